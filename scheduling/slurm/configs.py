"""The keys of slurm.conf that a policy needs: what each must be, and whether a cluster has it."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from gpuwarden import job_files
from gpuwarden.scheduling.slurm.names import by_qos, tres_of
from gpuwarden.scheduling.slurm.versions import notice_setting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slurm.versions import Version

KILL_WAIT_SECONDS: Final = 60
"""Between SIGTERM and SIGKILL: a step and a save, also of a large model on a busy file system."""
_FAIR_SHARE, _AGE = 1000, 100
"""Weights beside that of priorities: together less than the smallest step between two of them."""
_MOST_WEIGHT = 4_000_000_000
_RETURNING: Final = ("JobRequeue", "RequeueExit")
_RANGE = re.compile(r"([0-9]{1,3})-([0-9]{1,3})")
_CLOCK = re.compile(r"(?:([0-9]{1,4})-)?([0-9]{1,4}):([0-9]{1,2}):([0-9]{1,2})")


class Test(StrEnum):
    """How a cluster's value is compared."""

    IS = "is"
    HAS = "has"
    """A list that must contain these words; others may be there."""
    AT_LEAST = "at least"
    """A number of seconds."""
    SECONDS = "seconds"
    """The same length of time, in whichever way it is written."""


@dataclass(frozen=True, slots=True)
class ConfigTerm:
    """One key.

    Attributes:
        key: of slurm.conf.
        value: as it would be written there.
        why: for people, as the beginning of a sentence.
        test: how a cluster's value is compared.
        restart: it is read by a controller that starts, not by `scontrol reconfigure`.
    """

    key: str
    value: str
    why: str
    test: Test = Test.IS
    restart: bool = False

    def satisfied(self, found: str | None) -> bool:
        """Whether a value that `scontrol show config` printed will do."""
        if found is None:
            return False
        match self.test:
            case Test.IS:
                return found.lower() == self.value.lower()
            case Test.HAS:
                return _words(self.value) <= _words(found)
            case Test.AT_LEAST:
                seconds = clock_seconds(found)
                return seconds is not None and seconds >= int(self.value)
            case Test.SECONDS:
                return clock_seconds(found) == clock_seconds(self.value)


def preempting(policy: Policy) -> bool:
    """Whether any running job may be asked to leave for another."""
    return policy.preemption is not None and any(each.preempts for each in policy.priorities)


def preemptible(policy: Policy) -> frozenset[str]:
    """Priorities whose running jobs may be asked to leave."""
    return frozenset(lower for each in policy.priorities for lower in each.preempts)


def config_terms(policy: Policy, version: Version) -> tuple[ConfigTerm, ...]:
    """Every key that a policy needs, in the order in which they are written.

    Args:
        policy: which.
        version: of the Slurm that reads them.
    """
    terms = [*_requeue_terms(), *_preemption_terms(policy, version)]
    if by_qos(policy):
        terms += [*_accounting_terms(policy), *_priority_terms(policy)]
    return tuple(terms)


def satisfied_values(terms: tuple[ConfigTerm, ...], settings: Mapping[str, str]) -> dict[str, str]:
    """What a cluster has of each key: the wanted text where its own will do.

    Args:
        terms: what is wanted.
        settings: of `decode_settings`.
    """
    return {
        term.key: term.value if term.satisfied(settings.get(term.key)) else settings[term.key]
        for term in terms
        if term.key in settings
    }


def hidden(settings: Mapping[str, str]) -> tuple[str, ...]:
    """What a cluster tells of others only to its operators (PrivateData), of what matters here.

    Args:
        settings: of `scontrol show config`.
    """
    words = {word.strip().lower() for word in settings.get("PrivateData", "").split(",")}
    matter = ("jobs", "usage", "accounts", "reservations", "nodes", "partitions")
    return tuple(word for word in matter if word in words or "all" in words)


def is_slurms_own(settings: Mapping[str, str], user: str) -> bool:
    """Whether a user is Slurm's own or root, to whom everything is told."""
    return user in ("root", settings.get("SlurmUser", "").partition("(")[0])


def no_return(settings: Mapping[str, str]) -> str | None:
    """Why jobs that saved and left would not come back by themselves; None: they will.

    Args:
        settings: of `decode_settings`.
    """
    lacking = [term for term in _requeue_terms() if not term.satisfied(settings.get(term.key))]
    wanted = [f"{term.key}={term.value}" for term in lacking if term.key in _RETURNING]
    if not wanted:
        return None
    return (
        f"Slurm lacks {' and '.join(wanted)}: a training that saved and left counts as failed and "
        "does not come back. Add it to slurm.conf and restart slurmctld; until then `scontrol "
        "requeue` brings such a job back"
    )


def no_return_of_left(settings: Mapping[str, str]) -> str | None:
    """Why a job that `gpuwarden submit` makes would not come back when it left; None: it will.

    It asks to be queued again itself (`--requeue`), whatever `JobRequeue` is for others.

    Args:
        settings: of `decode_settings`.
    """
    (wanted,) = (term for term in _requeue_terms() if term.key == "RequeueExit")
    if wanted.satisfied(settings.get(wanted.key)):
        return None
    return (
        "this Slurm does not queue a job again that saved and left (its slurm.conf lacks "
        f"RequeueExit={wanted.value}): it ends as failed. Ask an operator for that; until then "
        "`scontrol requeue JOB` has it go on, or submit it again under the same --name"
    )


def _requeue_terms() -> Iterator[ConfigTerm]:
    yield ConfigTerm("JobRequeue", "1", "Jobs that left come back")
    yield ConfigTerm(
        "RequeueExit",
        str(job_files.EXIT_REQUEUE),
        "A training that saved and left for another ends with this status",
        Test.HAS,
    )
    yield ConfigTerm(
        "RequeueExitHold",
        str(job_files.EXIT_HOLD),
        "One that a rule ended ends with this status, and waits for its owner",
        Test.HAS,
    )
    yield ConfigTerm(
        "KillWait",
        str(KILL_WAIT_SECONDS),
        "The last chance to save at the next step, when the grace is over",
        Test.AT_LEAST,
    )


def _preemption_terms(policy: Policy, version: Version) -> Iterator[ConfigTerm]:
    if policy.preemption is None or not preempting(policy):
        return
    kind = "qos" if by_qos(policy) else "partition_prio"
    yield ConfigTerm("PreemptType", f"preempt/{kind}", "Who may ask whom to leave", restart=True)
    yield ConfigTerm("PreemptMode", "REQUEUE", "Who leaves is queued again", Test.HAS, restart=True)
    key, word = notice_setting(version)
    yield ConfigTerm(
        key, word, "The notice is the job's own --signal, at the beginning of the grace", Test.HAS
    )
    yield ConfigTerm(
        "PreemptExemptTime",
        written_clock(0 if by_qos(policy) else policy.preemption.minimum_run),
        "A job is left alone for so long after its start"
        if not by_qos(policy)
        else "Each QOS has its own",
        Test.SECONDS,
    )


def _accounting_terms(policy: Policy) -> Iterator[ConfigTerm]:
    yield ConfigTerm(
        "AccountingStorageType",
        "accounting_storage/slurmdbd",
        "Accounts, qualities of service and limits are in its database",
        restart=True,
    )
    tres = sorted({"gres/gpu", *(tres_of(policy, each.name) for each in policy.cards)})
    yield ConfigTerm(
        "AccountingStorageTRES",
        ",".join(tres),
        "Without them no card is counted, and no limit on cards holds",
        Test.HAS,
        restart=True,
    )
    yield ConfigTerm(
        "AccountingStorageEnforce",
        "associations,limits,qos,safe",
        "Limits hold; without `safe`, Slurm kills running jobs when a budget is spent",
        Test.HAS,
        restart=True,
    )


def _priority_terms(policy: Policy) -> Iterator[ConfigTerm]:
    yield ConfigTerm(
        "PriorityType",
        "priority/multifactor",
        "Priorities and shares order the queue",
        restart=True,
    )
    yield ConfigTerm(
        "PriorityWeightQOS",
        str(_priority_weight([each.value for each in policy.priorities])),
        "A higher priority goes first, whatever the shares",
    )
    yield ConfigTerm(
        "PriorityWeightFairShare", str(_FAIR_SHARE), "Among equals, who has had less of its share"
    )
    yield ConfigTerm("PriorityWeightAge", str(_AGE), "Then who has waited longer")
    if any(each.kind == "hard" for each in policy.budgets):
        yield ConfigTerm(
            "PriorityDecayHalfLife",
            "0",
            "What was used counts in full, or budgets leak",
            Test.SECONDS,
        )
        yield ConfigTerm(
            "PriorityUsageResetPeriod", "MONTHLY", "Budgets of a month begin anew on its first"
        )


def _priority_weight(values: list[int]) -> int:
    """The weight by which the smallest step between two priorities outweighs all else."""
    distinct = sorted({0, *values})
    step = min((high - low for low, high in itertools.pairwise(distinct)), default=1)
    weight = math.ceil((_FAIR_SHARE + _AGE + 1) * max(distinct[-1], 1) / step)
    return min(weight, _MOST_WEIGHT)


def written_clock(seconds: float) -> str:
    """A length of time as Slurm prints it: [days-]hours:minutes:seconds.

    A bare number would be seconds in one place of slurm.conf, and minutes in another.
    """
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour:02}:{minute:02}:{second:02}"
    return f"{days}-{clock}" if days else clock


def _words(text: str) -> set[str]:
    """Members of a list, in small letters; a range of numbers is each of them."""
    words = set[str]()
    for word in text.lower().replace(" ", "").split(","):
        if (found := _RANGE.fullmatch(word)) is not None:
            words |= {str(number) for number in range(int(found[1]), int(found[2]) + 1)}
        elif word:
            words.add(word)
    return words


def clock_seconds(text: str) -> int | None:
    """`90`, `5 sec`, `00:30:00`, `7-00:00:00`; None for what is no length of time."""
    if (found := _CLOCK.fullmatch(text)) is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    found = re.fullmatch(r"([0-9]{1,9})(?: sec)?", text)
    return None if found is None else int(found[1])
