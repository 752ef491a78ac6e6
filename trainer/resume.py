"""Which run a command means, whether its newest state fits, and how exactly it can be continued."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
import secrets
import shlex
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden.errors import InvalidInput
from gpuwarden.trainer import comparisons, offline, states
from gpuwarden.trainer.runs import RunRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpuwarden.trainer.settings import TrainSettings
    from gpuwarden.trainer.states import Manifest

EXACT, EPOCH, NONE = "exact", "epoch", "none"

KNOWN_LOOPS = {
    "df968dc516e25810": "ultralytics 8.4.190",
    "e9f6d66d68da363f": "ultralytics 8.4.190, classification",
}
"""Digests of the code that exact resume drives, for which the tests have shown bit identity."""

EXACT_TASKS = ("detect", "segment", "pose", "obb", "classify")
"""For which the tests have shown it."""

FREE_WORDS = frozenset(
    {"device", "exist_ok", "mode", "plots", "resume", "save_dir", "save_period", "show", "task"}
    | {"verbose", "workers"}
)
"""Words that may differ between the attempts of a run: they do not change what is learnt."""
_PLACE_WORDS = frozenset({"project", "name"})
_MAX_RUNS = 10_000


@dataclass(frozen=True, slots=True)
class Plan:
    """What a command means.

    Attributes:
        save_dir: ultralytics' directory of the run.
        record: the run.
        fresh: no attempt of it was made yet.
        words: those of this start, as text.
    """

    save_dir: Path
    record: RunRecord
    fresh: bool
    words: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where its states are."""
        return self.save_dir / states.FOLDER


def plan(
    settings: TrainSettings,
    words: Mapping[str, Any],
    *,
    task: str,
    now: float,
    elsewhere: Callable[[], RunRecord | None] = lambda: None,
) -> Plan:
    """Find the run that a command means, or make a new one.

    Without a run id, a run is known again by its words: `resume=auto` continues the newest run in
    the same project and name whose words are the same.

    Args:
        settings: gpuwarden's own choices.
        words: ultralytics' words, `model` included.
        task: of the model.
        now: Unix time.
        elsewhere: finds the run of that id at another place, asked where none is here.

    Raises:
        InvalidInput: the run that is meant was started with other words, and that is not to be
            passed over.
    """
    said = _said(words)
    base = _base_directory(words, task)
    if settings.resumes:
        _refuse_unreadable(base, settings)
        found = _find(settings, said, base, fixed="save_dir" in words)
        if found is None and (remote := elsewhere()) is not None:
            found = _compared(Plan(_unused(base, words), remote, fresh=False), said, settings)
        if found is not None:
            return found
    record = RunRecord(
        run_id=settings.run_id or _new_run_id(words),
        lineage=secrets.token_hex(8),
        words=said,
        started=now,
    )
    return Plan(_unused(base, words), record, fresh=True, words=said)


def _refuse_unreadable(base: Path, settings: TrainSettings) -> None:
    """A run whose record is damaged must not become a new training beside its own states.

    Raises:
        InvalidInput: there are states in the folder that is meant, and nobody knows whose.
    """
    folder = base / states.FOLDER
    if settings.run_id is None or RunRecord.read(folder) is not None:
        return
    if _has_states(folder):
        raise InvalidInput(
            f"{folder} holds states, but its {RunRecord.FILE} cannot be used: put it back (a copy "
            "is where --upload put it), or start anew with --resume never"
        )


def _has_states(folder: Path) -> bool:
    """Whether there are states, good or put aside."""
    return any(folder.glob("[0-9]" * 6 + ".*"))


def _find(settings: TrainSettings, said: dict[str, str], base: Path, *, fixed: bool) -> Plan | None:
    related: list[Plan] = []
    for found in _runs(base, fixed=fixed):
        if settings.run_id is not None:
            if found.record.run_id == settings.run_id:
                related.append(found)
        elif not comparisons.word_differences(said, found.record.words, ignore=frozenset()):
            return dataclasses.replace(found, words=said)
        elif all(
            said.get(word) == found.record.words.get(word)
            for word in ("model", "data", *_PLACE_WORDS)
        ):
            related.append(found)
    if not related:
        return None
    newest = related[0]
    if newest.record.finished is None and not _has_states(newest.folder):
        # Nothing was learnt under the former words, in which a typing error may have stood.
        return dataclasses.replace(newest, words=said)
    return _compared(newest, said, settings)


def _compared(newest: Plan, said: dict[str, str], settings: TrainSettings) -> Plan | None:
    """The run, if it may be continued under these words; None if they mean another."""
    ignore = _PLACE_WORDS if settings.run_id is not None else frozenset()
    if settings.run_id is not None:
        ignore |= comparisons.PATHS  # what is in these files is compared with each state
    if settings.extend_epochs is not None:
        ignore |= comparisons.EXTENDABLE
    differences = comparisons.word_differences(said, newest.record.words, ignore=ignore)
    if not differences or (
        settings.run_id is not None and settings.on_mismatch != comparisons.REFUSE
    ):
        return dataclasses.replace(newest, words=said)
    if newest.record.finished is not None and settings.run_id is None:
        return None
    raise InvalidInput(
        f"run {newest.record.run_id} in {newest.save_dir} was started with other words: "
        f"{'; '.join(differences)}. Use the same words to continue it, or start another run with "
        f"--resume never (or name=... or --run-id){_ways(settings, differences)}"
    )


def _ways(settings: TrainSettings, differences: list[str]) -> str:
    """What else may be meant by other words."""
    names = {difference.partition("=")[0] for difference in differences}
    ways = []
    if names <= comparisons.EXTENDABLE:
        ways.append("--extend-epochs TOTAL gives a run more epochs")
    if settings.run_id is not None:
        ways.append("--on-mismatch says how to go on with other words all the same")
    return f"; {'; '.join(ways)}" if ways else ""


def continued(record: RunRecord, words: dict[str, str], settings: TrainSettings) -> RunRecord:
    """A run's record under the words of this start; each state keeps those it was taken with.

    Args:
        record: as it is on disk.
        words: of this start, which `plan` has let pass.
        settings: gpuwarden's own choices.

    Raises:
        InvalidInput: `--extend-epochs` asks for fewer epochs than the run has.
    """
    places = {name: record.words[name] for name in _PLACE_WORDS & record.words.keys()}
    said = {**{name: words[name] for name in words.keys() - _PLACE_WORDS}, **places}
    total, finished = settings.extend_epochs, record.finished
    extended = record.extended
    if total is not None and total != extended:
        planned = extended or int(record.words.get("epochs", 0))
        if total < planned:
            raise InvalidInput(
                f"--extend-epochs {total}: run {record.run_id} has {planned} epochs already; "
                "give the total that it is to have"
            )
        # Told again when the further epochs are done, as a job script does, it asks for nothing.
        extended, finished = total, None
    ignore = _PLACE_WORDS | (comparisons.EXTENDABLE if total is not None else frozenset())
    if settings.on_mismatch == comparisons.REFUSE:
        ignore |= comparisons.PATHS
    if comparisons.word_differences(said, record.words, ignore=ignore):
        finished = None  # `--on-mismatch` has let them pass: there is more to do
        if total is None and said.get("epochs") != record.words.get("epochs"):
            extended = None
    return dataclasses.replace(record, words=said, extended=extended, finished=finished)


def _runs(base: Path, *, fixed: bool) -> list[Plan]:
    """Runs beside a directory, newest first."""
    if fixed:
        folders = [base]
    elif base.parent.is_dir():
        folders = sorted(path for path in base.parent.iterdir() if path.is_dir())[:_MAX_RUNS]
    else:
        folders = []
    found = []
    for folder in folders:
        record = RunRecord.read(folder / states.FOLDER)
        if record is not None:
            found.append(Plan(folder, record, fresh=False))
    return sorted(found, key=lambda item: item.record.started, reverse=True)


def _said(words: Mapping[str, Any]) -> dict[str, str]:
    """The words that make a training this one, as text."""
    return {name: str(value) for name, value in sorted(words.items()) if name not in FREE_WORDS}


def _base_directory(words: Mapping[str, Any], task: str) -> Path:
    from ultralytics.cfg import get_cfg, get_save_dir

    places = {name: words[name] for name in ("project", "name", "save_dir") if words.get(name)}
    args = get_cfg(overrides={**places, "task": task, "mode": "train", "exist_ok": True})
    return Path(get_save_dir(args))


def _unused(base: Path, words: Mapping[str, Any]) -> Path:
    from ultralytics.utils.files import increment_path

    if "save_dir" in words or words.get("exist_ok"):
        return base
    return Path(increment_path(base))


def _new_run_id(words: Mapping[str, Any]) -> str:
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(str(words.get("model") or "run")).stem)[:40]
    return f"{stem or 'run'}-{secrets.token_hex(4)}"


# ---------------------------------------------------------------------------------------------
# Refusals


def several_devices(found: str) -> InvalidInput:
    """Refuses to have ultralytics launch a training on several devices.

    Args:
        found: what asks for them.
    """
    return InvalidInput(
        f"{found}: ultralytics' own launcher leaves its ranks running, and holding memory, when a "
        "training is told to leave. `gpuwarden train device=0,1 ...` on the command line starts "
        "them itself; a script that attaches to a model can be started by torchrun"
    )


def other_model(error: Exception) -> InvalidInput:
    """Refuses a state whose tensors are not those of the model that was built."""
    first = next(iter(str(error).split("\n\t")[1:]), str(error)).strip()
    return InvalidInput(
        "the state does not fit the model, whose file or number of classes has changed since "
        f"({first[:200]}). Put it back as it was to continue, or start anew with --resume never"
    )


def none_usable(folder: Path) -> InvalidInput:
    """Refuses to begin anew where there were states."""
    return InvalidInput(
        f"none of the states in {folder} can be used (the damaged ones are put aside as *.bad): "
        "mend what is said above, or start anew with --resume never"
    )


def only_whole_epochs(manifest: Manifest) -> InvalidInput:
    """Refuses a state from within an epoch where a training resumes from whole epochs only."""
    return InvalidInput(
        f"the newest state is in the middle of epoch {manifest.epoch + 1}, but here a training can "
        f"be resumed from whole epochs only: use the software that wrote it ({manifest.writer}); "
        "or begin that epoch again with --on-mismatch epoch; or start anew with --resume never"
    )


def no_dataset(data: str, error: BaseException) -> InvalidInput:
    """Refuses a data set that is not there, or whose description does not describe one."""
    said = " ".join(str(error).split())
    hint = (
        ""
        if "--online" in said
        or not offline.chosen()
        or not isinstance(error, FileNotFoundError | ConnectionError)
        else ("; put it there, or say --online to let ultralytics download it")
    )
    return InvalidInput(f"data={data}: {said}{hint}")


def no_device(device: Any, error: Exception) -> InvalidInput:
    """Refuses a device that is not there.

    Args:
        device: as it was asked for.
        error: ultralytics' own.
    """
    import torch

    said = str(error).partition("\n")[0].split(" Use 'device=cpu'")[0]
    return InvalidInput(
        f"device={device}: {said} torch sees {torch.cuda.device_count()} card(s) here; nvidia-smi "
        "-L and $CUDA_VISIBLE_DEVICES say why; device=cpu trains without one"
    )


def native_of_ours(checkpoint: str, record: RunRecord) -> InvalidInput:
    """Refuses to hand a checkpoint of a gpuwarden run to ultralytics' own, inexact resume."""
    words = " ".join(shlex.quote(f"{name}={value}") for name, value in record.words.items())
    return InvalidInput(
        f"{checkpoint} belongs to run {record.run_id}, of which gpuwarden keeps exact states. "
        f"Continue it with: gpuwarden train --run-id {record.run_id} {words}"
    )


# ---------------------------------------------------------------------------------------------
# How exactly


def loop_digest(task: str) -> str:
    """Digest of the code that exact resume drives; empty where its source cannot be read.

    Args:
        task: one of `EXACT_TASKS`.
    """
    from ultralytics.data import ClassificationDataset
    from ultralytics.data.augment import Mosaic
    from ultralytics.data.base import BaseDataset
    from ultralytics.data.build import InfiniteDataLoader
    from ultralytics.engine.trainer import BaseTrainer
    from ultralytics.models.yolo.classify import ClassificationTrainer

    samples: tuple[Any, ...] = (BaseDataset.load_image, Mosaic.get_indexes)
    if task == "classify":
        samples = (ClassificationDataset.__getitem__, ClassificationTrainer.get_dataloader)
    try:
        sources = [
            inspect.getsource(part)
            for part in (
                BaseTrainer._do_train,  # noqa: SLF001 -- the loop itself
                BaseTrainer._setup_train,  # noqa: SLF001
                InfiniteDataLoader,
                *samples,
            )
        ]
    except (OSError, TypeError):
        return ""
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()[:16]


def mode_for(trainer: Any, data_order: str) -> tuple[str, str]:
    """How exactly a training can be resumed, and why not better.

    Args:
        trainer: constructed, not necessarily set up.
        data_order: of the settings.

    Returns:
        `exact` with an empty reason, or `epoch` (from the last complete epoch, with other random
        choices than an undisturbed run) with the reason.
    """
    from ultralytics.engine.trainer import BaseTrainer

    args = trainer.args
    geometry = ("degrees", "translate", "scale", "shear", "perspective")
    # Colours are then changed in the cached image itself, whose history is not stored.
    cached_edits = (
        args.task != "classify"
        and (args.mosaic < 1 or args.close_mosaic)
        and not any(getattr(args, name) for name in geometry)
    )
    reasons = {
        f"task {args.task} is not among those shown to resume exactly": args.task
        not in EXACT_TASKS,
        "its trainer has a loop of its own": type(trainer)._do_train is not BaseTrainer._do_train,  # noqa: SLF001
        "time=... plans the epochs by the clock": bool(args.time),
        "compile=True separates the loss from the model": bool(args.compile),
        "distill_model is not among what was shown to resume exactly": bool(args.distill_model),
        "quantize is not among what was shown to resume exactly": bool(args.quantize),
        "no geometric augmentation: colours change in cached images": bool(cached_edits),
        "augmentations have a random stream of their own": bool(
            getattr(args, "augmentations", None)
        ),
        "albumentations has a random stream of its own": bool(find_spec("albumentations")),
        "data order ultralytics with loader workers": data_order == "ultralytics"
        and args.workers > 0,
        "data order ultralytics shuffles a classification's validation": data_order == "ultralytics"
        and args.task == "classify",
        "this version of ultralytics is not known": loop_digest(args.task) not in KNOWN_LOOPS,
    }
    for reason, applies in reasons.items():
        if applies:
            return EPOCH, reason
    return EXACT, ""
