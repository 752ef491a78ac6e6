"""What a job says of itself stops the clocks of its case, and turns none of them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ruleengine.test_cases import PROVEN, TICK, rule
from tests.ruleengine.test_grades import PATIENT, SEVERE

from gpuwarden.ruleengine import cases
from gpuwarden.ruleengine.cases import Case, CaseState, Step
from gpuwarden.ruleengine.verdicts import Grade, Truth

if TYPE_CHECKING:
    from gpuwarden.ruleengine.model import Rule

YES, NO, UNKNOWN = Truth.YES, Truth.NO, Truth.UNKNOWN


def told(case: Case, truth: Truth, *, word: bool, by: Rule | None = None, ticks: int = 1) -> Step:
    """Advance by ticks of one truth, which is the job's word alone or measured."""
    step = Step(case)
    for _ in range(ticks):
        step = cases.advance(
            step.case,
            by or rule(),
            truth=truth,
            grades=(),
            delta=TICK,
            wall=10.0,
            delivery=PROVEN,
            worded=word,
        )
        if step.closed is not None:
            break
    return step


def begun(ticks: int) -> Case:
    """A case that has held for so many ticks."""
    return told(cases.opened(rule(), "proc-1", wall=1.0), YES, word=False, ticks=ticks + 1).case


@pytest.mark.parametrize("truth", [NO, UNKNOWN])
@pytest.mark.parametrize("ticks", [3, 20])
def test_a_word_keeps_a_case_where_it_is_however_long(truth: Truth, ticks: int) -> None:
    """Watched or found: neither `clear_after` nor 10 min of not knowing is counted."""
    case = begun(ticks)
    step = told(case, truth, word=True, ticks=200)
    assert step.closed is None
    assert (step.case.yes_for, step.case.elapsed) == (case.yes_for, case.elapsed)
    again = told(step.case, YES, word=False, ticks=2).case
    assert again.yes_for == case.yes_for + TICK


@pytest.mark.parametrize("truth", [NO, UNKNOWN])
def test_what_is_measured_closes_a_case_after_a_word_as_well(truth: Truth) -> None:
    """A minute of work, or more than ten without knowledge, is the job's right."""
    step = told(told(begun(20), NO, word=True, ticks=50).case, truth, word=False, ticks=42)
    assert step.closed is not None


@given(st.lists(st.tuples(st.sampled_from([NO, UNKNOWN]), st.integers(1, 60)), max_size=12))
@settings(max_examples=60, deadline=None)
def test_words_delay_an_end_by_no_more_than_their_own_time(words: list[tuple[Truth, int]]) -> None:
    """However they are spread: each costs itself, and one tick in which the clock starts again."""
    plain = ticks_until_due([])
    assert ticks_until_due(words) <= plain + sum(ticks + 1 for _, ticks in words)


def ticks_until_due(words: list[tuple[Truth, int]]) -> int:
    """Ticks until the job may be ended, if it speaks up again and again just before."""
    case, passed = begun(0), 0
    for truth, ticks in words:
        while left(case) > 2 * TICK:
            case, passed = told(case, YES, word=False).case, passed + 1
        case, passed = told(case, truth, word=True, ticks=ticks).case, passed + ticks
    while case.state is not CaseState.DUE:
        case, passed = told(case, YES, word=False).case, passed + 1
        assert passed < 10_000
    return passed


def left(case: Case) -> float:
    """Seconds until the end."""
    found = cases.remaining(case, rule())
    assert found is not None
    return found


def test_a_word_stops_the_clock_of_a_stage_too() -> None:
    """A stage whose own condition the job talks away goes on from where it was."""
    case = cases.opened(PATIENT, "proc-1", wall=1.0)

    def by(truth: Truth, *, word: bool, ticks: int) -> None:
        nonlocal case
        for _ in range(ticks):
            case = cases.advance(
                case,
                PATIENT,
                truth=YES,
                grades=(Grade(SEVERE, truth, worded=word),),
                delta=TICK,
                wall=10.0,
                delivery=PROVEN,
            ).case

    by(YES, word=False, ticks=11)
    held = case.clock(SEVERE).held
    by(NO, word=True, ticks=100)
    assert case.clock(SEVERE).held == held > 0
    assert not cases.far_enough(case, PATIENT, SEVERE, PATIENT.stages[-1])
    by(NO, word=False, ticks=10)
    assert case.clock(SEVERE).held == 0
