"""`gpuwarden train`: the words of `yolo train`, under gpuwarden."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuwarden import job_files
from gpuwarden.errors import GpuwardenError, InvalidInput, MissingExtra
from gpuwarden.trainer import (
    agreement,
    comparisons,
    endings,
    faults,
    follow_cli,
    launching,
    offline,
    ranks,
    results,
)
from gpuwarden.trainer.leaving import ON_SIGNAL, SIGNALS, Leave, LeaveWatch, job_ends_at
from gpuwarden.trainer.sessions import Session
from gpuwarden.trainer.settings import DATA_ORDERS, RESUME_CHOICES, TrainSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

_NEEDED = ("numpy", "torch", "ultralytics")
"""What the extra brings: modules whose absence is an installation's fault, not a user's code's."""
_SIGNAL_NAMES = ", ".join(number.name for number in SIGNALS)
_EPILOG = f"""\b
Signals: {_SIGNAL_NAMES}
all mean: save at the next step and leave. Repeats within 5 seconds count once.
With --on-signal epoch, SIGUSR1 and SIGUSR2 let the epoch end first; a later SIGTERM does not.
Ctrl-C three times, further apart, gives up at once.

\b
Exit status:
  {job_files.EXIT_DONE}   the training is complete (or was already)
  {job_files.EXIT_FAULT}   a fault; states saved before it stay
  2   wrong usage, or a state that does not fit these words
  3   the place of --upload could not be asked: try again
  {job_files.EXIT_REQUEUE}  left, state saved: bring the job back
  {job_files.EXIT_HOLD}  left because a rule ended it, or too large for its card: do not bring it
      back by itself
  {job_files.EXIT_NOT_RESUMABLE}  left, but no state could be saved

\b
Slurm, with RequeueExit={job_files.EXIT_REQUEUE} in slurm.conf: put
  #SBATCH --requeue --signal=B:USR1@120
(so many seconds before the end: an epoch and a save, for --on-signal epoch) and, as the last line,
  exec gpuwarden train --run-id exp1 model=... data=...
which starts the run at first and continues it ever after.
"""


@click.command(
    "train",
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    },
    epilog=_EPILOG,
)
@click.option(
    "--run-id",
    envvar="GPUWARDEN_RUN_ID",
    metavar="NAME",
    help="Name of the run, stable over resumes. With it, an unfinished run of that name in the "
    "same project is continued. By default it is made from the model's name, and kept.",
)
@click.option(
    "--resume",
    type=click.Choice(RESUME_CHOICES),
    help="Continue the run's newest good state if there is one, or start afresh. Default: auto "
    "with --run-id, else never. The word resume=auto means the same; without a run id it finds "
    "the newest run of the same project, name and words.",
)
@click.option(
    "--jobs-directory",
    envvar=job_files.DIRECTORY_VARIABLE,
    type=click.Path(path_type=Path, file_okay=False),
    default=job_files.DEFAULT_DIRECTORY,
    show_default=True,
    help="Where the node's exporter and agent meet their trainings.",
)
@click.option(
    "--on-mismatch",
    type=click.Choice(comparisons.CHOICES),
    default=comparisons.REFUSE,
    show_default=True,
    help="What to do where the newest state is of a training that differs from this one, by its "
    "words, data set, classes, model or seed: refuse; go on from the beginning of the state's "
    "epoch; or begin anew from its weights alone.",
)
@click.option(
    "--extend-epochs",
    type=click.IntRange(min=1),
    metavar="TOTAL",
    help="Give the run more epochs: TOTAL in all. Also continues one that stopped early; then "
    "patience= may differ.",
)
@click.option(
    "--checkpoint-every",
    metavar="DURATION",
    default="5m",
    show_default=True,
    help="Time between periodic states, such as 90s or 5m; each costs the loop one copy. auto: "
    "the square root of 2 x its cost x --mtbf (Young, Daly), from 60s to 5m.",
)
@click.option(
    "--mtbf",
    metavar="DURATION",
    default="24h",
    show_default=True,
    help="Mean time between interruptions of this training, for --checkpoint-every auto.",
)
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    metavar="K",
    default=3,
    show_default=True,
    help="So many of the newest states stay on disk, and the best one besides.",
)
@click.option(
    "--upload",
    envvar="GPUWARDEN_UPLOAD",
    metavar="URL",
    help="Put each state there besides, once it is on this disk: s3://, oss://, gs://, file:// or "
    "any other URL of fsspec (extra [upload]). A run whose folder is empty here continues from "
    "there.",
)
@click.option(
    "--upload-wait",
    metavar="DURATION",
    default="20s",
    show_default=True,
    help="How long an attempt that leaves waits for the upload of its state.",
)
@click.option(
    "--gradient-norm",
    is_flag=True,
    help="Publish the norm of the gradients.",
)
@click.option(
    "--export",
    multiple=True,
    metavar="FORMAT",
    help="Export the trained model by ultralytics' own means, such as onnx or engine, before the "
    "run is complete. May be repeated.",
)
@click.option(
    "--lock-wait",
    metavar="DURATION",
    default="30s",
    show_default=True,
    help="How long to wait for an earlier attempt of the run to be gone.",
)
@click.option(
    "--stall-report",
    metavar="DURATION",
    default="10m",
    show_default=True,
    help="A loop that has not moved for so long shows on standard error where it stands; 0s never.",
)
@click.option(
    "--result",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write what became of it there, as JSON: exit status and reason, run id, folder, weights, "
    "metrics.",
)
@click.option(
    "--on-signal",
    type=click.Choice(ON_SIGNAL),
    default=ON_SIGNAL[0],
    show_default=True,
    help="Up to where SIGUSR1 and SIGUSR2, which schedulers send ahead of an end, let the training "
    "go on: epoch finishes the one it is in. SIGTERM and Ctrl-C always mean the next step.",
)
@click.option(
    "--with-parent",
    is_flag=True,
    help="Save and leave when the process that started this one ends.",
)
@click.option(
    "--follow",
    metavar="RUN",
    help="Show how the training RUN goes, and train nothing; see gpuwarden follow --help.",
)
@click.option(
    "--online",
    is_flag=True,
    help="Let ultralytics use the network: download data sets and weights, ask for updates, send "
    "its statistics. Without it a training opens no connection of its own.",
)
@click.option(
    "--checkpoint-epochs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Also save after every N epochs.",
)
@click.option(
    "--data-order",
    type=click.Choice(DATA_ORDERS),
    default=DATA_ORDERS[0],
    show_default=True,
    help="stateless: resumes exactly with any number of loader workers. ultralytics: its own "
    "order, exact only with workers=0.",
)
@click.option(
    "--trainer",
    metavar="MODULE:CLASS",
    help="A trainer class of your own to build upon; the current folder is searched too.",
)
@click.option(
    "--log",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file that this output goes to: its growth shows the node that the job is alive. "
    "Default: the file behind standard output, if it is one.",
)
@click.option(
    "--nproc",
    type=click.IntRange(min=1, max=launching.MAX_RANKS),
    metavar="N",
    help="Train with N processes, one per card, together on each batch. Default: one for each "
    "card that the word device names, such as device=0,1. With device=cpu, on the CPU.",
)
@click.option(
    "--grace",
    metavar="DURATION",
    default="5m",
    show_default=True,
    help="With several processes: how long those that were told to leave may take, before what "
    "is left of them is killed. A little less than the scheduler's own patience is right.",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]...")
@click.pass_context
def train(
    context: click.Context,
    /,
    words: tuple[str, ...],
    nproc: int | None,
    **options: Any,
) -> int:
    """Train as `yolo train` does, and never lose work.

    Takes the words of `yolo train` after its own options, so that only one word changes:

    \u0008
      gpuwarden train model=yolov8n.yaml data=coco.yaml epochs=3 batch=16
      gpuwarden train --run-id exp1 --checkpoint-every 2m model=... data=...
      gpuwarden train model=... data=... resume=auto

    While it trains it publishes its progress to the node. Asked to leave, by a signal or by
    gpuwarden's agent, it saves its whole state at the next step; the resumed run ends as if it
    had never been interrupted.
    """
    if (followed := options.pop("follow")) is not None:
        follow_cli.watch(
            followed,
            options["jobs_directory"],
            engine_url=os.environ.get("GPUWARDEN_ENGINE_URL"),
        )
        return job_files.EXIT_DONE
    result: Path | None = options.pop("result")
    if options.pop("with_parent"):
        ranks.die_with_parent(signal.SIGTERM)
    settings = TrainSettings.from_options(**options)
    ending = endings.Ending()
    _log_to_stderr()
    offline.choose(online=settings.online)
    if not ranks.is_launched() and (devices := launching.devices_of(words, nproc)):
        command = launching.rank_command(list(launching.options_said(context)), words)
        patient = settings.on_signal == "epoch"
        return launching.Launcher(command, devices, settings.grace_seconds, patient=patient).run()
    watch = LeaveWatch(on_signal=settings.on_signal, ends_at=job_ends_at(os.environ))
    watch.install()
    session, reason = Session(settings, watch=watch), "left before it began"
    try:
        with watch.interruptible():  # importing torch takes seconds
            ranks.bind()
            overrides = parse_words(words)
            model = load_model(overrides)
        code, reason = session.run(model, overrides, train=model.train)
    except Leave:
        code = watch.leaving_status()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _NEEDED:
            raise
        raise MissingExtra("train", missing, "yolo") from error
    except (GpuwardenError, RuntimeError, MemoryError, OSError) as error:
        known = _known(error, session)
        code = faults.status_of(known or error)
        results.write(result, session, code=code, reason=str(known or error))
        if known is None or known is error:
            raise
        raise known from error
    results.write(result, session, code=code, reason=reason)
    # A second signal that arrives while the interpreter ends must not kill it, for a scheduler
    # would then see a crash instead of the status.
    watch.ignore()
    if not agreement.leave():
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)  # a communicator waits for good for ranks that are gone
    ending.settle(code)
    return code


def _known(error: Exception, session: Session) -> GpuwardenError | None:
    if isinstance(error, GpuwardenError):
        return error
    return faults.explained(error, session.trainer, alone=session.team.place.world == 1)


def _log_to_stderr() -> None:
    """Our own lines go to standard error: ultralytics' progress has standard output to itself."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("gpuwarden: %(message)s"))
    logger = logging.getLogger("gpuwarden")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def parse_words(words: Sequence[str]) -> dict[str, Any]:
    """The words of `yolo train`, as `yolo` understands them.

    Args:
        words: `key=value`; `train`, a task, and bare names of boolean settings are allowed as
            `yolo` allows them.

    Raises:
        InvalidInput: a word that `yolo` would refuse.
    """
    cfg: Any = importlib.import_module("ultralytics.cfg")  # takes seconds: --help must not
    utils: Any = importlib.import_module("ultralytics.utils")
    checks: Any = importlib.import_module("ultralytics.utils.checks")
    overrides: dict[str, Any] = {}
    allowed = {**cfg.DEFAULT_CFG_DICT, **dict.fromkeys((*cfg.TASKS, *cfg.MODES))}
    for word in cfg.merge_equals_args(list(words)):
        text = word.removeprefix("--").removesuffix(",")
        try:
            if "=" in text:
                key, value = cfg.parse_key_value_pair(text)
                if key == "cfg" and value:
                    file = utils.YAML.load(checks.check_yaml(value))
                    overrides = {**{k: v for k, v in file.items() if k != "cfg"}, **overrides}
                else:
                    overrides[key] = value
            elif text in cfg.TASKS:
                overrides["task"] = text
            elif isinstance(cfg.DEFAULT_CFG_DICT.get(text), bool):
                overrides[text] = True
            elif text != "train":
                cfg.check_dict_alignment(allowed, {text: ""})
                raise InvalidInput(f"{word!r} is not a setting of a training: write key=value")
        except (SyntaxError, ValueError, AssertionError, FileNotFoundError) as error:
            hint = _about_options(text)
            raise InvalidInput(f"{word!r}: {str(error).strip()}{hint}") from error
    try:
        cfg.check_dict_alignment(allowed, overrides)
        cfg.check_cfg(dict(overrides))  # else it is refused once the run has begun
    except (SyntaxError, TypeError, ValueError) as error:
        raise InvalidInput(str(error).strip()) from error
    overrides.pop("mode", None)
    return overrides


def _about_options(text: str) -> str:
    """What to add where one of our own options stands among the words of `yolo`."""
    name = text.partition("=")[0]
    if f"--{name}" not in (option for known in train.params for option in known.opts):
        return ""
    return f" gpuwarden's own option --{name} goes before the first KEY=VALUE"


def load_model(overrides: dict[str, Any]) -> Any:
    """The model that `yolo` would make of the words `model` and `task`, which are taken out.

    Raises:
        InvalidInput: no `model` or `data` word, or a model that is not there or is none; gpuwarden
            downloads nothing of its own choice.
    """
    ultralytics: Any = importlib.import_module("ultralytics")
    name, task = overrides.pop("model", None), overrides.pop("task", None)
    if not name:
        raise InvalidInput("which model? Say model=yolov8n.yaml or model=path/to/weights.pt")
    if not overrides.get("data") and overrides.get("resume") in (None, False, "auto"):
        raise InvalidInput("which data set? Say data=path/to/data.yaml")
    offline.prepare()
    try:
        if "rtdetr" in Path(str(name)).stem.lower():
            return ultralytics.RTDETR(name)
        return ultralytics.YOLO(name, task=task)
    except (FileNotFoundError, ConnectionError) as error:
        raise InvalidInput(f"model={name}: {error}") from error
    except (TypeError, LookupError, SyntaxError, ValueError, NotImplementedError) as error:
        # As ultralytics meets what is no model: a data set's YAML, half a file, another's weights.
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise InvalidInput(f"model={name} is no model that can be read ({said})") from error
