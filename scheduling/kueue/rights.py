"""gpuwarden's controller in the cluster: its account, its least rights, its Deployment.

It reads what is queued and runs, in all namespaces. It changes Workloads and Jobs only in the
teams' namespaces, quotas only of its own queues, and the state of no check but its own. It starts,
deletes and executes nothing, and reads no secrets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuwarden.scheduling.kueue import leases, names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.scheduling.policies import Policy

Body = dict[str, Any]

_USER = 10001
"""Of the image; no more than a number."""
_STATE = "/var/lib/gpuwarden-scheduler"
_PORT = 9839


def rights(policy: Policy) -> Iterator[Body]:
    """The controller's account and what it may do."""
    name, space = names.controller_name(policy), policy.kueue.namespace
    account = {"kind": "ServiceAccount", "name": name, "namespace": space}
    # Held by nobody yet: it is here so that `undo` takes it away.
    yield leases.lease_body(policy, {})
    yield _body(policy, "v1", "ServiceAccount", name, space)
    yield {
        **_body(policy, names.RBAC, "ClusterRole", name),
        "rules": _cluster_rules(policy),
    }
    yield {
        **_body(policy, names.RBAC, "ClusterRoleBinding", name),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [account],
    }
    spaces = sorted({team.namespace for team in policy.teams})
    for each in dict.fromkeys([space, *spaces]):
        rules = [
            *(_lease_rules(name) if each == space else ()),
            *(_team_rules() if each in spaces else ()),
        ]
        yield {**_body(policy, names.RBAC, "Role", name, each), "rules": rules}
        yield {
            **_body(policy, names.RBAC, "RoleBinding", name, each),
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [account],
        }


def _cluster_rules(policy: Policy) -> list[Body]:
    queues = sorted(names.queue_name(policy, team.name) for team in policy.teams)
    seeing = ["list", "watch"]
    kueue = "kueue.x-k8s.io"
    return [
        {
            "apiGroups": [kueue],
            "resources": ["workloads", "clusterqueues", "cohorts", "admissionchecks"],
            "verbs": seeing,
        },
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": seeing},
        {"apiGroups": [""], "resources": ["pods", "nodes"], "verbs": seeing},
        # Bookings move quotas between its own queues, and between no others.
        {
            "apiGroups": [kueue],
            "resources": ["clusterqueues"],
            "resourceNames": queues,
            "verbs": ["patch"],
        },
        {
            "apiGroups": [kueue],
            "resources": ["cohorts"],
            "resourceNames": [policy.kueue.cohort],
            "verbs": ["patch"],
        },
        {
            "apiGroups": [kueue],
            "resources": ["admissionchecks/status"],
            "resourceNames": [names.check_name(policy)],
            "verbs": ["patch"],
        },
    ]


def _team_rules() -> list[Body]:
    return [
        {
            "apiGroups": ["kueue.x-k8s.io"],
            "resources": ["workloads", "workloads/status"],
            "verbs": ["patch"],
        },
        # Gates are annotations of the Job; Kueue carries them to the Workload.
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["patch"]},
    ]


def _lease_rules(name: str) -> list[Body]:
    return [
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": [name],
            "verbs": ["get", "patch"],
        },
        # A creation has no name yet that a rule could ask for.
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
    ]


def deployment(policy: Policy) -> Iterator[Body]:
    """The controller's own Deployment and the volume of its state; nothing without an image."""
    if policy.kueue.image is None:
        return
    name, space = names.controller_name(policy), policy.kueue.namespace
    yield {
        **_body(policy, "v1", "PersistentVolumeClaim", name, space),
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    labels = {"app.kubernetes.io/name": name}
    yield {
        **_body(policy, "apps/v1", "Deployment", name, space),
        "spec": {
            "replicas": 1,
            # Two of them would each keep half of the story: the old one goes first.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": _pod(policy, name),
            },
        },
    }


def _pod(policy: Policy, name: str) -> Body:
    engine = policy.kueue.engine_url
    asking = [f"--engine.url={engine}", "--engine.token-file=/secrets/token"] if engine else []
    secret = f"{policy.kueue.cohort}-engine-token"
    container: Body = {
        "name": "scheduler",
        "image": policy.kueue.image,
        "command": ["gpuwarden", "scheduler"],
        "args": [
            "--policy=/etc/gpuwarden/policy.yaml",
            f"--state={_STATE}",
            f"--listen=0.0.0.0:{_PORT}",
            "--socket=/tmp/scheduler.sock",
            *asking,
        ],
        "ports": [{"name": "http", "containerPort": _PORT, "protocol": "TCP"}],
        "readinessProbe": {"httpGet": {"path": "/-/ready", "port": "http"}},
        "livenessProbe": {
            "httpGet": {"path": "/-/healthy", "port": "http"},
            "initialDelaySeconds": 30,
            "periodSeconds": 20,
            "timeoutSeconds": 5,
        },
        "resources": {
            "requests": {"cpu": "100m", "memory": "128Mi"},
            "limits": {"memory": "1Gi"},
        },
        "securityContext": {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "policy", "mountPath": "/etc/gpuwarden", "readOnly": True},
            {"name": "state", "mountPath": _STATE},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the pod's own, made below
        ],
    }
    volumes: list[Body] = [
        {"name": "policy", "configMap": {"name": f"{policy.kueue.cohort}-policy"}},
        {"name": "state", "persistentVolumeClaim": {"claimName": name}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
    ]
    if engine:
        volumes.append({"name": "secrets", "secret": {"secretName": secret, "defaultMode": 0o440}})
        mount = {"name": "secrets", "mountPath": "/secrets", "readOnly": True}
        container["volumeMounts"].append(mount)
    return {
        "serviceAccountName": name,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }


def _body(policy: Policy, version: str, kind: str, name: str, space: str | None = None) -> Body:
    metadata: Body = {"name": name, "labels": names.marks(policy)}
    if space is not None:
        metadata["namespace"] = space
    return {"apiVersion": version, "kind": kind, "metadata": metadata}
