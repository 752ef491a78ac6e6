"""What all tests have in common: the order in which their files are handed out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what waits for minutes: at the end one process would be left with it."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/system/"))
