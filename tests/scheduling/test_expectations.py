"""History goes before a formula where there is enough of it, and says what it rests on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from tests.scheduling.policy_files import NOW, a_policy

from gpuwarden.errors import InvalidInput, RefusedAction
from gpuwarden.scheduling import submission_texts
from gpuwarden.scheduling.estimations import Fit
from gpuwarden.scheduling.expectations import Past, read_past
from gpuwarden.scheduling.predictions import Features, Prediction, Run, Unforeseen
from gpuwarden.scheduling.submissions import Asked, Plan, plan, read
from gpuwarden.scheduling.tasks import Foreseen

if TYPE_CHECKING:
    from collections.abc import Iterable

ALIKE = Features("yolov8m", "640", "64", "a100-40", 1, "coco.yaml")
WORDS = ("model=yolov8m", "data=coco.yaml", "batch=64", "epochs=100")


def past(
    hours: Iterable[float] = range(20, 30),
    features: Features = ALIKE,
    *,
    epochs: float = 100,
    ends: int = 0,
    late: int = 0,
) -> Past:
    """Trainings that took so many hours."""
    runs = [Run(features, epochs, each * 3600, NOW - n) for n, each in enumerate(hours)]
    return Past(tuple(runs), ends, late)


def ask(*words: str, before: Past | None, **said: Any) -> Plan:
    """The plan for what ana of team vision asks for."""
    asked = Asked(**{"words": words or WORDS, "user": "ana", "directory": "/home/ana"} | said)
    return plan(asked, read(asked), a_policy(), profiles=(), now=NOW, past=before)


def test_a_limit_is_that_of_the_slowest_run_and_a_tenth() -> None:
    """Shorter than the formula's, so that Slurm can fill gaps with it; what it rests on is told."""
    found = ask(before=past())
    assert found.task.time_limit_seconds == pytest.approx(29 * 3600 * 1.1, abs=300)
    assert "the slowest of 10 trainings like it here" in found.limit_words
    assert isinstance(found.foretold, Prediction)
    assert found.gpu_hours is not None
    assert (found.gpu_hours.expected, found.gpu_hours.high) == (24.5, 29)
    text = submission_texts.as_text(found)
    assert "history  1d (20h to 1d5h), from 10 trainings like it here; 82 % should lie" in text
    assert "saves, leaves, and goes on in the next" in text
    document = submission_texts.as_document(found, Foreseen())
    assert document["history"]["a100-40"]["runs"] == 10
    assert document["task"]["estimate"]["history"]["slowest_seconds"] == 29 * 3600


def test_a_limit_that_holds_no_epoch_is_doubted() -> None:
    """Each attempt would end before it has saved one."""
    for limit, doubted in ((600.0, True), (7200.0, False)):
        found = ask(before=None, time_limit=limit)
        assert any("may not hold one epoch" in each for each in found.warnings) is doubted


def test_too_few_runs_are_told_and_not_gone_by() -> None:
    """The estimate stands, with why history says nothing; without a daemon it is not spoken of."""
    few, none = ask(before=past([20, 21, 22, 23])), ask(before=None)
    assert isinstance(few.foretold, Unforeseen)
    assert few.task.time_limit_seconds == none.task.time_limit_seconds
    assert few.limit_words == none.limit_words == "the upper end of the estimate, and a margin"
    assert "history  4 trainings like it" in submission_texts.as_text(few)
    assert "history" not in submission_texts.as_text(none)
    assert "history" not in submission_texts.as_document(none, Foreseen())


def test_where_ends_come_late_the_longer_limit_is_taken() -> None:
    """Three of four foretold ends came after their interval: no attempt is cut short by such."""
    usual = ask(before=past(ends=40, late=4))
    late = ask(before=past(ends=40, late=30))
    limits = [each.task.time_limit_seconds or 0.0 for each in (usual, late)]
    assert limits[0] == pytest.approx(29 * 3600 * 1.1, abs=300)
    assert limits[1] == pytest.approx(29 * 3600 * 1.5, abs=300)
    assert "come late here" in late.limit_words


def test_an_engine_that_fills_no_gaps_gets_the_longer_limit() -> None:
    """Kueue ends a job for good there; what happens is said."""
    quick = past([1, 1.1, 1.2, 1.3, 1.4])
    found = ask(before=quick, engine="local")
    assert found.task.time_limit_seconds == found.chosen.time_limit_seconds
    assert "which is more than history says" in found.limit_words
    assert "does not come back by itself" in submission_texts.as_text(found, engine="kueue")


def test_a_model_of_which_only_history_knows_needs_no_card_and_no_time() -> None:
    """Five of it ended on a card: it has room there, and its time is known."""
    mine = dataclasses.replace(ALIKE, model="mine-v2", card="h100-80")
    words = ("model=mine-v2", *WORDS[1:])
    found = ask(*words, before=past([10, 10, 11, 12, 10], mine))
    assert (found.chosen.kind.name, found.chosen.fit) == ("h100-80", Fit.YES)
    assert found.task.time_limit_seconds == pytest.approx(12 * 3600 * 1.1, abs=300)
    assert found.task.epoch_seconds == pytest.approx(12 * 36)
    assert not any("UNKNOWN" in each for each in found.warnings)
    with pytest.raises(RefusedAction, match="2 trainings like it") as caught:
        ask(*words, before=past([10, 10], mine), card="h100-80")
    assert caught.value.reason == "unknown"


def test_a_deadline_is_held_against_history() -> None:
    """By the formula it could be in time; it never was here."""
    soon = NOW + 20 * 3600
    slow = Past((*past().runs, *past(features=dataclasses.replace(ALIKE, card="h100-80")).runs))
    with pytest.raises(RefusedAction, match="a later --deadline") as caught:
        ask(before=slow, deadline=soon)
    assert caught.value.reason == "deadline"
    assert ask(before=past(), deadline=soon).chosen.kind.name == "h100-80"


@pytest.mark.parametrize(
    "more",
    ["fraction=0.1", "amp=False", "time=3", "imgsz=320", "epochs=2"],
)
def test_other_words_are_another_training(more: str) -> None:
    """A tenth of the data, another precision or size, or two epochs: none is like the others."""
    found = ask(*(word for word in WORDS if word.split("=")[0] not in more), more, before=past())
    assert isinstance(found.foretold, Unforeseen)


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "gpuwarden.runs/v2"},
        {"runs": [{"batch": "64"}]},
        {"runs": 3},
        {"ends": None},
        {"runs": [dict.fromkeys(("batch", "card", "gpus", "epochs", "seconds", "ended"), "inf")]},
    ],
)
def test_an_answer_that_is_none_is_refused(changes: dict[str, Any]) -> None:
    """Of another version, with parts missing, or numbers that are none."""
    row = {"batch": "64", "card": "a", "gpus": 1, "epochs": 9.0, "seconds": 1.0, "ended": 2.0}
    of = {"model": "m", "imgsz": "640", "data": "d", "pacing": ""}
    whole = {"schema": "gpuwarden.runs/v1", "of": of, "runs": [row]}
    whole["ends"] = {"count": 3, "late": 1}
    assert read_past(whole).runs[0].features == Features("m", "640", "64", "a", 1, "d")
    with pytest.raises(InvalidInput, match=r"gpuwarden\.runs/v1"):
        read_past(whole | changes)
