"""The API's description in OpenAPI 3.1, made from the table that the routes are made from."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from gpuwarden import __version__
from gpuwarden.ruleengine.api_models import Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.ruleengine.operations import Operation

PATH = "/v1/openapi.json"
_REF = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"\{([a-z_]+)\}")
_FAILURE = TypeAdapter(Failure)
_UNWRITTEN = {503: "The ledger cannot be written: nothing was done."}
_COMMON = {401: "Nobody who is known asks.", 403: "Who asks may not."}


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    """The description of these operations.

    Args:
        operations: in the order in which they are listed.
    """
    shapes: dict[tuple[str, str], TypeAdapter[Any]] = {("Failure", "serialization"): _FAILURE}
    for number, operation in enumerate(operations):
        if operation.answer is not None:
            shapes[f"answer{number}", "serialization"] = operation.answer
        if operation.body is not None:
            shapes[f"body{number}", "validation"] = operation.body
    schemas, definitions = TypeAdapter.json_schemas(
        [(key, mode, adapter) for (key, mode), adapter in shapes.items()],  # type: ignore[misc]
        ref_template=_REF,
    )
    found = {(str(key), str(mode)): schema for (key, mode), schema in schemas.items()}
    paths: dict[str, dict[str, Any]] = {}
    for number, operation in enumerate(operations):
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(
            operation,
            answer=found.get((f"answer{number}", "serialization")),
            body=found.get((f"body{number}", "validation")),
            failure=found["Failure", "serialization"],
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gpuwarden's rule engine",
            "version": __version__,
            "description": "What the engine knows and does. Names and types are kept within v1; "
            "fields may be added. Times are RFC 3339 in UTC, durations seconds.",
        },
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(
    operation: Operation,
    *,
    answer: dict[str, Any] | None,
    body: dict[str, Any] | None,
    failure: dict[str, Any],
) -> dict[str, Any]:
    reading = operation.method == "GET" and operation.least is not None
    takes = operation.opened_by or (
        "" if operation.least is None else f"Takes the role {operation.least}."
    )
    # An empty requirement says that it may also be open: that depends on engine.yaml.
    security: list[dict[str, Any]] = [{"token": []}] if takes else []
    content = {} if answer is None else {"content": {"application/json": {"schema": answer}}}
    writes = {} if operation.method == "GET" else _UNWRITTEN
    failures = {**(_COMMON if takes else {}), **writes, **operation.refusals}
    found: dict[str, Any] = {
        "operationId": _name(operation),
        "summary": operation.summary,
        "parameters": _parameters(operation),
        "responses": {
            str(operation.status): {"description": "Done.", **content},
            **{
                str(status): {
                    "description": when,
                    "content": {"application/json": {"schema": failure}},
                }
                for status, when in sorted(failures.items())
            },
        },
        "security": [*([{}] if reading else []), *security],
    }
    if takes:
        found["description"] = takes
    if body is not None:
        found["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    return found


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    inside = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(operation.path)
    ]
    asked = [
        {"name": name, "in": "query", "description": words, "schema": {"type": kind}}
        for name, (kind, words) in operation.parameters.items()
    ]
    return [*inside, *asked]


def _name(operation: Operation) -> str:
    words = re.findall(r"[a-z]+", operation.path.removeprefix("/v1"))
    return "_".join([operation.method.lower(), *words])
