"""What reaches the agent: requests, its own journal, and what users started their jobs with."""

from __future__ import annotations

import base64
import dataclasses
import json
from contextlib import suppress
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.fuzz.edges import JSON_WORDS, SPLIT, Attack, require
from gpuwarden import agent_api
from gpuwarden.agent_api import (
    Action,
    ActionReport,
    ActionRequest,
    ActionState,
    ApiError,
    CommandLines,
    NodeInfo,
    ProcessRef,
)
from gpuwarden.clock import SystemClock
from gpuwarden.exporter.agent import keys, redactions
from gpuwarden.exporter.agent.authorisations import Authoriser, Rejected
from gpuwarden.exporter.agent.journal import Journal, JournalError, Record
from gpuwarden.exporter.processes import parse_proc_job_id, split_arguments

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

BOOT = "01234567-89ab-cdef-0123-456789abcdef"
REQUEST = ActionRequest(
    decision_id="d-1",
    epoch=1,
    node="node1",
    boot_id=BOOT,
    job_id="proc-01234567-4242-77",
    action=Action.TERMINATE,
    grace=60.0,
    expires=1_800_000_000.0,
    run_id="run-1",
    reason="idle for 30m",
    seen=(ProcessRef(4242, 77),),
    gpus=("GPU-a",),
)
REPORT = ActionReport(
    decision_id="d-1",
    job_id="proc-01234567-4242-77",
    action=Action.TERMINATE,
    state=ActionState.ACTING,
    steps={"journalled": 1_800_000_000.0},
)
_RECORD = Record(
    report=REPORT,
    epoch=1,
    boot_id=BOOT,
    run_id="run-1",
    grace=60.0,
    at="step",
    then="hold",
    reason="idle",
    accepted=1_800_000_000.0,
    begun=1_800_000_001.0,
)
SECRET = "hunter2-Correct9Horse"  # noqa: S105 (a throwaway that must not be shown)


def _requests(folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    """Signed bodies: what the engine's key says, a thief of it could; anybody else's is refused."""
    keys.generate(folder / "keys")
    ring = keys.KeyRing(folder / "keys")
    private = Ed25519PrivateKey.from_private_bytes(bytes(32))
    authoriser = Authoriser(ring, node="node1", boot_id=BOOT, clock=SystemClock())

    def attack(data: bytes) -> None:
        header, _, body = data.partition(SPLIT)
        signature = base64.b64encode(private.sign(agent_api.signing_bytes(body))).decode()
        name = next(iter(ring.key_ids))
        for text in (header.decode("latin-1"), agent_api.render_signature(name, signature), None):
            try:
                authoriser.read(body, text)
            except Rejected:
                continue
            require(holds=False, what="a body that this engine did not sign was believed")
        with suppress(ApiError):
            request = ActionRequest.decode(body)
            require(holds=ActionRequest.decode(request.encode()) == request, what="other fields")
            with suppress(Rejected):
                authoriser.admit(request)

    return attack


def _answers(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    """What an agent answers to the engine: a node whose root is hostile may say anything."""

    def attack(data: bytes) -> None:
        for decode in (ActionReport.decode, NodeInfo.decode, CommandLines.decode):
            with suppress(ApiError):
                found = decode(data)
                found.encode()

    return attack


def _journals(folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    path = folder / "agent.journal"

    def attack(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(JournalError):
            journal = Journal(path)
            try:
                journal.unfinished()
                journal.check()
                for record in journal.records.values():
                    record.dump()
            finally:
                journal.close()

    return attack


def _command_lines(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        words = split_arguments(data)
        shown = redactions.redact(words)
        require(holds=len(shown) == len(words), what="arguments were lost")
        told = redactions.redact((*words, f"--password={SECRET}"))
        require(holds=SECRET not in told[-1], what="a password was shown")

    return attack


def _names(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        parse_proc_job_id(data.decode(errors="replace"))

    return attack


def _line(event: str, record: Record) -> bytes:
    told = {"version": 1, "event": event, "time": 1.0, "record": record.dump()}
    return json.dumps(told).encode() + b"\n"


ATTACKS = (
    Attack(
        "requests to the agent",
        _requests,
        (
            b"key_id=0123456789abcdef, signature=" + b"A" * 86 + b"==" + SPLIT + REQUEST.encode(),
            SPLIT + dataclasses.replace(REQUEST, action=Action.INSPECT, run_id=None).encode(),
        ),
        (*JSON_WORDS, b"key_id=", b"signature=", b'"seen": [', b'"version": 2', b'"action":'),
        of="agent",
    ),
    Attack(
        "answers of an agent",
        _answers,
        (
            REPORT.encode(),
            NodeInfo("node1", BOOT, ("0123456789abcdef",)).encode(),
            CommandLines("d-1", "proc-01234567-4242-77").encode(),
        ),
        (*JSON_WORDS, b'"proof":{', b'"processes":[', b'"steps":{', b'"outcome":"reclaimed"'),
        of="agent",
    ),
    Attack(
        "the agent's journal",
        _journals,
        (
            _line("accepted", _RECORD),
            _line("begun", dataclasses.replace(_RECORD, terminating=True)),
        ),
        (*JSON_WORDS, b"\n", b'"members": [', b'"event": "epoch", "epoch": ', b'"alias"'),
        of="agent",
    ),
    Attack(
        "command lines to be shown",
        _command_lines,
        (
            b"python\0train.py\0--token=abcdefghijklmnop\0https://u:p@host/x?y=z\0",
            b"curl\0-u\0user:pass\0-H\0Authorization: Bearer abc\0",
        ),
        (b"--password", b"=", b":", b"@", b"://", b"\0", b'"', b"-----BEGIN", b"\xff", b"key"),
        of="agent",
    ),
    Attack(
        "names of processes' jobs",
        _names,
        (b"proc-01234567-4242-77",),
        (b"-", b"proc-", b"99999999999999999999", b"\xd9\xa3"),
        of="agent",
    ),
)
