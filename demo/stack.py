"""One node and one cluster as processes on loopback ports; demo and system tests share it.

Everything is the product's own or Debian's: exporter, agent, engine, Prometheus, Alertmanager. The
configuration is that of `alerting/`, with the addresses of this stack and short group waits.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml
from tests.servers import ALERTMANAGER, PROMETHEUS, Server, binary, free_port

from demo.sinks import Sinks
from gpuwarden.exporter.scenarios import Card, Scenario

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]
COMMAND = Path(sys.executable).with_name("gpuwarden")
LAUNCHER = "gw-launcher"
"""Command name of the process that starts workloads; each child of it is the root of a job."""
NODE = "gpu-node-1"
TOKEN = "demo-token"  # noqa: S105 - of this stack alone, on loopback
CARDS = tuple(Card(index=index, name="NVIDIA A100-SXM4-40GB") for index in range(4))
ORDER = ("prometheus", "alertmanager", "exporter", "agent", "engine")


class Stack:
    """The running stack.

    Args:
        folder: everything that the stack writes.
        rules: the rule file.
        owner: user whose address the directory knows.
        engine: what engine.yaml says besides, or otherwise.

    Attributes:
        folder: everything that the stack writes.
        sinks: where notices arrive.
        servers: name -> process; `kill` and `start` them at will.
        scenario: file that describes the simulated cards.
        jobs: the directory of job files.
    """

    def __init__(
        self,
        folder: Path,
        rules: Path,
        *,
        owner: str,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self._engine = {} if engine is None else dict(engine)
        self.owner = owner
        self.sinks = Sinks()
        self.scenario = folder / "gpus.scenario"
        self.jobs = folder / "run"
        self.ledger = folder / "engine" / "ledger.sqlite"
        self.kill_switch = folder / "halt"
        self.servers: dict[str, Server] = {}
        self._rules = rules
        self._ports = {name: free_port() for name in ORDER}

    # -- life ------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.prepare()
        self.sinks.start()
        try:
            for name in ORDER:
                self.servers[name].start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop every process, last started first."""
        for name in reversed(ORDER):
            if name in self.servers:
                self.servers[name].stop()
        self.sinks.stop()

    def url(self, name: str) -> str:
        """Address of one of the servers."""
        return f"http://127.0.0.1:{self._ports[name]}"

    # -- configuration ---------------------------------------------------------------------

    def prepare(self) -> None:
        """Write every configuration file and key; nothing is started."""
        for name in ("keys", "engine", "agent", "logs", "alerting"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        Scenario(cards=CARDS).write(self.scenario)
        self._write_keys()
        self._write_prometheus()
        self._write_alertmanager()
        self._write_engine()
        gpus = f"simulated:{self.scenario}"
        common = ["--gpus", gpus, "--jobs.directory", str(self.jobs)]
        common += ["--attribution.launcher", LAUNCHER]
        commands: dict[str, list[str]] = {
            "prometheus": [
                binary(PROMETHEUS),
                f"--config.file={self.folder / 'alerting' / 'prometheus.yml'}",
                f"--storage.tsdb.path={self.folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{self._ports['prometheus']}",
                "--log.level=warn",
            ],
            "alertmanager": [
                binary(ALERTMANAGER),
                f"--config.file={self.folder / 'alerting' / 'alertmanager.yml'}",
                f"--storage.path={self.folder / 'alertmanager'}",
                f"--web.listen-address=127.0.0.1:{self._ports['alertmanager']}",
                f"--web.external-url={self.url('alertmanager')}",
                "--cluster.listen-address=",
                "--log.level=warn",
            ],
            "exporter": [
                str(COMMAND),
                "exporter",
                "--web.listen-address",
                f"127.0.0.1:{self._ports['exporter']}",
                "--collect.interval",
                "1s",
                *common,
            ],
            "agent": [
                str(COMMAND),
                "agent",
                "--web.listen-address",
                f"127.0.0.1:{self._ports['agent']}",
                "--node",
                NODE,
                "--keys",
                str(self.folder / "keys"),
                "--journal",
                str(self.folder / "agent" / "agent.journal"),
                "--kill-switch",
                str(self.kill_switch),
                *common,
            ],
            "engine": [
                str(COMMAND),
                "engine",
                "--config",
                str(self.folder / "engine" / "engine.yaml"),
            ],
        }
        for name, command in commands.items():
            log = self.folder / "logs" / f"{name}.log"
            self.servers[name] = Server(self.url(name), log, command)

    def _write_keys(self) -> None:
        private = self.folder / "engine" / "engine.key"
        if private.exists():
            return
        made = self.folder / "made-keys"
        subprocess.run(
            [str(COMMAND), "agent", "keys", "--out", str(made)],
            check=True,
            capture_output=True,
            timeout=60,
        )
        (made / "engine.key").rename(private)
        (made / "engine.pub").rename(self.folder / "keys" / "engine.pub")
        made.rmdir()

    def _write_prometheus(self) -> None:
        source, target = ROOT / "alerting", self.folder / "alerting"
        shutil.copy(source / "prometheus.yml", target / "prometheus.yml")
        shutil.copytree(source / "rules", target / "rules", dirs_exist_ok=True)
        (target / "targets").mkdir(exist_ok=True)
        for name, server in (
            ("nodes", "exporter"),
            ("engine", "engine"),
            ("alertmanagers", "alertmanager"),
            ("prometheus", "prometheus"),
        ):
            entry = [{"targets": [f"127.0.0.1:{self._ports[server]}"]}]
            (target / "targets" / f"{name}.yml").write_text(yaml.safe_dump(entry))

    def _write_alertmanager(self) -> None:
        target = self.folder / "alerting"
        shutil.copytree(ROOT / "alerting" / "templates", target / "templates", dirs_exist_ok=True)
        slack, token = target / "slack_url", target / "notify_token"
        slack.write_text(self.sinks.slack_url + "webhook")
        token.write_text(TOKEN)
        for secret in (slack, token):
            secret.chmod(0o600)
        config = yaml.safe_load((ROOT / "alerting" / "alertmanager.yml").read_text())
        # The sink on loopback speaks neither TLS nor AUTH.
        for name in ("smtp_auth_username", "smtp_auth_password_file"):
            del config["global"][name]
        config["global"] |= {
            "slack_api_url_file": str(slack),
            "smtp_smarthost": f"127.0.0.1:{self.sinks.smtp_port}",
            "smtp_require_tls": False,
        }
        for receiver in config["receivers"]:
            for hook in receiver.get("webhook_configs", []):
                hook["url"] = (
                    hook["url"]
                    .replace("http://engine:9837", self.url("engine"))
                    .replace("http://deadman:8025/", self.sinks.slack_url)
                )
                if "http_config" in hook:
                    hook["http_config"]["authorization"]["credentials_file"] = str(token)
        pending = [config["route"]]
        while pending:
            route = pending.pop()
            pending += route.get("routes", [])
            if "group_wait" in route:
                route["group_wait"] = "1s"
            if "group_interval" in route:
                route["group_interval"] = "5s"
        (target / "alertmanager.yml").write_text(yaml.safe_dump(config, sort_keys=False))

    def _write_engine(self) -> None:
        folder = self.folder / "engine"
        slack = folder / "slack_token"
        slack.write_text("xoxb-demo")
        slack.chmod(0o600)
        directory = {
            "version": 1,
            "operators": {"email": ["operators@example.com"]},
            "users": {
                self.owner: {
                    "email": f"{self.owner}@example.com",
                    "slack": "U0DEMO",
                    "team": "vision",
                }
            },
        }
        (folder / "directory.yaml").write_text(yaml.safe_dump(directory))
        config: dict[str, Any] = {
            "version": 1,
            "prometheus": {"url": self.url("prometheus")},
            "scrape_interval": "5s",
            "tick": "2s",
            "expected_nodes": 1,
            "rules": [str(self._rules)],
            "directory": "directory.yaml",
            "ledger": str(self.ledger),
            "alertmanagers": [self.url("alertmanager")],
            "notices": {"resend": "5s"},
            "agents": {
                "url": f"http://{{host}}:{self._ports['agent']}",
                "key_file": "engine.key",
            },
            "web": {
                "listen": f"127.0.0.1:{self._ports['engine']}",
                "token_file": str(self.folder / "alerting" / "notify_token"),
            },
            "smtp": {
                "host": "127.0.0.1",
                "port": self.sinks.smtp_port,
                "tls": "none",
                "sender": "gpuwarden@example.com",
            },
            "slack": {"url": self.sinks.slack_url, "token_file": "slack_token"},
            "kill_switch": str(self.kill_switch),
            "external_url": self.url("engine"),
            # All five jobs have one owner here, and must not wait for one another.
            "cool_down": "0s",
        }
        for name, value in self._engine.items():
            before = config.get(name)
            config[name] = (
                {**before, **value}
                if isinstance(before, dict) and isinstance(value, dict)
                else value
            )
        (folder / "engine.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

    # -- reading back ----------------------------------------------------------------------

    def prometheus(self, expression: str) -> list[dict[str, Any]]:
        """Result of an instant query: label set and value of each series."""
        return self.servers["prometheus"].query(expression)

    def value(self, expression: str) -> float | None:
        """The one value of an instant query, or None if there is none."""
        result = self.prometheus(expression)
        return float(result[0]["value"][1]) if result else None

    @contextlib.contextmanager
    def open_ledger(self) -> Iterator[sqlite3.Connection]:
        """The engine's ledger, read-only."""
        connection = sqlite3.connect(f"{self.ledger.as_uri()}?mode=ro", uri=True, timeout=10)
        connection.row_factory = sqlite3.Row
        try:
            yield connection
        finally:
            connection.close()

    # -- workloads -------------------------------------------------------------------------

    def launch(
        self, name: str, command: list[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a workload whose root process is the root of a job of its own.

        The calling process must carry the command name `LAUNCHER` (`as_launcher`).
        """
        log = self.folder / "logs" / f"{name}.log"
        with log.open("ab") as out:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env={**os.environ, **self.training_environment(), **(environment or {})},
                start_new_session=True,
            )

    def training_environment(self) -> dict[str, str]:
        """What a training on this node has in its environment."""
        settings = self.folder / "ultralytics"
        settings.mkdir(exist_ok=True)
        return {
            "GPUWARDEN_JOBS": str(self.jobs),
            "YOLO_CONFIG_DIR": str(settings),
            "YOLO_OFFLINE": "1",
            "YOLO_AUTOINSTALL": "0",
            # Three trainings share few cores; more threads would only fight each other.
            "OMP_NUM_THREADS": "1",
        }


@contextlib.contextmanager
def as_launcher() -> Iterator[None]:
    """Give this process the command name that marks a launcher of jobs; main thread only."""
    comm = Path("/proc/self/comm")
    before = comm.read_text().strip()
    comm.write_text(LAUNCHER)
    try:
        yield
    finally:
        comm.write_text(before)
