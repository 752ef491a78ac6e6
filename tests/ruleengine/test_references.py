"""What is generated from the types is what is committed, and is true of the files that we ship."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from gpuwarden.ruleengine.codes import CODES
from gpuwarden.ruleengine.loading import check_rule_files
from gpuwarden.ruleengine.references import rule_reference
from gpuwarden.ruleengine.schemas import rule_file_schema

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "ruleengine" / "rules").glob("*.yaml"))


def test_the_committed_schema_is_that_of_the_types() -> None:
    """Regenerate with `gpuwarden rules schema > ruleengine/schema.json`."""
    assert (ROOT / "ruleengine" / "schema.json").read_text() == rule_file_schema()


def test_the_committed_reference_is_that_of_the_types() -> None:
    """Regenerate with `gpuwarden rules reference > docs/rules.md`."""
    assert (ROOT / "docs" / "rules.md").read_text() == rule_reference()


def test_every_code_that_is_used_is_documented_and_no_other() -> None:
    """A code in a message leads to its meaning."""
    used: set[str] = set()
    for path in [ROOT / "src" / "gpuwarden" / "yaml_files.py", *(ROOT / "ruleengine").glob("*.py")]:
        if path.name != "codes.py":
            used |= set(re.findall(r'"(GW[0-9]{3})"', path.read_text()))
    assert used == set(CODES)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_editors_accept_what_the_engine_accepts(path: Path) -> None:
    """The schema does not redden a file that is right."""
    jsonschema.validate(yaml.safe_load(path.read_text()), json.loads(rule_file_schema()))


def test_the_schema_knows_what_is_wrong() -> None:
    """Units, words and keys are checked while one types."""
    wrong = {
        "version": 1,
        "rules": [
            {
                "id": "x",
                "target": "job",
                "cold_start": 60,
                "when": {"silent_for": "5m", "signals": ["cpu"]},
                "for": "5m",
                "stages": [{"level": "light", "after": "0s", "do": "kill", "why": 1}],
            }
        ],
    }
    validator = jsonschema.Draft202012Validator(json.loads(rule_file_schema()))
    places = {".".join(map(str, error.absolute_path)) for error in validator.iter_errors(wrong)}
    assert places == {"rules.0.cold_start", "rules.0.stages.0", "rules.0.stages.0.do"}


def test_the_shipped_rules_have_no_findings_and_end_nothing() -> None:
    """They observe until an operator says otherwise."""
    checked = check_rule_files(SHIPPED)
    assert checked.render() == ""
    assert checked.rules is not None
    assert not [rule.id for rule in checked.rules.rules if rule.mode != "observe"]
