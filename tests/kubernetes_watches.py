"""Watches of the fake API server: streams of changes, with bookmarks, that end, break or expire."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from tests.kubernetes_store import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.kubernetes_store import Event, Json, Resource, Store

_LOOK_SECONDS = 0.02


def events(
    store: Store,
    resource: Resource,
    namespace: str | None,
    *,
    version: int,
    seconds: float,
    wanted: Callable[[Json], bool],
    broken: Callable[[], bool],
) -> Iterator[Json]:
    """What a watch sends.

    Args:
        store: of the cluster.
        resource: of the objects.
        namespace: or None for all.
        version: after which changes are told.
        seconds: until it ends by itself, with a bookmark.
        wanted: whether an object meets the selectors.
        broken: whether the stream is to be cut off now.
    """
    end = time.monotonic() + seconds
    at = version
    while time.monotonic() < end and not broken():
        with store.lock:
            if at < store.oldest:
                yield {"type": "ERROR", "object": _expired(at, store.oldest)}
                return
            news = [event for event in store.events if event.version > at]
            if not news:
                store.news.wait(_LOOK_SECONDS)
        for event in news:
            at = event.version
            if (said := _said(event, resource, namespace, wanted=wanted)) is not None:
                yield said
    if not broken():
        metadata = {"resourceVersion": str(at)}
        body = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
        yield {"type": "BOOKMARK", "object": body}


def line(event: Json) -> bytes:
    """One event, as a chunk of the stream."""
    content = json.dumps(event).encode() + b"\n"
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


def _said(
    event: Event, resource: Resource, namespace: str | None, *, wanted: Callable[[Json], bool]
) -> Json | None:
    """An event as this watch sees it: what no longer meets its selectors is gone for it."""
    own, space, _name = event.key
    if own != resource or namespace not in (None, space):
        return None
    now = event.kind != "DELETED" and wanted(event.found)
    then = event.before is not None and wanted(event.before)
    if not now and not then:
        return None
    kind = "DELETED" if not now else "MODIFIED" if then else "ADDED"
    body: dict[str, Any] = {"apiVersion": own.api_version, "kind": own.kind, **event.found}
    return {"type": kind, "object": body}


def _expired(version: int, oldest: int) -> Json:
    return Refusal(410, "Expired", f"too old resource version: {version} ({oldest})").status
