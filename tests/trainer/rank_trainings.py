"""Trainings of several ranks, one after the other in the same processes; run by the launcher.

Reads cases from a JSON file and writes what each rank has learnt beside it: `<file>.<rank>`. A case
is `{"name", "words", "order", "workers", "point", "rank"}`; `point` is where the first of its two
attempts is told to leave: `null` (there is one, undisturbed), `[epoch, batch]` (when so many
batches are done), `["epoch", n]` (when epoch n is validated), or `["val", n]` (in the so-manieth
batch of the validations). `rank` is who is told, or null for all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tests.trainer.many_workers import ManyWorkers
from tests.trainer.trainings import digest_of
from ultralytics import YOLO

from gpuwarden.trainer import LeftTraining, attach, ranks

if TYPE_CHECKING:
    from collections.abc import Callable


def _hooks(point: list[Any] | None) -> dict[str, Callable[[Any], None]]:
    """Raises the signal at the point; validators come with another argument than trainers."""
    if point is None:
        return {}
    if point[0] == "val":
        seen: list[int] = []

        def in_validation(_validator: Any) -> None:
            seen.append(1)
            if len(seen) == point[1]:
                signal.raise_signal(signal.SIGTERM)

        return {"on_val_batch_end": in_validation}

    def at(trainer: Any) -> None:
        done = ["epoch", trainer.epoch]
        if point[0] != "epoch":
            done = [trainer.epoch, trainer.gpuwarden.batch + 1]
        if done == point:
            signal.raise_signal(signal.SIGTERM)

    return {"on_fit_epoch_end" if point[0] == "epoch" else "on_train_batch_end": at}


def run(case: dict[str, Any], material: dict[str, str], folder: Path) -> dict[str, Any]:
    """What the case has left on this rank: sums, statuses, steps."""
    codes, model, left_at = [], None, None
    point = case["point"]
    told = case["rank"] in (None, int(os.environ["RANK"]))
    interrupted = [_hooks(point) if told else {}] if point else []
    for hooks in [*interrupted, {}]:
        torch.manual_seed(0)
        model = YOLO(material["model"])
        attach(
            model,
            run_id=case["name"],
            jobs_directory=folder / "node",
            data_order=case["order"],
        )
        for event, hook in hooks.items():
            model.add_callback(event, hook)
        os.environ["TEST_WORKERS"] = str(case["workers"])
        words = {
            "data": material["data"],
            "project": str(folder / "runs"),
            "name": case["name"],
            "device": "cpu",
            **case["words"],
        }
        try:
            model.train(trainer=ManyWorkers, **words)
            codes.append(0)
        except LeftTraining as left:
            codes.append(int(left.code or 0))
            newest = model.trainer.gpuwarden_session._store.manifests()
            left_at = [newest[0].epoch, newest[0].batch] if newest else None
    trainer: Any = model.trainer if model is not None else None
    session = trainer.gpuwarden_session
    return {
        "codes": codes,
        "left": left_at,
        "digest": digest_of(trainer),
        "steps": session.board.status.counters.steps,
        "mode": trainer.gpuwarden.mode,
        "workers": trainer.train_loader.num_workers,
    }


def main() -> None:
    """All cases of the file."""
    file = Path(sys.argv[1])
    asked = json.loads(file.read_text("utf-8"))
    ranks.bind()
    results = {case["name"]: run(case, asked["material"], file.parent) for case in asked["cases"]}
    file.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(results), "utf-8")


if __name__ == "__main__":
    main()
