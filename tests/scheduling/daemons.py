"""A scheduler's daemon in a thread of the test, with an engine that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from gpuwarden.errors import RefusedAction
from gpuwarden.scheduling.daemon import Daemon, Settings
from gpuwarden.scheduling.daemon_clients import DaemonClient
from gpuwarden.scheduling.drivers import SlotsRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from gpuwarden.schedule_api import Preemption, Problem, QueueEntry
    from gpuwarden.scheduling.drivers import Context
    from gpuwarden.scheduling.holdings import Holding
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.predictions import Training
    from gpuwarden.scheduling.slots import Slot, SlotUse
    from gpuwarden.scheduling.tasks import Task


class Clock:
    """Both clocks, as the test sets them."""

    def __init__(self, now: float) -> None:
        self.now = now

    def wall(self) -> float:
        """Unix time."""
        return self.now

    def monotonic(self) -> float:
        """Seconds."""
        return self.now


class PlayedDriver:
    """An engine whose answers the test writes down; it notes what it was told, and from where."""

    engine = "slurm"
    cluster = "ci"

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.rows: Sequence[QueueEntry] = ()
        self.asked_to_leave: Sequence[Preemption] = ()
        self.wrong: Sequence[Problem] = ()
        self.uses: Sequence[SlotUse] = ()
        self.held: Sequence[Holding] = ()
        self.known: Mapping[str, Training] = {}
        self.refuses: Mapping[str, str] = {}
        self.refuses_all = ""
        self.remark = ""
        self.unseen: Exception | None = None
        self.unaccounted: Exception | None = None
        self.forbidden: Exception | None = None
        self.slots: tuple[Slot, ...] = ()
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self.usages: list[tuple[float, float]] = []

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)

    def _seen(self) -> None:
        if self.unseen is not None:
            raise self.unseen

    def start(self, now: float) -> None:
        """Note it."""
        self._note(f"start {now:g}")

    def stop(self) -> None:
        """Note it."""
        self._note("stop")

    def adopt(self, policy: Policy) -> None:
        """Take another policy."""
        self._note("adopt")
        self.policy = policy

    def tick(self, now: float) -> None:
        """Note it, or be unseen."""
        self._note(f"tick {now:g}")
        self._seen()

    def entries(self) -> Sequence[QueueEntry]:
        """As the test wrote them."""
        return self.rows

    def preemptions(self) -> Sequence[Preemption]:
        """As the test wrote them."""
        return self.asked_to_leave

    def problems(self) -> Sequence[Problem]:
        """As the test wrote them."""
        return self.wrong

    def book(self, slots: Sequence[Slot], now: float) -> None:
        """Keep the slots, but those that the test has refused."""
        self._note(f"book {now:g}")
        self._seen()
        if self.forbidden is not None:
            raise self.forbidden
        against = {
            slot.id: self.refuses.get(slot.id, self.refuses_all)
            for slot in slots
            if slot.id in self.refuses or self.refuses_all
        }
        self.slots = tuple(slot for slot in slots if slot.id not in against)
        if against:
            raise SlotsRefused(against)

    def remarks(self) -> Mapping[str, str]:
        """The same for every slot."""
        return {slot.id: self.remark for slot in self.slots if self.remark}

    def slot_uses(self) -> Sequence[SlotUse]:
        """As the test wrote them."""
        return self.uses

    def usage(self, begin: float, end: float) -> Sequence[Holding]:
        """As the test wrote them."""
        self._note("usage")
        self.usages.append((begin, end))
        self._seen()
        if self.unaccounted is not None:
            raise self.unaccounted
        return [
            item
            for item in self.held
            if item.start < end and (item.end is None or item.end > begin)
        ]

    def trainings(self) -> Mapping[str, Training]:
        """As the test wrote them."""
        return self.known


class PlayedHolds(PlayedDriver):
    """An engine whose jobs can be held and released, and nothing else."""

    engine = "kueue"

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.commands: list[tuple[str, str, str]] = []

    def hold(self, entry: str, *, by: str, now: float) -> None:
        """Note it."""
        self._note(f"hold {now:g}")
        self.commands.append(("hold", entry, by))

    def release(self, entry: str, *, by: str, now: float) -> None:
        """Note it."""
        self._note(f"release {now:g}")
        self.commands.append(("release", entry, by))


class PlayedQueue(PlayedHolds):
    """An engine that owns its queue."""

    engine = "local"

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.taken: list[tuple[Task, int, int, str]] = []

    def submit(self, task: Task, *, uid: int, gid: int, now: float, token: str = "") -> str:
        """Note the task."""
        self._note(f"submit {now:g}")
        if task.gpus > 4:
            raise RefusedAction("too_large", "there are 4 cards")
        self.taken.append((task, uid, gid, token))
        return str(len(self.taken))

    def cancel(self, entry: str, *, by: str, now: float) -> None:
        """Note it."""
        self._note(f"cancel {now:g}")
        self.commands.append(("cancel", entry, by))


@dataclasses.dataclass
class Running:
    """A daemon that runs.

    Attributes:
        daemon: the daemon.
        driver: the engine that the test plays.
        client: asks it over its socket.
        clock: its time.
        settings: of its command line.
        contexts: what its driver was given.
    """

    daemon: Daemon
    driver: Any
    client: DaemonClient
    clock: Clock
    settings: Settings
    contexts: list[Context]

    def tick(self, seconds: float = 0.0) -> None:
        """Have one tick, so much later, and wait for its end."""
        self.clock.now += seconds
        self.daemon.worker.call(self.daemon.scheduler.tick)


@contextlib.contextmanager
def running(
    folder: Path,
    policy: str,
    *,
    now: float,
    driver: type[PlayedDriver] = PlayedDriver,
    listen: tuple[str, int] | None = None,
    tokens: Path | None = None,
    prometheus: str | None = None,
) -> Iterator[Running]:
    """A daemon, until the context ends; it ticks when the test says so.

    Args:
        folder: for its files.
        policy: text of the policy.
        now: Unix time at first.
        driver: plays the engine.
        listen: on the network too.
        tokens: who may ask there.
        prometheus: address of a server.
    """
    file = folder / "policy.yaml"
    file.write_text(policy)
    settings = Settings(
        policy=file,
        state=folder / "state",
        listen=listen,
        socket=folder / "s.sock",
        tokens=tokens,
        tick_seconds=3600.0,
        prometheus=prometheus,
    )
    clock, contexts = Clock(now), []

    def opening(_engine: str, read: Policy, context: Context) -> PlayedDriver:
        contexts.append(context)
        return driver(read)

    daemon = Daemon(settings, clock=clock, opening=opening)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            asyncio.run(daemon.run())
        except BaseException as error:  # noqa: BLE001 (told in the test's own thread)
            failed.append(error)

    thread = threading.Thread(target=work, name="daemon")
    thread.start()
    try:
        wait_for(lambda: failed or (settings.socket.exists() and daemon.scheduler.ticked))
        assert not failed, failed
        yield Running(
            daemon,
            daemon.scheduler.driver,
            DaemonClient(settings.socket),
            clock,
            settings,
            contexts,
        )
    finally:
        daemon.stop()
        thread.join(20)
    assert not failed, failed
    assert not thread.is_alive()


def free_port() -> int:
    """A port of the loopback that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    """Look until something is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)
