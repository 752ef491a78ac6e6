"""What Kueue makes of jobs is read as it is meant: less than asked for, twice, elsewhere, later."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tests.kueue_controllers import stamp
from tests.scheduling.kueue.clusters import kueue_policy

from gpuwarden.schedule_api import Cause, EntryState, QueueEntry
from gpuwarden.scheduling.kueue import mirrors
from gpuwarden.scheduling.kueue.advances import advance
from gpuwarden.scheduling.kueue.choices import choose_all
from gpuwarden.scheduling.kueue.entries import entries_of
from gpuwarden.scheduling.kueue.leavings import Leaving
from gpuwarden.scheduling.kueue.limits import limit_all
from gpuwarden.scheduling.kueue.loops import vain_returns
from gpuwarden.scheduling.kueue.pods import Pod
from gpuwarden.scheduling.kueue.views import Ask, Park, Spent, Tell, Verdict, View
from gpuwarden.scheduling.kueue.workloads import QueuedJob, read_jobs

if TYPE_CHECKING:
    from tests.kubernetes_store import Json

NOW = 1_800_000_000.0
POLICY = kueue_policy(
    teams=[{"name": "vision", "users": ["ana"], "quota": {"a100-40": 4}}],
)
FLAVOR = "gpuwarden-a100-40"


def owned_by(kind: str, uid: str, name: str = "x") -> list[Json]:
    """Owner references."""
    return [{"kind": kind, "name": name, "uid": uid, "controller": True}]


def template(gpus: int = 1) -> Json:
    """Of a pod."""
    return {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]}}


def workload(name: str, uid: str, *, kind: str = "Job", count: int = 1, **more: Any) -> Json:
    """A Workload of a job.

    Args:
        name: of the job.
        uid: of the job.
        kind: of the job.
        count: of pods.
        more: conditions (type -> status and reason), admitted (pods, or None), priority, status.
    """
    said = more.get("conditions", {})
    admitted = more.get("admitted")
    status: Json = dict(more.get("status", {}))
    if admitted is not None:
        said = {"QuotaReserved": "True", "Admitted": "True", **said}
        usage = {"nvidia.com/gpu": str(admitted)}
        given = {"name": "main", "count": admitted, "resourceUsage": usage}
        given["flavors"] = {"nvidia.com/gpu": FLAVOR}
        status["admission"] = {"clusterQueue": "q", "podSetAssignments": [given]}
    status["conditions"] = [
        {
            "type": each,
            "status": value.partition(" ")[0],
            "reason": value.partition(" ")[2] or "x",
            "lastTransitionTime": stamp(NOW - 3600.0),
        }
        for each, value in said.items()
    ]
    return {
        "metadata": {
            "name": more.get("called", f"{kind.lower()}-{name}"),
            "namespace": "vision",
            "uid": f"w-{more.get('called', uid)}",
            "resourceVersion": "1",
            "creationTimestamp": stamp(NOW - more.get("age", 7200.0)),
            "labels": {"kueue.x-k8s.io/job-uid": uid},
            "ownerReferences": owned_by(kind, uid, name),
        },
        "spec": {
            "queueName": "gpuwarden",
            "active": more.get("active", True),
            "priority": 1000 if more.get("priority") == "high" else 10,
            "priorityClassRef": {"name": f"gpuwarden-{more.get('priority', 'low')}"},
            "podSets": [{"name": "main", "count": count, "template": template()}],
        },
        "status": status,
    }


def job(name: str, uid: str, owner: list[Json] | None = None) -> Json:
    """A Job."""
    metadata: Json = {"name": name, "namespace": "vision", "uid": uid, "resourceVersion": "1"}
    metadata["creationTimestamp"] = stamp(NOW - 7200.0)
    if owner:
        metadata["ownerReferences"] = owner
    return {"metadata": metadata, "spec": {"template": template()}}


def pod(uid: str, owner: str, *, node: str = "node1", **status: Any) -> Json:
    """A pod of a Job that runs, or waits for a node."""
    started = {"startedAt": stamp(NOW - 3000.0)}
    running = {"phase": "Running", "containerStatuses": [{"state": {"running": started}}]}
    return {
        "metadata": {"name": uid, "uid": uid, "ownerReferences": owned_by("Job", owner)},
        "spec": {**template()["spec"], **({"nodeName": node} if node else {})},
        "status": {**(running if node else {"phase": "Pending"}), **status},
    }


def seen(
    *workloads: Json,
    jobs: tuple[Json, ...] = (),
    pods: tuple[Json, ...] = (),
    nodes: tuple[Json, ...] = (),
    **more: Any,
) -> View:
    """A view, of what mirrors keep."""
    found = read_jobs(
        POLICY,
        workloads=[each for item in workloads if (each := mirrors.trim_workload(item))],
        jobs=[each for item in jobs if (each := mirrors.trim_job(item))],
        pods=[each for item in pods if (each := mirrors.trim_pod(item))],
        nodes=nodes,
    )
    return View(policy=POLICY, now=NOW, jobs=tuple(found), **more)


def decided(view: View) -> tuple[Verdict, dict[str, QueueEntry]]:
    """What follows, and what the queue says, by name."""
    verdict = Verdict.of([advance(view), limit_all(view), choose_all(view)])
    return verdict, {each.id: each for each in entries_of(view, verdict)}


def by_name(view: View, name: str) -> QueuedJob:
    """A job."""
    return next(each for each in view.jobs if each.id == f"vision/{name}")


def test_nobody_leaves_for_a_job_that_kueue_puts_off() -> None:
    """Its pods were not ready in time: Kueue would not start it now, so no card helps it."""
    runs = workload("low", "u1", count=4, admitted=4)
    evicted = {"Evicted": "True PodsReadyTimeout", "Requeued": "False PodsReadyTimeout"}
    stats = {"evictions": [{"reason": "PodsReadyTimeout", "count": 2}]}
    waits = workload(
        "high", "u2", priority="high", conditions=evicted, status={"schedulingStats": stats}
    )
    jobs, pods = (job("low", "u1"), job("high", "u2")), (pod("p1", "u1"),)
    verdict, entries = decided(seen(runs, waits, jobs=jobs, pods=pods))
    assert [act for act in verdict.acts if isinstance(act, Tell)] == []
    entry = entries["vision/high"]
    assert (entry.state, entry.why) == (EntryState.HELD, "backs_off")
    assert "2 times until now" in entry.words
    waits = workload("high", "u2", priority="high", conditions={"Requeued": "True BackoffFinished"})
    verdict, _entries = decided(seen(runs, waits, jobs=jobs, pods=pods))
    assert [act.job.id for act in verdict.acts if isinstance(act, Tell)] == ["vision/low"]


def test_kueue_gives_up() -> None:
    """It is told why, and not that somebody has stopped it."""
    why = "DeactivatedDueToRequeuingLimitExceeded"
    given_up = workload("low", "u1", active=False, conditions={"Evicted": f"True {why}"})
    _verdict, entries = decided(seen(given_up, jobs=(job("low", "u1"),)))
    assert entries["vision/low"].why == "given_up"
    assert "backoffLimitCount" in entries["vision/low"].words


def test_fewer_pods_than_asked_for() -> None:
    """Of a job that lets Kueue admit part of it, that part counts; and what has ended no more."""
    part = workload("low", "u1", count=8, admitted=4)
    assert by_name(seen(part), "low").gpus == 4
    status = {"reclaimablePods": [{"name": "main", "count": 3}]}
    ends = workload("low", "u1", count=4, admitted=4, status=status)
    assert by_name(seen(ends), "low").gpus == 1
    assert by_name(seen(workload("low", "u1", count=8)), "low").gpus == 8


def test_the_pods_of_a_jobset() -> None:
    """They belong to its Jobs: it is seen to run, and its quota is no leak."""
    view = seen(
        workload("set", "u1", kind="JobSet", count=2, admitted=2),
        jobs=(job("set-a-0", "j1", owned_by("JobSet", "u1")),),
        pods=(pod("p1", "j1"), pod("p2", "j1")),
    )
    assert [each.uid for each in by_name(view, "set").pods] == ["p1", "p2"]
    verdict, entries = decided(view)
    assert entries["vision/set"].state is EntryState.RUNNING
    assert verdict.faults == ()


def test_the_pods_of_a_cronjobs_job_are_the_jobs() -> None:
    """What is queued is the Job, whoever owns it."""
    view = seen(
        workload("night-1", "j1", admitted=1),
        jobs=(job("night-1", "j1", owned_by("CronJob", "c1")),),
        pods=(pod("p1", "j1"),),
    )
    assert [each.uid for each in by_name(view, "night-1").pods] == ["p1"]


def test_pods_that_are_not_followed() -> None:
    """Of a RayJob, or in another cluster: it runs while Kueue says so, and is no leak."""
    for more in ({"kind": "RayJob"}, {"status": {"clusterName": "east"}}):
        view = seen(workload("far", "u1", admitted=2, count=2, **more))
        verdict, entries = decided(view)
        assert entries["vision/far"].state is EntryState.RUNNING
        assert entries["vision/far"].started == NOW - 3600.0
        assert verdict.faults == ()
        gone = workload("far", "u1", count=2, conditions={"Evicted": "True Preempted"}, **more)
        assert not by_name(seen(gone), "far").here


def test_an_elastic_job_is_one_job() -> None:
    """While it grows it has two Workloads: its pods count once, and it asks nobody for itself."""
    old = workload("grows", "u1", count=2, admitted=2, called="slice-1")
    new = workload("grows", "u1", count=4, called="slice-2", age=60.0, priority="high")
    jobs, pods = (job("grows", "u1"),), (pod("p1", "u1"), pod("p2", "u1"))
    for each in ((old, new), (new, old)):
        view = seen(*each, jobs=jobs, pods=pods)
        assert [(one.id, one.gpus, len(one.pods)) for one in view.jobs] == [("vision/grows", 2, 2)]
        assert [act for act in decided(view)[0].acts if isinstance(act, Tell)] == []
    over = workload(
        "grows", "u1", admitted=2, called="slice-1", conditions={"Finished": "True Replaced"}
    )
    grown = workload("grows", "u1", count=4, admitted=4, called="slice-2", age=60.0)
    assert [one.gpus for one in seen(over, grown, jobs=jobs, pods=pods).jobs] == [4]


LOW = workload("low", "u1", count=4, admitted=4)
HIGH = {"priority": "high", "count": 4}
BOTH = (job("low", "u1"), job("high", "u2"))


def asked(view: View) -> list[str]:
    """Who is told to leave."""
    return [act.job.id for act in decided(view)[0].acts if isinstance(act, Tell)]


def test_nobody_leaves_for_a_job_of_a_stopped_queue() -> None:
    """An operator has stopped it, or it is not in order: no card would start the job."""
    for reason in ("Inadmissible", "Suspended", "Misconfigured"):
        waits = workload("high", "u2", **HIGH, conditions={"QuotaReserved": f"False {reason}"})
        view = seen(LOW, waits, jobs=BOTH, pods=(pod("p1", "u1"),))
        assert asked(view) == []
        assert decided(view)[1]["vision/high"].why == reason
    drained = {"Evicted": "True ClusterQueueStopped", "Requeued": "False ClusterQueueStopped"}
    view = seen(LOW, workload("high", "u2", **HIGH, conditions=drained), jobs=BOTH)
    assert decided(view)[1]["vision/high"].why == "queue_stopped"
    waits = workload("high", "u2", **HIGH, conditions={"QuotaReserved": "False Pending"})
    assert asked(seen(LOW, waits, jobs=BOTH, pods=(pod("p1", "u1"),))) == ["vision/low"]


def test_nobody_leaves_for_a_job_whose_budget_is_spent() -> None:
    """It would get the quota, and be sent back by the check until the period ends."""
    waits = workload("high", "u2", **HIGH)
    spent = {"vision": Spent("Team vision has used all.", NOW + 3600.0, leave=False)}
    view = seen(LOW, waits, jobs=BOTH, pods=(pod("p1", "u1"),), spent=spent)
    assert asked(view) == []
    assert decided(view)[1]["vision/high"].why == "budget"


def test_nobody_leaves_beside_one_that_goes_by_itself() -> None:
    """A job was cancelled, and is in its grace: its cards are waited for, unless it is stuck."""
    waits = workload("high", "u2", priority="high", count=2)
    first = workload("first", "u1", count=2, admitted=2)
    other = workload("other", "u3", count=2, admitted=2)
    going = pod("p1", "u1")
    jobs = (job("first", "u1"), job("high", "u2"), job("other", "u3"))
    for until, told in ((NOW + 600.0, []), (NOW - 600.0, ["vision/other"])):
        going["metadata"]["deletionTimestamp"] = stamp(until)
        view = seen(first, waits, other, jobs=jobs, pods=(going, pod("p3", "u3")))
        assert asked(view) == told
    going["metadata"]["deletionTimestamp"] = stamp(NOW + 600.0)
    entry = decided(seen(first, waits, other, jobs=jobs, pods=(going, pod("p3", "u3"))))[1]
    assert entry["vision/high"].must_end == ("vision/first",)


def test_nobody_on_a_dark_node_is_asked() -> None:
    """It would not hear, and its card would not come free: another is."""
    waits = workload("high", "u2", priority="high", count=2)
    first = workload("first", "u1", count=2, admitted=2)
    other = workload("other", "u3", count=2, admitted=2)
    jobs = (job("first", "u1"), job("high", "u2"), job("other", "u3"))
    started = {"startedAt": stamp(NOW - 60.0)}
    young = [{"state": {"running": started}}]
    pods = (pod("p1", "u1", containerStatuses=young), pod("p3", "u3", node="node2"))
    assert asked(seen(first, waits, other, jobs=jobs, pods=pods)) == ["vision/first"]
    dark = {
        "metadata": {"name": "node1"},
        "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]},
    }
    view = seen(first, waits, other, jobs=jobs, pods=pods, nodes=(dark,))
    assert asked(view) == ["vision/other"]


def test_a_job_that_was_made_anew_under_its_name() -> None:
    """The old one's pod is in its grace: both count, and each is found by an id of its own."""
    old = workload("low", "u1", admitted=2, count=2, called="job-low-old")
    new = workload("low", "u9", age=10.0, called="job-low-new")
    view = seen(old, new, jobs=(job("low", "u9"),), pods=(pod("p1", "u1"),))
    assert [each.id for each in view.jobs] == ["vision/job-low-old", "vision/low"]
    assert view.ledger().held("vision", "a100-40") == 2


def test_quota_and_no_node() -> None:
    """Nodes are full of other things, or broken: the scheduler's words say which."""
    unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    unplaced["message"] = "0/5 nodes are available: 5 Insufficient nvidia.com/gpu."
    view = seen(
        workload("low", "u1", admitted=1),
        jobs=(job("low", "u1"),),
        pods=(pod("p1", "u1", node="", conditions=[unplaced]),),
    )
    entry = decided(view)[1]["vision/low"]
    assert (entry.state, entry.why) == (EntryState.PENDING, "unplaced")
    assert "5 Insufficient nvidia.com/gpu" in entry.words


def test_leaving_because_one_was_asked_is_no_loop() -> None:
    """Nor is what was before a release; a pod of an earlier attempt is no sign that it has left."""
    ends = [
        Pod(f"p{n}", phase="Failed", exit_code=75, started=NOW - n, ended=NOW - n + 20.0)
        for n in (100.0, 200.0, 300.0)
    ]
    base = by_name(seen(workload("low", "u1")), "low")
    each = dataclasses.replace(base, pods=tuple(ends))
    assert vain_returns(each, NOW, 3600.0) == 3
    assert vain_returns(each, NOW, 150.0) == 1
    assert vain_returns(dataclasses.replace(each, history=(NOW - 170.0,)), NOW, 3600.0) == 2
    assert vain_returns(dataclasses.replace(each, released=NOW - 150.0), NOW, 3600.0) == 1
    leaving = Leaving("x", Cause.WINDOW, "night", "epoch", begun=NOW - 10.0, deadline=NOW + 600.0)
    told = dataclasses.replace(each, leaving=leaving, window="night", active=True)
    view = View(policy=POLICY, now=NOW, jobs=(told,))
    assert [type(act) for act in advance(view).acts] == [Ask]
    now = Pod("p4", phase="Failed", exit_code=75, started=NOW - 60.0, ended=NOW - 1.0)
    left = dataclasses.replace(told, pods=(*ends, now))
    assert [type(act) for act in advance(dataclasses.replace(view, jobs=(left,))).acts] == [Park]
