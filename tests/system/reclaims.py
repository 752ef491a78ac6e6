"""One node, Slurm and a cluster of pods, all as processes: reclaims from end to end.

Prometheus, Alertmanager, exporter, agent, engine, SMTP and Slurm are real, and so are the processes
of every job; the driver is the simulated one, and Kubernetes the fake API server with its kubelet.
Pytest is not needed: `python -m tests.system.reclaim_table` prints what became of each job.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import getpass
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from demo.stack import Stack, as_launcher
from tests.kubernetes_pods import Kubelet, cgroup_mount, node
from tests.servers import ServerFailed, until
from tests.slurm_servers import CLUSTER, FREEZER, slurm

from gpuwarden.exporter.processes import boot_id, proc_job_id, read_process
from gpuwarden.exporter.scenarios import GIB, Card, Scenario, SimulatedProcess

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Mapping, Sequence

    from tests.slurm_servers import SlurmCluster

HOLDERS = Path(__file__).with_name("holders.py")
KINDS = {
    "process": "process",
    "slurm": "Slurm job",
    "array": "Slurm array task",
    "pod": "pod (L1)",
}
WAYS = {
    "notice": "leaves on notice",
    "term": "leaves on TERM",
    "kill": "needs KILL",
    "survives": "NVML still lists it",
}
CARDS = 18
MEMORY = 20 * GIB
GRACE_SECONDS = 5
SCRAPE_SECONDS = 2
TASK = 1
"""Of an array: the task that holds a card; the one before it must be left alone."""
RULES = f"""
version: 1
limits:
  terminate: {{per_tick: 16, per_hour: 40, per_user_per_day: 40, halt_above_share_of_running: 100%}}
rules:
- id: idle-held
  description: A card is held and nothing happens.
  mode: enforce
  target: job
  match: {{}}
  cold_start: 1s
  ignore_phases: {{}}
  when:
    all:
    - {{signal: gpu_utilization, agg: max, window: 3 samples, at_most: 5%, gpus: all}}
    - {{signal: gpu_memory_share, agg: min, window: 3 samples, above: 10%, gpus: any}}
    - {{silent_for: 5s, signals: [cpu]}}
  for: 4s
  clear_after: 20s
  stages:
  - {{level: light, after: 0s, do: log}}
  - {{level: moderate, after: 0s, do: notify, owner_may: {{keep: 1h, times: 1}}}}
  - {{level: severe, after: 10s, do: terminate, notice_delivered_for: 5s,
     grace: {GRACE_SECONDS}s, max_work_lost: 24h}}
"""


class Ground(Stack):
    """The stack with platforms beside it.

    Args:
        folder: everything that it writes.
        rules: the rule file.
        cluster: Slurm, or None.
        kubelet: pods, or None.
    """

    def __init__(
        self,
        folder: Path,
        rules: Path,
        *,
        cluster: SlurmCluster | None,
        kubelet: Kubelet | None,
    ) -> None:
        super().__init__(folder, rules, owner=getpass.getuser())
        self.cluster = cluster
        self.kubelet = kubelet
        self.held: dict[int, list[SimulatedProcess]] = {}
        self.started: list[Job] = []

    # -- configuration

    def prepare(self) -> None:
        """The stack's own, and the platforms'."""
        super().prepare()
        self.write()
        agent = self.servers["agent"].command
        agent += ["--proof-timeout", "5s", "--limit.terminate-per-hour", "40"]
        self.servers["exporter"].command.append("--state.path=" + str(self.folder / "state"))
        if self.cluster is not None:
            for name in ("exporter", "agent"):
                command = self.servers[name].command
                command[:0] = ["/usr/bin/env", f"SLURM_CONF={self.cluster.config}"]
            self.servers["exporter"].command.append("--collector.slurm")

    def _write_prometheus(self) -> None:
        super()._write_prometheus()
        path = self.folder / "alerting" / "prometheus.yml"
        config = yaml.safe_load(path.read_text())
        (nodes,) = [item for item in config["scrape_configs"] if item["job_name"] == "gpuwarden"]
        nodes |= {"scrape_interval": f"{SCRAPE_SECONDS}s", "scrape_timeout": f"{SCRAPE_SECONDS}s"}
        path.write_text(yaml.safe_dump(config, sort_keys=False))

    def _write_engine(self) -> None:
        super()._write_engine()
        path = self.folder / "engine" / "engine.yaml"
        config: dict[str, Any] = yaml.safe_load(path.read_text())
        config["scrape_interval"] = f"{SCRAPE_SECONDS}s"
        if self.cluster is not None:
            found = {name: shutil.which(name) or "" for name in ("squeue", "scontrol", "scancel")}
            config["slurm"] = {**found, "config": str(self.cluster.config)}
        if self.kubelet is not None:
            settings = self.kubelet.cluster.settings()
            config["kubernetes"] = settings.model_dump(
                mode="json", include={"kubeconfig"}, exclude_none=True
            )
        path.write_text(yaml.safe_dump(config, sort_keys=False))

    # -- jobs

    def write(self) -> None:
        """Say who is on which card."""
        cards = [Card(index=index, minor=100 + index) for index in range(CARDS)]
        processes = [process for found in self.held.values() for process in found]
        Scenario(cards=cards, processes=processes).write(self.scenario)

    def start(self, kind: str, way: str, card: int) -> Job:
        """Start a job and put it on a card."""
        name = f"{kind}-{way}-{card}"
        job = Job(kind, way, card, self.folder / f"{name}.record")
        # Slurm's own notice is its signal; the others are asked through their run.
        run = name if way == "notice" and kind in ("process", "pod") else ""
        words = [sys.executable, str(HOLDERS), "stays" if way in ("kill", "survives") else way]
        words += [str(job.record), run]
        getattr(self, f"_start_{kind}")(job, name, words)
        self.started.append(job)
        (found,) = until(lambda: job.lines("start"), 60)
        job.pid = int(found[1])
        self.put(job)
        return job

    def put(self, job: Job) -> None:
        """Put a job's process on its card; what survives stays listed when it is dead."""
        linger = 3600.0 if job.way == "survives" else 1.0
        process = SimulatedProcess(job.card, job.pid, memory=MEMORY, sm=0, linger=linger)
        self.held.setdefault(job.card, []).append(process)
        self.write()

    def _start_process(self, job: Job, name: str, words: list[str]) -> None:
        started = self.launch(name, words)
        job.process = started
        found = read_process(started.pid)
        if found is None:
            raise ServerFailed(f"{name} ended at once, see {self.folder}/logs")
        job.job_id = proc_job_id(found, boot_id())

    def _start_slurm(self, job: Job, _name: str, words: list[str]) -> None:
        number = self._submitted(job, words)
        job.number = str(number)
        job.job_id = f"slurm-{CLUSTER}-{number}-0"

    def _start_array(self, job: Job, _name: str, words: list[str]) -> None:
        sleeper = f'if [ "$SLURM_ARRAY_TASK_ID" != {TASK} ]; then exec sleep 600; fi'
        number = self._submitted(job, words, f"--array=0-{TASK}", first=sleeper)
        job.number = f"{number}_{TASK}"
        job.beside = f"{number}_{TASK - 1}"
        job.job_id = f"slurm-{CLUSTER}-{number}_{TASK}-0"

    def _submitted(self, job: Job, words: list[str], *options: str, first: str = "") -> int:
        if self.cluster is None:
            raise ServerFailed("there is no Slurm here")
        asked = "#SBATCH --signal=B:USR1@60" if job.way == "notice" else ""
        last = f"{words[-1]!r}"
        line = " ".join([*words[:-1], last])
        return self.cluster.submit(f"{asked}\n{first}\nexec {line}", "--cpus-per-task=1", *options)

    def _start_pod(self, job: Job, name: str, words: list[str]) -> None:
        if self.kubelet is None:
            raise ServerFailed("there are no pods here")
        environment = {
            **self.training_environment(),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }
        pod = self.kubelet.start_job("lab", name, words, grace=GRACE_SECONDS, env=environment)
        job.job_id = pod.job_id

    def end(self) -> None:
        """End every process of a job that is left; Slurm and the kubelet end theirs."""
        for job in self.started:
            if job.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.process.pid, signal.SIGKILL)
                job.process.wait(timeout=10)

    # -- looking

    def audit_of(self, job: Job) -> dict[str, Any] | None:
        """The audit of the last decision about a job, or None before there is one."""
        with self.open_ledger() as ledger:
            row = ledger.execute(
                "SELECT id FROM decisions WHERE job_id=? ORDER BY created_at DESC", (job.job_id,)
            ).fetchone()
        if row is None:
            return None
        found: dict[str, Any] = self.servers["engine"].json(f"/v1/decisions/{row['id']}/audit")
        return found

    def finished(self, job: Job) -> dict[str, Any] | None:
        """The audit of a decision that has its result, or None."""
        found = self.audit_of(job)
        return found if found is not None and found["decision"]["finished_at"] else None

    def why_not(self, job: Job) -> set[str]:
        """What stands between a job and its end now, in the words of the guards."""
        document = self.servers["engine"].json(f"/v1/jobs/{job.job_id}")
        return {block["reason"] for rule in document["rules"] for block in rule["why_not"]}


@dataclass
class Job:
    """A job of the table.

    Attributes:
        kind: key of `KINDS`.
        way: key of `WAYS`.
        card: index of its card.
        record: file in which it writes down what happens to it.
        job_id: as the node names it.
        pid: of the process that holds the card.
        number: Slurm's.
        beside: Slurm's number of a task that must be left alone, or an empty string.
        process: where it is a child of ours.
    """

    kind: str
    way: str
    card: int
    record: Path
    job_id: str = ""
    pid: int = 0
    number: str = ""
    beside: str = ""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def lines(self, what: str) -> list[list[str]]:
        """Its own lines that begin with a word, each as words.

        What its controller starts after it writes into the same file: that is another life.
        """
        if not self.record.exists():
            return []
        found = [line.split() for line in self.record.read_text().splitlines()]
        starts = [place for place, words in enumerate(found) if words[0] == "start"]
        own = found[: starts[1]] if len(starts) > 1 else found
        return [words for words in own if words[0] == what]

    @property
    def alive(self) -> bool:
        """Whether its process is there."""
        if self.process is not None:
            return self.process.poll() is None  # and nothing of it is left for us to reap
        return read_process(self.pid) is not None

    @property
    def saved_at(self) -> float:
        """When it last had everything on disk: when it saved, else when it began."""
        return float((self.lines("saved") or self.lines("start"))[-1][-1])


@contextlib.contextmanager
def ground(folder: Path, *, platforms: bool = True) -> Iterator[Ground]:
    """Everything, up; this process may launch jobs.

    Args:
        folder: everything that it writes; a short path, for it holds a socket.
        platforms: whether with Slurm and pods.
    """
    rules = folder / "rules.yaml"
    rules.write_text(RULES)
    with contextlib.ExitStack() as stack:
        cluster, kubelet = None, None
        if platforms:
            # Munge's socket must be reachable by all.
            folder.chmod(0o755)
            (folder / "slurm").mkdir()
            (folder / "pods").mkdir()
            cluster = stack.enter_context(
                slurm(
                    folder / "slurm",
                    gpus=1,
                    node=f"gw{os.getpid()}",
                    cgroups=True,
                    settings=(f"KillWait={GRACE_SECONDS}",),
                )
            )
            kubelet = stack.enter_context(node(folder / "pods", gpus=CARDS))
        stack.enter_context(as_launcher())
        made = Ground(folder, rules, cluster=cluster, kubelet=kubelet)
        stack.callback(made.end)
        yield stack.enter_context(made)


def platforms_here() -> bool:
    """Whether Slurm and a kubelet can make cgroups here, so that their jobs are seen as theirs."""
    return os.access(FREEZER, os.W_OK) and cgroup_mount() is not None


@dataclass(frozen=True, slots=True)
class Cell:
    """What became of one job.

    Attributes:
        job: the job.
        audit: of its decision.
        lost: seconds of work that were not on disk when its process ended, as it says itself.
    """

    job: Job
    audit: Mapping[str, Any]
    lost: float

    @property
    def ended_by(self) -> str:
        """What ended its process, as the node and the job saw it."""
        if self.job.lines("saved"):
            return self.job.lines("asked")[-1][2]
        return "SIGKILL" if not self.job.alive else "nothing"

    @property
    def told_first(self) -> bool:
        """Whether its owner had the notice on both channels before it was decided."""
        decided = self.audit["decision"]["created_at"]
        looked = self.audit["last_look"]["notices"]
        had = {item["channel"] for item in looked if (item["proven_at"] or "~") < decided}
        return had == {"email", "slack"}

    @property
    def broken(self) -> list[str]:
        """Invariants that the audit shows as broken."""
        wrong = [check for check in self.audit["checks"] if check["holds"] is False]
        return [f"{check['name']}: {check['why']}" for check in wrong]


def cells(here: Ground, jobs: Sequence[Job], *, within: float = 240.0) -> list[Cell]:
    """Wait until each job's decision has its result."""
    deadline = time.monotonic() + within
    found = []
    for job in jobs:
        left = max(1.0, deadline - time.monotonic())
        audit = until(lambda job=job: here.finished(job), left, every=0.5)  # type: ignore[misc]
        gone = [step["at"] for node in audit["nodes"] for step in node["steps"]]
        lost = _moment(max(gone, default=audit["decision"]["finished_at"])) - job.saved_at
        found.append(Cell(job, audit, 0.0 if job.lines("saved") else lost))
    return found


def _moment(text: str) -> float:
    return dt.datetime.fromisoformat(text).timestamp()
