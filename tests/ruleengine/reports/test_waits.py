"""Waiting: what Slurm's accounting tells, and that nobody tells where it does not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.ruleengine.reports.stocks import BEGIN, DAY, TEAMS

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine.reports.periods import period_of
from gpuwarden.ruleengine.reports.readers import Reader
from gpuwarden.ruleengine.reports.waits import decode_accounting, slurm_waits
from gpuwarden.slurm_commands import SlurmCommands

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

GPU = "billing=8,cpu=8,gres/gpu:a100=2,gres/gpu=2,mem=64G,node=1"


def line(
    user: str, start: float | str, *, eligible: float | str, submit: float = 0, tres: str = GPU
) -> str:
    """A line of sacct."""
    times = (each if isinstance(each, str) else f"{each:.0f}" for each in (submit, eligible, start))
    return "|".join(("7", user, *times, tres))


def waits(
    folder: Path, output: str, *, programs: Mapping[str, str] | None = None, status: int = 0
) -> dict[str, Any]:
    """The section of a report on a day and a half, of a Slurm that answers like this."""
    text = folder / "answer"
    text.write_text(output)
    chosen = {}
    for name, script in (programs or {"sacct": f"cat {text}; exit {status}"}).items():
        chosen[name] = folder / name
        chosen[name].write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n{script}\n')
        chosen[name].chmod(0o755)
    commands = SlurmCommands(chosen, None, 20.0)
    period = period_of(BEGIN, BEGIN + 1.5 * DAY, "UTC")
    return asyncio.run(slurm_waits(commands, period, Reader(TEAMS), now=BEGIN + 2 * DAY))


def test_jobs_waited_from_when_they_could_have_started(tmp_path: Path) -> None:
    """Those with a GPU that started in the period; of each team the middle, and the longest."""
    found = waits(
        tmp_path,
        "\n".join(
            (
                line("ana", BEGIN + 600, eligible=BEGIN),
                line("cho", BEGIN + 8000, eligible=BEGIN + 1000, submit=BEGIN - DAY),
                line("ben", BEGIN + 50, eligible="Unknown", submit=BEGIN - 50),
                line("ben", BEGIN - 50, eligible=BEGIN - DAY),  # ran already
                line("ben", "Unknown", eligible=BEGIN),  # never started
                line("ben", BEGIN + 900, eligible=BEGIN, tres="cpu=4,mem=1G"),
            )
        ),
    )

    assert (found["known"], found["jobs"], found["longest_seconds"]) == (True, 3, 7000.0)
    assert [(row["team"], row["jobs"], row["median_seconds"]) for row in found["teams"]] == [
        ("vision", 2, 3800.0),
        ("robotics", 1, 100.0),
    ]


def test_accounting_is_asked_without_regard_to_a_zone(tmp_path: Path) -> None:
    """Moments are told as seconds before now, with a minute of slack on both sides."""
    waits(tmp_path, "")

    asked = (tmp_path / "asked").read_text()
    assert f"--starttime=now-{2 * DAY + 60:.0f}seconds" in asked
    assert f"--endtime=now-{0.5 * DAY - 60:.0f}seconds" in asked


@pytest.mark.parametrize(
    ("output", "status", "why"),
    [
        ("", 1, "Slurm did not tell: sacct failed with status 1"),
        ("7|ana|1|2\n", 0, "Slurm did not tell: sacct answered in another form"),
    ],
)
def test_an_answer_that_is_none_is_told(tmp_path: Path, output: str, status: int, why: str) -> None:
    """The report is made, and its section says what went wrong."""
    found = waits(tmp_path, output, status=status)

    assert found["known"] is False
    assert why in found["why"]


def test_without_accounting_only_who_waits_now_is_known(tmp_path: Path) -> None:
    """And the section names the setting that would change that."""
    found = waits(tmp_path, "", programs={"squeue": "true"})

    assert found["known"] is False
    assert "slurm.sacct in engine.yaml" in found["why"]
    assert "0 jobs pend now" in found["why"]


def test_a_name_with_a_bar_is_no_other_column() -> None:
    """A line of another shape is refused as a whole, not read as somebody else's."""
    with pytest.raises(ServiceUnavailable):
        decode_accounting(line("a|b", 100.0, eligible=50.0))
