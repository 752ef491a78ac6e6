"""What the driver must still know after it was started anew: a small file, replaced as a whole."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import structlog

from gpuwarden.schedule_api import Cause
from gpuwarden.scheduling.slurm.askings import Asking
from gpuwarden.scheduling.slurm.loops import History

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAME: Final = "slurm.json"
VERSION: Final = 2
_MAX_BYTES: Final = 64 * 1024 * 1024

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """What is kept of a slot that Slurm keeps cards for.

    Attributes:
        end: Unix time at which it ends; a while after, it is forgotten.
        first_used: Unix time at which a job of its team first held a card in it, or None.
        held: attempt that held cards in it -> GPU-seconds so far.
    """

    end: float
    first_used: float | None = None
    held: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Memory:
    """What is kept.

    Attributes:
        histories: of the loop guard.
        slots: slot -> what is known of it.
        asked: attempt that was asked to leave, or was to be -> its request.
    """

    histories: Mapping[str, History] = field(default_factory=dict)
    slots: Mapping[str, SlotMemory] = field(default_factory=dict)
    asked: Mapping[str, Asking] = field(default_factory=dict)


def essence(memory: Memory) -> Memory:
    """A memory without what merely grows from look to look."""
    slots = {slot: replace(each, held={}) for slot, each in memory.slots.items()}
    return replace(memory, slots=slots)


def load(folder: Path) -> Memory:
    """What was kept; nothing where there is no such file, or one that cannot be read.

    Nothing in it makes a job end, so that forgetting it is safe: a loop is counted from the start.
    """
    path = folder / NAME
    try:
        with path.open("rb") as file:
            data = json.loads(file.read(_MAX_BYTES))
        return _memory(data)
    except FileNotFoundError:
        return Memory()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("slurm_memory_unreadable", path=str(path), error=str(error))
        return Memory()


def save(folder: Path, memory: Memory) -> None:
    """Keep it: the old file or the new one is there at any time.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / NAME
    new = path.with_suffix(".new")
    data = {"version": VERSION, **dataclasses.asdict(memory)}
    try:
        with new.open("w") as file:
            json.dump(data, file, separators=(",", ":"))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


def _memory(data: Any) -> Memory:
    if data["version"] != VERSION:
        raise ValueError(f"version {data['version']} is not {VERSION}")
    return Memory(
        histories={str(key): _history(value) for key, value in data["histories"].items()},
        slots={str(key): _slot(value) for key, value in data["slots"].items()},
        asked={str(key): _asking(value) for key, value in data["asked"].items()},
    )


def _history(value: Any) -> History:
    return History(
        restarts=int(value["restarts"]),
        times=tuple(float(time) for time in value["times"]),
        made_way=tuple(float(time) for time in value["made_way"]),
        epoch=None if value["epoch"] is None else int(value["epoch"]),
        told=bool(value["told"]),
        got_on=bool(value["got_on"]),
        held=_moment(value["held"]),
        paused=None if value["paused"] is None else int(value["paused"]),
        stopped=None if value["stopped"] is None else int(value["stopped"]),
    )


def _asking(value: Any) -> Asking:
    return Asking(
        number=str(value["number"]),
        cause=Cause(value["cause"]),
        successor=str(value["successor"]),
        at="epoch" if value["at"] == "epoch" else "step",
        signal=str(value["signal"]),
        intended=float(value["intended"]),
        sent=_moment(value["sent"]),
        deadline=_moment(value["deadline"]),
        run_id=None if value["run_id"] is None else str(value["run_id"]),
        acknowledged=_moment(value["acknowledged"]),
        saved=_moment(value["saved"]),
        left=_moment(value["left"]),
    )


def _moment(value: Any) -> float | None:
    return None if value is None else float(value)


def _slot(value: Any) -> SlotMemory:
    return SlotMemory(
        end=float(value["end"]),
        first_used=_moment(value["first_used"]),
        held={str(key): float(seconds) for key, seconds in value["held"].items()},
    )
