"""ValidatingAdmissionPolicies of the fake API server: their CEL is evaluated, requests are refused.

As a real server does for what the tests apply: policies count by their bindings, variables are
evaluated when they are first used, a failing expression refuses (`failurePolicy: Fail`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import celpy
from celpy.adapter import json_to_cel
from tests.kubernetes_store import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.kubernetes_store import Json, Resource, Store

LOOKED_AT = frozenset({"Job", "Workload"})
"""Kinds for which policies are looked for: most requests of the tests are of others."""


def admit(
    store: Store, resource: Resource, namespace: str | None, *, found: Json, before: Json | None
) -> list[str]:
    """Look at an object that is to be written.

    Args:
        store: with the policies.
        resource: of the object.
        namespace: of it.
        found: as it would be.
        before: as it is, or None where it is made.

    Returns:
        Warnings.

    Raises:
        Refusal: 403, of a policy that denies it.
    """
    if resource.kind not in LOOKED_AT or namespace is None:
        return []
    policies = {
        item["metadata"]["name"]: item["spec"] for item in store.all("ValidatingAdmissionPolicy")
    }
    warnings = []
    for item in store.all("ValidatingAdmissionPolicyBinding"):
        spec = policies.get(item["spec"]["policyName"])
        if spec is None or not _concerns(spec, resource, namespace, before):
            continue
        for message in denials(spec, namespace, found, before):
            names = (item["spec"]["policyName"], item["metadata"]["name"])
            said = f"ValidatingAdmissionPolicy '{names[0]}' with binding '{names[1]}' denied "
            title = f'{resource.title()} "{found["metadata"].get("name", "")}" is forbidden'
            if "Deny" in item["spec"]["validationActions"]:
                raise Refusal(403, "Forbidden", f"{title}: {said}request: {message}")
            warnings.append(message)
    return warnings


def denials(spec: Json, namespace: str, found: Json, before: Json | None) -> list[str]:
    """What a policy says against an object; nothing where it lets it pass.

    Args:
        spec: of the policy.
        namespace: of the object.
        found: the object.
        before: as it is, or None where it is made.
    """
    facts = {
        "object": json_to_cel(found),
        "oldObject": json_to_cel(before),
        "request": json_to_cel({"operation": "CREATE" if before is None else "UPDATE"}),
        "namespaceObject": json_to_cel({"metadata": {"name": namespace}}),
    }
    for condition in spec.get("matchConditions", ()):
        if not _evaluated(condition["expression"], facts, {}):
            return []
    variables = {item["name"]: item["expression"] for item in spec.get("variables", ())}
    said = []
    for rule in spec["validations"]:
        if not _evaluated(rule["expression"], facts, variables):
            words = rule.get("messageExpression")
            told = str(_evaluated(words, facts, variables)) if words else ""
            said.append(told or rule["message"])
    return said


def _concerns(spec: Json, resource: Resource, namespace: str, before: Json | None) -> bool:
    constraints = spec["matchConstraints"]
    operation = "CREATE" if before is None else "UPDATE"
    group, _, version = resource.api_version.rpartition("/")
    rules = any(
        group in rule["apiGroups"]
        and version in rule["apiVersions"]
        and resource.plural in rule["resources"]
        and operation in rule["operations"]
        for rule in constraints["resourceRules"]
    )
    spaces = constraints["namespaceSelector"]["matchExpressions"]
    return rules and all(namespace in each["values"] for each in spaces)


class _Variables:
    """Variables by name, each evaluated when it is first used, as a server does."""

    def __init__(self, expressions: Mapping[str, str], facts: Mapping[str, Any]) -> None:
        self._expressions = expressions
        self._facts = facts
        self.known: dict[str, Any] = {}

    def used_by(self, expression: str) -> dict[str, Any]:
        """What an expression uses, directly or not; what cannot be evaluated is left out."""
        for name, text in self._expressions.items():
            if name not in self.known and f"variables.{name}" in expression:
                inner = self.used_by(text)
                try:
                    self.known[name] = _run(
                        text, {**self._facts, "variables": celpy.celtypes.MapType(inner)}
                    )
                except celpy.CELEvalError:
                    continue
        return dict(self.known)


def _evaluated(expression: str, facts: Mapping[str, Any], variables: Mapping[str, str]) -> Any:
    known = _Variables(variables, facts).used_by(expression)
    return _run(expression, {**facts, "variables": celpy.celtypes.MapType(known)})


def _run(expression: str, facts: Mapping[str, Any]) -> Any:
    return _program(expression).evaluate(dict(facts))


@lru_cache(maxsize=256)
def _program(expression: str) -> celpy.Runner:
    return _environment().program(_environment().compile(expression))


@lru_cache(maxsize=1)
def _environment() -> celpy.Environment:
    return celpy.Environment()
