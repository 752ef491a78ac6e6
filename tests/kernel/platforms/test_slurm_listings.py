"""The queue and the accounts of Slurm 22.05 and 24.11 say the same, as both of them gave them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.platforms.slurm_accounting import Attempt, decode_accounting
from gpuwarden.platforms.slurm_limits import Counter, decode_limits
from gpuwarden.platforms.slurm_listings import (
    LISTING_FIELDS,
    ListedJob,
    clock_seconds,
    decode_listing,
)
from gpuwarden.platforms.slurm_reservations import decode_reservations

ANSWERS = Path(__file__).parent / "answers"
MARK = "|0123456789abcdef"
VERSIONS = ("22.05", "24.11")


def listing(version: str) -> dict[str, ListedJob]:
    """The recorded queue by the jobs' numbers."""
    text = (ANSWERS / f"slurm-{version}-squeue-listing.txt").read_text()
    return {job.number: job for job in decode_listing(text, MARK)}


def attempts(version: str) -> list[Attempt]:
    """The recorded accounts."""
    return list(decode_accounting((ANSWERS / f"slurm-{version}-sacct.txt").read_text(), MARK))


def a_row(**values: str) -> str:
    """A job as `squeue` prints it, with some of its fields changed."""
    usual = {"JobID": "7", "State": "RUNNING", "NumNodes": "1", "NumTasks": "1", "NodeList": "n1"}
    return "".join(f"{(usual | values).get(name, 'N/A')}{MARK}" for name in LISTING_FIELDS) + "\n"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_queue_is_read_alike(version: str) -> None:
    """Whoever waits, runs or has ended: cards, limits, and why, from either version."""
    jobs = listing(version)
    assert jobs["5"].gpus == 2
    assert jobs["5"].gpu_type == "a100"
    assert jobs["5"].job.comment == "gpuwarden:token123:run=exp-1"
    assert jobs["5"].job.time_limit == 600.0
    assert jobs["10_[1-5%2]"].gpus == 1
    assert jobs["10_0"].job.holds
    assert jobs["8"].job.reason == "AssocGrpGRES"
    assert jobs["8"].gpu_type == "a100"
    assert jobs["9"].job.qos == "high"
    assert jobs["9"].eligible is not None
    assert jobs["11"].waits_for == (("afterok", "5"),)
    assert jobs["12"].waits_for == (("afternotok", "1"),)
    assert jobs["3"].job.restarts == 1
    assert jobs["3"].status == 75
    assert jobs["2"].status == 7
    assert jobs["4"].job.states == {"SPECIAL_EXIT"}
    assert jobs["15"].planned_nodes == ("node1",)
    assert all(job.gpus_known for job in jobs.values())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_hostile_name_stays_a_name(version: str) -> None:
    """It holds a separator, a line feed and a state: none of it is taken for Slurm's own words."""
    job = listing(version)["6"]
    assert job.job.name == "evil |0123456789abcde\nRUNNING|"
    assert (job.gpus, job.job.account) == (1, "speech")
    named = [each for each in attempts(version) if each.number == "6"]
    assert [each.name for each in named] == [job.job.name]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_accounts_are_read_alike(version: str) -> None:
    """Every attempt of a job that came back, and what it had."""
    found = attempts(version)
    again = [each for each in found if each.number == "3"]
    assert [(each.state, each.gpus, each.status) for each in again] == [
        ("REQUEUED", 1, 75),
        ("PENDING", 0, 0),
    ]
    assert again[0].end is not None
    assert again[1].start is None
    running = next(each for each in found if each.number == "5")
    assert (running.gpus, running.gpu_type, running.end) == (2, "a100", None)
    assert next(each for each in found if each.number == "7").gpus == 0
    assert {each.number for each in found} >= {"10_0", "10_[1-5%2]"}


@pytest.mark.parametrize("version", VERSIONS)
def test_limits_are_read_alike(version: str) -> None:
    """What an account may use and does, now and by minutes."""
    limits = decode_limits((ANSWERS / f"slurm-{version}-assoc-mgr.txt").read_text())
    speech = limits.accounts["speech"]
    assert speech.resources["gres/gpu"] == Counter(1, 1)
    assert speech.minutes["gres/gpu"] == Counter(60, 0)
    assert speech.minutes["gres/gpu"].left == 60
    assert limits.accounts["vision"].resources["gres/gpu"] == Counter(None, 3)
    assert limits.accounts["vision"].resources["gres/gpu"].left is None
    assert limits.users["vision", "root"].resources["gres/gpu"].used == 3
    assert limits.above("speech") == ("speech", "root")
    assert limits.qos["high"].resources["gres/gpu"] == Counter(None, 0)


def test_reservations_of_both_versions_are_read() -> None:
    """Whole nodes of the older one, cards of the newer one."""
    (old,) = decode_reservations((ANSWERS / "slurm-22.05-reservations.txt").read_text())
    assert (old.name, old.nodes, old.cards) == ("gpuwarden-a.1", ("node1",), None)
    assert old.end - old.start == 1800
    assert old.accounts == {"speech"}
    assert {"MAGNETIC", "FLEX", "IGNORE_JOBS"} <= old.flags
    assert not old.active
    newer = decode_reservations((ANSWERS / "slurm-24.11-reservations.txt").read_text())
    assert [(each.name, each.cards) for each in newer] == [
        ("gpuwarden-a.1", None),
        ("gpuwarden-c", 2),
    ]
    assert decode_reservations("No reservations in the system\n") == ()
    with pytest.raises(ServiceUnavailable):
        decode_reservations("slurm_load_reservations: error")


def test_cards_that_are_not_accounted_for_are_counted_by_what_was_asked() -> None:
    """For each of its nodes or tasks; where that cannot be made out, it is not 0 but unknown."""
    per_node = a_row(**{"tres-per-node": "gres:gpu:a100:2", "NodeList": "n[1-3]", "NumNodes": "3"})
    per_task = a_row(**{"tres-per-task": "gres/gpu=1", "NumTasks": "4"})
    odd = a_row(**{"tres-per-socket": "gres/gpu:1"})
    none = a_row()
    (nodes,) = decode_listing(per_node, MARK)
    (tasks,) = decode_listing(per_task, MARK)
    (unknown,) = decode_listing(odd, MARK)
    (nothing,) = decode_listing(none, MARK)
    assert (nodes.gpus, nodes.gpu_type, nodes.gpus_known) == (6, "a100", False)
    assert (tasks.gpus, tasks.gpus_known) == (4, False)
    assert (unknown.gpus, unknown.gpus_known) == (0, False)
    assert (nothing.gpus, nothing.gpus_known) == (0, True)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5:00", 300.0),
        ("1:00:00", 3600.0),
        ("365-00:00:00", 31_536_000.0),
        ("2-03:04:05", 183_845.0),
        ("00:00:07", 7.0),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_a_time_limit_is_read_as_slurm_writes_it(text: str, seconds: float | None) -> None:
    """With days and hours where there are some."""
    assert clock_seconds(text) == seconds


@pytest.mark.parametrize("text", ["x|0123456789abcdef", "error: no", "1|2|3"])
def test_what_is_no_answer_is_not_taken_for_an_empty_one(text: str) -> None:
    """Neither a queue nor accounts are empty because they cannot be read."""
    with pytest.raises(ServiceUnavailable):
        decode_listing(text, MARK)
    with pytest.raises(ServiceUnavailable):
        decode_accounting(text, MARK)
    with pytest.raises(ServiceUnavailable):
        decode_limits(text)
