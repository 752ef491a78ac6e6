"""`gpuwarden policy apply|undo`: make an engine be as a policy wants it, and take that back."""

from __future__ import annotations

import asyncio
import getpass
from typing import TYPE_CHECKING

import click

from gpuwarden.clock import SystemClock
from gpuwarden.consoles import printable
from gpuwarden.errors import GpuwardenError
from gpuwarden.option_values import output_option
from gpuwarden.scheduling.daemon_clients import daemon_of_environment
from gpuwarden.scheduling.engines import Plan, Rendering, carry_out, plan, undoing
from gpuwarden.scheduling.policies import policy_hash
from gpuwarden.scheduling.policy_options import engine_option, policy_argument
from gpuwarden.scheduling.policy_plans import plan_json, plan_lines
from gpuwarden.scheduling.policy_records import Record, remove_record, write_record
from gpuwarden.scheduling.policy_sessions import (
    open_session,
    record_option,
    record_path,
    say,
    yes_option,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuwarden.scheduling.engines import Outcome, Step
    from gpuwarden.scheduling.policies import Engine
    from gpuwarden.scheduling.policy_sessions import Session


@click.command(short_help="Make the engine be as the policy wants it.")
@policy_argument
@engine_option
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@yes_option
@record_option
@output_option
@click.pass_context
def apply(
    context: click.Context,
    file: Path,
    output: str,
    *,
    engine: Engine | None,
    dry_run: bool,
    yes: bool,
    record: Path | None,
) -> None:
    """Make the engine's objects be as the policy wants them; applied again, it does nothing.

    What is done is shown first. Only what gpuwarden has made, and marked, is ever changed or taken
    away; if something of somebody else's has a name that is needed, nothing is done at all. It
    stops at the first step that fails, says what was done and what not, and goes on from there the
    next time.

    Exit status: 0 done, or nothing to do; 1 refused, or not all done; 2 the file is not usable;
    3 the engine does not answer.
    """

    async def applied() -> int:
        async with open_session(context.obj, file, engine) as session:
            wanted = await session.wanted()
            found = await session.adapter.read(wanted)
            chosen = plan(wanted, found)
            _tell(chosen, wanted, output)
            if dry_run:
                return 0
            if chosen.in_the_way:
                click.echo(_in_the_way(chosen, wanted), err=True)
                return 1
            path = record_path(record, session.engine)
            if chosen.steps and not _agreed(len(chosen.steps), yes=yes):
                return 1
            outcome = await carry_out(session.adapter, chosen.steps, _progress(len(chosen.steps)))
            _keep(path, wanted, outcome, chosen)
            return await _checked(session, wanted, outcome)

    context.exit(asyncio.run(applied()))


def _in_the_way(chosen: Plan, wanted: Rendering) -> str:
    """What to do about others' objects; those that can be handed over with the command for it."""
    names = {each.key for each in chosen.in_the_way}
    commands = [each.take_over for each in wanted.objects if each.key in names and each.take_over]
    lines = [
        "Nothing was done. Rename or remove what is in the way, or rename it in the policy.",
        *(["To hand it over to gpuwarden instead:"] if commands else []),
        *(f"  {command}" for command in commands),
    ]
    return printable("\n".join(lines))


def _tell(chosen: Plan, wanted: Rendering | None, output: str) -> None:
    if output == "json":
        click.echo(plan_json(chosen, wanted))
    else:
        say("\n".join(plan_lines(chosen, () if wanted is None else wanted.remarks)))


def _agreed(count: int, *, yes: bool) -> bool:
    if yes:
        return True
    try:
        return click.confirm(f"Do these {count} steps?", err=True)
    except click.Abort:
        # Ctrl-C, or nobody at the other end.
        click.echo("\nNothing was done. Where nobody can be asked, say --yes.", err=True)
        return False


def _progress(count: int) -> Callable[[int, Step], None]:
    return lambda number, step: click.echo(printable(f"[{number}/{count}] {step}"), err=True)


def _keep(path: Path, wanted: Rendering, outcome: Outcome, chosen: Plan) -> None:
    """Remember what is in place now: all that was wanted, but for what was not reached."""
    missing = {(step.kind, step.name) for step in (*outcome.left, *chosen.by_hand)}
    if outcome.failed is not None:
        missing.add((outcome.failed.kind, outcome.failed.name))
    objects = tuple(each for each in wanted.objects if each.key not in missing)
    kept = Rendering(wanted.engine, wanted.version, wanted.policy, objects)
    try:
        write_record(path, Record(kept, SystemClock().wall(), getpass.getuser()))
    except GpuwardenError as error:
        click.echo(f"warning: {error}", err=True)


async def _checked(session: Session, wanted: Rendering, outcome: Outcome) -> int:
    """Say how it went, by the engine's own word."""
    if outcome.failed is not None:
        return _failed(outcome)
    left = plan(wanted, await session.adapter.read(wanted))
    if left.steps:
        click.echo("Everything was done, and the engine still says otherwise:", err=True)
        click.echo(printable("\n".join(plan_lines(left))), err=True)
        return 1
    click.echo(f"{len(outcome.done)} steps done; policy {policy_hash(session.policy)}.", err=True)
    stale = await _stale_daemon(session)
    if stale:
        click.echo(stale, err=True)
    return 0


async def _stale_daemon(session: Session) -> str:
    """What to do if a daemon goes by another policy than the engine does now."""
    if session.engine == "local":
        return ""
    try:
        document = await asyncio.to_thread(daemon_of_environment().ask, "GET", "/v1/policy")
    except GpuwardenError:
        return ""  # there is none here, which its own page and alerts tell
    if document.get("hash") == policy_hash(session.policy):
        return ""
    return (
        "The scheduler's daemon goes by another policy: once its file is this one, "
        "`systemctl reload gpuwarden-scheduler`."
    )


def _failed(outcome: Outcome) -> int:
    error = outcome.error
    how = "was interrupted, and may have been done" if error is None else f"failed: {error}"
    click.echo(
        printable(
            f"{outcome.failed} {how}\n{len(outcome.done)} steps were done, "
            f"{len(outcome.left)} were not tried. The same command goes on from here."
        ),
        err=True,
    )
    return 130 if error is None else error.exit_code


@click.command(short_help="Take away from the engine what gpuwarden has made.")
@policy_argument
@engine_option
@click.option("--dry-run", is_flag=True, help="Only show what would be taken away.")
@yes_option
@record_option
@output_option
@click.pass_context
def undo(
    context: click.Context,
    file: Path,
    output: str,
    *,
    engine: Engine | None,
    dry_run: bool,
    yes: bool,
    record: Path | None,
) -> None:
    """Take away everything that carries gpuwarden's mark, and nothing else.

    Exit status: 0 done, or nothing to do; 1 refused, or not all done; 2 the file is not usable;
    3 the engine does not answer.
    """

    async def undone() -> int:
        async with open_session(context.obj, file, engine) as session:
            wanted = await session.wanted()
            chosen = undoing(await session.adapter.read(wanted))
            if not chosen.steps:
                click.echo("Nothing of gpuwarden's is there.", err=True)
                remove_record(record_path(record, session.engine))
                return 0
            _tell(chosen, None, output)
            if dry_run:
                return 0
            if not _agreed(len(chosen.steps), yes=yes):
                return 1
            outcome = await carry_out(session.adapter, chosen.steps, _progress(len(chosen.steps)))
            if outcome.failed is not None:
                return _failed(outcome)
            remove_record(record_path(record, session.engine))
            click.echo(f"{len(outcome.done)} steps done.", err=True)
            return 0

    context.exit(asyncio.run(undone()))
