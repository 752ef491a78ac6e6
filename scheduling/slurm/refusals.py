"""What Slurm says when it refuses a job or a reservation, and what to do about it. Pure.

Slurm's commands have no codes: what they print is compared, by words that 22.05 and 24.11 share.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import RefusedAction, ServiceUnavailable

if TYPE_CHECKING:
    from gpuwarden.slurm_commands import Answer


@dataclass(frozen=True, slots=True)
class _Known:
    """A refusal: how Slurm says it, our word for it, and the remedy."""

    said: re.Pattern[str]
    reason: str
    remedy: str


def _known(said: str, reason: str, remedy: str) -> _Known:
    return _Known(re.compile(said, re.IGNORECASE), reason, remedy)


_JOBS: Final = (
    _known(
        r"invalid account",
        "account",
        "the team's account is not there, or the user is not in it: an operator runs `gpuwarden "
        "policy apply`, or adds the user to the team",
    ),
    _known(
        r"invalid qos|QOS.*not permitted",
        "priority",
        "the priority's QOS is not there, or not for this account: an operator runs `gpuwarden "
        "policy apply`; or choose another --priority",
    ),
    _known(
        r"AssocGrpSubmitJobsLimit|AssocMaxSubmitJobLimit|QOS\w*SubmitJob\w*Limit|MaxSubmitJobs",
        "too_many_jobs",
        "as many jobs as are allowed wait or run already: let some of them end first",
    ),
    _known(
        r"Job violates accounting/QOS policy|(?:Assoc|QOS|Max)\w*(?:Limit|GRES|Per\w+)\b",
        "limit",
        "it asks for more than the team or the priority may have at a time: fewer --gpus, a "
        "shorter --time, or another --priority",
    ),
    _known(
        r"invalid generic resource|Invalid GRES",
        "card",
        "Slurm does not know such cards: compare the policy's cards[].slurm.gres with gres.conf",
    ),
    _known(
        r"Requested node configuration is not available|Memory specification can not be satisfied",
        "no_such_node",
        "no node has that many of these cards, or that much memory or that many processors: fewer "
        "--gpus, another --card, or less of the policy's cards[].slurm.cpus and host_memory",
    ),
    _known(
        r"invalid partition|partition specified",
        "partition",
        "the partition is not there: compare the policy's cards[].slurm.partition with `sinfo`",
    ),
    _known(
        r"group not permitted|not permitted to use this partition",
        "partition",
        "the user may not use this partition: choose another --card, or ask an operator",
    ),
    _known(
        r"time limit|Requested time limit is invalid",
        "time_limit",
        "the partition or the priority does not allow so long a time: a shorter --time",
    ),
    _known(
        r"dependency",
        "dependency",
        "a job of --after is not known to Slurm (any more): leave out those that are done",
    ),
    _known(
        r"requested reservation is invalid|reservation",
        "reservation",
        "the reservation is not there, or not for this account or user",
    ),
    _known(r"invalid feature", "feature", "no node has such a feature"),
    _known(
        r"partition.*(?:down|inactive|drain)|required partition not available",
        "partition_down",
        "the partition takes no jobs now: ask an operator, or choose another --card",
    ),
    _known(
        r"invalid --(?P<option>[a-z-]+) specification|not a valid",
        "malformed",
        "Slurm does not understand a value",
    ),
    _known(r"batch script|no such file", "script", "Slurm could not read the script"),
)
_RESERVATIONS: Final = (
    _known(
        r"unknown parameter",
        "unsupported",
        "this version of Slurm cannot reserve in this way",
    ),
    _known(r"not supported with reservations", "unsupported", "this Slurm reserves whole nodes"),
    _known(
        r"overlaps with another reservation",
        "overlap",
        "these nodes are reserved for others then: `scontrol show reservation` says by whom",
    ),
    _known(r"duplicate reservation name", "duplicate", "there is one of this name already"),
    _known(
        r"requested nodes are busy",
        "busy",
        "not enough cards are free of other reservations and of jobs that run past its beginning",
    ),
    _known(
        r"invalid account|invalid user",
        "account",
        "the team's account is not there: an operator runs `gpuwarden policy apply`",
    ),
    _known(r"invalid time|start time", "time", "its time lies in the past, or is none"),
    _known(
        r"reservation.*in use|requested reservation is in use|busy",
        "in_use",
        "jobs run in it: it goes when they end",
    ),
    _known(r"requested reservation is invalid|not found", "gone", "there is none of this name"),
    _known(
        r"invalid partition|partition",
        "partition",
        "the partition is not there: compare the policy's cards[].slurm.partition with `sinfo`",
    ),
    _known(
        r"node count|nodes|configuration",
        "no_such_node",
        "no node has that many of these cards",
    ),
)
_FORBIDDEN = re.compile(
    r"permission denied|not permitted|access denied|invalid user id|user not authorized",
    re.IGNORECASE,
)
_DOWN = re.compile(
    r"unable to contact|connection (?:refused|timed out|reset)|socket timed out|slurm backend|"
    r"controller is (?:shutting|in standby)|configuring|temporarily (?:unable|unavailable)|"
    r"protocol authentication|munge|in standby mode|resource temporarily unavailable|zero bytes",
    re.IGNORECASE,
)


def is_down(answer: Answer) -> bool:
    """Whether an answer says that nobody answered: what was told may or may not have been done."""
    return bool(answer.status) and _DOWN.search(answer.complaint) is not None


def refusal_of_job(answer: Answer) -> RefusedAction | ServiceUnavailable:
    """Why a job was not taken, with what Slurm said and the remedy."""
    return _refusal(answer, _JOBS, "Slurm does not take the job")


def refusal_of_reservation(answer: Answer) -> RefusedAction | ServiceUnavailable:
    """Why a reservation was not made or deleted, with what Slurm said and the remedy."""
    return _refusal(answer, _RESERVATIONS, "Slurm does not take the reservation")


def _refusal(
    answer: Answer, known: tuple[_Known, ...], what: str
) -> RefusedAction | ServiceUnavailable:
    said = answer.complaint or answer.output.strip()[:300] or f"status {answer.status}"
    if is_down(answer):
        return ServiceUnavailable(f"Slurm's controller does not answer: {said}")
    if _FORBIDDEN.search(said) and "partition" not in said:
        return RefusedAction("forbidden", f"{what}: the user who asks has no right to it ({said})")
    for each in known:
        if each.said.search(said):
            return RefusedAction(each.reason, f"{what}: {each.remedy} ({said})")
    return RefusedAction("refused", f"{what}: {said}")
