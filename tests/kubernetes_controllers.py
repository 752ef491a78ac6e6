"""Stand-ins for the controllers of a cluster: pods are made, deleted and made again by them.

Each look at the cluster brings pods and owners one step towards what is asked for, as controllers
do; the garbage collector takes what has lost its owner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuwarden.platforms.kubernetes import value_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kubernetes_store import Json, Store

_ROUNDS = 12


def reconcile(store: Store, step: Callable[[Store], None] | None = None) -> None:
    """Bring everything to where nothing is left to do.

    Args:
        store: of the cluster.
        step: of a further controller; it looks after Workloads, if there is one.
    """
    with store.lock:
        for _ in range(_ROUNDS):
            before = store.version, len(store.objects)
            _collect(store)
            if step is not None:
                step(store)
            for kind, want in _WANTED.items():
                if kind == "Workload" and step is not None:
                    continue
                for found in store.all(kind):
                    want(store, found)
            if (store.version, len(store.objects)) == before:
                return


def _children(store: Store, owner: Json, kind: str) -> list[Json]:
    uid = owner["metadata"]["uid"]
    return [
        item
        for item in store.all(kind)
        if any(ref["uid"] == uid for ref in item["metadata"].get("ownerReferences", ()))
    ]


def _make(store: Store, owner: Json, kind: str, *, suffix: str, **body: Any) -> None:
    metadata = owner["metadata"]
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    about = {"ownerReferences": [reference], **body.pop("metadata", {})}
    about["name" if suffix else "generateName"] = f"{metadata['name']}-{suffix}"
    store.create(store.of_kind(kind), metadata["namespace"], {"metadata": about, **body})


def _pods(store: Store, owner: Json, count: int, template: Json, *, ordinal: bool = False) -> None:
    """So many living pods; those that are being deleted count no more."""
    pods = _children(store, owner, "Pod")
    living = [
        pod
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
        and pod["status"]["phase"] not in ("Succeeded", "Failed")
    ]
    for pod in living[count:]:
        metadata = pod["metadata"]
        store.delete(store.of_kind("Pod"), metadata["namespace"], metadata["name"])
    taken = {pod["metadata"]["name"] for pod in pods}
    for index in range(count) if ordinal else range(len(living), count):
        suffix = str(index) if ordinal else ""
        if f"{owner['metadata']['name']}-{suffix}" in taken:
            continue  # it is there, or still on its way out
        _make(
            store,
            owner,
            "Pod",
            suffix=suffix,
            metadata=dict(template.get("metadata", {})),
            spec=template["spec"],
        )


def _job(store: Store, job: Json) -> None:
    spec = job["spec"]
    done = sum(pod["status"]["phase"] == "Succeeded" for pod in _children(store, job, "Pod"))
    wanted = 0 if spec.get("suspend") or done else spec.get("parallelism", 1)
    _pods(store, job, wanted, spec["template"])


def _replica_set(store: Store, found: Json) -> None:
    _pods(store, found, found["spec"]["replicas"], found["spec"]["template"])


def _deployment(store: Store, found: Json) -> None:
    """A Deployment has one ReplicaSet here; it passes its number on."""
    spec = found["spec"]
    sets = _children(store, found, "ReplicaSet")
    if not sets:
        body = {name: spec[name] for name in ("replicas", "selector", "template")}
        _make(store, found, "ReplicaSet", suffix="5d4f", spec=body)
    for item in sets:
        if item["spec"]["replicas"] != spec["replicas"]:
            _patch(store, item, {"spec": {"replicas": spec["replicas"]}})


def _stateful_set(store: Store, found: Json) -> None:
    _pods(store, found, found["spec"]["replicas"], found["spec"]["template"], ordinal=True)


def _notebook(store: Store, found: Json) -> None:
    stopped = value_at(found, "metadata.annotations.kubeflow-resource-stopped") is not None
    sets = _children(store, found, "StatefulSet")
    name = found["metadata"]["name"]
    template = found["spec"]["template"]
    if not sets:
        labels = {"notebook-name": name}
        _make(
            store,
            found,
            "StatefulSet",
            suffix="nb",
            spec={
                "replicas": 1,
                "serviceName": name,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, **template},
            },
        )
    for item in sets:
        if item["spec"]["replicas"] != int(not stopped):
            _patch(store, item, {"spec": {"replicas": int(not stopped)}})


def _pytorch_job(store: Store, found: Json) -> None:
    held = value_at(found, "spec.runPolicy.suspend")
    spec = found["spec"]["pytorchReplicaSpecs"]
    pods = _children(store, found, "Pod")
    for role, part in spec.items():
        own = [pod for pod in pods if pod["metadata"]["labels"]["role"] == role]
        if held:
            for pod in own:
                if "deletionTimestamp" not in pod["metadata"]:
                    metadata = pod["metadata"]
                    store.delete(store.of_kind("Pod"), metadata["namespace"], metadata["name"])
            continue
        for index in range(len(own), part["replicas"]):
            _make(
                store,
                found,
                "Pod",
                suffix=f"{role.lower()}-{index}",
                metadata={"labels": {"role": role}},
                spec=part["template"]["spec"],
            )


def _job_set(store: Store, found: Json) -> None:
    held = bool(found["spec"].get("suspend"))
    jobs = _children(store, found, "Job")
    if not jobs:
        for item in found["spec"]["replicatedJobs"]:
            _make(
                store,
                found,
                "Job",
                suffix=f"{item['name']}-0",
                spec={**item["template"]["spec"], "suspend": held},
            )
    for job in jobs:
        if job["spec"].get("suspend") != held:
            _patch(store, job, {"spec": {"suspend": held}})


def _workload(store: Store, found: Json) -> None:
    """Kueue: what is not active is suspended; what is active runs."""
    held = found["spec"].get("active") is False
    uid = found["metadata"]["labels"]["kueue.x-k8s.io/job-uid"]
    for job in store.all("Job"):
        if job["metadata"]["uid"] == uid and bool(job["spec"].get("suspend")) != held:
            _patch(store, job, {"spec": {"suspend": held}})


def _patch(store: Store, found: Json, body: Json) -> None:
    metadata = found["metadata"]
    store.patch(store.of_kind(found["kind"]), metadata["namespace"], metadata["name"], body=body)


def _collect(store: Store) -> None:
    """Delete what has lost its owner."""
    uids = {found["metadata"]["uid"] for found in store.objects.values()}
    for resource, namespace, name in list(store.objects):
        key = (resource, namespace, name)
        owners = store.objects[key]["metadata"].get("ownerReferences", ())
        left = "deletionTimestamp" in store.objects[key]["metadata"]
        if owners and not left and not any(owner["uid"] in uids for owner in owners):
            store.delete(resource, namespace, name)


_WANTED = {
    "Workload": _workload,
    "JobSet": _job_set,
    "Notebook": _notebook,
    "Deployment": _deployment,
    "ReplicaSet": _replica_set,
    "StatefulSet": _stateful_set,
    "PyTorchJob": _pytorch_job,
    "Job": _job,
}
