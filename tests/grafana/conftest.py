"""A Prometheus that holds an hour of the fleet, recorded series included."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.grafana import histories
from tests.servers import Server, backfill, binary, prometheus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RULES = Path(__file__).parents[2] / "alerting" / "rules" / "recording.yml"
DEPTH = 3
"""Recorded series rest on recorded ones, this deep; promtool fills in one layer at a time."""


@pytest.fixture(scope="session")
def history_of() -> Callable[[Path, histories.History], None]:
    """Writes a history and its recorded series into a database that no server has open."""

    def write(storage: Path, history: histories.History) -> None:
        backfill(history.text(), storage)
        for _ in range(DEPTH):
            with prometheus("global: {}\n", storage) as server:
                _record(server, storage)

    return write


def _record(server: Server, storage: Path) -> None:
    done = subprocess.run(
        [
            binary(("promtool",)),
            "tsdb",
            "create-blocks-from",
            "rules",
            f"--url={server.url}",
            f"--start={histories.START}",
            f"--end={histories.END}",
            "--eval-interval=15s",
            f"--output-dir={storage}",
            str(RULES),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def healthy(
    tmp_path_factory: pytest.TempPathFactory,
    history_of: Callable[[Path, histories.History], None],
) -> Iterator[Server]:
    """The fleet at work."""
    storage = tmp_path_factory.mktemp("healthy") / "tsdb"
    history_of(storage, histories.fleet())
    with prometheus("global: {}\n", storage) as server:
        yield server
