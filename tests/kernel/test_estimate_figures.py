"""Estimates against public figures: as good as docs/estimates.md says, and the page is current."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from bench.trainer import estimates as scores

from gpuwarden.estimate_tables import find_model, needed, tables
from gpuwarden.estimates import GIB, Memory, ModelCosts, Workload, memory


def test_the_shipped_constants_are_fitted_and_good_enough() -> None:
    """Median errors of at most 20 % with each card left out, and bands that hold what they say."""
    text, faults = scores.report()
    assert faults == []
    page = scores.PAGE.read_text("utf-8")
    written = page[page.index(scores.BEGIN) + len(scores.BEGIN) : page.index(scores.END)]
    assert written == f"\n{text}"


def test_a_fit_finds_the_constants_that_made_the_figures() -> None:
    """Figures made by known constants lead back to them, from anywhere."""
    figures, _ = scores.load()
    truth = dataclasses.replace(tables().constants, base_bytes=0.4 * GIB, activation_factor=1.5)
    made = [
        dataclasses.replace(item, memory=scores.predicted_memory(item, truth))
        for item in figures
        if item.memory is not None
    ]
    start = dataclasses.replace(truth, base_bytes=0.1 * GIB, activation_factor=1.0)
    found = scores.fit(made, start, what="memory")
    assert found.base_bytes == pytest.approx(truth.base_bytes, rel=0.02)
    assert found.activation_factor == pytest.approx(truth.activation_factor, rel=0.01)


def test_a_card_is_scored_by_constants_that_never_saw_it() -> None:
    """Figures of one card that are all wrong by two do not move the constants it is scored by."""
    figures, _ = scores.load()
    used = [item for item in figures if item.images is not None and not item.reason]
    wrong = [
        dataclasses.replace(item, images=2 * item.images)
        if item.gpu.name == "T4" and item.images is not None
        else item
        for item in used
    ]
    start = tables().constants
    assert (
        scores.left_out(wrong, start, what="speed")["T4"]
        == scores.left_out(used, start, what="speed")["T4"]
    )


def test_every_figure_names_its_source_and_is_within_reason() -> None:
    """Known cards and models, numbers that somebody could have measured, reasons where left out."""
    figures, largest = scores.load()
    assert len(figures) >= 45
    assert len({item.gpu.name for item in figures}) >= 10
    for item in (*figures, *largest):
        assert item.source
        for value in (item.memory, item.images):
            assert value is None or (math.isfinite(value) and value > 0)
    for item in figures:
        assert item.memory is not None or item.images is not None
        assert item.memory is None or item.memory < item.gpu.memory


# Model, batch, pixels, what else is known, and GiB that torch reserves.
LATER_FIGURES: list[tuple[str, int, int, dict[str, Any], float]] = [
    # A public training script of 2025: batch sizes that fit a card of 12 GB, with their memory.
    ("yolo11s", 10, 1280, {}, 11.3),
    ("yolo11m", 5, 1280, {}, 10.9),
    ("yolo11l", 4, 1280, {}, 11.3),
    ("yolo11l", 3, 1280, {}, 8.7),
    # ultralytics pull request 20893, on a GTX 1650: AMP is off, since theirs is broken.
    ("yolov8s-seg", 8, 640, {"amp": False}, 5.23 / 1.0737),
    # ultralytics issue 1854.
    ("yolov8x", 16, 640, {"gpus": 8, "optimizer": "sgd"}, 2.95 / 1.0737),
]


def test_figures_that_the_fit_never_saw_lie_in_the_band() -> None:
    """Looked for after the constants were fitted: all but one, and that one not by far."""
    ratios = []
    for model, batch, imgsz, words, gib in LATER_FIGURES:
        found = find_model(model)
        assert isinstance(found, ModelCosts)
        workload = Workload(batch=batch, imgsz=imgsz, **words)
        needed_here = memory(found, workload, tables().constants).reserved.expected / GIB
        ratios.append(max(needed_here / gib, gib / needed_here))
    within = [ratio for ratio in ratios if ratio <= 1 + tables().constants.memory_error]
    assert len(within) >= len(ratios) - 1
    assert max(ratios) < 1.3


@pytest.mark.parametrize(
    ("model", "batch", "imgsz"),
    [
        *(("yolo11x", 1, 1920), ("yolo11l", 1, 1920), ("yolo11m", 2, 1920), ("yolo11n", 6, 1920)),
        *(("yolo11s", 9, 1280), ("yolo11m", 5, 1280), ("yolo11l", 4, 1280)),
        *(("yolo11l", 5, 1088), ("yolo11s", 15, 1088), ("yolo11l", 8, 960), ("yolo11x", 11, 640)),
    ],
)
def test_what_is_known_to_fill_a_card_is_not_said_to_need_more_than_it_has(
    model: str, batch: int, imgsz: int
) -> None:
    """The largest batches of the same script; the default rule will-not-fit asks for 90 %."""
    found = needed(model, batch, imgsz=imgsz, amp=True)
    assert isinstance(found, Memory)
    assert found.total.low <= 0.9 * 12 * GIB
    more = needed(model, 3 * batch, imgsz=imgsz, amp=True)
    assert isinstance(more, Memory)
    assert more.total.low > 0.9 * 12 * GIB
