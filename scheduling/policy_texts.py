"""A policy as people write it: every value with its unit, as plain dicts and lists, and as YAML."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator

from gpuwarden import durations, quantities
from gpuwarden.budget_terms import Limit, written
from gpuwarden.hours import parse_clock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuwarden.scheduling.policies import Policy

_SIZES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def policy_yaml(policy: Policy) -> str:
    """A policy as YAML that reads back as the same policy."""
    return str(yaml.dump(as_written(policy), sort_keys=False, allow_unicode=True, width=100))


def as_written(model: BaseModel) -> dict[str, Any]:
    """The fields of a model as a person would write them; what is None is left out.

    Args:
        model: a policy, or a part of one.
    """
    found = {}
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        if value is not None:
            found[info.alias or name] = _text(value, info.annotation, info.metadata)
    return found


def flat(written: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """A policy as it is written, by the path of each value: `teams.vision.share` -> 3.

    The order of entries is not in it; in what is written, only that of cards means anything.

    Args:
        written: as `as_written` gives it, also after a way through JSON.
        above: path of it.
    """
    found: dict[str, str] = {}
    for key, value in written.items():
        path = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping):
            found |= flat(value, path)
        elif isinstance(value, (list, tuple)):
            entries = [each for each in value if isinstance(each, Mapping)]
            for each in entries:
                name = each.get("name") or f"{each.get('team')} per {each.get('per')}"
                found |= flat(each, f"{path}.{name}")
            if not entries:
                found[path] = ", ".join(sorted(map(str, value)))
        else:
            found[path] = str(value)
    return found


def _text(value: Any, annotation: Any, beside: Sequence[Any]) -> Any:
    if isinstance(value, BaseModel):
        return as_written(value)
    if isinstance(value, Limit):
        return written(value)
    wanted, beside = next(_plain(annotation, tuple(beside)))
    inner = get_args(wanted)
    if isinstance(value, tuple):
        return [_text(item, inner[0], ()) for item in value]
    if isinstance(value, Mapping):
        return {key: _text(item, inner[1], ()) for key, item in value.items()}
    readers = [each.func for each in beside if isinstance(each, BeforeValidator)]
    write = next((_WRITERS[reader] for reader in readers if reader in _WRITERS), None)
    return value if write is None else write(value)


def _plain(annotation: Any, beside: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """What an annotation wants where it is not None, with what pydantic keeps beside it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _plain(inner[0], (*beside, *inner[1:]))
    elif origin in (Union, types.UnionType):
        for member in inner:
            if member is not type(None):
                yield from _plain(member, beside)
    else:
        yield annotation, beside


def _share(value: float) -> str:
    return f"{value * 100:.12g}%"


def _clock(value: int) -> str:
    return f"{value // 60:02d}:{value % 60:02d}"


def _size(value: float) -> str:
    for unit, size in _SIZES:
        if value % size == 0:
            return f"{value / size:.0f}{unit}"
    return f"{value:.9f}".rstrip("0").rstrip(".") + "B"


_WRITERS: Mapping[Any, Callable[[Any], str]] = {
    quantities.parse_duration: durations.render,
    quantities.parse_ratio: _share,
    quantities.parse_bytes: _size,
    parse_clock: _clock,
}
"""What reads a value -> what writes it."""
