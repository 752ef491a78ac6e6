"""Ending pods: through their controllers, by the uid, and only what was meant.

A pod is its uid. What is done to it is decided once (`find`), written into the decision by the
engine, and done to that very pod and controller (`end`) or not at all. What has become of it is
read from pods, never from a controller's status, which may lag behind or be wrong.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import re
from typing import TYPE_CHECKING, Self

import structlog

from gpuwarden.clock import SystemClock
from gpuwarden.errors import RefusedAction, ServiceUnavailable, TemporaryError
from gpuwarden.kubernetes_clients import (
    EVENTS,
    PODS,
    KubernetesClient,
)
from gpuwarden.platforms import kubernetes
from gpuwarden.platforms.kubernetes import UnexpectedObject, read_pod
from gpuwarden.ruleengine.guards import Blocked
from gpuwarden.ruleengine.kubernetes_demands import KubernetesQueue
from gpuwarden.ruleengine.reclaim import kubernetes_controllers as controllers
from gpuwarden.ruleengine.reclaim.kubernetes_claims import MAX_OTHERS, PodClaim
from gpuwarden.ruleengine.reclaim.kubernetes_controllers import Act
from gpuwarden.ruleengine.reclaim.kubernetes_lookups import PodLookup
from gpuwarden.ruleengine.reclaim.kubernetes_owners import Owners
from gpuwarden.ruleengine.reclaim.kubernetes_states import PodStates
from gpuwarden.ruleengine.reclaim.kubernetes_targets import MAX_REASON, Targets, is_final
from gpuwarden.ruleengine.reclaim.ports import Claim, Deed

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from gpuwarden.clock import Clock
    from gpuwarden.platforms.kubernetes import Json, Pod, Reference
    from gpuwarden.ruleengine.kubernetes_settings import KubernetesSettings
    from gpuwarden.ruleengine.reclaim.ports import Order, State
    from gpuwarden.ruleengine.verdicts import JobFacts

FIND_SECONDS = 45.0
"""For all questions about one pod: a tick waits for them."""
TRIES = 3
YOUNG_SECONDS = 120.0
"""A successor that is no older has only come because its predecessor was asked to leave."""
_UID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}")
_SHOWN = 4

log = structlog.get_logger(__name__)


class Kubernetes:
    """The platform of the jobs that are pods.

    Args:
        client: of the API server.
        settings: what may be ended.
        clock: for what is late.

    Attributes:
        queue: who waits, over the same connection.
    """

    name = "kubernetes"
    prefix = "pod-"

    def __init__(
        self, client: KubernetesClient, settings: KubernetesSettings, *, clock: Clock | None = None
    ) -> None:
        self._client = client
        self.queue = KubernetesQueue(client)
        self._settings = settings
        self._clock = clock or SystemClock()
        self._holds = controllers.holds_of(settings.controllers)
        self._targets = Targets(client, self._holds)
        self._states = PodStates(client, self._targets, self._clock)
        self._lookup = PodLookup(client, settings.namespaces)

    @classmethod
    def from_settings(
        cls, settings: KubernetesSettings, base: Path, *, clock: Clock | None = None
    ) -> Self:
        """As engine.yaml says; nothing is asked yet.

        Args:
            settings: its `kubernetes`.
            base: the file's directory.
            clock: the machine's by default.

        Raises:
            MissingExtra: lightkube is not installed.
            InvalidInput: the kubeconfig cannot be used.
        """
        path = base / settings.kubeconfig if settings.kubeconfig is not None else None
        client = KubernetesClient.connect(path, settings.context, timeout=settings.timeout)
        return cls(client, settings, clock=clock)

    async def aclose(self) -> None:
        """Close connections."""
        await self._client.aclose()

    async def find(
        self, job: JobFacts, deed: Deed, *, offenders: Collection[str] = ()
    ) -> Claim | Blocked:
        """Recognise a job's pod, and say whether the deed can be done to it as it stands now.

        Args:
            job: the job.
            deed: what would be done.
            offenders: ids of the jobs that the same rule would end now. A controller with several
                pods is acted on only if all of them are among these.

        Returns:
            The claim, or why not.
        """
        try:
            async with asyncio.timeout(FIND_SECONDS):
                return await self._find(job, deed, frozenset(offenders))
        except TimeoutError:
            text = f"to look the pod up took longer than {FIND_SECONDS:g} s"
            return Blocked("platform_unreachable", text)
        except RefusedAction as error:
            return Blocked(error.reason, str(error))
        except TemporaryError as error:
            return Blocked("platform_unreachable", str(error))
        except UnexpectedObject as error:
            return Blocked("platform_unreachable", f"the API server's answer: {error}")

    async def ask(self, order: Order) -> bool:  # noqa: ARG002 - the port's; Kubernetes has none
        """Kubernetes has no notice of its own; the agent's leave request and SIGTERM are there."""
        return False

    async def end(self, order: Order) -> None:
        """Do the deed. Safe to repeat.

        Raises:
            RefusedAction: `gone`, `target_changed`, `disruption_budget`, `forbidden`, `invalid`,
                `unsupported`.
            ServiceUnavailable: not known whether it was done.
        """
        claim = PodClaim.decode(order.claim.identity)
        try:
            if claim.act is Act.EVICT:
                await self._evict(claim, order)
            else:
                await self._hold(claim, order)
        except UnexpectedObject as error:
            raise ServiceUnavailable(f"the API server's answer: {error}") from error

    async def state(self, order: Order) -> State:
        """What has become of the pod.

        Raises:
            ServiceUnavailable: not known.
        """
        claim = PodClaim.decode(order.claim.identity)
        try:
            return await self._states.state(claim, order)
        except (RefusedAction, UnexpectedObject) as error:
            raise ServiceUnavailable(f"the pod's state is not known: {error}") from error

    # -----------------------------------------------------------------------------------------

    async def _find(self, job: JobFacts, deed: Deed, offenders: frozenset[str]) -> Claim | Blocked:
        pod = await self._candidate(job)
        if isinstance(pod, Blocked):
            return pod
        owners = Owners(self._client, pod.namespace, self._holds)
        above = await owners.chain(pod.owner)
        ruling = controllers.ruling([owner.reference for owner in above])
        queued = await owners.workload({pod.uid, *(owner.uid for owner in ruling)})
        if queued is not None and queued[1] == pod.uid and ruling:
            # Of a service Kueue queues each pod: the service itself would make another one.
            queued = None
        if deed is Deed.REQUEUE:
            return await self._returning(
                pod, ruling, queued=queued, owner=above[0].found if above else None, owners=owners
            )
        if queued is not None:
            target, root = queued
            return await self._ending(
                pod, Act.HOLD, target, root=root, owners=owners, offenders=offenders
            )
        act = controllers.act_for_end(pod, ruling, self._holds)
        if isinstance(act, Blocked):
            return act
        if act is Act.EVICT:
            return _claim(PodClaim(pod.namespace, pod.reference, act), pod, ())
        return await self._ending(
            pod, act, ruling[-1], root=ruling[-1].uid, owners=owners, offenders=offenders
        )

    async def _candidate(self, job: JobFacts) -> Pod | Blocked:
        """The pod of a job, if it is there to be ended."""
        uid = job.job_id.removeprefix(self.prefix)
        if _UID.fullmatch(uid) is None:
            return Blocked("not_a_pod", f"{job.job_id} does not name a pod")
        pod = await self._lookup.pod(uid, job.instance)
        if pod is None:
            return Blocked("not_found", f"the API server has no pod with the uid {uid}")
        why = None
        if not self._settings.allows(pod.namespace):
            why = "namespace_not_allowed", "kubernetes.namespaces does not allow to end pods there"
        elif not pod.living:
            why = "gone", f"it has ended by itself ({pod.phase})"
        elif pod.deletion is not None:
            why = "ending", "it is being deleted already"
        return pod if why is None else Blocked(why[0], f"{pod.title}: {why[1]}")

    async def _ending(
        self,
        pod: Pod,
        act: Act,
        target: Reference,
        *,
        root: str,
        owners: Owners,
        offenders: frozenset[str],
    ) -> Claim | Blocked:
        """A claim that ends all pods of a controller, if all are meant."""
        others = [
            item
            for item in await owners.members(root, await owners.pods())
            if item.uid != pod.uid and item.living and item.deletion is None
        ]
        if len(others) > MAX_OTHERS:
            return Blocked("too_many_pods", f"{target.title} has {len(others) + 1} pods")
        hold = self._targets.hold_of(target)
        # Helpers of one job (a launcher, say) have no card, and end with it; a service's do not.
        counted = [item for item in others if item.devices or hold is None or not hold.gang]
        spared = [item for item in counted if f"{self.prefix}{item.uid}" not in offenders]
        if spared:
            return Blocked(
                "not_all_offenders",
                f"{pod.title} can only be ended with all of {target.title}, and {_named(spared)} "
                "did nothing wrong",
            )
        claim = PodClaim(
            pod.namespace,
            pod.reference,
            act,
            target=target,
            root_uid=root,
            others=frozenset(item.uid for item in others),
        )
        return _claim(claim, pod, others)

    async def _returning(
        self,
        pod: Pod,
        ruling: Sequence[Reference],
        *,
        queued: tuple[Reference, str] | None,
        owner: Json | None,
        owners: Owners,
    ) -> Claim | Blocked:
        """A claim that ends one pod, whose controller starts another."""
        if queued is not None or pod.queued:
            return Blocked(
                "queued_by_kueue",
                f"{pod.title} is queued by Kueue: an evicted pod would be replaced without its "
                "turn. Kueue itself preempts; `terminate` deactivates its Workload",
            )
        act = controllers.act_for_return(pod, ruling, owner)
        if isinstance(act, Blocked):
            return act
        beside = await owners.members(ruling[0].uid, await owners.pods())
        claim = PodClaim(
            pod.namespace,
            pod.reference,
            act,
            target=ruling[0],
            others=frozenset(item.uid for item in beside if item.uid != pod.uid),
        )
        return _claim(claim, pod, ())

    async def _get_pod(self, namespace: str, name: str) -> Pod | None:
        found = await self._client.get(PODS, namespace, name)
        return read_pod(found) if found is not None else None

    # -----------------------------------------------------------------------------------------

    async def _evict(self, claim: PodClaim, order: Order) -> None:
        pod = await self._get_pod(claim.namespace, claim.pod.name)
        if pod is None:
            raise RefusedAction("gone", f"{claim.pod.title} is gone")
        if pod.uid != claim.pod.uid:
            raise _changed(claim)
        if pod.deletion is not None:
            return
        if not pod.living:
            raise RefusedAction("gone", f"{pod.title} has ended by itself ({pod.phase})")
        ask = self._client.evict
        if order.deed is Deed.TERMINATE and not self._settings.respect_disruption_budgets:
            ask = self._client.delete
        try:
            await ask(claim.namespace, claim.pod, grace=order.grace)
        except RefusedAction as error:
            if error.reason == "conflict":
                raise _changed(claim) from error
            raise
        await self._record(claim, order, "told to go")

    async def _hold(self, claim: PodClaim, order: Order) -> None:
        """Tell the controller, if it is the same one and its pods are those that were meant."""
        target = claim.target
        if target is None:
            raise RefusedAction("bad_claim", "the claim names no controller")
        kind = await self._targets.told_at(claim, target)
        for _ in range(TRIES):
            found = await self._client.get(kind, claim.namespace, target.name)
            if found is None:
                raise RefusedAction("gone", f"{target.title} is gone")
            if kubernetes.value_at(found, "metadata.uid") != target.uid:
                raise _changed(claim)
            if self._targets.is_held(claim, target, found):
                return
            await self._check_members(claim, target, found)
            patch = self._targets.patch(claim, target, order, now=self._now())
            patch.setdefault("metadata", {}).update(
                uid=target.uid,
                resourceVersion=kubernetes.value_at(found, "metadata.resourceVersion"),
            )
            try:
                done = await self._client.patch(kind, claim.namespace, target.name, body=patch)
            except RefusedAction as error:
                if error.reason == "conflict":
                    continue
                raise
            if not self._targets.is_held(claim, target, done):
                raise RefusedAction(
                    "unsupported",
                    f"the API server took the change of {target.title} and dropped it: its version "
                    "does not know how to suspend it",
                )
            before = kubernetes.value_at(found, "spec.replicas")
            had = f", which had {before} replicas" if claim.act is Act.SCALE else ""
            await self._record(claim, order, f"told to go through {target.title}{had}")
            return
        raise ServiceUnavailable(f"{target.title} changes so often that it could not be told")

    async def _check_members(self, claim: PodClaim, target: Reference, found: Json) -> None:
        """Only pods that were meant may end, and none that has begun since."""
        owners = Owners(self._client, claim.namespace, self._holds)
        pods = await owners.pods()
        own = next((pod for pod in pods if pod.uid == claim.pod.uid), None)
        ended = own is None or not own.living
        if ended and is_final(found):
            raise RefusedAction("gone", f"{target.title} has ended by itself")
        members = await owners.members(claim.root_uid, pods)
        # A trainer that was asked to leave may be gone by now, and its controller may have made
        # a successor at once: that has nothing to lose yet, and goes too. One that has run for long
        # is an attempt of its own, of which nobody was told.
        since = self._clock.wall() - YOUNG_SECONDS
        new = [
            pod
            for pod in members
            if pod.living
            and pod.deletion is None
            and not claim.known(pod.uid)
            and not (ended and (pod.phase == "Pending" or pod.created > since))
        ]
        if new:
            raise RefusedAction(
                "target_changed", f"{target.title} has got {_named(new)} since it was decided"
            )

    async def _record(self, claim: PodClaim, order: Order, deed: str) -> None:
        """Tell whoever looks at the pod; that this fails is no reason not to act."""
        now = self._now()
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": "gpuwarden-", "namespace": claim.namespace},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": claim.namespace,
                "name": claim.pod.name,
                "uid": claim.pod.uid,
            },
            "type": "Warning",
            "reason": f"Gpuwarden{order.deed.value.capitalize()}",
            "message": f"{deed}: {order.reason} (decision {order.decision_id})"[:MAX_REASON],
            "source": {"component": "gpuwarden"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._client.create(EVENTS, claim.namespace, body)
        except (RefusedAction, TemporaryError) as error:
            log.warning("no event was written", pod=claim.pod.title, error=str(error))

    def _now(self) -> str:
        moment = dt.datetime.fromtimestamp(int(self._clock.wall()), dt.UTC)
        return moment.isoformat().replace("+00:00", "Z")

    # -----------------------------------------------------------------------------------------


def _claim(claim: PodClaim, pod: Pod, others: Sequence[Pod]) -> Claim:
    controlled = claim.act is not Act.EVICT
    also, company = "", tuple[str, ...]()
    if claim.target is not None and controlled and others:
        company = tuple(sorted(f"{Kubernetes.prefix}{item.uid}" for item in others))
        also = f"{len(others)} more of {claim.target.title}: {_named(others)}"
    return Claim(
        platform=Kubernetes.name,
        identity=claim.encode(),
        nodes=(pod.node,) if pod.node else (),
        # A controller deletes its pods with the grace that is written in them.
        grace=float(pod.grace) if controlled else None,
        also=also,
        returns=pod.owner is not None or pod.restarts,
        company=company,
    )


def _changed(claim: PodClaim) -> RefusedAction:
    return RefusedAction(
        "target_changed", f"{claim.namespace}/{claim.pod.name} is not the pod that was meant"
    )


def _named(pods: Sequence[Pod]) -> str:
    names = [pod.title for pod in pods]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
