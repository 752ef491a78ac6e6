"""What is foretold of a case is what its state machine then does, and not earlier."""

from __future__ import annotations

import msgspec
import pytest
from tests.ruleengine.test_cases import NO, PROVEN, TICK, UNKNOWN, YES, fresh, rule, run

from gpuwarden.ruleengine import cases
from gpuwarden.ruleengine.cases import Case, CaseState, Delivery
from gpuwarden.ruleengine.forecasts import Forecast, forecasts

NOW = 1_800_000_000.0
KINDS = {"found": "detected", "log": "log", "notify": "notify", "terminate": "due"}
"""Kind of a forecast -> kind of the event that makes it true."""


def foretold(
    case: Case, mode: str = "enforce", kept_until: float | None = None
) -> dict[str, float]:
    """Kind -> seconds from now."""
    found = forecasts(case, rule(mode), now=NOW, kept_until=kept_until)
    return {item.kind: item.seconds for item in found if item.seconds is not None}


def test_every_step_is_foretold_with_its_time() -> None:
    """From the first YES on: found after `for`, the stages from there, the end after the notice."""
    assert foretold(fresh()) == {
        "found": 60.0,
        "log": 60.0,
        "notify": 60.0 + 120.0,
        "terminate": 60.0 + 480.0,
    }


def test_what_is_foretold_happens_and_not_before() -> None:
    """The case is led on by the real state machine; each event comes within a tick of its time."""
    case = fresh()
    promised = {KINDS[kind]: seconds for kind, seconds in foretold(case).items()}
    happened: dict[str, float] = {}
    for number in range(1, 80):
        told = case.mark("moderate-notify") is not None
        step = run(case, YES, delivery=PROVEN if told else Delivery())
        case = step.case
        for event in step.events:
            happened.setdefault(event.kind, number * TICK)
    late = {kind: happened[kind] - seconds for kind, seconds in promised.items()}
    assert all(0 <= seconds <= 2 * TICK for seconds in late.values()), late


def test_a_notice_that_is_not_proven_moves_the_end() -> None:
    """Its promised age counts from its proof, which cannot be before now."""
    case = run(fresh(), *[YES] * 40, delivery=Delivery()).case
    (end,) = forecasts(case, rule(), now=NOW)
    assert (end.kind, end.seconds) == ("terminate", 300.0)
    assert "not before its owner has had the notice for 5m" in end.what
    (early,) = forecasts(case, rule(notice_delivered_for="2h"), now=NOW)
    assert early.seconds == 7200.0


def test_a_keep_moves_the_end() -> None:
    """Also one that reaches further than the case's own deadline."""
    case = run(fresh(), *[YES] * 20).case
    assert foretold(case, kept_until=NOW + 9000)["terminate"] == 9000
    moved, _ = cases.kept(case, rule(), 3600)
    assert foretold(moved)["terminate"] == foretold(case)["terminate"] + 3600


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [
        ("observe", {"found", "log", "would_notify", "would_terminate"}),
        ("warn", {"found", "log", "notify", "would_terminate"}),
    ],
)
def test_a_mode_that_does_not_act_is_foretold_as_such(mode: str, kinds: set[str]) -> None:
    """Nobody is frightened by what is only written down."""
    assert set(foretold(fresh(), mode)) == kinds


@pytest.mark.parametrize(
    ("truth", "seconds"), [(NO, 60.0 - TICK), (UNKNOWN, 600.0 - TICK), (None, 60.0 - TICK)]
)
def test_a_case_that_is_about_to_be_closed_promises_no_end(
    truth: cases.Truth | None, seconds: float
) -> None:
    """Kept again, unknown or gone: when the case is closed, and nothing else."""
    case = run(fresh(), *[YES] * 20, truth, truth).case
    (only,) = forecasts(case, rule(), now=NOW)
    assert (only.kind, only.seconds) == ("close", seconds)


def test_what_is_decided_is_not_foretold() -> None:
    """The agent's answer is waited for; after it nothing more follows."""
    case = run(fresh(), *[YES] * 40).case
    acting = cases.authorised(case, rule(), "d1", key="severe-terminate", wall=1.0)
    assert [item.kind for item in forecasts(acting, rule(), now=NOW)] == ["answer"]
    done = msgspec.structs.replace(acting, state=CaseState.VERIFIED)
    assert forecasts(done, rule(), now=NOW) == ()


def test_the_api_tells_seconds_and_a_time() -> None:
    """Both, since the clocks of who asks may differ; neither where nobody knows."""
    known = Forecast("notify", "its owner is told", 90.0, "if it stays so", "s", "moderate")
    assert known.document(NOW) == {
        "kind": "notify",
        "what": "its owner is told",
        "in_seconds": 90.0,
        "at": "2027-01-15T08:01:30.000Z",
        "if": "if it stays so",
        "stage": "s",
        "level": "moderate",
    }
    assert Forecast("answer", "x", None).document(NOW)["at"] is None
