"""Policies of `rules replay --fail-on`: what a change of rules must not come to, for CI. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LIMIT = re.compile(r"(?P<name>[a-z-]+)(?:>(?P<limit>[0-9]+(?:\.[0-9]+)?)(?P<percent>%)?)?")
RATES: Final = {
    "regret": "share of the ended jobs that were at work again within the horizon",
    "unknown": "share of all verdicts that could not be reached",
}
COUNTS: Final = {
    "terminations": "jobs that would be ended",
    "new-terminations": "jobs that would be ended, and are not by --against",
    "flapping": "incidents that came back within an hour",
    "stale": "jobs that a rule without gates would have ended on stopped data",
}
FLAGS: Final = {
    "exempt": "a job would be ended that a whitelist entry means, for whatever rule, even expired",
    "kept": "a job would be ended that was kept then: from another rule, or longer than allowed",
    "caps": "a limit per hour or user, or the share of running jobs, would have held something",
}
_HARD_CAPS: Final = ("share_of_running", "limit_per_hour", "limit_per_user_per_day")


@dataclass(frozen=True, slots=True)
class Policy:
    """One of them: its name, and what must not be exceeded (0 where it must not happen at all)."""

    name: str
    limit: float = 0.0

    def __str__(self) -> str:
        if self.name in FLAGS:
            return self.name
        shown = f"{self.limit:.10%}".rstrip("0%").rstrip(".") if self.name in RATES else ""
        return (
            f"{self.name}>{shown or '0'}%" if self.name in RATES else f"{self.name}>{self.limit:g}"
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """A policy, what was found, and whether that is too much."""

    policy: Policy
    value: float
    exceeded: bool
    sentence: str


def parse_policies(text: str) -> list[Policy]:
    """Read `regret>5%,exempt,caps`.

    Raises:
        ValueError: with a sentence that says how to write it.
    """
    return [_policy(word.strip()) for word in text.split(",") if word.strip()]


def _policy(word: str) -> Policy:
    found = _LIMIT.fullmatch(word.replace(" ", ""))
    name = found["name"] if found is not None else ""
    if found is None or name not in {*RATES, *COUNTS, *FLAGS}:
        known = [*(f"{n}>5%" for n in RATES), *(f"{n}>0" for n in COUNTS), *FLAGS]
        raise ValueError(f"{word!r} is no policy: there are {', '.join(known)}")
    if name in FLAGS:
        if found["limit"] is not None:
            raise ValueError(f"{name} takes no limit: it must not happen at all")
        return Policy(name)
    if found["limit"] is None:
        raise ValueError(f"{name} needs a limit: write {name}>{'5%' if name in RATES else '0'}")
    if (found["percent"] is not None) != (name in RATES):
        wanted = "in per cent, such as 5%" if name in RATES else "as a number of them"
        raise ValueError(f"{name}: write the limit {wanted}")
    limit = float(found["limit"])
    return Policy(name, limit / 100 if name in RATES else limit)


def outcomes(report: Mapping[str, Any], policies: Sequence[Policy]) -> list[Outcome]:
    """What a replay's document says of each policy."""
    return [_outcome(report, policy) for policy in policies]


def _outcome(report: Mapping[str, Any], policy: Policy) -> Outcome:
    value, about = _VALUES[policy.name](report)
    exceeded = value > policy.limit
    words = "exceeded" if exceeded else "kept"
    return Outcome(policy, value, exceeded, f"{policy}: {words}: {about}")


def _regret(report: Mapping[str, Any]) -> tuple[float, str]:
    totals = report["totals"]
    rate = totals["regret_rate"] or 0.0
    return rate, f"{totals['regretted']} of {totals['terminations']} ended jobs"


def _unknown(report: Mapping[str, Any]) -> tuple[float, str]:
    totals = report["totals"]
    rate = totals["unknown"] / totals["verdicts"] if totals["verdicts"] else 0.0
    return rate, f"{rate:.1%} of {totals['verdicts']} verdicts"


def _terminations(report: Mapping[str, Any]) -> tuple[float, str]:
    count = report["totals"]["terminations"]
    return count, f"{count} jobs"


def _new_terminations(report: Mapping[str, Any]) -> tuple[float, str]:
    difference = report["difference"]
    rows = difference["terminations"]["new"] if difference else report["terminations"]
    return len(rows), _named(row["job"] for row in rows)


def _flapping(report: Mapping[str, Any]) -> tuple[float, str]:
    count = report["totals"]["flapping"]
    return count, f"{count} incidents"


def _stale(report: Mapping[str, Any]) -> tuple[float, str]:
    return len(report["stale"]), _named(row["job"] for row in report["stale"])


def _exempt(report: Mapping[str, Any]) -> tuple[float, str]:
    jobs = [row["job"] for row in report["terminations"] if row["exempt"]]
    return len(jobs), _named(jobs)


def _kept(report: Mapping[str, Any]) -> tuple[float, str]:
    jobs = [row["job"] for row in report["terminations"] if row["kept"]]
    return len(jobs), _named(jobs)


def _caps(report: Mapping[str, Any]) -> tuple[float, str]:
    hit = [row["limit"] for row in report["caps"] if row["limit"] in _HARD_CAPS]
    return len(hit), ", ".join(hit) or "none"


def _named(jobs: Any) -> str:
    found = list(jobs)
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return (", ".join(found[:5]) + more) or "none"


_VALUES: Final = {
    "regret": _regret,
    "unknown": _unknown,
    "terminations": _terminations,
    "new-terminations": _new_terminations,
    "flapping": _flapping,
    "stale": _stale,
    "exempt": _exempt,
    "kept": _kept,
    "caps": _caps,
}
