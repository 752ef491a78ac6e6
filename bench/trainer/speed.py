"""The trainer beside plain ultralytics: `python -m bench.trainer.speed [--quick]`.

Measures on the CPU, each against its target, as Markdown:

- wrapper: CPU time that gpuwarden's hooks add to a batch, and their share of an epoch;
- loading: the stateless data order beside ultralytics' own loader, on one core;
- stop: from SIGTERM to a durable state and to the process's end;
- replay: how long a resumed training takes to stand 1,000 batches within its epoch.

Ends with 1 where a target is missed, and says which.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from demo.datasets import TINY_MODEL, make_detection_dataset

from bench.trainer import beside
from gpuwarden import job_files
from gpuwarden.trainer import attach
from gpuwarden.trainer.attaching import LeftTraining

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PARTS = ("wrapper", "loading", "stop", "replay")
REPLAYED = 1000
REPLAY_SECONDS = 1.0

_PATIENCE_SECONDS = 120.0
_MOMENT_SECONDS = 0.5
"""A stop is asked for at a random moment of so many seconds."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where everything is.

    Attributes:
        folder: of the trainings.
        jobs: of the job files.
        model: description of a model of 0.15 M parameters.
    """

    folder: Path
    jobs: Path
    model: Path

    @classmethod
    def prepare(cls, folder: Path) -> Place:
        """Make it."""
        jobs, model = folder / "node", folder / "tiny.yaml"
        (jobs / "jobs").mkdir(parents=True)
        (jobs / "requests").mkdir()
        model.write_text(TINY_MODEL, "utf-8")
        return cls(folder, jobs, model)

    def words(self, data: Path, **others: Any) -> dict[str, Any]:
        """Words of a training."""
        return {
            "model": str(self.model),
            "data": str(data),
            "imgsz": 64,
            "optimizer": "AdamW",
            "plots": False,
            "verbose": False,
            "device": "cpu",
            "project": str(self.folder / "runs"),
            **others,
        }


@dataclass(frozen=True, slots=True)
class Stopped:
    """One stop, in seconds since the signal.

    Attributes:
        durable: until the state's manifest, which is written last, was on disk.
        gone: until the process had ended.
        told: what it published as `yolo_stop_latency_seconds`.
        code: exit status.
    """

    durable: float
    gone: float
    told: float
    code: int


def wrapper(place: Place, *, quick: bool) -> tuple[str, list[str]]:
    """See `beside.wrapper`."""
    data = make_detection_dataset(place.folder / "wrapper", images=480)
    words = place.words(data, epochs=3, batch=8, name="wrapper")
    return beside.wrapper(place.jobs, words, rounds=1 if quick else 3)


def loading(place: Place, *, quick: bool) -> tuple[str, list[str]]:
    """See `beside.loading`."""
    folder = place.folder / "loading"
    return beside.loading(folder, rounds=2 if quick else 3, batches=12 if quick else 24)


def stop(place: Place, *, quick: bool) -> tuple[str, list[str]]:
    """How long a training takes to leave; missed is a state that was not durable at its end."""
    data = make_detection_dataset(place.folder / "stop", images=256)
    table = (
        "| stop, from SIGTERM | state durable s | process gone s | longest s | "
        "yolo_stop_latency_seconds | target |\n|---|--:|--:|--:|--:|---|\n"
    )
    missed = []
    moments = random.Random(0)  # noqa: S311 -- moments, not secrets
    for label, model, size in (
        ("tiny, imgsz 64", str(place.model), 64),
        ("yolov8n, imgsz 160", "yolov8n.yaml", 160),
    ):
        words = place.words(data, model=model, imgsz=size, batch=8, epochs=1000, workers=0)
        stops = [
            _stopped(place, words, f"stop-{size}-{number}", moments.uniform(0, _MOMENT_SECONDS))
            for number in range(2 if quick else 4)
        ]
        middle = [
            statistics.median(values)
            for values in zip(*((one.durable, one.gone, one.told) for one in stops), strict=True)
        ]
        table += (
            f"| {label} | {middle[0]:.2f} | {middle[1]:.2f} | {max(s.gone for s in stops):.2f} | "
            f"{middle[2]:.2f} | state durable, exit {job_files.EXIT_REQUEUE} |\n"
        )
        missed += [
            f"stop, {label}: exit {one.code}, state after {one.durable:.2f} s"
            for one in stops
            if one.code != job_files.EXIT_REQUEUE or not 0 <= one.durable <= one.gone
        ]
    return table, missed


def _stopped(place: Place, words: dict[str, Any], run_id: str, delay: float) -> Stopped:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "gpuwarden", "train", "--run-id", run_id),
            *("--jobs-directory", str(place.jobs)),
            *(f"{name}={value}" for name, value in {**words, "name": run_id}.items()),
        ],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.DEVNULL,
        stderr=(place.folder / f"{run_id}.log").open("wb"),
    )
    try:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (status := _status(place, run_id)) is None or status.step < 3:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the training does not train: see {run_id}.log")
            time.sleep(0.02)
        time.sleep(delay)
        asked = time.time()
        process.send_signal(signal.SIGTERM)
        code = process.wait(_PATIENCE_SECONDS)
        gone = time.time() - asked
    finally:
        process.kill()
        process.wait()
    states = (place.folder / "runs" / run_id / "states").glob("[0-9]*.json")
    durable = max((path.stat().st_mtime for path in states), default=0.0) - asked
    status = _status(place, run_id)
    told = status.stop_latency if status is not None else None
    return Stopped(durable, gone, float("nan") if told is None else told, code)


def _status(place: Place, run_id: str) -> job_files.RunStatus | None:
    path = job_files.status_path(place.jobs, run_id)
    try:
        return job_files.RunStatus.decode(job_files.read(path).content)
    except FileNotFoundError:
        return None


def replay(place: Place, *, quick: bool) -> tuple[str, list[str]]:
    """From the start of the resumed epoch to its first new batch, in both orders."""
    data = make_detection_dataset(place.folder / "replay", images=REPLAYED + (8 if quick else 64))
    table = (
        f"| replay of {REPLAYED} batches | to the first new batch s | of which the loop's s | "
        "first batch of a new epoch s | target |\n|---|--:|--:|--:|--:|\n"
    )
    missed = []
    for order in ("stateless", "ultralytics"):
        words = place.words(data, epochs=2, batch=1, workers=0, name=f"replay-{order}")
        fresh = _first_batch(place, words, order, leave_after=REPLAYED)
        resumed = _first_batch(place, words, order, leave_after=1)
        status = _status(place, words["name"])
        loop = status.counters.replay_seconds if status is not None else float("nan")
        table += (
            f"| {order} | {resumed:.3f} | {loop:.3f} | {fresh:.3f} | {REPLAY_SECONDS:.0f} s |\n"
        )
        if not resumed < REPLAY_SECONDS or not loop > 0:
            missed.append(f"replay, {order}: {resumed:.2f} s")
    return table, missed


def _first_batch(place: Place, words: dict[str, Any], order: str, *, leave_after: int) -> float:
    """Train so many batches and leave; seconds from the epoch's start to the first of them."""
    model: Any = importlib.import_module("ultralytics").YOLO(words["model"])
    attach(model, run_id=words["name"], jobs_directory=place.jobs, data_order=order)
    began: list[float] = []
    first: list[float] = []
    trained: list[int] = []

    def epoch_starts(_trainer: Any) -> None:
        began.append(time.perf_counter())

    def batch_starts(_trainer: Any) -> None:
        first.append(time.perf_counter())

    def batch_ended(trainer: Any) -> None:
        trained.append(trainer.gpuwarden.batch)
        if len(trained) == leave_after:
            signal.raise_signal(signal.SIGTERM)

    model.add_callback("on_train_epoch_start", epoch_starts)
    model.add_callback("on_train_batch_start", batch_starts)
    model.add_callback("on_train_batch_end", batch_ended)
    try:
        model.train(**{name: value for name, value in words.items() if name != "model"})
    except LeftTraining:
        return first[0] - began[0]
    raise RuntimeError("the training did not leave")


def report(results: Iterable[tuple[str, list[str]]]) -> int:
    """Print each table as it comes, then what missed its target.

    Args:
        results: tables in Markdown, each with what misses its targets.

    Returns:
        Exit status: 1 if a target is missed.
    """
    missed: list[str] = []
    for table, misses in results:
        print(table, flush=True)
        missed += misses
    print("".join(f"MISSED {miss}\n" for miss in missed) or "Every target is met.")
    return 1 if missed else 0


def main() -> int:
    """Print the tables; 0 if every target is met."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.trainer.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds: some two minutes")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; repeatable")
    choices = parser.parse_args()
    parts: dict[str, Callable[..., tuple[str, list[str]]]] = {
        "wrapper": wrapper,
        "loading": loading,
        "stop": stop,
        "replay": replay,
    }
    with tempfile.TemporaryDirectory(prefix="speed-") as name:
        # Ultralytics reads these when it is imported.
        os.environ |= {
            "YOLO_CONFIG_DIR": f"{name}/ultralytics",
            "YOLO_VERBOSE": "false",
            "YOLO_OFFLINE": "1",
            "YOLO_AUTOINSTALL": "0",
        }
        torch.set_num_threads(1)
        place = Place.prepare(Path(name))
        chosen = choices.only or PARTS
        return report(parts[part](place, quick=choices.quick) for part in chosen)


if __name__ == "__main__":
    sys.exit(main())
