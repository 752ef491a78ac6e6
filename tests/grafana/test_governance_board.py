"""The Governance board counts what was done, what is proven, and what speaks against it."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import pytest
from tests.grafana.asking import target_of, value
from tests.grafana.engines import DECISIONS, waited
from tests.grafana.scenarios import ENGINE_DEAD, NOBODY

from gpuwarden.ruleengine.ledger_counters import WAIT_BOUNDS

if TYPE_CHECKING:
    from tests.servers import Server


def test_every_decision_of_the_day_is_counted_by_what_became_of_it(past: Server) -> None:
    """Whole numbers, although increase() extrapolates."""
    found = {
        tuple(row["metric"][label] for label in ("rule", "action", "mode", "outcome")): int(
            row["value"][1]
        )
        for row in target_of("What was decided").ask(past)
    }
    assert found == DECISIONS


def test_what_is_proven_is_apart_from_what_is_not(past: Server) -> None:
    """One end survived and one met an error; those refused or lapsed are neither."""
    assert value(past, "Jobs ended") == [24]
    assert value(past, "Not proven") == [2]
    assert value(past, "Memory back") == [pytest.approx(24 * 30 * 2**30, rel=0.01)]


def test_hints_of_false_alarms_are_held_against_the_ends(past: Server) -> None:
    """An appeal, a regret and a return for the ends; without any end there is no share."""
    assert value(past, "Objections") == [3 / 24]
    # in the last quarter of an hour nothing was ended, and nothing is 0 of nothing
    assert value(past, "Objections", over="15m") == [-1]


def test_the_time_to_act_is_read_from_the_right_buckets(past: Server) -> None:
    """The median lies in the bucket that holds the middle wait; means are those of each action."""
    waits = {action: [waited(place) for place in range(count)]
             for action, count in (("terminate", 24), ("checkpoint", 12))}  # fmt: skip
    middle = statistics.median([*waits["terminate"], *waits["checkpoint"]])
    low = max(bound for bound in WAIT_BOUNDS if bound < middle)
    high = min(bound for bound in WAIT_BOUNDS if bound >= middle)
    (median,) = value(past, "Time to act")
    assert low < median <= high
    assert value(past, "Time to act", over="15m") == [-1]
    found = {
        row["metric"]["action"]: float(row["value"][1])
        for row in target_of("How long each action took").ask(past)
    }
    assert found == {
        action: pytest.approx(statistics.mean(each), rel=0.01) for action, each in waits.items()
    }


def test_one_rule_can_be_chosen(past: Server) -> None:
    """Then nothing of any other is counted."""
    (row,) = target_of("Rules", "D").ask(past, rule="idle-held")
    assert (row["metric"], row["value"][1]) == ({"rule": "idle-held"}, "2")
    decided = target_of("What was decided").ask(past, rule="starved")
    assert {row["metric"]["rule"] for row in decided} == {"starved"}


def test_every_rule_that_judged_has_its_row(past: Server) -> None:
    """A nought where nothing was counted, since the engine would have counted it."""
    for ref in "ABCDEFGH":
        rows = target_of("Rules", ref).ask(past)
        rules = {row["metric"]["rule"] for row in rows}
        assert rules == {"idle-held", "memory-hog", "off-profile", "starved"}
    assert value(past, "Rules", "H") == [pytest.approx(0.02 / 0.47, rel=0.02)] * 4


def test_a_dead_engine_may_not_end_and_is_not_calm(past: Server) -> None:
    """The lamp is green only while the engine answers."""
    assert value(past, "May end jobs", scenario=NOBODY) == [0]
    assert value(past, "May end jobs", scenario=ENGINE_DEAD) == []
    assert value(past, "Cannot be told", scenario=ENGINE_DEAD) == []


def test_a_budget_is_held_against_the_tighter_limit_and_unknown_use_is_not_zero(
    past: Server,
) -> None:
    """Use in money is not known here: it reads n/a, and no share is made of it."""
    shares = {
        ref: {
            (row["metric"]["team"], row["metric"]["unit"]): float(row["value"][1])
            for row in target_of("Budgets", ref).ask(past)
        }
        for ref in "ABCD"
    }
    assert shares["A"]["robotics", "GPU-hours"] == 90
    assert shares["C"]["robotics", "GPU-hours"] == pytest.approx(80 / 90)
    assert shares["D"]["robotics", "GPU-hours"] == pytest.approx(120 / 90)
    for ref in "BCD":
        assert shares[ref]["robotics", "EUR"] == -1
