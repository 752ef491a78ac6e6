"""The models' table is what is measured now."""

from __future__ import annotations

import json

import pytest
from bench.trainer.slopes import TABLE, differences, names

from gpuwarden.trainer import slopes


def test_the_table_has_every_model_that_it_is_written_for() -> None:
    """No more and no fewer, in the same order."""
    assert list(json.loads(TABLE.read_text("utf-8"))["models"]) == names()


def check(name: str) -> None:
    """A row against the same model, measured anew."""
    shipped = json.loads(TABLE.read_text("utf-8"))["models"][name]
    assert differences(shipped, slopes.measure(f"{name}.yaml")) == []


def test_a_row_that_differs_is_told() -> None:
    """By its field; half a percent is no difference."""
    row = {"task": "detect", "parameters": 1000}
    assert differences(row, {"task": "detect", "parameters": 1004}) == []
    assert differences(row, {"task": "pose", "parameters": 1010}) == [
        "task is detect, measured pose",
        "parameters is 1000, measured 1010",
    ]


def test_the_table_is_what_is_measured_now() -> None:
    """Of one small model; the others are in the sweep."""
    check("yolov8n-cls")


@pytest.mark.sweep
@pytest.mark.parametrize("name", names())
def test_all_of_the_table_is_what_is_measured_now(name: str) -> None:
    """`python -m bench.trainer.slopes` writes it."""
    check(name)
