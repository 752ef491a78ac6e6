"""The JSON schema of rule files, for editors; `schema.json` is generated and checked for drift."""

from __future__ import annotations

import json
from typing import Any

from gpuwarden import durations
from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.model import RuleSet


def rule_file_document() -> dict[str, Any]:
    """The schema as a document."""
    schema = RuleSet.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "gpuwarden rule file"
    schema["description"] = "Rules, profiles and the whitelist of gpuwarden's rule engine."
    schema["$defs"]["Signal"]["properties"]["signal"]["enum"] = list(signals.SIGNALS)
    for definition in (schema, *schema["$defs"].values()):
        for field in definition.get("properties", {}).values():
            # Durations are read into seconds, but written as text.
            if field.get("type") == "string" and isinstance(field.get("default"), float):
                field["default"] = durations.render(field["default"])
    return schema


def rule_file_schema() -> str:
    """The schema as JSON text, ending with a newline."""
    return json.dumps(rule_file_document(), indent=2) + "\n"
