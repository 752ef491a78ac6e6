"""A Prometheus that holds a day."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.reports.days import history
from tests.servers import Server, backfill, prometheus

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Prometheus that holds the day."""
    storage = tmp_path_factory.mktemp("day") / "tsdb"
    backfill("\n".join([*history(), "# EOF\n"]), storage)
    with prometheus("global: {}\n", storage) as running:
        yield running
