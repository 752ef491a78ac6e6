"""The `prometheus` part of engine.yaml: one server, replicas that hold the same, or shards."""

from __future__ import annotations

import re
import ssl
from typing import TYPE_CHECKING, Annotated, Any

import httpx
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from gpuwarden.errors import InvalidInput
from gpuwarden.fields import Seconds, Strict, as_tuple
from gpuwarden.files import read_secret
from gpuwarden.ruleengine.web_settings import File

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
REPLICA_LABELS = ("replica", "prometheus_replica", "__replica__")
"""Names that the documentation of Prometheus Operator, Thanos, Mimir and Cortex uses."""


def _url(text: str) -> str:
    if URL.fullmatch(text) is None:
        raise PydanticCustomError(
            "GW107",
            "{text} is not a base address: write it like http://prometheus:9090, "
            "without user, query or fragment",
            {"text": repr(text)},
        )
    return text.rstrip("/")


Url = Annotated[str, AfterValidator(_url)]
"""Base address of a server, without a trailing slash."""
Label = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,127}$")]
"""Name of a label."""


def _shards(value: Any) -> Any:
    """Shards as tuples of replicas; a shard without replicas may be written as its address."""
    if not isinstance(value, list):
        return value
    return tuple((item,) if isinstance(item, str) else as_tuple(item) for item in value)


class PrometheusSettings(Strict):
    """Where every fact comes from."""

    url: Url | None = None
    """Base address, such as http://127.0.0.1:9090; of anything that speaks Prometheus' query API:
    Thanos Query, Mimir (http://mimir/prometheus), VictoriaMetrics (of a cluster:
    http://vmselect:8481/select/0/prometheus)."""
    replicas: Annotated[tuple[Url, ...], BeforeValidator(as_tuple)] = ()
    """In place of url: servers that scrape the same nodes. One of them answers a whole tick: that
    which sees most nodes; if it fails, the next one is asked everything anew."""
    shards: Annotated[
        tuple[Annotated[tuple[Url, ...], Field(min_length=1)], ...], BeforeValidator(_shards)
    ] = ()
    """In place of url: servers that scrape different nodes, each an address or a list of replicas.
    Rows of all are put together; without one of them nothing is judged. Needs `expected_nodes` or
    `nodes`."""
    timeout: Annotated[Seconds, Field(gt=0)] = 10.0
    """For one query; with 10,000 cards one takes about a second."""
    tenant: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9!_.*'()|-]{1,150}$")] | None = (
        None
    )
    """Sent as X-Scope-OrgID: the tenant of Mimir and Cortex."""
    bearer_token_file: File | None = None
    """A token for Authorization; read again when it changes."""
    username: Annotated[str, StringConstraints(pattern=r"^[^:\r\n]{1,256}$")] | None = None
    """For basic authentication, with password_file."""
    password_file: File | None = None
    """Password of the username; read again when it changes."""
    ca_file: File | None = None
    """Certificates for the servers' TLS; the system's by default."""
    replica_labels: Annotated[tuple[Label, ...], BeforeValidator(as_tuple)] = REPLICA_LABELS
    """Labels by which a global view tells replicas apart: they are dropped from what comes, and
    rows that then differ in nothing but their value are a partial answer: nothing is judged. If
    they are given here, Thanos is asked to fold these in place of its own --query.replica-label."""

    @model_validator(mode="after")
    def _whole(self) -> PrometheusSettings:
        if sum(map(bool, (self.url, self.replicas, self.shards))) != 1:
            raise PydanticCustomError(
                "GW111", "prometheus needs exactly one of url, replicas and shards", {}
            )
        if (self.username is None) != (self.password_file is None):
            raise PydanticCustomError(
                "GW111", "username and password_file are given together or not at all", {}
            )
        if self.username is not None and self.bearer_token_file is not None:
            raise PydanticCustomError(
                "GW111", "bearer_token_file and username exclude each other", {}
            )
        addresses = [url for shard in self.groups for url in shard]
        if len(set(addresses)) != len(addresses):
            raise PydanticCustomError("GW111", "a server is named twice", {})
        return self

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Shards, each with the addresses of its replicas."""
        if self.shards:
            return self.shards
        return (self.replicas or tuple(url for url in (self.url,) if url is not None),)


class _FileAuth(httpx.Auth):
    """Credentials in a file, which is read again whenever it changes."""

    def __init__(self, path: Path, setting: str, made: Callable[[str], httpx.Auth | str]) -> None:
        self._path = path
        self._setting = setting
        self._made = made
        self._seen: tuple[int, int, int] | None = None
        self._header = ""
        self._current()

    def _current(self) -> str:
        """The header's value.

        Raises:
            InvalidInput: the file cannot be read, or holds nothing.
        """
        try:
            found = self._path.stat()
            seen = (found.st_ino, found.st_mtime_ns, found.st_size)
        except OSError:
            seen = None
        if seen is None or seen != self._seen:
            secret = read_secret(self._path, self._setting)
            if not secret.isascii() or not secret.isprintable():
                raise InvalidInput(
                    f"{self._setting}: {self._path} holds no token: one line of ASCII"
                )
            made = self._made(secret)
            self._header = made if isinstance(made, str) else _header_of(made)
            self._seen = seen
        return self._header

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Add the header.

        Raises:
            RequestError: the file cannot be read any more.
        """
        try:
            request.headers["Authorization"] = self._current()
        except InvalidInput as error:
            raise httpx.RequestError(str(error), request=request) from error
        yield request


def _header_of(auth: httpx.Auth) -> str:
    request = httpx.Request("GET", "http://localhost")
    return next(auth.sync_auth_flow(request)).headers["Authorization"]


def client_of(settings: PrometheusSettings, place: Callable[[str], Path]) -> httpx.AsyncClient:
    """A client with the settings' credentials.

    Args:
        settings: of the servers; all of them take the same credentials.
        place: where a file that they name is.

    Raises:
        InvalidInput: a file cannot be used.
    """
    context: ssl.SSLContext | bool = True
    if settings.ca_file is not None:
        try:
            context = ssl.create_default_context(cafile=str(place(settings.ca_file)))
        except OSError as error:
            raise InvalidInput(
                f"prometheus.ca_file: {settings.ca_file} cannot be used: {error}"
            ) from error
    auth: httpx.Auth | None = None
    if settings.bearer_token_file is not None:
        path = place(settings.bearer_token_file)
        auth = _FileAuth(path, "prometheus.bearer_token_file", lambda secret: f"Bearer {secret}")
    elif settings.username is not None and settings.password_file is not None:
        user, path = settings.username, place(settings.password_file)
        auth = _FileAuth(
            path, "prometheus.password_file", lambda secret: httpx.BasicAuth(user, secret)
        )
    return httpx.AsyncClient(
        timeout=settings.timeout,
        follow_redirects=False,
        verify=context,
        auth=auth,
        headers={} if settings.tenant is None else {"X-Scope-OrgID": settings.tenant},
    )
