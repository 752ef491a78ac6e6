"""The `web` part of engine.yaml: where pages and API listen, and who may see and change what."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from gpuwarden.fields import Seconds, Strict, as_tuple, some_tuple

DEFAULT_LISTEN = "127.0.0.1:9837"
_LISTEN = re.compile(r"(?P<host>[A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")

File = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
"""A path; relative ones are relative to engine.yaml."""


def _listen(text: str) -> str:
    match = _LISTEN.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise PydanticCustomError(
            "GW107",
            "{text} is not an address to listen on: write it like 127.0.0.1:9837",
            {"text": repr(text)},
        )
    return text


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        raise PydanticCustomError(
            "GW107",
            "{text} is not an address or a network: write it like 10.1.2.3 or 10.1.0.0/16",
            {"text": repr(text)},
        ) from None


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.][A-Za-z0-9_.@+-]{0,62}$")]
"""Name of a person or of a group."""
Names = Annotated[tuple[Name, ...], BeforeValidator(as_tuple)]
"""Names of several."""
GroupName = Annotated[str, StringConstraints(pattern=r"^[^,\s][^,\r\n]{0,126}$")]
"""Name of a group as the proxy gives it; anything but a comma."""
HeaderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9-]{0,63}$")]
"""Name of a header of HTTP."""


class TokenSettings(Strict):
    """One person or program that signs in with a token."""

    name: Name
    """Who bears it, as the audit names them. Of an owner: the user name on the nodes."""
    role: Literal["owner", "scheduler", "operator", "admin"]
    """What they may do: see and keep their own jobs; ask jobs to leave within the limits of
    `leaves`, and see none; see and keep all; also pause enforcement."""
    file: File
    """Holds the token: one line of at least 16 characters, such as `openssl rand -hex 32` gives."""


class Members(Strict):
    """Who has a role, by the proxy's word."""

    users: Names = ()
    """User names, as the directory or the proxy has them."""
    groups: Annotated[tuple[GroupName, ...], BeforeValidator(as_tuple)] = ()
    """Groups of which one is enough."""


class ProxySettings(Strict):
    """A proxy in front that knows who is asking, such as oauth2-proxy with --pass-user-headers."""

    peers: Annotated[
        tuple[Annotated[str, AfterValidator(_network)], ...], BeforeValidator(some_tuple)
    ]
    """Addresses from which its headers are believed. Requests from elsewhere that carry the user's
    header are refused."""
    user_header: HeaderName = "X-Forwarded-User"
    """Holds the user's name; X-Auth-Request-User where nginx asks oauth2-proxy."""
    email_header: HeaderName | None = "X-Forwarded-Email"
    """Holds the mail address, by which the directory finds a user whom the name does not name; null
    where the proxy passes such a header on as it came."""
    groups_header: HeaderName | None = "X-Forwarded-Groups"
    """Holds the groups, separated by commas; null where the proxy passes such a header on as it
    came."""
    operators: Members = Field(default_factory=Members)
    """Who sees and keeps all jobs. Everybody else is an owner."""
    admins: Members = Field(default_factory=Members)
    """Who may also pause enforcement."""


class WebSettings(Strict):
    """The engine's own pages and API."""

    listen: Annotated[str, AfterValidator(_listen)] = DEFAULT_LISTEN
    """Address to listen on. Loopback by default: the pages name users."""
    token_file: File | None = None
    """Bearer token of Alertmanager for /v1/notify. Without it no notice can be delivered, so that
    nothing is ever ended."""
    operator_token_file: File | None = None
    """Bearer token that operators share for POST /v1/keeps; better one token each: see `tokens`.
    Without either only owners can keep their jobs."""
    tokens: Annotated[tuple[TokenSettings, ...], BeforeValidator(as_tuple)] = ()
    """Who signs in with a token, on the pages or as `Authorization: Bearer`."""
    proxy: ProxySettings | None = None
    """A proxy in front that signs people in."""
    read: Literal["everyone", "signed-in"] | None = None
    """Who may read pages and API. By default everyone until `tokens` or `proxy` says who people
    are; changes always need a token, a session or a signed link."""
    names: Literal["team", "everyone", "nobody"] = "team"
    """Whose names owners read beside their own: those of their team's people, everyone's, or
    nobody's, whose teams are then not told either. Others are pseudonyms."""
    operator_names: Literal["always", "opened"] = "always"
    """Whether operators and admins read names by their role, or only after they opened them for a
    while, with a reason that stands in the audit."""
    metrics_token_file: File | None = None
    """Bearer token that /metrics takes; without it whoever reaches the port reads it, users' names
    in gpuwarden_user_info included."""
    session: Annotated[Seconds, Field(ge=60, le=30 * 86400)] = 12 * 3600.0
    """How long a sign-in lasts; a restart of the engine ends them all."""
    tls_cert_file: File | None = None
    """Certificate in PEM; plain HTTP without it."""
    tls_key_file: File | None = None
    """Private key of the certificate."""

    @model_validator(mode="after")
    def _tls_pair(self) -> WebSettings:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise PydanticCustomError(
                "GW111", "tls_cert_file and tls_key_file are given together or not at all", {}
            )
        return self

    @model_validator(mode="after")
    def _one_token_each(self) -> WebSettings:
        names = [token.name for token in self.tokens]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PydanticCustomError(
                "GW111", "tokens: {name} is named twice", {"name": ", ".join(twice)}
            )
        return self

    @property
    def readable_by_all(self) -> bool:
        """Whether who has not signed in may read."""
        if self.read is not None:
            return self.read == "everyone"
        return not self.tokens and self.proxy is None

    @property
    def host(self) -> str:
        """Host to listen on; every address where the setting has none."""
        return self.listen.rpartition(":")[0].strip("[]") or "0.0.0.0"

    @property
    def port(self) -> int:
        """Port to listen on."""
        return int(self.listen.rpartition(":")[2])
