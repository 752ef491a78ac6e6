"""Durations in Prometheus' grammar: `1h30m`, `250ms`, `7d`; whole numbers, units descending."""

from __future__ import annotations

import functools
import re

# https://prometheus.io/docs/prometheus/latest/querying/basics/#float-literals-and-time-durations
_UNITS: tuple[tuple[str, float], ...] = (
    ("y", 365 * 86400.0),
    ("w", 7 * 86400.0),
    ("d", 86400.0),
    ("h", 3600.0),
    ("m", 60.0),
    ("s", 1.0),
    ("ms", 0.001),
)
MAX_SECONDS = 100 * 365 * 86400.0
"""Longer than any run; a moment that lies further ahead may be past the last that has a date."""
_PATTERN = re.compile(
    "".join(rf"(?:(?P<{unit}>[0-9]{{1,9}}){unit}(?![a-z]))?" for unit, _ in _UNITS)
)


def parse(text: str) -> float:
    """Read a duration.

    Args:
        text: such as `90s`, `1h30m` or `0s`; a unit is mandatory.

    Returns:
        Seconds.

    Raises:
        ValueError: with a sentence that says how to write it.
    """
    match = _PATTERN.fullmatch(text)
    if match is None or not text:
        if re.fullmatch(r"[0-9]+", text):
            raise ValueError(f"{text!r} lacks a unit: write {text}s, {text}m or {text}h")
        raise ValueError(f"{text!r} is not a duration: write it like 30s, 5m or 1h30m")
    found = sum(float(match[unit]) * seconds for unit, seconds in _UNITS if match[unit])
    if found > MAX_SECONDS:
        raise ValueError(f"{text!r} is too long: at most 100y")
    return found


@functools.lru_cache(maxsize=8192)
def render(seconds: float) -> str:
    """Write seconds as the shortest exact duration, rounded to milliseconds.

    Raises:
        ValueError: if `seconds` is negative.
    """
    if seconds < 0:
        raise ValueError(f"a duration cannot be negative: {seconds}")
    rest = round(seconds * 1000)
    parts = []
    for unit, size in _UNITS:
        if unit in ("y", "w"):
            continue  # weeks and years are read, but 10d says more to a person than 1w3d
        step = round(size * 1000)
        count, rest = divmod(rest, step)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
