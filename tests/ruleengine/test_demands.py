"""A job is ended for somebody only if that somebody could then start."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.ruleengine.fleets import a_job, cards
from tests.ruleengine.test_cases import due, rule
from tests.ruleengine.test_guards import NOW, facts, situation

from gpuwarden.ruleengine import guards
from gpuwarden.ruleengine.cases import Delivery
from gpuwarden.ruleengine.conditions import Waiting
from gpuwarden.ruleengine.demands import (
    Demand,
    Freed,
    Needs,
    Room,
    Share,
    WaitingJob,
    fits,
    freed_by,
    serves,
    service,
)
from gpuwarden.ruleengine.verdicts import Truth, Verdict

ROOMS = {"n1": Room({"a100": 0}), "n2": Room({"a100": 2}), "n3": Room({"v100": 1})}
"""Two idle cards on n2, one of another model on n3."""


def _waiting(
    name: str = "7",
    cards: int = 1,
    nodes: str = "n1 n2 n3",
    *,
    max_nodes: int | None = 1,
    model: str = "",
) -> WaitingJob:
    needs = Needs(cards, max_nodes=max_nodes, model=model)
    return WaitingJob(name, needs, frozenset(nodes.split()), frozenset({"main"}))


def _truth(*waiting: WaitingJob, cards: int = 2, node: str = "n1", place: str = "") -> Truth:
    return serves([Freed(node, cards)], ROOMS, waiting, place=place).truth


@pytest.mark.parametrize(
    ("waiting", "truth"),
    [
        (_waiting(cards=1, nodes="n1"), Truth.YES),
        (_waiting(cards=2, nodes="n1"), Truth.YES),
        (_waiting(cards=3, nodes="n1"), Truth.NO),
        # Idle cards of another node do not help who needs them on one.
        (_waiting(cards=3, nodes="n1 n2"), Truth.NO),
        (_waiting(cards=3, nodes="n1 n2", max_nodes=2), Truth.YES),
        (_waiting(cards=4, nodes="n1 n2", max_nodes=None), Truth.YES),
        (_waiting(cards=5, nodes="n1 n2", max_nodes=None), Truth.NO),
        # It fits already: what it waits for is not this job.
        (_waiting(cards=2, nodes="n1 n2"), Truth.NO),
        (_waiting(cards=1, nodes="n3"), Truth.NO),
        (_waiting(cards=1, nodes="n1", model="a100"), Truth.YES),
        (_waiting(cards=1, nodes="n1", model="v100"), Truth.NO),
    ],
)
def test_the_whole_request_must_fit(waiting: WaitingJob, truth: Truth) -> None:
    """On what is idle and what the end frees, and not without it."""
    assert _truth(waiting) is truth


def test_nobody_who_waits_needs_no_end() -> None:
    """And neither does one who may not use the node."""
    assert _truth() is Truth.NO
    assert _truth(_waiting(nodes="n2", cards=4)) is Truth.NO


def test_the_first_in_line_for_the_cards_decides() -> None:
    """Who stands behind one that needs more would have to pass it; who wants others does not."""
    big, small = _waiting("big", 8, "n1"), _waiting("small", 1, "n1")
    other = _waiting("other", 8, "n2")
    assert _truth(big, small) is Truth.NO
    assert _truth(small, big) is Truth.YES
    assert _truth(other, small) is Truth.YES


def test_whose_request_is_not_understood_ends_nobody() -> None:
    """Nor does anybody behind it, as long as it may want the same cards."""
    odd = replace(_waiting("odd", 1, "n1"), unknown="it wants its nodes for itself alone")
    assert _truth(odd, _waiting("small", 1, "n1")) is Truth.UNKNOWN
    elsewhere = replace(odd, candidates=frozenset({"n2"}))
    assert _truth(elsewhere, _waiting("small", 1, "n1")) is Truth.YES


def test_a_rule_about_one_queue_ends_nobody_for_another() -> None:
    """The cards would go to who is first in line, whatever queue that is in."""
    first = replace(_waiting("first", 1, "n1"), places=frozenset({"urgent"}))
    assert _truth(first, _waiting("second", 1, "n1"), place="main") is Truth.NO
    assert _truth(first, place="urgent") is Truth.YES


def test_a_model_is_not_guessed() -> None:
    """On a node with two, which of them is freed is not known to who asks for one."""
    rooms = {"n1": Room({"a100": 0, "v100": 0})}
    freed = [Freed("n1", 1)]
    named = serves(freed, rooms, [_waiting(nodes="n1", model="v100")])
    assert named.truth is Truth.UNKNOWN
    assert serves(freed, rooms, [_waiting(nodes="n1")]).truth is Truth.YES


@pytest.mark.parametrize(
    ("needs", "fit"),
    [
        (Needs(2, max_nodes=1, cpus=4, memory=8), True),
        (Needs(2, max_nodes=1, cpus=5), False),
        (Needs(2, max_nodes=1, cpus=4, memory=9), False),
        (Needs(4, per_node=2, nodes=2, max_nodes=2, cpus=8), True),
        (Needs(4, per_node=2, nodes=2, max_nodes=2, cpus=9), False),
        (Needs(6, per_node=2, nodes=3, max_nodes=3), False),
        (Needs(3, per_node=3, nodes=1, max_nodes=1), False),
        (Needs(4, unit=2, per_node=2, max_nodes=None), True),
        (Needs(3, unit=3, per_node=3, max_nodes=None), False),
    ],
)
def test_cores_and_memory_are_needed_too(needs: Needs, fit: bool) -> None:
    """Of two nodes with two cards, four cores and eight bytes each."""
    assert fits(needs, [Room({"a100": 2}, 4, 8), Room({"a100": 2}, 4, 8)]) is fit
    assert not fits(needs, [])


@pytest.mark.parametrize(
    ("taken", "freed", "truth"),
    [(6.0, 6.0, Truth.YES), (8.0, 6.0, Truth.NO), (math.inf, 6.0, Truth.NO)],
)
def test_who_wants_a_node_alone_gets_it_only_if_nobody_else_is_there(
    taken: float, freed: float, truth: Truth
) -> None:
    """As jobs of all cards of a node usually do."""
    rooms = {"n1": Room({"a100": 0}, 2, 8, taken=taken)}
    waiting = WaitingJob("7", Needs(8, cpus=1, max_nodes=1, whole=True), frozenset({"n1"}))
    assert serves([Freed("n1", 8, freed)], rooms, [waiting]).truth is truth


def _demand(*shares: Share, job: str = "slurm-c-1-0") -> Demand:
    return Demand(
        "Slurm",
        "slurm-",
        waiting=(_waiting(nodes="n1"),),
        rooms=ROOMS,
        holdings={job: shares} if shares else {},
        hosts={"10.0.0.1": "n1"},
    )


def test_what_a_job_frees_is_what_the_platform_gave_it() -> None:
    """By its own count, else by the node's, told apart by node where it has several."""
    held = replace(cards("a", "b")[0], instance="10.0.0.1:9835")
    more = tuple(replace(card, instance="n2:9835") for card in cards("c", "d"))
    job = replace(a_job(job_id="slurm-c-1-0"), gpus=(held, *more))
    assert freed_by(_demand(Share("n1", 4, 2.0, 5.0)), job) == (Freed("n1", 4, 2.0, 5.0),)
    assert freed_by(_demand(Share("n1")), job) == (Freed("n1", 3),)
    assert freed_by(_demand(Share("n1"), Share("n2")), job) == (Freed("n1", 1), Freed("n2", 2))
    for demand in (_demand(Share("n1"), Share("n9")), _demand()):
        assert isinstance(freed_by(demand, job), str)
        assert service(demand, job).truth is Truth.UNKNOWN
    assert service(_demand(Share("n1")), job).truth is Truth.YES


def test_a_bare_process_frees_nothing_that_slurm_gives_away() -> None:
    """It took what Slurm does not know to be taken."""
    found = service(_demand(Share("n1")), a_job(job_id="proc-1"))
    assert found.truth is Truth.NO
    assert "none of Slurm's" in found.why


@pytest.mark.parametrize(
    ("demand", "fits", "reason"),
    [
        (_demand(Share("n1", 1), job="slurm-c-7-0"), None, ""),
        (_demand(Share("n1", 1), job="slurm-c-7-0"), True, ""),
        (_demand(Share("n2", 1), job="slurm-c-7-0"), None, "no_fit"),
        (_demand(Share("n2", 1), job="slurm-c-7-0"), False, ""),
        (_demand(), None, "fit_unknown"),
        (_demand(), False, ""),
        (None, None, "fit_unknown"),
    ],
)
def test_a_due_job_stays_unless_its_cards_serve_who_waits(
    demand: Demand | None, fits: bool | None, reason: str
) -> None:
    """By default; a rule may say that it is enough that somebody waits."""
    waiting = Waiting.model_validate({"slurm": {"partition": "main"}, "above": 0, "fits": fits})
    judged = rule("enforce").model_copy(update={"only_if_waiting": waiting})
    job = replace(a_job(job_id="slurm-c-7-0"), start_time=NOW - 60)
    known = facts(numbers={waiting.key: 1.0}, demands={} if demand is None else {"slurm": demand})
    blocks = guards.case_blocks(
        situation(facts=known),
        due(),
        judged,
        key="severe-terminate",
        stage=judged.stages[-1],
        job=job,
        verdict=Verdict("idle", job.job_id, Truth.YES),
        truth=Truth.YES,
        delivery=Delivery(complete=True, proven_at=1.0),
        kept_until=None,
    )
    found = {block.reason for block in blocks} & {"no_fit", "fit_unknown", "waiting_unknown"}
    assert found == ({reason} if reason else set())
