"""What a save costs the training thread: `python -m bench.trainer.saving [MODEL ...]`.

The loop may stand still for the copy alone; checks, serialising, sum, write and fsync are on
another thread. Measured: the copy by itself, the whole of `Saver.save` in the background, how long
the write takes, and by how much the loop's own steps are slower while it goes on.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gpuwarden.clock import SystemClock
from gpuwarden.trainer import captures
from gpuwarden.trainer.saving import Saver
from gpuwarden.trainer.states import Manifest, Position, StateStore
from gpuwarden.trainer.status import StatusBoard

ROUNDS = 5


def state_of(model: str) -> dict[str, Any]:
    """Weights, EMA and momentum of a model, as a training has them."""
    ultralytics: Any = importlib.import_module("ultralytics")
    weights = dict(ultralytics.YOLO(model).model.state_dict())
    moments = {
        at: {"momentum_buffer": torch.rand_like(value.float())}
        for at, value in enumerate(weights.values())
    }
    return {"model": weights, "ema": dict(weights), "optimizer": {"state": moments}}


def draft(step: int) -> Manifest:
    """A manifest for a state that nobody will resume."""
    return Manifest(
        lineage="",
        epoch=0,
        batch=step,
        step=step,
        batches=10**6,
        epochs=1,
        batch_size=1,
        dataset="",
        order="",
        exact=True,
        reason="bench",
        time=0.0,
    )


def steps(seconds: float) -> list[float]:
    """How long steps of a small computation take, one after the other."""
    one = torch.rand(256, 256)
    taken = []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        for _ in range(20):
            one = torch.tanh(one @ one)
        taken.append(time.perf_counter() - began)
    return taken


def measure(model: str, folder: Path) -> str:
    """One row of the table, in milliseconds."""
    state = state_of(model)
    states = folder / model
    states.mkdir()
    clock = SystemClock()
    saver = Saver(
        StateStore(states, "bench"),
        StatusBoard(folder, "bench", clock=clock),
        every=300,
        clock=clock,
    )
    alone = statistics.median(steps(2.0))
    copies, stalls, writes, slower = [], [], [], []
    for at in range(1, ROUNDS + 1):
        began = time.perf_counter()
        captures.plain(state)
        copies.append(time.perf_counter() - began)
        began = time.perf_counter()
        saver.save(
            Position(0, at),
            capture=lambda: captures.plain(state),
            draft=draft(at),
            background=True,
        )
        stalls.append(time.perf_counter() - began)
        slower += steps(0.3)
        saver.collect(wait=True)
        writes.append(saver.save_seconds)
    size = max(path.stat().st_size for path in states.glob("*.pt")) / 1e6
    mid = [1e3 * statistics.median(values) for values in (copies, stalls, writes)]
    return (
        f"| {model} | {size:.0f} | {mid[0]:.1f} | {mid[1]:.1f} | {mid[2]:.0f} | "
        f"{1e3 * alone:.2f} | {1e3 * statistics.median(slower):.2f} | {1e3 * max(slower):.0f} |"
    )


def main(models: list[str]) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(
        "| model | MB | copy ms | loop stands still ms | durable after ms | step alone ms |", end=""
    )
    print(" step while writing ms | longest ms |\n|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "jobs").mkdir()
        for model in models:
            print(measure(model, Path(folder)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["yolov8n.yaml", "yolov8m.yaml"])
