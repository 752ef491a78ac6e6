"""Why a job of Slurm's waits, in a sentence for its owner.

Slurm has some two hundred words for it. Most are made by one pattern: whose limit (an account's, a
QOS's), of what, counted how, for whom; the others are listed. A word that is in neither is shown as
it is: a version may have more than are known here. Source: the words of Slurm 22.05 and 24.11.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """What has to happen before a job starts."""

    TURN = "turn"
    """Others go first, or there is no room: time alone mends it."""
    LIMIT = "limit"
    """Jobs of its team or user have to end first."""
    BUDGET = "budget"
    """GPU-hours are used up: a new period, or an operator, mends it."""
    TIME = "time"
    """It may not begin yet."""
    JOB = "job"
    """It waits for another job."""
    PERSON = "person"
    """It does not start before somebody does something."""
    SITE = "site"
    """Nodes, partitions or Slurm itself are not ready."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a job waits.

    Attributes:
        code: Slurm's word.
        words: a sentence; `{account}`, `{qos}`, `{partition}` and `{user}` stand for the job's.
        kind: what has to happen.
    """

    code: str
    words: str
    kind: Kind


_TURN, _TIME, _JOB = Kind.TURN, Kind.TIME, Kind.JOB
_PERSON, _SITE, _LIMIT = Kind.PERSON, Kind.SITE, Kind.LIMIT

_RELEASE: Final = "it was taken off its node and is held: `scontrol release` lets it go on"

_LISTED: Final[dict[str, tuple[Kind, str]]] = {
    "None": (_TURN, "Slurm has not looked at it yet"),
    "Priority": (_TURN, "jobs with a higher priority go first"),
    "Resources": (_TURN, "it is its turn: it starts as soon as enough cards are free"),
    "Reservation": (_TIME, "it waits for its reservation to begin"),
    "BeginTime": (_TIME, "it may not begin yet"),
    "Dependency": (_JOB, "it waits for another job"),
    "DependencyNeverSatisfied": (
        _PERSON,
        (
            "the job that it waits for did not succeed, so it never starts: cancel it, or take the "
            "dependency away with `scontrol update JobId=... Dependency=`"
        ),
    ),
    "JobArrayTaskLimit": (_LIMIT, "as many tasks of its array run as its user wanted at a time"),
    "JobHeldUser": (_PERSON, "its user holds it: `scontrol release` lets it go on"),
    "JobHeldAdmin": (_PERSON, "an operator holds it: only an operator can release it"),
    "JobHoldMaxRequeue": (
        _PERSON,
        "it came back so often that Slurm holds it: look into its log, then `scontrol release` it",
    ),
    "MaxRequeue": (
        _PERSON,
        "it came back so often that Slurm holds it: look into its log, then `scontrol release` it",
    ),
    "launch failed requeued held": (
        _PERSON,
        (
            "a node could not start it, and Slurm holds it: `scontrol release` it, and tell an "
            "operator of that node"
        ),
    ),
    "job requeued in held state": (_PERSON, _RELEASE),
    "job requeued in special exit state": (_PERSON, _RELEASE),
    "Licenses": (_LIMIT, "a licence that it asks for is in use"),
    "ReqNodeNotAvail": (_SITE, "nodes that it needs are down, drained or reserved for others"),
    "NodeDown": (_SITE, "a node that it needs is down"),
    "FrontEndDown": (_SITE, "no front-end node works"),
    "PartitionDown": (
        _SITE,
        "partition {partition} takes jobs, but starts none: an operator set it down",
    ),
    "PartitionInactive": (_SITE, "partition {partition} is inactive: an operator set it so"),
    "PartitionConfig": (
        _PERSON,
        (
            "it asks for more than a job of partition {partition} may have, or for what it has "
            "not: submit it with less, or elsewhere"
        ),
    ),
    "PartitionNodeLimit": (
        _PERSON,
        (
            "it asks for more nodes than partition {partition} has or gives to a job, or too many "
            "of them are down"
        ),
    ),
    "PartitionTimeLimit": (
        _PERSON,
        (
            "its time limit is longer than partition {partition} allows: shorten it with `scontrol "
            "update JobId=... TimeLimit=`"
        ),
    ),
    "BadConstraints": (
        _PERSON,
        "no node has all that it asks for: submit it with other cards, features or nodes",
    ),
    "AccountNotAllowed": (
        _PERSON,
        "account {account} may not use partition {partition}: submit it elsewhere",
    ),
    "QOSNotAllowed": (
        _PERSON,
        (
            "QOS {qos} may not be used with account {account} or partition {partition}: submit it "
            "with another priority, or ask an operator"
        ),
    ),
    "InvalidAccount": (
        _PERSON,
        "account {account} does not exist (any more), or is not {user}'s: submit it with another",
    ),
    "InvalidQOS": (
        _PERSON,
        "QOS {qos} does not exist (any more), or is not {user}'s: submit it with another priority",
    ),
    "QOSUsageThreshold": (_LIMIT, "QOS {qos} has used more than its share of the cluster"),
    "RequiresReservation": (
        _PERSON,
        "QOS {qos} or partition {partition} serves reservations only: submit it with --reservation",
    ),
    "ReservationDeleted": (
        _PERSON,
        (
            "the reservation that it was submitted for was deleted: `scontrol release` it to run "
            "without, or cancel it"
        ),
    ),
    "ReservationInvalid": (
        _PERSON,
        "the reservation that it was submitted for is not there or not for it: cancel it",
    ),
    "JobLaunchFailure": (
        _PERSON,
        (
            "it could not be started: the file system, the image or the user is not there on the "
            "node; see slurmd's log, then `scontrol release` it"
        ),
    ),
    "NonZeroExitCode": (_SITE, "it ended with an error"),
    "RaisedSignal": (_SITE, "it was ended by a signal"),
    "SystemFailure": (_SITE, "Slurm, a file system or a network failed"),
    "OutOfMemory": (_SITE, "it needed more of the node's memory than it had asked for"),
    "TimeLimit": (_SITE, "it reached its time limit"),
    "InactiveLimit": (_SITE, "it did nothing for longer than the cluster allows"),
    "DeadLine": (_PERSON, "it cannot be done by its deadline any more"),
    "Cleaning": (_TIME, "it came back, and what is left of its last run is being cleaned up"),
    "Prolog": (_TIME, "its nodes are being prepared"),
    "ResvProlog": (_TIME, "its reservation is being prepared"),
    "ResvEpilog": (_TIME, "its reservation is being cleaned up"),
    "PowerNotAvail": (_SITE, "there is not enough power for it now"),
    "PowerReserved": (_SITE, "there is not enough power for it now"),
    "MaxPoweredUpNodes": (_LIMIT, "as many nodes run as the cluster allows"),
    "MaxMemPerLimit": (
        _PERSON,
        "it asks for more memory on a node than partition {partition} allows: submit it with less",
    ),
    "BurstBufferOperation": (_SITE, "the burst buffer failed for it"),
    "BurstBufferResources": (_LIMIT, "there is no room in the burst buffer"),
    "BurstBufferStageIn": (_TIME, "its data are being copied into the burst buffer"),
    "BlockMaxError": (_SITE, "its nodes failed too often"),
    "BlockFreeAction": (_SITE, "its nodes are being made free"),
    "MpiPortsBusy": (_LIMIT, "no ports are free on its nodes"),
    "FedJobLock": (_SITE, "the clusters of the federation are agreeing on it"),
    "SchedDefer": (_TURN, "jobs are started by the scheduler's next round only"),
    "AssociationJobLimit": (_LIMIT, "account {account} has as many jobs as it may"),
    "AssociationResourceLimit": (_LIMIT, "account {account} has as much as it may"),
    "AssociationTimeLimit": (_LIMIT, "account {account} has used its time"),
    "AccountingPolicy": (_LIMIT, "a limit of account {account} or of QOS {qos} keeps it"),
    "QOSJobLimit": (_LIMIT, "QOS {qos} has as many jobs as it may"),
    "QOSResourceLimit": (_LIMIT, "QOS {qos} has as much as it may"),
    "QOSTimeLimit": (_LIMIT, "QOS {qos} has used its time"),
}

_THINGS: Final = {
    "BB": "burst buffer",
    "Billing": "billing units",
    "CPU": "processors",
    "Cpu": "processors",
    "Energy": "energy",
    "GRES": "cards",
    "Jobs": "jobs",
    "License": "licences",
    "Mem": "memory",
    "Memory": "memory",
    "Node": "nodes",
    "SubmitJobs": "submitted jobs",
    "SubmitJob": "submitted jobs",
    "Unknown": "of a resource",
    "Wall": "time",
    "WallDuration": "time",
}
_SCOPES: Final = {
    "Job": "one job",
    "Node": "one job on a node",
    "User": "{user}",
    "Account": "account {account}",
}
# AssocGrpCpuLimit, QOSMaxGRESPerUser, QOSGrpMemoryRunMinutes, MaxCpuRunMinsPerAccount, QOSMinGRES
_LIMIT_WORD = re.compile(
    r"(?P<owner>Assoc|QOS)?(?P<bound>Grp|Max|Min)(?P<thing>[A-Z][A-Za-z]*?)"
    r"(?P<how>RunMinutes|RunMins|Minutes|Mins)?(?:Per(?P<scope>Job|Node|User|Account))?"
    r"(?:Limit|NotSatisfied)?"
)
_WORD = re.compile(r"[A-Za-z]+")
_SENTENCES: Final = {
    "Nodes required for job are DOWN": "ReqNodeNotAvail",
    "ReqNodeNotAvail": "ReqNodeNotAvail",
}
"""How some words look when Slurm writes them out: it adds which nodes, or why."""
_HELD = re.compile(r"^Job(?:Held|Hold)|requeued held$")
"""How every version names what somebody has to release."""
_MAX_WORDS = 300


def explain(reason: str) -> Reason:
    """What a reason of `squeue -O Reason` means; one that is not known is told as it is."""
    text = " ".join(reason.replace("_", " ").split())[:_MAX_WORDS].strip("()")
    if not text:
        return Reason("None", _LISTED["None"][1], Kind.TURN)
    for beginning, code in _SENTENCES.items():
        if text.startswith(beginning):
            return _unavailable(code, text)
    if (listed := _listed(text)) is not None:
        return listed
    found = _LIMIT_WORD.fullmatch(text) if _WORD.fullmatch(text) else None
    if found is not None and found["thing"] in _THINGS:
        return _limit(text, found)
    if _HELD.search(text):
        words = f"Slurm holds it ({_plain(text)}): look into its log, then `scontrol release` it"
        return Reason(text, words, Kind.PERSON)
    return Reason(text, f"Slurm says: {_plain(text)}", Kind.UNKNOWN)


def _listed(text: str) -> Reason | None:
    """One of the listed reasons; some versions say in brackets of what, such as a licence."""
    name, _, inside = (part.strip() for part in text.partition("("))
    code = "JobHeldAdmin" if name.startswith("JobHeldAdmin") else name
    if code not in _LISTED:
        return None
    kind, words = _LISTED[code]
    # The last bracket was taken away with those around it all.
    return Reason(code, f"{words} ({_plain(inside)})" if inside else words, kind)


def _plain(text: str) -> str:
    """Somebody's words where `{account}` and the like are filled in: they are not filled in."""
    return text.replace("{", "(").replace("}", ")")


def _unavailable(code: str, text: str) -> Reason:
    """Nodes that are not to be had, and what Slurm adds about them."""
    kind, words = _LISTED[code]
    if "eserved for maintenance" in text:
        return Reason(code, "its time would reach into a maintenance of its nodes", kind)
    if "reserved for other job" in text:
        words = "its time would reach into a booking of others: a shorter time limit may fit before"
        return Reason(code, words, Kind.TURN)
    _, marked, nodes = text.partition("UnavailableNodes:")
    if marked and nodes.strip():
        return Reason(code, f"{words}: {_plain(nodes.strip())}", kind)
    return Reason(code, words, kind)


def _limit(code: str, found: re.Match[str]) -> Reason:
    owner = "account {account}" if found["owner"] == "Assoc" else "QOS {qos}"
    thing, how, scope = _THINGS[found["thing"]], found["how"] or "", found["scope"]
    much = "much" if thing in _MASSES else "many"
    whole_job = scope in ("Job", "Node") or found["thing"] == "WallDuration"
    kind = Kind.PERSON
    if how.startswith("Run"):
        kind = Kind.LIMIT
        words = (
            f"{owner} has as {much} {thing} promised to running jobs as it may: they have to run "
            "down first"
        )
    elif found["bound"] == "Min":
        words = f"it asks for fewer {thing} than {owner} demands: submit it with more"
    elif how and scope == "Job":
        words = (
            f"its {thing} times its time limit are more than {owner} grants one job: shorten its "
            "time limit, or ask for less"
        )
    elif how or found["thing"] == "Wall":
        kind = Kind.BUDGET
        what = {"cards": "GPU-hours", "time": "time"}.get(thing, f"hours of {thing}")
        words = f"the {what} of {owner} are used up, or it would use them up"
    elif whole_job:
        words = (
            f"it asks for more {thing} than {owner} grants {_SCOPES[scope or 'Job']}: submit it "
            "with less"
        )
    else:
        kind = Kind.LIMIT
        whose = f" for {_SCOPES[scope]}" if scope else ""
        if found["owner"] == "Assoc" and found["bound"] == "Max":
            whose = " for {user}"
        words = (
            f"{owner} has as {much} {thing}{whose} in use as it may: some of them have to end first"
        )
    return Reason(code, words, kind)


_MASSES: Final = frozenset({"burst buffer", "energy", "memory", "time", "of a resource"})
