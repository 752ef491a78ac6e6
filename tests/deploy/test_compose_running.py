"""compose.yaml's own command lines with its own files, as plain processes on free ports.

No Docker engine runs here. What is put in its place: mounts are folders of a scratch root, names of
services are addresses of the loopback, and Prometheus and Alertmanager are Debian's. Grafana, Loki
and Alloy are not to be had, and are left out.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.deploy.dockerfiles import ROOT, lineage, stages
from tests.servers import ALERTMANAGER, PROMETHEUS, Server, binary, fetch, free_port, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.ruleengine.bodies import Json

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
STAGES = stages(ROOT / "deploy" / "docker" / "Dockerfile")
BIN = Path(sys.executable).parent

PORTS = {"exporter": 9835, "agent": 9836, "engine": 9837, "prometheus": 9090, "alertmanager": 9093}
HOSTS = {
    "node:9835": "exporter",
    "engine:9837": "engine",
    "prometheus:9090": "prometheus",
    "alertmanager:9093": "alertmanager",
    "0.0.0.0:9835": "exporter",
    "0.0.0.0:9836": "agent",
    "0.0.0.0:9837": "engine",
}
PROGRAMS = {"prometheus": PROMETHEUS, "alertmanager": ALERTMANAGER}

pytestmark = [pytest.mark.sweep, pytest.mark.system]


class Scratch:
    """The volumes, files and addresses of the stack below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in (*PORTS, "sinks", "smtp")}

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
        found: dict[str, Path] = {}
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
        return Server(url, self.folder / f"{name}.log", self.command(name), ready_path=ready)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[dict[str, Server]]:
    """Everything of compose.yaml that can be had here, started in its order."""
    scratch = Scratch(tmp_path)
    with contextlib.ExitStack() as started:
        scratch.run("init")
        scratch.run("jobs-ready")
        for volume in ("job-files", "agent-journal", "ledger"):
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
        servers["engine"] = started.enter_context(running(scratch.server("engine")))
        yield servers


def _scraped(prometheus: Server) -> set[str]:
    """Jobs of which every target answers."""
    rows = prometheus.query("min by (job) (up) == 1")
    return {row["metric"]["job"] for row in rows}


@pytest.mark.timeout(300)
def test_every_service_comes_up_and_the_job_reaches_the_engine(stack: dict[str, Server]) -> None:
    """Each is ready where its health check looks; the notebook is judged, and its log is listed."""
    assert b"gpu_job_holds_gpu" in fetch(stack["exporter"].url + "/metrics")
    jobs = until(lambda: stack["engine"].json("/v1/jobs")["jobs"], 120)
    assert {job["user"] for job in jobs}
    wanted = {"alertmanager", "gpuwarden", "gpuwarden-engine", "prometheus"}
    until(lambda: wanted == _scraped(stack["prometheus"]), 120)
    (listed,) = stack["engine"].log.parent.glob("volumes/job-files/logs/targets.json")
    until(lambda: "training.log" in listed.read_text(), 60)
