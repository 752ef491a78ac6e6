"""`gpuwarden policy render|diff|apply|undo|drift`: a policy and the engine's own objects."""

from __future__ import annotations

import asyncio
import getpass
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuwarden.clock import SystemClock
from gpuwarden.consoles import printable
from gpuwarden.errors import GpuwardenError, InvalidInput
from gpuwarden.option_values import output_option
from gpuwarden.scheduling.daemon_clients import daemon_of_environment
from gpuwarden.scheduling.engines import (
    Act,
    Plan,
    Rendering,
    adapter_of,
    carry_out,
    plan,
    undoing,
)
from gpuwarden.scheduling.policies import policy_hash
from gpuwarden.scheduling.policy_checks import check_policy, load_policy
from gpuwarden.scheduling.policy_differences import (
    difference_lines,
    differences,
    differences_json,
)
from gpuwarden.scheduling.policy_options import engine_option, policy_argument
from gpuwarden.scheduling.policy_plans import (
    plan_json,
    plan_lines,
    remark_lines,
    rendering_json,
    rendering_text,
)
from gpuwarden.scheduling.policy_records import Record, read_record, remove_record, write_record

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from gpuwarden.scheduling.engines import Adapter, Outcome, Step
    from gpuwarden.scheduling.policies import Engine, Policy

    AdapterOf = Callable[[Engine, Policy], Adapter]

# In these, \b is the character by which click leaves the lines that follow as they are.
_SIGNS = """\b
Signs:
  +  made
  ~  changed
  -  taken away: gpuwarden's, and the policy wants it no more
  !  in the way, and not gpuwarden's: never touched
  *  to be done by hand
  ?  not to be had on this engine"""
_STATE = Path("/var/lib/gpuwarden")
_yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
_record = click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where what was applied is kept.  [default: /var/lib/gpuwarden/policy-ENGINE.json]",
)


def _record_path(chosen: Path | None, engine: Engine) -> Path:
    return chosen or _STATE / f"policy-{engine}.json"


def _load(file: Path, engine: Engine | None) -> tuple[Policy, Engine]:
    checked = check_policy(file, now=SystemClock().wall(), engine=engine)
    found = checked.usable()
    if checked.diagnostics:
        click.echo(printable(checked.render()), err=True)
    return found, engine or found.engine


def _say(lines: str) -> None:
    click.echo(printable(lines))


class _Session:
    """One policy and one engine.

    Args:
        adapter: of the engine.
        found: the policy.
        engine: whose objects are meant.
    """

    def __init__(self, adapter: Adapter, found: Policy, engine: Engine) -> None:
        self.adapter = adapter
        self.policy = found
        self.engine = engine

    async def wanted(self) -> Rendering:
        """The policy as objects for the version that is found."""
        return self.adapter.render(self.policy, version=await self.adapter.version())


@asynccontextmanager
async def _session(
    factory: AdapterOf | None, file: Path, engine: Engine | None
) -> AsyncIterator[_Session]:
    found, chosen = _load(file, engine)
    adapter = (factory or adapter_of)(chosen, found)
    try:
        yield _Session(adapter, found, chosen)
    finally:
        await adapter.aclose()


# -- render


@click.command(short_help="Show a policy as the engine's own objects.")
@policy_argument
@engine_option
@click.option(
    "--engine-version",
    metavar="VERSION",
    help="Of the engine, such as 22.05.  [default: the one that is found, else the newest known]",
)
@click.option(
    "--init",
    "init",
    is_flag=True,
    help="Everything for a small engine of its own instead: a Slurm on this machine.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write each object into a file of this folder.",
)
@output_option
@click.pass_obj
def render(
    factory: AdapterOf | None,
    file: Path,
    output: str,
    *,
    engine: Engine | None,
    engine_version: str | None,
    init: bool,
    out: Path | None,
) -> None:
    """Show what a policy comes to on an engine, and what the engine cannot do of it.

    Nothing of the engine is changed, and it need not be there.

    Exit status: 0 done; 2 the file is not usable.
    """

    async def rendered() -> Rendering:
        async with _session(factory, file, engine) as session:
            version = engine_version
            if version is None and not init:
                version = await _version(session.adapter)
            return session.adapter.render(session.policy, version=version, init=init)

    found = asyncio.run(rendered())
    if out is not None:
        _write(found, out)
        return
    if output == "json":
        click.echo(rendering_json(found))
        return
    click.echo(rendering_text(found), nl=False)
    for line in remark_lines(found.remarks):
        click.echo(printable(line), err=True)


async def _version(adapter: Adapter) -> str | None:
    try:
        version = await adapter.version()
    except GpuwardenError as error:
        click.echo(
            f"the engine's version is not known ({printable(str(error))}): this is for the newest "
            "that gpuwarden knows; name another by --engine-version",
            err=True,
        )
        return None
    return version


def _write(found: Rendering, out: Path) -> None:
    ending = "yaml" if found.engine == "kueue" else "txt"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for index, each in enumerate(found.objects, 1):
            name = each.name
            if each.kind != "file":
                name = f"{index:02d}-{each.kind}-{each.name}".replace("/", "-").replace(" ", "-")
                name += f".{ending}"
            path = out / Path(name).name
            path.write_text(each.text.rstrip("\n") + "\n", encoding="utf-8")
            if each.text.startswith("#!"):
                path.chmod(0o755)
            note = f"  {each.note}" if each.note else ""
            click.echo(f"{path}{printable(note)}")
    except OSError as error:
        where = error.filename or out
        raise InvalidInput(f"{where} cannot be written: {error.strerror}") from error
    for line in remark_lines(found.remarks):
        click.echo(printable(line), err=True)


# -- diff and drift


@click.command(
    epilog=_SIGNS,
    short_help="Say what the engine has otherwise, or what changed between two files.",
)
@policy_argument
@engine_option
@click.option(
    "--against",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="OLD",
    help="Another policy file: who gains and who loses by this one. No engine is asked.",
)
@output_option
@click.pass_context
def diff(
    context: click.Context,
    file: Path,
    output: str,
    *,
    engine: Engine | None,
    against: Path | None,
) -> None:
    """Say what `gpuwarden policy apply` would do now; with --against, what two files differ in.

    Exit status: 0 no difference; 1 there are some; 2 a file is not usable; 3 the engine does not
    answer.
    """
    if against is not None:
        now = SystemClock().wall()
        old, new = (load_policy(path, now=now, engine=engine) for path in (against, file))
        changes = differences(old, new)
        in_words = "\n".join(difference_lines(changes))
        _say(differences_json(changes) if output == "json" else in_words)
        if changes:
            context.exit(1)
        return

    async def compared() -> tuple[Plan, Rendering]:
        async with _session(context.obj, file, engine) as session:
            wanted = await session.wanted()
            return plan(wanted, await session.adapter.read(wanted)), wanted

    _show(context, *asyncio.run(compared()), output=output)


def _show(context: click.Context, found: Plan, wanted: Rendering, *, output: str) -> None:
    if output == "json":
        click.echo(plan_json(found, wanted))
    else:
        _say("\n".join(plan_lines(found, wanted.remarks)))
    if not found.nothing:
        context.exit(1)


@click.command(short_help="Say what was changed on the engine since the policy was applied.")
@policy_argument
@engine_option
@_record
@output_option
@click.pass_context
def drift(
    context: click.Context,
    file: Path,
    output: str,
    *,
    engine: Engine | None,
    record: Path | None,
) -> None:
    """Say what somebody changed on the engine since the policy was applied from this machine.

    Changes of the file itself are none: `gpuwarden policy diff` shows those as well.

    Exit status: 0 none; 1 there is some; 2 nothing was applied from here; 3 the engine does not
    answer.
    """

    async def compared() -> tuple[Plan, Record]:
        async with _session(context.obj, file, engine) as session:
            path = _record_path(record, session.engine)
            kept = read_record(path, session.engine)
            if kept is None:
                raise InvalidInput(
                    f"{path} is not there: nothing was applied from this machine; see "
                    "`gpuwarden policy diff`"
                )
            return plan(kept.rendering, await session.adapter.read(kept.rendering)), kept

    found, kept = asyncio.run(compared())
    if output == "json":
        click.echo(plan_json(found, kept.rendering))
    elif found.nothing:
        click.echo("No drift: the engine is as it was applied.")
    else:
        _say("\n".join(_drift_lines(found)))
    if not found.nothing:
        context.exit(1)


def _drift_lines(found: Plan) -> list[str]:
    """What was done by hand, told as what it was and not as what would undo it."""
    lines = []
    for step in (*found.steps, *found.by_hand):
        if step.act is Act.CREATE:
            lines.append(f"{step.kind} {step.name} is gone")
        elif step.act is Act.DELETE:
            lines.append(f"{step.kind} {step.name} carries gpuwarden's mark, and was not applied")
        else:
            lines += [
                f"{step.kind} {step.name}: {change.field} is {change.found or 'nothing'}, "
                f"and was {change.wanted or 'nothing'}"
                for change in step.changes
            ]
    lines += [f"{each} has lost gpuwarden's mark" for each in found.in_the_way]
    return lines


# -- apply and undo


@click.command(short_help="Make the engine be as the policy wants it.")
@policy_argument
@engine_option
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@_yes
@_record
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
        async with _session(context.obj, file, engine) as session:
            wanted = await session.wanted()
            found = await session.adapter.read(wanted)
            chosen = plan(wanted, found)
            _tell(chosen, wanted, output)
            if dry_run:
                return 0
            if chosen.in_the_way:
                click.echo(
                    "Nothing was done. Rename or remove what is in the way, or give the object "
                    "another name in the policy.",
                    err=True,
                )
                return 1
            path = _record_path(record, session.engine)
            if chosen.steps and not _agreed(len(chosen.steps), yes=yes):
                return 1
            outcome = await carry_out(session.adapter, chosen.steps, _progress(len(chosen.steps)))
            _keep(path, wanted, outcome, chosen)
            return await _checked(session, wanted, outcome)

    context.exit(asyncio.run(applied()))


def _tell(chosen: Plan, wanted: Rendering | None, output: str) -> None:
    if output == "json":
        click.echo(plan_json(chosen, wanted))
    else:
        _say("\n".join(plan_lines(chosen, () if wanted is None else wanted.remarks)))


def _agreed(count: int, *, yes: bool) -> bool:
    return yes or click.confirm(f"Do these {count} steps?", err=True)


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


async def _checked(session: _Session, wanted: Rendering, outcome: Outcome) -> int:
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


async def _stale_daemon(session: _Session) -> str:
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
        "The scheduler's daemon goes by another policy: write this one to its file, then "
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
@_yes
@_record
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
        async with _session(context.obj, file, engine) as session:
            wanted = await session.wanted()
            chosen = undoing(await session.adapter.read(wanted))
            if not chosen.steps:
                click.echo("Nothing of gpuwarden's is there.", err=True)
                remove_record(_record_path(record, session.engine))
                return 0
            _tell(chosen, None, output)
            if dry_run:
                return 0
            if not _agreed(len(chosen.steps), yes=yes):
                return 1
            outcome = await carry_out(session.adapter, chosen.steps, _progress(len(chosen.steps)))
            if outcome.failed is not None:
                return _failed(outcome)
            remove_record(_record_path(record, session.engine))
            click.echo(f"{len(outcome.done)} steps done.", err=True)
            return 0

    context.exit(asyncio.run(undone()))
