"""How Kueue takes tasks: as Jobs, each submitted once however often an answer is lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import yaml

from gpuwarden.errors import GpuwardenError, RefusedAction, ServiceUnavailable
from gpuwarden.platforms.kubernetes import value_at
from gpuwarden.scheduling.kueue import leases, names
from gpuwarden.scheduling.kueue.adapters import connect, kueue_version
from gpuwarden.scheduling.kueue.manifests import fitting_cards, gates_of, job_of
from gpuwarden.scheduling.kueue.quotas import Ledger, shares_of
from gpuwarden.scheduling.kueue.renderings import GATED, version_numbers
from gpuwarden.scheduling.kueue.shapes import part_at
from gpuwarden.scheduling.storages import is_uploaded, states_folder
from gpuwarden.scheduling.tasks import Foreseen, SubmittedJob

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeVar

    from gpuwarden.kubernetes_clients import KubernetesClient
    from gpuwarden.platforms.kubernetes import Json
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.tasks import Task

    T = TypeVar("T")

TRIES: Final = 3
_LOCAL_QUEUES: Final = names.KINDS["LocalQueue"]


def submitter(policy: Policy) -> KueueSubmitter:
    """The submitter of a policy's cluster."""
    return KueueSubmitter(policy)


class KueueSubmitter:
    """Hands tasks to Kueue in the name of who asks, by their own kubeconfig.

    Args:
        policy: of the cluster.
    """

    engine = "kueue"

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def close(self) -> None:
        """There is nothing to let go of: each question has a connection of its own."""

    def foresee(self, task: Task) -> Foreseen:
        """Ask when a task would start; nothing is changed.

        Raises:
            ServiceUnavailable: the API server does not answer.
            RefusedAction: the queue is not there, or the task never fits it.
        """
        return self._with_client(lambda client: self._foresee(client, task))

    def doubts(self, task: Task) -> tuple[str, ...]:
        """Whether its next pod finds its states: they have to lie on the volume."""
        folder, volume = states_folder(task), self._policy.kueue.volume
        if is_uploaded(task):
            return ()
        if volume is None:
            words = (
                "the policy gives jobs no volume (kueue.volume): what a pod has written is gone "
                "when it leaves, and the run begins anew; keep states with -- --upload=URL, or "
                "ask an operator for a volume"
            )
            return (words,)
        if not PurePosixPath(folder).is_relative_to(volume.mount):
            words = (
                f"its states would lie in {folder}, which is not on the volume ({volume.mount}): "
                "they are gone when its pod leaves, and the run begins anew; say "
                f"project={PurePosixPath(volume.mount) / task.name}, or --upload behind --"
            )
            return (words,)
        return ()

    def render(self, task: Task) -> str:
        """The Job that would be sent, as YAML."""
        body = job_of(self._policy, task, token="0" * 16, gated=True, noticed=True)
        return yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=1000)

    def submit(self, task: Task, *, token: str) -> SubmittedJob:
        """Hand a task over, once.

        Args:
            task: what is to be run.
            token: of this submission, kept as a label of the Job.

        Raises:
            ServiceUnavailable: the API server does not answer, and the Job is not there.
            RefusedAction: it does not take the Job; its words, and the remedy.
        """
        return self._with_client(lambda client: self._submit(client, task, token))

    def _with_client(self, ask: Callable[[KubernetesClient], Awaitable[T]]) -> T:
        async def run() -> T:
            client = connect(self._policy, "submit --engine kueue")
            try:
                return await ask(client)
            finally:
                await client.aclose()

        return asyncio.run(run())

    def _space(self, task: Task) -> str:
        team = self._policy.team(task.team)
        if team is None:
            raise RefusedAction("unknown_name", f"the policy has no team {task.team}")
        return team.namespace

    async def _foresee(self, client: KubernetesClient, task: Task) -> Foreseen:
        space = self._space(task)
        cards = [card.name for card in fitting_cards(self._policy, task)]
        if Ledger(shares_of(self._policy)).never(task.team, cards, task.gpus):
            raise RefusedAction(
                "too_large",
                f"team {task.team} never has {task.gpus} cards of {' or '.join(cards)} at once, "
                "own and borrowed ones together: ask for fewer, or for another kind",
            )
        queue = await client.get(_LOCAL_QUEUES, space, names.QUEUE)
        if queue is None:
            raise RefusedAction(
                "no_queue",
                f"namespace {space} has no LocalQueue {names.QUEUE}: an operator has to run "
                "`gpuwarden policy apply --engine kueue` first",
            )
        waiting = value_at(queue, "status.pendingWorkloads")
        count = waiting if isinstance(waiting, int) else 0
        words = (
            "Kueue does not tell when jobs start; nobody of the team waits"
            if count == 0
            else f"Kueue does not tell when jobs start; {count} of the team wait already"
        )
        return Foreseen(words=words)

    async def _submit(self, client: KubernetesClient, task: Task, token: str) -> SubmittedJob:
        space, warnings = self._space(task), list[str]()
        known = await kueue_version(client)
        gated = known is not None and version_numbers(known) >= GATED
        alive = await self._is_alive(client)
        body = job_of(self._policy, task, token=token, gated=gated, noticed=alive)
        if gates_of(self._policy, task, noticed=False) and not alive:
            warnings.append(
                "it waits for its hours or for other jobs, and gpuwarden's controller, which looks "
                "after that, does not run now"
            )
        found = await self._created(client, body)
        name = str(value_at(found, "metadata.name"))
        return SubmittedJob(
            engine="kueue",
            id=f"{space}/{name}",
            name=task.name,
            run_id=task.run_id,
            words=f"Job {name} waits in namespace {space}; follow it with kubectl -n {space} logs "
            f"-f job/{name} once it runs",
            warnings=tuple(warnings),
        )

    async def _is_alive(self, client: KubernetesClient) -> bool:
        name = names.controller_name(self._policy)
        try:
            found = await client.get(names.LEASES, self._policy.kueue.namespace, name)
        except GpuwardenError:
            return False  # who may not see it, does not wait for it
        return leases.is_held(found, time.time())

    async def _created(self, client: KubernetesClient, body: dict[str, Any]) -> Json:
        """Make the Job, or find the one that was made when an answer was lost."""
        space, name = body["metadata"]["namespace"], body["metadata"]["name"]
        token = body["metadata"]["labels"][names.SUBMISSION_LABEL]
        problem: ServiceUnavailable | None = None
        for _ in range(TRIES):
            try:
                return await client.create(names.JOBS, space, body)
            except ServiceUnavailable as error:
                problem = error
            except RefusedAction as error:
                if error.reason != "conflict":
                    raise _explained(error, space) from error
            try:
                found = await client.get(names.JOBS, space, name)
            except ServiceUnavailable as error:
                problem = error
                continue
            if found is not None:
                labels = part_at(found, "metadata.labels")
                if labels.get(names.SUBMISSION_LABEL) == token:
                    return found
                raise RefusedAction("conflict", f"there is another Job {space}/{name}")
        raise ServiceUnavailable(
            f"the Job {space}/{name} may or may not have been made: look with kubectl -n {space} "
            f"get job {name} before you submit again ({problem})"
        )


def _explained(error: RefusedAction, space: str) -> RefusedAction:
    """What the server refused, with what to do."""
    match error.reason:
        case "gone":
            hint = f"is there a namespace {space}? See team.kueue.namespace in the policy"
        case "forbidden":
            hint = f"you may not create Jobs in {space}: ask for a role there"
        case "denied":
            hint = f"a policy of the cluster forbids such pods in {space}"
        case _:
            hint = "please report this: what gpuwarden renders should be valid"
    return RefusedAction(error.reason, f"{error}; {hint}")
