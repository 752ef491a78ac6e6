"""Held sets: on which nodes jobs over several nodes hold cards, where Prometheus forgets it.

Of a node that went dark Prometheus tells for an hour what was held there. After that the rest of
such a job would look like all of it: idle on the node that is seen, say, while the other one works.
What was held is kept in the ledger until the node answers, or the job is gone where it would be
seen. A job on one node needs none of this: it is not seen at all then, and so not judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from gpuwarden.ruleengine.ledger import Ledger

    Row: TypeAlias = tuple[float, tuple[str, ...]]
    """1, and (node, job, UUID, index) of a card that the job holds."""
    _Places: TypeAlias = dict[str, frozenset[tuple[str, str]]]
    """Node -> (UUID, index) of each card that a job holds there."""

GONE_SECONDS: Final = 3600.0
"""A job that no node has told of for so long, while one of its nodes would, has ended."""


class HeldSets:
    """What jobs over several nodes hold, as each node said last.

    Args:
        ledger: where it is kept.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._gone_since: dict[str, float] = {}
        self._known: dict[str, _Places] = {}
        rows = ledger.rows("SELECT job_id, node, uuid, gpu FROM held_sets")
        for job, places in _placed((1.0, (node, job, *card)) for job, node, *card in rows).items():
            self._known[job] = places

    def missing(self, rows: Sequence[Row], *, lit: AbstractSet[str], time: float) -> list[Row]:
        """What jobs hold on nodes that are dark, and that nobody told.

        Args:
            rows: what was told, as rows of `gpu_job_holds_gpu`.
            lit: nodes that are to be believed.
            time: Unix time of the rows.

        Returns:
            Further rows of the same kind.

        Raises:
            LedgerUnusable: what has changed cannot be written down.
        """
        wide = self._known.keys() | _over_several(rows)
        if not wide:
            return []
        told = _placed(row for row in rows if row[1][1] in wide)
        kept: dict[str, _Places] = {}
        found: list[Row] = []
        for job in wide:
            known, here = self._known.get(job, {}), told.get(job, {})
            if not here:
                if not self._gone(job, known, lit=lit, time=time):
                    kept[job] = known
                continue
            self._gone_since.pop(job, None)
            lost = _lost(known, here, lit)
            found += [
                (1.0, (node, job, *card)) for node, cards in lost.items() for card in sorted(cards)
            ]
            if len(here) + len(lost) > 1:
                kept[job] = here | lost
        self._save(kept)
        return found

    def _gone(
        self, job: str, known: Mapping[str, object], *, lit: AbstractSet[str], time: float
    ) -> bool:
        """Whether a job that nobody tells of has ended: a scrape or two may have missed it."""
        if lit.isdisjoint(known):
            return False
        since = self._gone_since.setdefault(job, time)
        if time - since < GONE_SECONDS:
            return False
        del self._gone_since[job]
        return True

    def _save(self, kept: dict[str, _Places]) -> None:
        """Write down what has changed."""
        changed = {job for job, places in kept.items() if self._known.get(job) != places}
        over = self._known.keys() - kept.keys()
        if changed or over:
            with self._ledger.transaction() as db:
                db.executemany(
                    "DELETE FROM held_sets WHERE job_id=?", [(job,) for job in changed | over]
                )
                db.executemany(
                    "INSERT INTO held_sets (job_id, node, uuid, gpu) VALUES (?, ?, ?, ?)",
                    [
                        (job, node, *card)
                        for job in sorted(changed)
                        for node, cards in kept[job].items()
                        for card in sorted(cards)
                    ],
                )
        self._known = kept


def _over_several(rows: Iterable[Row]) -> set[str]:
    """Jobs of which several nodes tell."""
    homes: dict[str, str] = {}
    return {texts[1] for _, texts in rows if homes.setdefault(texts[1], texts[0]) != texts[0]}


def _placed(rows: Iterable[Row]) -> dict[str, _Places]:
    found: dict[str, dict[str, set[tuple[str, str]]]] = {}
    for _, (node, job, uuid, gpu) in rows:
        found.setdefault(job, {}).setdefault(node, set()).add((uuid, gpu))
    return {
        job: {node: frozenset(cards) for node, cards in places.items()}
        for job, places in found.items()
    }


def _lost(known: _Places, here: _Places, lit: AbstractSet[str]) -> _Places:
    """Places of a job that are neither told, nor answered by their node or under its new name."""
    shown = {uuid for node in here.keys() & lit for uuid, _ in here[node]}
    return {
        node: cards
        for node, cards in known.items()
        if node not in here and node not in lit and not {uuid for uuid, _ in cards} <= shown
    }
