"""Drills on real parts: one goes through, one that nobody starts pages, a slow step is named."""

from __future__ import annotations

import contextlib
import getpass
import json
import subprocess
from typing import TYPE_CHECKING

import pytest
from demo.stack import COMMAND, Stack, as_launcher
from tests.servers import fetch, until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.system

ADMIN = "an-admins-token-1"
NODE = "127.0.0.1"
RULE = """
version: 1
limits: {terminate: {per_tick: 1, per_hour: 0, per_user_per_day: 0,
  halt_above_share_of_running: 10%}}
rules:
- id: drill
  description: A rehearsal.
  mode: enforce
  target: job
  match: {user: USER, run_id: "drill-.*"}
  cold_start: 0s
  ignore_phases: {}
  when:
    all:
    - {signal: gpu_utilization, agg: max, window: 3 samples, at_most: 5%, gpus: all}
    - {signal: gpu_memory, agg: min, window: 3 samples, above: 1MiB, gpus: all}
  for: 4s
  clear_after: 10s
  stages:
  - {level: moderate, after: 0s, do: notify}
  - {level: severe, after: 6s, do: terminate, notice_delivered_for: 4s, grace: 3s,
     max_work_lost: 1h}
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A node whose drills are overdue soon; all real limits are 0, since drills count apart."""
    folder = tmp_path_factory.mktemp("drills")
    rules = folder / "drill.yaml"
    rules.write_text(RULE.replace("USER", getpass.getuser()))
    (folder / "admin.token").write_text(ADMIN)
    engine = {
        "settle": "4s",
        "web": {
            "tokens": [{"name": "root", "role": "admin", "file": str(folder / "admin.token")}],
            "read": "everyone",
        },
        "drill": {
            "rule": "drill",
            "user": getpass.getuser(),
            "per_hour": 10,
            "per_day": 10,
            "nodes": [NODE],
            "every": "15s",
            "budgets": {"seen": "60s", "detected": "90s", "notified": "30s", "due": "60s"},
        },
    }
    with as_launcher(), Stack(folder, rules, owner=getpass.getuser(), engine=engine) as running:
        yield running


def operator(stack: Stack, *words: str) -> list[str]:
    """A command of `gpuwarden drill`, as an admin gives it."""
    asked = ["--engine.url", stack.url("engine"), "--token-file", str(stack.folder / "admin.token")]
    return [str(COMMAND), "drill", words[0], *asked, *words[1:]]


def victim(stack: Stack, *words: str) -> list[str]:
    """The command that starts a victim on the simulated node."""
    gpus = f"simulated:{stack.scenario}"
    jobs = ["--jobs.directory", str(stack.jobs)]
    return [str(COMMAND), "drill", "victim", "--gpus", gpus, *jobs, "--for", "5m", *words]


def known(stack: Stack) -> bool:
    """Whether the engine has seen the node yet."""
    found = json.loads(fetch(stack.url("engine") + "/v1/jobs"))["nodes"]
    return found is not None and found["lit"] == 1


@contextlib.contextmanager
def drilled(stack: Stack, name: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`gpuwarden drill run`, and a victim of these options; what the first says is in a log."""
    until(lambda: known(stack), 60)
    drill = stack.launch(name, operator(stack, "run", "--node", NODE))
    said = stack.folder / "logs" / f"{name}.log"
    # On a node of its own it would start the victim; here both would be one job of one user.
    until(lambda: "Waiting for a victim" in said.read_text(), 60)
    started = stack.launch(f"{name}-victim", victim(stack, *words))
    try:
        yield drill
    finally:
        for process in (drill, started):
            process.kill()
            process.wait(60)


def series(stack: Stack) -> dict[str, float]:
    """The engine's page: series -> value."""
    lines = fetch(stack.url("engine") + "/metrics").decode().splitlines()
    rows = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}


def paged(stack: Stack, name: str) -> list[dict[str, str]]:
    """Labels of the alerts of a name that have reached Alertmanager."""
    found = json.loads(fetch(stack.url("alertmanager") + "/api/v2/alerts"))
    return [item["labels"] for item in found if item["labels"]["alertname"] == name]


@pytest.mark.sweep
@pytest.mark.timeout(200)
def test_a_victim_that_nobody_starts_pages(stack: Stack) -> None:
    """The node is on the schedule, and after its time Alertmanager has the page."""
    (labels,) = until(lambda: paged(stack, "GpuwardenDrillSilent"), 120)
    assert (labels["node"], labels["severity"]) == (NODE, "page")
    done = subprocess.run(
        operator(stack, "status"), capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "(overdue)" in done.stdout


@pytest.mark.timeout(300)
def test_a_drill_goes_through_from_sample_to_proof(stack: Stack) -> None:
    """A deaf victim is told, ended by SIGKILL and proven gone, and counts as nothing else."""
    with drilled(stack, "drill", "--on-term", "ignore") as drill:
        assert until(lambda: drill.poll() is not None, 200)
    said = (stack.folder / "logs" / "drill.log").read_text()
    assert drill.returncode == 0, said
    steps = ["seen", "detected", "notified", "due", "authorised", "acting", "proven"]
    assert [line.split()[0] for line in said.splitlines() if line.split()[0] in steps] == steps
    assert f"the drill on {NODE} passed" in said
    told = series(stack)
    assert told[f'gpuwarden_drill_result{{node="{NODE}",result="passed"}}'] == 1
    assert f'gpuwarden_drill_last_success_timestamp_seconds{{node="{NODE}"}}' in told
    assert told["gpu_released_success_total"] == 0
    assert told["gpu_memory_freed_bytes_total"] == 0
    assert told["gpu_idle_detected_total"] == 0
    ended = 'action="terminate",mode="enforce",outcome="verified",rule="drill"'
    assert told[f"gpuwarden_decisions_total{{{ended}}}"] == 1
    assert any("rehearsal" in item.text for item in stack.sinks.received)


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_a_step_that_is_made_slow_is_named(stack: Stack) -> None:
    """Slack and the mail server refuse for longer than the budget: the page names `notified`."""
    stack.sinks.slack_refuses = "channel_not_found"
    stack.sinks.mail_refuses = "450 4.2.0 try again later"
    with drilled(stack, "slow") as drill:
        (labels,) = until(lambda: paged(stack, "GpuwardenDrillSlow"), 200)
        assert (labels["node"], labels["step"]) == (NODE, "notified")
        assert drill.poll() is None
        stack.sinks.slack_refuses = stack.sinks.mail_refuses = None
        until(lambda: drill.poll() is not None, 200)
    said = (stack.folder / "logs" / "slow.log").read_text()
    assert drill.returncode == 1, said
    assert f"the drill on {NODE} was proven, but slow: notified took" in said
    assert series(stack)[f'gpuwarden_drill_result{{node="{NODE}",result="slow"}}'] == 1
