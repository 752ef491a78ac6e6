"""Tables of the reference pages, generated from the types of what people write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from gpuwarden import durations

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic.fields import FieldInfo

    from gpuwarden.fields import Strict


def field_table(kind: type[Strict], definitions: Mapping[str, Any]) -> Iterator[str]:
    """The keys of a mapping as a table in Markdown.

    Args:
        kind: of the mapping.
        definitions: of the schema of the whole file, for a type whose own schema is a reference.
    """
    yield "| key | value | default | meaning |"
    yield "| --- | --- | --- | --- |"
    schema = kind.model_json_schema(by_alias=True)
    own = schema.get("properties") or definitions[kind.__name__]["properties"]
    for name, info in kind.model_fields.items():
        key = info.alias or name
        value = _value(own[key], schema.get("$defs", definitions))
        default = "mandatory" if info.is_required() else _default(info, own[key])
        yield f"| `{key}` | {value} | {default} | {_one_line(info.description or '')} |"


def _default(info: FieldInfo, schema: Mapping[str, Any]) -> str:
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is None or value in ("", (), {}):
        return "none"
    if isinstance(value, BaseModel):
        return "as below"
    if isinstance(value, tuple):
        shares = str(schema.get("items", {}).get("examples", "")).endswith("%']")
        return ", ".join(f"`{item:.0%}`" if shares else f"`{item}`" for item in value)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{durations.render(value)}`" if isinstance(value, float) else f"`{value}`"


def _value(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """What may be written, in few words."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    options = [item for item in schema.get("anyOf", ()) if item.get("type") != "null"]
    if "examples" in schema:
        return "like " + ", ".join(f"`{item}`" for item in schema["examples"])
    if "enum" in schema:
        return ", ".join(f"`{item}`" for item in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "oneOf" in schema or "discriminator" in schema:
        return "a condition"
    if options:
        return _value(options[0], definitions)
    names = {
        "string": "text",
        "integer": "whole number",
        "boolean": "true or false",
        "object": "mapping",
        "array": "list",
        "number": "number",
    }
    return names.get(schema.get("type", ""), "value")


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
