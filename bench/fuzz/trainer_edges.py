"""What a training reads: its states' manifests, its run's record, the words of an estimate.

They lie in the user's own folder or in a bucket that others may write, and outlive the version that
wrote them.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from typing import TYPE_CHECKING

from bench.fuzz.edges import JSON_WORDS, SPLIT, Attack, require
from gpuwarden.clock import SystemClock
from gpuwarden.errors import InvalidInput, MissingExtra
from gpuwarden.job_files import LeaveRequest
from gpuwarden.trainer import estimate_words
from gpuwarden.trainer.leaving import LeaveWatch
from gpuwarden.trainer.runs import VERSION, RunRecord
from gpuwarden.trainer.states import Manifest, StateStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

LINEAGE = "0123456789abcdef"
MANIFEST = Manifest(
    lineage=LINEAGE,
    epoch=1,
    batch=5,
    step=105,
    batches=100,
    epochs=3,
    batch_size=16,
    dataset="d",
    order="stateless-1",
    exact=True,
    reason="periodic",
    time=1_800_000_000.0,
    words={"model": "yolov8n.pt"},
    software={"torch": "2"},
    fitness=0.5,
    sequence=1,
)
RECORD = RunRecord("run-1", LINEAGE, {"model": "yolov8n.pt"}, 1_800_000_000.0)


def _manifests(folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        for left in folder.iterdir():
            left.unlink()
        for number, part in enumerate(data.split(SPLIT)[:4], 1):
            (folder / f"{number:06d}.json").write_bytes(part)
        store = StateStore(folder, LINEAGE)
        store.has_any()
        for manifest in store.manifests():
            require(holds=manifest.writer != "" and manifest.position is not None, what="nobody's")
            require(holds=Manifest.decode(manifest.encode()) == manifest, what="other fields")
        store.best()
        store.newest()
        store.discard_others()

    return attack


def _records(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        record = RunRecord.decode(data, where="run.json")
        if record is not None:
            again = record.having_answered("d-9")
            require(holds=again.answered[-1] == "d-9", what="an answer was lost")
            sorted(record.words.items())
            sorted(record.loggers.items())

    return attack


def _leave(folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    path = folder / "run-1.json"

    def attack(data: bytes) -> None:
        path.write_bytes(data)
        leaving = LeaveWatch(SystemClock())
        leaving.observe(path, answered=set(), since=0.0)
        leaving.reread()
        leaving.must_leave()
        leaving.leaving_status()

    return attack


def _words(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        with suppress(InvalidInput, MissingExtra):
            estimate_words.parse(data.decode(errors="replace").split("\0")[:20])

    return attack


_RECORD = json.dumps({"version": VERSION, **dataclasses.asdict(RECORD)}).encode()

ATTACKS = (
    Attack(
        "manifests of states",
        _manifests,
        (
            MANIFEST.encode(),
            MANIFEST.encode() + SPLIT + dataclasses.replace(MANIFEST, fitness=None).encode(),
        ),
        (*JSON_WORDS, SPLIT, b'"fitness": ', b'"sequence": ', b'"words": {', b'"version": 2'),
        of="trainer",
    ),
    Attack(
        "records of runs",
        _records,
        (_RECORD,),
        (*JSON_WORDS, b'"answered": ["a"]', b'"words": {', b'"version": 2', b'"loggers": {'),
        of="trainer",
    ),
    Attack(
        "requests to leave",
        _leave,
        (LeaveRequest("d-1", 1_900_000_000.0).encode(),),
        (*JSON_WORDS, b'"leave_by": ', b'"at": "epoch"', b'"then": "requeue"'),
        of="trainer",
    ),
    Attack(
        "words of an estimate",
        _words,
        (b"model=yolov8m\0batch=64\0imgsz=640\0gpu=A100 40GB", b"model=yolov8n\0batch=-1\0gpus=2"),
        (b"=", b"\0", b"1e9", b"-1", b"\xd9\xa3", b"nan", b"gpu=", b"gpus=999999999999", b".yaml"),
        of="trainer",
    ),
)
