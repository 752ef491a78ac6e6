"""Nodes come and go: exporters, the engine and a Prometheus that finds them by the engine alone."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.servers import Server, free_port, prometheus, running, until

from gpuwarden.exporter.simulated import Card, Scenario

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.system

RULES = """
version: 1
rules:
- id: busy
  target: job
  cold_start: 60s
  when: {signal: gpu_utilization, agg: avg, window: 5m, at_most: 5%, gpus: all}
  for: 5m
  stages: [{level: light, after: 0s, do: log}]
"""


@dataclass
class Cluster:
    """An engine, its Prometheus, and nodes on this machine."""

    folder: Path
    engine: Server
    prometheus: Server
    nodes: dict[str, subprocess.Popen[bytes]]

    def start_node(self, name: str) -> str:
        """Start an exporter that registers; gives its address."""
        address = f"127.0.0.1:{free_port()}"
        scenario = Scenario([Card(0, uuid=f"GPU-{name}")]).write(self.folder / name)
        command = [sys.executable, "-m", "gpuwarden", "exporter", f"--gpus=simulated:{scenario}"]
        command += [f"--web.listen-address={address}", f"--jobs.directory={self.folder / 'jobs'}"]
        command += [f"--engine.url={self.engine.url}"]
        command += [f"--engine.token-file={self.folder / 'node_token'}"]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.nodes[address] = subprocess.Popen(command, stderr=log)
        return address

    def known(self) -> dict[str, tuple[str, bool, bool]]:
        """Address -> state, lit, expected."""
        document: dict[str, Any] = self.engine.json("/v1/nodes")
        return {
            node["address"]: (node["state"], node["lit"], node["expected"])
            for node in document["nodes"]
        }

    def up(self) -> dict[str, str]:
        """Target -> whether Prometheus reaches it."""
        rows = self.prometheus.query('up{job="gpuwarden"}')
        return {row["metric"]["instance"]: row["value"][1] for row in rows}

    def gpus(self) -> set[str]:
        """Cards that Prometheus knows now."""
        return {row["metric"]["uuid"] for row in self.prometheus.query("gpu_up")}

    def halted(self) -> bool:
        """Whether nothing is ended for want of nodes."""
        page = until(lambda: self.engine.json("/v1/jobs"))
        return "dark_nodes" in {block["reason"] for block in page["halted"]}

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`gpuwarden nodes` with some words."""
        return subprocess.run(
            [sys.executable, "-m", "gpuwarden", "nodes", *words, "--engine.url", self.engine.url],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """An engine and a Prometheus without a node."""
    ports = {"engine": free_port(), "prometheus": free_port()}
    for name in ("node_token", "operator_token"):
        (tmp_path / name).write_text(f"{name}-secret\n")
    (tmp_path / "rules.yaml").write_text(RULES)
    settings = {
        "version": 1,
        "prometheus": {"url": f"http://127.0.0.1:{ports['prometheus']}"},
        "scrape_interval": "1s",
        "tick": "1s",
        "rules": ["rules.yaml"],
        "ledger": "ledger.sqlite",
        "kill_switch": "halt",
        "web": {
            "listen": f"127.0.0.1:{ports['engine']}",
            "operator_token_file": "operator_token",
        },
        "nodes": {"registration": {"token_file": "node_token", "heartbeat": "1s"}},
    }
    (tmp_path / "engine.yaml").write_text(yaml.safe_dump(settings))
    discovery = f"http://127.0.0.1:{ports['engine']}/v1/sd/prometheus"
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {
                "job_name": "gpuwarden",
                "http_sd_configs": [{"url": discovery, "refresh_interval": "1s"}],
            }
        ],
    }
    command = [sys.executable, "-m", "gpuwarden", "engine"]
    command += ["--config", str(tmp_path / "engine.yaml")]
    log = tmp_path / "engine.log"
    url = f"http://127.0.0.1:{ports['engine']}"
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(running(Server(url, log, command, ready_path="/-/healthy")))
        found = stack.enter_context(
            prometheus(yaml.safe_dump(config), tmp_path / "tsdb", port=ports["prometheus"])
        )
        made = Cluster(tmp_path, engine, found, {})
        yield made
        for node in made.nodes.values():
            node.kill()
            node.wait()


def test_nodes_come_and_go(cluster: Cluster) -> None:
    """Found and scraped when they come; missed when they vanish; not missed after a goodbye."""
    first, second = cluster.start_node("one"), cluster.start_node("two")
    until(lambda: cluster.gpus() == {"GPU-one", "GPU-two"})
    lit = ("registered", True, True)
    until(lambda: cluster.known() == {first: lit, second: lit})
    until(lambda: not cluster.halted())

    # It vanishes without a word: still a target, dark, and nothing may be ended.
    cluster.nodes[second].kill()
    until(lambda: cluster.known().get(second) == ("silent", False, True))
    until(lambda: cluster.up() == {first: "1", second: "0"})
    until(cluster.halted)
    # Neither a restart of the engine nor time makes it forget.
    cluster.engine.kill()
    cluster.engine.start()
    until(lambda: cluster.known().get(second, ("", True, False))[1:] == (False, True))
    until(cluster.halted)

    token = str(cluster.folder / "operator_token")
    listed = cluster.command("list")
    assert "1 of 2 expected nodes are lit" in listed.stderr
    assert second in listed.stdout
    assert cluster.command("forget", second, "--token-file", token).returncode == 0
    assert cluster.command("forget", second, "--token-file", token).returncode == 1
    until(lambda: cluster.up() == {first: "1"})
    until(lambda: not cluster.halted())

    # It comes back, and then says goodbye: from then on nobody misses it.
    third = cluster.start_node("two")
    until(lambda: cluster.known().get(third) == lit)
    cluster.nodes[third].terminate()
    assert cluster.nodes[third].wait(timeout=20) == 0
    until(lambda: cluster.known()[third] == ("left", False, False))
    until(lambda: cluster.up() == {first: "1"})
    until(lambda: not cluster.halted())
