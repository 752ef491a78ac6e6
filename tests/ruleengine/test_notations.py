"""Series are read as promtool reads them, and what is no series is refused with what to write."""

from __future__ import annotations

import math

import pytest

from gpuwarden.ruleengine.notations import (
    STALE,
    MalformedNotation,
    Value,
    parse_selector,
    parse_values,
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1 2 3", (1, 2, 3)),
        ("0+10x3", (0, 10, 20, 30)),
        ("-2+4x3", (-2, 2, 6, 10)),
        ("1-2x4", (1, -1, -3, -5, -7)),
        ("7x2", (7, 7, 7)),
        ("3x0", (3,)),
        ("1 _ 2", (1, None, 2)),
        ("_x3 5", (None, None, None, 5)),
        ("4 stale _", (4, STALE, None)),
        (" 1e3\n+Inf  -Inf ", (1000, math.inf, -math.inf)),
        ("Infx1", (math.inf, math.inf)),
        (".5+.5x1", None),
        ("0.5+0.25x2", (0.5, 0.75, 1)),
    ],
)
def test_values_are_those_of_promtool(text: str, values: tuple[Value, ...] | None) -> None:
    """`axn` and `a+bxn` are n+1 values, `_xn` is n lost scrapes."""
    if values is None:
        with pytest.raises(MalformedNotation):
            parse_values(text)
    else:
        assert parse_values(text) == values


def test_nan_is_a_number_and_no_gap() -> None:
    """As PromQL has it."""
    (value,) = parse_values("NaN")
    assert isinstance(value, float)
    assert math.isnan(value)


@pytest.mark.parametrize("text", ["", " ", "five", "1+x3", "1x", "x3", "_x", "1,2", "1x1000000"])
def test_what_is_no_value_is_refused(text: str) -> None:
    """With what to write, and before it fills the memory."""
    with pytest.raises(MalformedNotation):
        parse_values(text)


@pytest.mark.parametrize(
    ("text", "metric", "labels"),
    [
        ("up", "up", {}),
        ("up{}", "up", {}),
        ('up{job="a", instance="b"}', "up", {"instance": "b", "job": "a"}),
        (' up{a="x",} ', "up", {"a": "x"}),
        (r'm:x{a="q\"}, b",c="\\"}', "m:x", {"a": 'q"}, b', "c": "\\"}),
        ('up{a="",b="c"}', "up", {"b": "c"}),
    ],
)
def test_a_series_is_its_name_and_labels(text: str, metric: str, labels: dict[str, str]) -> None:
    """In the order of labels, so that two spellings are one series; an empty label is none."""
    found = parse_selector(text)
    assert found == (metric, tuple(sorted(labels.items())))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "1up",
        "up{",
        "up{a}",
        "up{a=b}",
        'up{a="x" b="y"}',
        'up{a="x",a="y"}',
        'up{a=~"x"}',
        'up{__name__="x"}',
        r'up{a="\q"}',
        "up[5m]",
    ],
)
def test_what_is_no_series_is_refused(text: str) -> None:
    """A matcher or a range is not a series."""
    with pytest.raises(MalformedNotation):
        parse_selector(text)
