"""The agent's API: strict where it commands, lenient where it reports."""

import dataclasses
import json

import pytest

from gpuwarden import agent_api
from gpuwarden.agent_api import (
    Action,
    ActionReport,
    ActionRequest,
    ActionState,
    ApiError,
    CommandLine,
    CommandLines,
    NodeInfo,
    Outcome,
    ProcessRef,
    Proof,
    SignalledProcess,
    decision_of,
    question_id,
)

REQUEST = ActionRequest(
    decision_id="idle-held:proc-0b5d2cf2-77-9:1",
    epoch=3,
    node="gpu-1",
    boot_id="0b5d2cf2-93a7-4d1f-8a53-3b1f9a2f0a11",
    job_id="proc-0b5d2cf2-77-9",
    action=Action.TERMINATE,
    grace=60.0,
    expires=1_700_000_030.0,
    run_id="wheat-7",
    reason="memory held, nothing happens",
    seen=(ProcessRef(77, start_ticks=9), ProcessRef(78, start_time=1_700_000_000.5)),
    gpus=("GPU-1",),
)
REPORT = ActionReport(
    decision_id=REQUEST.decision_id,
    job_id=REQUEST.job_id,
    action=Action.TERMINATE,
    state=ActionState.FINISHED,
    outcome=Outcome.RECLAIMED,
    steps={"journalled": 1.0, "sigterm": 2.0, "proven": 5.5},
    processes=(SignalledProcess(77, 9, "SIGTERM", 30_000_000_000),),
    proof=Proof(
        gone=True,
        memory_freed=30_000_000_000,
        device_used_before={"GPU-1": 31},
        device_used_after={"GPU-1": 1},
        seconds=2.5,
    ),
)


def test_messages_survive_a_round_trip() -> None:
    """Request, report, command lines and node information are read back as they were written."""
    lines = (CommandLine(77, 9, ("python", "\ufffd"), cut=True), CommandLine(78, 10, None))
    told = CommandLines(REQUEST.decision_id, REQUEST.job_id, lines, cut=True)
    assert CommandLines.decode(told.encode()) == told
    info = NodeInfo("gpu-1", REQUEST.boot_id, ("0123456789abcdef",))
    assert ActionRequest.decode(REQUEST.encode()) == REQUEST
    assert ActionReport.decode(REPORT.encode()) == REPORT
    assert NodeInfo.decode(info.encode()) == info


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"version": 2}, "version"),
        ({"action": "nuke"}, "action"),
        ({"grace": -1}, "grace is negative"),
        ({"grace": "60s"}, "grace"),
        ({"expires": None}, "expires"),
        ({"epoch": True}, "epoch"),
        ({"job_id": 7}, "job_id"),
        ({"decision_id": "a b"}, "decision_id"),
        ({"then": "forget"}, "then"),
        ({"at": "never"}, "at"),
        ({"seen": [7]}, "seen"),
        ({"seen": [{"pid": -1}]}, "pid"),
        ({"force": True}, "unknown field 'force'"),
    ],
    ids=str,
)
def test_a_command_that_is_not_understood_whole_is_refused(
    fields: dict[str, object], names: str
) -> None:
    """A field that a node does not know could change what the command means."""
    body = json.dumps({**json.loads(REQUEST.encode()), **fields}).encode()
    with pytest.raises(ApiError, match=names):
        ActionRequest.decode(body)


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"[" * 100_000, b" " * 300_000])
def test_a_body_that_is_not_an_object_is_refused(body: bytes) -> None:
    """Malformed bodies are one kind of error."""
    with pytest.raises(ApiError):
        ActionRequest.decode(body)


def test_a_report_of_a_newer_agent_is_understood() -> None:
    """The engine reads what it knows of an answer and ignores the rest."""
    body = json.dumps({**json.loads(REPORT.encode()), "colour": "red"}).encode()
    assert ActionReport.decode(body) == REPORT


@pytest.mark.parametrize(
    "processes", [[7], 7, [{"pid": 1}], [{"pid": 1, "start_ticks": 1, "arguments": 7}]], ids=str
)
def test_command_lines_that_are_none_are_refused(processes: object) -> None:
    """A malformed answer is one kind of error."""
    told = json.loads(CommandLines(REQUEST.decision_id, REQUEST.job_id).encode())
    with pytest.raises(ApiError):
        CommandLines.decode(json.dumps({**told, "processes": processes}).encode())


def test_the_signature_covers_every_field() -> None:
    """No field can be altered without altering what was signed."""
    signed = agent_api.signing_bytes(REQUEST.encode())
    others = {
        "decision_id": "x",
        "epoch": 4,
        "node": "gpu-2",
        "boot_id": "b",
        "job_id": "j",
        "action": Action.INSPECT,
        "grace": 1.0,
        "expires": 2.0,
        "run_id": None,
        "then": "requeue",
        "at": "epoch",
        "reason": "r",
        "seen": (),
        "gpus": (),
    }
    assert set(others) == {field.name for field in dataclasses.fields(ActionRequest)}
    for name, value in others.items():
        altered = dataclasses.replace(REQUEST, **{name: value})
        assert agent_api.signing_bytes(altered.encode()) != signed


def test_the_signature_header_is_read_back_or_refused() -> None:
    """Key id and signature have exactly one notation."""
    signature = "A" * 86 + "=="
    value = agent_api.render_signature(agent_api.key_id(b"k" * 32), signature)
    assert agent_api.parse_signature(value) == (agent_api.key_id(b"k" * 32), signature)
    for wrong in ("", "key_id=1, signature=2", value + " ", value.upper()):
        with pytest.raises(ApiError):
            agent_api.parse_signature(wrong)


@pytest.mark.parametrize(
    "change",
    [
        {"processes": [{"pid": 1, "start_ticks": 2, "gpu_memory": "lots"}]},
        {"processes": [{"pid": 1, "start_ticks": 2, "gpu_memory": -5}]},
        {"processes": [{"pid": 1, "start_ticks": 2, "ended_by": {}}]},
        {"steps": {"exited": float("nan")}},
        {"steps": {"exited": 10**400}},
        {"steps": {"exited": "5"}},
        {"proof": {"memory_freed": 0, "seconds": 10**400}},
        {"proof": {"memory_freed": 0, "seconds": 1, "device_used_after": {"g": float("inf")}}},
        {"message": "\ud800"},
    ],
)
def test_a_report_that_could_not_be_counted_or_kept_is_no_answer(change: dict[str, object]) -> None:
    """Whoever decodes it can add its numbers up, write it down, and read it again."""
    fields = {**json.loads(REPORT.encode()), **change}
    with pytest.raises(ApiError):
        ActionReport.decode(json.dumps(fields).encode())


@pytest.mark.parametrize("said", ["false", "yes", 1, [0], None])
def test_only_a_plain_true_says_that_processes_are_gone(said: object) -> None:
    """Whatever else is not empty is no proof."""
    fields = json.loads(REPORT.encode())
    fields["proof"]["gone"] = said
    report = ActionReport.decode(json.dumps(fields).encode())
    assert report.proof is not None
    assert not report.proof.gone


@pytest.mark.parametrize("number", [None, 3])
def test_a_question_names_its_decision(number: int | None) -> None:
    """So an agent knows what a `cancel` means, without a field that older ones would refuse."""
    asked = question_id("leave-0a1b", Action.REQUEST_LEAVE, number)
    assert decision_of(asked) == "leave-0a1b"
    assert decision_of("leave-0a1b") is None
    request = dataclasses.replace(REQUEST, decision_id=asked)
    assert ActionRequest.decode(request.encode()).decision_id == asked
