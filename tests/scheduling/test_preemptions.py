"""Who is asked to leave: by class, then by lost work, and nobody without need."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.scheduling.fitted_preemptions import choose_fitting
from gpuwarden.scheduling.preemption_terms import (
    Choice,
    Code,
    Pool,
    Request,
    Room,
    Running,
    Terms,
    Told,
    earliest_notice,
)
from gpuwarden.scheduling.preemptions import choose, useless_notices

if TYPE_CHECKING:
    import random

NOW = 1_000_000.0
HOUR = 3600.0
BOX = Pool("a100", "box")
TERMS = Terms(
    values={"low": 10, "normal": 100, "high": 1000},
    preempts={"high": frozenset({"low", "normal"}), "normal": frozenset({"low"})},
    minimum_run=1800.0,
    at="epoch",
    deadline=1200.0,
    back_off=1800.0,
    times=3,
    per=24 * HOUR,
)
HIGH = Request("h", 2, frozenset({"a100"}), "high", "vision")


def job(name: str, cards: int = 1, *, ran: float = 5 * HOUR, **others: Any) -> Running:
    """A job of low priority in the box."""
    chosen = {"priority": "low", "holds": {BOX: cards}, "started": NOW - ran, **others}
    return Running(id=name, **chosen)


def ask(
    *running: Running,
    request: Request = HIGH,
    free: int | dict[Pool, int] = 0,
    history: dict[str, tuple[float, ...]] | None = None,
    now: float = NOW,
    **room: Any,
) -> Choice:
    """The choice in a box of 8 cards."""
    there = {BOX: free} if isinstance(free, int) else free
    place = Room(**{"total": {BOX: 8}, "free": there, **room})
    return choose(request, running, history or {}, terms=TERMS, room=place, now=now)


def names(choice: Choice) -> list[str]:
    """Of those to be told."""
    return [victim.id for victim in choice.victims]


# -- who is waited for


def test_nobody_is_waited_for_who_would_not_make_room() -> None:
    """Spur #888: a request that cannot be met waits for no one, and keeps nothing meanwhile."""
    fresh = job("fresh", 1, ran=60.0)
    firm = job("firm", 7, priority="high")
    choice = ask(fresh, firm)
    assert (choice.code, choice.again) == (Code.NO_VICTIM, None)


def test_enough_of_them_must_be_ripe_and_it_is_said_where() -> None:
    """The first may be asked in a quarter of an hour, and would not do; both in half an hour."""
    other = Pool("a100", "other")
    first, second = job("a", ran=900.0), job("b", ran=0.0)
    elsewhere = job("c", ran=600.0, holds={other: 1})
    room = {"total": {BOX: 8, other: 8}, "free": {BOX: 0, other: 0}}
    choice = ask(first, second, elsewhere, **room)
    assert (choice.code, choice.again, choice.pools) == (Code.NOT_YET, NOW + 1800, (BOX,))
    assert choice.words.startswith("a and b may not be asked to leave yet")
    assert names(ask(first, second, elsewhere, now=NOW + 900, **room)) == []
    assert names(ask(first, second, elsewhere, now=NOW + 1800, **room)) == ["a", "b"]


# -- reports of section 7


def test_whoever_saved_last_leaves_first() -> None:
    """Kueue #477: the victim is the job that would lose least, not the newest or the first."""
    old = job("old", 2, saved=NOW - 60)
    new = job("new", 2, ran=2 * HOUR, saved=NOW - HOUR)
    choice = ask(new, old)
    assert names(choice) == ["old"]
    assert choice.victims[0].lost_gpu_seconds == 120.0


def test_a_state_that_nobody_knows_of_is_work_lost_since_the_start() -> None:
    """An unknown save counts as none: two hours unsaved are dearer than one hour known."""
    assert names(ask(job("a", 2, ran=2 * HOUR), job("b", 2, saved=NOW - HOUR))) == ["b"]


def test_a_state_of_an_earlier_attempt_is_no_save_of_this_one() -> None:
    """Work of this attempt alone can be lost: not the days since a state that it began from."""
    resumed = job("a", 2, ran=HOUR, saved=NOW - 50 * HOUR)
    assert resumed.lost_gpu_seconds(NOW) == 2 * HOUR


def test_of_equal_losses_the_youngest_leaves() -> None:
    """It has waited least for its turn to be repaid."""
    old, young = job("a", 2, ran=9 * HOUR, saved=NOW), job("b", 2, ran=2 * HOUR, saved=NOW)
    assert names(ask(old, young)) == ["b"]


def test_a_class_is_never_left_out_for_a_cheaper_job_above_it() -> None:
    """A normal job that would lose nothing stays while a low one can make room."""
    low = job("low", 2)
    normal = job("normal", 2, priority="normal", saved=NOW)
    assert names(ask(low, normal)) == ["low"]


def test_from_a_class_above_only_what_the_lower_one_cannot_give_is_taken() -> None:
    """Three cards are wanted: both low cards, and one normal."""
    wanted = dataclasses.replace(HIGH, gpus=3)
    lows = [job("l1"), job("l2")]
    normals = [job("n1", 3, priority="normal", saved=NOW), job("n2", 1, priority="normal")]
    assert names(ask(*lows, *normals, request=wanted)) == ["l1", "l2", "n2"]


def test_a_job_of_its_own_class_or_above_is_never_asked() -> None:
    """Nor is one that the policy does not let this priority preempt."""
    others = (job("a", 4, priority="high"), job("b", 4, priority="high"))
    choice = ask(*others)
    assert (choice.victims, choice.code) == ((), Code.NO_VICTIM)
    low = dataclasses.replace(HIGH, priority="low")
    assert ask(job("a", 8), request=low).words == (
        "It lacks 2 cards, and priority low may ask nobody to leave."
    )


def test_a_victim_past_its_deadline_is_not_told_again_and_another_is_taken() -> None:
    """Kueue #6489: one that does not go blocks the queue no longer than its deadline."""
    stuck = job("stuck", 2, told=Told("h", NOW - 1))
    choice = ask(stuck, job("next", 2))
    assert names(choice) == ["next"]
    assert choice.overdue == ("stuck",)
    alone = ask(stuck)
    assert (alone.code, alone.overdue) == (Code.OVERDUE, ("stuck",))


def test_nobody_else_is_told_while_those_who_were_have_time() -> None:
    """Asked again every second, the answer is the same until the deadline."""
    told = job("told", 2, told=Told("h", NOW + 5))
    choice = ask(told, job("other", 2))
    assert (choice.victims, choice.code, choice.coming) == ((), Code.COMING, ("told",))
    assert names(ask(told, job("other", 2), now=NOW + 5)) == ["other"]


def test_cards_that_were_freed_for_somebody_else_are_not_counted_on() -> None:
    """A job told for another request gives this one nothing, and gets no second notice."""
    choice = ask(job("told", 4, told=Told("other", NOW + 900)), job("a", 1), job("b", 1))
    assert names(choice) == ["a", "b"]


@pytest.mark.parametrize(
    ("ran", "epoch", "able"),
    [
        (1799.0, None, False),
        (1800.0, None, True),
        (1800.0, 2400.0, False),
        (2400.0, 2400.0, True),
        (1800.0, 60.0, True),
    ],
)
def test_nobody_is_told_before_its_minimum_run_and_an_epoch(
    ran: float, epoch: float | None, *, able: bool
) -> None:
    """Kueue #2821, #9876: an attempt that got nowhere yet is left alone; it is said how long."""
    victim = job("a", 2, ran=ran, epoch_seconds=epoch)
    choice = ask(victim)
    assert bool(choice.victims) is able
    if not able:
        assert choice.code is Code.NOT_YET
        assert choice.again == earliest_notice(victim, TERMS, now=NOW)
        assert names(ask(victim, now=choice.again)) == ["a"]


def test_a_job_has_to_leave_so_often_at_most() -> None:
    """Kueue #4406: after the third notice within a day there is none, and that is said."""
    times = tuple(NOW - hours * HOUR for hours in (13, 8))
    (victim,) = ask(job("a", 2), history={"a": times}).victims
    assert victim.last
    assert victim.words.endswith("the 3rd time within 1d, so nobody asks it again for a while")
    worn = (*times, NOW - 6 * HOUR)
    assert ask(job("a", 2), history={"a": worn}).code is Code.NO_VICTIM
    assert names(ask(job("a", 2), history={"a": worn}, now=NOW + 11 * HOUR)) == ["a"]


def test_a_job_that_came_back_is_left_alone_longer_each_time() -> None:
    """Volcano #561: half an hour, an hour, two hours; forgotten after a day."""
    history = (NOW - 300, NOW - 200, NOW - 100)
    back = job("a", 2, ran=60.0)
    rests = [
        earliest_notice(back, TERMS, history=history[:count], now=NOW) - back.started
        for count in (0, 1, 2, 3)
    ]
    assert rests == [1800.0, 1800.0, 3600.0, 7200.0]
    assert earliest_notice(back, TERMS, history=history, now=NOW + 25 * HOUR) == back.started + 1800
    often = tuple(NOW - number for number in range(1100))
    assert earliest_notice(back, TERMS, history=often, now=NOW) == back.started + TERMS.per


def test_who_borrows_leaves_when_the_owners_come_back() -> None:
    """A team within its own quota gets its cards back, from jobs of its class and lower."""
    lent = job("lent", 2, priority="high", team="nlp", borrowed=True)
    assert ask(lent).code is Code.NO_VICTIM
    back = dataclasses.replace(HIGH, reclaims=True)
    assert names(ask(lent, request=back)) == ["lent"]
    assert ask(dataclasses.replace(lent, borrowed=False), request=back).code is Code.NO_VICTIM
    assert ask(dataclasses.replace(lent, team="vision"), request=back).code is Code.NO_VICTIM
    lower = dataclasses.replace(back, priority="normal")
    assert ask(lent, request=lower).code is Code.NO_VICTIM


def test_nobody_is_told_for_a_request_that_would_not_fit_then() -> None:
    """Volcano #3673: one card of two can be made free, so both low jobs train on."""
    choice = ask(job("low", 1), job("high", 6, priority="high"))
    assert (choice.victims, choice.code) == ((), Code.NO_VICTIM)
    assert choice.words.startswith("It lacks 2 cards, and jobs of low and normal")
    huge = ask(job("low", 8), request=dataclasses.replace(HIGH, gpus=9))
    assert huge.code is Code.TOO_LARGE
    assert huge.words == "It wants 9 cards of a100 in one host, and there are never more than 8."


def test_nobody_is_told_for_a_team_that_may_hold_no_more() -> None:
    """A request over its quota would not start: of its own team alone somebody may leave for it."""
    limit = {("vision", "a100"): 4}
    own = job("own", 3, team="vision", priority="high")
    assert ask(own, job("other", 4), quota=limit).code is Code.QUOTA
    own_low = job("own", 3, team="vision")
    assert names(ask(own_low, job("other", 2, saved=NOW), quota=limit)) == ["own"]
    assert names(ask(own_low, job("other", 5), quota={("nlp", "a100"): 1})) == ["own"]


def test_jobs_in_a_booking_and_those_that_cannot_be_asked_stay() -> None:
    """A booking is a promise; one that cannot hear would only be killed."""
    assert ask(job("a", 4, booked=True), job("b", 4, deaf=True)).code is Code.NO_VICTIM


def test_a_booking_asks_whoever_is_there_and_waits_for_no_minimum_run() -> None:
    """It was announced; jobs that began a minute ago knew of it."""
    slot = Request("slot", 3, frozenset({"a100"}))
    high = job("high", 4, ran=60, priority="high")
    low = job("low", 4, ran=60)
    choice = ask(high, low, request=slot, history={"low": (NOW - 9, NOW - 8, NOW - 7)})
    assert names(choice) == ["low"]
    assert not choice.victims[0].last
    assert choice.victims[0].words == "Booking slot needs 3 cards"


def test_free_cards_are_used_before_anybody_is_told() -> None:
    """One is free and one is wanted more: a job of one card, not of two."""
    assert names(ask(job("a", 2), job("b", 1), free=1)) == ["b"]
    assert ask(job("a", 2), free=2).code is Code.FITS


def test_a_job_that_needs_one_host_gets_its_cards_in_one() -> None:
    """Two hosts with a low card each are no host with two; a spread request takes both."""
    east, west = Pool("a100", "east"), Pool("a100", "west")
    jobs = (
        job("a", holds={east: 1}),
        job("b", holds={west: 1}),
        job("c", holds={west: 1}, saved=NOW - 5),
    )
    room = {"total": {east: 4, west: 4}, "free": {}}
    assert names(ask(*jobs, **room)) == ["b", "c"]
    assert ask(*jobs[:2], **room).code is Code.NO_VICTIM
    spread = dataclasses.replace(HIGH, spread=True)
    assert names(ask(*jobs[:2], request=spread, **room)) == ["a", "b"]


def test_between_kinds_the_cheaper_place_is_taken_and_lower_classes_first() -> None:
    """The same rule as within one place."""
    other = Pool("v100", "box")
    room = {"total": {BOX: 2, other: 2}, "free": {}}
    both = dataclasses.replace(HIGH, kinds=frozenset({"a100", "v100"}))
    jobs = (
        job("normal", 2, priority="normal", saved=NOW),
        job("low", holds={other: 2}),
    )
    choice = ask(*jobs, request=both, **room)
    assert (names(choice), choice.pools) == (["low"], (other,))


def test_a_large_job_leaves_where_that_costs_less_than_many_small_ones() -> None:
    """Loss adds up: eight small jobs with 100 s each against one of eight cards with 90 s."""
    eight = dataclasses.replace(HIGH, gpus=8)
    room = {"total": {BOX: 16}, "free": {}}
    small = [job(f"s{number}", 1, saved=NOW - 100) for number in range(8)]
    assert names(ask(*small, job("big", 8, saved=NOW - 90), request=eight, **room)) == ["big"]
    dear = job("big", 8, saved=NOW - 110)
    assert names(ask(*small, dear, request=eight, **room)) == [f"s{number}" for number in range(8)]


# -- notices that became useless


def still(*running: Running, waiting: tuple[Request, ...] = (HIGH,), free: int = 0) -> list[str]:
    """Whose notices are withdrawn in a box of 8 cards."""
    room = Room({BOX: 8}, {BOX: free})
    return list(useless_notices(waiting, running, terms=TERMS, room=room, now=NOW))


def test_a_notice_is_withdrawn_when_its_successor_is_gone() -> None:
    """Volcano #4925: a request that was cancelled, or started elsewhere, needs no victim."""
    told = job("a", 2, told=Told("h", NOW + 60))
    assert still(told) == []
    assert still(told, waiting=()) == ["a"]
    assert still(told, free=2) == ["a"]


def test_of_two_victims_the_dearer_one_is_let_off() -> None:
    """One card became free by itself: the job with more to lose may stay."""
    dear = job("dear", 1, told=Told("h", NOW + 60))
    cheap = job("cheap", 1, saved=NOW - 5, told=Told("h", NOW + 60))
    assert still(dear, cheap) == []
    assert still(dear, cheap, free=1) == ["dear"]


def test_a_notice_for_another_cause_is_not_withdrawn() -> None:
    """The end of a window or a budget has no successor."""
    assert still(job("a", 2, told=Told(None, NOW + 60)), waiting=()) == []


# -- properties

_JOBS = st.lists(
    st.builds(
        dict,
        priority=st.sampled_from(["low", "normal", "high"]),
        cards=st.integers(1, 4),
        ran=st.sampled_from([60.0, 2000.0, 7200.0, 90_000.0]),
        saved=st.none() | st.integers(0, 5000),
        team=st.sampled_from(["vision", "nlp"]),
        booked=st.booleans(),
        told=st.none() | st.sampled_from([Told("h", NOW + 5), Told("h", NOW - 5), Told("x", NOW)]),
        past=st.integers(0, 4),
    ),
    max_size=9,
)


def _fleet(drawn: list[dict[str, Any]]) -> tuple[list[Running], dict[str, tuple[float, ...]]]:
    jobs, history = [], {}
    for number, facts in enumerate(drawn):
        name = f"j{number}"
        saved = None if facts["saved"] is None else NOW - facts["saved"]
        given = {key: facts[key] for key in ("priority", "team", "booked", "told", "ran")}
        jobs.append(job(name, facts["cards"], saved=saved, **given))
        history[name] = tuple(NOW - 100.0 * back for back in range(facts["past"]))
    return jobs, history


def _room(jobs: list[Running], free: int, limit: int) -> dict[str, Any]:
    total = sum(each.gpus for each in jobs) + free
    return {"total": {BOX: total}, "quota": {("vision", "a100"): limit}, "free": free}


@given(drawn=_JOBS, free=st.integers(0, 2), gpus=st.integers(1, 6), limit=st.integers(0, 12))
def test_whoever_is_told_is_allowed_needed_and_enough(
    drawn: list[dict[str, Any]], free: int, gpus: int, limit: int
) -> None:
    """Every victim may be told, the request fits afterwards, and no victim could be spared."""
    jobs, history = _fleet(drawn)
    request = dataclasses.replace(HIGH, gpus=gpus)
    choice = ask(*jobs, request=request, history=history, **_room(jobs, free, limit))
    by_id = {each.id: each for each in jobs}
    victims = [by_id[name] for name in names(choice)]
    for victim in victims:
        assert victim.priority in {"low", "normal"}
        assert not victim.booked
        assert victim.told is None
        assert earliest_notice(victim, TERMS, history=history[victim.id], now=NOW) <= NOW
        assert len(history[victim.id]) < TERMS.times
    assert bool(victims) is (choice.code is None)
    coming = [by_id[name] for name in choice.coming]

    def enough(leaving: list[Running]) -> bool:
        gone = {each.id for each in (*leaving, *coming)}
        cards = free + sum(each.gpus for each in jobs if each.id in gone)
        held = sum(each.gpus for each in jobs if each.team == "vision" and each.id not in gone)
        return cards >= gpus and held + gpus <= limit

    if victims:
        assert enough(victims)
        for spared in victims:
            assert not enough([each for each in victims if each is not spared])
    else:
        able = [
            each
            for each in jobs
            if each.priority in {"low", "normal"}
            and not each.booked
            and each.told is None
            and earliest_notice(each, TERMS, history=history[each.id], now=NOW) <= NOW
            and len(history[each.id]) < TERMS.times
        ]
        assert choice.code in {Code.FITS, Code.COMING} or not enough(able)


@given(drawn=_JOBS, gpus=st.integers(1, 6), shuffle=st.randoms(use_true_random=False))
def test_the_order_of_the_jobs_changes_nothing(
    drawn: list[dict[str, Any]], gpus: int, shuffle: random.Random
) -> None:
    """A choice is of what there is, not of how it was listed."""
    jobs, history = _fleet(drawn)
    request = dataclasses.replace(HIGH, gpus=gpus)
    room = _room(jobs, 0, 9)
    shuffled = shuffle.sample(jobs, len(jobs))
    assert ask(*jobs, request=request, history=history, **room) == ask(
        *shuffled, request=request, history=history, **room
    )


@given(drawn=_JOBS, gpus=st.integers(1, 6))
def test_a_job_that_cannot_help_changes_nothing(drawn: list[dict[str, Any]], gpus: int) -> None:
    """One on other cards, one of its own class, one in a booking: each as if it were not there."""
    jobs, history = _fleet(drawn)
    request = dataclasses.replace(HIGH, gpus=gpus)
    room = _room(jobs, 0, 9)
    before = ask(*jobs, request=request, history=history, **room)
    for other in (
        job("elsewhere", holds={Pool("v100", "box"): 8}),
        job("equal", 8, priority="high", team="nlp"),
        job("promised", 8, team="nlp", booked=True),
    ):
        after = ask(*jobs, other, request=request, history=history, **room)
        assert (after.victims, after.code) == (before.victims, before.code)


@given(
    costs=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 50)), min_size=1, max_size=7),
    gpus=st.integers(1, 8),
)
def test_no_other_set_of_victims_would_lose_less(costs: list[tuple[int, int]], gpus: int) -> None:
    """Within one class the choice is the best of all sets, tried one by one."""
    jobs = [
        job(f"j{number}", cards, saved=NOW - lost) for number, (cards, lost) in enumerate(costs)
    ]
    total = sum(cards for cards, _lost in costs)
    choice = ask(*jobs, request=dataclasses.replace(HIGH, gpus=gpus), total={BOX: max(total, 8)})
    losses = [
        sum(each.lost_gpu_seconds(NOW) for each in some)
        for size in range(1, len(jobs) + 1)
        for some in itertools.combinations(jobs, size)
        if sum(each.gpus for each in some) >= gpus
    ]
    assert bool(losses) is bool(choice.victims)
    if losses:
        assert sum(victim.lost_gpu_seconds for victim in choice.victims) == min(losses)


# -- where the engine says what fits


def fitted(jobs: list[Running], wanted: int, **others: Any) -> Choice:
    """The choice where an engine says that so many cards are wanted."""
    cards = {each.id: each.gpus for each in jobs}
    return choose_fitting(
        others.pop("request", HIGH),
        jobs,
        others.pop("history", {}),
        terms=TERMS,
        fits=lambda gone: sum(cards[name] for name in gone) >= wanted,
        now=NOW,
    )


def test_an_engine_with_rules_of_its_own_is_asked_what_fits() -> None:
    """Cheapest first, until it fits; whoever turned out not to be needed is spared."""
    jobs = [job("small", 1, saved=NOW), job("big", 4, saved=NOW - 9), job("dear", 4)]
    assert names(fitted(jobs, 4)) == ["big"]
    assert names(fitted(jobs, 5)) == ["small", "big"]
    assert fitted(jobs, 10).code is Code.NO_VICTIM
    assert fitted(jobs, 0).code is Code.FITS
    told = [job("told", 4, told=Told("h", NOW + 9)), *jobs]
    assert (fitted(told, 4).code, names(fitted(told, 5))) == (Code.COMING, ["small"])
    late = [job("told", 4, told=Told("h", NOW)), job("fresh", 8, ran=5)]
    assert fitted(late, 4).code is Code.OVERDUE
    assert fitted(late[1:], 4).code is Code.NOT_YET


@given(drawn=_JOBS, wanted=st.integers(1, 8))
def test_an_engines_choice_is_allowed_needed_and_enough_too(
    drawn: list[dict[str, Any]], wanted: int
) -> None:
    """The same promises as where cards are counted here."""
    jobs, history = _fleet(drawn)
    choice = fitted(jobs, wanted, history=history)
    counted = ask(*jobs, history=history, request=dataclasses.replace(HIGH, gpus=wanted))
    by_id = {each.id: each for each in jobs}
    cards = [by_id[name].gpus for name in (*names(choice), *choice.coming)]
    assert bool(choice.victims) is (choice.code is None)
    if choice.victims:
        assert sum(cards) >= wanted
        assert all(sum(cards) - by_id[name].gpus < wanted for name in names(choice))
    assert counted.code is Code.TOO_LARGE or bool(choice.victims) is bool(counted.victims)
