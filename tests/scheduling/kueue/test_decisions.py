"""Decisions are pure: by what is there, in whatever order, and never beyond a quota."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from tests.scheduling.kueue.clusters import kueue_policy

from gpuwarden.schedule_api import Cause, EntryState, Outcome
from gpuwarden.scheduling.kueue.advances import advance
from gpuwarden.scheduling.kueue.choices import choose_all
from gpuwarden.scheduling.kueue.entries import entries_of, state_of
from gpuwarden.scheduling.kueue.leavings import Leaving, Phase, history_of, history_text
from gpuwarden.scheduling.kueue.limits import limit_all
from gpuwarden.scheduling.kueue.mirrors import trim_job, trim_pod, trim_workload
from gpuwarden.scheduling.kueue.pods import Pod
from gpuwarden.scheduling.kueue.views import Return, Spent, Tell, Verdict, View
from gpuwarden.scheduling.kueue.workloads import QueuedJob, read_jobs
from gpuwarden.scheduling.slots import Slot

if TYPE_CHECKING:
    import random

NOW = 1_800_000_000.0
POLICY = kueue_policy(
    cards=[
        {
            "name": "a100-40",
            "model": "NVIDIA A100-SXM4-40GB",
            "memory": "40GiB",
            "count": 8,
            "kueue": {"node_labels": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB"}},
        }
    ],
    teams=[
        {"name": "vision", "users": ["ana"], "quota": {"a100-40": 4}, "borrow": {"a100-40": 2}},
        {"name": "speech", "users": ["cy"], "quota": {"a100-40": 4}, "borrow": {"a100-40": 2}},
    ],
)
VALUES = {"low": 10, "normal": 100, "high": 1000}


def a_job(name: str, priority: str = "low", *, team: str = "vision", **more: object) -> QueuedJob:
    """A job that waits."""
    base = QueuedJob(
        id=f"{team}/{name}",
        namespace=team,
        workload=f"job-{name}",
        uid=name,
        version="1",
        job=name,
        team=team,
        priority=priority,
        value=VALUES[priority],
        gpus=1,
        cards=("a100-40",),
        created=NOW - 1000.0,
    )
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


def running(job: QueuedJob, seconds: float) -> QueuedJob:
    """The same, running since."""
    since = NOW - seconds
    pod = Pod(f"{job.uid}-pod", "node1", "Running", started=since, node_ready=True)
    return dataclasses.replace(job, card="a100-40", reserved=since, admitted=since, pods=(pod,))


JOBS = st.lists(
    st.tuples(
        st.sampled_from(["vision", "speech"]),
        st.sampled_from([*VALUES]),
        st.integers(1, 3),
        st.one_of(st.none(), st.integers(1, 5000)),
    ),
    max_size=14,
)


def fleet(drawn: list[tuple[str, str, int, int | None]]) -> list[QueuedJob]:
    """Jobs that run, as far as there are cards, and jobs that wait."""
    found, used = [], {"vision": 0, "speech": 0}
    for index, (team, priority, gpus, seconds) in enumerate(drawn):
        job = a_job(f"j{index}", priority, team=team, gpus=gpus)
        most = min(6 - used[team], 8 - sum(used.values()))
        if seconds is not None and gpus <= most:
            used[team] += gpus
            job = running(job, float(seconds))
        found.append(job)
    return found


def told(verdict: Verdict) -> dict[str, str]:
    """Who is told, for whom."""
    return {act.job.id: act.leaving.successor for act in verdict.acts if isinstance(act, Tell)}


@given(JOBS, st.randoms(use_true_random=False))
def test_order_changes_nothing(
    drawn: list[tuple[str, str, int, int | None]], shuffler: random.Random
) -> None:
    """The same jobs in another order: the same acts, reasons and problems."""
    jobs = fleet(drawn)
    mixed = [*jobs]
    shuffler.shuffle(mixed)
    first, second = (
        choose_all(View(policy=POLICY, now=NOW, jobs=tuple(sorted(each, key=lambda j: j.id))))
        for each in (jobs, mixed)
    )
    assert first == second
    unsorted = choose_all(View(policy=POLICY, now=NOW, jobs=tuple(mixed)))
    assert told(unsorted) == told(first)


@given(JOBS)
def test_nobody_is_told_in_vain_or_above_their_class(
    drawn: list[tuple[str, str, int, int | None]],
) -> None:
    """Each is told once, for a job that waits, may ask it, and fits when all of its have left."""
    jobs = fleet(drawn)
    view = View(policy=POLICY, now=NOW, jobs=tuple(jobs))
    by_id = {job.id: job for job in jobs}
    ledger = view.ledger()
    acts = [act for act in choose_all(view).acts if isinstance(act, Tell)]
    assert len({act.job.id for act in acts}) == len(acts)
    for victim, successor in told(Verdict(tuple(acts))).items():
        who, whom = by_id[successor], by_id[victim]
        assert who.pending
        assert whom.here
        lent = ledger.borrows(whom.team, "a100-40") and who.team != whom.team
        assert POLICY.preempts(who.priority, whom.priority) or (lent and whom.value <= who.value)
        gone = frozenset(told(Verdict(tuple(acts))))
        assert ledger.fits(who.team, who.cards, who.gpus, without=gone) is not None


@given(JOBS, st.booleans())
def test_every_job_has_a_place_and_a_reason(
    drawn: list[tuple[str, str, int, int | None]], active: bool
) -> None:
    """Whatever the cluster looks like: what waits says why, places are one after the other."""
    jobs = [dataclasses.replace(job, active=active) for job in fleet(drawn)]
    view = View(policy=POLICY, now=NOW, jobs=tuple(jobs))
    verdict = Verdict.of([advance(view), limit_all(view), choose_all(view)])
    entries = entries_of(view, verdict)
    assert {entry.id for entry in entries} == {job.id for job in jobs}
    for entry in entries:
        waits = entry.state in (EntryState.PENDING, EntryState.HELD)
        assert bool(entry.words) == waits or entry.state is EntryState.LEAVING
    for team in ("vision", "speech"):
        places = [each.position for each in entries if each.team == team and each.position]
        assert places == [*range(1, len(places) + 1)]


def test_states() -> None:
    """A deactivated job whose pod is still there is leaving; one without a pod is held."""
    job = running(a_job("x"), 10.0)
    assert state_of(job) is EntryState.RUNNING
    assert state_of(dataclasses.replace(job, active=False)) is EntryState.LEAVING
    assert state_of(dataclasses.replace(job, active=False, pods=())) is EntryState.HELD
    assert state_of(dataclasses.replace(job, pods=())) is EntryState.PENDING
    assert state_of(dataclasses.replace(job, finished="Succeeded")) is EntryState.DONE
    assert state_of(dataclasses.replace(job, finished="Failed")) is EntryState.FAILED


LEAVING = Leaving(
    "kueue.1.x", Cause.PRIORITY, "vision/high", "epoch", NOW, NOW + 600, steps={"notified": NOW}
)


def test_notes_survive() -> None:
    """What is written is what is read; odd ones are none."""
    full = dataclasses.replace(
        LEAVING, phase=Phase.PARKED, leave="l", lost=3.5, parked=NOW, until=NOW + 9, words="x"
    )
    assert Leaving.decode(full.encode()) == full
    assert Leaving.decode(LEAVING.encode()) == LEAVING
    for odd in (
        None,
        "",
        "[]",
        "{}",
        '{"id":"x"}',
        full.encode().replace('"phase":"parked"', '"phase":"x"'),
        "9",
    ):
        assert Leaving.decode(odd) is None


@given(st.text(max_size=200))
def test_nothing_that_is_written_there_is_an_error(text: str) -> None:
    """Notes and histories come from whoever may write a Workload."""
    assert Leaving.decode(text) is None
    assert all(math.isfinite(moment) for moment in history_of(text))


def test_a_step_keeps_its_first_time() -> None:
    """Seen again, it is not seen later; and nothing is made up."""
    seen = LEAVING.seen(notified=NOW + 50, saved=NOW + 60, freed=None)
    assert seen.steps == {"notified": NOW, "saved": NOW + 60}
    told_of = seen.told("vision/low", None, Outcome.OPEN)
    assert [*told_of.steps] == ["notified", "saved"]
    assert told_of.lost_seconds == 0.0


def test_a_history_is_bounded() -> None:
    """It holds the last ones, and forgets what is no time."""
    text = ""
    for index in range(100):
        text = history_text(history_of(text), NOW + index)
    assert len(history_of(text)) == 32
    assert history_of(text)[-1] == NOW + 99
    assert history_of("1,x,nan,inf,2") == (1.0, 2.0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON, JSON, st.sampled_from(["spec", "status", "metadata"]))
def test_odd_objects_are_no_jobs_and_no_errors(first: object, second: object, part: str) -> None:
    """A server of another version, or somebody's own Workload: nothing of it stops the others."""
    metadata = {
        "name": "w",
        "namespace": "vision",
        "uid": "u",
        "labels": {"kueue.x-k8s.io/job-uid": "j"},
    }
    odd = {"metadata": metadata, "spec": {"queueName": "gpuwarden", "podSets": first}}
    odd["status"] = {"conditions": first, "admission": second, "admissionChecks": second}
    if part != "metadata":
        odd[part] = {**odd[part], "extra": second} if isinstance(odd[part], dict) else {}
    job = {
        "metadata": {"uid": "j", "name": "n", "annotations": first},
        "spec": {"template": second},
    }
    pod = {
        "metadata": {
            "uid": "p",
            "ownerReferences": [{"uid": "j", "kind": "Job", "controller": True}],
        },
        "spec": {"nodeName": first},
        "status": {"containerStatuses": second},
    }
    found = read_jobs(
        POLICY,
        workloads=[each for each in [trim_workload(odd)] if each is not None],
        jobs=[each for each in [trim_job(job)] if each is not None],
        pods=[each for each in [trim_pod(pod)] if each is not None],
        nodes=[{"metadata": first, "status": second}],
    )
    view = View(policy=POLICY, now=NOW, jobs=tuple(found))
    entries_of(view, Verdict.of([advance(view), limit_all(view), choose_all(view)]))


def parked(cause: Cause, successor: str, *, until: float | None) -> QueuedJob:
    """A job that we have taken out of the queue, and that has left long ago."""
    leaving = Leaving(
        id="d1",
        cause=cause,
        successor=successor,
        at="epoch",
        begun=NOW - 900.0,
        deadline=NOW - 600.0,
        phase=Phase.PARKED,
        parked=NOW - 600.0,
        until=until,
        steps={"left": NOW - 590.0},
    )
    return a_job("away", leaving=leaving, active=False)


def returns(view: View) -> bool:
    """Whether the job comes back."""
    return any(isinstance(act, Return) for act in advance(view).acts)


def test_a_raised_budget_brings_back_whom_it_kept_out() -> None:
    """It was kept out until the period's end; the budget has room again before that."""
    job = parked(Cause.BUDGET, "budget of vision", until=NOW + 20 * 86_400.0)
    spent = {"vision": Spent("All is used.", NOW + 20 * 86_400.0, leave=True)}
    assert not returns(View(policy=POLICY, now=NOW, jobs=(job,), spent=spent))
    assert returns(View(policy=POLICY, now=NOW, jobs=(job,)))


def test_who_left_for_a_slot_stays_away_until_it_begins() -> None:
    """Back before that, it would start on the cards that it left, and be asked once more."""
    job = parked(Cause.BOOKING, "b1", until=None)
    slot = Slot("b1", "speech", "cy", 4, "a100-40", NOW + 300.0, NOW + 4000.0, 900.0)
    assert not returns(View(policy=POLICY, now=NOW, jobs=(job,), slots=(slot,)))
    assert returns(View(policy=POLICY, now=NOW + 331.0, jobs=(job,), slots=(slot,)))
    assert returns(View(policy=POLICY, now=NOW, jobs=(job,))), "the booking is gone"
