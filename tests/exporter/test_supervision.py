"""What a supervisor hears of exporter and agent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from gpuwarden.exporter.agent import keys
from gpuwarden.exporter.simulated import Card, Scenario
from gpuwarden.exporter.supervision import Supervision

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[socket.socket]:
    """A supervisor's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "notify"))
        made.settimeout(30)
        yield made


def test_ready_is_said_once(ear: socket.socket) -> None:
    """The first sign of life says ready, the others only that it lives."""
    supervision = Supervision({"NOTIFY_SOCKET": ear.getsockname(), "WATCHDOG_USEC": "30000000"})
    asyncio.run(supervision.alive())
    asyncio.run(supervision.alive())
    supervision.stopping()
    assert [ear.recv(64) for _ in range(3)] == [
        b"READY=1\nWATCHDOG=1",
        b"WATCHDOG=1",
        b"STOPPING=1",
    ]
    assert supervision.interval == 15


def test_an_abstract_address() -> None:
    """A name that begins with @ is one of the abstract namespace."""
    name = f"gpuwarden-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(f"\0{name}")
        made.settimeout(30)
        Supervision({"NOTIFY_SOCKET": f"@{name}"}).stopping()
        assert made.recv(64) == b"STOPPING=1"


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/at/all"])
def test_without_a_supervisor_nothing_happens(address: str) -> None:
    """No supervisor, and one that is gone, are no fault."""
    Supervision({"NOTIFY_SOCKET": address}).stopping()


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WATCHDOG_USEC": "x"},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"},
    ],
)
def test_without_a_watchdog_signs_are_rare(environ: dict[str, str]) -> None:
    """Another process's watchdog, and one that is off, is not fed faster than now and then."""
    assert Supervision(environ).interval == 30


@pytest.mark.parametrize("program", ["exporter", "agent"])
def test_a_daemon_says_what_it_does(
    program: str, ear: socket.socket, tmp_path: Path, scenario_file: Path
) -> None:
    """Exporter and agent are ready when they serve, show that they live, and say that they end."""
    Scenario([Card(0)]).write(scenario_file)
    flags = [
        "--web.listen-address=127.0.0.1:0",
        f"--jobs.directory={tmp_path / 'jobs'}",
        f"--gpus=simulated:{scenario_file}",
    ]
    if program == "agent":
        keys.generate(tmp_path / "keys")
        flags += [f"--keys={tmp_path / 'keys'}", f"--journal={tmp_path / 'journal'}"]
    environ = {"NOTIFY_SOCKET": ear.getsockname(), "WATCHDOG_USEC": "2000000"}
    with subprocess.Popen(
        [sys.executable, "-m", "gpuwarden", program, *flags],
        env=os.environ | environ,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            assert ear.recv(64) == b"READY=1\nWATCHDOG=1"
            assert ear.recv(64) == b"WATCHDOG=1"
            process.send_signal(signal.SIGTERM)
            heard = ear.recv(64)
            while heard == b"WATCHDOG=1":
                heard = ear.recv(64)
            assert heard == b"STOPPING=1"
            assert process.wait(30) == 0
        finally:
            process.kill()
