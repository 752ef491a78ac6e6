"""The templates of reports: where they lie, and how they are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER: Final = Path(__file__).resolve().parent / "templates"


def environment(**filters: Callable[..., Any]) -> Environment:
    """An environment that escapes every value, and in which a name that is none is an error."""
    found = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= filters
    return found
