"""A probe runs real steps on this device and tells what a step costs, and each image."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from tests.trainer.conftest import REPOSITORY, Material

from gpuwarden.errors import InvalidInput
from gpuwarden.estimates import Workload
from gpuwarden.trainer import probes
from gpuwarden.trainer.probes import Probe, Trial

if TYPE_CHECKING:
    from pathlib import Path


def probe(few: Trial, many: Trial) -> Probe:
    """What two trials make."""
    return Probe(device="cpu", few=few, many=many, loader_seconds=0.01, workers=2)


def test_two_trials_tell_the_step_from_its_images() -> None:
    """100 ms and 20 ms for each image; 1000 bytes and 50 for each image."""
    found = probe(Trial(4, 0.18, 0.0, 1200), Trial(16, 0.42, 0.08, 1800))
    assert found.image_seconds == pytest.approx(0.02)
    assert found.fixed_seconds == pytest.approx(0.10)
    assert found.image_bytes == pytest.approx(50)
    assert found.fixed_bytes == pytest.approx(1000)
    assert found.images_per_second == pytest.approx(16 / 0.5)
    assert found.wait_share == pytest.approx(0.16)
    assert found.largest_batch(3000) == 40
    assert found.largest_batch(500) == 0


def test_a_larger_batch_that_takes_no_longer_costs_nothing_per_image() -> None:
    """Where launching the operations bounds a step, noise must not make time negative."""
    found = probe(Trial(1, 0.050, 0.0, None), Trial(4, 0.049, 0.0, None))
    assert found.image_seconds == 0
    assert found.fixed_seconds == pytest.approx(0.049)
    assert found.image_bytes is None
    assert found.largest_batch(1e9) is None


@pytest.mark.parametrize(
    ("workload", "task", "complaint"),
    [
        (Workload(batch=1), "detect", "a batch of at least 2"),
        (Workload(batch=4, gpus=2), "detect", "measures one card"),
        (Workload(batch=4), "segment", "needs data=YAML"),
    ],
)
def test_what_cannot_be_probed_is_refused(workload: Workload, task: str, complaint: str) -> None:
    """Before anything is built."""
    with pytest.raises(InvalidInput, match=complaint):
        probes.run("yolov8n.yaml", workload, task=task)


def test_a_batch_that_ultralytics_halves_is_refused() -> None:
    """Out of memory it goes on with half the batch, whose steps must not pass for whole ones.

    The class is private: memory cannot be made to run out on a device that does not count it.
    """
    watch = probes._Watch(iter(range(10)).__next__, 16, 3)
    watch.on_batch(SimpleNamespace(batch_size=16, device="cuda:0"))
    with pytest.raises(InvalidInput, match="batch=16 does not fit"):
        watch.on_batch(SimpleNamespace(batch_size=8, device="cuda:0"))


@pytest.mark.training
def test_real_steps_are_measured_on_the_users_data(material: Material) -> None:
    """On the CPU: times and their split, no memory, and nothing left of the training."""
    before = sorted(material.data.parent.rglob("*.pt"))
    found = probes.run(
        str(material.model), Workload(batch=8, imgsz=64), task="detect", data=material.data, steps=3
    )
    assert (found.few.batch, found.many.batch) == (2, 8)
    for trial in (found.few, found.many):
        assert trial.step_seconds > 0
        assert trial.wait_seconds > 0
        assert trial.memory is None
    assert found.loader_seconds > 0
    assert (found.device, found.workers) == ("cpu", 0)
    assert sorted(material.data.parent.rglob("*.pt")) == before


@pytest.mark.training
def test_a_batch_that_the_data_cannot_fill_is_refused(material: Material) -> None:
    """Its steps would be smaller than they are said to be."""
    with pytest.raises(InvalidInput, match="fewer than the 64 images"):
        probes.run(
            str(material.model),
            Workload(batch=256, imgsz=64),
            task="detect",
            data=material.data,
            steps=1,
        )


@pytest.mark.training
def test_the_command_probes_with_drawn_images(material: Material, tmp_path: Path) -> None:
    """No data set is needed; the answer is all that is printed."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "gpuwarden", "estimate", "--probe", "--json"),
            *(f"model={material.model}", "batch=4", "imgsz=64", "device=cpu"),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), *sys.path]),
            "TMPDIR": str(tmp_path),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)["probe"]
    assert answer["many"]["batch"] == 4
    assert answer["images_per_second"] > 0
    assert answer["device"] == "cpu"
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
