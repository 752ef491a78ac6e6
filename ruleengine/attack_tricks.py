"""The catalogue of tricks, and how they are played on a rule. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpuwarden.ruleengine import attack_deeds, attack_moments, attack_words
from gpuwarden.ruleengine.attacks import Kind, Trick, changed
from gpuwarden.ruleengine.conditions import (
    All,
    Any_,
    NeedsMemory,
    NoProgress,
    Not,
    ProfileCondition,
    Promql,
    Signal,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuwarden.ruleengine.attacks import Play, Target
    from gpuwarden.ruleengine.conditions import Condition

_TOLD = "write a rule that rests on what the node measures, and at least notifies"

TRICKS = (
    Trick(
        "touch-log",
        Kind.WORD,
        "touches its log in a loop",
        "past trust_for only the CPU counts",
        "add cpu to silent_for",
        attack_words.touch_log,
    ),
    Trick(
        "fake-heartbeat",
        Kind.WORD,
        "writes a heartbeat, and nothing else happens",
        "past trust_for only the CPU counts",
        "add cpu to silent_for",
        attack_words.heartbeat,
    ),
    Trick(
        "frozen-phase",
        Kind.WORD,
        "says for ever that it is in a phase that the rule ignores",
        "a phase has a limit in ignore_phases, and trust_for",
        _TOLD,
        attack_words.frozen,
    ),
    Trick(
        "alternating-phases",
        Kind.WORD,
        "changes its phase before each one's limit is over",
        "trust_for is spent over all phases together",
        _TOLD,
        attack_words.alternating,
    ),
    Trick(
        "say-everything",
        Kind.WORD,
        "log, heartbeat and changing phases at once",
        "one trust_for for all that it says",
        _TOLD,
        attack_words.everything,
    ),
    Trick(
        "future-times",
        Kind.WORD,
        "dates heartbeat, log, phase and state an hour ahead",
        "a future time is unknown, within trust_for",
        _TOLD,
        attack_words.future,
    ),
    Trick(
        "forged-throughput",
        Kind.WORD,
        "counts the images that are expected of it",
        "nothing measured can be forged so",
        _TOLD,
        attack_words.forged,
    ),
    Trick(
        "large-lie",
        Kind.WORD,
        "declares a training that would need what it holds",
        "nothing measured can be forged so",
        _TOLD,
        attack_words.large_lie,
    ),
    Trick(
        "small-lie",
        Kind.WORD,
        "declares the smallest training",
        "what it holds is then too much",
        _TOLD,
        attack_words.small_lie,
    ),
    Trick(
        "say-nothing",
        Kind.WORD,
        "drops its trainer's word",
        "a channel that it never had is silent",
        _TOLD,
        attack_words.silent,
    ),
    Trick(
        "last-words",
        Kind.WORD,
        "says that it lives shortly before each deadline",
        "what it says stops the clock, and turns none back",
        _TOLD,
        attack_moments.last_words,
    ),
    Trick(
        "unsaved-work",
        Kind.WORD,
        "says that it has saved nothing for long",
        "told all the same; max_work_lost is the operator's own word",
        "raise max_work_lost, or end it by hand",
        attack_words.unsaved,
    ),
    Trick(
        "disguise",
        Kind.NAME,
        "exec -a: is called like a protected program, which runs beside it",
        "the whitelist sees the executable of every process",
        "name no executable of a user's",
        attack_words.disguise,
    ),
    Trick(
        "claim-run",
        Kind.NAME,
        "claims another job's run",
        "a run claimed twice says nothing, within trust_for",
        _TOLD,
        attack_words.claim,
    ),
    Trick(
        "borrowed-run",
        Kind.NAME,
        "calls its run like one on the whitelist",
        "the user's name beside the run's",
        "name the user beside the run in the whitelist",
        attack_words.borrowed,
    ),
    Trick(
        "renamed",
        Kind.NAME,
        "calls framework, project, run and model differently",
        "match: {} means every job",
        "match on user, team or node, which a job cannot choose",
        attack_words.renamed,
    ),
    Trick(
        "terminal",
        Kind.NAME,
        "runs at a terminal, as if a person worked in it",
        "match: {} means every job",
        "let a rule that spares what is interactive have another beside it that does not",
        attack_words.terminal,
    ),
    Trick(
        "no-labels",
        Kind.NAME,
        "loses the labels that it can influence",
        "match: {} means every job",
        "match on user, team or node, which a job cannot choose",
        attack_words.unlabelled,
    ),
    Trick(
        "hidden",
        Kind.NAME,
        "hides its processes from the node, as in a machine of its own",
        "memory that belongs to nobody is found by its card",
        "use orphaned-memory, about the card",
        attack_words.hidden,
    ),
    Trick(
        "restart",
        Kind.ATTEMPT,
        "begins anew before it is found, again and again",
        "each attempt gives its cards back",
        "ask of the user and the card, over attempts (barely-used, full-and-slow)",
        attack_deeds.restarts,
    ),
    Trick(
        "restart-believed",
        Kind.ATTEMPT,
        "begins anew before its word counts no more",
        "trust_for is spent by user and card, over attempts",
        "ask of the user and the card, over attempts (barely-used, full-and-slow)",
        attack_deeds.believed,
    ),
    Trick(
        "split",
        Kind.ATTEMPT,
        f"runs as {attack_deeds.PARTS} jobs that share the card",
        "each part is judged",
        "limit the user's sum with promql, or the card with target: gpu",
        attack_deeds.split,
    ),
    Trick(
        "shared-card",
        Kind.ATTEMPT,
        "puts a helper of its own on the card",
        "what is measured for each process stays known",
        "use gpu_* signals instead of card_*",
        attack_deeds.shared,
    ),
    Trick(
        "trickle",
        Kind.WORK,
        "a second of kernels every minute",
        "the mean stays low",
        "take the mean of an hour (barely-used)",
        attack_deeds.trickle,
    ),
    Trick(
        "last-step",
        Kind.WORK,
        "makes one step shortly before each deadline",
        "clear_after is longer than any window remembers it",
        "make clear_after longer than the rule's windows and silent_for",
        attack_moments.last_step,
    ),
    Trick(
        "decoy-card",
        Kind.WORK,
        "takes one card more, and works on that one a little",
        "each card is judged",
        "ask of each card for itself, with gpus: any, and tell (idle-sibling, barely-used)",
        attack_deeds.decoy,
    ),
    Trick(
        "crawl",
        Kind.WORK,
        "makes a step now and then",
        "throughput is compared with what is expected",
        "compare the throughput with a profile (utilization-hog)",
        attack_deeds.crawl,
    ),
    Trick(
        "cpu-spin",
        Kind.WORK,
        "burns 5 % of a core",
        "what the card does stays the same",
        "notify without silent_for (barely-used)",
        attack_deeds.spin,
    ),
    Trick(
        "just-under",
        Kind.WORK,
        "holds a little less memory than the limit",
        "the rest of the card is free, as the rule asks",
        "lower the limit",
        attack_deeds.under,
    ),
    Trick(
        "memory-dips",
        Kind.WORK,
        "lets go of some memory for a moment in every window",
        "the mean stays high",
        "take the mean of the memory, or no memory at all (barely-used, full-and-slow)",
        attack_deeds.dips,
    ),
    Trick(
        "keep-abuse",
        Kind.GRANT,
        "keeps the job as often as it may",
        "owner_may: times, per run and rule for life",
        "lower keep or times",
        attack_deeds.keeps,
    ),
)
"""Every trick, by kind."""


def plays(target: Target, tricks: Iterable[Trick] = TRICKS) -> list[tuple[Trick, Play]]:
    """The tricks that mean something to a rule, each on cards and in a name of its own."""
    found = []
    for trick in tricks:
        named = changed(target.job, job=f"{_stem(target.job.job)}{trick.name}")
        play = trick.play(replace(target, job=named))
        if play is not None:
            found.append((trick, play))
    return found


def _stem(job: str) -> str:
    return "proc-" if job.startswith("proc-") else f"{job}-"


def rests_on_word(condition: Condition) -> bool:
    """Whether a condition can become true only by what a job says of itself."""
    match condition:
        case All():
            return any(rests_on_word(part) for part in condition.all)
        case Any_():
            return all(rests_on_word(part) for part in condition.any)
        case Not():
            return rests_on_word(condition.not_)
        case Signal():
            return condition.spec.self_report
        case Promql():
            return "yolo_" in condition.promql
    return isinstance(condition, (ProfileCondition, NeedsMemory, NoProgress))
