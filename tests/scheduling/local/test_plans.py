"""Who starts on a lab box, who is asked to leave, and why the others wait."""

from __future__ import annotations

import dataclasses
import datetime as dt
import zoneinfo
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scheduling.local.policy_texts import box

from gpuwarden.schedule_api import Cause
from gpuwarden.scheduling.local.plans import DRAIN_SECONDS, plan
from gpuwarden.scheduling.local.scenes import Plan, Scene, Waiting, Working
from gpuwarden.scheduling.preemption_terms import Pool, Told
from gpuwarden.scheduling.slots import Slot

if TYPE_CHECKING:
    import random

    from gpuwarden.scheduling.policies import Policy

NOW = 1_800_000_000.0
HOUR = 3600.0
A100 = Pool("a100", "box")
BOX = box()


def wants(name: str, gpus: int = 1, **others: Any) -> Waiting:
    """A job of vision, of normal priority."""
    chosen = {"priority": "normal", "team": "vision", "submitted": NOW - 60.0, **others}
    return Waiting(id=name, gpus=gpus, **chosen)


def works(name: str, gpus: int = 1, *, ran: float = 2 * HOUR, **others: Any) -> Working:
    """A running job of vision, of low priority."""
    chosen = {"priority": "low", "team": "vision", **others}
    return Working(id=name, holds={A100: gpus}, since=NOW - ran, **chosen)


def planned(
    *jobs: Waiting | Working,
    policy: Policy = BOX,
    now: float = NOW,
    total: int = 4,
    **others: Any,
) -> Plan:
    """The plan for a box of four cards; what nobody holds is free."""
    working = [job for job in jobs if isinstance(job, Working)]
    free = total - sum(job.gpus for job in working)
    scene = Scene(
        total={A100: total},
        free={A100: free},
        waiting=[job for job in jobs if isinstance(job, Waiting)],
        working=working,
        **others,
    )
    return plan(scene, policy, now)


def started(found: Plan) -> list[str]:
    """Ids, in their order."""
    return [start.id for start in found.starts]


def told(found: Plan) -> list[str]:
    """Ids of those who are asked."""
    return [notice.victim for notice in found.notices]


# -- turns and quotas


def test_the_higher_class_starts_first_and_then_whoever_came_first() -> None:
    """Two cards are free; the third in turn waits, and is told how many it lacks."""
    found = planned(
        works("x", 2, team="nlp"),
        wants("late", submitted=NOW - 1),
        wants("early", submitted=NOW - 9, priority="low"),
        wants("first", submitted=NOW - 5),
    )
    assert started(found) == ["first", "late"]
    assert found.order == ("early",)
    assert found.waits["early"].code == "no_victim"


def test_in_a_class_the_team_that_has_less_for_its_share_goes_first() -> None:
    """Vision came first, but it holds cards already."""
    jobs = (works("x", 2), wants("v", submitted=NOW - 99), wants("n", team="nlp"))
    assert started(planned(*jobs)) == ["n", "v"]
    shared = [
        {**team.model_dump(), "share": share} for team, share in zip(BOX.teams, (9, 1), strict=True)
    ]
    big = box(teams=[{k: v for k, v in each.items() if v is not None} for each in shared])
    more = (works("x", 2), works("y", 1, team="nlp"), jobs[1], jobs[2])
    assert started(planned(*more, policy=big)) == ["v"]


def test_a_team_holds_no_more_than_its_own_and_what_it_may_borrow() -> None:
    """Cards are free, and still it waits: for its own team alone."""
    teams = [
        {"name": "vision", "users": [], "quota": {"a100": 2}, "borrow": {"a100": 1}},
        {"name": "nlp", "users": [], "quota": {"a100": 2}, "lend": {"a100": 1}},
    ]
    found = planned(works("x", 3), wants("v"), policy=box(teams=teams))
    assert found.waits["v"].code == "quota"
    assert "would hold 1 card of a100 more than it may at once" in found.waits["v"].words
    generous = [{**teams[0], "borrow": {"a100": 2}}, teams[1]]
    kept = planned(works("x", 3), wants("v"), policy=box(teams=generous))
    assert started(kept) == []  # one card of nlp's is lent, and the other is not
    assert started(planned(works("x", 3), wants("n", team="nlp"), policy=box(teams=teams))) == ["n"]


def test_owners_get_lent_cards_back() -> None:
    """The youngest job that runs on borrowed cards is asked, though of the same class."""
    found = planned(
        works("old", 2, priority="normal"),
        works("lent", 2, ran=HOUR, priority="normal"),
        wants("n", 2, team="nlp"),
    )
    assert told(found) == ["lent"]
    assert found.waits["n"].must_end == ("lent",)


def test_a_job_that_can_never_start_is_told_so() -> None:
    """No box has five cards, and no card is of this kind."""
    found = planned(wants("huge", 5), wants("odd", kind="h100"))
    assert found.waits["huge"].code == "too_large"
    assert found.waits["odd"].held
    assert "no kind of cards h100" in found.waits["odd"].words


# -- preemption


def test_a_high_job_has_a_low_one_leave_and_keeps_what_is_free_meanwhile() -> None:
    """Two of four cards are wanted, one is free: a small job must not take it."""
    jobs = (works("a", 1), works("b", 2, saved=NOW - 1), wants("small", submitted=NOW - 999))
    high = wants("h", 2, priority="high")
    found = planned(*jobs, high)
    assert (started(found), told(found)) == ([], ["b"])
    notice = found.notices[0]
    assert (notice.cause, notice.successor, notice.at) == (Cause.PRIORITY, "h", "epoch")
    assert notice.deadline == NOW + 1200
    again = planned(
        works("a", 1), works("b", 2, told=Told("h", NOW + 1200)), jobs[2], high, now=NOW + 5
    )
    assert (started(again), again.notices) == ([], ())
    assert again.waits["h"].words == "b is leaving for it."
    done = planned(works("a", 1), jobs[2], high, now=NOW + 60)
    assert started(done) == ["h", "small"]


def test_while_nobody_may_be_asked_yet_fresh_jobs_do_not_take_what_is_free() -> None:
    """Each would be left alone for ten minutes anew, and the high job never start."""
    young = works("young", 3, ran=60)
    found = planned(young, wants("small"), wants("h", 4, priority="high"))
    assert (started(found), told(found)) == ([], [])
    assert found.waits["h"].code == "not_yet"
    assert found.again == NOW - 60 + 600


def test_two_requests_do_not_count_on_the_same_card() -> None:
    """The second one has another job leave, or nobody."""
    jobs = [works(name, 1, team="nlp") for name in ("a", "b", "c", "d")]
    highs = [wants(name, 2, priority="high", submitted=NOW - at) for at, name in enumerate("zyx")]
    found = planned(*jobs, *highs)
    assert sorted(told(found)) == ["a", "b", "c", "d"]
    assert {notice.successor for notice in found.notices} == {"x", "y"}
    assert found.waits["z"].code == "quota"


def test_notices_are_taken_back_when_nobody_needs_them() -> None:
    """Its successor is gone, or starts elsewhere; one that was followed stays."""
    leaving = works("a", 1, told=Told("h", NOW + 99))
    assert planned(leaving).withdrawn == ("a",)
    assert planned(dataclasses.replace(leaving, final=True)).withdrawn == ()
    there = planned(leaving, wants("h", priority="high"))
    assert (started(there), there.withdrawn) == (["h"], ("a",))
    full = works("f", 3, priority="high")
    assert planned(leaving, full, wants("h", priority="high")).withdrawn == ()
    held = wants("h", priority="high", held="by ana")
    assert planned(leaving, full, held).withdrawn == ("a",)


def test_without_terms_of_preemption_nobody_is_asked() -> None:
    """The job waits, and is told for how many cards."""
    found = planned(
        works("a", 4, team="nlp"),
        wants("h", 2, priority="high"),
        policy=box(preemption=None, windows=[]),
    )
    assert found.notices == ()
    assert found.waits["h"].words == "All cards are in use; it needs 2 cards."


# -- passing


def test_a_job_passes_if_it_is_done_before_the_first_could_start() -> None:
    """A large job waits for one that ends in an hour: half an hour passes, two hours do not."""
    running = works("a", 3, team="nlp", priority="high", ends=NOW + HOUR)
    large = wants("large", 4, submitted=NOW - 99)
    short, long = wants("short", seconds=HOUR / 2), wants("long", seconds=2 * HOUR)
    assert started(planned(running, large, short)) == ["short"]
    assert started(planned(running, large, long)) == []
    found = planned(running, large, wants("unknown"))
    assert started(found) == []
    assert found.waits["unknown"].words == ("Cards are free, but large comes first and needs them.")


def test_a_job_passes_beside_a_reservation() -> None:
    """Three cards will be wanted of four: one may be had by whoever lasts longer."""
    running = works("a", 2, team="nlp", priority="high", ends=NOW + HOUR)
    large = wants("large", 3, submitted=NOW - 99)
    assert started(planned(running, large, wants("x"), wants("y"))) == ["x"]


def test_a_job_that_takes_longer_than_expected_keeps_no_card_idle() -> None:
    """It is late by an hour, so it may take another: what is done by then passes, no more does.

    Its word was its owner's own: else a minute, said of a week, would keep cards from everybody.
    """
    running = works("a", 3, team="nlp", priority="high", ends=NOW - HOUR)
    large = wants("large", 4, submitted=NOW - 99)
    assert started(planned(running, large, wants("short", seconds=0.9 * HOUR))) == ["short"]
    assert started(planned(running, large, wants("long", seconds=1.1 * HOUR))) == []


def test_where_nobody_knows_when_others_end_a_large_job_is_passed_for_an_hour() -> None:
    """After that, cards that become free are kept for it."""
    running = works("a", 3, team="nlp", priority="high")
    for waited, passing in ((DRAIN_SECONDS, ["small"]), (DRAIN_SECONDS + 1, [])):
        large = wants("large", 4, submitted=NOW - waited)
        assert started(planned(running, large, wants("small"))) == passing


# -- people, jobs, hours, budgets


def test_a_job_waits_for_others_people_and_times() -> None:
    """Each says what for; only what a person or an hour must end counts as held."""
    found = planned(
        wants("held", held="ana holds it."),
        wants("after", unmet=("7",)),
        wants("broken", broken=("7", "8")),
        wants("later", not_before=NOW + 9),
        wants("nobody", team="gone"),
        wants("free"),
    )
    assert started(found) == ["free"]
    assert {name: (wait.code, wait.held) for name, wait in found.waits.items()} == {
        "held": ("held", True),
        "after": ("after", False),
        "broken": ("after_failed", True),
        "later": ("not_before", False),
        "nobody": ("policy", True),
    }
    assert found.waits["after"].words == "It runs after 7."
    assert found.again == NOW + 9


def at(text: str) -> float:
    """A moment in Berlin; of two with the same name the second if a `+` follows."""
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    moment = dt.datetime.fromisoformat(text.rstrip("+")).replace(tzinfo=zone)
    return moment.replace(fold=1 if text.endswith("+") else 0).timestamp()


@pytest.mark.parametrize(
    ("moment", "is_open"),
    [
        ("2026-10-24T19:59:59", False),
        ("2026-10-24T20:00:00", True),
        ("2026-10-25T02:30:00", True),  # for the first time
        ("2026-10-25T02:30:00+", True),  # and again
        ("2026-10-25T06:59:59", True),
        ("2026-10-25T07:00:00", False),
        ("2027-03-28T01:59:59", True),
        ("2027-03-28T03:00:00", True),  # a second later
        ("2027-03-28T07:00:00", False),
    ],
)
def test_jobs_of_a_window_run_inside_of_it_also_when_clocks_change(
    moment: str, *, is_open: bool
) -> None:
    """They start inside alone, and outside are asked to leave; those that may finish are not."""
    now = at(moment)
    night = wants("night", window="nights", submitted=now)
    ran = dataclasses.replace(works("ran", window="nights"), since=now - HOUR)
    patient = dataclasses.replace(works("patient", window="evenings"), since=now - HOUR)
    found = planned(night, ran, patient, now=now)
    assert started(found) == (["night"] if is_open else [])
    assert told(found) == ([] if is_open else ["ran"])
    if not is_open:
        assert found.notices[0].cause is Cause.WINDOW
        assert found.waits["night"].held
        assert "20:00 CE" in found.waits["night"].words
    asked = dataclasses.replace(ran, told=Told(None, now + 60), cause=Cause.WINDOW)
    assert planned(asked, now=now).withdrawn == (("ran",) if is_open else ())


def test_past_a_hard_budget_nothing_starts_and_running_jobs_leave() -> None:
    """Only those of the team; the notice is taken back when the budget is there again."""
    spent = {"spent": {"vision": "Team vision has used 300 of 300 GPU-hours of today."}}
    jobs = (works("v"), works("n", team="nlp"), wants("w"), wants("m", team="nlp"))
    found = planned(*jobs, **spent)
    assert (started(found), told(found)) == (["m"], [])
    assert found.waits["w"].held
    found = planned(*jobs, **spent, leaving=frozenset({"vision"}))
    assert told(found) == ["v"]
    assert (found.notices[0].cause, found.notices[0].successor) == (Cause.BUDGET, "vision")
    asked = works("v", told=Told(None, NOW + 60), cause=Cause.BUDGET)
    assert planned(asked, **spent, leaving=frozenset({"vision"})).withdrawn == ()
    assert planned(asked).withdrawn == ("v",)


# -- bookings


def slot(begin: float, *, gpus: int = 2, hours: float = 2, team: str = "nlp") -> Slot:
    """Cards for a team, from so many seconds from now."""
    start = NOW + begin
    return Slot("s", team, "bo", gpus, "a100", start, start + hours * HOUR, 900.0)


def test_whoever_holds_booked_cards_is_told_lead_time_before() -> None:
    """Not earlier; by the slot's start they should be gone, whatever their class."""
    jobs = (works("a", 2, ran=60, priority="high"), works("b", 2, ran=60, priority="high"))
    early = planned(*jobs, slots=[slot(901)])
    assert early.notices == ()
    assert early.again == NOW + 1
    found = planned(*jobs, slots=[slot(900)])
    assert len(found.notices) == 1
    assert found.notices[0].deadline == NOW + 900
    assert (found.notices[0].cause, found.notices[0].successor) == (Cause.BOOKING, "s")
    late = planned(*jobs, slots=[slot(-60)])
    assert late.notices[0].deadline == NOW + 900


def test_booked_cards_are_kept_and_only_those() -> None:
    """Four are free and two are booked: others get two, and whoever booked them gets more."""
    jobs = [wants(name) for name in "abc"]
    assert started(planned(*jobs, slots=[slot(60)])) == ["a", "b"]
    assert started(planned(*jobs, slots=[slot(60, team="vision")])) == ["a", "b"]
    assert started(planned(*jobs, slots=[slot(-60, team="vision")])) == ["a", "b", "c"]
    early = [wants(name, user="bo") for name in "abc"]
    assert started(planned(*early, slots=[slot(60, team="vision")])) == ["a", "b", "c"]
    assert planned(*jobs, slots=[slot(60)]).kept == {"s": 2}
    assert started(planned(*jobs, slots=[slot(-3 * HOUR)])) == ["a", "b", "c"]


def test_short_jobs_run_in_front_of_a_booking() -> None:
    """Those that are expected to be done before it; an hour before, all that accept notice."""
    wide = {"slots": [slot(600, gpus=4)]}
    assert started(planned(wants("short", seconds=500), **wide)) == ["short"]
    assert started(planned(wants("long", seconds=700), **wide)) == []
    assert started(planned(wants("unknown"), **wide)) == []
    assert started(planned(wants("unknown"), slots=[slot(HOUR, gpus=4)])) == ["unknown"]
    # What begins now would be told before its minimum run is over.
    assert started(planned(wants("unknown"), slots=[slot(900 + 599, gpus=4)])) == []


def test_in_its_slot_a_team_is_bound_by_no_quota_and_nobody_asks_its_jobs() -> None:
    """The booking was checked when it was made; a high job of others finds no victim there."""
    teams = [
        {"name": "vision", "users": [], "quota": {"a100": 4}},
        {"name": "nlp", "users": [], "quota": {}},
    ]
    policy = box(teams=teams)
    slots = [slot(-60, gpus=2)]
    assert started(planned(wants("n", 2, team="nlp"), slots=slots, policy=policy)) == ["n"]
    assert started(planned(wants("n", 3, team="nlp"), slots=slots, policy=policy)) == []
    inside = works("n", 2, team="nlp")
    high = wants("h", 4, priority="high")
    assert planned(inside, high, slots=slots, policy=policy).notices == ()
    assert told(planned(inside, high, policy=policy)) == ["n"]


def test_in_a_slot_jobs_of_whoever_booked_it_go_first() -> None:
    """Before older ones of the team and higher ones; where they do not fit, the others do."""
    older = wants("older", 2, team="nlp", submitted=NOW - 999, priority="high", user="ana")
    booked = wants("booked", 2, team="nlp", user="bo")
    box_of_two = {"total": 2, "slots": [slot(-60)]}
    assert started(planned(older, booked, **box_of_two)) == ["booked"]
    large = dataclasses.replace(booked, gpus=4)
    assert started(planned(older, large, **box_of_two)) == ["older"]
    early = {"total": 2, "slots": [slot(60)]}
    assert started(planned(older, booked, **early)) == ["booked"]
    assert started(planned(older, **early)) == []
    stranger = dataclasses.replace(booked, team="vision")
    assert started(planned(older, stranger, **box_of_two)) == ["older"]


def test_what_a_team_runs_already_takes_nothing_of_what_it_booked() -> None:
    """Others leave for the slot, and the booker's jobs start in it beside those of the team."""
    running = works("n", 2, team="nlp", user="ana", priority="normal")
    full = (running, works("v", 2), wants("more", 2, team="nlp", user="ana", priority="high"))
    assert told(planned(*full, slots=[slot(60)])) == ["v"]
    left = (running, *full[2:], wants("booked", 2, team="nlp", user="bo"))
    assert started(planned(*left[:2], slots=[slot(60)])) == []
    found = planned(*left, slots=[slot(-60)])
    assert (started(found), found.kept) == (["booked"], {"s": 2})
    inside = works("booked", 2, team="nlp", user="bo", ran=50)
    later = planned(running, inside, full[2], slots=[slot(-60)])
    assert (later.kept, later.used) == ({"s": 2}, {"s": ("booked",)})
    assert (started(later), later.notices) == ([], ())


def test_jobs_that_the_slots_opening_let_in_use_it_up() -> None:
    """Also one that is larger than what is left of it: a booking gives its cards once."""
    inside = works("n", 3, team="nlp", user="ana", ran=50)
    found = planned(inside, works("v", 1), slots=[slot(-60)])
    assert (found.notices, found.kept) == ((), {"s": 2})
    early = dataclasses.replace(inside, since=NOW - 70)
    assert planned(early, works("v", 1), slots=[slot(-60)]).used == {"s": ()}


def test_nobody_leaves_for_what_he_booked_himself() -> None:
    """Others do; where there are no others, his job is in the slot, and nobody may ask it."""
    mine = works("n", 2, team="nlp", user="bo")
    found = planned(mine, works("v", 2, priority="high"), slots=[slot(60)])
    assert (told(found), found.used) == (["v"], {"s": ()})
    whole = planned(
        works("n", 4, team="nlp", user="bo"),
        wants("h", 2, priority="high"),
        slots=[slot(-60, gpus=4)],
    )
    assert (whole.notices, whole.used) == ((), {"s": ("n",)})


def test_what_teams_do_not_lend_does_not_keep_a_booking_from_its_cards() -> None:
    """A team without cards of its own booked two of those that are lent to nobody."""
    teams = [
        {"name": "vision", "users": [], "quota": {"a100": 4}, "lend": {"a100": 0}},
        {"name": "nlp", "users": [], "quota": {}, "borrow": {"a100": 4}},
    ]
    jobs = [wants(name, team="nlp", user="bo") for name in "abc"]
    found = planned(*jobs, slots=[slot(-60)], policy=box(teams=teams))
    assert started(found) == ["a", "b"]


# -- properties

_WAITS = st.lists(
    st.builds(
        dict,
        priority=st.sampled_from(["low", "normal", "high"]),
        team=st.sampled_from(["vision", "nlp"]),
        gpus=st.integers(1, 4),
        submitted=st.integers(0, 9000).map(lambda ago: NOW - ago),
        seconds=st.none() | st.sampled_from([600.0, 7200.0]),
        user=st.sampled_from(["ana", "bo"]),
    ),
    max_size=7,
)
_WORKS = st.lists(
    st.builds(
        dict,
        priority=st.sampled_from(["low", "normal", "high"]),
        team=st.sampled_from(["vision", "nlp"]),
        gpus=st.integers(1, 3),
        ran=st.sampled_from([60.0, 7200.0]),
        user=st.sampled_from(["ana", "bo"]),
        saved=st.none() | st.just(NOW - 30),
        ends=st.none() | st.just(NOW + 1800),
        told=st.none() | st.sampled_from([Told("w0", NOW + 60), Told("w1", NOW - 1)]),
    ),
    max_size=4,
)
_SLOTS = st.lists(
    st.builds(
        slot,
        st.sampled_from([-600.0, 300.0, 1200.0, 7200.0]),
        gpus=st.integers(1, 3),
        team=st.sampled_from(["vision", "nlp"]),
    ),
    max_size=1,
)


def _drawn(waiting: list[dict[str, Any]], working: list[dict[str, Any]]) -> list[Waiting | Working]:
    jobs: list[Waiting | Working] = []
    for number, facts in enumerate(waiting):
        jobs.append(wants(f"w{number}", **facts))
    left = 8
    for number, facts in enumerate(working):
        if facts["gpus"] <= left:
            left -= facts["gpus"]
            jobs.append(works(f"r{number}", **facts))
    return jobs


@given(waiting=_WAITS, working=_WORKS, slots=_SLOTS)
def test_no_card_is_given_twice_and_no_quota_passed(
    waiting: list[dict[str, Any]], working: list[dict[str, Any]], slots: list[Slot]
) -> None:
    """And every job that waits is told why; nobody is told who may not be."""
    jobs = _drawn(waiting, working)
    found = planned(*jobs, total=8, slots=slots)
    running = [job for job in jobs if isinstance(job, Working)]
    held = sum(job.gpus for job in running)
    given_out = sum(sum(start.holds.values()) for start in found.starts)
    assert given_out + held <= 8
    queue = [job for job in jobs if isinstance(job, Waiting)]
    assert sorted([*started(found), *found.waits]) == sorted(job.id for job in queue)
    assert sorted(found.order) == sorted(found.waits)
    for team in ("vision", "nlp"):
        booked = sum(each.gpus for each in slots if each.team == team)
        before = sum(job.gpus for job in running if job.team == team)
        new = [job for job in queue if job.team == team and job.id in started(found)]
        assert not new or before + sum(job.gpus for job in new) <= 4 + booked
    lent = sum(job.gpus for job in queue if job.id in started(found) and job.seconds == 600.0)
    for each in slots:
        own = sum(job.gpus for job in running if job.team == each.team)
        own += sum(job.gpus for job in queue if job.team == each.team and job.id in started(found))
        # What is kept and not used yet is nobody's, but for jobs that are done before the slot.
        idle = max(0, found.kept.get(each.id, 0) - own)
        assert given_out + held + idle <= 8 + (lent if each.start > NOW else 0)
    by_id = {job.id: job for job in running}
    for notice in found.notices:
        victim = by_id[notice.victim]
        assert victim.told is None
        if notice.cause is Cause.PRIORITY:
            assert NOW - victim.since >= 600
    for each in slots:
        inside = found.used.get(each.id, ())
        assert {by_id[name].team for name in inside} <= {each.team}
        # Whoever has it all gets it from others, as long as there are any.
        leaving = sum(by_id[n.victim].gpus for n in found.notices if n.successor == each.id)
        stays = sum(job.gpus for job in running if job.user == "bo" and job.team == each.team)
        reach = 8 - stays - sum(job.gpus for job in running if job.told is not None)
        if each.id in found.kept and not inside and each.gpus <= reach:
            assert found.kept[each.id] + leaving >= each.gpus
    assert len(set(told(found))) == len(found.notices)
    assert set(found.withdrawn) <= {job.id for job in running if job.told is not None}


@given(waiting=_WAITS, working=_WORKS, slots=_SLOTS, shuffle=st.randoms(use_true_random=False))
def test_the_order_in_which_jobs_are_listed_changes_nothing(
    waiting: list[dict[str, Any]],
    working: list[dict[str, Any]],
    slots: list[Slot],
    shuffle: random.Random,
) -> None:
    """A plan is of what there is."""
    jobs = _drawn(waiting, working)
    assert planned(*jobs, total=8, slots=slots) == planned(
        *shuffle.sample(jobs, len(jobs)), total=8, slots=slots
    )
