"""Server-side apply for the fake API server: who owns which field, and who may change it.

As a real server does for what the tests apply: maps are merged, lists are taken as a whole; a field
that its manager leaves out of the next apply goes, unless somebody else owns it too; a field of
another manager's is a conflict unless it has the same value or the apply is forced.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from tests.kubernetes_store import Refusal

if TYPE_CHECKING:
    from tests.kubernetes_store import Json, Resource, Store

Path = tuple[str, ...]
_OWN = ("apiVersion", "kind", "metadata.name", "metadata.namespace", "metadata.resourceVersion")


def apply(
    store: Store,
    resource: Resource,
    namespace: str | None,
    *,
    name: str,
    body: Json,
    manager: str,
    force: bool,
) -> tuple[int, Json]:
    """Make or change an object; the answer's status and body."""
    with store.lock:
        wanted = {path: value for path, value in _leaves(body, ()) if ".".join(path) not in _OWN}
        try:
            before = store.get(resource, namespace, name)
        except Refusal:
            if "resourceVersion" in body.get("metadata", {}):
                raise Refusal(
                    409,
                    "Conflict",
                    f'Operation cannot be fulfilled on {resource.title()} "{name}": the object has '
                    "been deleted",
                ) from None
            made = store.create(resource, namespace, body)
            _own(store, resource, namespace, name=name, manager=manager, paths=set(wanted))
            return 201, made
        owners = store.owners.get((resource, namespace, name), {})
        _refuse_conflicts(before, wanted, owners, manager=manager, force=force, name=name)
        patch: Json = {
            "metadata": {
                part: body["metadata"][part]
                for part in ("resourceVersion", "uid")
                if part in body.get("metadata", {})
            }
        }
        elsewhere = {path for other, paths in owners.items() if other != manager for path in paths}
        left = owners.get(manager, set()) - set(wanted) - elsewhere
        for path in sorted({_emptied(before, path, left) for path in left}):
            _put(patch, path, None)
        for path, value in wanted.items():
            _put(patch, path, value)
        same = all(_at(before, path) == value for path, value in wanted.items())
        gone = any(_at(before, path) is not None for path in _nulls(patch, ()))
        if force:
            for other, paths in owners.items():
                if other != manager:
                    paths -= {path for path in wanted if _at(before, path) != wanted[path]}
        # What changes nothing makes no new version.
        found = before
        if not same or gone or _stale(before, patch):
            found = store.patch(resource, namespace, name, body=patch)
        _own(store, resource, namespace, name=name, manager=manager, paths=set(wanted))
        return 200, found


def _emptied(before: Json, path: Path, left: set[Path]) -> Path:
    """The outermost field that is empty once these are gone: it goes as well."""
    for size in range(1, len(path)):
        inside = [(*path[:size], *sub) for sub, _ in _leaves(_at(before, path[:size]), ())]
        if size > 1 and all(each in left for each in inside):
            return path[:size]
    return path


def _stale(before: Json, patch: Json) -> bool:
    wanted = patch["metadata"].get("resourceVersion")
    return wanted is not None and wanted != before["metadata"]["resourceVersion"]


def _refuse_conflicts(
    before: Json,
    wanted: dict[Path, Any],
    owners: dict[str, set[Path]],
    *,
    manager: str,
    force: bool,
    name: str,
) -> None:
    owned = {path: other for other, paths in owners.items() if other != manager for path in paths}
    clash = sorted(
        f'conflict with "{other}": .{".".join(path)}'
        for path, value in wanted.items()
        if (other := owned.get(path)) is not None and _at(before, path) != value
    )
    if clash and not force:
        raise Refusal(409, "Conflict", f'Apply failed on "{name}": {"; ".join(clash)}')


def _own(
    store: Store,
    resource: Resource,
    namespace: str | None,
    *,
    name: str,
    manager: str,
    paths: set[Path],
) -> None:
    store.owners.setdefault((resource, namespace, name), {})[manager] = paths


def leaves(body: Json) -> set[Path]:
    """The paths of all fields that a body sets."""
    return {path for path, _ in _leaves(body, ()) if ".".join(path) not in _OWN}


def _leaves(value: Any, path: Path) -> list[tuple[Path, Any]]:
    if isinstance(value, dict) and value:
        return [leaf for name, item in value.items() for leaf in _leaves(item, (*path, name))]
    return [(path, copy.deepcopy(value))]


def _nulls(patch: Any, path: Path) -> list[Path]:
    if isinstance(patch, dict):
        return [null for name, item in patch.items() for null in _nulls(item, (*path, name))]
    return [path] if patch is None else []


def _put(patch: Json, path: Path, value: Any) -> None:
    here = patch
    for name in path[:-1]:
        here = here.setdefault(name, {})
    here[path[-1]] = value


def _at(found: Any, path: Path) -> Any:
    here = found
    for name in path:
        here = here.get(name) if isinstance(here, dict) else None
    return here
