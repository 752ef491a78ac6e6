"""The five jobs of the demo, and the successor that takes a card when its job is ended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.servers import free_port

from demo.datasets import make_detection_dataset
from demo.stack import CARDS, COMMAND
from gpuwarden import job_files
from gpuwarden.exporter.processes import boot_id, proc_job_id, read_process
from gpuwarden.exporter.scenarios import GIB, Scenario, SimulatedProcess

if TYPE_CHECKING:
    from demo.stack import Stack

WORKLOADS = Path(__file__).with_name("workloads")
IMAGES = 160
LINGER_SECONDS = 2.0
"""How long a simulated card keeps a process's memory after its death."""


@dataclass(slots=True)
class Job:
    """A job of the demo.

    Attributes:
        name: short name, also that of its log and, for trainings, of its run.
        title: what it is, for people.
        card: index of the simulated card.
        memory: bytes that it uses there once it trains (trainings) or at once (the others).
        busy: per cent of time that its kernels run.
        after: name of the job whose memory it takes over, or an empty string.
        training: whether it is a training, which touches its card only when it begins to train.
        process: its root process, once started.
        job_id: as the node will name it.
        on_card: whether the driver lists it.
        reported: whether its end has been told.
        earlier: job ids of earlier attempts.
    """

    name: str
    title: str
    card: int
    memory: int
    busy: int
    after: str = ""
    training: bool = False
    process: subprocess.Popen[bytes] | None = None
    job_id: str = ""
    on_card: bool = False
    reported: bool = False
    earlier: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        """Process id of the root."""
        if self.process is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self.process.pid

    @property
    def status(self) -> int | None:
        """Exit status of the root process; None while it runs or before it is started."""
        return None if self.process is None else self.process.poll()

    @property
    def ended(self) -> bool:
        """Whether the root process has ended."""
        return self.status is not None


def cast() -> dict[str, Job]:
    """The jobs by name."""
    jobs = (
        Job("fitting", "training in line with its profile", 0, 4 * GIB, 70, training=True),
        Job("hog", "training that fills the card and is slow", 1, 37 * GIB, 60, training=True),
        Job("notebook", "crashed notebook, memory held", 2, 30 * GIB, 0),
        Job("starved", "training starved by its loader", 3, 3 * GIB, 95, training=True),
        Job("tensorboard", "shared service, whitelisted", 0, 6 * GIB, 0),
        Job("waiting", "takes the notebook's card", 2, 30 * GIB, 85, after="notebook"),
    )
    return {job.name: job for job in jobs}


class Cards:
    """The simulated cards of the node, and who is on them."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._processes: dict[int, SimulatedProcess] = {}

    def put(self, job: Job, *, after: int | None = None) -> None:
        """Put a job's root process on its card."""
        self._processes[job.pid] = SimulatedProcess(
            card=job.card,
            pid=job.pid,
            memory=job.memory,
            sm=job.busy,
            mem=job.busy // 2,
            linger=LINGER_SECONDS,
            after=after,
        )
        job.on_card = True
        self.write()

    def write(self) -> None:
        """Replace the scenario that the driver reads."""
        Scenario(cards=CARDS, processes=list(self._processes.values())).write(self._stack.scenario)


class Starter:
    """Starts jobs with the command lines that they have in life."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._data: dict[str, Path] = {}

    def training(self, job: Job, *words: str, environment: dict[str, str]) -> None:
        """Start `gpuwarden train`; a second start of the same job resumes its run."""
        if job.name not in self._data:
            folder = self._stack.folder / "data" / job.name
            self._data[job.name] = make_detection_dataset(folder, images=IMAGES)
        command = [
            str(COMMAND),
            "train",
            "--run-id",
            job.name,
            "--trainer",
            "demo.paced:PacedTrainer",
            "model=yolov8n.yaml",
            f"data={self._data[job.name]}",
            "imgsz=64",
            "workers=0",
            "device=cpu",
            "plots=False",
            "resume=auto",
            "exist_ok=True",
            f"project={self._stack.folder / 'runs'}",
            f"name={job.name}",
            *words,
        ]
        self._started(job, command, environment)

    def fitting(self, job: Job) -> None:
        """8 images a second, as its profile expects."""
        self.training(
            job,
            "batch=8",
            "epochs=5",
            environment={"GPUWARDEN_DEMO_LOADER_SECONDS": "1.0"},
        )

    def hog(self, job: Job, step_seconds: float = 2.5) -> None:
        """6.4 images a second where its profile expects 32."""
        self.training(
            job,
            "batch=16",
            "epochs=6",
            environment={"GPUWARDEN_DEMO_STEP_SECONDS": str(step_seconds)},
        )

    def starved(self, job: Job) -> None:
        """0.4 images a second where its profile expects 20, all of the time waiting for data."""
        self.training(
            job,
            "batch=4",
            "epochs=50",
            environment={"GPUWARDEN_DEMO_LOADER_SECONDS": "10"},
        )

    def notebook(self, job: Job) -> None:
        """A Jupyter kernel by its command line; two children, deaf to SIGTERM."""
        connection = self._stack.folder / "kernel-7f9c2ba4.json"
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", str(connection)]
        self._started(job, command, {"PYTHONPATH": str(WORKLOADS)})

    def tensorboard(self, job: Job) -> None:
        """A service whose executable belongs to root, as the whitelist demands."""
        self._started(job, [str(tensorboard_path(self._stack.folder)), str(free_port())], {})

    def waiting(self, job: Job) -> None:
        """The job that has waited for the notebook's card."""
        self._started(job, ["/bin/sleep", "900"], {})

    def _started(self, job: Job, command: list[str], environment: dict[str, str]) -> None:
        if job.job_id:
            job.earlier.append(job.job_id)
        job.process = self._stack.launch(job.name, command, environment)
        job.on_card, job.reported = False, False
        process = read_process(job.pid)
        if process is None:
            raise RuntimeError(f"{job.name} ended at once, see {self._stack.folder}/logs")
        job.job_id = proc_job_id(process, boot_id())


def tensorboard_path(folder: Path) -> Path:
    """Where the service's executable is; the whitelist names it."""
    return folder / "bin" / "tensorboard"


def install_tensorboard(folder: Path) -> None:
    """Compile the service and give it to root: a whitelisted executable must be root's.

    Raises:
        PermissionError: this user is neither root nor may use sudo.
    """
    path = tensorboard_path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    built = folder / "tensorboard.built"
    compiler = shutil.which("gcc") or "/usr/bin/gcc"
    source = str(WORKLOADS / "tensorboard.c")
    subprocess.run([compiler, "-O2", "-o", str(built), source], check=True, timeout=120)
    command = ["install", "-o", "root", "-m", "755", str(built), str(path)]
    if os.geteuid() != 0:
        if shutil.which("sudo") is None:
            raise PermissionError(f"run as root: {' '.join(command)}")
        command = ["sudo", "-n", *command]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise PermissionError(f"{' '.join(command)}: {done.stderr.strip()}")


def run_status(stack: Stack, job: Job) -> job_files.RunStatus | None:
    """What a training last said of itself, or None before it says anything."""
    try:
        opened = job_files.read(job_files.status_path(stack.jobs, job.name))
        return job_files.RunStatus.decode(opened.content)
    except (FileNotFoundError, job_files.JobFileError):
        return None
