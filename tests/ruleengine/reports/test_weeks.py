"""A whole week of a fleet: everything that a report can tell is told."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.reports import weeks
from tests.servers import prometheus

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.sweep
def test_a_week_is_told_whole(tmp_path: Path) -> None:
    """No section says that it knows nothing, and the outage is a gap in the right place."""
    weeks.write(tmp_path)
    with prometheus("global: {}\n", tmp_path / "tsdb") as server:
        text = weeks.page(tmp_path, server).read_text()

    assert "Not known" not in text
    assert "GPU fleet, 9 to 15 June 2025" in text
    heat = re.search(r"<svg[^>]*Utilisation by hour of the week.*?</svg>", text, re.DOTALL)
    assert heat is not None
    assert heat[0].count('class="gap"') == 3  # three hours of Wednesday
    assert "10 people of 4 teams" in text
