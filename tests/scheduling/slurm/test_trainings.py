"""What a job of Slurm trains is read from the script that it was submitted with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.scheduling.slurm.tasks import a_task, box_policy

from gpuwarden.scheduling.predictions import Features
from gpuwarden.scheduling.slurm.observations import Reader
from gpuwarden.scheduling.slurm.queues import entries_of
from gpuwarden.scheduling.slurm.scripts import Comment, script
from gpuwarden.scheduling.slurm.trainings import Trainings, directory_of, words_of
from gpuwarden.scheduling.tasks import Task

if TYPE_CHECKING:
    from tests.slurm_servers import SlurmCluster

    from gpuwarden.scheduling.slurm.clusters import Cluster


def test_the_words_are_those_of_the_task() -> None:
    """Quoted as they were: spaces and quotes in names come back."""
    task = a_task(words=("model=my model's.pt", "data=a b.yaml", "epochs=3"))
    assert isinstance(task, Task)
    assert words_of(script(task, box_policy(), 0.0).text)[-3:] == task.words


def test_the_folder_is_that_in_which_it_starts() -> None:
    """By it files that everybody calls the same are told apart; of other scripts there is none."""
    task = a_task(directory='/home/ana/my "cats"')
    assert directory_of(script(task, box_policy(), 0.0).text) == '/home/ana/my "cats"'
    assert directory_of("#!/bin/sh\n#SBATCH --chdir=relative\nexec gpuwarden train") == ""


@pytest.mark.parametrize(
    "text", ["", "#!/bin/sh\nsleep 60", "#!/bin/sh\nexec python train.py", "exec gpuwarden train '"]
)
def test_of_other_scripts_nothing_is_known(text: str) -> None:
    """Nor of broken ones."""
    assert words_of(text) == ()


def test_a_job_that_runs_tells_what_it_trains(box: SlurmCluster, cluster: Cluster) -> None:
    """Only of gpuwarden's own jobs, and its script is asked for once."""
    command = "true || \nexec gpuwarden train --run-id r model=yolov8n.pt data=coco8.yaml epochs=3"
    comment = Comment("token-1234", "r")
    ours = box.submit(f"sleep 60\n{command}", "--gres=gpu:a100:1", f"--comment={comment}")
    other = box.submit("sleep 60", "--gres=gpu:a100:1")
    for job in (ours, other):
        box.wait_for_state(job, "RUNNING")
    trainings, reader = Trainings(cluster), Reader(cluster)
    reading = reader.read(0.0)
    trainings.look(reading.jobs)
    found = trainings.known(entries_of(reading, box_policy(box)))
    assert set(found) == {str(ours)}
    training = found[str(ours)]
    assert training.epochs == 3
    assert training.features == Features("yolov8n", "640", "16", "a100-40", 1, "coco8.yaml")
    for job in (ours, other):
        box.run("scancel", str(job))
