"""The few calls to a Kubernetes API server that gpuwarden needs: to end pods, and to queue jobs.

lightkube reads the kubeconfig or the pod's service account and makes the connection: TLS, tokens
and their rotation, client certificates, exec plugins. The calls are made here, because its own
`delete` knows no preconditions, and a deletion without the uid may hit another pod of the name.
Objects are plain JSON, so that any controller can be read. Every answer has a time and a size; an
error of the API becomes one of ours, with what to do about it. lightkube is an extra of its own and
is loaded only by `connect`.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import yaml

from gpuwarden.errors import InvalidInput, MissingExtra, RefusedAction, ServiceUnavailable
from gpuwarden.kubernetes_replies import Change, Listing, items_of, refuse, version_of
from gpuwarden.platforms.kubernetes import checked_name

if TYPE_CHECKING:
    import builtins
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path

    from gpuwarden.platforms.kubernetes import Json, Reference

MAX_ANSWER_BYTES = 32 * 1024 * 1024
MAX_EVENT_BYTES = 4 * 1024 * 1024
"""Of one event of a watch: an object of etcd is at most 1.5 MiB."""
PAGE = 500
LEAST_PAGE = 20
"""Where a page of objects is larger than an answer may be, smaller ones are asked for."""
MAX_OBJECTS = 100_000
MAX_BUSY = 3
"""So often a request is sent that the server puts off."""
MOST_BUSY_SECONDS = 5.0
AGENT = "gpuwarden"
"""As which changes are recorded (`fieldManager`)."""
_POLICY = ("policy/v1", "policy/v1beta1")

_PLURALS = {
    ("v1", "Pod"): "pods",
    ("v1", "Node"): "nodes",
    ("v1", "Event"): "events",
    ("batch/v1", "Job"): "jobs",
    ("batch/v1", "CronJob"): "cronjobs",
    ("apps/v1", "ReplicaSet"): "replicasets",
    ("apps/v1", "Deployment"): "deployments",
    ("apps/v1", "StatefulSet"): "statefulsets",
    ("apps/v1", "DaemonSet"): "daemonsets",
}


class AnswerTooLarge(ServiceUnavailable):
    """An answer is larger than any that is read; part of it may not be."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Where objects of a kind are found.

    Attributes:
        api_version: such as `batch/v1`.
        plural: such as `jobs`, with a sub-resource after a slash.
    """

    api_version: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None) -> str:
        """Address below the server's.

        Args:
            namespace: or None for all, or for objects that have none.
            name: of one object, or None for the list.
        """
        plural, _, part = self.plural.partition("/")
        parts = ["apis" if "/" in self.api_version else "api", self.api_version]
        if namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(plural)
        if name is not None:
            parts += [quote(name, safe=""), *([part] if part else [])]
        return "/".join(parts)


PODS = Kind("v1", "pods")
NODES = Kind("v1", "nodes")
EVENTS = Kind("v1", "events")


class KubernetesClient:
    """An API server.

    Args:
        http: a client of httpx2 as lightkube makes it, with the server's address.
        timeout: seconds for one request with its answer.
        role: the manifest of what it may do, for messages.
    """

    def __init__(
        self,
        http: Any,
        timeout: float,
        *,
        role: str = "the engine's role, see deploy/kubernetes/engine-rbac.yaml",
    ) -> None:
        self._http = http
        self._role = role
        self._errors = (
            OSError,
            importlib.import_module("httpx2").HTTPError,
            # A token's file that is gone, or an exec plugin that fails, shows in the first request.
            importlib.import_module("lightkube.core.exceptions").ConfigError,
        )
        self._timeout = timeout
        self._kinds = {key: Kind(key[0], plural) for key, plural in _PLURALS.items()}
        self._policy: str | None = None

    @classmethod
    def connect(
        cls,
        kubeconfig: Path | None,
        context: str | None,
        *,
        timeout: float,
        command: str = "engine",
        **more: str,
    ) -> Self:
        """Read who we are; nothing is asked yet.

        Args:
            kubeconfig: the file, or None for the service account of the pod that this runs in.
            context: of the file, or None for its current one.
            timeout: seconds for one request.
            command: of gpuwarden that wants it, for messages.
            more: `role`, as of the class.

        Raises:
            MissingExtra: lightkube is not installed.
            InvalidInput: the kubeconfig cannot be used, or this is no pod.
        """
        try:
            config = importlib.import_module("lightkube.config.kubeconfig")
            adapter = importlib.import_module("lightkube.config.client_adapter")
            errors = importlib.import_module("lightkube.core.exceptions")
        except ModuleNotFoundError as error:
            raise MissingExtra(command, error.name or "lightkube", "kubernetes") from error
        try:
            if kubeconfig is None:
                known = config.KubeConfig.from_service_account()
            else:
                known = config.KubeConfig.from_file(str(kubeconfig))
            single = known.get(context_name=context) if context else known.get()
            if single is None or single.user is None:
                raise InvalidInput(f"kubernetes: {kubeconfig} names no user for its context")
            # Proxies must not see what is ended.
            http = adapter.AsyncClient(
                single, adapter.ConnectionParams(timeout=timeout, trust_env=False)
            )
        except errors.ConfigError as error:
            where = f"kubernetes.kubeconfig: {kubeconfig}" if kubeconfig else "kubernetes"
            hint = "" if kubeconfig else "; outside a pod, name a kubeconfig"
            raise InvalidInput(f"{where}: {error}{hint}") from error
        except (yaml.YAMLError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidInput(f"kubernetes.kubeconfig: {kubeconfig}: {error}") from error
        return cls(http, timeout, **more)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def kind(self, owner: Reference) -> Kind:
        """Where an object's kind is found; asked once for each that is not built in.

        A reference keeps the version by which it was made, which the server may serve no more: the
        object is then found by the version that its group prefers.

        Raises:
            RefusedAction: `unknown_kind`: the server has no such kind.
            ServiceUnavailable: not known.
        """
        key = (owner.api_version, owner.kind)
        if key not in self._kinds:
            found = await self._discovered(owner.api_version, owner.kind)
            if found is None and owner.group:
                preferred = await self.has_group(owner.group)
                if preferred not in (None, owner.api_version):
                    found = await self._discovered(str(preferred), owner.kind)
            if found is None:
                raise RefusedAction(
                    "unknown_kind", f"the API server has no {owner.kind} in {owner.api_version}"
                )
            self._kinds[key] = found
        return self._kinds[key]

    async def _discovered(self, api_version: str, kind: str) -> Kind | None:
        """A kind by what a version of a group says, or None where it does not know it."""
        root = "apis" if "/" in api_version else "api"
        try:
            found = await self._ask("GET", f"{root}/{api_version}")
        except RefusedAction as error:
            if error.reason != "gone":
                raise
            return None
        for item in items_of(found, "resources"):
            name = item.get("name")
            if item.get("kind") == kind and isinstance(name, str) and "/" not in name:
                return Kind(api_version, checked_name(name))
        return None

    async def has_group(self, group: str) -> str | None:
        """The version of an API group that the server prefers, or None where it has no such group.

        Raises:
            ServiceUnavailable: not known.
        """
        try:
            found = await self._ask("GET", f"apis/{checked_name(group)}")
        except RefusedAction as error:
            if error.reason != "gone":
                raise
            return None
        preferred = found.get("preferredVersion")
        version = preferred.get("groupVersion") if isinstance(preferred, dict) else None
        return version if isinstance(version, str) else None

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json | None:
        """An object, or None where there is none of that name.

        Raises:
            RefusedAction: `forbidden`.
            ServiceUnavailable: not known.
        """
        try:
            return await self._ask("GET", kind.path(namespace, checked_name(name)))
        except RefusedAction as error:
            if error.reason != "gone":
                raise
            return None

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> list[Json]:
        """All objects of a kind, page by page; see `listing`."""
        return (await self.listing(kind, namespace, labels=labels, fields=fields)).items

    async def listing(
        self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> Listing:
        """All objects of a kind, page by page, with the version that a watch goes on from.

        Args:
            kind: of them.
            namespace: or None for all.
            labels: selector, or an empty string.
            fields: selector, or an empty string.

        Raises:
            RefusedAction: `forbidden`.
            ServiceUnavailable: not known, or there are too many.
        """
        found: builtins.list[Json] = []
        words = {"labelSelector": labels, "fieldSelector": fields}
        token, size, restarted = "", PAGE, False
        while len(found) < MAX_OBJECTS:
            try:
                page = await self._ask(
                    "GET",
                    kind.path(namespace),
                    params={**words, "limit": str(size), "continue": token},
                )
            except AnswerTooLarge:
                if size <= LEAST_PAGE:
                    raise
                size = max(LEAST_PAGE, size // 5)
                continue
            except RefusedAction as error:
                # A list that took too long has expired (410), and begins again, once.
                if error.reason != "gone" or restarted or not token:
                    raise
                found, token, restarted = [], "", True
                continue
            found += items_of(page, "items")
            metadata = page.get("metadata")
            token = str(metadata.get("continue") or "") if isinstance(metadata, dict) else ""
            if not token:
                return Listing(found, version_of(metadata))
        raise ServiceUnavailable(f"more than {MAX_OBJECTS} {kind.plural}")

    async def watch(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        version: str,
        seconds: float,
        labels: str = "",
        opened: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[Change]:
        """What changes, from a version on, until the server ends the stream.

        Args:
            kind: of the objects.
            namespace: or None for all.
            version: of a listing or of the last change.
            seconds: after which the server ends it; it is cut off some time later.
            labels: selector, or an empty string.
            opened: is called once the server has taken the version, before anything changes.

        Raises:
            RefusedAction: `gone`: the version is too old, list again; `forbidden`.
            ServiceUnavailable: the stream broke, or said what no watch says.
        """
        words = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, math.ceil(seconds))),
            "labelSelector": labels,
        }
        params = {name: value for name, value in words.items() if value}
        pending = bytearray()
        limit = seconds + self._timeout
        try:
            async with (
                asyncio.timeout(limit),
                self._http.stream(
                    "GET",
                    kind.path(namespace),
                    params=params,
                    headers={"Accept": "application/json"},
                    timeout=limit,
                ) as response,
            ):
                if response.status_code != 200:
                    self._read(response.status_code, await response.aread())
                opened()
                async for chunk in response.aiter_bytes():
                    pending += chunk
                    *lines, rest = bytes(pending).split(b"\n")
                    pending = bytearray(rest)
                    if len(pending) > MAX_EVENT_BYTES:
                        raise ServiceUnavailable(
                            f"an event of {kind.plural} is larger than {MAX_EVENT_BYTES} bytes"
                        )
                    for line in lines:
                        if line.strip():
                            yield self._change(line)
        except TimeoutError as error:
            raise ServiceUnavailable(
                f"the API server did not end a watch of {kind.plural} within {limit:g} s"
            ) from error
        except self._errors as error:
            text = str(error) or type(error).__name__
            raise ServiceUnavailable(f"a watch of {kind.plural} broke: {text}") from error

    def _change(self, line: bytes) -> Change:
        """One event of a watch; an error in it is raised as if it had been the answer."""
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ServiceUnavailable("a watch sent what is no JSON") from error
        event = found.get("type") if isinstance(found, dict) else None
        body = found.get("object") if isinstance(found, dict) else None
        if not isinstance(body, dict):
            raise ServiceUnavailable("a watch sent an event without an object")
        if event == "ERROR":
            code = body.get("code")
            self._read(code if isinstance(code, int) and code >= 300 else 500, line=body)
        if event not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK"):
            raise ServiceUnavailable(f"a watch sent an event {str(event)[:40]!r}")
        return Change(str(event), body)

    async def apply(
        self, kind: Kind, namespace: str | None, body: Json, *, manager: str, force: bool
    ) -> Json:
        """Server-side apply: make an object, or bring the fields that are ours to what `body` says.

        Args:
            kind: of it.
            namespace: or None.
            body: with apiVersion, kind and name; `metadata.resourceVersion` in it must be the
                object's.
            manager: whose fields these are.
            force: whether to take fields that somebody else has set to another value.

        Raises:
            RefusedAction: `conflict` where it is another version, or a field is somebody else's;
                `invalid`, `denied`, `forbidden`.
            ServiceUnavailable: not known whether it was changed.
        """
        name = checked_name(str(body["metadata"]["name"]))
        return await self._ask(
            "PATCH",
            kind.path(namespace, name),
            params={"fieldManager": manager, "force": "true" if force else "false"},
            body=body,
            content_type="application/apply-patch+yaml",
        )

    async def remove(self, kind: Kind, namespace: str | None, found: Reference) -> None:
        """Delete an object, and no other of its name; what it owns goes after it.

        Raises:
            RefusedAction: `gone`, `conflict` (another one by now), `forbidden`.
            ServiceUnavailable: not known whether it was deleted.
        """
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": found.uid},
            "propagationPolicy": "Background",
        }
        await self._ask("DELETE", kind.path(namespace, checked_name(found.name)), body=body)

    async def create(self, kind: Kind, namespace: str | None, body: Json) -> Json:
        """Make an object.

        Raises:
            RefusedAction: it will not be made.
            ServiceUnavailable: not known whether it was.
        """
        return await self._ask(
            "POST", kind.path(namespace), params={"fieldManager": AGENT}, body=body
        )

    async def patch(self, kind: Kind, namespace: str | None, name: str, *, body: Json) -> Json:
        """Change an object by a merge patch; `metadata` of it may say which version is meant.

        Raises:
            RefusedAction: `conflict` where it is another version or object by now.
            ServiceUnavailable: not known whether it was changed.
        """
        return await self._ask(
            "PATCH",
            kind.path(namespace, checked_name(name)),
            params={"fieldManager": AGENT},
            body=body,
            content_type="application/merge-patch+json",
        )

    async def delete(self, namespace: str, pod: Reference, *, grace: float) -> None:
        """Delete a pod, and no other of its name.

        Args:
            namespace: of it.
            pod: which.
            grace: seconds between SIGTERM and SIGKILL; at least one, for zero would leave its
                processes running.

        Raises:
            RefusedAction: `gone`, `conflict` (another pod by now), `forbidden`.
            ServiceUnavailable: not known whether it was deleted.
        """
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **_options(pod, grace)}
        await self._ask("DELETE", PODS.path(namespace, checked_name(pod.name)), body=body)

    async def evict(self, namespace: str, pod: Reference, *, grace: float) -> None:
        """Delete a pod, and no other of its name, if its disruption budgets allow it.

        Args:
            namespace: of it.
            pod: which.
            grace: seconds between SIGTERM and SIGKILL, at least one.

        Raises:
            RefusedAction: `disruption_budget`, `gone`, `conflict`, `forbidden`.
            ServiceUnavailable: not known whether it was deleted.
        """
        body = {
            "apiVersion": await self._eviction_version(),
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": namespace},
            "deleteOptions": _options(pod, grace),
        }
        path = Kind("v1", "pods/eviction").path(namespace, checked_name(pod.name))
        await self._ask("POST", path, body=body)

    async def _eviction_version(self) -> str:
        """The policy API that the server has: v1 since 1.22, v1beta1 until 1.24."""
        if self._policy is None:
            found = await self._ask("GET", "apis/policy")
            served = {item.get("groupVersion") for item in items_of(found, "versions")}
            self._policy = next((name for name in _POLICY if name in served), _POLICY[0])
        return self._policy

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        """Send a request and read its whole answer, within a time and a size.

        One that the server puts off, for it has too many, is sent again when it says: it has done
        nothing of it.
        """
        content = None if body is None else json.dumps(body).encode()
        headers = {"Accept": "application/json"}
        if content is not None:
            headers["Content-Type"] = content_type
        words = {name: value for name, value in (params or {}).items() if value}
        send = functools.partial(
            self._http.stream, method, path, params=words, content=content, headers=headers
        )
        try:
            async with asyncio.timeout(self._timeout):
                for _ in range(MAX_BUSY - 1):
                    status, answer, told = await self._exchange(send)
                    wait = _wait_of(method, status, answer, told)
                    if wait is None:
                        return self._read(status, answer)
                    await asyncio.sleep(wait)
                status, answer, _told = await self._exchange(send)
        except TimeoutError as error:
            raise ServiceUnavailable(
                f"the API server did not answer within {self._timeout:g} s; see kubernetes.timeout"
            ) from error
        except self._errors as error:
            text = str(error) or type(error).__name__
            raise ServiceUnavailable(f"the API server does not answer: {text}") from error
        return self._read(status, answer)

    async def _exchange(self, send: Callable[[], Any]) -> tuple[int, bytes, str | None]:
        """One request: its status, its answer, and when another try may be made, if it says."""
        answer = bytearray()
        async with send() as response:
            async for chunk in response.aiter_bytes():
                answer += chunk
                if len(answer) > MAX_ANSWER_BYTES:
                    raise AnswerTooLarge(
                        f"the API server's answer is larger than {MAX_ANSWER_BYTES} bytes"
                    )
        return response.status_code, bytes(answer), response.headers.get("Retry-After")

    def _read(self, status: int, content: bytes = b"", *, line: Json | None = None) -> Json:
        """An answer, or the error that it stands for.

        Args:
            status: of HTTP.
            content: the answer.
            line: or what was read of it already.
        """
        try:
            found = json.loads(content) if line is None else line
        except (ValueError, RecursionError):
            found = None
        if not 200 <= status < 300 or not isinstance(found, dict):
            refuse(status, found if isinstance(found, dict) else {}, role=self._role)
        return found


def _wait_of(method: str, status: int, answer: bytes, told: str | None) -> float | None:
    """Seconds after which a request is sent again that the server has put off; None: it is not.

    429 of too many requests, which is no budget that forbids an eviction; or 503 of a server that
    goes down and says when, where nothing is changed.
    """
    busy = status == 429 and b"DisruptionBudget" not in answer
    if not (busy or (status == 503 and method == "GET" and told)):
        return None
    # A date, or nothing, is one second.
    seconds = int(told) if told and told.isascii() and told.isdecimal() else 1
    return min(MOST_BUSY_SECONDS, max(0.1, float(seconds)))


def _options(pod: Reference, grace: float) -> dict[str, Any]:
    return {
        "gracePeriodSeconds": max(1, math.ceil(grace)),
        "preconditions": {"uid": pod.uid},
    }
