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

RECORDED = CLUSTER
"""Of recorded series, which carry no scrape job."""

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
