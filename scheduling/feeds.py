"""Addresses of the calendar that programs can subscribe to: each signed, for one team or all.

A calendar program sends no token: who has the address may read. It holds no more than bookings.
To take all addresses back, remove the file of the key and restart the daemon.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from gpuwarden.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

_BYTES = 32


class Feeds:
    """Signs addresses.

    Args:
        path: file of the key, which is made where there is none.

    Raises:
        InvalidInput: it cannot be read, or holds no key.
    """

    def __init__(self, path: Path) -> None:
        try:
            if not path.exists():
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with os.fdopen(handle, "wb") as file:
                    file.write(secrets.token_bytes(_BYTES))
            self._key = path.read_bytes()
        except OSError as error:
            raise InvalidInput(f"{path} cannot be read or made: {error}") from error
        if len(self._key) != _BYTES:
            raise InvalidInput(f"{path} holds no key: remove it, and a new one is made")

    def path(self, team: str) -> str:
        """Path and query of a calendar; an empty team is all of them."""
        return f"/v1/calendar.ics?{urlencode({'team': team, 'key': self._sign(team)})}"

    def right(self, team: str, key: str) -> bool:
        """Whether an address is one that was given out; compared in constant time."""
        return hmac.compare_digest(key.encode("utf-8", "replace"), self._sign(team).encode())

    def _sign(self, team: str) -> str:
        message = b"gpuwarden calendar v1\n" + team.encode("utf-8", "replace")
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()[:40]
