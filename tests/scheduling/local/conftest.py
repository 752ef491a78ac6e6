"""Lab boxes that tests open, and that end with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.scheduling.local.boxes import LabBox
from tests.scheduling.local.labs import quick

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def open_lab(tmp_path: Path) -> Iterator[Callable[..., LabBox]]:
    """Opens boxes of two cards under a policy, and ends what runs in them."""
    made: list[LabBox] = []

    def opened(engine: str | None = None, **changes: Any) -> LabBox:
        made.append(LabBox(tmp_path, quick(**changes), cards=2, engine=engine))
        return made[-1]

    yield opened
    for each in made:
        each.close()


@pytest.fixture
def lab(open_lab: Callable[..., LabBox]) -> LabBox:
    """A box of two cards, in which a job may be asked at once."""
    return open_lab()
