"""`gpuwarden doctor` on a whole installation, well at first and then no more."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.servers import until

if TYPE_CHECKING:
    from demo.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.sweep, pytest.mark.timeout(300)]
_OF_THIS_MACHINE = {"node.cgroups", "node.clock", "node.processes", "node.kernel", "ledger.disk"}
"""What the machine that tests run on may lack."""


def doctor(*words: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Exit status, and the findings by their check."""
    done = subprocess.run(
        [sys.executable, "-m", "gpuwarden", "doctor", *words, "-o", "json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found: dict[str, list[dict[str, Any]]] = {}
    for item in json.loads(done.stdout)["findings"]:
        found.setdefault(item["id"], []).append(item)
    return done.returncode, found


def troubles(found: dict[str, list[dict[str, Any]]]) -> set[str]:
    """Checks of which something is to be done, but for what this machine lacks."""
    return {
        name
        for name, items in found.items()
        if any(item["status"] in ("warning", "failed") for item in items)
    } - _OF_THIS_MACHINE


def test_an_installation_that_is_well_and_one_that_is_not(stack: Stack) -> None:
    """The demo's stack is well; then what breaks is found, and what depends on it."""
    config = stack.folder / "engine/engine.yaml"
    centre = ("engine", "--config", str(config))
    until(lambda: stack.value("up{job='gpuwarden-engine'}") == 1)
    until(lambda: stack.value("count(count_over_time(up{job='gpuwarden'}[20s]) > 2)") == 1)
    until(lambda: not stack.servers["engine"].json("/v1/enforcement")["halted"])  # it settles
    status, found = doctor(*centre)
    assert troubles(found) == set(), [found[name] for name in troubles(found)]
    assert status == 0
    assert found["prometheus.rules"][0]["said"].endswith("rules of this version")
    node = ("node", "--engine.url", stack.url("engine"))
    _, found = doctor(*node)
    assert troubles(found) == set()
    assert found["node.agent"][0]["said"].startswith("node gpu-node-1")

    stack.kill_switch.touch()
    (stack.folder / "keys/engine.pub").rename(stack.folder / "engine.pub")
    for name in ("exporter", "alertmanager"):
        stack.servers[name].kill()
    until(lambda: stack.value("up{job='gpuwarden'}") == 0)
    status, found = doctor(*centre)
    assert status == 1
    assert troubles(found) >= {
        "prometheus.nodes",
        "alertmanager.answer",
        "engine.enforcement",
        "agents.keys",
    }
    assert found["agents.answer"][0]["status"] == "ok"
    _, found = doctor(*node, "--exporter.url", stack.url("exporter"))
    assert troubles(found) >= {"node.exporter", "node.kill_switch", "node.keys"}
