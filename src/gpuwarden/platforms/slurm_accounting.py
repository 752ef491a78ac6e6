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
from gpuwarden.platforms.slurm_listings import clock_seconds

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
    # Users' words come last.
    "JobName",
)
_NUMBER = re.compile(r"[0-9]{1,18}")
_ROW = re.compile(r"(?P<job>[0-9]{1,10})\|")
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
        tracked: whether it can be told that it had no cards: a cluster that does not account for
            them tells of none.
        account, user, qos, partition, cluster, name: in Slurm's words.
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
    tracked: bool = True
    account: str = ""
    user: str = ""
    qos: str = ""
    partition: str = ""
    cluster: str = ""
    name: str = ""
    status: int | None = None


def accounting_words(begin: int, end: int, *, everybody: bool = True) -> tuple[str, ...]:
    """Arguments of `sacct` for every attempt that may have held something in a stretch of time.

    Args:
        begin: Unix time.
        end: Unix time.
        everybody: not only the caller's own jobs.
    """
    return (
        "--duplicates",
        "--allocations",
        "--parsable2",
        "--noheader",
        *(("--allusers",) if everybody else ()),
        f"--starttime=uts{begin}",
        f"--endtime=uts{end}",
        f"--format={','.join(ACCOUNTING_FIELDS)}",
    )


def decode_accounting(text: str, *, tracked: bool = True) -> tuple[Attempt, ...]:
    """Attempts of an answer to `accounting_words`, each once.

    A name may hold `|` and line feeds: it comes last, and a line that does not begin as a row does
    goes on with the name before it.

    Args:
        text: what it printed.
        tracked: whether the cluster accounts for cards.

    Raises:
        ServiceUnavailable: it is no such answer.
    """
    found: dict[tuple[int, float, float | None], Attempt] = {}
    for line in text.split("\n"):
        values = line.split("|", len(ACCOUNTING_FIELDS) - 1)
        if not _ROW.match(line) or len(values) < len(ACCOUNTING_FIELDS):
            if line and not found:
                raise ServiceUnavailable("sacct answered in another form than it was asked for")
            continue
        attempt = _attempt(dict(zip(ACCOUNTING_FIELDS, values, strict=True)), tracked)
        if attempt is not None:
            found[attempt.job_id, attempt.submit, attempt.start] = attempt
    return tuple(found.values())


def _attempt(row: Mapping[str, str], tracked: bool) -> Attempt | None:
    submit = _time(row["Submit"])
    if submit is None:
        return None
    # An attempt that was cancelled before it ran has a start in some versions, and no cards.
    given = decode_tres(row["AllocTRES"])
    start = _time(row["Start"]) if given else None
    count = given.get("gres/gpu", "")
    models = {name.removeprefix(_MODEL) for name in given if name.startswith(_MODEL)}
    return Attempt(
        job_id=int(row["JobIDRaw"]),
        number=row["JobID"],
        submit=submit,
        start=start,
        end=_time(row["End"]),
        state=(row["State"].split() or [""])[0],
        elapsed=_time(row["ElapsedRaw"]) or 0.0,
        suspended=clock_seconds(row["Suspended"]) or 0.0,
        gpus=int(count) if _NUMBER.fullmatch(count) else 0,
        gpu_type=models.pop() if len(models) == 1 else "",
        tracked=tracked,
        account=row["Account"],
        user=row["User"],
        qos=row["QOS"],
        partition=row["Partition"],
        cluster=row["Cluster"],
        name=row["JobName"],
        status=_status(row["ExitCode"]),
    )


def _status(text: str) -> int | None:
    status = text.partition(":")[0]
    return int(status) if _NUMBER.fullmatch(status) else None


def _time(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) and int(text) else None
