"""Slurm's answers in text: what every version gives, read so that no user's words count.

Callers set SLURM_TIME_FORMAT=%s, so that a time is a Unix time and not a local one, which comes
twice when clocks are set back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.platforms import hostlists
from gpuwarden.platforms.slurm import MAX_JOB_ID, SlurmJob, decode_tres, gpu_indexes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

LIST_FIELDS: Final = (
    "JobID",
    "ArrayJobID",
    "ArrayTaskID",
    "HetJobID",
    "HetJobOffset",
    "UserID",
    "State",
    "RestartCnt",
    "SubmitTime",
    "StartTime",
    "EndTime",
    "Partition",
    "tres-alloc",
    "NodeList",
    "Account",
    "Name",
)
"""What `squeue -O` is asked for."""

EVERYTHING: Final = ("--all", "--local", "--noheader")
"""What `squeue` is told besides. Without it, it leaves out in silence the jobs of partitions that
are hidden or closed to who asks, and tells of a federation's other clusters, under headings."""
_NUMBER = re.compile(r"[0-9]{1,18}")
_MARK = re.compile(r"\|[0-9a-z]{8,64}")


def rows_format(fields: Sequence[str], mark: str) -> str:
    """The argument of `squeue --noheader -O` whose answer `decode_rows` reads.

    Args:
        fields: what is asked for.
        mark: `|` and at least eight letters or digits that nobody can foresee: an account's name
            may hold anything, the mark excepted.
    """
    if not _MARK.fullmatch(mark):
        raise ValueError(f"{mark!r} is no mark")
    # A width would cut values, and a suffix that began with a digit would be taken for one.
    return ",".join(f"{name}:{mark}" for name in fields)


def decode_rows(text: str, mark: str, fields: Sequence[str]) -> list[dict[str, str]]:
    """Field -> value of each job of an answer in `rows_format`, as it was printed.

    Args:
        text: what it printed.
        mark: that of the format.
        fields: likewise.

    Raises:
        ServiceUnavailable: it is no such answer.
    """
    values = text.split(mark)
    rest = values.pop()
    if rest.strip() or len(values) % len(fields):
        raise ServiceUnavailable("Slurm answered in another form than it was asked for")
    return [
        dict(zip(fields, values[at : at + len(fields)], strict=True))
        for at in range(0, len(values), len(fields))
    ]


def list_format(mark: str) -> str:
    """`rows_format` of `LIST_FIELDS`, whose answer `decode_list` reads."""
    return rows_format(LIST_FIELDS, mark)


def decode_list(text: str, mark: str) -> tuple[SlurmJob, ...]:
    """Jobs of an answer of `squeue --noheader -O` in `list_format`.

    Args:
        text: what it printed.
        mark: that of the format.

    Raises:
        ServiceUnavailable: it is no such answer.
    """
    return tuple(listed_job(row) for row in decode_rows(text, mark, LIST_FIELDS))


def listed_job(row: Mapping[str, str]) -> SlurmJob:
    """A job of `LIST_FIELDS`, which may have more beside it.

    Raises:
        ServiceUnavailable: it is none.
    """
    job_id = _number(row["JobID"])
    if job_id is None or not 0 < job_id <= MAX_JOB_ID:
        raise ServiceUnavailable("squeue answered with a job that has no number")
    task, het = _number(row["ArrayTaskID"]), _number(row["HetJobID"])
    try:
        nodes = hostlists.expand(row["NodeList"])
    except ValueError as error:
        raise ServiceUnavailable(f"squeue answered with nodes that are none: {error}") from error
    return SlurmJob(
        job_id=job_id,
        array_job_id=_number(row["ArrayJobID"]) if task is not None else None,
        array_task_id=task,
        het_job_id=het or None,
        het_job_offset=_number(row["HetJobOffset"]) if het else None,
        user_id=_number(row["UserID"]),
        name=row["Name"],
        account=_word(row["Account"]),
        partition=_word(row["Partition"]),
        states=frozenset(re.findall(r"[A-Z_]+", row["State"].upper())),
        restarts=_number(row["RestartCnt"]) or 0,
        submit_time=_time(row["SubmitTime"]),
        start_time=_time(row["StartTime"]),
        end_time=_time(row["EndTime"]),
        nodes=nodes,
        tres=decode_tres(_word(row["tres-alloc"])),
    )


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if _NUMBER.fullmatch(text) else None


def _time(text: str) -> float | None:
    seconds = _number(text)
    return float(seconds) if seconds else None


def _word(text: str) -> str:
    text = text.strip()
    return "" if text in ("(null)", "N/A", "None") else text


# ---------------------------------------------------------------------------------------------
# scontrol show job

_ANCHORS: Final = (
    "JobId=",
    "   UserId=",
    "   JobState=",
    "   NodeList=",
    "   MinCPUsNode=",
)
"""Beginnings of lines that an answer about one job has, each once and in this order."""
_END: Final = "\n   Command="
"""From here on there are users' words: a command, folders, a comment."""
_PLACE = re.compile(r" {5}Nodes=(?P<nodes>\S+) CPU_IDs=\S* Mem=\S*(?: GRES=(?P<gres>\S*))?\s*")


def decode_details(text: str, job: SlurmJob) -> dict[str, tuple[int, ...]] | None:
    """Node -> indexes of a job's cards, from `scontrol show --details job NUMBER` of one job.

    A user's words may hold line feeds. The name, which comes first, is known and taken out, and
    nothing is read behind the command; an answer in which a line that must be there once is there
    twice nevertheless is not believed.

    Args:
        text: what it printed.
        job: the job, with its name as `decode_list` gave it.

    Returns:
        The indexes; None where they are not told, or not to be believed.
    """
    cards: dict[str, tuple[int, ...]] = {}
    try:
        for match in filter(None, map(_PLACE.fullmatch, _places(text, job))):
            indexes = gpu_indexes(_word(match["gres"] or ""))
            if indexes is None:
                return None
            for node in hostlists.expand(match["nodes"]):
                cards[node] = tuple(sorted({*cards.get(node, ()), *indexes}))
    except ValueError:
        return None
    return cards


def _places(text: str, job: SlurmJob) -> list[str]:
    """The lines among which Slurm tells of a job's nodes and cards.

    Raises:
        ValueError: it is not sure that they are Slurm's.
    """
    head, separator, rest = text.partition("JobName=")
    if not separator or "\n" in head or not rest.startswith(f"{job.name}\n"):
        raise ValueError("an answer about another job")
    rest, separator, _ = rest[len(job.name) :].partition(_END)
    if not separator or "\n" in job.account:
        raise ValueError("an answer that may be somebody else's words")
    lines = (head + rest).split("\n")
    if lines[0].split(maxsplit=1)[0] != f"JobId={job.job_id}":
        raise ValueError("an answer about another job")
    found = [
        (number, anchor)
        for number, line in enumerate(lines)
        for anchor in _ANCHORS
        if line.startswith(anchor)
    ]
    if tuple(anchor for _, anchor in found) != _ANCHORS:
        raise ValueError("an answer whose lines are not as they must be")
    at = {anchor: number for number, anchor in found}
    return lines[at["   NodeList="] + 1 : at["   MinCPUsNode="]]


# ---------------------------------------------------------------------------------------------
# The cluster and its nodes

_SETTING = re.compile(r"^(?P<name>\w+)[ \t]*=[ \t]*(?P<value>.*?)[ \t]*$", re.MULTILINE)
"""What is empty ends with its line: the next one is another setting."""
_SECONDS = re.compile(r"[0-9]{1,6}")
_VERSION = re.compile(r"\b(?P<major>[0-9]{2})\.(?P<minor>[0-9]{1,2})\b")
_CLUSTER = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NODE = re.compile(r"(?:^|\s)(?P<key>NodeName|NodeHostName)=(?P<value>\S+)")
_STEP = re.compile(
    r"slurmstepd: \[(?P<job>[0-9]{1,10})\.(?:[0-9]+|batch|extern|interactive)[^\]]*\]"
)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What of `scontrol show config` matters here.

    Attributes:
        name: the cluster's.
        accounts_for_gpus: whether `tres` of its jobs tells of their cards.
        kill_wait: seconds between SIGTERM and SIGKILL of a job that is ended, or None.
        requeues_by_exit: whether a job that ends by itself may be started again for its status.
    """

    name: str
    accounts_for_gpus: bool = False
    kill_wait: float | None = None
    requeues_by_exit: bool = False


def decode_settings(text: str) -> dict[str, str]:
    """Key -> value of `scontrol show config`; what is not set is an empty text."""
    found = {match["name"]: match["value"] for match in _SETTING.finditer(text)}
    return {name: "" if value == "(null)" else value for name, value in found.items()}


def decode_config(text: str) -> ClusterConfig:
    """Settings of a cluster.

    Args:
        text: what `scontrol show config` printed.

    Raises:
        ServiceUnavailable: it names no cluster.
    """
    settings = decode_settings(text)
    name = settings.get("ClusterName", "")
    if not _CLUSTER.fullmatch(name):
        raise ServiceUnavailable("`scontrol show config` names no cluster")
    tracked = settings.get("AccountingStorageTRES", "").split(",")
    wait = _SECONDS.match(settings.get("KillWait", ""))
    return ClusterConfig(
        name,
        accounts_for_gpus="gres/gpu" in tracked,
        kill_wait=None if wait is None else float(wait[0]),
        requeues_by_exit=bool(settings.get("RequeueExit")),
    )


def decode_version(text: str) -> tuple[int, int]:
    """(major, minor) of `scontrol --version`; (0, 0) where it does not tell."""
    match = _VERSION.search(text)
    return (int(match["major"]), int(match["minor"])) if match is not None else (0, 0)


def node_names(text: str, hosts: Collection[str]) -> tuple[str, ...]:
    """Names of the nodes that run on a host; usually one, of the host's own name.

    Args:
        text: what `scontrol show node --oneliner` printed.
        hosts: names of the host, with and without its domain.
    """
    found: dict[str, str] = {}
    for line in text.split("\n"):
        keys: dict[str, str] = {}
        for match in _NODE.finditer(line):
            # An administrator's remarks come last.
            keys.setdefault(match["key"], match["value"])
        if "NodeName" in keys:
            found[keys["NodeName"]] = keys.get("NodeHostName", keys["NodeName"])
    exact = tuple(name for name, host in found.items() if host in hosts)
    return exact or tuple(name for name, host in found.items() if host.partition(".")[0] in hosts)


def step_job(title: str) -> int | None:
    """The job whose step a `slurmstepd` serves, by its title, such as `slurmstepd: [12.batch]`."""
    match = _STEP.match(title)
    return int(match["job"]) if match is not None else None


# ---------------------------------------------------------------------------------------------
# The node's own list of cards


@dataclass(frozen=True, slots=True)
class GresCard:
    """A card in the node's list, whose place there is the index by which jobs are told of it.

    Attributes:
        minor: of its device file, or None.
        uuid: where Slurm knows it (MIG), else empty.
    """

    minor: int | None
    uuid: str = ""


_GRES_LINE = re.compile(r"Gres Name=gpu(?=\s)(?P<rest>.*)")
_FILE = re.compile(r"\sFile=(?P<file>\S+)")
_UUID = re.compile(r"\sUniqueId=(?P<uuid>\S+)")
_DEVICE = re.compile(r".*/nvidia(?P<minor>[0-9]{1,4})")


def decode_gres(text: str) -> tuple[GresCard, ...]:
    """The node's cards in the order of their indexes, from `slurmd -G`.

    Args:
        text: what it printed; each line has a prefix of the daemon's.

    Raises:
        ServiceUnavailable: a card has no device file that is known.
    """
    cards: list[GresCard] = []
    for line in text.split("\n"):
        match = _GRES_LINE.search(line)
        if match is None:
            continue
        file, uuid = _FILE.search(match["rest"]), _UUID.search(match["rest"])
        if file is None:
            raise ServiceUnavailable("gres.conf names cards without their device files")
        try:
            paths = _paths(file["file"])
        except ValueError as error:
            raise ServiceUnavailable(f"gres.conf's device files: {error}") from error
        cards += [
            GresCard(_minor(path), uuid["uuid"] if uuid is not None else "") for path in paths
        ]
    return tuple(cards)


def _paths(text: str) -> Sequence[str]:
    """Device files of one line; with several for one card (MIG) the first is the card's."""
    folder, slash, names = text.rpartition("/")
    if "," in folder:
        return [text.partition(",")[0]]
    return [f"{folder}{slash}{name}" for name in hostlists.expand(names)]


def _minor(path: str) -> int | None:
    match = _DEVICE.fullmatch(path)
    return int(match["minor"]) if match is not None else None
