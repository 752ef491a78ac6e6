"""The nouns of attacks: what a trick is, whom it is played on, and what it makes of a job. Pure.

A trick is one of five kinds. What a job *says* and what it is *called* are its own word: these may
delay a rule by its `trust_for` and no longer. An *attempt* is begun anew or split; *work* is really
done on the card or the CPU, so that what the rule measures has changed; a *grant* is the operator's
own promise, used to the full.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from gpuwarden.ruleengine.conditions import leaves
from gpuwarden.ruleengine.histories import CARD_MEMORY_BYTES, LIKENESSES
from gpuwarden.ruleengine.rule_tests import DeclaredRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from gpuwarden.ruleengine.attack_offenders import Forge, Offender
    from gpuwarden.ruleengine.conditions import Leaf
    from gpuwarden.ruleengine.model import Rule, WhitelistEntry
    from gpuwarden.ruleengine.rule_tests import ConductChange, DeclaredJob

HASTE = 0.8
"""Share of the time that is left to it after which a job does something else."""


class Kind(StrEnum):
    """What a trick changes."""

    WORD = "word"
    """What the job says of itself."""
    NAME = "name"
    """What it is called, whose run it claims to be, and whether it is seen at all."""
    ATTEMPT = "attempt"
    """Where one attempt ends and the next begins, and what belongs to it."""
    WORK = "work"
    """What really happens on the card or the CPU."""
    GRANT = "grant"
    """What the operator has promised its owner."""


@dataclass(frozen=True, slots=True)
class Target:
    """A rule and the offender that it finds without a trick. Times are seconds.

    Attributes:
        rule: the rule.
        offender: as it shows itself.
        job: the same, called what the rule's match asks for.
        found: from its begin until `for` was met.
        done: until the rule's last stage.
        length: of the history in which tricks are played.
        interval: between two scrapes.
        whitelist: of the rule set.
    """

    rule: Rule
    offender: Offender
    job: DeclaredJob
    found: float
    done: float
    length: float
    interval: float
    whitelist: tuple[WhitelistEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class Play:
    """A trick as it is played on one rule.

    Attributes:
        jobs: the offender's, which are judged.
        bystanders: others that are there.
        every: whether all of its jobs must be found; else one of them suffices.
        forge: series that few words do not make, of each of its jobs; or None.
        keeps: whether the owner keeps the job as often as the rule allows.
    """

    jobs: tuple[DeclaredJob, ...]
    bystanders: tuple[DeclaredJob, ...] = ()
    every: bool = False
    forge: Forge | None = None
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class Trick:
    """One way to escape.

    Attributes:
        name: a word for tables and `--trick`.
        kind: what it changes.
        help: what the job does, in one sentence.
        stands: what stands against it, in a few words.
        hint: what an operator can do where it escapes.
        play: plays it on a rule; None where it means nothing there.
    """

    name: str
    kind: Kind
    help: str
    stands: str
    hint: str
    play: Callable[[Target], Play | None]


def every_leaf(rule: Rule) -> Iterator[Leaf]:
    """What a rule and its stages measure."""
    for condition in rule.conditions:
        yield from leaves(condition)


def run_of(job: DeclaredJob) -> DeclaredRun:
    """What its trainer says, or what one would say that has just begun."""
    return job.run or DeclaredRun()


def changed(job: DeclaredJob, /, **change: Any) -> DeclaredJob:
    """The job with other values, in base units."""
    return job.model_copy(update=change)


def beside(job: DeclaredJob, name: str, /, **change: Any) -> DeclaredJob:
    """A job of that name on the same cards."""
    return changed(job, **{"job": name, "uuids": job.card_names, **change})


def merged(first: Iterable[ConductChange], second: Iterable[ConductChange]) -> tuple[Any, ...]:
    """Changes in order of time; two of one moment become one."""
    found: dict[float, ConductChange] = {}
    for change in sorted([*first, *second], key=lambda item: item.at):
        before = found.get(change.at)
        given = {name: getattr(change, name) for name in change.model_fields_set}
        found[change.at] = change if before is None else before.model_copy(update=given)
    return tuple(found.values())


def card_memory(job: DeclaredJob) -> float:
    """Bytes of each of its cards."""
    return job.card_memory or CARD_MEMORY_BYTES


def held_memory(job: DeclaredJob) -> float:
    """Bytes of each card that it holds."""
    if job.memory is not None:
        return job.memory
    return LIKENESSES[job.like or "healthy"].memory_share * card_memory(job)
