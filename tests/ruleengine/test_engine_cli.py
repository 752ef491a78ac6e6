"""`gpuwarden engine`, `jobs` and `keep` as processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import World, serving
from tests.ruleengine.engines import running as running_engine
from tests.ruleengine.test_settings import MINIMAL, write
from tests.servers import Server, free_port, running

from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.cases import CaseState

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def gpuwarden(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "gpuwarden", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextlib.contextmanager
def engine(folder: Path) -> Iterator[Server]:
    """An engine without a Prometheus: alive, not ready, and acting on nothing."""
    port = free_port()
    path = write(
        folder,
        MINIMAL.replace("9090", str(free_port()))
        + f"ledger: ledger.sqlite\ntick: 1s\nweb: {{listen: '127.0.0.1:{port}'}}\n",
    )
    command = [sys.executable, "-m", "gpuwarden", "engine", "--config", str(path)]
    server = Server(
        f"http://127.0.0.1:{port}", folder / "engine.log", command, ready_path="/-/healthy"
    )
    with running(server) as started:
        yield started


def test_check_says_what_it_read_or_what_is_wrong(tmp_path: Path) -> None:
    """0 and a summary; 2 and every mistake."""
    path = write(tmp_path)
    good = gpuwarden("engine", "--config", str(path), "--check")
    assert (good.returncode, "1 rules" in good.stdout) == (0, True), good.stderr
    path.write_text(MINIMAL + "tik: 5s\nledgr: x\n")
    bad = gpuwarden("engine", "--config", str(path), "--check")
    assert bad.returncode == 2
    assert "engine.yaml:4:1" in bad.stderr
    assert "engine.yaml:5:1" in bad.stderr
    missing = gpuwarden("engine", "--config", str(tmp_path / "none.yaml"), "--check")
    assert missing.returncode == 2
    assert "cannot be read" in missing.stderr


def test_an_engine_serves_without_prometheus_and_leaves_when_asked(tmp_path: Path) -> None:
    """Everything down is no reason to die; SIGTERM is, orderly."""
    with engine(tmp_path) as server:
        jobs = gpuwarden("jobs", "list", "--engine.url", server.url, "-o", "json")
        assert jobs.returncode == 0
        assert json.loads(jobs.stdout)["jobs"] == []
        unknown = gpuwarden("jobs", "show", "proc-9", "--engine.url", server.url)
        assert unknown.returncode == 1
        assert "unknown_job" in unknown.stderr
        second = gpuwarden("engine", "--config", str(tmp_path / "engine.yaml"))
        assert second.returncode == 3
        assert "another engine" in second.stderr
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0


def test_an_engine_that_is_killed_leaves_a_usable_ledger(tmp_path: Path) -> None:
    """Kill -9, start again: the epoch has grown, and it serves."""
    with engine(tmp_path) as server:
        server.kill()
        server.start()
        first, second = (
            int(number) for number in re.findall(r'"epoch": ([0-9]+)', server.log.read_text())
        )
        assert second > first


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    """Not a traceback, and an exit status of its own."""
    with engine(tmp_path) as server:
        other = tmp_path / "other"
        other.mkdir()
        path = write(
            other, MINIMAL + f"ledger: l.sqlite\nweb: {{listen: '127.0.0.1:{server.port}'}}\n"
        )
        second = gpuwarden("engine", "--config", str(path))
        assert second.returncode == 3
        assert "cannot listen on" in second.stderr
        assert "Traceback" not in second.stderr


def test_jobs_are_listed_by_their_whole_names_and_shown_with_their_proof(servers: World) -> None:
    """What stands in the first column can be given to `show`, also through a pipe."""
    job = "proc-1c9f2a7d-30954-4711220815-of-a-long-name"
    servers.fleet.jobs[0].job_id = job
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    async def story() -> tuple[str, str, str]:
        async with running_engine(servers) as world:
            app = EngineApp(
                world.engine,
                world.hop,
                notify_token=None,
                operator_token=None,
                ticket_key=None,
            )
            async with serving(app, port):
                while world.state(job) is not CaseState.NOTIFIED:
                    await world.tick()
                ask = ("--engine.url", url)
                listed = await asyncio.to_thread(gpuwarden, "jobs", "list", *ask)
                told = await asyncio.to_thread(gpuwarden, "jobs", "show", job, *ask)
                while not world.agent.requests:
                    await world.tick()
                await world.settled()
                shown = await asyncio.to_thread(gpuwarden, "jobs", "show", job, *ask)
                return listed.stdout, told.stdout, shown.stdout

    listed, told, shown = asyncio.run(story())
    assert listed.splitlines()[1].split()[0] == job
    assert "not ended: the owner has had the notice for" in told
    assert "notice by slack to U0ALICE01: proven (slack channel=U0ALICE01 ts=" in told
    assert shown.startswith("This job was ended by the rule idle-held at ")
    assert ": verified" in shown
    assert "NVML: the processes are gone from its lists; 30.0 GiB freed" in shown
    assert "None" not in shown


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("--for", "1h", "--reason", "x"), 2, "either --ticket"),
        (("--for", "1h", "--reason", "x", "--ticket", "t", "--token-file", "f"), 2, "either"),
        (("--for", "1h", "--reason", "x", "--token-file", "/none"), 2, "cannot be read"),
        (("--for", "1h", "--reason", "x", "--ticket", "t"), 3, "does not answer"),
    ],
)
def test_keep_says_what_is_missing(arguments: tuple[str, ...], status: int, text: str) -> None:
    """Wrong usage is 2, an engine that is away is 3."""
    url = f"http://127.0.0.1:{free_port()}"
    done = gpuwarden("keep", "proc-1", "--rule", "r", "--engine.url", url, *arguments)
    assert done.returncode == status
    assert text in done.stderr
