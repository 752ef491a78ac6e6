"""The exporter as a process, over HTTP; and its sampler at a time that the test moves."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.exporter.nodes import Children, ManualClock, eventually

from gpuwarden.exporter.app import wanted_format
from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.nvml import Nvml
from gpuwarden.exporter.pages import Format
from gpuwarden.exporter.processes import boot_id
from gpuwarden.exporter.sampler import Sampler
from gpuwarden.exporter.settings import ExporterSettings
from gpuwarden.exporter.simulated import (
    GIB,
    Card,
    Delay,
    Fault,
    Scenario,
    SimulatedProcess,
    SimulatedXid,
    build,
)
from gpuwarden.exporter.state_files import StateFile, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HANG = Delay("nvmlDevice*", 600_000)


def _values(page: bytes | str) -> dict[str, float]:
    """Name -> value, for metrics with one sample; with many, the last one."""
    text = page.decode() if isinstance(page, bytes) else page
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Exporter:
    """`gpuwarden exporter` as a process."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpuwarden", "exporter", *arguments],
                stderr=file,
                stdout=subprocess.DEVNULL,
            )
        listening = eventually(lambda: self.events("listening"))
        self.address = listening[0]["address"]

    def events(self, name: str) -> list[dict[str, str]]:
        """What it logged under a name."""
        lines = [json.loads(line) for line in self._log.read_text().splitlines()]
        return [line for line in lines if line.get("event") == name]

    def get(self, path: str, accept: str = "text/plain") -> tuple[int, str, str]:
        """Status, content type and body of an answer."""
        request = urllib.request.Request(f"http://{self.address}{path}", headers={"Accept": accept})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.headers["content-type"], answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers["content-type"], error.read().decode()

    def values(self) -> dict[str, float]:
        """The page's values by name."""
        return _values(self.get("/metrics")[2])


@pytest.fixture
def start(tmp_path: Path, scenario_file: Path) -> Iterator[Callable[..., Exporter]]:
    """Starts exporters and ends them with the test."""
    started: list[Exporter] = []

    def begin(*arguments: str, gpus: str | None = None) -> Exporter:
        everything = [
            "--web.listen-address=127.0.0.1:0",
            f"--jobs.directory={tmp_path / 'jobs'}",
            f"--gpus={gpus or f'simulated:{scenario_file}'}",
            "--collect.interval=100ms",
            "--log.format=json",
            *arguments,
        ]
        started.append(Exporter(everything, tmp_path / f"log-{len(started)}"))
        return started[-1]

    yield begin
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()


class TestProcess:
    """The whole program."""

    def test_it_serves(
        self, start: Callable[..., Exporter], scenario_file: Path, children: Children
    ) -> None:
        """Metrics in both formats, health and a landing page come from one process."""
        child = children.start()
        Scenario([Card(0)], [SimulatedProcess(0, child.pid, memory=GIB)]).write(scenario_file)
        program = start()
        eventually(lambda: program.get("/-/ready")[0], until=lambda status: status == 200)
        # On a busy machine a page of three intervals ago may be the newest, and is not served.
        status, kind, page = eventually(
            lambda: program.get("/metrics"), until=lambda answer: "\ngpu_job_" in answer[2]
        )
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert _values(page)["gpu_job_memory_bytes"] == GIB
        status, kind, page = program.get("/metrics", "application/openmetrics-text;version=1.0.0")
        assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        assert page.endswith("# EOF\n")
        assert program.get("/-/healthy")[0] == 200
        assert "/metrics" in program.get("/")[2]
        assert program.get("/nothing")[0] == 404

    def test_errors_of_a_card(self, start: Callable[..., Exporter], scenario_file: Path) -> None:
        """An error that a card reports is on the page, and the program still ends at once."""
        quiet = Scenario([Card(0)])
        quiet.write(scenario_file)
        program = start()
        happened = itertools.count(1)

        def again() -> dict[str, float]:
            replace(quiet, xids=[SimulatedXid(0, 79, next(happened))]).write(scenario_file)
            return program.values()

        values = eventually(again, until=lambda seen: "gpu_xid_errors_total" in seen)
        assert values["gpu_xid_last_timestamp_seconds"] > 0
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(timeout=20) == 0
        assert program.events("stopped")

    def test_sigterm(self, start: Callable[..., Exporter], scenario_file: Path) -> None:
        """Told to stop, it shuts the driver down and ends with 0."""
        Scenario([Card(0)]).write(scenario_file)
        program = start()
        eventually(lambda: program.events("driver opened"))
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(timeout=20) == 0
        assert program.events("stopped")

    def test_idle_connections_keep_nobody_out(
        self, start: Callable[..., Exporter], scenario_file: Path
    ) -> None:
        """A user who opens connections and asks for nothing does not blind the node."""
        Scenario([Card(0)]).write(scenario_file)
        program = start()
        host, _, port = program.address.rpartition(":")
        with contextlib.ExitStack() as stack:
            for _ in range(3 * ExporterSettings().max_requests):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            assert program.get("/metrics")[0] == 200

    def test_a_driver_that_hangs(self, start: Callable[..., Exporter], scenario_file: Path) -> None:
        """While a call hangs, scrapes are answered, without any value of a card; and it ends."""
        scenario = Scenario([Card(0, utilization=97)])
        scenario.write(scenario_file)
        program = start()
        eventually(program.values, until=lambda values: "gpu_utilization_ratio" in values)
        replace(scenario, delays=[HANG]).write(scenario_file)
        values = eventually(program.values, until=lambda values: not values["gpuwarden_nvml_up"])
        assert not any(name.startswith(("gpu_", "yolo_")) for name in values)
        assert "gpuwarden_snapshot_timestamp_seconds" not in values
        assert values["gpuwarden_collector_success"] == 0
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(timeout=20) == 0

    def test_no_driver(self, start: Callable[..., Exporter]) -> None:
        """Without a driver it says so and keeps serving."""
        program = start(gpus="nvml")
        values = eventually(
            program.values, until=lambda values: "gpuwarden_node_pressure_seconds_total" in values
        )
        assert values["gpuwarden_nvml_up"] == 0
        status, _, reason = program.get("/-/ready")
        assert (status, program.get("/-/healthy")[0]) == (503, 200)
        assert "not ready" in reason

    def test_what_it_loads(self) -> None:
        """A node's exporter carries neither torch nor servers' libraries that it does not use."""
        program = (
            "import sys, gpuwarden.exporter.daemon;"
            "print(sorted({'torch','numpy','pydantic','cryptography','ultralytics','httpx',"
            "'starlette','anyio','prometheus_client'}"
            "&sys.modules.keys()))"
        )
        answer = subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, timeout=60
        )
        assert answer.stdout == b"[]\n"


class TestSampler:
    """When a page is served, and when it is too old."""

    @pytest.fixture
    def sampler(
        self, scenario_file: Path, jobs: Path, clock: ManualClock
    ) -> Iterator[Callable[[Scenario], Sampler]]:
        """Makes a sampler on a scenario; nothing is read until the test says so."""
        made: list[Sampler] = []

        def make(scenario: Scenario) -> Sampler:
            nvml = Nvml(build(), scenario=scenario.write(scenario_file))
            settings = ExporterSettings(jobs_directory=jobs)
            made.append(Sampler(settings, nvml, Attribution(jobs, clock=clock), clock=clock))
            return made[-1]

        yield make
        for one in made:
            one.stop()

    def test_an_old_page_is_not_served(
        self, sampler: Callable[[Scenario], Sampler], clock: ManualClock
    ) -> None:
        """Past three intervals a page is no longer served."""
        one = sampler(Scenario([Card(0)]))
        assert _values(one.page().body[Format.TEXT])["gpuwarden_nvml_up"] == 0
        assert not one.ready
        one.sample()
        clock.advance(6)
        assert _values(one.page().body[Format.TEXT])["gpu_up"] == 1
        clock.advance(0.1)
        values = _values(one.page().body[Format.TEXT])
        assert (values["gpuwarden_nvml_up"], "gpu_up" in values) == (0, False)
        assert one.ready

    def test_a_missing_driver_is_tried_ever_less_often(
        self, sampler: Callable[[Scenario], Sampler], clock: ManualClock, scenario_file: Path
    ) -> None:
        """A driver that comes later is found, without being asked for all the time."""
        scenario = Scenario([Card(0)])
        one = sampler(replace(scenario, faults=[Fault("nvmlInit*", 9)]))
        one.sample()
        assert one.problem is not None
        assert "modprobe" in one.problem
        scenario.write(scenario_file)
        one.sample()
        assert _values(one.page().body[Format.TEXT])["gpuwarden_nvml_up"] == 0
        clock.advance(2.0)
        # The library looks at its file again after some milliseconds.
        time.sleep(0.02)
        one.sample()
        assert _values(one.page().body[Format.TEXT])["gpuwarden_nvml_up"] == 1
        assert one.problem is None

    def test_an_unreadable_list_makes_no_whole_page(
        self, sampler: Callable[[Scenario], Sampler]
    ) -> None:
        """A node of which a part is hidden has values, but no snapshot to judge by."""
        faults = [Fault("nvmlDeviceGetComputeRunningProcesses*", 999)]
        page = sampler(Scenario([Card(0)], faults=faults)).sample()
        values = _values(page.body[Format.TEXT])
        assert not page.complete
        assert values["gpu_up"] == 1
        assert "gpuwarden_snapshot_timestamp_seconds" not in values

    def test_what_is_known_is_kept_before_the_process_is_replaced(
        self, scenario_file: Path, jobs: Path, tmp_path: Path, children: Children
    ) -> None:
        """An exporter that becomes a new one writes down what it knows, and reads no more."""
        processes = [SimulatedProcess(0, children.start().pid)]
        nvml = Nvml(build(), scenario=Scenario([Card(0)], processes).write(scenario_file))
        file = tmp_path / "state.json"
        settings = ExporterSettings(jobs_directory=jobs)
        one = Sampler(settings, nvml, Attribution(jobs), state=StateFile(file))
        one.start()
        eventually(lambda: one.ready)
        file.unlink(missing_ok=True)
        one.keep()
        known = load(file, boot_id())
        assert known is not None
        assert len(known.jobs) == 1
        one.stop()

    def test_dropped_values_add_up(self, sampler: Callable[[Scenario], Sampler]) -> None:
        """Dropped values are counted over all snapshots."""
        one = sampler(Scenario([Card(0)], faults=[Fault("nvmlDeviceGetPowerUsage", 999)]))
        for _ in range(3):
            one.sample()
        page = one.page().body[Format.TEXT].decode()
        assert 'gpuwarden_dropped_values_total{reason="nvml_error"} 3.0' in page

    def test_open_files_stay_the_same(
        self, sampler: Callable[[Scenario], Sampler], children: Children
    ) -> None:
        """A hundred snapshots leave no open file behind."""
        child = children.start()
        one = sampler(Scenario([Card(0)], [SimulatedProcess(0, child.pid, memory=GIB, sm=5)]))
        one.sample()
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(100):
            one.sample()
        assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", Format.TEXT),
        ("*/*", Format.TEXT),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", Format.OPENMETRICS),
        ("application/openmetrics-text;q=0.1,text/plain;q=0.5", Format.TEXT),
        ("application/openmetrics-text;q=0, */*", Format.TEXT),
        ("application/openmetrics-text;q=nonsense", Format.TEXT),
        ("application/json", Format.TEXT),
        (";;;,,,q=", Format.TEXT),
    ],
)
def test_formats(accept: str, form: Format) -> None:
    """The format is what the scraper prefers, and text for whoever does not say."""
    assert wanted_format(accept) is form


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--collect.interval=5"], "lacks a unit"),
        (["--collect.interval=5m"], "outside 100ms to 1m"),
        (["--gpus=cuda"], "simulated:FILE"),
        (["--web.listen-address=x"], "HOST:PORT"),
        (["--web.max-requests=0"], "nobody is answered"),
    ],
)
def test_wrong_flags(arguments: list[str], message: str) -> None:
    """A wrong flag is refused at the start, with what to write instead."""
    answer = subprocess.run(
        [sys.executable, "-m", "gpuwarden", "exporter", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 2
    assert message in answer.stderr


def test_once(scenario_file: Path, tmp_path: Path) -> None:
    """The page can be had without a server."""
    Scenario([Card(0), Card(1)]).write(scenario_file)
    flags = [f"--gpus=simulated:{scenario_file}", f"--jobs.directory={tmp_path}", "--once"]
    answer = subprocess.run(
        [sys.executable, "-m", "gpuwarden", "exporter", *flags],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert _values(answer.stdout)["gpuwarden_nvml_up"] == 1
    assert answer.stdout.count("\ngpu_up{") == 2
