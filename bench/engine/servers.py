"""A Prometheus for the bench: started on a free port, asked about itself, stopped by its pid."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING

import httpx
import yaml

from gpuwarden.ruleengine.temporary_servers import prometheus_binary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

GROUP = "engine"


class Prometheus:
    """One that runs.

    Args:
        folder: with its configuration.
        url: its address.
        pid: of its process.
    """

    def __init__(self, folder: Path, url: str, pid: int) -> None:
        self._folder = folder
        self.url = url
        self.pid = pid
        self._client = httpx.Client(timeout=60.0, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def load(self, expressions: Sequence[str], interval: float) -> None:
        """Evaluate expressions as one rule group from now on; of none, no group."""
        rules = [
            {"record": f"bench:{number}", "expr": text} for number, text in enumerate(expressions)
        ]
        group = {"name": GROUP, "interval": f"{interval:g}s", "rules": rules}
        text = yaml.safe_dump({"groups": [group] if rules else []})
        (self._folder / "group.yml").write_text(text, encoding="utf-8")
        self._client.post(f"{self.url}/-/reload").raise_for_status()

    def group_seconds(self) -> float | None:
        """How long the group's last evaluation took, or None before the first."""
        text = self._client.get(f"{self.url}/metrics").text
        found = re.search(
            r"^prometheus_rule_group_last_duration_seconds\{.*\} (\S+)$", text, re.MULTILINE
        )
        return float(found[1]) if found else None

    def group_failures(self) -> float:
        """How many of the group's evaluations failed."""
        text = self._client.get(f"{self.url}/metrics").text
        found = re.findall(
            r"^prometheus_rule_evaluation_failures_total\{.*\} (\S+)$", text, re.MULTILINE
        )
        return sum(map(float, found))


@contextlib.contextmanager
def prometheus(folder: Path, *, gogc: int | None = None) -> Iterator[Prometheus]:
    """Run one with its data below a folder until the context ends.

    Args:
        folder: for its data, configuration and log.
        gogc: percent by which its heap may grow between two collections; None: its own default.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "prometheus.yml"
    config.write_text("global: {}\nrule_files: [group.yml]\n", encoding="utf-8")
    (folder / "group.yml").write_text("groups: []\n", encoding="utf-8")
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                prometheus_binary(),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--web.enable-remote-write-receiver",
                "--web.enable-lifecycle",
                # A series is written whole: the head must take what is more than an hour old.
                "--storage.tsdb.min-block-duration=8h",
                "--storage.tsdb.max-block-duration=8h",
                "--log.level=warn",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | ({} if gogc is None else {"GOGC": str(gogc)}),
        )
    server = Prometheus(folder, f"http://127.0.0.1:{port}", process.pid)
    try:
        _wait(server, process)
        yield server
    finally:
        server.close()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(server: Prometheus, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/-/ready", trust_env=False).is_success:
                return
        time.sleep(0.1)
    raise SystemExit("Prometheus does not come up; its log lies beside its data")
