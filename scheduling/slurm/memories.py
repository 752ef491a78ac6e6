"""What the driver must still know after it was started anew: a small file, replaced as a whole."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import structlog

from gpuwarden.scheduling.slurm.loops import History

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAME: Final = "slurm.json"
VERSION: Final = 1
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
        asked: attempt that was asked to leave -> Unix time.
    """

    histories: Mapping[str, History] = field(default_factory=dict)
    slots: Mapping[str, SlotMemory] = field(default_factory=dict)
    asked: Mapping[str, float] = field(default_factory=dict)


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
        asked={str(key): float(value) for key, value in data["asked"].items()},
    )


def _history(value: Any) -> History:
    return History(
        restarts=int(value["restarts"]),
        times=tuple(float(time) for time in value["times"]),
        epoch=None if value["epoch"] is None else int(value["epoch"]),
        told=bool(value["told"]),
        held=None if value["held"] is None else float(value["held"]),
    )


def _slot(value: Any) -> SlotMemory:
    first = value["first_used"]
    return SlotMemory(
        end=float(value["end"]),
        first_used=None if first is None else float(first),
        held={str(key): float(seconds) for key, seconds in value["held"].items()},
    )
