"""Which attempt of a Slurm job may be ended, by Slurm's words alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuwarden.platforms.slurm import SlurmJob
from gpuwarden.platforms.slurm_attempts import Record
from gpuwarden.ruleengine.reclaim.slurm_attempts import strange
from gpuwarden.ruleengine.verdicts import JobFacts

FACTS = JobFacts("slurm-ci-7-0", "n1:9835", user="ana")
JOB = SlurmJob(job_id=7, user_id=1000, user_name="ana", submit_time=100.0, nodes=("n1",))


def _blocked(*states: str) -> str:
    record = Record(replace(JOB, states=frozenset(states)))
    found = strange(record, [record], FACTS)
    return "" if found is None else found.reason


@pytest.mark.parametrize(
    ("states", "why"),
    [
        (("RUNNING",), ""),
        (("SUSPENDED",), ""),
        (("PENDING",), "not_running"),
        # Its nodes are being set up: what would be told to go now has not begun.
        (("RUNNING", "CONFIGURING"), "not_running"),
        (("RUNNING", "REQUEUED"), "not_running"),
        (("COMPLETED",), "not_running"),
        (("COMPLETED", "COMPLETING"), "ending_already"),
    ],
)
def test_only_a_job_that_runs_is_ended(states: tuple[str, ...], why: str) -> None:
    """Before a notice is spent on one that Slurm would not end, or not as this attempt."""
    assert _blocked(*states) == why
