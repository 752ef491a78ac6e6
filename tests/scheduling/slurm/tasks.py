"""Tasks and a policy for a Slurm of the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.scheduling.policy_files import a_policy

from gpuwarden.scheduling.tasks import Task

if TYPE_CHECKING:
    from pathlib import Path

    from tests.slurm_servers import SlurmCluster

    from gpuwarden.scheduling.policies import Policy

CARDS = [
    {
        "name": "a100-40",
        "model": "NVIDIA A100-SXM4-40GB",
        "memory": "40GiB",
        "count": 4,
        "slurm": {"gres": "a100"},
    }
]
TEAMS = [
    {"name": "vision", "users": ["ana", "root"], "quota": {"a100-40": 3}},
    {"name": "speech", "users": ["cy"], "quota": {"a100-40": 1}},
]
PRIORITIES = [{"name": "normal", "value": 100}, {"name": "high", "value": 1000}]


def a_task(**changes: Any) -> Task:
    """A small training, with some of its fields changed."""
    return Task(
        **{
            "name": "exp1",
            "run_id": "exp1",
            "words": ("model=yolov8n", "data=coco8.yaml", "epochs=3"),
            "user": "root",
            "team": "vision",
            "priority": "normal",
            "gpus": 1,
            "directory": "/tmp",  # noqa: S108
            "gpu_type": "a100-40",
            "time_limit_seconds": 600.0,
        }
        | changes
    )


def box_policy(cluster: SlurmCluster | None = None, **parts: object) -> Policy:
    """A policy whose cards and teams are those of a cluster of `tests.slurm_accounting`."""
    slurm: dict[str, object] = {"preempt": "qos", "timeout": "20s"}
    if cluster is not None:
        slurm |= {"config": str(cluster.config), "programs": str(_programs(cluster))}
    usual = {
        "cards": CARDS,
        "teams": TEAMS,
        "priorities": PRIORITIES,
        "budgets": None,
        "images": None,
        "slurm": slurm,
    }
    return a_policy(**(usual | parts))


def _programs(cluster: SlurmCluster) -> Path:
    return cluster.program("squeue").parent
