"""Reports from what the recording rules wrote: the same figures as sampled ones, and money."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from tests.grafana import recordings
from tests.grafana.histories import Window
from tests.ruleengine.reports.days import BEGIN, HOUR, PRICE, history
from tests.servers import Server, backfill, prometheus

from gpuwarden.ruleengine.reports.cli import report

if TYPE_CHECKING:
    from collections.abc import Iterator

WINDOW = Window("hour", BEGIN, BEGIN + HOUR, BEGIN)
SPAN = ("--from", "2025-06-15", "--to", "2025-06-15T13:00:00")
"""Longer than the hour of which Prometheus knows: short reports are always sampled."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An hour of the day at 5 s, with what alerting/rules would have written."""
    storage = tmp_path_factory.mktemp("recorded") / "tsdb"
    backfill("\n".join([*history(scrape=5, hours=1), "# EOF\n"]), storage)
    for layer in recordings.layers():
        with prometheus("global: {}\n", storage) as server:
            text = recordings.recorded(server, layer, WINDOW)
        backfill(text, storage)
    with prometheus("global: {}\n", storage) as running:
        yield running


def asked(server: Server, *more: str) -> dict[str, Any]:
    """The document that the command writes."""
    arguments = ["--prometheus", server.url, "--output", "json", *SPAN, *more]
    done = CliRunner().invoke(report, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_recorded_hours_are_those_that_were_used(recorded: Server) -> None:
    """An hour each of ana and ben, of which the first and last minutes may lie at an edge."""
    found = asked(recorded)

    sources = {row["measure"]: row["source"] for row in found["sources"]}
    assert sources["cards"] == "fleet:gpus:count"
    assert sources["held"] == "user:gpu_hours:sum5m"
    hours = {row["user"]: row["held_hours"] for row in found["people"]}
    assert hours == {"ana": pytest.approx(1, abs=0.1), "ben": pytest.approx(1, abs=0.1)}
    assert found["totals"]["card_hours"] == pytest.approx(3, abs=0.1)
    assert found["totals"]["idle_hours"] == pytest.approx(1, abs=0.15)
    assert found["worst"]["idle_jobs"][0]["job_id"] == "j-ben"
    assert found["totals"]["coverage"] == pytest.approx(1 / 13, abs=0.005)
    assert found["totals"]["utilization"] == pytest.approx(1.6 / 3, abs=0.01)


def test_money_is_hours_at_their_price(recorded: Server) -> None:
    """In every row, and their sum is the total."""
    found = asked(recorded)

    for person in found["people"]:
        assert person["cost"]["EUR"] == pytest.approx(PRICE * person["held_hours"], abs=0.02)
    total = sum(team["cost"]["EUR"] for team in found["teams"])
    assert found["totals"]["cost"]["EUR"] == pytest.approx(total, abs=0.02)
    assert found["totals"]["idle_cost"]["EUR"] == pytest.approx(
        PRICE * found["totals"]["idle_hours"], abs=0.05
    )
    assert "EUR" in found["answer"][1]


def test_a_teams_money_is_its_own(recorded: Server) -> None:
    """Of recorded series as well as of sampled ones."""
    found = asked(recorded, "--team", "vision")

    assert [row["user"] for row in found["people"]] == ["ana"]
    assert found["totals"]["cost"]["EUR"] == pytest.approx(PRICE, abs=0.25)


@pytest.mark.parametrize("chunk", ["55m"])
def test_portions_of_recorded_series_change_no_figure(recorded: Server, chunk: str) -> None:
    """However the questions are cut."""
    whole, cut = asked(recorded), asked(recorded, "--chunk", chunk)

    for document in (whole, cut):
        del document["made_at"], document["cost"]
    assert whole == cut
