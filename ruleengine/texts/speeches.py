"""Speaking one language: times, durations, quantities and templates, rendered for people. Pure."""

from __future__ import annotations

import datetime as dt
import functools
import re
import zoneinfo
from typing import TYPE_CHECKING, Final, Literal, get_args

from gpuwarden import durations, quantities
from gpuwarden.ruleengine.texts.chinese import CHINESE
from gpuwarden.ruleengine.texts.english import ENGLISH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.quantities import Quantity, Unit, Window
    from gpuwarden.ruleengine.texts.phrases import Phrases

Language = Literal["en", "zh"]
"""A language that notices are written in."""
LANGUAGES: Final[tuple[Language, ...]] = get_args(Language)
"""All of them."""
PHRASES: Final[Mapping[Language, Phrases]] = {"en": ENGLISH, "zh": CHINESE}
"""What is said in each."""

_ENDS = tuple(".!?\u3002\uff01\uff1f")
_PART = re.compile(r"([0-9]+)([a-z]+)")


def local_time(moment: float, zone: str) -> dt.datetime:
    """A Unix time in a zone; an unknown zone gives UTC."""
    try:
        info: dt.tzinfo = zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        info = dt.UTC
    return dt.datetime.fromtimestamp(moment, tz=info)


def about(seconds: float) -> str:
    """A duration for people: whole seconds below an hour, whole minutes above."""
    step = 60 if seconds >= 3600 else 1
    return durations.render(float(round(seconds / step) * step))


class Speech:
    """One language.

    Args:
        language: which.
    """

    def __init__(self, language: Language) -> None:
        self.language = language
        self.phrases = PHRASES[language]

    def say(self, template: str, **words: object) -> str:
        """Fill a template; joints of lists are always at hand."""
        return template.format(
            comma=self.phrases.comma,
            semicolon=self.phrases.semicolon,
            colon=self.phrases.colon,
            **words,
        )

    def sentences(self, *parts: str) -> str:
        """Whole sentences one after the other; each ends with a full stop, and no two."""
        stop, space = self.phrases.full_stop, self.phrases.after_stop
        ended = [
            part if part.endswith(_ENDS) else f"{part}{stop}"
            for part in (each.strip() for each in parts)
            if part
        ]
        return space.join(ended)

    def capital(self, text: str) -> str:
        """A sentence that begins with a template of the middle of one."""
        return text[:1].upper() + text[1:]

    def time(self, moment: float, zone: str) -> str:
        """A Unix time: `Sun 29 Nov 18:05:07 (Asia/Shanghai)`."""
        local, phrases = local_time(moment, zone), self.phrases
        clock = phrases.clock.format(
            weekday=phrases.weekdays[local.weekday()],
            day=local.day,
            month=phrases.months[local.month - 1],
            time=f"{local:%H:%M:%S}",
        )
        return phrases.moment.format(clock=clock, zone=zone)

    def length(self, seconds: float) -> str:
        """A duration, exactly."""
        units = self.phrases.duration_units
        parts = _PART.findall(durations.render(seconds))
        return self.phrases.duration_joint.join(f"{n}{units[unit]}" for n, unit in parts)

    def about(self, seconds: float) -> str:
        """A duration: whole seconds below an hour, whole minutes above."""
        step = 60 if seconds >= 3600 else 1
        return self.length(float(round(seconds / step) * step))

    def amount(self, value: float, unit: Unit) -> str:
        """A value with its unit, with three significant digits."""
        text = quantities.render(value, unit)
        number, space, suffix = text.partition(" ")
        return f"{number}{space}{self.phrases.quantity_units.get(suffix, suffix)}"

    def number(self, value: float) -> str:
        """A number for people: two decimals below ten, one above."""
        return f"{value:.{2 if value < 10 else 1}f}".rstrip("0").rstrip(".")

    def quantity(self, quantity: Quantity) -> str:
        """A limit, as `amount`."""
        return self.amount(quantity.value, quantity.unit)

    def window(self, window: Window) -> str:
        """A length of time, or a number of samples."""
        if window.samples is None:
            return self.say(self.phrases.window_seconds, length=self.length(window.seconds))
        return self.say(self.phrases.window_samples, count=window.samples)

    def listed(self, parts: list[str]) -> str:
        """Parts of a sentence, with commas."""
        return self.phrases.comma.join(parts)


@functools.cache
def speech(language: Language) -> Speech:
    """The one `Speech` of a language."""
    return Speech(language)
