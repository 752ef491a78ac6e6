from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from tests.exporter.nodes import ManualClock, eventually

from gpuwarden.exporter.blocking_calls import BlockingCalls
from gpuwarden.exporter.users import KEEP_SECONDS, RETRY_SECONDS, UserNames

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def calls() -> Iterator[BlockingCalls]:
    """Calls that get all the time that a busy machine needs."""
    made = BlockingCalls(patience=30)
    yield made
    made.close()


def test_a_name_is_asked_for_once_an_hour(calls: BlockingCalls, clock: ManualClock) -> None:
    """A directory is not asked about the same user all the time, but not only once either."""
    answers = iter(["alice", "alice-2"])
    users = UserNames(calls, clock, ask=lambda _uid: next(answers))
    assert [users.name(1000), users.name(1000)] == ["alice", "alice"]
    clock.advance(KEEP_SECONDS)
    assert users.name(1000) == "alice-2"


def test_a_directory_that_was_down_is_asked_again(calls: BlockingCalls, clock: ManualClock) -> None:
    """A user is not nameless for good because the directory was, when he was first seen."""
    answers = iter([None, "alice"])
    users = UserNames(calls, clock, ask=lambda _uid: next(answers))
    assert [users.name(1000), users.name(1000)] == ["1000", "1000"]
    clock.advance(RETRY_SECONDS)
    assert users.name(1000) == "alice"


def test_a_name_outlives_the_directory(calls: BlockingCalls, clock: ManualClock) -> None:
    """While the directory does not answer, a user keeps the name that rules know him by."""
    answers = iter(["alice", None, "alice"])
    users = UserNames(calls, clock, ask=lambda _uid: next(answers))
    assert users.name(1000) == "alice"
    clock.advance(KEEP_SECONDS)
    assert users.name(1000) == "alice"


def test_a_directory_that_hangs(clock: ManualClock) -> None:
    """A directory that hangs holds nobody up; once it answers, names are there."""
    calls, release = BlockingCalls(patience=0.01), threading.Event()

    def ask(_uid: int) -> str:
        release.wait()
        return "alice"

    users = UserNames(calls, clock, ask=ask)
    assert users.name(1000) == "1000"
    release.set()

    def later() -> str:
        clock.advance(RETRY_SECONDS)
        return users.name(1000)

    assert eventually(later, until=lambda name: name == "alice")
    calls.close()


def test_users_who_are_gone_are_forgotten(calls: BlockingCalls, clock: ManualClock) -> None:
    """What is kept does not grow with all users there ever were."""
    answers = iter(["alice", None])
    users = UserNames(calls, clock, ask=lambda _uid: next(answers))
    assert users.name(1000) == "alice"
    clock.advance(2 * KEEP_SECONDS)
    users.forget()
    assert users.name(1000) == "1000"
