"""What a rule file may say of a canary: on which share enforcement begins, and what ends it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictInt

from gpuwarden import durations, quantities
from gpuwarden.fields import Ratio, Seconds, Strict

MAX_WITHIN_SECONDS = 90 * 86400.0
"""Objections are remembered for at least so long, whatever `retention.audit` says."""


class BackToWarn(Strict):
    """What puts the rule back to warn by itself, until an admin says otherwise."""

    appeals: Annotated[StrictInt, Field(ge=1)]
    """Owners who object to an announced or done end: an appeal, or a keep by the owner."""
    regrets: Annotated[StrictInt, Field(ge=1)]
    """Ends that were wrong: the run was back within an hour, or an operator says so."""
    within: Annotated[Seconds, Field(gt=0, le=MAX_WITHIN_SECONDS)]
    """How far back appeals and regrets count, at most 90d; what came before an admin resumed counts
    no more."""


class Canary(Strict):
    """Enforcement on a share of the owners. No field has a default."""

    share: Annotated[Ratio, Field(gt=0, le=1)]
    """Owners whose jobs may be ended; the rule warns all others. Also the largest part of the jobs
    found within `back_to_warn.within` that is ended."""
    back_to_warn: BackToWarn
    """What ends the trial."""

    def __str__(self) -> str:
        """The canary in words: `10% of the owners, until 2 appeals or 1 regret within 7d`."""
        back = self.back_to_warn
        return (
            f"{quantities.render(self.share, quantities.Unit.RATIO)} of the owners, until "
            f"{back.appeals} appeal{'' if back.appeals == 1 else 's'} or {back.regrets} "
            f"regret{'' if back.regrets == 1 else 's'} within {durations.render(back.within)}"
        )
