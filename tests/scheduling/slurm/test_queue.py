"""The queue tells where everybody stands, why, and what would have to happen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.scheduling.slurm.tasks import box_policy

from gpuwarden.platforms.slurm import SlurmJob
from gpuwarden.platforms.slurm_arrays import decode_tasks
from gpuwarden.platforms.slurm_limits import AllLimits, Counter, Limits, decode_limits
from gpuwarden.platforms.slurm_listings import ListedJob, decode_listing
from gpuwarden.platforms.slurm_nodes import SlurmNode, decode_nodes
from gpuwarden.schedule_api import EntryState, Interval, QueueEntry, ScheduleDocument
from gpuwarden.scheduling.slurm.queues import Reading, entries_of

ANSWERS = Path(__file__).parents[2] / "kernel/platforms/answers"
MARK = "|0123456789abcdef"
NOW = 1_796_040_361.0
"""When the answers of 22.05 were taken; those of 24.11 are some seconds older."""
NODE = SlurmNode("n1", partitions=frozenset({"main"}), usable=True, idle={"a100": 0})


def recorded(version: str) -> Reading:
    """The reading of a recorded cluster."""
    listing = (ANSWERS / f"slurm-{version}-squeue-listing.txt").read_text()
    limits = (ANSWERS / f"slurm-{version}-assoc-mgr.txt").read_text()
    nodes = (ANSWERS / f"slurm-{version}-nodes.txt").read_text()
    return Reading(
        "ci",
        NOW,
        jobs=decode_listing(listing, MARK),
        nodes=decode_nodes(nodes),
        tiers={"main": 1},
        limits=decode_limits(limits),
    )


def a_job(number: int, *, state: str = "PENDING", reason: str = "", **changes: object) -> ListedJob:
    """A job that asks for or has one card."""
    own = {
        "job_id": number,
        "user_name": "ana",
        "account": "vision",
        "partition": "main",
        "qos": "normal",
        "states": frozenset(state.split()),
        "reason": reason or ("None" if "RUNNING" in state else "Priority"),
        "submit_time": NOW - 1000 + number,
        "nodes": ("n1",) if "RUNNING" in state or "COMPLETING" in state else (),
    }
    # Both have a field `gpus`: a job's own says which cards of which node.
    fields = set(SlurmJob.__slots__) - {"gpus"}
    job = {name: changes.pop(name) for name in list(changes) if name in fields}
    return replace(
        ListedJob(SlurmJob(**(own | job)), gpus=1, gpu_type="a100"),  # type: ignore[arg-type]
        **changes,  # type: ignore[arg-type]
    )


def told(*jobs: ListedJob, **reading: object) -> dict[str, QueueEntry]:
    """The entries of some jobs, by their numbers."""
    parts = {"jobs": jobs, "nodes": (NODE,), "tiers": {"main": 1}} | reading
    found = entries_of(Reading("ci", NOW, **parts), box_policy())  # type: ignore[arg-type]
    return {entry.id: entry for entry in found}


@pytest.mark.parametrize("version", ["22.05", "24.11"])
def test_both_versions_give_the_same_queue(version: str) -> None:
    """Whoever waits first, in Slurm's order; held ones are not in line."""
    entries = entries_of(recorded(version), box_policy())
    by_id = {entry.id: entry for entry in entries}
    states = {number: entry.state for number, entry in by_id.items()}
    assert {states[n] for n in ("5", "6", "7", "10_0")} == {EntryState.RUNNING}
    assert {states[n] for n in ("4", "12", "13")} == {EntryState.HELD}
    assert {states[n] for n in ("3", "8", "9", "10_[1-5%2]", "11", "15")} == {EntryState.PENDING}
    assert states["1"] is EntryState.DONE
    assert {states["2"], states["14"]} == {EntryState.FAILED}
    assert by_id["5"].run_id == "exp-1"
    assert by_id["5"].gpu_type == "a100-40"
    assert by_id["5"].job_id == "slurm-ci-5-0"
    assert by_id["3"].requeues == 1
    line = [entry.id for entry in entries if entry.position is not None]
    assert line == ["3", "10_[1-5%2]", "15"]
    assert [by_id[number].position for number in line] == [1, 2, 3]


@pytest.mark.parametrize("version", ["22.05", "24.11"])
def test_why_it_waits_is_told_in_words(version: str) -> None:
    """Whose limit, which window, which job, and what to do where nobody else will."""
    words = {entry.id: entry.words for entry in entries_of(recorded(version), box_policy())}
    assert "1 of 1 cards of account speech are in use, and it asks for 1" in words["8"]
    assert words["9"].startswith("It waits for the window off-peak, which opens ")
    assert words["11"] == "It waits for job 5 to succeed."
    assert "never starts" in words["12"]
    assert "status that means hold (76)" in words["4"]
    assert words["10_[1-5%2]"].startswith("5 tasks of an array (1-5, 2 at a time): ")
    assert words["2"] == "It ended as failed with status 7."


@pytest.mark.parametrize(
    ("state", "status", "says"),
    [
        ("TIMEOUT", 0, "was ended at its time limit: submit it anew with the same words"),
        ("OUT_OF_MEMORY", 137, "host_memory of the policy"),
        ("NODE_FAIL", 0, "and Slurm did not queue it again: submit it anew"),
        ("FAILED", 75, "saved and left (status 75), and Slurm did not queue it again"),
        ("FAILED", 76, "saved and left for good (status 76)"),
        ("FAILED", 7, "It ended as failed with status 7."),
        ("CANCELLED", 0, "It ended as cancelled."),
    ],
)
def test_how_it_ended_is_told_with_what_to_do(state: str, status: int, says: str) -> None:
    """One that left with 75 where Slurm queues nobody again is no crash (Lightning #20542)."""
    entry = told(a_job(1, state=state, status=status))["1"]
    assert says in entry.words
    assert entry.why == state.lower()


def test_an_array_is_one_line_that_counts_for_all_of_it() -> None:
    """The tasks that have not begun; each that runs is a line of its own, and may have to end."""
    entries = told(
        a_job(10, array_job_id=10, array_task_id=0, state="RUNNING", end_time=NOW + 9),
        a_job(10, tasks=decode_tasks("1-39:2%4"), priority=5),
        a_job(11, priority=4),
    )
    line = entries["10_[1-39:2%4]"]
    assert (line.tasks, line.gpus, line.position) == (20, 1, 1)
    assert "20 tasks of an array (1-39:2, 4 at a time)" in line.words
    assert entries["10_0"].tasks == entries["11"].tasks == 1
    # As many as may run besides go first.
    assert entries["11"].position == 4
    cut = told(a_job(12, tasks=decode_tasks("1,3,5,...%2")))["12_[1,3,5,...%2]"]
    assert cut.tasks == 1
    assert cut.words.startswith("Tasks of an array (1,3,5,..., 2 at a time): ")


def test_who_came_back_is_told_why_it_waits_with_free_cards() -> None:
    """Pyxis #129: Slurm holds it back for two minutes, and says BeginTime like of any other."""
    found = told(a_job(1, reason="BeginTime", restarts=1), a_job(2, reason="BeginTime"))
    assert "cred_expire of AuthInfo (120 s" in found["1"].words
    assert found["2"].words == "It may not begin yet."


@pytest.mark.parametrize("version", ["22.05", "24.11"])
def test_a_plan_is_told_only_to_those_in_line(version: str) -> None:
    """Of a job that a limit keeps, Slurm plans a start all the same: it means nothing."""
    entries = {entry.id: entry for entry in entries_of(recorded(version), box_policy())}
    start = entries["15"].start
    assert start is not None
    assert start.samples == 0
    assert start.earliest > NOW
    assert entries["8"].start is None
    assert entries["9"].start is None


def test_the_document_takes_every_entry() -> None:
    """What is told of a real queue is what the contract says."""
    entries = entries_of(recorded("24.11"), box_policy())
    document = ScheduleDocument("slurm", "ci", NOW, entries=entries)
    assert ScheduleDocument.decode(document.encode()).entries == entries


def test_one_that_completes_still_has_its_cards() -> None:
    """Its node cleans up after it: it is leaving, and who waits for its cards still waits."""
    entries = told(
        a_job(1, state="COMPLETED COMPLETING", end_time=NOW - 5),
        a_job(2, reason="Resources"),
    )
    assert entries["1"].state is EntryState.LEAVING
    assert entries["2"].must_end == ("1",)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("PREEMPTED", EntryState.HELD),
        ("PREEMPTED COMPLETING", EntryState.LEAVING),
        ("PENDING REQUEUED", EntryState.PENDING),
        ("RUNNING SIGNALING", EntryState.RUNNING),
        ("SUSPENDED", EntryState.SUSPENDED),
        ("STATE_OF_2031", EntryState.HELD),
        ("NODE_FAIL", EntryState.FAILED),
        ("CANCELLED COMPLETING", EntryState.LEAVING),
    ],
)
def test_no_state_ends_a_job_that_may_come_back(state: str, expected: EntryState) -> None:
    """Preempted is not over, and a word that is not known here is not an end."""
    assert told(a_job(1, state=state))["1"].state is expected


def test_who_was_told_to_leave_is_leaving() -> None:
    """Slurm says when it told a job; until it is gone it has its cards."""
    entry = told(a_job(1, state="RUNNING", preempted=NOW - 3, start_time=NOW - 60))["1"]
    assert entry.state is EntryState.LEAVING
    assert entry.why == "preempted"


def test_slurms_order_is_by_tier_then_priority_then_number() -> None:
    """A higher tier goes first whatever the priority; then who came first."""
    entries = told(
        a_job(1, priority=10),
        a_job(2, priority=99),
        a_job(3, partition="fast", priority=1),
        a_job(4, priority=10),
        tiers={"main": 1, "fast": 9},
    )
    assert list(entries) == ["3", "2", "1", "4"]
    # Each is counted among those that compete with it: another partition's do not.
    assert [entries[n].position for n in ("3", "2", "1", "4")] == [1, 1, 2, 3]


def test_other_kinds_of_cards_are_another_line() -> None:
    """Who wants an h100 does not stand behind those that want an a100; who takes any does."""
    entries = told(
        a_job(1, priority=9, gpu_type="a100"),
        a_job(2, priority=8, gpu_type="h100"),
        a_job(3, priority=7, gpu_type=""),
        a_job(4, priority=6, gpus=0),
    )
    assert [entries[n].position for n in "1234"] == [1, 1, 3, 1]


def test_what_would_have_to_end_ends_soonest() -> None:
    """Enough jobs for the cards that are missing, those first that end first; none too many."""
    running = [
        a_job(n, state="RUNNING", gpus=2, start_time=NOW - 50, end_time=NOW + n, time_limit=900.0)
        for n in (10, 20, 30)
    ]
    entries = told(*running, a_job(1, gpus=3, reason="Resources"))
    assert entries["1"].must_end == ("10", "20")
    free = told(*running, a_job(1, gpus=3), nodes=(replace(NODE, idle={"a100": 1}),))
    assert free["1"].must_end == ("10",)
    never = told(*running, a_job(1, gpus=7))
    assert never["1"].must_end == ()


def test_jobs_without_a_time_limit_come_last() -> None:
    """Nobody knows when they end."""
    entries = told(
        a_job(10, state="RUNNING", start_time=NOW - 50),
        a_job(20, state="RUNNING", start_time=NOW - 50, end_time=NOW + 900, time_limit=950.0),
        a_job(1),
    )
    assert entries["1"].must_end == ("20",)
    assert entries["10"].finish is None
    assert entries["20"].finish == Interval(NOW, NOW + 900, 0)


def test_a_limit_is_freed_by_the_accounts_own_jobs() -> None:
    """Others' jobs may end as they like: that does not help."""
    limits = AllLimits(accounts={"vision": Limits(resources={"gres/gpu": Counter(2, 0)})})
    entries = told(
        a_job(10, state="RUNNING", start_time=NOW, end_time=NOW + 5, time_limit=9.0, account="x"),
        a_job(11, state="RUNNING", start_time=NOW, end_time=NOW + 9, time_limit=9.0),
        a_job(12, state="RUNNING", start_time=NOW, end_time=NOW + 8, time_limit=9.0),
        a_job(1, reason="AssocGrpGRES"),
        limits=limits,
    )
    assert entries["1"].must_end == ("12",)
    assert entries["1"].position is None


def test_a_limit_above_the_account_keeps_a_job_too() -> None:
    """What teams share: any job below it makes room; its own account has none in use."""
    limits = AllLimits(
        accounts={"lab": Limits(resources={"gres/gpu": Counter(2, 0)}), "vision": Limits()},
        parents={"vision": "lab", "speech": "lab", "lab": "root"},
    )
    ends = {"state": "RUNNING", "start_time": NOW, "time_limit": 9.0}
    entries = told(
        a_job(10, account="speech", end_time=NOW + 5, **ends),
        a_job(11, account="speech", end_time=NOW + 4, **ends),
        a_job(12, account="other", end_time=NOW + 1, **ends),
        a_job(1, reason="AssocGrpGRES"),
        limits=limits,
    )
    assert entries["1"].must_end == ("11",)
    assert "2 of 2 cards of account lab are in use" in entries["1"].words


def test_a_spent_budget_holds_a_job() -> None:
    """How much is used is told; no job's end would mend it."""
    limits = AllLimits(accounts={"vision": Limits(minutes={"gres/gpu": Counter(6000, 5999)})})
    entry = told(a_job(1, reason="AssocGrpGRESMinutes"), limits=limits)["1"]
    assert entry.state is EntryState.HELD
    assert "100.0 of 100.0 GPU-hours are used" in entry.words
    assert entry.must_end == ()


def test_an_unlimited_queue_has_no_plan() -> None:
    """Behind a job without a time limit Slurm plans a year ahead, or thousands."""
    for years in (1, 5000):
        assert told(a_job(1, start_time=NOW + years * 365 * 86_400))["1"].start is None


def test_a_plan_that_has_passed_is_due_now() -> None:
    """Slurm looks at it in its next round; nothing starts in the past."""
    assert told(a_job(1, start_time=NOW - 30))["1"].start == Interval(NOW, NOW, 0)


def test_cards_that_slurm_does_not_tell_are_not_zero_silently() -> None:
    """The job says that its cards are not known."""
    entry = told(a_job(1, state="RUNNING", gpus=0, gpus_known=False))["1"]
    assert entry.why == "cards_unknown"
    assert "AccountingStorageTRES" in entry.words


def test_braces_in_names_are_harmless() -> None:
    """An account, a QOS or a reason may hold what looks like a place to fill in."""
    entry = told(a_job(1, reason="AssocGrpGRES", account="{user.__class__}"))["1"]
    assert "{user.__class__}" in entry.words
    assert told(a_job(1, reason="Odd{0}"))["1"].words == "Slurm says: Odd(0)."


def test_a_long_queue_on_many_nodes_is_told_whole() -> None:
    """Twenty thousand jobs that wait, on a thousand nodes: places without gaps."""
    nodes = tuple(replace(NODE, name=f"n{n}") for n in range(1000))
    held = [
        a_job(90_000 + n, state="RUNNING", nodes=(f"n{n}",), gpus=4, start_time=NOW, name="r")
        for n in range(1000)
    ]
    queue = [a_job(n, priority=n) for n in range(1, 20_001)]
    entries = told(*held, *queue, nodes=nodes)
    places = [entries[str(n)].position for n in range(20_000, 0, -1)]
    assert places == list(range(1, 20_001))
    assert entries["1"].must_end == entries["20000"].must_end != ()
