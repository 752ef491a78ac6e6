"""What Slurm's commands answer: jobs, their identity, and the cards that they were given.

Shapes differ between versions: a number is a number (22.05) or an object that says whether it is
set (from 23.02 on), a state is a word or a list of words. Both are read here, and a version that
names more than is known is no error.

Text is read only where no user's words can be mistaken for Slurm's. A job's name, comment and
account may hold spaces, line feeds and whatever looks like another field; so lists are asked for
with a separator that nobody can guess, and of `scontrol show job` only what stands where it must.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.platforms import hostlists

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_JOB_ID = 2**32 - 1
_UNSET_TASKS = (2**32 - 2, 2**32 - 1)
"""NO_VAL and INFINITE, by which Slurm 22.05 says that there is no number."""
_MAX_GPUS = 4096

PENDING: Final = frozenset(
    {
        "PENDING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_HOLD",
        "REQUEUE_FED",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
    }
)
"""In one of these it has no nodes, and may get some; SPECIAL_EXIT is held, by RequeueExitHold."""
HOLDING: Final = frozenset(
    {"RUNNING", "SUSPENDED", "COMPLETING", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"}
)
"""In one of these a job has its nodes; a suspended one keeps its cards, one that ends has them."""
ENDED: Final = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "RECONFIG_FAIL",
        "REVOKED",
        "TIMEOUT",
    }
)
"""For good, unless COMPLETING stands beside it. PREEMPTED is not here: such a job may come back."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job, or one task of an array, or one component of a heterogeneous job.

    Attributes:
        job_id: Slurm's own number of it, which no other job has at the same time; an array's first
            task bears the array's.
        array_job_id, array_task_id: of an array's task, else None.
        het_job_id, het_job_offset: of a component, else None.
        cluster: empty where the answer does not tell.
        user_id, user_name: its owner.
        name, account, partition, qos, comment: as the user or the site wrote them.
        states: base state and flags, in Slurm's words.
        reason: why it waits, in Slurm's words.
        restarts: how often it was requeued.
        submit_time, start_time, end_time: Unix times, None where there is none. Requeueing may set
            the time of submission anew.
        time_limit: seconds, None where there is none or it is not told.
        nodes: those that it has.
        tres: what it was given, such as {"cpu": "4", "gres/gpu": "2"}. A site that does not account
            for gres/gpu has no gres/gpu here, which does not mean that there is none.
        gpus: node -> indexes of its cards in the node's own list; None where that is not told.
    """

    job_id: int
    array_job_id: int | None = None
    array_task_id: int | None = None
    het_job_id: int | None = None
    het_job_offset: int | None = None
    cluster: str = ""
    user_id: int | None = None
    user_name: str = ""
    name: str = ""
    account: str = ""
    partition: str = ""
    qos: str = ""
    comment: str = ""
    states: frozenset[str] = frozenset()
    reason: str = ""
    restarts: int = 0
    submit_time: float | None = None
    start_time: float | None = None
    end_time: float | None = None
    time_limit: float | None = None
    nodes: tuple[str, ...] = ()
    tres: Mapping[str, str] = field(default_factory=dict)
    gpus: Mapping[str, tuple[int, ...]] | None = None

    @property
    def holds(self) -> bool:
        """Whether it has its nodes, and so its cards, now."""
        return bool(self.states & HOLDING)

    @property
    def ended(self) -> bool:
        """Whether it is over for good and has given everything back."""
        return bool(self.states & ENDED) and not self.holds and not self.states & PENDING

    @property
    def number(self) -> str:
        """What its user calls it, and what `scontrol` and `scancel` take: 12, 12_3 or 12+1."""
        if self.array_job_id is not None and self.array_task_id is not None:
            return f"{self.array_job_id}_{self.array_task_id}"
        if self.het_job_id is not None and self.het_job_offset is not None:
            return f"{self.het_job_id}+{self.het_job_offset}"
        return str(self.job_id)


@dataclass(frozen=True, slots=True)
class SlurmAnswer:
    """What a command with `--json` answered.

    Attributes:
        jobs: in its order.
        cluster: empty where it does not tell.
        version: (major, minor), such as (24, 11); (0, 0) where it does not tell.
        errors: what Slurm complained of.
    """

    jobs: tuple[SlurmJob, ...]
    cluster: str = ""
    version: tuple[int, int] = (0, 0)
    errors: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------
# Names of attempts

_JOB_ID = re.compile(
    r"slurm-(?P<cluster>[A-Za-z0-9_.-]{1,64})-(?P<job>[0-9]{1,10})(?:_(?P<task>[0-9]{1,10}))?"
    r"-(?P<restarts>[0-9]{1,6})"
)
UNRESOLVED: Final = "slurm-unresolved-"
"""A job of Slurm's whose cluster and attempt are not known; nobody may act on it."""


@dataclass(frozen=True, slots=True)
class SlurmAttempt:
    """What `attempt_id` names.

    Attributes:
        cluster: its cluster.
        number: 12 or 12_3, as `scontrol` takes it; a heterogeneous job's component by its own.
        restarts: how often it had been requeued.
    """

    cluster: str
    number: str
    restarts: int


def attempt_id(job: SlurmJob, cluster: str) -> str:
    """The `job_id` of one attempt of a job, as the node assigns it.

    Args:
        job: the job.
        cluster: its cluster.
    """
    number = str(job.job_id)
    if job.array_job_id is not None and job.array_task_id is not None:
        number = f"{job.array_job_id}_{job.array_task_id}"
    return f"slurm-{cluster}-{number}-{job.restarts}"


def parse_attempt_id(job_id: str) -> SlurmAttempt | None:
    """The attempt that a `job_id` names, or None where it is not one, or not resolved."""
    match = _JOB_ID.fullmatch(job_id)
    if match is None or job_id.startswith(UNRESOLVED):
        return None
    number = match["job"] if match["task"] is None else f"{match['job']}_{match['task']}"
    return SlurmAttempt(match["cluster"], number, int(match["restarts"]))


# ---------------------------------------------------------------------------------------------
# JSON


def decode_json(content: str | bytes) -> SlurmAnswer:
    """The answer of `squeue --json` or `scontrol --json show job`.

    A job that cannot be made out is left out and complained of.

    Raises:
        ServiceUnavailable: it is no such answer.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ServiceUnavailable(f"Slurm's answer is not JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("jobs"), list):
        raise ServiceUnavailable("Slurm's answer holds no list of jobs")
    meta = _dict(
        _dict(document.get("meta")).get("slurm") or _dict(document.get("meta")).get("Slurm")
    )
    said = document.get("errors")
    jobs, errors = [], [_complaint(item) for item in (said if isinstance(said, list) else ())]
    for item in document["jobs"]:
        try:
            jobs.append(_json_job(_dict(item)))
        except ValueError as error:
            errors.append(str(error))
    cluster = _text(meta.get("cluster")) or next((job.cluster for job in jobs if job.cluster), "")
    return SlurmAnswer(
        jobs=tuple(jobs),
        cluster=cluster,
        version=_version(_dict(meta.get("version"))),
        errors=tuple(errors),
    )


def _json_job(item: Mapping[str, Any]) -> SlurmJob:
    job_id = _number(item.get("job_id"))
    if job_id is None or not 0 < job_id <= MAX_JOB_ID:
        raise ValueError(f"a job without a number: {str(item.get('job_id'))[:40]}")
    array, task = _number(item.get("array_job_id")), _number(item.get("array_task_id"))
    het, offset = _number(item.get("het_job_id")), _number(item.get("het_job_offset"))
    nodes = _nodes(item.get("nodes"))
    details = item.get("gres_detail")
    limit = _number(item.get("time_limit"))
    return SlurmJob(
        job_id=job_id,
        array_job_id=(array or None) if task is not None else None,
        array_task_id=task if array else None,
        het_job_id=het or None,
        het_job_offset=offset if het else None,
        cluster=_text(item.get("cluster")),
        user_id=_number(item.get("user_id")),
        user_name=_text(item.get("user_name")),
        name=_text(item.get("name")),
        account=_text(item.get("account")),
        partition=_text(item.get("partition")),
        qos=_text(item.get("qos")),
        # Later versions keep the comment of its user beside those of the site.
        comment=_text(item.get("comment")) or _text(_dict(item.get("comment")).get("job")),
        states=_states(item.get("job_state")),
        reason=_text(item.get("state_reason")),
        restarts=_number(item.get("restart_cnt")) or 0,
        submit_time=_time(item.get("submit_time")),
        start_time=_time(item.get("start_time")),
        end_time=_time(item.get("end_time")),
        time_limit=None if limit is None else limit * 60.0,
        nodes=nodes,
        tres=decode_tres(_text(item.get("tres_alloc_str"))),
        gpus=_gpus_of_nodes(nodes, details) if isinstance(details, list) else None,
    )


def _gpus_of_nodes(nodes: tuple[str, ...], details: list[Any]) -> dict[str, tuple[int, ...]] | None:
    if len(details) != len(nodes):
        # Only with its nodes' names it tells anything; a job without cards may have no details.
        return None if details else dict.fromkeys(nodes, ())
    found = {}
    for node, text in zip(nodes, details, strict=True):
        indexes = gpu_indexes(_text(text))
        if indexes is None:
            return None
        found[node] = indexes
    return found


def _nodes(value: object) -> tuple[str, ...]:
    parts = value if isinstance(value, list) else [value]
    return tuple(node for part in parts for node in hostlists.expand(_text(part)))


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) and value != "(null)" else ""


def _number(value: object) -> int | None:
    """A number, whichever way it is written; None where it is not set or has no end."""
    if isinstance(value, dict):
        if value.get("set") is not True or value.get("infinite") is True:
            return None
        value = value.get("number")
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"[0-9]{1,18}", value) else None
    # A float that is no number is not within any bounds.
    if not isinstance(value, int | float) or not -(2**53) <= value <= 2**53:
        return None
    return None if int(value) in _UNSET_TASKS else int(value)


def _time(value: object) -> float | None:
    seconds = _number(value)
    return float(seconds) if seconds is not None and seconds > 0 else None


def _states(value: object) -> frozenset[str]:
    words: Iterable[object] = value if isinstance(value, list) else [value]
    return frozenset(
        part
        for word in words
        if isinstance(word, str)
        for part in re.split(r"[^A-Z_]+", word.upper())
        if part
    )


def _version(value: Mapping[str, Any]) -> tuple[int, int]:
    return (_number(value.get("major")) or 0, _number(value.get("minor")) or 0)


def _complaint(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("description") or value.get("error") or "an error"
    return str(value)[:200]


# ---------------------------------------------------------------------------------------------
# What a job was given

_GRES = re.compile(r"(?P<name>[A-Za-z0-9_-]+)(?P<rest>(?::[^(,:]*)*)(?:\((?P<inside>[^)]*)\))?")


def decode_tres(text: str) -> dict[str, str]:
    """`cpu=4,mem=8G,gres/gpu=2` by name; what does not look like that is left out."""
    found = {}
    for item in text.split(","):
        name, separator, value = item.partition("=")
        if separator and name:
            found[name.strip()] = value.strip()
    return found


def gpu_indexes(text: str) -> tuple[int, ...] | None:
    """Indexes of a job's cards on a node: of `gpu:a100:2(IDX:0-1),mps:10`, (0, 1).

    Returns:
        In ascending order; empty where there is no card; None where cards are there, but which is
        not told.
    """
    found: set[int] = set()
    at = 0
    while at < len(text):
        match = _GRES.match(text, at)
        if match is None or (match.end() < len(text) and text[match.end()] != ","):
            return None
        at = match.end() + 1
        if match["name"] != "gpu":
            continue
        inside = match["inside"] or ""
        if not inside.startswith("IDX:"):
            if match["rest"].endswith(":0"):
                continue
            return None
        ranges = inside[len("IDX:") :]
        if ranges in ("", "N/A"):
            continue
        try:
            found.update(hostlists.numbers(ranges, most=_MAX_GPUS))
        except ValueError:
            return None
    return tuple(sorted(found))
