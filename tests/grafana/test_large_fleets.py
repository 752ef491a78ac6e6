"""The boards on a fleet of 10,000 cards: what chooses among all cards does choose.

How many series a query has at most is computed by the linter (`grafana.answers`); this shows on a
real Prometheus that the panels which choose among all cards do choose, and what they choose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from grafana import owners
from tests.grafana.asking import ask, target_of
from tests.grafana.histories import BASE, Window
from tests.grafana.scenarios import Scenario
from tests.servers import Server, backfill, prometheus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NODES, CARDS_OF_NODE, USERS = 1250, 8, 800
STEP, SECONDS = 60, 3000
LARGE = Scenario(Window("large", BASE, BASE + SECONDS, BASE))
IDLE = range(0, 10_000, 400)
"""Cards that are held and idle, 25 of them; every tenth of the others is free."""

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(600)]


def _lines() -> Iterator[str]:
    times = range(LARGE.window.start, LARGE.window.end + 1, STEP)

    def family(name: str, series: Iterator[tuple[str, float | None]]) -> Iterator[str]:
        yield f"# TYPE {name} gauge\n"
        for labels, value in series:
            for time in times:
                yield f"{name}{{{labels}}} {time if value is None else value} {time}\n"

    def node(place: int) -> str:
        return f'instance="n{place:04}:9835"'

    def card(number: int) -> str:
        place, gpu = divmod(number, CARDS_OF_NODE)
        return f'{node(place)},gpu="{gpu}",uuid="GPU-{number}"'

    exporter, all_nodes = 'job="gpuwarden",', range(NODES)
    cards = range(NODES * CARDS_OF_NODE)
    for name, value in (("up", 1), ("gpuwarden_snapshot_timestamp_seconds", None)):
        yield from family(name, ((exporter + node(place), value) for place in all_nodes))
    yield from family("gpu_up", ((exporter + card(number), 1) for number in cards))
    yield from family("gpu_memory_used_bytes", ((exporter + card(one), 2e10) for one in cards))
    held = [number for number in cards if number in IDLE or number % 10]

    def use(number: int) -> str:
        if number not in held_at_all:
            return 'use="free"'
        word = "idle" if number in IDLE else "busy"
        return f'user="u{number % USERS}",owners="1",use="{word}"'

    held_at_all = frozenset(held)
    yield from family("card:owner_use:info", ((f"{card(n)},{use(n)}", 1) for n in cards))
    yield from family("card:gpu_busy:bool1m", ((card(n), float(n not in IDLE)) for n in held))
    yield from family("card:gpu_held_idle:bool5m", ((card(n), float(n in IDLE)) for n in held))
    yield from family(
        "user:team:info", ((f'user="u{place}",team="t{place % 60}"', 1) for place in range(USERS))
    )
    yield from family(
        "user:gpu_memory_bytes:sum", ((f'user="u{place}"', 1e9 * place) for place in range(USERS))
    )
    yield "# EOF\n"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Prometheus that holds fifty minutes of the large fleet."""
    folder: Path = tmp_path_factory.mktemp("large")
    history = folder / "history.txt"
    with history.open("w") as file:
        file.writelines(_lines())
    backfill(history, folder / "tsdb")
    history.unlink()
    with prometheus("global: {}\n", folder / "tsdb") as server:
        yield server


def test_the_grid_shows_the_cards_that_are_held_idle(large: Server) -> None:
    """Sixty rows and that of the nodes: all that are idle, whichever nodes they are on."""
    series = target_of("Who holds which GPU").ask(large, LARGE, over="40m")
    rows = {one["metric"]["card"]: one["metric"]["cell"] for one in series}
    assert len(rows) == owners.MOST + 1
    assert rows[owners.EVERY] == f"{NODES} seen"
    idle = {card for card, cell in rows.items() if cell.endswith("· idle")}
    assert len(idle) == len(IDLE)


def test_tables_and_graphs_of_the_fleet_choose(large: Server) -> None:
    """A hundred nodes, twelve users: not one more, at whatever moment of the range."""
    assert len(target_of("Nodes").ask(large, LARGE, over="40m")) == 100
    users = target_of("GPU memory by user").ask(large, LARGE, over="40m")
    assert {one["metric"]["user"] for one in users} == {f"u{n}" for n in range(788, 800)}


def test_a_nodes_cards_are_all_shown_when_it_is_chosen(large: Server) -> None:
    """Choosing a node shows what was not among the sixty."""
    series = target_of("Who holds which GPU").ask(large, LARGE, over="40m", node="n0777:9835")
    rows = {one["metric"]["card"] for one in series}
    assert {f"n0777:9835 GPU {gpu}" for gpu in range(CARDS_OF_NODE)} <= rows
    figures = target_of("GPUs").ask(large, LARGE, node="n0777:9835")
    assert [one["value"][1] for one in figures] == [str(CARDS_OF_NODE)]
    assert ask(large, "count(up)", LARGE, instant=True)[0]["value"][1] == str(NODES)
