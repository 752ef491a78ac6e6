from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from tests.exporter.agent.nodes import AgentProcess
from tests.servers import fetch, until

from gpuwarden import agent_api
from gpuwarden.agent_api import (
    Action,
    ActionReport,
    ActionState,
    NodeInfo,
    Outcome,
)
from gpuwarden.cli import gpuwarden
from gpuwarden.clock import SystemClock
from gpuwarden.exporter import releases
from gpuwarden.exporter.agent import app, keys
from gpuwarden.exporter.processes import boot_id

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.exporter.agent.nodes import Cards, Engine, Jobs


@pytest.fixture
def agent(tmp_path: Path, cards: Cards, engine: Engine) -> Iterator[AgentProcess]:
    """An agent process that obeys the engine."""
    made = AgentProcess.beside(tmp_path, cards, engine)
    made.start()
    try:
        yield made
    finally:
        if made.running:
            made.stop()


def refusal(url: str, body: bytes | None = None, **headers: str) -> tuple[int, dict]:
    """Status and reason with which the agent refuses."""
    with pytest.raises(urllib.error.HTTPError) as raised:
        fetch(url, body, **headers)
    with raised.value as error:
        return error.code, json.loads(error.read())


def test_the_api_ends_a_job(agent: AgentProcess, engine: Engine, jobs: Jobs, cards: Cards) -> None:
    """The engine learns the node, has a job ended, and reads the proof."""
    job = jobs.start("polite")
    cards.hold(job.pid)
    info = NodeInfo.decode(fetch(f"{agent.url}/v1/node"))
    assert info == NodeInfo(engine.node, boot_id(), (engine.key_id,))
    request = engine.request(job.job_id)
    assert agent.post(engine, request).decision_id == request.decision_id
    report = agent.outcome(request.decision_id)
    assert report.outcome is Outcome.RECLAIMED
    assert agent.post(engine, engine.request(job.job_id)) == report


def test_a_repeat_is_answered_however_late(
    agent: AgentProcess, engine: Engine, jobs: Jobs, cards: Cards
) -> None:
    """Who lost the answer and asks again learns what became of it, and nothing is done again."""
    job, other = jobs.start("polite"), jobs.start("polite")
    for item in (job, other):
        cards.hold(item.pid)
    request = engine.request(job.job_id, expires=SystemClock().wall() + 2)
    agent.post(engine, request)
    report = agent.outcome(request.decision_id)
    until(lambda: SystemClock().wall() > request.expires)
    assert agent.post(engine, request) == report
    # What is not known is not taken on so late, nor may an old signature ask for something else.
    url = f"{agent.url}/v1/actions"
    for late, error in (
        (engine.request(other.job_id, expires=request.expires), "expired"),
        (engine.request(job.job_id, expires=request.expires), "expired"),
        (dataclasses.replace(request, job_id=other.job_id), "decision_reused"),
    ):
        body = late.encode()
        answer = refusal(url, body, **{agent_api.SIGNATURE_HEADER: engine.sign(body)})[1]
        assert answer["error"] == error
    assert other.states()


def test_an_agent_without_its_journal_is_not_ready(
    agent: AgentProcess, engine: Engine, tmp_path: Path
) -> None:
    """Monitoring learns that the agent would refuse everything, and why."""
    (tmp_path / "agent.journal").unlink()
    with pytest.raises(urllib.error.HTTPError) as raised:
        fetch(f"{agent.url}/-/ready")
    with raised.value as error:
        assert (error.code, b"put it back" in error.read()) == (503, True)
    report = agent.post(engine, engine.request("proc-1", Action.INSPECT))
    assert (report.outcome, report.reason) == (Outcome.REFUSED, "journal")


_POST = b"POST /v1/actions HTTP/1.1\r\nHost: a\r\n"
_CHUNK = b"8000\r\n%b\r\n" % (b"a" * 0x8000)
_SIGNATURE = agent_api.SIGNATURE_HEADER.encode()
HOSTILE = (
    (b"GET /" + b"a" * 1_000_000, 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"x: y\r\n" * 200_000, 400),
    (_POST + b"Content-Length: -1\r\n\r\n", 400),
    (_POST + b"Content-Length: 99999999999\r\n\r\n" + b"a" * 300_000, 413),
    (_POST + b"Transfer-Encoding: chunked\r\n\r\n" + _CHUNK * 12, 413),
    (_POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    (_POST + _SIGNATURE + b": \xff\xfe\r\nContent-Length: 2\r\n\r\n{}", 401),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    (b"GET /v1/actions/..%2f..%2fetc%2fpasswd HTTP/1.1\r\nHost: a\r\n\r\n", 404),
)  # fmt: skip


def test_hostile_requests_are_refused(agent: AgentProcess) -> None:
    """Endless headers and bodies, wrong lengths and no HTTP at all: answered, and forgotten."""
    host, _, port = agent.url.removeprefix("http://").rpartition(":")
    answers = []
    for sent, _status in HOSTILE:
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(sent)
            with connection.makefile("rb") as answer:
                answers.append(int(answer.readline().split()[1]))
    assert answers == [status for _, status in HOSTILE]
    assert fetch(f"{agent.url}/-/ready")


def test_a_killed_agent_finishes_what_it_began(
    agent: AgentProcess, engine: Engine, jobs: Jobs, cards: Cards
) -> None:
    """Killed between SIGTERM and SIGKILL, the agent ends the job after its restart, once."""
    job = jobs.start("family")
    cards.hold(job.pid)
    request = engine.request(job.job_id, grace=3.0)
    agent.post(engine, request)
    agent.outcome(request.decision_id, "sigterm")
    assert agent.stop(signal.SIGKILL) == -signal.SIGKILL
    assert set(job.states()) == set(job.pids)
    agent.start()
    assert agent.post(engine, engine.request(job.job_id)).decision_id == request.decision_id
    report = agent.outcome(request.decision_id)
    assert report.outcome is Outcome.RECLAIMED
    assert {item.pid: item.ended_by for item in report.processes} == dict.fromkeys(
        job.pids, "SIGKILL"
    )
    assert not job.states()


def test_sigterm_ends_an_agent_in_the_middle_of_a_grace(
    agent: AgentProcess, engine: Engine, jobs: Jobs, cards: Cards
) -> None:
    """The agent ends orderly, and the job runs on until the next agent finishes."""
    job = jobs.start("stubborn")
    cards.hold(job.pid)
    request = engine.request(job.job_id, grace=600.0)
    agent.post(engine, request)
    agent.outcome(request.decision_id, "sigterm")
    assert agent.stop() == 0, agent.log.read_text()
    until(lambda: job.states() == {job.pid: "S"})
    agent.start()
    assert agent.outcome(request.decision_id, "sigterm").state is ActionState.ACTING


def test_an_agent_that_cannot_start_leaves_nobody_stopped(
    agent: AgentProcess, engine: Engine, jobs: Jobs, cards: Cards
) -> None:
    """What a crash left stopped goes on, whatever else is in the way of the next start."""
    job = jobs.start("stubborn")
    cards.hold(job.pid)
    request = engine.request(job.job_id, grace=600.0)
    agent.post(engine, request)
    agent.outcome(request.decision_id, "sigterm")
    agent.stop(signal.SIGKILL)
    os.kill(job.pid, signal.SIGSTOP)
    until(lambda: job.states() == {job.pid: "T"})
    (engine.private.parent / "engine.pub").unlink()
    again = subprocess.run(
        [sys.executable, "-m", "gpuwarden", "agent", *agent.arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (again.returncode, "gpuwarden agent keys" in again.stderr) == (2, True)
    assert until(lambda: job.states() == {job.pid: "S"})


def test_an_unsigned_request_does_nothing(
    agent: AgentProcess, engine: Engine, jobs: Jobs, cards: Cards
) -> None:
    """Without the engine's signature the answer is a reason, and the job lives."""
    job = jobs.start("polite")
    cards.hold(job.pid)
    body, url = engine.request(job.job_id).encode(), f"{agent.url}/v1/actions"
    status, answer = refusal(url, body)
    assert (status, answer["error"]) == (401, "unsigned")
    signature = engine.sign(body)
    altered = body.replace(b'"grace":30.0', b'"grace":99.0')
    status, answer = refusal(url, altered, **{agent_api.SIGNATURE_HEADER: signature})
    assert (status, answer["error"]) == (401, "bad_signature")
    assert job.states()


def test_idle_connections_do_not_shut_the_engine_out(agent: AgentProcess) -> None:
    """A user who opens connections to the agent does not keep the engine from commanding it."""
    host, _, port = agent.url.removeprefix("http://").rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(2 * app.REQUESTS):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
        assert fetch(f"{agent.url}/v1/node")


def test_malformed_requests_are_answered(agent: AgentProcess, engine: Engine) -> None:
    """Wrong fields, too much of them, and unknown actions each have their status."""
    url = f"{agent.url}/v1/actions"
    body = engine.request("proc-1").encode().replace(b"terminate", b"obliterate")
    status, answer = refusal(url, body, **{agent_api.SIGNATURE_HEADER: engine.sign(body)})
    assert (status, answer["error"]) == (400, "malformed")
    assert "obliterate" in answer["message"]
    status, answer = refusal(url, b"x" * (agent_api.MAX_BODY_BYTES + 1))
    assert (status, answer["error"]) == (413, "too_large")
    status, answer = refusal(f"{url}/never-heard-of")
    assert (status, answer["error"]) == (404, "unknown_action")


def test_an_agent_without_a_key_is_not_ready(agent: AgentProcess, engine: Engine) -> None:
    """An agent whose keys were taken away serves, obeys nobody, and says that it is not ready."""
    assert fetch(f"{agent.url}/-/healthy")
    (engine.private.parent / "engine.pub").unlink()
    with pytest.raises(urllib.error.HTTPError) as raised:
        fetch(f"{agent.url}/-/ready")
    with raised.value as error:
        assert error.code == 503
    body = engine.request("proc-1").encode()
    status, answer = refusal(
        f"{agent.url}/v1/actions", body, **{agent_api.SIGNATURE_HEADER: engine.sign(body)}
    )
    assert (status, answer["error"]) == (401, "unknown_key")


def test_keys_are_exchanged_under_a_running_agent(
    agent: AgentProcess, engine: Engine, jobs: Jobs, cards: Cards, tmp_path: Path
) -> None:
    """A key commands from the moment its file is there until that is gone, without a restart."""
    job = jobs.start("polite")
    cards.hold(job.pid)
    pair = keys.generate(tmp_path / "next")
    successor = dataclasses.replace(engine, private=pair.private, key_id=pair.key_id)
    request = engine.request(job.job_id, decision_id="d-next")
    body, url = request.encode(), f"{agent.url}/v1/actions"
    early = refusal(url, body, **{agent_api.SIGNATURE_HEADER: successor.sign(body)})
    assert early[1]["error"] == "unknown_key"
    folder = engine.private.parent
    (folder / "next.pub").write_bytes(pair.public.read_bytes())
    (folder / "engine.pub").unlink()
    late = refusal(url, body, **{agent_api.SIGNATURE_HEADER: engine.sign(body)})
    assert late[1]["error"] == "unknown_key"
    assert job.states()
    agent.post(successor, request)
    assert agent.outcome("d-next").outcome is Outcome.RECLAIMED


def test_an_agent_serves_tls(agent: AgentProcess, tmp_path: Path) -> None:
    """With a certificate the API is HTTPS."""
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    subprocess.run(
        ["/usr/bin/openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
         "ec_paramgen_curve:P-256", "-nodes", "-keyout", key, "-out", certificate, "-days", "1",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    agent.stop()
    agent.arguments += [f"--web.tls-cert-file={certificate}", f"--web.tls-key-file={key}"]
    url = agent.url.replace("http:", "https:")
    context = ssl.create_default_context(cafile=str(certificate))
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    with agent.log.open("ab") as log:
        agent.process = subprocess.Popen(
            [sys.executable, "-m", "gpuwarden", "agent", *agent.arguments], stdout=log, stderr=log
        )

    def answer() -> bytes:
        with opener.open(f"{url}/v1/node", timeout=10) as response:
            content: bytes = response.read()
            return content

    assert NodeInfo.decode(until(answer)).node == "node-1"


# ---------------------------------------------------------------------------------------------
# The command line


def test_a_second_agent_says_what_is_in_its_way(agent: AgentProcess) -> None:
    """An address or a journal that another agent has is named, and nothing is disturbed."""

    def start(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "gpuwarden", "agent", *arguments],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    second = start(agent.arguments)
    assert (second.returncode, "another agent is using" in second.stderr) == (1, True)
    third = start([*agent.arguments, f"--journal={agent.log}.journal"])
    assert (third.returncode, "cannot be listened on" in third.stderr) == (2, True)
    assert fetch(f"{agent.url}/-/ready")


def test_keys_are_made_and_explained(tmp_path: Path) -> None:
    """`agent keys` says what goes where, and does not overwrite."""
    result = CliRunner().invoke(gpuwarden, ["agent", "keys", "--out", str(tmp_path / "k")])
    assert result.exit_code == 0
    assert "stays with the engine" in result.output
    assert (tmp_path / "k" / "engine.key").exists()
    again = CliRunner().invoke(gpuwarden, ["agent", "keys", "--out", str(tmp_path / "k")])
    assert "would be overwritten" in str(again.exception)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--keys DIR is missing"),
        (["--keys", "/nowhere", "--web.listen-address", "9836"], "is not an address"),
        (["--keys", "/nowhere", "--web.tls-cert-file", __file__], "go together"),
        (["--keys", "/nowhere", "--proof-timeout", "30"], "lacks a unit"),
    ],
)
@pytest.mark.parametrize("command", [["agent"], ["agent", "run"]])
def test_wrong_usage_says_what_to_write(command: list, arguments: list, says: str) -> None:
    """A mistake on the command line is answered by what to do instead."""
    result = CliRunner().invoke(gpuwarden, [*command, *arguments])
    assert result.exit_code == 2
    assert says in result.output


def test_flags_before_the_subcommand_count(tmp_path: Path) -> None:
    """`agent FLAGS run` is `agent run FLAGS`: no protection is lost by the order of words."""
    result = CliRunner().invoke(gpuwarden, ["agent", "--keys", str(tmp_path / "none"), "run"])
    assert f"{tmp_path / 'none'} holds no public key" in str(result.exception)
    result = CliRunner().invoke(
        gpuwarden, ["agent", "--keys=/none", "--proof-timeout=5s", "--web.tls-cert-file", __file__,
                    "run", "--keys", str(tmp_path)],
    )  # fmt: skip
    assert "go together" in result.output


def test_no_keys_no_agent(tmp_path: Path) -> None:
    """An agent that could obey nobody does not start, and says how to make keys."""
    result = CliRunner().invoke(gpuwarden, ["agent", "--keys", str(tmp_path)])
    assert "gpuwarden agent keys --out DIR" in str(result.exception)


def test_inspect_over_the_api(
    agent: AgentProcess, engine: Engine, jobs: Jobs, cards: Cards
) -> None:
    """A dry run over the API names the processes and leaves them alone."""
    job = jobs.start("family")
    cards.hold(job.pid)
    request = engine.request(job.job_id, Action.INSPECT)
    agent.post(engine, request)
    report = agent.outcome(request.decision_id)
    assert report.outcome is Outcome.DONE
    assert {item.pid for item in report.processes} == set(job.pids) == set(job.states())


def test_released_cards_are_let_go_and_nothing_is_done(
    agent: AgentProcess, engine: Engine, jobs: Jobs, cards: Cards, tmp_path: Path
) -> None:
    """While the driver is released the agent has no device file open and refuses every action."""
    folder = cards.path.with_name(f"{cards.path.name}.devices")
    folder.mkdir()
    job = jobs.start("polite")
    cards.hold(job.pid)

    def ask(action: Action) -> ActionReport:
        request = engine.request(job.job_id, action)
        agent.post(engine, request)
        return agent.outcome(request.decision_id)

    def holds() -> bool:
        assert agent.process is not None
        return agent.process.pid in {item.pid for item in releases.holders(f"{folder}/")}

    assert ask(Action.INSPECT).outcome is Outcome.DONE
    assert holds()
    releases.order(tmp_path / "release", 600, clock=SystemClock())
    until(lambda: not holds())
    report = ask(Action.TERMINATE)
    assert (report.outcome, report.reason) == (Outcome.REFUSED, "released")
    assert not holds()
    assert set(job.states()) == set(job.pids)
    releases.withdraw(tmp_path / "release")
    until(lambda: ready(agent))
    assert ask(Action.TERMINATE).outcome is Outcome.RECLAIMED


def ready(agent: AgentProcess) -> bool:
    """Whether the agent says that it could act."""
    try:
        return bool(fetch(f"{agent.url}/-/ready"))
    except urllib.error.HTTPError as error:
        with error:
            return False
