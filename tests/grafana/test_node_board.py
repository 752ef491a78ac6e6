"""The Node board says whether a node and its cards are well, and whose memory is on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from grafana import node
from tests.grafana.asking import target_of
from tests.grafana.fleets import GIB
from tests.grafana.scenarios import (
    DEAD,
    HEALTHY,
    MIG,
    NOBODY,
    ONE_DEAD,
    SHARED,
    UNATTRIBUTED,
    Scenario,
)

if TYPE_CHECKING:
    from tests.servers import Server


def figure(
    past: Server, title: str, scenario: Scenario = HEALTHY, ref: str = "A", **variables: str
) -> list[float]:
    """The values of one query at the end of the scenario."""
    found = target_of(title, ref).ask(past, scenario, over="30m", **variables)
    return [float(row["value"][1]) for row in found]


def test_the_banner_of_a_healthy_node(past: Server) -> None:
    """A young snapshot, a driver that answers, and noughts that somebody looked for."""
    assert figure(past, "Exporter") == [1]
    assert figure(past, "Driver") == [1]
    for title in ("Cards lost", "Hardware XIDs", "ECC errors", "Unattributed"):
        assert figure(past, title) == [0], title
    (hottest,) = figure(past, "Hottest card")
    assert 70 < hottest < 85


@pytest.mark.parametrize("title", ["Cards lost", "Hardware XIDs", "ECC errors", "Driver"])
def test_a_dead_exporters_banner_is_dark_and_not_calm(past: Server, title: str) -> None:
    """Its age reads "dark", and what only it could tell is empty."""
    assert figure(past, "Exporter", DEAD) == [-1]
    assert figure(past, title, DEAD) == []


def test_one_node_is_shown_and_no_other(past: Server) -> None:
    """The node that lives beside a dead one is as it was."""
    assert figure(past, "Exporter", ONE_DEAD, node="n1:9835") == [-1]
    assert figure(past, "Exporter", ONE_DEAD, node="n2:9835") == [1]


def test_instances_stand_among_the_cards(past: Server) -> None:
    """A cut card has n/a for its use, and its instances have their own memory."""
    used = target_of("Cards", "D").ask(past, MIG, node="n3:9835")
    memory = {row["metric"]["uuid"]: float(row["value"][1]) for row in used}
    assert memory["MIG-a"] == 8 * GIB
    assert memory["MIG-c"] == 0
    assert figure(past, "Cards", MIG, "C", node="n3:9835") == [-1] * 4


def test_processes_name_their_owners(past: Server) -> None:
    """Each with its memory, use and age; a use that is not measured is n/a."""
    rows = target_of("Processes").ask(past, SHARED)
    found = {(row["metric"]["gpu"], row["metric"]["user"]): row["value"][1] for row in rows}
    assert found == dict.fromkeys(
        (("0", "ana"), ("0", "ben"), ("1", "cho"), ("1", "eve")), str(12 * GIB)
    )
    assert sorted(figure(past, "Processes", SHARED, "B")) == [-1, -1, 0.3, 0.5]


def test_memory_of_nobody_is_a_row_of_its_own(past: Server) -> None:
    """What no listed process accounts for is shown as such, once for each card."""
    rows = target_of("Processes").ask(past, UNATTRIBUTED)
    assert {row["metric"]["user"] for row in rows} == {"nobody known"}
    assert {float(row["value"][1]) for row in rows} == {5 * GIB}
    assert figure(past, "Unattributed", UNATTRIBUTED) == [20 * GIB]
    assert figure(past, "Processes", NOBODY) == []


def test_use_of_a_card_is_that_of_its_jobs_or_of_the_card(past: Server) -> None:
    """Jobs that cannot be measured leave the card's own figure, named as such."""
    jobs = {
        (row["metric"]["gpu"], row["metric"]["job_id"]): row["values"][-1][1]
        for row in target_of("GPU $gpu: utilisation by job").ask(past, SHARED, over="30m")
    }
    assert jobs == {("0", "j-two-1"): "0.5", ("0", "j-two-2"): "0.3"}
    whole = {
        row["metric"]["gpu"]: float(row["values"][-1][1])
        for row in target_of("GPU $gpu: utilisation by job", "B").ask(past, SHARED, over="30m")
    }
    assert whole["1"] == 1.0
    assert whole["2"] == 0.0


def test_the_gravest_reason_holds_the_clocks_back(past: Server) -> None:
    """A card at its power limit says so for as long as it is, and nothing else at other times."""
    names = {str(place): name for place, (_, name, _) in enumerate(node.HOLDS_BACK, 1)}
    found = {
        row["metric"]["gpu"]: {names.get(value, value) for _, value in row["values"]}
        for row in target_of("What holds the clocks back").ask(past, HEALTHY, over="50m")
    }
    assert found["2"] == {"0", "at its power limit"}
    assert found["3"] == {"0"}
