"""What statements rest on: the series of alerting/rules/money.yml, and the ledger's counted losses.

Each five minutes of them were written at their end and a quarter of a minute; a question is asked
so much later that a price is put to the middle of what it is for.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine.costs import Costs, Extra, Use, spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gpuwarden.periods import Span
    from gpuwarden.ruleengine.prices import Prices
    from gpuwarden.ruleengine.prometheus import Sample, Source

LONGEST_SECONDS = 400 * 86400.0
"""A statement's time; more is a mistake, and would be asked for in thousands of questions."""
RECORDED_SECONDS = 300.0
"""Between two samples of the series."""
_LAG_SECONDS = 165.0
"""From the middle of five minutes to the sample that tells of them."""
_OWN = ("job_id", "user", "team", "project", "model")


async def measured(
    source: Source,
    prices: Prices | None,
    span: Span,
    *,
    team: str = "",
    ledger: Path | None = None,
    shards: int = 1,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Costs:
    """Everything that was measured in a time.

    Args:
        source: Prometheus, or what speaks like it, with the series of money.yml.
        prices: of engine.yaml, or None.
        span: the time; its edges are off by up to 5 minutes.
        team: if given, of this team only.
        ledger: from which losses of jobs are read, or None: they are not known then.
        shards: how many servers' rows the source joins; each scrapes other nodes.
        progress: told how many of how many parts are done.

    Raises:
        ServiceUnavailable: no answer, no whole one, or none of the series is there.
        QueryRefused: the server refuses a query.
    """
    found = Costs(span, prices)
    chosen = f"{{team={_quoted(team)}}}" if team else ""
    parts = spans(prices, span)
    for number, part in enumerate(parts):
        found.add(part, await _uses(source, part, chosen))
        progress(number + 1, len(parts) + 1)
    found.ran_before = await _holders(source, span.begin, chosen)
    found.runs_on = await _holders(source, span.end, chosen)
    found.covered = await _covered(source, span) / shards
    if not found.covered:
        raise ServiceUnavailable(
            "nothing is recorded of this time: load alerting/rules/money.yml into Prometheus, and "
            "see that its retention reaches back so far"
        )
    jobs = () if ledger is None else _ledger_losses(ledger, span)
    found.lost = [*await _lost(source, span, chosen), *jobs]
    found.jobs_known = ledger is not None
    found.reclaimed = await _reclaimed(source, span, chosen)
    found.notes = tuple(_notes(found))
    progress(len(parts) + 1, len(parts) + 1)
    return found


async def _uses(source: Source, part: Span, chosen: str) -> list[Use]:
    held, share, idle = [
        {_place(row): row for row in await _total(source, f"holder:{name}:sum5m{chosen}", part)}
        for name in ("held_hours", "gpu_hours", "gpu_held_idle_hours")
    ]
    found = []
    for place, row in share.items():
        labels = {name: row.labels.get(name, "") for name in _OWN}
        hours = held[place].value if place in held else row.value
        idle_hours = idle[place].value if place in idle else 0.0
        found.append(
            Use(
                labels,
                (row.labels.get("instance", ""), row.labels.get("uuid", "")),
                labels["model"],
                held=3600 * hours,
                gpu_seconds=3600 * row.value,
                idle_gpu_seconds=3600 * idle_hours,
            )
        )
    return found


def _place(row: Sample) -> tuple[str, ...]:
    return tuple(row.labels.get(name, "") for name in ("instance", "uuid", *_OWN))


async def _total(source: Source, series: str, span: Span, by: str = "") -> list[Sample]:
    """What fell into a time, of recorded series; (begin, end], so that parts add up."""
    length = round(1000 * span.seconds) - 1
    query = f"sum_over_time({series}[{max(1, length)}ms])"
    return await source.instant(
        f"sum by ({by}) ({query})" if by else query, span.end + _LAG_SECONDS
    )


async def _holders(source: Source, at: float, chosen: str) -> frozenset[str]:
    rows = await source.instant(f"count by (job_id) (holder:gpus:share{chosen})", at)
    return frozenset(row.labels.get("job_id", "") for row in rows)


async def _covered(source: Source, span: Span) -> float:
    """Share of the time of which anything was recorded, added up over shards."""
    length = max(1, round(1000 * span.seconds) - 1)
    query = f"count_over_time(fleet:gpus_seen:count5m[{length}ms])"
    rows = await source.instant(query, span.end + _LAG_SECONDS)
    samples = max(span.seconds, RECORDED_SECONDS) / RECORDED_SECONDS
    return sum(min(1.0, row.value / samples) for row in rows)


async def _lost(source: Source, span: Span, chosen: str) -> list[Extra]:
    hours = await _total(source, f"user:lost_gpu_hours:increase5m{chosen}", span, "user, team")
    money = await _total(source, f"user:lost_cost:increase5m{chosen}", span, "user, team, currency")
    found = [_extra(row, "user", "team", seconds=3600 * row.value) for row in hours if row.value]
    for row in money:
        if row.value:
            labels = {name: row.labels.get(name, "") for name in ("user", "team")}
            found.append(Extra(labels, 0.0, {row.labels.get("currency", ""): row.value}))
    return found


async def _reclaimed(source: Source, span: Span, chosen: str) -> list[Extra]:
    by = "job_id, user, team"
    rows = await _total(source, f"job:reclaimed_gpu_hours:increase5m{chosen}", span, by)
    # The engine counts it, and every shard scrapes the engine.
    most: dict[tuple[str, ...], Sample] = {}
    for row in rows:
        place = tuple(row.labels.get(name, "") for name in ("job_id", "user", "team"))
        if place not in most or row.value > most[place].value:
            most[place] = row
    return [
        _extra(row, "job_id", "user", "team", seconds=3600 * row.value) for row in most.values()
    ]


def _extra(row: Sample, *names: str, seconds: float) -> Extra:
    return Extra({name: row.labels.get(name, "") for name in names}, seconds)


def _ledger_losses(path: Path, span: Span) -> list[Extra]:
    """What ends of jobs have cost, as their nodes counted it.

    Raises:
        ServiceUnavailable: the ledger cannot be read.
    """
    query = (
        "SELECT d.job_id, sum(l.gpu_seconds) FROM losses l "
        "JOIN decisions d ON d.id = l.decision_id "
        "WHERE d.finished_at >= ? AND d.finished_at < ? AND l.gpu_seconds IS NOT NULL "
        "GROUP BY d.job_id"
    )
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
            rows = db.execute(query, (span.begin, span.end)).fetchall()
    except sqlite3.Error as error:
        raise ServiceUnavailable(f"the ledger {path} cannot be read: {error}") from error
    return [Extra({"job_id": job}, seconds) for job, seconds in rows]


def _notes(found: Costs) -> Iterator[str]:
    if found.covered is not None and found.covered < 0.995:
        yield (
            f"{100 * found.covered:.1f} % of the time was recorded; what was not counts as no use"
        )
    if found.prices is None:
        yield "engine.yaml names no prices: nothing has a cost"
    if not found.jobs_known:
        yield "lost work of single jobs is in the engine's ledger, which was not read"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
