"""Predictions claim what their number of runs allows, and are held to it afterwards."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.scheduling.calibrations import Settled, calibrate, wilson
from gpuwarden.scheduling.predictions import (
    LEAST_RUNS,
    Features,
    Prediction,
    Run,
    Unforeseen,
    predict,
    trained_words,
    training_of_words,
)

ALIKE = Features("yolov8m", "640", "64", "a100", 2, "coco.yaml")


def runs(*rates: float, features: Features = ALIKE, epochs: float = 100) -> list[Run]:
    """Trainings that took so many seconds for an epoch."""
    return [Run(features, epochs, rate * epochs, float(n)) for n, rate in enumerate(rates)]


def foretold(history: list[Run], epochs: float = 100) -> Prediction:
    """A prediction that is one."""
    found = predict(history, ALIKE, epochs)
    assert isinstance(found, Prediction)
    return found


def test_below_five_runs_nothing_is_said_but_why() -> None:
    """Four that are alike are too few, whatever else there is."""
    other = runs(1, 2, 3, 4, 5, 6, features=replace(ALIKE, batch="32"))
    found = predict([*runs(10, 11, 12, 13), *other], ALIKE, 100)
    assert isinstance(found, Unforeseen)
    assert found.runs == 4
    assert "4 trainings like it" in found.words
    assert "batch 64, 2 x a100" in found.words


@pytest.mark.parametrize("field", ["model", "imgsz", "batch", "card", "data"])
def test_what_is_not_known_is_like_nothing(field: str) -> None:
    """Two runs of which nobody knows the data are not alike for that."""
    unknown = replace(ALIKE, **{field: ""})
    assert isinstance(predict(runs(*range(1, 20), features=unknown), unknown, 100), Unforeseen)


def test_epochs_that_are_not_known_are_not_guessed() -> None:
    """Nor are none of them."""
    for epochs in (None, 0.0):
        found = predict(runs(*range(1, 20)), ALIKE, epochs)
        assert isinstance(found, Unforeseen)
        assert "epochs" in found.words


def test_five_runs_claim_two_thirds_and_nineteen_claim_eighty_percent() -> None:
    """From five nothing narrower than all of them is honest; from nineteen the outermost go."""
    five = foretold(runs(10, 11, 12, 13, 14))
    assert (five.shortest, five.middle, five.longest, five.runs) == (1000, 1200, 1400, 5)
    assert five.claim == pytest.approx(2 / 3)
    nineteen = foretold(runs(*range(10, 29)))
    assert (nineteen.shortest, nineteen.longest) == (1100, 2700)
    assert nineteen.claim == pytest.approx(0.8)


def test_more_epochs_take_longer_in_proportion() -> None:
    """What is alike is the time for an epoch."""
    assert foretold(runs(10, 11, 12, 13, 14), 300).longest == 3 * 1400


def test_the_newest_runs_count() -> None:
    """A driver of two years ago says nothing any more."""
    assert foretold(runs(*[1000] * 30, *[10] * 50)).longest == 1000


def test_since_a_jump_only_what_came_after_it_counts() -> None:
    """Five runs that take twice as long as the ten before them: the data have grown."""
    grown = foretold(runs(*[10, 11, 12, 11, 10] * 2, *[22, 23, 21, 22, 24]))
    assert (grown.shortest, grown.longest, grown.runs) == (2100, 2400, 5)
    outlier = foretold(runs(*[10, 11, 12, 11, 10] * 2, *[22, 23, 21, 22, 11]))
    assert (outlier.runs, outlier.shortest) == (15, 1000)
    drift = foretold(runs(*[10 + n / 10 for n in range(20)]))
    assert drift.runs == 20


def test_runs_of_a_few_epochs_say_nothing_of_one_of_hundreds() -> None:
    """To begin, to cache and to validate at the end is most of what a trial takes."""
    trials = runs(*[200] * 20, epochs=1)
    found = predict([*trials, *runs(10, 11, 12, 13)], ALIKE, 100)
    assert isinstance(found, Unforeseen)
    assert found.runs == 4
    assert foretold([*trials, *runs(10, 11, 12, 13, 14)]).longest == 1400


def test_runs_that_always_take_the_same_have_an_interval_without_length() -> None:
    """And one that took a hundred times as long widens it, while there are too few to leave it."""
    same = foretold(runs(*[10.0] * 6))
    assert same.shortest == same.middle == same.longest == same.slowest == 1000
    one = foretold(runs(*[10.0] * 6, 1000.0))
    assert (one.middle, one.longest, one.slowest) == (1000, 100_000, 100_000)


@pytest.mark.parametrize("seconds", [0.0, -5.0, float("inf"), float("nan")])
def test_a_run_that_is_none_is_not_learnt_from(seconds: float) -> None:
    """A clock that jumped leaves such."""
    broken = Run(ALIKE, 100, seconds, 99.0)
    assert foretold([*runs(10, 11, 12, 13, 14), broken]).runs == 5


def test_an_end_is_never_foretold_for_the_past() -> None:
    """What should have ended and runs on ends from now on at the earliest."""
    found = foretold(runs(10, 11, 12, 13, 14))
    early = found.finish(5000.0, now=5500.0)
    assert (early.earliest, early.latest, early.samples) == (6000, 6400, 5)
    late = found.finish(5000.0, now=9000.0)
    assert (late.earliest, late.latest) == (9000, 9000)


def test_what_earlier_attempts_did_is_not_done_again() -> None:
    """A training that came back has less before it."""
    found = foretold(runs(10, 11, 12, 13, 14))
    assert found.finish(5000.0, now=5000.0, held=600.0).earliest == 5400


@pytest.mark.parametrize("count", [5, 9, 19, 50])
def test_the_claim_is_kept_whatever_the_distribution(count: int) -> None:
    """Of 4000 trainings with a long tail as many lie inside as was claimed, within three sigma."""
    rng = random.Random(7)  # noqa: S311 (no secret)
    inside, trials, claim = 0, 4000, 0.0
    for _ in range(trials):
        rates = [rng.lognormvariate(2, 0.6) for _ in range(count + 1)]
        found = foretold(runs(*rates[:-1]))
        claim = found.claim
        inside += found.shortest <= 100 * rates[-1] <= found.longest
    sigma = (claim * (1 - claim) / trials) ** 0.5
    assert inside / trials == pytest.approx(claim, abs=3 * sigma)


@given(st.lists(st.floats(0.1, 1e4), min_size=LEAST_RUNS, max_size=80), st.randoms())
def test_the_order_of_history_is_nothing(rates: list[float], rng: random.Random) -> None:
    """An interval holds its median, and comes from the runs alone."""
    history = runs(*rates)
    mixed = list(history)
    rng.shuffle(mixed)
    found = foretold(history)
    assert foretold(mixed) == found
    assert found.shortest <= found.middle <= found.longest


# -- calibration


def settled(actual: float, *, samples: int = 5, kind: str = "finish") -> Settled:
    """A prediction of 100 to 200, and what became of it."""
    return Settled(kind, 0.0, 100.0, 200.0, samples, actual)  # type: ignore[arg-type]


def test_calibration_counts_what_lay_inside_before_and_after() -> None:
    """By kind, and by the number of cases that the predictions rested on."""
    rows = [settled(150), settled(99.5), settled(98), settled(300), settled(150, samples=60)]
    five, fifty = calibrate(rows)
    assert (five.least, five.most, five.count, five.inside) == (5, 9, 4, 2)
    assert (five.early, five.late, five.share) == (1, 1, 0.5)
    assert (fifty.least, fifty.most, fifty.count, fifty.share) == (50, None, 1, 1.0)


def test_starts_and_ends_are_not_mixed() -> None:
    """The engine's plans of starts (0 cases) have a line of their own."""
    found = calibrate([settled(150, kind="start", samples=0), settled(150)])
    assert [(each.kind, each.least, each.most) for each in found] == [
        ("start", 0, 0),
        ("finish", 5, 9),
    ]
    assert calibrate([]) == ()


def test_a_share_of_few_is_told_to_be_of_few() -> None:
    """One of one may be a third of all; 80 of 100 are between 71 and 87 percent (Wilson 1927)."""
    low, high = wilson(1, 1)
    assert low == pytest.approx(0.2065, abs=1e-4)
    assert high == 1.0
    assert wilson(80, 100) == pytest.approx((0.7112, 0.8666), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_words_that_were_not_said_are_ultralytics_defaults() -> None:
    """Of two of a key the last one counts; folders and .pt are no part of a name."""
    words = ("model=/models/yolov8m.pt", "batch=8", "data=/sets/coco.yaml", "batch=64")
    found = training_of_words(words, card="a100", gpus=2)
    assert (found.features, found.epochs) == (ALIKE, 100)
    assert not training_of_words((), card="a100", gpus=2).features.known
    assert training_of_words(("epochs=many",), card="", gpus=1).epochs is None


def test_words_are_those_behind_train() -> None:
    """Options, and what they are given, are none; another command has none."""
    command = ("gpuwarden", "train", "--run-id", "r1", "--on-signal=epoch", "model=a", "epochs=3")
    assert trained_words(command) == ("model=a", "epochs=3")
    assert trained_words(("python", "train.py", "model=a")) == ()
    assert trained_words(()) == ()


def test_files_that_everybody_calls_the_same_are_told_apart_by_their_folder() -> None:
    """`data.yaml` and `best.pt` are something else for each; `coco.yaml` is the same everywhere."""
    words = ("model=runs/a/weights/best.pt", "data=data.yaml")
    found = training_of_words(words, card="a100", gpus=1, directory="/home/ana/cats")
    assert found.features.model == "/home/ana/cats/runs/a/weights/best"
    assert found.features.data == "/home/ana/cats/data.yaml"
    assert not training_of_words(words, card="a100", gpus=1).features.known
    usual = ("model=/weights/yolov8m.pt", "data=/data/coco.yaml")
    assert training_of_words(usual, card="a100", gpus=1).features.data == "coco.yaml"


def test_words_that_change_the_pace_make_another_training() -> None:
    """But not those that say the usual."""
    plain, same, other = (
        training_of_words(("model=m", "data=d", *more), card="a", gpus=1).features
        for more in ((), ("amp=True", "fraction=1.0"), ("amp=False", "cache=ram"))
    )
    assert plain == same
    assert other.pacing == "amp=False cache=ram"


@pytest.mark.parametrize("epochs", ["-5", "0", "1e3", "9" * 400, "\u0663", "100.0", ""])
def test_epochs_that_are_no_number_of_them_are_not_known(epochs: str) -> None:
    """Nor is anything foretold then."""
    words = ("model=m", "data=d", f"epochs={epochs}")
    assert training_of_words(words, card="a", gpus=1).epochs is None
    timed = ("model=m", "data=d", "epochs=10", "time=2")
    assert training_of_words(timed, card="a", gpus=1).epochs is None
