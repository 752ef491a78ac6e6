"""Kueue behind the port of policies: what the API server has, and single steps on it.

Objects are applied on the server under our own name, so that what others set in them stays. What
does not carry our mark is never changed or deleted: an object is looked at right before, and the
change names the version that was seen.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml

from gpuwarden.clock import SystemClock
from gpuwarden.errors import InvalidInput, RefusedAction, ServiceUnavailable
from gpuwarden.kubernetes_clients import Kind, KubernetesClient
from gpuwarden.platforms.kubernetes import UnexpectedObject, reference_of
from gpuwarden.scheduling.engines import Act
from gpuwarden.scheduling.kueue import held_jobs, names, renderings, shifts
from gpuwarden.scheduling.kueue.objects import found_object, leftovers, place_of, title
from gpuwarden.scheduling.kueue.shapes import rows_at

if TYPE_CHECKING:
    from gpuwarden.clock import Clock
    from gpuwarden.platforms.kubernetes import Json
    from gpuwarden.scheduling.engines import FoundObject, Rendering, Step
    from gpuwarden.scheduling.policies import Policy

_DEPLOYMENTS: Final = Kind("apps/v1", "deployments")
_IMAGE = re.compile(r":v?(?P<version>[0-9]+\.[0-9]+\.[0-9]+)")


def connect(policy: Policy, command: str) -> KubernetesClient:
    """A client as the policy says; nothing is asked yet.

    Args:
        policy: its `kueue`.
        command: of gpuwarden that wants it, for messages.

    Raises:
        MissingExtra: lightkube is not installed.
        InvalidInput: the kubeconfig cannot be used, or there is none.
    """
    terms = policy.kueue
    path = own_kubeconfig() if terms.kubeconfig is None else Path(terms.kubeconfig)
    return KubernetesClient.connect(
        path,
        terms.context,
        timeout=terms.timeout,
        command=command,
        role="its role, see docs/scheduling-kueue.md#rights",
    )


def own_kubeconfig() -> Path | None:
    """Where kubectl would look, so that one policy serves people and the daemon's pod alike.

    KUBECONFIG first (of several files the first that is there: they are not merged), then the
    service account of a pod, which is told by None, then ~/.kube/config.

    Raises:
        InvalidInput: there is none, and this is no pod.
    """
    named = [Path(word) for word in os.environ.get("KUBECONFIG", "").split(os.pathsep) if word]
    if named:
        return next((path for path in named if path.exists()), named[0])
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return None
    own = Path("~/.kube/config")
    with contextlib.suppress(RuntimeError):  # a user without a home
        own = own.expanduser()
    if not own.exists():
        raise InvalidInput(
            f"there is no kubeconfig: set KUBECONFIG, have {own}, or name one by "
            "kueue.kubeconfig of the policy"
        )
    return own


async def kueue_version(client: KubernetesClient) -> str | None:
    """Kueue's version by the image of its controller; None where that cannot be seen.

    Raises:
        ServiceUnavailable: the server does not answer.
    """
    labels = "app.kubernetes.io/name=kueue,control-plane=controller-manager"
    try:
        found = await client.list(_DEPLOYMENTS, None, labels=labels)
    except RefusedAction:
        return None  # not everybody may look into Kueue's namespace
    for item in found:
        for container in rows_at(item, "spec.template.spec.containers"):
            match = _IMAGE.search(str(container.get("image", "")))
            if match is not None:
                return match["version"]
    return None


def adapter(policy: Policy) -> KueueAdapter:
    """The adapter of a policy's cluster."""
    return KueueAdapter(policy)


class KueueAdapter:
    """The API server of one policy.

    Args:
        policy: where the server is, and whose marks are looked for.
        client: of the server; by default one is made when it is first needed.
        clock: by which bookings are over.
    """

    def __init__(
        self,
        policy: Policy,
        client: KubernetesClient | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._policy = policy
        self._client = client
        self._clock = clock or SystemClock()

    def render(self, policy: Policy, *, version: str | None, init: bool = False) -> Rendering:
        """Say what a policy comes to.

        Args:
            policy: that checks without errors for Kueue.
            version: of Kueue; None is the newest that is known.
            init: a cluster of its own, which gpuwarden does not make.

        Raises:
            RefusedAction: `init` was asked for.
        """
        if init:
            raise RefusedAction(
                "no_init",
                "a Kubernetes cluster and Kueue are installed by their own tools: see "
                "https://kueue.sigs.k8s.io/docs/installation; --init is for Slurm",
            )
        return renderings.render(policy, version=version)

    def _connected(self) -> KubernetesClient:
        if self._client is None:
            self._client = connect(self._policy, "policy --engine kueue")
        return self._client

    async def version(self) -> str:
        """Kueue's version, or the newest that is known where it cannot be seen.

        Raises:
            ServiceUnavailable: it does not answer, or there is no Kueue.
        """
        client = self._connected()
        if await client.has_group("kueue.x-k8s.io") is None:
            raise ServiceUnavailable(
                "the cluster has no kueue.x-k8s.io: install Kueue first "
                "(https://kueue.sigs.k8s.io/docs/installation)"
            )
        return await kueue_version(client) or renderings.NEWEST

    async def read(self, wanted: Rendering) -> tuple[FoundObject, ...]:
        """Say what the server has: everything marked, and everything that has a wanted name.

        Raises:
            ServiceUnavailable: it does not answer, or not all of it.
            RefusedAction: it may not be read.
        """
        client, policy = self._connected(), self._policy
        found: dict[tuple[str, str], FoundObject] = {}
        movable: list[Json] = []
        for kind, where in names.KINDS.items():
            for item in await self._marked(kind, where, wanted):
                if kind in shifts.KINDS:
                    movable.append({**item, "kind": kind})
                    continue
                each = found_object(item, kind, policy=policy)
                found[each.key] = each
        plain, refused = shifts.without_shifts(movable, self._clock.wall())
        for item in plain:
            kind = str(item["kind"])
            why = refused.get(f"{kind} {title(item)}", "")
            each = found_object(item, kind, policy=policy, shift=why)
            found[each.key] = each
        for one in wanted.objects:
            if one.key not in found:
                there = await client.get(names.KINDS[one.kind], *place_of(one.name))
                if there is not None:
                    found[one.key] = found_object(there, one.kind, policy=policy)
        for item in await client.list(names.WORKLOADS, None, labels=held_jobs.selector(policy)):
            each = held_jobs.held_object(policy, item)
            found[each.key] = each
        order = {kind: place for place, kind in enumerate(names.KINDS)}
        # What is made last goes first: jobs are given back once the controller is gone that could
        # take them again, and before their queues go.
        order[held_jobs.KIND] = order["ServiceAccount"]
        return tuple(sorted(found.values(), key=lambda one: (order[one.kind], one.name)))

    async def _marked(self, kind: str, where: Kind, wanted: Rendering) -> list[Json]:
        """Everything of a kind that is ours; of a kind that an old server lacks, nothing."""
        client = self._connected()
        try:
            return await client.list(where, None, labels=names.selector(self._policy))
        except RefusedAction as error:
            if error.reason != "gone" or where.api_version != names.ADMISSION:
                raise
            if any(each.kind == kind for each in wanted.objects):
                raise RefusedAction(
                    "no_admission_policies",
                    f"this Kubernetes has no {kind} in {where.api_version} (since 1.30): update "
                    "it, or write kueue: {admission: none}; raw Jobs are then held to nothing",
                ) from error
            return []

    async def carry_out(self, step: Step) -> None:
        """Do one step; done before, it changes nothing.

        Raises:
            ServiceUnavailable: the server does not answer; it may or may not have been done.
            RefusedAction: the server refuses it, or what is to be changed is not gpuwarden's.
        """
        if step.act is Act.RELEASE:
            await self._release(*place_of(step.name))
            return
        client, kind = self._connected(), names.KINDS[step.kind]
        space, name = place_of(step.name)
        there = await client.get(kind, space, name)
        if there is not None and not found_object(there, step.kind, policy=self._policy).marked:
            raise RefusedAction(
                "not_ours",
                f"{step.kind} {step.name} does not carry gpuwarden's mark: rename it, or give it "
                f"the labels {names.selector(self._policy)} to hand it over",
            )
        if step.act is Act.DELETE:
            if there is not None:
                await self._delete(client, kind, space, there, step=step)
            return
        if step.wanted is None:
            raise ValueError("a step that makes something names it")
        body = yaml.safe_load(step.wanted.text)
        if there is None:
            await self._make(client, kind, space, body)
            return
        if step.kind in shifts.KINDS:
            fields = [change.field for change in step.changes]
            body = shifts.kept(body, there, fields, self._clock.wall())
        body["metadata"]["resourceVersion"] = there["metadata"]["resourceVersion"]
        now = await client.apply(kind, space, body, manager=names.MANAGER, force=True)
        more, notes = leftovers(body, now), shifts.stray(body, now)
        if more or notes:
            metadata = {key: now["metadata"][key] for key in ("uid", "resourceVersion")}
            metadata |= {"annotations": notes} if notes else {}
            await client.patch(kind, space, name, body={"metadata": metadata, **more})

    async def _make(
        self, client: KubernetesClient, kind: Kind, space: str | None, body: Json
    ) -> None:
        try:
            # Not forced: what somebody else made meanwhile is theirs.
            await client.apply(kind, space, body, manager=names.MANAGER, force=False)
        except RefusedAction as error:
            if error.reason == "gone" and space is not None:
                raise RefusedAction(
                    "no_namespace",
                    f"{error}: the namespaces of the controller and of teams must be there: "
                    f"kubectl create namespace {space}",
                ) from error
            raise

    async def _release(self, space: str | None, name: str) -> None:
        """Give a Workload back; Kueue writes on them often, and another look is had then."""
        client = self._connected()
        for last in (False, False, True):
            there = await client.get(names.WORKLOADS, space, name)
            body = None if there is None else held_jobs.release_of(there)
            if body is None:
                return
            try:
                await client.patch(names.WORKLOADS, space, name, body=body)
            except RefusedAction as error:
                if error.reason == "gone":
                    return
                if error.reason != "conflict" or last:
                    raise
            else:
                return

    async def _delete(
        self, client: KubernetesClient, kind: Kind, space: str | None, there: Json, *, step: Step
    ) -> None:
        try:
            reference = reference_of(there, api_version=kind.api_version, kind=step.kind)
            await client.remove(kind, space, reference)
        except UnexpectedObject as error:
            raise ServiceUnavailable(f"{step.kind} {step.name}: {error}") from error
        except RefusedAction as error:
            if error.reason != "gone":
                raise

    async def aclose(self) -> None:
        """Let go of connections."""
        if self._client is not None:
            await self._client.aclose()
