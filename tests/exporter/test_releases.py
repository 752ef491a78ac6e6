"""The release window: who is told, who is believed, and that nothing stays open."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.exporter.nodes import ManualClock, eventually
from tests.servers import free_port

from gpuwarden.clock import SystemClock
from gpuwarden.errors import PermanentError
from gpuwarden.exporter import releases
from gpuwarden.exporter.releases import Release, ReleaseWatch
from gpuwarden.exporter.simulated import Card, Delay, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Holder:
    """Holds a driver, which may hang."""

    def __init__(self, *, hangs: bool = False, stale: bool = False) -> None:
        self.hangs = hangs
        self.stale = stale
        self.did: list[str] = []

    def release(self) -> bool:
        """Let go."""
        self.did.append("release")
        return not self.hangs

    def acquire(self) -> None:
        """Take back."""
        self.did.append("acquire")

    def restart(self) -> None:
        """Start anew."""
        self.did.append("restart")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The release file."""
    return tmp_path / "release"


class TestFile:
    """What a release file says."""

    def test_an_order_ends(self, file: Path, clock: ManualClock) -> None:
        """An order holds for its time and no longer."""
        assert releases.read(file) is None
        order = releases.order(file, 600, clock=clock)
        assert releases.read(file) == order
        assert order.covers(clock.wall() + 599)
        assert not order.covers(clock.wall() + 600)
        assert releases.withdraw(file)
        assert releases.read(file) is None
        assert not releases.withdraw(file)

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"until": "x"}', '{"until": null}', "\0"])
    def test_what_is_not_understood_holds_until_it_is_removed(
        self, file: Path, content: str
    ) -> None:
        """`touch` is an order without end, and so is a file that was spoilt."""
        file.write_text(content)
        assert releases.read(file) == Release(None)
        assert Release(None).covers(1e12)

    def test_links_and_pipes_are_no_orders(self, file: Path, tmp_path: Path) -> None:
        """A link is not followed, and a pipe does not keep anybody waiting."""
        (tmp_path / "elsewhere").touch()
        file.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OSError, match="symbolic"):
            releases.read(file)
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(PermissionError):
            releases.read(file)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
    def test_others_cannot_order(self, file: Path) -> None:
        """The file of another user blinds nobody."""
        file.touch()
        os.chown(file, 65534, -1)
        with pytest.raises(PermissionError):
            releases.read(file)

    def test_a_folder_that_is_not_there(self, tmp_path: Path, clock: ManualClock) -> None:
        """Where the order cannot be left, it is said how."""
        with pytest.raises(PermanentError, match="as root"):
            releases.order(tmp_path / "none" / "release", 1, clock=clock)


class TestWatch:
    """What is done about it."""

    def watch(self, file: Path, holder: Holder, clock: ManualClock) -> ReleaseWatch:
        """A watch that the test has look."""
        return ReleaseWatch(file, holder, restart=holder.restart, clock=clock)

    def test_let_go_and_take_back(self, file: Path, clock: ManualClock) -> None:
        """Each order is followed once, and its end by the clock as well as by `acquire`."""
        holder = Holder()
        watch = self.watch(file, holder, clock)
        watch.look()
        assert holder.did == []
        releases.order(file, 600, clock=clock)
        watch.look()
        watch.look()
        assert holder.did == ["release"]
        clock.advance(600)
        watch.look()
        assert holder.did == ["release", "acquire"]
        releases.order(file, 600, clock=clock)
        watch.look()
        releases.withdraw(file)
        watch.look()
        assert holder.did == ["release", "acquire"] * 2

    def test_a_hanging_call_is_ended_with_its_process(self, file: Path, clock: ManualClock) -> None:
        """What a hanging call holds is closed by a restart, tried once."""
        holder = Holder(hangs=True)
        watch = self.watch(file, holder, clock)
        releases.order(file, 600, clock=clock)
        watch.look()
        watch.look()
        assert holder.did == ["release", "restart"]

    def test_a_library_that_stays_is_left_with_its_process(
        self, file: Path, clock: ManualClock
    ) -> None:
        """Where the old library cannot be dropped after an upgrade, a new process loads the new."""
        holder = Holder(stale=True)
        self.watch(file, holder, clock).look()
        assert holder.did == ["restart"]

    def test_an_unreadable_order_changes_nothing(self, file: Path, clock: ManualClock) -> None:
        """Neither a release nor its end follows from what cannot be read."""
        holder = Holder()
        watch = self.watch(file, holder, clock)
        file.symlink_to("nowhere")
        watch.look()
        assert holder.did == []
        file.unlink()
        releases.order(file, 600, clock=clock)
        watch.look()
        file.unlink()
        file.symlink_to("nowhere")
        watch.look()
        assert holder.did == ["release"]

    def test_it_is_told(self, file: Path, clock: ManualClock) -> None:
        """An order, its end and the end of the watch are followed when they come."""
        holder = Holder()
        watch = self.watch(file, holder, clock)
        before = len(list(Path("/proc/self/fd").iterdir()))
        watch.start()
        assert holder.did == []
        releases.order(file, 600, clock=clock)
        eventually(lambda: holder.did == ["release"])
        releases.withdraw(file)
        eventually(lambda: holder.did == ["release", "acquire"])
        watch.stop()
        releases.order(file, 600, clock=clock)
        assert "release-watch" not in {thread.name for thread in threading.enumerate()}
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    def test_an_order_that_was_there_before(self, file: Path, clock: ManualClock) -> None:
        """Whoever starts in a release window begins without the driver."""
        holder = Holder()
        releases.order(file, 600, clock=clock)
        watch = self.watch(file, holder, clock)
        watch.start()
        assert holder.did == ["release"]
        watch.stop()

    def test_it_ends_by_the_clock(self, file: Path) -> None:
        """An order that nobody withdraws ends, though nothing happens to its file."""
        holder, clock = Holder(), SystemClock()
        releases.order(file, 0.05, clock=clock)
        watch = ReleaseWatch(file, holder, restart=holder.restart, clock=clock)
        watch.start()
        eventually(lambda: holder.did[-1:] == ["acquire"] or not holder.did)
        watch.stop()


class Node:
    """An exporter as a process, with stand-ins of device files."""

    def __init__(self, folder: Path) -> None:
        self.scenario = folder / "scenario"
        self.devices = folder / "scenario.devices"
        self.devices.mkdir()
        Scenario([Card(0), Card(1)]).write(self.scenario)
        self.flags = [f"--release-file={folder / 'release'}", f"--gpus=simulated:{self.scenario}"]
        self.url = f"http://127.0.0.1:{free_port()}"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gpuwarden", "exporter", *self.flags),
                f"--web.listen-address={self.url.removeprefix('http://')}",
                f"--jobs.directory={folder / 'jobs'}",
                "--collect.interval=500ms",
            ],
            stderr=subprocess.DEVNULL,
        )

    def get(self, path: str) -> tuple[int, str]:
        """Status and body; status 0 while nobody answers."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def up(self) -> bool:
        """Whether it knows its cards."""
        return "\ngpuwarden_nvml_up 1" in self.get("/metrics")[1]

    def open(self) -> list[str]:
        """Stand-ins that it has open."""
        found = []
        for entry in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if entry.readlink().parent == self.devices:
                    found.append(entry.readlink().name)
        return sorted(set(found))

    def say(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run one of the operator's commands."""
        return subprocess.run(
            [sys.executable, "-m", "gpuwarden", "exporter", *words],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[[], Node]]:
    """Starts the exporter, and ends it with the test."""
    started: list[Node] = []

    def start() -> Node:
        started.append(Node(tmp_path))
        eventually(started[-1].up)
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def test_an_operator_releases_the_cards(node: Callable[[], Node]) -> None:
    """Released, the exporter has no device file open and says so; acquired, it has its cards back.

    The command returns when nobody has a card open.
    """
    one = node()
    assert one.open() == ["nvidia0", "nvidia1"]
    answer = one.say(*one.flags, "release", "--for=10m")
    assert (answer.returncode, "still open" in answer.stdout) == (0, False), answer.stderr
    assert one.open() == []
    status, page = one.get("/metrics")
    assert (status, "\ngpuwarden_nvml_up 0" in page, "\ngpu_" in page) == (200, True, False)
    assert "\ngpuwarden_snapshot_timestamp_seconds" not in page
    status, reason = one.get("/-/ready")
    assert (status, "released" in reason) == (503, True)
    assert one.say("acquire", one.flags[0]).returncode == 0
    eventually(one.up)
    assert one.open() == ["nvidia0", "nvidia1"]
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(20) == 0


def test_cards_are_released_although_the_driver_hangs(node: Callable[[], Node]) -> None:
    """While a call hangs for ten minutes, the same pid comes back with no device file open."""
    one = node()
    scenario = Scenario([Card(0), Card(1)], delays=[Delay("nvmlDevice*", 600_000)])
    scenario.write(one.scenario)
    eventually(lambda: not one.up())
    answer = one.say(*one.flags, "release")
    assert answer.returncode == 0, answer.stdout
    assert one.open() == []
    status, reason = eventually(lambda: one.get("/-/ready"), until=lambda seen: seen[0] == 503)
    assert (status, "released" in reason) == (503, True)
    assert one.process.poll() is None
    replace(scenario, delays=()).write(one.scenario)
    assert one.say(one.flags[0], "acquire").returncode == 0
    eventually(one.up)


def test_who_still_has_a_card_open_is_named(node: Callable[[], Node]) -> None:
    """A process that keeps a card open is named, and the status says that it is not free."""
    one = node()
    with (one.devices / "nvidia0").open("rb"):
        answer = one.say("release", *one.flags)
    assert answer.returncode == 1
    assert f"pid {os.getpid()} " in answer.stdout
    assert f"pid {one.process.pid} " not in answer.stdout


def test_a_window_ends(tmp_path: Path) -> None:
    """A release for more than a day is refused."""
    answer = subprocess.run(
        [sys.executable, "-m", "gpuwarden", "exporter", "release", "--for=2d"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert answer.returncode == 2
    assert "a window must end" in answer.stderr


def test_a_program_that_cannot_be_started_again() -> None:
    """Where no new process can be had this one ends all the same: nothing else lets go."""
    code = (
        "import sys; from gpuwarden.exporter import releases; "
        "sys.executable = '/nowhere/python'; releases.restart()"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, timeout=60
    )
    assert answer.returncode == 1
    assert b"cannot become a new process" in answer.stdout + answer.stderr
