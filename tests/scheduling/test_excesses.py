"""What teams hold is counted by ourselves, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.scheduling.daemon_scenes import POLICY as TEXT
from tests.scheduling.daemons import running
from tests.scheduling.policy_files import NOW, a_policy

from gpuwarden.schedule_api import EntryState, QueueEntry
from gpuwarden.scheduling.excesses import SETTLED_SECONDS, excesses
from gpuwarden.scheduling.slots import Slot

if TYPE_CHECKING:
    from pathlib import Path

POLICY = a_policy()
TEAM = POLICY.teams[0]
CARD = next(iter(TEAM.quota))
MOST = TEAM.most(CARD)


def entry(number: int, gpus: int = 1, **others: object) -> QueueEntry:
    """A job of the first team that has run for ten minutes."""
    chosen: dict[str, object] = {
        "engine": "kueue",
        "id": str(number),
        "name": "a",
        "user": "ana",
        "state": EntryState.RUNNING,
        "gpus": gpus,
        "submitted": NOW - 700,
        "started": NOW - 600,
        "team": TEAM.name,
        "gpu_type": CARD,
    }
    return QueueEntry(**(chosen | others))  # type: ignore[arg-type]


def test_a_queue_beyond_its_capability_is_told_of() -> None:
    """Volcano #1860: the engine says that all is well, and the team holds one card too many."""
    full = [entry(1, MOST - 1), entry(2)]
    assert excesses(full, (), POLICY, NOW) == ()
    (words,) = excesses([*full, entry(3)], (), POLICY, NOW)
    assert words.startswith(f"team {TEAM.name} holds {MOST + 1} cards of {CARD}, and")
    assert f" are {MOST}:" in words
    leaving = entry(3, state=EntryState.LEAVING)
    assert excesses([*full, leaving], (), POLICY, NOW), "who leaves holds its cards still"


def test_what_holds_no_card_or_has_just_begun_is_not_counted() -> None:
    """Whoever made way may be on its way out; of unknown teams and cards nothing is known."""
    full = entry(1, MOST)
    for other in (
        entry(2, state=EntryState.PENDING, started=None),
        entry(2, state=EntryState.DONE),
        entry(2, state=EntryState.SUSPENDED),
        entry(2, started=NOW - SETTLED_SECONDS + 1),
        entry(2, 99, team="others"),
        entry(2, 99, gpu_type=""),
    ):
        assert excesses([full, other], (), POLICY, NOW) == ()


def test_in_its_slot_a_team_may_hold_more() -> None:
    """As long as it lasts, and of its kind of cards."""
    jobs = [entry(1, MOST), entry(2, 2)]
    slot = Slot("b1", TEAM.name, "ana", 2, CARD, NOW - 3600, NOW + 1, 900.0)
    assert excesses(jobs, (slot,), POLICY, NOW) == ()
    assert len(excesses(jobs, (slot,), POLICY, NOW + 1)) == 1


def test_the_daemon_tells_of_it(tmp_path: Path) -> None:
    """As a problem, as long as it lasts."""
    with running(tmp_path, TEXT, now=NOW) as here:
        here.driver.rows = (entry(1, MOST + 1),)
        here.tick(5)
        assert [each.code for each in here.client.schedule().problems] == ["quota_exceeded"]
        here.driver.rows = (entry(1, MOST),)
        here.tick(5)
        assert here.client.schedule().problems == ()
