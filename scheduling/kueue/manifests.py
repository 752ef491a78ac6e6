"""A task as a Job of Kubernetes. Pure.

The Job is an ordinary one: it waits suspended for Kueue, and runs to its end also where no daemon
of gpuwarden does. The training is the container's first process, without a shell before it, so that
it gets the signal; it leaves with 75, which counts as no failure, and comes back from its volume.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.errors import RefusedAction
from gpuwarden.job_files import EXIT_FAULT, EXIT_HOLD, EXIT_REQUEUE
from gpuwarden.scheduling.kueue import names
from gpuwarden.scheduling.kueue.renderings import gates_notices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.scheduling.policies import Card, Policy, Team
    from gpuwarden.scheduling.tasks import Task

Body = dict[str, Any]

CONTAINER: Final = "train"
EXIT_USAGE: Final = 2
"""Of a command line that gpuwarden does not understand."""
MAX_TASK_BYTES: Final = 32 * 1024
LEAST_GRACE: Final = 60.0
MOST_GRACE: Final = 4 * 3600.0
UNKNOWN_GRACE: Final = 600.0
MARGIN: Final = 1.2
"""On an epoch and a save: neither is known to the second."""
FATAL_EXITS: Final = (EXIT_FAULT, EXIT_USAGE, EXIT_HOLD)
RETRIES: Final = 6
"""Ends by a kill, a crash, or without a state, before the Job is given up."""
KEPT_SECONDS: Final = 7 * 86_400
"""A Job that has ended is there for so long."""
_LONGEST = 40
"""Of what a Job's name keeps of the task's: pods add to it, and 63 is a label's end."""


def job_of(policy: Policy, task: Task, *, token: str, gated: bool, noticed: bool) -> Body:
    """The Job of a task.

    Args:
        policy: of the cluster.
        task: what is to be run.
        token: of this submission.
        gated: whether this Kueue has gates; without, a Job that waits has no queue yet.
        noticed: whether our controller is there: only then does a Job wait for it to give notices.

    Raises:
        RefusedAction: the policy has no such team, priority or kind of cards, or no image is named.
    """
    team, priority = policy.team(task.team), policy.priority(task.priority)
    if team is None or priority is None:
        raise RefusedAction("unknown_name", f"the policy has no {task.team} or {task.priority}")
    if task.image is None:
        known = ", ".join(each.name for each in policy.images) or "none"
        raise RefusedAction("no_image", f"a pod needs an image: --image; the policy has {known}")
    cards = fitting_cards(policy, task)
    gates = gates_of(policy, task, noticed=noticed and gated)
    labels = _labels(policy, task, team=team, token=token)
    annotations = _annotations(task, gates, gated=gated)
    if gated or not gates:
        labels[names.QUEUE_LABEL] = names.QUEUE
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(task, token),
            "namespace": team.namespace,
            "labels": labels,
            "annotations": annotations,
        },
        "spec": {
            "suspend": True,
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": RETRIES,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            # Two at once would write the same states.
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    _exits("Ignore", EXIT_REQUEUE),
                    # A node that is drained, or lost, is no fault of the training's.
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                    # What it says itself will not get better. Whatever else ends it, a kill above
                    # all, may have been an eviction: that counts against the limit, no more.
                    _exits("FailJob", *FATAL_EXITS),
                ]
            },
            "template": {
                "metadata": {"labels": _of_people(labels)},
                "spec": _pod(policy, task, cards),
            },
        },
    }


def job_name(task: Task, token: str) -> str:
    """The Job's name: the task's, as Kubernetes takes it, and part of the submission's token."""
    plain = re.sub(r"[^a-z0-9]+", "-", task.name.lower()).strip("-")[:_LONGEST].strip("-")
    return f"{plain or 'task'}-{token[:10]}"


def fitting_cards(policy: Policy, task: Task) -> list[Card]:
    """Kinds of cards that a task may run on, in the policy's order; all of one resource.

    Raises:
        RefusedAction: there is none.
    """
    found = [
        card
        for card in policy.cards
        if card.kueue is not None
        and task.gpu_type in (None, card.name)
        and (task.memory_bytes is None or task.memory_bytes <= card.memory)
    ]
    if not found:
        raise RefusedAction("no_card", f"no kind of cards of the policy will do for {task.name}")
    resource = found[0].kueue and found[0].kueue.resource
    return [card for card in found if card.kueue is not None and card.kueue.resource == resource]


def gates_of(policy: Policy, task: Task, *, noticed: bool) -> tuple[str, ...]:
    """Gates behind which a task waits until our controller opens them."""
    found = []
    if task.window is not None or task.not_before is not None:
        found.append(names.WINDOW_GATE)
    if task.after:
        found.append(names.AFTER_GATE)
    if noticed and gates_notices(policy, task.priority):
        found.append(names.NOTICE_GATE)
    return tuple(found)


def grace_seconds(policy: Policy, task: Task) -> int:
    """Between the signal and the end: an epoch and a save, with a margin."""
    if task.epoch_seconds is not None:
        wanted = MARGIN * (task.epoch_seconds + (task.save_seconds or LEAST_GRACE))
    elif policy.preemption is not None:
        wanted = policy.preemption.deadline
    else:
        wanted = UNKNOWN_GRACE
    return math.ceil(min(MOST_GRACE, max(LEAST_GRACE, wanted)))


def _labels(policy: Policy, task: Task, *, team: Team, token: str) -> dict[str, str]:
    labels = {
        **names.marks(policy),
        names.PRIORITY_LABEL: names.priority_name(policy, task.priority),
        names.TEAM_LABEL: team.name,
        names.RUN_LABEL: _label(task.run_id),
        names.SUBMISSION_LABEL: token,
    }
    # Names of people may hold what no label may.
    if (user := _label(task.user)) == task.user:
        labels[names.USER_LABEL] = user
    if task.window is not None:
        labels[names.WINDOW_LABEL] = task.window
    if task.time_limit_seconds is not None:
        labels[names.TIME_LABEL] = str(math.ceil(task.time_limit_seconds))
    return labels


def _label(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:63].strip("-_.") or "unknown"


def _of_people(labels: dict[str, str]) -> dict[str, str]:
    kept = (names.MANAGED_LABEL, names.TEAM_LABEL, names.USER_LABEL, names.RUN_LABEL)
    return {key: value for key, value in labels.items() if key in kept}


def _annotations(task: Task, gates: Sequence[str], *, gated: bool) -> dict[str, str]:
    document = task.as_document()
    text = json.dumps(document, sort_keys=True)
    if len(text.encode()) > MAX_TASK_BYTES:
        text = json.dumps({k: v for k, v in document.items() if k != "estimate"}, sort_keys=True)
    found = {names.TASK_ANNOTATION: text}
    if task.epoch_seconds is not None:
        found[names.EPOCH_ANNOTATION] = f"{task.epoch_seconds:g}"
    if task.not_before is not None:
        found[names.NOT_BEFORE_ANNOTATION] = f"{task.not_before:.0f}"
    if task.after:
        found[names.AFTER_ANNOTATION] = ",".join(task.after)
    if gates:
        key = names.GATES_ANNOTATION if gated else names.WAITS_ANNOTATION
        found[key] = ",".join(gates)
    return found


def _exits(action: str, *codes: int) -> Body:
    return {
        "action": action,
        "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": list(codes)},
    }


def _pod(policy: Policy, task: Task, cards: Sequence[Card]) -> Body:
    resource = cards[0].kueue.resource if cards[0].kueue is not None else ""
    volumes, mounts = _volumes(policy)
    container: Body = {
        "name": CONTAINER,
        "image": task.image,
        # An array, and no shell: it is PID 1 and gets SIGTERM itself.
        "command": list(task.command),
        "workingDir": task.directory,
        "resources": {"limits": {resource: str(task.gpus)}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }
    spec: Body = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_seconds(policy, task),
        "automountServiceAccountToken": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": volumes,
    }
    return spec | _placed(policy, cards)


def _placed(policy: Policy, cards: Sequence[Card]) -> Body:
    """On which nodes: those of the kinds that will do; nothing where all will."""
    labels = [dict(card.kueue.node_labels) for card in cards if card.kueue is not None]
    if len(labels) == 1:
        return {"nodeSelector": labels[0]}
    same = [
        card
        for card in policy.cards
        if card.kueue is not None and cards[0].kueue is not None
        if card.kueue.resource == cards[0].kueue.resource
    ]
    if len(same) == len(cards):
        return {}
    terms = [
        {
            "matchExpressions": [
                {"key": key, "operator": "In", "values": [value]} for key, value in each.items()
            ]
        }
        for each in labels
    ]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"affinity": {"nodeAffinity": required}}


def _volumes(policy: Policy) -> tuple[list[Body], list[Body]]:
    # Workers of a data loader pass batches through it, and 64 MB are soon full.
    volumes: list[Body] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[Body] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108 - the pod's own
    if policy.kueue.volume is not None:
        claim = {"claimName": policy.kueue.volume.claim}
        volumes.append({"name": "work", "persistentVolumeClaim": claim})
        mounts.append({"name": "work", "mountPath": policy.kueue.volume.mount})
    folder = policy.kueue.job_files
    if folder is not None:
        volumes.append({"name": "gpuwarden", "hostPath": {"path": folder}})
        mounts += [
            {"name": "gpuwarden", "mountPath": "/run/gpuwarden/jobs", "subPath": "jobs"},
            {
                "name": "gpuwarden",
                "mountPath": "/run/gpuwarden/requests",
                "subPath": "requests",
                "readOnly": True,
            },
        ]
    return volumes, mounts
