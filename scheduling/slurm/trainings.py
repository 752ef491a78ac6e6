"""What jobs of Slurm train, read from the batch scripts that `gpuwarden submit` gave them.

By it their ends are foretold. A script is asked for once, when its job runs, a few in each tick; of
one that cannot be had, or that is none of ours, nothing is known, and nothing is foretold.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.scheduling.predictions import trained_words, training_of_words
from gpuwarden.scheduling.slurm.scripts import read_comment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpuwarden.platforms.slurm_listings import ListedJob
    from gpuwarden.schedule_api import QueueEntry
    from gpuwarden.scheduling.predictions import Training
    from gpuwarden.scheduling.slurm.clusters import Cluster

MOST_ASKED: Final = 5
"""Scripts that are asked for in one tick."""
MOST_KNOWN: Final = 20_000
_DIRECTORY: Final = re.compile(r'^#SBATCH --chdir="(/(?:[^"\\]|\\")*)"$', re.MULTILINE)
_LONGEST: Final = 64 * 1024
"""Characters of a script that are looked at."""


def words_of(script: str) -> tuple[str, ...]:
    """The words of `exec gpuwarden train`, by which a script of ours ends; none of another one."""
    last = script[-_LONGEST:].rstrip().rpartition("\nexec ")[2]
    try:
        return trained_words(shlex.split(last))
    except ValueError:
        return ()


def directory_of(script: str) -> str:
    """Where a script of ours starts; empty of another one."""
    found = _DIRECTORY.search(script[:_LONGEST])
    return "" if found is None else found[1].replace('\\"', '"')


class Trainings:
    """Remembers what was read.

    Args:
        cluster: whose jobs they are.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._words: dict[tuple[str, float], tuple[tuple[str, ...], str]] = {}

    def look(self, jobs: Iterable[ListedJob]) -> None:
        """Read the scripts of jobs that run and were not read yet."""
        left = MOST_ASKED
        for job in jobs:
            key = (job.number, job.job.submit_time or 0.0)
            if not job.job.holds or key in self._words or read_comment(job.job.comment) is None:
                continue
            if left == 0:
                return
            left -= 1
            try:
                answer = self._cluster.run(
                    "scontrol", "write", "batch_script", str(job.job.job_id), "-"
                )
            except ServiceUnavailable:
                return  # the next tick tries again
            text = "" if answer.status else answer.output
            self._words[key] = words_of(text), directory_of(text)
            while len(self._words) > MOST_KNOWN:
                del self._words[next(iter(self._words))]

    def known(self, entries: Sequence[QueueEntry]) -> Mapping[str, Training]:
        """Id of an entry -> what it trains; of those where it is known."""
        return {
            entry.id: training_of_words(
                told[0], card=entry.gpu_type, gpus=entry.gpus, directory=told[1]
            )
            for entry in entries
            if (told := self._words.get((entry.id, entry.submitted))) and told[0]
        }
