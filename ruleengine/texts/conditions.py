"""Conditions and what was found of them, in the words of a language. Pure.

Evidence is written down in the engine's own terms; here it is told again from the rule, which knows
what was asked, and from the values that were found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gpuwarden.quantities import Direction, Unit
from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.conditions import (
    All,
    Any_,
    Gpus,
    GpuShare,
    NeedsMemory,
    NoProgress,
    Not,
    OverBudget,
    ProfileCondition,
    Promql,
    Signal,
    SilentFor,
)
from gpuwarden.ruleengine.described import described
from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpuwarden.quantities import Deviation
    from gpuwarden.ruleengine.conditions import Comparing, Condition, Leaf
    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.ruleengine.profiles import Expected
    from gpuwarden.ruleengine.texts.speeches import Speech
    from gpuwarden.ruleengine.verdicts import Evidence

SHOWN_CARDS = 4
_OPPOSITES = {"above": "at_most", "at_most": "above", "at_least": "below", "below": "at_least"}


@dataclass(frozen=True, slots=True)
class _Asked:
    """One condition that measures, as its piece of evidence stands for it.

    Attributes:
        leaf: the condition.
        entry: which deviation of a profile, or an empty string.
        negated: whether it is true where the leaf is not.
    """

    leaf: Leaf
    entry: str = ""
    negated: bool = False


def _asked(condition: Condition, *, negated: bool = False) -> Iterator[_Asked]:
    """In the order in which evaluation gives evidence."""
    match condition:
        case All():
            for part in condition.all:
                yield from _asked(part, negated=negated)
        case Any_():
            for part in condition.any:
                yield from _asked(part, negated=negated)
        case Not():
            yield from _asked(condition.not_, negated=not negated)
        case ProfileCondition():
            for name in condition.profile.entries:
                yield _Asked(condition, name, negated)
        case _:
            yield _Asked(condition, negated=negated)


def seen(
    rule: Rule,
    evidence: Sequence[Evidence],
    speech: Speech,
    *,
    gpus: Mapping[str, str],
    expected: Mapping[str, Expected],
) -> list[str]:
    """What speaks for a violation, one line for each condition.

    Args:
        rule: what was asked.
        evidence: of the rule and of its stages, whole and in order.
        speech: the language.
        gpus: UUID of each card of the job -> its index; may be empty.
        expected: what the job should show, by signal; may be empty.
    """
    asked = [item for condition in _told_once(rule) for item in _asked(condition)]
    # What holds a verdict up, such as a cold start, stands before all conditions.
    held = len(evidence) == len(asked) + 1 and evidence[0].truth is Truth.UNKNOWN
    found = evidence[1:] if held else evidence
    if len(found) != len(asked):
        return [
            f"{item.condition}{speech.phrases.colon}{item.measured}"
            if item.measured
            else item.condition
            for item in evidence
            if item.truth is Truth.YES
        ]
    telling = _Telling(speech, gpus, expected)
    lines = [
        telling.line(item, answer)
        for item, answer in zip(asked, found, strict=True)
        if answer.truth is (Truth.NO if item.negated else Truth.YES)
    ]
    return list(dict.fromkeys(speech.capital(line) for line in lines))


def _told_once(rule: Rule) -> list[Condition]:
    """The rule's condition and those of its stages; what stages share stands once in evidence."""
    found: list[Condition] = []
    for stage in rule.stages:
        if stage.when is not None and stage.when not in found:
            found.append(stage.when)
    return [rule.when, *found]


def words(condition: Condition, speech: Speech) -> str:
    """A condition in words, without anything measured."""
    phrases = speech.phrases
    match condition:
        case All():
            parts = phrases.semicolon.join(words(part, speech) for part in condition.all)
            return speech.say(phrases.all_of, parts=parts)
        case Any_():
            parts = phrases.semicolon.join(words(part, speech) for part in condition.any)
            return speech.say(phrases.any_of, parts=parts)
        case Not():
            return speech.say(phrases.negated, part=words(condition.not_, speech))
        case _:
            telling = _Telling(speech, {}, {})
            return phrases.semicolon.join(telling.asked(item) for item in _asked(condition))


def amount(expected: Expected, speech: Speech) -> str:
    """What is expected of one signal; of an estimate, the band."""
    unit = signals.SIGNALS[expected.signal].unit
    if not expected.estimated:
        return speech.amount(expected.value, unit)
    low, high = (speech.amount(end, unit) for end in (expected.low, expected.high))
    return speech.say(speech.phrases.estimated_band, low=low, high=high)


def expectations(expected: Sequence[Expected], speech: Speech) -> list[str]:
    """What a training like this one should show, a line for each source of it."""
    phrases = speech.phrases
    sources = dict.fromkeys((item.basis, item.estimated) for item in expected)
    lines = []
    for basis, estimated in sources:
        entries = [
            speech.say(
                phrases.expected_entry,
                what=phrases.signal_names[item.signal],
                amount=amount(item, speech),
            )
            for item in expected
            if (item.basis, item.estimated) == (basis, estimated)
        ]
        template = phrases.expected_estimate_of if estimated else phrases.expected_of
        line = speech.say(template, entries=speech.listed(entries), basis=basis)
        lines.append(speech.capital(line))
    return lines


def _unit(leaf: object, name: str) -> Unit | Literal["seconds"]:
    """What a figure is told in."""
    if isinstance(leaf, OverBudget):
        return Unit.RATIO
    if isinstance(leaf, Promql):
        return {"ratio": Unit.RATIO, "bytes": Unit.BYTES}.get(
            leaf.unit or "", "seconds" if leaf.unit == "seconds" else Unit.COUNT
        )
    spec = signals.SIGNALS.get(name)
    # Seconds of waiting per second are cores to a rule, and processes to people.
    return Unit.COUNT if spec is None or name == "job_io_wait" else spec.unit


class _Telling:
    """Evidence in one language."""

    def __init__(
        self, speech: Speech, gpus: Mapping[str, str], expected: Mapping[str, Expected]
    ) -> None:
        self._speech = speech
        self._phrases = speech.phrases
        self._gpus = gpus
        self._expected = expected

    def line(self, asked: _Asked, found: Evidence) -> str:
        """One condition and what was found of it."""
        match asked.leaf:
            case SilentFor():
                return self._silence(asked.leaf, found)
            case NoProgress() if not asked.negated:
                length = self._speech.length(asked.leaf.no_progress_for)
                return self._speech.say(self._phrases.no_progress_measured, length=length)
            case NeedsMemory() if not asked.negated and found.values:
                low, high, size = (
                    self._speech.amount(found.values[name], Unit.BYTES)
                    for name in ("low", "high", "of")
                )
                share = self._speech.amount(asked.leaf.needs_memory, Unit.RATIO)
                template = self._phrases.needs_memory_measured
                return self._speech.say(template, low=low, high=high, size=size, share=share)
            case NoProgress() | NeedsMemory():
                return self.asked(asked)
        known = self._expected.get(asked.entry)
        expected = found.expected if known is None else amount(known, self._speech)
        template = self._phrases.seen_against if expected else self._phrases.seen
        return self._speech.say(
            template,
            what=self._what(asked),
            measured=self._measured(asked, found),
            limit=self._limit(asked),
            expected=expected,
        )

    def asked(self, asked: _Asked) -> str:
        """One condition without what was found."""
        phrases, say = self._phrases, self._speech.say
        match asked.leaf:
            case SilentFor(silent_for=length, signals=channels):
                names = self._speech.listed([phrases.channel_names[name] for name in channels])
                text = say(phrases.silent, length=self._speech.length(length), channels=names)
            case NoProgress(no_progress_for=length):
                text = say(phrases.no_progress, length=self._speech.length(length))
            case NeedsMemory(needs_memory=share):
                text = say(phrases.needs_memory, share=self._speech.amount(share, Unit.RATIO))
            case _:
                return f"{self._what(asked)}{phrases.colon}{self._limit(asked)}"
        return say(phrases.negated, part=text) if asked.negated else text

    def _what(self, asked: _Asked) -> str:
        phrases, leaf = self._phrases, asked.leaf
        if isinstance(leaf, OverBudget):
            return phrases.budget_used[leaf.over_budget]
        if isinstance(leaf, Promql):
            return described(leaf.means, self._speech.language) or phrases.expression
        if isinstance(leaf, ProfileCondition):
            how = self._speech.say(phrases.aggregates["avg"], window=self._window(leaf))
            return f"{phrases.signal_names[asked.entry]}{phrases.comma}{how}"
        if not isinstance(leaf, Signal):
            return ""
        if leaf.window is None:
            how = phrases.now
        elif leaf.share is not None:
            how = self._speech.say(phrases.over, window=self._window(leaf))
        else:
            how = self._speech.say(phrases.aggregates[leaf.agg or "avg"], window=self._window(leaf))
        return f"{phrases.signal_names[leaf.signal]}{phrases.comma}{how}"

    def _window(self, leaf: Signal | ProfileCondition) -> str:
        return "" if leaf.window is None else self._speech.window(leaf.window)

    def _limit(self, asked: _Asked) -> str:
        leaf = asked.leaf
        if isinstance(leaf, ProfileCondition):
            text = self._deviation(leaf.profile.entries[asked.entry])
            parts = [self._speech.say(self._phrases.negated, part=text) if asked.negated else text]
            if signals.SIGNALS[asked.entry].per_gpu:
                parts.append(self._cards(leaf.gpus))
            return self._speech.listed(parts)
        if not isinstance(leaf, (Signal, Promql, OverBudget)):
            return ""
        plain = isinstance(leaf, (Promql, OverBudget)) or (
            leaf.share is None and not isinstance(leaf.gpus, GpuShare)
        )
        parts = [self._comparison(leaf, opposite=asked.negated and plain)]
        if isinstance(leaf, Signal):
            if leaf.share is not None:
                share = self._speech.amount(leaf.share, Unit.RATIO)
                parts = [
                    self._speech.say(
                        self._phrases.share_of_samples, comparison=parts[0], share=share
                    )
                ]
            if leaf.gpus is not None:
                gpus = leaf.gpus
                if asked.negated and plain:
                    gpus = Gpus.ANY if gpus is Gpus.ALL else Gpus.ALL
                parts.append(self._cards(gpus))
        text = self._speech.listed(parts)
        if asked.negated and not plain:
            return self._speech.say(self._phrases.negated, part=text)
        return text

    def _comparison(self, leaf: Comparing, *, opposite: bool) -> str:
        name = _OPPOSITES[leaf.comparison] if opposite else leaf.comparison
        name_of = leaf.signal if isinstance(leaf, Signal) else ""
        limit = self._amount(leaf.limit.value, _unit(leaf, name_of))
        return self._speech.say(self._phrases.comparisons[name], limit=limit)

    def _cards(self, gpus: Gpus | GpuShare) -> str:
        if isinstance(gpus, GpuShare):
            share = self._speech.amount(gpus.share, Unit.RATIO)
            return self._speech.say(self._phrases.of_share_of_gpus, share=share)
        return self._phrases.of_all_gpus if gpus is Gpus.ALL else self._phrases.of_any_gpu

    def _deviation(self, deviation: Deviation) -> str:
        template = {
            Direction.BELOW: self._phrases.deviation_below,
            Direction.ABOVE: self._phrases.deviation_above,
            Direction.OUTSIDE: self._phrases.deviation_outside,
        }[deviation.direction]
        tolerance = self._speech.amount(deviation.tolerance, Unit.RATIO)
        text = self._speech.say(template, tolerance=tolerance)
        if deviation.floor is None:
            return text
        floor = self._speech.quantity(deviation.floor)
        return self._speech.say(self._phrases.deviation_floor, deviation=text, floor=floor)

    def _measured(self, asked: _Asked, found: Evidence) -> str:
        """The values that were found: one, or those of the first cards."""
        leaf, values = asked.leaf, found.values
        name = asked.entry or (leaf.signal if isinstance(leaf, Signal) else "")
        spec = signals.SIGNALS.get(name)
        unit = _unit(leaf, name)
        if spec is None or not spec.per_gpu:
            if "" not in values:
                return found.measured or self._phrases.not_known
            return self._amount(values[""], unit)
        if not self._gpus:
            return found.measured or self._phrases.not_known
        parts = [
            self._speech.say(self._phrases.card, index=index or uuid)
            + self._phrases.colon
            + (self._amount(values[uuid], unit) if uuid in values else self._phrases.not_known)
            for uuid, index in list(self._gpus.items())[:SHOWN_CARDS]
        ]
        if len(self._gpus) > SHOWN_CARDS:
            more = len(self._gpus) - SHOWN_CARDS
            parts.append(self._speech.say(self._phrases.more, count=more))
        return self._speech.listed(parts)

    def _amount(self, value: float, unit: Unit | str) -> str:
        if isinstance(unit, Unit):
            return self._speech.amount(value, unit)
        return self._speech.about(value)

    def _silence(self, leaf: SilentFor, found: Evidence) -> str:
        parts = []
        for name in leaf.signals:
            channel = self._phrases.channel_names[name]
            if name in found.values:
                age = self._speech.about(max(0.0, found.values[name]))
                parts.append(self._speech.say(self._phrases.silent_ago, channel=channel, age=age))
            elif f"{name} never" in found.measured:
                parts.append(self._speech.say(self._phrases.silent_never, channel=channel))
        return self._speech.say(
            self._phrases.silent,
            length=self._speech.length(leaf.silent_for),
            channels=self._speech.listed(parts),
        )
