"""Estimates against public figures: as good as docs/estimates.md says, and the page is current."""

from __future__ import annotations

import dataclasses
import math

import pytest
from bench.trainer import estimates as scores

from gpuwarden.estimate_tables import tables
from gpuwarden.estimates import GIB


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
