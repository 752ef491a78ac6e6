"""compose.yaml's own command lines with its own files, as plain processes on free ports.

No Docker engine runs here. What is put in its place: mounts are folders of a scratch root, names of
services are addresses of the loopback, and Prometheus and Alertmanager are Debian's. Grafana, Loki
and Alloy are not to be had, and are left out.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.deploy.dockerfiles import ROOT, lineage, stages
from tests.servers import ALERTMANAGER, PROMETHEUS, Server, binary, fetch, free_port, running, until

from gpuwarden.schedule_api import Outcome, ScheduleDocument

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.ruleengine.bodies import Json

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
STAGES = stages(ROOT / "deploy" / "docker" / "Dockerfile")
BIN = Path(sys.executable).parent

PORTS = {
    "exporter": 9835,
    "agent": 9836,
    "engine": 9837,
    "scheduler": 9839,
    "prometheus": 9090,
    "alertmanager": 9093,
}
HOSTS = {
    "node:9835": "exporter",
    "engine:9837": "engine",
    "scheduler:9839": "scheduler",
    "prometheus:9090": "prometheus",
    "alertmanager:9093": "alertmanager",
    "0.0.0.0:9835": "exporter",
    "0.0.0.0:9836": "agent",
    "0.0.0.0:9837": "engine",
    "0.0.0.0:9839": "scheduler",
}
PROGRAMS = {"prometheus": PROMETHEUS, "alertmanager": ALERTMANAGER}

pytestmark = [pytest.mark.sweep, pytest.mark.system]


class Scratch:
    """The volumes, files and addresses of the stack below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in (*PORTS, "sinks", "smtp")}
        self._mounted: dict[str, dict[str, Path]] = {}
        self.socket = Path(tempfile.mkdtemp(prefix="gw-")) / "s.sock"

    def volume(self, name: str) -> Path:
        """A named volume's folder."""
        path = self.folder / "volumes" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def words(self, text: str) -> str:
        """A text with the stack's addresses in the place of the services'."""
        for host, name in HOSTS.items():
            text = text.replace(host, f"127.0.0.1:{self.ports[name]}")
        text = text.replace("{host}:9836", f"{{host}}:{self.ports['agent']}")
        text = re.sub(r"(?:mail|slack|deadman):8025", f"127.0.0.1:{self.ports['sinks']}", text)
        text = text.replace(
            "host: mail, port: 1025", f"host: 127.0.0.1, port: {self.ports['smtp']}"
        )
        return text.replace("mail:1025", f"127.0.0.1:{self.ports['smtp']}")

    def mounts(self, name: str) -> dict[str, Path]:
        """Path in the container -> path here; files of the repository are copied with addresses."""
        if name in self._mounted:
            return self._mounted[name]
        found = self._mounted[name] = {}
        for volume in SERVICES[name].get("volumes", []):
            source, target = volume.split(":")[:2]
            if source.startswith("."):
                here = self.folder / "files" / name / target.lstrip("/")
                self._copy(ROOT / source, here)
            else:
                here = self.volume(source)
            found[target] = here
        for path in found.values():
            for file in [path] if path.is_file() else []:
                file.write_text(self.paths(file.read_text(), found))
        return found

    def _copy(self, source: Path, here: Path) -> None:
        here.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, here, dirs_exist_ok=True)
        else:
            shutil.copy(source, here)
        for path in here.rglob("*.y*ml") if here.is_dir() else [here]:
            path.write_text(self.words(path.read_text()))

    def paths(self, text: str, mounts: dict[str, Path]) -> str:
        """A text with paths here in the place of the container's."""
        for target in sorted(mounts, key=len, reverse=True):
            text = re.sub(
                rf"(?<![\w/.]){re.escape(target)}(?=[/\s,:}}\"']|$)", str(mounts[target]), text
            )
        return text

    def command(self, name: str) -> list[str]:
        """What the container would run."""
        service = SERVICES[name]
        mounts = self.mounts(name)
        entry = service.get("entrypoint")
        if entry is None:
            entry = [binary(PROGRAMS[name])] if name in PROGRAMS else self._entrypoint(service)
        words = [
            self.paths(self.words(word), mounts) for word in [*entry, *service.get("command", [])]
        ]
        if name in PROGRAMS:
            words.append(f"--web.listen-address=127.0.0.1:{self.ports[name]}")
        known = {"gpuwarden": BIN / "gpuwarden", "python": sys.executable}
        return [str(known.get(words[0], words[0])), *words[1:]]

    def _entrypoint(self, service: dict[str, Any]) -> list[str]:
        found: Json = [
            yaml.safe_load(words)
            for stage in lineage(STAGES, service["build"]["target"])
            for words in stage.all("ENTRYPOINT")
        ][-1]
        return [str(word) for word in found]

    def run(self, name: str) -> None:
        """Run a service that ends by itself."""
        environment = {**os.environ, "PATH": f"{BIN}:/usr/bin:/bin"}
        done = subprocess.run(
            self.command(name),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr

    def server(self, name: str, ready: str = "/-/ready") -> Server:
        """A service that lasts, not started."""
        url = f"http://127.0.0.1:{self.ports[name]}"
        mounts = self.mounts(name)
        given = [
            f"{key}={self.paths(str(value), mounts)}"
            for key, value in SERVICES[name].get("environment", {}).items()
        ]
        command = [*(["/usr/bin/env", *given] if given else []), *self.command(name)]
        return Server(url, self.folder / f"{name}.log", command, ready_path=ready)

    def scheduler(self) -> Server:
        """The scheduler, whose users are whoever runs the tests."""
        server = self.server("scheduler")
        mounts = self.mounts("scheduler")
        policy, training = mounts["/etc/gpuwarden/policy.yaml"], mounts["/training.py"]
        policy.write_text(policy.read_text().replace("[ana]", f"[{getpass.getuser()}]"))
        training.write_text(training.read_text().replace("/opt/gpuwarden/bin", str(BIN)))
        # A path of a socket has 107 characters at most.
        server.command.append(f"--socket={self.socket}")
        return server


@dataclass(frozen=True)
class Stack:
    """What is up, and where its files are."""

    scratch: Scratch
    servers: dict[str, Server]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Everything of compose.yaml that can be had here, started in its order."""
    scratch = Scratch(tmp_path)
    with contextlib.ExitStack() as started:
        scratch.run("init")
        scratch.run("jobs-ready")
        started.callback(shutil.rmtree, scratch.socket.parent)
        for volume in ("job-files", "agent-journal", "ledger", "trainings", "scheduler-state"):
            scratch.volume(volume)
        servers = {}
        sinks = scratch.server("sinks")
        sinks.command = [sys.executable, str(ROOT / "deploy/compose/sinks.py")]
        sinks.command += [f"--http-port={scratch.ports['sinks']}"]
        sinks.command += [f"--smtp-port={scratch.ports['smtp']}"]
        servers["sinks"] = started.enter_context(running(sinks))
        for name in ("exporter", "agent", "prometheus", "alertmanager"):
            server = scratch.server(name)
            if name in {"exporter", "agent"}:
                server.command.append(f"--release-file={tmp_path}/release")
            if name == "agent":
                server.command.append(f"--kill-switch={tmp_path}/halt")
                server.command.append(f"--jobs.directory={scratch.volume('job-files')}")
            if name == "exporter":
                server.command.append(f"--jobs.directory={scratch.volume('job-files')}")
            servers[name] = started.enter_context(running(server))
        jobs = subprocess.Popen(scratch.command("jobs"))
        started.callback(jobs.wait, 30)
        started.callback(jobs.terminate)
        servers["scheduler"] = started.enter_context(running(scratch.scheduler()))
        servers["engine"] = started.enter_context(running(scratch.server("engine")))
        yield Stack(scratch, servers)


def _scraped(prometheus: Server) -> set[str]:
    """Jobs of which every target answers."""
    rows = prometheus.query("min by (job) (up) == 1")
    return {row["metric"]["job"] for row in rows}


def _submitted(stack: Stack, name: str, *words: str) -> None:
    """Submit compose.yaml's stand-in for a training, as its head tells."""
    mounts = stack.scratch.mounts("scheduler")
    done = subprocess.run(
        [
            *(BIN / "gpuwarden", "submit", "model=yolov8n.yaml", "data=coco8.yaml"),
            *("--program", mounts["/training.py"], "--time", "1h", "--yes", "--name", name),
            *("--gpus", "2", "--socket", stack.scratch.socket, *words),
            *("--policy", mounts["/etc/gpuwarden/policy.yaml"]),
        ],
        cwd=stack.scratch.volume("trainings"),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _document(stack: Stack) -> ScheduleDocument:
    """What the scheduler tells the engine's pages, who have a token."""
    token = (stack.scratch.volume("scheduler-secrets") / "pages_token").read_text()
    url = stack.servers["scheduler"].url + "/v1/schedule"
    return ScheduleDocument.decode(fetch(url, Authorization=f"Bearer {token}"))


def _states(stack: Stack) -> dict[str, str]:
    """Name -> state of every job."""
    return {entry.name: entry.state.value for entry in _document(stack).entries}


@pytest.mark.timeout(400)
def test_every_service_comes_up_and_does_its_part(stack: Stack) -> None:
    """Each is ready where its health check looks; a job is judged, one leaves for another."""
    servers = stack.servers
    assert b"gpu_job_holds_gpu" in fetch(servers["exporter"].url + "/metrics")
    _submitted(stack, "patient", "epochs=4", "--team", "vision", "--priority", "low")
    jobs = until(lambda: servers["engine"].json("/v1/jobs")["jobs"], 120)
    assert {job["user"] for job in jobs}
    until(lambda: _states(stack).get("patient") == "running", 60)
    _submitted(stack, "urgent", "epochs=1", "--team", "speech", "--priority", "high")
    until(lambda: b"urgent" in fetch(servers["engine"].url + "/queue"), 60)
    wanted = {"alertmanager", "gpuwarden", "gpuwarden-engine", "gpuwarden-scheduler", "prometheus"}
    until(lambda: wanted == _scraped(servers["prometheus"]), 120)
    (listed,) = servers["engine"].log.parent.glob("volumes/job-files/logs/targets.json")
    until(lambda: "training.log" in listed.read_text(), 60)
    until(lambda: set(_states(stack).values()) == {"done"}, 200)
    (left,) = _document(stack).preemptions
    assert (left.run_id, left.outcome, len(left.steps)) == ("patient", Outcome.DONE, 6)
    assert (stack.scratch.volume("trainings") / "patient.step").read_text() == "40"
