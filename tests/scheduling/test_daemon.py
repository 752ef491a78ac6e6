"""The daemon: one thread asks the engine, what cannot be seen is told, and nothing is lost."""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.scheduling.daemon_scenes import BOOKING, POLICY, WAITS
from tests.scheduling.daemons import PlayedDriver, free_port, running
from tests.scheduling.policy_files import NOW

from gpuwarden.errors import InvalidInput, RefusedAction, ServiceUnavailable
from gpuwarden.schedule_api import (
    Cause,
    EntryState,
    Outcome,
    Preemption,
    Problem,
)
from gpuwarden.scheduling.daemon import Daemon, Settings
from gpuwarden.scheduling.daemon_clients import DaemonClient
from gpuwarden.scheduling.sqlite_files import StateUnwritable, StoreUnusable
from gpuwarden.scheduling.store_files import MIGRATIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.scheduling.daemons import Running


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Running]:
    """A daemon of a cluster."""
    with running(tmp_path, POLICY, now=NOW) as found:
        yield found


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
    here.driver.unseen = StateUnwritable("queue.db cannot be written (database or disk is full)")
    here.tick(5)
    (problem,) = here.client.schedule().problems
    assert problem.code == "state_unwritable"
    assert problem.words.startswith("queue.db cannot be written")
    here.driver.unseen = None
    here.tick(5)
    assert here.client.schedule().taken == NOW + 15


def test_the_engine_is_asked_from_one_thread(here: Running) -> None:
    """Ticks, commands and accounts: a driver needs no locks."""
    here.client.ask("POST", "/v1/bookings", body=BOOKING)
    here.client.ask("GET", "/v1/usage")
    here.tick(5)
    assert {name.partition("_")[0] for name in here.driver.threads} == {"driver"}


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


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    """They could put another queue in the place of ours."""
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "state").mkdir(mode=0o700)
    os.chown(tmp_path / "state", 65534, 65534)
    settings = Settings(tmp_path / "policy.yaml", tmp_path / "state", None, tmp_path / "s.sock")
    with pytest.raises(InvalidInput, match="belongs to user 65534"):
        Daemon(settings, opening=lambda _e, policy, _c: PlayedDriver(policy))


def test_a_file_that_cannot_be_written_is_said_and_is_no_fault(here: Running) -> None:
    """A full disk is told as what it is, and the next question is answered."""
    here.driver.unseen = sqlite3.OperationalError("database or disk is full")
    with pytest.raises(ServiceUnavailable, match="cannot be used now: database or disk is full"):
        here.client.ask("POST", "/v1/bookings", body=BOOKING)
    here.driver.unseen = None
    assert here.client.ask("GET", "/v1/bookings")["slots"]


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
