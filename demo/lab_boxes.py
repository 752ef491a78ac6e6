"""A lab box of one card beside the demo's node: a high job comes, and a low one leaves for it.

The scheduler's daemon, `gpuwarden submit` and both trainings are real; the card is simulated. It is
watched from outside: the schedule's document says what happened, and the trainings' own files.
"""

from __future__ import annotations

import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import yaml
from tests.servers import Server, fetch, free_port

from demo.datasets import make_detection_dataset
from demo.stack import COMMAND
from gpuwarden import job_files
from gpuwarden.exporter import simulated
from gpuwarden.exporter.scenarios import GIB, Card, Scenario, SimulatedProcess
from gpuwarden.schedule_api import STEPS, EntryState, Outcome, Preemption, ScheduleDocument

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuwarden.job_files import RunDescription, RunStatus
    from gpuwarden.schedule_api import QueueEntry

CARD = "NVIDIA A100-SXM4-40GB"
IMAGES, BATCH = 160, 16
BATCHES = IMAGES // BATCH
LOW_EPOCHS, HIGH_EPOCHS = 12, 1
"""The low one must still train when the high one is there, however busy the machine is."""
WITHIN_SECONDS = 240.0
PAUSE_SECONDS = 0.2
SUBMIT_SECONDS = 60.0


@dataclass(slots=True)
class Account:
    """What became of it.

    Attributes:
        preemption: as the scheduler tells it, or None.
        left_at: the low job's status when it left, or None.
        ended: its last status, or None.
        wrong: what should be otherwise, in words.
    """

    preemption: Preemption | None = None
    left_at: RunStatus | None = None
    ended: RunStatus | None = None
    wrong: list[str] = field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note what is wrong if something does not hold."""
        if not holds:
            self.wrong.append(otherwise)


class LabBox:
    """One host with one card, and its queue.

    Args:
        folder: everything that it writes.
        owner: the user of this process, who submits.
        narrate: told what happens: the job, what, and details.
    """

    def __init__(self, folder: Path, owner: str, narrate: Callable[[str, str, str], None]) -> None:
        self._folder = folder
        self._owner = owner
        self._narrate = narrate
        self._jobs = folder / "run"
        self._scenario = folder / "card.scenario"
        self._policy = folder / "policy.yaml"
        self._socket = folder / "s.sock"
        self._on_card: dict[int, SimulatedProcess] = {}
        self._told: set[tuple[str, str]] = set()
        self._over = threading.Event()
        url = f"http://127.0.0.1:{free_port()}"
        self._server = Server(url, folder / "scheduler.log", [])

    def stop(self) -> None:
        """Come to an end soon; for another thread."""
        self._over.set()

    def play(self, when: Callable[[], bool] = lambda: True) -> Account:
        """Submit both, and see what becomes of them.

        Args:
            when: whether it may begin; asked until it may.
        """
        while not when() and not self._over.wait(PAUSE_SECONDS):
            pass
        self._prepare()
        self._server.start()
        account = Account()
        try:
            self._submit("low", LOW_EPOCHS, team="vision")
            deadline = time.monotonic() + WITHIN_SECONDS
            while time.monotonic() < deadline and not self._look(account):
                if self._over.wait(PAUSE_SECONDS):
                    break
            self._check(account)
        finally:
            self._end()
        return account

    # -- what people and the world would do

    def _prepare(self) -> None:
        self._folder.mkdir(parents=True)
        for name in ("low-1", "high-1"):
            make_detection_dataset(self._data(name), images=IMAGES)
        self._write_card()
        self._policy.write_text(yaml.safe_dump(self._terms(), sort_keys=False))
        library = simulated.build()
        self._server.command = [
            "/usr/bin/env",
            f"LD_LIBRARY_PATH={library.parent}",
            f"{simulated.SCENARIO_VARIABLE}={self._scenario}",
            str(COMMAND),
            "scheduler",
            *("--policy", str(self._policy), "--state", str(self._folder / "state")),
            *("--socket", str(self._socket), "--listen", self._server.url.removeprefix("http://")),
            *("--tick", "1s"),
        ]

    def _terms(self) -> dict[str, object]:
        """A policy of two teams: the card is speech's, and vision borrows it."""
        teams = [
            {"name": "speech", "users": [self._owner], "quota": {"a100": 1}},
            {"name": "vision", "users": [self._owner], "quota": {}, "borrow": {"a100": 1}},
        ]
        return {
            "version": 1,
            "timezone": "UTC",
            "engine": "local",
            "cards": [{"name": "a100", "model": CARD, "memory": "40GiB", "count": 1}],
            "teams": teams,
            "priorities": [
                {"name": "low", "value": 10},
                {"name": "high", "value": 1000, "preempts": ["low"]},
            ],
            "preemption": {
                "minimum_run": "1s",
                "notice": "epoch",
                "deadline": "2m",
                "back_off": "0s",
                "at_most": {"times": 3, "per": "24h"},
            },
            "local": {"jobs": str(self._jobs)},
        }

    def _submit(self, priority: str, epochs: int, *, team: str) -> None:
        name = f"{priority}-1"
        command = [
            str(COMMAND),
            "submit",
            "model=yolov8n.yaml",
            f"data={self._data(name) / 'data.yaml'}",
            f"epochs={epochs}",
            f"batch={BATCH}",
            *("imgsz=64", "workers=0", "plots=False", "exist_ok=True"),
            *(f"project={self._folder / 'runs'}", f"name={name}"),
            *("--policy", str(self._policy), "--socket", str(self._socket)),
            *("--team", team, "--priority", priority, "--name", name),
            *("--time", "1h", "--program", str(COMMAND), "--chdir", str(self._folder), "--yes"),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=SUBMIT_SECONDS
        )
        if done.returncode:
            raise RuntimeError(f"{name} was not taken: {done.stdout}{done.stderr}")
        self._narrate(name, "submitted", f"team {team}, priority {priority}, {epochs} epochs")

    def _data(self, name: str) -> Path:
        return self._folder / "data" / name

    def _write_card(self) -> None:
        card = Card(index=0, name=CARD)
        Scenario(cards=(card,), processes=list(self._on_card.values())).write(self._scenario)

    def _put_on_card(self, name: str) -> None:
        """A training is on the card once it trains; the driver drops it when it ends."""
        status, description = self._status(name), self._description(name)
        fresh = status is not None and status.exit is None and status.phase == "train"
        if not fresh or description is None or description.pid in self._on_card:
            return
        self._on_card[description.pid] = SimulatedProcess(
            card=0, pid=description.pid, memory=6 * GIB, sm=80, mem=30, linger=1.0
        )
        self._write_card()
        self._narrate(name, "on the card", f"pid {description.pid}")

    # -- looking

    def _look(self, account: Account) -> bool:
        """One look; whether both are done."""
        document = ScheduleDocument.decode(fetch(self._server.url + "/v1/schedule"))
        entries = {entry.name: entry for entry in document.entries}
        for entry in document.entries:
            self._say(entry)
            self._put_on_card(entry.name)
        low, high = entries.get("low-1"), entries.get("high-1")
        status = self._status("low-1")
        if high is None and status is not None and status.phase == "train" and status.epoch >= 1:
            self._submit("high", HIGH_EPOCHS, team="speech")
        if status is not None and status.exit is not None and account.left_at is None:
            account.left_at = status
        account.ended = status
        account.preemption = next(iter(document.preemptions), None)
        over = {EntryState.DONE, EntryState.FAILED}
        return all(entry is not None and entry.state in over for entry in (low, high))

    def _say(self, entry: QueueEntry) -> None:
        if (entry.name, entry.state.value) not in self._told:
            self._told.add((entry.name, entry.state.value))
            self._narrate(entry.name, entry.state.value, entry.words)
        if entry.requeues and (entry.name, "came back") not in self._told:
            self._told.add((entry.name, "came back"))
            self._narrate(entry.name, "came back", entry.words)

    def _status(self, name: str) -> RunStatus | None:
        try:
            opened = job_files.read(job_files.status_path(self._jobs, name))
            return job_files.RunStatus.decode(opened.content)
        except (FileNotFoundError, job_files.JobFileError):
            return None

    def _description(self, name: str) -> RunDescription | None:
        try:
            opened = job_files.read(job_files.description_path(self._jobs, name))
            return job_files.RunDescription.decode(opened.content)
        except (FileNotFoundError, job_files.JobFileError):
            return None

    def _check(self, account: Account) -> None:
        """Hold it to account: who left how, what was seen, and where it went on."""
        told, left, ended = account.preemption, account.left_at, account.ended
        account.expect(told is not None, "the scheduler tells of no preemption")
        if told is not None:
            account.expect(told.outcome is Outcome.DONE, f"its outcome is {told.outcome}")
            missing = [step for step in STEPS if step not in told.steps]
            account.expect(not missing, f"no receipt of {', '.join(missing)}")
            times = [told.steps[step] for step in STEPS if step in told.steps]
            account.expect(times == sorted(times), f"its receipts are out of order: {times}")
        account.expect(left is not None, "the low job did not leave")
        if left is not None and left.exit is not None:
            asked = left.exit.code == job_files.EXIT_REQUEUE
            account.expect(asked, f"the low job left with {left.exit.code}")
            account.expect(left.step % BATCHES == 0, f"it left in mid-epoch, at {left.step}")
            saved = left.checkpoint is not None and left.checkpoint.step == left.step
            account.expect(saved, "it left without having saved where it was")
        whole = LOW_EPOCHS * BATCHES
        account.expect(
            ended is not None and ended.exit is not None and ended.exit.code == 0,
            "the low job did not come to its end",
        )
        if ended is not None:
            account.expect(ended.step == whole, f"it ended at {ended.step} of {whole} steps")
            resumed = left is not None and ended.counters.steps == whole - left.step
            account.expect(resumed, "it trained again what it had trained before")

    def _end(self) -> None:
        """Cancel what is left, as an operator would, and stop the daemon."""
        for entry in self._entries():
            if entry.state not in (EntryState.DONE, EntryState.FAILED):
                subprocess.run(
                    [
                        str(COMMAND),
                        *("queue", "cancel", entry.id, "--socket", str(self._socket)),
                    ],
                    capture_output=True,
                    check=False,
                    timeout=SUBMIT_SECONDS,
                )
        for pid in self._on_card:
            _wait_for_end(pid)
        self._server.stop()

    def _entries(self) -> tuple[QueueEntry, ...]:
        try:
            return ScheduleDocument.decode(fetch(self._server.url + "/v1/schedule")).entries
        except OSError:
            return ()


def _wait_for_end(pid: int, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while (
        time.monotonic() < deadline
        and subprocess.run(
            ["/bin/kill", "-0", str(pid)], capture_output=True, check=False
        ).returncode
        == 0
    ):
        time.sleep(PAUSE_SECONDS)
