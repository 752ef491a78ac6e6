"""Lints of a rule's `canary`: where it tries nothing, or could never try anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.diagnostics import Severity
from gpuwarden.ruleengine.linting import Finding
from gpuwarden.ruleengine.model import Mode, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.ruleengine.model import Rule


def lint_canary(rule: Rule) -> Iterator[Finding]:
    """Lint the canary of a rule, if it has one; paths begin at the rule."""
    if rule.canary is None:
        return
    if rule.target is Target.GPU or not rule.takes:
        yield Finding(
            "GW203",
            Severity.ERROR,
            ("canary",),
            "it is a trial of ending jobs, and no stage here ends one",
        )
    elif rule.mode is not Mode.ENFORCE:
        yield Finding(
            "GW320",
            Severity.WARNING,
            ("canary",),
            f"nothing is on trial in mode {rule.mode}",
            "write mode: enforce when the trial is to begin",
        )
