"""How long jobs waited for cards: where a scheduler tells, and otherwise that nobody does.

Slurm's accounting knows of each job when it could have started and when it did. Without it only
its queue of this moment is known; Kubernetes keeps neither.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine.slurm_queues import SlurmQueue

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuwarden.ruleengine.reports.periods import Period
    from gpuwarden.ruleengine.reports.readers import Reader
    from gpuwarden.slurm_commands import SlurmCommands

PORTION_SECONDS: Final = 7 * 86400.0
"""Accounting is asked for so much at once: its answer is bounded."""
TIMEOUT_SECONDS: Final = 120.0
"""Accounting is slower than the queue, and nobody waits for it."""
_SLACK_SECONDS: Final = 60.0
"""By how much a portion is asked for too early and too late: the clocks of two machines differ."""
_FIELDS: Final = "JobIDRaw,User,Submit,Eligible,Start,AllocTRES"
_GPU = re.compile(r"(?:^|,)gres/gpu(?::[^=,]*)?=[1-9]")
NOBODY: Final = (
    "no scheduler is configured (slurm in engine.yaml): nobody tells how long jobs waited"
)
KUBERNETES: Final = (
    "Kubernetes does not keep how long pods waited: only what waits at this moment could be asked"
)


@dataclass(frozen=True, slots=True)
class Wait:
    """One job that started in the period.

    Attributes:
        user: whose it is.
        begun: Unix time of its start.
        seconds: since it could have started.
    """

    user: str
    begun: float
    seconds: float


def decode_accounting(text: str) -> list[Wait]:
    """Jobs with a GPU that have started, of `sacct --parsable2` in the order of `_FIELDS`.

    Raises:
        ServiceUnavailable: it is no such answer.
    """
    found = []
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) != len(_FIELDS.split(",")):
            raise ServiceUnavailable("sacct answered in another form than it was asked for")
        _, user, submit, eligible, start, tres = parts
        if not start.isdecimal() or not _GPU.search(tres):
            continue
        # A job that waited for another one, or for its begin time, did not wait for a card.
        since = eligible if eligible.isdecimal() else submit
        if since.isdecimal():
            found.append(Wait(user, float(start), max(0.0, float(start) - float(since))))
    return found


async def slurm_waits(
    commands: SlurmCommands, period: Period, reader: Reader, *, now: float
) -> dict[str, Any]:
    """The section on waiting, from Slurm; where it does not answer, why it is not known."""
    try:
        if not commands.has("sacct"):
            pending = await SlurmQueue(commands).pending()
            return unknown(
                "Slurm's accounting is not configured (slurm.sacct in engine.yaml), so that how "
                f"long jobs waited is not known; {len(pending)} jobs pend now"
            )
        waits = await _accounting(commands, period, now)
    except ServiceUnavailable as error:
        return unknown(f"Slurm did not tell: {error}")
    users = reader.users
    return waiting([wait for wait in waits if users is None or wait.user in users], reader)


async def _accounting(commands: SlurmCommands, period: Period, now: float) -> list[Wait]:
    """Every job that started in the period, each once."""
    found: list[Wait] = []
    begin = period.begin
    while begin < period.end:
        end = min(begin + PORTION_SECONDS, period.end)
        text = await commands.output(
            "sacct",
            "--allusers",
            "--allocations",
            "--duplicates",
            "--parsable2",
            "--noheader",
            f"--starttime={_ago(now - begin + _SLACK_SECONDS)}",
            f"--endtime={_ago(now - end - _SLACK_SECONDS)}",
            f"--format={_FIELDS}",
        )
        # It lists what ran at any time in between: only what started there counts.
        found += [wait for wait in decode_accounting(text) if begin <= wait.begun < end]
        begin = end
    return found


def _ago(seconds: float) -> str:
    """A moment as sacct takes it without regard to the zone of this machine."""
    return f"now-{max(0, round(seconds))}seconds"


def unknown(why: str) -> dict[str, Any]:
    """The section where nobody tells."""
    return {"known": False, "why": why}


def waiting(waits: Iterable[Wait], reader: Reader) -> dict[str, Any]:
    """The section on waiting, of jobs that started in the period."""
    by_team: dict[str, list[float]] = {}
    for wait in waits:
        by_team.setdefault(reader.team_of(wait.user), []).append(wait.seconds)
    everybody = [seconds for own in by_team.values() for seconds in own]
    return {
        "known": True,
        "why": "",
        "jobs": len(everybody),
        **_spread(everybody),
        "teams": [
            {"team": team, "jobs": len(own), **_spread(own)}
            for team, own in sorted(by_team.items(), key=lambda item: (-max(item[1]), item[0]))
        ],
    }


def _spread(seconds: list[float]) -> dict[str, float | None]:
    """Median, the ninth tenth, and the longest."""
    if not seconds:
        return {"median_seconds": None, "p90_seconds": None, "longest_seconds": None}
    ordered = sorted(seconds)
    return {
        "median_seconds": statistics.median(ordered),
        "p90_seconds": ordered[min(len(ordered) - 1, (9 * len(ordered)) // 10)],
        "longest_seconds": ordered[-1],
    }
