"""What an API server with Kueue's CRDs would say of an object: types, unknown fields, CEL rules.

tests/kueue_schemas.json holds the schemas, as Kueue publishes them. As a server does: absent fields
get their defaults first, rules that speak of `oldSelf` run only on a change, and what no schema
knows is refused rather than dropped, so that a typing error is seen.
"""

from __future__ import annotations

import copy
import datetime as dt
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import celpy
from celpy.adapter import json_to_cel

Json = dict[str, Any]

DOCUMENT: Json = json.loads((Path(__file__).parent / "kueue_schemas.json").read_text())
API_VERSION: str = DOCUMENT["apiVersion"]
KINDS: dict[str, Json] = DOCUMENT["kinds"]
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}
_BOUNDS = {
    "minimum": (lambda value, limit: value >= limit),
    "maximum": (lambda v, limit: v <= limit),
}
_SIZES = {
    "minLength": (str, lambda size, limit: size >= limit),
    "maxLength": (str, lambda size, limit: size <= limit),
    "minItems": (list, lambda size, limit: size >= limit),
    "maxItems": (list, lambda size, limit: size <= limit),
    "minProperties": (dict, lambda size, limit: size >= limit),
    "maxProperties": (dict, lambda size, limit: size <= limit),
}


def completed(found: Json) -> Json:
    """An object with the defaults that its schema gives to what it leaves out."""
    body = copy.deepcopy(found)
    _fill(KINDS[found["kind"]]["schema"], body)
    return body


def findings(found: Json, before: Json | None = None) -> list[str]:
    """Everything that is wrong with an object, completed first; before: as it was."""
    schema = KINDS[found["kind"]]["schema"]
    body = completed(found)
    old = None if before is None else completed(before)
    if found.get("apiVersion") != API_VERSION:
        return [f"apiVersion: {found.get('apiVersion')!r}"]
    return _look(schema, body, old, found["kind"])


def _fill(schema: Json, value: Any) -> None:
    if isinstance(value, dict):
        for name, part in schema.get("properties", {}).items():
            if name not in value and "default" in part:
                value[name] = copy.deepcopy(part["default"])
            if name in value:
                _fill(part, value[name])
        more = schema.get("additionalProperties")
        if isinstance(more, dict):
            for item in value.values():
                _fill(more, item)
    elif isinstance(value, list):
        for item in value:
            _fill(schema.get("items", {}), item)


def _look(schema: Json, value: Any, old: Any, path: str) -> list[str]:
    if schema.get("x-kubernetes-int-or-string"):
        good = isinstance(value, int) or (
            isinstance(value, str) and re.fullmatch(schema.get("pattern", ".*"), value)
        )
        return [] if good and not isinstance(value, bool) else [f"{path}: {value!r} is no quantity"]
    kind = schema.get("type")
    # A bool is an int to Python, and to no server.
    odd = isinstance(value, bool) and kind != "boolean"
    if kind and (odd or not isinstance(value, _TYPES[kind])):
        return [f"{path}: {value!r} is no {kind}"]
    said = _values(schema, value, path)
    if isinstance(value, dict):
        said += _fields(schema, value, old, path)
    elif isinstance(value, list):
        said += _list(schema, value, old, path)
    for rule in schema.get("x-kubernetes-validations", ()):
        if ("oldSelf" not in rule["rule"] or old is not None) and not _holds(
            rule["rule"], value, old
        ):
            said.append(f"{path}: {rule.get('message', rule['rule'])}")
    return said


def _values(schema: Json, value: Any, path: str) -> list[str]:
    said = []
    if "enum" in schema and value not in schema["enum"]:
        said.append(f"{path}: {value!r} is none of {schema['enum']}")
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        said.append(f"{path}: {value!r} is not like {schema['pattern']}")
    if schema.get("format") == "date-time" and isinstance(value, str):
        try:
            dt.datetime.fromisoformat(value)
        except ValueError:
            said.append(f"{path}: {value!r} is no time")
    if schema.get("format") == "int32" and isinstance(value, int) and abs(value) >= 2**31:
        said.append(f"{path}: {value} is too large")
    said += [
        f"{path}: {value!r} against {name} {schema[name]}"
        for name, within in _BOUNDS.items()
        if name in schema and not within(value, schema[name])
    ]
    said += [
        f"{path}: its length {len(value)} against {name} {schema[name]}"
        for name, (kind, within) in _SIZES.items()
        if name in schema and isinstance(value, kind) and not within(len(value), schema[name])
    ]
    return said


def _fields(schema: Json, value: Json, old: Any, path: str) -> list[str]:
    said = [
        f"{path}.{name} is required" for name in schema.get("required", ()) if name not in value
    ]
    known, more = schema.get("properties", {}), schema.get("additionalProperties")
    before = old if isinstance(old, dict) else {}
    for name, item in value.items():
        part = known.get(name) or (more if isinstance(more, dict) else None)
        if part is not None:
            said += _look(part, item, before.get(name), f"{path}.{name}")
        elif known and not schema.get("x-kubernetes-preserve-unknown-fields"):
            said.append(f"{path}.{name} is unknown")
    return said


def _list(schema: Json, value: list[Any], old: Any, path: str) -> list[str]:
    said, keys = [], schema.get("x-kubernetes-list-map-keys", ())
    if keys:
        ids = [tuple(item.get(key) for key in keys) for item in value if isinstance(item, dict)]
        if len(set(ids)) != len(ids):
            said.append(f"{path}: two items with the same {', '.join(keys)}")
    elif schema.get("x-kubernetes-list-type") == "set" and len({*map(str, value)}) != len(value):
        said.append(f"{path}: an item twice")
    before = {
        tuple(item.get(key) for key in keys): item
        for item in (old if isinstance(old, list) and keys else ())
    }
    for index, item in enumerate(value):
        same = before.get(tuple(item.get(key) for key in keys)) if keys else None
        said += _look(schema.get("items", {}), item, same, f"{path}[{index}]")
    return said


@lru_cache(maxsize=256)
def _program(rule: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def _holds(rule: str, value: Any, old: Any) -> bool:
    names = {"self": json_to_cel(value)}
    if old is not None:
        names["oldSelf"] = json_to_cel(old)
    return bool(_program(rule).evaluate(names))
