"""The report as one page that stands alone: style and plots inside, no script, nothing to load."""

from __future__ import annotations

import datetime as dt
import functools
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from markupsafe import Markup

from gpuwarden.ruleengine.reports import drawings, wording
from gpuwarden.ruleengine.reports.rendering import FOLDER, environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jinja2 import Environment


def page(found: Mapping[str, Any], *, engine: str = "") -> str:
    """The document as HTML.

    Args:
        found: see `documents`; every text in it is escaped.
        engine: base address of the engine's pages, for links; empty for none.
    """
    pieces, totals = found["timeline"], found["totals"]
    days = [
        {**day, "from": day["date"], "label": f"{date.day} {date:%b}"}
        for day in found["days"]
        for date in (dt.date.fromisoformat(day["date"]),)
    ]
    return (
        _environment()
        .get_template("report.html")
        .render(
            found=found,
            title=title(found),
            when=wording.span(found["period"], bare=True),
            earlier=wording.span(found["earlier"], bare=True) if found["earlier"] else "",
            style=_style(),
            notes={each["id"]: number for number, each in enumerate(found["footnotes"], start=1)},
            weekdays=drawings.WEEKDAYS,
            money=bool(found["totals"]["cost"]),
            most_held=max((team["held_hours"] for team in found["teams"]), default=0.0),
            engine=engine if engine.startswith(("http://", "https://")) else "",
            plots={
                "band": drawings.band(pieces),
                "heat": drawings.heat(found["week"], found["week_hours"]),
                "hours": drawings.columns(
                    "hours",
                    pieces,
                    ("held_hours", "idle_hours"),
                    f"Card-hours over time: {wording.hours(totals['held_hours'])} held, of which "
                    f"{wording.hours(totals['idle_hours'])} idle",
                ),
                "jobs": drawings.columns(
                    "jobs",
                    days,
                    ("jobs_per_card",),
                    "Different jobs per card and day; the table of days has each",
                ),
                "coverage": drawings.shares(
                    "coverage",
                    pieces,
                    "coverage",
                    "Data coverage over time: "
                    f"{wording.percent(totals['coverage'])} of the expected samples",
                ),
            },
        )
    )


def title(found: Mapping[str, Any]) -> str:
    """What the report is called."""
    whose = f"Team {found['team']}" if found["team"] else "GPU fleet"
    return f"{whose}, {wording.span(found['period'], bare=True)}"


@functools.cache
def _environment() -> Environment:
    return environment(
        percent=wording.percent,
        hours=wording.hours,
        cost=lambda amounts: wording.cost(amounts) or "n/a",
        size=wording.size,
        wait=wording.wait,
        number=number,
        unit=unit,
        change=change,
        segment=lambda text: quote(text, safe=""),
    )


@functools.cache
def _style() -> Markup:
    # Ours, and not a user's: the element takes no escapes.
    return Markup((FOLDER / "report.css").read_text(encoding="utf-8"))  # noqa: S704 - see above


def number(value: float | None) -> str:
    """A number of hours in a column."""
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def unit(value: float | None, of: str) -> str:
    """A figure in its unit: ratio, hours, count, or a currency."""
    if value is None:
        return "n/a"
    if of == "ratio":
        return wording.percent(value)
    if of == "hours":
        return f"{number(value)} h"
    return f"{value:,.6g}" if of == "count" else f"{value:,.2f} {of}"


def change(value: float | None, of: str) -> str:
    """By how much a figure differs, with its sign; of shares in points."""
    if value is None:
        return "n/a"
    if of == "ratio":
        return f"{100 * value:+.1f} points"
    if of == "hours":
        return f"{value:+,.1f} h"
    return f"{value:+,.6g}" if of == "count" else f"{value:+,.2f} {of}"
