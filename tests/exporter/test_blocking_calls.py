from __future__ import annotations

import os
import threading

import pytest
from tests.exporter.nodes import eventually

from gpuwarden.exporter.blocking_calls import MAX_STUCK, OF_ALL, OF_OWNER, BlockingCalls


def test_an_answer_and_an_error() -> None:
    """A call gives what its function gave, errors included."""
    calls = BlockingCalls(patience=30)
    assert [calls.make(1, lambda: 5), calls.make(2, lambda: "x")] == [5, "x"]
    with pytest.raises(FileNotFoundError):
        calls.make(1, lambda: open("/none"))  # noqa: PTH123, SIM115
    calls.close()


def test_an_error_of_one_owner_is_not_the_next_ones() -> None:
    """A call that fails in any way leaves the calls of everybody else possible."""
    calls = BlockingCalls(patience=30)
    with pytest.raises(UnicodeEncodeError):
        calls.make(1, lambda: os.stat("/\ud800"))  # noqa: PTH116
    assert calls.make(2, lambda: 5) == 5
    calls.close()


def test_a_call_that_hangs_concerns_its_owner_only() -> None:
    """While a call hangs, its owner's calls are not made, and everybody else's are."""
    calls, release = BlockingCalls(patience=0.01), threading.Event()
    assert calls.make(1, release.wait) is None
    assert calls.make(1, lambda: 5) is None
    assert eventually(lambda: calls.make(2, lambda: 5), until=lambda answer: answer == 5)
    release.set()
    assert eventually(lambda: calls.make(1, lambda: 5)) == 5
    calls.close()


def test_hanging_calls_are_bounded() -> None:
    """When too many owners' calls hang, no more threads are given away."""
    calls, release = BlockingCalls(patience=0.01), threading.Event()
    before = threading.active_count()
    for owner in range(3 * MAX_STUCK):
        calls.make(owner, release.wait)
    assert calls.stuck == MAX_STUCK
    assert threading.active_count() <= before + MAX_STUCK
    release.set()
    eventually(lambda: threading.active_count() <= before)


def test_calls_that_come_back_just_in_time_are_bounded() -> None:
    """Whoever makes each of his calls take almost as long as it may does not take all the time."""
    calls = BlockingCalls(patience=0.1)
    answers = [calls.make(1, lambda: threading.Event().wait(0.05)) for _ in range(50)]
    made = len(answers) - answers.count(None)
    # Half a patience each; a slow machine makes fewer of them.
    assert 1 <= made <= 2 * OF_OWNER
    assert calls.make(2, lambda: 5) == 5
    calls.close()


def test_many_quick_calls_are_all_made() -> None:
    """Thousands of processes that answer at once are all looked at."""
    calls = BlockingCalls(patience=30)
    assert [calls.make(1, lambda at=at: at) for at in range(5000)] == list(range(5000))
    calls.close()


def test_many_owners_take_no_more_than_their_time() -> None:
    """A user of many uids takes what all may take together, and no more."""
    calls = BlockingCalls(patience=0.1)
    answers = [calls.make(at, lambda: threading.Event().wait(0.06)) for at in range(100)]
    assert len(answers) - answers.count(None) <= 2 * OF_ALL
    calls.close()
