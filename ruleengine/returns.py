"""Jobs that come back after they were ended, so that none is ended in a loop.

A controller, a queue or a script that starts a job again whenever it ends would have it ended again
and again, and every time the work since its last saved state is lost for nothing. What comes back
is told to its owner and to the operators, and is ended again only after a wait that grows.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden import durations
from gpuwarden.ruleengine.guards import DAY_SECONDS, Blocked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.ruleengine.ledger import Ledger
    from gpuwarden.ruleengine.reclaim.ports import Claim
    from gpuwarden.ruleengine.verdicts import JobFacts

FIRST_WAIT = 6.0
"""The first wait, in lengths of `comeback`; each further one is twice as long."""
HOLD_FROM = 3
"""From so many ends within a day on it is left alone until a day has passed."""
CAME_BACK = "came_back"
"""The guard's word, and the audit's."""

_SLURM = re.compile(r"slurm-(?P<job>.+)-[0-9]+")


@dataclass(frozen=True, slots=True)
class Return:
    """A job whose work was ended before. Times are Unix seconds.

    Attributes:
        work: what it has in common with what was ended, for people.
        times: how often that was ended within a day.
        last: the last time.
        until: it is not ended again before this.
    """

    work: str
    times: int
    last: float
    until: float

    def blocked(self, now: float) -> Blocked:
        """The reason not to end it now."""
        ago = durations.render(float(round(max(0.0, now - self.last))))
        left = durations.render(float(round(max(0.0, self.until - now))))
        times = "once" if self.times == 1 else f"{self.times} times"
        return Blocked(
            CAME_BACK,
            f"{self.work} was ended {times} within a day, {ago} ago for the last time, "
            f"and came back: it is left alone for another {left}. End what starts it again, or "
            "talk to its owner",
        )


def works_of(job: JobFacts, claim: Claim | None) -> dict[str, str]:
    """What names the work that an attempt does, whatever the attempt: key -> for people.

    Args:
        job: by facts.
        claim: how its platform recognises it, or None.
    """
    found = {}
    if job.run is not None and not job.run.conflict:
        found[f"run {job.run.run_id}"] = f"run {job.run.run_id}"
    slurm = _SLURM.fullmatch(job.job_id)
    if slurm is not None:
        found[f"slurm {slurm['job']}"] = f"Slurm's job {slurm['job']}"
    identity = {} if claim is None else claim.identity
    if identity.get("target_uid"):
        name = f"{identity.get('target_kind')} {identity.get('target_name')}"
        found[f"controller {identity['target_uid']}"] = f"a pod of {name}"
    return found


def wait_after(
    ends: Sequence[float], *, started: float | None, now: float, comeback: float
) -> float | None:
    """Until when a job is left alone whose work was ended at these times, or None: it need not be.

    Args:
        ends: Unix times within the last day, ascending.
        started: start of the present attempt, or None where that is not known.
        now: Unix time.
        comeback: an attempt that begins within this of an end came back by itself; seconds.
    """
    if not ends:
        return None
    last = ends[-1]
    if len(ends) >= HOLD_FROM:
        until = last + DAY_SECONDS
    elif started is None or started - last <= comeback:
        until = last + FIRST_WAIT * comeback * 2.0 ** (len(ends) - 1)
    else:
        return None
    return until if until > now else None


class Returns:
    """What was ended before, by the ledger.

    Args:
        ledger: of the engine.
        comeback: see `wait_after`.
    """

    def __init__(self, ledger: Ledger, comeback: float) -> None:
        self._ledger = ledger
        self._comeback = comeback

    def find(
        self, job: JobFacts, claim: Claim | None, *, rule_id: str, user: str, now: float
    ) -> Return | None:
        """How a job came back and must be left alone, or None.

        Args:
            job: by the tick's facts.
            claim: how its platform recognises it, or None.
            rule_id: the rule that would end it.
            user: its owner.
            now: Unix time.
        """
        works = works_of(job, claim)
        if not works:
            return None
        rows = self._ledger.rows(
            "SELECT DISTINCT d.id, d.finished_at, w.work FROM decisions d "
            "JOIN works w ON w.decision_id = d.id "
            "WHERE d.action IN ('terminate', 'requeue') AND d.state IN ('verified', 'incomplete') "
            "AND d.rule_id = ? AND d.user = ? AND d.finished_at >= ? "
            "AND w.work IN (SELECT value FROM json_each(?)) ORDER BY d.finished_at",
            (rule_id, user, now - DAY_SECONDS, json.dumps(sorted(works))),
        )
        ends = sorted({name: at for name, at, _ in rows}.values())
        until = wait_after(ends, started=job.start_time, now=now, comeback=self._comeback)
        if until is None:
            return None
        return Return(works[rows[-1][2]], len(ends), ends[-1], until)


def told(ledger: Ledger, case_id: int) -> Return | None:
    """What the audit says of a case's job having come back, or None."""
    rows = ledger.rows(
        "SELECT detail FROM events WHERE case_id=? AND kind=? ORDER BY id DESC LIMIT 1",
        (case_id, CAME_BACK),
    )
    return Return(**json.loads(rows[0][0])) if rows else None
