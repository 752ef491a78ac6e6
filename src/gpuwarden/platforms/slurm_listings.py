"""Every job of Slurm's queue with what its owner wants to know: by `squeue`, for every version.

Asked for as in `slurm_texts`, so that no user's words can be mistaken for Slurm's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from gpuwarden.platforms import hostlists
from gpuwarden.platforms.slurm_arrays import decode_tasks
from gpuwarden.platforms.slurm_queue import asked_cards
from gpuwarden.platforms.slurm_texts import LIST_FIELDS, decode_rows, listed_job, rows_format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.platforms.slurm import SlurmJob
    from gpuwarden.platforms.slurm_arrays import ArrayTasks

LISTING_FIELDS: Final = (
    *LIST_FIELDS,
    "UserName",
    "Reason",
    "QOS",
    "EligibleTime",
    "TimeLimit",
    "PreemptTime",
    "PriorityLong",
    "tres-per-job",
    "tres-per-node",
    "tres-per-socket",
    "tres-per-task",
    "NumNodes",
    "NumTasks",
    "schednodes",
    "Reservation",
    "Dependency",
    "exit_code",
    "Comment",
)
"""What `squeue --states=all -O` is asked for."""

_NUMBER = re.compile(r"[0-9]{1,18}")
_CLOCK = re.compile(
    r"(?:(?P<days>[0-9]{1,6})-)?(?:(?P<hours>[0-9]{1,3}):)?(?P<minutes>[0-9]{1,6}):"
    r"(?P<seconds>[0-9]{2})"
)
_STATUS = re.compile(r"(?P<status>[0-9]{1,5})(?::(?P<signal>[0-9]{1,3}))?")
_DEPENDENCY = re.compile(r"(?P<kind>[a-z]+):(?P<job>[0-9]{1,10}(?:_[0-9*]{1,10})?)")
_MODEL: Final = "gres/gpu:"


@dataclass(frozen=True, slots=True)
class ListedJob:
    """A job, or what has not begun of an array.

    Attributes:
        job: the job, with its user, account, QOS, comment and reason.
        tasks: those of an array that have not begun, in one; None of a single job or task.
        gpus: cards that it has, or asks for; of an array, each task.
        gpu_type: their type in Slurm's words; empty where any will do or several are asked for.
        gpus_known: whether Slurm told their number; where it does not account for cards, they are
            counted by what was asked for, and that is not always to be made out.
        eligible: Unix time from which on it may start, or None.
        preempted: Unix time at which it was told to leave for another, or None.
        priority: the higher, the earlier it is its turn.
        planned_nodes: where Slurm plans to start it; empty where it has no plan.
        reservation: that it asked for, or runs in; empty for none.
        waits_for: numbers of the jobs that it waits for, each with how.
        status: exit status of its last attempt, or None.
        nodes: that it has, or asks for at least.
    """

    job: SlurmJob
    tasks: ArrayTasks | None = None
    gpus: int = 0
    gpu_type: str = ""
    gpus_known: bool = True
    eligible: float | None = None
    preempted: float | None = None
    priority: int = 0
    planned_nodes: tuple[str, ...] = ()
    reservation: str = ""
    waits_for: tuple[tuple[str, str], ...] = ()
    status: int | None = None
    nodes: int = 1

    @property
    def number(self) -> str:
        """What its user calls it: 12, 12_3, 12+1, or 12_[0-5%2] of tasks that have not begun."""
        own = self.job.number
        return own if self.tasks is None else f"{self.job.job_id}_[{self.tasks.shown}]"

    @property
    def target(self) -> str:
        """What Slurm's commands take for it.

        Of tasks that have not begun and are too many to be named, the whole array: only for what
        concerns no running task.
        """
        if self.tasks is None:
            return self.job.number
        ranges = self.tasks.ranges
        return f"{self.job.job_id}_[{ranges}]" if ranges else str(self.job.job_id)


def listing_format(mark: str) -> str:
    """`slurm_texts.rows_format` of `LISTING_FIELDS`, whose answer `decode_listing` reads."""
    return rows_format(LISTING_FIELDS, mark)


def decode_listing(text: str, mark: str) -> tuple[ListedJob, ...]:
    """Jobs of an answer in `listing_format`.

    Raises:
        ServiceUnavailable: it is no such answer.
    """
    return tuple(_listed(row) for row in decode_rows(text, mark, LISTING_FIELDS))


def _listed(row: Mapping[str, str]) -> ListedJob:
    word = {name: _word(row[name]) for name in LISTING_FIELDS}
    job = replace(
        listed_job(row),
        user_name=word["UserName"],
        reason=word["Reason"],
        qos=word["QOS"],
        time_limit=clock_seconds(word["TimeLimit"]),
        # A comment is its user's: it may begin or end with whatever he likes.
        comment=row["Comment"] if row["Comment"] != "(null)" else "",
    )
    gpus, known = _gpus(job, word)
    return ListedJob(
        job,
        tasks=decode_tasks(word["ArrayTaskID"]),
        gpus=gpus,
        gpu_type=_model(job, word),
        gpus_known=known,
        eligible=_time(word["EligibleTime"]),
        preempted=_time(word["PreemptTime"]),
        priority=int(word["PriorityLong"]) if _NUMBER.fullmatch(word["PriorityLong"]) else 0,
        planned_nodes=_hosts(word["schednodes"]),
        reservation=word["Reservation"],
        waits_for=tuple(
            (match["kind"], match["job"]) for match in _DEPENDENCY.finditer(word["Dependency"])
        ),
        status=_exit_status(word["exit_code"]),
        nodes=len(job.nodes) or _leading(word["NumNodes"]),
    )


def _gpus(job: SlurmJob, word: Mapping[str, str]) -> tuple[int, bool]:
    """Cards by what Slurm accounts for; where it does not, by what was asked for in four ways."""
    counted = job.tres.get("gres/gpu", "")
    if _NUMBER.fullmatch(counted):
        return int(counted), True
    nodes = len(job.nodes) or _leading(word["NumNodes"])
    ways = {"job": 1, "node": nodes, "task": _leading(word["NumTasks"])}
    asked = {way: asked_cards(word[f"tres-per-{way}"]) for way in (*ways, "socket")}
    if None in asked.values() or asked["socket"]:
        return 0, False
    counts = [sum((asked[way] or {}).values()) * times for way, times in ways.items()]
    # What is asked for in several ways at once is the same cards, said more closely.
    return max(counts), not any(counts)


def _model(job: SlurmJob, word: Mapping[str, str]) -> str:
    named = {
        name.removeprefix(_MODEL)
        for name, count in job.tres.items()
        if name.startswith(_MODEL) and count != "0"
    }
    for way in ("job", "node", "socket", "task"):
        named |= {model for model in asked_cards(word[f"tres-per-{way}"]) or {} if model}
    return named.pop() if len(named) == 1 else ""


def clock_seconds(text: str) -> float | None:
    """Seconds of Slurm's `1-02:03:04`, `3:04` and `03:04:05`; None of `UNLIMITED` and what is none.

    Such texts have minutes and seconds at least.
    """
    match = _CLOCK.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes = (int(match[part] or 0) for part in ("days", "hours", "minutes"))
    return float(((days * 24 + hours) * 60 + minutes) * 60 + int(match["seconds"]))


def _exit_status(text: str) -> int | None:
    match = _STATUS.fullmatch(text)
    if match is None:
        return None
    status = int(match["status"])
    # 22.05 gives what wait(2) does: the status stands in its upper byte.
    return status >> 8 if match["signal"] is None and status > 255 else status


def _hosts(text: str) -> tuple[str, ...]:
    try:
        return hostlists.expand(text)
    except ValueError:
        return ()


def _leading(text: str) -> int:
    match = re.match(r"[0-9]{1,9}", text)
    return int(match[0]) if match is not None else 1


def _time(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) and int(text) else None


def _word(text: str) -> str:
    text = text.strip()
    return "" if text in ("(null)", "N/A", "None", "NONE") else text
