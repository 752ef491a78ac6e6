"""A client of one agent, for an operator who holds the engine's key."""

from __future__ import annotations

import base64
import http.client
import json
import re
import secrets
import ssl
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from gpuwarden import agent_api
from gpuwarden.agent_api import Action, ActionRequest, ApiError, CommandLines, NodeInfo
from gpuwarden.errors import InvalidInput, RefusedAction, ServiceUnavailable

if TYPE_CHECKING:
    from pathlib import Path

LIFETIME_SECONDS = 30.0
TIMEOUT_SECONDS = 10.0
_MAX_ANSWER_BYTES = agent_api.MAX_BODY_BYTES + 1
_URL = re.compile(r"https?://[!-~]+")


class Client:
    """Asks one agent, with the engine's key."""

    def __init__(self, url: str, key: Path, ca_file: Path | None = None) -> None:
        """Read the key; nothing is sent yet.

        Args:
            url: address of the agent, such as http://gpu-1:9836.
            key: the engine's private key, as `gpuwarden agent keys` writes it.
            ca_file: certificates that the agent's TLS is checked against; None for the system's.

        Raises:
            InvalidInput: the address or a file is wrong.
        """
        if not _is_address(url):
            raise InvalidInput(f"--url {url!r} is not an address such as http://gpu-1:9836")
        self._url = url.rstrip("/")
        try:
            loaded = load_pem_private_key(key.read_bytes(), password=None)
            context = ssl.create_default_context(cafile=ca_file)
        except (OSError, ValueError, TypeError) as error:
            raise InvalidInput(f"--key {key} or --ca-file cannot be used: {error}") from error
        if not isinstance(loaded, Ed25519PrivateKey):
            raise InvalidInput(f"--key {key} is not an Ed25519 key")
        self._key = loaded
        # Proxies must not see what an agent tells.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )

    def command_lines(self, job_id: str) -> CommandLines:
        """The command lines of a job on that node, without secrets.

        Raises:
            RefusedAction: the agent would not, with its reason.
            ServiceUnavailable: it does not answer, or not by the contract.
        """
        try:
            return self._command_lines(job_id)
        except ApiError as error:
            raise ServiceUnavailable(f"what answers at {self._url} is no agent: {error}") from error

    def _command_lines(self, job_id: str) -> CommandLines:
        node = NodeInfo.decode(self._ask("/v1/node"))
        request = ActionRequest(
            decision_id=f"read-{secrets.token_hex(12)}",
            epoch=0,
            node=node.node,
            boot_id=node.boot_id,
            job_id=job_id,
            action=Action.ARGUMENTS,
            grace=0.0,
            expires=time.time() + LIFETIME_SECONDS,
        )
        return CommandLines.decode(self._ask("/v1/arguments", request.encode()))

    def _ask(self, path: str, body: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        if body is not None:
            public = self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
            signature = self._key.sign(agent_api.signing_bytes(body))
            headers[agent_api.SIGNATURE_HEADER] = agent_api.render_signature(
                agent_api.key_id(public), base64.b64encode(signature).decode()
            )
        asked = urllib.request.Request(self._url + path, data=body, headers=headers)  # noqa: S310 (checked: http or https)
        try:
            with self._opener.open(asked, timeout=TIMEOUT_SECONDS) as answer:
                content: bytes = answer.read(_MAX_ANSWER_BYTES)
                return content
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error.code, error.read(_MAX_ANSWER_BYTES)) from None
        except OSError as error:
            raise ServiceUnavailable(f"the agent at {self._url} does not answer: {error}") from None
        except http.client.HTTPException as error:
            said = f"{type(error).__name__}: {error}"
            raise ServiceUnavailable(f"what answers at {self._url} is no agent: {said}") from None


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # Asking for the port finds one that is none.
        return _URL.fullmatch(url) is not None and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _refusal(status: int, body: bytes) -> RefusedAction | ServiceUnavailable:
    try:
        told = json.loads(body)
        return RefusedAction(str(told["error"])[:64], f"the agent refused: {told['message']}"[:500])
    except (ValueError, KeyError, TypeError):
        return ServiceUnavailable(f"the agent answered HTTP {status}")
