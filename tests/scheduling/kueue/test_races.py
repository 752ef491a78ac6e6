"""What else happens meanwhile: crashes, lost answers, conflicts, dark nodes, others at work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.kubernetes_servers import User
from tests.scheduling.kueue.clusters import kueue_policy
from tests.scheduling.kueue.lives import Life, life
from tests.servers import until

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.schedule_api import EntryState, Outcome
from gpuwarden.scheduling.drivers import LEAK, LOOP
from gpuwarden.scheduling.kueue import leases, names
from gpuwarden.scheduling.kueue.leavings import Phase

if TYPE_CHECKING:
    from pathlib import Path

ONE_CARD = kueue_policy(teams=[{"name": "vision", "users": ["ana"], "quota": {"a100-40": 1}}])
LADDER = [
    {"name": "low", "value": 10},
    {"name": "high", "value": 1000, "preempts": ["low"]},
]


def contested(found: Life) -> tuple[str, str]:
    """A low job that runs, and a high one that waits for its card."""
    low = found.run("low")
    found.scene.time.pass_(100.0)
    return low, found.submit("high", "high")


def finish(found: Life, low: str, high: str) -> None:
    """From a notice on: it saves, leaves, the other runs, it comes back."""
    for _ in range(12):
        if not found.active(low):
            break
        found.engine.see({"notified": found.scene.time.now, "saved": found.scene.time.now})
        found.tick(seconds=3.0)
    assert not found.active(low)
    found.let_go()
    found.tick(2)
    found.start_pods()
    assert found.running() == {high}
    found.tick(4)
    assert found.active(low)


def test_a_crash_after_every_round(tmp_path: Path) -> None:
    """Each round has a new process: asked once, parked once, brought back, and nothing lost."""
    with life(tmp_path, ONE_CARD) as found:
        low, high = contested(found)
        for _ in range(6):
            found.tick(seconds=3.0)
            found.kill()
        found.engine.see({"notified": found.scene.time.now, "saved": found.scene.time.now})
        for _ in range(3):
            found.tick(seconds=3.0)
            found.kill()
        assert not found.active(low)
        found.let_go()
        found.scene.kick()
        found.start_pods()
        for _ in range(4):
            found.tick()
            found.kill()
        assert found.active(low)
        assert found.running() == {high}
        assert len(found.engine.leaves) == 1
        assert {order["key"] for order in found.engine.orders} == {
            leave["key"] for leave in found.engine.leaves.values()
        }


@pytest.mark.parametrize("status", [1, 409, pytest.param(503, marks=pytest.mark.sweep)])
def test_every_change_without_an_answer(tmp_path: Path, status: int) -> None:
    """Each is done and cut off, or not done, or refused for now: the next rounds mend it."""
    with life(tmp_path, ONE_CARD) as found:
        low, high = contested(found)
        for _ in range(10):
            found.scene.cluster.fail("PATCH", "/workloads/", status)
            try:
                found.tick(seconds=3.0)
            except ServiceUnavailable:
                assert status != 409
            if found.engine.leaves:
                found.engine.see({"saved": found.scene.time.now})
        for fault in found.scene.cluster.faults:
            fault.times = 0
        finish(found, low, high)
        assert len(found.engine.leaves) == 1


def test_killed_between_parked_and_back(tmp_path: Path) -> None:
    """A driver that comes hours later brings it back: no job stays parked for ever."""
    with life(tmp_path, ONE_CARD) as found:
        low, high = contested(found)
        found.tick(3, seconds=5.0)
        found.engine.see({"saved": found.scene.time.now})
        found.tick(2, seconds=3.0)
        assert not found.active(low)
        found.kill()
        found.let_go()
        space, name = high.split("/")
        found.scene.cluster.delete("Job", name, space)
        found.let_go()
        found.scene.time.pass_(7200.0)
        found.tick(3)
        assert found.active(low)
        found.start_pods()
        assert found.running() == {low}


def test_away_for_longer_than_the_deadline(tmp_path: Path) -> None:
    """Who was chosen and not asked yet gets the whole time from when it is asked."""
    with life(tmp_path, ONE_CARD) as found:
        low, _high = contested(found)
        found.tick(seconds=6.0)
        assert found.engine.orders == []
        found.kill()
        found.scene.time.pass_(7200.0)
        found.tick()
        assert found.active(low)
        assert found.engine.orders[0]["deadline_seconds"] == pytest.approx(600.0)


def test_the_engine_is_down(tmp_path: Path) -> None:
    """It is asked again with the same key; at the deadline the signal and its grace come."""
    with life(tmp_path, ONE_CARD) as found:
        low, _high = contested(found)
        found.tick(2, seconds=4.0)
        found.engine.down = True
        found.tick(seconds=5.0)
        assert "engine_unreachable" in found.codes()
        assert found.active(low)
        found.engine.down = False
        found.tick(2)
        assert len(found.engine.leaves) == 1
        found.engine.down = True
        found.tick(2, seconds=400.0)
        assert not found.active(low)


def test_kueue_is_faster(tmp_path: Path) -> None:
    """Its own preemption ends the victim while it is told: nobody parks it, it may come back."""
    with life(tmp_path, ONE_CARD) as found:
        low, high = contested(found)
        found.tick(3, seconds=5.0)
        assert found.leaving(low) is not None
        store = found.scene.cluster.store
        found.scene.kueue.evict(store, found.workload(low), "Preempted")
        found.tick(2)
        found.let_go()
        found.tick(2)
        found.start_pods()
        found.tick(3)
        assert found.running() == {high}
        assert found.active(low)
        found.tick(2, seconds=700.0)
        assert found.preemption(low).outcome is Outcome.DONE
        assert "Preempted" in found.preemption(low).words


def test_an_operator_takes_the_victim_out(tmp_path: Path) -> None:
    """What somebody else has set to inactive stays so: it is theirs to bring back."""
    with life(tmp_path, ONE_CARD) as found:
        low, high = contested(found)
        found.tick(3, seconds=5.0)
        workload = found.workload(low)
        metadata = workload["metadata"]
        found.scene.cluster.patch(
            "Workload", metadata["name"], {"spec": {"active": False}}, metadata["namespace"]
        )
        found.tick()
        found.let_go()
        found.tick(4, seconds=400.0)
        assert not found.active(low)
        assert found.leaving(low) is None
        assert found.entry(low).why == "inactive"
        assert found.running() == {high}


def test_an_operator_brings_a_parked_job_back(tmp_path: Path) -> None:
    """It is not parked a second time for the same notice."""
    with life(tmp_path, ONE_CARD, asks=False) as found:
        low, _high = contested(found)
        found.tick(3, seconds=5.0)
        assert not found.active(low)
        metadata = found.workload(low)["metadata"]
        found.scene.cluster.patch(
            "Workload", metadata["name"], {"spec": {"active": True}}, metadata["namespace"]
        )
        found.tick(2)
        leaving = found.leaving(low)
        assert leaving is None or leaving.phase is Phase.RETURNED
        assert found.active(low)


def test_two_controllers(tmp_path: Path) -> None:
    """One acts, the other looks on and says so; it takes over once the Lease has run out."""
    with life(tmp_path, ONE_CARD) as found:
        low = found.run("low")
        found.tick()
        first = found.driver
        second = found.begin()
        found.submit("high", "high")
        found.driver = second
        found.tick(4, seconds=5.0)
        assert found.leaving(low) is None
        assert "another_controller" in found.codes()
        assert found.entry(low).state is EntryState.RUNNING
        assert first is not None
        found.tick(4, seconds=30.0)
        assert found.leaving(low) is not None
        found.driver = first
        found.tick(seconds=20.0)
        assert "another_controller" in found.codes()
        assert len(found.engine.leaves) <= 1


def test_a_clean_stop_gives_the_lease_away(tmp_path: Path) -> None:
    """Who comes next need not wait for it to run out."""
    with life(tmp_path, ONE_CARD) as found:
        found.tick()
        found.kill()
        found.tick(seconds=3.0)
        assert "another_controller" not in found.codes()


def test_watches_that_break_and_expire(tmp_path: Path) -> None:
    """410 on a watch is a new list; a cut one is taken up where it stood; nothing is missed."""
    with life(tmp_path, ONE_CARD) as found:
        found.tick()
        found.scene.cluster.store.forget()
        low = found.run("low")
        found.scene.cluster.cut()
        found.scene.time.pass_(100.0)
        found.submit("high", "high")
        found.tick(2, seconds=5.0)
        assert found.leaving(low) is not None
        found.scene.cluster.fail("GET", "/workloads$", 410)
        found.scene.cluster.cut()
        found.tick(2, seconds=5.0)
        assert len(found.engine.leaves) == 1


def test_a_server_that_cannot_be_seen(tmp_path: Path) -> None:
    """Nothing is decided on what is old, and what was known stays."""
    with life(tmp_path, ONE_CARD) as found:
        low, _high = contested(found)
        found.tick()
        found.scene.cluster.fail("GET", "/leases/", 503, times=100)
        found.scene.time.pass_(60.0)
        with pytest.raises(ServiceUnavailable):
            found.tick(seconds=5.0)
        assert found.leaving(low) is None
        assert found.entry(low).state is EntryState.RUNNING


def test_clocks_that_differ(tmp_path: Path) -> None:
    """With a clock that is wrong nobody is asked; it is said, and what stands is followed."""
    with life(tmp_path, ONE_CARD) as found:
        low, _high = contested(found)
        driver = found.begin()
        found.driver = driver
        server = found.scene.time.now
        found.scene.cluster.store.now = lambda: server
        found.caught_up(driver)
        for _ in range(3):
            found.scene.time.pass_(100.0)
            driver.tick(found.scene.time.now)
        assert "clock_skew" in found.codes()
        assert found.leaving(low) is None


def test_a_clock_that_leaps_ends_nobody(tmp_path: Path) -> None:
    """By it the deadline is over, and by the API server's it is not: nobody is parked."""
    with life(tmp_path, ONE_CARD) as found:
        low, _high = contested(found)
        found.tick(3, seconds=5.0)
        assert found.leaving(low) is not None
        assert found.driver is not None
        found.driver.tick(found.scene.time.now + 3600.0)
        assert found.active(low)
        assert "clock_skew" in found.codes()


def test_a_dead_node(tmp_path: Path) -> None:
    """Kueue #6757: its cards are not counted as free, and nobody says that the job has left."""
    with life(tmp_path, ONE_CARD) as found:
        low, high = contested(found)
        found.tick(3, seconds=5.0)
        found.engine.see({"saved": found.scene.time.now})
        found.scene.cluster.node("node1", ready="Unknown")
        found.tick(3, seconds=10.0)
        assert not found.active(low)
        assert "node_unknown" in found.codes()
        leaving = found.leaving(low)
        assert leaving is not None
        assert "left" not in leaving.steps
        assert found.entry(high).started is None
        found.tick(2, seconds=3600.0)
        assert not found.active(low), "it is not brought back while its pod may still run"


def test_a_job_that_counts_as_done(tmp_path: Path) -> None:
    """Volcano #394: a program that ends with 0 when told to leave is said to have done so."""
    with life(tmp_path, ONE_CARD, asks=False) as found:
        low, _high = contested(found)
        found.tick(3, seconds=5.0)
        found.end(low, 0)
        found.tick()
        assert found.preemption(low).outcome is Outcome.ENDED
        assert "exit_0_after_leave" in found.codes()


def test_a_pod_that_left_before_we_saw_it(tmp_path: Path) -> None:
    """It has ended with 75 and its Job has made another: that one is taken off, nothing else."""
    with life(tmp_path, ONE_CARD) as found:
        low, high = contested(found)
        found.tick(3, seconds=5.0)
        found.end(low, 75)
        assert len(found.pods(low)) == 2
        found.tick(2)
        assert not found.active(low)
        found.let_go()
        found.tick(2)
        found.start_pods()
        assert found.running() == {high}


def test_notes_that_nobody_can_read(tmp_path: Path) -> None:
    """A note that was written by somebody else, or cut, holds no job."""
    with life(tmp_path, ONE_CARD) as found:
        low = found.run("low")
        metadata = found.workload(low)["metadata"]
        for text in ("{", '{"id":1}', "x" * 10_000, '{"phase":"parked"}'):
            body = {
                "metadata": {"annotations": {names.LEAVE_ANNOTATION: text}},
                "spec": {"active": False},
            }
            found.scene.cluster.patch("Workload", metadata["name"], body, metadata["namespace"])
            found.tick()
            assert "garbled_note" in found.codes()
            found.tick()
            assert found.active(low)
            assert names.LEAVE_ANNOTATION not in found.workload(low)["metadata"]["annotations"]


def test_quota_that_leaks(tmp_path: Path) -> None:
    """Kueue #14811: reserved and never run; said with its age, and counted for nobody else."""
    with life(tmp_path, ONE_CARD) as found:
        low = found.submit("low")
        found.tick()
        for pod in found.pods(low):
            store = found.scene.cluster.store
            found.scene.cluster.controllers = False
            store.remove("Pod", "vision", pod["metadata"]["name"], pod["metadata"]["uid"])
        found.tick(2, seconds=400.0)
        assert found.entry(low).state is not EntryState.RUNNING, "Kueue #2923: its Job says so"
        assert found.driver is not None
        leak = next(each for each in found.driver.problems() if each.code == LEAK)
        assert leak.words.startswith("1 cards"), "the metric reads their number there"


def test_a_job_that_only_comes_back(tmp_path: Path) -> None:
    """Its data are gone, say: 75 is no failure to Kubernetes, so nobody else would say so."""
    with life(tmp_path, ONE_CARD) as found:
        low = found.submit("low")
        found.tick()
        for _ in range(3):
            assert LOOP not in found.codes()
            found.start_pods()
            found.scene.time.pass_(20.0)
            found.end(low, 75)
            found.tick()
        assert LOOP in found.codes()
        found.tick(seconds=3601.0)
        assert LOOP not in found.codes()


def test_a_finished_job_with_a_reservation_is_no_use(tmp_path: Path) -> None:
    """Kueue #7480: nobody has to leave because of it."""
    with life(tmp_path, kueue_policy()) as found:
        done = found.run("done")
        one = found.run("one")
        found.end(done, 0)
        found.scene.time.pass_(100.0)
        found.submit("high", "high")
        found.tick(4, seconds=5.0)
        assert found.leaving(one) is None


def test_a_gate_opens_for_who_fits_and_after_the_notice(tmp_path: Path) -> None:
    """Kueue that may end jobs by itself is kept from it until those that leave were told."""
    teams = [{"name": "vision", "users": ["ana"], "quota": {"a100-40": 1}}]
    policy = kueue_policy(kueue={"own_preemption": "fallback"}, teams=teams, priorities=LADDER)
    with life(tmp_path, policy) as found:
        found.scene.kueue.preempts = True
        labels = {"app.kubernetes.io/name": "kueue", "control-plane": "controller-manager"}
        containers = [{"name": "manager", "image": "registry.k8s.io/kueue/kueue:v0.19.2"}]
        template = {"metadata": {"labels": labels}, "spec": {"containers": containers}}
        spec = {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}
        body = {"metadata": {"name": "kueue-controller-manager", "labels": labels}, "spec": spec}
        found.scene.cluster.create("Deployment", "kueue-system", body)
        low = found.run("low")
        found.tick()
        name = names.controller_name(found.scene.policy)
        lease = found.scene.cluster.get("Lease", name, "gpuwarden")
        # Submissions go by the real clock, the scene by its own.
        assert leases.is_held(lease, found.scene.time.now)
        fresh = leases.lease_spec("x", 4e9, taken=4e9, changes=0)
        found.scene.cluster.patch(
            "Lease", name, {"spec": {"renewTime": fresh["renewTime"]}}, "gpuwarden"
        )
        found.scene.time.pass_(100.0)
        high = found.submit("high", "high")
        job = found.scene.cluster.get("Job", high.split("/")[1], "vision")
        assert job["metadata"]["annotations"][names.GATES_ANNOTATION] == names.NOTICE_GATE
        found.tick(4, seconds=3.0)
        assert found.running() == {low}, "the gate is shut: Kueue may not end it yet"
        found.engine.see({"saved": found.scene.time.now})
        found.tick(3, seconds=3.0)
        job = found.scene.cluster.get("Job", high.split("/")[1], "vision")
        assert names.GATES_ANNOTATION not in job["metadata"]["annotations"]
        found.let_go()
        found.tick(2)
        found.start_pods()
        assert found.running() == {high}


def test_a_stop_releases_everything(tmp_path: Path) -> None:
    """Threads and watches end with the driver."""
    with life(tmp_path, ONE_CARD) as found:
        found.tick()
        driver = found.driver
        assert driver is not None
        driver.stop()
        found.driver = None
        assert until(lambda: not driver._thread.is_alive())


def test_a_burst_of_changes_asks_for_few_rounds(tmp_path: Path) -> None:
    """A round serves all of them; what is not read, as a node's report, asks for none."""
    with life(tmp_path, ONE_CARD) as found:
        woken: list[float] = []
        found.wake = lambda: woken.append(found.scene.time.now)
        low = found.run("low")
        found.tick()
        until(lambda: woken)
        store, driver = found.scene.cluster.store, found.driver
        assert driver is not None
        metadata = found.workload(low)["metadata"]
        woken.clear()
        for index in range(40):
            store.status("Workload", metadata["namespace"], metadata["name"], note=index)
        found.caught_up(driver)
        until(lambda: woken)
        assert len(woken) < 40


def test_a_daemon_that_is_up_before_its_cluster(tmp_path: Path) -> None:
    """It says that nothing can be seen, and goes on by itself once something can."""
    with life(tmp_path, ONE_CARD) as found:
        found.scene.cluster.users.clear()
        driver = found.begin()
        found.driver = driver
        with pytest.raises(ServiceUnavailable, match=r"cannot be seen now.*401"):
            driver.tick(found.scene.time.now)
        assert driver.entries() == ()
        found.scene.cluster.users[found.scene.cluster.token] = User("controller")
        low = found.run("low")
        found.tick(2)
        assert found.entry(low).state is EntryState.RUNNING
