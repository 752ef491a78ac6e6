"""The daemon: who asks is whom the kernel names, one thread asks the engine, nothing is lost."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import pwd
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.scheduling.daemons import PlayedDriver, PlayedQueue, free_port, running
from tests.scheduling.policy_files import NOW, TEXT

from gpuwarden.errors import InvalidInput, RefusedAction, ServiceUnavailable
from gpuwarden.schedule_api import (
    BookingState,
    Cause,
    EntryState,
    Interval,
    Outcome,
    Preemption,
    Problem,
    QueueEntry,
)
from gpuwarden.scheduling.daemon import Daemon, Settings
from gpuwarden.scheduling.daemon_clients import DaemonClient
from gpuwarden.scheduling.holdings import Holding
from gpuwarden.scheduling.predictions import Features, Training
from gpuwarden.scheduling.slots import SlotUse
from gpuwarden.scheduling.store_files import MIGRATIONS, StoreUnusable
from gpuwarden.scheduling.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.scheduling.daemons import Running

ME = pwd.getpwuid(os.geteuid()).pw_name
HOUR = 3600.0
POLICY = TEXT.replace("users: [ana, bo]", f"users: [ana, bo, {ME}]").replace(
    "operators: {users: [root], groups: [ops]}", "operators: {users: [olga]}"
)
LOCAL = POLICY.replace("engine: slurm", "engine: local")
WAITS = QueueEntry(
    engine="slurm",
    id="7",
    name="night",
    user="ana",
    state=EntryState.PENDING,
    gpus=2,
    submitted=NOW - 600,
    team="vision",
    priority="high",
    start=Interval(NOW + 60, NOW + 120, 6),
)
BOOKING = {"gpus": 4, "card": "a100-40", "from": "+2h", "for": "4h"}


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Running]:
    """A daemon of a cluster."""
    with running(tmp_path, POLICY, now=NOW) as found:
        yield found


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A daemon that many tests ask what it refuses; nothing changes in it."""
    with running(tmp_path_factory.mktemp("daemon"), POLICY, now=NOW) as found:
        yield found


# -- the schedule


def test_the_schedule_is_what_the_engine_told_last(here: Running) -> None:
    """Entries, preemptions and problems of the engine; budgets and cards of the policy."""
    here.driver.rows = (WAITS,)
    here.driver.wrong = (Problem("quota_leak", "3 cards are held by nobody.", NOW),)
    here.tick(5)
    found = here.client.schedule()
    assert (found.engine, found.cluster, found.taken, found.timezone) == (
        "slurm",
        "ci",
        NOW + 5,
        "Europe/Berlin",
    )
    assert found.entries == (WAITS,)
    assert [problem.code for problem in found.problems] == ["quota_leak"]
    assert [(card.name, card.count) for card in found.cards] == [("a100-40", 32), ("h100-80", 8)]
    assert [(each.team, each.per, each.used) for each in found.budgets] == [
        ("vision", "month", 0.0),
        ("vision", "day", 0.0),
    ]


def test_an_engine_that_cannot_be_seen_is_not_an_empty_queue(here: Running) -> None:
    """What was known stays, with its age, and the trouble is told since it began."""
    here.driver.rows = (WAITS,)
    here.tick(5)
    here.driver.unseen = ServiceUnavailable("squeue does not answer")
    here.tick(5)
    here.tick(5)
    found = here.client.schedule()
    assert (found.taken, found.entries) == (NOW + 5, (WAITS,))
    (problem,) = found.problems
    assert (problem.code, problem.since) == ("engine_unseen", NOW + 10)
    assert "squeue does not answer" in problem.words
    here.driver.unseen = None
    here.tick(5)
    assert here.client.schedule().problems == ()


def test_an_account_that_does_not_answer_hides_no_queue(here: Running) -> None:
    """Slurmdbd down, slurmctld up: the queue is current, and what is missing is told."""
    here.driver.rows = (WAITS,)
    here.driver.unaccounted = ServiceUnavailable("slurmdbd does not answer")
    here.tick(61)
    found = here.client.schedule()
    assert (found.taken, found.entries) == (NOW + 61, (WAITS,))
    assert [problem.code for problem in found.problems] == ["account_unseen"]


def test_an_engine_that_takes_no_reservations_has_a_queue_all_the_same(here: Running) -> None:
    """A right that is missing is told, and stops nothing else."""
    here.driver.rows = (WAITS,)
    here.driver.forbidden = RefusedAction("rights", "only operators make reservations")
    here.tick(5)
    found = here.client.schedule()
    assert (found.taken, found.entries) == (NOW + 5, (WAITS,))
    (problem,) = found.problems
    assert problem.code == "bookings_untold"
    assert "only operators" in problem.words


def test_an_engine_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    """The daemon answers meanwhile, and says that it is not ready."""

    class Late(PlayedDriver):
        def start(self, now: float) -> None:
            super().start(now)
            if now < NOW + 10:
                raise ServiceUnavailable("slurmctld does not answer")

    with running(tmp_path, POLICY, now=NOW, driver=Late) as here:
        assert [each.code for each in here.client.schedule().problems] == ["engine_unseen"]
        with pytest.raises(ServiceUnavailable, match="503"):
            here.client.text("/-/ready", {})
        here.tick(10)
        assert here.client.text("/-/ready", {}) == b"ready\n"
        here.tick(5)
        assert [call for call in here.driver.calls if call.startswith("start")] == [
            f"start {NOW:g}",
            f"start {NOW + 10:g}",
        ]


def test_a_fault_in_a_tick_ends_no_daemon(here: Running) -> None:
    """It is told, and the next tick is one."""
    here.driver.unseen = ZeroDivisionError("a mistake of ours")
    here.tick(5)
    (problem,) = here.client.schedule().problems
    assert problem.code == "tick_failed"
    here.driver.unseen = None
    here.tick(5)
    assert here.client.schedule().taken == NOW + 10


def test_the_engine_is_asked_from_one_thread(here: Running) -> None:
    """Ticks, commands and accounts: a driver needs no locks."""
    here.client.ask("POST", "/v1/bookings", body=BOOKING)
    here.client.ask("GET", "/v1/usage")
    here.tick(5)
    assert {name.partition("_")[0] for name in here.driver.threads} == {"driver"}


# -- bookings over the socket


def test_a_booking_is_of_whom_the_kernel_names(here: Running) -> None:
    """Nobody says who they are; the team is that of the policy."""
    made = here.client.ask("POST", "/v1/bookings", body=BOOKING)
    (slot,) = made["slots"]
    assert (slot["who"], slot["team"], slot["gpus"]) == (ME, "vision", 4)
    assert (slot["start"], slot["end"]) == (NOW + 2 * HOUR, NOW + 6 * HOUR)
    assert (made["gpu_hours"], made["cost"]) == (16, {"EUR": 30.4})
    assert [each.id for each in here.driver.slots] == [slot["id"]]
    here.tick(5)
    (entry,) = here.client.schedule().bookings
    assert (entry.id, entry.state) == (slot["id"], BookingState.BOOKED)


def test_a_dry_run_books_nothing(here: Running) -> None:
    """It says what would be, and what it would cost."""
    found = here.client.ask("POST", "/v1/bookings", body={**BOOKING, "dry_run": True})
    assert (found["booking"], found["slots"], found["gpu_hours"]) == ("", [], 16)
    assert found["would"][0]["shown"] == "Fri 2027-01-15 11:00 to Fri 2027-01-15 15:00"
    assert here.client.ask("GET", "/v1/bookings")["slots"] == []


def test_a_conflict_names_who_has_it_and_books_nothing(here: Running) -> None:
    """Of 16 that can be booked 14 are taken; the nearest other time is told."""
    here.client.ask("POST", "/v1/bookings", body={**BOOKING, "gpus": 14})
    found = here.client.ask("POST", "/v1/bookings", body=BOOKING, also=(409,))
    (objection,) = found["objections"]
    assert objection["code"] == "conflict"
    assert f"vision ({ME}) has 14" in objection["words"]
    assert [each["start"] for each in found["proposals"]] == [NOW + 6 * HOUR]
    assert len(here.client.ask("GET", "/v1/bookings")["slots"]) == 1


def test_the_same_key_books_once(here: Running) -> None:
    """An answer that was lost on the way is asked for again; another wish needs another key."""
    body = {**BOOKING, "from": "2027-01-15 12:00", "key": "k1"}
    first = here.client.ask("POST", "/v1/bookings", body=body)
    again = here.client.ask("POST", "/v1/bookings", body=body)
    assert (again["booking"], again["repeated"]) == (first["booking"], True)
    assert len(here.client.ask("GET", "/v1/bookings")["slots"]) == 1
    with pytest.raises(RefusedAction, match="another booking"):
        here.client.ask("POST", "/v1/bookings", body={**body, "gpus": 1})


def test_what_the_engine_refuses_is_not_booked(here: Running) -> None:
    """Its reservation of somebody else is read at once, and the cards stay free."""
    here.driver.refuses_all = "overlaps a reservation of operations"
    with pytest.raises(RefusedAction, match=r"slurm refuses: .*overlaps a reservation"):
        here.client.ask("POST", "/v1/bookings", body=BOOKING)
    assert here.client.ask("GET", "/v1/bookings")["slots"] == []
    here.driver.refuses_all = ""
    assert here.client.ask("POST", "/v1/bookings", body=BOOKING)["booking"]


def test_where_the_engine_takes_no_slots_nothing_is_booked(here: Running) -> None:
    """A right that is missing is told to who books; giving back works all the same."""
    name = here.client.ask("POST", "/v1/bookings", body=BOOKING)["booking"]
    here.driver.forbidden = RefusedAction("rights", "only operators make reservations")
    with pytest.raises(RefusedAction, match="only operators"):
        here.client.ask("POST", "/v1/bookings", body=BOOKING)
    with pytest.raises(RefusedAction, match="only operators"):
        here.client.ask("POST", f"/v1/bookings/{name}/end", body={"by": "1h"})
    assert len(here.client.ask("GET", "/v1/bookings")["slots"]) == 1
    gone = here.client.ask("DELETE", f"/v1/bookings/{name}")
    assert [item["state"] for item in gone["slots"]] == ["released"]


def test_what_the_engine_cannot_be_told_is_proposed_until_it_is_back(here: Running) -> None:
    """The calendar takes it; the engine has it with the first tick that sees it."""
    here.driver.unseen = ServiceUnavailable("no answer")
    made = here.client.ask("POST", "/v1/bookings", body=BOOKING)
    assert made["slots"][0]["state"] == "proposed"
    here.driver.unseen = None
    here.tick(5)
    assert here.client.ask("GET", "/v1/bookings")["slots"][0]["state"] == "booked"


def test_the_last_cards_are_booked_once_however_many_want_them(here: Running) -> None:
    """Ten at once want four of sixteen cards each: four have them, and six read who."""

    def book(_number: int) -> bool:
        found = here.client.ask("POST", "/v1/bookings", body=BOOKING, also=(409,))
        assert bool(found["booking"]) is not bool(found["objections"])
        return bool(found["booking"])

    with concurrent.futures.ThreadPoolExecutor(10) as many:
        assert sum(many.map(book, range(10))) == 4
    assert len(here.driver.slots) == 4
    assert sum(slot.gpus for slot in here.driver.slots) == 16


def test_a_slot_far_ahead_is_told_to_the_engine_when_it_comes_near(here: Running) -> None:
    """Two weeks before; until then it is the calendar's, and nobody else's."""
    far = {**BOOKING, "from": "+30d"}
    (slot,) = here.client.ask("POST", "/v1/bookings", body=far)["slots"]
    assert (slot["state"], here.driver.slots) == ("booked", ())
    here.tick(17 * 24 * HOUR)
    assert [each.id for each in here.driver.slots] == [slot["id"]]


def test_a_cancelled_booking_is_given_back_to_the_engine(here: Running) -> None:
    """At once, and for good."""
    made = here.client.ask("POST", "/v1/bookings", body={**BOOKING, "repeat": "daily"})
    first, second = made["slots"][:2]
    gone = here.client.ask("DELETE", f"/v1/bookings/{second['id']}")
    assert [item["state"] for item in gone["slots"]] == ["released"]
    assert second["id"] not in {each.id for each in here.driver.slots}
    assert first["id"] in {each.id for each in here.driver.slots}
    here.client.ask("DELETE", f"/v1/bookings/{made['booking']}")
    assert here.driver.slots == ()
    with pytest.raises(RefusedAction, match="given back already"):
        here.client.ask("DELETE", f"/v1/bookings/{made['booking']}")


def test_a_slot_is_lengthened_if_the_engine_agrees(here: Running) -> None:
    """Else it stays as it was, here and there."""
    (slot,) = here.client.ask("POST", "/v1/bookings", body=BOOKING)["slots"]
    found = here.client.ask("POST", f"/v1/bookings/{slot['id']}/end", body={"by": "2h"})
    assert found["slots"][0]["end"] == slot["end"] + 2 * HOUR
    here.driver.refuses = {slot["id"]: "no"}
    with pytest.raises(RefusedAction, match="no"):
        here.client.ask("POST", f"/v1/bookings/{slot['id']}/end", body={"by": "1h"})
    here.driver.refuses = {}
    (after,) = here.client.ask("GET", f"/v1/bookings/{slot['id']}")["slots"]
    assert after["end"] == slot["end"] + 2 * HOUR


def test_others_bookings_are_others(tmp_path: Path) -> None:
    """Who is neither of the team nor an operator cannot give them back."""
    (tmp_path / "cy").write_text("c" * 32)
    (tmp_path / "olga").write_text("o" * 32)
    (tmp_path / "board").write_text("b" * 32)
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(
        "version: 1\ntokens:\n- {name: cy, role: user, file: cy}\n"
        "- {name: olga, role: operator, file: olga}\n- {name: board, role: reader, file: board}\n"
    )
    port = free_port()
    with running(tmp_path, POLICY, now=NOW, listen=("127.0.0.1", port), tokens=tokens) as here:
        url = f"http://127.0.0.1:{port}"
        cy = DaemonClient(url=url, token_file=tmp_path / "cy")
        olga = DaemonClient(url=url, token_file=tmp_path / "olga")
        board = DaemonClient(url=url, token_file=tmp_path / "board")
        body = {**BOOKING, "team": "vision"}
        name = olga.ask("POST", "/v1/bookings", body=body)["booking"]
        with pytest.raises(RefusedAction, match="they or an operator"):
            cy.ask("DELETE", f"/v1/bookings/{name}")
        with pytest.raises(RefusedAction, match="cy is of speech, and cannot act for vision"):
            cy.ask("POST", "/v1/bookings", body=body)
        with pytest.raises(RefusedAction, match="may look, and change nothing"):
            board.ask("POST", "/v1/bookings", body=body)
        assert board.schedule().cluster == "ci"
        assert olga.ask("GET", "/v1/whoami")["role"] == "operator"
        olga.ask("DELETE", f"/v1/bookings/{name}")
        assert here.driver.slots == ()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpus": "4"}, "gpus is not a whole number"),
        ({"gpus": 0}, "gpus is not a whole number"),
        ({"from": "noon"}, "from: 'noon' is no moment"),
        ({"from": "2027-03-28 02:30"}, "not in Europe/Berlin"),
        ({"for": "4"}, "for: '4' lacks a unit"),
        ({"repeat": "monthly"}, "repeat is none of none, daily"),
        ({"words": "a\x1b[31m"}, "cannot be shown"),
        ({"words": "x" * 201}, "at most 200"),
        ({"weather": "fine"}, "unknown field 'weather'"),
        ({"dry_run": "yes"}, "neither true nor false"),
        ({"card": ""}, "say which cards: a100-40, h100-80"),
    ],
)
def test_what_makes_no_sense_says_why(
    refusing: Running, change: dict[str, object], says: str
) -> None:
    """Whatever is sent, it is taken or refused by name."""
    with pytest.raises(InvalidInput, match=says):
        refusing.client.ask("POST", "/v1/bookings", body={**BOOKING, **change})


def test_nobody_came(here: Running) -> None:
    """Half an hour without use, all of it seen: the slot is given back, and its cards are free."""
    (slot,) = here.client.ask("POST", "/v1/bookings", body=BOOKING)["slots"]
    here.driver.uses = (SlotUse(slot["id"], held=True, gpus=0),)
    here.tick(2 * HOUR)
    here.tick(1799)
    assert here.client.schedule().bookings[0].state is BookingState.IDLE
    here.tick(1)
    (entry,) = here.client.schedule().bookings
    assert entry.state is BookingState.RELEASED
    assert here.driver.slots == ()
    (told,) = here.client.ask("GET", f"/v1/bookings/{slot['id']}")["slots"]
    assert told["released_by"] == "no-show"


def test_who_came_and_rests_is_no_no_show(here: Running) -> None:
    """Booked but idle is told, and counted; the slot stays the team's."""
    (slot,) = here.client.ask("POST", "/v1/bookings", body=BOOKING)["slots"]
    here.driver.uses = (SlotUse(slot["id"], held=True, gpus=4, first_used=NOW + 2 * HOUR),)
    here.tick(2 * HOUR)
    here.driver.uses = (SlotUse(slot["id"], held=True, gpus=0, used_gpu_seconds=240.0),)
    here.tick(60)
    here.tick(HOUR)
    (entry,) = here.client.schedule().bookings
    assert (entry.state, entry.used_gpu_seconds) == (BookingState.IDLE, 240)
    told = here.client.ask("GET", "/v1/usage", parameters={"from": "now-2h"})
    # Four cards for an hour and a minute, less the four minutes that one of them was used.
    assert told["booked_idle_gpu_hours"] == {"vision": pytest.approx(4 * 61 / 60 - 240 / 3600)}


def test_while_nobody_looks_nobody_is_absent(here: Running) -> None:
    """An engine that was not seen, or a daemon that was not there, proves no no-show."""
    (slot,) = here.client.ask("POST", "/v1/bookings", body=BOOKING)["slots"]
    here.driver.unseen = ServiceUnavailable("no answer")
    here.tick(3 * HOUR)
    here.driver.unseen = None
    here.driver.uses = (SlotUse(slot["id"], held=True, gpus=0),)
    here.tick(5)
    here.tick(1790)
    assert here.client.schedule().bookings[0].state is BookingState.IDLE
    here.tick(20)
    assert here.client.schedule().bookings[0].state is BookingState.RELEASED


# -- jobs


def task(**parts: object) -> dict[str, object]:
    """A task as `gpuwarden submit` sends it, of somebody who says to be root."""
    made = Task(
        name="night",
        run_id="night",
        words=("model=yolov8m", "data=coco.yaml"),
        user="somebody-else",
        team="vision",
        priority="high",
        gpus=2,
        directory="/home",
    )
    return {**made.as_document(), **parts}


def test_a_job_is_of_whom_the_kernel_names(tmp_path: Path) -> None:
    """Whatever its document says; uid and gid come from the socket, the token goes along."""
    with running(tmp_path, LOCAL, now=NOW, driver=PlayedQueue) as here:
        found = here.client.ask("POST", "/v1/jobs", body={"task": task(), "token": "t1"})
        assert found == {"id": "1", "engine": "local"}
        ((taken, uid, gid, token),) = here.driver.taken
        assert (taken.user, taken.team, uid, gid, token) == (
            ME,
            "vision",
            os.geteuid(),
            os.getegid(),
            "t1",
        )
        with pytest.raises(RefusedAction, match="there are 4 cards"):
            here.client.ask("POST", "/v1/jobs", body={"task": task(gpus=5)})
        with pytest.raises(InvalidInput, match="no document"):
            here.client.ask("POST", "/v1/jobs", body={"task": {"schema": "x"}})


def test_jobs_of_others_are_others(tmp_path: Path) -> None:
    """One's own can be commanded, others' only by operators; what is not there is not."""
    with running(tmp_path, LOCAL, now=NOW, driver=PlayedQueue) as here:
        mine = dataclasses.replace(WAITS, id="1", user=ME)
        here.driver.rows = (mine, dataclasses.replace(WAITS, id="2", user="cy"))
        for verb in ("hold", "release", "cancel"):
            here.client.ask("POST", f"/v1/jobs/1/{verb}")
        assert here.driver.commands == [(v, "1", ME) for v in ("hold", "release", "cancel")]
        with pytest.raises(RefusedAction, match="no job 3"):
            here.client.ask("POST", "/v1/jobs/3/cancel")
        if os.geteuid() != 0:
            with pytest.raises(RefusedAction, match="job 2 is of cy"):
                here.client.ask("POST", "/v1/jobs/2/cancel")


def test_an_engine_with_a_queue_of_its_own_keeps_it(here: Running) -> None:
    """Whoever asks is told which command does it there."""
    with pytest.raises(RefusedAction, match="sbatch, and scancel"):
        here.client.ask("POST", "/v1/jobs", body={"task": task()})


def test_nobody_submits_over_the_network(tmp_path: Path) -> None:
    """A token names a user, and no uid: jobs run as who the kernel names."""
    (tmp_path / "cy").write_text("c" * 32)
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("version: 1\ntokens:\n- {name: cy, role: operator, file: cy}\n")
    port = free_port()
    with running(
        tmp_path, LOCAL, now=NOW, driver=PlayedQueue, listen=("127.0.0.1", port), tokens=tokens
    ):
        cy = DaemonClient(url=f"http://127.0.0.1:{port}", token_file=tmp_path / "cy")
        with pytest.raises(RefusedAction, match="use the socket"):
            cy.ask("POST", "/v1/jobs", body={"task": task()})


# -- the network


def test_the_network_is_closed_to_who_shows_no_token(tmp_path: Path) -> None:
    """But for health and metrics, which name no users; a header makes nobody a local user."""
    (tmp_path / "cy").write_text("c" * 32)
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("version: 1\ntokens:\n- {name: cy, role: user, file: cy}\n")
    port = free_port()
    with running(tmp_path, POLICY, now=NOW, listen=("127.0.0.1", port), tokens=tokens) as here:
        url = f"http://127.0.0.1:{port}"
        here.driver.rows = (WAITS,)
        here.tick(5)
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"gpuwarden.peer": "0"}):
            for path in ("/v1/schedule", "/v1/policy"):
                answer = httpx.get(f"{url}{path}", headers=headers)
                assert answer.status_code == 401, (path, headers)
        assert httpx.get(f"{url}/-/healthy").text == "healthy\n"
        assert httpx.get(f"{url}/-/ready").status_code == 200
        assert "ana" not in httpx.get(f"{url}/metrics").text
        good = {"Authorization": "Bearer " + "c" * 32}
        assert httpx.get(f"{url}/v1/schedule", headers=good).status_code == 200


def test_without_tokens_the_loopback_may_look_and_no_more(tmp_path: Path) -> None:
    """A board of the same machine needs no token; nobody changes anything without one."""
    port = free_port()
    with running(tmp_path, POLICY, now=NOW, listen=("127.0.0.1", port)):
        anybody = DaemonClient(url=f"http://127.0.0.1:{port}")
        assert anybody.schedule().cluster == "ci"
        with pytest.raises(RefusedAction, match="may look"):
            anybody.ask("POST", "/v1/bookings", body=BOOKING)


def test_an_address_of_the_calendar_is_its_own_secret(tmp_path: Path) -> None:
    """It opens the calendar of its team, and nothing else; another letter opens nothing."""
    (tmp_path / "cy").write_text("c" * 32)
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("version: 1\ntokens:\n- {name: cy, role: user, file: cy}\n")
    port = free_port()
    with running(tmp_path, POLICY, now=NOW, listen=("127.0.0.1", port), tokens=tokens) as here:
        here.client.ask("POST", "/v1/bookings", body=BOOKING)
        path = here.client.ask("GET", "/v1/calendar-address", parameters={"team": "vision"})["path"]
        url = f"http://127.0.0.1:{port}"
        answer = httpx.get(url + path)
        assert answer.status_code == 200
        assert "SUMMARY:vision: 4 x a100-40" in answer.text
        assert httpx.get(url + path.replace("team=vision", "team=speech")).status_code == 403
        assert httpx.get(url + path[:-1] + "x").status_code == 403
        assert httpx.get(url + "/v1/calendar.ics").status_code == 401


# -- receipts, accounts, predictions


def test_a_step_that_was_seen_stays_seen(here: Running) -> None:
    """Also when the engine forgets it, or tells another time for it later."""
    asked = Preemption("p1", "7", "8", Cause.PRIORITY, "epoch", NOW + 60, steps={"notified": NOW})
    here.driver.asked_to_leave = (asked,)
    here.tick(5)
    here.driver.asked_to_leave = (
        dataclasses.replace(asked, steps={"notified": NOW + 9, "saved": NOW + 3}),
    )
    here.tick(5)
    here.driver.asked_to_leave = ()
    here.tick(5)
    (found,) = here.client.schedule().preemptions
    assert found.steps == {"notified": NOW, "saved": NOW + 3}


def test_accounts_are_what_was_read_of_the_engine_and_outlast_it(here: Running) -> None:
    """A job that the engine has forgotten still counts, and nothing counts twice."""
    job = Holding("slurm", "7", "ana", "vision", 2, NOW - HOUR, NOW, "a100-40")
    here.driver.held = (job,)
    here.tick(61)
    here.driver.held = (dataclasses.replace(job, entry="8"),)
    here.tick(61)
    here.tick(61)
    found = here.client.ask("GET", "/v1/usage", parameters={"by": "user", "from": "now-1d"})
    (line,) = found["lines"]
    assert (line["name"], line["gpu_hours"], line["jobs"]) == ("ana", 4, 2)
    assert (line["cost"], found["notes"]) == ({"EUR": 7.6}, [])
    here.driver.unaccounted = ServiceUnavailable("slurmdbd does not answer")
    here.tick(400)
    found = here.client.ask("GET", "/v1/usage", parameters={"from": "now-1d"})
    assert found["total"]["gpu_hours"] == 4
    assert "as it was last known" in found["notes"][0]


def test_of_before_its_time_the_daemon_asks_the_engine_for_operators_alone(tmp_path: Path) -> None:
    """Years of accounts keep the engine busy: a user could have nobody's queue be looked at."""
    (tmp_path / "cy").write_text("c" * 32)
    (tmp_path / "olga").write_text("o" * 32)
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(
        "version: 1\ntokens:\n- {name: cy, role: user, file: cy}\n"
        "- {name: olga, role: operator, file: olga}\n"
    )
    port = free_port()
    with running(tmp_path, POLICY, now=NOW, listen=("127.0.0.1", port), tokens=tokens) as here:
        old = NOW - 100 * 24 * HOUR
        here.driver.held = (Holding("slurm", "3", "ana", "vision", 1, old, old + HOUR, "a100-40"),)
        url, asked = f"http://127.0.0.1:{port}", {"from": "now-200d"}
        cy = DaemonClient(url=url, token_file=tmp_path / "cy")
        olga = DaemonClient(url=url, token_file=tmp_path / "olga")
        found = cy.ask("GET", "/v1/usage", parameters=asked)
        assert found["total"]["gpu_hours"] == 0
        assert "operators can ask slurm" in found["notes"][0]
        found = olga.ask("GET", "/v1/usage", parameters=asked)
        assert (found["total"]["gpu_hours"], found["notes"]) == (1, [])
        here.driver.unaccounted = ServiceUnavailable("slurmdbd does not answer")
        found = olga.ask("GET", "/v1/usage", parameters=asked)
        assert "slurmdbd does not answer" in found["notes"][0]


def test_a_preemption_that_no_engine_tells_of_is_none_any_more(here: Running) -> None:
    """An open one is shown for a day after it was last told of, a closed one for a week."""
    here.driver.asked_to_leave = (
        Preemption("p1", "7", "8", Cause.PRIORITY, "epoch", steps={"notified": NOW}),
        Preemption("p2", "7", "8", Cause.PRIORITY, "epoch", outcome=Outcome.DONE),
    )
    here.tick(5)
    here.driver.asked_to_leave = ()
    here.tick(23 * HOUR)
    assert {item.id for item in here.client.schedule().preemptions} == {"p1", "p2"}
    here.tick(2 * HOUR)
    assert {item.id for item in here.client.schedule().preemptions} == {"p2"}


def test_a_job_that_the_engine_lost_does_not_run_for_ever(here: Running) -> None:
    """Its end is when it was last seen; an engine that was not seen ends nothing."""
    here.driver.held = (Holding("slurm", "7", "ana", "vision", 2, NOW, None, "a100-40"),)
    here.tick(100)
    here.driver.unseen = ServiceUnavailable("no answer")
    here.driver.held = ()
    here.tick(100)
    assert here.daemon.scheduler.store.oldest_running() == NOW
    here.driver.unseen = None
    here.tick(100)
    (kept,) = here.daemon.scheduler.store.holdings("slurm", NOW, NOW + HOUR)
    assert kept.end == NOW + 100


def test_budgets_are_used_by_what_was_held_in_their_period(here: Running) -> None:
    """Of a job over midnight each day has its part."""
    midnight = 1_799_967_600.0  # 2027-01-15 00:00 in Berlin
    here.driver.held = (
        Holding("slurm", "7", "ana", "vision", 2, midnight - HOUR, midnight + HOUR, "a100-40"),
    )
    here.tick(61)
    month, day = here.client.schedule().budgets
    assert (month.used, day.used) == (4, 2)
    assert (month.limit_gpu_hours, month.kind, month.forecast) == (5000, "hard", None)


def test_an_end_is_foretold_from_five_on_and_settled_afterwards(here: Running) -> None:
    """What was said first counts, and calibration says whether it came true."""
    features = Features("yolov8m", "640", "64", "a100-40", 2, "coco.yaml")
    done = [
        dataclasses.replace(WAITS, id=str(n), state=EntryState.DONE, started=NOW, start=None)
        for n in range(1, 6)
    ]
    held = [
        Holding("slurm", str(n), "ana", "vision", 2, NOW, NOW + 1000 + n, "a100-40")
        for n in range(1, 6)
    ]
    here.driver.known = {str(n): Training(features, 100) for n in range(1, 10)}
    here.driver.rows, here.driver.held = tuple(done), tuple(held)
    here.tick(2000)
    runs = dataclasses.replace(WAITS, id="9", state=EntryState.RUNNING, started=NOW + 2000)
    here.driver.rows = (*done, runs)
    running_now = Holding("slurm", "9", "ana", "vision", 2, NOW + 2000, None, "a100-40")
    here.driver.held = (*held, running_now)
    here.tick(61)
    finish = here.client.schedule().entries[-1].finish
    assert finish == Interval(NOW + 3001, NOW + 3005, 5)
    here.driver.rows = (*done, dataclasses.replace(runs, state=EntryState.DONE))
    here.driver.held = (*held, dataclasses.replace(running_now, end=NOW + 3003))
    here.tick(1000)
    found = here.client.ask("GET", "/v1/calibration")
    (row,) = found["bins"]
    assert (row["kind"], row["least"], row["count"], row["inside"]) == ("finish", 5, 1, 1)
    assert row["low"] == pytest.approx(0.2065, abs=1e-4)


def test_starts_that_did_not_come_are_void_and_not_wrong(here: Running) -> None:
    """A job that was cancelled says nothing of the plan."""
    late = dataclasses.replace(WAITS, id="8")
    here.driver.rows = (WAITS, late)
    here.tick(5)
    here.driver.rows = (
        dataclasses.replace(WAITS, state=EntryState.RUNNING, started=NOW + 200, start=None),
    )
    here.tick(200)
    found = here.client.ask("GET", "/v1/calibration")
    (row,) = found["bins"]
    assert (row["kind"], row["count"], row["inside"], row["late"]) == ("start", 1, 0, 1)
    assert (found["void"], found["open"]) == (1, 0)


# -- life


def test_a_policy_is_taken_whole_or_not_at_all(here: Running) -> None:
    """A mistake leaves the old one in force, and is told until it is mended."""
    here.settings.policy.write_text(POLICY.replace("share: 3", "share: 0"))
    here.daemon.worker.call(here.daemon.reload)
    here.tick(5)
    (problem,) = here.client.schedule().problems
    assert problem.code == "policy_invalid"
    assert "policy.yaml:" in problem.words
    here.settings.policy.write_text(POLICY.replace("count: 8", "count: 9"))
    here.daemon.worker.call(here.daemon.reload)
    here.tick(5)
    found = here.client.schedule()
    assert (found.problems, found.cards[1].count) == ((), 9)
    assert here.driver.policy.card("h100-80").count == 9


def test_tokens_are_read_again_with_the_policy(tmp_path: Path) -> None:
    """A token that was taken away opens nothing any more, and a new one does."""
    (tmp_path / "cy").write_text("c" * 32)
    (tmp_path / "di").write_text("d" * 32)
    tokens = tmp_path / "tokens.yaml"
    line = "version: 1\ntokens:\n- {{name: {0}, role: user, file: {0}}}\n"
    tokens.write_text(line.format("cy"))
    port = free_port()
    with running(tmp_path, POLICY, now=NOW, listen=("127.0.0.1", port), tokens=tokens) as here:
        url = f"http://127.0.0.1:{port}"
        cy = DaemonClient(url=url, token_file=tmp_path / "cy")
        di = DaemonClient(url=url, token_file=tmp_path / "di")
        assert cy.ask("GET", "/v1/whoami")["name"] == "cy"
        tokens.write_text(line.format("di") + "nonsense: 1\n")
        here.daemon.worker.call(here.daemon.reload)
        assert cy.ask("GET", "/v1/whoami")["name"] == "cy"
        tokens.write_text(line.format("di"))
        here.daemon.worker.call(here.daemon.reload)
        assert di.ask("GET", "/v1/whoami")["name"] == "di"
        with pytest.raises(RefusedAction, match="nobody's"):
            cy.ask("GET", "/v1/whoami")


def test_bookings_survive_a_restart(tmp_path: Path) -> None:
    """And the engine is told of them with the first tick."""
    with running(tmp_path, POLICY, now=NOW) as first:
        name = first.client.ask("POST", "/v1/bookings", body=BOOKING)["booking"]
    assert first.driver.calls[-1] == "stop"
    assert not first.settings.socket.exists()
    with running(tmp_path, POLICY, now=NOW + 60) as second:
        assert [slot.id for slot in second.driver.slots] == [name]


def test_one_daemon_has_a_folder(here: Running) -> None:
    """The second one says so, and touches nothing."""
    with pytest.raises(StoreUnusable, match="in use by another scheduler"):
        Daemon(here.settings, opening=lambda _e, policy, _c: PlayedDriver(policy))
    assert here.client.schedule().cluster == "ci"


def test_a_store_of_a_newer_gpuwarden_is_not_touched(tmp_path: Path) -> None:
    """Nor is a damaged one taken for an empty one."""
    with running(tmp_path, POLICY, now=NOW) as here:
        file = here.settings.state / "scheduler.sqlite"
    with sqlite3.connect(file) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    db.close()
    with pytest.raises(StoreUnusable, match="start the newer one"):
        Daemon(here.settings, opening=lambda _e, policy, _c: PlayedDriver(policy))
    file.write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreUnusable, match="damaged"):
        Daemon(here.settings, opening=lambda _e, policy, _c: PlayedDriver(policy))


def test_a_copy_is_made_while_the_daemon_runs(here: Running, tmp_path: Path) -> None:
    """Put in its place, it has every booking."""
    name = here.client.ask("POST", "/v1/bookings", body=BOOKING)["booking"]
    here.daemon.scheduler.store.copy(tmp_path / "copy.sqlite")
    other = tmp_path / "other"
    (other / "state").mkdir(parents=True)
    (tmp_path / "copy.sqlite").rename(other / "state" / "scheduler.sqlite")
    with running(other, POLICY, now=NOW) as restored:
        assert [slot.id for slot in restored.driver.slots] == [name]


def test_everybody_may_connect_and_nobody_may_read_the_store(here: Running) -> None:
    """The socket is for all users of the machine; what lies on disk is the daemon's."""
    assert here.settings.socket.stat().st_mode & 0o777 == 0o666
    assert (here.settings.state / "scheduler.sqlite").stat().st_mode & 0o077 == 0
    assert here.settings.state.stat().st_mode & 0o077 == 0
    assert here.contexts[0].state.stat().st_mode & 0o077 == 0


def test_a_folder_that_everybody_writes_into_is_refused(tmp_path: Path) -> None:
    """Somebody could put a store of theirs into it."""
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o777)
    settings = Settings(tmp_path / "policy.yaml", tmp_path / "state", None, tmp_path / "s.sock")
    with pytest.raises(InvalidInput, match="everybody may write"):
        Daemon(settings, opening=lambda _e, policy, _c: PlayedDriver(policy))


def test_metrics_tell_the_queue_and_not_who_is_in_it(here: Running) -> None:
    """By team and priority; counters count on over a restart, since the store has them."""
    here.driver.rows = (
        WAITS,
        dataclasses.replace(
            WAITS, id="8", state=EntryState.RUNNING, started=NOW - 300, requeues=0, start=None
        ),
        dataclasses.replace(WAITS, id="9", state=EntryState.RUNNING, started=NOW, requeues=2),
    )
    here.driver.asked_to_leave = (
        Preemption(
            "p1", "7", "8", Cause.PRIORITY, "epoch", NOW, outcome=Outcome.DONE,
            steps={"notified": NOW, "saved": NOW + 20, "left": NOW + 30}, lost_seconds=12.0,
        ),
        Preemption("p2", "9", "8", Cause.BOOKING, "epoch", NOW, "r", {"notified": NOW}),
    )  # fmt: skip
    here.tick(5)
    text = here.client.text("/metrics", {}).decode()
    for line in (
        'gpuwarden_scheduler_jobs{priority="high",state="pending",team="vision"} 1.0',
        'gpuwarden_scheduler_jobs{priority="high",state="running",team="vision"} 2.0',
        'gpuwarden_scheduler_gpus{state="running",team="vision"} 4.0',
        'gpuwarden_scheduler_oldest_wait_seconds{priority="high",team="vision"} 605.0',
        'gpuwarden_scheduler_wait_seconds_bucket{le="300.0",priority="high",team="vision"} 1.0',
        'gpuwarden_scheduler_requeues_total{team="vision"} 2.0',
        'gpuwarden_scheduler_preemptions_total{cause="priority",outcome="done"} 1.0',
        "gpuwarden_scheduler_preemptions_open 1.0",
        'gpuwarden_scheduler_victim_overdue{entry="9",run_id="r"} 1.0',
        'gpuwarden_scheduler_receipt_step_seconds_sum{step="saved"} 20.0',
        'gpuwarden_scheduler_receipt_step_seconds_sum{step="left"} 10.0',
        'gpuwarden_scheduler_lost_gpu_seconds_total{cause="priority"} 12.0',
        'gpuwarden_scheduler_budget_limit_gpu_hours{kind="hard",per="month",team="vision"} 5000.0',
        'gpuwarden_scheduler_ticks_total{outcome="completed"} 2.0',
        'gpuwarden_scheduler_build_info{engine="slurm",version=',
    ):
        assert line in text, line
    assert json.dumps("ana") not in text


def test_a_driver_has_a_folder_that_means_the_same_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the daemon was started with `--state state`: its jobs stand in other folders."""
    monkeypatch.chdir(tmp_path)
    with running(Path(), POLICY, now=NOW) as found:
        assert found.contexts[0].state == tmp_path / "state" / "slurm"
