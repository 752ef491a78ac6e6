"""How a node makes itself known to the engine: the contract between exporter and engine.

A node says at which address Prometheus reaches its exporter, says so again as often as the engine
asks for, and says goodbye. Whoever says it needs the nodes' token; and an address belongs to who
registered it first, by a key that no other node can make. The address is for Prometheus only.

::

    POST /v1/nodes          Registration                 -> 200 {"heartbeat_seconds": 60}
    POST /v1/nodes/leave    {"version", "address", "key"}  -> 200 {}
    POST /v1/nodes/forget   {"address"}, by an operator  -> 200 {}
    GET  /v1/nodes          who is there, and who should be
    GET  /v1/sd/prometheus  Prometheus' HTTP service discovery
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from dataclasses import dataclass
from typing import Any, Self

from gpuwarden.errors import PermanentError

VERSION = 1
MAX_BYTES = 4096
REGISTER_PATH = "/v1/nodes"
LEAVE_PATH = "/v1/nodes/leave"
FORGET_PATH = "/v1/nodes/forget"
DISCOVERY_PATH = "/v1/sd/prometheus"

SCHEMES = ("http", "https")
_MAX_HOST = 253
_ADDRESS = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]{2,45})\]|(?P<host>[A-Za-z0-9._-]{1,253})):(?P<port>[0-9]{1,5})"
)
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_KEY = re.compile(r"[0-9a-f]{64}")
_WORD = re.compile(r"[A-Za-z0-9.+_-]{1,64}")

_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254")
)
"""Where clouds answer whoever asks about the machine and its credentials, beside link-local."""
_METADATA_NAMES = frozenset({"metadata", "metadata.google.internal", "instance-data"})


class RegistrationRefused(PermanentError):
    """What a node said cannot be taken.

    Attributes:
        reason: a short machine-readable word.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Target:
    """An address that Prometheus can scrape.

    Attributes:
        host: a DNS name in lower case, or an IP address in its shortest form.
        port: TCP port.
        loopback: whether it means the machine that asks.
    """

    host: str
    port: int
    loopback: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `HOST:PORT` or `[IPv6]:PORT`, and nothing else.

        Raises:
            RegistrationRefused: it is no such address, or one that no node may have.
        """
        match = _ADDRESS.fullmatch(text)
        if match is None or not 1 <= int(match["port"]) <= 65535:
            raise RegistrationRefused(
                "bad_address", f"{text[:300]!r} is not an address HOST:PORT, such as node7:9835"
            )
        port = int(match["port"])
        host = match["v6"] or match["host"].lower()
        try:
            number = ipaddress.ip_address(host)
        except ValueError:
            if match["v6"] is not None:
                raise RegistrationRefused("bad_address", f"{host!r} is no IPv6 address") from None
            return cls(_name(host), port, loopback=_is_local_name(host))
        number = getattr(number, "ipv4_mapped", None) or number
        if _is_forbidden(number):
            raise RegistrationRefused(
                "forbidden_address", f"{number} is not an address that a node can have"
            )
        return cls(str(number), port, loopback=number.is_loopback)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _is_forbidden(number: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    # Reserved ranges hold IPv6's loopback, too.
    reserved = number.is_reserved and not number.is_loopback
    special = number.is_link_local or number.is_multicast or number.is_unspecified
    return special or reserved or number in _METADATA


def _name(host: str) -> str:
    labels = host.removesuffix(".").split(".")
    # What ends in a number is read as an address by some resolvers: 127.1, 0x7f.1, 2130706433.
    numeric = labels[-1].isdigit() or labels[-1].startswith("0x")
    if len(host) > _MAX_HOST or numeric or not all(map(_LABEL.fullmatch, labels)):
        raise RegistrationRefused("bad_address", f"{host!r} is neither a host name nor an address")
    if host.removesuffix(".") in _METADATA_NAMES:
        raise RegistrationRefused("forbidden_address", f"{host} is not a node")
    return host.removesuffix(".")


def _is_local_name(host: str) -> bool:
    return host.removesuffix(".").rpartition(".")[2] in ("localhost", "localdomain")


@dataclass(frozen=True, slots=True)
class Registration:
    """What a node says of itself.

    Attributes:
        target: where Prometheus reaches its exporter.
        key: `node_key`.
        boot_id: of this boot.
        scheme: http or https.
        exporter: version of the exporter.
    """

    target: Target
    key: str
    boot_id: str
    scheme: str = "http"
    exporter: str = ""

    def encode(self) -> bytes:
        """The request's body."""
        document = {
            "version": VERSION,
            "address": str(self.target),
            "key": self.key,
            "boot_id": self.boot_id,
            "scheme": self.scheme,
            "exporter": self.exporter,
        }
        return json.dumps(document).encode()

    @classmethod
    def decode(cls, document: object) -> Self:
        """Read a request's body; fields that are not known are ignored.

        Raises:
            RegistrationRefused: naming the field.
        """
        found = _document(document)
        scheme = found.get("scheme", "http")
        if scheme not in SCHEMES:
            raise RegistrationRefused("malformed", "scheme is neither http nor https")
        exporter = found.get("exporter", "")
        return cls(
            target=Target.parse(_text(found, "address")),
            key=_matching(found, "key", _KEY),
            boot_id=_matching(found, "boot_id", _WORD),
            scheme=scheme,
            exporter=_matching(found, "exporter", _WORD) if exporter else "",
        )


@dataclass(frozen=True, slots=True)
class Goodbye:
    """A node leaves, and is not expected any more.

    Attributes:
        target: as it was registered.
        key: `node_key`.
    """

    target: Target
    key: str

    def encode(self) -> bytes:
        """The request's body."""
        document = {"version": VERSION, "address": str(self.target), "key": self.key}
        return json.dumps(document).encode()

    @classmethod
    def decode(cls, document: object) -> Self:
        """Read a request's body.

        Raises:
            RegistrationRefused: naming the field.
        """
        found = _document(document)
        return cls(Target.parse(_text(found, "address")), _matching(found, "key", _KEY))


def node_key(target: Target, machine: str) -> str:
    """What an address is bound to: the same over restarts and new tokens, on no other machine.

    Args:
        target: the address that is registered.
        machine: what only this machine knows of itself (/etc/machine-id); not to be had from the
            key.
    """
    text = f"gpuwarden node\0{target}\0{machine}"
    return hashlib.sha256(text.encode()).hexdigest()


def _document(document: object) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise RegistrationRefused("malformed", "the body is not a JSON object")
    if type(document.get("version")) is not int or document["version"] != VERSION:
        raise RegistrationRefused(
            "version", f"version is not {VERSION}: exporter and engine do not fit together"
        )
    return document


def _text(document: dict[str, Any], name: str) -> str:
    value = document.get(name)
    if not isinstance(value, str):
        raise RegistrationRefused("malformed", f"{name} is missing")
    return value


def _matching(document: dict[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = _text(document, name)
    if pattern.fullmatch(value) is None:
        raise RegistrationRefused("malformed", f"{name} is not as it should be")
    return value
