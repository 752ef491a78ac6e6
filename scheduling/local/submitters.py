"""What `gpuwarden submit --engine local` hands tasks to: the daemon of this machine."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.job_files import DEFAULT_DIRECTORY
from gpuwarden.schedule_api import EntryState
from gpuwarden.scheduling.storages import mounts_here, storage_doubt
from gpuwarden.scheduling.tasks import Foreseen, SubmittedJob

if TYPE_CHECKING:
    from gpuwarden.scheduling.daemon_clients import DaemonClient
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.tasks import Submitter, Task

_HOLDING = frozenset({EntryState.RUNNING, EntryState.LEAVING})


class LocalSubmitter:
    """Asks the daemon over its socket: it runs jobs as whom the kernel says that asks.

    Args:
        client: of the daemon.
        policy: of this machine.
    """

    engine = "local"

    def __init__(self, client: DaemonClient, policy: Policy) -> None:
        self._client = client
        self._policy = policy

    def close(self) -> None:
        """There is nothing to let go of: each question has a connection of its own."""

    def foresee(self, task: Task) -> Foreseen:
        """What the queue looks like now; when a job ends is its own affair.

        Raises:
            ServiceUnavailable: no daemon answers.
        """
        schedule = self._client.schedule()
        counts = Counter(entry.state for entry in schedule.entries)
        held = sum(entry.gpus for entry in schedule.entries if entry.state in _HOLDING)
        cards = sum(card.count for card in self._policy.cards)
        waiting = counts[EntryState.PENDING]
        if not waiting and held + task.gpus <= cards and task.window is None and not task.after:
            return Foreseen(
                earliest=schedule.taken,
                latest=schedule.taken,
                words=f"nobody waits, and {cards - held} of {cards} cards are free",
            )
        jobs = "1 job waits" if waiting == 1 else f"{waiting} jobs wait"
        return Foreseen(words=f"UNKNOWN: {jobs}, {held} of {cards} cards are in use")

    def doubts(self, task: Task) -> tuple[str, ...]:
        """Whether its states outlast a reboot: its next attempt runs on this machine."""
        lost = storage_doubt(task, mounts_here(), several_nodes=False)
        return () if lost is None else (lost,)

    def render(self, task: Task) -> str:
        """The request's body, without the token that each submission has of its own."""
        return json.dumps({"task": task.as_document()}, indent=2)

    def submit(self, task: Task, *, token: str) -> SubmittedJob:
        """Hand a task over; the daemon keeps the token, so that it is taken once.

        Raises:
            RefusedAction: it was not taken, and why.
            ServiceUnavailable: no daemon answers.
        """
        body = {"task": task.as_document(), "token": token}
        try:
            answer = self._client.ask("POST", "/v1/jobs", body=body)
        except ServiceUnavailable:
            # The answer may have been lost: with its token the same task is the same job.
            answer = self._client.ask("POST", "/v1/jobs", body=body)
        name = str(answer.get("id", ""))
        return SubmittedJob(
            engine=self.engine,
            id=name,
            name=task.name,
            run_id=task.run_id,
            words=f"in the queue; gpuwarden queue show {name}, "
            f"gpuwarden follow {task.run_id}{self._elsewhere()}",
        )

    def _elsewhere(self) -> str:
        """The option that finds job files where they are not in their usual place."""
        folder = self._policy.local.jobs
        return "" if Path(folder) == DEFAULT_DIRECTORY else f" --jobs-directory {quote(folder)}"


def submitter(policy: Policy, client: DaemonClient) -> Submitter:
    """The submitter of this machine's daemon."""
    return LocalSubmitter(client, policy)
