"""Stages with a condition of their own: how far it must have come, beside how long."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ruleengine.engines import TICK, World, running
from tests.ruleengine.fleets import NOW_FACTS, a_job, a_rule, fleet_of
from tests.ruleengine.test_cases import PROVEN, fresh, kinds, rule
from tests.ruleengine.test_evaluation import IDLE, SILENT, judge
from tests.ruleengine.test_guards import JOB, situation
from tests.ruleengine.worlds import GIB

from gpuwarden.ruleengine import cases, guards
from gpuwarden.ruleengine.cases import Case, CaseState, Delivery, Step
from gpuwarden.ruleengine.evaluation import evaluate
from gpuwarden.ruleengine.forecasts import forecasts
from gpuwarden.ruleengine.linting import lint_rule
from gpuwarden.ruleengine.lints_of_grades import lint_grades
from gpuwarden.ruleengine.messages import Outlook, notice
from gpuwarden.ruleengine.model import RuleSet
from gpuwarden.ruleengine.rule_differences import differences
from gpuwarden.ruleengine.rule_explanations import explain_rule, explanation_lines
from gpuwarden.ruleengine.texts.speeches import speech
from gpuwarden.ruleengine.verdicts import Grade, SignalKey, Truth, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuwarden.ruleengine.model import Rule

YES, NO, UNKNOWN = Truth.YES, Truth.NO, Truth.UNKNOWN
SEVERE = "severe-terminate"
SHARE_KEY = SignalKey("gpu_memory_share", "min", 300.0)


def full(limit: str, **changes: str) -> dict[str, Any]:
    """More memory than this for five minutes."""
    base = {"signal": "gpu_memory_share", "agg": "min", "window": "5m", "gpus": "any"}
    return {**base, "above": limit, **changes}


LOG: dict[str, Any] = {"level": "light", "after": "0s", "do": "log"}
NOTIFY: dict[str, Any] = {"level": "moderate", "after": "2m", "do": "notify"}
END: dict[str, Any] = {
    "level": "severe",
    "after": "8m",
    "do": "terminate",
    "notice_delivered_for": "5m",
    "grace": "60s",
    "max_work_lost": "12h",
}


def graded(*stages: dict[str, Any], **fields: object) -> Rule:
    """A rule about memory above 70 % with these stages."""
    known = {"match": {}, "ignore_phases": {}, "stages": list(stages)}
    return a_rule(full("70%"), **(known | fields))


PATIENT = rule(when=full("90%"))
"""The rule of test_cases, whose stage that ends needs more than 90 %: `for` 1m, `after` 8m."""
ENDS_FAR = PATIENT.model_copy(update={"clear_after": 0.0})
"""The same with `clear_after: 0s` in place of 1m: any NO begins anew."""


def run(case: Case, *pairs: tuple[Truth, Truth], by: Rule = ENDS_FAR, delta: float = TICK) -> Step:
    """Advance by a tick for each (truth, truth of the severe stage)."""
    events: list[cases.Event] = []
    step = Step(case)
    for truth, far in pairs:
        step = cases.advance(
            step.case,
            by,
            truth=truth,
            grades=(Grade(SEVERE, far),),
            delta=delta,
            wall=10.0,
            delivery=PROVEN,
        )
        events += step.events
    return Step(step.case, tuple(events), step.closed)


def begun() -> Case:
    """A case at its first YES, of the rule and of the stage."""
    return run(fresh(), (YES, YES), delta=0.0).case


NEEDED = int((60 + 480) / TICK)
"""Ticks of YES until the stage's own clock is over: `for` and `after`."""


# -- evaluation


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.5, (NO, NO)), (0.8, (YES, NO)), (0.95, (YES, YES)), (None, (UNKNOWN, UNKNOWN))],
)
def test_a_stage_is_as_far_as_both_conditions(
    share: float | None, expected: tuple[Truth, Truth]
) -> None:
    """The rule's truth is its own; that of a stage is the lesser of the two."""
    job = a_job({SHARE_KEY: {} if share is None else {"g0": share}})
    verdict = judge(graded(LOG, NOTIFY, END | {"when": full("90%")}), job)
    grade = verdict.grade(SEVERE)
    assert grade is not None
    assert (verdict.truth, grade.truth) == expected
    assert verdict.grade("moderate-notify") is None


def test_a_rule_without_grades_says_nothing_of_stages() -> None:
    """Nothing is spent on what nobody asked for."""
    assert judge(graded(LOG, NOTIFY, END), a_job({SHARE_KEY: {"g0": 0.95}})).grades == ()


def test_a_protected_job_has_come_nowhere() -> None:
    """Where the rule is not about the job, no stage is either."""
    judged = graded(LOG, NOTIFY, END | {"when": full("90%")}, match={"user": "nobody"})
    job = a_job({SHARE_KEY: {"g0": 0.95}})
    assert judge(judged, job).grades == ()


def test_what_a_job_says_cannot_hold_a_stage_back_for_ever() -> None:
    """A heartbeat that keeps only the stage from YES spends the budget of the job's word."""
    judged = graded(LOG, NOTIFY, END | {"when": SILENT}, trust_for="1h")
    job = a_job(
        {SHARE_KEY: {"g0": 0.95}},
        activity={"cpu": NOW_FACTS - 900, "log": NOW_FACTS - 900, "heartbeat": NOW_FACTS - 1},
    )
    verdict, plain = judge(judged, job), judge(judged, job, trusted=False)
    assert verdict.truth is YES
    assert verdict.self_report_only
    for spent, expected in ((3599.0, NO), (3600.0, YES)):
        counts = cases.budgeted(verdict, plain, spent=spent, trust_for=judged.trust_for)
        grade = counts.grade(SEVERE)
        assert grade is not None
        assert grade.truth is expected


# -- the state machine


def test_a_stage_waits_until_its_own_condition_has_held() -> None:
    """Long after the rule's deadline, its own clock begins with its own first YES."""
    case = run(fresh(), *[(YES, NO)] * 100).case
    assert case.state is CaseState.NOTIFIED
    assert run(case, *[(YES, YES)] * NEEDED).case.state is CaseState.NOTIFIED
    assert run(case, *[(YES, YES)] * (NEEDED + 1)).case.state is CaseState.DUE


def test_a_condition_that_holds_from_the_beginning_costs_no_time() -> None:
    """Then the stage comes when it would have come without a condition."""
    plain = rule()
    for ticks in range(NEEDED - 2, NEEDED + 3):
        far = run(begun(), *[(YES, YES)] * ticks).case
        without = run(begun(), *[(YES, YES)] * ticks, by=plain).case
        assert far.state is without.state
        assert cases.remaining(far, ENDS_FAR) == cases.remaining(without, plain)


def test_a_no_begins_anew_and_unknown_stops_the_clock() -> None:
    """Just like the rule's own `for`; and nothing hangs on old knowledge."""
    case = run(fresh(), *[(YES, YES)] * NEEDED).case
    held = case.clock(SEVERE).held
    assert held > 0
    assert run(case, (YES, NO)).case.clock(SEVERE).held == 0
    assert run(case, *[(YES, UNKNOWN)] * 40).case.clock(SEVERE).held == held
    assert run(case, *[(YES, UNKNOWN)] * 42).case.clock(SEVERE).held == 0


def test_a_no_shorter_than_clear_after_only_stops_the_clock() -> None:
    """As it does for a case once `for` is met: nobody escapes by one better sample now and then."""
    case = run(begun(), *[(YES, YES)] * 20, by=PATIENT).case
    held = case.clock(SEVERE).held
    short = run(case, *[(YES, NO)] * 4, by=PATIENT).case
    assert short.clock(SEVERE).held == held
    assert run(short, (YES, UNKNOWN), (YES, NO), by=PATIENT).case.clock(SEVERE).held == held
    assert run(short, *[(YES, YES)] * 2, by=PATIENT).case.clock(SEVERE).held == held + TICK
    assert run(case, *[(YES, NO)] * 5, by=PATIENT).case.clock(SEVERE).held == 0
    early = run(begun(), *[(YES, YES)] * 3, (YES, NO), by=PATIENT).case
    assert early.clock(SEVERE).held == 0


def test_a_due_case_goes_back_when_the_stage_is_withdrawn() -> None:
    """The notice stands, and the whole time is asked for again."""
    case = run(fresh(), *[(YES, YES)] * (NEEDED + 2)).case
    assert case.state is CaseState.DUE
    for doubt in (NO, UNKNOWN):
        step = run(case, (YES, doubt))
        assert step.case.state is CaseState.NOTIFIED
        assert kinds(step) == ["postponed"]
    back = run(case, (YES, NO), *[(YES, YES)] * NEEDED).case
    assert back.state is CaseState.NOTIFIED


def test_a_stage_that_notifies_waits_as_well() -> None:
    """Nobody is told before it has come so far, and without a notice nothing is ended."""
    judged = graded(LOG, NOTIFY | {"when": full("90%")}, END, mode="enforce", clear_after="1m")
    case = msgspec.structs.replace(fresh(), rule_id=judged.id)
    for truth, marks in ((NO, ["light-log"]), (UNKNOWN, ["light-log"])):
        step = Step(case)
        for _ in range(100):
            step = cases.advance(
                step.case,
                judged,
                truth=YES,
                grades=(Grade("moderate-notify", truth),),
                delta=TICK,
                wall=10.0,
                delivery=Delivery(),
            )
        assert [mark.key for mark in step.case.marks] == marks
        assert step.case.state is CaseState.DETECTED


def test_what_the_owner_was_told_allows_for_the_stages_own_clock() -> None:
    """The notice names the earliest end, as if the stage's condition held from then on."""
    step = run(fresh(), *[(YES, NO)] * 13)
    (promise,) = step.case.promises
    # Told two minutes after `for` was met; ended not before another `for` and `after`.
    assert promise.after == 120 + 60 + 480


def test_the_clocks_of_grades_outlive_a_restart() -> None:
    """They are written with the case; a ledger from before there were any is read."""
    case = run(fresh(), *[(YES, YES)] * 5).case
    assert Case.decode(case.encode()) == case
    assert Case.decode(fresh().encode().replace('"grades":[],', "")) == fresh()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(Truth), st.sampled_from(Truth)), max_size=200))
def test_due_needs_the_stages_condition_for_its_whole_time(
    history: list[tuple[Truth, Truth]],
) -> None:
    """Whatever the history: due means that it holds now and held in as many ticks before."""
    case: Case | None = fresh()
    far_for = 0
    for truth, far in history:
        grade = Truth(min(truth.value, far.value))
        far_for = 0 if grade is NO else far_for + (grade is YES)
        if case is None:
            continue
        step = run(case, (truth, grade))
        case = None if step.closed else step.case
        if case is not None and case.state is CaseState.DUE:
            assert grade is YES
            assert far_for >= NEEDED


# -- guards


@pytest.mark.parametrize(
    ("grades", "reasons"),
    [
        ((Grade(SEVERE, YES),), []),
        ((Grade(SEVERE, NO),), ["not_confirmed"]),
        ((Grade(SEVERE, UNKNOWN),), ["not_confirmed"]),
        ((Grade("moderate-notify", YES),), ["not_confirmed"]),
        ((), ["not_confirmed"]),
    ],
)
def test_the_stage_is_asked_again_right_before_the_act(
    grades: tuple[Grade, ...], reasons: list[str]
) -> None:
    """Fresh facts must say YES of the stage too; anything else is an objection."""
    case = run(fresh(), *[(YES, YES)] * (NEEDED + 2)).case
    blocks = guards.case_blocks(
        situation(),
        case,
        ENDS_FAR,
        key=SEVERE,
        stage=ENDS_FAR.stages[-1],
        job=JOB,
        verdict=Verdict("idle", "proc-1", YES, grades=grades),
        truth=YES,
        delivery=PROVEN,
        kept_until=None,
    )
    assert [block.reason for block in blocks] == reasons


# -- a whole engine


def _write(world: World) -> None:
    world.rules()
    path = world.folder / "rules.yaml"
    grade = "when: {signal: gpu_memory_share, agg: min, window: 60s, above: 90%, gpus: any}, "
    text = path.read_text().replace("do: terminate, ", f"do: terminate, {grade}")
    path.write_text(text)


def _empty(world: World) -> None:
    world.fleet.jobs[0].memory = 10 * GIB


def _lost(world: World) -> None:
    world.fleet.jobs[0].memory = None


@pytest.mark.parametrize("change", [_empty, _lost])
def test_a_job_is_ended_only_as_far_as_the_rule_says(
    servers: World, change: Callable[[World], None]
) -> None:
    """Idle for long: told and no more. Full as well: ended, unless the last look finds other."""
    _write(servers)

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            await world.tick(NEEDED + 4)
            assert world.state() is CaseState.NOTIFIED
            assert world.agent.requests == []
            far = "share of the GPU memory held, lowest of the last 1m: above 90 %"
            assert f"has gone so far as {far}" in str(world.alerts.received[-1].json())
            world.fleet.jobs[0].memory = 38 * GIB
            world.agent.on_node = lambda: change(world)
            await world.tick(38)
            # Both clocks were over; the last look found it changed, and the case went back.
            assert world.agent.requests == []
            assert world.state() is CaseState.NOTIFIED
            world.agent.on_node = None
            world.fleet.jobs[0].memory = 38 * GIB
            await world.tick(40)
            await world.settled()
            assert world.agent.ended == ["proc-1"]
            (decision,) = world.engine.ledger.job_decisions("proc-1")
            assert "gpu_memory_share min over 1m > 90 %" in decision.evidence

    asyncio.run(story())


# -- what authors and owners are told


@pytest.mark.parametrize(
    ("stages", "codes"),
    [
        ((LOG, NOTIFY, END), []),
        ((LOG | {"when": full("80%")}, NOTIFY, END), []),
        ((LOG, NOTIFY | {"when": full("80%")}, END | {"when": full("90%")}), []),
        ((LOG, NOTIFY | {"when": full("80%")}, END | {"when": full("80%")}), []),
        ((LOG, NOTIFY | {"when": full("90%")}, END | {"when": full("80%")}), ["GW225", "GW312"]),
        ((LOG | {"when": full("90%")}, NOTIFY | {"when": full("80%")}, END), ["GW225", "GW312"]),
        ((LOG, NOTIFY | {"when": full("90%")}, END), ["GW312"]),
        ((LOG, NOTIFY, END | {"when": full("70%")}), ["GW311"]),
        ((LOG, NOTIFY, END | {"when": full("60%")}), ["GW311"]),
        # Another window is another measure: nothing is known of their order.
        ((LOG, NOTIFY, END | {"when": full("60%", window="10m")}), []),
        (
            (
                LOG,
                NOTIFY | {"when": {"all": [full("80%"), IDLE]}},
                END | {"when": {"all": [IDLE, full("85%")]}},
            ),
            [],
        ),
        (
            (LOG, NOTIFY | {"when": full("80%")}, END | {"when": {"any": [full("95%"), IDLE]}}),
            ["GW312"],
        ),
        (
            (
                LOG,
                NOTIFY | {"when": {"silent_for": "20m", "signals": ["cpu"]}},
                END | {"when": {"silent_for": "10m", "signals": ["cpu"]}},
            ),
            ["GW225", "GW312"],
        ),
        (
            (
                LOG | {"when": {"profile": {"throughput": "below 30%"}, "window": "5m"}},
                NOTIFY | {"when": {"profile": {"throughput": "below 15%"}, "window": "5m"}},
            ),
            ["GW225"],
        ),
    ],
)
def test_grades_out_of_order_are_found(
    stages: tuple[dict[str, Any], ...], codes: list[str]
) -> None:
    """A threshold of a higher level must be further, and who may be ended must have been told."""
    assert [finding.code for finding in lint_grades(graded(*stages))] == codes


@pytest.mark.parametrize(
    ("stage", "codes"),
    [
        (END | {"when": full("90%") | {"gpus": None}}, ["GW204"]),
        (END | {"when": full("90%", window="10s")}, ["GW212"]),
        (END | {"when": {"promql": "sum(", "above": 1}}, ["GW213"]),
        (END | {"when": IDLE | {"gpus": "any"}}, ["GW224"]),
        (NOTIFY | {"when": IDLE | {"gpus": "any"}}, []),
    ],
)
def test_a_stages_condition_is_linted_like_the_rules(
    stage: dict[str, Any], codes: list[str]
) -> None:
    """With its place in the stage."""
    found = lint_rule(graded(LOG, NOTIFY, stage))
    assert [item.code for item in found] == codes
    assert all(item.path[:3] == ("stages", 2, "when") for item in found)


def test_a_second_stage_that_ends_jobs_would_never_be_reached() -> None:
    """Far or long is one condition, not two ends."""
    found = lint_rule(graded(LOG, NOTIFY, END | {"when": full("90%")}, END | {"after": "1h"}))
    assert [(item.code, item.path) for item in found] == [("GW226", ("stages", 3))]


def test_what_an_end_rests_on_is_both_conditions_together() -> None:
    """Utilization alone ends nothing; with memory demanded by the stage it is not alone."""
    alone = a_rule(IDLE, match={}, ignore_phases={}, stages=[LOG, NOTIFY, END])
    both = a_rule(
        IDLE, match={}, ignore_phases={}, stages=[LOG, NOTIFY, END | {"when": full("10%")}]
    )
    assert [item.code for item in lint_rule(alone)] == ["GW210"]
    assert lint_rule(both) == []


@pytest.mark.parametrize(
    ("old", "new", "effect"),
    [
        (None, "90%", "laxer"),
        ("90%", None, "stricter"),
        ("90%", "95%", "laxer"),
        ("95%", "90%", "stricter"),
    ],
)
def test_a_change_of_a_grade_has_a_direction(old: str | None, new: str | None, effect: str) -> None:
    """To demand more for a stage is laxer."""
    sets = [
        RuleSet(
            version=1,
            rules=(graded(LOG, NOTIFY, END | ({} if limit is None else {"when": full(limit)})),),
        )
        for limit in (old, new)
    ]
    (difference,) = differences(*sets)
    (change,) = difference.changes
    assert change.effect == effect
    assert change.part.startswith(f"stages.{SEVERE}.when")


def test_an_explanation_says_how_far_and_when_at_the_earliest() -> None:
    """A longer window of the stage puts it off."""
    judged = graded(LOG, NOTIFY, END | {"when": full("90%", window="15m")})
    found = explain_rule(judged, RuleSet(version=1, rules=(judged,)), scrape_interval=5)
    plain = explain_rule(graded(LOG, NOTIFY, END), RuleSet(version=1), scrape_interval=5)
    assert found["stages"][2]["earliest"] == plain["stages"][2]["earliest"] + 600
    text = " ".join(line.strip() for line in explanation_lines(found))
    assert "the lowest value of the last 15m of gpu_memory_share is above 90 %" in text


def test_the_notice_says_how_far_it_must_go() -> None:
    """Who is told knows what would be too much."""
    judged = graded(LOG, NOTIFY, END | {"when": full("90%")})
    texts = notice(
        fresh(),
        judged,
        (),
        Outlook(remaining=600.0, grace=60.0),
        speech=speech("en"),
        now=NOW_FACTS,
        zone="UTC",
        engine_url="http://engine:9837",
    )
    far = "share of the GPU memory held, lowest of the last 5m: above 90 %, on any GPU"
    assert f"has gone so far as {far}" in texts["next"]


def test_a_forecast_counts_the_stages_own_time() -> None:
    """Where its condition does not hold yet, the whole of it, and the condition is named."""
    waiting = run(fresh(), *[(YES, NO)] * 100).case
    (end,) = forecasts(waiting, ENDS_FAR, now=NOW_FACTS)
    assert (end.stage, end.seconds) == (SEVERE, 60 + 480)
    assert end.condition.endswith("gpu_memory_share min over 5m > 90 %, any GPUs")
    running_ = run(waiting, *[(YES, YES)] * 5).case
    (end,) = forecasts(running_, ENDS_FAR, now=NOW_FACTS)
    assert (end.seconds, end.condition) == (60 + 480 - 4 * TICK, "if it stays so")


def test_a_card_has_grades_too() -> None:
    """A rule about cards tells of two temperatures."""
    hot = {"signal": "card_temperature", "agg": "min", "window": "1m"}
    judged = a_rule(
        hot | {"above": "80C"},
        target="gpu",
        stages=[LOG, NOTIFY | {"after": "0s", "when": hot | {"above": "90C"}}],
    )
    key = SignalKey("card_temperature", "min", 60.0)
    job = a_job({key: {"g0": 85.0}})
    verdict = evaluate(judged, job, fleet_of(job), profiles=[], whitelist=[], now=NOW_FACTS)
    assert verdict.truth is YES
    assert [grade.truth for grade in verdict.grades] == [NO]
