"""What the controller keeps in order besides jobs: its Lease, its check, the quotas of bookings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import structlog

from gpuwarden.errors import RefusedAction
from gpuwarden.platforms.kubernetes import condition, value_at
from gpuwarden.scheduling.kueue import leases, names, shifts
from gpuwarden.scheduling.kueue.pods import moment_of
from gpuwarden.scheduling.kueue.quotas import shares_of
from gpuwarden.scheduling.kueue.renderings import cluster_queue, cohort
from gpuwarden.scheduling.kueue.shapes import part_at, rows_at
from gpuwarden.scheduling.kueue.views import Fault

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuwarden.kubernetes_clients import Kind, KubernetesClient
    from gpuwarden.platforms.kubernetes import Json
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slots import Slot

SKEW_SECONDS: Final = 5.0
"""Between our clock and the API server's: beyond it nobody is asked to leave."""

log = structlog.get_logger(__name__)


class Lease:
    """Which of several controllers acts.

    Args:
        client: of the API server.
        policy: whose Lease.
        holder: who we are; different for every process.

    Attributes:
        held: whether we act.
        other: who does instead, or empty.
        skew: seconds that our clock is ahead of the server's, as of the last renewal; None before.
    """

    def __init__(self, client: KubernetesClient, policy: Policy, holder: str) -> None:
        self._client = client
        self._policy = policy
        self._space = policy.kueue.namespace
        self._name = names.controller_name(policy)
        self._holder = holder
        self._renewed: float | None = None
        self._taken = 0.0
        self._changes = 0
        self.held = False
        self.other = ""
        self.skew: float | None = None

    async def keep(self, now: float) -> bool:
        """Take it or renew it; whether it is ours.

        Args:
            now: Unix time.

        Raises:
            ServiceUnavailable: not known; it is then not ours.
        """
        due = self._renewed is None or not 0 <= now - self._renewed < leases.RENEW_SECONDS
        if self.held and not due:
            return True
        self.held = False
        found = await self._client.get(names.LEASES, self._space, self._name)
        holder = leases.holder_of(found)
        self.other = holder if holder != self._holder and leases.is_held(found, now) else ""
        if self.other:
            return False
        if holder != self._holder:
            changes = value_at(found, "spec.leaseTransitions") if found is not None else None
            self._taken, self._changes = now, (changes if isinstance(changes, int) else 0) + 1
        try:
            written = await self._write(found, now)
        except RefusedAction as error:
            if error.reason not in ("conflict", "gone"):
                raise
            return False  # somebody was faster: looked at again in the next round
        self._renewed, self.held = now, True
        self.skew = _skew(written, now)
        return True

    async def _write(self, found: Json | None, now: float) -> Json:
        spec = leases.lease_spec(self._holder, now, taken=self._taken, changes=self._changes)
        if found is None:
            body = leases.lease_body(self._policy, spec)
            return await self._client.create(names.LEASES, self._space, body)
        metadata = {key: value_at(found, f"metadata.{key}") for key in ("uid", "resourceVersion")}
        body = {"metadata": metadata, "spec": spec}
        return await self._client.patch(names.LEASES, self._space, self._name, body=body)

    async def release(self) -> None:
        """Let somebody else take it at once."""
        if not self.held:
            return
        self.held = False
        found = await self._client.get(names.LEASES, self._space, self._name)
        if leases.holder_of(found) == self._holder and found is not None:
            version = value_at(found, "metadata.resourceVersion")
            body = {"metadata": {"resourceVersion": version}, "spec": {"leaseDurationSeconds": 1}}
            await self._client.patch(names.LEASES, self._space, self._name, body=body)

    def faults(self) -> list[Fault]:
        """What is wrong with it."""
        if self.other:
            words = f"{self.other} is the controller of this cluster: this one only looks on"
            return [Fault("another_controller", self.other, words)]
        if self.skew is not None and abs(self.skew) > SKEW_SECONDS:
            words = (
                f"this clock and the API server's are {abs(self.skew):.0f} s apart: nobody is "
                "asked to leave or ended before they agree (is there an NTP client?)"
            )
            return [Fault("clock_skew", "clock", words)]
        return []


def _skew(written: Json, now: float) -> float | None:
    """How far we are ahead of the server, by when it says that this was written just now."""
    times = [
        moment
        for row in rows_at(written, "metadata.managedFields")
        if (moment := moment_of(row.get("time"))) is not None
    ]
    # The server cuts to whole seconds.
    return now - (max(times) + 0.5) if times else None


async def keep_check(client: KubernetesClient, found: Json | None, now: float) -> None:
    """Say that the controller of our admission check is there; without, Kueue admits nothing.

    Args:
        client: of the API server.
        found: the check as it is, or None where the policy has none.
        now: Unix time.
    """
    if found is None or condition({**found}, "Active") == "True":
        return
    rows = [dict(row) for row in rows_at(found, "status.conditions") if row.get("type") != "Active"]
    rows.append(
        {
            "type": "Active",
            "status": "True",
            "reason": "Active",
            "message": "gpuwarden looks after it",
            "lastTransitionTime": leases.stamp(now),
        }
    )
    metadata = {key: value_at(found, f"metadata.{key}") for key in ("uid", "resourceVersion")}
    name = str(value_at(found, "metadata.name"))
    body = {"metadata": metadata, "status": {"conditions": rows}}
    await client.patch(names.CHECK_STATUS, None, name, body=body)


async def keep_quotas(
    client: KubernetesClient,
    policy: Policy,
    slots: Sequence[Slot],
    *,
    queues: Iterable[Json],
    cohorts: Iterable[Json],
) -> list[Fault]:
    """Have quotas be those of the bookings that are in force, and back afterwards.

    What is in force is written on each object with its quotas, and what they are without, so that a
    crash between two of them is seen and mended, whenever it was, and nobody takes it for drift.

    Args:
        client: of the API server.
        policy: whose queues.
        slots: that are in force.
        queues: the ClusterQueues as they are.
        cohorts: the cohorts as they are.
    """
    wanted = ",".join(sorted(slot.id for slot in slots))
    until = min((slot.end for slot in slots), default=0.0)
    there = {("ClusterQueue", _name(item)): item for item in queues}
    there |= {("Cohort", _name(item)): item for item in cohorts}
    plain, shares = shares_of(policy), shares_of(policy, slots)
    pairs = [
        (names.COHORTS, cohort(policy, plain), cohort(policy, shares)),
        *(
            (
                names.CLUSTER_QUEUES,
                cluster_queue(policy, team, plain),
                cluster_queue(policy, team, shares),
            )
            for team in policy.teams
        ),
    ]
    faults = []
    todo: list[tuple[int, Kind, dict[str, Any], Json]] = []
    for kind, base, body in pairs:
        name = body["metadata"]["name"]
        found = there.get((body["kind"], name))
        if found is None or not _is_ours(policy, found):
            words = f"{body['kind']} {name} is not there, or not gpuwarden's: run policy apply"
            faults.append(Fault("quota_object_missing", name, words))
            continue
        notes = shifts.annotations_of(wanted, base, body, until=until) if wanted else {}
        annotations = part_at(found, "metadata.annotations")
        if all(annotations.get(key) == notes.get(key) for key in shifts.ANNOTATIONS):
            continue
        if notes:
            body["metadata"]["annotations"] = notes
        growth = shifts.cards_of(body) - shifts.cards_of(found)
        todo.append((growth, kind, body, found))
    # Who gives goes first: for a moment there is less, never more than there is.
    for _growth, kind, body, found in sorted(todo, key=lambda each: each[0]):
        name = body["metadata"]["name"]
        body["metadata"]["resourceVersion"] = value_at(found, "metadata.resourceVersion")
        log.info("quotas", object=name, bookings=wanted)
        now = await client.apply(kind, None, body, manager=names.MANAGER, force=True)
        if more := shifts.stray(body, now):
            # Somebody else has written there, and an apply leaves that.
            locks = {key: value_at(now, f"metadata.{key}") for key in ("uid", "resourceVersion")}
            await client.patch(kind, None, name, body={"metadata": {**locks, "annotations": more}})
    return faults


def _name(found: Json) -> str:
    return str(value_at(found, "metadata.name"))


def _is_ours(policy: Policy, found: Json) -> bool:
    labels = part_at(found, "metadata.labels")
    return all(labels.get(key) == value for key, value in names.marks(policy).items())
