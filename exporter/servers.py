"""What the servers of exporter and agent have in common: their address, and how they end."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
from typing import TYPE_CHECKING

from gpuwarden.errors import InvalidInput, TemporaryError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import uvicorn

_BACKLOG = 128
_ADDRESS = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?)\]|(?P<host>[^:\[\]\s]*)):(?P<port>[0-9]{1,5})"
)


def parse_address(text: str, *, default_port: int) -> tuple[str, int]:
    """Host and port of a `--web.listen-address`.

    Args:
        text: `HOST:PORT`, `[IPv6]:PORT`, or `:PORT` for every address.
        default_port: the program's own, for the examples of the error's message.

    Returns:
        The host, `::` for every address, and the port.

    Raises:
        InvalidInput: it is none of these.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise InvalidInput(
            f"--web.listen-address {text!r} is not an address HOST:PORT: write "
            f"127.0.0.1:{default_port}, [::1]:{default_port}, or :{default_port} for every address"
        )
    return match["v6"] or match["host"] or "::", int(match["port"])


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket.

    Args:
        host: address; `::` takes IPv4 too where the system has both.
        port: 0 for a free one.

    Raises:
        TemporaryError: the address is taken or is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    if host == "::" and not both:
        family, host = socket.AF_INET, ""
    try:
        server = socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        raise TemporaryError(
            f"{host or '*'} port {port} cannot be listened on: {error.strerror or error}; "
            "choose another --web.listen-address"
        ) from error
    with server:
        yield server


def end_by_signal(program: uvicorn.Server) -> None:
    """Let SIGTERM and SIGINT end a server in an orderly way, also before and after it serves.

    uvicorn takes these signals over while it serves, and raises the one that ended it once more;
    neither before nor after that may a signal be lost, or skip what is to be done at the end.
    """

    def end(_number: int, _frame: object) -> None:
        program.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
