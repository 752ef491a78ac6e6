"""Measures: the values of one job in one flat array, read like the mapping that they stand for.

Ten thousand jobs with forty values each are half a million small dictionaries, some hundred
megabytes of them, and two ticks are in memory at once. An array of doubles is a twentieth of that,
and a rule that knows where its value lies reads it without hashing anything.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from gpuwarden import quantities
from gpuwarden.ruleengine import signals

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gpuwarden.ruleengine.verdicts import GpuFacts, SignalKey

ABSENT = math.nan
"""Stands for a value that is not known; known values are finite."""


def per_card(key: SignalKey) -> bool:
    """Whether a job has one value of this for each of its cards, and not one in all."""
    spec = signals.SIGNALS.get(key.signal)
    return spec is not None and spec.per_gpu


def averages(values: Mapping[SignalKey, Mapping[str, float]], signal: str) -> Sequence[SignalKey]:
    """The averages of a signal that were asked for, the longest window first.

    Args:
        values: of a job; only `Measures` also name what is not known of it.
        signal: name in `signals.SIGNALS`.
    """
    by_signal = values.layout.averages if isinstance(values, Measures) else _averages(values)
    return by_signal.get(signal, ())


def _averages(keys: Iterable[SignalKey]) -> dict[str, list[SignalKey]]:
    found: dict[str, list[SignalKey]] = {}
    for key in keys:
        if key.agg == "avg":
            found.setdefault(key.signal, []).append(key)
    for each in found.values():
        each.sort(key=lambda key: (key.window_seconds, key.samples or 0), reverse=True)
    return found


class Layout:
    """Where in an array each value of a job lies: those of the job, then those of its cards.

    Args:
        keys: all that were asked for; they are the same for every job of a tick.
    """

    __slots__ = ("averages", "cards", "job", "keys")

    def __init__(self, keys: Iterable[SignalKey]) -> None:
        self.keys = tuple(dict.fromkeys(keys))
        single = [key for key in self.keys if not per_card(key)]
        apart = [key for key in self.keys if per_card(key)]
        self.job: dict[SignalKey, int] = {key: at for at, key in enumerate(single)}
        """Key -> position of the job's value."""
        self.cards: dict[SignalKey, int] = {key: at for at, key in enumerate(apart)}
        """Key -> how many keys of cards come before; see `first`."""
        self.averages = _averages(self.keys)
        """Signal -> its averages, the longest window first."""

    def __contains__(self, key: SignalKey) -> bool:
        return key in self.job or key in self.cards

    def first(self, key: SignalKey, cards: int) -> int:
        """Position of the first card's value for a job with this many cards."""
        return len(self.job) + self.cards[key] * cards

    def empty(self, cards: int) -> array[float]:
        """Numbers of a job with this many cards of which nothing is known."""
        return array("d", [ABSENT]) * (len(self.job) + len(self.cards) * cards)

    def packed(
        self, values: Mapping[SignalKey, Mapping[str, float]], uuids: Sequence[str]
    ) -> array[float]:
        """The numbers of a job whose values are an ordinary mapping.

        Args:
            values: key -> card's UUID ("" for the job) -> value.
            uuids: of the job's cards, in its order.
        """
        numbers = self.empty(len(uuids))
        for key, at in self.job.items():
            numbers[at] = values.get(key, {}).get("", ABSENT)
        for key in self.cards:
            known = values.get(key, {})
            for at, uuid in enumerate(uuids, start=self.first(key, len(uuids))):
                numbers[at] = known.get(uuid, ABSENT)
        return numbers


class Measures(Mapping["SignalKey", Mapping[str, float]]):
    """Values of one job: key -> card's UUID ("" for the job) -> value; read-only.

    Args:
        layout: shared by all jobs of a tick.
        uuids: of the job's cards, in its order.
        numbers: as `Layout.empty` makes them, filled by who gathers.
    """

    __slots__ = ("layout", "numbers", "uuids")

    def __init__(self, layout: Layout, uuids: tuple[str, ...], numbers: array[float]) -> None:
        self.layout = layout
        self.uuids = uuids
        self.numbers = numbers

    def __getitem__(self, key: SignalKey) -> Mapping[str, float]:
        found = self._known(key)
        if not found:
            raise KeyError(key)
        return MappingProxyType(found)

    def _known(self, key: SignalKey) -> dict[str, float]:
        at = self.layout.job.get(key)
        if at is not None:
            value = self.numbers[at]
            return {} if math.isnan(value) else {"": value}
        if key not in self.layout.cards:
            return {}
        first = self.layout.first(key, len(self.uuids))
        part = self.numbers[first : first + len(self.uuids)]
        pairs = zip(self.uuids, part, strict=True)
        return {uuid: value for uuid, value in pairs if not math.isnan(value)}

    def __iter__(self) -> Iterator[SignalKey]:
        return (key for key in self.layout.keys if self._known(key))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def rendered(key: SignalKey, value: float) -> str:
    """A value in words, with its unit."""
    spec = signals.SIGNALS.get(key.signal)
    return quantities.render(value, spec.unit if spec else quantities.Unit.COUNT)


def listed(gpus: Sequence[GpuFacts], key: SignalKey, known: Mapping[str, float]) -> str:
    """The values of the first cards in words."""
    parts = [
        f"GPU {gpu.index or gpu.uuid}: "
        + (rendered(key, known[gpu.uuid]) if gpu.uuid in known else "not known")
        for gpu in gpus[:4]
    ]
    if len(gpus) > 4:
        parts.append(f"and {len(gpus) - 4} more")
    return ", ".join(parts)
