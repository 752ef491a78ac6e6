"""What the Kubernetes API tells of pods that wait for a node, and of what nodes have to give.

As the scheduler sees it: requests, selectors, required affinity to nodes, taints. What is not told
apart here (affinity between pods, volumes, other devices) is said so and never guessed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.platforms.kubernetes import (
    GPU_RESOURCE,
    Pod,
    UnexpectedObject,
    is_ready,
    read_pod,
    value_at,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from gpuwarden.platforms.kubernetes import Json

_QUANTITY = re.compile(
    r"(?P<number>[0-9]{1,18}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})"
    r"(?P<suffix>[numkMGTPE]?|[KMGTPE]i|[eE][+-]?[0-9]{1,2})"
)
_SUFFIXES: Final = {
    "": 1.0,
    **{letter: 10.0**power for letter, power in zip("num", (-9, -6, -3), strict=True)},
    **{letter: 1000.0**power for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", 1)},
}
_PLAIN: Final = frozenset({"cpu", "memory", "ephemeral-storage", "pods"})
_GROUP_LABELS: Final = (
    "scheduling.x-k8s.io/pod-group",
    "pod-group.scheduling.sigs.k8s.io/name",
    "kueue.x-k8s.io/pod-group-name",
)
_GROUP_ANNOTATIONS: Final = ("scheduling.k8s.io/group-name",)
# What the scheduler says of nodes that have room, but not for this pod, and is not read here.
_ELSE: Final = re.compile(
    r"volume|persistentvolumeclaim|topology|host ?port|free ports", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Requests:
    """What a pod takes from a node.

    Attributes:
        cards: resource -> how many, such as nvidia.com/gpu -> 2.
        cpus: in cores.
        memory: in bytes.
        others: further resources that it asks for.
    """

    cards: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    cpus: float = 0.0
    memory: float = 0.0
    others: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Claimant:
    """A pod, as the scheduler sees it.

    Attributes:
        pod: which.
        requests: what it takes.
        waits: whether it waits for cards: unscheduled, and because of them.
        priority: higher ones are served first.
        nominated: the node on which others are being ended for it, or an empty string.
        accepts: whether it may run on a node; None where it waits for none.
        unknown: what of its wishes is not told apart here, or an empty string.
    """

    pod: Pod
    requests: Requests
    waits: bool = False
    priority: int = 0
    nominated: str = ""
    accepts: Callable[[Offer], bool] = lambda _offer: False
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """A node, as the scheduler sees it.

    Attributes:
        name: of it.
        usable: whether pods can start on it.
        cards: resource -> how many it has for pods.
        cpus, memory: for pods; memory in bytes.
        labels: of it.
        taints: (key, value, effect) that keep pods away.
        hosts: other words for it: its addresses and host name.
    """

    name: str
    usable: bool
    cards: Mapping[str, int]
    cpus: float
    memory: float
    labels: Mapping[str, str]
    taints: tuple[tuple[str, str, str], ...] = ()
    hosts: frozenset[str] = frozenset()


def quantity(value: object) -> float:
    """A quantity of the API, such as `500m`, `16Gi` or 2.

    Raises:
        UnexpectedObject: it is none.
    """
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise UnexpectedObject(f"{str(value)[:40]!r} is not a quantity")
    suffix = match["suffix"]
    if suffix not in _SUFFIXES:
        return float(match["number"]) * 10.0 ** int(suffix[1:])
    return float(match["number"]) * _SUFFIXES[suffix]


def read_offer(node: Json) -> Offer:
    """A node.

    Raises:
        UnexpectedObject: it is none.
    """
    allocatable = _dict(value_at(node, "status.allocatable"))
    taints = [item for item in _list(value_at(node, "spec.taints")) if isinstance(item, dict)]
    addresses = _list(value_at(node, "status.addresses"))
    return Offer(
        name=str(value_at(node, "metadata.name") or ""),
        usable=is_ready(node) and value_at(node, "spec.unschedulable") is not True,
        cards=_cards(allocatable),
        cpus=quantity(allocatable["cpu"]) if "cpu" in allocatable else math.inf,
        memory=quantity(allocatable["memory"]) if "memory" in allocatable else math.inf,
        labels=_dict(value_at(node, "metadata.labels")),
        taints=tuple(
            (str(item.get("key", "")), str(item.get("value", "")), str(item.get("effect", "")))
            for item in taints
        ),
        hosts=frozenset(str(item.get("address")) for item in addresses if isinstance(item, dict)),
    )


def read_claimant(found: Json) -> Claimant:
    """A pod, and what it wants.

    Raises:
        UnexpectedObject: it is none.
    """
    pod, spec = read_pod(found), _dict(found.get("spec"))
    requests = _requests(spec)
    message = _unschedulable(found)
    waits = bool(
        requests.cards
        and not pod.node
        and pod.phase == "Pending"
        and pod.deletion is None
        and any(f"Insufficient {name}" in message for name in requests.cards)
    )
    nominated = value_at(found, "status.nominatedNodeName")
    priority = spec.get("priority")
    return Claimant(
        pod,
        requests,
        waits=waits,
        priority=priority if isinstance(priority, int) else 0,
        nominated=nominated if isinstance(nominated, str) else "",
        accepts=_acceptance(spec),
        unknown=_unknown(found, requests, message) if waits else "",
    )


def _unschedulable(found: Json) -> str:
    """Why the scheduler has found no node, in its words; empty where it says no such thing."""
    for item in _list(value_at(found, "status.conditions")):
        if (
            isinstance(item, dict)
            and item.get("type") == "PodScheduled"
            and item.get("status") == "False"
            and item.get("reason") == "Unschedulable"
        ):
            return str(item.get("message") or "")
    return ""


def _requests(spec: Json) -> Requests:
    """The sum of the containers, or what one of the first asks for, and the pod's overhead."""

    def of(container: object) -> dict[str, float]:
        resources = _dict(_dict(container).get("resources"))
        # Who names only a limit requests it.
        named = {**_dict(resources.get("limits")), **_dict(resources.get("requests"))}
        return {name: quantity(value) for name, value in named.items()}

    total: dict[str, float] = {}
    sidecars: dict[str, float] = {}
    for container in _list(spec.get("containers")):
        _add(total, of(container))
    for container in _list(spec.get("initContainers")):
        if _dict(container).get("restartPolicy") == "Always":
            _add(sidecars, of(container))
            _add(total, of(container))
    for container in _list(spec.get("initContainers")):
        if _dict(container).get("restartPolicy") != "Always":
            first = dict(sidecars)
            _add(first, of(container))
            total |= {name: max(value, total.get(name, 0.0)) for name, value in first.items()}
    _add(total, {name: quantity(value) for name, value in _dict(spec.get("overhead")).items()})
    return Requests(
        cards=_cards(total),
        cpus=total.get("cpu", 0.0),
        memory=total.get("memory", 0.0),
        others=frozenset(
            name
            for name, value in total.items()
            if value and name not in _PLAIN and GPU_RESOURCE.fullmatch(name) is None
        ),
    )


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        total[name] = total.get(name, 0.0) + value


def _cards(named: Mapping[str, Any]) -> dict[str, int]:
    """Kinds of cards of which there is any."""
    counts = {
        name: int(quantity(value)) for name, value in named.items() if GPU_RESOURCE.fullmatch(name)
    }
    return {name: count for name, count in counts.items() if count}


def _unknown(found: Json, requests: Requests, message: str) -> str:
    """What of a pod's wishes is not told apart here."""
    spec = _dict(found.get("spec"))
    labels, notes = (
        _dict(value_at(found, f"metadata.{part}")) for part in ("labels", "annotations")
    )
    affinity = _dict(spec.get("affinity"))
    spread = [
        item
        for item in _list(spec.get("topologySpreadConstraints"))
        if _dict(item).get("whenUnsatisfiable") != "ScheduleAnyway"
    ]
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    together = any(name in labels for name in _GROUP_LABELS) or any(
        name in notes for name in _GROUP_ANNOTATIONS
    )
    doubts = (
        (len(requests.cards) != 1, "it asks for cards of several kinds"),
        (bool(requests.others), f"it also asks for {', '.join(sorted(requests.others))[:120]}"),
        (bool(spec.get("resourceClaims")), "it claims devices by resourceClaims"),
        (together, "it is one of several pods that start together"),
        (
            any(
                _dict(affinity.get(kind)).get(required)
                for kind in ("podAffinity", "podAntiAffinity")
            ),
            "it must be near to, or apart from, other pods",
        ),
        (bool(spread), "it must be spread over nodes"),
        (_ELSE.search(message) is not None, "its volumes, ports or spread keep it from nodes"),
    )
    return next((text for holds, text in doubts if holds), "")


def _acceptance(spec: Json) -> Callable[[Offer], bool]:
    """Whether a pod's selector, required affinity and tolerations allow a node."""
    selector = _dict(spec.get("nodeSelector"))
    terms = _list(
        value_at(
            spec,
            "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
            ".nodeSelectorTerms",
        )
    )
    tolerations = [item for item in _list(spec.get("tolerations")) if isinstance(item, dict)]

    def accepts(offer: Offer) -> bool:
        return (
            selector.items() <= offer.labels.items()
            and (not terms or any(_term(_dict(term), offer) for term in terms))
            and all(_tolerated(taint, tolerations) for taint in offer.taints)
        )

    return accepts


def _term(term: Json, offer: Offer) -> bool:
    """All expressions of a term; one without any matches no node."""
    labels, fields = _list(term.get("matchExpressions")), _list(term.get("matchFields"))
    return bool(labels or fields) and (
        all(_expression(_dict(item), offer.labels) for item in labels)
        and all(_expression(_dict(item), {"metadata.name": offer.name}) for item in fields)
    )


def _expression(item: Json, values: Mapping[str, str]) -> bool:
    value = values.get(str(item.get("key")))
    wanted = [str(word) for word in _list(item.get("values"))]
    match item.get("operator"):
        case "In":
            holds = value in wanted
        case "NotIn":
            holds = value not in wanted
        case "Exists":
            holds = value is not None
        case "DoesNotExist":
            holds = value is None
        case "Gt" | "Lt" as operator:
            holds = _compared(value, wanted, operator)
        case _:
            holds = False
    return holds


def _compared(value: str | None, wanted: list[str], operator: str) -> bool:
    try:
        have, limit = int(value or ""), int(wanted[0])
    except (ValueError, IndexError):
        return False
    return have > limit if operator == "Gt" else have < limit


def _tolerated(taint: tuple[str, str, str], tolerations: Iterable[Json]) -> bool:
    key, value, effect = taint
    if effect == "PreferNoSchedule":
        return True
    for item in tolerations:
        if item.get("effect") not in (None, "", effect):
            continue
        everything = not item.get("key") and item.get("operator") == "Exists"
        named = item.get("key") == key and (
            item.get("operator") == "Exists" or str(item.get("value") or "") == value
        )
        if everything or named:
            return True
    return False


def _dict(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []
