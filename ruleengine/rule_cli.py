"""`gpuwarden rules`: check and test rule files, and print their schema."""

from __future__ import annotations

import asyncio
import importlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuwarden.diagnostics import did_you_mean, render_json
from gpuwarden.option_values import read_positive_seconds
from gpuwarden.ruleengine.attack_reports import (
    report_json,
    report_lines,
    report_markdown,
    summary_lines,
)
from gpuwarden.ruleengine.attack_runs import attack_until_told
from gpuwarden.ruleengine.loading import CheckedFiles, check_rule_files, rule_set_hash
from gpuwarden.ruleengine.path_patterns import matching
from gpuwarden.ruleengine.references import rule_reference
from gpuwarden.ruleengine.rehearsal_runs import (
    chosen,
    result_lines,
    results_json,
    run_until_told,
    summary_line,
)
from gpuwarden.ruleengine.rule_differences import (
    difference_lines,
    differences,
    differences_json,
)
from gpuwarden.ruleengine.rule_explanations import (
    explain_rule,
    explain_rules,
    explanation_lines,
)
from gpuwarden.ruleengine.schemas import rule_file_schema

if TYPE_CHECKING:
    from gpuwarden.ruleengine.model import RuleSet

# In these, \b is the character by which click leaves the lines that follow as they are.
_EXAMPLES = """\b
Examples:
  gpuwarden rules check rules.d/*.yaml
  gpuwarden rules test rules.d/*.yaml
  gpuwarden rules explain --rule idle-held rules.d/*.yaml
  gpuwarden rules attack --rule idle-held rules.d/*.yaml
  gpuwarden rules diff /etc/gpuwarden/rules rules.d
  gpuwarden rules replay rules.d/*.yaml --from now-7d
  gpuwarden rules schema > rules.schema.json"""
_OUTCOMES = """\b
Outcomes:
  held       it changes nothing
  delayed    later by at most the rule's trust_for
  elsewhere  another rule of the set tells its owner, or finds its card
  told       its owner is told each time; only the end is escaped
  granted    by what the operator promised: keeps, or max_work_lost
  obeys      it gives up what the rule is about
  advice     the rule rests on the job's word, and ends nobody
  escapes    for longer than trust_for; the last lines say what would find it"""
_MODELINE = """\b
With yaml-language-server, put this at the top of a rule file:
  # yaml-language-server: $schema=rules.schema.json"""


class _RuleGroup(click.Group):
    """Its commands, and `replay`, which is loaded when it is called: the engine needs no numpy."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "replay"])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name != "replay":
            return super().get_command(ctx, name)
        module = importlib.import_module("gpuwarden.ruleengine.replay_cli")
        command: click.Command = module.replay_command
        return command


@click.group(cls=_RuleGroup, epilog=_EXAMPLES)
def rules() -> None:
    """Check, test and document rule files.

    A rule file says which use of GPUs is a violation, what is told to whom and when, and when a
    job is ended.
    """


_files = click.argument(
    "files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILES..."
)
_output = click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="text: for people, with each line; json: one versioned document, for CI.",
)
_scrape_interval = click.option(
    "--scrape-interval",
    callback=read_positive_seconds,
    metavar="DURATION",
    default="5s",
    show_default=True,
    help="How often Prometheus scrapes the nodes; windows are checked against it.",
)


@rules.command(short_help="Say every mistake, each at its line and column.")
@_files
@_output
@_scrape_interval
@click.pass_context
def check(
    context: click.Context, files: tuple[Path, ...], output: str, *, scrape_interval: float
) -> None:
    """Say everything that is wrong with rule files that are used together.

    All errors of all files are found in one run, each with its line and column: syntax, unknown or
    duplicate keys, missing units, PromQL that Prometheus 2.42 would refuse, and rules that could
    end the wrong job.

    Exit status: 0 usable (warnings are allowed); 2 not usable.
    """
    checked = check_rule_files(files, scrape_interval=scrape_interval)
    if output == "json":
        click.echo(render_json(checked.diagnostics))
    else:
        _print(checked, len(files))
    if checked.rules is None:
        context.exit(2)


def _usable(files: tuple[Path, ...], output: str, *, scrape_interval: float) -> RuleSet:
    """The rules of files, or their findings and the end."""
    checked = check_rule_files(files, scrape_interval=scrape_interval)
    return _merged(checked, output, count=len(files))


def _merged(checked: CheckedFiles, output: str, *, count: int) -> RuleSet:
    if checked.rules is not None:
        return checked.rules
    if output == "json":
        click.echo(render_json(checked.diagnostics))
    else:
        _print(checked, count)
    raise click.exceptions.Exit(2)


def _print(checked: CheckedFiles, count: int) -> None:
    """The findings are the result here, so that they go to standard output."""
    if checked.diagnostics:
        click.echo(checked.render())
    errors = len(checked.errors)
    warnings = len(checked.diagnostics) - errors
    summary = f"{count} {_plural(count, 'file')}: {errors} {_plural(errors, 'error')}, "
    summary += f"{warnings} {_plural(warnings, 'warning')}"
    if checked.rules is not None:
        number = len(checked.rules.rules)
        summary += f"; {number} {_plural(number, 'rule')}, hash {rule_set_hash(checked.rules)}"
    click.echo(summary)


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


@rules.command()
@_files
@_output
@click.option(
    "--run",
    "wanted",
    multiple=True,
    metavar="ID",
    help="Only the tests of this name, or about this rule; may be given several times.",
)
@click.pass_context
def test(
    context: click.Context, files: tuple[Path, ...], output: str, *, wanted: tuple[str, ...]
) -> None:
    """Run the inline tests of rule files that are used together.

    Each test under `tests:` is a history (what jobs do, or series in promtool's notation) and what
    must follow from it. It is put into a temporary Prometheus and judged as the live engine would,
    every rule as if its mode were enforce; nothing real is asked, told or ended.

    Needs the program `prometheus` on this machine.

    Exit status: 0 all passed; 1 a test failed; 2 the files are not usable, or no test was chosen;
    3 there is no Prometheus.
    """
    checked = check_rule_files(files)
    merged = _merged(checked, output, count=len(files))
    tests = chosen(checked.tests, wanted)
    if not tests:
        known = sorted({name for item in checked.tests for name in item.test.rules})
        about = f"; there are tests about {', '.join(known)}" if known else ""
        raise click.UsageError(f"no test to run{about}: docs/rules.md says how to write one")
    results = []
    for placed in tests:
        try:
            result = asyncio.run(run_until_told(placed, merged))
        except asyncio.CancelledError:
            context.exit(128 + signal.SIGTERM)
        results.append(result)
        if output == "text":
            click.echo("\n".join(result_lines(result)))
    click.echo(results_json(results) if output == "json" else summary_line(results))
    if not all(result.passed for result in results):
        context.exit(1)


@rules.command(short_help="Say in words what rules do, and when.")
@_files
@_output
@click.option(
    "--rule",
    "wanted",
    multiple=True,
    metavar="ID",
    help="Only this rule; may be given several times.",
)
@_scrape_interval
def explain(
    files: tuple[Path, ...],
    output: str,
    *,
    wanted: tuple[str, ...],
    scrape_interval: float,
) -> None:
    """Say in words what rules do: whom they judge, by which PromQL, and what follows when.

    Exit status: 0 explained; 2 the files are not usable, or there is no such rule.
    """
    usable = _usable(files, output, scrape_interval=scrape_interval)
    _known(wanted, usable)
    found = [rule for rule in usable.rules if not wanted or rule.id in wanted]
    if output == "json":
        click.echo(explain_rules(usable, found, scrape_interval=scrape_interval))
        return
    for number, rule in enumerate(found):
        explained = explain_rule(rule, usable, scrape_interval=scrape_interval)
        click.echo("\n" * bool(number) + "\n".join(explanation_lines(explained)))


def _known(wanted: tuple[str, ...], usable: RuleSet) -> None:
    """Refuse ids that no rule has."""
    known = [rule.id for rule in usable.rules]
    for rule_id in wanted:
        if rule_id not in known:
            hint = did_you_mean(rule_id, known) or f"there are {', '.join(known)}"
            raise click.BadParameter(f'there is no rule "{rule_id}"; {hint}', param_hint="--rule")


@rules.command(
    epilog=_OUTCOMES, short_help="Play the tricks by which jobs escape; say which succeed."
)
@_files
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "markdown"]),
    default="table",
    show_default=True,
    help="table: for people; json: one versioned document, for CI; markdown: for a page.",
)
@click.option(
    "--rule",
    "wanted",
    multiple=True,
    metavar="ID",
    help="Only this rule; may be given several times. The others still may find what escapes it.",
)
@click.pass_context
def attack(
    context: click.Context, files: tuple[Path, ...], output: str, *, wanted: tuple[str, ...]
) -> None:
    """Play the tricks by which jobs escape on rules, and say which succeed and for how long.

    A made-up job breaks each rule openly, and then again with each trick: a log touched in a loop,
    a fake heartbeat, phases that never end, future times, a forged throughput, lies about model
    and batch, another's run, a protected name, restarts, splitting, a trickle of kernels, a
    spinning CPU, keeps. All is judged on a temporary Prometheus as the live engine would, every
    rule as if its mode were enforce; nothing real is asked, told or ended.

    Needs the program `prometheus` on this machine, and up to a minute for each rule.

    Exit status: 0 every trick is bounded; 1 one escapes; 2 the files are not usable, or there is
    no such rule; 3 there is no Prometheus.
    """
    usable = _usable(files, "json" if output == "json" else "text", scrape_interval=5.0)
    _known(wanted, usable)
    try:
        found = asyncio.run(
            attack_until_told(usable, wanted, tell=lambda text: click.echo(text, err=True))
        )
    except asyncio.CancelledError:
        context.exit(128 + signal.SIGTERM)
    if output == "json":
        click.echo(report_json(found))
    elif output == "markdown":
        click.echo(report_markdown(found), nl=False)
    else:
        click.echo("\n".join([*report_lines(found), "", *summary_lines(found)]))
    if any(item.escapes for item in found):
        context.exit(1)


@rules.command()
@click.argument("old", type=click.Path(path_type=Path), metavar="OLD")
@click.argument("new", type=click.Path(path_type=Path), metavar="NEW")
@_output
@_scrape_interval
@click.pass_context
def diff(
    context: click.Context, old: Path, new: Path, *, output: str, scrape_interval: float
) -> None:
    """Say what changed between two rule sets in meaning, not in text.

    OLD and NEW are files, or folders of which all *.yaml are taken. Each change is stricter (what
    was found, told or ended still is, and perhaps more), laxer, or different where neither is
    sure. Order, comments, descriptions and tests mean nothing.

    Exit status: 0 no difference; 1 there are some; 2 one of them is not usable.
    """
    before, after = (
        _usable(_rule_files(path), output, scrape_interval=scrape_interval) for path in (old, new)
    )
    found = differences(before, after)
    click.echo(differences_json(found) if output == "json" else "\n".join(difference_lines(found)))
    if found:
        context.exit(1)


def _rule_files(path: Path) -> tuple[Path, ...]:
    """A file, or those of a folder."""
    if not path.is_dir():
        return (path,)
    files = matching(path / "*.yaml")
    if not files:
        raise click.BadParameter(f"{path} holds no *.yaml")
    return files


@rules.command(epilog=_MODELINE)
def schema() -> None:
    """Print the JSON schema of rule files, for editors and CI."""
    click.echo(rule_file_schema(), nl=False)


@rules.command()
def reference() -> None:
    """Print the reference page of the rule language as Markdown."""
    click.echo(rule_reference(), nl=False)
