"""What `gpuwarden submit --engine slurm` hands tasks to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpuwarden.scheduling.slurm.clusters import open_cluster
from gpuwarden.scheduling.slurm.submissions import SlurmSubmitter

if TYPE_CHECKING:
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.tasks import Submitter


def submitter(policy: Policy) -> Submitter:
    """The submitter of a policy's Slurm, for whoever runs this process."""
    return SlurmSubmitter(policy, open_cluster(policy), environment=dict(os.environ))
