"""Bookings are Slurm's reservations: made once, given back, and in time for their team."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scheduling.slurm.drivers import WallClock, a_driver
from tests.scheduling.slurm.tasks import a_task, box_policy
from tests.scheduling.slurm.test_driver import clear, entry
from tests.scheduling.slurm.test_queue import NODE, NOW, a_job
from tests.servers import until
from tests.slurm_accounting import manage

from gpuwarden.errors import RefusedAction
from gpuwarden.platforms.slurm_nodes import SlurmNode
from gpuwarden.platforms.slurm_reservations import Reservation
from gpuwarden.schedule_api import Cause, EntryState
from gpuwarden.scheduling.slots import Slot
from gpuwarden.scheduling.slurm.observations import read_jobs
from gpuwarden.scheduling.slurm.queues import Reading
from gpuwarden.scheduling.slurm.reservations import (
    Shape,
    conflicts,
    creation,
    in_the_way,
    shape_of,
    steps,
    uses,
)
from gpuwarden.scheduling.slurm.submissions import SlurmSubmitter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.slurm_servers import SlurmCluster

    from gpuwarden.schedule_api import QueueEntry
    from gpuwarden.scheduling.slurm.clusters import Cluster

OLD, NEW = (22, 5), (24, 11)
POLICY = box_policy()
NODES = tuple(replace(NODE, name=f"n{n}", cards={"a100": 4}, cores=8) for n in range(3))


def a_slot(name: str = "b1", **changes: object) -> Slot:
    """Two cards of vision for an hour, in an hour."""
    slot = Slot(
        name,
        team="vision",
        who="ana",
        gpus=2,
        card="a100-40",
        start=NOW + 3600,
        end=NOW + 7200,
        lead_seconds=600.0,
    )
    return replace(slot, **changes)  # type: ignore[arg-type]


def reserved(slot: Slot, **changes: object) -> Reservation:
    """The reservation of a slot as Slurm has it."""
    made = Reservation(
        f"gpuwarden-{slot.id}",
        slot.start,
        slot.end,
        nodes=("n1",),
        accounts=frozenset({slot.team}),
        active=slot.start <= NOW,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def words(slot: Slot, *, version: tuple[int, int] = NEW, ignore_jobs: bool = False) -> list[str]:
    """What Slurm is told."""
    policy = box_policy()
    return list(creation(slot, policy, NODES, version=version, now=NOW, ignore_jobs=ignore_jobs))


# -- what is asked for


def test_cards_are_reserved_where_they_can_be() -> None:
    """Since 23.11; for the team's account, found by its name, given back if nobody comes."""
    found = words(a_slot())
    assert "ReservationName=gpuwarden-b1" in found
    assert "TRESPerNode=gres/gpu=2" in found
    assert "NodeCnt=1" in found
    assert "Accounts=vision" in found
    assert "Flags=MAGNETIC,PURGE_COMP=00:30:00" in found
    assert "MaxStartDelay=10" in found
    assert f"StartTime=uts{int(NOW) + 3600}" in found


def test_whole_nodes_are_reserved_where_cards_cannot_be() -> None:
    """22.05 knows no cards in reservations."""
    found = words(a_slot(), version=OLD)
    assert "NodeCnt=1" in found
    assert not [word for word in found if word.startswith("TRESPerNode")]


def test_a_slot_that_has_begun_begins_now() -> None:
    """Slurm refuses a beginning in the past."""
    assert "StartTime=now" in words(a_slot(start=NOW - 60))
    with pytest.raises(RefusedAction, match="within a minute"):
        words(a_slot(start=NOW - 60, end=NOW + 5))


@pytest.mark.parametrize(
    ("gpus", "new", "old"),
    [
        (1, Shape(1, 1, 1), Shape(1, None, 4)),
        (4, Shape(1, 4, 4), Shape(1, None, 4)),
        (6, Shape(2, 3, 6), Shape(2, None, 8)),
        (7, Shape(2, 4, 8), Shape(2, None, 8)),
        (12, Shape(3, 4, 12), Shape(3, None, 12)),
    ],
)
def test_cards_are_spread_over_as_few_nodes_as_hold_them(gpus: int, new: Shape, old: Shape) -> None:
    """The same number on each, at least as many as were booked."""
    policy = box_policy()
    assert shape_of(a_slot(gpus=gpus), policy, NODES, NEW) == new
    assert shape_of(a_slot(gpus=gpus), policy, NODES, OLD) == old


@given(
    gpus=st.integers(1, 40),
    sizes=st.lists(st.integers(0, 8), min_size=1, max_size=8),
    version=st.sampled_from([OLD, NEW]),
)
def test_no_slot_gets_less_than_it_booked(
    gpus: int, sizes: list[int], version: tuple[int, int]
) -> None:
    """On any nodes; and what cannot be had is refused."""
    nodes = [SlurmNode(f"n{n}", cards={"a100": size}) for n, size in enumerate(sizes)]
    most = max(range(1, len(sizes) + 1), key=lambda n: n * sorted(sizes)[-n])
    try:
        shape = shape_of(a_slot(gpus=gpus), POLICY, nodes, version)
    except RefusedAction:
        assert gpus > (sum(sizes) if version == OLD else most * sorted(sizes)[-most])
        return
    assert shape.gpus >= gpus
    if shape.cards is None:
        chosen = sorted(size for size in sizes if size)[: shape.nodes]
        assert sum(chosen) >= gpus
    else:
        assert sum(size >= shape.cards for size in sizes) >= shape.nodes
        assert shape.cards * shape.nodes == shape.gpus


# -- what differs


def test_what_is_there_already_stays() -> None:
    """Asked a hundred times, Slurm is told once."""
    slot = a_slot()
    assert steps([slot], [], box_policy(), made=(), now=NOW).create == (slot,)
    assert not steps([slot], [reserved(slot)], box_policy(), made=("b1",), now=NOW)


def test_what_is_not_ours_is_nobodys_business() -> None:
    """A maintenance, or somebody's own reservation."""
    other = reserved(a_slot(), name="maint", start=NOW)
    assert not steps([], [other], box_policy(), made=(), now=NOW)
    gone = steps([], [reserved(a_slot())], box_policy(), made=("b1",), now=NOW)
    assert [each.name for each in gone.delete] == ["gpuwarden-b1"]


def test_another_time_or_team_is_another_reservation() -> None:
    """A longer one is the same."""
    slot, policy = a_slot(), box_policy()
    moved = steps([replace(slot, start=NOW + 1800)], [reserved(slot)], policy, made=(), now=NOW)
    assert (len(moved.delete), len(moved.create)) == (1, 1)
    longer = replace(slot, end=slot.end + 600)
    found = steps([longer], [reserved(slot)], policy, made=(), now=NOW)
    assert found.extend == (longer,)
    assert not found.delete
    assert not found.create


def test_one_that_was_given_back_is_not_made_again() -> None:
    """Nobody came, or an operator deleted it: it stays so; but before its time it is made anew."""
    begun = a_slot(start=NOW - 600)
    policy = box_policy()
    assert not steps([begun], [], policy, made=("b1",), now=NOW).create
    assert steps([begun], [], policy, made=(), now=NOW).create == (begun,)
    assert steps([a_slot()], [], policy, made=("b1",), now=NOW).create


def test_a_slot_that_has_begun_lets_jobs_run_past_its_end() -> None:
    """Before, the team's jobs would drive others out long before the slot."""
    slot, policy = a_slot(start=NOW - 5), box_policy()
    closed = reserved(slot)
    assert steps([slot], [closed], policy, made=("b1",), now=NOW).open == (slot,)
    opened = replace(closed, flags=frozenset({"FLEX"}))
    assert not steps([slot], [opened], policy, made=("b1",), now=NOW)


# -- who is in the way


def running(number: int, **changes: object) -> Reading:
    """A cluster on whose node n1 a job runs."""
    job = a_job(number, **({"state": "RUNNING", "start_time": NOW - 100} | changes))  # type: ignore[arg-type]
    return Reading("ci", NOW, jobs=(job,), nodes=NODES)


def test_others_that_run_into_a_slot_are_in_its_way() -> None:
    """The team's own are not, nor those that end before, nor those elsewhere."""
    slot, policy = a_slot(), box_policy()
    there = reserved(slot)
    assert in_the_way(slot, there, running(1, account="speech"), policy)
    assert not in_the_way(slot, there, running(1), policy)
    early = running(1, account="speech", end_time=NOW + 3000)
    assert not in_the_way(slot, there, early, policy)
    assert not in_the_way(slot, there, running(1, account="speech", nodes=("n2",)), policy)


def test_plans_of_others_in_a_slot_are_seen() -> None:
    """A QOS with NoReserve starts its jobs there all the same."""
    slot, policy = a_slot(), box_policy()
    job = a_job(1, account="speech", start_time=slot.start + 60, planned_nodes=("n1",))
    assert conflicts(slot, reserved(slot), [job], policy) == ("1",)
    before = a_job(1, account="speech", start_time=NOW, time_limit=60.0, planned_nodes=("n1",))
    assert conflicts(slot, reserved(slot), [before], policy) == ()
    assert conflicts(slot, reserved(slot), [replace(job, planned_nodes=("n0",))], policy) == ()


def test_use_is_what_runs_in_the_slot() -> None:
    """What Slurm drew into it, and in whole nodes what the team has there; no other's."""
    slot = a_slot()
    drawn = a_job(1, state="RUNNING", reservation="gpuwarden-b1", nodes=("n9",))
    own = a_job(2, state="RUNNING", nodes=("n1",))
    other = a_job(3, state="RUNNING", nodes=("n1",), account="speech")
    assert set(uses(reserved(slot), [drawn, own, other], "vision")) == {"1", "2"}
    assert set(uses(reserved(slot, cards=2), [drawn, own, other], "vision")) == {"1"}


# -- a real Slurm


@pytest.fixture
def empty(box: SlurmCluster) -> Iterator[SlurmCluster]:
    """The box without jobs and bookings, before and after."""
    clear(box)
    yield box
    clear(box)
    for line in box.run("scontrol", "--oneliner", "show", "reservation").splitlines():
        if line.startswith("ReservationName="):
            box.run("scontrol", "delete", line.split()[0])


def names(box: SlurmCluster) -> list[str]:
    """Reservations that there are."""
    said = box.run("scontrol", "--oneliner", "show", "reservation")
    return [line.split()[0].partition("=")[2] for line in said.splitlines() if "=" in line]


def test_slots_come_and_go(empty: SlurmCluster, tmp_path: Path) -> None:
    """Made once, refused where others are, longer when extended, gone when cancelled."""
    clock, policy = WallClock(), box_policy(empty)
    now = clock.wall()
    first = a_slot("a.1", start=now + 3600, end=now + 7200, gpus=4)
    over = a_slot("b", start=now + 5000, end=now + 9000, gpus=4, team="speech")
    far = a_slot("c", start=now + 10_000, end=now + 12_000)
    with a_driver(policy, tmp_path, clock) as driver:
        driver.book([first, far], now)
        assert names(empty) == ["gpuwarden-a.1", "gpuwarden-c"]
        with pytest.raises(RefusedAction, match=r"slot b of speech: .*"):
            driver.book([first, over, far], now)
        assert names(empty) == ["gpuwarden-a.1", "gpuwarden-c"]
        longer = replace(first, end=now + 7800)
        driver.book([longer], now)
        assert names(empty) == ["gpuwarden-a.1"]
        said = empty.run("scontrol", "--oneliner", "show", "reservation")
        assert "Duration=01:10:00" in said
        driver.tick(now)
        codes = {problem.code for problem in driver.problems()}
        assert ("booking_whole_nodes" in codes) is (empty.version < (23, 11))
    with a_driver(policy, tmp_path, clock) as again:
        again.book([longer], now)
        assert names(empty) == ["gpuwarden-a.1"]
        again.book([], now)
        assert names(empty) == []


def test_a_training_in_front_of_a_slot_makes_way_for_it(
    empty: SlurmCluster, cluster: Cluster, tmp_path: Path
) -> None:
    """It is told as the slot begins, leaves with 75, and the team begins; others have to wait."""
    trainer = tmp_path / "gpuwarden"
    trainer.write_text(
        "#!/bin/sh\ntrap 'date +%s > told; exit 75' USR1\n"
        "echo $SLURM_RESTART_COUNT > begun\nwhile :; do sleep 0.1; done\n"
    )
    trainer.chmod(0o755)
    clock, policy = WallClock(), box_policy(empty)
    now = float(int(clock.wall()))  # Slurm's times are whole seconds
    slot = a_slot(start=now + 6, end=now + 600, gpus=4, team="speech", lead_seconds=600.0)
    submitter = SlurmSubmitter(policy, cluster, environment={"PATH": "/usr/bin:/bin"})
    with a_driver(policy, tmp_path, clock) as driver:
        driver.book([slot], now)
        task = a_task(gpus=4, program=str(trainer), directory=str(tmp_path))
        training = int(submitter.submit(task, token="makes-way-1").id)
        # As somebody else: root and Slurm's own user may use every reservation.
        manage(empty, "add", "user", "games", "account=vision")
        asked = ("--gres=gpu:1", "--account=vision", "--time=20", "--uid=games")
        plain = empty.submit("sleep 1", *asked)
        empty.wait_for_state(training, "RUNNING")
        assert entry(driver, plain).started is None
        theirs = empty.submit("exec sleep 30", "--gres=gpu:4", "--account=speech", "--time=5")
        empty.wait_for_state(theirs, "RUNNING")
        told = int((tmp_path / "told").read_text())
        assert told >= int(slot.start)
        driver.book([slot], clock.wall() + 60)
        driver.tick(clock.wall())
        (use,) = driver.slot_uses()
        assert (use.held, use.gpus) == (True, 4)
        assert use.first_used is not None
        assert "FLEX" in empty.run("scontrol", "--oneliner", "show", "reservation")
        came_back = entry(driver, training)
        assert came_back.requeues == 1
        assert came_back.started is None
        assert entry(driver, plain).started is None
        # In use it cannot be deleted: it ends, and its jobs go on.
        driver.book([], clock.wall() + 120)
        assert empty.states(theirs) == {"RUNNING"}


@pytest.mark.sweep
def test_a_training_is_told_ahead_of_a_slot_and_waits_for_it(
    empty: SlurmCluster, cluster: Cluster, tmp_path: Path
) -> None:
    """Lead time before, though Slurm would tell it only as the slot begins; once."""
    trainer = tmp_path / "gpuwarden"
    trainer.write_text(
        "#!/bin/sh\ntrap 'echo told >> told; exit 75' USR1\n"
        "touch begun\nwhile :; do sleep 0.1; done\n"
    )
    trainer.chmod(0o755)
    clock, policy = WallClock(), box_policy(empty)
    submitter = SlurmSubmitter(policy, cluster, environment={"PATH": "/usr/bin:/bin"})
    with a_driver(policy, tmp_path, clock) as driver:
        now = float(int(clock.wall()))
        slot = a_slot(start=now + 500, end=now + 4100, gpus=4, team="speech", lead_seconds=200.0)
        task = a_task(gpus=4, program=str(trainer), directory=str(tmp_path))
        training = int(submitter.submit(task, token="told-ahead").id)
        empty.wait_for_state(training, "RUNNING")
        until((tmp_path / "begun").exists)
        driver.book([slot], now)

        def look(later: float) -> QueueEntry:
            clock.ahead = later
            driver.tick(clock.wall())
            return next(each for each in driver.entries() if each.id == str(training))

        assert look(280.0).state is EntryState.RUNNING
        assert not (tmp_path / "told").exists()
        look(330.0)
        until(lambda: look(331.0).state is EntryState.PENDING, every=0.2)
        assert look(332.0).words.startswith("It made way for slot b1 of speech, and may start ")
        (waits,) = [each for each in read_jobs(cluster) if each.job.job_id == training]
        assert waits.eligible == slot.start
        assert (tmp_path / "told").read_text() == "told\n"
        (told,) = [each for each in driver.preemptions() if each.cause is Cause.BOOKING]
        assert set(told.steps) == {"notified", "left"}
