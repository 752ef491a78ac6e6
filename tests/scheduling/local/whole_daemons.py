"""`gpuwarden scheduler` of a lab box as a process of its own, with the simulated driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from tests.scheduling.local.boxes import PROGRAM
from tests.scheduling.local.policy_texts import document

from gpuwarden import job_files
from gpuwarden.errors import ServiceUnavailable
from gpuwarden.exporter import simulated
from gpuwarden.scheduling.daemon_clients import DaemonClient
from gpuwarden.scheduling.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuwarden.schedule_api import Preemption, QueueEntry, ScheduleDocument

REPOSITORY = Path(__file__).resolve().parents[3]


class WholeDaemon:
    """A daemon that may be killed and started again; jobs show up on the cards that they got.

    Args:
        folder: for everything.
        cards: how many.
    """

    def __init__(self, folder: Path, *, cards: int = 1) -> None:
        self.folder, self.cards = folder, cards
        self.jobs, self.work = folder / "node", folder / "work"
        self.work.mkdir()
        self.socket = folder / "s.sock"
        self.policy = folder / "policy.yaml"
        self.scenario = folder / "scenario"
        said = document(
            cards=[{"name": "a100", "model": "NVIDIA A100", "memory": "40GiB", "count": cards}],
            teams=[{"name": "vision", "users": ["root"], "quota": {"a100": cards}}],
            preemption={
                "minimum_run": "0s",
                "notice": "epoch",
                "deadline": "5m",
                "back_off": "0s",
                "at_most": {"times": 3, "per": "24h"},
            },
            local={"jobs": str(self.jobs)},
            operators={"users": [], "groups": []},
            windows=None,
            bookings=None,
        )
        self.policy.write_text(yaml.safe_dump(said), "utf-8")
        self.client = DaemonClient(self.socket)
        self.process: subprocess.Popen[bytes] | None = None
        self.seen: dict[int, int] = {}
        """pid -> card of every job there was: what has ended lingers a while by itself."""
        self.show({})

    def show(self, pids: dict[int, int]) -> None:
        """Put processes on cards: pid -> index; their memory lingers for a while."""
        lines = [
            f'card index={index} uuid=GPU-{index} name="NVIDIA A100" memory=42949672960'
            for index in range(self.cards)
        ]
        lines += [
            f"process card={index} pid={pid} memory=8589934592 linger=1"
            for pid, index in sorted(pids.items())
        ]
        part = self.scenario.with_suffix(".part")
        part.write_text("\n".join(lines) + "\n")
        part.replace(self.scenario)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY / "src"),
            "LD_LIBRARY_PATH": str(simulated.build().parent),
            simulated.SCENARIO_VARIABLE: str(self.scenario),
        }
        command = [
            *(sys.executable, "-m", "gpuwarden", "scheduler"),
            *("--policy", str(self.policy), "--state", str(self.folder / "state")),
            *("--socket", str(self.socket), "--listen", "none", "--tick", "100ms"),
        ]
        with (self.folder / "daemon.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.until(lambda _document: True)

    def kill(self) -> None:
        """End it as nothing else does."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def stop(self) -> None:
        """Cancel what is there, and end it in order."""
        if self.process is None:
            self.start()
        assert self.process is not None

        def ended(found: ScheduleDocument) -> bool:
            open_ones = [each for each in found.entries if each.state not in ("done", "failed")]
            for each in open_ones:
                self.client.ask("POST", f"/v1/jobs/{each.id}/cancel", body={})
            return not open_ones

        self.until(ended)
        self.process.terminate()
        assert self.process.wait(timeout=30) == 0

    def schedule(self) -> ScheduleDocument | None:
        """What it shows; None while it does not answer. Jobs are put on their cards meanwhile."""
        self.seen |= self._on_cards()
        self.show(self.seen)
        try:
            return self.client.schedule()
        except ServiceUnavailable:
            return None

    def _on_cards(self) -> dict[int, int]:
        """Pid -> card of jobs, by their claims and what they were given."""
        found = {}
        for claim in (self.folder / "state").rglob("*.claim"):
            content = json.loads(claim.read_text() or "{}")
            if not content:
                continue
            pid = content["job"][0]
            try:
                given = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            for word in given:
                if word.startswith(b"CUDA_VISIBLE_DEVICES=GPU-"):
                    found[pid] = int(word.rpartition(b"-")[2])
        return found

    def until(
        self, what: Callable[[ScheduleDocument], Any], *, seconds: float = 60.0
    ) -> ScheduleDocument:
        """The first schedule of which something is true.

        Raises:
            AssertionError: it never was.
        """
        deadline = time.monotonic() + seconds
        while True:
            found = self.schedule()
            if found is not None and what(found):
                return found
            assert time.monotonic() < deadline, (found, (self.folder / "daemon.log").read_text())
            time.sleep(0.05)

    def submit(self, name: str, priority: str, **others: Any) -> str:
        """Submit a child that behaves, or what `words` and `program` say."""
        program = self.folder / "gpuwarden"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I {PROGRAM} "$@"\n', "utf-8")
        program.chmod(0o755)
        chosen = {
            "words": ("model=yolov8n", "behaviour=train"),
            "program": str(program),
            **others,
        }
        task = Task(
            name=name,
            run_id=name,
            user="whoever",
            team="vision",
            priority=priority,
            gpus=1,
            directory=str(self.work),
            **chosen,
        )
        body = {"task": task.as_document(), "token": name}
        return str(self.client.ask("POST", "/v1/jobs", body=body)["id"])

    def steps_done(self, run_id: str) -> int:
        """Steps that a run has published."""
        try:
            content = job_files.read(job_files.status_path(self.jobs, run_id)).content
        except FileNotFoundError:
            return 0
        return job_files.RunStatus.decode(content).step


def entry_of(found: ScheduleDocument, entry: str) -> QueueEntry:
    """One of the queue."""
    return next(each for each in found.entries if each.id == entry)


def is_in(found: ScheduleDocument, entry: str, state: str) -> bool:
    """Whether a job is in a state; the schedule may be older than the job."""
    return any(each.id == entry and each.state == state for each in found.entries)


def receipt_of(found: ScheduleDocument, victim: str) -> Preemption | None:
    """The newest preemption of a job, or None."""
    own = [each for each in found.preemptions if each.victim == victim]
    return own[-1] if own else None


def timeline(found: Preemption) -> str:
    """The steps with the seconds from one to the next, for people."""
    times = list(found.steps.items())
    return ", ".join(
        f"{name} +{time - times[max(number - 1, 0)][1]:.2f} s"
        for number, (name, time) in enumerate(times)
    )
