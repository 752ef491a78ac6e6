"""Objects as users write them, for the fake cluster and for a real one alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.kubernetes_store import Json

IMAGE = "registry.example.org/lab/train:1"


def pod_spec(
    argv: Sequence[str] = ("train",),
    *,
    gpus: int = 1,
    node: str | None = "node1",
    grace: int = 30,
    restart: str = "Never",
    env: Sequence[Json] = (),
) -> Json:
    """What a pod runs: one container, on a node of its own choice where one is named."""
    container: Json = {"name": "train", "image": IMAGE, "command": list(argv)}
    if env:
        container["env"] = list(env)
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    spec: Json = {
        "containers": [container],
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": grace,
    }
    return {**spec, "nodeName": node} if node else spec


def pod(name: str, *argv: str, metadata: Json | None = None, **spec: Any) -> Json:
    """A pod that nothing manages."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}, **(metadata or {})},
        "spec": pod_spec(argv or ("train",), **spec),
    }


def job(name: str, *argv: str, spec: Json | None = None, **pods: Any) -> Json:
    """A Job."""
    template = {"metadata": {"labels": {"app": name}}, "spec": pod_spec(argv or ("train",), **pods)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"template": template, **(spec or {})},
    }


def service(kind: str, name: str, *, replicas: int = 1, **pods: Any) -> Json:
    """A Deployment, StatefulSet or DaemonSet."""
    labels = {"app": name}
    spec: Json = {
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod_spec(restart="Always", **pods)},
    }
    if kind != "DaemonSet":
        spec["replicas"] = replicas
    if kind == "StatefulSet":
        spec["serviceName"] = name
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def pytorch_job(name: str, *, workers: int = 1, launcher_gpus: int = 1) -> Json:
    """A training over several pods, of kubeflow's operator."""

    def part(replicas: int, gpus: int) -> Json:
        return {"replicas": replicas, "template": {"spec": pod_spec(gpus=gpus)}}

    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "pytorchReplicaSpecs": {"Master": part(1, launcher_gpus), "Worker": part(workers, 1)}
        },
    }


def job_set(name: str) -> Json:
    """A JobSet with one Job."""
    template = {"spec": {"template": {"spec": pod_spec()}}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {"replicatedJobs": [{"name": "workers", "template": template}]},
    }


def notebook(name: str) -> Json:
    """A Notebook of kubeflow."""
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "Notebook",
        "metadata": {"name": name},
        "spec": {"template": {"spec": pod_spec(restart="Always")}},
    }


def workload(name: str, job_uid: str) -> Json:
    """Kueue's Workload of a Job."""
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta1",
        "kind": "Workload",
        "metadata": {"name": name, "labels": {"kueue.x-k8s.io/job-uid": job_uid}},
        "spec": {"queueName": "lab", "active": True},
    }


def budget(name: str, app: str) -> Json:
    """A disruption budget of one pod that must stay."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": app}}},
    }


def owned(body: Json, owner: Json) -> Json:
    """The same object, managed by another."""
    metadata = owner["metadata"]
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }
    return {**body, "metadata": {**body["metadata"], "ownerReferences": [reference]}}
