"""Trainings of two and three processes over gloo: interrupted anywhere, they end bit-identical."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from tests.trainer.conftest import REPOSITORY
from tests.trainer.trainings import BATCHES

if TYPE_CHECKING:
    from pathlib import Path

    from tests.trainer.conftest import Material

pytestmark = pytest.mark.training

_LAUNCH = """\
import sys
from gpuwarden.trainer.launching import Launcher
command = [sys.executable, "-m", "tests.trainer.rank_trainings", sys.argv[1]]
sys.exit(Launcher(command, ("cpu",) * int(sys.argv[2]), 30.0).run())
"""
RICH = {"nbs": 32, "close_mosaic": 1, "mixup": 0.3, "multi_scale": 0.5}


def _case(name: str, point: list[Any] | None = None, **others: Any) -> dict[str, Any]:
    plain = {"words": RICH, "order": "stateless", "workers": 0, "rank": None}
    return {"name": name, "point": point, **plain, **others}


def _train(
    folder: Path, material: Material, cases: list[dict[str, Any]], *, world: int = 2
) -> list[dict[str, Any]]:
    """What each rank reports of each case."""
    data = folder / "data.yaml"  # validates on the training images: several batches for each rank
    data.write_text(material.data.read_text("utf-8").replace("images/val", "images/train"), "utf-8")
    (folder / "node" / "jobs").mkdir(parents=True)
    words = material.words(batch=8 if world == 2 else 21)
    del words["data"]
    file = folder / "cases.json"
    asked = [{**case, "words": {**words, **case["words"]}} for case in cases]
    document = {"cases": asked, "material": {"model": str(material.model), "data": str(data)}}
    file.write_text(json.dumps(document), "utf-8")
    done = subprocess.run(
        [sys.executable, "-c", _LAUNCH, str(file), str(world)],
        cwd=REPOSITORY,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    return [json.loads(file.with_suffix(f".{rank}").read_text("utf-8")) for rank in range(world)]


def _assert_identical(results: list[dict[str, Any]], name: str, calm: str) -> None:
    for rank, result in enumerate(results):
        assert result[name]["codes"] == [75, 0], (rank, name)
        assert result[name]["mode"] == "exact"
        assert result[name]["digest"] == result[calm]["digest"], (rank, name)


@pytest.mark.timeout(300)
def test_two_ranks_end_bit_identical_wherever_they_were_interrupted(
    tmp_path: Path, material: Material
) -> None:
    """One told alone or all, in training, in validation, in the final evaluation; workers too."""
    cases = [
        _case("calm"),
        _case("alone", [1, 3], rank=1),
        _case("validation", ["val", 4], rank=0, workers=2),
        _case("final", ["val", 10], rank=1),
    ]
    results = _train(tmp_path, material, cases)
    for name in ("alone", "validation", "final"):
        _assert_identical(results, name, "calm")
    lead = results[0]
    assert lead["validation"]["workers"] == 2
    assert lead["alone"]["left"] == [1, 4]  # one batch later than told: all ranks had to hear
    assert lead["validation"]["left"] == [1, BATCHES]
    assert lead["final"]["steps"] == 0


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("close_mosaic", [0, 1])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_every_kind_of_interruption_of_two_ranks(
    tmp_path: Path, material: Material, accumulate: int, close_mosaic: int
) -> None:
    """Points at and within the epochs, with both orders and with loader workers."""
    words = {"nbs": 8 * accumulate, "close_mosaic": close_mosaic, "multi_scale": 0.5}
    kinds = {"w0": ("stateless", 0), "w2": ("stateless", 2), "own": ("ultralytics", 0)}
    points = {
        "first": [0, 1],
        "done": [0, BATCHES],
        "epoch": ["epoch", 0],
        "within": [1, 3],
        "closing": ["epoch", 1],
        "last": [2, 4],
        "final": ["val", 10],
    }
    cases = []
    for (kind, (order, workers)), who in zip(kinds.items(), (None, 1, 0), strict=True):
        shared = {"words": words, "order": order, "workers": workers}
        cases.append(_case(f"{kind}-calm", **shared))
        cases += [
            _case(f"{kind}-{name}", point, rank=who, **shared) for name, point in points.items()
        ]
    results = _train(tmp_path, material, cases)
    for kind, name in product(kinds, points):
        _assert_identical(results, f"{kind}-{name}", f"{kind}-calm")
    for rank in results:
        assert rank["w0-calm"]["digest"] == rank["w2-calm"]["digest"]


@pytest.mark.sweep
def test_three_ranks_end_bit_identical(tmp_path: Path, material: Material) -> None:
    """Images that cannot be shared evenly, a last batch that is short, sums of three."""
    cases = [_case("calm"), _case("run", [1, 1], rank=2)]
    _assert_identical(_train(tmp_path, material, cases, world=3), "run", "calm")
