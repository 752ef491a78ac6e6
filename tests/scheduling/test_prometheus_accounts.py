"""The engine's account beside that of a real Prometheus with the series of money.yml."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.scheduling.daemons import free_port, running
from tests.scheduling.policy_files import NOW, TEXT
from tests.servers import backfill, prometheus

from gpuwarden.scheduling.holdings import Holding

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers import Server

HOUR = 3600.0
STEPS = 12
"""Fives of minutes of an hour; each is written 15 s after its end."""


def history() -> str:
    """An hour in which vision held two cards and nobody's process one; ten minutes are missing."""
    lines = []
    for name, labels, value in (
        ("fleet:gpus_seen:count5m", "", 4.0),
        ("team:gpu_hours:sum5m", '{team="none"}', 1 / STEPS),
        ("team:gpu_hours:sum5m", '{team="vision"}', 2 / STEPS),
        ("user:gpu_hours:sum5m", '{team="vision",user="ana"}', 2 / STEPS),
        (
            "job:gpu_hours:sum5m",
            '{job_id="slurm-ci-7-0",team="vision",user="ana",project="cars",model="A100"}',
            1.5 / STEPS,
        ),
        (
            "job:gpu_hours:sum5m",
            '{job_id="slurm-ci-7-1",team="none",user="ana",project="none",model="A100"}',
            0.5 / STEPS,
        ),
        (
            "job:gpu_hours:sum5m",
            '{job_id="proc-1f-77-9",team="none",user="bo",project="none",model="A100"}',
            1 / STEPS,
        ),
    ):
        lines += [
            f"{name}{labels} {value} {NOW - HOUR + 300 * step + 15:.0f}"
            for step in range(1, STEPS + 1)
            if step not in (5, 6)
        ]
    return "\n".join([*lines, "# EOF\n"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Prometheus with that hour."""
    folder = tmp_path_factory.mktemp("prometheus")
    backfill(history(), folder / "tsdb")
    with prometheus("global: {}\n", folder / "tsdb") as found:
        yield found


def test_both_accounts_stand_side_by_side_and_the_difference_is_explained(
    server: Server, tmp_path: Path
) -> None:
    """By team and by user; what only the nodes saw has a line, what was not recorded is told."""
    held = Holding("slurm", "7", "ana", "vision", 2, NOW - HOUR, NOW, "a100-40")
    with running(tmp_path, TEXT, now=NOW, prometheus=server.url) as here:
        here.driver.held = (held,)
        here.tick(61)
        here.clock.now = NOW
        found = here.client.ask("GET", "/v1/usage", parameters={"from": "now-1h", "to": "now"})
        vision, none = found["lines"]
        assert (vision["name"], none["name"]) == ("vision", "none")
        assert vision["gpu_hours"] == pytest.approx(2)
        assert vision["prometheus_gpu_hours"] == pytest.approx(2 * 10 / 12)
        assert vision["difference_gpu_hours"] == pytest.approx(-2 * 2 / 12)
        assert (vision["apart"], none["apart"]) == (True, True)
        notes = " ".join(found["notes"])
        assert "recorded 83.3 % of this time" in notes
        assert "allocated and not opened" in notes
        assert "beside the engine" in notes
        users = here.client.ask(
            "GET", "/v1/usage", parameters={"by": "user", "from": "now-1h", "to": "now"}
        )
        (ana,) = users["lines"]
        assert ana["prometheus_gpu_hours"] == pytest.approx(2 * 10 / 12)
        jobs = here.client.ask("GET", "/v1/usage", parameters={"by": "job", "from": "now-1h"})
        seven, stray = jobs["lines"]
        assert (seven["name"], stray["name"], stray["user"]) == ("7", "proc-1f-77-9", "bo")
        assert seven["prometheus_gpu_hours"] == pytest.approx(2 * 10 / 12)
        assert stray["difference_gpu_hours"] == pytest.approx(10 / 12)
        mine = here.client.ask(
            "GET", "/v1/usage", parameters={"by": "job", "from": "now-1h", "team": "vision"}
        )
        (only,) = mine["lines"]
        assert only["prometheus_gpu_hours"] == pytest.approx(2 * 10 / 12)
        early = {"from": "2026-01-01", "to": "2026-01-02"}
        assert (
            "recorded nothing" in here.client.ask("GET", "/v1/usage", parameters=early)["notes"][-1]
        )


def test_a_prometheus_that_does_not_answer_takes_nothing_away(tmp_path: Path) -> None:
    """The engine's account is told alone, and why."""
    url = f"http://127.0.0.1:{free_port()}"
    with running(tmp_path, TEXT, now=NOW, prometheus=url) as here:
        here.driver.held = (Holding("slurm", "7", "ana", "vision", 2, NOW - HOUR, NOW, "a100-40"),)
        here.tick(61)
        here.clock.now = NOW
        found = here.client.ask("GET", "/v1/usage", parameters={"from": "now-1h"})
        assert found["total"]["gpu_hours"] == pytest.approx(2)
        assert found["total"]["prometheus_gpu_hours"] is None
        assert found["notes"][-1].startswith("Prometheus: ")
