"""What cards a Workload asks for, may run on, and was given. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.scheduling.kueue import names
from gpuwarden.scheduling.kueue.pods import cards_asked, whole
from gpuwarden.scheduling.kueue.shapes import part_at, rows_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.platforms.kubernetes import Json
    from gpuwarden.scheduling.policies import Policy


def templates_of(workload: Json) -> list[tuple[int, Json]]:
    """How many pods of a Workload there are to be of each shape, and the shapes."""
    return [
        (whole(row.get("count", 1)), part_at(row, "template.spec"))
        for row in rows_at(workload, "spec.podSets")
    ]


def resources_of(policy: Policy) -> frozenset[str]:
    """What cards of a policy are asked for by."""
    return frozenset(card.kueue.resource for card in policy.cards if card.kueue is not None)


def gpus_of(policy: Policy, workload: Json) -> int:
    """Cards that it has, where Kueue has admitted it, and else those that it asks for.

    Kueue admits fewer pods than asked for where a job lets it, and counts what has ended no more.
    """
    resources = resources_of(policy)
    given = rows_at(workload, "status.admission.podSetAssignments")
    if not given:
        return sum(count * cards_asked(spec, resources) for count, spec in templates_of(workload))
    over = {
        str(row.get("name")): whole(row.get("count"))
        for row in rows_at(workload, "status.reclaimablePods")
    }
    total = 0
    for row in given:
        usage, count = part_at(row, "resourceUsage"), max(1, whole(row.get("count", 1)))
        mine = sum(whole(usage.get(each, 0)) for each in resources)
        total += mine * max(0, count - over.get(str(row.get("name")), 0)) // count
    return total


def width_of(workload: Json) -> int:
    """How many pods there are to be at once; at least one."""
    return max(1, sum(count for count, _spec in templates_of(workload)))


def kinds_of(policy: Policy, workload: Json) -> tuple[str, ...]:
    """Kinds of cards on which its pods may run: by resource and by the nodes that they choose."""
    asked: set[str] = set()
    specs = [spec for _count, spec in templates_of(workload)]
    for spec in specs:
        for container in rows_at(spec, "containers"):
            for part in ("resources.limits", "resources.requests"):
                asked |= {*part_at(container, part)}
    return tuple(
        card.name
        for card in policy.cards
        if card.kueue is not None
        and card.kueue.resource in asked
        and all(_may_run(spec, card.kueue.node_labels) for spec in specs)
    )


def _may_run(spec: Json, labels: Mapping[str, str]) -> bool:
    chosen = spec.get("nodeSelector")
    if isinstance(chosen, dict) and any(
        labels.get(key, value) != value for key, value in chosen.items()
    ):
        return False
    path = "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
    terms = rows_at(spec, path)
    return not terms or any(_meets(term, labels) for term in terms)


def _meets(term: Json, labels: Mapping[str, str]) -> bool:
    """Whether a flavor's labels can meet a term; keys that it does not name decide nothing."""
    for rule in rows_at(term, "matchExpressions"):
        value, wanted = labels.get(str(rule.get("key"))), rule.get("values")
        if value is None or not isinstance(wanted, list | None):
            continue
        wanted = wanted or []
        if rule.get("operator") == "In" and value not in wanted:
            return False
        if rule.get("operator") == "NotIn" and value in wanted:
            return False
        if rule.get("operator") == "DoesNotExist":
            return False
    return True


def kind_given(policy: Policy, workload: Json) -> str:
    """The kind of cards that a Workload was given, by its flavor; empty where none was."""
    flavors = {names.flavor_name(policy, card.name): card.name for card in policy.cards}
    for row in rows_at(workload, "status.admission.podSetAssignments"):
        for flavor in part_at(row, "flavors").values():
            if isinstance(flavor, str) and flavor in flavors:
                return flavors[flavor]
    return ""
