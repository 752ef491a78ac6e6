"""Names, labels and annotations: what is gpuwarden's, and what Kueue calls things.

Every object of a policy begins with the name of its cohort, so that none is taken for somebody
else's, and carries two labels by which it is found again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpuwarden.kubernetes_clients import Kind

if TYPE_CHECKING:
    from gpuwarden.scheduling.policies import Policy

API_VERSION: Final = "kueue.x-k8s.io/v1beta2"
"""Served since Kueue 0.15, and what it stores since 0.16."""
RBAC: Final = "rbac.authorization.k8s.io/v1"
ADMISSION: Final = "admissionregistration.k8s.io/v1"
"""Has ValidatingAdmissionPolicies since Kubernetes 1.30."""

# Kueue's own.
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL: Final = "kueue.x-k8s.io/priority-class"
TIME_LABEL: Final = "kueue.x-k8s.io/max-exec-time-seconds"
GATES_ANNOTATION: Final = "kueue.x-k8s.io/admission-gated-by"

# Ours.
MANAGER: Final = "gpuwarden"
MANAGED_LABEL: Final = "app.kubernetes.io/managed-by"
POLICY_LABEL: Final = "gpuwarden.io/policy"
"""Value: the cohort of the policy whose object it is."""
TEAM_LABEL: Final = "gpuwarden.io/team"
USER_LABEL: Final = "gpuwarden.io/user"
RUN_LABEL: Final = "gpuwarden.io/run-id"
WINDOW_LABEL: Final = "gpuwarden.io/window"
WAITS_ANNOTATION: Final = "gpuwarden.io/waits"
"""On a Job without gates and without a queue: the gates that it would have, by commas."""
AFTER_ANNOTATION: Final = "gpuwarden.io/after"
"""Jobs that must have succeeded first, `namespace/name` by commas."""
NOT_BEFORE_ANNOTATION: Final = "gpuwarden.io/not-before"
"""Unix seconds."""
TASK_ANNOTATION: Final = "gpuwarden.io/task"
SUBMISSION_LABEL: Final = "gpuwarden.io/submission"
EPOCH_ANNOTATION: Final = "gpuwarden.io/epoch-seconds"
LEAVE_ANNOTATION: Final = "gpuwarden.io/leave"
"""On a Workload: the decision by which it was asked to leave, and how far that has come."""
LEAVE_LABEL: Final = "gpuwarden.io/leaving"
"""On the same: so that an interrupted decision is found again; value: `told`, `parked`, `returned`,
or `HELD`. Beside it stands the label `POLICY_LABEL`."""
HELD: Final = "held"
HOLD_ANNOTATION: Final = "gpuwarden.io/held"
"""On a Workload that waits until it is released: since when, and why."""
RELEASED_ANNOTATION: Final = "gpuwarden.io/released"
"""On a Workload: when it was released last, Unix seconds."""
HISTORY_ANNOTATION: Final = "gpuwarden.io/left"
"""On a Workload: when it had to leave before, Unix seconds, newest last."""
NOTES: Final = (LEAVE_ANNOTATION, HOLD_ANNOTATION, RELEASED_ANNOTATION, HISTORY_ANNOTATION)
"""All that is written on Workloads."""
BOOKINGS_ANNOTATION: Final = "gpuwarden.io/bookings"
"""On ClusterQueues and the cohort: ids of the bookings whose cards their quotas have moved."""
SHIFT_ANNOTATION: Final = "gpuwarden.io/shift"
"""On the same: what the quotas are without those bookings."""

NOTICE_GATE: Final = "gpuwarden.io/notice"
WINDOW_GATE: Final = "gpuwarden.io/window"
AFTER_GATE: Final = "gpuwarden.io/after"
BUDGET_CONTROLLER: Final = "gpuwarden.io/budget"

QUEUE: Final = "gpuwarden"
"""Of a team's LocalQueue, in its namespace."""

WORKLOADS: Final = Kind(API_VERSION, "workloads")
WORKLOAD_STATUS: Final = Kind(API_VERSION, "workloads/status")
CLUSTER_QUEUES: Final = Kind(API_VERSION, "clusterqueues")
COHORTS: Final = Kind(API_VERSION, "cohorts")
ADMISSION_CHECKS: Final = Kind(API_VERSION, "admissionchecks")
CHECK_STATUS: Final = Kind(API_VERSION, "admissionchecks/status")
JOBS: Final = Kind("batch/v1", "jobs")
LEASES: Final = Kind("coordination.k8s.io/v1", "leases")

KINDS: Final = {
    # The first is the last that is taken away, when nobody is there who would make it anew.
    "Lease": LEASES,
    "ResourceFlavor": Kind(API_VERSION, "resourceflavors"),
    "Cohort": COHORTS,
    "AdmissionCheck": ADMISSION_CHECKS,
    "ClusterQueue": CLUSTER_QUEUES,
    "LocalQueue": Kind(API_VERSION, "localqueues"),
    "WorkloadPriorityClass": Kind(API_VERSION, "workloadpriorityclasses"),
    "ValidatingAdmissionPolicy": Kind(ADMISSION, "validatingadmissionpolicies"),
    "ValidatingAdmissionPolicyBinding": Kind(ADMISSION, "validatingadmissionpolicybindings"),
    "ServiceAccount": Kind("v1", "serviceaccounts"),
    "ClusterRole": Kind(RBAC, "clusterroles"),
    "ClusterRoleBinding": Kind(RBAC, "clusterrolebindings"),
    "Role": Kind(RBAC, "roles"),
    "RoleBinding": Kind(RBAC, "rolebindings"),
    "PersistentVolumeClaim": Kind("v1", "persistentvolumeclaims"),
    "Deployment": Kind("apps/v1", "deployments"),
}
"""Everything that a policy comes to, in the order in which it is made."""


def flavor_name(policy: Policy, card: str) -> str:
    """The ResourceFlavor of a kind of cards."""
    return f"{policy.kueue.cohort}-{card}"


def plain_flavor_name(policy: Policy) -> str:
    """The ResourceFlavor of what is not rationed: processors and memory."""
    return f"{policy.kueue.cohort}.any"


def queue_name(policy: Policy, team: str) -> str:
    """The ClusterQueue of a team."""
    return f"{policy.kueue.cohort}-{team}"


def priority_name(policy: Policy, priority: str) -> str:
    """The WorkloadPriorityClass of a priority.

    A cohort has 20 characters at most and a priority 40: together they are a label's value yet.
    """
    return f"{policy.kueue.cohort}-{priority}"


def check_name(policy: Policy) -> str:
    """The AdmissionCheck of hard budgets."""
    return f"{policy.kueue.cohort}.budget"


def admission_name(policy: Policy, what: str) -> str:
    """An admission policy and its binding, by the kind of objects that it looks at."""
    return f"{policy.kueue.cohort}.{what}"


def controller_name(policy: Policy) -> str:
    """The controller's service account, roles, Deployment and Lease."""
    return f"{policy.kueue.cohort}-scheduler"


def marks(policy: Policy) -> dict[str, str]:
    """Labels of everything that a policy comes to."""
    return {MANAGED_LABEL: MANAGER, POLICY_LABEL: policy.kueue.cohort}


def selector(policy: Policy) -> str:
    """By which everything of a policy is found."""
    return ",".join(f"{key}={value}" for key, value in sorted(marks(policy).items()))
