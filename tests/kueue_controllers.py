"""A scripted Kueue for the fake API server: queues Jobs, reserves quota, evicts, requeues.

It follows what Kueue's own code does where gpuwarden relies on it (v0.19: jobframework's
reconciler, core's workload controller), in one cohort, for one resource of cards. It is no proof of
what Kueue does; docs/scheduling-kueue.md says so. Knobs make it misbehave as public reports tell.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.kubernetes_store import KUEUE, Refusal

from gpuwarden.platforms.kubernetes import condition, value_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kubernetes_store import Json, Store

QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
GATES = "kueue.x-k8s.io/admission-gated-by"
LIMIT = "kueue.x-k8s.io/max-exec-time-seconds"
_WORKLOAD = next(item for item in KUEUE if item.kind == "Workload")


@dataclass
class Kueue:
    """The controller and its scheduler.

    Attributes:
        resource: whose quota it counts.
        node: where pods of admitted Jobs go.
        frozen: whether it does nothing at all, as when it is down.
        preempts: whether it evicts lower priorities by itself.
        keeps_on_retry: whether a reservation outlives a check's Retry (kueue #6035).
        ignores_active: whether it does not look at `active`.
        retried: workload uid -> until when a Retry keeps it out.
    """

    resource: str = "nvidia.com/gpu"
    node: str = "node1"
    frozen: bool = False
    preempts: bool = False
    keeps_on_retry: bool = False
    ignores_active: bool = False
    retried: dict[str, float] = field(default_factory=dict)

    def __call__(self, store: Store) -> None:
        """One round."""
        if self.frozen:
            return
        for job in store.all("Job"):
            if QUEUE in job["metadata"].get("labels", {}):
                self._queue(store, job)
        for job in store.all("Job"):
            self._end(store, job)
        for workload in _workloads(store):
            self._evict(store, workload)
        self._admit(store)
        for workload in _workloads(store):
            self._run(store, workload)
        for pod in store.all("Pod"):
            if not pod["spec"].get("nodeName"):
                _patch(store, "Pod", pod, {"spec": {"nodeName": self.node}})

    # -- Jobs

    def _queue(self, store: Store, job: Json) -> None:
        metadata = job["metadata"]
        found = workload_of(store, job)
        gates = metadata.get("annotations", {}).get(GATES)
        if found is None:
            self._make(store, job)
        elif found["metadata"].get("annotations", {}).get(GATES) != gates:
            _patch(store, "Workload", found, {"metadata": {"annotations": {GATES: gates}}})

    def _make(self, store: Store, job: Json) -> None:
        metadata, labels = job["metadata"], job["metadata"]["labels"]
        if not job["spec"].get("suspend"):
            _patch(store, "Job", job, {"spec": {"suspend": True}})
        spec: Json = {
            "queueName": labels[QUEUE],
            "active": True,
            "podSets": [
                {
                    "name": "main",
                    "count": job["spec"].get("parallelism", 1),
                    "template": job["spec"]["template"],
                }
            ],
        }
        if PRIORITY in labels:
            found = store.get(store.of_kind("WorkloadPriorityClass"), None, labels[PRIORITY])
            spec["priority"] = found["value"]
            spec["priorityClassRef"] = {
                "group": "kueue.x-k8s.io",
                "kind": "WorkloadPriorityClass",
                "name": labels[PRIORITY],
            }
        if LIMIT in labels:
            spec["maximumExecutionTimeSeconds"] = int(labels[LIMIT])
        gates = metadata.get("annotations", {}).get(GATES)
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
        }
        body = {
            "metadata": {
                "name": f"job-{metadata['name']}-{metadata['uid'][:5]}",
                "labels": {"kueue.x-k8s.io/job-uid": metadata["uid"]},
                "annotations": {GATES: gates} if gates else {},
                "ownerReferences": [owner],
            },
            "spec": spec,
        }
        store.create(_WORKLOAD, metadata["namespace"], body)

    def _end(self, store: Store, job: Json) -> None:
        """What the Job controller says at the end, and what Kueue makes of it."""
        workload = workload_of(store, job)
        if workload is None or condition(workload, "Finished") == "True":
            return
        pods = pods_of(store, job)
        done = any(pod["status"]["phase"] == "Succeeded" for pod in pods)
        failed = any(_exit_code(pod) not in (None, 0, 75) for pod in pods)
        if done or failed:
            kind = "Complete" if done else "Failed"
            metadata = job["metadata"]
            conditions = [{"type": kind, "status": "True"}]
            store.status("Job", metadata["namespace"], metadata["name"], conditions=conditions)
            if failed and not done:
                _patch(store, "Job", job, {"spec": {"suspend": True}})
            reason = "Succeeded" if done else "Failed"
            self._say(store, workload, Finished=("True", reason))

    # -- Workloads

    def _evict(self, store: Store, workload: Json) -> None:
        if condition(workload, "Finished") == "True":
            return
        why = ""
        if workload["spec"].get("active") is False and not self.ignores_active:
            why = "Deactivated"
        elif any(check["state"] == "Retry" for check in checks_of(workload)):
            why = "AdmissionCheck"
        held = condition(workload, "QuotaReserved") == "True"
        evicted = condition(workload, "Evicted") == "True"
        if why and held and not evicted:
            self.evict(store, workload, why)
            evicted = True
        if evicted and held:
            self._release(store, workload)
        elif not held and why == "AdmissionCheck":
            self._reset_checks(store, workload)
        again = condition(workload, "Requeued") == "False" and not why
        if again and workload["spec"].get("active") is not False:
            self._say(store, workload, Requeued=("True", "Reactivated"), Evicted=("False", "x"))

    def evict(self, store: Store, workload: Json, reason: str) -> None:
        """Mark a Workload as evicted and suspend its Job: its pods get SIGTERM."""
        self._say(store, workload, Evicted=("True", reason), Admitted=("False", "NoReservation"))
        job = job_of(store, workload)
        if job is not None and not job["spec"].get("suspend"):
            _patch(store, "Job", job, {"spec": {"suspend": True}})

    def _release(self, store: Store, workload: Json) -> None:
        """Once no pod is left to be told, the reservation goes."""
        found = _fresh(store, workload)
        job = job_of(store, found)
        # As the Job integration: pods that are on their way out count no more (kueue #6143).
        left = job is not None and any(
            "deletionTimestamp" not in pod["metadata"]
            and pod["status"]["phase"] not in ("Succeeded", "Failed")
            for pod in pods_of(store, job)
        )
        retry = any(check["state"] == "Retry" for check in checks_of(found))
        if left or (retry and self.keeps_on_retry and found["spec"].get("active") is not False):
            return
        name, space = found["metadata"]["name"], found["metadata"]["namespace"]
        body = dict(found["status"])
        body.pop("admission", None)
        with store.lock:
            store.objects[_WORKLOAD, space, name]["status"] = body
        requeued = "False" if found["spec"].get("active") is False else "True"
        self._say(
            store, found, QuotaReserved=("False", "Pending"), Requeued=(requeued, "Deactivated")
        )
        if retry:
            self._reset_checks(store, found)

    def _reset_checks(self, store: Store, workload: Json) -> None:
        found = _fresh(store, workload)
        for check in checks_of(found):
            if check["state"] == "Retry":
                since = dt.datetime.fromisoformat(check["lastTransitionTime"]).timestamp()
                wait = check.get("requeueAfterSeconds", 0)
                self.retried[found["metadata"]["uid"]] = since + wait
        checks = [_check(store, item["name"]) for item in checks_of(found)]
        metadata = found["metadata"]
        store.status("Workload", metadata["namespace"], metadata["name"], admissionChecks=checks)

    def _admit(self, store: Store) -> None:
        waiting = [item for item in _workloads(store) if self._may_run(store, item)]
        waiting.sort(
            key=lambda item: (
                -item["spec"].get("priority", 0),
                item["metadata"]["creationTimestamp"],
                int(item["metadata"]["resourceVersion"]),
            )
        )
        for workload in waiting:
            queue = queue_of(store, workload)
            if queue is None:
                self._say(store, workload, QuotaReserved=("False", "Inadmissible"))
                continue
            flavor = self._fitting(store, workload, queue)
            if flavor is not None:
                self._reserve(store, workload, queue, flavor=flavor)
            else:
                self._say(store, workload, QuotaReserved=("False", "WaitingForQuota"))
                if self.preempts:
                    self._preempt(store, workload, queue)

    def _may_run(self, store: Store, workload: Json) -> bool:
        metadata = workload["metadata"]
        return (
            condition(workload, "QuotaReserved") != "True"
            and condition(workload, "Finished") != "True"
            and (workload["spec"].get("active") is not False or self.ignores_active)
            and not metadata.get("annotations", {}).get(GATES)
            and store.now() >= self.retried.get(metadata["uid"], 0.0)
        )

    def _fitting(self, store: Store, workload: Json, queue: Json) -> str | None:
        wanted = self.cards(workload)
        selector = workload["spec"]["podSets"][0]["template"]["spec"].get("nodeSelector", {})
        for group in queue["spec"].get("resourceGroups", ()):
            if self.resource not in group["coveredResources"]:
                continue
            for item in group["flavors"]:
                labels = store.get(store.of_kind("ResourceFlavor"), None, item["name"])["spec"].get(
                    "nodeLabels", {}
                )
                if any(labels.get(key, value) != value for key, value in selector.items()):
                    continue
                if wanted <= self._room(store, queue, item):
                    return str(item["name"])
        return None

    def _room(self, store: Store, queue: Json, flavor: Json) -> int:
        name, own = flavor["name"], self._quota(flavor)
        used = {item["metadata"]["name"]: 0 for item in store.all("ClusterQueue")}
        for item in _workloads(store):
            assigned = value_at(item, "status.admission")
            held = condition(item, "QuotaReserved") == "True"
            reserved = held and condition(item, "Finished") != "True" and assigned
            if reserved and name in assigned["podSetAssignments"][0]["flavors"].values():
                used[assigned["clusterQueue"]] += self.cards(item)
        total = 0
        for item in (*store.all("ClusterQueue"), *store.all("Cohort")):
            for group in item["spec"].get("resourceGroups", ()):
                total += sum(self._quota(each) for each in group["flavors"] if each["name"] == name)
        resource = next(item for item in flavor["resources"] if item["name"] == self.resource)
        limit = resource.get("borrowingLimit")
        most = total if limit is None else own + int(limit)
        return min(most - used[queue["metadata"]["name"]], total - sum(used.values()))

    def _quota(self, flavor: Json) -> int:
        return sum(
            int(item["nominalQuota"])
            for item in flavor["resources"]
            if item["name"] == self.resource
        )

    def cards(self, workload: Json) -> int:
        """How many cards a Workload wants."""
        total = 0
        for part in workload["spec"]["podSets"]:
            for container in part["template"]["spec"]["containers"]:
                limits = container.get("resources", {}).get("limits", {})
                total += part["count"] * int(limits.get(self.resource, 0))
        return total

    def _reserve(self, store: Store, workload: Json, queue: Json, *, flavor: str) -> None:
        metadata = workload["metadata"]
        count = workload["spec"]["podSets"][0]["count"]
        assignment = {
            "name": "main",
            "flavors": {self.resource: flavor},
            "resourceUsage": {self.resource: str(self.cards(workload))},
            "count": count,
        }
        strategy = value_at(queue, "spec.admissionChecksStrategy.admissionChecks") or []
        store.status(
            "Workload",
            metadata["namespace"],
            metadata["name"],
            admission={
                "clusterQueue": queue["metadata"]["name"],
                "podSetAssignments": [assignment],
            },
            admissionChecks=[_check(store, item["name"]) for item in strategy],
        )
        self._say(
            store, workload, QuotaReserved=("True", "QuotaReserved"), Evicted=("False", "Reserved")
        )

    def _preempt(self, store: Store, workload: Json, queue: Json) -> None:
        name, value = queue["metadata"]["name"], workload["spec"].get("priority", 0)
        lower = [
            item
            for item in _workloads(store)
            if value_at(item, "status.admission.clusterQueue") == name
            and item["spec"].get("priority", 0) < value
            and condition(item, "Evicted") != "True"
        ]
        if lower:
            victim = min(lower, key=lambda item: item["spec"].get("priority", 0))
            self.evict(store, victim, "Preempted")

    def _run(self, store: Store, workload: Json) -> None:
        ready = all(check["state"] == "Ready" for check in checks_of(workload))
        held = condition(workload, "QuotaReserved") == "True"
        going = condition(workload, "Evicted") == "True"
        if held and ready and not going and condition(workload, "Admitted") != "True":
            self._say(store, workload, Admitted=("True", "Admitted"))
        job = job_of(store, workload)
        over = condition(_fresh(store, workload), "Finished") == "True"
        if job is None or over:
            return
        suspend = condition(_fresh(store, workload), "Admitted") != "True"
        if bool(job["spec"].get("suspend")) != suspend:
            _patch(store, "Job", job, {"spec": {"suspend": suspend}})

    def _say(self, store: Store, workload: Json, **said: tuple[str, str]) -> None:
        """Set conditions; one that stands already keeps its time."""
        found = _fresh(store, workload)
        conditions = {item["type"]: item for item in found.get("status", {}).get("conditions", ())}
        changed = False
        for kind, (status, reason) in said.items():
            old = conditions.get(kind)
            if old is not None and old["status"] == status:
                continue
            changed = True
            conditions[kind] = {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": "",
                "lastTransitionTime": stamp(store.now()),
            }
        if changed:
            metadata = found["metadata"]
            rows = list(conditions.values())
            store.status("Workload", metadata["namespace"], metadata["name"], conditions=rows)


def workload_of(store: Store, job: Json) -> Json | None:
    """The Workload of a Job."""
    uid = job["metadata"]["uid"]
    return next(
        (
            item
            for item in store.all("Workload")
            if item["metadata"].get("labels", {}).get("kueue.x-k8s.io/job-uid") == uid
        ),
        None,
    )


def job_of(store: Store, workload: Json) -> Json | None:
    """The Job of a Workload."""
    uid = workload["metadata"]["labels"]["kueue.x-k8s.io/job-uid"]
    return next((item for item in store.all("Job") if item["metadata"]["uid"] == uid), None)


def pods_of(store: Store, job: Json) -> list[Json]:
    """The pods of a Job that are there."""
    uid = job["metadata"]["uid"]
    return [
        item
        for item in store.all("Pod")
        if any(owner["uid"] == uid for owner in item["metadata"].get("ownerReferences", ()))
    ]


def queue_of(store: Store, workload: Json) -> Json | None:
    """The ClusterQueue of a Workload, or None where there is none."""
    space, name = workload["metadata"]["namespace"], workload["spec"].get("queueName", "")
    try:
        local = store.get(store.of_kind("LocalQueue"), space, name)
        return store.get(store.of_kind("ClusterQueue"), None, local["spec"]["clusterQueue"])
    except Refusal:
        return None


def checks_of(workload: Json) -> list[Json]:
    """States of its admission checks."""
    return list(workload.get("status", {}).get("admissionChecks", ()))


def stamp(moment: float) -> str:
    """A time as the API writes it."""
    return dt.datetime.fromtimestamp(int(moment), dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _check(store: Store, name: str) -> dict[str, Any]:
    moment = stamp(store.now())
    return {"name": name, "state": "Pending", "message": "", "lastTransitionTime": moment}


def _exit_code(pod: Json) -> int | None:
    statuses = pod["status"].get("containerStatuses", ())
    codes = [value_at(item, "state.terminated.exitCode") for item in statuses]
    return next((code for code in codes if code is not None), None)


def _workloads(store: Store) -> Iterator[Json]:
    for item in store.all("Workload"):
        if job_of(store, item) is not None:
            yield _fresh(store, item)


def _fresh(store: Store, found: Json) -> Json:
    metadata = found["metadata"]
    return store.get(_WORKLOAD, metadata["namespace"], metadata["name"])


def _patch(store: Store, kind: str, found: Json, body: Json) -> None:
    metadata = found["metadata"]
    store.patch(store.of_kind(kind), metadata["namespace"], metadata["name"], body=body)
