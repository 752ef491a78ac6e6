"""A Prometheus that holds the generated day and the brief scenarios, recorded series included."""

from __future__ import annotations

import fcntl
import os
import shutil
from typing import TYPE_CHECKING

import pytest
from tests.grafana import recordings
from tests.grafana.histories import DAY
from tests.grafana.scenarios import SCENARIOS
from tests.servers import Server, backfill, prometheus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.grafana.histories import Window

NO_CONFIG = "global: {}\n"


@pytest.fixture(scope="session")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server. The database is made once in a run of the tests, whatever its workers."""
    own = tmp_path_factory.mktemp("past")
    several = "PYTEST_XDIST_WORKER" in os.environ
    made = (tmp_path_factory.getbasetemp().parent if several else own) / "past-of-all"
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            building = own / "building"
            _write(building)
            building.rename(made)
    # a server locks its folder; blocks are never changed, and their files can be shared
    storage = own / "tsdb"
    shutil.copytree(made, storage, copy_function=os.link, ignore=shutil.ignore_patterns("lock"))
    with prometheus(NO_CONFIG, storage) as server:
        yield server


def _write(storage: Path) -> None:
    """Histories first, then recorded series layer by layer: each rests on what is there."""
    for scenario in SCENARIOS:
        _fill(scenario.history().text(), storage, scenario.window)
    for layer in recordings.layers():
        with prometheus(NO_CONFIG, storage) as server:
            texts = [recordings.recorded(server, layer, one.window) for one in SCENARIOS]
        for scenario, text in zip(SCENARIOS, texts, strict=True):
            _fill(text, storage, scenario.window)


def _fill(text: str, storage: Path, window: Window) -> None:
    path = storage.with_name("history.txt")
    path.write_text(text)
    backfill(path, storage, block="54h" if window is DAY else "2h")
    path.unlink()
