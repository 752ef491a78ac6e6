"""Who has to leave is asked once, by the signal that he asked for, and it is on disk before."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.scheduling.slurm.tasks import box_policy
from tests.scheduling.slurm.test_bookings import a_slot
from tests.scheduling.slurm.test_queue import NODE, a_job

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.schedule_api import Cause, Outcome
from gpuwarden.scheduling.slurm import memories
from gpuwarden.scheduling.slurm.askings import DOUBT_SECONDS, HEED_SECONDS, Asking
from gpuwarden.scheduling.slurm.clusters import Cluster
from gpuwarden.scheduling.slurm.notices import Answered, Notices, Why, attempt_of
from gpuwarden.scheduling.slurm.queues import Reading
from gpuwarden.scheduling.slurm.receipts import Signs
from gpuwarden.scheduling.slurm.slot_desks import SlotDesk
from gpuwarden.slurm_commands import SlurmCommands

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gpuwarden.platforms.slurm_listings import ListedJob

NOW = 1_800_000_000.0
DEADLINE = 1200.0
"""Of the policy, in seconds."""
WHY = Why(Cause.WINDOW, "off-peak")
ASKS = "#!/bin/sh\n#SBATCH --signal=USR1@60\n"


def running(number: int = 1, **changes: object) -> ListedJob:
    """A job of the trainer's run exp-1, which runs since ten minutes."""
    usual = {"state": "RUNNING", "comment": "gpuwarden:token123:run=exp-1", "start_time": NOW - 600}
    return a_job(number, **(usual | changes))  # type: ignore[arg-type]


class Desk:
    """Notices at a Slurm whose jobs have a script, and what `scancel` was told.

    Attributes:
        calls: file with what `scancel` was told.
        folder: of all of it.
        notices: of the scheduler that runs.
        disk: whether there is room on it.
        signs: what the trainer says.
        cluster: its commands.
    """

    def __init__(self, folder: Path, script: str, scancel: str = "exit 0") -> None:
        self.calls = folder / "calls"
        self.folder = folder
        self.disk = True
        self.signs: Signs | None = None
        (folder / "script").write_text(script)
        for name, text in (
            ("scontrol", f'cat "{folder}/script"'),
            ("scancel", f'echo "$@" >> "{self.calls}"; {scancel}'),
        ):
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
        programs = {name: folder / name for name in ("scontrol", "scancel")}
        self.cluster = Cluster(SlurmCommands(programs, None, 20.0))
        self.notices = self.begin({})

    def begin(self, asked: Mapping[str, Asking]) -> Notices:
        """A scheduler that finds these on its disk."""
        self.notices = Notices(self.cluster, asked, keep=self._keep, signs=self._said)
        return self.notices

    def again(self) -> Notices:
        """One that was ended, and is started anew."""
        return self.begin(memories.load(self.folder).asked)

    def ask(self, job: ListedJob, now: float) -> Answered:
        """Ask one job."""
        (answer,) = self.notices.ask([(job, WHY)], box_policy(), now)
        return answer

    def sent(self) -> list[str]:
        """Each call of `scancel`."""
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    def _keep(self) -> bool:
        if self.disk:
            memories.save(self.folder, memories.Memory(asked=dict(self.notices.asked)))
        return self.disk

    def _said(self, _job: ListedJob, run_id: str | None) -> Signs | None:
        assert run_id == "exp-1"
        return self.signs


def test_a_job_gets_the_signal_that_it_asked_for(tmp_path: Path) -> None:
    """Once, to its batch shell or its steps as it said; then it is told of."""
    desk = Desk(tmp_path, "#!/bin/sh\n#SBATCH --signal=B:USR2@60\nexec train\n")
    assert desk.ask(running(), NOW) is Answered.ASKED
    assert desk.ask(running(), NOW + 5) is Answered.BEFORE
    assert [call.split() for call in desk.sent()] == [["--batch", "--signal=USR2", "1"]]
    (preemption,) = desk.notices.preemptions(NOW)
    assert (preemption.victim, preemption.cause) == ("1", Cause.WINDOW)
    assert preemption.steps == {"notified": NOW}
    desk.notices.observe([running()], NOW + 60)
    assert desk.notices.preemptions(NOW + 60)[0].outcome is Outcome.OPEN
    assert desk.notices.preemptions(NOW + DEADLINE + 1)[0].outcome is Outcome.OVERDUE
    desk.notices.observe([a_job(1)], NOW + 1300)
    (preemption,) = desk.notices.preemptions(NOW + 1300)
    assert preemption.outcome is Outcome.DONE
    assert preemption.steps["left"] == NOW + 1300


def test_the_components_of_one_job_are_asked_as_one(tmp_path: Path) -> None:
    """They have one script, to which Slurm passes whatever is sent to any of them."""
    desk = Desk(tmp_path, ASKS)
    parts = [
        running(7 + offset, het_job_id=7, het_job_offset=offset, start_time=NOW - 600)
        for offset in (0, 1)
    ]
    answers = desk.notices.ask([(part, WHY) for part in parts], box_policy(), NOW)
    assert answers == [Answered.ASKED] * 2
    assert desk.ask(parts[1], NOW + 5) is Answered.BEFORE
    assert desk.sent() == ["--signal=USR1 7+0"]
    desk.notices.observe(parts[1:], NOW + 9)
    assert desk.notices.preemptions(NOW + 9)[0].outcome is Outcome.OPEN
    desk.notices.observe([], NOW + 10)
    assert desk.notices.preemptions(NOW + 10)[0].outcome is Outcome.DONE


def test_what_the_trainer_said_of_its_end_is_told(tmp_path: Path) -> None:
    """When it took note, and when the state with which it left was on disk."""
    desk = Desk(tmp_path, ASKS)
    desk.ask(running(), NOW)
    desk.notices.observe([running()], NOW + 1)
    desk.signs = Signs(acknowledged=NOW + 2, saved=NOW + 30)
    desk.notices.observe([], NOW + 35)
    (preemption,) = desk.notices.preemptions(NOW + 40)
    assert list(preemption.steps.items()) == [
        ("notified", NOW),
        ("acknowledged", NOW + 2),
        ("saved", NOW + 30),
        ("left", NOW + 35),
    ]
    assert preemption.lost_seconds == 0.0


def test_a_job_that_has_just_begun_is_asked_later(tmp_path: Path) -> None:
    """It does not heed its signal yet, and would die of it."""
    desk = Desk(tmp_path, ASKS)
    begun = running(start_time=NOW - 5)
    assert desk.ask(begun, NOW) is Answered.EARLY
    assert not desk.sent()
    assert desk.ask(begun, NOW + 55) is Answered.ASKED


def test_a_job_that_expects_no_signal_is_sent_none(tmp_path: Path) -> None:
    """It would be its end."""
    desk = Desk(tmp_path, "#!/bin/sh\nexec train # --signal=USR1\n")
    assert desk.ask(running(), NOW) is Answered.DEAF
    assert not desk.sent()
    assert desk.notices.preemptions(NOW) == ()


def test_what_slurm_refused_is_tried_again(tmp_path: Path) -> None:
    """And is no notice."""
    desk = Desk(tmp_path, ASKS, "echo 'error: Invalid job id specified' >&2; exit 1")
    for _ in range(2):
        assert desk.ask(running(), NOW) is Answered.FAILED
        assert desk.notices.failed.pop("1") == "error: Invalid job id specified"
    assert len(desk.sent()) == 2
    assert desk.notices.preemptions(NOW) == ()


def test_another_attempt_is_asked_anew(tmp_path: Path) -> None:
    """It came back, and its window is closed again."""
    desk = Desk(tmp_path, ASKS)
    desk.ask(running(), NOW)
    again = running(restarts=1, start_time=NOW + 900)
    assert desk.ask(again, NOW + 1000) is Answered.ASKED
    assert len(desk.sent()) == 2


def test_it_is_on_disk_before_it_is_sent(tmp_path: Path) -> None:
    """All of one look at once; who has no room for it asks nobody."""
    copied = tmp_path / "at-the-first"
    name = tmp_path / memories.NAME
    desk = Desk(tmp_path, ASKS, f'[ -e "{copied}" ] || cp "{name}" "{copied}"')
    desk.disk = False
    assert desk.ask(running(1), NOW) is Answered.UNKEPT
    assert not desk.sent()
    desk.disk = True
    pairs = [(running(1), WHY), (running(2), WHY), (running(1), WHY)]
    answers = desk.notices.ask(pairs, box_policy(), NOW)
    assert answers == [Answered.ASKED] * 3
    assert len(desk.sent()) == 2
    copied.rename(name)
    assert set(memories.load(tmp_path).asked) == {attempt_of(running(1)), attempt_of(running(2))}


def in_doubt(folder: Path) -> Desk:
    """A scheduler that was ended while it asked, and is started anew."""
    desk = Desk(
        folder, ASKS, "echo 'scancel: error: Unable to contact slurm controller' >&2; exit 1"
    )
    with pytest.raises(ServiceUnavailable):
        desk.ask(running(), NOW)
    (folder / "scancel").write_text(f'#!/bin/sh\necho "$@" >> "{desk.calls}"\n')
    desk.calls.unlink()
    desk.again()
    return desk


def test_one_in_doubt_is_not_sent_twice(tmp_path: Path) -> None:
    """Where nobody can tell it counts as sent up to its deadline, and the doubt is told."""
    desk = in_doubt(tmp_path)
    for later in (1.0, DEADLINE):
        assert desk.ask(running(), NOW + later) is Answered.BEFORE
        desk.notices.observe([running()], NOW + later)
    assert not desk.sent()
    (preemption,) = desk.notices.preemptions(NOW + 5)
    assert preemption.steps == {}
    assert "whether it did is not known" in preemption.words
    assert desk.ask(running(), NOW + DEADLINE + 1) is Answered.ASKED
    assert len(desk.sent()) == 1
    assert desk.ask(running(), NOW + 9 * DEADLINE) is Answered.BEFORE


def test_the_trainer_ends_the_doubt(tmp_path: Path) -> None:
    """It took note: then it was sent. It goes on and says nothing: then it was not."""
    desk = in_doubt(tmp_path)
    desk.signs = Signs(acknowledged=NOW + 1)
    desk.notices.observe([running()], NOW + 2)
    assert desk.ask(running(), NOW + 2 * DEADLINE) is Answered.BEFORE
    desk.again()
    desk.signs = Signs(heard=NOW + HEED_SECONDS)
    desk.notices.observe([running()], NOW + HEED_SECONDS)
    assert desk.ask(running(), NOW + HEED_SECONDS) is Answered.BEFORE
    desk.signs = Signs(heard=NOW + HEED_SECONDS + 1)
    desk.notices.observe([running()], NOW + HEED_SECONDS + 1)
    assert desk.ask(running(), NOW + HEED_SECONDS + 2) is Answered.ASKED
    assert len(desk.sent()) == 1


def test_a_notice_of_an_earlier_cause_ends_no_doubt(tmp_path: Path) -> None:
    """A trainer's older word is about something else."""
    desk = in_doubt(tmp_path)
    desk.signs = Signs(acknowledged=NOW - 50)
    desk.notices.observe([running()], NOW + 2)
    assert "whether it did is not known" in desk.notices.preemptions(NOW + 3)[0].words


def test_who_left_in_doubt_has_left(tmp_path: Path) -> None:
    """What was not seen is no step."""
    desk = in_doubt(tmp_path)
    desk.notices.observe([], NOW + 9)
    (preemption,) = desk.notices.preemptions(NOW + 10)
    assert preemption.steps == {"left": NOW + 9}
    assert preemption.outcome is Outcome.DONE


def test_what_becomes_of_a_notice_is_told_over_a_restart(tmp_path: Path) -> None:
    """Whoever is started anew sees it leave."""
    desk = Desk(tmp_path, ASKS)
    desk.ask(running(), NOW)
    memories.save(tmp_path, memories.Memory(asked=dict(desk.notices.asked)))
    desk.again()
    assert desk.notices.preemptions(NOW + 1)[0].steps == {"notified": NOW}
    desk.notices.observe([a_job(1)], NOW + 7)
    assert desk.notices.preemptions(NOW + 8)[0].steps == {"notified": NOW, "left": NOW + 7}
    desk.notices.observe([], NOW + 86_401)
    assert desk.notices.preemptions(NOW + 86_402) == ()


# -- in front of a slot

LEAD = 600.0
"""Of slots, in seconds."""


def in_front(folder: Path, script: str, *, begun: float, slot_in: float) -> tuple[Desk, SlotDesk]:
    """A job of vision's, which runs into a slot of speech's that is looked at once.

    Args:
        folder: for the Slurm.
        script: of the job.
        begun: how long before now the job began.
        slot_in: seconds until the slot begins.
    """
    desk = Desk(folder, script)
    start = NOW + slot_in
    slot = a_slot(team="speech", start=start, end=start + 3600, lead_seconds=LEAD)
    kept = f"ReservationName=gpuwarden-b1 StartTime={start:.0f} EndTime={start + 3600:.0f}"
    (folder / "kept").write_text(f"{kept} Nodes=n1 Accounts=speech State=INACTIVE\n")
    (folder / "scontrol").write_text(
        f'#!/bin/sh\n[ "$1" = write ] && exec cat "{folder}/script"\n'
        f'[ "$1" = --version ] && exec echo slurm 24.11.5\n'
        f'[ "$1" = --oneliner ] && exec cat "{folder}/kept"\nexit 0\n'
    )
    slots = SlotDesk(desk.cluster, desk.notices, {})
    slots.book([slot], box_policy(), (NODE,), NOW)
    job = running(start_time=NOW - begun)
    slots.watch(Reading("ci", NOW, jobs=(job,), nodes=(NODE,)), box_policy(), NOW)
    return desk, slots


MAKES_WAY = "#!/bin/sh\n#SBATCH --signal=RB:USR1@60\n"


@pytest.mark.parametrize(
    ("script", "begun", "slot_in", "asked"),
    [
        (ASKS, 700, LEAD + 1, False),
        (ASKS, 700, LEAD, True),
        (ASKS, 100, LEAD - 300, True),
        (ASKS, 700, -1, True),
        (MAKES_WAY, 700, LEAD, True),
        (MAKES_WAY, 700, LEAD - 300, True),
        (MAKES_WAY, 100, LEAD - 300, False),
        (MAKES_WAY, 700, -1, False),
    ],
)
def test_who_runs_into_a_slot_is_told_ahead_of_it(
    tmp_path: Path, script: str, begun: float, slot_in: float, *, asked: bool
) -> None:
    """Lead time before; but who asked Slurm to be let in front of it and told, and came late.

    As the slot begins Slurm tells that one: a second signal would make it hurry.
    """
    desk, slots = in_front(tmp_path, script, begun=begun, slot_in=slot_in)
    assert bool(desk.sent()) is asked
    assert "booking_blocked" not in slots.problems


def test_who_made_way_waits_for_the_slot_to_begin(tmp_path: Path) -> None:
    """Else it would be let in front of it once more; another job of the queue may be."""
    _, slots = in_front(tmp_path, MAKES_WAY, begun=700, slot_in=LEAD)
    back = Reading("ci", NOW + 60, jobs=(a_job(1, restarts=1), a_job(2)), nodes=(NODE,))
    found = slots.returns(back, NOW + 60)
    assert {number: slot.id for number, slot in found.items()} == {"1": "b1"}
    assert slots.returns(back, NOW + LEAD) == {}


def test_without_a_deadline_a_doubt_lasts_ten_minutes() -> None:
    """A policy may have none."""
    asking = Asking("1", Cause.BUDGET, "vision", "step", "USR1", intended=NOW)
    assert asking.counts(NOW + DOUBT_SECONDS)
    assert not asking.counts(NOW + DOUBT_SECONDS + 1)
    assert replace(asking, sent=NOW).counts(NOW + 9e9)
