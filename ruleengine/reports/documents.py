"""The report as one versioned document, from which page, tables, mail and PDF are made. Pure."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.ruleengine.reports import tallies
from gpuwarden.ruleengine.reports.footnotes import FOOTNOTES
from gpuwarden.ruleengine.reports.wording import answer, cautions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.ruleengine.reports.gatherings import Gathered
    from gpuwarden.ruleengine.reports.periods import Period
    from gpuwarden.ruleengine.reports.readers import Reader

SCHEMA: Final = "gpuwarden.report/v1"
WORST: Final = 5
COMPARED: Final = (
    ("utilization", "Mean utilisation", "ratio"),
    ("held_share", "Share of card-hours held", "ratio"),
    ("held_hours", "Hours held", "hours"),
    ("idle_share", "Share of those held idle", "ratio"),
    ("idle_hours", "Hours held idle", "hours"),
    ("jobs_at_once", "Jobs at once", "count"),
    ("lost_hours", "Work lost", "hours"),
    ("coverage", "Data coverage", "ratio"),
)
"""Figure, its name for people, and its unit."""


def document(
    gathered: Gathered,
    reader: Reader,
    *,
    earlier: Gathered | None,
    rulings: Mapping[str, Any],
    earlier_rulings: Mapping[str, Any] | None,
    waiting: Mapping[str, Any],
    made_at: float,
    not_compared: str = "",
) -> dict[str, Any]:
    """One JSON document.

    Args:
        gathered: what Prometheus said of the period.
        reader: for whom it is.
        earlier: of the period that it is compared with, or None.
        rulings: what the ledger says, see `rulings`.
        earlier_rulings: likewise of the earlier period.
        waiting: see `waits`.
        made_at: Unix time.
        not_compared: why there is no earlier period although one was asked for.
    """
    totals = tallies.totals(gathered)
    everybody = tallies.people(gathered, reader)
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "made_at": iso(made_at),
        "team": reader.team,
        "period": period_record(gathered.period),
        "earlier": None if earlier is None else period_record(earlier.period),
        "totals": {
            **totals,
            "people": len({each["user"] for each in everybody if each["held_hours"]}),
        },
        "not_compared": not_compared,
        "comparison": []
        if earlier is None
        else comparison(totals, tallies.totals(earlier), rulings, earlier_rulings),
        "days": tallies.days(gathered),
        "timeline": tallies.timeline(gathered),
        "week": tallies.week(gathered),
        "week_hours": tallies.week_hours(gathered),
        "teams": tallies.teams(everybody),
        "people": everybody,
        "worst": {
            "idle_people": sorted(
                (each for each in everybody if each["idle_hours"] > 0),
                key=lambda each: (-each["idle_hours"], each["user"]),
            )[:WORST],
            "idle_jobs": tallies.idle_jobs(gathered, reader, WORST),
            "busiest_cards": tallies.busiest_cards(gathered, WORST),
        },
        "waiting": dict(waiting),
        "rulings": dict(rulings),
        "sources": [
            {"measure": name, "source": rows.source} for name, rows in gathered.rows.items()
        ],
        "sampling": {
            "scrape_seconds": list(gathered.sizes.scrapes),
            "rule_seconds": list(gathered.sizes.rules),
            "bin_seconds": gathered.period.bin,
        },
    }
    found["answer"] = answer(found)
    found["cautions"] = cautions(found, gathered, earlier)
    found["footnotes"] = [{"id": name, "text": text} for name, text in FOOTNOTES.items()]
    return found


def period_record(period: Period) -> dict[str, Any]:
    """A period for people and programs."""
    return {
        "from": period.local(period.begin).isoformat(),
        "to": period.local(period.end).isoformat(),
        "zone": period.zone,
        "days": len(period.days()),
        "seconds": period.seconds,
    }


def comparison(
    now: Mapping[str, Any],
    before: Mapping[str, Any],
    rulings: Mapping[str, Any],
    earlier: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    """Figure by figure, this period beside the earlier one."""
    rows = [
        _compared(name, label, unit, (now.get(name), before.get(name)))
        for name, label, unit in COMPARED
    ]
    for currency in sorted({*now["idle_cost"], *before["idle_cost"]}):
        pair = (now["idle_cost"].get(currency), before["idle_cost"].get(currency))
        rows.append(_compared("idle_cost", "Cost of idle hours", currency, pair))
    if rulings["known"] and earlier is not None and earlier["known"]:
        for name, label in (
            ("reclaims", "Jobs ended, cards proven free"),
            ("appeals", "Appeals"),
            ("regrets", "Regrets"),
        ):
            rows.append(_compared(name, label, "count", (rulings[name], earlier[name])))
    return rows


def _compared(name: str, label: str, unit: str, pair: Sequence[float | None]) -> dict[str, Any]:
    now, before = pair
    change = None if now is None or before is None else round(now - before, 4)
    return {
        "figure": name,
        "label": label,
        "unit": unit,
        "now": now,
        "before": before,
        "change": change,
    }


def iso(moment: float) -> str:
    """A moment in UTC, to the second."""
    return dt.datetime.fromtimestamp(moment, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
