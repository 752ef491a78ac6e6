"""`gpuwarden why` and `gpuwarden jobs show`: what every rule says of a job, and what comes next."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click
from rich.table import Table

from gpuwarden.consoles import open_console, printable
from gpuwarden.errors import GpuwardenError, RefusedAction
from gpuwarden.option_values import output_option
from gpuwarden.ruleengine.clients import ask, token_headers, token_option, url_option
from gpuwarden.ruleengine.explain import answer, cause_lines, proof_line
from gpuwarden.ruleengine.leave_documents import leave_sentence
from gpuwarden.ruleengine.losses import loss_lines, risk_line
from gpuwarden.ruleengine.messages import about
from gpuwarden.ruleengine.unknown_reasons import REASONS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rich.console import Console

ENDED_BY_US = ("authorised", "acting", "verified", "incomplete", "failed")
"""States of a decision that stands."""


class UnknownJob(GpuwardenError):
    """No job of that name was seen."""

    exit_code = 3


@click.command()
@click.argument("job", metavar="JOB")
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Show the numbers of every rule, also of those that are kept.",
)
@token_option
@url_option
@output_option
@click.pass_context
def why(
    context: click.Context,
    job: str,
    *,
    everything: bool,
    token_file: Path | None,
    url: str,
    output: str,
) -> None:
    """Say what every rule says of JOB now, what happens next and when, and what holds it back.

    JOB is a job_id (`gpuwarden jobs list` shows them), a run_id of a training, or the beginning of
    either, as long as it means one job. A run that was resumed means its running attempt, else the
    last one. Times are those of this machine's time zone, and the earliest ones.

    A rule says YES (broken), NO (kept) or UNKNOWN: what is not known for certain ends no job. Of a
    job that was ended it is told by which rule, on which evidence, and whether the memory came
    back.

    Exit status: 0 it breaks no rule, as far as is known; 1 it breaks one, or was ended by one;
    2 wrong usage, or JOB means several jobs; 3 no such job was seen, or the engine does not answer.
    """
    if not job.strip():
        raise click.UsageError("JOB is empty: `gpuwarden jobs list` shows those that run")
    document = find_job(job, url, token_headers(token_file))
    if output == "json":
        click.echo(json.dumps(document, indent=2))
    else:
        print_document(open_console(), document, everything=everything)
    context.exit(1 if breaks(document) else 0)


@click.command()
@click.argument("job_id")
@token_option
@url_option
@output_option
def show(job_id: str, token_file: Path | None, *, url: str, output: str) -> None:
    """Say everything known of JOB_ID: verdicts with their numbers, stages, and why it is not ended.

    JOB_ID is as `gpuwarden jobs list` shows it; `gpuwarden why` also takes a run_id or the
    beginning of a name, and its exit status tells the answer.
    """
    path = f"/v1/jobs/{quote(job_id, safe='')}"
    document = ask("GET", url, path, headers=token_headers(token_file))
    if output == "json":
        click.echo(json.dumps(document, indent=2))
        return
    print_document(open_console(), document, everything=True)


def breaks(document: dict[str, Any]) -> bool:
    """Whether a job's document says that it breaks a rule, or was ended by one."""
    found = any(rule["case"] and rule["case"]["detected_at"] for rule in document["rules"])
    return found or any(
        item["state"] in ENDED_BY_US and item["action"] != "checkpoint"
        for item in document["decisions"]
    )


def find_job(word: str, url: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """The document of the job that a word means.

    Raises:
        UnknownJob: it means none.
        UsageError: it means several.
    """
    try:
        return ask("GET", url, f"/v1/jobs/{quote(word, safe='')}", headers=headers)
    except RefusedAction as error:
        if error.reason != "unknown_job":
            raise
    found = ask("GET", url, f"/v1/matches/{quote(word, safe='')}", headers=headers)
    rows = found["matches"]
    if not rows:
        raise UnknownJob(
            f"no job {word} was seen: `gpuwarden jobs list` shows those that run; of those that "
            "ended, only jobs that broke a rule are remembered"
        )
    if len(rows) > 1 and not found["whole"]:
        names = "".join(f"\n  {row['job_id']}" for row in rows)
        more = "\n  and more" if found["more"] else ""
        raise click.UsageError(printable(f"{word} may mean several jobs:{names}{more}"))
    if len(rows) > 1:
        others = ", ".join(row["job_id"] for row in rows[1:])
        click.echo(printable(f"The run {word} also had the attempts {others}."), err=True)
    path = f"/v1/jobs/{quote(rows[0]['job_id'], safe='')}"
    return ask("GET", url, path, headers=headers)


def print_document(console: Console, document: dict[str, Any], *, everything: bool) -> None:
    """Tell people what a job's document says; `everything`: also of rules that it keeps."""
    console.print(answer(document))
    if document["job"]:
        console.print(_head(document))
        _show_risk(console, document["job"])
    for block in document["halted"]:
        text = f"No job at all is ended now: {block['sentence']} [{block['reason']}]"
        console.print(text)
    _show_next(console, document)
    full = [rule for rule in document["rules"] if everything or _matters(rule)]
    for rule in full:
        _show_rule(console, rule)
    rest = [rule for rule in document["rules"] if rule not in full]
    if rest:
        _show_kept(console, rest)
    for decision in document["decisions"]:
        _show_decision(console, decision)
    # An engine of before schedulers does not tell of leaves.
    for leave in document.get("leaves", ()):
        _show_leave(console, leave)
    _show_past(console, document["past_cases"])
    if everything and document["events"]:
        table = Table("TIME", "RULE", "EVENT", box=None, pad_edge=False, title="What happened")
        for event in document["events"]:
            table.add_row(event["time"], event["rule"], event["kind"])
        console.print()
        console.print(table)


def _show_past(console: Console, cases: list[dict[str, Any]]) -> None:
    if not cases:
        return
    table = Table("RULE", "FROM", "TO", "CLOSED", box=None, pad_edge=False, title="Earlier")
    for past in cases:
        times = (_local(past["opened_at"]), _local(past["closed_at"]))
        table.add_row(past["rule"], *times, past["closed_because"])
    console.print()
    console.print(table)


def _show_risk(console: Console, job: dict[str, Any]) -> None:
    # An engine of before the prices does not say it.
    if job.get("at_risk"):
        console.print(f"Lost by an end now: {risk_line(job['at_risk'])}")


def _matters(rule: dict[str, Any]) -> bool:
    return bool(rule["case"] or rule["protected"] or rule["verdict"] == "YES")


def _head(document: dict[str, Any]) -> str:
    job = document["job"]
    owner = f" of {job['user']}" if job["user"] else ""
    team = f" ({job['team']})" if job["team"] else ""
    gpus = f", GPU {', '.join(job['gpus'])}" if job["gpus"] else ""
    run = f", training {job['run_id']}" if job["run_id"] else ""
    phase = f" in phase {job['phase']}" if job["phase"] else ""
    noun = "Card" if document.get("target") == "gpu" else "Job"
    return f"{noun} {document['job_id']}{owner}{team} on {job['node']}{gpus}{run}{phase}"


def _show_next(console: Console, document: dict[str, Any]) -> None:
    found = [(rule, item) for rule in document["rules"] for item in rule["next"]]
    if not found:
        return
    console.print()
    console.print("What comes next, if nothing holds it back:")
    for rule, item in sorted(found, key=lambda pair: pair[1]["in_seconds"] or 0.0):
        level = f", {item['level']}" if item["level"] else ""
        condition = f", {item['if']}" if item["if"] else ""
        what = f"{_when(item)}: {item['what']}{condition} [{rule['rule']}{level}]"
        console.print(f"  {what}")


def _when(item: dict[str, Any]) -> str:
    if item["in_seconds"] is None:
        return "soon"
    if item["in_seconds"] <= 0:
        return "now"
    return f"in {about(item['in_seconds'])} ({_local(item['at'])})"


def _local(moment: str) -> str:
    """A time of the API in the zone of whoever asks: `14:32 CET`, with its date if not today."""
    then = dt.datetime.fromisoformat(moment).astimezone()
    today = dt.datetime.now(dt.UTC).astimezone().date()
    return f"{then:%H:%M %Z}" if then.date() == today else f"{then:%a %d %b %Y %H:%M %Z}"


def _show_kept(console: Console, rules: list[dict[str, Any]]) -> None:
    table = Table("RULE", "MODE", "SAYS", "BECAUSE", box=None, pad_edge=False, title="Other rules")
    for rule in rules:
        table.add_row(rule["rule"], rule["mode"], rule["verdict"] or "not judged", _because(rule))
    console.print()
    console.print(table)


def _because(rule: dict[str, Any]) -> str:
    """What decides a verdict, in one line: the first conditions of that truth."""
    deciding = [item for item in rule["evidence"] if item["truth"] == rule["verdict"]]
    return "; ".join(_evidence(item) for item in deciding[:2])


def _evidence(item: dict[str, Any]) -> str:
    parts = [item["measured"], REASONS.get(item["reason"], item["reason"])]
    if item["expected"]:
        parts.append(f"expected {item['expected']}")
    said = ", ".join(part for part in parts if part)
    return f"{item['condition']}: {said}" if said else str(item["condition"])


def _show_rule(console: Console, rule: dict[str, Any]) -> None:
    console.print()
    verdict = rule["verdict"] or "not judged"
    console.print(f"Rule {rule['rule']} ({rule['mode']}): {verdict}")
    if rule["description"]:
        console.print(f"  {rule['description']}")
    if rule["protected"]:
        console.print(f"  protected: {rule['protected']}")
    if rule["self_report_only"]:
        console.print("  only what the job says of itself speaks against it, for a limited time")
    table = Table("CONDITION", "HOLDS", "MEASURED", "EXPECTED", "WHY UNKNOWN", box=None)
    found = [("", item) for item in rule["evidence"]]
    # An engine of before the stages' own conditions does not tell of them.
    for grade in rule.get("grades", ()):
        found += [(f"{grade['stage']}: ", item) for item in grade["evidence"]]
    for stage, item in found:
        reason = REASONS.get(item["reason"], item["reason"])
        condition = f"{stage}{item['condition']}"
        table.add_row(condition, item["truth"], item["measured"], item["expected"], reason)
    if found:
        console.print(table)
    case = rule["case"]
    if case:
        _show_case(console, case)
    for block in rule["why_not"]:
        console.print(f"  not ended: {block['sentence']} [{block['reason']}]")


def _show_case(console: Console, case: dict[str, Any]) -> None:
    console.print(f"  case: {case['state']}, since {_local(case['opened_at'])}")
    for line in cause_lines(case["cause"]) if case["cause"] else ():
        console.print(f"  {line[0].lower()}{line[1:]}")
    # An engine of before the softer stages does not tell of them.
    for act in case.get("acts", ()):
        console.print(f"  {act['do']} by {act['stage']} at {_local(act['at'])}: {act['state']}")
    for notice in case["notices"]:
        said = notice["proof"] or notice["error"] or "not tried yet"
        text = f"  notice by {notice['channel']} to {notice['recipient']}: {notice['state']}"
        console.print(f"{text} ({said})")
    for kept in case["keeps"]:
        text = f"  kept by {kept['by']} until {_local(kept['until'])}: {kept['reason']}"
        console.print(text)


def _show_leave(console: Console, leave: dict[str, Any]) -> None:
    console.print()
    told = {**leave, **{name: _local(leave[name]) for name in ("asked_at", "deadline")}}
    console.print(f"Leave {leave['id']}: {leave_sentence(told)}.")
    for step, moment in sorted(leave["steps"].items(), key=lambda pair: pair[1]):
        seen = dt.datetime.fromtimestamp(moment, dt.UTC).isoformat()
        console.print(f"  {step} at {_local(seen)}")


def _show_decision(console: Console, decision: dict[str, Any]) -> None:
    console.print()
    reason = f": {decision['reason']}" if decision["reason"] else ""
    head = f"Decision {decision['id']} of rule {decision['rule']}: {decision['state']}{reason}"
    console.print(head)
    for item in decision["evidence"]:
        console.print(f"  {item['truth']}: {_evidence(item)}")
    report = decision["report"] or {}
    for item in report.get("processes", []):
        ended_by = item["ended_by"] or "survived"
        console.print(f"  process {item['pid']}: {ended_by}")
    proof = report.get("proof")
    if proof:
        console.print(f"  {proof_line(proof)}")
    for line in loss_lines(decision["loss"]) if decision.get("loss") else ():
        console.print(f"  work lost, {line}")
