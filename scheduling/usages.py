"""Accounts of GPU time: who held how much, from timestamps, each attempt once. Pure.

A second of eight cards is eight GPU-seconds, and an hour is 3600 s: what is counted is the time
from a start to an end, cut to the stretch that is asked about, so that the parts of a stretch add
up to the whole. A job that came back is one job with several attempts, each of which counts.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuwarden.periods import Span
    from gpuwarden.scheduling.holdings import Holding

By = Literal["team", "project", "job", "user"]
Key = tuple[str, str, str]
"""Of a line: its name, its team, its user; empty where it is about all of them."""
NONE = "none"
"""What is nobody's; as in the series of money.yml."""
TOLERANCE = 0.02
"""Of the larger figure; two accounts that differ by more are told apart."""
NEGLIGIBLE_SECONDS = 600.0
"""GPU-seconds; less is the edges of a few scrapes."""
EDGE_SECONDS = 315.0
"""Of each card that was held across an end of the time: Prometheus has whole fives of minutes."""


@dataclass(slots=True)
class Line:
    """What one team, project, job or user held.

    Attributes:
        name: of whom or what.
        team: of a job or user, else empty.
        user: of a job, else empty.
        gpu_seconds: that were held.
        jobs: different jobs.
        attempts: starts of them; more than jobs where some came back.
        cost: currency -> amount.
        seen_gpu_seconds: by Prometheus, or None where it was not asked or says nothing of it.
        gpu_types: kind of cards -> GPU-seconds.
        edge_gpu_seconds: by which two accounts may differ, as it held cards across the time's ends.
    """

    name: str
    team: str = ""
    user: str = ""
    gpu_seconds: float = 0.0
    jobs: int = 0
    attempts: int = 0
    cost: dict[str, float] = field(default_factory=dict)
    seen_gpu_seconds: float | None = None
    gpu_types: dict[str, float] = field(default_factory=dict)
    edge_gpu_seconds: float = 0.0

    @property
    def difference(self) -> float | None:
        """Prometheus' figure less the engine's, GPU-seconds."""
        return None if self.seen_gpu_seconds is None else self.seen_gpu_seconds - self.gpu_seconds

    @property
    def apart(self) -> bool:
        """Whether the two accounts differ by more than their edges explain."""
        if self.seen_gpu_seconds is None:
            return False
        larger = max(self.gpu_seconds, self.seen_gpu_seconds)
        return abs(self.seen_gpu_seconds - self.gpu_seconds) > max(
            TOLERANCE * larger, NEGLIGIBLE_SECONDS, self.edge_gpu_seconds
        )


@dataclass(frozen=True, slots=True)
class Account:
    """Who held what in a stretch of time.

    Attributes:
        span: the stretch.
        by: what its lines are about.
        lines: the longest first.
        total: of all lines.
        notes: what a reader must know, in words.
    """

    span: Span
    by: By
    lines: tuple[Line, ...]
    total: Line
    notes: tuple[str, ...] = ()


def held_seconds(holding: Holding, span: Span, *, now: float) -> float:
    """Seconds of an attempt that lie in a stretch of time, without those it was suspended.

    When in its life an attempt was suspended nobody tells: its parts lose their shares of it, so
    that they add up.

    Args:
        holding: one attempt.
        span: the stretch.
        now: Unix time, up to which one that runs counts.
    """
    end = now if holding.end is None else holding.end
    whole = end - holding.start
    inside = min(end, span.end) - max(holding.start, span.begin)
    if inside <= 0 or whole <= 0:
        return 0.0
    awake = max(0.0, whole - min(max(0.0, holding.suspended_seconds), whole))
    return inside * awake / whole


def each_once(holdings: Iterable[Holding]) -> tuple[Holding, ...]:
    """Every attempt once, whoever told of it: of two, the one that is known to have ended.

    An attempt ends at the latest when the next one of its job begins: the record of its end may be
    lost, or of another clock.

    Returns:
        In order of time.
    """
    found: dict[tuple[str, str, str, float], Holding] = {}
    for item in holdings:
        before = found.get(item.key)
        if before is None or _rank(item) > _rank(before):
            found[item.key] = item
    ordered = sorted(found.values(), key=lambda item: item.key)
    ends = [
        after.start if before.key[:3] == after.key[:3] else math.inf
        for before, after in itertools.pairwise(ordered)
    ]
    once = (
        replace(item, end=end) if end < math.inf and (item.end is None or item.end > end) else item
        for item, end in zip(ordered, [*ends, math.inf], strict=False)
    )
    return tuple(sorted(once, key=lambda item: (item.start, item.engine, item.entry, item.part)))


def _rank(item: Holding) -> tuple[bool, float, float, int, tuple[str, ...]]:
    """Who knows more, knows later; the rest only makes the choice one."""
    texts = (item.team, item.user, item.project, item.card, item.run_id or "")
    return (item.end is not None, item.end or 0.0, item.suspended_seconds, item.gpus, texts)


def account(
    holdings: Iterable[Holding],
    span: Span,
    by: By,
    *,
    now: float,
    prices: Mapping[str, tuple[float, str]] | None = None,
) -> Account:
    """Add up who held what.

    Args:
        holdings: attempts, in any order, also the same one several times.
        span: the stretch of time.
        by: what the lines are about.
        now: Unix time, up to which what runs counts.
        prices: kind of cards -> price of a card-hour and its currency.
    """
    lines: dict[Key, Line] = {}
    total = Line("total")
    jobs: dict[str, set[tuple[str, str]]] = {}
    for item in each_once(holdings):
        seconds = held_seconds(item, span, now=now) * item.gpus
        if seconds <= 0:
            continue
        key = key_of(item, by)
        line = lines.setdefault(key, Line(*key))
        price = None if prices is None else prices.get(item.card)
        for each in (line, total):
            each.gpu_seconds += seconds
            each.attempts += 1
            each.edge_gpu_seconds += _edges(item, span) * EDGE_SECONDS * item.gpus
            each.gpu_types[item.card] = each.gpu_types.get(item.card, 0.0) + seconds
            if price is not None:
                amount, currency = price
                each.cost[currency] = each.cost.get(currency, 0.0) + amount * seconds / 3600.0
        for name in ("\0".join(key), ""):
            jobs.setdefault(name, set()).add((item.engine, item.entry))
    for key, line in lines.items():
        line.jobs = len(jobs["\0".join(key)])
    total.jobs = len(jobs.get("", ()))
    ordered = sorted(lines.values(), key=lambda line: (-line.gpu_seconds, line.name, line.team))
    return Account(span, by, tuple(ordered), total)


def _edges(item: Holding, span: Span) -> int:
    """How many of a time's ends fall into an attempt."""
    return (item.start < span.begin) + (item.end is None or item.end > span.end)


def key_of(item: Holding, by: By) -> Key:
    """Whose line an attempt is counted in."""
    team = item.team or NONE
    if by == "team":
        return (team, "", "")
    if by == "project":
        return (item.project or NONE, team, "")
    if by == "user":
        return (item.user or NONE, team, "")
    return (item.run_id or item.entry, team, item.user or NONE)


def of_jobs(
    seen: Mapping[Key, float],
    jobs: Mapping[str, str],
    holdings: Iterable[Holding],
    *,
    team: str = "",
) -> dict[Key, float]:
    """Prometheus' account of attempts as one of jobs, named as the engine's.

    Args:
        seen: the exporter's `job_id`, team and user -> GPU-seconds.
        jobs: `job_id` -> the engine's id of the job, of those that are known.
        holdings: of the engine, whole: also others' than the team's.
        team: only of this one, or an empty text.

    Returns:
        By the keys of lines; attempts that no engine knows keep the exporter's name.
    """
    keys = {item.entry: key_of(item, "job") for item in holdings}
    found: dict[Key, float] = {}
    for (job_id, its_team, user), seconds in seen.items():
        key = keys.get(jobs.get(job_id, "")) or (job_id, its_team or NONE, user or NONE)
        if team in ("", key[1]):
            found[key] = found.get(key, 0.0) + seconds
    return found


def beside(found: Account, seen: Mapping[Key, float], *, covered: float) -> Account:
    """Put Prometheus' account beside the engine's.

    Args:
        found: the engine's.
        seen: key of a line -> GPU-seconds by Prometheus.
        covered: share of the time of which Prometheus recorded anything.

    Returns:
        The same account with both figures; what only Prometheus saw has lines of its own.
    """
    lines = {(line.name, line.team, line.user): line for line in found.lines}
    for key, seconds in seen.items():
        line = lines.setdefault(key, Line(*key))
        line.seen_gpu_seconds = (line.seen_gpu_seconds or 0.0) + seconds
    for line in lines.values():
        if line.seen_gpu_seconds is None:
            line.seen_gpu_seconds = 0.0
    found.total.seen_gpu_seconds = sum(line.seen_gpu_seconds or 0.0 for line in lines.values())
    ordered = sorted(lines.values(), key=lambda line: (-line.gpu_seconds, line.name, line.team))
    return Account(
        found.span, found.by, tuple(ordered), found.total, (*found.notes, *_why(ordered, covered))
    )


def _why(lines: Iterable[Line], covered: float) -> list[str]:
    """What explains that the accounts differ."""
    apart = [line for line in lines if line.apart]
    found = []
    if covered < 0.995:
        found.append(
            f"Prometheus recorded {100 * covered:.1f} % of this time: what it did not see is "
            "missing from its column"
        )
    if not apart:
        return found
    if any((line.difference or 0.0) < 0 for line in apart):
        found.append(
            "less in Prometheus than by the engine: cards that were allocated and not opened by a "
            "process (the engine charges from the start of the job), nodes without an exporter, or "
            "gaps between scrapes"
        )
    if any((line.difference or 0.0) > 0 for line in apart):
        found.append(
            "more in Prometheus than by the engine: processes that hold cards beside the engine, "
            "or outlived their job"
        )
    return found
