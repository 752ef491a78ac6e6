"""The client of the engine's leaves: taken on, refused, or not known; never guessed."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.ruleengine.worlds import Received, Sink
from tests.servers import free_port

from gpuwarden.errors import InvalidInput, RefusedAction, ServiceUnavailable
from gpuwarden.scheduling.leaves import EngineLeaves, LeaveOrder, LeaveState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

ORDER = LeaveOrder(
    key="pre-1",
    cause="booking",
    reason=" the slot of\nspeech begins " + "x" * 400,
    deadline_seconds=600.0,
    job_id="slurm-c1-7-0",
)
TOLD: dict[str, Any] = {
    "id": "leave-1",
    "job_id": "slurm-c1-7-0",
    "run_id": "run-1",
    "state": "waiting",
    "why": "",
    "deadline": "2027-01-15T08:10:00Z",
    "steps": {"notified": 1.0, "newer": 2.0},
    "a_field_of_tomorrow": [],
}


def told(
    answers: list[tuple[int, Any]],
    what: Callable[[EngineLeaves], Awaitable[Any]] = lambda engine: engine.ask(ORDER),
) -> tuple[Any, list[Received]]:
    """What comes of a call whose answers are these, one after the other; and what was sent."""
    left = list(answers)

    def answer(_method: str, _request: Received) -> tuple[int, bytes]:
        status, body = left.pop(0)
        return status, body if isinstance(body, bytes) else json.dumps(body).encode()

    async def story(url: str) -> Any:
        engine = EngineLeaves(url + "/", "a-secret-of-16-characters", timeout=5.0, pause=0.01)
        try:
            return await what(engine)
        finally:
            await engine.aclose()

    with Sink(answer) as sink:
        found = asyncio.run(story(sink.url))
    assert left == []
    return found, sink.received


def test_a_request_that_is_taken_on_is_told_as_the_engine_tells_it() -> None:
    """With the bearer's token, in one line of reason; what a newer engine adds is left alone."""
    leave, (request,) = told([(202, TOLD)])
    assert (leave.id, leave.state, leave.steps) == ("leave-1", LeaveState.WAITING, {"notified": 1})
    assert leave.deadline == 1_800_000_600.0
    assert not leave.state.over
    sent = request.json()
    assert request.headers["authorization"] == "Bearer a-secret-of-16-characters"
    assert sent["reason"].startswith("the slot of speech begins xxx")
    assert len(sent["reason"]) == 300
    assert (sent["at"], sent["then"], sent["key"]) == ("epoch", "requeue", "pre-1")


@pytest.mark.parametrize(
    ("status", "word"), [(409, "protected"), (429, "limit_per_hour"), (404, "unknown_job")]
)
def test_a_refusal_is_final_and_keeps_the_engines_word(status: int, word: str) -> None:
    """Nobody was asked, and nobody is asked again behind the scheduler's back."""
    with pytest.raises(RefusedAction, match="no: because") as error:
        told([(status, {"error": word, "message": "no: because"})])
    assert error.value.reason == word


def test_what_is_not_known_is_repeated_with_the_same_bytes() -> None:
    """An engine that restarts answers the second time; the key asks nobody twice."""
    leave, requests = told([(503, b"{}"), (502, b"<html>"), (202, TOLD)])
    assert leave.id == "leave-1"
    assert len({request.body for request in requests}) == 1
    assert len(requests) == 3


@pytest.mark.parametrize(
    "body",
    [
        b"<html>a captive portal</html>",
        b"[]",
        b"{}",
        {**TOLD, "steps": {"left": "now"}},
        {**TOLD, "steps": {"left": True}},
        {**TOLD, "deadline": "soon"},
        {**TOLD, "steps": 7},
        b"[" * 100_000,
    ],
)
def test_an_answer_that_is_none_is_not_taken_for_one(body: Any) -> None:
    """Nothing is made up of it."""
    with pytest.raises(ServiceUnavailable, match="not a leave"):
        told([(202, body)])


def test_a_state_of_a_newer_engine_is_neither_over_nor_an_error() -> None:
    """Whoever follows it goes on asking."""
    leave, _ = told([(200, {**TOLD, "state": "pondering"})], lambda engine: engine.look("leave-1"))
    assert leave.state is LeaveState.UNKNOWN
    assert not leave.state.over


def test_names_of_leaves_stay_in_their_place() -> None:
    """An id with slashes leads to no other address."""
    seen: list[str] = []

    def answer(method: str, request: Received) -> tuple[int, bytes]:
        seen.append(f"{method} {request.path}")
        return 200, json.dumps({**TOLD, "state": "withdrawn"}).encode()

    async def story(url: str) -> LeaveState:
        engine = EngineLeaves(url, "a-secret-of-16-characters")
        try:
            return (await engine.look("../jobs?x#y")).state
        finally:
            await engine.aclose()

    with Sink(answer) as sink:
        assert asyncio.run(story(sink.url)) is LeaveState.WITHDRAWN
    assert seen == ["GET /v1/leaves/..%2Fjobs%3Fx%23y"]


def test_an_engine_that_is_not_there_is_said_to_be_unreachable() -> None:
    """Which is not "refused", and not "left"."""

    async def story() -> None:
        engine = EngineLeaves(f"http://127.0.0.1:{free_port()}", "a-secret-of-16", pause=0.01)
        with pytest.raises(ServiceUnavailable, match=r"unreachable: the engine at http://127"):
            await engine.withdraw("leave-1")
        await engine.aclose()

    asyncio.run(story())


def test_the_token_comes_from_a_file(tmp_path: Path) -> None:
    """And its absence is said by name."""
    with pytest.raises(InvalidInput, match=r"the engine's token: .* cannot be read"):
        EngineLeaves.from_file("http://e", tmp_path / "none", timeout=1.0)
