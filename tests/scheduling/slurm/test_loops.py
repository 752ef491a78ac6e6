"""A job that only comes back is held and told of; one that gets on, or makes way, is not."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scheduling.slurm.test_queue import NOW, a_job
from tests.servers import Server, backfill, free_port, prometheus

from gpuwarden.scheduling.engine_terms import AtMost
from gpuwarden.scheduling.slurm import memories
from gpuwarden.scheduling.slurm.epochs import Epochs
from gpuwarden.scheduling.slurm.loops import (
    Guarded,
    guard,
    key_of,
    mark_held,
    mark_paused,
    pause_seconds,
    returning,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from gpuwarden.platforms.slurm_listings import ListedJob

BERLIN = ZoneInfo("Europe/Berlin")
TERMS = AtMost.model_validate({"times": 3, "per": "10m"})


def attempt(restarts: int, *, state: str = "PENDING", told: bool = False) -> ListedJob:
    """The job at one look: it waits, or runs and perhaps was told to leave."""
    preempted = NOW if told else None
    return a_job(
        1, state=state, restarts=restarts, preempted=preempted, reason="BeginTime", priority=9
    )


def looks(
    jobs: Sequence[ListedJob],
    *,
    every: float = 10.0,
    terms: AtMost | None = TERMS,
    epochs: Sequence[Mapping[str, int]] = (),
) -> Guarded:
    """What comes of looking at a job again and again."""
    found = Guarded()
    for number, job in enumerate(jobs):
        known = epochs[number] if number < len(epochs) else {}
        now = NOW + number * every
        found = look(job, found, now, terms=terms, epochs=known)
    return found


def look(
    job: ListedJob,
    before: Guarded,
    now: float,
    *,
    terms: AtMost | None = TERMS,
    epochs: Mapping[str, int] | None = None,
    made_way: AtMost | None = None,
) -> Guarded:
    """One look at one job."""
    return guard(
        (job,),
        before.histories,
        terms,
        now=now,
        epochs=epochs or {},
        zone=BERLIN,
        made_way=made_way,
    )


def test_a_job_that_only_comes_back_is_held() -> None:
    """Three times are allowed in ten minutes; the fourth is one too many."""
    assert not looks([attempt(n) for n in range(4)]).loops
    (loop,) = looks([attempt(n) for n in range(5)]).loops
    assert loop.number == "1"
    assert loop.words.startswith("It came back 4 times within 10m")


def test_another_job_that_was_given_the_same_number_is_not_held_for_the_first() -> None:
    """Numbers begin anew with Slurm's state, and somebody's jobs have the same name for years."""
    assert looks([attempt(n) for n in range(5)]).loops
    assert not looks([*(attempt(n) for n in range(5)), attempt(0), attempt(1)]).loops


def test_restarts_between_two_looks_count_each() -> None:
    """A fast loop comes back several times before it is looked at."""
    assert looks([attempt(0), attempt(4)]).loops


def test_what_came_before_the_first_look_is_not_held_against_it() -> None:
    """A daemon that begins does not know why a job came back nine times last week."""
    assert not looks([attempt(9)]).loops
    assert not looks([attempt(9), attempt(10)]).loops


def test_slow_returns_are_no_loop() -> None:
    """Only those within the policy's stretch of time count."""
    assert not looks([attempt(n) for n in range(9)], every=300.0).loops


def test_a_job_that_makes_way_is_no_loop() -> None:
    """It was told to leave each time: somebody else's doing."""
    jobs = []
    for restarts in range(6):
        jobs += [attempt(restarts), attempt(restarts, state="RUNNING", told=True)]
    assert not looks(jobs).loops
    alone = [replace(job, preempted=None) for job in jobs]
    assert looks([*alone, attempt(6)]).loops


def test_a_new_epoch_clears_it() -> None:
    """It leaves often, and gets on."""
    jobs = [attempt(n) for n in range(6)]
    assert not looks(jobs, epochs=[{"1": n} for n in range(6)]).loops
    assert looks(jobs, epochs=[{"1": 3}] * 6).loops
    # What it did in an attempt counts for that attempt, whenever it was seen.
    seen, known = [], []
    for restarts in range(4):
        seen += [attempt(restarts, state="RUNNING"), attempt(restarts + 1)]
        known += [{"1": restarts}, {"1": restarts}]
    assert looks(seen, epochs=known).histories[key_of(attempt(0))].times == ()


def test_a_running_job_is_left_alone() -> None:
    """Holding ends nothing: it is done when the job waits."""
    running = [attempt(n, state="RUNNING") for n in range(6)]
    assert not looks(running).loops
    assert looks([*running, attempt(6)]).loops


def test_without_terms_nobody_is_held() -> None:
    """Nothing here has a default."""
    assert not looks([attempt(n) for n in range(50)], terms=None).loops


def test_once_released_it_begins_anew() -> None:
    """Whoever releases it gets all tries again, and is not held at the next look."""
    found = looks([attempt(n) for n in range(5)])
    found = mark_held(found, attempt(4), NOW + 50)
    assert set(found.held) == {"1"}
    for reason in ("JobHeldAdmin", "BeginTime"):
        held = a_job(1, restarts=4, reason=reason, priority=0)
        found = look(held, found, NOW + 60)
        assert set(found.held) == {"1"}
        assert not found.loops
    found = look(attempt(4), found, NOW + 70)
    assert not found.held
    assert not found.loops
    for restarts in (5, 6, 7):
        found = look(attempt(restarts), found, NOW + 80)
        assert not found.loops
    assert look(attempt(8), found, NOW + 80).loops


def test_each_time_it_waits_twice_as_long() -> None:
    """Told to Slurm once; then it is held."""
    found, waits = Guarded(), []
    for restarts in range(4):
        came_back = NOW + restarts * 100
        found = look(attempt(restarts), found, came_back)
        waits += [(pause.until - came_back, pause.due) for pause in found.pauses]
        if found.pauses:
            found = mark_paused(found, attempt(restarts))
            later = replace(attempt(restarts), eligible=found.pauses[0].until)
            (again,) = look(later, found, came_back + 1).pauses
            assert not again.due
            assert not look(later, found, found.pauses[0].until).pauses
    assert [round(seconds) for seconds, _ in waits] == [43, 86, 171]
    assert all(due for _, due in waits)
    assert look(attempt(4), found, NOW + 500).loops


def test_who_waits_is_told_how_long_and_why() -> None:
    """In the policy's time."""
    found = looks([attempt(0), attempt(2)])
    (pause,) = found.pauses
    assert pause.words.startswith(
        "It came back 2 times within 10m without a new epoch, so it waits"
    )
    assert "(after 3 it is held)" in pause.words


def test_a_pause_that_a_person_ends_is_over() -> None:
    """`scontrol update StartTime=now`; and what makes it wait longer is left as it is."""
    found = looks([attempt(0), attempt(1)])
    found = mark_paused(found, attempt(1))
    assert not look(replace(attempt(1), eligible=NOW), found, NOW + 15).pauses
    later = replace(attempt(1), eligible=NOW + 9999)
    (pause,) = look(later, looks([attempt(0)]), NOW + 10).pauses
    assert not pause.due


def test_who_gets_on_or_makes_way_waits_for_nothing() -> None:
    """Neither does one that is held already, nor one that runs."""
    assert not looks([attempt(n) for n in range(3)], epochs=[{"1": n} for n in range(3)]).pauses
    assert not looks([attempt(0), attempt(0, state="RUNNING", told=True), attempt(1)]).pauses
    assert not looks([attempt(0), replace(attempt(1), priority=0)]).pauses
    assert not looks([attempt(0), attempt(1, state="RUNNING")]).pauses


@given(times=st.integers(1, 100), per=st.integers(1, 10**7))
def test_pauses_leave_room_for_the_hold(times: int, per: int) -> None:
    """Who waited for each would otherwise never come back often enough; each is the longer one."""
    terms = AtMost.model_validate({"times": times, "per": f"{per}s"})
    pauses = [pause_seconds(number, terms) for number in range(1, times + 1)]
    assert sum(pauses) <= per / 2 * (1 + 1e-9)
    assert pauses == sorted(pauses)
    assert pauses[0] <= 60.0


def test_who_has_to_leave_again_and_again_is_told_of() -> None:
    """Slurm goes on asking it, whatever the policy says."""
    terms = AtMost.model_validate({"times": 2, "per": "1h"})
    found, seen = Guarded(), []
    for restarts in range(4):
        found = look(attempt(restarts), found, NOW + restarts * 600, made_way=terms)
        seen.append(found.driven_out)
        running = attempt(restarts, state="RUNNING", told=True)
        found = look(running, found, NOW + restarts * 600 + 300, made_way=terms)
    assert seen == [(), (), (), ("1",)]
    assert not look(attempt(3), found, NOW + 9000, made_way=terms).driven_out


def test_a_number_that_is_given_anew_is_another_job() -> None:
    """After a crash of the controller somebody else's job may bear it."""
    found = looks([attempt(n) for n in range(4)])
    other = a_job(1, restarts=9, name="other", user_id=77)
    assert key_of(other) not in found.histories
    assert not look(other, found, NOW + 50).loops


def test_jobs_that_are_gone_are_forgotten() -> None:
    """What is remembered does not grow."""
    found = looks([attempt(n) for n in range(4)])
    gone = guard((), found.histories, TERMS, now=NOW, epochs={}, zone=BERLIN)
    assert gone.histories == {}


def test_it_is_remembered_over_a_restart(tmp_path: Path) -> None:
    """A daemon that is started anew in the middle of a loop goes on counting."""
    found = looks([attempt(n) for n in range(4)])
    memories.save(tmp_path, memories.Memory(histories=found.histories))
    kept = memories.load(tmp_path).histories
    assert kept == found.histories
    assert look(attempt(4), Guarded(kept), NOW + 50).loops


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 9}', '{"version": 1, "histories": 3}', "null", "\x00"]
)
def test_a_memory_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    """Nothing is held by it, and the daemon starts."""
    (tmp_path / memories.NAME).write_text(text)
    assert memories.load(tmp_path) == memories.Memory()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Prometheus that saw the epochs of two jobs and of another cluster's."""
    at = int(time.time()) - 60
    rows = {"slurm-ci-1-0": 3, "slurm-ci-1-2": 5, "slurm-ci-7_2-0": 1, "slurm-cix-1-9": 99}
    lines = [f'yolo_epoch{{job_id="{name}",run_id="r"}} {n} {at}' for name, n in rows.items()]
    folder = tmp_path_factory.mktemp("prometheus")
    backfill("\n".join([*lines, "# EOF\n"]), folder / "tsdb")
    with prometheus("global: {}\n", folder / "tsdb") as found:
        yield found


def test_how_far_a_job_got_is_known_over_its_attempts(server: Server) -> None:
    """The highest of them; of no other job, and of no other cluster."""
    asked = ("1", "7_2", "8", '1"} or up{', "10_[1-5%2]")
    assert Epochs(server.url).known("ci", asked, time.time()) == {"1": 5, "7_2": 1}


def test_without_an_answer_nothing_is_known() -> None:
    """And it is not asked for again at once."""
    epochs = Epochs(f"http://127.0.0.1:{free_port()}")
    assert epochs.known("ci", ("1",), NOW) == {}
    assert epochs.known("ci", ("1",), NOW + 1) == {}
    assert epochs.known("ci", (), NOW + 99) == {}


def test_only_of_those_that_come_back_it_matters() -> None:
    """A queue of thousands asks Prometheus for the few."""
    found = looks([attempt(0), attempt(1)])
    assert returning(found.histories, (attempt(1), a_job(2))) == ("1",)
    assert returning(looks([attempt(0)]).histories, (attempt(0),)) == ()
