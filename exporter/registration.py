"""The node makes itself known to the engine, and says goodbye: from a thread of its own.

Nothing of a snapshot or a page waits for the engine. A failed attempt is tried again ever less
often, and at random times: after an outage not all nodes come at once. The token file is read each
time, so that it can be replaced under a running exporter.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import random
import re
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog

from gpuwarden import __version__, node_api
from gpuwarden.errors import InvalidInput
from gpuwarden.exporter.processes import boot_id

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0
TIMEOUT_SECONDS = 5.0
GOODBYE_SECONDS = 1.0
"""An exporter that is told to end must not be kept by an engine that is down."""
_JITTER = 0.1
_SHORTEST_HEARTBEAT, _LONGEST_HEARTBEAT = 1.0, 3600.0
_MAX_TOKEN = 4096
_MAX_ANSWER = 65_536
_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?")
_MACHINE_ID = Path("/etc/machine-id")

_logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Which engine the node registers with.

    Attributes:
        url: the engine's base address.
        token_file: the nodes' token.
        advertise: `HOST:PORT` at which Prometheus reaches this exporter; None: the address by
            which the engine is reached, and the port that is listened on.
        ca_file: certificates for the engine's TLS; None: the system's.
    """

    url: str
    token_file: Path
    advertise: str | None = None
    ca_file: Path | None = None

    def __post_init__(self) -> None:
        if _URL.fullmatch(self.url) is None:
            raise InvalidInput(
                f"--engine.url {self.url!r} is not a base address: write it like "
                "https://engine:9837, without user, query or fragment"
            )
        try:
            _ = urlsplit(self.url).port
        except ValueError as error:
            raise InvalidInput(f"--engine.url {self.url!r}: {error}") from error
        if self.advertise is not None:
            try:
                node_api.Target.parse(self.advertise)
            except node_api.RegistrationRefused as error:
                raise InvalidInput(f"--engine.advertise-address: {error}") from error


class Failed(Exception):
    """An attempt failed.

    Attributes:
        retry_after: seconds after which the engine asks to be tried again, or None.
    """

    def __init__(self, why: str, retry_after: float | None = None) -> None:
        super().__init__(why)
        self.retry_after = retry_after


class Registrar:
    """Keeps one node registered."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        host: str,
        port: int,
        scheme: str = "http",
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Prepare; `start` begins.

        Args:
            settings: of the engine.
            host: what is listened on; `::` is every address.
            port: likewise.
            scheme: http, or https where the exporter serves TLS.
            chance: from 0 to 1, for the moment of the next attempt.
        """
        self._settings = settings
        self._host, self._port, self._scheme = host, port, scheme
        self._chance = chance
        self._stop = threading.Event()
        self._registered: node_api.Registration | None = None
        self._complaint = ""
        # A daemon: an engine that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="registration", daemon=True)

    def start(self) -> None:
        """Register from now on."""
        url = urlsplit(self._settings.url)
        if url.scheme == "http" and not _is_loopback(url.hostname or ""):
            _logger.warning(
                "the nodes' token crosses the network in clear: give the engine a certificate "
                "(web.tls_cert_file), and write --engine.url with https",
                url=self._settings.url,
            )
        self._thread.start()

    def leave(self) -> None:
        """Begin to say goodbye, while others end, too."""
        self._stop.set()

    def stop(self) -> None:
        """Say goodbye, if the engine answers at once."""
        self.leave()
        if self._thread.ident is not None:
            self._thread.join(GOODBYE_SECONDS)

    def _work(self) -> None:
        pause, retry = 0.0, FIRST_RETRY_SECONDS
        while not self._stop.wait(pause):
            try:
                heartbeat = self.register()
            except Failed as error:
                self._complain(str(error))
                # Anywhere in the time, so that nodes which failed together do not come together.
                pause = max(error.retry_after or 0.0, retry * (0.5 + self._chance() / 2))
                retry = min(LAST_RETRY_SECONDS, 2 * retry)
            except Exception:
                # Whatever it was, the next attempt may succeed.
                _logger.exception("not registered with the engine")
                pause = LAST_RETRY_SECONDS
            else:
                retry = FIRST_RETRY_SECONDS
                pause = heartbeat * (1 - _JITTER * self._chance())
        self._say_goodbye()

    def register(self) -> float:
        """Register once; gives the seconds after which the engine wants to hear again.

        Raises:
            Failed: it was not taken.
        """
        token = self._token()
        connection = self._connect(TIMEOUT_SECONDS)
        try:
            target = self._target(connection)
            registration = node_api.Registration(
                target=target,
                key=node_api.node_key(target, _machine()),
                boot_id=boot_id(),
                scheme=self._scheme,
                exporter=__version__,
            )
            body = registration.encode()
            answer = self._post(connection, node_api.REGISTER_PATH, token, body)
        finally:
            connection.close()
        heartbeat = answer.get("heartbeat_seconds")
        if not isinstance(heartbeat, int | float) or not heartbeat > 0:
            raise Failed("the engine did not say when it wants to hear again")
        if self._registered is None or self._complaint:
            _logger.info("registered with the engine", address=str(target))
        self._registered, self._complaint = registration, ""
        return min(_LONGEST_HEARTBEAT, max(_SHORTEST_HEARTBEAT, float(heartbeat)))

    def _say_goodbye(self) -> None:
        registration, self._registered = self._registered, None
        if registration is None:
            return
        try:
            connection = self._connect(GOODBYE_SECONDS)
            try:
                goodbye = node_api.Goodbye(registration.target, registration.key)
                path = node_api.LEAVE_PATH
                self._post(connection, path, self._token(), goodbye.encode())
            finally:
                connection.close()
        except Failed as error:
            _logger.warning(
                "the engine was not told that this node leaves; it stays expected until it is "
                "back, or `gpuwarden nodes forget`",
                error=str(error),
            )
        else:
            _logger.info("left the engine", address=str(registration.target))

    # -----------------------------------------------------------------------------------------

    def _token(self) -> str:
        try:
            with self._settings.token_file.open("rb") as file:
                token = file.read(_MAX_TOKEN).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Failed(f"--engine.token-file {self._settings.token_file}: {error}") from error
        if not token or not token.isprintable():
            raise Failed(f"--engine.token-file {self._settings.token_file} holds no token")
        return token

    def _connect(self, seconds: float) -> http.client.HTTPConnection:
        url = urlsplit(self._settings.url)
        host = url.hostname or ""
        connection: http.client.HTTPConnection
        try:
            if url.scheme == "https":
                trusted = ssl.create_default_context(cafile=self._settings.ca_file)
                connection = http.client.HTTPSConnection(
                    host, url.port, timeout=seconds, context=trusted
                )
            else:
                connection = http.client.HTTPConnection(host, url.port, timeout=seconds)
            connection.connect()
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Failed(f"the engine does not answer at {self._settings.url}: {error}") from error
        return connection

    def _target(self, connection: http.client.HTTPConnection) -> node_api.Target:
        if self._settings.advertise is not None:
            return node_api.Target.parse(self._settings.advertise)
        host = self._host
        if host in ("::", "0.0.0.0"):
            # The address by which the engine is reached is one by which the node is, as a rule.
            host = connection.sock.getsockname()[0].partition("%")[0]
        try:
            text = f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"
            return node_api.Target.parse(text)
        except node_api.RegistrationRefused as error:
            raise Failed(f"{error}; say --engine.advertise-address") from error

    def _post(
        self, connection: http.client.HTTPConnection, path: str, token: str, body: bytes
    ) -> dict[str, object]:
        prefix = urlsplit(self._settings.url).path.rstrip("/")
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        try:
            # Redirects are not followed: the token is for this server only.
            connection.request("POST", prefix + path, body, headers)
            answer = connection.getresponse()
            content = answer.read(_MAX_ANSWER)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Failed(f"the engine does not answer at {self._settings.url}: {error}") from error
        try:
            document = json.loads(content)
        except (ValueError, RecursionError):
            document = None
        if answer.status != 200 or not isinstance(document, dict):
            said = document.get("message") if isinstance(document, dict) else None
            why = said if isinstance(said, str) else answer.reason
            raise Failed(
                f"the engine refuses: HTTP {answer.status}: {why[:300]}",
                _seconds(answer.headers.get("Retry-After", "")),
            )
        return document

    def _complain(self, complaint: str) -> None:
        if complaint != self._complaint:
            self._complaint = complaint
            _logger.warning("not registered with the engine", error=complaint)


def _seconds(text: str) -> float | None:
    """A Retry-After in seconds, within reason."""
    return min(float(text), LAST_RETRY_SECONDS) if text.isdecimal() and len(text) < 6 else None


def _machine() -> str:
    try:
        text = _MACHINE_ID.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        text = ""
    return text or boot_id()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_reachable(settings: EngineSettings, host: str) -> None:
    """Refuse to advertise what only this machine can reach to an engine elsewhere.

    Args:
        settings: of the engine.
        host: what is listened on.

    Raises:
        InvalidInput: with what to say instead.
    """
    engine = urlsplit(settings.url).hostname or ""
    if settings.advertise is None and _is_loopback(host) and not _is_loopback(engine):
        raise InvalidInput(
            f"--engine.url {settings.url} would make Prometheus scrape {host}, which only this "
            "node can reach: say --web.listen-address :9835, or --engine.advertise-address "
            "HOST:PORT where something else listens for it"
        )
