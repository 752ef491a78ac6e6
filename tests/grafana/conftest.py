"""A Prometheus that holds the generated day and the brief scenarios, recorded series included."""

from __future__ import annotations

import fcntl
import os
import shutil
from typing import TYPE_CHECKING

import pytest
from tests.grafana import databases
from tests.grafana.scenarios import SCENARIOS
from tests.servers import Server, prometheus

if TYPE_CHECKING:
    from collections.abc import Iterator


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
            databases.write(building, SCENARIOS)
            building.rename(made)
    # Blocks are never changed, and their files can be shared; all else a server writes to, and
    # one dies of it when another cuts a file short that it has mapped.
    storage = own / "tsdb"
    own_files = shutil.ignore_patterns("lock", "queries.active", "wal", "chunks_head")
    shutil.copytree(made, storage, copy_function=os.link, ignore=own_files)
    with prometheus(databases.NO_CONFIG, storage, flags=[databases.SHORT]) as server:
        yield server
