"""What bookings have moved between quotas, written beside the moved ones. Pure.

An object whose quotas are moved says what they are without, so that whoever compares or applies a
policy knows the one from the other. It is believed only as far as a booking can have done it:
nothing else was changed since, no more is borrowed or lent, the cards do not become more, and the
booking is not over.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.platforms.kubernetes import value_at
from gpuwarden.scheduling.kueue import names
from gpuwarden.scheduling.kueue.objects import SHIFT, canonical, title, values_of
from gpuwarden.scheduling.kueue.shapes import part_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.platforms.kubernetes import Json

KINDS: Final = frozenset({"ClusterQueue", "Cohort"})
ANNOTATIONS: Final = (names.BOOKINGS_ANNOTATION, names.SHIFT_ANNOTATION)
LATE_SECONDS: Final = 120.0
"""So long after its end a booking's cards are back at the latest, where the controller is there."""
MAX_BYTES: Final = 64 * 1024
_GROUPS: Final = "spec.resourceGroups"
_ROW: Final = frozenset({"name", "nominalQuota", "borrowingLimit", "lendingLimit"})
_MAX_CARDS: Final = 1_000_000_000_000_000_000

Place = tuple[str, str]
"""Flavor and resource."""


class NotAShift(ValueError):
    """What stands beside quotas is not what a booking has written there."""


@dataclass(frozen=True, slots=True)
class Shift:
    """What an object was before bookings moved its quotas.

    Attributes:
        base: its resource groups without them.
        grown: cards that it has more, or less, than without.
    """

    base: list[Json]
    grown: Mapping[Place, int]


def annotations_of(bookings: str, base: Json, body: Json, *, until: float) -> dict[str, str]:
    """What is written on an object whose quotas bookings have moved.

    Args:
        bookings: their ids, by commas.
        base: the object without them.
        body: the object with them.
        until: Unix time at which the first of them ends.
    """
    note = {"base": _groups(base), "digest": _digest(_groups(body)), "until": until}
    text = json.dumps(note, sort_keys=True, separators=(",", ":"))
    return {names.BOOKINGS_ANNOTATION: bookings, names.SHIFT_ANNOTATION: text}


def is_noted(found: Json) -> bool:
    """Whether anything of bookings stands on an object."""
    notes = part_at(found, "metadata.annotations")
    return any(key in notes for key in ANNOTATIONS)


def shift_of(found: Json, now: float) -> Shift | None:
    """What was moved of an object, or None where nothing was.

    Args:
        found: a ClusterQueue or a cohort, as the API has it.
        now: Unix time.

    Raises:
        NotAShift: with words: what stands there cannot be believed.
    """
    notes = part_at(found, "metadata.annotations")
    if not is_noted(found):
        return None
    bookings, text = notes.get(names.BOOKINGS_ANNOTATION), notes.get(names.SHIFT_ANNOTATION)
    if not bookings or not isinstance(text, str) or len(text) > MAX_BYTES:
        raise NotAShift(f"{names.BOOKINGS_ANNOTATION} and {names.SHIFT_ANNOTATION} do not go along")
    try:
        note = json.loads(text)
        base, digest, until = note["base"], note["digest"], note["until"]
        before = _quotas(base, strictly=True)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise NotAShift(f"{names.SHIFT_ANNOTATION} cannot be read") from error
    if isinstance(until, bool) or not isinstance(until, int | float) or not math.isfinite(until):
        raise NotAShift(f"{names.SHIFT_ANNOTATION} cannot be read")
    if now > until + LATE_SECONDS:
        raise NotAShift(f"booking {bookings} is over, and no controller has moved its cards back")
    there = _groups(found)
    if digest != _digest(there):
        raise NotAShift(f"the quotas were changed since booking {bookings} had moved them")
    try:
        after = _quotas(there)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NotAShift("the quotas are of no shape that a booking leaves") from error
    return Shift(base, _grown(before, after))


def _grown(before: Mapping[Place, _Quota], after: Mapping[Place, _Quota]) -> dict[Place, int]:
    none = _Quota(0, 0, 0)
    grown = {}
    for place in {*before, *after}:
        old, new = before.get(place, none), after.get(place, none)
        if new.borrows != old.borrows or new.lends > old.lends:
            raise NotAShift("a booking changes what a queue has, and not what it borrows or lends")
        grown[place] = new.own - old.own
    return grown


def too_many(shifts: Sequence[Shift]) -> bool:
    """Whether all together make more cards than there are.

    Fewer there may be for a moment: who gives goes first.
    """
    total: Counter[Place] = Counter()
    for shift in shifts:
        total.update(shift.grown)
    return any(count > 0 for count in total.values())


def without_shifts(found: Sequence[Json], now: float) -> tuple[list[Json], dict[str, str]]:
    """Objects as they are without bookings, for comparisons.

    Args:
        found: all ClusterQueues and cohorts that are ours, with their kinds.
        now: Unix time.

    Returns:
        The same objects, moved quotas put back; and by `kind title` why one was left as it is.
    """
    shifts: dict[str, Shift] = {}
    refused: dict[str, str] = {}
    for item in found:
        try:
            shift = shift_of(item, now)
        except NotAShift as error:
            refused[_key(item)] = str(error)
        else:
            shifts |= {_key(item): shift} if shift is not None else {}
    if too_many([*shifts.values()]):
        words = "all that is written of bookings makes more cards than there are"
        refused |= dict.fromkeys(shifts, words)
        shifts = {}
    plain = [_with_groups(item, shifts.get(_key(item))) for item in found]
    return plain, refused


def kept(body: Json, found: Json, fields: Sequence[str], now: float) -> dict[str, Any]:
    """An object as it is to be written, with what bookings have moved of it.

    What moves the quotas themselves is written plainly, and the controller moves them anew.

    Args:
        body: as the policy has it.
        found: as the API has it.
        fields: that are to change.
        now: Unix time.
    """
    if any(field == SHIFT or field.startswith(_GROUPS) for field in fields):
        return {**body}
    try:
        shift = shift_of(found, now)
    except NotAShift:
        return {**body}
    if shift is None:
        return {**body}
    notes = part_at(found, "metadata.annotations")
    own = {key: notes[key] for key in ANNOTATIONS}
    metadata = {**body["metadata"], "annotations": own}
    return {
        **body,
        "metadata": metadata,
        "spec": {**body["spec"], "resourceGroups": _groups(found)},
    }


def stray(body: Json, found: Json) -> dict[str, None]:
    """Annotations of bookings that an apply has left there, for they are somebody else's."""
    wanted = part_at(body, "metadata.annotations")
    notes = part_at(found, "metadata.annotations")
    return {key: None for key in ANNOTATIONS if key in notes and key not in wanted}


def cards_of(found: Json) -> int:
    """How much an object has of everything together; 0 where that cannot be read."""
    try:
        return sum(quota.own for quota in _quotas(_groups(found)).values())
    except (ValueError, TypeError, KeyError, AttributeError):
        return 0


@dataclass(frozen=True, slots=True)
class _Quota:
    own: int
    borrows: int
    lends: int


def _quotas(groups: Any, *, strictly: bool = False) -> dict[Place, _Quota]:
    """Quotas by their places.

    Args:
        groups: of an object.
        strictly: with nothing but what we write.

    Raises:
        ValueError: it is of another shape; so are TypeError, KeyError and AttributeError.
    """
    found: dict[Place, _Quota] = {}
    if not isinstance(groups, list):
        raise TypeError("no groups")
    for group in groups:
        if strictly and {*group} != {"coveredResources", "flavors"}:
            raise ValueError("no group of ours")
        covered = group["coveredResources"]
        if not isinstance(covered, list) or not all(isinstance(each, str) for each in covered):
            raise TypeError("no resources")
        for flavor in group["flavors"]:
            if strictly and {*flavor} != {"name", "resources"}:
                raise ValueError("no flavor of ours")
            for row in flavor["resources"]:
                if strictly and not {*row} <= _ROW:
                    raise ValueError("no quota of ours")
                place = (flavor["name"], row["name"])
                if not all(isinstance(part, str) for part in place) or place in found:
                    raise ValueError("no place of its own")
                found[place] = _Quota(
                    _count(row["nominalQuota"]),
                    _count(row.get("borrowingLimit", "0")),
                    _count(row.get("lendingLimit", "0")),
                )
    return found


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError("no quantity")
    text = canonical(str(value))
    if not (text.isascii() and text.isdecimal()) or int(text) > _MAX_CARDS:
        raise ValueError("no quantity")
    return int(text)


def _groups(found: Json) -> list[Json]:
    value = value_at(found, _GROUPS)
    return [*value] if isinstance(value, list) else []


def _digest(groups: Sequence[Json]) -> str:
    values = values_of({"kind": "ClusterQueue", "spec": {"resourceGroups": groups}})
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _with_groups(found: Json, shift: Shift | None) -> Json:
    if shift is None:
        return found
    return {**found, "spec": {**part_at(found, "spec"), "resourceGroups": shift.base}}


def _key(found: Json) -> str:
    return f"{found['kind']} {title(found)}"
