"""Accounts of GPU time: who held how much, from timestamps, each attempt once. Pure.

A second of eight cards is eight GPU-seconds, and an hour is 3600 s: what is counted is the time
from a start to an end, cut to the stretch that is asked about, so that the parts of a stretch add
up to the whole. A job that came back is one job with several attempts, each of which counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuwarden.periods import Span
    from gpuwarden.scheduling.holdings import Holding

By = Literal["team", "project", "job", "user"]
NONE = "none"
"""What is nobody's; as in the series of money.yml."""
TOLERANCE = 0.02
"""Of the larger figure; two accounts that differ by more are told apart."""
NEGLIGIBLE_SECONDS = 600.0
"""GPU-seconds; less is the edges of a few scrapes."""


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
            TOLERANCE * larger, NEGLIGIBLE_SECONDS
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

    Returns:
        In order of time.
    """
    found: dict[tuple[str, str, float], Holding] = {}
    for item in holdings:
        before = found.get(item.key)
        if before is None or _rank(item) > _rank(before):
            found[item.key] = item
    return tuple(sorted(found.values(), key=lambda item: (item.start, item.engine, item.entry)))


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
    lines: dict[tuple[str, str, str], Line] = {}
    total = Line("total")
    jobs: dict[str, set[tuple[str, str]]] = {}
    for item in each_once(holdings):
        seconds = held_seconds(item, span, now=now) * item.gpus
        if seconds <= 0:
            continue
        key = _key(item, by)
        line = lines.setdefault(key, Line(*key))
        price = None if prices is None else prices.get(item.card)
        for each in (line, total):
            each.gpu_seconds += seconds
            each.attempts += 1
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


def _key(item: Holding, by: By) -> tuple[str, str, str]:
    team = item.team or NONE
    if by == "team":
        return (team, "", "")
    if by == "project":
        return (item.project or NONE, team, "")
    if by == "user":
        return (item.user or NONE, team, "")
    return (item.run_id or item.entry, team, item.user or NONE)


def beside(found: Account, seen: Mapping[tuple[str, str], float], *, covered: float) -> Account:
    """Put Prometheus' account beside the engine's.

    Args:
        found: the engine's.
        seen: name and team -> GPU-seconds by Prometheus; the team is empty in an account by team.
        covered: share of the time of which Prometheus recorded anything.

    Returns:
        The same account with both figures; what only Prometheus saw has lines of its own.
    """
    lines = {(line.name, line.team): line for line in found.lines}
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
