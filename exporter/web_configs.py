"""TLS and basic authentication as the exporter-toolkit's web configuration file has them.

The same file serves node_exporter and its like::

    tls_server_config:
      cert_file: server.crt
      key_file: server.key
      client_auth_type: RequireAndVerifyClientCert
      client_ca_file: clients.crt
    basic_auth_users:
      prometheus: $2y$10$...          # htpasswd -nBC 10 prometheus

File, certificates and keys are looked at for every request and connection, so that a renewal needs
no restart. One that is wrong then is reported, and what was right before stays in force. What the
toolkit knows and this does not is refused: a limit that is written but not kept is worse than none.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import importlib
import re
import secrets
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from gpuwarden.diagnostics import Diagnostic, Severity, Span, did_you_mean, render_text
from gpuwarden.errors import InvalidInput, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from starlette.types import ASGIApp, Receive, Scope, Send

    from gpuwarden.yaml_files import Node

MAX_COST = 16
"""bcrypt takes 4 s for this; each further one doubles it."""
_MAX_VERIFIED = 100
_MAX_WAITING = 8
"""Passwords that wait to be checked: who guesses must not fill the requests that are answered."""
_MAX_PASSWORD_BYTES = 72
_HASH = re.compile(r"\$2[aby]\$(?P<cost>[0-9]{2})\$[./A-Za-z0-9]{53}")
_NOBODY = "$2b$10$bglmn681bqagYqZddoViDu1N1iRCs3VyT9Z1CNlH6l/wwgvV1h4jm"
"""Checked for users that do not exist, so that time does not tell who does."""
_CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert")
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_TLS_KEYS = ("cert_file", "key_file", "client_auth_type", "client_ca_file", "min_version")

_logger = structlog.get_logger(__name__)

Signature = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """How a server proves itself, and whether clients must.

    Attributes:
        certificate: PEM file of the server's certificate and its chain.
        key: PEM file of its private key.
        client_auth: whether a client's certificate is asked for and checked.
        client_ca: PEM file of who may vouch for clients.
        minimum: lowest version of TLS.
    """

    certificate: Path
    key: Path
    client_auth: ssl.VerifyMode = ssl.CERT_NONE
    client_ca: Path | None = None
    minimum: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2

    @property
    def files(self) -> tuple[Path, ...]:
        """Everything that may change."""
        given = (self.certificate, self.key, self.client_ca)
        return tuple(file for file in given if file is not None)

    def context(self) -> ssl.SSLContext:
        """What connections are made with.

        Raises:
            OSError: a file cannot be read, or is not what it should be.
        """
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = self.minimum
        made.load_cert_chain(self.certificate, self.key)
        if self.client_ca is not None:
            made.load_verify_locations(self.client_ca)
        made.verify_mode = self.client_auth
        return made


@dataclass(frozen=True, slots=True)
class WebConfig:
    """What a web configuration file says.

    Attributes:
        tls: None for plain HTTP.
        users: name -> bcrypt hash; empty: everybody may ask.
    """

    tls: TlsConfig | None = None
    users: Mapping[str, str] = field(default_factory=dict)


class _Context(ssl.SSLContext):
    """Gives each connection the newest context; asyncio keeps the one that it was given."""

    web: Web

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        return self.web.newest().wrap_bio(*arguments, **options)


class Web:
    """A web configuration file in force."""

    def __init__(self, file: Path) -> None:
        """Read it.

        Args:
            file: the web configuration file.

        Raises:
            InvalidInput: it is wrong; with every mistake at its line.
            MissingExtra: what it takes is not installed.
        """
        self._file = file
        self._seen: Signature = ()
        self._config = WebConfig()
        self._context: ssl.SSLContext | None = None
        self._started = False
        self._verified: dict[bytes, None] = {}
        self._secret = secrets.token_bytes(16)
        # One at a time: whoever guesses passwords must not take all cores of a GPU node.
        self._checking = asyncio.Lock()
        self._waiting = 0
        self._take_over()

    @property
    def tls(self) -> ssl.SSLContext | None:
        """What a server is to be started with; it follows the files from then on."""
        if self._context is None:
            return None
        context = _Context(ssl.PROTOCOL_TLS_SERVER)
        context.web = self
        return context

    def newest(self) -> ssl.SSLContext:
        """The context for a new connection."""
        self.follow()
        if self._context is None:  # pragma: no cover (`follow` never takes TLS away)
            raise ssl.SSLError("TLS is off")
        return self._context

    def follow(self) -> None:
        """Read again what changed."""
        seen = self._signature(self._config)
        if seen == self._seen:
            return
        # Whatever comes of it, the same content is not tried again.
        self._seen = seen
        try:
            self._take_over()
        except (InvalidInput, MissingExtra) as error:
            _logger.warning("web configuration not taken over", error=str(error))
        else:
            _logger.info("web configuration read again", file=str(self._file))

    def _take_over(self) -> None:
        config = read(self._file)
        seen = self._signature(config)
        try:
            context = None if config.tls is None else config.tls.context()
        except OSError as error:
            raise InvalidInput(
                f"{self._file}: tls_server_config: its certificates or key cannot be used: {error}"
            ) from error
        if self._started and (context is None) != (self._context is None):
            raise InvalidInput(f"{self._file}: to turn TLS on or off, restart")
        if config.users:
            _bcrypt()
        self._config, self._context, self._seen = config, context, seen
        self._started = True

    def _signature(self, config: WebConfig) -> Signature:
        files = [self._file, *(() if config.tls is None else config.tls.files)]
        found: list[tuple[int, int, int] | None] = []
        for file in files:
            try:
                about = file.stat()
            except OSError:
                found.append(None)
            else:
                found.append((about.st_ino, about.st_size, about.st_mtime_ns))
        return tuple(found)

    async def allows(self, authorization: str) -> bool:
        """Whether a request may be answered.

        Args:
            authorization: its header of that name.

        Raises:
            TooManyGuesses: it cannot be found out now.
        """
        self.follow()
        users = self._config.users
        if not users:
            return True
        given = _credentials(authorization)
        if given is None:
            return False
        name, password = given
        wanted = users.get(name, _NOBODY)
        mark = self._mark(name, wanted, password=password)
        if mark in self._verified:
            return True
        if self._waiting >= _MAX_WAITING:
            raise TooManyGuesses
        self._waiting += 1
        try:
            async with self._checking:
                matches = await asyncio.to_thread(_matches, password, wanted)
        finally:
            self._waiting -= 1
        if not matches or name not in users:
            return False
        # A hash that changes gives another mark: what was right once is not so for ever.
        if len(self._verified) >= _MAX_VERIFIED:
            self._verified.clear()
        self._verified[mark] = None
        return True

    def _mark(self, name: str, wanted: str, *, password: bytes) -> bytes:
        content = b"\0".join((name.encode(), wanted.encode(), password))
        return hmac.digest(self._secret, content, hashlib.sha256)


class TooManyGuesses(Exception):
    """More passwords wait to be checked than there may; who was let in before is not concerned."""


class Guarded:
    """An application that only those may use whom the web configuration lets in."""

    def __init__(self, application: ASGIApp, web: Web) -> None:
        """Guard an application.

        Args:
            application: what answers.
            web: who may ask.
        """
        self._application = application
        self._web = web

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "http":
            headers: list[tuple[bytes, bytes]] = scope["headers"]
            given = [value for name, value in headers if name == b"authorization"]
            text = given[0].decode("latin-1") if len(given) == 1 else ""
            try:
                allowed = await self._web.allows(text)
            except TooManyGuesses:
                await _send_away(send)
                return
            if not allowed:
                await _refuse(send)
                return
        await self._application(scope, receive, send)


async def _refuse(send: Send) -> None:
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"www-authenticate", b'Basic realm="gpuwarden"'),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": b"unauthorized\n"})


async def _send_away(send: Send) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": b"too many passwords to check\n"})


def _credentials(authorization: str) -> tuple[str, bytes] | None:
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(rest.strip(), validate=True).partition(b":")
        user = name.decode()
    except ValueError:
        # Not base64, not ASCII, or not UTF-8 inside.
        return None
    return (user, password) if colon else None


def _bcrypt() -> Any:
    try:
        return importlib.import_module("bcrypt")
    except ModuleNotFoundError as error:
        raise MissingExtra("exporter --web.config.file", "bcrypt", "web") from error


def _matches(password: bytes, wanted: str) -> bool:
    if len(password) > _MAX_PASSWORD_BYTES or b"\0" in password:
        # bcrypt would cut it off or refuse it; nobody's password is so long.
        return False
    return bool(_bcrypt().checkpw(password, wanted.encode()))


# ---------------------------------------------------------------------------------------------
# Reading


def read(file: Path) -> WebConfig:
    """Read and check a web configuration file.

    Args:
        file: paths in it are relative to its folder.

    Raises:
        InvalidInput: with every mistake, each at its line and column.
        MissingExtra: the reader of YAML is not installed.
    """
    try:
        # A node without such a file needs none of this.
        from gpuwarden.yaml_files import load_located  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingExtra("exporter --web.config.file", error.name or "yaml", "web") from error
    document = load_located(file)
    reader = _Reader(file, list(document.diagnostics))
    config = WebConfig()
    if document.root is not None:
        config = reader.config(document.root)
    if reader.found:
        text = render_text(reader.found, {document.file: document.text})
        raise InvalidInput(text, reader.found)
    return config


@dataclass(slots=True)
class _Reader:
    file: Path
    found: list[Diagnostic]

    def complain(self, code: str, span: Span, message: str, *, hint: str | None = None) -> None:
        self.found.append(Diagnostic(code, Severity.ERROR, span, message, hint))

    def config(self, root: Node) -> WebConfig:
        if root.value is None:
            return WebConfig()
        parts = self.mapping(root, "the file", ("tls_server_config", "basic_auth_users"))
        tls = self.tls(parts["tls_server_config"]) if "tls_server_config" in parts else None
        users = self.users(parts["basic_auth_users"]) if "basic_auth_users" in parts else {}
        return WebConfig(tls, users)

    def mapping(
        self, node: Node, what: str, known: tuple[str, ...] | None = None
    ) -> Mapping[str, Node]:
        """A mapping's parts; keys that are not known are complained of, unless any is."""
        if not isinstance(node.value, dict):
            self.complain("GW106", node.span, f"{what} must be a mapping")
            return {}
        if known is not None:
            for key in node.value.keys() - set(known):
                hint = did_you_mean(key, known) or f"known are {', '.join(known)}"
                span = node.keys.get(key, node.span)
                self.complain("GW103", span, f"{key}: this key is not known here", hint=hint)
        return node.value

    def text(self, node: Node | None, what: str) -> str | None:
        if node is None or (isinstance(node.value, str) and node.value):
            return None if node is None else str(node.value)
        self.complain("GW106", node.span, f"{what}: must be text", hint="put it in quotes")
        return None

    def tls(self, node: Node) -> TlsConfig | None:
        before = len(self.found)
        parts = self.mapping(node, "tls_server_config", _TLS_KEYS)
        texts = {key: self.text(parts.get(key), key) for key in _TLS_KEYS}
        for key in ("cert_file", "key_file"):
            if key not in parts:
                self.complain("GW105", node.span, f"tls_server_config.{key}: is missing")
        policy = texts["client_auth_type"] or "NoClientCert"
        if policy not in _CLIENT_AUTH:
            hint = did_you_mean(policy, _CLIENT_AUTH)
            if policy in _UNVERIFIED:
                hint = "a certificate that nobody verifies proves nothing"
            self.complain(
                "GW104",
                parts["client_auth_type"].span,
                f"client_auth_type: {policy} is none of {', '.join(_CLIENT_AUTH)}",
                hint=hint,
            )
        elif (policy != "NoClientCert") != ("client_ca_file" in parts):
            self.complain(
                "GW105",
                node.span,
                "tls_server_config: client_ca_file and a client_auth_type that verifies go "
                "together",
                hint="write client_auth_type: RequireAndVerifyClientCert and client_ca_file",
            )
        version = texts["min_version"] or "TLS12"
        if version not in _VERSIONS:
            message = f"min_version: {version} is none of {', '.join(_VERSIONS)}"
            self.complain("GW104", parts["min_version"].span, message)
        if len(self.found) > before:
            return None
        folder = self.file.absolute().parent
        client_ca = texts["client_ca_file"]
        return TlsConfig(
            folder / (texts["cert_file"] or ""),
            folder / (texts["key_file"] or ""),
            client_auth=_CLIENT_AUTH[policy],
            client_ca=None if client_ca is None else folder / client_ca,
            minimum=_VERSIONS[version],
        )

    def users(self, node: Node) -> dict[str, str]:
        found = {}
        for name, item in self.mapping(node, "basic_auth_users").items():
            text = self.text(item, name)
            if text is None:
                continue
            match = _HASH.fullmatch(text)
            if match is None or not 4 <= int(match["cost"]) <= MAX_COST:
                self.complain(
                    "GW107",
                    item.span,
                    f"basic_auth_users.{name}: not a bcrypt hash of a cost of 4 to {MAX_COST}",
                    hint="`htpasswd -nBC 10 NAME` makes one",
                )
            elif ":" in name:
                span = node.keys.get(name, node.span)
                self.complain("GW107", span, f"{name}: a user's name cannot hold a colon")
            else:
                found[name] = text
        return found
