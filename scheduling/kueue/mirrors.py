"""What an API server has, kept up to date by list and watch, trimmed to what is read here.

A watch that ends is taken up where it stood; one that the server has forgotten (410), or refuses
again and again, is begun anew with a list; one that breaks is tried again, ever later. A mirror
that has not heard of its server for a while says so, and nobody decides by it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import structlog

from gpuwarden.errors import GpuwardenError, RefusedAction, ServiceUnavailable
from gpuwarden.platforms.kubernetes import value_at
from gpuwarden.scheduling.kueue.shapes import part_at, rows_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuwarden.clock import Clock
    from gpuwarden.kubernetes_clients import Kind, KubernetesClient
    from gpuwarden.kubernetes_replies import Change
    from gpuwarden.platforms.kubernetes import Json

WATCH_SECONDS: Final = 120.0
"""After which a watch is ended and taken up again: that it is silent then proves that it lives."""
STALE_SECONDS: Final = 240.0
LASTING_SECONDS: Final = 10.0
"""A watch that was there for so long was no failure: a proxy has cut it, and it is taken up."""
RELIST_SECONDS: Final = 1800.0
"""So often everything is listed anew: a server that was set back to an older state sends nothing
to a watch from a version that it has not reached yet."""
MOST_FAILURES: Final = 3
"""After as many in a row a version is given up: a server may never take it again."""
FIRST_PAUSE: Final = 0.5
MOST_PAUSE: Final = 30.0
MAX_OBJECTS: Final = 200_000

log = structlog.get_logger(__name__)


class Mirror:
    """All objects of one kind.

    Args:
        client: of the server.
        kind: of the objects.
        clock: time.
        changed: is called after each change.
        namespace: or None for all.
        trim: what is kept of an object; None of one that is not kept.
        pause: seconds before what failed is tried again at first; then twice as long each time.
    """

    def __init__(
        self,
        client: KubernetesClient,
        kind: Kind,
        *,
        clock: Clock,
        changed: Callable[[], None],
        namespace: str | None = None,
        trim: Callable[[Json], Json | None],
        pause: float = FIRST_PAUSE,
    ) -> None:
        self._client = client
        self._pause = pause
        self.kind = kind
        self._clock = clock
        self._changed = changed
        self._namespace = namespace
        self._trim = trim
        self._objects: dict[str, Json] = {}
        self._version = ""
        self._heard: float | None = None
        self._listed = 0.0
        self.problem = ""

    def objects(self) -> list[Json]:
        """As of the last that was heard."""
        return list(self._objects.values())

    def current(self) -> bool:
        """Whether what it has can be decided by."""
        heard = self._heard
        return heard is not None and self._clock.monotonic() - heard < STALE_SECONDS

    async def run(self) -> None:
        """Follow the server until cancelled."""
        pause, failures = self._pause, 0
        while True:
            begun = self._clock.monotonic()
            try:
                if not self._version or begun - self._listed >= RELIST_SECONDS:
                    await self._list()
                await self._watch()
                pause, failures = self._pause, 0
                continue
            except RefusedAction as error:
                # Forgotten by the server: what happened meanwhile is only in a new list.
                self._version = ""
                self.problem = "" if error.reason == "gone" else str(error)
                if error.reason == "gone" and pause == self._pause:
                    pause *= 2
                    continue
            except GpuwardenError as error:
                self.problem = str(error)
            if self._clock.monotonic() - begun >= LASTING_SECONDS:
                pause, failures = self._pause, 0
            failures += 1
            if failures >= MOST_FAILURES:
                self._version = ""
            if self.problem:
                log.warning("watch", kind=self.kind.plural, problem=self.problem)
            await asyncio.sleep(pause)
            pause = min(MOST_PAUSE, pause * 2)

    async def _list(self) -> None:
        listing = await self._client.listing(self.kind, self._namespace)
        if len(listing.items) > MAX_OBJECTS:
            raise ServiceUnavailable(f"more than {MAX_OBJECTS} {self.kind.plural}")
        if not listing.version:
            raise ServiceUnavailable(f"a list of {self.kind.plural} has no version")
        kept = {}
        for item in listing.items:
            if (own := self._trim(item)) is not None:
                kept[_key(item)] = own
        self._objects, self._version = kept, listing.version
        self._listed = self._clock.monotonic()
        self._hear()
        self._changed()

    async def _watch(self) -> None:
        watch = self._client.watch(
            self.kind,
            self._namespace,
            version=self._version,
            seconds=WATCH_SECONDS,
            # A quiet kind of which every stream is cut, by a proxy say, is followed all the same.
            opened=self._hear,
        )
        async for change in watch:
            self._take(change)
        # It ended as it should: the server is there.
        self._hear()

    def _take(self, change: Change) -> None:
        self._hear()
        self._version = change.version or self._version
        if change.event == "BOOKMARK":
            return
        key, own = _key(change.found), self._trim(change.found)
        before = self._objects.get(key)
        if change.event == "DELETED" or own is None:
            self._objects.pop(key, None)
            own = None
        else:
            self._objects[key] = own
        # Nodes report all the time, and what is read of them seldom changes.
        if own != before:
            self._changed()

    def _hear(self) -> None:
        self._heard = self._clock.monotonic()
        self.problem = ""


def _key(found: Json) -> str:
    return str(value_at(found, "metadata.uid"))


_METADATA: Final = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "labels",
    "annotations",
    "ownerReferences",
    "creationTimestamp",
    "deletionTimestamp",
)


def whole(found: Json) -> Json | None:
    """An object as it is."""
    return found


def trim_workload(found: Json) -> Json | None:
    """A Workload without what is not read: of its pods only what they ask for, and where."""
    kept = _trimmed(found, "status")
    spec = dict(part_at(found, "spec"))
    spec["podSets"] = [
        {"count": row.get("count"), "template": trim_template(part_at(row, "template"))}
        for row in rows_at(found, "spec.podSets")
    ]
    return {**kept, "spec": spec}


def trim_job(found: Json) -> Json | None:
    """A Job, likewise."""
    kept = _trimmed(found)
    return {**kept, "spec": {"template": trim_template(part_at(found, "spec.template"))}}


def trim_template(found: Json) -> Json:
    """What a pod asks for, of which nodes, and what it runs."""
    spec = part_at(found, "spec")
    containers = [
        {
            "resources": part_at(row, "resources"),
            "command": _cut(row.get("command")),
            "workingDir": str(row.get("workingDir") or "")[:4096],
        }
        for row in rows_at(spec, "containers")
    ]
    parts = {key: spec[key] for key in ("nodeSelector", "affinity") if spec.get(key)}
    return {"spec": {"containers": containers, **parts}}


def _cut(command: Any) -> list[str]:
    """A command line, up to a length that a command line for a training has."""
    words = command if isinstance(command, list) else []
    return [str(word)[:4096] for word in words[:200]]


def trim_pod(found: Json) -> Json | None:
    """A pod of a Job: where it is and how it goes; None of all others."""
    if not any(row.get("kind") == "Job" for row in rows_at(found, "metadata.ownerReferences")):
        return None
    kept = _trimmed(found, "status")
    kept["metadata"] = {
        key: value
        for key, value in kept["metadata"].items()
        if key not in ("labels", "annotations")
    }
    spec = part_at(found, "spec")
    kept["spec"] = {key: spec.get(key) for key in ("nodeName", "terminationGracePeriodSeconds")}
    kept["spec"]["containers"] = [
        {"resources": part_at(row, "resources")} for row in rows_at(spec, "containers")
    ]
    status = part_at(found, "status")
    kept["status"] = {key: status.get(key) for key in ("phase", "startTime", "containerStatuses")}
    if not spec.get("nodeName"):
        kept["status"]["conditions"] = rows_at(status, "conditions")
    return kept


def trim_node(found: Json) -> Json | None:
    """A node's name and whether it reports."""
    ready = [row for row in rows_at(found, "status.conditions") if row.get("type") == "Ready"]
    name = value_at(found, "metadata.name")
    return {"metadata": {"name": name}, "status": {"conditions": ready}}


def _trimmed(found: Json, *parts: str) -> dict[str, Any]:
    metadata = part_at(found, "metadata")
    kept: dict[str, Any] = {part: found[part] for part in parts if part in found}
    kept["metadata"] = {key: metadata[key] for key in _METADATA if key in metadata}
    return kept
