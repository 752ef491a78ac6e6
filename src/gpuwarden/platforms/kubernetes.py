"""What the Kubernetes API tells of pods, their owners and nodes, read tolerantly and without trust.

Objects are read as the API serves them, dictionaries of JSON; what is not of the shape that the API
documents is refused, and what it documents as optional may be absent. Names come from users; they
are checked before they become part of an address.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

Json: TypeAlias = "Mapping[str, Any]"
"""An object of the API."""

GPU_RESOURCE: Final = re.compile(
    r"(?:nvidia\.com/(?:gpu|gpu\.shared|mig-[0-9]+g\.[0-9]+gb(?:\.[A-Za-z0-9.+-]+)?))"
)
"""Resources that are cards, or parts of them, of NVIDIA's device plugin."""
KUEUE_JOB_LABEL: Final = "kueue.x-k8s.io/job-uid"
"""Label of a Workload: the uid of the object that Kueue queues by it."""
KUEUE_MANAGED_LABEL: Final = "kueue.x-k8s.io/managed"
"""Label of a pod that Kueue queues by itself."""
MIRROR_ANNOTATION: Final = "kubernetes.io/config.mirror"
"""On a pod that a node runs from a file of its own."""
DEFAULT_GRACE_SECONDS: Final = 30

# RFC 1123 subdomains; kinds and groups are of the same letters.
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9]{0,62}")
_VERSION = re.compile(r"(?:[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?/)?v[a-z0-9]{1,30}")
_UID = re.compile(r"[0-9A-Za-z-]{1,64}")


class UnexpectedObject(ValueError):
    """An object is not of the shape that the API documents."""


@dataclass(frozen=True, slots=True)
class Reference:
    """An object, and no other of its name.

    Attributes:
        api_version: such as `batch/v1`, or `v1` for the core group.
        kind: such as `Job`.
        name: within its namespace.
        uid: which one of that name.
    """

    api_version: str
    kind: str
    name: str
    uid: str

    @property
    def group(self) -> str:
        """API group, empty for the core."""
        group, slash, _ = self.api_version.rpartition("/")
        return group if slash else ""

    @property
    def title(self) -> str:
        """For people: `Job.batch/train`, `Pod/train`."""
        return f"{self.kind}.{self.group}/{self.name}" if self.group else f"{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod. Times are Unix seconds.

    Attributes:
        reference: which.
        namespace: of it.
        node: that it runs on, or an empty string.
        phase: Pending, Running, Succeeded, Failed or Unknown.
        reason: why, in the API's word, or an empty string; NodeLost of a pod on a lost node.
        deletion: when it should be gone at the latest, or None where nobody has told it to go.
        grace: seconds between its SIGTERM and SIGKILL, as it was written.
        finalizers: what must let go before the object goes.
        owner: its controller, or None.
        devices: whether it may have a card or another device: a request of an extended resource, a
            claim, a runtime class, or a word to NVIDIA's runtime.
        mirror: whether a node runs it from a file of its own.
        queued: whether Kueue queues this very pod.
        created: when it was made.
        restarts: whether its node starts a container again that ended with a failure.
    """

    reference: Reference
    namespace: str
    node: str = ""
    phase: str = "Pending"
    reason: str = ""
    deletion: float | None = None
    grace: int = DEFAULT_GRACE_SECONDS
    finalizers: tuple[str, ...] = ()
    owner: Reference | None = None
    devices: bool = True
    mirror: bool = False
    queued: bool = False
    created: float = 0.0
    restarts: bool = True

    @property
    def uid(self) -> str:
        """Which pod of its name."""
        return self.reference.uid

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.namespace}/{self.reference.name}"

    @property
    def living(self) -> bool:
        """Whether its containers run, or may yet begin."""
        return self.phase not in ("Succeeded", "Failed")


def checked_name(name: str) -> str:
    """A name that may stand in an address.

    Raises:
        UnexpectedObject: it is not one of the API's.
    """
    if _NAME.fullmatch(name) is None or ".." in name:
        raise UnexpectedObject(f"{name[:80]!r} is not the name of an object")
    return name


def read_pod(found: Json) -> Pod:
    """A pod.

    Raises:
        UnexpectedObject: it is none.
    """
    metadata, spec, status = _part(found, "metadata"), _part(found, "spec"), _part(found, "status")
    grace = spec.get("terminationGracePeriodSeconds")
    labels, annotations = _part(metadata, "labels"), _part(metadata, "annotations")
    return Pod(
        reference=reference_of(found, api_version="v1", kind="Pod"),
        namespace=checked_name(_text(metadata, "namespace")),
        node=_text(spec, "nodeName"),
        phase=_text(status, "phase") or "Pending",
        reason=_text(status, "reason"),
        deletion=_time(metadata, "deletionTimestamp"),
        grace=grace if isinstance(grace, int) and grace >= 0 else DEFAULT_GRACE_SECONDS,
        finalizers=_texts(metadata, "finalizers"),
        owner=controller_of(found),
        devices=may_have_devices(spec),
        mirror=MIRROR_ANNOTATION in annotations,
        queued=labels.get(KUEUE_MANAGED_LABEL) == "true",
        created=_time(metadata, "creationTimestamp") or 0.0,
        restarts=_text(spec, "restartPolicy") != "Never",
    )


def reference_of(found: Json, *, api_version: str = "", kind: str = "") -> Reference:
    """Which object it is.

    Args:
        found: the object.
        api_version: where it does not say so itself, as in a list.
        kind: likewise.

    Raises:
        UnexpectedObject: it lacks a name or a uid.
    """
    metadata = _part(found, "metadata")
    return _reference(
        _text(found, "apiVersion") or api_version,
        _text(found, "kind") or kind,
        _text(metadata, "name"),
        uid=_text(metadata, "uid"),
    )


def controller_of(found: Json) -> Reference | None:
    """The one owner that manages an object, or None.

    Raises:
        UnexpectedObject: it names one that cannot be.
    """
    owners = _part(found, "metadata").get("ownerReferences")
    for owner in owners if isinstance(owners, list) else ():
        if isinstance(owner, dict) and owner.get("controller") is True:
            return _reference(
                _text(owner, "apiVersion"),
                _text(owner, "kind"),
                _text(owner, "name"),
                uid=_text(owner, "uid"),
            )
    return None


def may_have_devices(spec: Json) -> bool:
    """Whether a pod may have a card or another device, however it came by it."""
    if spec.get("resourceClaims") or spec.get("runtimeClassName"):
        return True
    volumes = spec.get("volumes")
    mounts = volumes if isinstance(volumes, list) else ()
    paths = [value_at(item, "hostPath.path") for item in mounts if isinstance(item, dict)]
    if any(path == "/" or f"{path}/".startswith("/dev/") for path in paths):
        return True
    lists = (spec.get("containers"), spec.get("initContainers"))
    containers = [item for found in lists if isinstance(found, list) for item in found]
    return any(_has_devices(item) for item in containers if isinstance(item, dict))


def is_ready(node: Json) -> bool:
    """Whether a node's kubelet reports."""
    return condition(node, "Ready") == "True"


def condition(found: Json, kind: str) -> str:
    """Status of one of an object's conditions (True, False, Unknown), or an empty string."""
    conditions = _part(found, "status").get("conditions")
    for item in conditions if isinstance(conditions, list) else ():
        if isinstance(item, dict) and item.get("type") == kind:
            return _text(item, "status")
    return ""


def value_at(found: Json, path: str) -> Any:
    """What stands at a dotted path, or None."""
    here: Any = found
    for name in path.split("."):
        here = here.get(name) if isinstance(here, dict) else None
    return here


def patch_at(path: str, value: object) -> dict[str, Any]:
    """A merge patch that writes a value at a dotted path."""
    patch: Any = value
    for name in reversed(path.split(".")):
        patch = {name: patch}
    return dict(patch)


def _reference(api_version: str, kind: str, name: str, *, uid: str) -> Reference:
    if (
        _VERSION.fullmatch(api_version) is None
        or _KIND.fullmatch(kind) is None
        or _UID.fullmatch(uid) is None
    ):
        raise UnexpectedObject(f"{api_version[:80]} {kind[:80]} {uid[:80]!r} is not an object")
    return Reference(api_version, kind, checked_name(name), uid)


def _has_devices(container: Json) -> bool:
    # Who is privileged sees every device of the node; what a whole map sets is not known here.
    if value_at(container, "securityContext.privileged") is True or container.get("envFrom"):
        return True
    resources, environment = _part(container, "resources"), container.get("env")
    asked = {*_part(resources, "limits"), *_part(resources, "requests")}
    words = environment if isinstance(environment, list) else ()
    # Extended resources are those of a domain; hugepages and the like have none.
    return any("/" in name for name in asked) or any(
        isinstance(word, dict)
        and word.get("name") == "NVIDIA_VISIBLE_DEVICES"
        and word.get("value") not in ("none", "void")
        for word in words
    )


def _part(found: Json, name: str) -> Json:
    if not isinstance(found, dict):
        raise UnexpectedObject(f"{type(found).__name__} where an object with {name} belongs")
    part = found.get(name)
    if part is None:
        return {}
    if not isinstance(part, dict):
        raise UnexpectedObject(f"{name} is {type(part).__name__}, not an object")
    return part


def _text(found: Json, name: str) -> str:
    value = found.get(name)
    return value if isinstance(value, str) else ""


def _texts(found: Json, name: str) -> tuple[str, ...]:
    values = found.get(name)
    return (
        tuple(item for item in values if isinstance(item, str))
        if (isinstance(values, list))
        else ()
    )


def _time(found: Json, name: str) -> float | None:
    text = _text(found, name)
    if not text:
        return None
    try:
        return dt.datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise UnexpectedObject(f"{name}: {text[:40]!r} is not a time") from error
