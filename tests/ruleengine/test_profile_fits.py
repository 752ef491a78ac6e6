"""What makes a profile, as pure functions, and how it is written down."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.errors import InvalidInput
from gpuwarden.ruleengine.model import Profile
from gpuwarden.ruleengine.profile_fits import Demands, Fit, Kind, Run, fits
from gpuwarden.ruleengine.profile_texts import (
    entry_lines,
    merged,
    profile_fields,
    usable,
    yaml_text,
)
from gpuwarden.yaml_files import load_located

KIND = Kind("yolov8m", 64, 640, amp=True, hardware="NVIDIA A100-SXM4-40GB", gpus=1)
PATH = Path("rules.yaml")
DAY = 86400.0


def a_run(name: str, *rates: float, kind: Kind = KIND, **changes: object) -> Run:
    """A healthy run with these throughputs in its windows."""
    run = Run(
        kind=kind,
        run_id=name,
        user="ana",
        jobs=(f"proc-{name}",),
        begin=0.0,
        end=7200.0,
        trained=7200.0,
        windows={"throughput": list(rates), "gpu_memory": [10 * 2**30] * len(rates)},
    )
    return dataclasses.replace(run, **changes)  # type: ignore[arg-type]


def the_fit(*runs: Run, demands: Demands | None = None) -> Fit:
    """What follows of runs of one kind."""
    (found,) = fits(runs, demands or Demands())
    return found


def healthy(count: int, rate: float = 100.0) -> list[Run]:
    """So many runs that agree."""
    return [a_run(f"r{number}", rate, rate) for number in range(count)]


@given(st.floats(0.1, 80.0) | st.floats(125.0, 1e6), st.integers(3, 8))
@settings(max_examples=50, deadline=None)
def test_one_sick_run_moves_nothing(rate: float, count: int) -> None:
    """However sick it is, the profile is that of the others, and it is named."""
    fit = the_fit(*healthy(count), a_run("sick", rate, rate, rate))
    assert fit.values["throughput"].value == 100.0
    assert [item.run.run_id for item in fit.left] == ["sick"]
    assert fit.tolerance == 0.05


def test_of_two_that_differ_nobody_knows_which_is_sick() -> None:
    """None is an outlier; what they do not agree about is not expected, and the rest is."""
    fit = the_fit(a_run("a", 100.0), a_run("b", 60.0), demands=Demands(runs=2))
    assert fit.left == ()
    assert fit.disagreed == {"throughput": "they do not agree: 60 img/s to 100 img/s"}
    assert set(fit.values) == {"gpu_memory"}
    assert fit.tolerance == 0.05


@pytest.mark.parametrize(("slow", "fast"), [(3, 3), (2, 4), (2, 6), (4, 2)])
def test_runs_of_two_data_sets_make_no_expectation_between_them(slow: int, fast: int) -> None:
    """Nor does the larger group accuse the smaller one; of memory they agree, as narrowly as ever.

    A profile of all of them would have a tolerance at which no memory is too much.
    """
    runs = [
        *(a_run(f"slow{n}", 100.0 + n) for n in range(slow)),
        *(a_run(f"fast{n}", 200.0 + n) for n in range(fast)),
    ]
    fit = the_fit(*runs)
    assert len(fit.runs) == slow + fast
    assert set(fit.values) == {"gpu_memory"}
    assert fit.tolerance == 0.05
    assert fit.disagreed["throughput"].startswith(f"they are of two kinds, {slow} at 10")
    assert usable(fit) == ""
    (comment,) = (line for line in entry_lines(fit) if "throughput" in line and "{" not in line)
    assert comment.startswith("# No throughput was learnt of these runs: they are of two kinds")
    once = merged(PATH, "version: 1\n", [fit])
    assert merged(PATH, once, [fit]) == once


def test_runs_that_agree_in_nothing_are_no_profile() -> None:
    """And the estimate goes on to be asked."""
    runs = [
        a_run(f"r{n}", rate, windows={"throughput": [rate]})
        for n, rate in enumerate([50.0, 100.0, 190.0])
    ]
    fit = the_fit(*runs)
    assert fit.too_little == usable(fit) == "throughput: they do not agree: 50 img/s to 190 img/s"


def test_people_may_call_their_runs_the_same() -> None:
    """The sick one is told from the healthy one of the same name, in whatever order they ran."""
    for begin in (0.0, 100.0):
        sick = a_run("exp1", 20.0, user="ben", begin=begin)
        fit = the_fit(*healthy(3), a_run("exp1", 100.0, user="ana", begin=50.0), sick)
        assert [item.run.user for item in fit.left] == ["ben"]
        assert len(fit.runs) == 4


def test_a_run_counts_once_however_long_it_was() -> None:
    """A long run of other data does not outvote three short ones."""
    fit = the_fit(*healthy(3), a_run("long", *[104.0] * 500))
    assert fit.values["throughput"].value == 100.0
    assert fit.values["throughput"].runs == 4


def test_the_tolerance_covers_healthy_windows() -> None:
    """A rule that compares windows of five minutes must not find fault with a healthy run."""
    swinging = [a_run(f"r{n}", *[80.0, 100.0, 100.0, 120.0] * 5) for n in range(3)]
    assert the_fit(*swinging).tolerance == 0.2


@pytest.mark.parametrize(
    ("demands", "lacks"),
    [
        (Demands(runs=4), "3 of 4 healthy runs"),
        (Demands(users=2), "1 of 2 people"),
        (Demands(days=3), "2 of 3 days"),
        (Demands(trained=8000.0), "0 of 3 healthy runs"),
    ],
)
def test_what_is_asked_of_the_data_is_asked(demands: Demands, lacks: str) -> None:
    """And what is lacking is said."""
    runs = [*healthy(2), a_run("late", 100.0, 100.0, begin=DAY, end=DAY + 7200)]
    fit = the_fit(*runs, demands=demands)
    assert lacks in fit.too_little
    assert usable(fit) == fit.too_little


def test_kinds_are_kept_apart() -> None:
    """Another card, or another precision, is another profile."""
    other = dataclasses.replace(KIND, amp=False)
    found = fits([*healthy(3), *(a_run(f"o{n}", 50.0, kind=other) for n in range(3))], Demands())
    assert [fit.kind for fit in found] == [other, KIND]
    assert [fit.values["throughput"].value for fit in found] == [50.0, 100.0]


def test_the_order_of_runs_does_not_matter() -> None:
    """Nor does that of their windows."""
    runs = [*healthy(3), a_run("a", 97.0, 103.0), a_run("sick", 10.0)]
    backwards = [
        dataclasses.replace(run, windows={k: v[::-1] for k, v in run.windows.items()})
        for run in reversed(runs)
    ]
    one, two = the_fit(*runs), the_fit(*backwards)
    assert (one.values, one.tolerance) == (two.values, two.tolerance)


NAMES = ["no", "y", "1e3", "a: b", "x\n- evil", "{", "#", '"', "null", "yolo11n\u2028", "~", "a, b"]


@pytest.mark.parametrize("model", NAMES)
@pytest.mark.parametrize("hardware", ["NVIDIA A100", "} , {", "x # y"])
def test_names_that_users_chose_become_no_yaml(model: str, hardware: str) -> None:
    """What is read back is exactly what was learnt, or it is no profile."""
    kind = dataclasses.replace(KIND, model=model, hardware=hardware, gpus=2)
    fit = the_fit(*(a_run(f"r{n}", 100.0, kind=kind) for n in range(3)))
    if not usable(fit):
        root = load_located(yaml_text([fit], told="a test")).root
        assert root is not None
        (data,) = root.data()["profiles"]
        assert data == profile_fields(fit)
        assert Profile.model_validate(data).model == model
    comments = [line for line in entry_lines(fit) if line.startswith("#")]
    assert not any(model in line for line in comments if len(model) > 3)


def test_profiles_are_added_where_a_file_has_none() -> None:
    """At its end, with everything else as it was."""
    old = "version: 1\n# rules follow\nrules: []\n"
    new = merged(PATH, old, [the_fit(*healthy(3))])
    assert new.startswith(old)
    assert new.endswith("tolerance: 5%}\n")
    assert merged(PATH, new, [the_fit(*healthy(3))]) == new


def test_what_was_learnt_before_is_learnt_anew() -> None:
    """Its comments go with it; those of people stay."""
    old = merged(PATH, "version: 1\n", [the_fit(*healthy(3))])
    old = old.replace("# Learnt", "# Ask ana before you change this.\n# Learnt")
    new = merged(PATH, old, [the_fit(*healthy(4, rate=120.0))])
    assert "# Ask ana" in new
    assert new.count("# Learnt") == new.count("- {model") == 1
    assert "throughput: 120 img/s" in new


@pytest.mark.parametrize(
    "text",
    [
        "version: 1\nprofiles: [{model: a, batch: 1, imgsz: 1, hardware: b, gpu_memory: 1GiB}]\n",
        "version: 1\nprofiles: []\n",
        "- a list\n",
        "version: 1\nprofiles: {\n",
    ],
)
def test_a_file_that_cannot_be_added_to_is_refused(text: str) -> None:
    """Rather than guessed at."""
    with pytest.raises(InvalidInput):
        merged(PATH, text, [the_fit(*healthy(3))])
