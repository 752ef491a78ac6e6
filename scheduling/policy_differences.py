"""What changed between two policies, in words: who gains, who loses, what is stricter or laxer.

Everything that can be written is compared; the order of entries means nothing, but for that of
cards, which go from the cheapest on. Pure.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuwarden.scheduling.policy_texts import as_written

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpuwarden.scheduling.policies import Policy

SCHEMA = "gpuwarden.policy-differences/v1"
_PART, _ITEM = "there", "named"
"""What a part of the file, and an item of a list of names, is where it has no value of its own."""


class Effect(StrEnum):
    """What a change means for whom it is about."""

    GAINS = "gains"
    """They may use more than before."""
    LOSES = "loses"
    """They may use less."""
    STRICTER = "stricter"
    """More jobs wait, or have to leave, or sooner."""
    LAXER = "laxer"
    """The opposite."""
    DIFFERENT = "different"
    """Neither can be said for every job."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that changed.

    Attributes:
        path: of what, such as `teams.vision.quota.a100-40`.
        old: as it was written; None where there was none.
        new: likewise.
        effect: for whom it is about.
        whom: who that is, such as `vision`, or an empty string: everybody.
    """

    path: str
    old: str | None
    new: str | None
    effect: Effect
    whom: str = ""

    def __str__(self) -> str:
        who = self.whom or "everybody"
        about = f" for {self.whom}" if self.whom else ""
        told = self.effect in (Effect.GAINS, Effect.LOSES)
        means = f"{who} {self.effect}" if told else f"{self.effect}{about}"
        path, change = self.path, f"{self.old or 'none'} -> {self.new or 'none'}"
        if _PART in (self.old, self.new):
            change = "new" if self.old is None else "gone"
        elif _ITEM in (self.old, self.new):
            path, _, item = self.path.rpartition(".")
            change = f"+ {item}" if self.old is None else f"- {item}"
        return f"{path}: {change} ({means})"


class _Sense(NamedTuple):
    """What more of a value means; less of it means the opposite."""

    more: Effect
    whom: int | None = None
    """Which step of the path names who it is about; None is everybody."""


_GAIN, _STRICT, _LAX = Effect.GAINS, Effect.STRICTER, Effect.LAXER
_OPPOSITE = {
    Effect.GAINS: Effect.LOSES,
    Effect.LOSES: Effect.GAINS,
    Effect.STRICTER: Effect.LAXER,
    Effect.LAXER: Effect.STRICTER,
    Effect.DIFFERENT: Effect.DIFFERENT,
}
_SENSES: Mapping[str, _Sense] = {
    "operators.users.*": _Sense(_GAIN, 2),
    "operators.groups.*": _Sense(_GAIN, 2),
    "cards.*": _Sense(_GAIN),
    "cards.*.count": _Sense(_GAIN),
    "teams.*": _Sense(_GAIN, 1),
    "teams.*.users.*": _Sense(_GAIN, 3),
    "teams.*.quota.*": _Sense(_GAIN, 1),
    "teams.*.borrow.*": _Sense(_GAIN, 1),
    "teams.*.lend": _Sense(_STRICT),
    "teams.*.lend.*": _Sense(_LAX),
    "teams.*.share": _Sense(_GAIN, 1),
    "teams.*.priorities": _Sense(_STRICT, 1),
    "teams.*.priorities.*": _Sense(_LAX, 1),
    "priorities.*.preempts.*": _Sense(_STRICT, 3),
    "budgets.*": _Sense(_STRICT, 1),
    "budgets.*.limit": _Sense(_LAX, 1),
    "budgets.*.kind": _Sense(_STRICT, 1),
    "budgets.*.running": _Sense(_STRICT, 1),
    "windows.*": _Sense(_LAX),
    "windows.*.days.*": _Sense(_LAX),
    "windows.*.running": _Sense(_STRICT),
    "preemption": _Sense(_STRICT),
    "preemption.minimum_run": _Sense(_LAX),
    "preemption.notice": _Sense(_LAX),
    "preemption.deadline": _Sense(_LAX),
    "preemption.back_off": _Sense(_LAX),
    "preemption.at_most.times": _Sense(_STRICT),
    "preemption.at_most.per": _Sense(_LAX),
    "images.*": _Sense(_LAX),
    "bookings": _Sense(_LAX),
    "bookings.lead_time": _Sense(_LAX),
    "bookings.longest": _Sense(_LAX),
    "bookings.ahead": _Sense(_LAX),
    "bookings.no_show_after": _Sense(_LAX),
    "bookings.at_most_share": _Sense(_LAX),
}
"""Path, with `*` for names -> what more of it means. What is new there is more than nothing."""
_RANKS = {"soft": 0, "hard": 1, "finish": 0, "leave": 1, "step": 0, "epoch": 1}
"""Words that have an order."""
_SETS = frozenset({"users", "groups", "priorities", "preempts", "days", "models"})
"""Lists in which order means nothing, and whose items are names."""
_TABLES = frozenset({"cards", "teams", "priorities", "windows", "images", "budgets"})
"""Lists of entries that have names."""


class _Leaf(NamedTuple):
    """A value, for people and for comparisons."""

    text: str
    rank: float | None


def differences(old: Policy, new: Policy) -> tuple[Change, ...]:
    """Everything that changed, in the order of the file; what is gone comes last in its place."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    paths = [*before, *(path for path in after if path not in before)]
    found = list(_order_of_cards(old, new))
    for path in paths:
        was, now = before.get(path), after.get(path)
        if was == now or _told_above(path, before, after):
            continue
        if was is not None and now is not None and path[-1] in _SETS:
            continue  # its items are told one by one
        kinds = [side.get((*path[:2], "kind")) for side in (before, after)]
        soft = path[0] == "budgets" and all(k is None or k.text == "soft" for k in kinds)
        found.append(_change(path, was, now, soft=soft))
    order = {part: index for index, part in enumerate(type(new).model_fields)}
    return tuple(sorted(found, key=lambda each: order[each.path.partition(".")[0]]))


def _order_of_cards(old: Policy, new: Policy) -> Iterator[Change]:
    """Of cards that both have; the cheapest that is enough is recommended."""
    orders = []
    for one, other in ((old, new), (new, old)):
        orders.append(", ".join(card.name for card in one.cards if other.card(card.name)))
    if orders[0] != orders[1]:
        yield Change("cards", orders[0], orders[1], Effect.DIFFERENT)


def difference_lines(found: Sequence[Change]) -> list[str]:
    """The changes for people."""
    if not found:
        return ["Nothing changed in meaning."]
    return [str(each) for each in found]


def differences_json(found: Sequence[Change]) -> str:
    """The changes as one versioned document."""
    changes = [asdict(each) | {"words": str(each)} for each in found]
    document = {"schema": SCHEMA, "changes": changes}
    return json.dumps(document, indent=2, ensure_ascii=False)


# -- flattening


def _leaves(policy: Policy) -> Iterator[tuple[tuple[str, ...], _Leaf]]:
    raw = policy.model_dump(by_alias=True)
    yield from _below((), as_written(policy), raw)


def _below(path: tuple[str, ...], text: Any, raw: Any) -> Iterator[tuple[tuple[str, ...], _Leaf]]:
    if isinstance(text, dict):
        if path:
            yield path, _Leaf(_PART, None)
        for key, item in text.items():
            yield from _below((*path, str(key)), item, raw[key])
    elif isinstance(text, list) and path[-1] in _TABLES and len(path) == 1:
        for entry, below in zip(text, raw, strict=True):
            yield from _below((*path, _name(path[0], entry)), entry, below)
    elif isinstance(text, list) and path[-1] in _SETS:
        if path[-1] == "priorities":
            yield path, _Leaf(", ".join(sorted(map(str, text))), None)
        for item in text:
            yield (*path, str(item)), _Leaf(_ITEM, None)
    elif isinstance(text, list):
        yield path, _Leaf(", ".join(map(str, text)) or "none", None)
    else:
        yield path, _Leaf(str(text), _rank(text, raw))


def _name(kind: str, entry: Mapping[str, Any]) -> str:
    return f"{entry['team']} per {entry['per']}" if kind == "budgets" else str(entry["name"])


def _rank(text: object, raw: object) -> float | None:
    if isinstance(text, str) and text in _RANKS:
        return float(_RANKS[text])
    if isinstance(raw, str) and raw == text and " GPU-hours" in raw:
        return float(raw.partition(" ")[0])
    return float(raw) if isinstance(raw, (int, float)) and not isinstance(raw, bool) else None


def _told_above(path: tuple[str, ...], before: Mapping[Any, Any], after: Mapping[Any, Any]) -> bool:
    """Whether a whole part that is new or gone has been told already."""
    above = [path[:length] for length in range(1, len(path))]
    return any((each in before) != (each in after) for each in above)


# -- meaning


def _change(path: tuple[str, ...], was: _Leaf | None, now: _Leaf | None, *, soft: bool) -> Change:
    """What a change means; a budget that was and is soft touches no job."""
    pattern, sense = _sense(path)
    effect = Effect.DIFFERENT
    if sense is not None:
        grown = _grown(was, now)
        if grown is not None:
            effect = sense.more if grown else _OPPOSITE[sense.more]
    whom = "" if sense is None or sense.whom is None else path[sense.whom]
    if pattern.startswith("budgets."):
        whom = path[1].partition(" per ")[0]
        if soft:
            effect = Effect.DIFFERENT
    old, new = (None if each is None else each.text for each in (was, now))
    return Change(".".join(path), old, new, effect, whom)


def _sense(path: tuple[str, ...]) -> tuple[str, _Sense | None]:
    for pattern, sense in _SENSES.items():
        steps = pattern.split(".")
        if len(steps) == len(path) and all(
            step in ("*", name) for step, name in zip(steps, path, strict=True)
        ):
            return pattern, sense
    return ".".join(path), None


def _grown(was: _Leaf | None, now: _Leaf | None) -> bool | None:
    """Whether there is more than before; None where that cannot be said."""
    if was is None or now is None:
        return was is None
    if was.rank is None or now.rank is None or was.rank == now.rank:
        return None
    return now.rank > was.rank
