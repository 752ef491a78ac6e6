"""Job files are believed for their own process and owner, and for nothing else."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scheduling.local.policy_texts import box

if TYPE_CHECKING:
    from pathlib import Path

from gpuwarden import job_files
from gpuwarden.job_files import LeaveRequest, RunDescription, RunStatus
from gpuwarden.periods import Span
from gpuwarden.scheduling.holdings import Holding
from gpuwarden.scheduling.local.progress import RunFiles, prepared
from gpuwarden.scheduling.local.spending import spending, used_gpu_hours


def written(root: Path, **others: Any) -> RunFiles:
    """The files of a run of this process."""
    assert prepared(root) == ""
    chosen = {
        "run_id": "a",
        "pid": 7,
        "pid_ns": 1,
        "start_ticks": 1,
        "boot_id": "b",
        "model": "m",
        "batch": 1,
        "imgsz": 64,
        "amp": False,
        "epochs": 1,
        **others,
    }
    job_files.write(job_files.description_path(root, "a"), RunDescription(**chosen).encode())
    status = RunStatus("a", 1, "train", 0.0, 0.0, step=5)
    job_files.write(job_files.status_path(root, "a"), status.encode())
    return RunFiles(root, "a", os.getuid())


def seen(files: RunFiles, **others: Any) -> RunStatus | None:
    """What counts for an attempt of pid 7."""
    return files.status(**{"pids": frozenset({7, 8}), "boot": "b", "since": 0.0, **others})


def test_a_status_counts_for_its_own_process_only(tmp_path: Path) -> None:
    """Not of another process, another boot, an earlier attempt, or another user."""
    files = written(tmp_path)
    assert seen(files) is not None
    assert seen(files, pids=frozenset({8})) is None
    assert seen(files, boot="c") is None
    assert seen(files, since=4e9) is None
    assert seen(files, pids=frozenset()) is not None  # it has ended, and wrote since its start
    assert seen(files, pids=frozenset(), since=4e9) is None
    assert seen(RunFiles(tmp_path, "a", os.getuid() + 1)) is None


@pytest.mark.parametrize("what", ["link", "pipe", "garbage", "large", "folder", "second name"])
def test_what_a_user_may_put_there_is_no_status(tmp_path: Path, what: str) -> None:
    """It is neither followed nor waited for, and nothing breaks."""
    files = written(tmp_path)
    path = job_files.status_path(tmp_path, "a")
    path.unlink()
    if what == "link":
        path.symlink_to("/dev/zero")
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "second name":
        other = tmp_path / "other"
        other.write_bytes(RunStatus("a", 1, "train", 0.0, 0.0).encode())
        path.hardlink_to(other)
    else:
        path.write_bytes(b"{" if what == "garbage" else b" " * 100_000)
    assert seen(files) is None


def test_a_request_is_taken_back_by_whoever_gave_it(tmp_path: Path) -> None:
    """The agent's own stands."""
    files = written(tmp_path)
    files.ask(LeaveRequest("agent", 9e9))
    files.withdraw("local")
    assert files.request() is not None
    files.withdraw("agent")
    assert files.request() is None
    files.withdraw("agent")


# -- what was held, as what is spent

_HOLDINGS = st.lists(
    st.builds(
        lambda start, seconds, gpus, team: Holding(
            "local", "1", "ana", team, gpus, start, None if seconds is None else start + seconds
        ),
        st.integers(0, 10_000).map(float),
        st.none() | st.integers(0, 9000).map(float),
        st.integers(1, 8),
        st.sampled_from(["vision", "nlp"]),
    ),
    max_size=8,
)


@given(held=_HOLDINGS, cuts=st.lists(st.integers(1, 19_999).map(float), max_size=4))
def test_slices_of_time_add_up_to_the_whole(held: list[Holding], cuts: list[float]) -> None:
    """Gpustack #5710: an hour is an hour however it is cut; eight cards cost eight times one."""
    now = 20_000.0
    edges = [0.0, *sorted(cuts), now]
    spans = [Span(begin, end) for begin, end in itertools.pairwise(edges)]
    parts = sum(used_gpu_hours(held, "vision", span, now) for span in spans)
    whole = used_gpu_hours(held, "vision", Span(0.0, now), now)
    assert parts == pytest.approx(whole)
    assert whole == pytest.approx(
        sum(
            each.gpus * ((now if each.end is None else each.end) - each.start) / 3600
            for each in held
            if each.team == "vision"
        )
    )


def test_only_hard_budgets_in_gpu_hours_stop_a_team() -> None:
    """Soft ones are told by others, money is counted by the rule engine."""
    day = {"team": "vision", "per": "day"}
    now = 1_800_000_000.0
    held = [Holding("local", "1", "ana", "vision", 2, now - 3600.0)]
    hard = {**day, "limit": "2 GPU-hours", "kind": "hard", "running": "finish"}
    for budget, stops in (
        (hard, True),
        ({**hard, "limit": "2.001 GPU-hours"}, False),
        ({**day, "limit": "1 GPU-hours", "kind": "soft"}, False),
        ({**hard, "limit": "1 EUR"}, False),
        ({**hard, "team": "nlp"}, False),
    ):
        found = spending(box(budgets=[budget]), held, now)
        assert ("vision" in found.spent) is stops
        assert found.leaving == frozenset()
    leaving = spending(box(budgets=[{**hard, "running": "leave"}]), held, now)
    assert leaving.leaving == {"vision"}
    assert leaving.again is not None
    assert now < leaving.again <= now + 90_000
