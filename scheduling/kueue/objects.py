"""Objects of the API as fields with texts: what is compared, told and written. Pure.

A map is followed by its keys, a list of named things by their names; what a server writes otherwise
than it was told (quantities, above all) is compared by what it means.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final

import yaml

from gpuwarden.scheduling.engines import By, EngineObject, FoundObject
from gpuwarden.scheduling.kueue import names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpuwarden.platforms.kubernetes import Json
    from gpuwarden.scheduling.policies import Policy

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?)([munkMGTPE]|[KMGTPE]i|)")
_POWERS: Final = {
    "n": -9,
    "u": -6,
    "m": -3,
    "": 0,
    "k": 3,
    "M": 6,
    "G": 9,
    "T": 12,
    "P": 15,
    "E": 18,
}
_QUANTITIES: Final = frozenset({"nominalQuota", "borrowingLimit", "lendingLimit", "storage"})
_WHOLE: Final = {
    "ResourceFlavor": ("spec",),
    "Cohort": ("spec",),
    "AdmissionCheck": ("spec",),
    "LocalQueue": ("spec",),
    "WorkloadPriorityClass": ("value", "description"),
    "ValidatingAdmissionPolicyBinding": ("spec",),
    "ClusterRole": ("rules",),
    "Role": ("rules",),
    "ClusterRoleBinding": ("roleRef", "subjects"),
    "RoleBinding": ("roleRef", "subjects"),
}
"""Kinds of which every field counts; of the others only those that we write, for a server adds."""
_DEEP: Final = frozenset({"ValidatingAdmissionPolicyBinding"})
"""Kinds of those in which anything more, however deep, means something else."""
_OPTIONAL: Final = {
    "ClusterQueue": (
        "spec.admissionChecksStrategy.admissionChecks",
        "spec.cohortName",
        "spec.resourceGroups",
    )
}
"""Fields that count also where we write none."""
SHIFT: Final = "moved by bookings"
"""Not a field of the API: what stands on a queue of bookings, and cannot be believed."""
_SHIFTED: Final = frozenset({"ClusterQueue", "Cohort"})
_LISTS: Final = {"ValidatingAdmissionPolicy": ("matchConditions", "variables")}
"""Lists of a spec to which others may add by names of their own: each is written as a whole."""
_SERVERS: Final = {
    "LocalQueue": {"spec.stopPolicy": "None"},
}
"""What a server writes into fields that nobody has set: no difference."""


def engine_object(body: Json, *, note: str = "", by: By = By.APPLY) -> EngineObject:
    """An object as the port knows it.

    Args:
        body: of the object.
        note: what a person has to do for it.
        by: who puts it in place.
    """
    kind = str(body["kind"])
    text = yaml.safe_dump(body, sort_keys=False, width=1000, allow_unicode=True)
    return EngineObject(kind, title(body), values_of(body), text, by, note)


def found_object(body: Json, kind: str, *, policy: Policy, shift: str = "") -> FoundObject:
    """An object of the server's as the port knows it.

    Args:
        body: of the object, which need not say its kind.
        kind: of it.
        policy: whose mark is looked for.
        shift: why what stands on it of bookings is not believed.
    """
    labels = body.get("metadata", {}).get("labels") or {}
    marked = all(labels.get(key) == value for key, value in names.marks(policy).items())
    values = values_of({**body, "kind": kind})
    return FoundObject(kind, title(body), values | ({SHIFT: shift} if shift else {}), marked)


def title(body: Json) -> str:
    """`namespace/name`, or the name of what is in no namespace."""
    metadata = body["metadata"]
    space = metadata.get("namespace")
    return f"{space}/{metadata['name']}" if space else str(metadata["name"])


def place_of(name: str) -> tuple[str | None, str]:
    """Namespace and name of a title."""
    space, slash, own = name.rpartition("/")
    return (space if slash else None), own


def values_of(body: Json) -> dict[str, str]:
    """What of an object is compared, by field."""
    kind = str(body["kind"])
    parts = _WHOLE.get(kind, ("spec", "rules", "value"))
    found = {
        path: text
        for part in parts
        if part in body
        for path, text in _leaves(body[part], part, part)
    }
    for path, usual in _SERVERS.get(kind, {}).items():
        if found.get(path) == usual:
            del found[path]
    for path in _OPTIONAL.get(kind, ()):
        found.setdefault(path, "")
    if kind in _WHOLE:
        # What is there and not wanted must be seen: the fields' names are a field too.
        deep = kind in _DEEP
        found["fields"] = ", ".join(sorted(path for path in found if deep or path.count(".") < 3))
    if kind in _SHIFTED:
        found[SHIFT] = ""
    return found


def is_same(wanted: Mapping[str, str], found: Mapping[str, str]) -> bool:
    """Whether an object is as it should be."""
    return all(found.get(path) == text for path, text in wanted.items())


def leftovers(wanted: Json, found: Json) -> dict[str, Any]:
    """A merge patch that takes away what somebody else has added to an object of ours.

    Only of kinds of which every field counts: an apply leaves there what it has not set itself.

    Args:
        wanted: the object as it should be.
        found: as it is after an apply.

    Returns:
        The patch, empty where nothing is too much.
    """
    kind = str(wanted["kind"])
    patch: dict[str, Any] = {}
    for part in _WHOLE.get(kind, ()):
        if isinstance(found.get(part), dict):
            more = _more(wanted.get(part) or {}, found[part])
            for path in _SERVERS.get(kind, {}):
                more.pop(path.rpartition(".")[2], None)
            if more:
                patch[part] = more
    for name in _LISTS.get(kind, ()):
        if wanted["spec"].get(name) != found["spec"].get(name):
            patch.setdefault("spec", {})[name] = wanted["spec"].get(name)
    return patch


def _more(wanted: Json, found: Json) -> dict[str, Any]:
    more: dict[str, Any] = {}
    for key, item in found.items():
        if key not in wanted:
            more[key] = None
        elif isinstance(item, dict) and isinstance(wanted[key], dict):
            inner = _more(wanted[key], item)
            more |= {key: inner} if inner else {}
    return more


def _leaves(value: Any, path: str, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if item not in (None, {}, []):
                yield from _leaves(item, f"{path}.{key}", str(key))
    elif isinstance(value, list) and (keys := _keys(value)) is not None:
        yield path, ", ".join(keys)
        for key, item in zip(keys, value, strict=True):
            rest = {each: part for each, part in item.items() if each != "name"}
            yield from _leaves(rest, f"{path}[{key}]", name)
    else:
        yield path, _text(value, name)


def _keys(value: Sequence[Any]) -> list[str] | None:
    """By what the things of a list are told apart, or None where they are not."""
    if not value or not all(isinstance(item, dict) for item in value):
        return None
    keys = [
        item.get("name") or "+".join(item.get("coveredResources") or ()) or None for item in value
    ]
    if any(not isinstance(key, str) for key in keys) or len({*keys}) != len(keys):
        return None
    return [str(key) for key in keys]


def _text(value: Any, name: str) -> str:
    if name in _QUANTITIES:
        return canonical(str(value))
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def canonical(quantity: str) -> str:
    """A quantity as a plain number, so that `2k`, `2000` and `2000000m` are one.

    Returns:
        The number; what is no quantity as it is.
    """
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        return quantity
    number, suffix = match.groups()
    try:
        base = Decimal(number)
    except InvalidOperation:
        return quantity
    if suffix.endswith("i"):
        base *= Decimal(1024) ** (_POWERS[suffix[0].replace("K", "k")] // 3)
    else:
        base = base.scaleb(_POWERS[suffix])
    return f"{base.normalize():f}"
