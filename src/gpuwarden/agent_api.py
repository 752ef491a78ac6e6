"""The contract between engine and node agent: actions, their signature, their outcome.

`GET /v1/node` -> NodeInfo. `POST /v1/actions` with an ActionRequest -> 202 and its ActionReport.
`GET /v1/actions/{decision_id}` -> ActionReport, or 404 where the agent never took it on.
`POST /v1/arguments` with an ActionRequest for `arguments` -> 200 and a CommandLines, once.

A request is authorised by an Ed25519 signature over `signing_bytes` in the header
`Gpuwarden-Signature: key_id=<id>, signature=<base64>`. The signature binds the node's name, its
boot id and the expiry, so that a captured request is worthless elsewhere, after a reboot, or later.

This module holds no cryptography and does no I/O: both sides bring their own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from gpuwarden.errors import PermanentError

VERSION = 1
SIGNATURE_HEADER = "Gpuwarden-Signature"
MAX_BODY_BYTES = 256 * 1024
MAX_LIFETIME_SECONDS = 60.0
"""A request that expires later than this after its receipt is refused."""

_PART = ":"
"""Parts a decision's id from what is asked for it."""
_DECISION_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_SIGNATURE = re.compile(r"key_id=([0-9a-f]{16}), signature=([A-Za-z0-9+/=]{88})")


class Action(StrEnum):
    """What the engine may ask of a node."""

    INSPECT = "inspect"
    """Every step up to the signal: what would be ended, and whether it may be."""
    REQUEST_CHECKPOINT = "request_checkpoint"
    """Ask the trainer to save now and go on."""
    REQUEST_LEAVE = "request_leave"
    """Ask the trainer to save and leave; no signal follows."""
    CANCEL = "cancel"
    """Withdraw the decision's leave request that the trainer has not yet followed."""
    TERMINATE = "terminate"
    """The whole ladder: leave request, SIGTERM, grace, SIGKILL, proof."""
    WATCH = "watch"
    """Signal nobody: wait until the job's processes have gone, and prove it, while its platform
    ends it."""
    ARGUMENTS = "arguments"
    """Read the command lines of a job, without secrets; only by `POST /v1/arguments`."""


class ActionState(StrEnum):
    """Where an action stands."""

    ACCEPTED = "accepted"
    ACTING = "acting"
    FINISHED = "finished"


class Outcome(StrEnum):
    """How an action ended."""

    RECLAIMED = "reclaimed"
    """terminate, watch: the job's processes are gone from NVML's lists."""
    INCOMPLETE = "incomplete"
    """terminate, watch: a process is still there, or NVML still lists one of those that ended."""
    REFUSED = "refused"
    """Nothing was signalled; `reason` says why."""
    DONE = "done"
    """inspect, request_*, cancel: done."""
    UNDELIVERABLE = "undeliverable"
    """request_*, cancel: there is no run to ask."""
    FAILED = "failed"
    """The agent met an error of its own; `reason` says which."""


class ApiError(PermanentError):
    """A message does not follow the contract; the text names the field."""


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """A process, so that a recycled pid is not mistaken for it.

    Attributes:
        pid: in the node's PID namespace.
        start_ticks: field 22 of `/proc/<pid>/stat`, or None where only the start time is known.
        start_time: Unix time of its start, or None.
    """

    pid: int
    start_ticks: int | None = None
    start_time: float | None = None


@dataclass(frozen=True, slots=True)
class ActionRequest:
    """One action on one job.

    Attributes:
        decision_id: the engine's; key of every action but `terminate`, whose key is `job_id`.
            Where a decision asks several things, each has an id of its own (`question_id`), and a
            `cancel` takes back what its own decision asked, and nothing of another's.
        epoch: grows with each start of the engine; an agent refuses a smaller one than it has seen.
        node: name of the node as `GET /v1/node` gave it.
        boot_id: boot of the node as `GET /v1/node` gave it.
        job_id: one attempt.
        run_id: the trainer's run, or None where the job has none.
        action: what to do.
        grace: seconds between SIGTERM and SIGKILL, until `leave_by` of a request, or for which a
            watch waits.
        then: `hold` or `requeue`, for leave requests.
        at: `step` or `epoch`, for leave requests.
        reason: one line for the owner and the journal.
        expires: Unix time after which the request must not be taken on.
        seen: processes of the job as the engine last knew them.
        gpus: UUIDs of the cards the job held as the engine last knew them.
    """

    decision_id: str
    epoch: int
    node: str
    boot_id: str
    job_id: str
    action: Action
    grace: float
    expires: float
    run_id: str | None = None
    then: str = "hold"
    at: str = "step"
    reason: str = ""
    seen: tuple[ProcessRef, ...] = ()
    gpus: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """The body to send and to sign."""
        return _encode(dataclasses.asdict(self))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Read a body.

        Raises:
            ApiError: naming the field.
        """
        data = _load(body)
        _only(data, {f.name for f in dataclasses.fields(cls)} | {"version"})
        decision_id = _text(data, "decision_id", 64)
        if not _DECISION_ID.fullmatch(decision_id):
            raise ApiError("decision_id has characters outside A-Z a-z 0-9 _ . : -")
        action, then, at = _text(data, "action", 32), _text(data, "then", 16), _text(data, "at", 16)
        if action not in set(Action):
            raise ApiError(f"action {action!r} is none of {', '.join(Action)}")
        if then not in ("hold", "requeue"):
            raise ApiError("then is neither hold nor requeue")
        if at not in ("step", "epoch"):
            raise ApiError("at is neither step nor epoch")
        run_id = data.get("run_id")
        seen, gpus = data.get("seen", []), data.get("gpus", [])
        if not isinstance(seen, list) or len(seen) > 4096:
            raise ApiError("seen is not a list of at most 4096 processes")
        if not isinstance(gpus, list) or len(gpus) > 256:
            raise ApiError("gpus is not a list of at most 256 UUIDs")
        return cls(
            decision_id=decision_id,
            epoch=_integer(data, "epoch"),
            node=_text(data, "node", 256),
            boot_id=_text(data, "boot_id", 64),
            job_id=_text(data, "job_id", 256),
            action=Action(action),
            grace=_number(data, "grace"),
            expires=_number(data, "expires"),
            run_id=None if run_id is None else _text(data, "run_id", 64),
            then=then,
            at=at,
            reason=_text(data, "reason", 1024),
            seen=tuple(_process(item) for item in seen),
            gpus=tuple(_text({"gpus": item}, "gpus", 128) for item in gpus),
        )


@dataclass(frozen=True, slots=True)
class SignalledProcess:
    """A process that the ladder touched.

    Attributes:
        pid: in the node's PID namespace.
        start_ticks: field 22 of `/proc/<pid>/stat`.
        ended_by: `SIGTERM` (left within the grace), `SIGKILL`, `gone` (before any signal of the
            agent's; always for a watch), or None where it survived.
        gpu_memory: bytes that NVML attributed to it when the ladder began, or None if it held none.
    """

    pid: int
    start_ticks: int
    ended_by: str | None = None
    gpu_memory: int | None = None


@dataclass(frozen=True, slots=True)
class Proof:
    """What NVML showed after the act.

    Attributes:
        gone: whether every signalled identity had left NVML's process lists.
        memory_freed: bytes that the ended processes had held, by NVML's account of each.
        device_used_before: bytes used on the job's cards before the act, by UUID.
        device_used_after: likewise after it; advisory, since a successor may have moved in.
        seconds: from the last exit to the proof, or to giving up.
    """

    gone: bool
    memory_freed: int
    device_used_before: dict[str, int] = field(default_factory=dict)
    device_used_after: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ActionReport:
    """State and outcome of an action.

    Attributes:
        decision_id: the decision that the agent acted on; for a second `terminate` of the same
            attempt it is the first one's.
        job_id: the attempt.
        action: as requested.
        state: accepted, acting or finished.
        outcome: set when finished.
        reason: machine-readable word for refusals and failures, else an empty string.
        message: the same for people.
        steps: step of the ladder -> Unix time: journalled, verified, leave_requested, stopped,
            sigterm, sigkill, exited, proven.
        processes: those that the ladder touched (for inspect: would touch; for watch: watches).
        proof: set for a finished terminate that signalled something, and for a finished watch.
    """

    decision_id: str
    job_id: str
    action: Action
    state: ActionState
    outcome: Outcome | None = None
    reason: str = ""
    message: str = ""
    steps: dict[str, float] = field(default_factory=dict)
    processes: tuple[SignalledProcess, ...] = ()
    proof: Proof | None = None

    def encode(self) -> bytes:
        """The answer's body."""
        return _encode(dataclasses.asdict(self))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Read an answer; fields that a newer agent adds are ignored.

        Raises:
            ApiError: naming the field.
        """
        data = _load(body)
        outcome, proof = data.get("outcome"), data.get("proof")
        try:
            return cls(
                decision_id=_text(data, "decision_id", 64),
                job_id=_text(data, "job_id", 256),
                action=Action(_text(data, "action", 32)),
                state=ActionState(_text(data, "state", 32)),
                outcome=None if outcome is None else Outcome(outcome),
                reason=_text(data, "reason", 256),
                message=_text(data, "message", 4096),
                steps={str(k): _finite(v, str(k)) for k, v in dict(data.get("steps", {})).items()},
                processes=tuple(_signalled(item) for item in data.get("processes", [])),
                proof=None if proof is None else _proof(proof),
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise ApiError(f"the agent's answer does not follow the contract: {error}") from error


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What one process of a job was started with.

    Attributes:
        pid: in the node's PID namespace.
        start_ticks: field 22 of `/proc/<pid>/stat`.
        arguments: without secrets; None where it could not be read in time.
        cut: whether there is more of it.
    """

    pid: int
    start_ticks: int
    arguments: tuple[str, ...] | None
    cut: bool = False


@dataclass(frozen=True, slots=True)
class CommandLines:
    """The command lines of a job, parents before their children.

    Attributes:
        decision_id: of the request.
        job_id: the attempt.
        processes: what there is.
        cut: whether the job has more processes than are told.
    """

    decision_id: str
    job_id: str
    processes: tuple[CommandLine, ...] = ()
    cut: bool = False

    def encode(self) -> bytes:
        """The answer's body."""
        return _encode(dataclasses.asdict(self))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Read an answer.

        Raises:
            ApiError: naming the field.
        """
        data = _load(body)
        try:
            return cls(
                decision_id=_text(data, "decision_id", 64),
                job_id=_text(data, "job_id", 256),
                processes=tuple(_command_line(item) for item in data.get("processes", [])),
                cut=bool(data.get("cut")),
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise ApiError(f"the agent's answer does not follow the contract: {error}") from error


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node says of itself: its name, its boot, and the keys it accepts."""

    node: str
    boot_id: str
    key_ids: tuple[str, ...]

    def encode(self) -> bytes:
        """The answer's body."""
        return _encode(dataclasses.asdict(self))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Read an answer.

        Raises:
            ApiError: naming the field.
        """
        data = _load(body)
        keys = data.get("key_ids")
        if not isinstance(keys, list):
            raise ApiError("key_ids is not a list")
        return cls(
            node=_text(data, "node", 256),
            boot_id=_text(data, "boot_id", 64),
            key_ids=tuple(_text({"key_ids": key}, "key_ids", 64) for key in keys),
        )


def question_id(decision_id: str, action: Action, number: int | None = None) -> str:
    """Under which an agent knows one of the things that a decision asks.

    Args:
        decision_id: the decision's, without a colon.
        action: what is asked.
        number: of the try, where it is to be another question than before.
    """
    parts = (decision_id, action.value, *(() if number is None else (str(number),)))
    return _PART.join(parts)


def decision_of(asked: str) -> str | None:
    """The decision that a question's id names; None: it is no such id, and names none."""
    decision, part, _question = asked.partition(_PART)
    return decision if part else None


def signing_bytes(body: bytes) -> bytes:
    """What an action's signature covers.

    The body carries node, boot id and expiry; the prefix keeps a signature made for another
    purpose with the same key from being taken for one of an action.
    """
    return b"gpuwarden action v1\n" + hashlib.sha256(body).digest()


def key_id(public_key: bytes) -> str:
    """Short name of an Ed25519 public key: 16 hex digits of the SHA-256 of its 32 raw bytes."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def render_signature(key: str, signature_base64: str) -> str:
    """Value of the signature header."""
    return f"key_id={key}, signature={signature_base64}"


def parse_signature(value: str) -> tuple[str, str]:
    """Key id and base64 signature of the header's value.

    Raises:
        ApiError: the header is malformed.
    """
    match = _SIGNATURE.fullmatch(value)
    if match is None:
        raise ApiError(f"{SIGNATURE_HEADER} is malformed")
    return match[1], match[2]


def _encode(fields: dict[str, Any]) -> bytes:
    return json.dumps(
        {"version": VERSION, **fields}, sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode()


def _load(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_BODY_BYTES:
        raise ApiError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        data = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ApiError("the body is not a JSON object")
    if data.get("version") != VERSION:
        raise ApiError(f"version {data.get('version')!r} is not {VERSION}")
    return data


def _only(data: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(data) - known)
    if unknown:
        raise ApiError(f"unknown field {unknown[0]!r}")


def _text(data: dict[str, Any], name: str, limit: int) -> str:
    value = data.get(name)
    if not isinstance(value, str) or len(value) > limit:
        raise ApiError(f"{name} is not a string of at most {limit} characters")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair: no file and no database takes it
        raise ApiError(f"{name} is not text") from error
    return value


def _integer(data: dict[str, Any], name: str) -> int:
    value = data.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ApiError(f"{name} is not a whole number")
    return value


def _number(data: dict[str, Any], name: str) -> float:
    value = _finite(data.get(name), name)
    if value < 0:
        raise ApiError(f"{name} is negative")
    return value


def _process(item: Any) -> ProcessRef:
    if not isinstance(item, dict):
        raise ApiError("seen holds something that is not an object")
    ticks, time = item.get("start_ticks"), item.get("start_time")
    return ProcessRef(
        pid=_integer(item, "pid"),
        start_ticks=None if ticks is None else _integer(item, "start_ticks"),
        start_time=None if time is None else _number(item, "start_time"),
    )


def _command_line(item: dict[str, Any]) -> CommandLine:
    given = item.get("arguments")
    return CommandLine(
        pid=_integer(item, "pid"),
        start_ticks=_integer(item, "start_ticks"),
        arguments=None if given is None else tuple(str(argument) for argument in given),
        cut=bool(item.get("cut")),
    )


def _finite(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ApiError(f"{name} is not a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise ApiError(f"{name} is too large") from error
    if not math.isfinite(number):
        raise ApiError(f"{name} is not a finite number")
    return number


def _signalled(data: dict[str, Any]) -> SignalledProcess:
    unheld = data.get("gpu_memory") is None
    return SignalledProcess(
        pid=_integer(data, "pid"),
        start_ticks=_integer(data, "start_ticks"),
        ended_by=None if data.get("ended_by") is None else _text(data, "ended_by", 32),
        gpu_memory=None if unheld else _integer(data, "gpu_memory"),
    )


def _memory(data: dict[str, Any], name: str) -> dict[str, int]:
    found = data.get(name, {})
    return {uuid: _integer(found, uuid) for uuid in found}


def _proof(data: dict[str, Any]) -> Proof:
    return Proof(
        # Only the word itself is a proof, not whatever is not empty.
        gone=data.get("gone") is True,
        memory_freed=_integer(data, "memory_freed"),
        device_used_before=_memory(data, "device_used_before"),
        device_used_after=_memory(data, "device_used_after"),
        seconds=_number(data, "seconds"),
    )
