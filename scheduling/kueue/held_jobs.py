"""Jobs that gpuwarden keeps out of their queues, seen from outside: whose they are, and given back.

A Workload is somebody else's object. What gpuwarden has written on it says which policy did, so
that `policy undo`, an apply without its team, or whatever controller comes next can let it go on
when nobody else is there to. What an operator has set to inactive carries no such mark. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpuwarden.platforms.kubernetes import value_at
from gpuwarden.scheduling.engines import FoundObject
from gpuwarden.scheduling.kueue import names
from gpuwarden.scheduling.kueue.leavings import Leaving, Phase
from gpuwarden.scheduling.kueue.objects import title
from gpuwarden.scheduling.kueue.shapes import part_at
from gpuwarden.scheduling.kueue.views import Act, Fault, Free, Verdict
from gpuwarden.scheduling.kueue.workloads import QueuedJob, owner_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuwarden.platforms.kubernetes import Json
    from gpuwarden.scheduling.policies import Policy

KIND: Final = "Workload"
_PARKED: Final = frozenset({Phase.PARKED.value, names.HELD})
"""Values of the label of those that were set to inactive by us."""
_WORDS: Final = 200


def selector(policy: Policy) -> str:
    """By which all Workloads are found on which a policy has written."""
    return f"{names.LEAVE_LABEL},{names.POLICY_LABEL}={policy.kueue.cohort}"


def held_object(policy: Policy, found: Json) -> FoundObject:
    """A Workload as the port of policies knows it: given back where its team's queue goes.

    Args:
        policy: whose mark is looked for.
        found: as the API has it.
    """
    queue = f"{value_at(found, 'metadata.namespace')}/{names.QUEUE}"
    annotations = part_at(found, "metadata.annotations")
    leaving = Leaving.decode(annotations.get(names.LEAVE_ANNOTATION))
    values = {"of": owner_name(found)}
    if is_parked(found):
        values["spec.active"] = "false"
    if leaving is not None:
        values["words"] = leaving.words[:_WORDS]
    return FoundObject(
        KIND,
        title(found),
        values,
        _policy_of(found) == policy.kueue.cohort,
        held_for=("LocalQueue", queue),
    )


def is_parked(found: Json) -> bool:
    """Whether it is we who have set a Workload to inactive."""
    labels = part_at(found, "metadata.labels")
    inactive = value_at(found, "spec.active") is False
    return inactive and labels.get(names.LEAVE_LABEL) in _PARKED


def release_of(found: Json, *, released: float | None = None) -> dict[str, Any] | None:
    """A merge patch that takes off what we have written, and lets go on what we have stopped.

    Args:
        found: a Workload as the API has it now.
        released: Unix time of a release by somebody's word: what went wrong before it counts no
            more. None where nobody is there to count.

    Returns:
        The patch, for this version of it alone; None where nothing of ours is there.
    """
    metadata = part_at(found, "metadata")
    annotations, labels = part_at(found, "metadata.annotations"), part_at(found, "metadata.labels")
    ours = names.NOTES if released is None else (names.HOLD_ANNOTATION,)
    notes: dict[str, str | None] = {key: None for key in ours if key in annotations}
    if not notes and names.LEAVE_LABEL not in labels:
        return None
    if released is not None:
        notes[names.RELEASED_ANNOTATION] = f"{released:.0f}"
    body: dict[str, Any] = {
        "metadata": {
            "uid": metadata.get("uid"),
            "resourceVersion": metadata.get("resourceVersion"),
            "annotations": notes,
            "labels": dict.fromkeys((names.LEAVE_LABEL, names.POLICY_LABEL)),
        }
    }
    if is_parked(found):
        body["spec"] = {"active": True}
    return body


def orphans(policy: Policy, workloads: Iterable[Json], objects: Iterable[Json]) -> Verdict:
    """Bring back what a policy keeps out of its queue and nobody else would ever bring back.

    Its team is of the policy no more, or it is of another queue now; or the policy that wrote on it
    is gone with all its queues.

    Args:
        policy: in force.
        workloads: all that there are.
        objects: all ClusterQueues and cohorts that there are.
    """
    spaces = {team.namespace for team in policy.teams}
    alive = {_policy_of(each) for each in objects} - {""}
    acts: list[Act] = []
    faults: list[Fault] = []
    for found in workloads:
        whose, space = _policy_of(found), str(value_at(found, "metadata.namespace"))
        if names.LEAVE_LABEL not in part_at(found, "metadata.labels") or not whose:
            continue
        if space in spaces and value_at(found, "spec.queueName") == names.QUEUE:
            continue  # of ours: followed like every other
        if whose in alive and whose != policy.kueue.cohort:
            continue  # another policy's, which is there
        patch = release_of(found)
        if patch is None:
            continue
        job = QueuedJob(
            id=f"{space}/{owner_name(found) or value_at(found, 'metadata.name')}",
            namespace=space,
            workload=str(value_at(found, "metadata.name")),
            uid=str(value_at(found, "metadata.uid")),
            version=str(value_at(found, "metadata.resourceVersion")),
        )
        acts.append(Free(job, patch))
        if is_parked(found):
            words = (
                f"{job.id} is kept out of its queue by policy {whose}, of which it is no more: it "
                "is brought back; where that is refused, `gpuwarden policy apply` does it"
            )
            faults.append(Fault("parked_by_nobody", job.id, words))
    return Verdict(tuple(acts), faults=tuple(faults))


def _policy_of(found: Json) -> str:
    return str(part_at(found, "metadata.labels").get(names.POLICY_LABEL, ""))
