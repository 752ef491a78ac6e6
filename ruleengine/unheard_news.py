"""When nobody could be told: news of that time stands until it can be heard, over restarts too.

That a job was ended is told once, for a quarter of an hour. If no Alertmanager took anything just
then, or no engine ran, its owner would never hear of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuwarden.ruleengine.ledger import Ledger

NEWS_SECONDS = 900.0
"""News stands this long from when it can be heard: longer than any group_wait."""
KEEP_SECONDS = 300.0
"""How often it is written down that all is well; what is told again for it, nobody gets twice."""


@dataclass(frozen=True, slots=True)
class Quiet:
    """A time in which no Alertmanager took anything; Unix seconds.

    Attributes:
        begun: of what was taken last before it.
        ended: of what was taken first after it, or now while it lasts.
    """

    begun: float
    ended: float

    def heard_from(self, at: float) -> float:
        """From when on news of a moment could be heard."""
        return self.ended if self.begun <= at <= self.ended else at


class UnheardNews:
    """Remembers in the ledger when Alertmanager last took what it was told.

    Args:
        ledger: where it is kept.
        patience: seconds without that, from which on the time counts as quiet.
    """

    def __init__(self, ledger: Ledger, patience: float) -> None:
        self._ledger, self._patience = ledger, patience
        rows = ledger.rows("SELECT name, value FROM meta WHERE name LIKE 'alerts_%'")
        kept = {str(name): float(value) for name, value in rows}
        self._taken_at = self._kept_at = kept.get("alerts_taken_at")
        begun, ended = kept.get("alerts_quiet_begun"), kept.get("alerts_quiet_ended")
        self._last = None if begun is None or ended is None else Quiet(begun, ended)

    def quiet(self, now: float) -> Quiet | None:
        """The last quiet time, up to now while it lasts; None where there was none.

        Args:
            now: Unix time.
        """
        begun, last = self._taken_at, self._last
        if begun is None or now - begun <= self._patience:
            return last
        if last is not None and begun - last.ended < NEWS_SECONDS:
            begun = last.begun  # what became news in that one has not been out for long enough
        return Quiet(begun, now)

    def taken(self, now: float) -> None:
        """Alertmanager took everything.

        Args:
            now: Unix time.

        Raises:
            LedgerUnusable: it cannot be written down.
        """
        quiet, same = self.quiet(now), self._last
        self._taken_at, self._last = now, quiet
        if quiet == same and self._kept_at is not None and 0 <= now - self._kept_at < KEEP_SECONDS:
            return
        kept = {"alerts_taken_at": now}
        if quiet is not None:
            kept |= {"alerts_quiet_begun": quiet.begun, "alerts_quiet_ended": quiet.ended}
        with self._ledger.transaction() as db:
            db.executemany(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)",
                [(name, repr(value)) for name, value in kept.items()],
            )
        self._kept_at = now
