"""Numbers with units, as operators write them: `5%`, `10.5GiB`, `78 img/s`, `3 samples`, `1h30m`.

A bare number where a unit belongs is refused: `at_most: 5` could mean 5 % or 500 %.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from enum import StrEnum

from gpuwarden import durations


class MalformedQuantity(ValueError):
    """What was written is not the number with a unit that is needed here."""


class Unit(StrEnum):
    """What a number counts; values are kept in these base units."""

    RATIO = "ratio"
    BYTES = "bytes"
    BYTES_PER_SECOND = "bytes per second"
    IMAGES_PER_SECOND = "images per second"
    STEPS_PER_SECOND = "steps per second"
    WATTS = "watts"
    CELSIUS = "degrees celsius"
    CORES = "cores"
    COUNT = "count"


EXAMPLES: dict[Unit, str] = {
    Unit.RATIO: "5%",
    Unit.BYTES: "10.5GiB",
    Unit.BYTES_PER_SECOND: "20MiB/s",
    Unit.IMAGES_PER_SECOND: "78 img/s",
    Unit.STEPS_PER_SECOND: "0.5 steps/s",
    Unit.WATTS: "250W",
    Unit.CELSIUS: "85C",
    Unit.CORES: "0.5 cores",
    Unit.COUNT: "3",
}
"""How a quantity of each unit is written; used in messages and in the reference."""

_BINARY = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_DECIMAL = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}

_SUFFIXES: dict[str, tuple[Unit, float]] = {
    "%": (Unit.RATIO, 0.01),
    **{name: (Unit.BYTES, size) for name, size in (_BINARY | _DECIMAL).items()},
    **{f"{name}/s": (Unit.BYTES_PER_SECOND, size) for name, size in (_BINARY | _DECIMAL).items()},
    "img/s": (Unit.IMAGES_PER_SECOND, 1.0),
    "steps/s": (Unit.STEPS_PER_SECOND, 1.0),
    "W": (Unit.WATTS, 1.0),
    "C": (Unit.CELSIUS, 1.0),
    "cores": (Unit.CORES, 1.0),
    "core": (Unit.CORES, 1.0),
}

_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,9})?"
_QUANTITY = re.compile(rf"(?P<number>{_NUMBER})\s?(?P<suffix>[A-Za-z%][A-Za-z/]*)?")
_SAMPLES = re.compile(r"(?P<count>[0-9]{1,4})\s?samples?")
_DEVIATION = re.compile(
    rf"(?P<direction>below|above|outside)\s+(?P<tolerance>{_NUMBER}\s?%)"
    r"(?:,\s?at least\s+(?P<floor>\S.*))?"
)

QUANTITY_PATTERN = rf"^{_NUMBER}\s?[A-Za-z%][A-Za-z/]*$"
"""The shape of a quantity, for the JSON schema."""
WINDOW_PATTERN = r"^([0-9]+ ?samples?|([0-9]+(y|w|d|h|m|s|ms))+)$"
"""The shape of a window, for the JSON schema."""
DURATION_PATTERN = r"^([0-9]+(y|w|d|h|ms|m|s))+$"
"""The shape of a duration, for the JSON schema."""
DEVIATION_PATTERN = r"^(below|above|outside) +[0-9.]+ ?%(, ?at least .+)?$"
"""The shape of a deviation, for the JSON schema."""


@dataclass(frozen=True, slots=True, order=True)
class Quantity:
    """A number in a base unit.

    Attributes:
        value: in `unit`; finite and not negative.
        unit: what it counts.
    """

    value: float
    unit: Unit

    def __str__(self) -> str:
        return render(self.value, self.unit)


@dataclass(frozen=True, slots=True)
class Window:
    """How far back a condition looks: a length of time, or the last N scrapes.

    Attributes:
        seconds: length, 0 where `samples` is given.
        samples: number of scrapes, or None.
    """

    seconds: float = 0.0
    samples: int | None = None

    def __str__(self) -> str:
        return durations.render(self.seconds) if self.samples is None else f"{self.samples} samples"

    def length(self, scrape_interval: float) -> float:
        """Seconds that the window covers, half a scrape of slack included for `samples`.

        Prometheus 2 keeps both ends of a window and 3 only the newer one; with half a scrape of
        slack both see at least N samples.
        """
        return self.seconds if self.samples is None else (self.samples + 0.5) * scrape_interval


class Direction(StrEnum):
    """On which side of an expectation a value may be wrong."""

    BELOW = "below"
    ABOVE = "above"
    OUTSIDE = "outside"


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far a value may be from its expectation.

    Attributes:
        direction: the side that counts.
        tolerance: ratio of the expectation.
        floor: a difference up to this never counts, in the unit of the value; or None.
    """

    direction: Direction
    tolerance: float
    floor: Quantity | None = None

    def __str__(self) -> str:
        text = f"{self.direction} {render(self.tolerance, Unit.RATIO)}"
        return text if self.floor is None else f"{text}, at least {self.floor}"

    def exceeded(self, value: float, expected: float, *, tolerance: float | None = None) -> bool:
        """Whether a value is outside; exactly at the limit is inside.

        Args:
            value: measured.
            expected: in the same unit.
            tolerance: a wider tolerance of the profile, or None.
        """
        wide = max(self.tolerance, tolerance or 0.0)
        limit = max(wide * expected, self.floor.value if self.floor else 0.0)
        difference = value - expected
        # 115 against 100 with 15 % must be inside although 0.15 * 100 is 14.999...
        if math.isclose(abs(difference), limit, rel_tol=1e-9):
            return False
        if self.direction is Direction.BELOW:
            return -difference > limit
        if self.direction is Direction.ABOVE:
            return difference > limit
        return abs(difference) > limit


def parse_duration(value: object) -> float:
    """Read a duration in Prometheus' grammar.

    Returns:
        Seconds.

    Raises:
        MalformedQuantity: naming what to write.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise MalformedQuantity("must be a duration, such as 30s, 5m or 1h30m")
    if isinstance(value, (int, float)):
        # 1.5h is none either, and infs is no word.
        number = value if isinstance(value, int) and value >= 0 else 90
        raise MalformedQuantity(f"{value} lacks a unit: write {number}s, {number}m or {number}h")
    try:
        return durations.parse(value)
    except ValueError as error:
        raise MalformedQuantity(str(error)) from error


def parse_ratio(value: object) -> float:
    """Read a percentage.

    Returns:
        A ratio; 1 is 100 %.

    Raises:
        MalformedQuantity: naming what to write.
    """
    return _expect(value, Unit.RATIO).value


def parse_bytes(value: object) -> float:
    """Read a size such as `10.5GiB`.

    Returns:
        Bytes.

    Raises:
        MalformedQuantity: naming what to write.
    """
    return _expect(value, Unit.BYTES).value


def parse_throughput(value: object) -> float:
    """Read a throughput such as `78 img/s`.

    Returns:
        Images per second.

    Raises:
        MalformedQuantity: naming what to write.
    """
    return _expect(value, Unit.IMAGES_PER_SECOND).value


def parse_quantity(value: object) -> Quantity:
    """Read a number with its unit; a bare number is a count.

    Raises:
        MalformedQuantity: naming what to write.
    """
    if isinstance(value, Quantity):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise MalformedQuantity("must be a number with its unit, such as 5%, 10GiB or 78 img/s")
    if isinstance(value, (int, float)):
        if not math.isfinite(value) or value < 0:
            raise MalformedQuantity(f"{value} must be a finite number that is not negative")
        return Quantity(float(value), Unit.COUNT)
    match = _QUANTITY.fullmatch(value.strip())
    if match is None:
        raise MalformedQuantity(
            f"{value!r} is not a quantity: write it like 5%, 10.5GiB or 78 img/s"
        )
    suffix = match["suffix"]
    if suffix is None:
        return Quantity(float(match["number"]), Unit.COUNT)
    if suffix not in _SUFFIXES:
        raise MalformedQuantity(f"{suffix!r} is not a unit: {', '.join(_SUFFIXES)} are")
    unit, factor = _SUFFIXES[suffix]
    number = float(match["number"])
    # 82 * 0.01 is 0.8200000000000001; dividing is exact to the last digit that was written.
    return Quantity(number / 100 if unit is Unit.RATIO else number * factor, unit)


def parse_window(value: object) -> Window:
    """Read a window: `5m` or `3 samples`.

    Raises:
        MalformedQuantity: naming what to write.
    """
    if isinstance(value, Window):
        return value
    match = _SAMPLES.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        count = int(match["count"])
        if count == 0:
            raise MalformedQuantity("a window of 0 samples shows nothing: write at least 1 sample")
        return Window(samples=count)
    if isinstance(value, int) and not isinstance(value, bool):
        raise MalformedQuantity(
            f"{value} lacks a unit: write {value}s, {value}m or '{value} samples'"
        )
    seconds = parse_duration(value)
    if seconds <= 0:
        raise MalformedQuantity("a window of no length shows nothing")
    return Window(seconds=seconds)


def parse_deviation(value: object) -> Deviation:
    """Read a deviation: `below 15%`, `above 15%, at least 2GiB`, `outside 10%`.

    Raises:
        MalformedQuantity: naming what to write.
    """
    if isinstance(value, Deviation):
        return value
    match = _DEVIATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise MalformedQuantity(
            f"{value!r} is not a deviation: write it like 'below 15%', 'above 15%', "
            "'outside 15%' or 'above 15%, at least 2GiB'"
        )
    return Deviation(
        Direction(match["direction"]),
        parse_ratio(match["tolerance"]),
        parse_quantity(match["floor"]) if match["floor"] else None,
    )


@functools.lru_cache(maxsize=8192)
def render(value: float, unit: Unit) -> str:
    """Write a value for people, with three significant digits.

    Remembered, since a tick writes the same limits once for every job of the fleet.
    """
    if unit is Unit.RATIO:
        return f"{_digits(value * 100)} %"
    if unit in (Unit.BYTES, Unit.BYTES_PER_SECOND):
        per = "/s" if unit is Unit.BYTES_PER_SECOND else ""
        for name in reversed(_BINARY):
            if abs(value) >= _BINARY[name]:
                return f"{_digits(value / _BINARY[name])} {name}{per}"
        return f"{_digits(value)} B{per}"
    suffix = {
        Unit.IMAGES_PER_SECOND: " img/s",
        Unit.STEPS_PER_SECOND: " steps/s",
        Unit.WATTS: " W",
        Unit.CELSIUS: " C",
        Unit.CORES: " cores",
    }.get(unit, "")
    return f"{_digits(value)}{suffix}"


def _digits(value: float) -> str:
    """Three significant digits, never in exponential notation and with every whole digit kept."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(places, 9)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _expect(value: object, unit: Unit) -> Quantity:
    quantity = parse_quantity(value)
    if quantity.unit is unit:
        return quantity
    if quantity.unit is Unit.COUNT:
        raise MalformedQuantity(f"{value} lacks a unit: write it like {EXAMPLES[unit]}")
    raise MalformedQuantity(f"{value} is in {quantity.unit}, not in {unit}: write {EXAMPLES[unit]}")
