"""The report as CSV: one long table, a figure in each row, so that one filter finds each part.

A spreadsheet takes a cell that begins with `=`, `+`, `-` or `@` for a formula. Names are chosen by
users: such cells are written with a leading apostrophe, which spreadsheets show as plain text.
"""

from __future__ import annotations

import csv
import io
import math
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.ruleengine.reports.drawings import WEEKDAYS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

COLUMNS: Final = ("section", "date", "hour", "team", "user", "item", "figure", "value", "unit")
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n")
_UNITS: Final = {
    "coverage": "ratio",
    "utilization": "ratio",
    "p10": "ratio",
    "p50": "ratio",
    "p90": "ratio",
    "jobs_at_once": "count",
    "cards": "count",
    "jobs_per_card": "count",
    "most_jobs_on_a_card": "count",
    "people": "count",
    "hours": "hours",
}

_Row = dict[str, Any]


def table(found: Mapping[str, Any]) -> str:
    """The document as CSV text with a header, lines ended as RFC 4180 has it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\r\n")
    writer.writeheader()
    for row in _rows(found):
        writer.writerow({name: safe(value) for name, value in row.items()})
    return text.getvalue()


def safe(value: object) -> object:
    """A cell that no spreadsheet computes; numbers stay numbers, and what is not known is empty."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if not isinstance(value, str):
        return value
    # Some take what follows spaces or an invisible mark for a formula as well.
    first = value.lstrip(" \u00a0\ufeff\u200b")
    return f"'{value}" if first.startswith(_FORMULA) or value.startswith(_FORMULA) else value


def _rows(found: Mapping[str, Any]) -> Iterator[_Row]:
    for name in ("from", "to", "zone"):
        yield {"section": "period", "figure": name, "value": found["period"][name]}
    yield from _figures({"section": "totals"}, found["totals"])
    for day in found["days"]:
        yield from _figures({"section": "days", "date": day["date"]}, day)
    for weekday, hours in enumerate(found["week"]):
        for hour, value in enumerate(hours):
            yield {
                "section": "week",
                "date": WEEKDAYS[weekday],
                "hour": hour,
                "figure": "utilization",
                "value": value,
                "unit": "ratio",
            }
    yield from _owners(found)
    yield from _rulings(found["rulings"])
    yield from _waiting(found["waiting"])
    for row in found["comparison"]:
        for name in ("now", "before", "change"):
            yield {
                "section": "comparison",
                "item": row["figure"],
                "figure": name,
                "value": row[name],
                "unit": row["unit"],
            }


def _owners(found: Mapping[str, Any]) -> Iterator[_Row]:
    for team in found["teams"]:
        yield from _figures({"section": "teams", "team": team["team"]}, team)
    for person in found["people"]:
        head = {"section": "people", "team": person["team"], "user": person["user"]}
        yield from _figures(head, person)
    for job in found["worst"]["idle_jobs"]:
        head = {
            "section": "idle_jobs",
            "team": job["team"],
            "user": job["user"],
            "item": job["job_id"],
        }
        yield from _figures(head, job)
    for card in found["worst"]["busiest_cards"]:
        yield from _figures({"section": "busiest_cards", "item": card["card"]}, card)


def _waiting(waiting: Mapping[str, Any]) -> Iterator[_Row]:
    if not waiting["known"]:
        return
    yield from _figures({"section": "waiting"}, waiting)
    for team in waiting["teams"]:
        yield from _figures({"section": "waiting", "team": team["team"]}, team)


def _rulings(rulings: Mapping[str, Any]) -> Iterator[_Row]:
    if not rulings["known"]:
        return
    head = {"section": "rulings"}
    for name in ("decisions", "reclaims", "appeals", "regrets"):
        yield {**head, "figure": name, "value": rulings[name], "unit": "count"}
    yield from _figures({**head, "item": "proven"}, rulings["proven"])
    yield from _figures({**head, "item": "estimated"}, rulings["estimated"])
    for row in rulings["outcomes"]:
        item = f"{row['action']} {row['outcome']}"
        yield {**head, "item": item, "figure": "count", "value": row["count"], "unit": "count"}
    for rule in rulings["rules"]:
        yield from _figures({"section": "rules", "item": rule["rule"]}, rule)


def _figures(head: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[_Row]:
    """A row for each number; of money one for each currency."""
    for name, value in values.items():
        if isinstance(value, dict):
            for currency, amount in value.items():
                yield {**head, "figure": name, "value": amount, "unit": currency}
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield {**head, "figure": name, "value": value, "unit": _unit(name)}


def _unit(name: str) -> str:
    if name in _UNITS:
        return _UNITS[name]
    for ending, unit in (
        ("_hours", "card-hours"),
        ("_share", "ratio"),
        ("_seconds", "seconds"),
        ("_seconds_from_detection", "seconds"),
        ("_bytes", "bytes"),
        ("hours_at_most", "card-hours"),
        ("hours_each", "hours"),
    ):
        if name.endswith(ending):
            return unit
    return "count"
