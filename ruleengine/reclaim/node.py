"""Ending a bare process: the client of the node's agent.

The engine signs what it asks, and the agent may refuse; nothing here retries by itself, because
only the ledger knows what may be sent again. A retry reuses the same signed bytes, and never after
they have expired.
"""

from __future__ import annotations

import base64
import re
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from gpuwarden import agent_api
from gpuwarden.agent_api import ActionReport, ApiError, NodeInfo
from gpuwarden.errors import InvalidInput, RefusedAction, ServiceUnavailable
from gpuwarden.exchanges import Answer, exchange

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuwarden.agent_api import ActionRequest

T = TypeVar("T")

LIFETIME_SECONDS = 30.0
"""How long a signed request may be taken on."""
_TIMEOUT = httpx.Timeout(10.0, connect=5.0)
_WHOLE_SECONDS = 15.0
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\]")
_INSTANCE = re.compile(rf"(?P<host>{_HOST.pattern})(?::[0-9]{{1,5}})?")


def host_of(instance: str) -> str:
    """The host of a Prometheus target, brackets included for IPv6.

    Only the host is taken, and only if it is one: the rest of an agent's address comes from the
    operator's template, so that nobody can send the engine elsewhere through a label.

    Raises:
        RefusedAction: `instance` is not `host` or `host:port`.
    """
    match = _INSTANCE.fullmatch(instance)
    if match is None or ".." in match["host"]:
        raise RefusedAction("bad_instance", f"{instance!r} is not the address of a node")
    return match["host"]


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """What is sent, byte for byte, as often as it must be."""

    body: bytes
    signature: str


class Signer:
    """The engine's Ed25519 key.

    Args:
        private_key: of the engine; nodes hold only its public half.
    """

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._key = private_key
        public = private_key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.key_id = agent_api.key_id(public)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a PKCS8 PEM file as `gpuwarden agent keys` writes it.

        Raises:
            InvalidInput: it cannot be read, or is not an Ed25519 key.
        """
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except OSError as error:
            raise InvalidInput(
                f"agents.key_file: {path} cannot be read ({error.strerror}): make a pair with "
                "`gpuwarden agent keys --out DIR` and give engine.key to the engine's user"
            ) from error
        except (ValueError, TypeError) as error:
            raise InvalidInput(
                f"agents.key_file: {path} is not an unencrypted private key in PEM: {error}"
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise InvalidInput(f"agents.key_file: {path} is not an Ed25519 key")
        return cls(key)

    def sign(self, request: ActionRequest) -> SignedRequest:
        """Encode and sign a request."""
        body = request.encode()
        signature = base64.b64encode(self._key.sign(agent_api.signing_bytes(body))).decode()
        return SignedRequest(body, agent_api.render_signature(self.key_id, signature))


class AgentClient:
    """The agents of all nodes.

    Args:
        template: address of an agent with `{host}` in it, such as `http://{host}:9836`.
        ca_file: certificates that its TLS is checked against, or None for the system's.
    """

    def __init__(self, template: str, ca_file: Path | None = None) -> None:
        self._template = template
        context: ssl.SSLContext | bool = True
        if ca_file is not None:
            context = ssl.create_default_context(cafile=str(ca_file))
        # Proxies must not see actions.
        self._client = httpx.AsyncClient(
            verify=context, timeout=_TIMEOUT, trust_env=False, follow_redirects=False
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def node(self, host: str) -> NodeInfo:
        """What a node says of itself.

        Raises:
            ServiceUnavailable: its agent does not answer, or not by the contract.
        """
        answer = await self._ask("GET", host, "/v1/node")
        if answer.status != 200:
            raise ServiceUnavailable(f"agent of {host}: HTTP {answer.status} for /v1/node")
        return _decoded(NodeInfo.decode, answer, host)

    async def send(self, host: str, request: SignedRequest) -> ActionReport:
        """Hand a request over; safe to repeat with the same bytes.

        Raises:
            RefusedAction: the agent would not, with its reason.
            ServiceUnavailable: no usable answer; it may or may not have been taken on.
        """
        answer = await self._ask(
            "POST",
            host,
            "/v1/actions",
            content=request.body,
            headers={
                "Content-Type": "application/json",
                agent_api.SIGNATURE_HEADER: request.signature,
            },
        )
        if 400 <= answer.status < 500 and answer.status not in (408, 429):
            reason, message = _refusal(answer)
            raise RefusedAction(reason, f"the agent of {host} refused: {message}")
        if answer.status not in (200, 202):
            raise ServiceUnavailable(f"agent of {host}: HTTP {answer.status} for an action")
        return _decoded(ActionReport.decode, answer, host)

    async def report(self, host: str, decision_id: str) -> ActionReport | None:
        """How far an action has come, or None where the agent never took it on.

        Raises:
            ServiceUnavailable: no usable answer.
        """
        answer = await self._ask("GET", host, f"/v1/actions/{decision_id}")
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise ServiceUnavailable(
                f"agent of {host}: HTTP {answer.status} for /v1/actions/{decision_id}"
            )
        return _decoded(ActionReport.decode, answer, host)

    async def _ask(
        self,
        method: str,
        host: str,
        path: str,
        *,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        url = self._template.replace("{host}", host).rstrip("/") + path
        try:
            return await exchange(
                self._client, method, url, seconds=_WHOLE_SECONDS, content=content, headers=headers
            )
        except ServiceUnavailable as error:
            raise ServiceUnavailable(
                f"agent of {host} does not answer at {url}: {error}"
            ) from error


def _decoded(decode: Callable[[bytes], T], answer: Answer, host: str) -> T:
    try:
        return decode(answer.body)
    except ApiError as error:
        raise ServiceUnavailable(f"agent of {host}: {error}") from error


def _refusal(answer: Answer) -> tuple[str, str]:
    try:
        data = answer.json()
    except ValueError:
        data = None
    if isinstance(data, dict) and isinstance(data.get("error"), str):
        return data["error"][:64], str(data.get("message", data["error"]))[:500]
    return f"http_{answer.status}", f"HTTP {answer.status}"
