"""The committed boards: built by the code, known to Grafana's types, passed by the linter."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from typing import Any

import pytest
import yaml
from grafana import build, expressions, lint
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from gpuwarden.catalogue import CATALOGUE
from gpuwarden.scheduler_metrics import SCHEDULER_METRICS

PATHS = sorted(build.FOLDER.glob("*.json"))


@pytest.fixture(params=PATHS, ids=[path.stem for path in PATHS])
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each committed board."""
    return json.loads(request.param.read_text())


def test_the_boards_are_what_the_code_builds() -> None:
    """Committed JSON and code agree byte for byte; `python -m grafana.build` mends a difference."""
    assert build.drifted() == []


def test_every_key_is_known_to_grafana(board: dict[str, Any]) -> None:
    """A board survives the SDK's types: a misspelt key would vanish on the way."""
    register_default_plugins()
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(deepcopy(board))))
    assert again == board


def test_the_linter_finds_nothing() -> None:
    """No finding is left, and no exclusion in lint.yaml is without use."""
    assert lint.report() == []


def test_nothing_that_scheduling_tells_goes_unseen() -> None:
    """Each metric of the scheduler, and of leaves, stands on a board or is watched by an alert."""
    rules = (expressions.RULES / "scheduling.yml").read_text()
    text = "\n".join([rules, *(path.read_text() for path in PATHS)])
    asked = set(re.findall(r"gpuwarden_[a-z0-9_]+", text))
    told = [metric.name for metric in SCHEDULER_METRICS]
    told += [name for name in CATALOGUE if name.startswith("gpuwarden_leave")]
    parts = ("", "_bucket", "_sum", "_count")
    unseen = [name for name in told if not {name + part for part in parts} & asked]
    assert len(told) > 25
    assert unseen == []


def test_recording_interval_is_what_the_boards_count_with() -> None:
    """Idle GPU-hours multiply samples by 15 s: the interval of the group that records them."""
    groups = yaml.safe_load((expressions.RULES / "recording.yml").read_text())["groups"]
    (interval,) = {
        group["interval"]
        for group in groups
        for rule in group["rules"]
        if rule["record"] == "user:gpus_held_idle:count"
    }
    assert interval == "15s"
