"""What a Job of anybody may ask for in the teams' queues, as policies of the API server. Pure.

`gpuwarden submit` keeps to the policy by itself; whoever writes a Job with kubectl is held to it by
two ValidatingAdmissionPolicies: one on Jobs, whose words its writer sees at once, and one on
Workloads, which Kueue makes of whatever else it queues. Looked at is only what is new: a Job that
was taken on, and that Kueue starts and stops, is not refused because the policy has changed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.scheduling.kueue import names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gpuwarden.scheduling.policies import Policy

Body = dict[str, Any]

ACTIONS: Final = {"deny": ["Deny"], "warn": ["Warn", "Audit"]}
_LISTED: Final = 600
"""Characters of names in a message, which may have 5 KiB."""
_NAMESPACE_LABEL: Final = "kubernetes.io/metadata.name"
_RULE_OF: Final = {
    "jobs": ("batch", "v1"),
    "workloads": ("kueue.x-k8s.io", "v1beta2"),
}
_SPACE: Final = "namespaceObject.metadata.name"
"""`request.namespace` cannot be said: `namespace` is a reserved word of CEL."""
_QUEUE: Final = json.dumps(names.QUEUE)
_LABELS: Final = "(has({0}.metadata.labels) ? {0}.metadata.labels : {{}})"


def admissions(policy: Policy) -> Iterator[Body]:
    """The admission policies of the teams' namespaces, and their bindings; nothing without them."""
    if policy.kueue.admission == "none":
        return
    bodies = (_jobs(policy), _workloads(policy))
    yield from bodies
    for body in bodies:
        name = body["metadata"]["name"]
        yield {
            "apiVersion": names.ADMISSION,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": name, "labels": names.marks(policy)},
            "spec": {"policyName": name, "validationActions": ACTIONS[policy.kueue.admission]},
        }


def _jobs(policy: Policy) -> Body:
    queue, label = _literal(names.QUEUE_LABEL), _literal(names.PRIORITY_LABEL)
    variables: dict[str, str] = {}
    for source in ("object", "oldObject"):
        names_of = {
            part: part[0].lower() + part[1:] if source == "object" else f"old{part}"
            for part in ("Labels", "Spec", "Class", "PodClass", "Images")
        }
        labels, spec = (f"variables.{names_of[part]}" for part in ("Labels", "Spec"))
        variables |= {
            names_of["Labels"]: _LABELS.format(source),
            names_of["Spec"]: f"{source}.spec.template.spec",
            names_of["Class"]: f"{label} in {labels} ? {labels}[{label}] : ''",
            names_of["PodClass"]: f"has({spec}.priorityClassName) ? {spec}.priorityClassName : ''",
            names_of["Images"]: " + ".join(_images_of(spec)),
        }
    # There is no old object where one is made: what is not looked at is not evaluated.
    ours = f"{queue} in variables.oldLabels && variables.oldLabels[{queue}] == {_QUEUE}"
    variables["oldOurs"] = f"request.operation == 'UPDATE' && {ours}"
    known = "variables.oldOurs && variables.old{0} == variables.{1}"
    return _admission(
        policy,
        "jobs",
        condition=f"{queue} in {_LABELS.format('object')} && "
        f"object.metadata.labels[{queue}] == {_QUEUE}",
        variables=variables,
        rules=[
            _class_rule(policy, known.format("Class", "class")),
            _pod_class_rule(
                policy,
                known.format("PodClass", "podClass"),
                f"variables.podClass in {_literal(['', *policy.kueue.pod_priorities])}",
            ),
            *_image_rules(
                policy,
                known.format("Images", "images"),
                "variables.images.all(image, image in {0})",
                "variables.images.filter(image, !(image in {0}))[0]",
            ),
        ],
    )


def _workloads(policy: Policy) -> Body:
    group = "kueue.x-k8s.io"
    variables = {
        "old": "request.operation == 'UPDATE'",
        "class": _class_of("object", group),
        "oldClass": f"variables.old ? {_class_of('oldObject', group)} : ''",
    }
    same = "variables.old && oldObject.spec.podSets == object.spec.podSets"
    pods = "object.spec.podSets.all(part, {0})"
    allowed = _literal(["", *policy.kueue.pod_priorities])
    own = "(has({0}.priorityClassName) ? {0}.priorityClassName : '')".format("part.template.spec")
    every = "part.template.spec.{0}.all(each, has(each.image) && each.image in {{0}})"
    containers = (
        every.format("containers"),
        f"(!has(part.template.spec.initContainers) || {every.format('initContainers')})",
    )
    return _admission(
        policy,
        "workloads",
        condition=f"has(object.spec.queueName) && object.spec.queueName == {_QUEUE}",
        variables=variables,
        rules=[
            _class_rule(policy, "variables.old && variables.oldClass == variables.class"),
            _pod_class_rule(policy, same, pods.format(f"{own} in {allowed}")),
            *_image_rules(policy, same, pods.format(" && ".join(containers)), "''"),
        ],
    )


def _class_of(source: str, group: str) -> str:
    """The WorkloadPriorityClass of a Workload; a PriorityClass of its pods is looked at in them."""
    ref = f"{source}.spec.priorityClassRef"
    return f"(has({ref}) && {ref}.group == '{group}' ? {ref}.name : '')"


def _images_of(spec: str) -> list[str]:
    image = "each, has(each.image) ? each.image : ''"
    return [
        f"{spec}.containers.map({image})",
        f"(has({spec}.initContainers) ? {spec}.initContainers.map({image}) : [])",
    ]


def _class_rule(policy: Policy, known: str) -> Body:
    allowed, told = {}, {}
    for team in sorted(policy.teams, key=lambda team: team.name):
        own = sorted(each.name for each in policy.priorities if team.may_choose(each.name))
        found = [names.priority_name(policy, each) for each in own]
        allowed[team.namespace] = ["", *found]
        told[team.namespace] = f"team {team.name} has {_listed(found)}"
    return {
        "expression": f"({known}) || variables.class in {_literal(allowed)}[{_SPACE}]",
        "message": "its priority class is none that this namespace's team may choose",
        "messageExpression": f"'the priority class ' + variables.class + ' is not to be chosen "
        f"here: ' + {_literal(told)}[{_SPACE}] + ' (label {names.PRIORITY_LABEL})'",
        "reason": "Forbidden",
    }


def _pod_class_rule(policy: Policy, known: str, allowed: str) -> Body:
    listed = _listed(policy.kueue.pod_priorities) or "none"
    return {
        "expression": f"({known}) || {allowed}",
        "message": "its pods name a priorityClassName, by which they would pass others or push "
        f"them from their nodes without a notice: of those {listed} is allowed (kueue."
        f"pod_priorities of the policy); priorities are named by the label {names.PRIORITY_LABEL}",
        "reason": "Forbidden",
    }


def _image_rules(policy: Policy, known: str, allowed: str, first: str) -> Iterator[Body]:
    """Only images of the catalogue, where the policy has one."""
    if not policy.images:
        return
    images = _literal(sorted({each.image for each in policy.images}))
    listed = _listed(sorted(each.name for each in policy.images))
    words = f"is not one of the policy, pinned by its digest: there are {listed}; "
    words += "`gpuwarden submit --image NAME` takes one"
    rule: Body = {
        "expression": f"({known}) || {allowed.format(images)}",
        "message": f"an image of it {words}",
        "reason": "Forbidden",
    }
    if first != "''":
        text = f"'the image ' + {first.format(images)} + {_literal(' ' + words)}"
        rule["messageExpression"] = text
    yield rule


def _admission(
    policy: Policy, what: str, *, condition: str, variables: dict[str, str], rules: Sequence[Body]
) -> Body:
    group, version = _RULE_OF[what]
    spaces = sorted({team.namespace for team in policy.teams})
    return {
        "apiVersion": names.ADMISSION,
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {
            "name": names.admission_name(policy, what),
            "labels": names.marks(policy),
        },
        "spec": {
            # What cannot be judged is not let in: a rule that fails is a fault of ours.
            "failurePolicy": "Fail",
            "matchConstraints": {
                "matchPolicy": "Equivalent",
                "namespaceSelector": {
                    "matchExpressions": [
                        {"key": _NAMESPACE_LABEL, "operator": "In", "values": spaces}
                    ]
                },
                "resourceRules": [
                    {
                        "apiGroups": [group],
                        "apiVersions": [version],
                        "operations": ["CREATE", "UPDATE"],
                        "resources": [what],
                        "scope": "Namespaced",
                    }
                ],
            },
            "matchConditions": [{"name": "queue", "expression": condition}],
            "variables": [{"name": name, "expression": text} for name, text in variables.items()],
            "validations": list(rules),
        },
    }


def _literal(value: Any) -> str:
    """A value in CEL, whose literals of texts, lists and maps are those of JSON."""
    return json.dumps(value, ensure_ascii=False)


def _listed(texts: Iterable[str]) -> str:
    found = ", ".join(texts)
    return found if len(found) <= _LISTED else f"{found[:_LISTED]}..."
