"""Names of users, asked for with care: the directory behind them may be slow or down."""

from __future__ import annotations

import pwd
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuwarden.clock import Clock
    from gpuwarden.exporter.blocking_calls import BlockingCalls

KEEP_SECONDS = 3600.0
"""A name is asked for again after this; accounts seldom change."""
RETRY_SECONDS = 5.0
"""A uid without a name, in a container or while the directory is down, is asked for again."""

_DIRECTORY = -1
"""Owner of these calls: no user, but the node's own name service."""


def system_name(uid: int) -> str | None:
    """What the system's directory calls a user, or None where it names none or does not answer."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        # Python says KeyError for "nobody" and for "the directory is down" alike.
        return None


class UserNames:
    """uid -> name; used by one thread."""

    def __init__(
        self,
        calls: BlockingCalls,
        clock: Clock,
        *,
        ask: Callable[[int], str | None] = system_name,
    ) -> None:
        """Begin knowing nobody.

        Args:
            calls: makes the calls, which may hang.
            clock: for the age of names.
            ask: the directory.
        """
        self._calls = calls
        self._clock = clock
        self._ask = ask
        self._known: dict[int, tuple[str | None, float]] = {}

    def name(self, uid: int) -> str:
        """Name of a user; the uid while he has none that is known.

        A name that was known stays while the directory does not answer.
        """
        name, until = self._known.get(uid, (None, 0.0))
        now = self._clock.monotonic()
        if now >= until:
            found = self._calls.make(_DIRECTORY, lambda: self._ask(uid))
            name, kept = found or name, KEEP_SECONDS if found else RETRY_SECONDS
            self._known[uid] = (name, now + kept)
        return str(uid) if name is None else name

    def forget(self) -> None:
        """Forget who is not asked for any more; to be called now and then."""
        now = self._clock.monotonic()
        self._known = {
            uid: (name, until)
            for uid, (name, until) in self._known.items()
            if now < until + KEEP_SECONDS
        }
