"""`gpuwarden scheduler` at work: its servers, its ticks, reload and an orderly end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import socket
import stat
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import structlog
import uvicorn

from gpuwarden.clock import SystemClock
from gpuwarden.connections import BoundedProtocol
from gpuwarden.errors import GpuwardenError, InvalidInput, ServiceUnavailable
from gpuwarden.scheduling.app import SchedulerApp
from gpuwarden.scheduling.booking_desks import BookingDesk
from gpuwarden.scheduling.callers import Peer, peer_of
from gpuwarden.scheduling.drivers import Context, open_driver
from gpuwarden.scheduling.feeds import Feeds
from gpuwarden.scheduling.policy_checks import load_policy
from gpuwarden.scheduling.prometheus_accounts import PrometheusAccounts
from gpuwarden.scheduling.schedulers import Scheduler
from gpuwarden.scheduling.stores import Store
from gpuwarden.scheduling.tokens import load_tokens
from gpuwarden.scheduling.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gpuwarden.clock import Clock
    from gpuwarden.scheduling.drivers import Driver
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.tokens import Token

    Opening = Callable[[str, Policy, Context], Driver]

STOP_SECONDS = 30.0
"""In which a tick that has begun must end when the daemon stops."""

THREADS = 16
"""In which requests wait; bookings, jobs and accounts take five of them at most."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says.

    Attributes:
        policy: file of the policy.
        state: folder of the daemon.
        listen: host and port on the network, or None: nowhere.
        socket: path of the unix socket.
        tokens: file that says who may ask over the network, or None.
        tick_seconds: between two ticks.
        engine_url: of the rule engine, which asks trainers to leave; or None.
        engine_token: file with the token for it, or None.
        prometheus: address of the server whose account is shown beside, or None.
        tls_cert: file, or None.
        tls_key: file, or None.
    """

    policy: Path
    state: Path
    listen: tuple[str, int] | None
    socket: Path
    tokens: Path | None = None
    tick_seconds: float = 5.0
    engine_url: str | None = None
    engine_token: Path | None = None
    prometheus: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None


class Daemon:
    """The scheduler with everything around it.

    Args:
        settings: of the command line.
        clock: the machine's by default.
        opening: makes the driver; that of the policy's engine by default.

    Attributes:
        scheduler: what it knows.
        worker: the driver's thread.
        app: its HTTP interface.

    Raises:
        InvalidInput: a file that it needs is missing or wrong.
        StoreUnusable: its folder cannot be used, or another daemon has it.
    """

    def __init__(
        self, settings: Settings, *, clock: Clock | None = None, opening: Opening = open_driver
    ) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()
        self._asked = asyncio.Event()
        policy = self._read_policy()
        tokens = self._read_tokens()
        _make_folder(settings.state)
        self.worker = Worker()
        store = Store(settings.state)
        try:
            driver = opening(policy.engine, policy, self._context(policy))
            self.scheduler = Scheduler(policy, driver, store, self._clock)
            self._web = SchedulerApp(
                self.scheduler,
                BookingDesk(self.scheduler, self.worker.call),
                self.worker,
                tokens=tokens,
                open_reading=settings.listen is not None
                and not tokens
                and _is_loopback(settings.listen[0]),
                feeds=Feeds(settings.state / "calendar.key"),
                accounts=PrometheusAccounts(settings.prometheus) if settings.prometheus else None,
            )
            self.app = self._web.starlette()
        except BaseException:
            store.close()
            self.worker.close()
            raise

    def _context(self, policy: Policy) -> Context:
        # Programs that a driver starts may have another folder of their own to stand in.
        folder = self._settings.state.absolute() / policy.engine
        _make_folder(folder)
        return Context(
            folder,
            self._clock,
            self.wake,
            self._settings.engine_url,
            self._settings.engine_token,
            self._settings.prometheus,
        )

    def _read_tokens(self) -> tuple[Token, ...]:
        return () if self._settings.tokens is None else load_tokens(self._settings.tokens)

    def _read_policy(self) -> Policy:
        return load_policy(self._settings.policy, now=self._clock.wall())

    def wake(self) -> None:
        """Ask for a tick at once; from any thread."""
        self._signal(self._woken)

    def stop(self) -> None:
        """Ask for an orderly end, as SIGTERM does; from any thread."""
        self._signal(self._asked)

    def _signal(self, event: asyncio.Event) -> None:
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                loop.call_soon_threadsafe(event.set)

    async def run(self) -> None:
        """Serve and tick until SIGTERM or SIGINT; SIGHUP reads the policy again.

        Raises:
            ServiceUnavailable: an address to listen on cannot be had.
        """
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(
            concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="web")
        )
        if threading.current_thread() is threading.main_thread():  # no other can have them
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._asked.set)
            self._loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        settings, scheduler = self._settings, self.scheduler
        peers = _listen_unix(settings.socket)
        try:
            servers = [self._server(_PeerProtocol)]
            serving = [
                asyncio.create_task(servers[0].serve(sockets=[peers]), name="socket"),
            ]
            if settings.listen is not None:
                servers.append(self._server(BoundedProtocol, settings.listen))
                serving.append(asyncio.create_task(_serve(servers[1], settings.listen), name="web"))
            log.info(
                "scheduler starts",
                engine=scheduler.driver.engine,
                cluster=scheduler.driver.cluster,
                socket=str(settings.socket),
                listen=settings.listen,
            )
            ticking = asyncio.create_task(self._tick_for_ever(), name="ticks")
            asked = asyncio.create_task(self._asked.wait(), name="signals")
            try:
                done, _ = await asyncio.wait(
                    (ticking, asked, *serving), return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                for server in servers:
                    server.should_exit = True
                ticking.cancel()
                asked.cancel()
                await asyncio.gather(ticking, asked, *serving, return_exceptions=True)
            for task in done - {asked}:
                # A loop that died of an error of ours must not look like an orderly end.
                task.result()
        finally:
            self._loop = None
            peers.close()
            settings.socket.unlink(missing_ok=True)
            await asyncio.to_thread(self._close)
        log.info("scheduler leaves")

    def _close(self) -> None:
        try:
            self.worker.call(self.scheduler.driver.stop, seconds=STOP_SECONDS)
        except TimeoutError:
            log.warning("the engine is still busy: left as it is")
        finally:
            self.worker.close()
            self.scheduler.store.close()

    async def _tick_for_ever(self) -> None:
        while True:
            self._woken.clear()
            await asyncio.wrap_future(self.worker.begin(self.scheduler.tick))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), self._settings.tick_seconds)

    def _hang_up(self) -> None:
        self.worker.begin(self.reload)
        self._woken.set()

    def reload(self) -> None:
        """Read policy and tokens again: all of it or, with any mistake in it, nothing."""
        try:
            policy, tokens = self._read_policy(), self._read_tokens()
            self.scheduler.adopt(policy)
            self._web.tokens = tokens
        except GpuwardenError as error:
            # The file's mistakes, each with its line, are for who wrote it: in the log.
            log.warning("the policy is not taken", why=str(error))
            first = str(error).partition("\n")[0]
            self.scheduler.reload_problem = f"the policy is not taken, the old one counts: {first}"
            return
        self.scheduler.reload_problem = None
        log.info("policy taken")

    def _server(
        self, protocol: type[BoundedProtocol], listen: tuple[str, int] | None = None
    ) -> uvicorn.Server:
        host, port = listen or ("", 0)
        tls = listen is not None
        cert, key = self._settings.tls_cert, self._settings.tls_key
        return _Server(
            uvicorn.Config(
                self.app,
                host=host,
                port=port,
                http=protocol,
                ssl_certfile=str(cert) if tls and cert else None,
                ssl_keyfile=str(key) if tls and key else None,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=5,
            )
        )


class _PeerProtocol(BoundedProtocol):
    """HTTP on a unix socket: each request carries whom the kernel names as its peer."""

    most_of_one: ClassVar[int] = 64
    """Connections of one user at the same time: nobody can take all of them from the others."""

    uid: int | None = None
    """Whose it is, once it is made."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A process of this machine is there."""
        uid, gid = peer_of(transport.get_extra_info("socket"))
        self.uid, application = uid, self.app

        async def identified(scope: dict[str, object], receive: object, send: object) -> None:
            # A directory that does not answer must hold up neither ticks nor other people.
            peer = await asyncio.to_thread(Peer.of, uid, gid)
            await application({**scope, "gpuwarden.peer": peer}, receive, send)

        self.app = identified
        super().connection_made(transport)
        own = sum(isinstance(each, _PeerProtocol) and each.uid == uid for each in self.connections)
        if own > self.most_of_one:
            transport.abort()


class _Server(uvicorn.Server):
    """Leaves the signals to the daemon."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


async def _serve(server: uvicorn.Server, listen: tuple[str, int]) -> None:
    try:
        await server.serve()
    except SystemExit as error:  # uvicorn's way to say that it cannot bind
        raise ServiceUnavailable(
            f"cannot listen on {listen[0]}:{listen[1]}: is another server there? See --listen"
        ) from error


def _make_folder(path: Path) -> None:
    """A folder for nobody else: bookings and jobs in it name people.

    Raises:
        InvalidInput: it cannot be made, or belongs to somebody else.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise InvalidInput(f"--state: {path} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or not os.access(path, os.W_OK | os.X_OK):
        raise InvalidInput(f"--state: {path} is no folder that this user may write into")
    if found.st_uid not in (0, os.geteuid()):
        raise InvalidInput(
            f"--state: {path} belongs to user {found.st_uid}, who could change the queue: chown it"
        )
    if found.st_mode & stat.S_IWOTH:
        raise InvalidInput(f"--state: everybody may write into {path}: chmod o-w {path}")


def _listen_unix(path: Path) -> socket.socket:
    """A socket that everybody on this machine may connect to; who they are, the kernel says.

    The folder's lock is held: a socket that lies there is one of a daemon that is gone.

    Raises:
        ServiceUnavailable: it cannot be made.
    """
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
            _refuse_a_living_one(path)
            path.unlink()
        found.bind(str(path))
        path.chmod(0o666)
    except OSError as error:
        found.close()
        raise ServiceUnavailable(f"--socket: {path} cannot be made: {error}") from error
    return found


def _refuse_a_living_one(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise ServiceUnavailable(f"--socket: another daemon answers at {path}: stop it first")


def _is_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "::1", "localhost")
