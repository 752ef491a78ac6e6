"""The report in words: the answer, and what makes it worth less than it looks. Pure."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.ruleengine.reports.expressions import IDLE_SECONDS, RECORDED_WIDTH_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.ruleengine.reports.gatherings import Gathered

GOOD_COVERAGE: Final = 0.95
COVERAGE_SPREAD: Final = 0.02
"""Periods whose coverage differs by more than this are not quite comparable."""


def answer(found: Mapping[str, Any]) -> list[str]:
    """What the fleet did, what was wasted, and what changed: a sentence each."""
    return [_did(found), _wasted(found), _changed(found)]


def _did(found: Mapping[str, Any]) -> str:
    totals, team = found["totals"], found["team"]
    who = "The fleet" if team is None else f"Team {team}"
    when = span(found["period"])
    if not totals["held_hours"]:
        return f"{who} used no card {when}."
    people = plural(totals["people"], "person", "people")
    if team is None:
        share = "" if totals["held_share"] is None else f" ({percent(totals['held_share'])} of all)"
        teams = plural(len(found["teams"]), "team")
        held = f"{people} of {teams} held cards for {hours(totals['held_hours'])}{share}"
    else:
        held = f"{people} held cards for {hours(totals['held_hours'])}"
    busy = totals["utilization"]
    level = "" if busy is None else f"; the cards were busy for {percent(busy)} of the time"
    start = f"{held[0].upper()}{held[1:]}" if team is None else f"{who}: {held}"
    return f"{start} {when}{level}."


def _wasted(found: Mapping[str, Any]) -> str:
    totals = found["totals"]
    if not totals["idle_hours"]:
        # A short report would else deny what a rule with a shorter window has ended.
        parts = [f"Nothing was held idle for {IDLE_SECONDS / 60:.0f} minutes on end"]
    else:
        share = totals["idle_share"]
        money = cost(totals["idle_cost"])
        parts = [
            f"{hours(totals['idle_hours'])} were held idle"
            + ("" if share is None else f", {percent(share)} of what was held")
            + (f" ({money})" if money else "")
        ]
    rulings = found["rulings"]
    if rulings["known"]:
        reclaims = rulings["reclaims"]
        if reclaims:
            freed = size(rulings["proven"]["memory_bytes"])
            jobs = plural(reclaims, "job")
            ends = f"{jobs} {'was' if reclaims == 1 else 'were'} ended and gave {freed} back"
            objected = rulings["appeals"] + rulings["regrets"]
            ends += f", with {plural(objected, 'objection')}" if objected else ", with no objection"
        else:
            ends = "no job was ended"
        parts.append(ends)
    return "; ".join(parts) + "."


def _changed(found: Mapping[str, Any]) -> str:
    rows = {row["figure"]: row for row in found["comparison"]}
    if found["not_compared"]:
        return "It cannot be compared with the time before, of which nothing is known."
    if not rows:
        return "Not compared with an earlier time: --compare previous does."
    parts = []
    for name, word in (("utilization", "utilisation"), ("idle_share", "the idle share")):
        row = rows[name]
        if row["change"] is None:
            parts.append(f"{word} cannot be compared")
        else:
            parts.append(f"{word} {_moved(row)}")
    held = rows["held_hours"]
    if held["change"]:
        word = "rose" if held["change"] > 0 else "fell"
        parts.append(f"what was held {word} from {hours(held['before'])} to {hours(held['now'])}")
    else:
        parts.append(f"what was held stayed at {hours(held['now'])}")
    return f"Against {span(found['earlier'], bare=True)}: {'; '.join(parts)}."


def _moved(row: Mapping[str, Any]) -> str:
    now, before = percent(row["now"]), percent(row["before"])
    if now == before:
        return f"stayed at {now}"
    return f"{'rose' if row['change'] > 0 else 'fell'} from {before} to {now}"


def cautions(found: Mapping[str, Any], gathered: Gathered, earlier: Gathered | None) -> list[str]:
    """What makes the figures worth less than they look, and what to do about it."""
    said = []
    if found["not_compared"]:
        said.append(f"Nothing to compare with: {found['not_compared']}")
    coverage = found["totals"]["coverage"]
    if coverage is not None and coverage < GOOD_COVERAGE:
        dark = [day["date"] for day in found["days"] if (day["coverage"] or 0) < GOOD_COVERAGE]
        said.append(
            f"Only {percent(coverage)} of the expected samples are there; figures are about the "
            f"covered time alone. Gaps on {listed(dark)}."
        )
    if earlier is not None:
        said += _against(found, gathered, earlier)
    sampled = [
        row["measure"]
        for row in found["sources"]
        if row["measure"] in ("held", "idle") and "sampled" in row["source"]
    ]
    if sampled and gathered.period.bin >= RECORDED_WIDTH_SECONDS:
        said.append(
            "Hours are sampled from the nodes' own series, since the recording rules of "
            "alerting/rules had not written them for the whole time."
        )
    if len(gathered.sizes.scrapes) > 1:
        each = " and ".join(wait(seconds) for seconds in gathered.sizes.scrapes)
        said.append(
            f"Nodes were scraped every {each} within the period: small gaps may not be seen."
        )
    rulings = found["rulings"]
    if rulings["known"] and (rulings["whole_from"] or 0) > gathered.period.begin:
        said.append(
            "The ledger has forgotten closed cases of the beginning of the period "
            "(retention.audit in engine.yaml): decisions are counted from "
            f"{day_of(rulings['whole_from'])} on."
        )
    unattributed = found["totals"]["card_hours"]
    if found["team"] is None and found["totals"]["held_hours"] > unattributed * 1.01 + 0.01:
        said.append(
            "More hours were held than cards answered: some node told of its jobs and not of its "
            "cards. See the exporter's gpuwarden_collector_success."
        )
    return said


def _against(found: Mapping[str, Any], gathered: Gathered, earlier: Gathered) -> list[str]:
    said = []
    row = next(row for row in found["comparison"] if row["figure"] == "coverage")
    if row["change"] is None or abs(row["change"]) > COVERAGE_SPREAD:
        said.append(
            f"The compared periods are not covered alike ({percent(row['before'])} before, "
            f"{percent(row['now'])} now): compare shares, not hours."
        )
    if abs(earlier.period.seconds - gathered.period.seconds) > 1:
        said.append(
            "The compared periods are not of the same length "
            f"({hours(earlier.period.seconds / 3600)} before, "
            f"{hours(gathered.period.seconds / 3600)} now): compare shares, not hours."
        )
    before = {row.source for name, row in earlier.rows.items() if name == "held"}
    now = {row.source for name, row in gathered.rows.items() if name == "held"}
    if before != now:
        said.append(
            "Hours were recorded in one of the periods and sampled in the other: small "
            "differences mean nothing."
        )
    return said


# -- words


def span(period: Mapping[str, Any], *, bare: bool = False) -> str:
    """Such as `from 23 to 29 November 2026`; short ones with their times."""
    begin, end = (dt.datetime.fromisoformat(period[name]) for name in ("from", "to"))
    if begin.time() == end.time() == dt.time():
        last = end - dt.timedelta(seconds=1)
        if begin.date() == last.date():
            return f"{'' if bare else 'on '}{begin.day} {begin:%B %Y}"
        first = f"{begin.day}"
        if (begin.month, begin.year) != (last.month, last.year):
            first += f" {begin:%B}" if begin.year == last.year else f" {begin:%B %Y}"
        return f"{'' if bare else 'from '}{first} to {last.day} {last:%B %Y}"
    same = begin.date() == end.date()
    until = f"{end:%H:%M}" if same else f"{end.day} {end:%B %Y, %H:%M}"
    return f"{'' if bare else 'from '}{begin.day} {begin:%B %Y, %H:%M} to {until}"


def day_of(moment: float) -> str:
    """A day in UTC."""
    return dt.datetime.fromtimestamp(moment, dt.UTC).date().isoformat()


def percent(ratio: float | None) -> str:
    """Whole percents; below ten with one digit; `n/a` where it is not known."""
    if ratio is None:
        return "n/a"
    value = 100 * ratio
    return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.1f} %"


def hours(value: float | None) -> str:
    """Hours of cards for people."""
    if value is None:
        return "n/a"
    if 0 < value < 0.995:
        return f"{value * 60:.0f} card-minutes" if value * 60 >= 1 else "under a card-minute"
    return f"{value:,.0f} card-hours" if value >= 99.5 else f"{value:.1f} card-hours"


def cost(amounts: Mapping[str, float]) -> str:
    """Amounts, each with its currency, or an empty string."""
    return ", ".join(f"{amount:,.2f} {currency}" for currency, amount in sorted(amounts.items()))


def size(number: float) -> str:
    """Bytes in binary units."""
    for unit, size_of in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if number >= size_of:
            return f"{number / size_of:,.1f} {unit}"
    return f"{number:.0f} B"


def wait(seconds: float | None) -> str:
    """A length of time for people."""
    if seconds is None:
        return "n/a"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


def plural(count: int, one: str, many: str = "") -> str:
    """A number with its noun."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def listed(words: Sequence[str], most: int = 5) -> str:
    """Some words, and how many more there are."""
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more} more" if more > 0 else "")
