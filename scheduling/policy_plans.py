"""Plans and renderings for people and programs: what they look like on a terminal and as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gpuwarden.scheduling.engines import Act, By

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.scheduling.engines import Plan, Remark, Rendering, Step

RENDERING_SCHEMA = "gpuwarden.policy-rendering/v1"
PLAN_SCHEMA = "gpuwarden.policy-plan/v1"
_SIGNS = {Act.CREATE: "+", Act.CHANGE: "~", Act.DELETE: "-", Act.RELEASE: "<"}
_MOST_FIELDS = 40


def plan_lines(plan: Plan, remarks: tuple[Remark, ...] = ()) -> Iterator[str]:
    """A plan for people.

    Args:
        plan: what is to be done.
        remarks: what the engine cannot do of the policy.
    """
    if plan.nothing:
        yield "Nothing is to be done: the engine is as the policy wants it."
    for step in plan.steps:
        yield from _step_lines(step)
    for found in plan.in_the_way:
        yield f"! {found} is there, and not gpuwarden's: it is left as it is"
    for step in plan.by_hand:
        yield f"* by hand: {step.kind} {step.name}" + ("" if step.wanted is None else _note(step))
        yield from _field_lines(step)
    yield from remark_lines(remarks)


def remark_lines(remarks: tuple[Remark, ...]) -> Iterator[str]:
    """What an engine cannot do of a policy, for people."""
    for remark in remarks:
        yield f"? {remark.path}: {remark.text}"


def _note(step: Step) -> str:
    note = "" if step.wanted is None else step.wanted.note
    return f" ({note})" if note else ""


def _step_lines(step: Step) -> Iterator[str]:
    yield f"{_SIGNS[step.act]} {step}"
    if step.act is not Act.DELETE:
        yield from _field_lines(step)


def _field_lines(step: Step) -> Iterator[str]:
    for change in step.changes[:_MOST_FIELDS]:
        yield f"    {change}"
    if len(step.changes) > _MOST_FIELDS:
        yield f"    and {len(step.changes) - _MOST_FIELDS} more"


def plan_json(plan: Plan, rendering: Rendering | None) -> str:
    """A plan as one versioned document."""
    document: dict[str, Any] = {
        "schema": PLAN_SCHEMA,
        "engine": None if rendering is None else rendering.engine,
        "version": None if rendering is None else rendering.version,
        "steps": [_step(step) for step in plan.steps],
        "in_the_way": [{"kind": each.kind, "name": each.name} for each in plan.in_the_way],
        "by_hand": [_step(step) for step in plan.by_hand],
        "remarks": [] if rendering is None else _remarks(rendering),
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _step(step: Step) -> dict[str, Any]:
    return {
        "act": step.act,
        "kind": step.kind,
        "name": step.name,
        "note": "" if step.wanted is None else step.wanted.note,
        "changes": [
            {"field": each.field, "found": each.found, "wanted": each.wanted}
            for each in step.changes
        ],
    }


def _remarks(rendering: Rendering) -> list[dict[str, str]]:
    return [{"path": each.path, "text": each.text} for each in rendering.remarks]


def rendering_text(rendering: Rendering) -> str:
    """A rendering for people; Kubernetes' objects as one stream that kubectl takes."""
    parts = []
    for each in rendering.objects:
        note = f": {each.note}" if each.note else ""
        hand = "by hand, " if each.by is By.HAND else ""
        parts.append(f"# {hand}{each}{note}\n{each.text.rstrip()}\n")
    separator = "---\n" if rendering.engine == "kueue" else "\n"
    return separator.join(parts)


def rendering_json(rendering: Rendering) -> str:
    """A rendering as one versioned document."""
    document = {
        "schema": RENDERING_SCHEMA,
        "engine": rendering.engine,
        "version": rendering.version,
        "policy": rendering.policy,
        "objects": [
            {
                "kind": each.kind,
                "name": each.name,
                "by": each.by,
                "note": each.note,
                "text": each.text,
                "values": dict(each.values),
            }
            for each in rendering.objects
        ],
        "remarks": _remarks(rendering),
    }
    return json.dumps(document, indent=2, ensure_ascii=False)
