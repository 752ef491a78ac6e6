"""The grid of owners has one word per card and moment, which says who and how well."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest
from grafana import owners
from tests.grafana.asking import target_of
from tests.grafana.scenarios import (
    DEAD,
    HEALTHY,
    MIG,
    NOBODY,
    ONE_DEAD,
    SCENARIOS,
    SHARED,
    Scenario,
)

if TYPE_CHECKING:
    from tests.servers import Server

TITLE = "Who holds which GPU"


def grid(past: Server, scenario: Scenario, **variables: str) -> dict[str, dict[float, list[str]]]:
    """Row -> time -> its words, as the matrix of the panel has them."""
    found: dict[str, dict[float, list[str]]] = defaultdict(lambda: defaultdict(list))
    for series in target_of(TITLE).ask(past, scenario, over="30m", **variables):
        for time, _ in series["values"]:
            found[series["metric"]["card"]][float(time)].append(series["metric"]["cell"])
    return found


def last(past: Server, scenario: Scenario, **variables: str) -> dict[str, str | None]:
    """Row -> its word at the end, None where there is a gap."""
    rows = grid(past, scenario, **variables)
    end = max(time for row in rows.values() for time in row)
    return {card: (words.get(end) or [None])[0] for card, words in rows.items()}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[one.window.name for one in SCENARIOS])
def test_a_cell_has_one_word_and_a_colour_of_its_own(past: Server, scenario: Scenario) -> None:
    """Of two words at a time Grafana would keep one, and one that no mapping knows stays grey."""
    patterns = [mapping.options.pattern for mapping in owners.mappings()]
    rows = grid(past, scenario)
    assert rows
    for words in (words for row in rows.values() for words in row.values()):
        assert len(words) == 1
        assert sum(bool(re.match(pattern, words[0])) for pattern in patterns) == 1, words


def test_a_row_names_the_owner_and_the_use_of_its_card(past: Server) -> None:
    """What cannot be measured is not called idle, and of several owners their number is told."""
    assert last(past, HEALTHY) == {
        " nodes": "2 seen",
        "n1:9835 GPU 0": "ana · busy",
        "n1:9835 GPU 1": "ben · idle",
        "n1:9835 GPU 2": "cho · busy",
        "n1:9835 GPU 3": "free",
        "n2:9835 GPU 0": "ana · busy",
        "n2:9835 GPU 1": "2 users · not measured",
    }
    shared = last(past, SHARED)
    assert shared["n1:9835 GPU 0"] == "2 users · part"
    assert shared["n1:9835 GPU 1"] == "2 users · not measured"


def test_an_instance_of_a_cut_card_is_a_row(past: Server) -> None:
    """MIG instances stand beside one another under their card's number."""
    rows = last(past, MIG)
    assert rows["n3:9835 GPU 0 MIG-a"] == "ana · busy"
    assert rows["n3:9835 GPU 0 MIG-b"] == "cho · not measured"


def test_free_is_said_and_silence_is_a_gap(past: Server) -> None:
    """A dead exporter's cards are neither free nor held, and the first row tells why."""
    assert set(last(past, NOBODY).values()) == {"2 seen", "free"}
    one = last(past, ONE_DEAD)
    assert one[" nodes"] == "1 seen"
    assert one["n1:9835 GPU 1"] is None
    assert one["n2:9835 GPU 0"] == "ana · busy"
    dead = last(past, DEAD)
    assert dead.pop(" nodes") == "0 seen"
    assert set(dead.values()) == {None}


def test_the_choice_of_a_user_frees_no_card(past: Server) -> None:
    """Cards of others are missing then: they are not free."""
    rows = last(past, HEALTHY, user="ana")
    assert rows["n1:9835 GPU 0"] == "ana · busy"
    assert rows["n2:9835 GPU 1"] == "2 users · not measured"
    assert "n1:9835 GPU 1" not in rows
    assert rows["n1:9835 GPU 3"] == "free"
