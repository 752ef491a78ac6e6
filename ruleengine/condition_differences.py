"""What changed between two conditions in meaning, and in which direction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden import durations, quantities
from gpuwarden.quantities import Direction
from gpuwarden.ruleengine.conditions import (
    All,
    Any_,
    Comparing,
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
from gpuwarden.ruleengine.effects import Change, Effect, flipped, longer, more

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuwarden.quantities import Deviation, Window
    from gpuwarden.ruleengine.conditions import Condition, Leaf

_OPPOSITES = {"above": "at_most", "at_most": "above", "at_least": "below", "below": "at_least"}
_RANKS = {"min": 0, "avg": 1, "max": 2}
"""Aggregates of the same samples, in the order of their size."""


def condition_changes(old: Condition, new: Condition) -> Iterator[Change]:
    """Every change of a rule's `when`; none where both say the same in other words."""
    yield from _compared("when", normal(old), normal(new))


# -- one form for what means the same


def normal(condition: Condition, *, negated: bool = False) -> Condition:
    """The condition with `not` only at what measures, nested lists of a kind made one, each once.

    Kleene's logic allows both: the truth is the same for every job, UNKNOWN included.
    """
    match condition:
        case Not():
            return normal(condition.not_, negated=not negated)
        case All() | Any_():
            whole = isinstance(condition, All) is not negated
            inner = condition.all if isinstance(condition, All) else condition.any
            parts: list[Condition] = []
            for item in inner:
                part = normal(item, negated=negated)
                for piece in _parts(part, whole=whole):
                    if piece not in parts:
                        parts.append(piece)
            return parts[0] if len(parts) == 1 else _joined(parts, whole=whole)
        case Signal() | Promql() | OverBudget() if negated and not _without_opposite(condition):
            return _turned(condition)
        case _:
            return Not.model_construct(not_=condition) if negated else condition


def _parts(condition: Condition, *, whole: bool) -> Sequence[Condition]:
    """What a list of this kind holds; anything else stands for itself."""
    match condition:
        case All() if whole:
            return condition.all
        case Any_() if not whole:
            return condition.any
        case _:
            return (condition,)


def _joined(parts: Sequence[Condition], *, whole: bool) -> Condition:
    # Built from what was validated already.
    joined = tuple(parts)
    return All.model_construct(all=joined) if whole else Any_.model_construct(any=joined)


def _without_opposite(condition: Signal | Promql | OverBudget) -> bool:
    """Whether it is about a share, of samples or of cards: what is left over is no such share."""
    return isinstance(condition, Signal) and (
        condition.share is not None or isinstance(condition.gpus, GpuShare)
    )


def _turned(condition: Signal | Promql | OverBudget) -> Condition:
    """The opposite comparison: not above is at most, and not of all is of any that not."""
    changes: dict[str, object] = {
        condition.comparison: None,
        _OPPOSITES[condition.comparison]: condition.limit,
    }
    if isinstance(condition, Signal) and condition.gpus is not None:
        changes["gpus"] = Gpus.ANY if condition.gpus is Gpus.ALL else Gpus.ALL
    return condition.model_copy(update=changes)


# -- compared


def _compared(part: str, old: Condition, new: Condition) -> Iterator[Change]:
    if old == new:
        return
    for whole, kind, word in ((True, All, "all"), (False, Any_, "any")):
        if isinstance(old, kind) or isinstance(new, kind):
            other = Any_ if whole else All
            if not isinstance(old, other) and not isinstance(new, other):
                lists = (_parts(old, whole=whole), _parts(new, whole=whole))
                yield from _lists(f"{part}.{word}", *lists, whole=whole)
                return
    if isinstance(old, Not) and isinstance(new, Not):
        for change in _leaf(f"{part}.not", old.not_, new.not_):
            yield Change(change.part, flipped(change.effect), change.old, change.new)
        return
    yield from _leaf(part, old, new)


def _lists(
    part: str, old: Sequence[Condition], new: Sequence[Condition], *, whole: bool
) -> Iterator[Change]:
    """Two lists of conditions, compared whatever their order."""
    left = [item for item in old if item not in new]
    right = [item for item in new if item not in old]
    for akin in (_alike, _about_the_same, _overlapping):
        for first in list(left):
            partner = next((second for second in right if akin(first, second)), None)
            if partner is not None:
                left.remove(first)
                right.remove(partner)
                yield from _compared(part, first, partner)
    # One condition more under `all` leaves fewer violations, under `any` it makes more.
    for item in left:
        yield Change(part, more(whole), words(item), "none")
    for item in right:
        yield Change(part, more(not whole), "none", words(item))


def _alike(old: Condition, new: Condition) -> bool:
    """Whether both are about the same, and compare it in the same way."""
    if isinstance(old, Comparing) and isinstance(new, Comparing) and old.upward != new.upward:
        return False
    return _about_the_same(old, new) and getattr(old, "agg", "") == getattr(new, "agg", "")


def _about_the_same(old: Condition, new: Condition) -> bool:
    lists = (All, Any_)
    return not isinstance(old, lists) and not isinstance(new, lists) and _near(old) == _near(new)


def _overlapping(old: Condition, new: Condition) -> bool:
    """Whether one of the two, or both, are lists that have something in common."""
    inner = [
        {_near(part) for part in (*_parts(item, whole=True), *_parts(item, whole=False))}
        for item in (old, new)
    ]
    lists = (All, Any_)
    return (isinstance(old, lists) or isinstance(new, lists)) and bool(inner[0] & inner[1])


def _near(condition: Condition) -> tuple[str, ...]:
    match condition:
        case Not():
            return ("not", *_near(condition.not_))
        case Signal():
            return ("signal", condition.signal)
        case ProfileCondition():
            return ("profile", *condition.profile.entries)
        case _:
            return (type(condition).__name__,)


def _leaf(part: str, old: Condition, new: Condition) -> Iterator[Change]:
    match old, new:
        case Signal(), Signal() if old.signal == new.signal and old.upward == new.upward:
            yield from _signals(f"{part}.{new.signal}", old, new)
        case Promql(), Promql() if old.promql == new.promql and old.upward == new.upward:
            yield from _limit(f"{part}.promql", old, new)
        case OverBudget(), OverBudget() if (old.over_budget, old.upward) == (
            new.over_budget,
            new.upward,
        ):
            yield from _limit(f"{part}.over_budget", old, new)
        case SilentFor(), SilentFor():
            yield from _silences(f"{part}.silent_for", old, new)
        case NoProgress(), NoProgress():
            lengths = (old.no_progress_for, new.no_progress_for)
            yield from longer(f"{part}.no_progress_for", *lengths, Effect.LAXER)
        case NeedsMemory(), NeedsMemory():
            before, after = old.needs_memory, new.needs_memory
            if before != after:
                yield Change(f"{part}.needs_memory", more(after < before), words(old), words(new))
        case ProfileCondition(), ProfileCondition():
            yield from _profiles(f"{part}.profile", old, new)
        case _:
            yield Change(part, Effect.DIFFERENT, words(old), words(new))


def _limit(part: str, old: Comparing, new: Comparing) -> Iterator[Change]:
    """The limit of comparisons to the same side."""
    before, after = old.limit.value, new.limit.value
    if (old.comparison, before) == (new.comparison, after):
        return
    if before == after:
        stricter = new.comparison in ("at_least", "at_most")
    else:
        stricter = (after < before) is new.upward
    yield Change(part, more(stricter), old.comparison_text, new.comparison_text)


def _signals(part: str, old: Signal, new: Signal) -> Iterator[Change]:
    yield from _limit(part, old, new)
    yield from _cards(part, old.gpus, new.gpus)
    how = (_how(old), _how(new))
    if how[0] != how[1]:
        yield Change(f"{part}.agg", _aggregates(old, new), *how)
    if old.window != new.window:
        texts = (str(old.window or "none"), str(new.window or "none"))
        effect = _windows(old, new) if how[0] == how[1] else Effect.DIFFERENT
        yield Change(f"{part}.window", effect, *texts)


def _how(condition: Signal) -> str:
    if condition.share is not None:
        return f"share {quantities.render(condition.share, quantities.Unit.RATIO)}"
    return condition.agg or "avg"


def _aggregates(old: Signal, new: Signal) -> Effect:
    """From one aggregate to another of the same samples."""
    ranks: list[int | None] = []
    for condition in (old, new):
        if condition.share is not None:
            # What holds for a share of the samples lies between what holds for all and for one.
            ranks.append(None)
        else:
            ranks.append(_RANKS.get(condition.agg or "avg"))
    before, after = ranks
    if old.share is not None and new.share is not None:
        return more(new.share < old.share)
    if old.share is not None or new.share is not None:
        rank = after if before is None else before
        if rank not in (_RANKS["min"], _RANKS["max"]):
            return Effect.DIFFERENT
        all_samples = (rank == _RANKS["min"]) is new.upward
        becomes_share = before is not None
        return more(all_samples is becomes_share)
    if before is None or after is None:
        return Effect.DIFFERENT
    return more((after > before) is new.upward)


def _windows(old: Signal, new: Signal) -> Effect:
    """From one window to another of the same aggregate: extremes only grow with it."""
    before, after = _length(old.window), _length(new.window)
    if before is None or after is None or before[0] != after[0]:
        return Effect.DIFFERENT
    if new.agg not in ("min", "max"):
        return Effect.DIFFERENT
    grows = after[1] > before[1]
    eager = (new.agg == "max") is new.upward
    return more(grows is eager)


def _length(window: Window | None) -> tuple[str, float] | None:
    if window is None:
        return None
    if window.samples is not None:
        return ("samples", float(window.samples))
    return ("seconds", window.seconds)


def _silences(part: str, old: SilentFor, new: SilentFor) -> Iterator[Change]:
    yield from longer(part, old.silent_for, new.silent_for, Effect.LAXER)
    before, after = set(old.signals), set(new.signals)
    if before != after:
        effect = Effect.DIFFERENT
        if before < after or after < before:
            effect = more(after < before)
        texts = (", ".join(sorted(before)), ", ".join(sorted(after)))
        yield Change(f"{part}.signals", effect, *texts)


def _profiles(part: str, old: ProfileCondition, new: ProfileCondition) -> Iterator[Change]:
    before, after = old.profile.entries, new.profile.entries
    for name in sorted(before.keys() | after.keys()):
        first, second = before.get(name), after.get(name)
        if first is None or second is None:
            texts = (str(first or "none"), str(second or "none"))
            yield Change(f"{part}.{name}", more(first is None), *texts)
        elif first != second:
            yield Change(f"{part}.{name}", _deviations(first, second), str(first), str(second))
    if old.window != new.window:
        yield Change(f"{part}.window", Effect.DIFFERENT, str(old.window), str(new.window))
    yield from _cards(part, old.gpus, new.gpus)


def _cards(part: str, old: Gpus | GpuShare | None, new: Gpus | GpuShare | None) -> Iterator[Change]:
    """Of how many cards it must be true: the fewer, the sooner."""
    before, after = (None if gpus is None else _needed(gpus) for gpus in (old, new))
    if before == after:
        return
    effect = Effect.DIFFERENT
    if before is not None and after is not None:
        effect = more(after < before)
    yield Change(f"{part}.gpus", effect, str(old or "none"), str(new or "none"))


def _needed(gpus: Gpus | GpuShare) -> float:
    """The share of the cards; 0 for any."""
    if isinstance(gpus, GpuShare):
        return gpus.share
    return 1.0 if gpus is Gpus.ALL else 0.0


def _deviations(old: Deviation, new: Deviation) -> Effect:
    """A deviation counts sooner if it may be smaller, has no floor, or counts to both sides."""
    effects = set()
    if old.direction is not new.direction:
        if Direction.OUTSIDE not in (old.direction, new.direction):
            return Effect.DIFFERENT
        effects.add(more(new.direction is Direction.OUTSIDE))
    if old.tolerance != new.tolerance:
        effects.add(more(new.tolerance < old.tolerance))
    floors = [0.0 if item.floor is None else item.floor.value for item in (old, new)]
    if floors[0] != floors[1]:
        effects.add(more(floors[1] < floors[0]))
    return effects.pop() if len(effects) == 1 else Effect.DIFFERENT


def words(condition: Condition) -> str:
    """A condition in few words, as one would write it."""
    match condition:
        case All():
            return f"all of ({'; '.join(words(part) for part in condition.all)})"
        case Any_():
            return f"any of ({'; '.join(words(part) for part in condition.any)})"
        case Not():
            return f"not ({words(condition.not_)})"
        case _:
            return _leaf_words(condition)


def _leaf_words(condition: Leaf) -> str:
    match condition:
        case Signal():
            over = "" if condition.window is None else f" over {condition.window}"
            gpus = "" if condition.gpus is None else f", {condition.gpus.value} GPUs"
            how = f"{_how(condition)}{over} {condition.comparison_text}"
            return f"{condition.signal} {how}{gpus}"
        case Promql() | OverBudget():
            what = condition.title if isinstance(condition, OverBudget) else condition.promql
            return f"{' '.join(what.split())} {condition.comparison_text}"
        case NoProgress():
            return f"no progress for {durations.render(condition.no_progress_for)}"
        case NeedsMemory():
            share = quantities.render(condition.needs_memory, quantities.Unit.RATIO)
            return f"needs over {share} of a card's memory"
        case SilentFor():
            length = durations.render(condition.silent_for)
            return f"silent for {length} on {', '.join(condition.signals)}"
        case _:
            entries = condition.profile.entries.items()
            limits = ", ".join(f"{name} {deviation}" for name, deviation in entries)
            return f"profile: {limits} over {condition.window}"
