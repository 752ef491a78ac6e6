"""What a job that cannot start keeps from those behind it, and what it lets them have. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuwarden.scheduling.local.scenes import Waiting
    from gpuwarden.scheduling.preemption_terms import Pool


def is_done_by(job: Waiting, at: float, now: float) -> bool:
    """Whether a job that starts now is expected to have ended by a moment.

    Args:
        job: that waits.
        at: Unix time.
        now: Unix time.
    """
    return job.seconds is not None and now + job.seconds <= at


@dataclass(slots=True)
class Shadow:
    """When the first job that cannot start could, and what is left beside it then.

    Attributes:
        job: its id.
        pools: where.
        at: Unix time; infinite where nobody can tell.
        extra: cards that are free then besides.
    """

    job: str
    pools: tuple[Pool, ...]
    at: float
    extra: int


@dataclass(slots=True)
class Claim:
    """Free cards that are kept for a job until it has all that it wants.

    Attributes:
        cards: pool -> how many; fewer as they are lent.
        at: Unix time before which it cannot have the rest: nobody may be asked before, and nobody
            is expected to end. Whoever is done by then may have them.
    """

    cards: dict[Pool, int]
    at: float
