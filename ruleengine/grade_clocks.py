"""How long it has been as far as a stage demands: a clock for each condition of a stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuwarden.ruleengine.verdicts import Truth

UNKNOWN_LIMIT_SECONDS = 600.0
"""Longer than this without a known verdict closes a case: nothing may hang on old knowledge."""


@dataclass(frozen=True, slots=True)
class GradeClock:
    """How long a stage's own condition has held.

    Attributes:
        key: name of the stage within its rule.
        last: its last truth: yes, no or unknown, or word: only what the job says of itself stands
            against a yes.
        held: seconds of yes. Until the rule's `for` is met a no sets it back at once, then only
            one that lasts for the rule's `clear_after`; anything else stops it.
        no_for: seconds of no since the last yes.
        unknown_for: seconds since it was last known.
    """

    key: str
    last: str
    held: float = 0.0
    no_for: float = 0.0
    unknown_for: float = 0.0

    def after(self, truth: Truth, delta: float, *, needed: float, clear_after: float) -> GradeClock:
        """The clock one tick later, by the same rules as those of a case.

        Args:
            truth: what is found now; time counts only between two that are the same.
            delta: seconds since the last completed tick.
            needed: the rule's `for`.
            clear_after: the rule's.
        """
        now = truth.word
        same = delta if now == self.last else 0.0
        held, no_for, unknown_for = self.held, self.no_for, 0.0
        match truth:
            case Truth.YES:
                held, no_for = held + same, 0.0
            case Truth.NO:
                no_for += same
            case Truth.UNKNOWN:
                unknown_for = self.unknown_for + same
        broken = truth is Truth.NO and (held < needed or no_for >= clear_after)
        if broken or unknown_for > UNKNOWN_LIMIT_SECONDS:
            held = 0.0
        return GradeClock(self.key, now, held, no_for, unknown_for)

    def stopped(self) -> GradeClock:
        """The clock one tick later, where only the job's word stands against a yes."""
        return replace(self, last="word")
