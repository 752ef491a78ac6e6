"""Run drafts: what trainers say of their runs, put together from several rows."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Protocol

from gpuwarden.ruleengine.verdicts import RunFacts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class _Owner(Protocol):
    """A job in the making."""

    runs: dict[str, RunFacts]


class RunDrafts:
    """Runs by the job that claims them; they are handed to the jobs by `finish`."""

    def __init__(self) -> None:
        self._fields: dict[tuple[int, str], dict[str, Any]] = {}
        self._owners: dict[int, _Owner] = {}

    def declare(self, owner: _Owner, run_id: str, texts: Sequence[str]) -> None:
        """A run as its labels declare it; a second row of the same run counts instead.

        Args:
            owner: the job.
            run_id: of the run.
            texts: model, batch, imgsz, amp and project.
        """
        model, batch, imgsz, amp, project = texts
        self._owners[id(owner)] = owner
        self._fields[id(owner), run_id] = {
            "run_id": run_id,
            "model": model,
            "batch": _whole(batch),
            "imgsz": _whole(imgsz),
            "amp": {"true": True, "false": False}.get(amp.lower()),
            "project": project,
        }

    def amend(self, owner: _Owner, run_id: str, **fields: float | str) -> None:
        """More of a run that was declared; of another nothing is known."""
        known = self._fields.get((id(owner), run_id))
        if known is not None:
            known.update(fields)

    def finish(self) -> None:
        """Give every job its runs."""
        for (owner, run_id), fields in self._fields.items():
            self._owners[owner].runs[run_id] = RunFacts(**fields)


def torn(claims: Mapping[str, Mapping[str, RunFacts]]) -> set[str]:
    """Runs that more than one job claims.

    Args:
        claims: job_id -> its runs.
    """
    owners: dict[str, int] = defaultdict(int)
    for runs in claims.values():
        for run_id in runs:
            owners[run_id] += 1
    return {run_id for run_id, count in owners.items() if count > 1}


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= 9 else None
