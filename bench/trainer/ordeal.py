"""Ends a training at random moments, over and over: `python -m bench.trainer.ordeal`.

A training of a few epochs is ended ten times, by SIGKILL or SIGTERM, at random moments of set-up,
training, validation and saving, and continued by the same command each time. What it has learnt
must be that of a training that nobody disturbed, to the last bit. Meanwhile a real exporter, on
simulated cards, counts the GPU time whose work was lost (`gpuwarden_lost_gpu_seconds_total`);
beside it stands what this program measures: from the newest state on disk to the process's end, or
to its word that it has left. Exits with 1 where either does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from demo.datasets import TINY_MODEL, make_detection_dataset

from bench.exporter import programs
from gpuwarden import job_files
from gpuwarden.exporter.scenarios import GIB, Card, Scenario, SimulatedProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN = "ordeal"
BATCH = 8
CARDS = 8  # as the exporter of bench.exporter.programs is known to be ready by its eighth card
_SETUP_SHARE = 0.2
_SETUP_SECONDS = 6.0
_STEP_SECONDS = 0.25
_PATIENCE_SECONDS = 180.0
_TOLERANCE_SECONDS = 3.5
"""For each attempt that died: the exporter looks every other second, the training publishes every
second, and learns only at the end of a step that a state is on disk."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one attempt went.

    Attributes:
        told: the signal and who got it.
        code: exit status.
        phase: as published last.
        step: likewise; -1 if nothing was.
        durable: step of the newest state on disk then.
        lost: GPU seconds from that state, or from the attempt's start, to its end, or until it
            said that it leaves; 0 if it had not said yet who it was.
        gone: seconds from the signal until no process was left.
    """

    told: str
    code: int
    phase: str
    step: int
    durable: int
    lost: float
    gone: float


class Ordeal:
    """One training and the node that watches it.

    Args:
        folder: for everything.
        choices: of the command line.
    """

    def __init__(self, folder: Path, choices: argparse.Namespace) -> None:
        self.folder, self.choices = folder, choices
        self.random = random.Random(choices.seed)  # noqa: S311 -- moments, not secrets
        self.node = folder / "jobs"
        (self.node / "jobs").mkdir(parents=True)
        (self.node / "requests").mkdir()
        self.scenario = folder / "gpus.scenario"
        self.model = folder / "tiny.yaml"
        self.model.write_text(TINY_MODEL, "utf-8")
        self.data = make_detection_dataset(folder / "data", images=choices.images)
        self.steps = choices.epochs * -(-choices.images // BATCH)
        self._started: subprocess.Popen[bytes] | None = None
        self.hold([])

    def hold(self, pids: list[int]) -> None:
        """Let the simulated cards be held by these processes, one each."""
        held = [SimulatedProcess(card, pid, memory=GIB, sm=50) for card, pid in enumerate(pids)]
        Scenario(cards=[Card(index) for index in range(CARDS)], processes=held).write(self.scenario)

    def start(self, run_id: str, node: Path) -> subprocess.Popen[bytes]:
        """An attempt, in a session of its own."""
        several = ["--nproc", str(self.choices.nproc)] if self.choices.nproc > 1 else []
        words = {
            "model": self.model,
            "data": self.data,
            "epochs": self.choices.epochs,
            "batch": BATCH,
            "imgsz": 64,
            "nbs": 4 * BATCH,
            "close_mosaic": 1,
            "optimizer": "AdamW",
            "plots": False,
            "verbose": False,
            "device": "cpu",
            "project": self.folder / "runs",
            "name": run_id,
        }
        self._started = subprocess.Popen(
            [
                *(sys.executable, "-m", "gpuwarden", "train", "--run-id", run_id),
                *("--jobs-directory", str(node), "--checkpoint-every", self.choices.every),
                *("--trainer", "demo.paced:PacedTrainer", *several),
                *(f"{name}={value}" for name, value in words.items()),
            ],
            cwd=programs.ROOT,
            env={
                **os.environ,
                "YOLO_CONFIG_DIR": str(self.folder / "ultralytics"),
                "GPUWARDEN_DEMO_LOADER_SECONDS": str(_STEP_SECONDS),
            },
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / f"{run_id}.log").open("ab"),
            start_new_session=True,
        )
        return self._started

    def close(self) -> None:
        """Leave no training behind, whatever ended this program."""
        if self._started is not None and self._started.poll() is None:
            self._started.kill()  # which its ranks, if it has some, do not survive either
            self._started.wait()

    # -- interruptions

    def interrupt(self, left: int) -> Ended:
        """One attempt, ended at a random moment.

        Args:
            left: interruptions that are still to come, this one included.
        """
        before = self.published()
        began = time.time()
        process = self.start(RUN, self.node)
        number = self.random.choice((signal.SIGKILL, signal.SIGTERM))
        if self.random.random() < _SETUP_SHARE:
            self._wait(process, before, step=self.steps, seconds=_SETUP_SECONDS)
        else:
            done = self.durable()[0]
            share = max(1, 2 * (self.steps - done) // (left + 1))
            step = done + self.random.randint(1, share)
            self._wait(process, before, step=step, seconds=_PATIENCE_SECONDS)
            time.sleep(self.random.uniform(0.0, _STEP_SECONDS))
        family = [process.pid, *_children(process.pid)]
        target = self.random.choice(family[: self.choices.nproc + 1 if len(family) > 1 else 1])
        signalled = time.time()
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, number)
        code = process.wait(_PATIENCE_SECONDS)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while any(Path(f"/proc/{pid}").exists() for pid in family[1:]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes are left: {family}")
            time.sleep(0.05)
        gone = time.time()
        status = self.published()
        said = status if status != before else None
        # One that could not say that it ends has held its card until it was gone.
        ended = said["exit"]["time"] if said and said["exit"] else gone
        step, written = self.durable()
        described = said and job_files.description_path(self.node, RUN).exists()
        cards = self.choices.nproc
        return Ended(
            told=f"{number.name} to {'it' if target == process.pid else 'one rank'}",
            code=code,
            phase=said["phase"] if said else "start",
            step=said["step"] if said else -1,
            durable=step,
            lost=max(0.0, ended - max(began, written)) * cards if described else 0.0,
            gone=gone - signalled,
        )

    def _wait(
        self, process: subprocess.Popen[bytes], before: Any, *, step: int, seconds: float
    ) -> None:
        """Until the attempt has published the step, or the time is over."""
        limit = seconds if seconds > _SETUP_SECONDS else self.random.uniform(0.0, seconds)
        deadline = time.monotonic() + limit
        held = False
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(
                    f"the training ended by itself ({process.returncode}) before it was told to: "
                    f"see {self.folder / RUN}.log, or take more --images"
                )
            if not held:
                alone = self.choices.nproc == 1
                ranks = [process.pid] if alone else _children(process.pid)[: self.choices.nproc]
                if held := self._described() in ranks:  # else a former attempt's
                    self.hold(ranks)
            status = self.published()
            if status and status != before and status["step"] >= step:
                return
            time.sleep(0.02)

    def _described(self) -> int:
        """Pid of the process that the run's description names; 0 without one."""
        try:
            file = job_files.read(job_files.description_path(self.node, RUN))
        except (FileNotFoundError, job_files.JobFileError):
            return 0
        return job_files.RunDescription.decode(file.content).pid

    def published(self) -> Any:
        """The run's status, as its file has it."""
        with contextlib.suppress(FileNotFoundError):
            return json.loads(job_files.read(job_files.status_path(self.node, RUN)).content)
        return None

    def durable(self) -> tuple[int, float]:
        """Step of the newest state on disk, and when it was complete there (Unix time)."""
        manifests = sorted((self.folder / "runs" / RUN / "states").glob("[0-9]*.json"))
        if not manifests:
            return 0, 0.0
        step: int = json.loads(manifests[-1].read_bytes())["step"]
        return step, manifests[-1].stat().st_mtime

    # -- the end

    def finish(self, run_id: str, node: Path) -> int:
        """Train to the end; returns the exit status."""
        return self.start(run_id, node).wait(20 * _PATIENCE_SECONDS)

    def learnt(self, run_id: str) -> tuple[dict[str, Any], list[str]]:
        """Model, EMA and optimizer of the last state; results without their time column."""
        folder = self.folder / "runs" / run_id
        state = torch.load(max((folder / "states").glob("*.pt")), weights_only=True)
        rows = (folder / "results.csv").read_text("utf-8").splitlines()
        parts = {name: state[name] for name in ("model", "ema", "optimizer")}
        return parts, [",".join(cells[:1] + cells[2:]) for cells in map(_cells, rows)]


def _cells(row: str) -> list[str]:
    return row.split(",")


def _children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii")
        return [int(child) for child in text.split()]
    return []


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _reported(page: bytes) -> dict[str, float]:
    """GPU seconds that the exporter counts as lost, by reason."""
    lost: dict[str, float] = {}
    for line in page.decode().splitlines():
        if line.startswith("gpuwarden_lost_gpu_seconds_total{"):
            labels, _, value = line.rpartition(" ")
            reason = labels.partition('reason="')[2].partition('"')[0]
            lost[reason] = lost.get(reason, 0.0) + float(value)
    return lost


@contextlib.contextmanager
def _place(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True)
        yield kept.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="ordeal-") as name:
        yield Path(name)


def main() -> int:
    """Run it; 0 if nothing but the time that was told was lost."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.trainer.ordeal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--times", type=int, default=10, help="interruptions (default: 10)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=240, help="to train on (default: 240)")
    parser.add_argument("--nproc", type=int, default=1, help="processes of the training (CPU)")
    parser.add_argument("--every", default="2s", help="time between periodic states (default: 2s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--folder", type=Path, help="keep everything there; must not exist")
    choices = parser.parse_args()
    os.environ["YOLO_AUTOINSTALL"] = "0"
    with _place(choices.folder) as folder:
        ordeal = Ordeal(folder, choices)
        # Jobs are what stands below this program, and it is not to be taken for a training's own.
        Path("/proc/self/comm").write_text("ordeal")
        node = programs.gpuwarden(Path(sys.executable), folder, ordeal.scenario)
        with contextlib.closing(ordeal), node as exporter:
            return _run(ordeal, exporter)


def _run(ordeal: Ordeal, exporter: programs.Program) -> int:
    choices = ordeal.choices
    print(
        f"{choices.epochs} epochs of {ordeal.steps // choices.epochs} batches, {choices.nproc} "
        f"process(es), a state every {choices.every}, ended {choices.times} times; seed "
        f"{choices.seed}\n\n"
        "| # | told | exit | in | at step | newest state | GPU-s lost | gone after |\n"
        "|--:|---|--:|---|--:|--:|--:|--:|"
    )
    attempts: list[Ended] = []
    for number in range(choices.times):
        attempts.append(ordeal.interrupt(choices.times - number))
        ended = attempts[-1]
        print(
            f"| {number + 1} | {ended.told} | {ended.code} | {ended.phase} | {ended.step} "
            f"| {ended.durable} | {ended.lost:.1f} | {ended.gone:.1f} s |",
            flush=True,
        )
    code = ordeal.finish(RUN, ordeal.node)
    time.sleep(5.0)  # two looks of the exporter
    reported = _reported(exporter.scrape({})[1])
    calm = ordeal.folder / "calm-node"
    (calm / "jobs").mkdir(parents=True)
    undisturbed = ordeal.finish("calm", calm)
    identical = code == undisturbed == 0 and _equal(ordeal.learnt(RUN), ordeal.learnt("calm"))
    measured = sum(ended.lost for ended in attempts)
    told = sum(reported.values())
    by_reason = ", ".join(f"{name} {value:.1f}" for name, value in sorted(reported.items()))
    died = sum(ended.code not in (0, job_files.EXIT_REQUEUE) for ended in attempts)
    close = abs(told - measured) <= _TOLERANCE_SECONDS * max(1, died) * choices.nproc
    print(
        f"\nlast attempt: exit {code}; undisturbed: exit {undisturbed}\n"
        f"model, EMA, optimizer, results: {'identical' if identical else 'DIFFERENT'}\n"
        f"GPU seconds lost: {told:.1f} reported ({by_reason}), {measured:.1f} measured"
        f"{'' if close else ': TOO FAR APART'}"
    )
    return 0 if identical and close else 1


if __name__ == "__main__":
    sys.exit(main())
