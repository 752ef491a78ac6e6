"""`gpuwarden policy render|diff|drift`: a policy and the engine's own objects."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuwarden.clock import SystemClock
from gpuwarden.consoles import printable
from gpuwarden.errors import GpuwardenError, InvalidInput
from gpuwarden.option_values import output_option
from gpuwarden.scheduling.engines import (
    Act,
    Plan,
    Rendering,
    plan,
)
from gpuwarden.scheduling.policy_checks import load_policy
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
from gpuwarden.scheduling.policy_records import Record, read_record
from gpuwarden.scheduling.policy_sessions import (
    open_session,
    record_option,
    record_path,
    say,
)

if TYPE_CHECKING:
    from gpuwarden.scheduling.engines import Adapter
    from gpuwarden.scheduling.policies import Engine
    from gpuwarden.scheduling.policy_sessions import AdapterOf

# In these, \b is the character by which click leaves the lines that follow as they are.
_SIGNS = """\b
Signs:
  +  made
  ~  changed
  -  taken away: gpuwarden's, and the policy wants it no more
  <  given back: somebody's job that gpuwarden keeps out of its queue
  !  in the way, and not gpuwarden's: never touched
  *  to be done by hand
  ?  not to be had on this engine"""


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
        async with open_session(factory, file, engine) as session:
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
        say(differences_json(changes) if output == "json" else in_words)
        if changes:
            context.exit(1)
        return

    async def compared() -> tuple[Plan, Rendering]:
        async with open_session(context.obj, file, engine) as session:
            wanted = await session.wanted()
            return plan(wanted, await session.adapter.read(wanted)), wanted

    _show(context, *asyncio.run(compared()), output=output)


def _show(context: click.Context, found: Plan, wanted: Rendering, *, output: str) -> None:
    if output == "json":
        click.echo(plan_json(found, wanted))
    else:
        say("\n".join(plan_lines(found, wanted.remarks)))
    if not found.nothing:
        context.exit(1)


@click.command(short_help="Say what was changed on the engine since the policy was applied.")
@policy_argument
@engine_option
@record_option
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
        async with open_session(context.obj, file, engine) as session:
            path = record_path(record, session.engine)
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
        say("\n".join(_drift_lines(found)))
        click.echo("`gpuwarden policy apply` makes it as the policy wants it.", err=True)
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
        elif step.act is Act.RELEASE:
            lines.append(f"{step.kind} {step.name} is kept out of its queue, and was not applied")
        else:
            lines += [
                f"{step.kind} {step.name}: {change.field} is {change.found or 'nothing'}, "
                f"and was {change.wanted or 'nothing'}"
                for change in step.changes
            ]
    lines += [f"{each} has lost gpuwarden's mark" for each in found.in_the_way]
    return lines
