"""Canaries as pure functions: who is in the share, what falls back, and what is never ended."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ruleengine.fleets import a_rule, fleet_of
from tests.ruleengine.languages import rules

from gpuwarden.ruleengine import canaries
from gpuwarden.ruleengine.canaries import Ended, Objected, Objection, Seen
from gpuwarden.ruleengine.dry_runs import DryRun
from gpuwarden.ruleengine.effects import Effect
from gpuwarden.ruleengine.guards import PastEnd
from gpuwarden.ruleengine.lints_of_canaries import lint_canary
from gpuwarden.ruleengine.model import Canary, Mode, Rule, RuleSet, Target
from gpuwarden.ruleengine.rule_differences import differences
from gpuwarden.ruleengine.rule_explanations import explain_rule, explanation_lines
from gpuwarden.ruleengine.verdicts import Truth

USERS = st.text(min_size=1, max_size=20)
IDS = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,62}", fullmatch=True)
SHARES = st.floats(min_value=0.001, max_value=1.0)
DAY = 86400.0
IDLE = {"silent_for": "5m", "signals": ["cpu"]}


def canary(share: str = "10%", appeals: int = 2, regrets: int = 1, within: str = "7d") -> Canary:
    """A canary as a file writes it."""
    back = {"appeals": appeals, "regrets": regrets, "within": within}
    return Canary.model_validate({"share": share, "back_to_warn": back})


def on_trial(rule: Rule, terms: Canary | None = None) -> Rule:
    """A rule that enforces on trial."""
    return rule.model_copy(update={"mode": Mode.ENFORCE, "canary": terms or canary()})


@given(IDS, USERS, SHARES, SHARES)
def test_whoever_is_in_a_share_is_in_every_larger_one(
    rule_id: str, user: str, one: float, other: float
) -> None:
    """To raise the share only ever adds owners; nobody is swapped for another."""
    low, high = sorted((one, other))
    assert not canaries.in_share(rule_id, user, low) or canaries.in_share(rule_id, user, high)
    assert canaries.in_share(rule_id, user, 1.0)


@given(IDS, SHARES)
def test_a_job_whose_user_is_not_known_is_in_no_share(rule_id: str, share: float) -> None:
    """Who is unsure does nothing, even on trial with everybody."""
    assert not canaries.in_share(rule_id, "", share)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.25, 0.5])
@pytest.mark.parametrize("rule_id", ["idle-held", "memory-hog", "x"])
def test_over_many_owners_the_part_in_the_share_comes_to_the_share(
    rule_id: str, share: float
) -> None:
    """20,000 owners: within five standard deviations of a fair draw."""
    count = 20_000
    inside = sum(canaries.in_share(rule_id, f"user{n}", share) for n in range(count))
    spread = (share * (1 - share) / count) ** 0.5
    assert abs(inside / count - share) < 5 * spread


def test_another_rule_tries_on_other_owners() -> None:
    """Being in one rule's share says nothing about another's: a half of a half is a quarter."""
    both = sum(
        canaries.in_share("one", f"user{n}", 0.5) and canaries.in_share("two", f"user{n}", 0.5)
        for n in range(4000)
    )
    assert 850 < both < 1150


@pytest.mark.parametrize("held", [False, True])
@given(rule=rules(), user=USERS, share=SHARES)
def test_a_canary_never_makes_a_rule_stricter(
    rule: Rule, user: str, share: float, *, held: bool
) -> None:
    """For every owner it is the same rule or the same in warn, and in warn once it fell back."""
    terms = canary()
    terms = terms.model_copy(update={"share": share})
    trial = on_trial(rule, terms)
    found = canaries.applied(trial, user, {rule.id: "why"} if held else {})
    if held or not canaries.in_share(rule.id, user, share):
        assert found == trial.model_copy(update={"mode": Mode.WARN})
        assert not found.enforces
    else:
        assert found is trial
    assert canaries.applied(rule, user, {}) is rule
    assert not canaries.applied(rule, user, {rule.id: "why"}).enforces


@given(SHARES, st.integers(0, 400))
def test_of_all_jobs_found_never_more_than_the_share_is_ended(share: float, found: int) -> None:
    """Ending whenever the guard lets it leaves at most share * found ended, at every moment."""
    rule = on_trial(a_rule(IDLE), canary().model_copy(update={"share": share}))
    ended = 0
    for seen in range(1, found + 1):
        if not canaries.share_blocks(rule, found=seen, ended=ended):
            ended += 1
        assert ended <= share * seen
    assert ended >= int(share * found) - 1 or share * found < 1


def test_the_guard_says_how_many_and_of_how_many() -> None:
    """The sentence has the numbers."""
    (block,) = canaries.share_blocks(on_trial(a_rule(IDLE)), found=25, ended=2)
    assert block.reason == "canary_share"
    assert block.sentence == (
        "2 of the 25 jobs that the rule found within 7d were ended; one more would be above "
        "canary.share, which is 10 %"
    )
    assert canaries.share_blocks(on_trial(a_rule(IDLE)), found=30, ended=2) == []
    assert canaries.share_blocks(a_rule(IDLE), found=1, ended=9) == []


OBJECTIONS = st.lists(
    st.builds(
        Objected,
        st.sampled_from(["rule-under-test", "other"]),
        st.sampled_from(list(Objection)),
        st.sampled_from(["ana", "ben", "cem", "dia"]),
        st.floats(min_value=0, max_value=20 * DAY),
    ),
    max_size=12,
)


@given(OBJECTIONS, st.randoms(), st.floats(min_value=0, max_value=20 * DAY))
def test_falling_back_depends_on_no_order_and_counts_everybody_once(
    objections: list[Objected], random: object, since: float
) -> None:
    """The same objections in any order, or said twice, give the same answer."""
    rule = on_trial(a_rule(IDLE)).model_copy(update={"id": "rule-under-test"})
    now = 20 * DAY
    answer = canaries.fallen_back(rule, objections, now=now, since=since)
    mixed = [*objections, *objections]
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert canaries.fallen_back(rule, mixed, now=now, since=since) == answer
    own = [o for o in objections if o.rule_id == rule.id and o.at > since and o.at >= now - 7 * DAY]
    appeals = {o.subject for o in own if o.kind is Objection.APPEAL}
    regrets = {o.subject for o in own if o.kind is Objection.REGRET}
    assert (answer is not None) == (len(appeals) >= 2 or len(regrets) >= 1)


def test_a_rule_that_is_not_on_trial_never_falls_back() -> None:
    """Objections to it are kept, and change nothing."""
    objections = [Objected("idle", Objection.REGRET, str(n), 5.0) for n in range(9)]
    for rule in (a_rule(IDLE), on_trial(a_rule(IDLE)).model_copy(update={"mode": Mode.WARN})):
        named = rule.model_copy(update={"id": "idle"})
        assert canaries.fallen_back(named, objections, now=6.0, since=0.0) is None


END = Ended("d1", "idle", "proc-1", "ana", "run-7", 1000.0)


@pytest.mark.parametrize(
    ("end", "job", "now", "regret"),
    [
        (END, Seen("proc-2", "ana", "run-7"), 1600.0, True),
        (END, Seen("proc-1", "ana", "run-7"), 1600.0, False),
        (END, Seen("proc-2", "ben", "run-7"), 1600.0, False),
        (END, Seen("proc-2", "ana", "run-8"), 1600.0, False),
        (END, Seen("proc-2", "ana", None), 1600.0, False),
        (END, Seen("proc-2", "ana", "run-7"), 1000.0 + 3601.0, False),
        (END, Seen("proc-2", "ana", "run-7"), 999.0, False),
        (dataclasses.replace(END, run_id=None), Seen("proc-2", "ana", None), 1600.0, False),
        (dataclasses.replace(END, user=""), Seen("proc-2", "", "run-7"), 1600.0, False),
    ],
    ids=[
        "back",
        "the ended attempt itself, still listed",
        "another user takes the name",
        "another run",
        "a job without a run",
        "after more than an hour",
        "a clock that went back",
        "an end without a run",
        "users that are not known",
    ],
)
def test_an_end_is_regretted_where_its_own_run_is_back_within_an_hour(
    end: Ended, job: Seen, now: float, *, regret: bool
) -> None:
    """Only the same run of the same user, on a card, as another attempt."""
    assert bool(canaries.regretted([end], [job], now=now)) is regret


def test_a_canary_without_an_end_is_an_error_and_without_enforcement_a_warning() -> None:
    """What tries nothing is said when the file is checked."""
    assert [f.code for f in lint_canary(on_trial(a_rule(IDLE)))] == ["GW203"]
    ending = a_rule(IDLE, stages=ENDING, mode="enforce", match={}, ignore_phases={})
    assert list(lint_canary(on_trial(ending))) == []
    warned = on_trial(ending).model_copy(update={"mode": Mode.WARN})
    assert [f.code for f in lint_canary(warned)] == ["GW320"]
    cards = on_trial(ending).model_copy(update={"target": Target.GPU})
    assert [f.code for f in lint_canary(cards)] == ["GW203"]


ENDING = [
    {"level": "moderate", "after": "1m", "do": "notify"},
    {
        "level": "severe",
        "after": "5m",
        "do": "terminate",
        "notice_delivered_for": "2m",
        "grace": "60s",
        "max_work_lost": "40h",
    },
]


@pytest.mark.parametrize(
    ("change", "effect"),
    [
        ({"share": "20%"}, Effect.STRICTER),
        ({"appeals": 3}, Effect.STRICTER),
        ({"regrets": 2}, Effect.STRICTER),
        ({"within": "3d"}, Effect.STRICTER),
        ({"within": "14d"}, Effect.LAXER),
        ({"share": "5%", "appeals": 1}, Effect.LAXER),
        ({"share": "20%", "appeals": 1}, Effect.DIFFERENT),
    ],
)
def test_a_change_of_a_canary_is_told_with_its_direction(
    change: dict[str, Any], effect: Effect
) -> None:
    """More owners, or more that it takes to fall back, end more jobs."""
    before, after = on_trial(a_rule(IDLE)), on_trial(a_rule(IDLE), canary(**change))
    sets = [RuleSet(version=1).model_copy(update={"rules": (rule,)}) for rule in (before, after)]
    (difference,) = differences(*sets)
    assert [(item.part, item.effect) for item in difference.changes] == [("canary", effect)]


def test_an_explanation_says_whom_it_ends_and_what_puts_it_back() -> None:
    """For people, with the numbers of the file."""
    rule = on_trial(a_rule(IDLE, stages=ENDING, ignore_phases={}))
    lines = explanation_lines(explain_rule(rule, RuleSet(version=1), scrape_interval=5.0))
    text = " ".join(line.strip() for line in lines)
    assert (
        "On trial: it ends jobs of 10 % of the owners, and warns all others. It falls back to warn "
        "by itself once 2 owners object or 1 end is regretted within 7d, until an admin resumes "
        "it. Of the jobs that it finds within 7d, it ends at most 10 % as well: none before it has "
        "found 10." in text
    )


def test_dry_runs_end_the_jobs_of_the_same_owners_as_the_engine_and_no_more_than_the_share() -> (
    None
):
    """Forty owners, a job each: those in the share become due, the others would only have been."""
    rule = on_trial(a_rule(IDLE, stages=ENDING, ignore_phases={}), canary("25%"))
    run = DryRun(RuleSet(version=1).model_copy(update={"rules": (rule,)}), 5.0)
    users = [f"user{number}" for number in range(40)]
    for tick in range(60):
        for user in users:
            run.advance(
                rule,
                (rule.id, f"proc-{user}"),
                Truth.YES,
                grades=(),
                delta=15.0,
                time=1000.0 + 15.0 * tick,
                user=user,
            )
    inside = {f"proc-{user}" for user in users if canaries.in_share(rule.id, user, 0.25)}
    assert 0 < len(inside) < len(users)
    assert {job for _, job in run.due()} == inside
    outside = next(case for pair, case in run.cases.items() if pair[1] not in inside)
    assert [mark.would for mark in outside.marks if mark.do == "terminate"] == [True]
    facts, pair = dataclasses.replace(fleet_of(), time=1000.0 + 15.0 * 60), run.due()[0]
    for ended in range(11):
        found = run.objections(rule, pair, facts, job=None, judged=None, owners=(), ended=0)
        assert found is not None
        assert ("canary_share" in {block.reason for block in found}) is (ended >= 10)
        run.ends.append(PastEnd(facts.time, "", rule.id, f"proc-{ended}"))
