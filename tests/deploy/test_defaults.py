"""The rules that gpuwarden comes with, and Grafana's provisioning."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from gpuwarden.ruleengine.directories import Directory
from gpuwarden.ruleengine.loading import load_rule_files
from gpuwarden.ruleengine.model import Mode
from gpuwarden.ruleengine.settings import EngineSettings

ROOT = Path(__file__).parents[2]
RULES = sorted((ROOT / "ruleengine" / "rules").glob("*.yaml"))


def test_the_shipped_rules_load_together_and_end_nothing() -> None:
    """Every shipped rule is on trial: an installation acts only once somebody says so."""
    loaded = load_rule_files(RULES)
    assert {rule.mode for rule in loaded.rules} == {Mode.OBSERVE}
    assert all(rule.description for rule in loaded.rules)
    assert loaded.limits is not None
    assert loaded.profiles


def test_shipped_rules_can_be_enforced_as_they_are(tmp_path: Path) -> None:
    """Raising the mode is all that it takes, and owners then have an hour or more to react."""
    for path in RULES:
        text = path.read_text().replace("mode: observe", "mode: enforce")
        (tmp_path / path.name).write_text(text)
    loaded = load_rule_files(sorted(tmp_path.glob("*.yaml")))
    ends = [stage for rule in loaded.rules for stage in rule.stages if stage.do == "terminate"]
    assert ends
    assert all(stage.notice_delivered_for >= 3600 for stage in ends)


def test_boards_are_provisioned_read_only_from_their_folder() -> None:
    """What the code builds is what is shown: nobody can save another board over it."""
    folder = ROOT / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((folder / "dashboards/gpuwarden.yaml").read_text())["providers"]
    assert provider["allowUiUpdates"] is False
    sources = yaml.safe_load((folder / "datasources/gpuwarden.yaml").read_text())["datasources"]
    assert all(source["editable"] is False for source in sources)
    kinds = {source["type"] for source in sources}
    for path in (ROOT / "grafana" / "dashboards").glob("*.json"):
        variables = json.loads(path.read_text())["templating"]["list"]
        wanted = {one["query"] for one in variables if one["type"] == "datasource"}
        assert wanted <= kinds


def _keys(model: type[BaseModel]) -> set[str]:
    """Every key that a file of this shape may have, at any depth."""
    keys, waiting, seen = set(), [model], {model}
    while waiting:
        for name, field in waiting.pop().model_fields.items():
            keys.add(field.alias or name)
            parts: list[object] = [field.annotation]
            for part in parts:
                parts += typing.get_args(part)
                if isinstance(part, type) and issubclass(part, BaseModel) and part not in seen:
                    seen.add(part)
                    waiting.append(part)
    return keys


@pytest.mark.parametrize(
    ("name", "model"), [("engine.yaml", EngineSettings), ("directory.yaml", Directory)]
)
def test_the_example_has_every_key(name: str, model: type[BaseModel]) -> None:
    """Commented out where it is seldom wanted: who looks for a setting finds it there."""
    text = (ROOT / "deploy" / "examples" / name).read_text()
    keys = _keys(model)
    assert len(keys) > 8
    assert [key for key in sorted(keys) if not re.search(rf"\b{key}:", text)] == []
