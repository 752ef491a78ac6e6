"""The words of notices: what was seen, what was expected, why, what happens when, what to do.

The engine writes them, in the owner's time zone; Alertmanager carries them as annotations, and the
last hop only lays them out. Nothing that a job says of itself becomes markup.
"""

from __future__ import annotations

import datetime as dt
import zoneinfo
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden import durations
from gpuwarden.ruleengine.cases import next_stage
from gpuwarden.ruleengine.condition_differences import words
from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.ruleengine.cases import Case
    from gpuwarden.ruleengine.model import OwnerMay, Rule
    from gpuwarden.ruleengine.records import Decision
    from gpuwarden.ruleengine.verdicts import Evidence

LINES = (
    ("description", ""),
    ("seen", "Seen"),
    ("expected", "Expected"),
    ("cause", "Probable cause"),
    ("remedy", "What helps"),
    ("next", "What happens next"),
    ("keep", "To keep it"),
    ("work", "Work that would be lost"),
    ("gpus", "Cards"),
)
"""Annotations in the order of a message, with their headings."""

_MAX_SUBJECT = 150
_MAX_LINE = 1500


def local_time(moment: float, zone: str) -> dt.datetime:
    """A Unix time in a zone; an unknown zone gives UTC."""
    try:
        info: dt.tzinfo = zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        info = dt.UTC
    return dt.datetime.fromtimestamp(moment, tz=info)


def clock_time(moment: float, zone: str) -> str:
    """A Unix time for people: `Sun 29 Nov 18:05:07 (Asia/Shanghai)`."""
    return f"{local_time(moment, zone):%a %d %b %H:%M:%S} ({zone})"


def about(seconds: float) -> str:
    """A duration for people: whole seconds below an hour, whole minutes above."""
    step = 60 if seconds >= 3600 else 1
    return durations.render(float(round(seconds / step) * step))


@dataclass(frozen=True, slots=True)
class Message:
    """A notice, ready to be laid out.

    Attributes:
        subject: one line.
        lines: (heading or an empty string, text), in order.
        url: the page that explains it, or an empty string.
    """

    subject: str
    lines: tuple[tuple[str, str], ...]
    url: str = ""

    @classmethod
    def of(cls, annotations: Mapping[str, object], url: str) -> Message:
        """Lay out an alert's annotations; text of any other kind is ignored."""

        def text(name: str) -> str:
            value = annotations.get(name)
            return value[:_MAX_LINE].strip() if isinstance(value, str) else ""

        subject = " ".join(text("summary").split())[:_MAX_SUBJECT] or "a job needs your attention"
        lines = tuple((heading, text(name)) for name, heading in LINES if text(name))
        safe = url if url.startswith(("http://", "https://")) else ""
        return cls(subject, lines, safe)

    def plain(self) -> str:
        """The message as plain text, for mail."""
        parts = [f"{heading}: {text}" if heading else text for heading, text in self.lines]
        if self.url:
            parts.append(f"Why, in full: {self.url}")
        return "\n\n".join(parts) + "\n"

    def slack(self) -> str:
        """The message in Slack's mrkdwn, with everything escaped that could be a mention."""
        parts = [f"*{_escaped(self.subject)}*"]
        parts += [
            f"*{heading}:* {_escaped(text)}" if heading else _escaped(text)
            for heading, text in self.lines
        ]
        if self.url:
            parts.append(f"<{_escaped(self.url)}|Why, in full>")
        return "\n".join(parts)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


@dataclass(frozen=True, slots=True)
class Outlook:
    """What lies ahead of a case.

    Attributes:
        remaining: seconds until the job may be ended at the earliest, or None if nothing follows.
        grace: seconds between SIGTERM and SIGKILL.
        owner_may: what the owner may still do, or None.
        keeps_used: how often the owner has kept it, over the life of the run.
        ticket: the owner's proof for `gpuwarden keep`, or an empty string.
        link: address of the page on which the owner may keep it, or an empty string.
        work_lost: seconds of work that an end now would cost, or None where not known.
        saved: whether it counts from a saved state.
        cards: the cards it holds, in words.
    """

    remaining: float | None = None
    grace: float = 0.0
    owner_may: OwnerMay | None = None
    keeps_used: int = 0
    ticket: str = ""
    link: str = ""
    work_lost: float | None = None
    saved: bool = False
    cards: str = ""


def notice(
    case: Case,
    rule: Rule,
    evidence: Sequence[Evidence],
    outlook: Outlook,
    *,
    now: float,
    zone: str,
    engine_url: str,
) -> dict[str, str]:
    """Annotations of a notice that a job breaks a rule."""
    where = f" on {case.instance}" if case.instance else ""
    since = case.detected_at if case.detected_at is not None else case.opened_at
    texts = {
        "summary": f"Job {case.job_id}{where}: {rule.description or rule.id}",
        "description": (
            f"Your job {case.job_id}{where} has broken the rule {rule.id} since "
            f"{clock_time(since, zone)}." + (f" {rule.description}." if rule.description else "")
        ).replace("..", "."),
        "seen": "; ".join(_seen(evidence)),
        "expected": "; ".join(dict.fromkeys(e.expected for e in evidence if e.expected)),
        "cause": f"{case.cause}: {case.because}" if case.cause and case.because else case.cause,
        "remedy": case.remedy,
        "next": _next(case, rule, outlook, now=now, zone=zone),
        "keep": _keep(case, outlook, engine_url),
        "gpus": outlook.cards,
    }
    if outlook.remaining is not None and outlook.work_lost is not None:
        since_start = (
            "" if outlook.saved else " (everything since its start: no saved state is known)"
        )
        texts["work"] = about(outlook.work_lost) + since_start
    return texts


def _seen(evidence: Sequence[Evidence]) -> list[str]:
    return [
        f"{item.condition}: {item.measured}" if item.measured else item.condition
        for item in evidence
        if item.truth is Truth.YES
    ]


def _next(case: Case, rule: Rule, outlook: Outlook, *, now: float, zone: str) -> str:
    if outlook.remaining is None:
        return f"Nothing is done to the job; the rule {rule.id} only tells you."
    moment = clock_time(now + outlook.remaining, zone)
    ladder = f"not before {moment}: SIGTERM, and SIGKILL {about(outlook.grace)} later."
    unless = "If this does not change"
    final = next_stage(case, rule)
    if final is not None and final[1].when is not None:
        unless += f", and has gone so far as {words(final[1].when)}"
    if rule.only_if_waiting is not None:
        unless += ", and while somebody waits for a GPU"
    if case.run_id is not None:
        return f"{unless}, the job is asked to save and leave, and is ended, {ladder}"
    return (
        f"{unless}, the job is ended, {ladder} No trainer is known in it that could be asked to "
        "save: save what you need before."
    )


def _keep(case: Case, outlook: Outlook, engine_url: str) -> str:
    may = outlook.owner_may
    if may is None or outlook.remaining is None:
        return ""
    left = may.times - outlook.keeps_used
    if left <= 0:
        return f"It has been kept {outlook.keeps_used} times, which is all this rule allows."
    ticket = f" --ticket {outlook.ticket}" if outlook.ticket else ""
    page = f"open {outlook.link} and say why, or: " if outlook.link else ""
    return (
        f"{page}gpuwarden keep {case.job_id} --rule {case.rule_id} "
        f"--for {durations.render(may.keep)} "
        f"--reason WHY --engine.url {engine_url}{ticket}  (moves the end by up to "
        f"{durations.render(may.keep)}; {left} of {may.times} left)"
    )


def ending(case: Case, rule: Rule, grace: float, *, now: float, zone: str) -> dict[str, str]:
    """Annotations of the message that a job is being ended now."""
    return {
        "summary": f"Job {case.job_id} is being ended: {rule.description or rule.id}",
        "description": (
            f"Your job {case.job_id} is being ended by the rule {rule.id}, as announced. "
            + ("It is asked to save and leave: " if case.run_id is not None else "")
            + f"SIGTERM at {clock_time(now, zone)}, and SIGKILL {about(grace)} later for what is "
            "then left of it."
        ),
        "cause": f"{case.cause}: {case.because}" if case.cause and case.because else case.cause,
        "remedy": case.remedy,
    }


def ended(decision: Decision, freed: float | None, *, zone: str) -> dict[str, str]:
    """Annotations of the message that a job was ended, or that this could not be proven."""
    at = clock_time(decision.finished_at or decision.created_at, zone)
    if decision.state == "verified":
        memory = f" {freed / 2**30:.1f} GiB of GPU memory were freed." if freed is not None else ""
        what = f"Your job {decision.job_id} was ended by the rule {decision.rule_id} at {at}."
        return {
            "summary": f"Job {decision.job_id} was ended by the rule {decision.rule_id}",
            "description": what + memory,
            "next": (
                "It was asked to save and leave: `gpuwarden train ... resume=auto` goes on from "
                "its last saved state."
                if decision.asked_to_save
                else "It was not asked to save: what it had not saved by itself is gone."
            ),
        }
    return {
        "summary": f"Job {decision.job_id}: its end could not be proven",
        "description": (
            f"The rule {decision.rule_id} ended your job {decision.job_id} at {at}, but not all of "
            f"it is proven gone ({decision.reason or decision.state}). The operators look into it."
        ),
    }


def withdrawn(case: Case, why: str) -> dict[str, str]:
    """Annotations of the message that what an earlier notice announced does not happen."""
    return {
        "summary": f"Job {case.job_id} is not ended after all",
        "description": (
            f"The rule {case.rule_id} had announced the end of your job {case.job_id}. That is "
            f"called off: {why}."
        ),
        "next": "Nothing is done to the job, and there is nothing that you have to do.",
    }
