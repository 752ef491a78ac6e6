"""Accounts: a full hour is 3600 s, eight cards cost eight times one, each attempt counts once."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.periods import Span
from gpuwarden.scheduling.holdings import Holding
from gpuwarden.scheduling.usages import By, account, beside, each_once, held_seconds, of_jobs

if TYPE_CHECKING:
    import random

HOUR = 3600.0
SPAN = Span(0.0, 100 * HOUR)
NOW = 100 * HOUR
ONE = Holding("slurm", "1", "ana", "vision", 1, 0.0, HOUR, "a100", "run-1", "cars")


def test_a_full_hour_is_3600_seconds() -> None:
    """From timestamps, and not from how often something was looked at."""
    assert account([ONE], SPAN, "team", now=NOW).total.gpu_seconds == 3600


def test_eight_cards_cost_eight_times_one() -> None:
    """Whatever the job, a card is a card."""
    eight = replace(ONE, gpus=8)
    assert account([eight], SPAN, "team", now=NOW).total.gpu_seconds == 8 * 3600


def test_a_job_that_came_back_is_one_job_and_every_attempt_counts_once() -> None:
    """Also where the engine and the daemon's own record both tell of them."""
    back = replace(ONE, start=2 * HOUR, end=3 * HOUR)
    found = account([ONE, back, ONE, back], SPAN, "job", now=NOW)
    (line,) = found.lines
    assert (line.name, line.jobs, line.attempts, line.gpu_seconds) == ("run-1", 1, 2, 2 * HOUR)
    assert (found.total.jobs, found.total.attempts) == (1, 2)


def test_of_two_records_of_an_attempt_the_one_that_ended_counts() -> None:
    """The daemon may have stopped before the job did."""
    running = replace(ONE, end=None)
    assert each_once([running, ONE]) == each_once([ONE, running]) == (ONE,)


def test_what_runs_counts_up_to_now() -> None:
    """And not up to the end of the stretch, which is ahead."""
    assert account([replace(ONE, end=None)], SPAN, "team", now=7200).total.gpu_seconds == 7200


def test_what_was_suspended_held_nothing() -> None:
    """A quarter of the hour is not counted, in each half of it as much."""
    item = replace(ONE, suspended_seconds=900.0)
    assert held_seconds(item, SPAN, now=NOW) == 2700
    assert held_seconds(item, Span(0.0, 1800.0), now=NOW) == 1350
    assert held_seconds(replace(ONE, suspended_seconds=1e9), SPAN, now=NOW) == 0


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("team", [("speech", "", ""), ("vision", "", "")]),
        ("user", [("bo", "speech", ""), ("ana", "vision", "")]),
        ("project", [("none", "speech", ""), ("cars", "vision", "")]),
        ("job", [("2", "speech", "bo"), ("run-1", "vision", "ana")]),
    ],
)
def test_lines_are_about_what_was_asked(by: By, names: list[tuple[str, str, str]]) -> None:
    """The longest first; what has no project is said to have none."""
    other = Holding("slurm", "2", "bo", "speech", 2, 0.0, HOUR, "h100")
    lines = account([ONE, other], SPAN, by, now=NOW).lines
    assert [(line.name, line.team, line.user) for line in lines] == names


def test_money_is_told_where_a_price_is_given() -> None:
    """By kind of cards; what has no price costs nothing."""
    other = replace(ONE, entry="2", card="h100")
    found = account([ONE, other], SPAN, "team", now=NOW, prices={"a100": (1.9, "EUR")})
    assert found.total.cost == {"EUR": pytest.approx(1.9)}
    assert found.total.gpu_types == {"a100": 3600.0, "h100": 3600.0}


# -- beside Prometheus


def test_accounts_that_agree_within_two_percent_are_not_flagged() -> None:
    """98 hours of 100 agree, 97.9 do not."""
    many = replace(ONE, gpus=100)
    for hours, apart in ((98.0, False), (97.9, True), (102.0, False), (102.1, True)):
        seen = {("vision", "", ""): hours * HOUR}
        (line,) = beside(account([many], SPAN, "team", now=NOW), seen, covered=1.0).lines
        assert line.apart is apart, hours


def test_a_few_minutes_are_edges_and_no_difference() -> None:
    """A job of five minutes that Prometheus saw for two is not worth a flag."""
    short = replace(ONE, end=300.0)
    found = beside(
        account([short], SPAN, "team", now=NOW), {("vision", "", ""): 120.0}, covered=1.0
    )
    assert not found.lines[0].apart
    assert found.notes == ()


def test_a_difference_is_explained_by_its_side() -> None:
    """Allocated and not opened; held beside the engine; not recorded."""
    many = replace(ONE, gpus=100)
    found = beside(
        account([many], SPAN, "team", now=NOW),
        {("vision", "", ""): 50 * HOUR, ("none", "", ""): 7 * HOUR},
        covered=0.9,
    )
    less, covered, more = (
        "allocated and not opened",
        "recorded 90.0 %",
        "processes that hold cards beside the engine",
    )
    assert all(any(words in note for note in found.notes) for words in (less, covered, more))
    assert [(line.name, line.gpu_seconds, line.seen_gpu_seconds) for line in found.lines] == [
        ("vision", 100 * HOUR, 50 * HOUR),
        ("none", 0.0, 7 * HOUR),
    ]
    assert found.total.seen_gpu_seconds == 57 * HOUR


def test_cards_that_were_held_across_an_end_of_the_time_are_no_difference() -> None:
    """Eight cards still held: Prometheus has not written the last five minutes of them yet."""
    running = replace(ONE, gpus=8, start=98 * HOUR, end=None)
    for missing, apart in ((8 * 300.0, False), (8 * 400.0, True)):
        seen = {("run-1", "vision", "ana"): 8 * 2 * HOUR - missing}
        (line,) = beside(account([running], SPAN, "job", now=NOW), seen, covered=1.0).lines
        assert line.apart is apart


def test_two_users_of_one_run_name_keep_their_lines_beside_prometheus() -> None:
    """Neither is taken for the other."""
    other = replace(ONE, entry="2", user="bo")
    seen = {("run-1", "vision", "ana"): HOUR, ("run-1", "vision", "bo"): HOUR}
    found = beside(account([ONE, other], SPAN, "job", now=NOW), seen, covered=1.0)
    assert [(line.user, line.gpu_seconds, line.apart) for line in found.lines] == [
        ("ana", HOUR, False),
        ("bo", HOUR, False),
    ]


def test_attempts_of_a_job_are_its_line_whatever_nodes_call_them() -> None:
    """The team is the engine's; what no engine knows keeps the exporter's name."""
    seen = {
        ("pod-a", "none", "root"): 100.0,
        ("pod-b", "vision", "ana"): 200.0,
        ("proc-1", "robots", "cy"): 300.0,
        ("proc-2", "", ""): 400.0,
    }
    jobs = {"pod-a": "1", "pod-b": "1", "proc-2": "gone"}
    assert of_jobs(seen, jobs, [ONE]) == {
        ("run-1", "vision", "ana"): 300.0,
        ("proc-1", "robots", "cy"): 300.0,
        ("proc-2", "none", "none"): 400.0,
    }
    assert of_jobs(seen, jobs, [ONE], team="vision") == {("run-1", "vision", "ana"): 300.0}


# -- each hour once


def test_an_attempt_whose_end_was_lost_ends_when_the_next_begins() -> None:
    """A job that came back holds its cards once, also where accounting was down meanwhile."""
    lost, late = replace(ONE, end=None), replace(ONE, end=5 * HOUR)
    back = replace(ONE, start=2 * HOUR, end=3 * HOUR)
    for first in (lost, late):
        found = account([first, back], SPAN, "team", now=NOW)
        assert (found.total.gpu_seconds, found.total.attempts) == (3 * HOUR, 2)


def test_pods_of_one_job_that_begin_in_the_same_second_count_each() -> None:
    """They hold their cards at the same time."""
    pods = [replace(ONE, engine="kueue", part=part, gpus=4) for part in ("a", "b")]
    later = replace(pods[0], part="c", start=HOUR / 2)
    found = account([*pods, *pods, later], SPAN, "job", now=NOW)
    assert found.total.gpu_seconds == (2 * 4 + 2) * HOUR


# -- properties

HOLDINGS = st.lists(
    st.builds(
        Holding,
        engine=st.just("slurm"),
        entry=st.sampled_from("1234"),
        user=st.sampled_from(["ana", "bo", ""]),
        team=st.sampled_from(["vision", "speech", ""]),
        gpus=st.integers(1, 8),
        start=st.integers(0, 5000).map(float),
        end=st.none() | st.integers(5001, 9000).map(float),
        card=st.sampled_from(["a100", ""]),
        suspended_seconds=st.integers(0, 100).map(float),
    ),
    max_size=8,
)


@given(HOLDINGS, st.lists(st.integers(0, 9000), max_size=6))
def test_the_parts_of_a_stretch_add_up_to_it(holdings: list[Holding], cuts: list[int]) -> None:
    """Wherever it is cut, nothing is counted twice or lost (gpustack 5710)."""
    edges = [0.0, *sorted(float(cut) for cut in cuts), 9000.0]
    whole = account(holdings, Span(0.0, 9000.0), "team", now=8000).total.gpu_seconds
    parts = sum(
        account(holdings, Span(a, b), "team", now=8000).total.gpu_seconds
        for a, b in itertools.pairwise(edges)
    )
    assert parts == pytest.approx(whole)


@given(HOLDINGS, st.randoms(), st.sampled_from(["team", "user", "job", "project"]))
def test_every_account_has_the_same_sum_in_any_order(
    holdings: list[Holding], rng: random.Random, by: By
) -> None:
    """Lines add up to the total, whatever they are about; the order of records is nothing."""
    mixed = [*holdings, *holdings]
    rng.shuffle(mixed)
    found = account(mixed, Span(0.0, 9000.0), by, now=8000)
    assert sum(line.gpu_seconds for line in found.lines) == pytest.approx(found.total.gpu_seconds)
    plain = account(holdings, Span(0.0, 9000.0), "team", now=8000)
    assert found.total.gpu_seconds == pytest.approx(plain.total.gpu_seconds)


@given(HOLDINGS, st.integers(5000, 12_000))
def test_a_job_never_holds_more_than_the_time_there_was(holdings: list[Holding], now: int) -> None:
    """However its attempts are told to overlap."""
    one = [replace(item, entry="1", gpus=1, suspended_seconds=0.0) for item in holdings]
    total = account(one, Span(0.0, 9000.0), "job", now=now).total.gpu_seconds
    begun = min((item.start for item in one), default=0.0)
    ended = max((now if item.end is None else item.end for item in one), default=0.0)
    assert 0 <= total <= max(0.0, ended - begun)


@given(HOLDINGS)
def test_what_was_made_to_count_once_stays_as_it_is(holdings: list[Holding]) -> None:
    """A second look at the same account changes nothing."""
    once = each_once(holdings)
    assert each_once(once) == once
    assert len({item.key for item in once}) == len(once)
