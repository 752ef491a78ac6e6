"""`gpuwarden top` in a terminal, with a serving engine and with a real exporter."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
from click.testing import CliRunner
from pydantic import TypeAdapter
from tests.exporter.nodes import Children, declare, describe, process_of
from tests.ruleengine.browsing import OLGA, WEB, WHITELIST, application, populate
from tests.ruleengine.engines import World, running, serving
from tests.ruleengine.terminals import terminal
from tests.ruleengine.test_engine_cli import gpuwarden
from tests.servers import Server, fetch, free_port, until
from tests.servers import running as started

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.exporter.runs import prepare
from gpuwarden.exporter.simulated import GIB, Card, Scenario, SimulatedProcess
from gpuwarden.job_files import Counters, RunStatus
from gpuwarden.ruleengine.api_fleet_models import Fleet
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.clients import token_headers
from gpuwarden.ruleengine.top_cli import gathered, top
from gpuwarden.ruleengine.top_pictures import Question
from gpuwarden.ruleengine.top_sources import EngineSource

if TYPE_CHECKING:
    from collections.abc import Iterator

TOP = (sys.executable, "-m", "gpuwarden", "top")


class Served:
    """A fleet's engine that serves while the test looks on; it can go away and come back."""

    def __init__(self, servers: World, jobs: int) -> None:
        servers.web = WEB
        servers.rules(whitelist=WHITELIST)
        populate(servers, jobs)
        self.port = free_port()
        self.token = servers.folder / "token"
        self.token.write_text(OLGA)
        self._servers = servers
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._stack = contextlib.AsyncExitStack()
        self._web = contextlib.AsyncExitStack()

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._begin())
        self.come()
        return self

    def __exit__(self, *_: object) -> None:
        self.go()
        self._do(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _begin(self) -> None:
        world = await self._stack.enter_async_context(running(self._servers))
        await world.until(CaseState.NOTIFIED)

    def come(self) -> None:
        """Serve."""
        self._do(self._web.enter_async_context(serving(application(self._servers), self.port)))

    def go(self) -> None:
        """Serve no more."""
        self._do(self._web.aclose())

    def _do(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    @property
    def flags(self) -> list[str]:
        """Where it is, and who asks."""
        url = f"http://127.0.0.1:{self.port}"
        return ["--engine.url", url, "--token-file", str(self.token)]


@pytest.fixture
def served(servers: World) -> Iterator[Served]:
    """A fleet of forty jobs."""
    with Served(servers, 40) as serving_engine:
        yield serving_engine


def test_somebody_watches(served: Served) -> None:
    """Rows, another order, a filter, details, help; and the terminal is as before at the end."""
    with terminal([*TOP, *served.flags], size=(100, 24)) as screen:
        text = screen.until(lambda shown: "q quit" in shown and "alice" in shown)
        assert screen.alternate
        assert screen.cursor_hidden
        assert len(text.splitlines()) == 24
        assert "40 jobs, 3 in a case" in text.splitlines()[0]
        (row,) = [line for line in text.splitlines() if line.startswith("alice  127")]
        assert "idle-held: end in" in row
        screen.press("s")
        screen.until(lambda shown: "sort user" in shown and shown.splitlines()[3][:5] == "alice")
        screen.press("u")
        screen.until(lambda shown: "filter (user:" in shown)
        screen.press("dmi\r")
        screen.until(lambda shown: "filter user:dmi" in shown and "alice" not in shown)
        screen.press("c/broken\r")
        screen.until(lambda shown: "filter broken" in shown and "3 jobs" in shown)
        screen.press("\x1b[B\r")
        screen.until(lambda shown: "This job breaks the rule idle-held." in shown)
        screen.press("\x1b[6~" * 9)
        screen.until(
            lambda shown: "Rule idle-held (enforce): YES" in shown and "job  " not in shown
        )
        screen.press("\x1b[5~" * 9)
        screen.until(lambda shown: "This job breaks the rule idle-held." in shown)
        screen.press("\x1b")
        screen.until(lambda shown: "VERDICT" in shown and "2/3 " in shown)
        screen.press("?")
        screen.until(lambda shown: "only jobs that break a rule" in shown)
        screen.press("q")
        screen.until(lambda shown: "VERDICT" in shown)
        screen.press("q")
        assert screen.ended() == 0
        assert not screen.alternate
        assert not screen.cursor_hidden


def test_a_window_is_pulled_larger(served: Served) -> None:
    """More rows are asked for, and more columns shown; smaller again, fewer."""
    with terminal([*TOP, *served.flags], size=(60, 12)) as screen:
        screen.until(lambda shown: "q quit" in shown and "alice" in shown)
        screen.resize(200, 50)
        screen.until(lambda shown: shown.count("gpu06.example.org:0") >= 4 and "40/40" in shown)
        screen.resize(44, 8)
        screen.until(
            lambda shown: (
                len(shown.splitlines()) == 8
                and "alice" in shown
                and max(map(len, shown.splitlines())) <= 44
            )
        )


def test_an_engine_goes_away_and_comes_back(served: Served) -> None:
    """The last picture stays, marked as old with the reason; it goes on by itself."""
    with terminal([*TOP, *served.flags, "--interval", "200ms"], size=(120, 24)) as screen:
        screen.until(lambda shown: "alice" in shown and "OLD" not in shown)
        served.go()
        text = screen.until(lambda shown: "OLD, " in shown)
        assert "the engine does not answer" in text.splitlines()[1]
        assert "alice" in text
        screen.press("p")
        screen.until(lambda shown: "PAUSED" in shown or "OLD" in shown)
        screen.press("p")
        served.come()
        screen.until(lambda shown: "alice" in shown and "OLD" not in shown)


def test_before_an_engine_is_there_it_waits(servers: World) -> None:
    """It says what it waits for, and why."""
    with Served(servers, 8) as served:
        served.go()
        with terminal([*TOP, *served.flags, "--interval", "200ms"], size=(80, 20)) as screen:
            screen.until(lambda shown: "is --engine.url right?" in " ".join(shown.split()))
            served.come()
            screen.until(lambda shown: "idle-held" in shown)
            screen.process.send_signal(signal.SIGINT)
            assert screen.ended() == 0


def test_words_are_enough(served: Served) -> None:
    """NO_COLOR is heeded; where there is only ASCII nothing else is sent."""
    plain = {"NO_COLOR": "1", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    with terminal([*TOP, *served.flags], environment=plain) as screen:
        text = screen.until(lambda shown: "q quit" in shown and "alice" in shown)
        assert text.isascii()
        assert not any("3" in code for code in screen.codes)
    with terminal(
        [*TOP, *served.flags, "--interval", "200ms"], environment={"TERM": "dumb"}
    ) as dumb:
        text = dumb.until(lambda shown: shown.count("VERDICT") >= 2)
        assert dumb.codes == set()
        dumb.process.send_signal(signal.SIGINT)
        assert dumb.ended() == 130


def test_it_stops_and_goes_on_as_a_shell_says(served: Served) -> None:
    """Ctrl-Z gives the terminal back; fg paints it anew. SIGTERM leaves it as it was."""
    with terminal([*TOP, *served.flags]) as screen:
        screen.until(lambda shown: "alice" in shown)
        screen.process.send_signal(signal.SIGTSTP)
        stat = Path(f"/proc/{screen.process.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        screen.process.send_signal(signal.SIGCONT)
        screen.until(lambda shown: screen.alternate and "alice" in shown)
        screen.process.send_signal(signal.SIGTERM)
        assert screen.ended() == 0
        assert not screen.alternate


def test_once_is_for_scripts(served: Served) -> None:
    """A table on paper, or a document with a schema; what was left out is said."""
    text = gpuwarden("top", *served.flags, "--limit", "3")
    assert text.returncode == 0
    assert "37 more: --limit, or a filter" in text.stdout
    assert "\x1b" not in text.stdout
    whole = json.loads(gpuwarden("top", *served.flags, "-o", "json", "--broken").stdout)
    assert set(whole) == {"schema", "source", "places", "age", "stale", "problem", "fleet"}
    assert (whole["schema"], whole["source"]) == ("gpuwarden.top/v1", "engine")
    assert whole["fleet"]["schema"] == "gpuwarden.fleet/v1"
    assert len(whole["fleet"]["jobs"]) == 3


def test_more_rows_than_one_answer_has(servers: World) -> None:
    """They are asked for part by part."""
    with Served(servers, 620) as served:
        source = EngineSource(f"http://127.0.0.1:{served.port}", token_headers(served.token))
        picture = gathered(source, Question(limit=610))
    names = [job["job_id"] for job in picture.document["jobs"]]
    assert len(names) == len(set(names)) == 610


def test_nobody_answers() -> None:
    """Exit status 3 and what to look at."""
    away = gpuwarden("top", "--once", "--engine.url", f"http://127.0.0.1:{free_port()}")
    assert away.returncode == 3
    assert "is --engine.url right?" in away.stderr
    lost = CliRunner().invoke(top, ["--once", "--exporter", f"127.0.0.1:{free_port()}"])
    assert isinstance(lost.exception, ServiceUnavailable)
    assert "does not answer" in str(lost.exception)


@pytest.mark.parametrize(
    "wrong",
    [
        ("--exporter", "http://me:secret@gpu-1"),
        ("--exporter", "ftp://gpu-1"),
        ("--exporter.username", "me"),
        ("--ca-file", "none"),
        ("--exporter", "gpu-1", "--exporter.username", "me"),
        ("--sort", "price"),
        ("--limit", "0"),
    ],
)
def test_wrong_usage(wrong: tuple[str, ...]) -> None:
    """Exit status 2; a password that was typed is not shown again."""
    done = CliRunner().invoke(top, ["--once", *wrong])
    status = getattr(done.exception, "exit_code", done.exit_code)
    assert status == 2
    assert "secret" not in f"{done.output}{done.exception}"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Server]:
    """A machine with two cards, one of them used by a training; no engine."""
    children = Children()
    child = children.start()
    scenario = tmp_path / "scenario"
    used = SimulatedProcess(0, child.pid, memory=12 * GIB, sm=64)
    Scenario([Card(0), Card(1)], [used]).write(scenario)
    jobs = tmp_path / "jobs"
    prepare(jobs)
    status = RunStatus(
        run_id="run-1",
        sequence=1,
        phase="train",
        phase_since=1.0,
        heartbeat=1.0,
        epoch=1,
        counters=Counters(images=640),
    )
    declare(jobs, describe(child.pid, batch=32, epochs=20), status)
    port = free_port()
    command = [
        *(sys.executable, "-m", "gpuwarden", "exporter", f"--web.listen-address=127.0.0.1:{port}"),
        *(f"--jobs.directory={jobs}", f"--gpus=simulated:{scenario}", "--collect.interval=200ms"),
        f"--attribution.launcher={process_of(os.getpid()).comm}",
    ]
    server = Server(f"http://127.0.0.1:{port}", tmp_path / "log", command)
    with started(server):
        until(lambda: b"\nyolo_epoch{" in fetch(f"{server.url}/metrics"))
        yield server
    children.close()


def test_a_lab_without_an_engine(lab: Server) -> None:
    """The same columns from the exporter itself, with the formula's expectation; no verdict."""
    whole = json.loads(gpuwarden("top", "-o", "json", "--exporter", lab.url).stdout)
    assert whole["source"] == "exporters"
    assert not whole["stale"]
    fleet = whole["fleet"]
    assert (fleet["cards"], fleet["held"], fleet["nodes"]) == (2, 1, {"expected": 1, "lit": 1})
    (job,) = fleet["jobs"]
    assert (job["model"], job["batch"], job["phase"], job["epoch"]) == ("yolov8n", 32, "train", 1)
    assert (job["utilization"], job["memory_bytes"]) == (0.64, 12 * GIB)
    assert job["memory_expected"]["high"] < 12 * GIB
    assert job["verdict"]["state"] == "no_engine"
    TypeAdapter(Fleet).validate_python(fleet)  # the shape that an engine answers with
    away = f"127.0.0.1:{free_port()}"
    both = json.loads(
        gpuwarden("top", "-o", "json", "--exporter", lab.url, "--exporter", away).stdout
    )
    assert away in both["fleet"]["problem"]
    assert both["fleet"]["nodes"] == {"expected": 2, "lit": 1}
    assert len(both["fleet"]["jobs"]) == 1


def test_a_lab_is_watched(lab: Server) -> None:
    """Rows and details; an exporter that dies is told, and one that is back is believed again."""
    command = [*TOP, "--exporter", lab.url, "--interval", "200ms"]
    with terminal(command, size=(160, 16)) as screen:
        text = screen.until(lambda shown: "yolov8n b32 640" in shown)
        assert "no engine" in text
        assert "2/20" in text
        assert "in a case" not in text
        screen.press("\r")
        screen.until(lambda shown: "memory       12.0 GiB, expected" in shown)
        screen.press("q")
        lab.kill()
        screen.until(lambda shown: "OLD, " in shown and "yolov8n" in shown)
        lab.start()
        screen.until(lambda shown: "OLD, " not in shown and "yolov8n" in shown)
        screen.press("q")
        assert screen.ended() == 0
