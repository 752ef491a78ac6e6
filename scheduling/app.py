"""The scheduler's HTTP interface: the schedule for everybody's eyes, bookings and commands.

The same routes answer on the unix socket, where the kernel says who asks, and on the network, where
a token does. What blocks (the store, the engine) runs in threads, never in the loop.
"""

from __future__ import annotations

import asyncio
import sqlite3
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gpuwarden.errors import InvalidInput, RefusedAction, TemporaryError
from gpuwarden.refusals import Refusal, refused
from gpuwarden.scheduling.account_routes import AccountRoutes
from gpuwarden.scheduling.booking_routes import BookingRoutes
from gpuwarden.scheduling.callers import Caller, Role, local_caller
from gpuwarden.scheduling.job_routes import JobRoutes
from gpuwarden.scheduling.metrics import SchedulerCollector
from gpuwarden.scheduling.policies import policy_hash
from gpuwarden.scheduling.policy_texts import as_written
from gpuwarden.scheduling.tokens import bearer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.requests import Request

    from gpuwarden.schedule_api import ScheduleDocument
    from gpuwarden.scheduling.booking_desks import BookingDesk
    from gpuwarden.scheduling.feeds import Feeds
    from gpuwarden.scheduling.prometheus_accounts import PrometheusAccounts
    from gpuwarden.scheduling.schedulers import Scheduler
    from gpuwarden.scheduling.tokens import Token
    from gpuwarden.scheduling.workers import Worker

READY_SECONDS = 120.0
"""A daemon whose last tick is older than this is not ready."""
_STATUSES = {
    "unknown": 404,
    "reader": 403,
    "others": 403,
    "team": 403,
    "closed": 403,
    "no_queue": 409,
}


class SchedulerApp:
    """The routes.

    Args:
        scheduler: read by all of them.
        desk: takes bookings.
        worker: the driver's thread.
        tokens: of those who ask over the network.
        open_reading: whether anybody who reaches the network address may look: only on the
            loopback, and only where there are no tokens.
        feeds: signs the calendar's addresses.
        accounts: Prometheus' side of accounts, or None.

    Attributes:
        tokens: likewise; another tuple takes its place.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        desk: BookingDesk,
        worker: Worker,
        *,
        tokens: Sequence[Token],
        open_reading: bool,
        feeds: Feeds,
        accounts: PrometheusAccounts | None,
    ) -> None:
        self._scheduler = scheduler
        self.tokens = tokens
        self._open = open_reading
        self._feeds = feeds
        self._encoding = asyncio.Lock()
        self._encoded: tuple[ScheduleDocument | None, bytes] = (None, b"")
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(SchedulerCollector(scheduler))
        self._bookings = BookingRoutes(scheduler, desk, feeds, self.caller)
        self._jobs = JobRoutes(scheduler, worker, self.caller)
        self._accounts = AccountRoutes(scheduler, worker, accounts, self.caller)

    def starlette(self) -> Starlette:
        """The application."""
        return Starlette(
            routes=[
                Route("/v1/schedule", _plain(self._schedule)),
                Route("/v1/whoami", _plain(self._whoami)),
                Route("/v1/policy", _plain(self._policy)),
                Route("/metrics", self._metrics),
                Route("/-/healthy", _healthy),
                Route("/-/ready", self._ready),
                *(
                    Route(path, _plain(handler), methods=[method])
                    for method, path, handler in (
                        *self._bookings.routes(),
                        *self._jobs.routes(),
                        *self._accounts.routes(),
                    )
                ),
            ],
            exception_handlers={Refusal: refused, HTTPException: _no_such},
        )

    def caller(self, request: Request) -> Caller:
        """Who asks.

        Raises:
            Refusal: nobody who may.
        """
        peer = request.scope.get("gpuwarden.peer")
        if peer is not None:
            return local_caller(peer, self._scheduler.policy)
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer":
            found = bearer(self.tokens, given.strip())
            if found is None:
                raise Refusal(401, "unauthorised", "this token is nobody's")
            return found
        if self._open:
            return Caller("anybody", Role.READER)
        if not self.tokens:
            raise Refusal(403, "closed", "closed on the network until --tokens names who may ask")
        raise Refusal(401, "unauthorised", "this takes a bearer token of --tokens")

    async def _schedule(self, request: Request) -> Response:
        self.caller(request)
        # Encoded once for each tick, however many watch: ten thousand rows take half a second.
        async with self._encoding:
            document, body = self._encoded
            if document is not self._scheduler.document:
                document = self._scheduler.document
                body = await asyncio.to_thread(document.encode)
                self._encoded = (document, body)
        return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})

    async def _whoami(self, request: Request) -> Response:
        caller = self.caller(request)
        policy = self._scheduler.policy
        return JSONResponse(
            {
                "name": caller.name,
                "role": caller.role,
                "teams": [team.name for team in policy.teams_of(caller.name)],
                "engine": self._scheduler.driver.engine,
                "timezone": policy.timezone,
            }
        )

    async def _policy(self, request: Request) -> Response:
        """The policy in force, as people write it; the file may have another by now."""
        self.caller(request)
        policy = self._scheduler.policy
        return JSONResponse(
            {
                "schema": "gpuwarden.scheduler-policy/v1",
                "hash": policy_hash(policy),
                "problem": self._scheduler.reload_problem,
                "policy": as_written(policy),
            },
            headers={"Cache-Control": "no-store"},
        )

    async def _metrics(self, _request: Request) -> Response:
        text = await asyncio.to_thread(generate_latest, self._registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _ready(self, _request: Request) -> Response:
        now, ticked = self._scheduler.clock.wall(), self._scheduler.ticked
        if ticked is None:
            return PlainTextResponse("no tick yet\n", status_code=503)
        if now - ticked > READY_SECONDS:
            return PlainTextResponse(f"the last tick was {now - ticked:.0f} s ago\n", 503)
        if self._scheduler.seen is None:
            return PlainTextResponse("the engine was not seen yet\n", status_code=503)
        return PlainTextResponse("ready\n")


async def _no_such(_request: Request, error: Exception) -> Response:
    """The answer where nothing is: as every other refusal, so that clients can read it."""
    if not isinstance(error, HTTPException):
        raise error
    words = (
        "there is nothing at this path: a newer gpuwarden may have it, or a name in it is none"
        if error.status_code == 404
        else error.detail
    )
    code = "unknown" if error.status_code == 404 else "method"
    return JSONResponse(
        {"error": code, "message": words}, status_code=error.status_code, headers=error.headers
    )


async def _healthy(_request: Request) -> Response:
    return PlainTextResponse("healthy\n")


def _plain(
    handler: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """A handler whose refusals are answers."""

    async def answered(request: Request) -> Response:
        try:
            return await handler(request)
        except RefusedAction as error:
            raise Refusal(_STATUSES.get(error.reason, 409), error.reason, str(error)) from error
        except InvalidInput as error:
            raise Refusal(400, "malformed", str(error)) from error
        except (TemporaryError, TimeoutError) as error:
            why = str(error) or "the engine is busy: try again"
            raise Refusal(503, "unavailable", why) from error
        except sqlite3.OperationalError as error:
            # A full disk, or another program that holds the file.
            why = f"the scheduler's file cannot be used now: {error}"
            raise Refusal(503, "unavailable", why) from error

    return answered
