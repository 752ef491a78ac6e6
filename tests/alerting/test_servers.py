"""The helpers that every suite with real servers relies on."""

from __future__ import annotations

import urllib.error
from typing import TYPE_CHECKING

import pytest
from tests.servers import ServerFailed, alertmanager, backfill, fetch, prometheus, until

if TYPE_CHECKING:
    from pathlib import Path


def test_prometheus_serves_backfilled_history(tmp_path: Path) -> None:
    """History written before the start answers queries at its own time."""
    backfill("# TYPE x gauge\nx 1 1000\nx 3 1010\n# EOF\n", tmp_path / "tsdb")
    with prometheus("global: {}\n", tmp_path / "tsdb") as server:
        (row,) = server.query("max_over_time(x[1m])", at=1015)
    assert row["value"][1] == "3"


def test_a_killed_server_comes_back_on_its_port(tmp_path: Path) -> None:
    """`kill` and `start` are a crash and a restart at the same address."""
    config = "route: {receiver: nobody}\nreceivers: [{name: nobody}]\n"
    with alertmanager(config, tmp_path / "state") as server:
        first = server.pid
        server.kill()
        with pytest.raises(OSError, match="refused"):
            fetch(server.url + "/-/ready")
        server.start()
        assert server.pid != first
        assert server.json("/api/v2/alerts") == []


def test_a_refused_configuration_is_told_with_the_log(tmp_path: Path) -> None:
    """A server that ends at once raises what it wrote, not a timeout."""
    with pytest.raises(ServerFailed, match="nonsense"), prometheus("nonsense: 1", tmp_path / "d"):
        pass


def test_waiting_ends_at_its_deadline() -> None:
    """A probe that never answers raises, and keeps its last error."""

    def refuse() -> bool:
        raise urllib.error.URLError("no")

    with pytest.raises(TimeoutError) as caught:
        until(refuse, 0)
    assert isinstance(caught.value.__cause__, urllib.error.URLError)
