"""What two rule sets that went through the same history found differently. Pure."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuwarden.ruleengine.replay_arms import Arm
    from gpuwarden.ruleengine.replay_incidents import Incident


def differences(new: Arm, old: Arm) -> dict[str, Any]:
    """Incidents and ends that are new, gone, earlier or later than with the old rules."""
    return {
        "incidents": _incidents(new.incidents, old.incidents),
        "terminations": _ends(new.incidents, old.incidents),
    }


def _incidents(new: Iterable[Incident], old: Iterable[Incident]) -> dict[str, list[Any]]:
    """Two incidents of a rule and a job are the same where their times overlap."""
    known: dict[tuple[str, str], list[Incident]] = defaultdict(list)
    for item in old:
        known[item.rule, item.subject].append(item)
    found: dict[str, list[Any]] = {"new": [], "gone": [], "earlier": [], "later": []}
    for item in new:
        rest = known[item.rule, item.subject]
        same = next((other for other in rest if _overlap(item, other)), None)
        row = {"rule": item.rule, "job": item.subject, "detected": _iso(item.detected)}
        if same is None:
            found["new"].append(row)
            continue
        rest.remove(same)
        if same.detected != item.detected:
            word = "earlier" if item.detected < same.detected else "later"
            seconds = abs(item.detected - same.detected)
            found[word].append(row | {"before": _iso(same.detected), "seconds": seconds})
    found["gone"] = [
        {"rule": item.rule, "job": item.subject, "before": _iso(item.detected)}
        for rest in known.values()
        for item in rest
    ]
    return found


def _overlap(one: Incident, other: Incident) -> bool:
    never = float("inf")
    one_end = one.closed if one.closed is not None else never
    other_end = other.closed if other.closed is not None else never
    return one.begun <= other_end and other.begun <= one_end


def _ends(new: Iterable[Incident], old: Iterable[Incident]) -> dict[str, list[Any]]:
    """By job, since it is ended at most once, by whichever rule."""
    before = {item.subject: item for item in old if item.end is not None}
    after = {item.subject: item for item in new if item.end is not None}
    found: dict[str, list[Any]] = {"new": [], "gone": [], "earlier": [], "later": []}
    for job, item in after.items():
        if item.end is None:
            continue
        row = {"rule": item.rule, "job": job, "owner": item.user, "at": _iso(item.end.at)}
        other = before.get(job)
        if other is None or other.end is None:
            found["new"].append(row)
        elif other.end.at != item.end.at:
            word = "earlier" if item.end.at < other.end.at else "later"
            seconds = abs(item.end.at - other.end.at)
            found[word].append(row | {"before": _iso(other.end.at), "seconds": seconds})
    found["gone"] = [
        {"rule": item.rule, "job": job, "owner": item.user, "before": _iso(item.end.at)}
        for job, item in before.items()
        if item.end is not None and job not in after
    ]
    return found


def _iso(time: float) -> str:
    return dt.datetime.fromtimestamp(time, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
