"""What the daemon remembers: receipts, accounts, and what it foretold."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from tests.scheduling.daemon_scenes import HOUR, POLICY, WAITS
from tests.scheduling.daemons import free_port, running
from tests.scheduling.policy_files import NOW

from gpuwarden.errors import InvalidInput, ServiceUnavailable
from gpuwarden.schedule_api import (
    Cause,
    EntryState,
    Interval,
    Outcome,
    Preemption,
)
from gpuwarden.scheduling.daemon_clients import DaemonClient
from gpuwarden.scheduling.expectations import Past, read_past
from gpuwarden.scheduling.holdings import Holding
from gpuwarden.scheduling.predictions import Features, Training

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.scheduling.daemons import Running


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Running]:
    """A daemon of a cluster."""
    with running(tmp_path, POLICY, now=NOW) as found:
        yield found


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


def test_a_clock_that_jumps_loses_and_doubles_nothing(here: Running) -> None:
    """Years ahead for a tick and back: what ended meanwhile has its end, and nothing is lost."""
    first = Holding("slurm", "6", "ana", "vision", 1, NOW - HOUR, NOW, "a100-40")
    held = Holding("slurm", "7", "ana", "vision", 2, NOW, None, "a100-40")
    here.driver.held = (first, held)
    here.tick(61)
    here.tick(5 * 365 * 24 * HOUR)
    here.clock.now = NOW + 100
    short = Holding("slurm", "8", "ana", "vision", 4, NOW + 110, NOW + 120, "a100-40")
    here.driver.held = (first, dataclasses.replace(held, end=NOW + 110), short)
    here.tick(61)
    store = here.daemon.scheduler.store
    found = {item.entry: item.end for item in store.holdings("slurm", NOW - HOUR, NOW + HOUR)}
    assert found == {"6": NOW, "7": NOW + 110, "8": NOW + 120}


def test_a_daemon_that_starts_years_ahead_forgets_nothing(tmp_path: Path) -> None:
    """A clock that was not set yet is no reason to drop the accounts."""
    with running(tmp_path, POLICY, now=NOW) as here:
        here.driver.held = (Holding("slurm", "6", "ana", "vision", 1, NOW - HOUR, NOW),)
        here.tick(61)
    with running(tmp_path, POLICY, now=NOW + 10 * 365 * 24 * HOUR) as here:
        here.tick(61)
        assert here.daemon.scheduler.store.holdings("slurm", NOW - HOUR, NOW)


def test_attempts_are_known_by_the_names_of_nodes_after_they_are_gone(here: Running) -> None:
    """Slurm's by the name itself, others' because they were seen."""
    runs = dataclasses.replace(WAITS, state=EntryState.RUNNING, started=NOW, start=None)
    here.driver.rows = (
        dataclasses.replace(runs, id="vision/a", job_id="pod-1"),
        dataclasses.replace(runs, id="vision/b"),
    )
    here.tick(5)
    here.driver.rows = ()
    here.tick(5)
    names = {"pod-1", "pod-2", "slurm-ci-12_3-1", "slurm-other-5-0"}
    known = here.daemon.scheduler.attempts.jobs_of(names, cluster="ci")
    assert known == {"pod-1": "vision/a", "slurm-ci-12_3-1": "12_3"}


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


def test_what_trainings_took_is_told_to_whoever_names_them(here: Running) -> None:
    """On any cards; a run that was submitted twice under its name is not learnt from."""
    features = Features("yolov8m", "640", "64", "a100-40", 2, "coco.yaml")
    other = dataclasses.replace(features, pacing="fraction=0.1")
    done = [
        dataclasses.replace(
            WAITS, id=str(n), run_id=run, state=EntryState.DONE, started=NOW, start=None
        )
        for n, run in enumerate(("a", "b", "c", "c", "d"))
    ]
    here.driver.known = {str(n): Training(features, 100) for n in range(4)}
    here.driver.known = {**here.driver.known, "4": Training(other, 100)}
    here.driver.rows = tuple(done)
    here.driver.held = tuple(
        Holding("slurm", str(n), "ana", "vision", 2, NOW, NOW + 1000 + n, "a100-40", item.run_id)
        for n, item in enumerate(done)
    )
    here.tick(2000)
    named = {"model": "yolov8m", "imgsz": "640", "data": "coco.yaml"}
    past = read_past(here.client.ask("GET", "/v1/runs", parameters=named))
    assert {(run.features, run.seconds) for run in past.runs} == {
        (features, 1000.0),
        (features, 1001.0),
    }
    tenth = here.client.ask("GET", "/v1/runs", parameters=named | {"pacing": "fraction=0.1"})
    assert [run.features for run in read_past(tenth).runs] == [other]
    unknown = here.client.ask("GET", "/v1/runs", parameters=named | {"data": "x' OR 1=1"})
    assert (read_past(unknown), unknown["ends"]["count"]) == (Past(), 0)
    with pytest.raises(InvalidInput, match="say model and data"):
        here.client.ask("GET", "/v1/runs")


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
