"""A profile counts where it fits; else an estimate does, wider and marked, or nothing."""

from __future__ import annotations

import dataclasses

import pytest
from tests.ruleengine.fleets import (
    A100,
    GIB,
    NOW_FACTS,
    a_job,
    a_profile,
    a_rule,
    a_run,
    cards,
    fleet_of,
)
from tests.ruleengine.test_cases import fresh

from gpuwarden import estimate_tables, estimates
from gpuwarden.ruleengine.causes import diagnose
from gpuwarden.ruleengine.evaluation import evaluate
from gpuwarden.ruleengine.linting import lint_rule
from gpuwarden.ruleengine.messages import Outlook, notice
from gpuwarden.ruleengine.model import Profile
from gpuwarden.ruleengine.profiles import Expectations, expectation
from gpuwarden.ruleengine.reclaim.drafts import evidence_record
from gpuwarden.ruleengine.texts.speeches import speech
from gpuwarden.ruleengine.verdicts import Evidence, GpuFacts, JobFacts, SignalKey, Truth, Verdict

NO, UNKNOWN, YES = Truth.NO, Truth.UNKNOWN, Truth.YES
RATE, MEMORY, BUSY = (
    SignalKey(name, "avg", 300) for name in ("throughput", "gpu_memory", "gpu_utilization")
)
RUN = a_run(model="yolov8n", batch=16, amp=True)
"""A training that no profile of these tests fits."""


def _formula() -> estimates.Expectation:
    found = estimate_tables.expected("yolov8n", 16, imgsz=640, amp=True, hardware=A100)
    assert isinstance(found, estimates.Expectation)
    return found


FORMULA = _formula()


def _job(*, rate: float = FORMULA.throughput.expected, **fields: object) -> JobFacts:
    """A training that shows what the formula expects, but for what is given."""
    memory = fields.pop("memory", FORMULA.gpu_memory.expected)
    values = {RATE: {"": rate}, MEMORY: {"g0": memory}, BUSY: {"g0": 0.9}}
    return a_job(values, **({"run": RUN} | fields))  # type: ignore[arg-type]


def _judge(job: JobFacts, *profiles: Profile, **limits: str) -> Verdict:
    rule = a_rule({"profile": limits, "window": "5m"})
    return evaluate(rule, job, fleet_of(job), profiles=profiles, whitelist=[], now=NOW_FACTS)


def _only(verdict: Verdict) -> Evidence:
    (item,) = verdict.evidence
    return item


@pytest.mark.parametrize(
    ("limit", "rate", "truth"),
    [
        ("below 15%", FORMULA.throughput.low * 0.86, NO),
        ("below 15%", FORMULA.throughput.low * 0.84, YES),
        ("below 15%", FORMULA.throughput.high * 9, NO),
        ("above 15%", FORMULA.throughput.high * 1.14, NO),
        ("above 15%", FORMULA.throughput.high * 1.16, YES),
        ("above 15%", 0.0, NO),
        ("outside 15%", FORMULA.throughput.low * 0.84, YES),
        ("outside 15%", FORMULA.throughput.high * 1.16, YES),
        ("outside 15%", FORMULA.throughput.low, NO),
        ("outside 15%", FORMULA.throughput.high, NO),
        ("outside 15%, at least 9000 img/s", FORMULA.throughput.high * 1.16, NO),
    ],
)
def test_a_rules_tolerance_begins_where_an_estimates_band_ends(
    limit: str, rate: float, truth: Truth
) -> None:
    """What is expected may be anywhere in the band: nobody is accused of less than that."""
    assert _judge(_job(rate=rate), throughput=limit).truth is truth


def test_memory_is_judged_by_the_same_band() -> None:
    """It is compared on each card, as NVML shows it."""
    high = FORMULA.gpu_memory.high
    assert _judge(_job(memory=high * 1.14), gpu_memory="above 15%").truth is NO
    assert _judge(_job(memory=high * 1.16), gpu_memory="above 15%").truth is YES


def test_an_estimate_is_called_one_wherever_it_is_shown() -> None:
    """In the verdict, its record for pages and audit, and the owner's notice."""
    verdict = _judge(_job(rate=1.0), throughput="below 15%")
    item = _only(verdict)
    assert item.estimated
    assert evidence_record(item)["estimated"] is True
    assert item.expected.startswith("an estimated ")
    assert item.expected.endswith(
        f"(estimate by formula: yolov8n, batch 16, 640 px, AMP on {A100})"
    )
    told = notice(
        fresh(),
        a_rule({"profile": {"throughput": "below 15%"}, "window": "5m"}),
        verdict.evidence,
        Outlook(),
        speech=speech("en"),
        now=NOW_FACTS,
        zone="UTC",
        engine_url="http://engine:9837",
    )
    assert told["expected"] == item.expected


def test_a_missing_measure_still_names_the_estimate() -> None:
    """Who asks why nothing is known sees what it would be compared with."""
    item = _only(_judge(dataclasses.replace(_job(), values={}), throughput="below 15%"))
    assert (item.truth, item.reason, item.estimated) == (UNKNOWN, "no_data", True)


def test_a_profile_that_fits_is_no_estimate() -> None:
    """What was measured here beats any formula, with the rule's own tolerance."""
    profile = a_profile(model="yolov8n", batch=16)
    item = _only(_judge(_job(rate=84.0), profile, throughput="below 15%"))
    assert (item.truth, item.estimated) == (YES, False)
    assert item.expected == f"100 img/s (yolov8n, batch 16, 640 px on {A100})"
    assert evidence_record(item)["estimated"] is False


def test_a_profile_of_four_cards_says_nothing_of_who_trains_on_one_of_them() -> None:
    """Of several nodes each holds a part, and the profile is of all cards together."""
    profile = a_profile(model="yolov8n", batch=16, gpus=4)
    four, run = cards("g0", "g1", "g2", "g3"), dataclasses.replace(RUN, other_cards=True)
    known = Expectations([profile])
    assert "throughput" in known.of(_job(gpus=four), "").values
    assert known.of(_job(gpus=four, run=run), "").values == {}
    nodes = ("n1:9835", "n2:9835")
    assert "throughput" in known.of(_job(gpus=four, run=run, instances=nodes), "").values


def test_what_a_profile_leaves_out_is_estimated() -> None:
    """Most profiles know the speed alone."""
    profile = Profile.model_validate(
        {
            "model": "yolov8n",
            "batch": 16,
            "imgsz": 640,
            "hardware": A100,
            "throughput": "100 img/s",
        }
    )
    values = expectation(_job(), [profile]).values
    assert {name: item.estimated for name, item in values.items()} == {
        "throughput": False,
        "gpu_memory": True,
    }


def test_the_formula_knows_nothing_of_utilization() -> None:
    """Only a profile can say it."""
    item = _only(_judge(_job(), gpu_utilization="below 15%"))
    assert (item.truth, item.reason) == (UNKNOWN, "no_profile")
    assert "the formula does not" in item.measured


MIG = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"


@pytest.mark.parametrize(
    ("fields", "reason", "why"),
    [
        ({"run": None}, "no_run", "declares no training"),
        ({"run": a_run(conflict=True)}, "run_conflict", "claimed twice"),
        ({"gpus": ()}, "no_gpus", "no card"),
        ({"run": dataclasses.replace(RUN, model="my-net")}, "no_profile", "in no table"),
        ({"run": dataclasses.replace(RUN, model="")}, "no_profile", "model is not known"),
        ({"run": dataclasses.replace(RUN, batch=None)}, "no_profile", "batch is not known"),
        ({"run": dataclasses.replace(RUN, imgsz=None)}, "no_profile", "imgsz is not known"),
        ({"run": dataclasses.replace(RUN, imgsz=7)}, "no_profile", "is not between"),
        ({"run": dataclasses.replace(RUN, amp=None)}, "no_profile", "amp is not known"),
        ({"run": dataclasses.replace(RUN, batch=4096)}, "no_profile", "more than the 40.0 GiB"),
        ({"gpus": (GpuFacts("g0", "0", "Some Card"),)}, "no_profile", "in no table"),
        ({"gpus": (GpuFacts("g0", "0", ""),)}, "no_profile", "in no table"),
        ({"gpus": (GpuFacts("g0", "0", MIG),)}, "no_profile", "part of a card"),
        (
            {"gpus": (*cards("g0"), GpuFacts("g1", "1", "Tesla T4"))},
            "no_profile",
            "cards differ",
        ),
        ({"instances": ("n1:9835", "n2:9835")}, "no_profile", "several nodes"),
        (
            {"run": dataclasses.replace(RUN, other_cards=True), "gpus": cards("g0", "g1")},
            "no_profile",
            "more or fewer cards",
        ),
    ],
)
def test_where_nothing_is_known_nothing_is_expected(
    fields: dict[str, object], reason: str, why: str
) -> None:
    """An unknown model, card or way of training is UNKNOWN, never a guess, and says why."""
    item = _only(_judge(_job(rate=0.0, **fields), throughput="below 15%"))
    assert (item.truth, item.reason, item.expected) == (UNKNOWN, reason, "")
    assert why in item.measured


def test_on_a_shared_card_an_estimate_says_nothing_of_speed() -> None:
    """A neighbour slows a training down; its memory stays its own."""
    high = FORMULA.gpu_memory.high
    job = _job(rate=1.0, memory=2 * high, gpus=cards("g0", tenants=2))
    assert _judge(job, throughput="below 15%").unknown_reasons == ("shared_card",)
    assert _judge(job, gpu_memory="above 15%").truth is YES


def test_two_cards_share_the_batch() -> None:
    """Each holds less, and together they are faster, but not twice as fast."""
    one = expectation(_job(), []).values
    two = expectation(_job(gpus=cards("g0", "g1")), []).values
    assert two["gpu_memory"].value < one["gpu_memory"].value
    assert two["throughput"].value < 2 * one["throughput"].value
    assert "on 2 x NVIDIA A100" in str(two["throughput"])


@pytest.mark.parametrize(
    ("rate", "cause"),
    [
        (FORMULA.throughput.low * 0.8, "data-loading"),
        (FORMULA.throughput.low * 0.9, "data-loading"),
        (FORMULA.throughput.expected, "unknown"),
    ],
)
def test_inside_the_band_a_measured_wait_still_names_the_cause(rate: float, cause: str) -> None:
    """At what is expected nothing is wrong; below it the loop's own word counts."""
    values = {RATE: {"": rate}, SignalKey("data_wait_share", "avg", 300): {"": 0.6}}
    verdict = Verdict("r", "j", YES)
    assert diagnose(a_job(values, run=RUN), verdict, []).name == cause


def test_too_much_memory_for_the_estimate_is_hyperparameters_and_says_so() -> None:
    """The owner reads the band, not a figure that nobody measured."""
    found = diagnose(_job(memory=30 * GIB), Verdict("r", "j", YES), [])
    assert found.name == "hyperparameters"
    assert "30 GiB of GPU memory are held, where an estimated " in found.because
    assert "batch=16" in found.remedy


# -- memory that is needed, before it is allocated

NEED = FORMULA.gpu_memory


def _card(size: float) -> GpuFacts:
    return GpuFacts("g0", "0", "a card that is in no table", size)


def _fits(job: JobFacts, share: str = "100%") -> Evidence:
    rule = a_rule({"needs_memory": share})
    return _only(evaluate(rule, job, fleet_of(job), profiles=[], whitelist=[], now=NOW_FACTS))


@pytest.mark.parametrize(
    ("size", "share", "truth"),
    [
        (NEED.low * 0.99, "100%", YES),
        (NEED.low, "100%", UNKNOWN),
        (NEED.expected, "100%", UNKNOWN),
        (NEED.high, "100%", NO),
        (NEED.low * 1.99, "50%", YES),
        (NEED.high * 2, "50%", NO),
    ],
)
def test_what_surely_fits_or_surely_does_not_is_told_apart(
    size: float, share: str, truth: Truth
) -> None:
    """Between the ends of the band nobody knows, on whatever card: only its memory counts."""
    item = _fits(_job(gpus=(_card(size),)), share)
    assert item.truth is truth
    assert item.estimated
    assert item.measured.startswith("an estimated ")


def test_the_smallest_card_decides() -> None:
    """The first card that is full ends the training on all of them."""
    job = _job(gpus=(*cards("g1"), dataclasses.replace(_card(GIB), uuid="g0")))
    assert _fits(job).truth is YES
    assert "of 1 GiB" in _fits(job).measured


@pytest.mark.parametrize(
    ("fields", "reason", "why"),
    [
        ({"run": None}, "no_estimate", "declares no training"),
        ({"run": a_run(conflict=True)}, "no_estimate", "claimed twice"),
        ({"gpus": ()}, "no_estimate", "no card"),
        ({"run": dataclasses.replace(RUN, model="my-net")}, "no_estimate", "in no table"),
        ({"run": dataclasses.replace(RUN, batch=None)}, "no_estimate", "batch is not known"),
        ({"instances": ("n1:9835", "n2:9835")}, "no_estimate", "several nodes"),
        (
            {"run": dataclasses.replace(RUN, other_cards=True), "gpus": cards("g0", "g1")},
            "no_estimate",
            "more or fewer cards",
        ),
        ({"gpus": (GpuFacts("g0", "0", A100),)}, "no_data", "size of a card"),
    ],
)
def test_what_is_not_declared_or_not_known_needs_nothing_that_could_be_told(
    fields: dict[str, object], reason: str, why: str
) -> None:
    """UNKNOWN, and the reason in words."""
    item = _fits(_job(**fields))
    assert (item.truth, item.reason) == (UNKNOWN, reason)
    assert why in item.measured


def test_a_declaration_is_no_ground_to_end_a_job() -> None:
    """It is the job's own word, and a guess; of a card it says nothing at all."""
    severe = {
        "level": "severe",
        "after": "1h",
        "do": "terminate",
        "notice_delivered_for": "30m",
        "grace": "60s",
        "max_work_lost": "1h",
    }
    stages = [{"level": "light", "after": "0s", "do": "notify"}, severe]
    ending = a_rule({"needs_memory": "80%"}, stages=stages, match={}, ignore_phases={})
    assert [item.code for item in lint_rule(ending)] == ["GW209"]
    card = a_rule({"needs_memory": "80%"}, target="gpu")
    assert [item.code for item in lint_rule(card)] == ["GW206"]
