"""What counts as use of a slot, for what it has cost and for giving it back."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from gpuwarden.errors import RefusedAction
from gpuwarden.scheduling.holdings import Holding
from gpuwarden.scheduling.local.scenes import Plan
from gpuwarden.scheduling.local.views import slot_use
from gpuwarden.scheduling.slots import Slot

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.scheduling.local.boxes import LabBox

START = 1_800_000_000.0
SLOT = Slot("s", "nlp", "bo", 2, "a100", START, START + 7200, 900.0)
NOW = START + 600


def held(entry: str, user: str, begun: float, *, end: float | None = None) -> Holding:
    """Two cards of a job of nlp, from so many seconds after the slot's start."""
    return Holding("local", entry, user, "nlp", 2, START + begun, end, "a100")


def test_what_the_team_ran_before_is_no_use_of_the_slot() -> None:
    """Else a slot to which nobody came would be kept to its end beside it."""
    before = [held("old", "ana", -5000), held("own", "bo", -901), held("early", "ana", -60)]
    use = slot_use(SLOT, before, Plan(kept={"s": 2}), NOW)
    assert (use.held, use.gpus, use.first_used, use.used_gpu_seconds) == (True, 0, None, 0.0)


def test_what_started_on_its_cards_is() -> None:
    """The booker's from lead time on, counted from the start; the team's others after it."""
    early = slot_use(SLOT, [held("j", "bo", -900)], Plan(kept={"s": 2}), NOW)
    assert (early.gpus, early.first_used, early.used_gpu_seconds) == (2, START, 1200.0)
    done = held("j", "ana", 60, end=START + 360)
    late = slot_use(SLOT, [done], Plan(kept={"s": 2}), NOW)
    assert (late.gpus, late.first_used, late.used_gpu_seconds) == (0, START + 60, 600.0)


def test_so_is_a_job_of_the_bookers_own_that_the_slot_protects() -> None:
    """The planner says which: a slot of the whole box over a training of one's own."""
    mine = held("own", "bo", -5000)
    use = slot_use(SLOT, [mine], Plan(kept={"s": 2}, used={"s": ("own",)}), NOW)
    assert (use.gpus, use.first_used, use.used_gpu_seconds) == (2, START, 1200.0)


def test_a_job_larger_than_its_teams_quota_is_taken_on_for_a_slot(
    open_lab: Callable[..., LabBox],
) -> None:
    """No quota binds in it: it starts when the slot does, and not before."""
    lab = open_lab(teams=[{"name": "nlp", "users": [], "quota": {"a100": 1}}])
    now = lab.clock.wall()
    with pytest.raises(RefusedAction, match="1 cards of a kind at most"):
        lab.submit("wide", team="nlp", gpus=2)
    slot = dataclasses.replace(SLOT, who="ana", start=now + 3600, end=now + 7200, lead_seconds=60)
    lab.driver.book((dataclasses.replace(slot, team="other"),), now)
    with pytest.raises(RefusedAction):
        lab.submit("wide", team="nlp", gpus=2)
    lab.driver.book((slot,), now)
    wide = lab.submit("wide", team="nlp", gpus=2, not_before=slot.start)
    lab.tick()
    assert lab.state_of(wide) == "pending"
    lab.tick(3601)
    lab.until(lambda: lab.state_of(wide) == "running")
