"""What the API tells of queued jobs, as nouns: a Workload with its Job and its pods. Pure.

Read tolerantly and without trust: users write Jobs and their labels. What is not of the shape that
the API documents is not a job here. A Workload of which a condition says that quota is reserved
does not hold cards for that alone (kueue #7480).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gpuwarden.platforms.kubernetes import KUEUE_JOB_LABEL, value_at
from gpuwarden.scheduling.kueue import names
from gpuwarden.scheduling.kueue.card_requests import (
    gpus_of,
    kind_given,
    kinds_of,
    resources_of,
    templates_of,
    width_of,
)
from gpuwarden.scheduling.kueue.holds import Hold
from gpuwarden.scheduling.kueue.leavings import Leaving, Phase, history_of
from gpuwarden.scheduling.kueue.pods import Pod, moment_of, read_pod, whole
from gpuwarden.scheduling.kueue.shapes import rows_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gpuwarden.platforms.kubernetes import Json
    from gpuwarden.scheduling.policies import Policy

FOLLOWED: Final = frozenset({"Job", "JobSet"})
"""Owners whose pods are found: by what owns them, at most over one Job."""
_BARRED: Final = frozenset({"Inadmissible", "Misconfigured", "Suspended"})
"""Kueue's words for what no quota mends."""
_FINISHED: Final = "Finished"
_EXPIRED: Final = "MaximumExecutionTimeExceeded"


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A Workload of our queues, with its Job and pods. Times are Unix seconds.

    Attributes:
        id: `namespace/name` of the Job, which people know.
        namespace, workload, uid, version: of the Workload.
        job, job_version: name and version of the Job; empty where it is gone.
        team, priority: names of the policy's; empty where it is none of them.
        value: by which Kueue orders.
        user, run_id: of its labels; empty where they do not say.
        gpus: cards of all its pods.
        width: how many pods it has at a time.
        cards: kinds that will do, by the policy's names, in its order.
        card: that it was given, or empty.
        created: when it was submitted.
        active: whether Kueue may run it.
        reserved: since when it has quota, or None.
        admitted: since when it runs by Kueue's word, or None.
        evicted: why it was evicted, or empty.
        evicted_at: when.
        finished: Succeeded, Failed or another word; empty where it is not.
        finished_at: when.
        waits_for: Kueue's word for why it has no quota.
        expired: whether Kueue took it out of the queue because its time was over.
        requeues: how often it was evicted.
        preempted: how often by Kueue itself, for a higher priority.
        gates: behind which it waits, on Kueue's annotation.
        waits: the same on a Job that has no queue yet.
        window: of the policy, or empty.
        after: Jobs that must have succeeded first.
        not_before: when it may start, or None.
        check: state of our admission check, or empty where it has none.
        check_at: when that state was reached.
        epoch_seconds: how long its epochs take, or None.
        leaving: the leave that stands, or None.
        hold: that stands, or None.
        released: when it was released last, or None.
        mark: how it stands by its label: a phase of a leave, or held; empty where neither is so.
        garbled: whether a note of a leave or a hold cannot be read, or its mark is without one.
        history: when it had to leave before.
        kind: of its owner, such as Job; empty where it has none.
        cluster: another one in which it runs (MultiKueue), or empty.
        backs_off: whether Kueue lets it wait outside the queue for a while.
        pods: of it that are there.
        command: of its first container; empty where it names none.
        directory: where that starts; empty where it does not say.
    """

    id: str
    namespace: str
    workload: str
    uid: str
    version: str
    job: str = ""
    job_version: str = ""
    team: str = ""
    priority: str = ""
    value: int = 0
    user: str = ""
    run_id: str = ""
    gpus: int = 0
    width: int = 1
    cards: tuple[str, ...] = ()
    card: str = ""
    created: float = 0.0
    active: bool = True
    reserved: float | None = None
    admitted: float | None = None
    evicted: str = ""
    evicted_at: float | None = None
    finished: str = ""
    finished_at: float | None = None
    waits_for: str = ""
    expired: bool = False
    requeues: int = 0
    preempted: int = 0
    gates: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()
    window: str = ""
    after: tuple[str, ...] = ()
    not_before: float | None = None
    check: str = ""
    check_at: float | None = None
    epoch_seconds: float | None = None
    leaving: Leaving | None = None
    hold: Hold | None = None
    released: float | None = None
    mark: str = ""
    garbled: bool = False
    history: tuple[float, ...] = ()
    kind: str = "Job"
    cluster: str = ""
    backs_off: bool = False
    pods: tuple[Pod, ...] = field(default=())
    command: tuple[str, ...] = ()
    directory: str = ""

    @property
    def workload_id(self) -> str:
        """Its id by its Workload, which no other has."""
        return f"{self.namespace}/{self.workload}"

    @property
    def here(self) -> bool:
        """Whether any pod of it has, or may have, cards; by Kueue's word where none is seen."""
        if any(pod.holds for pod in self.pods):
            return True
        return self.unseen and self.reserved is not None and not self.finished

    @property
    def unseen(self) -> bool:
        """Whether its pods are of a kind that is not followed, or in another cluster."""
        return self.kind not in FOLLOWED or bool(self.cluster)

    @property
    def counts(self) -> bool:
        """Whether its cards count as used: by its pods, or by a reservation that is to be filled.

        A reservation of what is over, or was taken out of the queue, is a leak and no use.
        """
        if self.here:
            return True
        return self.reserved is not None and not self.finished and self.active and not self.evicted

    @property
    def pending(self) -> bool:
        """Whether it waits for quota: it could start at once if there were some."""
        return (
            self.reserved is None
            and not self.finished
            and self.active
            and not self.here
            and not self.waits
            and not self.backs_off
            and {*self.gates} <= {names.NOTICE_GATE}
        )

    @property
    def running_since(self) -> float | None:
        """When the attempt that runs began, or None where none does."""
        if self.unseen:
            return self.admitted if self.here else None
        starts = [pod.started for pod in self.pods if pod.holds and pod.started is not None]
        return min(starts, default=None)

    @property
    def dark(self) -> bool:
        """Whether it is on a node that does not report: nobody hears, and no card is freed."""
        return any(pod.holds and pod.node_ready is False for pod in self.pods)

    @property
    def barred(self) -> bool:
        """Whether Kueue would not start it whatever came free: its queue is stopped, say."""
        return self.reserved is None and self.waits_for in _BARRED

    @property
    def goes_by(self) -> float | None:
        """When its last pod is to be gone, where all of them were told to go; else None."""
        ends = [pod.goes_by for pod in self.pods if pod.holds]
        known = [moment for moment in ends if moment is not None]
        return max(known) if known and len(known) == len(ends) else None

    @property
    def unplaced(self) -> str:
        """Why none of its pods finds a node; empty where one has."""
        waiting = [pod for pod in self.pods if pod.holds]
        return next((pod.unplaced for pod in waiting if not any(p.node for p in waiting)), "")

    @property
    def grace(self) -> float:
        """Seconds that its pods have between signal and end."""
        return max((pod.grace for pod in self.pods), default=0.0)

    @property
    def parked(self) -> bool:
        """Whether it is we who have taken it out of the queue."""
        return self.leaving is not None and self.leaving.phase is Phase.PARKED


def read_jobs(
    policy: Policy,
    *,
    workloads: Iterable[Json],
    jobs: Iterable[Json],
    pods: Iterable[Json],
    nodes: Iterable[Json],
) -> list[QueuedJob]:
    """Everything in the policy's queues, by id.

    Args:
        policy: whose queues.
        workloads: as the API lists them.
        jobs: likewise.
        pods: likewise.
        nodes: likewise.
    """
    ready = {_text(node, "metadata.name"): _is_ready(node) for node in nodes}
    resources = resources_of(policy)
    by_uid = {_text(job, "metadata.uid"): job for job in jobs}
    spaces = {team.namespace: team.name for team in policy.teams}
    ours = _slices_joined(
        workload
        for workload in workloads
        if _text(workload, "metadata.namespace") in spaces
        and _text(workload, "spec.queueName") == names.QUEUE
    )
    owned = _owned(pods, by_uid, {_job_uid(workload) for workload in ours})
    found = []
    taken = set()
    for workload in ours:
        uid = _job_uid(workload)
        taken.add(uid)
        own = [read_pod(pod, ready, resources) for pod in owned.get(uid, ())]
        team = spaces[_text(workload, "metadata.namespace")]
        found.append(_read(policy, workload, by_uid.get(uid), own, team=team))
    for uid, job in by_uid.items():
        # A Job that waits without a queue has no Workload yet.
        space = _text(job, "metadata.namespace")
        if uid not in taken and space in spaces and _listed(job, names.WAITS_ANNOTATION):
            found.append(_unqueued(policy, job, team=spaces[space]))
    return sorted(_told_apart(found), key=lambda each: each.id)


def _told_apart(found: Sequence[QueuedJob]) -> Iterator[QueuedJob]:
    """Jobs with ids of their own: one that is gone, and another of its name, go by their Workloads.

    Whoever deletes a Job and makes it anew has both for the grace of its pods.
    """
    newest: dict[str, QueuedJob] = {}
    for job in found:
        before = newest.get(job.id)
        if before is None or _newness(job) > _newness(before):
            newest[job.id] = job
    for job in found:
        yield job if newest[job.id] is job else dataclasses.replace(job, id=job.workload_id)


def _newness(job: QueuedJob) -> tuple[bool, float, str]:
    return bool(job.job), job.created, job.uid


def _job_uid(workload: Json) -> str:
    return _text(workload, f"metadata.labels.{KUEUE_JOB_LABEL}", flat=True)


def _owned(
    pods: Iterable[Json], jobs: Mapping[str, Json], queued: set[str]
) -> dict[str, list[Json]]:
    """Uid of what is queued -> its pods: those of a JobSet belong to its Jobs."""
    owned: dict[str, list[Json]] = {}
    for pod in pods:
        owner = _owner_uid(pod)
        if owner not in queued and owner in jobs:
            owner = _owner_uid(jobs[owner])
        if owner:
            owned.setdefault(owner, []).append(pod)
    return owned


def _slices_joined(workloads: Iterable[Json]) -> list[Json]:
    """One Workload for each job: of an elastic one, that changes its size, there are two.

    The one that has its cards counts, for the other replaces it; of several that have, the newest.
    """
    found: dict[str, Json] = {}
    for workload in workloads:
        key = _job_uid(workload) or _text(workload, "metadata.uid")
        before = found.get(key)
        if before is None or _precedence(workload) > _precedence(before):
            found[key] = workload
    return list(found.values())


def _precedence(workload: Json) -> tuple[bool, bool, float, str]:
    said = _conditions(workload)
    made = moment_of(value_at(workload, "metadata.creationTimestamp")) or 0.0
    over, has = _since(said, _FINISHED) is not None, _since(said, "QuotaReserved") is not None
    return not over, has, made, _text(workload, "metadata.name")


def _read(
    policy: Policy, workload: Json, job: Json | None, pods: list[Pod], *, team: str
) -> QueuedJob:
    said = _conditions(workload)
    space = _text(workload, "metadata.namespace")
    name = _text(job, "metadata.name") if job is not None else owner_name(workload)
    annotation = _annotation(workload, names.LEAVE_ANNOTATION)
    leaving = Leaving.decode(annotation)
    held = _annotation(workload, names.HOLD_ANNOTATION)
    hold = Hold.decode(held)
    mark = _label(workload, names.LEAVE_LABEL)
    check, check_at = _check(policy, workload)
    resource_cards = kinds_of(policy, workload)
    labels = job if job is not None else workload
    priority = _text(workload, "spec.priorityClassRef.name")
    rows = rows_at(workload, "status.schedulingStats.evictions")
    value = value_at(workload, "spec.priority")
    return QueuedJob(
        id=f"{space}/{name or _text(workload, 'metadata.name')}",
        namespace=space,
        workload=_text(workload, "metadata.name"),
        uid=_text(workload, "metadata.uid"),
        version=_text(workload, "metadata.resourceVersion"),
        job=_text(job, "metadata.name") if job is not None else "",
        job_version=_text(job, "metadata.resourceVersion") if job is not None else "",
        team=team,
        priority=_priority(policy, priority),
        value=value if isinstance(value, int) else 0,
        user=_label(labels, names.USER_LABEL),
        run_id=_label(labels, names.RUN_LABEL),
        gpus=gpus_of(policy, workload),
        width=width_of(workload),
        cards=resource_cards,
        card=kind_given(policy, workload),
        created=moment_of(value_at(labels, "metadata.creationTimestamp")) or 0.0,
        active=value_at(workload, "spec.active") is not False,
        reserved=_since(said, "QuotaReserved"),
        admitted=_since(said, "Admitted"),
        evicted=said["Evicted"][1] if _since(said, "Evicted") is not None else "",
        evicted_at=_since(said, "Evicted"),
        finished=said[_FINISHED][1] or "Failed" if _since(said, _FINISHED) is not None else "",
        finished_at=_since(said, _FINISHED),
        waits_for=said["QuotaReserved"][1]
        if said.get("QuotaReserved", ("True",))[0] != "True"
        else "",
        expired=any(_EXPIRED in (i.get("underlyingCause"), i.get("reason")) for i in rows),
        requeues=sum(whole(item.get("count")) for item in rows),
        preempted=sum(whole(i.get("count")) for i in rows if i.get("reason") == "Preempted"),
        gates=_listed(workload, names.GATES_ANNOTATION),
        waits=(),
        window=_label(labels, names.WINDOW_LABEL),
        after=_listed(labels, names.AFTER_ANNOTATION),
        not_before=_number(_annotation(labels, names.NOT_BEFORE_ANNOTATION)),
        check=check,
        check_at=check_at,
        epoch_seconds=_number(_annotation(labels, names.EPOCH_ANNOTATION)),
        leaving=leaving,
        hold=hold,
        released=_number(_annotation(workload, names.RELEASED_ANNOTATION)),
        mark=mark,
        garbled=(annotation is not None and leaving is None)
        or (held is not None and hold is None)
        or (bool(mark) and leaving is None and hold is None),
        history=history_of(_annotation(workload, names.HISTORY_ANNOTATION)),
        pods=tuple(sorted(pods, key=lambda pod: pod.uid)),
        command=_command(workload),
        kind=_owner_kind(workload),
        cluster=_text(workload, "status.clusterName"),
        backs_off=_since(said, "QuotaReserved") is None
        and said.get("Requeued", ("",))[0] == "False",
        directory=_directory(workload),
    )


def _unqueued(policy: Policy, job: Json, *, team: str) -> QueuedJob:
    space, name = _text(job, "metadata.namespace"), _text(job, "metadata.name")
    as_workload = {
        "spec": {
            "podSets": [{"count": 1, "template": value_at(job, "spec.template")}],
        }
    }
    return QueuedJob(
        id=f"{space}/{name}",
        namespace=space,
        workload="",
        uid=_text(job, "metadata.uid"),
        version="",
        job=name,
        job_version=_text(job, "metadata.resourceVersion"),
        team=team,
        priority=_priority(policy, _label(job, names.PRIORITY_LABEL)),
        user=_label(job, names.USER_LABEL),
        run_id=_label(job, names.RUN_LABEL),
        gpus=gpus_of(policy, as_workload),
        width=width_of(as_workload),
        cards=kinds_of(policy, as_workload),
        created=moment_of(value_at(job, "metadata.creationTimestamp")) or 0.0,
        waits=_listed(job, names.WAITS_ANNOTATION),
        window=_label(job, names.WINDOW_LABEL),
        after=_listed(job, names.AFTER_ANNOTATION),
        not_before=_number(_annotation(job, names.NOT_BEFORE_ANNOTATION)),
    )


def _conditions(found: Json) -> dict[str, tuple[str, str, float | None]]:
    """Type -> status, reason, since."""
    return {
        str(row.get("type")): (
            str(row.get("status")),
            str(row.get("reason", "")),
            moment_of(row.get("lastTransitionTime")),
        )
        for row in rows_at(found, "status.conditions")
    }


def _since(said: dict[str, tuple[str, str, float | None]], kind: str) -> float | None:
    status, _reason, moment = said.get(kind, ("", "", None))
    return (moment or 0.0) if status == "True" else None


def _check(policy: Policy, workload: Json) -> tuple[str, float | None]:
    own = names.check_name(policy)
    for row in rows_at(workload, "status.admissionChecks"):
        if row.get("name") == own:
            return str(row.get("state", "")), moment_of(row.get("lastTransitionTime"))
    return "", None


def _command(workload: Json) -> tuple[str, ...]:
    """What its first container runs, as gpuwarden's own jobs say it: in `command`, without args."""
    for _count, spec in templates_of(workload):
        for container in rows_at(spec, "containers"):
            words = value_at(container, "command")
            return tuple(str(word) for word in words) if isinstance(words, list) else ()
    return ()


def _directory(workload: Json) -> str:
    for _count, spec in templates_of(workload):
        for container in rows_at(spec, "containers"):
            return _text(container, "workingDir")
    return ""


def _priority(policy: Policy, name: str) -> str:
    known = {names.priority_name(policy, each.name): each.name for each in policy.priorities}
    return known.get(name, "")


def _text(found: Json, path: str, *, flat: bool = False) -> str:
    if flat:
        prefix = "metadata.labels."
        labels = value_at(found, "metadata.labels")
        value = labels.get(path.removeprefix(prefix)) if isinstance(labels, dict) else None
    else:
        value = value_at(found, path)
    return value if isinstance(value, str) else ""


def _label(found: Json, key: str) -> str:
    return _text(found, f"metadata.labels.{key}", flat=True)


def _annotation(found: Json, key: str) -> str | None:
    rows = value_at(found, "metadata.annotations")
    value = rows.get(key) if isinstance(rows, dict) else None
    return value if isinstance(value, str) else None


def _listed(found: Json, key: str) -> tuple[str, ...]:
    text = _annotation(found, key) or ""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and 0 < value < 1e12 else None


def _owner_uid(found: Json) -> str:
    for row in rows_at(found, "metadata.ownerReferences"):
        if row.get("controller") is True:
            return str(row.get("uid", ""))
    return ""


def _owner_kind(found: Json) -> str:
    for row in rows_at(found, "metadata.ownerReferences"):
        if row.get("controller") is True:
            return str(row.get("kind", ""))
    return ""


def owner_name(found: Json) -> str:
    """Name of the Job, or whatever else, whose object this is; empty where it has none."""
    for row in rows_at(found, "metadata.ownerReferences"):
        if row.get("controller") is True:
            return str(row.get("name", ""))
    return ""


def _is_ready(node: Json) -> bool:
    return _conditions(node).get("Ready", ("",))[0] == "True"
