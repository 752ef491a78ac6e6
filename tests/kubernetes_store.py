"""What an API server keeps, and by which rules it changes: the heart of the fake one of the tests.

Versions and uids, optimistic locking, preconditions, deletion with a grace and with finalizers,
disruption budgets, roles, and the schemas of the native kinds (kubernetes-validate). Answers are
(status, object) as a real server gives them; tests/kubernetes_answers holds what one gave.
"""

from __future__ import annotations

import datetime as dt
import json
import threading
import uuid
import warnings
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import kubernetes_validate
from tests.kueue_validations import API_VERSION, KINDS, completed, findings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Json = dict[str, Any]

SCHEMA = "1.34"
"""Version of Kubernetes whose schemas native objects must meet."""
_RBAC = "rbac.authorization.k8s.io"
_ADMISSION = "admissionregistration.k8s.io/v1"
_NATIVE = {
    _ADMISSION,
    "v1",
    "batch/v1",
    "apps/v1",
    "policy/v1",
    f"{_RBAC}/v1",
    "coordination.k8s.io/v1",
}


@dataclass(frozen=True, order=True)
class Resource:
    """A kind of objects, as discovery tells it."""

    api_version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        """Empty for the core."""
        return self.api_version.rpartition("/")[0]

    def title(self, part: str = "") -> str:
        """As messages have it: `deployments.apps`, `deployments/scale.apps`."""
        plural = f"{self.plural}/{part}" if part else self.plural
        return f"{plural}.{self.group}" if self.group else plural


BUILT_IN = (
    Resource("v1", "pods", "Pod"),
    Resource("v1", "nodes", "Node", namespaced=False),
    Resource("v1", "events", "Event"),
    Resource("batch/v1", "jobs", "Job"),
    Resource("batch/v1", "cronjobs", "CronJob"),
    Resource("apps/v1", "replicasets", "ReplicaSet"),
    Resource("apps/v1", "deployments", "Deployment"),
    Resource("apps/v1", "statefulsets", "StatefulSet"),
    Resource("apps/v1", "daemonsets", "DaemonSet"),
    Resource("apps/v1", "controllerrevisions", "ControllerRevision"),
    Resource("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    Resource("v1", "namespaces", "Namespace", namespaced=False),
    Resource("v1", "serviceaccounts", "ServiceAccount"),
    Resource("v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
    Resource("v1", "configmaps", "ConfigMap"),
    Resource(f"{_RBAC}/v1", "roles", "Role"),
    Resource(f"{_RBAC}/v1", "rolebindings", "RoleBinding"),
    Resource(f"{_RBAC}/v1", "clusterroles", "ClusterRole", namespaced=False),
    Resource(f"{_RBAC}/v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False),
    Resource("coordination.k8s.io/v1", "leases", "Lease"),
    Resource(
        _ADMISSION,
        "validatingadmissionpolicies",
        "ValidatingAdmissionPolicy",
        namespaced=False,
    ),
    Resource(
        _ADMISSION,
        "validatingadmissionpolicybindings",
        "ValidatingAdmissionPolicyBinding",
        namespaced=False,
    ),
)
KUEUE = tuple(
    Resource(API_VERSION, found["plural"], kind, namespaced=found["namespaced"])
    for kind, found in KINDS.items()
)
"""Kueue's kinds as it serves them today; CUSTOM has an older Workload."""
CUSTOM = (
    Resource("kubeflow.org/v1", "pytorchjobs", "PyTorchJob"),
    Resource("kubeflow.org/v1", "notebooks", "Notebook"),
    Resource("jobset.x-k8s.io/v1alpha2", "jobsets", "JobSet"),
    Resource("kueue.x-k8s.io/v1beta1", "workloads", "Workload"),
    Resource("example.org/v1", "trainings", "Training"),
)


@dataclass(frozen=True)
class Grant:
    """One rule of a role.

    Attributes:
        groups, resources, verbs: as in the manifest; a sub-resource is `pods/eviction`.
        namespace: where it holds; everywhere if None.
        names: of the objects for which it holds; all if empty.
    """

    groups: tuple[str, ...]
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    namespace: str | None = None
    names: tuple[str, ...] = ()

    def allows(
        self,
        verb: str,
        group: str,
        resource: str,
        namespace: str | None,
        *,
        name: str | None = None,
    ) -> bool:
        """Whether it allows a request."""
        return (not self.names or name in self.names) and (
            verb in self.verbs
            and group in self.groups
            and resource in self.resources
            and self.namespace in (None, namespace)
        )


class Refusal(Exception):
    """An error of the API, as its `Status`."""

    def __init__(
        self, code: int, reason: str, message: str, *, causes: Iterable[Json] = ()
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "details": {"causes": list(causes)} if causes else {},
            "code": code,
        }


def copied(found: Any) -> Any:
    """A copy of JSON, much faster than `copy.deepcopy`."""
    if isinstance(found, dict):
        return {name: copied(item) for name, item in found.items()}
    return [copied(item) for item in found] if isinstance(found, list) else found


Key = tuple[Resource, str | None, str]


@dataclass(frozen=True)
class Event:
    """A change, as watches tell it.

    Attributes:
        version: of the store after it.
        key: of the object.
        kind: ADDED, MODIFIED or DELETED.
        found: the object after it, or as it last was.
        before: the object before it, or None.
    """

    version: int
    key: Key
    kind: str
    found: Json
    before: Json | None


@dataclass
class Store:
    """All objects of a cluster; safe for threads.

    Attributes:
        resources: kinds that it serves.
        now: Unix time; a test may own it.
        changed: called after each change, without the lock.
        events: what has changed, for watches; `forget` drops it.
        oldest: the version from which on watches can go.
        owners: of fields that were applied: object -> manager -> paths.
    """

    resources: tuple[Resource, ...] = BUILT_IN + CUSTOM
    now: Callable[[], float] = lambda: dt.datetime.now(dt.UTC).timestamp()
    changed: Callable[[], None] = lambda: None
    objects: dict[Key, Json] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    version: int = 1000
    events: list[Event] = field(default_factory=list)
    oldest: int = 1000
    owners: dict[Key, dict[str, set[tuple[str, ...]]]] = field(default_factory=dict)
    news: threading.Condition = field(init=False)

    def __post_init__(self) -> None:
        """Watches wait for news with the lock of the store."""
        self.news = threading.Condition(self.lock)

    def forget(self) -> None:
        """Compact the history, as etcd does after minutes: older versions cannot be watched."""
        with self.lock:
            self.events.clear()
            self.version += 1
            self.oldest = self.version
            self.news.notify_all()

    def resource(self, api_version: str, plural: str) -> Resource:
        """A kind by its address, or 404."""
        for item in self.resources:
            if (item.api_version, item.plural) == (api_version, plural):
                return item
        raise Refusal(404, "NotFound", "the server could not find the requested resource")

    def of_kind(self, kind: str) -> Resource:
        """A kind by its name."""
        return next(item for item in self.resources if item.kind == kind)

    def all(self, kind: str) -> list[Json]:
        """Every object of a kind."""
        with self.lock:
            return [
                copied(found)
                for (resource, _, _), found in sorted(self.objects.items(), key=_order)
                if resource.kind == kind
            ]

    def get(self, resource: Resource, namespace: str | None, name: str) -> Json:
        """A copy of an object, or 404."""
        with self.lock:
            return copied(self._live((resource, namespace, name)))

    def list(self, resource: Resource, namespace: str | None) -> list[Json]:
        """Copies of all of a kind in a namespace, or in all."""
        return [
            item
            for item in self.all(resource.kind)
            if namespace is None or item["metadata"].get("namespace") == namespace
        ]

    def create(self, resource: Resource, namespace: str | None, body: Json) -> Json:
        """Make an object as a server does: uid, version, time."""
        found = copied(body)
        metadata = found.setdefault("metadata", {})
        if "name" not in metadata:
            metadata["name"] = metadata.pop("generateName") + uuid.uuid4().hex[:5]
        found.setdefault("apiVersion", resource.api_version)
        found.setdefault("kind", resource.kind)
        if namespace is not None:
            metadata["namespace"] = namespace
        if resource in KUEUE:
            found = completed(found)
            metadata = found["metadata"]
        metadata.setdefault("uid", str(uuid.uuid4()))
        metadata["creationTimestamp"] = self._stamp(self.now())
        if resource.kind == "Pod":
            found["spec"].setdefault("terminationGracePeriodSeconds", 30)
            found["spec"].setdefault("restartPolicy", "Always")
            found.setdefault("status", {}).setdefault("phase", "Pending")
        if resource.kind == "Job":
            found["spec"] = {"parallelism": 1, "backoffLimit": 6, "suspend": False, **found["spec"]}
        _validate(resource, found)
        key = (resource, namespace, metadata["name"])
        with self.lock:
            if key in self.objects:
                raise Refusal(409, "AlreadyExists", f'{resource.title()} "{key[2]}" already exists')
            self._write(key, found)
        self.changed()
        return copied(found)

    def patch(self, resource: Resource, namespace: str | None, name: str, *, body: Json) -> Json:
        """A merge patch; `resourceVersion` and `uid` in it must be the object's."""
        key = (resource, namespace, name)
        with self.lock:
            before = self._live(key)
            found = merged(before, body)
            self._check_locks(resource, before, body.get("metadata", {}))
            _validate(resource, found, before)
            self._write(key, found)
            self._drop_if_released(key)
            answer = copied(found)
        self.changed()
        return answer

    def scale(self, resource: Resource, namespace: str, name: str, *, body: Json | None) -> Json:
        """The scale sub-resource, changed first where there is a body."""
        with self.lock:
            before = self._live((resource, namespace, name))
            if body is not None:
                self._check_locks(resource, before, body.get("metadata", {}), part="scale")
                self.patch(
                    resource,
                    namespace,
                    name,
                    body={"spec": {"replicas": body.get("spec", {}).get("replicas", 0)}},
                )
            found = self._live((resource, namespace, name))
            metadata = found["metadata"]
            answer = {
                "kind": "Scale",
                "apiVersion": "autoscaling/v1",
                "metadata": {
                    part: metadata[part]
                    for part in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
                },
                "spec": {"replicas": found["spec"]["replicas"]}
                if found["spec"]["replicas"]
                else {},
                "status": {"replicas": found.get("status", {}).get("replicas", 0)},
            }
        self.changed()
        return answer

    def status(self, kind: str, namespace: str | None, name: str, **status: Any) -> None:
        """What a node or a controller reports of an object."""
        key = (self.of_kind(kind), namespace, name)
        with self.lock:
            if key not in self.objects:
                return
            found = copied(self.objects[key])
            found["status"] = {**found.get("status", {}), **status}
            self._write(key, found)
        self.changed()

    def delete(
        self, resource: Resource, namespace: str | None, name: str, *, options: Json | None = None
    ) -> Json:
        """Delete as a server does: preconditions, then the grace of a pod that has a node."""
        options = options or {}
        key = (resource, namespace, name)
        with self.lock:
            found = self._live(key)
            metadata = found["metadata"]
            wanted = options.get("preconditions", {}).get("uid")
            if wanted is not None and wanted != metadata["uid"]:
                raise Refusal(
                    409,
                    "Conflict",
                    f'Operation cannot be fulfilled on {resource.kind} "{name}": the UID in the '
                    f"precondition ({wanted}) does not match the UID in record "
                    f"({metadata['uid']}). The object might have been deleted and then recreated",
                )
            grace = 0
            if resource.kind == "Pod" and found["spec"].get("nodeName"):
                grace = found["spec"]["terminationGracePeriodSeconds"]
                if found["status"].get("phase") in ("Succeeded", "Failed"):
                    grace = 0
                else:
                    grace = options.get("gracePeriodSeconds", grace)
            deadline = self.now() + grace
            if "deletionTimestamp" in metadata:
                # A grace is only ever shortened.
                before = dt.datetime.fromisoformat(metadata["deletionTimestamp"]).timestamp()
                grace = min(grace, metadata["deletionGracePeriodSeconds"])
                deadline = min(deadline, before)
            metadata["deletionTimestamp"] = self._stamp(deadline)
            metadata["deletionGracePeriodSeconds"] = grace
            self._write(key, found)
            answer = copied(found)
            self._drop_if_released(key)
        self.changed()
        return answer

    def evict(self, namespace: str, name: str, body: Json) -> Json:
        """Delete a pod if its budgets allow it."""
        if body.get("apiVersion") != "policy/v1":
            raise Refusal(400, "BadRequest", "no kind Eviction is registered for it")
        resource = self.of_kind("Pod")
        with self.lock:
            pod = self._live((resource, namespace, name))
            labels = pod["metadata"].get("labels", {})
            budgets = self.list(self.of_kind("PodDisruptionBudget"), namespace)
            wanted = body.get("deleteOptions", {}).get("preconditions", {}).get("uid")
            if pod["status"]["phase"] != "Running" or wanted not in (None, pod["metadata"]["uid"]):
                budgets = []  # what does not run is not missed, and another pod is not evicted
            for budget in budgets:
                wanted = budget["spec"].get("selector", {}).get("matchLabels", {})
                if not wanted.items() <= labels.items():
                    continue
                if budget.get("status", {}).get("disruptionsAllowed", 0) < 1:
                    raise Refusal(
                        429,
                        "TooManyRequests",
                        "Cannot evict pod as it would violate the pod's disruption budget.",
                        causes=[
                            {
                                "reason": "DisruptionBudget",
                                "message": f"The disruption budget {budget['metadata']['name']} "
                                "needs 1 healthy pods and has 1 currently",
                            }
                        ],
                    )
                allowed = budget["status"]["disruptionsAllowed"] - 1
                name_ = budget["metadata"]["name"]
                self.status("PodDisruptionBudget", namespace, name_, disruptionsAllowed=allowed)
            self.delete(resource, namespace, name, options=body.get("deleteOptions"))
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
                "code": 201}  # fmt: skip

    def remove(self, kind: str, namespace: str | None, name: str, uid: str) -> None:
        """What a kubelet does at last: the object goes, once nothing holds it."""
        key = (self.of_kind(kind), namespace, name)
        with self.lock:
            found = self.objects.get(key)
            if found is None or found["metadata"]["uid"] != uid:
                return
            found["metadata"].setdefault("deletionTimestamp", self._stamp(self.now()))
            found["metadata"]["deletionGracePeriodSeconds"] = 0
            self._drop_if_released(key)
        self.changed()

    def _live(self, key: Key) -> Json:
        if key not in self.objects:
            raise Refusal(404, "NotFound", f'{key[0].title()} "{key[2]}" not found')
        return self.objects[key]

    def _write(self, key: Key, found: Json) -> None:
        before = self.objects.get(key)
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)
        written = {"manager": "x", "operation": "Update", "time": self._stamp(self.now())}
        found["metadata"]["managedFields"] = [written]
        self.objects[key] = found
        self._tell(key, "ADDED" if before is None else "MODIFIED", found, before=before)

    def _tell(self, key: Key, kind: str, found: Json, *, before: Json | None) -> None:
        self.events.append(Event(self.version, key, kind, copied(found), before))
        self.news.notify_all()

    def _drop_if_released(self, key: Key) -> None:
        """An object that is to go, has no grace left and no finalizer goes."""
        metadata = self.objects[key]["metadata"]
        if (
            "deletionTimestamp" in metadata
            and not metadata.get("deletionGracePeriodSeconds")
            and not metadata.get("finalizers")
        ):
            found = self.objects.pop(key)
            self.owners.pop(key, None)
            self.version += 1
            last = copied(found)
            last["metadata"]["resourceVersion"] = str(self.version)
            self._tell(key, "DELETED", last, before=found)

    def _check_locks(
        self, resource: Resource, before: Json, wanted: Mapping[str, str], *, part: str = ""
    ) -> None:
        name, own = before["metadata"]["name"], before["metadata"]["uid"]
        version, uid = wanted.get("resourceVersion"), wanted.get("uid", own)
        refused = "Operation cannot be fulfilled on"
        if part and uid != own:
            raise Refusal(
                409,
                "Conflict",
                f'{refused} {resource.title(part)} "{name}": Precondition failed: UID in '
                f"precondition: {uid}, UID in object meta: {own}",
            )
        if version is not None and version != before["metadata"]["resourceVersion"]:
            raise Refusal(
                409,
                "Conflict",
                f'{refused} {resource.title()} "{name}": the object has been modified; please '
                "apply your changes to the latest version and try again",
            )
        if uid != own:
            kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
            raise Refusal(
                422,
                "Invalid",
                f'{kind} "{name}" is invalid: metadata.uid: Invalid value: "{uid}": field is '
                "immutable",
            )

    @staticmethod
    def _stamp(moment: float) -> str:
        return dt.datetime.fromtimestamp(int(moment), dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _order(item: tuple[Key, Json]) -> tuple[str, str]:
    """Lists are in the order of names."""
    (_, namespace, name), _ = item
    return namespace or "", name


def merged(before: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return copied(patch)
    found = dict(before) if isinstance(before, dict) else {}
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = merged(found.get(name), value)
    return copied(found)


def _validate(resource: Resource, found: Json, before: Json | None = None) -> None:
    """Refuse what the native kinds' schemas, and Kueue's, do not allow (422)."""
    if resource in KUEUE and (said := findings(found, before)):
        name = found["metadata"].get("name", "")
        message = f'{resource.kind}.{resource.group} "{name}" is invalid: {"; ".join(said)}'
        raise Refusal(422, "Invalid", message)
    if resource.api_version not in _NATIVE:
        return
    metadata = found["metadata"]
    # What tests make again and again is looked at once.
    own = {part: metadata[part] for part in ("labels", "annotations") if part in metadata}
    body = {**found, "metadata": {"name": "x", **own}}
    said = _finding(json.dumps({k: v for k, v in body.items() if k != "status"}, sort_keys=True))
    if said:
        raise Refusal(
            422,
            "Invalid",
            f'{resource.kind}.{resource.group} "{metadata.get("name", "")}" is invalid: {said}',
            causes=[{"reason": "FieldValueInvalid", "message": said}],
        )


@lru_cache(maxsize=2048)
def _finding(content: str) -> str:
    try:
        with warnings.catch_warnings(action="ignore"):
            kubernetes_validate.validate(json.loads(content), SCHEMA, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return ""
