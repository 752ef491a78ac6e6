"""Every attempt that held cards counts once, and what accounting lost is told, not guessed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scheduling.slurm.tasks import box_policy
from tests.scheduling.slurm.test_queue import a_job

from gpuwarden.platforms.slurm_accounting import Attempt, decode_accounting
from gpuwarden.schedule_api import EntryState
from gpuwarden.scheduling.slurm.usages import LATE_SECONDS, account, ended_entries

if TYPE_CHECKING:
    import random

ANSWERS = Path(__file__).parents[2] / "kernel/platforms/answers"
MARK = "|0123456789abcdef"
NOW = 1_796_040_400.0
POLICY = box_policy()
LONG = ",".join(map(str, range(1, 999, 2)))
"""The list of an array of every other task."""


def an_attempt(number: int = 7, **changes: object) -> Attempt:
    """An hour of two cards that ended ten minutes ago."""
    made = Attempt(
        number,
        str(number),
        submit=NOW - 5000,
        start=NOW - 4200,
        end=NOW - 600,
        state="COMPLETED",
        elapsed=3600.0,
        gpus=2,
        gpu_type="a100",
        account="vision",
        user="ana",
        qos="normal",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def seconds(*attempts: Attempt, begin: float = NOW - 86_400) -> float:
    """GPU-seconds that are counted."""
    found = account(attempts, POLICY, begin=begin, end=NOW, now=NOW)
    return sum(h.gpus * ((NOW if h.end is None else h.end) - h.start) for h in found.holdings)


def test_a_full_hour_of_two_cards_is_7200_seconds() -> None:
    """And eight cards cost four times as much."""
    assert seconds(an_attempt()) == 7200.0
    assert seconds(an_attempt(gpus=8)) == 4 * 7200.0


def test_every_return_counts_once() -> None:
    """Two attempts of one job are both counted, however often they are told."""
    first = an_attempt(end=NOW - 3000, state="REQUEUED")
    second = an_attempt(start=NOW - 2000, submit=NOW - 2900)
    assert seconds(first, second, first, second) == 2 * (1200 + 1400)


def test_what_never_ran_or_had_no_cards_is_nothing() -> None:
    """A job that waits, one that was refused, one without cards."""
    assert seconds(an_attempt(start=None, end=None, state="PENDING")) == 0
    assert seconds(an_attempt(gpus=0)) == 0


@pytest.mark.parametrize("version", ["22.05", "24.11"])
def test_the_accounts_of_real_clusters(version: str) -> None:
    """What came back, what runs, what had no cards: teams, cards and runs as they are."""
    attempts = decode_accounting((ANSWERS / f"slurm-{version}-sacct.txt").read_text(), MARK)
    found = account(
        attempts, POLICY, begin=NOW - 3600, end=NOW, now=NOW, runs={"5": "exp-1"}
    ).holdings
    by_entry = {each.entry: each for each in found}
    assert set(by_entry) == {"1", "2", "3", "4", "5", "6", "10_0"}
    running = by_entry["5"]
    assert (running.team, running.card, running.gpus, running.end) == ("vision", "a100-40", 2, None)
    assert running.run_id == "exp-1"
    assert by_entry["6"].team == "speech"


def test_a_run_is_known_by_the_comment_where_slurm_keeps_it() -> None:
    """Else by what was seen of the job while it was in the queue."""
    kept = an_attempt(comment="gpuwarden:token123:run=exp-2")
    runs = {"7": "exp-1"}
    for attempt, run in ((kept, "exp-2"), (an_attempt(), "exp-1")):
        found = account([attempt], POLICY, begin=0, end=NOW, now=NOW, runs=runs)
        assert found.holdings[0].run_id == run


def test_a_job_without_an_end_that_is_gone_is_told() -> None:
    """Accounting would count it for ever; it counts until it was last seen."""
    runaway = an_attempt(end=None, state="RUNNING")
    live = a_job(8, state="RUNNING")
    known = {(7, NOW - 4200): NOW - 3000}
    found = account([runaway], POLICY, begin=0, end=NOW, now=NOW, running=[live], seen=known)
    assert found.lost == ("7",)
    assert found.holdings[0].end == NOW - 3000
    unseen = account([runaway], POLICY, begin=0, end=NOW, now=NOW, running=[live])
    assert unseen.lost == ("7",)
    assert seconds_of(unseen) == 0


def seconds_of(found: object) -> float:
    """GPU-seconds of holdings that have ended."""
    return sum(h.gpus * (h.end - h.start) for h in found.holdings)  # type: ignore[attr-defined]


def test_an_end_that_is_written_late_is_no_runaway() -> None:
    """It was seen a moment ago: slurmdbd is told later."""
    late = an_attempt(end=None, state="RUNNING")
    known = {(7, NOW - 4200): NOW - 20}
    found = account([late], POLICY, begin=0, end=NOW, now=NOW, running=[], seen=known)
    assert found.lost == ()
    assert found.holdings[0].end is None


@given(
    cuts=st.lists(st.integers(1, 86_399), max_size=6, unique=True),
    runs=st.lists(
        st.tuples(st.integers(0, 80_000), st.integers(1, 20_000), st.integers(1, 8)), max_size=6
    ),
    seed=st.randoms(use_true_random=False),
)
def test_no_attempt_is_lost_between_two_stretches(
    cuts: list[int], runs: list[tuple[int, int, int]], seed: random.Random
) -> None:
    """Asked for piece by piece, each attempt is told in every piece that it touches."""
    begin = NOW - 86_400
    attempts = [
        an_attempt(n, start=begin + at, end=begin + at + length, gpus=gpus)
        for n, (at, length, gpus) in enumerate(runs, start=1)
    ]
    seed.shuffle(attempts)
    edges = [begin, *(begin + cut for cut in sorted(cuts)), NOW + 99_999]
    total = 0.0
    for low, high in itertools.pairwise(edges):
        found = account(attempts, POLICY, begin=low, end=high, now=NOW + 99_999)
        for each in found.holdings:
            assert each.end is not None
            total += each.gpus * max(0.0, min(each.end, high) - max(each.start, low))
    assert total == sum(length * gpus for _, length, gpus in runs)


# -- jobs that are over


def test_the_newest_record_is_what_became_of_a_job() -> None:
    """Preempted, requeued, node failed: it came back, and in the end it was done."""
    attempts = [
        an_attempt(state="PREEMPTED", submit=NOW - 9000, start=NOW - 9000, end=NOW - 8000),
        an_attempt(state="REQUEUED", submit=NOW - 8000, start=NOW - 7000, end=NOW - 6000),
        an_attempt(),
    ]
    (entry,) = ended_entries(attempts[::-1], POLICY, {"7": "exp-1"}, now=NOW)
    assert (entry.state, entry.requeues, entry.run_id) == (EntryState.DONE, 2, "exp-1")
    assert ended_entries(attempts[:2], POLICY, {}, now=NOW, queued={"7"}) == ()


@pytest.mark.parametrize("state", ["PREEMPTED", "REQUEUED"])
def test_one_that_was_to_come_back_and_has_not_is_told_of(state: str) -> None:
    """DataDesigner #913: not at once, as accounting is ahead of the queue; never while it waits."""
    gone = [an_attempt(state=state, end=NOW - LATE_SECONDS - 1)]
    (entry,) = ended_entries(gone, POLICY, {}, now=NOW)
    assert (entry.state, entry.why) == (EntryState.FAILED, state.lower())
    assert "Slurm has not queued it again" in entry.words
    assert ended_entries(gone, POLICY, {}, now=NOW - 2) == ()
    assert ended_entries(gone, POLICY, {}, now=NOW, queued={"7"}) == ()


@pytest.mark.parametrize("state", ["FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY"])
def test_what_failed_says_how(state: str) -> None:
    """In words, with its status where it has one."""
    (entry,) = ended_entries([an_attempt(state=state, status=9)], POLICY, {}, now=NOW)
    assert entry.state is EntryState.FAILED
    assert entry.why == state.lower()
    assert "status 9" in entry.words


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        ("10_[1-5%2]", "10_[1-5%2]"),
        ("10_3", "10_3"),
        ("12+1", "12+1"),
        (f"10_[{','.join(map(str, range(1, 999, 2)))}]", f"10_[{LONG[:48]}...]"),
        # Cut off by Slurm, with its bracket.
        (f"10_[{LONG[:60]}...", f"10_[{LONG[:48]}...]"),
    ],
)
def test_an_array_that_never_began_has_a_short_number(number: str, shown: str) -> None:
    """As in the queue: contracts bound it, and Slurm writes all of its tasks."""
    row = (ANSWERS / "slurm-22.05-sacct.txt").read_text().splitlines()[13]
    (found,) = decode_accounting(row.replace("10_[1-5%2]", number), MARK)
    assert found.number == shown
