"""Numbers carry their units, and limits are exact."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden import quantities
from gpuwarden.quantities import Deviation, Direction, Quantity, Unit, Window


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("5%", 0.05, Unit.RATIO),
        ("82 %", 0.82, Unit.RATIO),
        ("10.5GiB", 10.5 * 2**30, Unit.BYTES),
        ("40 GB", 40e9, Unit.BYTES),
        ("78 img/s", 78, Unit.IMAGES_PER_SECOND),
        ("20MiB/s", 20 * 2**20, Unit.BYTES_PER_SECOND),
        ("250W", 250, Unit.WATTS),
        ("85C", 85, Unit.CELSIUS),
        ("0.5 cores", 0.5, Unit.CORES),
        ("0.5 steps/s", 0.5, Unit.STEPS_PER_SECOND),
        (3, 3, Unit.COUNT),
        ("3", 3, Unit.COUNT),
    ],
)
def test_a_quantity_is_read_into_its_base_unit(text: object, value: float, unit: Unit) -> None:
    """Exactly: 82 % is 0.82, not 0.8200000000000001."""
    assert quantities.parse_quantity(text) == Quantity(value, unit)


@pytest.mark.parametrize(
    "text", ["5 percent", "-5%", "5%%", "1e3%", "", "GiB", "5 gib", True, None, [5], float("nan")]
)
def test_what_is_no_quantity_is_refused(text: object) -> None:
    """With a sentence, never with a guess."""
    with pytest.raises(quantities.MalformedQuantity):
        quantities.parse_quantity(text)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "5 lacks a unit: write it like 5%"),
        ("5", "5 lacks a unit: write it like 5%"),
        ("5GiB", "5GiB is in bytes, not in ratio: write 5%"),
    ],
)
def test_a_bare_number_is_refused_where_a_unit_belongs(value: object, message: str) -> None:
    """`at_most: 5` could be 5 % or 500 %."""
    with pytest.raises(quantities.MalformedQuantity) as caught:
        quantities.parse_ratio(value)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("value", "like"),
    [(5, "5s, 5m or 5h"), (1.5, "90s, 90m or 90h"), (float("inf"), "90s"), (-5, "90s")],
)
def test_what_is_told_to_be_written_can_be_read(value: float, like: str) -> None:
    """1.5h is no duration either, and infs no word."""
    with pytest.raises(quantities.MalformedQuantity, match=f"lacks a unit: write {like}"):
        quantities.parse_duration(value)


def test_a_window_is_a_time_or_a_number_of_samples() -> None:
    """And says how long it is, with half a scrape of slack for samples."""
    assert quantities.parse_window("5m") == Window(seconds=300)
    assert quantities.parse_window("3 samples") == Window(samples=3)
    assert quantities.parse_window("1 sample") == Window(samples=1)
    assert Window(samples=3).length(5) == 17.5
    assert Window(seconds=300).length(5) == 300
    for bad in ("0 samples", "0s", 5, "5", "samples", None):
        with pytest.raises(quantities.MalformedQuantity):
            quantities.parse_window(bad)


def test_a_deviation_has_a_side_a_tolerance_and_maybe_a_floor() -> None:
    """As it is written, so it is shown."""
    assert quantities.parse_deviation("below 15%") == Deviation(Direction.BELOW, 0.15)
    deviation = quantities.parse_deviation("above 15%, at least 2GiB")
    assert deviation.floor == Quantity(2 * 2**30, Unit.BYTES)
    assert str(deviation) == "above 15 %, at least 2 GiB"
    for bad in ("15%", "under 15%", "below 15", "below 15%, 2GiB", None):
        with pytest.raises(quantities.MalformedQuantity):
            quantities.parse_deviation(bad)


@pytest.mark.parametrize(
    ("direction", "value", "outside"),
    [
        (Direction.ABOVE, 115, False),
        (Direction.ABOVE, 115.001, True),
        (Direction.ABOVE, 10, False),
        (Direction.BELOW, 85, False),
        (Direction.BELOW, 84.999, True),
        (Direction.BELOW, 1000, False),
        (Direction.OUTSIDE, 115, False),
        (Direction.OUTSIDE, 85, False),
        (Direction.OUTSIDE, 84, True),
        (Direction.OUTSIDE, 116, True),
    ],
)
def test_exactly_at_the_limit_is_inside(direction: Direction, value: float, outside: bool) -> None:
    """15 % of 100."""
    assert Deviation(direction, 0.15).exceeded(value, 100) is outside


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 99))
def test_the_limit_itself_is_inside_whatever_the_numbers(expected: int, percent: int) -> None:
    """Floating point must not decide."""
    tolerance = percent / 100
    edge = expected * (1 + tolerance)
    assert not Deviation(Direction.ABOVE, tolerance).exceeded(edge, expected)
    edge = expected * (1 - tolerance)
    assert not Deviation(Direction.BELOW, tolerance).exceeded(edge, expected)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.05, Unit.RATIO, "5 %"),
        (0.9266, Unit.RATIO, "92.7 %"),
        (0, Unit.RATIO, "0 %"),
        (30.5 * 2**30, Unit.BYTES, "30.5 GiB"),
        (512, Unit.BYTES, "512 B"),
        (2 * 2**20, Unit.BYTES_PER_SECOND, "2 MiB/s"),
        (7.912, Unit.IMAGES_PER_SECOND, "7.91 img/s"),
        (12345.6, Unit.COUNT, "12346"),
        (0.00012, Unit.CORES, "0.00012 cores"),
    ],
)
def test_values_are_shown_with_three_digits(value: float, unit: Unit, text: str) -> None:
    """Never in exponential notation."""
    assert quantities.render(value, unit) == text
