"""Canaries: enforcement that begins on a share of the owners, and ends itself where it was wrong.

Pure. An owner is in the share by a hash of the rule's id and the user whom the node saw: so every
attempt and every run of theirs is treated alike, nobody chooses, and live engine, replay and tests
agree. For all others the rule is the same rule in `warn`. A job whose user is not known is
outside: who is unsure does nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from gpuwarden import durations, quantities
from gpuwarden.ruleengine.guards import Blocked
from gpuwarden.ruleengine.model import Mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuwarden.ruleengine.canary_terms import Canary
    from gpuwarden.ruleengine.model import Rule

_BUCKETS = 2**64
REGRET_SECONDS = 3600.0
"""A run that is back on a card this soon after it was ended: its owner did not agree."""


class Objection(StrEnum):
    """What speaks against a rule on trial."""

    APPEAL = "appeal"
    """An owner objects."""
    REGRET = "regret"
    """An end was wrong."""


@dataclass(frozen=True, slots=True)
class Objected:
    """One objection.

    Attributes:
        rule_id: the rule.
        kind: an appeal or a regret.
        subject: what is counted once: the owner of an appeal, the decision of a regret.
        at: Unix time.
    """

    rule_id: str
    kind: Objection
    subject: str
    at: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A termination that stands, and where its run would show that it was wrong.

    Attributes:
        decision_id, rule_id, job_id: of the decision.
        user: the owner.
        run_id: of the training, or None: it cannot be known again.
        at: Unix time of the proof.
    """

    decision_id: str
    rule_id: str
    job_id: str
    user: str
    run_id: str | None
    at: float


@dataclass(frozen=True, slots=True)
class Seen:
    """A job that holds a card now."""

    job_id: str
    user: str
    run_id: str | None


def in_share(rule_id: str, user: str, share: float) -> bool:
    """Whether a user's jobs are in a rule's share; never for a user who is not known.

    Args:
        rule_id: the rule's; another rule tries on others.
        user: as the node saw it.
        share: ratio above 0, at most 1.
    """
    if not user:
        return False
    digest = hashlib.blake2b(user.encode(), key=rule_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < int(share * _BUCKETS)


def applied(rule: Rule, user: str, held: Mapping[str, str]) -> Rule:
    """The rule as it is for one owner: itself, or the same in `warn`.

    Args:
        rule: as it reads.
        user: the owner of the job, as the node saw it; empty where not known.
        held: rules that have fallen back to warn -> why, in words.
    """
    if rule.mode is not Mode.ENFORCE:
        return rule
    outside = rule.canary is not None and not in_share(rule.id, user, rule.canary.share)
    if outside or rule.id in held:
        return rule.model_copy(update={"mode": Mode.WARN})
    return rule


def blocks(rule: Rule, user: str, held: Mapping[str, str]) -> list[Blocked]:
    """Why a rule that enforces only warns this owner, for whoever asks; empty if it does not.

    Args:
        rule: as it reads, or as `applied` made it.
        user: the owner of the job, or an empty string.
        held: as for `applied`.
    """
    found = []
    if rule.id in held and rule.mode is not Mode.OBSERVE:
        found.append(Blocked("held_back", held[rule.id]))
    canary = rule.canary
    if canary is not None and not in_share(rule.id, user, canary.share):
        who = "this owner's jobs are" if user else "a job whose user is not known is"
        text = f"the rule is on trial with {_percent(canary.share)} of the owners; {who} outside"
        found.append(Blocked("canary", text))
    return found


def share_blocks(rule: Rule, *, found: int, ended: int) -> list[Blocked]:
    """Whether one more end would make more than the share of what the rule has found.

    It defers, as limits do: one owner in the share may have most of the jobs.

    Args:
        rule: as it reads.
        found: distinct jobs that it found to break it, of the last `back_to_warn.within`.
        ended: of those, how many it has ended.
    """
    canary = rule.canary
    if canary is None or ended + 1 <= canary.share * found:
        return []
    within = durations.render(canary.back_to_warn.within)
    text = (
        f"{ended} of the {found} jobs that the rule found within {within} were ended; one more "
        f"would be above canary.share, which is {_percent(canary.share)}"
    )
    return [Blocked("canary_share", text)]


def fallen_back(
    rule: Rule, objections: Iterable[Objected], *, now: float, since: float
) -> tuple[Objection, str] | None:
    """Whether a rule has to fall back to warn, by which kind of objection, and why in words.

    Args:
        rule: as it reads.
        objections: of any rule, in any order.
        now: Unix time.
        since: Unix time after which they count: when an admin last resumed the rule.
    """
    canary = rule.canary
    if canary is None or rule.mode is not Mode.ENFORCE:
        return None
    count = tally(rule.id, canary, objections, now=now, since=since)
    terms = canary.back_to_warn
    for kind, limit, noun in (
        (Objection.REGRET, terms.regrets, "regretted end"),
        (Objection.APPEAL, terms.appeals, "owner's appeal"),
    ):
        if count[kind] >= limit:
            text = (
                f"{count[kind]} {noun}{'' if count[kind] == 1 else 's'} within "
                f"{durations.render(terms.within)}; canary.back_to_warn allows fewer than {limit}"
            )
            return kind, text
    return None


def tally(
    rule_id: str, canary: Canary, objections: Iterable[Objected], *, now: float, since: float
) -> dict[Objection, int]:
    """How many distinct subjects of each kind count now; arguments as in `fallen_back`."""
    begin = now - canary.back_to_warn.within
    seen = {
        (item.kind, item.subject)
        for item in objections
        if item.rule_id == rule_id and item.at >= begin and item.at > since
    }
    return {kind: sum(1 for each, _ in seen if each is kind) for kind in Objection}


def regretted(
    ends: Iterable[Ended], jobs: Iterable[Seen], *, now: float
) -> list[tuple[Ended, str]]:
    """Ends whose run is back on a card, with the new attempt.

    Only a run that names itself is known again, and only with the same user: a name alone can be
    taken by anybody.

    Args:
        ends: terminations that are proven.
        jobs: that hold a card now.
        now: Unix time.
    """
    back: dict[tuple[str, str], list[str]] = {}
    for job in jobs:
        if job.user and job.run_id:
            back.setdefault((job.user, job.run_id), []).append(job.job_id)
    found = []
    for end in ends:
        if end.run_id is None or not 0 <= now - end.at <= REGRET_SECONDS:
            continue
        others = [job for job in back.get((end.user, end.run_id), ()) if job != end.job_id]
        if others:
            found.append((end, min(others)))
    return found


def _percent(share: float) -> str:
    return quantities.render(share, quantities.Unit.RATIO)
