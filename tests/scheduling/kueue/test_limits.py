"""Budgets, hours, jobs that come first, and bookings on the cluster."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest
from tests.scheduling.kueue.clusters import kueue_policy
from tests.scheduling.kueue.lives import Life, life

from gpuwarden.platforms.kubernetes import condition
from gpuwarden.schedule_api import Cause, EntryState
from gpuwarden.scheduling.kueue import names
from gpuwarden.scheduling.slots import Slot

if TYPE_CHECKING:
    from pathlib import Path

HOUR = 3600.0
BERLIN = ZoneInfo("Europe/Berlin")


def moment(day: int, hour: int, minute: int = 0, *, month: int = 1) -> float:
    """A time of 2027 in Berlin."""
    return dt.datetime(2027, month, day, hour, minute, tzinfo=BERLIN).timestamp()


def with_budget(**more: Any) -> Any:
    """A policy with a hard budget of two GPU-hours a day."""
    budget = {"team": "vision", "per": "day", "limit": "2 GPU-hours", "kind": "hard"}
    return kueue_policy(budgets=[budget | {"running": "finish"} | more])


def check(found: Life, job: str) -> tuple[str, int | None]:
    """State of a job's budget check."""
    row = found.workload(job)["status"]["admissionChecks"][0]
    return row["state"], row.get("requeueAfterSeconds")


# -- budgets


def test_a_budget_with_room(tmp_path: Path) -> None:
    """The check is told to be looked after, the job is admitted once we have agreed, not before."""
    with life(tmp_path, with_budget()) as found:
        one = found.submit("one")
        assert condition(found.workload(one), "Admitted") != "True"
        assert (
            condition(found.scene.cluster.get("AdmissionCheck", "gpuwarden.budget", None), "Active")
            == ""
        )
        found.tick(2)
        assert check(found, one) == ("Ready", None)
        assert condition(found.workload(one), "Admitted") == "True"
        assert (
            condition(found.scene.cluster.get("AdmissionCheck", "gpuwarden.budget", None), "Active")
            == "True"
        )


def test_a_spent_budget(tmp_path: Path) -> None:
    """The next job waits until midnight, by Retry; its quota goes to others; then it runs."""
    with life(tmp_path, with_budget()) as found:
        found.scene.time.now = moment(4, 10)
        one = found.run("one", gpus=2)
        found.tick(2)
        found.start_pods()
        found.tick()
        found.scene.time.now += HOUR
        found.tick()
        found.end(one, 0)
        found.tick()
        two = found.submit("two")
        found.tick(3)
        assert condition(found.workload(two), "QuotaReserved") != "True"
        assert found.entry(two).why == "budget"
        assert found.entry(two).state is EntryState.PENDING
        assert found.running() == set()
        found.scene.time.now = moment(5, 0, 1)
        found.tick(3, seconds=HOUR)
        assert condition(found.workload(two), "Admitted") == "True"


def test_kueue_keeps_the_quota_after_retry(tmp_path: Path) -> None:
    """Kueue #6035: a minute later the job is parked; at midnight it comes back by itself."""
    with life(tmp_path, with_budget()) as found:
        found.scene.time.now = moment(4, 10)
        found.scene.kueue.keeps_on_retry = True
        one = found.run("one", gpus=2)
        found.tick(2)
        found.start_pods()
        found.tick()
        found.scene.time.now += HOUR
        found.tick()
        found.end(one, 0)
        two = found.submit("two")
        found.tick(2)
        assert check(found, two)[0] == "Retry"
        assert condition(found.workload(two), "QuotaReserved") == "True"
        found.tick(3, seconds=40.0)
        assert not found.active(two)
        assert found.entry(two).state is EntryState.HELD
        found.tick(2, seconds=60.0)
        assert condition(found.workload(two), "QuotaReserved") != "True"
        found.scene.time.now = moment(5, 0, 1)
        found.tick(3)
        assert found.active(two)


def test_a_check_that_flaps(tmp_path: Path) -> None:
    """Kueue sets it back to Pending: it is judged again, by the budget and nothing else."""
    with life(tmp_path, with_budget()) as found:
        one = found.run("one")
        found.tick(2)
        metadata = found.workload(one)["metadata"]
        for _ in range(3):
            rows = found.workload(one)["status"]["admissionChecks"]
            rows[0]["state"] = "Pending"
            found.scene.cluster.store.status(
                "Workload", metadata["namespace"], metadata["name"], admissionChecks=rows
            )
            found.tick(2)
            assert check(found, one)[0] == "Ready"


def test_running_jobs_leave_where_the_policy_says_so(tmp_path: Path) -> None:
    """They are asked, save, and are evicted by the check; they come back with the new day."""
    with life(tmp_path, with_budget(running="leave")) as found:
        found.scene.time.now = moment(4, 10)
        one = found.run("one", gpus=2)
        found.tick(2)
        found.start_pods()
        found.tick()
        found.scene.time.now += HOUR
        found.tick(3, seconds=30.0)
        assert found.engine.orders[0]["cause"] == "budget"
        found.engine.see({"saved": found.scene.time.now})
        found.tick(3, seconds=3.0)
        assert condition(found.workload(one), "Evicted") == "True"
        found.let_go()
        found.tick(3)
        assert found.running() == set()
        assert found.preemption(one).cause is Cause.BUDGET
        found.tick(3, seconds=100.0)
        assert found.running() == set()
        found.scene.time.now = moment(5, 0, 1)
        found.tick(4, seconds=HOUR)
        assert found.running() == {one}


def test_eight_cards_cost_eight_times_as_much(tmp_path: Path) -> None:
    """What is counted is the time of pods, by their number of cards, once for each attempt."""
    with life(tmp_path, kueue_policy()) as found:
        one = found.run("one", gpus=2)
        found.tick()
        start = found.scene.time.now - 1.0
        found.tick(4, seconds=20.0)
        found.end(one, 75)
        found.start_pods()
        found.tick(seconds=10.0)
        found.end(one, 0)
        found.tick()
        assert found.driver is not None
        held = found.driver.usage(0.0, found.scene.time.now + 1)
        assert len(held) == 2
        assert {each.gpus for each in held} == {2}
        assert all(each.end is not None for each in held)
        total = sum((each.end or 0.0) - each.start for each in held)
        assert total == pytest.approx(found.scene.time.now - start - 1.0, abs=12.0)
        again = found.begin()
        assert list(again.usage(0.0, found.scene.time.now + 1)) == list(held)


# -- hours

WINDOWS = [{"name": "night", "from": "20:00", "to": "07:00", "running": "leave"}]


def test_a_job_of_the_night(tmp_path: Path) -> None:
    """It starts when its window opens, is asked to leave when it closes, and goes on next night."""
    with life(tmp_path, kueue_policy(windows=WINDOWS)) as found:
        found.scene.time.now = moment(4, 15)
        one = found.submit("one", window="night")
        found.tick(2)
        assert found.running() == set()
        assert found.entry(one).why == "window"
        assert found.entry(one).state is EntryState.HELD
        found.scene.time.now = moment(4, 20, 1)
        found.tick(2)
        found.start_pods()
        assert found.running() == {one}
        found.scene.time.now = moment(5, 7, 0)
        found.tick(3)
        assert found.engine.orders[0]["cause"] == "window"
        found.engine.see({"saved": found.scene.time.now})
        found.tick(3, seconds=3.0)
        assert not found.active(one)
        found.let_go()
        found.tick(3, seconds=600.0)
        assert not found.active(one), "not before it opens again"
        found.scene.time.now = moment(5, 20, 0)
        found.tick(2)
        found.start_pods()
        assert found.running() == {one}
        found.tick(3, seconds=400.0)
        annotations = found.workload(one)["metadata"]["annotations"]
        assert names.HISTORY_ANNOTATION not in annotations, "nobody else made it leave"


def test_an_evicted_job_of_the_night_does_not_run_by_day(tmp_path: Path) -> None:
    """Its gate is gone for good, so it is kept out of the queue until its hours."""
    with life(tmp_path, kueue_policy(windows=WINDOWS)) as found:
        found.scene.time.now = moment(4, 21)
        blocker = found.run("blocker", gpus=2)
        one = found.submit("one", window="night")
        found.tick(2)
        assert found.entry(one).state is EntryState.PENDING
        found.scene.time.now = moment(5, 9)
        found.tick(2)
        found.end(blocker, 0)
        found.tick(2)
        assert found.running() == set()
        found.scene.time.now = moment(5, 20)
        found.tick(2)
        assert found.running() == {one}


def test_nights_with_another_length(tmp_path: Path) -> None:
    """Clocks are put forward on 28 March: the window opens and closes by the clock on the wall."""
    windows = [{"name": "night", "from": "01:30", "to": "03:30", "running": "finish"}]
    with life(tmp_path, kueue_policy(windows=windows)) as found:
        found.scene.time.now = moment(28, 1, 0, month=3)
        one = found.submit("one", window="night")
        found.tick()
        assert found.running() == set()
        found.scene.time.now = moment(28, 1, 31, month=3)
        found.tick(2)
        assert found.running() == {one}


def test_a_protected_job_stays_past_its_window(tmp_path: Path) -> None:
    """The engine would not have it asked: it is left alone for a while, and then asked again."""
    with life(tmp_path, kueue_policy(windows=WINDOWS)) as found:
        found.scene.time.now = moment(4, 21)
        one = found.run("one", window="night")
        found.tick(2)
        found.start_pods()
        found.engine.refuses[f"pod-{found.pods(one)[0]['metadata']['uid']}"] = "kept"
        found.scene.time.now = moment(5, 9)
        found.tick(8, seconds=5.0)
        assert found.running() == {one}
        assert found.active(one)
        assert len(found.engine.orders) == 1
        found.tick(3, seconds=600.0)
        assert len(found.engine.orders) == 2


def test_a_job_that_cannot_be_asked_stays_past_its_window(tmp_path: Path) -> None:
    """Nobody could leave in its place: it is told of with what helps, and asked again."""
    with life(tmp_path, kueue_policy(windows=WINDOWS)) as found:
        found.scene.time.now = moment(4, 21)
        one = found.run("one", window="night")
        found.tick(2)
        found.start_pods()
        found.engine.refuses[f"pod-{found.pods(one)[0]['metadata']['uid']}"] = "unknown_job"
        found.scene.time.now = moment(5, 9)
        found.tick(4, seconds=5.0)
        assert found.active(one)
        assert found.driver is not None
        words = [each.words for each in found.driver.problems() if each.code == "not_asked"]
        assert len(words) == 1
        assert "should leave for night" in words[0]
        assert "own_preemption: fallback" in words[0]
        found.engine.refuses.clear()
        found.tick(3, seconds=100.0)
        assert len(found.engine.leaves) == 1
        assert "not_asked" not in found.codes()


def test_finish_lets_it(tmp_path: Path) -> None:
    """A window may let what runs go on."""
    windows = [{**WINDOWS[0], "running": "finish"}]
    with life(tmp_path, kueue_policy(windows=windows)) as found:
        found.scene.time.now = moment(4, 21)
        one = found.run("one", window="night")
        found.tick(2)
        found.start_pods()
        found.scene.time.now = moment(5, 9)
        found.tick(3)
        assert found.running() == {one}
        assert found.engine.orders == []


def test_one_after_another(tmp_path: Path) -> None:
    """It starts when the first has succeeded; after a failure it says so and never starts."""
    with life(tmp_path, kueue_policy()) as found:
        first = found.run("first")
        second = found.submit("second", after=(first,))
        lost = found.submit("lost", after=("vision/nothing",))
        found.tick(2)
        assert found.running() == {first}
        assert found.entry(second).must_end == (first,)
        assert found.entry(lost).why == "unknown_dependency"
        found.end(first, 0)
        found.tick(2)
        assert found.running() == {second}
        found.start_pods()
        third = found.submit("third", after=(second,))
        found.end(second, 1)
        found.tick(2)
        assert found.entry(third).why == "broken_dependency"
        assert found.running() == set()


# -- bookings


def booked(
    team: str, start: float, *, gpus: int = 4, name: str = "b1", lead: float = 900.0
) -> Slot:
    """Two hours of the fleet's cards."""
    return Slot(name, team, "ana", gpus, "a100-40", start, start + 2 * HOUR, lead)


def quota(found: Life, team: str) -> str:
    """A team's own cards, as the cluster has it."""
    queue = found.scene.cluster.get("ClusterQueue", f"gpuwarden-{team}", None)
    groups = queue["spec"]["resourceGroups"]
    return str(groups[1]["flavors"][0]["resources"][0]["nominalQuota"]) if len(groups) > 1 else "0"


BOOKINGS = {
    "lead_time": "15m",
    "longest": "7d",
    "ahead": "90d",
    "no_show_after": "30m",
    "at_most_share": "50%",
}


def test_a_booking(tmp_path: Path) -> None:
    """Who has to leave is told before, quotas move at its start, and back at its end."""
    with life(tmp_path, kueue_policy(bookings=BOOKINGS)) as found:
        jobs = {found.run(f"job{index}") for index in range(2)}
        found.tick()
        start = found.scene.time.now + HOUR
        assert found.driver is not None
        slot = booked("speech", start)
        found.driver.book([slot], found.scene.time.now)
        found.tick(2)
        assert found.engine.orders == []
        found.scene.time.now = start - 800.0
        found.tick(4, seconds=2.0)
        assert {order["cause"] for order in found.engine.orders} == {"booking"}
        assert len(found.engine.leaves) == 2
        assert {order["successor"] for order in found.engine.orders} == {"b1"}
        found.engine.see({"saved": found.scene.time.now})
        found.tick(4, seconds=3.0)
        found.let_go()
        found.tick(2)
        assert all(not found.active(job) for job in jobs), "not before the quotas have moved"
        assert quota(found, "vision") == "2"
        found.scene.time.now = start
        found.tick(2)
        assert (quota(found, "vision"), quota(found, "speech")) == ("0", "4")
        assert [use.held for use in found.driver.slot_uses()] == [True]
        found.tick(4, seconds=20.0)
        assert all(found.active(job) for job in jobs)
        assert found.running() == set()
        own = found.run("own", team="speech", gpus=4)
        found.tick(2, seconds=60.0)
        assert own in found.running()
        use = found.driver.slot_uses()[0]
        assert use.gpus == 4
        assert use.used_gpu_seconds == pytest.approx(480.0, abs=20.0)
        found.end(own, 0)
        found.scene.time.now = slot.end
        found.tick(2)
        assert (quota(found, "vision"), quota(found, "speech")) == ("2", "2")
        assert found.driver.slot_uses() == ()
        found.tick(2)
        assert found.running() == jobs


def test_a_booking_outlives_nobody(tmp_path: Path) -> None:
    """Kueue #8654: a crash in the middle of it, and an hour too late: quotas are mended."""
    with life(tmp_path, kueue_policy(bookings=BOOKINGS)) as found:
        found.tick()
        slot = booked("speech", found.scene.time.now + 10.0)
        assert found.driver is not None
        found.driver.book([slot], found.scene.time.now)
        found.scene.cluster.fail("PATCH", "clusterqueues/gpuwarden-speech", 503)
        found.scene.time.pass_(20.0)
        with pytest.raises(Exception, match="503"):
            found.tick()
        # The one that gives went first: less for a moment, never more than there is.
        assert (quota(found, "vision"), quota(found, "speech")) == ("0", "2")
        found.kill()
        found.scene.time.now = slot.end + HOUR
        found.tick(2)
        assert (quota(found, "vision"), quota(found, "speech")) == ("2", "2")


def test_a_cancelled_booking_takes_its_notices_back(tmp_path: Path) -> None:
    """Whoever was told for it goes on."""
    with life(tmp_path, kueue_policy(bookings=BOOKINGS)) as found:
        job = found.run("job", gpus=2)
        found.tick()
        assert found.driver is not None
        found.driver.book([booked("speech", found.scene.time.now + 600.0)], found.scene.time.now)
        found.tick(3, seconds=3.0)
        assert found.leaving(job) is not None
        found.driver.book([], found.scene.time.now)
        found.tick(2)
        assert found.leaving(job) is None
        assert [leave["state"] for leave in found.engine.leaves.values()] == ["withdrawn"]
        assert names.HISTORY_ANNOTATION not in found.workload(job)["metadata"]["annotations"]
