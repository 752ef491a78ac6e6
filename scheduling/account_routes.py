"""Accounts, calibration, and what trainings took before, over HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from starlette.responses import JSONResponse, Response

from gpuwarden.errors import ServiceUnavailable, TemporaryError
from gpuwarden.periods import Span
from gpuwarden.refusals import Refusal
from gpuwarden.scheduling import expectations
from gpuwarden.scheduling.bodies import known_team
from gpuwarden.scheduling.booking_terms import prices_of
from gpuwarden.scheduling.calibrations import calibrate
from gpuwarden.scheduling.documents import idle_hours
from gpuwarden.scheduling.moments import MomentUnclear, read_moment, show_moment
from gpuwarden.scheduling.predictions import LEAST_RUNS
from gpuwarden.scheduling.usages import By, account, beside, of_jobs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from starlette.requests import Request

    from gpuwarden.scheduling.callers import Caller
    from gpuwarden.scheduling.holdings import Holding
    from gpuwarden.scheduling.prometheus_accounts import PrometheusAccounts
    from gpuwarden.scheduling.schedulers import Scheduler
    from gpuwarden.scheduling.usages import Account, Line
    from gpuwarden.scheduling.workers import Worker

    Handler = Callable[[Request], Awaitable[Response]]

LONGEST_SECONDS = 400 * 86400.0
STALE_SECONDS = 300.0
"""An account that was read longer ago is told to be old."""
ENGINE_SECONDS = 50.0
"""How long the engine's own account is waited for."""
CALIBRATED_SECONDS = 90 * 86400.0
"""Of which foretold ends say whether history can be gone by."""
_ALIKE = ("model", "imgsz", "data", "pacing")


class AccountRoutes:
    """Handlers of accounts.

    Args:
        scheduler: whose store and driver tell.
        worker: the driver's thread.
        accounts: Prometheus' side, or None.
        caller: says who asks.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        accounts: PrometheusAccounts | None,
        caller: Callable[[Request], Caller],
    ) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._accounts = accounts
        self._caller = caller
        self._busy = asyncio.Semaphore(1)

    def routes(self) -> Iterator[tuple[str, str, Handler]]:
        """Method, path and handler of each."""
        yield "GET", "/v1/usage", self._usage
        yield "GET", "/v1/calibration", self._calibration
        yield "GET", "/v1/runs", self._runs

    async def _usage(self, request: Request) -> Response:
        caller = self._caller(request)
        by = _level(request.query_params.get("by", "team"))
        team = request.query_params.get("team", "")
        now = self._scheduler.clock.wall()
        span = Span(self._moment(request, "from", "now-7d"), self._moment(request, "to", "now"))
        if not 0 < span.seconds <= LONGEST_SECONDS:
            raise Refusal(400, "malformed", "to is not after from, by 400 days at most")
        async with self._busy:
            holdings, notes = await asyncio.to_thread(self._holdings, span, caller)
        own = [item for item in holdings if team in ("", item.team)]
        prices = prices_of(self._scheduler.policy)
        if not own:
            known_team(self._scheduler.policy, team)
        found = account(own, span, by, now=now, prices=prices)
        found = replace(found, notes=(*found.notes, *notes))
        if self._accounts is not None:
            found = await self._compared(self._accounts, found, holdings, team)
        booked = await asyncio.to_thread(self._scheduler.store.slots_between, *span)
        idle = idle_hours(booked, span, now=now)
        document = _document(found, self._scheduler.driver.engine)
        document["booked_idle_gpu_hours"] = {
            name: hours for name, hours in sorted(idle.items()) if team in ("", name)
        }
        return JSONResponse(document)

    def _holdings(self, span: Span, caller: Caller) -> tuple[list[Holding], list[str]]:
        """What was read of the engine's account, each minute; of before that, the engine itself.

        Years of accounts take an engine minutes, in which it is not looked at: only operators ask.
        """
        scheduler = self._scheduler
        engine, now = scheduler.driver.engine, scheduler.clock.wall()
        kept = list(scheduler.store.holdings(engine, span.begin, span.end))
        since, notes = scheduler.store.accounts_since(), []
        if scheduler.accounted is None or now - scheduler.accounted > STALE_SECONDS:
            notes.append(f"{engine}'s account cannot be read now: this is as it was last known")
        if since is None or span.begin >= since:
            return kept, notes
        day = show_moment(since, scheduler.policy.zone)
        if not caller.operates:
            return kept, [*notes, f"nothing is kept of before {day}: operators can ask {engine}"]
        try:
            older = self._worker.call(
                lambda: scheduler.driver.usage(span.begin, min(since, span.end)),
                seconds=ENGINE_SECONDS,
            )
        except (TemporaryError, TimeoutError) as error:
            why = str(error) or "it is busy"
            return kept, [*notes, f"{engine} does not tell of before {day}: {why}"]
        return [*older, *kept], notes

    async def _compared(
        self,
        accounts: PrometheusAccounts,
        found: Account,
        holdings: Sequence[Holding],
        team: str,
    ) -> Account:
        jobs = found.by == "job"
        try:
            # Whose an attempt is, the engine says: the nodes' directory may have another team.
            held, covered = await accounts.held(found.span, found.by, "" if jobs else team)
        except ServiceUnavailable as error:
            return replace(found, notes=(*found.notes, f"Prometheus: {error}"))
        if jobs:
            known = await asyncio.to_thread(
                self._scheduler.attempts.jobs_of,
                {key[0] for key in held},
                cluster=self._scheduler.driver.cluster,
            )
            held = of_jobs(held, known, holdings, team=team)
        if not covered:
            note = "Prometheus recorded nothing of this time (alerting/rules/money.yml, retention)"
            return replace(found, notes=(*found.notes, note))
        return beside(found, held, covered=covered)

    async def _calibration(self, request: Request) -> Response:
        self._caller(request)
        since = self._moment(request, "from", "now-90d")
        foresights = self._scheduler.foresights
        settled = await asyncio.to_thread(foresights.settled, since)
        counts = await asyncio.to_thread(foresights.counts, since)
        return JSONResponse(
            {
                "schema": "gpuwarden.calibration/v1",
                "since": since,
                "open": counts.get("open", 0),
                "void": counts.get("void", 0),
                "bins": [
                    {
                        "kind": each.kind,
                        "least": each.least,
                        "most": each.most,
                        "count": each.count,
                        "inside": each.inside,
                        "share": each.share,
                        "low": each.low,
                        "high": each.high,
                        "early": each.early,
                        "late": each.late,
                    }
                    for each in calibrate(settled)
                ],
            }
        )

    async def _runs(self, request: Request) -> Response:
        """What trainings of a model with some data took; whoever asks has to know their names."""
        self._caller(request)
        of = {name: request.query_params.get(name, "") for name in _ALIKE}
        if not (of["model"] and of["data"]):
            raise Refusal(400, "malformed", "say model and data, as the trainings call them")
        foresights, now = self._scheduler.foresights, self._scheduler.clock.wall()
        runs = await asyncio.to_thread(lambda: foresights.runs_of(**of))
        ends, late = await asyncio.to_thread(
            foresights.ends_foretold, now - CALIBRATED_SECONDS, samples=LEAST_RUNS
        )
        return JSONResponse(
            {
                "schema": expectations.SCHEMA,
                "of": of,
                "runs": [
                    {
                        "batch": run.features.batch,
                        "card": run.features.card,
                        "gpus": run.features.gpus,
                        "epochs": run.epochs,
                        "seconds": run.seconds,
                        "ended": run.ended,
                    }
                    for run in runs
                ],
                "ends": {"count": ends, "late": late},
            }
        )

    def _moment(self, request: Request, name: str, default: str) -> float:
        policy, now = self._scheduler.policy, self._scheduler.clock.wall()
        given = request.query_params.get(name, default)
        try:
            return read_moment(given, now=now, zone=policy.zone)
        except MomentUnclear as error:
            raise Refusal(400, "malformed", f"{name}: {error}") from error


def _level(word: str) -> By:
    for level in get_args(By):
        if word == level:
            found: By = level
            return found
    raise Refusal(400, "malformed", f"by is none of {', '.join(get_args(By))}")


def _document(found: Account, engine: str) -> dict[str, Any]:
    return {
        "schema": "gpuwarden.usage/v1",
        "engine": engine,
        "from": found.span.begin,
        "to": found.span.end,
        "by": found.by,
        "lines": [_line(line) for line in found.lines],
        "total": _line(found.total),
        "notes": list(found.notes),
    }


def _line(line: Line) -> dict[str, Any]:
    seen, difference = line.seen_gpu_seconds, line.difference
    return {
        "name": line.name,
        "team": line.team,
        "user": line.user,
        "gpu_hours": line.gpu_seconds / 3600.0,
        "jobs": line.jobs,
        "attempts": line.attempts,
        "cost": {currency: round(amount, 2) for currency, amount in sorted(line.cost.items())},
        "cards": {card or "unknown": n / 3600.0 for card, n in sorted(line.gpu_types.items())},
        "prometheus_gpu_hours": None if seen is None else seen / 3600.0,
        "difference_gpu_hours": None if difference is None else difference / 3600.0,
        "apart": line.apart,
    }
