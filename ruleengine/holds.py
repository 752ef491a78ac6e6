"""What held a due end back, from when until when: kept for the audit, by one row a span.

A span begins with the tick that first finds the reason and ends with the first that does not. After
a restart the spans that are open go on, or end with the first tick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from gpuwarden.ruleengine.ledger_handles import LedgerUnusable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuwarden.ruleengine.guards import Blocked
    from gpuwarden.ruleengine.ledger import Ledger

MAX_SPANS = 200
"""Of one case: what comes and goes more often is not written down any more."""

log = structlog.get_logger(__name__)


class Holds:
    """The spans that are open.

    Args:
        ledger: where they are written.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        rows = ledger.rows("SELECT case_id, reason FROM holds WHERE ended_at IS NULL")
        self._open: set[tuple[int, str]] = {(case_id, reason) for case_id, reason in rows}

    def lifted(self, case_id: int) -> None:
        """The last look at a case found none, and has written that down."""
        self._open = {key for key in self._open if key[0] != case_id}

    def seen(self, blocks: Mapping[int, Iterable[Blocked]], *, time: float) -> None:
        """Take over what stands between each due case and its end now.

        Nothing waits for it: a ledger that cannot be written stops whatever depends on it, and
        this does not.

        Args:
            blocks: case's number -> the reasons; cases that are not due are not in it.
            time: Unix time.
        """
        sentences = {
            (case_id, block.reason): block.sentence
            for case_id, found in blocks.items()
            for block in found
        }
        begun, ended = sentences.keys() - self._open, self._open - sentences.keys()
        if not begun and not ended:
            return
        try:
            with self._ledger.transaction() as db:
                db.executemany(
                    "UPDATE holds SET ended_at=? WHERE case_id=? AND reason=? AND ended_at IS NULL",
                    [(time, *key) for key in sorted(ended)],
                )
                db.executemany(
                    "INSERT INTO holds (case_id, reason, sentence, begun_at) SELECT ?1, ?2, ?3, ?4 "
                    "WHERE (SELECT count(*) FROM holds WHERE case_id=?1) < ?5",
                    [(*key, sentences[key], time, MAX_SPANS) for key in sorted(begun)],
                )
        except LedgerUnusable as error:
            log.warning("what held ends back is not written down", error=str(error))
            return
        self._open = set(sentences)
