"""Parts of objects of the API, which may be of any shape: what is not as documented is absent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuwarden.platforms.kubernetes import value_at

if TYPE_CHECKING:
    from gpuwarden.platforms.kubernetes import Json


def rows_at(found: Any, path: str) -> list[Json]:
    """The objects in a list at a dotted path."""
    value = value_at(found, path)
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def part_at(found: Any, path: str) -> Json:
    """The object at a dotted path."""
    value = value_at(found, path)
    return value if isinstance(value, dict) else {}
