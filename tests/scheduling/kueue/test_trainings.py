"""What a job of Kubernetes trains is read from its pod template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.scheduling.kueue.clusters import kueue_policy
from tests.scheduling.kueue.lives import life

if TYPE_CHECKING:
    from pathlib import Path


ONE_CARD = kueue_policy(teams=[{"name": "vision", "users": ["ana"], "quota": {"a100-40": 1}}])


def test_a_job_that_was_given_cards_tells_what_it_trains(tmp_path: Path) -> None:
    """By the words that `gpuwarden submit` gave its container, on the cards that it got."""
    with life(tmp_path, ONE_CARD) as found:
        words = ("model=yolov8m.pt", "data=/sets/coco.yaml", "epochs=30", "batch=64")
        job = found.run("night", words=words)
        found.tick(2)
        assert found.driver is not None
        (entry,) = found.driver.entries()
        training = found.driver.trainings()[job]
        assert entry.id == job
        assert training.epochs == 30
        assert training.features.known
        assert (training.features.model, training.features.data) == ("yolov8m", "coco.yaml")
        assert (training.features.card, training.features.gpus) == (entry.gpu_type, 1)


def test_a_data_set_that_everybody_calls_the_same_is_told_by_its_folder(tmp_path: Path) -> None:
    """The container's working folder is where the words are said."""
    with life(tmp_path, ONE_CARD) as found:
        job = found.run("night", words=("model=yolov8m.pt", "data=data.yaml", "batch=64"))
        found.tick(2)
        assert found.driver is not None
        features = found.driver.trainings()[job].features
        assert features.data.startswith("/")
        assert features.data.endswith("/data.yaml")
