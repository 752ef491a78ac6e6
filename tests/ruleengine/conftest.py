"""Fixtures that several suites of the engine share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ruleengine.engines import World, world


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[World]:
    """The servers and files of a world whose engine is not yet running."""
    with world(tmp_path) as made:
        yield made
