"""The JSON schema of rule files, for editors; `schema.json` is generated and checked for drift."""

from __future__ import annotations

import json

from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.model import RuleSet


def rule_file_schema() -> str:
    """The schema as JSON text, ending with a newline."""
    schema = RuleSet.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "gpuwarden rule file"
    schema["description"] = "Rules, profiles and the whitelist of gpuwarden's rule engine."
    named = schema["$defs"]["Signal"]["properties"]["signal"]
    named["enum"] = list(signals.SIGNALS)
    return json.dumps(schema, indent=2) + "\n"
