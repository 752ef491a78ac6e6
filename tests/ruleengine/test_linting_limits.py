"""Rules that check must not pass in silence: they judge everybody, nobody, or on nothing at all."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from tests.ruleengine.fleets import a_rule

from gpuwarden.ruleengine.linting import lint_rule
from gpuwarden.ruleengine.lints_of_limits import lint_limits
from gpuwarden.ruleengine.lints_of_matches import LABELS, lint_match
from gpuwarden.ruleengine.model import MatchKey

LOW: dict[str, Any] = {
    "signal": "gpu_utilization",
    "agg": "max",
    "window": "5m",
    "at_most": "5%",
    "gpus": "all",
}
HELD = {"signal": "gpu_memory", "agg": "min", "window": "5m", "gpus": "any"}
HIGH = {name: value for name, value in LOW.items() if name != "at_most"}
BUSY = HIGH | {"above": "50%"}
NOTIFY = {"level": "moderate", "after": "5m", "do": "notify"}
ENDING: dict[str, Any] = {
    "match": {},
    "ignore_phases": {},
    "stages": [
        NOTIFY,
        {
            "level": "severe",
            "after": "2h",
            "do": "terminate",
            "notice_delivered_for": "1h",
            "grace": "60s",
            "max_work_lost": "1h",
        },
    ],
}


@pytest.mark.parametrize(
    ("when", "codes"),
    [
        (HELD | {"at_least": "0B"}, ["GW315"]),
        (HELD | {"below": "0B"}, ["GW303"]),
        (HELD | {"at_most": "0B"}, []),
        (HELD | {"above": "0B"}, []),
        (HIGH | {"at_most": "100%"}, ["GW315"]),
        (HIGH | {"at_most": "500%"}, ["GW315"]),
        (HIGH | {"below": "100.1%"}, ["GW315"]),
        (HIGH | {"below": "100%"}, []),
        (HIGH | {"above": "100%"}, ["GW303"]),
        (HIGH | {"at_least": "100%"}, []),
        ({"not": HIGH | {"at_most": "100%"}}, ["GW315"]),
        # A card may draw more than its limit for a moment.
        (HIGH | {"signal": "card_power_share", "above": "100%"}, []),
        ({"over_budget": "month", "at_least": "0%"}, ["GW315"]),
        ({"over_budget": "month", "above": "100%"}, []),
        # 5 would be 500 %.
        ({"promql": "avg by (job_id) (gpu_job_utilization_ratio)", "below": 5}, ["GW315"]),
        ({"promql": "max_over_time(gpu_job_utilization_ratio[5m])", "above": 90}, ["GW303"]),
        (
            {"promql": "quantile_over_time(0.5, gpu_job_utilization_ratio[5m])", "at_most": 2},
            ["GW315"],
        ),
        ({"promql": "100 * avg by (job_id) (gpu_job_utilization_ratio)", "below": 5}, []),
        ({"promql": "sum by (job_id) (gpu_job_utilization_ratio)", "above": 3}, []),
        ({"promql": "max by (job_id) (gpu_job_utilization_ratio)", "below": 0.05}, []),
        ({"promql": "max by (job_id) (gpu_job_memory_bytes)", "below": 5}, []),
        # What stands still is exactly 100 % below, and exactly at a limit is inside.
        ({"profile": {"throughput": "below 100%"}, "window": "5m"}, ["GW303"]),
        ({"profile": {"throughput": "below 99%"}, "window": "5m"}, []),
        ({"profile": {"gpu_memory": "above 100%"}, "window": "5m"}, []),
    ],
)
def test_a_limit_that_every_value_or_none_is_within_is_pointed_out(
    when: object, codes: list[str]
) -> None:
    """Whatever is measured, it says nothing of a job."""
    assert [finding.code for finding in lint_limits(a_rule(when))] == codes


@pytest.mark.parametrize(
    ("when", "codes"),
    [
        ({"all": [LOW, HELD | {"at_least": "0B"}]}, ["GW210"]),
        ({"all": [LOW, {"not": HELD | {"below": "0B"}}]}, ["GW210"]),
        ({"all": [LOW, {"any": [HELD | {"at_least": "0B"}, HELD | {"above": "9GiB"}]}]}, ["GW210"]),
        (
            {"all": [{"promql": "gpu_job_holds_gpu", "above": 3}, HIGH | {"at_most": "100%"}]},
            ["GW209"],
        ),
        ({"all": [LOW, {"any": [HELD | {"below": "0B"}, HELD | {"above": "9GiB"}]}]}, []),
        ({"all": [LOW, HELD | {"above": "0B"}]}, []),
    ],
)
def test_a_limit_that_holds_for_everybody_is_nothing_to_end_a_job_by(
    when: object, codes: list[str]
) -> None:
    """Beside utilization alone it would look like the second witness that must be there."""
    found = [finding.code for finding in lint_rule(a_rule(when, **ENDING))]
    assert [code for code in found if code in ("GW209", "GW210")] == codes


@pytest.mark.parametrize(
    ("when", "count"),
    [
        ({"all": [LOW, BUSY]}, 1),
        ({"all": [LOW, {"any": [{"all": [BUSY, LOW]}, BUSY]}]}, 1),
        ({"all": [LOW, {"not": {"any": [LOW | {"at_most": "9%"}]}}]}, 1),
        ({"all": [LOW | {"gpus": "any"}, BUSY]}, 1),
        ({"all": [LOW | {"gpus": "60%"}, BUSY | {"gpus": "50%"}]}, 1),
        ({"all": [LOW, BUSY | {"agg": "min"}]}, 1),
        ({"all": [HIGH | {"below": "50%"}, BUSY]}, 1),
        ({"all": [HIGH | {"at_most": "50%"}, HIGH | {"at_least": "50%"}]}, 0),
        # One card idle while another works; idle on the whole with a peak; now, and not before.
        ({"all": [LOW | {"gpus": "any"}, BUSY | {"gpus": "any"}]}, 0),
        ({"all": [LOW | {"gpus": "50%"}, BUSY | {"gpus": "50%"}]}, 0),
        ({"all": [LOW | {"agg": "avg"}, BUSY]}, 0),
        ({"all": [LOW, BUSY | {"window": "1h"}]}, 0),
        ({"any": [LOW, BUSY]}, 0),
    ],
)
def test_conditions_that_are_never_true_together_are_pointed_out(when: object, count: int) -> None:
    """The rule would be right in each of its words, and never find anybody."""
    found = list(lint_limits(a_rule(when)))
    assert [finding.code for finding in found] == ["GW316"] * count
    assert all("never true together" in finding.message for finding in found)


def test_a_stage_that_contradicts_its_rule_is_pointed_out_where_it_stands() -> None:
    """Its owner would be told of an end that never comes, or never be told."""
    rule = a_rule(LOW, stages=[NOTIFY, NOTIFY | {"after": "1h", "when": BUSY}])
    (finding,) = lint_limits(rule)
    assert (finding.code, finding.path) == ("GW316", ("stages", 1, "when"))


@pytest.mark.parametrize(
    ("key", "pattern", "hint"),
    [
        ("interactive", "yes", None),
        ("interactive", "True", 'did you mean "true"?'),
        ("source", "k8s|docker", None),
        ("source", "SLURM", 'did you mean "slurm"?'),
        ("framework", "pytorch", 'did you mean "torch"?'),
        ("user", "ana*", "write ana.* for anything at all"),
        ("model", "yolov8*", "write yolov8.* for anything at all"),
        ("user", "ana, ben", "write several as ana|ben"),
        ("user", "ana ben", "write several as ana|ben"),
        ("user", "ana ", "write several as ana|ben"),
        ("node", "gpu01:9835", None),
        ("node", "gpu-[0-9]+:[0-9]+", None),
        ("gpu", "0", None),
        ("gpu", "0|1", None),
        ("gpu", "GPU-8a1c.*", None),
        ("model", "yolov8n.pt", "yolov8n"),
    ],
)
def test_a_pattern_that_fits_no_label_is_pointed_out(
    key: str, pattern: str, hint: str | None
) -> None:
    """The rule would be switched on, and judge nobody."""
    (finding,) = lint_match(a_rule(LOW, match={key: pattern}))
    assert (finding.code, finding.path) == ("GW317", ("match", key))
    if hint is not None:
        assert finding.hint is not None
        assert hint in finding.hint


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("interactive", "true"),
        ("interactive", "(?i)TRUE"),
        ("source", "slurm|k8s"),
        ("framework", "(ultra.*|torch)"),
        ("user", r"ana.*|b[a-z]*|(c)*|d\*"),
        ("user", "ana{1,3}"),
        ("user", r"EXAMPLE\\ana"),
        ("team", "computer vision"),
        ("node", "gpu-[0-9]+"),
        ("node", "fd00::12"),
        ("gpu", "NVIDIA A100.*|NVIDIA RTX 4090"),
        ("gpu", "4090|A100"),
        ("model", "yolov8[nsmlx]"),
        ("job_id", "slurm-.*"),
        ("project", "runs, old"),
    ],
)
def test_a_pattern_that_may_fit_is_left_alone(key: str, pattern: str) -> None:
    """A warning that is wrong teaches to read none."""
    assert list(lint_match(a_rule(LOW, match={key: pattern}))) == []


def test_every_label_that_can_be_matched_is_told() -> None:
    """By the reference page: a rule's author sees no code."""
    assert list(LABELS) == list(get_args(MatchKey))


def test_a_silence_that_is_shorter_than_the_scrapes_is_pointed_out() -> None:
    """Between two scrapes nobody is heard, however hard the job works."""
    rule = a_rule({"silent_for": "30s", "signals": ["cpu"]})
    assert [item.code for item in lint_rule(rule, scrape_interval=5)] == []
    (finding,) = lint_rule(rule, scrape_interval=15)
    assert (finding.code, finding.hint) == ("GW318", "write at least 1m")
