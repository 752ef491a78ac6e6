"""The demo's lab box: one preemption by the local engine, with every receipt."""

from __future__ import annotations

import getpass
from typing import TYPE_CHECKING

import pytest
from demo.lab_boxes import LabBox

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.training, pytest.mark.sweep]


@pytest.mark.timeout(300)
def test_a_low_job_leaves_after_its_epoch_for_a_high_one_and_goes_on_where_it_was(
    tmp_path: Path,
) -> None:
    """Notified, acknowledged, saved, left, freed, started; no step is trained twice."""
    told: list[tuple[str, str]] = []

    def narrate(job: str, what: str, _detail: str) -> None:
        told.append((job, what))

    account = LabBox(tmp_path / "box", getpass.getuser(), narrate).play()
    assert account.wrong == []
    order = [("low-1", "leaving"), ("high-1", "running"), ("high-1", "done"), ("low-1", "done")]
    assert [moment for moment in told if moment in order] == order
