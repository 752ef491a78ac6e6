"""A real kube-apiserver with its etcd and controllers, as tools/kubernetes.py builds them.

All of it on free ports of the loopback, in a folder of its own, stopped by pid.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tests.kubernetes_servers import kubeconfig
from tests.servers import ServerFailed, free_port, until

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.kubernetes_clients import Kind, KubernetesClient
from gpuwarden.ruleengine.kubernetes_settings import KubernetesSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

HOME = Path(__file__).resolve().parents[1] / "build" / "kubernetes" / "bin"
_SECONDS = 90.0
CONTROLLERS = "deployment,replicaset,statefulset,job,garbagecollector,disruption"
USERS = {"admin": "system:masters", "engine": "gpuwarden", "nobody": "nobody"}


@dataclass
class ApiServer:
    """A running server."""

    folder: Path
    url: str

    def kubeconfig(self, user: str) -> Path:
        """Of one of `USERS`, or of somebody whom it does not know."""
        path = self.folder / f"{user}.kubeconfig"
        content = kubeconfig(self.url, f"token-of-{user}")
        authority = str(self.folder / "certificates" / "apiserver.crt")
        content["clusters"][0]["cluster"]["certificate-authority"] = authority
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path

    def client(self, user: str) -> KubernetesClient:
        """A connection in somebody's name."""
        return KubernetesClient.connect(self.kubeconfig(user), None, timeout=20)

    def settings(self, user: str = "admin") -> KubernetesSettings:
        """engine.yaml's `kubernetes`."""
        return KubernetesSettings(kubeconfig=str(self.kubeconfig(user)))


def built() -> bool:
    """Whether there is one to start."""
    names = ("etcd", "kube-apiserver", "kube-controller-manager")
    return all((HOME / name).exists() for name in names)


@contextlib.contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """Start etcd, the API server and its controllers.

    Args:
        folder: for all that they write.

    Raises:
        ServerFailed: one does not start, with the end of its log.
    """
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    (folder / "accounts.key").write_bytes(pem)
    lines = [f'token-of-{user},{user},{user},"{group}"\n' for user, group in USERS.items()]
    (folder / "tokens.csv").write_text("".join(lines))
    store, peer, port = free_port(), free_port(), free_port()
    server = ApiServer(folder, f"https://127.0.0.1:{port}")
    with contextlib.ExitStack() as stack:
        etcd = [
            "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync",
            f"--listen-client-urls=http://127.0.0.1:{store}",
            f"--advertise-client-urls=http://127.0.0.1:{store}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
        ]  # fmt: skip
        stack.enter_context(_process(folder, "etcd", etcd))
        api = [
            f"--etcd-servers=http://127.0.0.1:{store}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            "--insecure-port=0",
            f"--cert-dir={folder / 'certificates'}",
            "--authorization-mode=RBAC",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--disable-admission-plugins=ServiceAccount",
            "--service-account-issuer=https://kubernetes",
            f"--service-account-signing-key-file={folder / 'accounts.key'}",
            f"--service-account-key-file={folder / 'accounts.key'}",
            "--service-cluster-ip-range=10.0.0.0/24",
        ]
        process = stack.enter_context(_process(folder, "kube-apiserver", api))
        _wait(server, process)
        manager = [
            f"--kubeconfig={server.kubeconfig('admin')}",
            "--leader-elect=false",
            f"--controllers={CONTROLLERS}",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}",
            "--port=0",
            f"--cert-dir={folder / 'manager'}",
        ]
        stack.enter_context(_process(folder, "kube-controller-manager", manager))
        yield server


def _wait(server: ApiServer, process: subprocess.Popen[bytes]) -> None:
    async def asked() -> bool:
        admin, nobody = server.client("admin"), server.client("nobody")
        try:
            space = await admin.get(Kind("v1", "namespaces"), None, "default")
            # What everybody may read is allowed by roles that it makes at its first start.
            return space is not None and await nobody.has_group("apps") is not None
        except (ServiceUnavailable, RefusedAction):
            return False
        finally:
            await admin.aclose()
            await nobody.aclose()

    def ready() -> bool:
        if process.poll() is not None:
            raise ServerFailed((server.folder / "kube-apiserver.log").read_text()[-3000:])
        written = (server.folder / "certificates" / "apiserver.crt").exists()
        return written and asyncio.run(asked())

    until(ready, _SECONDS, every=0.2)


@contextlib.contextmanager
def _process(folder: Path, name: str, words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [str(HOME / name), *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"PATH": "/usr/bin:/bin", "HOME": str(folder), **_architecture()},
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def _architecture() -> dict[str, str]:
    """Have etcd start on other machines than amd64, where it wants to be told to."""
    machine = {"aarch64": "arm64"}.get(os.uname().machine)
    return {"ETCD_UNSUPPORTED_ARCH": machine} if machine else {}
