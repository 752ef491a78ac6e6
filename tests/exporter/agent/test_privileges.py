from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.exporter.agent.nodes import HERE, AgentProcess

from gpuwarden.agent_api import Outcome
from gpuwarden.exporter import simulated

if TYPE_CHECKING:
    from pathlib import Path

    from tests.exporter.agent.nodes import Cards, Engine, Jobs

SCRIPT = HERE / "unprivileged.py"
AGENT, EXPORTER = "gpuwarden-agent.service", "gpuwarden-exporter.service"
USER = 4343

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to give up")

READS = {
    "sees whose it is",
    "sees what it runs",
    "sees what it read",
    "sees its command line",
    "sees its files",
}
SIGNALS = {"may signal it", "may kill it by its pid", "may signal init"}
WRITES = {"may write its files"}


def rights(unit: str, pid: int, file: Path) -> set[str]:
    """What a unit's rights allow on somebody else's process and file."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), unit, "probe", str(pid), str(file)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {name for name, allowed in json.loads(done.stdout).items() if allowed}


@pytest.mark.parametrize(
    ("unit", "allowed"), [(EXPORTER, READS), (AGENT, READS | SIGNALS | WRITES)]
)
def test_a_unit_gives_no_more_than_its_program_needs(
    unit: str, allowed: set[str], jobs: Jobs, tmp_path: Path
) -> None:
    """The exporter reads everything and changes nothing; the agent signals, and is not root."""
    tenant = jobs.start("tenant").pids[1]
    file = tmp_path / "theirs"
    file.write_text("x")
    file.chmod(0o600)
    os.chown(file, 4242, 4242)
    assert rights(unit, tenant, file) == allowed
    assert file.stat().st_uid == 4242


def unprivileged(agent: AgentProcess, unit: str, folder: Path) -> AgentProcess:
    """The agent, to be started with the rights of a unit."""
    state = folder / "state"
    state.mkdir()
    simulated.build(state / "gpuwarden")
    for path in (state, *state.rglob("*")):
        os.chown(path, USER, USER)
    arguments = [
        item.replace(f"={folder}/", f"={state}/")
        if item.startswith(("--journal", "--jobs.directory"))
        else item
        for item in agent.arguments
    ]
    scenario = folder / "scenario"
    for path in folder.glob(f"{scenario.name}*"):
        os.chown(path, USER, USER)
    command = [sys.executable, str(SCRIPT), unit, "gpuwarden", "agent"]
    return AgentProcess(arguments, agent.url, agent.log, command=command)


@pytest.mark.parametrize(
    ("unit", "outcome", "reason"),
    [(AGENT, Outcome.RECLAIMED, ""), (EXPORTER, Outcome.REFUSED, "permission")],
)
def test_an_agent_ends_another_users_job_with_the_rights_of_its_unit(
    unit: str, outcome: Outcome, reason: str, *, jobs: Jobs, cards: Cards, engine: Engine,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What deploy/systemd gives the agent is enough; what it gives the exporter ends nobody."""
    host = jobs.start("tenant")
    tenant = host.pids[1]
    cards.hold(tenant)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "state"))
    agent = unprivileged(AgentProcess.beside(tmp_path, cards, engine), unit, tmp_path)
    agent.start()
    try:
        request = engine.request(host.part(tenant), grace=5.0)
        agent.post(engine, request)
        report = agent.outcome(request.decision_id)
    finally:
        agent.stop()
    assert (report.outcome, report.reason) == (outcome, reason)
    assert (tenant in host.states()) is (outcome is Outcome.REFUSED)
    assert host.pid in host.states()
