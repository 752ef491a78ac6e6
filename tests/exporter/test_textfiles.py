"""The page as a file."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.exporter.nodes import ManualClock, eventually

from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.nvml import Nvml
from gpuwarden.exporter.sampler import Sampler
from gpuwarden.exporter.settings import ExporterSettings
from gpuwarden.exporter.simulated import Card, Scenario, build
from gpuwarden.exporter.textfiles import NAME, Textfile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def sampler(scenario_file: Path, jobs: Path, clock: ManualClock) -> Iterator[Sampler]:
    """A sampler of one card."""
    nvml = Nvml(build(), scenario=Scenario([Card(0)]).write(scenario_file))
    settings = ExporterSettings(jobs_directory=jobs)
    made = Sampler(settings, nvml, Attribution(jobs, clock=clock), clock=clock)
    yield made
    made.stop()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_old_values_do_not_stay(sampler: Sampler, clock: ManualClock, tmp_path: Path) -> None:
    """The file follows the page, also when it grew old; nothing else is left in the folder."""
    folder = tmp_path / "textfiles"
    folder.mkdir()
    textfile = Textfile(folder, sampler, interval=2)
    sampler.sample()
    textfile.write()
    assert "\ngpu_up{" in (folder / NAME).read_text()
    assert _names(folder) == [NAME]
    clock.advance(60)
    textfile.write()
    assert "\ngpu_up{" not in (folder / NAME).read_text()
    assert "\ngpuwarden_nvml_up 0" in (folder / NAME).read_text()


def test_a_folder_that_goes_is_no_fault(sampler: Sampler, tmp_path: Path) -> None:
    """Without its folder nothing is written, and again when it is back."""
    textfile = Textfile(tmp_path / "none", sampler, interval=2)
    sampler.sample()
    textfile.write()
    (tmp_path / "none").mkdir()
    textfile.write()
    assert _names(tmp_path / "none") == [NAME]


def test_the_file_ends_with_its_writer(tmp_path: Path, scenario_file: Path) -> None:
    """The exporter writes what can be parsed, readable by all, and removes it when it ends."""
    Scenario([Card(0)]).write(scenario_file)
    folder = tmp_path / "textfiles"
    folder.mkdir()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "gpuwarden", "exporter", "--web.listen-address=127.0.0.1:0"),
            f"--jobs.directory={tmp_path / 'jobs'}",
            f"--gpus=simulated:{scenario_file}",
            f"--textfile.directory={folder}",
            "--collect.interval=100ms",
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually((folder / NAME).exists)
        families = list(text_string_to_metric_families((folder / NAME).read_text()))
        assert {"gpu_up", "gpuwarden_nvml_up"} <= {family.name for family in families}
        assert all(sample.timestamp is None for family in families for sample in family.samples)
        assert (folder / NAME).stat().st_mode & 0o777 == 0o644
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert _names(folder) == []
    finally:
        process.kill()
        process.wait()
