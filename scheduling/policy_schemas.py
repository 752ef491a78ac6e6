"""The JSON schema of policy files, for editors; `policy.schema.json` is generated."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from gpuwarden import durations
from gpuwarden.scheduling.policies import Policy


def policy_document() -> dict[str, Any]:
    """The schema as a document."""
    schema = Policy.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "gpuwarden policy"
    schema["description"] = (
        "Who may use how many GPUs, whose task goes first, and how jobs are asked to leave."
    )
    for definition in (schema, *schema["$defs"].values()):
        for field in definition.get("properties", {}).values():
            default = field.get("default")
            # Read into seconds and ratios, but written as text; a part's default is in its parts.
            if field.get("type") == "string" and isinstance(default, float):
                field["default"] = durations.render(default)
            elif field.get("type") == "array" and field["items"].get("type") == "string":
                field["default"] = [_written(item) for item in default or ()]
            if isinstance(default, (dict, BaseModel)) or field.get("default") == []:
                del field["default"]
    return schema


def _written(item: object) -> object:
    return f"{item:.0%}" if isinstance(item, float) else item


def policy_schema() -> str:
    """The schema as JSON text, ending with a newline."""
    return json.dumps(policy_document(), indent=2) + "\n"
