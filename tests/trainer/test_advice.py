"""Each known trap is named with its remedy, and a sound training hears nothing."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import pytest

from gpuwarden.trainer import fitting
from gpuwarden.trainer.advice import (
    GIB,
    Adviser,
    Facts,
    advise,
    slow_validation,
    usable_cores,
    usable_memory,
)
from gpuwarden.trainer.fitting import Need
from gpuwarden.trainer.status import StatusBoard

if TYPE_CHECKING:
    from pathlib import Path

SOUND = Facts(
    batch=64,
    imgsz=640,
    card=80 * GIB,
    parameters=26_000_000,
    workers=8,
    cores=16,
    memory=256 * GIB,
    shared=64 * GIB,
    images=118_287,
    model="yolov8m",
    words={"model": "yolov8m.yaml", "batch": "64"},
)


def test_a_sound_training_hears_nothing() -> None:
    """Advice that is always given is read by nobody."""
    assert advise(SOUND) == []
    on_a_cpu = dataclasses.replace(SOUND, card=None, amp=False, workers=0, batch=2)
    assert advise(on_a_cpu) == []


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        (
            {"model": "yolov8x", "card": 24 * GIB, "batch": 64},
            r"batch=64 at imgsz=640 will take about \d+.\d GiB of .* 24.0: batch=\d+ is sure",
        ),
        ({"batch": 8}, "batch=8 is 8 images per card of 80 GiB"),
        ({"batch": 32, "world": 4, "workers": 4}, "batch=32 is 8 images per card"),
        ({"batch": 24, "parameters": 3_000_000}, "a step of so few"),
        ({"amp": False}, "mixed precision is off"),
        ({"workers": 32}, "32 loader workers share 16 CPU cores.*workers=16"),
        ({"world": 4}, "32 loader workers share 16 CPU cores.*workers=4"),
        ({"workers": 0}, "workers=0: the card waits"),
        ({"shared": 64 << 20}, r"shared memory .* has 0.062 GiB.*--shm-size"),
        ({"cache": "ram", "memory": 64 * GIB}, "cache=ram takes about 135 GiB of 64"),
        ({"cache": True, "world": 2, "memory": 999 * GIB}, "by each of 2 ranks"),
        ({"words": {"batch": "-1"}}, "batch=-1 measures what is free"),
        ({"words": {"batch": "0.8"}}, "batch=0.8 measures what is free"),
        ({"words": {"lr0": "0.1"}}, "lr0=0.1 is ignored"),
        ({"plots": True}, "plots are drawn on the training thread"),
    ],
)
def test_a_trap_is_named_with_its_remedy(changes: dict[str, Any], advice: str) -> None:
    """One piece of advice for one fault."""
    pieces = advise(dataclasses.replace(SOUND, **changes))
    assert len(pieces) == 1
    assert re.search(advice, pieces[0]), pieces[0]


def test_what_was_chosen_is_not_argued_with() -> None:
    """Who says plots=True, or names an optimizer, knows."""
    assert advise(dataclasses.replace(SOUND, plots=True, words={"plots": "True"})) == []
    words = {"lr0": "0.1", "optimizer": "SGD"}
    assert advise(dataclasses.replace(SOUND, words=words)) == []


def test_a_slow_validation_is_told_once(
    jobs: Path, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is known only after the first epoch; a short one is nobody's trouble."""
    assert slow_validation(5.0, 10.0) is None
    assert slow_validation(60.0, 40.0) is None
    board = StatusBoard(jobs, "run", clock=clock)
    adviser = Adviser(board)
    for _ in range(3):
        board.enter("train")
        clock.advance(30.0)
        board.enter("validate")
        clock.advance(700.0)
        board.enter("train")
        adviser.epoch_ended()
    assert caplog.text.count("validation took 700 s, training 30 s") == 1


def test_a_containers_limits_count(tmp_path: Path) -> None:
    """The machine's cores and memory are not what a job of it may use."""
    assert usable_cores(tmp_path) >= 1
    (tmp_path / "cpu.max").write_text("50000 100000\n", "ascii")
    (tmp_path / "memory.max").write_text("1048576\n", "ascii")
    assert (usable_cores(tmp_path), usable_memory(tmp_path)) == (1, 1048576)
    (tmp_path / "cpu.max").write_text("max 100000\n", "ascii")
    (tmp_path / "memory.max").write_text("max\n", "ascii")
    assert usable_cores(tmp_path) >= 1
    assert (usable_memory(tmp_path) or 0) > 1048576


def test_the_batch_that_is_told_to_fit_fits() -> None:
    """And the next larger one is not promised; a model of the user's own has no estimate."""
    need = Need(model="yolov8m", batch=512, imgsz=640)
    largest = fitting.largest_batch(need, 24 * GIB)
    assert largest is not None
    assert largest > 1
    fitted = fitting.expected_bytes(dataclasses.replace(need, batch=largest))
    assert fitted is not None
    assert fitted < 24 * GIB
    assert fitting.advice(dataclasses.replace(need, batch=largest), 24 * GIB) is None
    own = dataclasses.replace(need, model="my-own-model")
    assert fitting.largest_batch(own, 24 * GIB) is None
    assert fitting.advice(own, 24 * GIB) is None
