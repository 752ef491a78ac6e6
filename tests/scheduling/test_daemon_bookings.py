"""Bookings through the daemon: of whom the kernel names, once, and with the engine's consent."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING

import pytest
from tests.scheduling.daemon_scenes import BOOKING, HOUR, ME, POLICY
from tests.scheduling.daemons import free_port, running
from tests.scheduling.policy_files import NOW

from gpuwarden.errors import InvalidInput, RefusedAction, ServiceUnavailable
from gpuwarden.schedule_api import (
    BookingState,
)
from gpuwarden.scheduling.daemon_clients import DaemonClient
from gpuwarden.scheduling.slots import SlotUse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.scheduling.daemons import Running


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


def test_a_booking_that_comes_again_includes_its_last_day(here: Running) -> None:
    """`--until` with a date is that day too; without a repeat it is refused and not passed over."""
    weekly = {**BOOKING, "from": "mon 09:00", "for": "1h", "repeat": "weekly", "dry_run": True}
    found = here.client.ask("POST", "/v1/bookings", body={**weekly, "until": "2027-02-01"})
    assert [item["shown"][:20] for item in found["would"]] == [
        "Mon 2027-01-18 09:00",
        "Mon 2027-01-25 09:00",
        "Mon 2027-02-01 09:00",
    ]
    with pytest.raises(InvalidInput, match="say repeat"):
        here.client.ask("POST", "/v1/bookings", body={**BOOKING, "until": "2027-02-01"})


def test_weekdays_begin_on_a_weekday(here: Running) -> None:
    """Of a Saturday it would be the only slot that is none of them."""
    body = {**BOOKING, "for": "1h", "repeat": "weekdays", "until": "+14d", "dry_run": True}
    with pytest.raises(InvalidInput, match=r"is a Saturday.*repeat daily"):
        here.client.ask("POST", "/v1/bookings", body={**body, "from": "sat 09:00"})
    found = here.client.ask("POST", "/v1/bookings", body={**body, "from": "mon 09:00"})
    assert {item["shown"][:3] for item in found["would"]} == {"Mon", "Tue", "Wed", "Thu", "Fri"}


@pytest.mark.parametrize("path", ["/v1/bookings", "/v1/usage", "/v1/calendar-address"])
def test_a_team_that_is_none_is_told_and_not_shown_empty(here: Running, path: str) -> None:
    """A letter too many is no quiet week."""
    with pytest.raises(RefusedAction, match=r'no team visoin.*did you mean "vision"'):
        here.client.ask("GET", path, parameters={"team": "visoin"})
    assert here.client.ask("GET", path, parameters={"team": "vision"})


def test_what_is_not_there_is_a_refusal_that_can_be_read(here: Running) -> None:
    """Also of a path that only another version knows, and of times that are the wrong way round."""
    with pytest.raises(RefusedAction, match="nothing at this path"):
        here.client.ask("GET", "/v1/bookings/a/b")
    with pytest.raises(RefusedAction, match="Method Not Allowed"):
        here.client.ask("DELETE", "/v1/schedule")
    with pytest.raises(InvalidInput, match="not after"):
        here.client.ask("GET", "/v1/bookings", parameters={"from": "+2d", "to": "+1d"})
