"""What one user, or a directory of users, can do to everybody else at the daemon: nothing."""

from __future__ import annotations

import json
import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest
from tests.scheduling.daemon_scenes import BOOKING, POLICY
from tests.scheduling.daemons import running, wait_for
from tests.scheduling.policy_files import NOW, TEXT

from gpuwarden.errors import RefusedAction
from gpuwarden.scheduling import booking_desks, callers, daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.scheduling.daemons import Running


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Running]:
    """A daemon of a cluster."""
    with running(tmp_path, POLICY, now=NOW) as found:
        yield found


def connected(path: Path) -> socket.socket:
    """A connection on which nothing is said."""
    found = socket.socket(socket.AF_UNIX)
    found.settimeout(20)
    found.connect(str(path))
    return found


def test_nobody_takes_all_connections_from_the_others(
    here: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond their share those of one user are closed at once; another user is answered."""
    share = daemon._PeerProtocol.most_of_one
    own = [connected(here.settings.socket) for _ in range(share)]
    more = connected(here.settings.socket)
    assert more.recv(1) == b""
    monkeypatch.setattr(daemon, "peer_of", lambda _connection: (os.geteuid() + 1, 0))
    other = connected(here.settings.socket)
    other.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"200" in other.recv(100)
    for each in (*own, more, other):
        each.close()


def test_a_directory_that_does_not_answer_holds_up_no_tick(
    here: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who somebody is, is looked up for their request alone."""
    answers, asked = threading.Event(), threading.Event()

    def slow(uid: int) -> str:
        asked.set()
        answers.wait(20)
        return f"#{uid}"

    monkeypatch.setattr(callers, "user_name", slow)
    waits = connected(here.settings.socket)
    waits.sendall(b"GET /v1/whoami HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert asked.wait(20)
    before = len(here.driver.calls)
    here.daemon.wake()
    wait_for(lambda: len(here.driver.calls) > before)
    answers.set()
    with waits, waits.makefile("rb") as answer:
        assert b'"role":"user"' in answer.read()


def test_nobody_fills_the_calendar_for_the_others(
    here: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots ahead of one user are counted, whatever they are for; others book on."""
    monkeypatch.setattr(booking_desks, "MAX_OF_ONE", 3)
    here.client.ask("POST", "/v1/bookings", body={**BOOKING, "gpus": 1})
    weekly = {**BOOKING, "gpus": 1, "repeat": "weekly", "until": "+15d"}
    with pytest.raises(RefusedAction, match="1 slots ahead are yours, and 3 may be"):
        here.client.ask("POST", "/v1/bookings", body=weekly)
    monkeypatch.setattr(daemon, "peer_of", lambda _connection: (0 if os.geteuid() else 1, 0))
    monkeypatch.setattr(callers, "user_name", lambda _uid: "bo")
    assert here.client.ask("POST", "/v1/bookings", body=weekly)["booking"]


@pytest.mark.parametrize("depth", [1000, 30_000])
def test_a_body_that_is_nested_without_end_is_refused(here: Running, depth: int) -> None:
    """And the next request is answered."""
    body = b'{"words": ' + b"[" * depth + b"]" * depth + b"}"
    asks = connected(here.settings.socket)
    head = f"POST /v1/bookings HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    asks.sendall(head.encode() + body)
    assert b"400" in asks.recv(100)
    asks.close()
    assert here.client.ask("GET", "/v1/whoami")


def test_slots_of_a_team_that_the_policy_has_no_more_take_nobodys_cards(here: Running) -> None:
    """Whoever runs there would leave for cards that nobody may use; it is told, and comes back."""
    booked = here.client.ask("POST", "/v1/bookings", body={**BOOKING, "team": "vision"})
    name = booked["booking"]
    here.tick(5)
    assert [slot.id for slot in here.driver.slots] == [name]
    old = TEXT.index("- name: vision"), TEXT.index("- name: speech")
    budgets = TEXT.index("budgets:"), TEXT.index("windows:")
    without = TEXT[: old[0]] + TEXT[old[1] : budgets[0]] + TEXT[budgets[1] :]
    here.settings.policy.write_text(without)
    here.daemon.worker.call(here.daemon.reload)
    here.tick(5)
    assert here.driver.slots == ()
    (problem,) = here.client.schedule().problems
    assert problem.code == "slot_refused"
    assert f"{name}: there is no team vision in the policy any more" in problem.words
    here.settings.policy.write_text(POLICY)
    here.daemon.worker.call(here.daemon.reload)
    here.tick(5)
    assert [slot.id for slot in here.driver.slots] == [name]
    assert json.dumps(here.client.schedule().problems) == "[]"
