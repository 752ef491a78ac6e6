"""Differences are about meaning, and a direction that is claimed holds for every job."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from tests.ruleengine.fleets import NOW_FACTS, a_job, a_rule, cards, fleet_of
from tests.ruleengine.rehearsing import RULES

from gpuwarden.ruleengine.condition_differences import condition_changes, normal
from gpuwarden.ruleengine.conditions import Condition, leaves
from gpuwarden.ruleengine.effects import Effect, overall
from gpuwarden.ruleengine.evaluation import evaluate
from gpuwarden.ruleengine.rule_cli import rules
from gpuwarden.ruleengine.verdicts import SignalKey, Truth

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Written = dict[str, Any]
READ: TypeAdapter[Condition] = TypeAdapter(Condition)

# -- conditions


@st.composite
def _signal(draw: st.DrawFn) -> Written:
    """A comparison of utilization, by an aggregate or a share, over whole scrapes."""
    side = draw(st.sampled_from(["above", "at_least", "below", "at_most"]))
    how: Written = draw(
        st.sampled_from([{"agg": name} for name in ("min", "max", "avg")])
        | st.sampled_from([{"share": f"{share}%"} for share in (25, 50, 75, 100)])
    )
    window = f"{draw(st.integers(1, 4))} samples"
    gpus = draw(st.sampled_from(["all", "any"]))
    limit = f"{draw(st.sampled_from([20, 40, 60]))}%"
    return {"signal": "gpu_utilization", side: limit, "window": window, "gpus": gpus, **how}


_conditions = st.recursive(
    _signal(),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"all": parts})
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"any": parts})
        | inner.map(lambda part: {"not": part})
    ),
    max_leaves=5,
)
_samples = st.lists(
    st.lists(st.sampled_from([0.0, 0.2, 0.3, 0.4, 0.6, 1.0]), min_size=4, max_size=4),
    min_size=1,
    max_size=3,
)
"""For each card its last four samples."""


def _aggregated(key: SignalKey, samples: Sequence[float]) -> float:
    """What Prometheus makes of the samples of a window."""
    window = sorted(samples[-(key.samples or 1) :])
    if key.agg in ("min", "max"):
        return window[0] if key.agg == "min" else window[-1]
    if key.agg == "avg":
        # Within its samples, out of which rounding would carry it: three of 0.2 are no 0.2000…04.
        return min(max(math.fsum(window) / len(window), window[0]), window[-1])
    rank = float(key.agg[1:]) * (len(window) - 1)
    low, high = window[math.floor(rank)], window[math.ceil(rank)]
    return low + (high - low) * (rank - math.floor(rank))


def _truth(condition: Condition, samples: Sequence[Sequence[float]], blind: bool = False) -> Truth:
    """What a rule with this condition says of a job whose cards have these samples."""
    names = [f"g{index}" for index in range(len(samples))]
    values: dict[SignalKey, dict[str, float]] = {}
    for leaf in leaves(condition):
        key = leaf.key  # type: ignore[union-attr, call-arg, misc]
        assert isinstance(key, SignalKey)
        known = dict(zip(names, samples, strict=True))
        if blind and key.agg == "min":
            known.pop("g0")
        values[key] = {name: _aggregated(key, row) for name, row in known.items()}
    job = a_job(values, gpus=cards(*names))
    rule = a_rule({"silent_for": "1m", "signals": ["cpu"]}).model_copy(update={"when": condition})
    verdict = evaluate(
        rule, job, fleet_of(job), profiles=(), whitelist=(), now=NOW_FACTS, trusted=True
    )
    return verdict.truth


@given(_conditions, _samples, st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_normal_form_says_the_same(
    written: Written, samples: list[list[float]], blind: bool
) -> None:
    """Of every job, also where something is not known; so what only looks different is none."""
    condition = READ.validate_python(written)
    assert _truth(normal(condition), samples, blind) is _truth(condition, samples, blind)
    assert list(condition_changes(condition, normal(condition))) == []


@given(_conditions, _conditions, st.lists(_samples, min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_a_direction_that_is_claimed_holds_for_every_job(
    first: Written, second: Written, jobs: list[list[list[float]]]
) -> None:
    """Of the same samples, the stricter condition finds all that the other one finds."""
    old, new = READ.validate_python(first), READ.validate_python(second)
    _claimed(old, new, jobs)


@st.composite
def _edited(draw: st.DrawFn) -> tuple[Written, Written]:
    """Two lists of conditions of which one lacks some of the other's, some of them negated."""
    parts = draw(st.lists(_conditions, min_size=2, max_size=4))
    kind = draw(st.sampled_from(["all", "any"]))
    kept = draw(st.lists(st.sampled_from(range(len(parts))), min_size=1, unique=True))
    pair: list[Written] = [{kind: parts}, {kind: [parts[index] for index in kept]}]
    if draw(st.booleans()):
        pair = [{"not": item} for item in pair]
    if draw(st.booleans()):
        pair.reverse()
    return pair[0], pair[1]


@given(_edited(), st.lists(_samples, min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_it_holds_where_conditions_come_and_go(
    pair: tuple[Written, Written], jobs: list[list[list[float]]]
) -> None:
    """Under `all` one more leaves less, under `any` it makes more, and `not` turns that around."""
    old, new = (READ.validate_python(written) for written in pair)
    _claimed(old, new, jobs)


_SIDES = ({"above", "at_least"}, {"below", "at_most"})


@st.composite
def _akin(draw: st.DrawFn) -> tuple[Written, Written]:
    """Two comparisons to the same side that have some of limit, aggregate, window and cards."""
    first, second = draw(_signal()), draw(_signal())
    side = next(key for key in first if any(key in names for names in _SIDES))
    other = next(key for key in second if any(key in names for names in _SIDES))
    groups = [{"window"}, {"gpus"}, {"agg", "share"}]
    kept = draw(st.lists(st.sampled_from(range(3)), min_size=1, max_size=3, unique=True))
    same = next(names for names in _SIDES if side in names)
    mixed: Written = {"signal": "gpu_utilization"}
    mixed[other if other in same else side] = second[other]
    for number, group in enumerate(groups):
        source = first if number in kept else second
        mixed |= {key: value for key, value in source.items() if key in group}
    return first, mixed


@given(_akin(), st.lists(_samples, min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_it_holds_for_single_comparisons_of_a_kind(
    pair: tuple[Written, Written], jobs: list[list[list[float]]]
) -> None:
    """Limits, aggregates, shares, windows and cards, each of them and together."""
    old, new = (READ.validate_python(written) for written in pair)
    _claimed(old, new, jobs)


def _claimed(old: Condition, new: Condition, jobs: list[list[list[float]]]) -> None:
    changes = list(condition_changes(old, new))
    truths = [(_truth(old, job), _truth(new, job)) for job in jobs]
    if not changes:
        assert all(before is after for before, after in truths)
        return
    effect = overall(changes)
    if effect is Effect.DIFFERENT:
        return  # nothing is claimed
    for before, after in truths:
        less, more = (before, after) if effect is Effect.STRICTER else (after, before)
        assert less.value <= more.value, [str(change) for change in changes]


BASE = {"signal": "gpu_utilization", "agg": "max", "window": "5m", "at_most": "5%", "gpus": "all"}
PROFILE = {"profile": {"throughput": "below 15%"}, "window": "5m"}
SILENT = {"silent_for": "5m", "signals": ["cpu", "log"]}


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (BASE, BASE | {"at_most": "6%"}, [("gpu_utilization", "stricter")]),
        (BASE, BASE | {"gpus": "any"}, [("gpu_utilization.gpus", "stricter")]),
        (BASE, BASE | {"window": "10m"}, [("gpu_utilization.window", "laxer")]),
        (BASE, BASE | {"window": "5 samples"}, [("gpu_utilization.window", "different")]),
        (BASE, BASE | {"window": "300s"}, []),
        (BASE, {"not": {"not": BASE}}, []),
        ({"all": [BASE, SILENT]}, {"all": [SILENT, BASE]}, []),
        ({"all": [BASE, SILENT]}, BASE, [("all", "stricter")]),
        (BASE, {"any": [SILENT, BASE]}, [("any", "stricter")]),
        (BASE, SILENT, [("", "different")]),
        (SILENT, SILENT | {"silent_for": "6m"}, [("silent_for", "laxer")]),
        (SILENT, SILENT | {"signals": ["cpu"]}, [("silent_for.signals", "stricter")]),
        ({"not": SILENT}, {"not": SILENT | {"silent_for": "6m"}}, [("not.silent_for", "stricter")]),
        (
            PROFILE,
            PROFILE | {"profile": {"throughput": "below 10%"}},
            [("profile.throughput", "stricter")],
        ),
        (
            PROFILE,
            PROFILE | {"profile": {"throughput": "outside 20%"}},
            [("profile.throughput", "different")],
        ),
        (
            PROFILE,
            PROFILE | {"profile": {"throughput": "below 15%", "gpu_memory": "above 9%"}},
            [("profile.gpu_memory", "stricter")],
        ),
        (
            {"promql": "gpu_job_threads", "above": 3},
            {"promql": "gpu_job_threads", "at_least": 3},
            [("promql", "stricter")],
        ),
        (
            {"no_progress_for": "30m"},
            {"no_progress_for": "20m"},
            [("no_progress_for", "stricter")],
        ),
        (
            {"needs_memory": "100%"},
            {"needs_memory": "80%"},
            [("needs_memory", "stricter")],
        ),
        ({"needs_memory": "80%"}, BASE, [("", "different")]),
        (
            {"over_budget": "month", "above": "120%"},
            {"over_budget": "month", "above": "100%"},
            [("over_budget", "stricter")],
        ),
        (
            {"over_budget": "month", "above": "100%"},
            {"over_budget": "week", "above": "100%"},
            [("", "different")],
        ),
        (
            BASE,
            {k: v for k, v in BASE.items() if k != "agg"} | {"share": "80%"},
            [("gpu_utilization.agg", "stricter")],
        ),
        (
            BASE,
            BASE | {"agg": "avg", "window": "9m"},
            [("gpu_utilization.agg", "stricter"), ("gpu_utilization.window", "different")],
        ),
        (
            {"all": [BASE, SILENT]},
            {"all": [BASE, {"any": [SILENT, PROFILE]}]},
            [("all.any", "stricter")],
        ),
    ],
)
def test_changes_of_conditions_are_named_with_their_direction(
    old: Written, new: Written, found: list[tuple[str, str]]
) -> None:
    """And read backwards, they go the other way."""
    first, second = READ.validate_python(old), READ.validate_python(new)
    changes = [(change.part, change.effect.value) for change in condition_changes(first, second)]
    assert changes == [(f"when.{part}".rstrip("."), effect) for part, effect in found]
    turned = {"stricter": "laxer", "laxer": "stricter", "different": "different"}
    back = [(change.part, change.effect.value) for change in condition_changes(second, first)]
    assert back == [(part, turned[effect]) for part, effect in changes]


# -- rules and what holds for all


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("cold_start: 5m", "cold_start: 6m", "idle: laxer|laxer      cold_start: 5m -> 6m"),
        (
            "- id: idle\n",
            "- id: idle\n  mode: warn\n",
            "idle: stricter|stricter   mode: observe -> warn",
        ),
        ("{framework: torch}", "{}", "idle: stricter|stricter   match.framework: torch -> any"),
        (
            "{validate: 1h}",
            "{validate: 1h, scan: 5m}",
            "idle: laxer|laxer      ignore_phases.scan: 0s -> 5m",
        ),
        (
            "trust_for: 10m",
            "only_during: [{from: '22:00', to: '06:00', zone: Europe/Berlin}]\n  trust_for: 10m",
            "idle: laxer|laxer      only_during: always -> 22:00 to 06:00 Europe/Berlin",
        ),
        ("trust_for: 10m", "trust_for: 5m", "idle: stricter|stricter   trust_for: 10m -> 5m"),
        (
            "clear_after: 2m",
            "clear_after: 3m",
            "idle: stricter|stricter   clear_after: 2m -> 3m",
        ),
        (
            "max_work_lost: 1h",
            "max_work_lost: 2h",
            "idle: stricter|stricter   stages.severe-terminate.max_work_lost: 1h -> 2h",
        ),
        (
            "grace: 60s",
            "grace: 2m",
            "idle: laxer|laxer      stages.severe-terminate.grace: 1m -> 2m",
        ),
        (
            "do: notify}",
            "do: notify, owner_may: {keep: 1h, times: 2}}",
            (
                "idle: laxer|laxer      stages.moderate-notify.owner_may.keep: 0s -> 1h"
                "|laxer      stages.moderate-notify.owner_may.times: 0 -> 2"
            ),
        ),
        (
            "- {level: light, after: 0s, do: log}\n  - {level: mod",
            "- {level: mod",
            "idle: laxer|laxer      stages.light-log: log after 0s -> none",
        ),
        (
            "per_hour: 6",
            "per_hour: 7",
            "all rules: stricter|stricter   limits.terminate.per_hour: 6 -> 7",
        ),
        (
            "{user: root}",
            "{user: toor}",
            (
                "all rules: different"
                "|stricter   whitelist[user root].idle: 2030-01-01T00:00:00+00:00 -> not protected"
                "|laxer      whitelist[user toor].idle: not protected -> 2030-01-01T00:00:00+00:00"
            ),
        ),
        (
            "2030-01-01T00:00:00Z",
            "2031-01-01T01:00:00+01:00",
            (
                "all rules: laxer|laxer      whitelist[user root].idle: 2030-01-01T00:00:00+00:00 "
                "-> 2031-01-01T00:00:00+00:00"
            ),
        ),
        ("- id: many", "- id: lots", "lots: new;many: gone"),
        (
            "target: gpu\n  cold_start: 0s",
            "target: gpu\n  cold_start: 0s\n  description: Hot.",
            "no difference in meaning",
        ),
    ],
)
def test_what_changed_is_told_and_exits_one(tmp_path: Path, old: str, new: str, line: str) -> None:
    """Each change once, with its direction; nothing that is only text."""
    assert old in RULES
    before, after = tmp_path / "old.yaml", tmp_path / "new.yaml"
    before.write_text(RULES)
    after.write_text(RULES.replace(old, new, 1))
    done = CliRunner().invoke(rules, ["diff", str(before), str(after)])
    none = line == "no difference in meaning"
    wanted = [part for item in line.split(";") for part in item.replace("|", "\n  ").splitlines()]
    told = done.stdout.splitlines()
    assert told == wanted if none else told[:-1] == wanted
    assert done.exit_code == (0 if none else 1)


@pytest.mark.parametrize(
    ("grace", "line"),
    [
        ("", "no difference in meaning"),
        (", grace: 5m", "no difference in meaning"),
        (", grace: 1m", "  stricter   stages.severe-checkpoint.grace: 5m -> 1m"),
        (", grace: 9m", "  laxer      stages.severe-checkpoint.grace: 5m -> 9m"),
    ],
)
def test_a_request_to_save_that_gives_no_time_gives_what_the_engine_gives(
    tmp_path: Path, grace: str, line: str
) -> None:
    """Five minutes are its time where the stage does not say; writing them down changes nothing."""
    end = "  - {level: severe, after: 20m, do: terminate"
    assert end in RULES
    saving = "  - {level: severe, after: 15m, do: checkpoint%s}\n" + end
    before, after = tmp_path / "old.yaml", tmp_path / "new.yaml"
    before.write_text(RULES.replace(end, saving % ""))
    after.write_text(RULES.replace(end, saving % grace))
    done = CliRunner().invoke(rules, ["diff", str(before), str(after)])
    assert line in done.stdout.splitlines()
    told = CliRunner().invoke(rules, ["explain", "--rule", "idle", str(after)])
    length = grace.removeprefix(", grace: ") or "5m"
    assert f"      which may take {length}; no card is taken meanwhile\n" in told.stdout


def test_folders_are_compared_and_results_are_one_document(tmp_path: Path) -> None:
    """As CI would: the rules in force against those of a branch."""
    for name, text in (("old", RULES), ("new", RULES.replace("at_most: 5%", "at_most: 4%"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rules.yaml").write_text(text)
    words = ["diff", "-o", "json", str(tmp_path / "old"), str(tmp_path / "new")]
    done = CliRunner().invoke(rules, words)
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {
        "schema": "gpuwarden.rule-differences/v1",
        "differences": [
            {
                "rule": "idle",
                "fate": "laxer",
                "changes": [
                    {
                        "part": "when.all.gpu_utilization",
                        "effect": "laxer",
                        "old": "<= 5 %",
                        "new": "<= 4 %",
                    }
                ],
            }
        ],
    }


def test_what_cannot_be_compared_exits_two(tmp_path: Path) -> None:
    """A file that is not usable, or an empty folder."""
    good, bad, empty = tmp_path / "good.yaml", tmp_path / "bad.yaml", tmp_path / "empty"
    good.write_text(RULES)
    bad.write_text(RULES.replace("80C", "80"))
    empty.mkdir()
    for pair in ((good, bad), (bad, good), (good, empty), (tmp_path / "none.yaml", good)):
        done = CliRunner().invoke(rules, ["diff", *map(str, pair)])
        assert done.exit_code == 2, done.output
