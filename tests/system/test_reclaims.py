"""Reclaims from the first sample to the memory that came back, on real servers and processes.

(process, Slurm job, Slurm array task, pod at L1) x (leaves on notice, leaves on TERM, needs KILL,
survives): one of each here, the whole table with `make test-all` and `make reclaim-table`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.servers import until
from tests.system.reclaims import KINDS, MEMORY, WAYS, Cell, Ground, cells, ground
from tests.system.reclaims import platforms_here as platforms

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.system
BY_NOTICE = {"process": "request", "slurm": "SIGUSR1", "array": "SIGUSR1", "pod": "request"}
needs_cgroups = pytest.mark.skipif(not platforms(), reason="Slurm and pods need cgroups of v1")


def check(here: Ground, cell: Cell) -> list[str]:
    """What of a cell is not as it must be."""
    job, audit, result = cell.job, cell.audit, cell.audit["result"]
    survives = job.way == "survives"
    ended = {"notice": BY_NOTICE[job.kind], "term": "SIGTERM"}.get(job.way, "SIGKILL")
    proving = [n for n in audit["nodes"] if n["request"]["action"] in ("terminate", "watch")]
    with here.open_ledger() as ledger:
        (count,) = ledger.execute(
            "SELECT count(*) FROM decisions WHERE job_id=?", (job.job_id,)
        ).fetchone()
    faults = {
        f"its state is {result['state']}: {result['reason']}": result["state"]
        != ("incomplete" if survives else "verified"),
        f"it was ended by {cell.ended_by}": cell.ended_by != ended,
        "its owner was not told first": not cell.told_first,
        f"{result['memory_freed']} bytes were freed": result["memory_freed"]
        != (0 if survives else MEMORY),
        "NVML's word is not that": [n["gone"] for n in proving] != [not survives],
        f"{cell.lost} s of work were lost": (cell.lost == 0.0) != (job.way in ("notice", "term")),
        f"{count} decisions were taken": count != 1,
        **dict.fromkeys(cell.broken, True),
    }
    if job.beside and here.cluster is not None:
        word = here.cluster.run("squeue", "--noheader", f"--jobs={job.beside}", "-o", "%T").strip()
        faults[f"the task beside it is {word}"] = word != "RUNNING"
    return [f"{job.kind} {job.way}: {text}" for text, wrong in faults.items() if wrong]


def begun(here: Ground) -> list[str]:
    """Jobs whose ladder the agent journalled as begun, one entry for each time."""
    journal = (here.folder / "agent" / "agent.journal").read_text()
    records = [json.loads(line) for line in journal.splitlines() if line.strip()]
    reports = [line["record"]["report"] for line in records if line["event"] == "begun"]
    return [report["job_id"] for report in reports if report["action"] == "terminate"]


def run(here: Ground, chosen: Sequence[tuple[str, str]], first: int = 0) -> list[Cell]:
    """Start jobs on cards of their own and see each to its end."""
    jobs = [here.start(kind, way, first + place) for place, (kind, way) in enumerate(chosen)]
    return cells(here, jobs)


@needs_cgroups
@pytest.mark.timeout(400)
def test_a_job_of_each_kind_comes_to_its_end() -> None:
    """Told, ended by whose it is, proven by NVML; and no second victim where it is not."""
    chosen = [("process", "notice"), ("slurm", "term"), ("array", "kill"), ("pod", "survives")]
    with tempfile.TemporaryDirectory(prefix="gw") as name, ground(Path(name)) as here:
        jobs = [here.start(*pair, card) for card, pair in enumerate(chosen)]
        pod = jobs[-1]
        until(lambda: here.audit_of(pod), 120, every=0.5)
        second = here.start("process", "term", pod.card)
        found = cells(here, jobs)
        assert [fault for cell in found for fault in check(here, cell)] == []
        assert begun(here) == [jobs[0].job_id]
        until(lambda: here.why_not(second) == {"incomplete_reclaim"}, 90, every=0.5)
        assert second.alive
        assert here.audit_of(second) is None


@needs_cgroups
@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_the_whole_table() -> None:
    """Each kind in each way, half of them at a time."""
    with tempfile.TemporaryDirectory(prefix="gw") as name, ground(Path(name)) as here:
        found = []
        for number, ways in enumerate((("notice", "term"), ("kill", "survives"))):
            chosen = [(kind, way) for way in ways for kind in KINDS]
            found += run(here, chosen, first=number * len(chosen))
        assert [fault for cell in found for fault in check(here, cell)] == []
        assert len(found) == len(KINDS) * len(WAYS)
        ended = [cell.job.job_id for cell in found if cell.job.kind == "process"]
        assert sorted(begun(here)) == sorted(ended)
