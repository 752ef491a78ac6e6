"""Kueue behind the daemon's port: blocking calls, over a loop that follows the cluster."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.files import read_secret
from gpuwarden.kubernetes_clients import NODES, PODS
from gpuwarden.schedule_api import Problem
from gpuwarden.scheduling.kueue import names
from gpuwarden.scheduling.kueue.adapters import connect
from gpuwarden.scheduling.kueue.advances import advance
from gpuwarden.scheduling.kueue.choices import choose_all, withdraw_useless
from gpuwarden.scheduling.kueue.controllers import Controller
from gpuwarden.scheduling.kueue.entries import entries_of, preemptions_of
from gpuwarden.scheduling.kueue.limits import limit_all
from gpuwarden.scheduling.kueue.progresses import Progresses
from gpuwarden.scheduling.kueue.records import Records
from gpuwarden.scheduling.kueue.slot_uses import uses_of
from gpuwarden.scheduling.kueue.views import Verdict, View
from gpuwarden.scheduling.kueue.workloads import read_jobs
from gpuwarden.scheduling.leaves import EngineLeaves
from gpuwarden.scheduling.predictions import trained_words, training_of_words

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Mapping, Sequence
    from typing import Any, TypeVar

    from gpuwarden.kubernetes_clients import Kind, KubernetesClient
    from gpuwarden.platforms.kubernetes import Json
    from gpuwarden.schedule_api import Preemption, QueueEntry
    from gpuwarden.scheduling.drivers import Context
    from gpuwarden.scheduling.holdings import Holding
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.predictions import Training
    from gpuwarden.scheduling.slots import Slot, SlotUse

    T = TypeVar("T")

CALL_SECONDS: Final = 55.0
"""For a round: the daemon gives a minute."""
LEAVE_SECONDS: Final = 8.0
"""For one exchange with the engine: it is tried three times, and a round has other things to do."""
LEAVE_PAUSE_SECONDS: Final = 0.1


class KueueDriver:
    """One policy's cluster.

    Args:
        policy: in force.
        context: of the daemon.
    """

    engine = "kueue"

    def __init__(self, policy: Policy, context: Context) -> None:
        self._policy = policy
        self._context = context
        self.cluster = policy.kueue.cohort
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kueue", daemon=True)
        self._records: Records | None = None
        self._controller: Controller | None = None
        self._since: dict[tuple[str, str], float] = {}
        self._problems: tuple[Problem, ...] = ()
        self._slots: tuple[Slot, ...] = ()
        self._now = 0.0

    def start(self, now: float) -> None:
        """Connect, and take up what was left."""
        self._now = now
        self._thread.start()
        self._records = Records(self._context.state / "kueue.sqlite")
        try:
            self._connect()
        except ServiceUnavailable:
            # The daemon is up before the cluster is: the next tick tries again.
            self._drop()

    def _connect(self) -> Controller:
        """A controller that follows the cluster."""
        if self._controller is None:
            self._controller = self._call(self._made())
            self._call(self._controller.start())
        return self._controller

    async def _made(self) -> Controller:
        if self._records is None:
            raise RuntimeError("start comes first")
        context, policy = self._context, self._policy
        client = connect(policy, "scheduler")
        leaves = None
        if context.leaves is not None and context.leaves_token is not None:
            token = read_secret(context.leaves_token, "the engine's token")
            leaves = EngineLeaves(
                context.leaves, token, timeout=LEAVE_SECONDS, pause=LEAVE_PAUSE_SECONDS
            )
        return Controller(
            policy,
            client,
            clock=context.clock,
            wake=context.wake,
            holder=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
            records=self._records,
            leaves=leaves,
            progress=Progresses(context.prometheus).known if context.prometheus else None,
        )

    def stop(self) -> None:
        """Release everything; jobs go on."""
        if self._thread.is_alive():
            # A server that does not answer holds up no end.
            with suppress(ServiceUnavailable):
                self._drop()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CALL_SECONDS)
        self._loop.close()
        if self._records is not None:
            self._records.close()

    def _drop(self) -> None:
        if self._controller is not None:
            controller, self._controller = self._controller, None
            self._call(controller.stop())

    def adopt(self, policy: Policy) -> None:
        """Go by another policy from the next tick on."""
        same = policy.kueue == self._policy.kueue
        self._policy = policy
        self.cluster = policy.kueue.cohort
        if self._controller is not None and same:
            self._controller.adopt(policy)
        elif self._controller is not None:
            self._drop()

    def tick(self, now: float) -> None:
        """Read the cluster, decide and act.

        Raises:
            TemporaryError: it cannot be seen now.
        """
        self._now = now
        try:
            controller = self._connect()
        except ServiceUnavailable:
            self._drop()
            raise
        controller.slots = self._slots
        self._call(controller.step(now))
        self._remember(controller, now)

    def _remember(self, controller: Controller, now: float) -> None:
        found = {(fault.code, fault.about): fault.words for fault in controller.faults}
        self._since = {key: self._since.get(key, now) for key in found}
        self._problems = tuple(
            Problem(code, words, self._since[code, about])
            for (code, about), words in sorted(found.items())
        )

    def entries(self) -> Sequence[QueueEntry]:
        """Every job as of the last tick."""
        controller = self._controller
        if controller is None or controller.view is None:
            return ()
        return entries_of(controller.view, controller.verdict)

    def trainings(self) -> Mapping[str, Training]:
        """What jobs train that were given cards, of those that are gpuwarden's."""
        controller = self._controller
        if controller is None or controller.view is None:
            return {}
        return {
            job.id: training_of_words(words, card=job.card, gpus=job.gpus, directory=job.directory)
            for job in controller.view.jobs
            if job.card and (words := trained_words(job.command))
        }

    def preemptions(self) -> Sequence[Preemption]:
        """Leaves that stand, and those that ended within the last day."""
        controller = self._controller
        if controller is None or controller.view is None:
            return ()
        return preemptions_of(controller.view, dict(controller.ended))

    def problems(self) -> Sequence[Problem]:
        """What an operator should know of as of the last tick."""
        return self._problems

    def book(self, slots: Sequence[Slot], now: float) -> None:
        """Have quotas follow these slots, and no others; the next tick sees to it.

        Args:
            slots: all that are ahead and active.
            now: Unix time.
        """
        self._slots = tuple(slot for slot in slots if now < slot.end)

    def slot_uses(self) -> Sequence[SlotUse]:
        """What becomes of the slots that are active, as of the last tick."""
        controller, records = self._controller, self._records
        active = [slot for slot in self._slots if slot.start <= self._now < slot.end]
        if controller is None or records is None or not active:
            return ()
        begin = min(slot.start for slot in active)
        held = controller.held_slots()
        return uses_of(active, records.holdings(begin, self._now), held=held, now=self._now)

    def usage(self, begin: float, end: float) -> Sequence[Holding]:
        """Every attempt that held cards in a stretch of time, whole."""
        return () if self._records is None else self._records.holdings(begin, end)

    def hold(self, entry: str, *, by: str, now: float) -> None:
        """Have a job that waits wait until it is released.

        Raises:
            RefusedAction: with a reason.
            TemporaryError: the cluster does not answer.
        """
        self._call(self._seen().hold(entry, by=by, now=now))

    def release(self, entry: str, *, by: str, now: float) -> None:
        """Let a held job wait for its turn again.

        Raises:
            RefusedAction: with a reason.
            TemporaryError: the cluster does not answer.
        """
        del by
        self._call(self._seen().release(entry, now=now))

    def _seen(self) -> Controller:
        if self._controller is None:
            raise ServiceUnavailable("the cluster cannot be seen now")
        return self._controller

    def _call(self, call: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(CALL_SECONDS)
        except FutureTimeout as error:
            future.cancel()
            raise ServiceUnavailable(
                f"the cluster did not answer within {CALL_SECONDS:g} s"
            ) from error


def open_driver(policy: Policy, context: Context) -> KueueDriver:
    """The driver of a policy's cluster; nothing is asked yet."""
    return KueueDriver(policy, context)


def read_entries(policy: Policy, now: float) -> Sequence[QueueEntry]:
    """Every job as the cluster has it now; nothing is changed.

    Args:
        policy: whose queues.
        now: Unix time.

    Raises:
        ServiceUnavailable: the cluster cannot be seen.
        RefusedAction: it may not be read.
    """

    async def read() -> tuple[View, bool]:
        client = connect(policy, "queue")
        try:
            return await _read_view(client, policy, now)
        finally:
            await client.aclose()

    view, whole = asyncio.run(read())
    parts = [withdraw_useless(view), advance(view), limit_all(view)]
    if whole:
        # Who would have to end can only be said of all.
        parts.append(choose_all(view))
    return entries_of(view, Verdict.of(parts))


async def _read_view(client: KubernetesClient, policy: Policy, now: float) -> tuple[View, bool]:
    """What somebody may see of the queue, and whether that is all of it."""
    spaces = dict.fromkeys(team.namespace for team in policy.teams)
    found = await asyncio.gather(
        *(_listed(client, kind, spaces) for kind in (names.WORKLOADS, names.JOBS, PODS))
    )
    whole = all(all_of_it for _items, all_of_it in found)
    try:
        nodes = await client.list(NODES, None)
    except RefusedAction:
        nodes = []  # whether they report is then not known
    workloads, jobs, pods = (items for items, _all_of_it in found)
    read = read_jobs(policy, workloads=workloads, jobs=jobs, pods=pods, nodes=nodes)
    return View(policy=policy, now=now, jobs=tuple(read)), whole


async def _listed(
    client: KubernetesClient, kind: Kind, spaces: Iterable[str]
) -> tuple[list[Json], bool]:
    """Objects of all namespaces or, for whoever may not see those, of the teams' that they may."""
    try:
        return await client.list(kind, None), True
    except RefusedAction as error:
        if error.reason != "forbidden":
            raise
        refused = error
    found: list[Json] = []
    seen = 0
    for space in spaces:
        try:
            found += await client.list(kind, space)
            seen += 1
        except RefusedAction as error:
            if error.reason != "forbidden":
                raise
    if not seen:
        raise refused
    return found, False
