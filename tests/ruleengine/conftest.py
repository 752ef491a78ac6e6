"""Fixtures that several suites of the engine share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import World, world

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[World]:
    """The servers and files of a world whose engine is not yet running."""
    with world(tmp_path) as made:
        yield made
