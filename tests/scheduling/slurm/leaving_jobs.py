"""Real trainings as Slurm's jobs, one of which has to leave for another, and what was seen."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo.datasets import TINY_MODEL, make_detection_dataset
from tests.scheduling.policy_files import a_policy
from tests.scheduling.slurm.tasks import CARDS, TEAMS
from tests.servers import until

from gpuwarden import job_files
from gpuwarden.platforms.slurm_listings import decode_listing, listing_format
from gpuwarden.scheduling.slurm.names import partition_of, qos_of
from gpuwarden.scheduling.slurm.receipts import Receipts, signs_in
from gpuwarden.scheduling.slurm.scripts import Comment, script
from gpuwarden.scheduling.tasks import Task

if TYPE_CHECKING:
    from tests.slurm_servers import SlurmCluster

    from gpuwarden.platforms.slurm_listings import ListedJob
    from gpuwarden.schedule_api import Preemption
    from gpuwarden.scheduling.policies import Policy

REPOSITORY = Path(__file__).resolve().parents[3]
BATCHES = 3
"""Of an epoch."""
EPOCHS = 3
_SECONDS = 120.0


def leaving_policy(preempt: str, *, low: str = "low") -> Policy:
    """Two priorities of a Slurm with four cards; the higher one asks the lower to leave.

    Args:
        preempt: `qos` or `partitions`.
        low: name of the lower one.
    """
    usual: dict[str, Any] = {
        "cards": CARDS,
        "teams": [TEAMS[0] | {"quota": {"a100-40": 4}}],
        "priorities": [
            {"name": low, "value": 10},
            {"name": "high", "value": 100, "preempts": [low]},
        ],
        "budgets": None,
        "images": None,
        "bookings": None,
        "slurm": {"preempt": preempt},
        "preemption": {
            "minimum_run": "0s",
            "notice": "epoch",
            "deadline": "60s",
            "back_off": "0s",
            "at_most": {"times": 9, "per": "1h"},
        },
    }
    return a_policy(**usual)


@dataclass
class Yard:
    """Where trainings are submitted from: their data, their folders, and who watches.

    Attributes:
        cluster: the Slurm.
        policy: by which jobs are written.
        folder: of data, projects and job files.
        receipts: what was seen.
    """

    cluster: SlurmCluster
    policy: Policy
    folder: Path
    receipts: Receipts = field(init=False)

    def __post_init__(self) -> None:
        """Make a model, data and a node's folder for job files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("jobs", "requests"):
            (self.node / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "tiny.yaml").write_text(TINY_MODEL, "utf-8")
        if not (self.folder / "data").exists():
            make_detection_dataset(self.folder / "data", images=8 * BATCHES)
        self.receipts = Receipts(self.policy, signs_in(self.node))

    @property
    def node(self) -> Path:
        """Root of the job files."""
        return self.folder / "node"

    def submit(self, run_id: str, *, priority: str, gpus: int = 4, pace: float = 0.5) -> int:
        """A training by the product's own script; its command goes to this tree's Python.

        Args:
            run_id: its name.
            priority: of the policy.
            gpus: cards.
            pace: seconds between two batches.
        """
        task = Task(
            name=run_id,
            run_id=run_id,
            words=(
                f"model={self.folder / 'tiny.yaml'}",
                f"data={self.folder / 'data/data.yaml'}",
                *(f"{name}={value}" for name, value in self.words(run_id).items()),
            ),
            options=("--trainer=tests.scheduling.slurm.digests:Digesting",),
            user="root",
            team="vision",
            priority=priority,
            gpus=1,
            directory=str(REPOSITORY),
            gpu_type="a100-40",
            time_limit_seconds=600.0,
        )
        text = script(task, self.policy, time.time()).text
        assert text.count("exec gpuwarden ") == 1
        path = self.folder / f"{run_id}.sh"
        path.write_text(
            text.replace("exec gpuwarden ", f"exec {sys.executable} -m gpuwarden "), "utf-8"
        )
        comment = str(Comment(secrets.token_hex(8), run_id))
        environment = {
            job_files.DIRECTORY_VARIABLE: str(self.node),
            "YOLO_OFFLINE": "1",
            "YOLO_AUTOINSTALL": "0",
            "YOLO_CONFIG_DIR": str(self.folder / "ultralytics"),
            "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}",
            "PYTHONUNBUFFERED": "1",
            "GPUWARDEN_DEMO_LOADER_SECONDS": str(pace),
            "OMP_NUM_THREADS": "1",
            "PATH": os.environ["PATH"],
        }
        exports = ",".join(f"{name}={value}" for name, value in environment.items())
        return int(
            self.cluster.run(
                "sbatch",
                "--parsable",
                f"--export={exports}",
                f"--gres=gpu:a100:{gpus}",
                f"--comment={comment}",
                f"--output={self.log(run_id)}",
                str(path),
            ).partition(";")[0]
        )

    def words(self, run_id: str) -> dict[str, object]:
        """Words of a short training."""
        return {
            "epochs": EPOCHS,
            "batch": 8,
            "imgsz": 64,
            "plots": False,
            "workers": 0,
            "verbose": False,
            "optimizer": "AdamW",
            "project": self.folder / "runs",
            "name": run_id,
        }

    def log(self, run_id: str) -> Path:
        """What a training prints, over all its attempts."""
        return self.folder / f"{run_id}.log"

    def status(self, run_id: str) -> job_files.RunStatus | None:
        """What a training has published last."""
        try:
            content = job_files.read(job_files.status_path(self.node, run_id)).content
        except FileNotFoundError:
            return None
        return job_files.RunStatus.decode(content)

    def digest(self, run_id: str) -> dict[str, str]:
        """What a complete training has learnt."""
        (path,) = (self.folder / "runs").glob(f"{run_id}*/digest.json")
        found: dict[str, str] = json.loads(path.read_text("utf-8"))
        return found

    def look(self) -> dict[int, ListedJob]:
        """One look at the queue, which the receipts take in as well."""
        mark = f"|{secrets.token_hex(8)}"
        words = ("squeue", "--noheader", "--states=all", "-O", listing_format(mark))
        now = time.time()
        self.cluster.environment["SLURM_TIME_FORMAT"] = "%s"
        jobs = decode_listing(self.cluster.run(*words), mark)
        self.receipts.observe(jobs, now)
        return {each.job.job_id: each for each in jobs}

    def wait(self, what: Any, run_id: str = "low") -> Any:
        """Look until something is so.

        Args:
            what: asked with all jobs by their numbers.
            run_id: whose log is shown where it never is.

        Raises:
            AssertionError: it never is.
        """
        try:
            return until(lambda: what(self.look()), _SECONDS, every=0.2)
        except TimeoutError:
            log = self.log(run_id)
            said = log.read_text("utf-8", errors="replace")[-3000:] if log.exists() else "nothing"
            queue = self.cluster.run("squeue", "--states=all")
            raise AssertionError(f"{self.receipts.preemptions()}\n{queue}\n{said}") from None

    def wait_for_step(self, run_id: str, step: int) -> job_files.RunStatus:
        """Until a training has done so many batches."""

        def reached(_: object) -> job_files.RunStatus | None:
            now = self.status(run_id)
            return now if now is not None and now.exit is None and now.step >= step else None

        found: job_files.RunStatus = self.wait(reached, run_id)
        return found

    def preemption(self) -> Preemption:
        """The only one that was seen."""
        (found,) = self.receipts.preemptions()
        return found


def qos_words(policy: Policy, priority: str) -> tuple[str, ...]:
    """How a job of another kind asks for a priority."""
    qos, partition = qos_of(policy, priority), partition_of(policy, "a100-40", priority)
    return (
        *(() if qos is None else (f"--qos={qos}",)),
        *(() if partition is None else (f"--partition={partition}",)),
    )
