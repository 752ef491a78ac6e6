"""A policy as Kueue's own objects. Pure.

Cards are ResourceFlavors; teams are ClusterQueues of one cohort, each with a LocalQueue in its
namespace; priorities are WorkloadPriorityClasses; a hard budget is an AdmissionCheck whose
controller we are. Cards that are nobody's own belong to the cohort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpuwarden.errors import InvalidInput
from gpuwarden.scheduling.engines import Remark, Rendering
from gpuwarden.scheduling.kueue import names
from gpuwarden.scheduling.kueue.admissions import admissions
from gpuwarden.scheduling.kueue.objects import engine_object
from gpuwarden.scheduling.kueue.quotas import POOL, shares_of
from gpuwarden.scheduling.kueue.rights import deployment, rights
from gpuwarden.scheduling.policies import policy_hash

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gpuwarden.scheduling.kueue.quotas import Shares
    from gpuwarden.scheduling.policies import Policy, Team
    from gpuwarden.scheduling.slots import Slot

Body = dict[str, Any]

NEWEST: Final = "0.19"
OLDEST: Final = (0, 15)
"""Since when v1beta2 is served."""
GATED: Final = (0, 19)
"""Since when gates are there without being switched on."""
PLAIN: Final = {"cpu": "1M", "memory": "1Pi", "ephemeral-storage": "1Pi"}
"""What is not rationed: Kueue admits no pod that asks for a resource of which it knows nothing."""


def render(policy: Policy, *, version: str | None = None) -> Rendering:
    """Say what a policy comes to.

    Args:
        policy: that checks without errors for Kueue.
        version: of Kueue, such as 0.19.2; None is the newest that is known.

    Raises:
        InvalidInput: this Kueue cannot do what the policy asks for.
    """
    known = version or NEWEST
    numbers = version_numbers(known)
    if numbers < OLDEST:
        raise InvalidInput(
            f"Kueue {known} does not serve {names.API_VERSION}: update it to 0.15 or later"
        )
    if falls_back(policy) and numbers < GATED:
        raise InvalidInput(
            f"kueue.own_preemption: fallback needs gates, which Kueue has since 0.19, and this is "
            f"{known}: update it, or write own_preemption: never"
        )
    bodies = [
        *bodies_of(policy),
        *admissions(policy),
        *rights(policy),
        *deployment(policy),
    ]
    order = {kind: place for place, kind in enumerate(names.KINDS)}
    bodies.sort(key=lambda body: order[body["kind"]])
    objects = tuple(engine_object(body, note=_note(policy, body)) for body in bodies)
    return Rendering("kueue", known, policy_hash(policy), objects, tuple(remarks(policy)))


def version_numbers(text: str) -> tuple[int, int]:
    """The first two numbers of a version; (0, 0) of what is none."""
    parts = text.removeprefix("v").split(".")
    if len(parts) < 2 or not all(part.isdecimal() for part in parts[:2]):
        return (0, 0)
    return int(parts[0]), int(parts[1])


def bodies_of(policy: Policy, slots: Iterable[Slot] = ()) -> Iterator[Body]:
    """Kueue's objects.

    Args:
        policy: the quotas.
        slots: bookings that are in force.
    """
    shares = shares_of(policy, slots)
    yield {
        **_body(policy, "ResourceFlavor", names.plain_flavor_name(policy)),
        "spec": {},
    }
    for card in policy.cards:
        yield {
            **_body(policy, "ResourceFlavor", names.flavor_name(policy, card.name)),
            "spec": {
                "nodeLabels": dict(sorted((card.kueue.node_labels if card.kueue else {}).items()))
            },
        }
    for priority in sorted(policy.priorities, key=lambda each: (each.value, each.name)):
        yield {
            **_body(policy, "WorkloadPriorityClass", names.priority_name(policy, priority.name)),
            "value": priority.value,
            "description": priority.description or f"Priority {priority.name} of the policy.",
        }
    if checked_teams(policy):
        yield {
            **_body(policy, "AdmissionCheck", names.check_name(policy)),
            "spec": {"controllerName": names.BUDGET_CONTROLLER},
        }
    yield cohort(policy, shares)
    for team in policy.teams:
        yield cluster_queue(policy, team, shares)
        yield {
            **_body(policy, "LocalQueue", names.QUEUE, team.namespace),
            "spec": {"clusterQueue": names.queue_name(policy, team.name)},
        }


def cohort(policy: Policy, shares: Shares) -> Body:
    """The cohort, with the cards that are nobody's own."""
    groups = []
    for resource, cards in _by_resource(policy).items():
        flavors = [
            {
                "name": names.flavor_name(policy, card),
                "resources": [{"name": resource, "nominalQuota": str(shares[POOL, card].own)}],
            }
            for card in cards
            if shares[POOL, card].own
        ]
        if flavors:
            groups.append({"coveredResources": [resource], "flavors": flavors})
    return {**_body(policy, "Cohort", policy.kueue.cohort), "spec": {"resourceGroups": groups}}


def cluster_queue(policy: Policy, team: Team, shares: Shares) -> Body:
    """A team's queue, with its quotas."""
    groups: list[Body] = [
        {
            "coveredResources": list(PLAIN),
            "flavors": [
                {
                    "name": names.plain_flavor_name(policy),
                    "resources": [
                        {"name": name, "nominalQuota": quota, "lendingLimit": "0"}
                        for name, quota in PLAIN.items()
                    ],
                }
            ],
        }
    ]
    for resource, cards in _by_resource(policy).items():
        flavors = []
        for card in cards:
            share = shares[team.name, card]
            if share.own + share.borrows:
                quota = {
                    "name": resource,
                    "nominalQuota": str(share.own),
                    "borrowingLimit": str(share.borrows),
                    "lendingLimit": str(share.lends),
                }
                name = names.flavor_name(policy, card)
                flavors.append({"name": name, "resources": [quota]})
        if flavors:
            groups.append({"coveredResources": [resource], "flavors": flavors})
    spec: Body = {
        "cohortName": policy.kueue.cohort,
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": team.namespace}},
        "queueingStrategy": "BestEffortFIFO",
        "resourceGroups": groups,
        # The cheapest kind that has room, borrowed or not; another kind before anybody has to go.
        "flavorFungibility": {"whenCanBorrow": "MayStopSearch", "whenCanPreempt": "TryNextFlavor"},
        "preemption": _preemption(policy),
        "fairSharing": {"weight": str(team.share)},
    }
    if team.name in checked_teams(policy):
        rule = {"name": names.check_name(policy)}
        spec["admissionChecksStrategy"] = {"admissionChecks": [rule]}
    return {**_body(policy, "ClusterQueue", names.queue_name(policy, team.name)), "spec": spec}


def _preemption(policy: Policy) -> Body:
    fallback = falls_back(policy)
    return {
        "withinClusterQueue": "LowerPriority" if fallback and _is_ladder(policy) else "Never",
        "reclaimWithinCohort": "Any" if fallback else "Never",
        "borrowWithinCohort": {"policy": "Never"},
    }


def falls_back(policy: Policy) -> bool:
    """Whether Kueue may end jobs by itself."""
    return policy.preemption is not None and policy.kueue.own_preemption == "fallback"


def gates_notices(policy: Policy, priority: str) -> bool:
    """Whether jobs of a priority wait behind a gate until those that leave for them were told.

    Otherwise Kueue, where it may end jobs by itself, would do so before anybody was.
    """
    found = policy.priority(priority)
    return falls_back(policy) and found is not None and bool(found.preempts or _borrowed(policy))


def _borrowed(policy: Policy) -> bool:
    return any(team.borrow for team in policy.teams)


def _is_ladder(policy: Policy) -> bool:
    """Whether each priority preempts exactly all lower ones: all that Kueue can be told."""
    return all(
        {*each.preempts} == {other.name for other in policy.priorities if other.value < each.value}
        for each in policy.priorities
    )


def checked_teams(policy: Policy) -> frozenset[str]:
    """Teams that start nothing before their budget was looked at."""
    return frozenset(each.team for each in policy.budgets if each.kind == "hard")


def remarks(policy: Policy) -> Iterator[Remark]:
    """What Kueue cannot do of a policy, and who does it."""
    if falls_back(policy) and not _is_ladder(policy):
        yield Remark(
            "kueue.own_preemption",
            "Kueue ends jobs of every lower priority or of none; here some priorities preempt "
            "others than exactly all lower ones, so within a team's queue it ends none, and only "
            "gpuwarden's controller asks jobs to leave",
        )
    if policy.preemption is not None and not falls_back(policy):
        yield Remark(
            "kueue.own_preemption",
            "Kueue ends nothing by itself: while gpuwarden's controller is down, high priorities "
            "go first in the queue and nobody has to leave for them",
        )
    for index, budget in enumerate(policy.budgets):
        if budget.kind == "hard":
            yield Remark(
                f"budgets[{index}]",
                f"Kueue knows no budgets: jobs of {budget.team} start once gpuwarden's controller "
                "has agreed, and none starts while it is down",
            )
    if policy.windows:
        yield Remark(
            "windows",
            "Kueue knows no hours: jobs wait behind a gate that gpuwarden's controller opens "
            "(Kueue 0.19 or later), and are asked to leave by it",
        )
    if policy.bookings is not None:
        yield Remark(
            "bookings",
            "Kueue knows no bookings: for its time gpuwarden's controller gives the team more of "
            "the quota and the others less, and undoes it afterwards; nodes are not reserved",
        )
    if policy.kueue.volume is None:
        yield Remark(
            "kueue.volume",
            "jobs have no volume: whoever has to leave begins anew unless it uploads its states "
            "(`gpuwarden train --upload`)",
        )


def _note(policy: Policy, body: Body) -> str:
    match body["kind"]:
        case "ValidatingAdmissionPolicy":
            return "It needs Kubernetes 1.30; kueue.admission: warn refuses nothing and warns."
        case "LocalQueue":
            return f"The namespace {body['metadata']['namespace']} must be there."
        case "Deployment":
            space, name = policy.kueue.namespace, f"{policy.kueue.cohort}-policy"
            return (
                f"It reads this file: kubectl -n {space} create configmap {name} "
                "--from-file=policy.yaml=FILE"
                + (
                    f"; and the token of the engine: kubectl -n {space} create secret generic "
                    f"{policy.kueue.cohort}-engine-token --from-file=token=FILE"
                    if policy.kueue.engine_url
                    else ""
                )
            )
        case _:
            return ""


def _by_resource(policy: Policy) -> dict[str, list[str]]:
    """Resource -> kinds of cards, in the order of the policy."""
    found: dict[str, list[str]] = {}
    for card in policy.cards:
        if card.kueue is not None:
            found.setdefault(card.kueue.resource, []).append(card.name)
    return found


def _body(policy: Policy, kind: str, name: str, space: str | None = None) -> Body:
    metadata: Body = {"name": name, "labels": names.marks(policy)}
    if space is not None:
        metadata["namespace"] = space
    return {"apiVersion": names.API_VERSION, "kind": kind, "metadata": metadata}
