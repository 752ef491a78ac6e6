"""The `gpuwarden` command: components are loaded only when called, and say what they lack."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden import __version__
from gpuwarden.errors import GpuwardenError, InvalidInput, MissingExtra

try:
    import click
except ModuleNotFoundError:  # the base distribution has no dependencies
    sys.stderr.write(
        "gpuwarden: the command line needs a component: pip install 'gpuwarden[exporter]' on a "
        "GPU node, 'gpuwarden[trainer]' beside ultralytics, "
        "'gpuwarden[ruleengine]' for the engine\n"
    )
    raise SystemExit(2) from None

from gpuwarden.option_values import output_option, quiet_option

if TYPE_CHECKING:
    from typing import Any


@dataclass(frozen=True, slots=True)
class _Component:
    module: str
    attribute: str
    extra: str
    help: str


_COMPONENTS = {
    "exporter": _Component(
        "gpuwarden.exporter.cli", "exporter", "exporter", "Serve a node's GPU metrics."
    ),
    "agent": _Component(
        "gpuwarden.exporter.agent.cli", "agent", "exporter", "End processes on a node when told."
    ),
    "train": _Component(
        "gpuwarden.trainer.cli", "train", "yolo", "Train as `yolo train` does, and never lose work."
    ),
    "estimate": _Component(
        "gpuwarden.trainer.estimate_cli",
        "estimate",
        "trainer",
        "Say what a training will need, before it is started.",
    ),
    "follow": _Component(
        "gpuwarden.trainer.follow_cli", "follow", "trainer", "Show how a training goes."
    ),
    "engine": _Component(
        "gpuwarden.ruleengine.cli", "engine", "ruleengine", "Judge jobs by rules, and act."
    ),
    "rules": _Component(
        "gpuwarden.ruleengine.cli", "rules", "ruleengine", "Check, test and explain rule files."
    ),
    "profiles": _Component(
        "gpuwarden.ruleengine.cli", "profiles", "ruleengine", "Learn what trainings need here."
    ),
    "policy": _Component(
        "gpuwarden.scheduling.policy_cli",
        "policy",
        "scheduling",
        "Say who may use how many GPUs; render, apply and undo it.",
    ),
    "top": _Component(
        "gpuwarden.ruleengine.top_cli",
        "top",
        "ruleengine",
        "Watch the fleet: who uses which GPU, how well, and what the rules say.",
    ),
    "jobs": _Component(
        "gpuwarden.ruleengine.cli", "jobs", "ruleengine", "Say what became of a job, and why."
    ),
    "why": _Component(
        "gpuwarden.ruleengine.cli",
        "why",
        "ruleengine",
        "Say what every rule says of a job, and what comes next.",
    ),
    "audit": _Component(
        "gpuwarden.ruleengine.cli",
        "audit",
        "ruleengine",
        "Tell one reclaim from its first sample to its proof, and verify it.",
    ),
    "enforcement": _Component(
        "gpuwarden.ruleengine.cli",
        "enforcement",
        "ruleengine",
        "Say whether jobs are ended now; pause and resume that.",
    ),
    "drill": _Component(
        "gpuwarden.cli", "drill", "ruleengine", "Rehearse the end of a job for real."
    ),
    "doctor": _Component(
        "gpuwarden.cli", "doctor", "exporter", "Check an installation, and say what to do."
    ),
    "nodes": _Component(
        "gpuwarden.ruleengine.cli", "nodes", "ruleengine", "Say which nodes there are."
    ),
    "alerting": _Component(
        "gpuwarden.ruleengine.cli",
        "alerting",
        "ruleengine",
        "Check that notices reach people.",
    ),
    "notices": _Component(
        "gpuwarden.ruleengine.cli",
        "notices",
        "ruleengine",
        "Read notices before anybody gets one, and try whether they arrive.",
    ),
    "directory": _Component(
        "gpuwarden.ruleengine.cli",
        "directory",
        "ruleengine",
        "Check who is told of whose jobs.",
    ),
    "names": _Component(
        "gpuwarden.ruleengine.cli",
        "names",
        "ruleengine",
        "Say who uses what; open names for a while.",
    ),
    "budgets": _Component(
        "gpuwarden.ruleengine.budget_cli",
        "budgets",
        "ruleengine",
        "Say how the budgets of teams stand.",
    ),
    "costs": _Component(
        "gpuwarden.ruleengine.costs_cli",
        "costs",
        "ruleengine",
        "Say who held how much GPU time, and what it costs.",
    ),
    "ledger": _Component(
        "gpuwarden.ruleengine.cli", "ledger", "ruleengine", "Back up what the engine knows."
    ),
    "queue": _Component(
        "gpuwarden.scheduling.queue_cli",
        "queue",
        "scheduling",
        "Show who waits for cards, who has them, and why.",
    ),
    "book": _Component(
        "gpuwarden.scheduling.book_cli",
        "book",
        "scheduling",
        "Book cards for a team, and give bookings back.",
    ),
    "usage": _Component(
        "gpuwarden.scheduling.usage_cli",
        "usage",
        "scheduling",
        "Say who held how many GPU-hours, by the engine and by Prometheus.",
    ),
    "scheduler": _Component(
        "gpuwarden.scheduling.scheduler_cli",
        "scheduler",
        "scheduling",
        "Run the queue, bookings and budgets of a cluster.",
    ),
    "submit": _Component(
        "gpuwarden.scheduling.submit_cli",
        "submit",
        "scheduling",
        "Estimate a training, check it against the policy, and hand it to the engine.",
    ),
    "report": _Component(
        "gpuwarden.ruleengine.reports.cli",
        "report",
        "ruleengine",
        "Say what the fleet did over days, for people, programs and papers.",
    ),
    "keep": _Component(
        "gpuwarden.ruleengine.cli", "keep", "ruleengine", "Ask the engine to leave a job alone."
    ),
    "appeal": _Component(
        "gpuwarden.ruleengine.cli", "appeal", "ruleengine", "Object to the end of a job."
    ),
    "regret": _Component(
        "gpuwarden.ruleengine.cli", "regret", "ruleengine", "Say that an end was wrong."
    ),
}


_DRILL = {
    "run": _Component(
        "gpuwarden.ruleengine.drill_cli",
        "run",
        "ruleengine",
        "Rehearse a real end on a node, and show each step.",
    ),
    "status": _Component(
        "gpuwarden.ruleengine.drill_cli",
        "status",
        "ruleengine",
        "Say how drills stand, and which are overdue.",
    ),
    "victim": _Component(
        "gpuwarden.exporter.drill_cli",
        "victim",
        "exporter",
        "On a node: hold a little GPU memory, and wait to be ended.",
    ),
}
"""Operator and node have a part each, and neither needs the other's component."""


_DOCTOR = {
    "node": _Component(
        "gpuwarden.exporter.doctor_cli",
        "node",
        "exporter",
        "Check this node: driver, rights, exporter, agent, clock.",
    ),
    "engine": _Component(
        "gpuwarden.ruleengine.doctor_cli",
        "engine",
        "ruleengine",
        "Check the centre: engine, Prometheus, every node, who is told.",
    ),
    "reference": _Component(
        "gpuwarden.doctors", "reference", "ruleengine", "Print what every finding means."
    ),
}
"""Likewise; plain `doctor` checks what is set up on this machine."""


class _LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    components = _COMPONENTS

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(self.components)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        if self.components is _COMPONENTS and name in ("drill", "doctor"):
            return {"drill": drill, "doctor": doctor}[name]
        component = self.components.get(name)
        if component is None:
            return None
        try:
            module = importlib.import_module(component.module)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing == "gpuwarden":
                raise
            raise MissingExtra(name, missing, component.extra) from error
        command: click.Command = getattr(module, component.attribute)
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # The overview must not import a component (nor torch): their one-line help stands here.
        with formatter.section("Commands"):
            formatter.write_dl([(name, item.help) for name, item in self.components.items()])


class _Drill(_LazyGroup):
    components = _DRILL


@click.group(cls=_Drill)
def drill() -> None:
    """Rehearse the end of a job for real, from the first sample to the memory that came back."""


class _Doctor(_LazyGroup):
    components = _DOCTOR


@click.group(cls=_Doctor, invoke_without_command=True)
@quiet_option
@output_option
@click.pass_context
def doctor(context: click.Context, output: str, *, quiet: bool) -> None:
    """Check an installation, and say what to do about each finding.

    Without a command: what is set up on this machine, a node (exporter, agent or a driver is
    there), a centre (/etc/gpuwarden/engine.yaml or $GPUWARDEN_ENGINE_CONFIG), or both. Everything
    is only read. docs/doctor.md tells what each finding means.

    Exit status: 0 healthy; 1 something is to be done; 2 wrong usage, or nothing is set up here;
    3 something could not be checked.
    """
    if context.invoked_subcommand is not None:
        return
    from gpuwarden import doctors  # noqa: PLC0415 (--help answers at once)

    checks, cover = doctors.local_checks()
    if not checks:
        raise click.UsageError(
            "no exporter, agent, driver or engine is set up here: see `gpuwarden doctor node "
            "--help` and `gpuwarden doctor engine --help`"
        )
    context.exit(doctors.show_findings(checks, cover, output=output, quiet=quiet))


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "GPUWARDEN"},
)
@click.version_option(__version__, prog_name="gpuwarden")
def gpuwarden() -> None:
    """Keep shared GPUs fair while teams train YOLO models on them.

    Exit status: 0 done; 1 the answer is no; 2 wrong usage or input; 3 a needed service is missing;
    130 interrupted. `gpuwarden train` has its own, see `gpuwarden train --help`.
    """


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line and exit.

    Args:
        arguments: without the program's name; `sys.argv[1:]` by default.
    """
    try:
        status = gpuwarden.main(args=arguments, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except InvalidInput as error:
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)
    except GpuwardenError as error:
        click.echo(f"gpuwarden: {error}", err=True)
        sys.exit(error.exit_code)
    sys.exit(status if isinstance(status, int) else 0)
