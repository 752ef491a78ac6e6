"""The agent's HTTP API, and the life of its process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gpuwarden import agent_api
from gpuwarden.agent_api import Action, NodeInfo
from gpuwarden.clock import SystemClock
from gpuwarden.errors import InvalidInput, RefusedAction, TemporaryError
from gpuwarden.exporter.agent.actions import Actions
from gpuwarden.exporter.agent.authorisations import Authoriser, Rejected
from gpuwarden.exporter.agent.command_lines import Reader
from gpuwarden.exporter.agent.guards import Guards
from gpuwarden.exporter.agent.handles import Wake
from gpuwarden.exporter.agent.journal import Journal, JournalError
from gpuwarden.exporter.agent.keys import KeyRing
from gpuwarden.exporter.agent.ladder import Ladder, take_hold
from gpuwarden.exporter.agent.proofs import BoundedDevices
from gpuwarden.exporter.agent.requests import LeaveRequests
from gpuwarden.exporter.agent.targets import Resolver
from gpuwarden.exporter.job_servers import JobServers
from gpuwarden.exporter.nvml import RELEASED, open_gpus
from gpuwarden.exporter.processes import Launchers, boot_id
from gpuwarden.exporter.releases import ReleaseWatch, restart
from gpuwarden.exporter.servers import (
    Bounded,
    QuietServer,
    end_by_signal,
    listening,
    raise_open_files,
)
from gpuwarden.exporter.supervision import Supervision

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request

    from gpuwarden.agent_api import ActionRequest
    from gpuwarden.exporter.agent.settings import AgentSettings

BODY_SECONDS = 10.0
SWEEP_SECONDS = 30.0
REQUESTS = 256

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Api:
    """The agent's endpoints.

    Attributes:
        actions: what is done.
        authoriser: who may ask for it.
        reader: reads command lines.
    """

    actions: Actions
    authoriser: Authoriser
    reader: Reader

    def application(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/node", self.node, methods=["GET"]),
                Route("/v1/actions", self.submit, methods=["POST"]),
                Route("/v1/arguments", self.arguments, methods=["POST"]),
                Route("/v1/actions/{decision_id}", self.report, methods=["GET"]),
                Route("/-/healthy", self.healthy, methods=["GET"]),
                Route("/-/ready", self.ready, methods=["GET"]),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            sweeper.cancel()
            await asyncio.gather(sweeper, return_exceptions=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await run_in_threadpool(self.actions.sweep)
            except OSError as error:
                _log.warning("leave requests not swept", error=str(error))

    async def node(self, _request: Request) -> Response:
        """Which node and boot this is, and which keys it accepts."""
        key_ids = await run_in_threadpool(lambda: self.authoriser.keys.key_ids)
        info = NodeInfo(self.authoriser.node, self.authoriser.boot_id, key_ids)
        return _json(200, info.encode())

    async def submit(self, request: Request) -> Response:
        """Take an action on."""
        return await self._answer(request, 202, self._submit)

    async def arguments(self, request: Request) -> Response:
        """The command lines of a job, without secrets."""
        return await self._answer(request, 200, self._arguments)

    def _submit(self, asked: ActionRequest) -> bytes:
        if asked.action is Action.ARGUMENTS:
            raise Rejected(400, "malformed", "command lines are asked for at POST /v1/arguments")
        return self.actions.submit(asked).encode()

    def _arguments(self, asked: ActionRequest) -> bytes:
        if asked.action is not Action.ARGUMENTS:
            raise Rejected(400, "malformed", f"{asked.action} is asked for at POST /v1/actions")
        self.actions.note_reading(asked)
        try:
            return self.reader.read(asked).encode()
        except RefusedAction as error:
            raise Rejected(404, error.reason, str(error)) from error

    async def _answer(
        self, request: Request, status: int, work: Callable[[ActionRequest], bytes]
    ) -> Response:
        """Read a signed request and do what it asks for."""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _body(request)
            signature = request.headers.get(agent_api.SIGNATURE_HEADER)
            asked = await run_in_threadpool(self.authoriser.read, body, signature)
            return _json(status, await run_in_threadpool(work, asked))
        except TimeoutError:
            return _error(408, "timeout", f"the body took longer than {BODY_SECONDS:g} s")
        except Rejected as error:
            _log.warning(
                "rejected",
                error=error.error,
                message=str(error),
                client=request.client.host if request.client is not None else "",
            )
            return _error(error.status, error.error, str(error))

    async def report(self, request: Request) -> Response:
        """What became of an action."""
        decision_id = request.path_params["decision_id"]
        report = await run_in_threadpool(self.actions.find, decision_id)
        if report is None:
            return _error(404, "unknown_action", "this agent never took that decision on")
        return _json(200, report.encode())

    async def healthy(self, _request: Request) -> Response:
        """Whether the process serves at all."""
        return PlainTextResponse("gpuwarden agent is healthy\n")

    async def ready(self, _request: Request) -> Response:
        """Whether the agent could act if it were told to."""
        if not await run_in_threadpool(lambda: self.authoriser.keys.key_ids):
            return PlainTextResponse("no public key of an engine can be used\n", 503)
        try:
            await run_in_threadpool(self.actions.check_journal)
        except JournalError as error:
            return PlainTextResponse(f"{error}\n", 503)
        if self.actions.released:
            return PlainTextResponse(f"released: {RELEASED}\n", 503)
        return PlainTextResponse("gpuwarden agent is ready\n")


async def _body(request: Request) -> bytes:
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > agent_api.MAX_BODY_BYTES:
            raise Rejected(
                413, "too_large", f"the body is larger than {agent_api.MAX_BODY_BYTES} bytes"
            )
    return bytes(content)


def _json(status: int, content: bytes) -> Response:
    return Response(content, status, media_type="application/json")


def _error(status: int, error: str, message: str) -> Response:
    return _json(status, json.dumps({"error": error, "message": message}).encode())


def run(settings: AgentSettings) -> None:
    """Run an agent until SIGTERM or SIGINT.

    Raises:
        GpuwardenError: it cannot start; the message says what to do.
    """
    raise_open_files()
    journal = Journal(settings.journal)
    try:
        # Before anything that may be in the way of a start: what a crash left stopped goes on.
        for record in journal.unfinished():
            take_hold(record).close()
        _act(settings, journal)
    finally:
        journal.close()


def _act(settings: AgentSettings, journal: Journal) -> None:
    clock, wake = SystemClock(), Wake()
    keys = KeyRing(settings.keys)
    try:
        requests = LeaveRequests(settings.jobs, clock)
    except OSError as error:
        raise InvalidInput(
            f"--jobs.directory {settings.jobs} cannot be used: {error.strerror}"
        ) from error
    driver = open_gpus(settings.gpus)
    # In doubt a process starts jobs: then it is not ended together with them.
    servers = JobServers(unknown=True)
    resolver = Resolver(
        guards=Guards(protect=settings.protect, kill_switch=settings.kill_switch),
        launchers=Launchers.with_extra(settings.launchers, servers.includes),
        devices=BoundedDevices(driver),
        host_pids=settings.gpus != "nvml",
    )
    ladder = Ladder(resolver, requests, clock, wake, proof_timeout=settings.proof_timeout)
    authoriser = Authoriser(keys, settings.node, boot_id(), clock)
    actions = Actions(
        journal,
        ladder,
        terminates_per_hour=settings.terminates_per_hour,
        restart_cooldown=settings.restart_cooldown,
        released=lambda: driver.released,
        admit=authoriser.admit,
    )
    # A restart in the middle of a ladder is what the journal is for.
    watch = ReleaseWatch(settings.release_file, driver, restart=restart)
    supervision = Supervision()
    api = Api(actions, authoriser, Reader(resolver.launchers))
    program = _server(api, settings, supervision=supervision)
    try:
        with listening(settings.host, settings.port) as server:
            end_by_signal(program)
            watch.start()
            actions.recover()
            program.run(sockets=[server])
    except TemporaryError as error:
        raise InvalidInput(f"{error}. Is another agent running?") from error
    finally:
        supervision.stopping()
        watch.stop()
        actions.close()
        driver.close()


def _server(api: Api, settings: AgentSettings, *, supervision: Supervision) -> QuietServer:
    config = uvicorn.Config(
        Bounded(api.application(), REQUESTS),
        http="h11",
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        callback_notify=supervision.alive,
        timeout_notify=max(1, int(supervision.interval)),
        timeout_keep_alive=5,
        timeout_graceful_shutdown=2,
    )
    try:
        config.load()
    except OSError as error:
        raise InvalidInput(f"the TLS certificate or its key cannot be used: {error}") from error
    return QuietServer(config)
