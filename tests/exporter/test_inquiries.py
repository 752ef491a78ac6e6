"""Questions to slow servers, which nobody waits for."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import pytest
from tests.exporter.nodes import ManualClock, eventually

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.exporter.inquiries import Inquiry

if TYPE_CHECKING:
    from collections.abc import Iterator


class Server:
    """Answers with how often it was asked, as fast as the test wants it to."""

    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = None
        self.go_on = threading.Event()
        self.go_on.set()

    def ask(self) -> int:
        """Answer."""
        self.asked += 1
        number = self.asked
        self.go_on.wait(60)
        if self.error is not None:
            raise self.error
        return number


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that lets go of its questions when the test ends."""
    made = Server()
    yield made
    made.go_on.set()


@pytest.fixture
def inquiry(server: Server) -> Iterator[Inquiry[int]]:
    """A question that is asked when it is wanted."""
    made = Inquiry("test", server.ask, every=3600, gap=0.01)
    yield made
    made.close()


def test_nobody_is_asked_before_it_is_wanted(inquiry: Inquiry[int], server: Server) -> None:
    """No thread and no question, until somebody wants to know."""
    assert (inquiry.told, inquiry.problem, inquiry.begun, server.asked) == (None, None, 0, 0)


def test_an_answer_has_the_number_of_its_question(inquiry: Inquiry[int]) -> None:
    """An answer is true of a time after its question was begun."""
    begun = inquiry.begun
    inquiry.want()
    told = eventually(lambda: inquiry.told)
    assert told is not None
    assert (told.value, told.number) == (1, begun + 1)


def test_an_answer_that_comes_at_once_is_not_missed() -> None:
    """Whoever waits is told, also where the question is answered before he begins to wait."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            inquiry = Inquiry("test", lambda: 1, every=3600)
            assert inquiry.wait(20)
            inquiry.close()
    finally:
        sys.setswitchinterval(interval)


def test_what_hangs_stalls_nobody(inquiry: Inquiry[int], server: Server) -> None:
    """While a question hangs the last answer stays, and wanting costs nothing."""
    assert inquiry.wait(30)
    server.go_on.clear()
    inquiry.want()
    eventually(lambda: server.asked, until=lambda asked: asked == 2)
    inquiry.want()
    told = inquiry.told
    assert told is not None
    assert (told.value, inquiry.begun, inquiry.problem) == (1, 2, None)
    server.go_on.set()
    # What was wanted while one was under way is asked once more: that one was begun before.
    eventually(lambda: server.asked, until=lambda asked: asked == 3)


def test_an_answer_grows_old(server: Server, clock: ManualClock) -> None:
    """Neither no answer nor an old one is a current one, though nothing failed."""
    inquiry = Inquiry("test", server.ask, every=3600, gap=0.01, clock=clock)
    assert not inquiry.current(60)
    assert inquiry.wait(30)
    assert inquiry.current(60)
    clock.advance(61)
    assert not inquiry.current(60)
    assert inquiry.problem is None
    inquiry.close()


@pytest.mark.parametrize("error", [ServiceUnavailable("down"), OSError("down"), KeyError("down")])
def test_a_failure_keeps_the_last_answer(
    inquiry: Inquiry[int], server: Server, error: Exception
) -> None:
    """A server that is down takes no answer back, is asked again, and forgiven."""
    assert inquiry.wait(30)
    server.error = error
    inquiry.want()
    eventually(lambda: inquiry.problem)
    told = inquiry.told
    assert told is not None
    assert told.value == 1
    server.error = None
    eventually(lambda: inquiry.problem, until=lambda problem: problem is None)
    told = inquiry.told
    assert told is not None
    assert told.number == server.asked > 2


def test_it_is_asked_at_intervals(server: Server) -> None:
    """Once somebody wanted to know, it is kept up to date."""
    inquiry = Inquiry("test", server.ask, every=0.02, gap=0.01)
    inquiry.want()
    eventually(lambda: server.asked, until=lambda asked: asked >= 3)
    inquiry.close()


def test_a_question_that_was_closed(inquiry: Inquiry[int], server: Server) -> None:
    """After its end nobody is asked."""
    inquiry.close()
    inquiry.want()
    assert not inquiry.wait(0.01)
    assert server.asked == 0
