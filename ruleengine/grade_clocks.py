"""How long it has been as far as a stage demands: a clock for each condition of a stage."""

from __future__ import annotations

from dataclasses import dataclass

from gpuwarden.ruleengine.verdicts import Truth

UNKNOWN_LIMIT_SECONDS = 600.0
"""Longer than this without a known verdict closes a case: nothing may hang on old knowledge."""


@dataclass(frozen=True, slots=True)
class GradeClock:
    """How long a stage's own condition has held.

    Attributes:
        key: name of the stage within its rule.
        last: its last truth: yes, no or unknown.
        held: seconds without a break; only yes runs it, no sets it back, anything else stops it.
        unknown_for: seconds since it was last known.
    """

    key: str
    last: str
    held: float = 0.0
    unknown_for: float = 0.0

    def after(self, truth: Truth, delta: float) -> GradeClock:
        """The clock one tick later, by the same rules as that of `for`.

        Args:
            truth: what is found now; time counts only between two that are the same.
            delta: seconds since the last completed tick.
        """
        now = truth.name.lower()
        same = delta if now == self.last else 0.0
        held = self.held + (same if truth is Truth.YES else 0.0)
        unknown_for = self.unknown_for + same if truth is Truth.UNKNOWN else 0.0
        if truth is Truth.NO or unknown_for > UNKNOWN_LIMIT_SECONDS:
            held = 0.0
        return GradeClock(self.key, now, held, unknown_for)
