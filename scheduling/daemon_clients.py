"""Asking the scheduler's daemon: over the socket of this machine, or the network with a token."""

from __future__ import annotations

import json
import os
import socket as sockets
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import httpx

from gpuwarden.consoles import printable
from gpuwarden.errors import InvalidInput, RefusedAction, ServiceUnavailable
from gpuwarden.files import read_secret
from gpuwarden.option_values import read_url
from gpuwarden.schedule_api import MAX_BODY_BYTES, ScheduleDocument, ScheduleError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEFAULT_SOCKET = Path("/run/gpuwarden-scheduler/scheduler.sock")
_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
_WHOLE_SECONDS: Final = 90.0

_socket_option = click.option(
    "--socket",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="GPUWARDEN_SCHEDULER_SOCKET",
    default=DEFAULT_SOCKET,
    show_default=True,
    metavar="PATH",
    help="Where the daemon of this machine answers; also $GPUWARDEN_SCHEDULER_SOCKET.",
)
_url_option = click.option(
    "--url",
    envvar="GPUWARDEN_SCHEDULER_URL",
    metavar="URL",
    callback=read_url,
    help="Address of a daemon of another machine, instead; also $GPUWARDEN_SCHEDULER_URL.",
)
_token_option = click.option(
    "--token-file",
    envvar="GPUWARDEN_SCHEDULER_TOKEN_FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File with your token for --url; also $GPUWARDEN_SCHEDULER_TOKEN_FILE.",
)


class DaemonClient:
    """Asks one daemon.

    Args:
        socket: of this machine; not used where there is an address.
        url: of a daemon on the network, or None.
        token_file: with the token for it, or None.

    Raises:
        InvalidInput: the token cannot be read.
    """

    def __init__(
        self,
        socket: Path = DEFAULT_SOCKET,
        url: str | None = None,
        *,
        token_file: Path | None = None,
    ) -> None:
        headers = {}
        if url is not None and token_file is not None:
            headers["Authorization"] = f"Bearer {read_secret(token_file, '--token-file')}"
        self._where = url or str(socket)
        self._base = (url or "http://scheduler").rstrip("/")
        self._headers = headers
        self._socket = socket if url is None else None

    @property
    def base(self) -> str | None:
        """Address on the network, or None for the socket."""
        return self._base if self._socket is None else None

    def schedule(self) -> ScheduleDocument:
        """The whole schedule.

        Raises:
            ServiceUnavailable: the daemon does not answer, or not usefully.
        """
        status, body = self._answer("GET", "/v1/schedule", None, {})
        if status != 200:
            raise _refusal(status, body)
        try:
            return ScheduleDocument.decode(body)
        except ScheduleError as error:
            raise ServiceUnavailable(f"{self._where}: {error}") from error

    def ask(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        parameters: Mapping[str, str] | None = None,
        also: tuple[int, ...] = (),
    ) -> dict[str, Any]:
        """Ask, and give the answer.

        Args:
            method: GET, POST or DELETE.
            path: what is asked for; names in it are quoted by the caller.
            body: sent as JSON.
            parameters: of the address.
            also: statuses above 399 whose answer is the caller's to read.

        Raises:
            RefusedAction: the daemon said no, and why.
            ServiceUnavailable: it does not answer, or not usefully.
        """
        status, content = self._answer(method, path, body, parameters or {})
        if status >= 400 and status not in also:
            raise _refusal(status, content)
        try:
            document = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ServiceUnavailable(f"{self._where}: its answer is not JSON") from error
        if not isinstance(document, dict):
            raise ServiceUnavailable(f"{self._where}: its answer is no object")
        if status in also and "schema" not in document:
            raise _refusal(status, content)
        return document

    def text(self, path: str, parameters: Mapping[str, str]) -> bytes:
        """An answer that is not JSON.

        Raises:
            RefusedAction: the daemon said no.
            ServiceUnavailable: it does not answer.
        """
        status, content = self._answer("GET", path, None, parameters)
        if status >= 400:
            raise _refusal(status, content)
        return content

    def _answer(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        parameters: Mapping[str, str],
    ) -> tuple[int, bytes]:
        began, content = time.monotonic(), bytearray()
        transport = None
        try:
            if self._socket is not None:
                _reach(self._socket)
                # Nothing is encrypted on a socket: no certificates of the system are read for it,
                # which would take longer than the answer.
                plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                transport = httpx.HTTPTransport(uds=str(self._socket), verify=plain)
            with (
                httpx.Client(
                    transport=transport, timeout=_TIMEOUT, headers=self._headers, trust_env=False
                ) as client,
                client.stream(
                    method, f"{self._base}{path}", json=body, params=dict(parameters)
                ) as response,
            ):
                for part in response.iter_bytes():
                    content += part
                    if len(content) > MAX_BODY_BYTES:
                        raise ServiceUnavailable(f"{self._where}: its answer is too large")
                    if time.monotonic() > began + _WHOLE_SECONDS:
                        raise ServiceUnavailable(f"{self._where}: no whole answer in time")
                return response.status_code, bytes(content)
        except (OSError, httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise ServiceUnavailable(
                f"the scheduler does not answer at {self._where} ({why}): is `gpuwarden scheduler` "
                "running here? Else say --url, or set GPUWARDEN_SCHEDULER_URL"
            ) from error


def _reach(path: Path) -> None:
    """See that somebody listens; httpcore leaves the socket of a failed connection open.

    Raises:
        OSError: nobody does.
    """
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(5.0)
        probe.connect(str(path))


def _refusal(status: int, content: bytes) -> Exception:
    try:
        document = json.loads(content)
        reason, message = str(document["error"]), str(document["message"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return ServiceUnavailable(f"the scheduler answers with status {status}")
    if status == 400:
        return InvalidInput(printable(message))
    if status in (502, 503, 504):
        return ServiceUnavailable(printable(message))
    return RefusedAction(reason, printable(message))


def daemon_of_environment() -> DaemonClient:
    """The daemon that the variables of `daemon_options` name, or this machine's.

    Raises:
        InvalidInput: the token cannot be read.
    """
    token = os.environ.get("GPUWARDEN_SCHEDULER_TOKEN_FILE")
    return DaemonClient(
        Path(os.environ.get("GPUWARDEN_SCHEDULER_SOCKET") or DEFAULT_SOCKET),
        os.environ.get("GPUWARDEN_SCHEDULER_URL") or None,
        token_file=Path(token) if token else None,
    )


def daemon_options(command: Callable[..., None]) -> Callable[..., None]:
    """`--socket`, `--url` and `--token-file`, for `DaemonClient`."""
    for option in (_token_option, _url_option, _socket_option):
        command = option(command)
    return command
