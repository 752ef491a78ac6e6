"""In which direction a change of a rule goes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from gpuwarden import durations

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Effect(StrEnum):
    """What a change means for jobs."""

    STRICTER = "stricter"
    """What was found, told or ended still is, and perhaps more."""
    LAXER = "laxer"
    """The opposite."""
    DIFFERENT = "different"
    """More for some jobs and less for others, or not to be told."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change: of which part, to what effect, from what to what, in words."""

    part: str
    effect: Effect
    old: str
    new: str


def flipped(effect: Effect) -> Effect:
    """The opposite effect."""
    if effect is Effect.DIFFERENT:
        return effect
    return Effect.LAXER if effect is Effect.STRICTER else Effect.STRICTER


def more(stricter: bool) -> Effect:
    """Stricter if so, else laxer."""
    return Effect.STRICTER if stricter else Effect.LAXER


def overall(changes: Sequence[Change]) -> Effect:
    """The effect of all changes together."""
    effects = {change.effect for change in changes}
    return effects.pop() if len(effects) == 1 else Effect.DIFFERENT


def longer(part: str, old: float, new: float, effect: Effect) -> Iterator[Change]:
    """A duration in seconds whose growth has this effect; nothing if it stays."""
    if old != new:
        texts = (durations.render(old), durations.render(new))
        yield Change(part, effect if new > old else flipped(effect), *texts)
