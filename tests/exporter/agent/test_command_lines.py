from __future__ import annotations

import dataclasses
import json
import urllib.error
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from tests.exporter.agent.nodes import LAUNCHER, AgentProcess
from tests.servers import fetch

from gpuwarden import agent_api
from gpuwarden.agent_api import Action, ActionReport, CommandLines, ProcessRef
from gpuwarden.cli import gpuwarden
from gpuwarden.clock import SystemClock
from gpuwarden.errors import RefusedAction
from gpuwarden.exporter.agent.command_lines import MAX_ARGUMENTS, MAX_CHARACTERS, Reader
from gpuwarden.exporter.processes import Launchers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.exporter.agent.nodes import Cards, Engine, Jobs

    from gpuwarden.agent_api import ActionRequest

SECRET = "hunter2hunter2"


@pytest.fixture
def agent(tmp_path: Path, cards: Cards, engine: Engine) -> Iterator[AgentProcess]:
    """An agent process that obeys the engine."""
    made = AgentProcess.beside(tmp_path, cards, engine)
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def reader() -> Reader:
    """Reads the command lines of this machine."""
    return Reader(Launchers.with_extra([LAUNCHER]))


def read(agent: AgentProcess, engine: Engine, request: ActionRequest) -> CommandLines:
    """Have command lines told."""
    body = request.encode()
    headers = {agent_api.SIGNATURE_HEADER: engine.sign(body)}
    return CommandLines.decode(fetch(f"{agent.url}/v1/arguments", body, **headers))


def refusal(
    agent: AgentProcess, engine: Engine | None, request: ActionRequest, path: str = "/v1/arguments"
) -> tuple[int, str]:
    """Status and reason of a refusal."""
    body = request.encode()
    headers = {} if engine is None else {agent_api.SIGNATURE_HEADER: engine.sign(body)}
    with pytest.raises(urllib.error.HTTPError) as raised:
        fetch(agent.url + path, body, **headers)
    with raised.value as error:
        return error.code, json.loads(error.read())["error"]


def test_command_lines_are_told_to_the_engine_alone(
    agent: AgentProcess, engine: Engine, jobs: Jobs, tmp_path: Path
) -> None:
    """They are told once, to who signed for this moment; neither journal nor report has them."""
    job = jobs.start("family", f"--api-key={SECRET}", "epochs=30")
    request = engine.request(job.job_id, Action.ARGUMENTS, grace=0.0)
    assert refusal(agent, None, request) == (401, "unsigned")
    late = engine.request(job.job_id, Action.ARGUMENTS, expires=SystemClock().wall() - 1)
    assert refusal(agent, engine, late) == (403, "expired")
    told = read(agent, engine, request)
    assert [item.pid for item in told.processes] == list(job.pids)
    root = told.processes[0]
    assert root.arguments is not None
    assert root.arguments[-2:] == ("--api-key=[redacted]", "epochs=30")
    assert (root.cut, told.cut) == (False, False)
    # Somebody who listened and sends it again learns nothing.
    assert refusal(agent, engine, request) == (409, "replayed")
    answer = fetch(f"{agent.url}/v1/actions/{request.decision_id}")
    assert ActionReport.decode(answer).action is Action.ARGUMENTS
    journal = (tmp_path / "agent.journal").read_bytes()
    assert b'"read"' in journal
    assert b"epochs=30" not in answer + journal + agent.log.read_bytes()
    assert SECRET.encode() not in answer + journal + agent.log.read_bytes()


def test_each_action_has_its_own_address(agent: AgentProcess, engine: Engine, jobs: Jobs) -> None:
    """What reads cannot be asked for as an action, and an action is none of what reads."""
    job = jobs.start("polite")
    reading = engine.request(job.job_id, Action.ARGUMENTS)
    assert refusal(agent, engine, reading, "/v1/actions") == (400, "malformed")
    assert refusal(agent, engine, engine.request(job.job_id)) == (400, "malformed")
    nobody = dataclasses.replace(reading, job_id="proc-00000000-1-1")
    assert refusal(agent, engine, nobody) == (404, "gone")
    assert job.states()


def test_an_operator_reads_them(
    agent: AgentProcess, engine: Engine, jobs: Jobs, tmp_path: Path
) -> None:
    """`agent arguments` shows a line per process, with nothing that a terminal would obey."""
    job = jobs.start("polite", "--token", SECRET, "a b", "\x1b]0;evil\x07", "\udcff")
    words = ["agent", "arguments", job.job_id, "--url", agent.url, "--key"]
    result = CliRunner().invoke(gpuwarden, [*words, str(engine.private)])
    assert result.exit_code == 0, result.output
    (line,) = result.output.splitlines()
    assert line.split()[0] == str(job.pid)
    assert "--token '[redacted]' 'a b'" in line
    assert SECRET not in line
    assert line.isprintable()
    wrong = tmp_path / "engine.key"
    wrong.write_text("no key")
    result = CliRunner().invoke(gpuwarden, [*words, str(wrong)])
    assert "cannot be used" in str(result.exception)


def test_an_answer_has_bounds(reader: Reader, engine: Engine, jobs: Jobs) -> None:
    """Endless arguments, and endlessly many, are cut, and the answer says so."""
    jobs.start("polite")
    many = jobs.start("polite", *("x" * 2000 for _ in range(20)), *range(400))
    told = reader.read(engine.request(many.job_id, Action.ARGUMENTS)).processes[0]
    assert told.arguments is not None
    assert (len(told.arguments), told.cut) == (MAX_ARGUMENTS, True)
    assert max(map(len, told.arguments)) == MAX_CHARACTERS
    # A secret that the end of what is read cuts in two has no shape any more: it is left out.
    huge = jobs.start("polite", "y" * 70_000, "--x")
    told = reader.read(engine.request(huge.job_id, Action.ARGUMENTS)).processes[0]
    assert told.arguments is not None
    assert told.cut
    assert not any("yy" in argument for argument in told.arguments)
    wide = jobs.start("ranks", *("\N{SNOWMAN}" * 1000 for _ in range(20)))
    answer = reader.read(engine.request(wide.job_id, Action.ARGUMENTS))
    assert answer.cut
    assert len(answer.encode()) < agent_api.MAX_BODY_BYTES


@dataclasses.dataclass
class Hurrying:
    """A clock by which everything takes two seconds."""

    now: float = 0.0

    def wall(self) -> float:
        """Unix time."""
        return self.now

    def monotonic(self) -> float:
        """Two seconds later each time."""
        self.now += 2
        return self.now


def test_a_reading_has_an_end(engine: Engine, jobs: Jobs) -> None:
    """Where each command line takes long, the answer is what was read in time, and says so."""
    job = jobs.start("loaders")
    reader = Reader(Launchers.with_extra([LAUNCHER]), clock=Hurrying())
    told = reader.read(engine.request(job.job_id, Action.ARGUMENTS))
    assert 0 < len(told.processes) < len(job.pids)
    assert told.cut


def test_who_is_of_no_platform_is_no_part_of_one(
    reader: Reader, engine: Engine, jobs: Jobs
) -> None:
    """What the engine saw is told of only where it can belong to the job."""
    job, other = jobs.start("polite"), jobs.start("polite")
    for job_id in ("slurm-main-7-0", "pod-8f4f5a0c-0000-4000-8000-000000000001"):
        request = engine.request(job_id, Action.ARGUMENTS, seen=job.seen)
        with pytest.raises(RefusedAction, match="no process"):
            reader.read(request)
    seen = (*other.seen, ProcessRef(1, 1))
    told = reader.read(engine.request(job.job_id, Action.ARGUMENTS, seen=seen))
    assert [item.pid for item in told.processes] == [job.pid]
