"""What Slurm's accounting keeps of every attempt of a job: `sacct`.

`sacct` without `--duplicates` hides every attempt of a job but the last: what a job that came back
had used before would be forgotten. Asked for with times as Unix times (SLURM_TIME_FORMAT=%s).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.platforms.slurm import decode_tres
from gpuwarden.platforms.slurm_arrays import decode_tasks
from gpuwarden.platforms.slurm_listings import clock_seconds
from gpuwarden.platforms.slurm_texts import decode_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

ACCOUNTING_FIELDS: Final = (
    "JobIDRaw",
    "JobID",
    "Submit",
    "Start",
    "End",
    "State",
    "ElapsedRaw",
    "Suspended",
    "AllocTRES",
    "ReqTRES",
    "Account",
    "User",
    "QOS",
    "Partition",
    "Cluster",
    "ExitCode",
    "JobName",
    "Comment",
)
"""What `sacct --format` is asked for. A comment is there only if the cluster stores it."""
_NUMBER = re.compile(r"[0-9]{1,18}")
_ARRAY = re.compile(r"(?P<job>[0-9]{1,10})_\[(?P<tasks>[^\]]*)\]?")
_MODEL: Final = "gres/gpu:"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One time that a job ran, or waits to run.

    Attributes:
        job_id: Slurm's own number, of an array's task too.
        number: what its user calls it: 12, 12_3 or 12+1.
        submit: Unix time at which this attempt was queued.
        start: Unix time, or None while it waits, and for one that never ran.
        end: Unix time, or None while it runs or waits.
        state: in Slurm's word, without who cancelled it.
        elapsed: seconds between start and end (or now), without those for which it was suspended.
        suspended: seconds.
        gpus: cards that it had; 0 for one that had none or never ran.
        gpu_type: in Slurm's words; empty where not told, or several.
        account, user, qos, partition, cluster: in Slurm's words.
        name, comment: in its user's.
        status: exit status, or None.
    """

    job_id: int
    number: str
    submit: float
    start: float | None
    end: float | None
    state: str
    elapsed: float
    suspended: float = 0.0
    gpus: int = 0
    gpu_type: str = ""
    account: str = ""
    user: str = ""
    qos: str = ""
    partition: str = ""
    cluster: str = ""
    name: str = ""
    comment: str = ""
    status: int | None = None


def accounting_words(begin: int, end: int, mark: str) -> tuple[str, ...]:
    """Arguments of `sacct` for every attempt that may have held something in a stretch of time.

    Args:
        begin: Unix time.
        end: Unix time.
        mark: as for `slurm_texts.rows_format`, for the same reason.
    """
    return (
        "--local",
        "--duplicates",
        "--allocations",
        "--allusers",
        "--noheader",
        "--parsable",
        f"--delimiter={mark}",
        f"--starttime=uts{begin}",
        f"--endtime=uts{end}",
        f"--format={','.join(ACCOUNTING_FIELDS)}",
    )


def decode_accounting(text: str, mark: str) -> tuple[Attempt, ...]:
    """Attempts of an answer to `accounting_words`, each once.

    Args:
        text: what it printed.
        mark: that of the words.

    Raises:
        ServiceUnavailable: it is no such answer.
    """
    found: dict[tuple[int, float, float | None], Attempt] = {}
    for row in decode_rows(text, mark, ACCOUNTING_FIELDS):
        attempt = _attempt(row)
        if attempt is not None:
            found[attempt.job_id, attempt.submit, attempt.start] = attempt
    return tuple(found.values())


def _attempt(row: Mapping[str, str]) -> Attempt | None:
    number, submit = row["JobIDRaw"].strip(), _time(row["Submit"])
    if not _NUMBER.fullmatch(number):
        raise ServiceUnavailable("sacct answered with a job that has no number")
    if submit is None:
        return None
    # An attempt that was cancelled before it ran has a start in some versions, and no cards.
    given = decode_tres(row["AllocTRES"])
    start = _time(row["Start"]) if given else None
    count = given.get("gres/gpu", "")
    models = {name.removeprefix(_MODEL) for name in given if name.startswith(_MODEL)}
    return Attempt(
        job_id=int(number),
        number=_number(row["JobID"]),
        submit=submit,
        start=start,
        end=_time(row["End"]),
        state=(row["State"].split() or [""])[0],
        elapsed=_time(row["ElapsedRaw"]) or 0.0,
        suspended=clock_seconds(row["Suspended"]) or 0.0,
        gpus=int(count) if _NUMBER.fullmatch(count) else 0,
        gpu_type=models.pop() if len(models) == 1 else "",
        account=row["Account"],
        user=row["User"],
        qos=row["QOS"],
        partition=row["Partition"],
        cluster=row["Cluster"],
        name=row["JobName"],
        comment=row["Comment"],
        status=_status(row["ExitCode"]),
    )


def _number(text: str) -> str:
    """What its user calls a job; of an array that never began, as `squeue` lists it are bounded."""
    match = _ARRAY.fullmatch(text)
    tasks = None if match is None else decode_tasks(match["tasks"])
    return text if match is None or tasks is None else f"{match['job']}_[{tasks.shown}]"


def _status(text: str) -> int | None:
    status = text.partition(":")[0]
    return int(status) if _NUMBER.fullmatch(status) else None


def _time(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) and int(text) else None
