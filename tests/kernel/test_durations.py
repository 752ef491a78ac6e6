"""Durations follow Prometheus' grammar."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden import durations


@given(st.integers(0, 10**12))
def test_what_is_rendered_is_read_back(milliseconds: int) -> None:
    """Every whole number of milliseconds survives a round trip."""
    assert durations.parse(durations.render(milliseconds / 1000)) == pytest.approx(
        milliseconds / 1000, abs=1e-9
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0s", 0), ("90s", 90), ("1h30m", 5400), ("250ms", 0.25), ("7d", 604800), ("5m", 300)],
)
def test_durations_are_seconds(text: str, seconds: float) -> None:
    """Each unit of the grammar has its length."""
    assert durations.parse(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "1.5h", "10 minutes", "1m1h", "-5m", "5min", "1:30"])
def test_other_notations_are_refused(text: str) -> None:
    """Notations that Prometheus refuses are refused, with a remedy."""
    with pytest.raises(ValueError, match=r"write (it like 30s|5s)|write it like"):
        durations.parse(text)


def test_a_bare_number_is_told_its_unit_is_missing() -> None:
    """The commonest mistake gets its own sentence."""
    with pytest.raises(ValueError, match="'300' lacks a unit: write 300s, 300m or 300h"):
        durations.parse("300")


def test_nobody_waits_for_longer_than_a_century() -> None:
    """Of a moment past the year 9999 there is no date, so that no notice could be written."""
    assert durations.parse("100y") == durations.MAX_SECONDS
    with pytest.raises(ValueError, match="'9000y' is too long: at most 100y"):
        durations.parse("9000y")
