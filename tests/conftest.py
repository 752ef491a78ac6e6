"""What all tests have in common: the order in which their files are handed out, and patience."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import settings

if TYPE_CHECKING:
    import pytest

# How long an example takes is the machine's affair, and whatever else it does meanwhile.
settings.register_profile("gpuwarden", deadline=None)
settings.load_profile("gpuwarden")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what waits for minutes: at the end one process would be left with it."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/system/"))
