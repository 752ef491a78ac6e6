"""Whether a policy's deadline holds an epoch, by what trainings here have really needed. Pure.

No engine knows epochs: Slurm's GraceTime, a pod's grace and the local queue's deadline are all the
policy's `preemption.deadline`. One below an epoch and its save ends epochs in the middle, and what
was meant as politeness is none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from gpuwarden import durations

if TYPE_CHECKING:
    from collections.abc import Collection

    from gpuwarden.scheduling.policies import Policy

LEAST_RUNS: Final = 20
"""Below so many, the longest of them says little about the next."""
SHARE: Final = 0.95
_MINUTE: Final = 60


def short_deadline(policy: Policy, epochs: Collection[float]) -> str | None:
    """One sentence about a deadline that is too short for one epoch in twenty, or None.

    Args:
        policy: with `notice: epoch`, or nothing is short.
        epochs: seconds that an epoch took on the average of each run, its saves included.
    """
    terms = policy.preemption
    if terms is None or terms.notice != "epoch" or len(epochs) < LEAST_RUNS:
        return None
    ordered = sorted(epochs)
    needed = ordered[math.ceil(SHARE * len(ordered)) - 1]
    if needed <= terms.deadline:
        return None
    longer = math.ceil(needed / _MINUTE) * _MINUTE
    cut = sum(each > terms.deadline for each in ordered)
    return (
        f"in {cut} of the {len(ordered)} newest runs an epoch takes longer than "
        f"preemption.deadline ({durations.render(terms.deadline)}), and is ended in the middle: "
        f"write deadline: {durations.render(longer)}, or notice: step"
    )
