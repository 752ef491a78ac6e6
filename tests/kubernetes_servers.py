"""A fake Kubernetes: a real HTTP server over `Store`, with its controllers, for the tests.

    with kubernetes(folder) as cluster:
        cluster.create("Pod", "lab", {...})
        platform = Kubernetes.from_settings(cluster.settings(), folder)

What it answers was compared with a real kube-apiserver (tests/kubernetes_answers). Pods are on
paper: they end when a test says so (`cluster.let_go`); tests/kubernetes_pods.py makes real
processes of them.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from tests import kubernetes_admissions, kubernetes_applies, kubernetes_watches
from tests.kubernetes_controllers import reconcile
from tests.kubernetes_store import Grant, Refusal, Resource, Store, merged

from gpuwarden.ruleengine.kubernetes_settings import KubernetesSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tests.kubernetes_store import Json

_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>v[a-z0-9]+)"
    r"(?:/namespaces/(?P<namespace>[^/]+))?(?:/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+)"
    r"(?:/(?P<part>[a-z]+))?)?)?"
)
_SELECTOR = re.compile(
    r"(?P<lacks>!)?(?P<name>[^ =!]+)(?:(?P<not>!)?==?(?P<value>.*)| in \((?P<values>.*)\))?"
)
PAGE = 500


@dataclass
class Fault:
    """How the server fails, instead of what it would have done.

    Attributes:
        method, path: of the requests (a pattern that is searched).
        status: what it answers; 0 hangs until `Cluster.thaw`, 1 does it and then cuts the line.
        times: how often.
        body: of the answer, or None for a plain one.
        headers: of the answer.
    """

    method: str
    path: str
    status: int
    times: int = 1
    body: Json | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class User:
    """Somebody with a token.

    Attributes:
        name: in refusals.
        grants: what they may do; everything if None.
    """

    name: str
    grants: tuple[Grant, ...] | None = None


@dataclass
class Cluster:
    """A fake cluster."""

    folder: Path
    store: Store = field(default_factory=Store)
    users: dict[str, User] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    bodies: list[Json] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    thaw: threading.Event = field(default_factory=threading.Event)
    controllers: bool = True
    step: Callable[[Store], None] | None = None
    cuts: int = 0
    used: set[tuple[str, str, str]] = field(default_factory=set)
    url: str = ""

    def cut(self) -> None:
        """Break every watch that is open."""
        self.cuts += 1

    def settings(self, **changes: Any) -> KubernetesSettings:
        """engine.yaml's `kubernetes` for it."""
        path = self.folder / "kubeconfig"
        path.write_text(yaml.safe_dump(kubeconfig(self.url, self.token)), encoding="utf-8")
        return KubernetesSettings(kubeconfig=str(path), **{"timeout": "5s", **changes})

    def create(self, kind: str, namespace: str | None, body: Json) -> Json:
        """Make an object, as its user does."""
        return self.store.create(self.store.of_kind(kind), namespace, body)

    def pods(self, namespace: str = "lab") -> list[Json]:
        """Pods that are there, in the order of their names."""
        return self.store.list(self.store.of_kind("Pod"), namespace)

    def pod(self, name: str, namespace: str = "lab") -> Json:
        """One of them."""
        return self.store.get(self.store.of_kind("Pod"), namespace, name)

    def get(self, kind: str, name: str, namespace: str | None = "lab") -> Json:
        """An object."""
        return self.store.get(self.store.of_kind(kind), namespace, name)

    def patch(self, kind: str, name: str, body: Json, namespace: str | None = "lab") -> None:
        """Change an object, as its user does."""
        self.store.patch(self.store.of_kind(kind), namespace, name, body=body)

    def delete(self, kind: str, name: str, namespace: str | None = "lab") -> None:
        """Delete an object, as its user does."""
        self.store.delete(self.store.of_kind(kind), namespace, name)

    def node(self, name: str, *, gpus: int = 8, ready: str = "True") -> None:
        """A node, with its cards and whether it reports."""
        resource = self.store.of_kind("Node")
        with contextlib.suppress(Refusal):
            self.store.create(resource, None, {"metadata": {"name": name}})
        self.store.status(
            "Node",
            None,
            name,
            conditions=[{"type": "Ready", "status": ready}],
            allocatable={"nvidia.com/gpu": str(gpus), "cpu": "64"},
        )

    def run_pods(self) -> None:
        """Let every pod on a node run, as its kubelet would."""
        for pod in self.store.all("Pod"):
            if pod["spec"].get("nodeName") and pod["status"]["phase"] == "Pending":
                metadata = pod["metadata"]
                self.store.status("Pod", metadata["namespace"], metadata["name"], phase="Running")

    def let_go(self) -> None:
        """Let every pod that was told to go be gone, as its kubelet would."""
        for pod in self.store.all("Pod"):
            metadata = pod["metadata"]
            if "deletionTimestamp" in metadata:
                self.store.remove("Pod", metadata["namespace"], metadata["name"], metadata["uid"])

    def fail(self, method: str, path: str, status: int, *, times: int = 1, **more: Any) -> None:
        """Make the next requests fail; see `Fault`."""
        self.faults.append(Fault(method, path, status, times, **more))

    def asked(self, method: str, path: str) -> int:
        """How many requests there were."""
        return sum(m == method and re.search(path, p) is not None for m, p in self.requests)


def kubeconfig(url: str, token: str) -> Json:
    """A kubeconfig for a server and a token."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "engine", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "engine"}}],
        "current-context": "test",
    }


@contextlib.contextmanager
def kubernetes(
    folder: Path,
    *,
    grants: tuple[Grant, ...] | None = None,
    store: Store | None = None,
    step: Callable[[Store], None] | None = None,
) -> Iterator[Cluster]:
    """A fake cluster with its API on a free port of the loopback.

    Args:
        folder: for its kubeconfig.
        grants: what its user may do; everything if None.
        store: what it keeps; the kinds that the engine ends by default.
        step: of a further controller, taken in each round of the others.
    """
    cluster = Cluster(folder, store or Store(), step=step)
    cluster.users[cluster.token] = User("engine", grants)

    busy = threading.local()

    def changed() -> None:
        # What a controller changes is looked at in its own round.
        if cluster.controllers and not getattr(busy, "now", False):
            busy.now = True
            try:
                reconcile(cluster.store, cluster.step)
            finally:
                busy.now = False

    cluster.store.changed = changed
    server = _Server(("127.0.0.1", 0), _Handler)
    server.cluster = cluster
    cluster.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield cluster
    finally:
        cluster.thaw.set()
        server.shutdown()
        thread.join(10)
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    cluster: Cluster


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # header and body are two writes
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""

    def do_GET(self) -> None:
        """Handle a read."""
        self._serve()

    def do_POST(self) -> None:
        """Handle a creation."""
        self._serve()

    def do_PATCH(self) -> None:
        """Handle a change."""
        self._serve()

    def do_DELETE(self) -> None:
        """Handle a deletion."""
        self._serve()

    def _serve(self) -> None:
        cluster, url = self.server.cluster, urlsplit(self.path)
        length = int(self.headers.get("Content-Length", 0))
        raw = self.rfile.read(length)
        cluster.requests.append((self.command, url.path))
        if raw:
            cluster.bodies.append(json.loads(raw))
        fault = self._fault(url.path)
        if fault is not None and fault.status == 0:
            cluster.thaw.wait(60)
        if fault is not None and fault.status > 1:
            self._send(fault.status, fault.body or _plain(fault.status), fault.headers)
            return
        try:
            self._user()
            status, answer = self._answer(url.path, parse_qs(url.query), raw)
        except Refusal as refusal:
            status, answer = refusal.code, refusal.status
        if fault is not None:
            self.close_connection = True
            self.connection.shutdown(2)
            return
        if status:
            self._send(status, answer)

    def _user(self) -> User:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in self.server.cluster.users:
            raise Refusal(401, "Unauthorized", "Unauthorized")
        return self.server.cluster.users[token]

    def _fault(self, path: str) -> Fault | None:
        for fault in self.server.cluster.faults:
            if fault.times and fault.method == self.command and re.search(fault.path, path):
                fault.times -= 1
                return fault
        return None

    def _send(self, status: int, answer: Json, headers: Mapping[str, str] | None = None) -> None:
        content = json.dumps(answer).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    def _answer(self, path: str, query: dict[str, list[str]], raw: bytes) -> tuple[int, Json]:
        store = self.server.cluster.store
        if (found := _discovery(store, path)) is not None:
            return 200, found
        match = _PATH.fullmatch(path)
        if match is None or match["plural"] is None:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        version = f"{match['group']}/{match['version']}" if match["group"] else match["version"]
        resource = store.resource(version, match["plural"])
        namespace = match["namespace"]
        name = unquote(match["name"]) if match["name"] else None
        part = match["part"]
        self._authorise(resource, namespace, name=name, part=part)
        body = json.loads(raw) if raw else {}
        if self.command == "GET":
            return self._get(resource, namespace, name, part=part, query=query)
        if self.command == "PATCH":
            if self.headers.get("Content-Type") == "application/apply-patch+yaml":
                return self._apply(resource, namespace, str(name), query=query, body=body)
            return 200, self._patch(resource, namespace, str(name), part=part, body=body)
        if self.command == "DELETE":
            return 200, store.delete(resource, namespace, str(name), options=body)
        make = store.evict(str(namespace), str(name), body) if part == "eviction" else None
        body = {key: value for key, value in body.items() if key != "status"}
        if make is None:
            self._admit(resource, namespace, body, None)
        return 201, make or store.create(resource, namespace, body)

    def _admit(
        self, resource: Resource, namespace: str | None, found: Json, before: Json | None
    ) -> None:
        cluster = self.server.cluster
        cluster.warnings += kubernetes_admissions.admit(
            cluster.store, resource, namespace, found=found, before=before
        )

    def _get(
        self,
        resource: Resource,
        namespace: str | None,
        name: str | None,
        *,
        part: str | None,
        query: dict[str, list[str]],
    ) -> tuple[int, Json]:
        store = self.server.cluster.store
        if name is None and "watch" in query:
            self._watch(resource, namespace, query)
            return 0, {}
        if name is None:
            return 200, _page(store, resource, namespace, query)
        scale = store.scale(resource, str(namespace), name, body=None) if part else None
        return 200, scale or store.get(resource, namespace, name)

    def _apply(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        query: dict[str, list[str]],
        body: Json,
    ) -> tuple[int, Json]:
        return kubernetes_applies.apply(
            self.server.cluster.store,
            resource,
            namespace,
            name=name,
            body=body,
            manager=query["fieldManager"][0],
            force=query.get("force") == ["true"],
        )

    def _watch(
        self, resource: Resource, namespace: str | None, query: dict[str, list[str]]
    ) -> None:
        cluster, selector = self.server.cluster, query.get("labelSelector", [""])[0]
        cuts = cluster.cuts
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        said = kubernetes_watches.events(
            cluster.store,
            resource,
            namespace,
            version=int(query["resourceVersion"][0]),
            seconds=float(query.get("timeoutSeconds", ["60"])[0]),
            wanted=lambda found: _selected(found["metadata"].get("labels", {}), selector),
            broken=lambda: cluster.cuts != cuts or cluster.thaw.is_set(),
        )
        try:
            for event in said:
                self.wfile.write(kubernetes_watches.line(event))
            self.wfile.write(b"" if cluster.cuts != cuts else b"0\r\n\r\n")
        except OSError:
            self.close_connection = True
        if cluster.cuts != cuts:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(2)

    def _patch(
        self, resource: Resource, namespace: str | None, name: str, *, part: str | None, body: Json
    ) -> Json:
        if self.headers.get("Content-Type") != "application/merge-patch+json":
            raise Refusal(
                415,
                "UnsupportedMediaType",
                "the body of the request was in an unknown format - accepted media types include: "
                "application/merge-patch+json",
            )
        store = self.server.cluster.store
        if part == "scale":
            return store.scale(resource, str(namespace), name, body=body)
        if part == "status":
            metadata = body.get("metadata", {})
            locks = {key: metadata[key] for key in ("uid", "resourceVersion") if key in metadata}
            body = {"metadata": locks, "status": body["status"]}
        else:
            # What a status says, only its own sub-resource changes.
            body = {key: value for key, value in body.items() if key != "status"}
        if not part:
            before = store.get(resource, namespace, name)
            self._admit(resource, namespace, merged(before, body), before)
        return store.patch(resource, namespace, name, body=body)

    def _authorise(
        self, resource: Resource, namespace: str | None, *, name: str | None, part: str | None
    ) -> None:
        user = self._user()
        if user.grants is None:
            return
        reading = "get" if name else "watch" if "watch=true" in self.path else "list"
        verb = {"GET": reading, "POST": "create"}.get(self.command, self.command.lower())
        what = f"{resource.plural}/{part}" if part else resource.plural
        group = resource.group
        self.server.cluster.used.add((verb, group, what))
        if any(grant.allows(verb, group, what, namespace, name=name) for grant in user.grants):
            return
        title = f' "{name}"' if name else ""
        where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
        raise Refusal(
            403,
            "Forbidden",
            f'{resource.title()}{title} is forbidden: User "{user.name}" cannot {verb} resource '
            f'"{what}" in API group "{resource.group}"{where}',
        )


def _plain(status: int) -> Json:
    return {"kind": "Status", "status": "Failure", "message": f"fault {status}", "code": status}


def _discovery(store: Store, path: str) -> Json | None:
    """Which groups, versions and kinds there are; None for another path."""
    parts = path.strip("/").split("/")
    groups = {item.group for item in store.resources if item.group}
    match parts:
        case ["apis", group] if group in groups:
            versions = sorted({r.api_version for r in store.resources if r.group == group})
            known = [{"groupVersion": v, "version": v.rpartition("/")[2]} for v in versions]
            return {"kind": "APIGroup", "apiVersion": "v1", "name": group, "versions": known,
                    "preferredVersion": known[0]}  # fmt: skip
        case ["api", version] | ["apis", _, version] if "/".join(parts[1:]) in {
            item.api_version for item in store.resources
        }:
            api_version = "/".join(parts[1:])
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": version,
                "resources": [
                    {"name": item.plural, "kind": item.kind, "namespaced": item.namespaced}
                    for item in store.resources
                    if item.api_version == api_version
                ],
            }
    return None


def _page(
    store: Store, resource: Resource, namespace: str | None, query: dict[str, list[str]]
) -> Json:
    found = [
        item
        for item in store.list(resource, namespace)
        if _selected(item["metadata"].get("labels", {}), query.get("labelSelector", [""])[0])
        and _selected(
            {
                "spec.nodeName": item.get("spec", {}).get("nodeName", ""),
                "status.phase": item.get("status", {}).get("phase", ""),
                "metadata.name": item["metadata"]["name"],
            },
            query.get("fieldSelector", [""])[0],
        )
    ]
    start = int(query.get("continue", ["0"])[0])
    size = int(query.get("limit", [str(PAGE)])[0])
    rest = {"continue": str(start + size)} if start + size < len(found) else {}
    # As a real server: what is in a list does not say what it is.
    items = [
        {name: value for name, value in item.items() if name not in ("kind", "apiVersion")}
        for item in found[start : start + size]
    ]
    return {
        "kind": f"{resource.kind}List",
        "apiVersion": resource.api_version,
        "metadata": {"resourceVersion": str(store.version), **rest},
        "items": items,
    }


def _selected(values: dict[str, str], selector: str) -> bool:
    """Whether all requirements of a selector hold; commas in brackets do not end one."""
    return all(_required(values, part) for part in re.findall(r"[^,(]+(?:\([^)]*\))?", selector))


def _required(values: dict[str, str], requirement: str) -> bool:
    match = _SELECTOR.fullmatch(requirement)
    if match is None:
        raise Refusal(400, "BadRequest", f"unable to parse requirement: {requirement}")
    value = values.get(match["name"])
    if match["value"] is None and match["values"] is None:
        return (value is None) == (match["lacks"] is not None)
    if match["values"] is not None:
        return value in match["values"].split(",")
    return (value == match["value"]) == (match["not"] is None)
