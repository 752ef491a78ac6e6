"""Jobs that are kept out of their queue: given back where nobody else would, held, released."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from tests.kubernetes_servers import User
from tests.scheduling.kueue.clusters import bring_about, kueue_policy
from tests.scheduling.kueue.lives import Life, life
from tests.scheduling.kueue.test_adapters import planned, undo, with_kueue
from tests.scheduling.kueue.test_rights import grants_of

from gpuwarden.errors import RefusedAction
from gpuwarden.scheduling.drivers import LOOP, Holdable
from gpuwarden.scheduling.engines import Act, Step, undoing
from gpuwarden.scheduling.kueue import names
from gpuwarden.scheduling.kueue.adapters import KueueAdapter
from gpuwarden.scheduling.policy_plans import plan_lines

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.scheduling.policies import Policy

SPEECH_ALONE = [{"name": "speech", "users": ["cy"], "quota": {"a100-40": 4}}]
GUARDED = {"requeues": {"times": 3, "per": "1h"}}


def park(found: Life) -> tuple[str, str]:
    """A low job that is parked for a high one, and one that an operator has set to inactive."""
    low = found.run("low", gpus=2)
    stopped = found.submit("stopped", team="speech")
    metadata = found.workload(stopped)["metadata"]
    found.scene.cluster.patch(
        "Workload", metadata["name"], {"spec": {"active": False}}, metadata["namespace"]
    )
    found.scene.time.pass_(100.0)
    found.submit("high", "high", gpus=2)
    found.tick(3, seconds=5.0)
    found.engine.see({"saved": found.scene.time.now})
    found.tick(2, seconds=3.0)
    assert not found.active(low)
    return low, stopped


def undo_steps(policy: Policy) -> tuple[Step, ...]:
    """What `policy undo` would do."""

    async def run() -> tuple[Step, ...]:
        adapter = KueueAdapter(policy)
        try:
            return undoing(await adapter.read(adapter.render(policy, version=None))).steps
        finally:
            await adapter.aclose()

    return asyncio.run(run())


def notes(found: Life, job: str) -> set[str]:
    """What of ours stands on a Workload."""
    metadata = found.workload(job)["metadata"]
    written = {*metadata.get("annotations", {}), *metadata["labels"]}
    return written & {*names.NOTES, names.LEAVE_LABEL, names.POLICY_LABEL}


def test_undo_gives_back_who_is_parked(tmp_path: Path) -> None:
    """It is told, before the queues go; what an operator has stopped stays; twice is once."""
    with life(tmp_path, kueue_policy()) as found:
        low, stopped = park(found)
        found.kill()
        name = found.workload(low)["metadata"]["name"]
        steps = undo_steps(found.scene.policy)
        given = [step for step in steps if step.act is Act.RELEASE]
        assert [(step.kind, step.name) for step in given] == [("Workload", f"vision/{name}")]
        kinds = [step.kind for step in steps]
        assert kinds.index("RoleBinding") < kinds.index("Workload") < kinds.index("LocalQueue")
        found.scene.cluster.fail("PATCH", f"/workloads/{name}", 409)
        undo(found.scene.policy)
        assert found.active(low)
        assert notes(found, low) == set()
        assert not found.active(stopped)
        assert undo_steps(found.scene.policy) == ()


def test_a_team_that_goes_gets_its_jobs_back(tmp_path: Path) -> None:
    """An apply without it says so and does it; of teams that stay nobody is disturbed."""
    with life(tmp_path, kueue_policy()) as found:
        low, _stopped = park(found)
        assert planned(found.scene.policy).nothing, "its team is there: it is on its way"
        policy = with_kueue(kueue_policy(teams=SPEECH_ALONE), found.scene)
        told = [*plan_lines(planned(policy))]
        assert any(line.startswith("< release Workload vision/job-low") for line in told)
        outcome = bring_about(policy)
        assert outcome.failed is None, outcome.error
        assert found.active(low)
        assert planned(policy).nothing


@pytest.mark.sweep
def test_a_lost_answer_gives_nothing_back_twice(tmp_path: Path) -> None:
    """Whoever parked it anew meanwhile, an operator say, is not overruled."""
    with life(tmp_path, kueue_policy()) as found:
        low, _stopped = park(found)
        found.kill()
        step = next(each for each in undo_steps(found.scene.policy) if each.act is Act.RELEASE)

        async def twice() -> None:
            adapter = KueueAdapter(found.scene.policy)
            try:
                await adapter.carry_out(step)
                space, name = step.name.split("/")
                found.scene.cluster.patch("Workload", name, {"spec": {"active": False}}, space)
                await adapter.carry_out(step)
            finally:
                await adapter.aclose()

        asyncio.run(twice())
        assert not found.active(low)


def test_a_controller_heals_what_a_policy_that_is_gone_has_left(tmp_path: Path) -> None:
    """Its team is of the policy no more; where it may not, it says who can."""
    with life(tmp_path, kueue_policy()) as found:
        low, _stopped = park(found)
        found.kill()
        policy = with_kueue(kueue_policy(teams=SPEECH_ALONE), found.scene)
        token = found.scene.cluster.token
        found.scene.cluster.users[token] = User("controller", grants_of(policy))
        found.driver = found.begin(policy)
        found.tick()
        assert not found.active(low)
        words = [each.words for each in found.driver.problems() if each.code == "parked_by_nobody"]
        assert "gpuwarden policy apply" in words[0]
        assert "refused" in found.codes()
        found.scene.cluster.users[token] = User("operator")
        found.tick(2)
        assert found.active(low)
        assert "parked_by_nobody" not in found.codes()


@pytest.mark.sweep
def test_the_jobs_of_another_policy_are_its_own(tmp_path: Path) -> None:
    """Two share a cluster; only once all queues of one are gone, the other brings its jobs back."""
    with life(tmp_path, kueue_policy()) as found:
        low, _stopped = park(found)
        found.kill()
        second = with_kueue(kueue_policy(teams=SPEECH_ALONE), found.scene, cohort="lab2")
        found.driver = found.begin(second)
        found.tick(2)
        assert not found.active(low)
        found.scene.cluster.controllers = False
        for kind in ("ClusterQueue", "Cohort"):
            for item in found.scene.cluster.store.all(kind):
                found.scene.cluster.delete(kind, item["metadata"]["name"], None)
        found.tick(2)
        assert found.active(low)


# -- held


def come_back(found: Life, job: str, times: int) -> None:
    """It leaves with 75 as soon as it began, so often."""
    for _ in range(times):
        found.start_pods()
        found.scene.time.pass_(20.0)
        found.end(job, 75)
        found.tick()


def test_a_loop_is_held_and_released(tmp_path: Path) -> None:
    """After `requeues` it waits with the reason in words; a release counts from then on."""
    with life(tmp_path, kueue_policy(kueue=GUARDED)) as found:
        low = found.submit("low")
        found.tick()
        come_back(found, low, 3)
        assert found.active(low), "three times are allowed"
        come_back(found, low, 1)
        assert not found.active(low)
        found.let_go()
        found.tick(2)
        assert found.running() == set()
        assert found.entry(low).why == LOOP
        assert f"gpuwarden queue release {low}" in found.entry(low).words
        assert LOOP in found.codes()
        found.kill()
        found.tick()
        assert found.entry(low).why == LOOP, "it is known to whoever comes next"
        assert isinstance(found.driver, Holdable)
        found.driver.release(low, by="ana", now=found.scene.time.now)
        found.tick(3)
        assert found.active(low)
        assert LOOP not in found.codes()
        assert notes(found, low) == {names.RELEASED_ANNOTATION}
        come_back(found, low, 4)
        assert not found.active(low)


@pytest.mark.sweep
def test_leaving_because_one_was_asked_is_no_loop(tmp_path: Path) -> None:
    """Whoever left for others three times is not taken for one that goes nowhere."""
    with life(tmp_path, kueue_policy(kueue={"requeues": {"times": 1, "per": "12h"}})) as found:
        one = found.run("one", gpus=2)
        for count in range(2):
            found.scene.time.pass_(100.0)
            high = found.submit(f"high{count}", "high", gpus=2)
            found.tick(4, seconds=5.0)
            assert found.active(one), "a pod of its first attempt is no sign that it has left now"
            found.engine.see({"saved": found.scene.time.now, "freed": found.scene.time.now})
            found.tick(2, seconds=3.0)
            found.end(one, 75)
            found.let_go()
            found.tick(3)
            found.start_pods()
            assert found.running() == {high}
            found.tick(3)
            found.end(high, 0)
            found.tick(3)
            found.start_pods()
            found.tick(2)
            assert found.running() == {one}
        assert LOOP not in found.codes()


def test_people_hold_what_waits(tmp_path: Path) -> None:
    """Not what runs; an undo gives it back, and `active: true` by other means is a release too."""
    with life(tmp_path, kueue_policy()) as found:
        one = found.run("one", gpus=2)
        two = found.submit("two")
        found.tick()
        driver, now = found.driver, found.scene.time.now
        assert isinstance(driver, Holdable)
        with pytest.raises(RefusedAction, match="has begun"):
            driver.hold(one, by="ana", now=now)
        with pytest.raises(RefusedAction, match="no job vision/none"):
            driver.hold("vision/none", by="ana", now=now)
        with pytest.raises(RefusedAction, match="is not held"):
            driver.release(two, by="ana", now=now)
        driver.hold(two, by="ana", now=now)
        found.tick()
        assert found.entry(two).why == "held"
        assert found.entry(two).words.startswith("ana holds it")
        with pytest.raises(RefusedAction, match="out of its queue already"):
            driver.hold(two, by="ana", now=now)
        metadata = found.workload(two)["metadata"]
        found.scene.cluster.patch(
            "Workload", metadata["name"], {"spec": {"active": True}}, metadata["namespace"]
        )
        found.tick(2)
        assert notes(found, two) == {names.RELEASED_ANNOTATION}
        driver.hold(two, by="ana", now=now)
        found.kill()
        undo(found.scene.policy)
        assert found.active(two)
        assert notes(found, two) == set()


def test_a_mark_without_its_note_holds_nobody(tmp_path: Path) -> None:
    """Somebody has taken the note off: the job comes back, but not one that was stopped by hand."""
    with life(tmp_path, kueue_policy()) as found:
        low, _stopped = park(found)
        metadata = found.workload(low)["metadata"]
        gone = {"metadata": {"annotations": {names.LEAVE_ANNOTATION: None}}}
        found.scene.cluster.patch("Workload", metadata["name"], gone, metadata["namespace"])
        found.tick()
        assert "garbled_note" in found.codes()
        found.tick()
        assert found.active(low)
        labels = {names.LEAVE_LABEL: "told"}
        stopped = {"metadata": {"labels": labels}, "spec": {"active": False}}
        found.scene.cluster.patch("Workload", metadata["name"], stopped, metadata["namespace"])
        found.tick(2)
        assert not found.active(low)
        assert notes(found, low) == set()


def test_a_hold_that_nobody_can_read_holds_nobody(tmp_path: Path) -> None:
    """It was written by somebody else, or cut."""
    with life(tmp_path, kueue_policy()) as found:
        low = found.run("low")
        metadata = found.workload(low)["metadata"]
        for text in ("{", '{"since":true,"code":"x","words":"y"}', '{"since":1e999}', "x" * 5000):
            body = {
                "metadata": {"annotations": {names.HOLD_ANNOTATION: text}},
                "spec": {"active": False},
            }
            found.scene.cluster.patch("Workload", metadata["name"], body, metadata["namespace"])
            found.tick()
            assert "garbled_note" in found.codes()
            found.tick()
            assert found.active(low)
