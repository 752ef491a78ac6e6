"""A job leaves for another: asked, parked, brought back, with each step and its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.scheduling.kueue.clusters import PREEMPTION, kueue_policy
from tests.scheduling.kueue.lives import Life, life

from gpuwarden.schedule_api import STEPS, EntryState, Outcome
from gpuwarden.scheduling.kueue import names
from gpuwarden.scheduling.kueue.leavings import Phase

if TYPE_CHECKING:
    from pathlib import Path


def full(found: Life) -> list[str]:
    """Two low jobs on the team's two cards, the first of them the older."""
    one = found.run("one")
    found.scene.time.pass_(100.0)
    two = found.run("two")
    found.scene.time.pass_(100.0)
    found.tick()
    return [one, two]


def test_the_whole_story(tmp_path: Path) -> None:
    """Notified, acknowledged, saved, left, freed, started; then it comes back and runs again."""
    with life(tmp_path, kueue_policy()) as found:
        one, two = full(found)
        high = found.submit("high", "high")
        found.tick(2, seconds=5.0)
        # The younger has less to lose.
        leaving = found.leaving(two)
        assert leaving is not None
        assert found.leaving(one) is None
        found.tick()
        order = found.engine.orders[0]
        assert order["job_id"] == f"pod-{found.pods(two)[0]['metadata']['uid']}"
        assert (order["at"], order["then"], order["cause"]) == ("epoch", "requeue", "priority")
        assert order["key"] == leaving.id
        assert order["successor"] == high
        now = found.scene.time.now
        found.engine.see({"notified": now, "acknowledged": now + 1})
        found.tick(2, seconds=3.0)
        assert found.active(two), "it is let finish its epoch"
        assert found.entry(two).state is EntryState.LEAVING
        assert found.entry(high).must_end == (two,)
        found.engine.see({"saved": found.scene.time.now})
        found.tick(2, seconds=3.0)
        assert not found.active(two)
        assert two in found.running(), "its pod has its grace"
        assert found.entry(high).why == "starting", "quota is not yet a card"
        found.end(two, 75)
        found.let_go()
        found.engine.see({"freed": found.scene.time.now})
        found.tick(2, seconds=3.0)
        found.start_pods()
        assert found.running() == {one, high}
        found.tick(3)
        assert found.active(two), "it waits for its turn again"
        assert found.entry(two).position == 1
        told = found.preemption(two)
        assert [*told.steps] == [*STEPS]
        assert [*told.steps.values()] == sorted(told.steps.values())
        assert told.outcome is Outcome.DONE
        assert told.lost_seconds == 0.0
        assert found.leaving(two) is None
        assert len(found.engine.leaves) == 1
        found.end(high, 0)
        found.tick()
        found.start_pods()
        assert found.running() == {one, two}
        assert found.workload(two)["metadata"]["annotations"][names.HISTORY_ANNOTATION]


def test_whoever_leaves_first_waits_for_the_others(tmp_path: Path) -> None:
    """Kueue #13662: two make way for one, at different times; neither goes back in between."""
    with life(tmp_path, kueue_policy()) as found:
        one, two = full(found)
        first, last = (f"pod-{found.pods(job)[0]['metadata']['uid']}" for job in (two, one))
        high = found.submit("high", "high", gpus=2)
        found.tick(3, seconds=5.0)
        assert found.leaving(one)
        assert found.leaving(two)
        found.engine.see({"saved": found.scene.time.now}, job=first)
        found.tick(2, seconds=3.0)
        found.end(two, 75)
        found.let_go()
        for _ in range(5):
            found.tick(seconds=100.0)
            found.start_pods()
            assert found.running() == {one}, "its card is kept for whoever it was given up for"
        found.engine.see({"saved": found.scene.time.now}, job=last)
        found.tick(2, seconds=3.0)
        found.end(one, 75)
        found.let_go()
        found.tick(3, seconds=3.0)
        found.start_pods()
        assert found.running() == {high}
        assert len(found.engine.leaves) == 2, "each was asked once"


def test_nobody_is_told_while_it_simply_fits(tmp_path: Path) -> None:
    """A free card needs no victim."""
    with life(tmp_path, kueue_policy()) as found:
        found.run("one")
        found.submit("high", "high")
        found.tick(4, seconds=5.0)
        assert found.engine.orders == []
        assert len(found.running()) == 2


def test_nobody_is_told_unless_the_whole_request_then_fits(tmp_path: Path) -> None:
    """Volcano #3673: one card that may be had does not help a job that wants two."""
    with life(tmp_path, kueue_policy()) as found:
        found.run("one")
        found.run("normal", "normal")
        found.scene.time.pass_(100.0)
        high = found.submit("high", "high", gpus=2)
        found.tick(4, seconds=5.0)
        assert found.engine.orders == []
        assert found.entry(high).why == "no_victim"


def test_a_minimum_run(tmp_path: Path) -> None:
    """Nobody is asked before it, and the wait is explained."""
    policy = kueue_policy(preemption={**PREEMPTION, "minimum_run": "30m"})
    with life(tmp_path, policy) as found:
        full(found)
        high = found.submit("high", "high")
        found.tick(3, seconds=5.0)
        assert found.entry(high).why == "not_yet"
        assert found.engine.orders == []
        found.tick(4, seconds=900.0)
        assert len(found.engine.leaves) == 1


def test_two_that_wait_do_not_count_one_card_twice(tmp_path: Path) -> None:
    """Each has its own victim, and a third has none."""
    with life(tmp_path, kueue_policy()) as found:
        one, two = full(found)
        waiting = [found.submit(f"high{index}", "high") for index in range(3)]
        found.tick(4, seconds=5.0)
        told = {job: found.leaving(job) for job in (one, two)}
        assert {each.successor for each in told.values() if each} == {*waiting[:2]}
        assert found.entry(waiting[2]).why == "no_victim"


def test_the_deadline(tmp_path: Path) -> None:
    """Who has not saved by then gets the signal, is told of as overdue, and comes back too."""
    with life(tmp_path, kueue_policy()) as found:
        _one, two = full(found)
        found.submit("high", "high")
        found.tick(3, seconds=5.0)
        found.tick(seconds=500.0)
        assert found.active(two)
        found.tick(seconds=120.0)
        assert not found.active(two)
        assert "victim_overdue" in found.codes()
        found.let_go()
        found.tick(2)
        found.start_pods()
        found.tick(3)
        assert found.active(two)
        found.tick(2, seconds=700.0)
        told = found.preemption(two)
        assert "saved" not in told.steps
        assert told.lost_seconds is not None
        assert told.lost_seconds > 0


def test_a_pod_that_stays_does_not_block_the_queue(tmp_path: Path) -> None:
    """Kueue #6489: past its grace somebody else is asked, and the first never a second time."""
    with life(tmp_path, kueue_policy()) as found:
        one, two = full(found)
        found.submit("high", "high")
        found.tick(3, seconds=5.0)
        found.tick(seconds=620.0)
        assert not found.active(two)
        found.tick(3, seconds=100.0)
        assert found.leaving(one) is not None
        assert "victim_stuck" in found.codes()
        found.tick(3)
        asked = [f"pod-{found.pods(job)[0]['metadata']['uid']}" for job in (two, one)]
        assert found.engine.asked == asked


def test_a_victim_that_ends_by_itself(tmp_path: Path) -> None:
    """Its notice is taken back, it is never parked, and its card goes to who waits."""
    with life(tmp_path, kueue_policy()) as found:
        one, two = full(found)
        high = found.submit("high", "high")
        found.tick(3, seconds=5.0)
        found.end(two, 0)
        found.tick(2)
        assert found.preemption(two).outcome is Outcome.ENDED
        assert found.leaving(two) is None
        assert found.running() == {one, high}
        assert [leave["state"] for leave in found.engine.leaves.values()] == ["withdrawn"]
        assert found.entry(two).state is EntryState.DONE


def test_a_victim_that_is_deleted(tmp_path: Path) -> None:
    """Nothing of it is left to be done."""
    with life(tmp_path, kueue_policy()) as found:
        one, two = full(found)
        high = found.submit("high", "high")
        found.tick(3, seconds=5.0)
        space, name = two.split("/")
        found.scene.cluster.delete("Job", name, space)
        found.let_go()
        found.tick(3)
        assert found.running() == {one, high}
        assert all(each.id != two for each in found.driver.entries()) if found.driver else False


def test_a_useless_notice_is_taken_back(tmp_path: Path) -> None:
    """Volcano #4925: who wanted the card is gone; the job goes on, and counts nothing."""
    with life(tmp_path, kueue_policy()) as found:
        _one, two = full(found)
        high = found.submit("high", "high")
        found.tick(3, seconds=5.0)
        space, name = high.split("/")
        found.scene.cluster.delete("Job", name, space)
        found.tick(2)
        assert found.leaving(two) is None
        assert [leave["state"] for leave in found.engine.leaves.values()] == ["withdrawn"]
        assert names.HISTORY_ANNOTATION not in found.workload(two)["metadata"]["annotations"]
        assert found.preemption(two).outcome is Outcome.WITHDRAWN


def test_nobody_is_ended_late_for_somebody_who_is_gone(tmp_path: Path) -> None:
    """The controller was away past the deadline, and who wanted the card is gone meanwhile."""
    with life(tmp_path, kueue_policy()) as found:
        _one, two = full(found)
        high = found.submit("high", "high")
        found.tick(3, seconds=5.0)
        assert found.leaving(two) is not None
        found.kill()
        space, name = high.split("/")
        found.scene.cluster.delete("Job", name, space)
        found.scene.time.pass_(3600.0)
        found.tick()
        assert found.active(two)
        assert found.leaving(two) is None


def test_a_card_that_came_free_otherwise_spares_the_victim(tmp_path: Path) -> None:
    """The notice is taken back as soon as the request fits without it."""
    with life(tmp_path, kueue_policy()) as found:
        one, two = full(found)
        found.submit("high", "high")
        found.tick(3, seconds=5.0)
        found.end(one, 0)
        found.tick(3)
        assert found.leaving(two) is None
        assert found.active(two)


def test_who_may_not_be_asked_is_not_ended(tmp_path: Path) -> None:
    """The engine protects a job: somebody else is asked, and the first is left alone."""
    with life(tmp_path, kueue_policy()) as found:
        one, two = full(found)
        found.engine.refuses[f"pod-{found.pods(two)[0]['metadata']['uid']}"] = "protected"
        found.submit("high", "high")
        found.tick(6, seconds=5.0)
        assert found.leaving(two) is None
        assert found.active(two)
        assert found.leaving(one) is not None
        assert found.engine.asked == [f"pod-{found.pods(one)[0]['metadata']['uid']}"]


def unknown(found: Life, *jobs: str) -> None:
    """The engine does not know these jobs."""
    for job in jobs:
        found.engine.refuses[f"pod-{found.pods(job)[0]['metadata']['uid']}"] = "unknown_job"


def test_who_cannot_be_asked_is_passed_over(tmp_path: Path) -> None:
    """A job that no engine knows is not ended for it: somebody else is asked."""
    with life(tmp_path, kueue_policy()) as found:
        one, two = full(found)
        unknown(found, two)
        high = found.submit("high", "high")
        found.tick(6, seconds=5.0)
        assert found.active(two)
        assert found.leaving(two) is None
        assert found.leaving(one) is not None
        assert found.engine.asked == [f"pod-{found.pods(one)[0]['metadata']['uid']}"]
        assert found.entry(high).must_end == (one,)


def test_nobody_is_ended_unasked(tmp_path: Path) -> None:
    """Where nobody else will do it waits and says for whom; known a little later, it is asked."""
    with life(tmp_path, kueue_policy()) as found:
        one, two = full(found)
        unknown(found, one, two)
        high = found.submit("high", "high")
        found.tick(8, seconds=5.0)
        assert found.active(one)
        assert found.active(two)
        entry = found.entry(high)
        assert (entry.why, entry.must_end) == ("not_asked", (two,))
        assert "not this one: unknown_job" in entry.words
        found.engine.refuses.clear()
        found.tick(4, seconds=100.0)
        assert len(found.engine.leaves) == 1


def test_the_hard_fallback_comes_last(tmp_path: Path) -> None:
    """`own_preemption: fallback`: once nobody can be asked, one gets the signal and its grace."""
    teams = [{"name": "vision", "users": ["ana"], "quota": {"a100-40": 2}}]
    ladder = [{"name": "low", "value": 10}, {"name": "high", "value": 1000, "preempts": ["low"]}]
    policy = kueue_policy(kueue={"own_preemption": "fallback"}, teams=teams, priorities=ladder)
    with life(tmp_path, policy) as found:
        one, two = full(found)
        unknown(found, two)
        found.engine.refuses[f"pod-{found.pods(one)[0]['metadata']['uid']}"] = "protected"
        found.submit("high", "high")
        found.tick(8, seconds=5.0)
        assert found.active(one), "nobody ends whom a rule protects"
        assert not found.active(two)
        assert "The engine cannot ask it" in found.preemption(two).words


def test_without_an_engine(tmp_path: Path) -> None:
    """The two steps are the note and the signal."""
    with life(tmp_path, kueue_policy(), asks=False) as found:
        one, two = full(found)
        high = found.submit("high", "high")
        found.tick(4, seconds=5.0)
        assert not found.active(two)
        assert found.pods(two)[0]["spec"]["terminationGracePeriodSeconds"] >= 65
        found.let_go()
        found.tick(2)
        found.start_pods()
        found.tick(3)
        assert found.running() == {one, high}
        assert found.active(two)


@pytest.mark.sweep
def test_no_more_often_than_the_policy_says(tmp_path: Path) -> None:
    """Kueue #4406: after that it is left alone, and told of."""
    policy = kueue_policy(
        teams=[{"name": "vision", "users": ["ana"], "quota": {"a100-40": 1}}],
        preemption={**PREEMPTION, "at_most": {"times": 3, "per": "24h"}},
    )
    with life(tmp_path, policy, asks=False) as found:
        low = found.run("low")
        for index in range(3):
            found.scene.time.pass_(100.0)
            high = found.submit(f"high{index}", "high")
            found.tick(4, seconds=5.0)
            found.let_go()
            found.tick(2)
            found.start_pods()
            found.tick(3)
            assert found.running() == {high}
            found.end(high, 0)
            found.tick(2)
            found.start_pods()
            found.tick(2, seconds=700.0)
            assert found.running() == {low}
        found.scene.time.pass_(100.0)
        last = found.submit("last", "high")
        found.tick(5, seconds=5.0)
        assert found.running() == {low}
        assert found.entry(last).why == "no_victim"
        assert "preemption_loop" in found.codes()


def test_borrowed_cards_go_back_to_their_owners(tmp_path: Path) -> None:
    """A job of the same class leaves if its team holds more than its own."""
    teams = [
        {"name": "vision", "users": ["ana"], "quota": {"a100-40": 2}, "borrow": {"a100-40": 2}},
        {"name": "speech", "users": ["cy"], "quota": {"a100-40": 2}},
    ]
    with life(tmp_path, kueue_policy(teams=teams), asks=False) as found:
        for index in range(4):
            found.run(f"job{index}", "normal")
            found.scene.time.pass_(10.0)
        assert len(found.running()) == 4
        own = found.submit("own", "normal", team="speech")
        found.tick(4, seconds=5.0)
        found.let_go()
        found.tick(3)
        assert own in found.running()
        found.start_pods()
        more = found.submit("more", "normal", team="vision")
        found.tick(4, seconds=5.0)
        assert found.entry(more).state is EntryState.PENDING, "it would borrow: it may ask nobody"


def test_the_phases_are_what_the_notes_say(tmp_path: Path) -> None:
    """Kueue #510: a parked job whose pod is still there has not left."""
    with life(tmp_path, kueue_policy(), asks=False) as found:
        _one, two = full(found)
        found.submit("high", "high")
        found.tick(4, seconds=5.0)
        leaving = found.leaving(two)
        assert leaving is not None
        assert leaving.phase is Phase.PARKED
        assert "left" not in leaving.steps
        assert "freed" not in leaving.steps


def test_a_priority_that_is_not_the_teams(tmp_path: Path) -> None:
    """Without admission policies a Job can name any class: nobody leaves for one of others'."""
    teams = [
        {"name": "vision", "users": ["ana"], "quota": {"a100-40": 2}, "priorities": ["low"]},
    ]
    policy = kueue_policy(teams=teams, kueue={"admission": "none"})
    with life(tmp_path, policy) as found:
        full(found)
        high = found.submit("high", "high")
        found.tick(4, seconds=5.0)
        assert found.engine.orders == []
        assert found.entry(high).why == "priority_not_allowed"


def test_a_time_that_is_over(tmp_path: Path) -> None:
    """Kueue takes a job out of its queue when its time is over; the queue says so."""
    with life(tmp_path, kueue_policy()) as found:
        one = found.run("one", time_limit_seconds=60.0)
        metadata = found.workload(one)["metadata"]
        spec = {"spec": {"active": False}}
        found.scene.cluster.patch("Workload", metadata["name"], spec, metadata["namespace"])
        evictions = [
            {
                "reason": "Deactivated",
                "underlyingCause": "MaximumExecutionTimeExceeded",
                "count": 1,
            }
        ]
        found.scene.cluster.store.status(
            "Workload",
            metadata["namespace"],
            metadata["name"],
            schedulingStats={"evictions": evictions},
        )
        found.let_go()
        found.tick(2)
        assert found.entry(one).why == "time_limit"
        assert found.entry(one).requeues == 1
