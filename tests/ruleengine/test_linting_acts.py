"""Lints of stages that act: in order of strength, each once, and as guarded as an end."""

from __future__ import annotations

from typing import Any

import pytest
from tests.ruleengine.fleets import a_rule
from tests.ruleengine.test_linting import (
    CHECKPOINT,
    CUSTOM,
    HELD,
    LOG,
    NOTIFY,
    SILENT,
    TERMINATE,
    UTIL,
    YIELD,
)

from gpuwarden.diagnostics import Severity
from gpuwarden.ruleengine.linting import Finding, lint_rule

REQUEUE = TERMINATE | {"do": "requeue", "after": "30m"}
LAST = TERMINATE | {"after": "40m"}


def _found(*stages: dict[str, Any], **fields: Any) -> list[Finding]:
    known: dict[str, Any] = {"match": {}, "ignore_phases": {}, "stages": list(stages)}
    return lint_rule(a_rule(fields.pop("when", HELD), **(known | fields)))


def _codes(*stages: dict[str, Any], **fields: Any) -> list[str]:
    return [finding.code for finding in _found(*stages, **fields)]


def test_every_stage_from_the_softest_to_the_hardest_is_in_order() -> None:
    """Asked to save more than once, asked to leave, requeued, ended."""
    again = CHECKPOINT | {"level": "severe", "after": "14m"}
    assert _codes(LOG, NOTIFY, CHECKPOINT, again, YIELD, REQUEUE, LAST) == []


@pytest.mark.parametrize(
    ("stages", "place"),
    [
        ([YIELD, CHECKPOINT | {"level": "severe", "after": "30m"}], 3),
        ([TERMINATE, YIELD | {"after": "30m"}], 3),
        ([CHECKPOINT, TERMINATE, REQUEUE], 4),
        ([YIELD, TERMINATE | {"after": "30m"}, CHECKPOINT | {"level": "severe", "after": "1h"}], 4),
    ],
)
def test_nothing_softer_follows_what_is_harder(stages: list[dict[str, Any]], place: int) -> None:
    """It says so at the stage, and what to do."""
    (found,) = [item for item in _found(LOG, NOTIFY, *stages) if item.code == "GW227"]
    assert (found.severity, found.path) == (Severity.ERROR, ("stages", place, "do"))
    assert found.hint == "put the stages in the order checkpoint, yield, requeue, terminate"


@pytest.mark.parametrize("stage", [YIELD, REQUEUE, TERMINATE])
def test_what_takes_cards_stands_once_in_a_rule(stage: dict[str, Any]) -> None:
    """The second of the same kind would never be reached."""
    assert _codes(LOG, NOTIFY, stage, stage | {"after": "2h"}) == ["GW226"]


def test_a_stage_that_comes_while_the_job_may_still_leave_is_told_to_wait() -> None:
    """A warning: the later stage waits for the grace of yield, as its author may not expect."""
    (found,) = _found(LOG, NOTIFY, YIELD, TERMINATE | {"after": "20m"})
    assert (found.code, found.severity, found.path) == (
        "GW313",
        Severity.WARNING,
        ("stages", 3, "after"),
    )
    assert "until 25m" in found.message
    assert _codes(LOG, NOTIFY, YIELD, TERMINATE | {"after": "25m"}) == []


@pytest.mark.parametrize("stage", [YIELD, REQUEUE, TERMINATE])
def test_whatever_takes_cards_rests_on_what_is_measured_and_follows_a_notice(
    stage: dict[str, Any],
) -> None:
    """A job that is asked to leave has lost its cards as well."""
    assert _codes(LOG, NOTIFY, stage, when=UTIL) == ["GW210"]
    assert _codes(LOG, NOTIFY, stage, when=CUSTOM) == ["GW209"]
    assert _codes(LOG, stage) == ["GW207"]
    bare = lint_rule(a_rule(HELD, stages=[LOG, NOTIFY, stage]))
    assert {finding.code for finding in bare} == {"GW211"}


def test_a_request_to_save_may_rest_on_anything_and_needs_no_notice() -> None:
    """It takes nothing: no measured condition, no notice, no `match`."""
    assert [f.code for f in lint_rule(a_rule(UTIL, stages=[LOG, CHECKPOINT]))] == []
    assert [f.code for f in lint_rule(a_rule(CUSTOM, stages=[LOG, CHECKPOINT]))] == []


@pytest.mark.parametrize("stage", [CHECKPOINT, YIELD, REQUEUE, TERMINATE])
def test_in_warn_nothing_acts(stage: dict[str, Any]) -> None:
    """And the author is told so."""
    assert "GW307" in _codes(LOG, NOTIFY, stage, mode="warn", when=SILENT)


@pytest.mark.parametrize(
    ("limit", "codes"),
    [
        ({"above": 0}, []),
        ({"at_least": 1}, []),
        ({"above": 3, "fits": False}, []),
        ({"at_least": 0}, ["GW314"]),
        ({"below": 1, "fits": False}, ["GW314"]),
        ({"at_most": 5}, ["GW314"]),
    ],
)
def test_a_need_that_an_empty_queue_satisfies_is_none(
    limit: dict[str, Any], codes: list[str]
) -> None:
    """Of a platform's queue; what a number of the operator's own means is theirs to say."""
    for platform in ("slurm", "kubernetes"):
        assert _codes(LOG, NOTIFY, TERMINATE, only_if_waiting={platform: {}, **limit}) == codes
    free = {"promql": "sum(free_gpus)", "below": 1}
    assert "GW314" not in _codes(LOG, NOTIFY, TERMINATE, only_if_waiting=free)


def test_an_epoch_needs_time() -> None:
    """A job that is given a minute to leave can hardly do so."""
    assert _codes(LOG, NOTIFY, YIELD | {"grace": "60s"}) == ["GW305"]
