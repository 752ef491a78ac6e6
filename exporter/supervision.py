"""What systemd hears of a daemon: that it serves, that it still does, that it ends (sd_notify(3)).

Alive means that the event loop turns: it is what answers scrapes and requests. A driver that hangs
is no reason to be restarted, because the next process would hang in it as well; the page says so.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_IDLE_SECONDS = 30.0
_SEND_SECONDS = 0.5


class Supervision:
    """The supervisor's ear; nothing is sent where there is none."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Find the supervisor.

        Args:
            environ: the process's environment by default.
        """
        given = os.environ if environ is None else environ
        address = given.get("NOTIFY_SOCKET", "")
        # A name of the abstract namespace is written with an @ for its leading NUL byte.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._ready = False
        self.interval = _interval(given)
        """Seconds between two signs of life: half of what the supervisor waits for one."""

    async def alive(self) -> None:
        """Say that the server serves; to be called from its event loop every `interval`."""
        self._send("WATCHDOG=1" if self._ready else "READY=1\nWATCHDOG=1")
        self._ready = True

    def stopping(self) -> None:
        """Say that the process is about to end."""
        self._send("STOPPING=1")

    def _send(self, message: str) -> None:
        if not self._address.startswith(("/", "\0")):
            return
        # A supervisor that cannot hear is no reason to fail: it decides itself what silence means.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as ear,
        ):
            ear.settimeout(_SEND_SECONDS)
            ear.sendto(message.encode(), self._address)


def _interval(environ: Mapping[str, str]) -> float:
    microseconds, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    mine = pid in ("", str(os.getpid()))
    if not mine or not microseconds.isdecimal() or int(microseconds) == 0:
        return _IDLE_SECONDS
    return int(microseconds) / 2e6
