"""Records that lie as JSON where others may write, or that another version wrote: read with doubt.

A folder of states is copied, restored and shared, and a bucket has more writers than one. A number
that is a text would not be noticed where it is read, but where it is compared, in the middle of a
training.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")
_NONE = type(None)


def document(content: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: it is none.
    """
    try:
        data = json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 -- one error for bad content
    return data


def record(kind: type[T], data: dict[str, Any]) -> T:
    """A dataclass from the fields of an object; what it does not know is passed over.

    Args:
        kind: whose annotations say what each field may be: texts, numbers, truths, mappings and
            sequences of texts, and None.
        data: the object.

    Raises:
        ValueError: naming the field that is missing or of another kind.
    """
    given = {}
    for name, wanted in _wanted(kind).items():
        if name in data:
            if not _is(data[name], wanted):
                raise ValueError(f"{name} is not {_named(wanted)}")
            given[name] = tuple(data[name]) if _is_sequence(wanted) else data[name]
    try:
        return kind(**given)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _wanted(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {item.name: hints[item.name] for item in dataclasses.fields(kind)}


def _is(value: object, wanted: Any) -> bool:
    options = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    return any(_is_one(value, option) for option in options)


def _is_one(value: object, wanted: Any) -> bool:
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _fits(value)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool) and _fits(value)
    if _is_sequence(wanted):
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if typing.get_origin(wanted) is dict:
        return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    return isinstance(value, wanted)


def _fits(value: float) -> bool:
    """Whether a number is one of 64 bits; NaN is."""
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def _is_sequence(wanted: Any) -> bool:
    return typing.get_origin(wanted) is tuple


def _named(wanted: Any) -> str:
    return wanted.__name__ if isinstance(wanted, type) else str(wanted)
