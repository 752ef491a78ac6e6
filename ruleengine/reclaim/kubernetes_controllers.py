"""Which controller has the last word over a pod, and how it is told to end its pods.

A pod that is just deleted comes back by its controller, and a controller that another one manages
is put right by that. So what counts is the uppermost owner, and only of those that are known here
or named in engine.yaml is it certain what a change does to the pods: a field called `suspend` alone
says nothing (a CronJob's leaves the running jobs alone).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from gpuwarden.platforms.kubernetes import patch_at, value_at
from gpuwarden.ruleengine.guards import Blocked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from gpuwarden.platforms.kubernetes import Json, Pod, Reference
    from gpuwarden.ruleengine.kubernetes_settings import ControllerSettings


class Act(StrEnum):
    """What is done to end a pod."""

    HOLD = "hold"
    """A field of its controller is set; the controller then deletes its pods."""
    SCALE = "scale"
    """Its controller is told to have no replicas."""
    EVICT = "evict"
    """The pod itself is evicted; nothing, or its controller, brings it back."""


@dataclass(frozen=True, slots=True)
class Hold:
    """How a controller is told to end its pods and start no more.

    Attributes:
        field: dotted path of what is set.
        value: what it is set to; None for the time of the decision.
        gang: whether its pods are parts of one job, some of which need no GPU.
    """

    field: str
    value: bool | int | str | None = True
    gang: bool = False

    def holds(self, found: Json) -> bool:
        """Whether the controller has been told so already."""
        value = value_at(found, self.field)
        return value is not None if self.value is None else value == self.value

    def patch(self, now: str) -> dict[str, Any]:
        """What tells it.

        Args:
            now: the time, for a field that holds one.
        """
        return patch_at(self.field, now if self.value is None else self.value)


_RUN_POLICY = Hold("spec.runPolicy.suspend", gang=True)
HOLDS: Final[Mapping[str, Hold]] = {
    "Job.batch": Hold("spec.suspend"),
    "JobSet.jobset.x-k8s.io": Hold("spec.suspend", gang=True),
    "TrainJob.trainer.kubeflow.org": Hold("spec.suspend", gang=True),
    "PyTorchJob.kubeflow.org": _RUN_POLICY,
    "TFJob.kubeflow.org": _RUN_POLICY,
    "MPIJob.kubeflow.org": _RUN_POLICY,
    "XGBoostJob.kubeflow.org": _RUN_POLICY,
    "PaddleJob.kubeflow.org": _RUN_POLICY,
    "JAXJob.kubeflow.org": _RUN_POLICY,
    "RayJob.ray.io": Hold("spec.suspend", gang=True),
    "RayCluster.ray.io": Hold("spec.suspend", gang=True),
    # What its own culler writes; the notebook's page shows it as stopped, with a button to start.
    "Notebook.kubeflow.org": Hold("metadata.annotations.kubeflow-resource-stopped", None),
}
"""Kind and group -> how it is told; the versions of a group agree on these fields."""
KUEUE_GROUP: Final = "kueue.x-k8s.io"
WORKLOAD: Final = Hold("spec.active", value=False, gang=True)
"""Kueue's own: deactivated, it suspends what it queues, and does not admit it again."""
SCALED: Final = frozenset({"Deployment.apps", "StatefulSet.apps", "ReplicaSet.apps"})
_STARTERS: Final = frozenset({"CronJob.batch"})
"""Owners that start others and leave them alone."""


def name_of(reference: Reference) -> str:
    """Kind and group, as the tables have them."""
    return f"{reference.kind}.{reference.group}" if reference.group else reference.kind


def holds_of(own: Sequence[ControllerSettings]) -> Mapping[str, Hold]:
    """The known controllers, and those of engine.yaml."""
    return {**HOLDS, **{item.kind: Hold(item.field, item.value) for item in own}}


def ruling(chain: Sequence[Reference]) -> tuple[Reference, ...]:
    """The owners that have a say over a pod, the last of which has the last word.

    Args:
        chain: from the pod's controller upwards.
    """
    for index, owner in enumerate(chain):
        if name_of(owner) in _STARTERS:
            return tuple(chain[:index])
    return tuple(chain)


def act_for_end(pod: Pod, chain: Sequence[Reference], holds: Mapping[str, Hold]) -> Act | Blocked:
    """How a pod is ended so that it stays ended.

    Args:
        pod: the pod.
        chain: `ruling` owners.
        holds: the known controllers.
    """
    if pod.mirror or (chain and name_of(chain[-1]) == "Node"):
        return Blocked(
            "static_pod",
            f"{pod.title} is run by its node from a file of its own, and no API ends it",
        )
    if not chain:
        queued = Blocked("queued_by_kueue", f"{pod.title} is queued by Kueue, without a Workload")
        return queued if pod.queued else Act.EVICT
    last = chain[-1]
    if name_of(last) in holds or name_of(last) in SCALED:
        return Act.HOLD if name_of(last) in holds else Act.SCALE
    if name_of(last) == "DaemonSet.apps":
        return Blocked("daemon_set", f"{pod.title} belongs to {last.title}, which every node has")
    return Blocked(
        "unknown_controller",
        f"{pod.title} is managed by {last.title}, and how that ends its pods is not known: it "
        "would bring them back. Say so under kubernetes.controllers in engine.yaml",
    )


def act_for_return(pod: Pod, chain: Sequence[Reference], owner: Json | None) -> Act | Blocked:
    """How a pod is ended so that its controller starts another one.

    Args:
        pod: the pod.
        chain: `ruling` owners.
        owner: the pod's controller, or None where it has none.
    """
    if pod.mirror or not chain or owner is None:
        return Blocked("no_controller", f"nothing would start {pod.title} again")
    if len(chain) == 1 and name_of(chain[0]) == "Job.batch":
        return _job_return(pod, owner)
    if name_of(chain[-1]) in SCALED:
        return Act.EVICT
    return Blocked(
        "unsure_return",
        f"whether {chain[-1].title} starts a single pod of its own again is not certain",
    )


def _job_return(pod: Pod, job: Json) -> Act | Blocked:
    """A Job starts a pod again as long as it may fail once more."""
    if _ignores_disruption(job):
        return Act.EVICT
    limit, failed = value_at(job, "spec.backoffLimit"), value_at(job, "status.failed")
    allowed = limit if isinstance(limit, int) else 6
    if (failed if isinstance(failed, int) else 0) + 1 > allowed:
        return Blocked(
            "backoff_limit",
            f"the Job of {pod.title} would fail for good: its evicted pod counts against "
            f"backoffLimit ({allowed}). A podFailurePolicy that ignores DisruptionTarget keeps it",
        )
    if value_at(job, "spec.backoffLimitPerIndex") is not None:
        return Blocked(
            "backoff_limit",
            f"the Job of {pod.title} counts failures for each index, and they are not known",
        )
    return Act.EVICT


def _ignores_disruption(job: Json) -> bool:
    """Whether the first rule of a Job's that an evicted pod meets is one that ignores it."""
    rules = value_at(job, "spec.podFailurePolicy.rules")
    for rule in rules if isinstance(rules, list) else ():
        if not isinstance(rule, dict):
            return False
        conditions = rule.get("onPodConditions")
        kinds = {
            item.get("type"): str(item.get("status", "True"))
            for item in (conditions if isinstance(conditions, list) else ())
            if isinstance(item, dict)
        }
        if kinds.get("DisruptionTarget") == "True":
            return rule.get("action") == "Ignore"
        if rule.get("onExitCodes"):
            # Which status the trainer leaves with is not known: this rule may be met first.
            return False
    return False
