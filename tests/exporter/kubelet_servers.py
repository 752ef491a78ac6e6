"""A stand-in for a node's kubelet: its socket, served by a real gRPC server, logs and cgroups."""

from __future__ import annotations

import threading
from concurrent import futures
from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def varint(value: int) -> bytes:
    """A number as protocol buffers write it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: bytes | str) -> bytes:
    """A field with a length."""
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def devices(resource: str, *ids: str) -> bytes:
    """Devices of a container, with the topology that the kubelet adds."""
    topology = field(3, field(1, varint(1 << 3) + varint(1)))
    return field(2, field(1, resource) + b"".join(field(2, name) for name in ids) + topology)


def claim(driver: str, device: str) -> bytes:
    """A device that a container was given by a claim (DRA)."""
    resource = field(1, field(1, "k8s.gpu.nvidia.com/claim=x")) + field(2, driver)
    resource += field(3, "node1") + field(4, device)
    return field(5, field(2, "claim") + field(3, "lab") + field(4, resource))


def pod(namespace: str, name: str, *containers: bytes) -> bytes:
    """A pod with one container for each of its parts."""
    # Processors and memory come beside the devices, and are of no interest.
    rest = field(3, varint(0) + varint(1)) + varint(200 << 3 | 1) + bytes(8)
    parts = b"".join(
        field(3, field(1, f"c{number}") + part + rest) for number, part in enumerate(containers)
    )
    return field(1, field(1, name) + field(2, namespace) + parts)


class Kubelet:
    """A node's kubelet."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "kubelet.sock"
        self.logs = folder / "logs"
        self.cgroups = folder / "cgroup"
        self.logs.mkdir()
        self.cgroups.mkdir()
        self.answer = b""
        self.code: grpc.StatusCode | None = None
        self.go_on = threading.Event()
        self.go_on.set()
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        handler = grpc.unary_unary_rpc_method_handler(self._list)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": handler}),)
        )
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def _list(self, _request: bytes, context: grpc.ServicerContext) -> bytes:
        self.go_on.wait(60)
        if self.code is not None:
            context.abort(self.code, "the feature gate is off")
        return self.answer

    def has(self, namespace: str, name: str, uid: str, *, alive: bool = True) -> None:
        """Give the node a pod: its log's folder, and its cgroup while it lives."""
        (self.logs / f"{namespace}_{name}_{uid}").mkdir()
        if alive:
            self.cgroup(uid).mkdir(parents=True)

    def cgroup(self, uid: str) -> Path:
        """A pod's cgroup."""
        inside = f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
        return self.cgroups / "kubepods.slice/kubepods-burstable.slice" / inside

    def says(self, pods: Sequence[bytes]) -> None:
        """What it answers with from now on."""
        self.answer = b"".join(pods)

    def stop(self) -> None:
        """End it."""
        self.go_on.set()
        self._server.stop(None).wait(10)
