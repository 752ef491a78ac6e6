"""How many words a job may put into labels: on one page, and over its whole life.

A label value of a user's own makes a series, and a series costs Prometheus memory long after it is
gone: who renames a model, a loss or a run with each snapshot makes as many as he likes, none of
them remarkable on any one page. So each job has a vocabulary. What was said once may be said
always; once it is full, new words are not said, and counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_RUNS = 16
"""Runs that a job declares at the same time; a process trains one, or a few in turn."""
MAX_RUNS_IN_A_LIFE = 1000
"""A notebook's kernel may train for weeks, one run after the other."""
MAX_DESCRIPTIONS = 8
"""Descriptions (model, batch, image size, ...) of one run: it has one, and a new one if resumed."""
MAX_WORDS = 32
"""Components, metrics or groups of one run and family."""
MAX_WORDS_IN_A_LIFE = 10_000
"""Of all runs of a job: some hundred trainings that say all they can, or a thousand as they are."""

RUNS = "runs"
_LIMITS = {RUNS: MAX_RUNS_IN_A_LIFE, "yolo_info": MAX_DESCRIPTIONS, "yolo_resume_mode": 8}


class Vocabularies:
    """What each job has said in labels; `forget` who is gone."""

    def __init__(self) -> None:
        """Begin with nothing said."""
        self._said: dict[str, dict[tuple[str, str], set[tuple[str, ...]]]] = {}
        self._counts: Counter[str] = Counter()

    def admit(self, job_id: str, family: str, *words: str, run_id: str = "") -> bool:
        """Whether a job may say this: it has before, or there is room.

        Args:
            job_id: whose words.
            family: the metric, or RUNS for a run's id.
            words: values of labels that are the job's own, all together one word.
            run_id: of which run; each has room of its own.
        """
        of_job = self._said.setdefault(job_id, defaultdict(set))
        said = of_job[family, run_id]
        if words in said:
            return True
        if len(said) >= _LIMITS.get(family, MAX_WORDS):
            return False
        if self._counts[job_id] >= MAX_WORDS_IN_A_LIFE:
            return False
        self._counts[job_id] += 1
        said.add(words)
        return True

    def forget(self, alive: Collection[str]) -> None:
        """Keep the words of these jobs only.

        Args:
            alive: ids of the jobs that there are.
        """
        for job_id in self._said.keys() - set(alive):
            del self._said[job_id]
            del self._counts[job_id]
