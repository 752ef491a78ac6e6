"""Label sets and expressions that several boards share, so that all of them mean the same.

Every selector carries the scrape job and `cluster`, which is `.*` where there is one cluster: that
matches series without the label as well.
"""

from __future__ import annotations

CLUSTER = 'cluster=~"$cluster"'
NODE = f'job="gpuwarden",{CLUSTER},instance=~"$node"'
"""Of the exporters' series: the chosen nodes."""

CARD = f'{NODE},gpu=~"$gpu"'
"""Likewise, of the chosen cards."""

ENGINE = f'job="gpuwarden-engine",{CLUSTER}'
"""Of the engine's series."""

RULED = f'{ENGINE},rule=~"$rule"'
"""Of the engine's series that name a rule: the chosen rules."""

SCHEDULER = f'job="gpuwarden-scheduler",{CLUSTER}'
"""Of the scheduler's series."""

SCHEDULED = f'{SCHEDULER},team=~"$team"'
"""Of the scheduler's series that name a team: the chosen teams."""

RECORDED = CLUSTER
"""Of recorded series, which carry no scrape job."""

RECORDED_NODE = f'{RECORDED},instance=~"$node"'
"""Likewise, of the chosen nodes."""

TEAMS = f'user:team:info{{{RECORDED},team=~"$team"}}'
"""1 for each user of the chosen teams who runs a job. The team `none` is of users whom the
directory does not know."""

OWNERS = (
    f'(max by (instance, job_id, user) (gpu_job_info{{{NODE},user=~"$user"}}) '
    f"and on (user) {TEAMS})"
)
"""1 for each job on each chosen node, of the chosen users and teams."""

USERS = f"max by (job_id, user) {OWNERS}"
"""The same once per job: across nodes only after max by (job_id), a job may run on several."""

EVERY_JOB = f"max by (job_id) {OWNERS}"

ENDS = 'action="terminate",mode="enforce",outcome=~"verified|incomplete|failed|refused"'
"""Labels of decisions that are over; those under way would be counted once more at their end."""

NODES = f"max by (instance) (up{{{NODE}}})"
"""1 for each node that answers scrapes, 0 for each that does not."""

LIT = f"(gpuwarden_snapshot_timestamp_seconds{{{NODE}}} > time() - 15)"
"""Nodes with a snapshot of the last 15 seconds: the engine judges no other."""

APPLICATIONS_XIDS = "13|31|43|45"
"""XIDs that a program causes and no card: a fault in a kernel, or an end that was wanted."""


def card_errors(where: str = NODE) -> str:
    """Cards with errors of their hardware in the shown time, as (instance, gpu, uuid)."""
    by = "(instance, gpu, uuid)"
    memory = f'increase(gpu_ecc_errors_total{{{where},error="uncorrected"}}[$__range]) > 0'
    heard = f'gpu_xid_last_timestamp_seconds{{{where},xid!~"{APPLICATIONS_XIDS}"}}'
    return f"(max by {by} ({memory}) or max by {by} (time() - {heard} < $__range_s))"


def highest(count: int, by: str, expression: str) -> str:
    """The series that are highest over the shown time: `topk` alone chooses anew at each moment.

    Args:
        count: how many.
        by: label that tells them apart.
        expression: of recorded series, which are few enough for a look at every five minutes.
    """
    over = f"avg_over_time(({expression})[$__range:5m] @ end())"
    return f"({expression}) and on ({by}) topk({count}, {over})"


def per_user(expression: str) -> str:
    """The expression's series, which have a job_id and no user, with the job's user.

    A job whose user no node tells, as for a moment after its end, is not left out.
    """
    users = f"max by (job_id, user) (gpu_job_info{{{NODE}}})"
    return (
        f"(({expression}) * on (job_id) group_left (user) {users} "
        f"or label_replace(({expression}) unless on (job_id) {users}, "
        '"user", "user not known", "", ""))'
    )
