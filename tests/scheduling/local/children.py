"""A job that speaks the trainer's job files without training: `train` words, one behaviour each.

train     counts steps until `<name>.finish` is there; leaves as a trainer does
done      ends at once with 0; `fail` with 1, `leave` with 75, `hold` with 76, `lost` with 77
deaf      publishes nothing and ignores SIGTERM
meek      publishes nothing, and ends with 0 at SIGTERM
stuck     answers a request, and then neither saves nor leaves, nor ends at SIGTERM
rude      leaves a child of its own behind when it ends
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

EXITS = {"done": 0, "fail": 1, "leave": 75, "hold": 76, "lost": 77}
STEPS = 4
"""Of an epoch."""


def say(text: str) -> None:
    """Write a line to the log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Behave."""
    words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    run_id = sys.argv[sys.argv.index("--run-id") + 1]
    behaviour = words["behaviour"]
    say(f"cards {os.environ['CUDA_VISIBLE_DEVICES']}")
    if behaviour in EXITS:
        return EXITS[behaviour]
    if behaviour == "rude":
        subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
        return 0
    if behaviour in {"deaf", "stuck"}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "meek":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if behaviour in {"deaf", "meek"}:
        say("ready")
        while True:
            time.sleep(0.05)
    return Run(run_id, behaviour).loop()


class Run:
    """A loop that saves its step, and goes on from there."""

    def __init__(self, run_id: str, behaviour: str) -> None:
        self.run_id, self.behaviour = run_id, behaviour
        self.jobs = Path(os.environ["GPUWARDEN_JOBS"])
        self.state = Path(f"{run_id}.state")
        self.step = int(self.state.read_text()) if self.state.exists() else 0
        self.saved: dict[str, float] | None = None
        self.request: dict[str, object] | None = None
        self.sequence = 0
        self.signalled = False

    def loop(self) -> int:
        """Train until told otherwise."""
        if self.behaviour != "stuck":
            signal.signal(signal.SIGTERM, self.on_signal)
        self.describe()
        say(f"from {self.step}")
        while True:
            time.sleep(0.02)
            if self.step % STEPS == 0 or not Path(f"{self.run_id}.pause").exists():
                self.step += 1
            self.listen()
            epoch_ended = self.step % STEPS == 0
            if Path(f"{self.run_id}.save").exists():
                self.save()
            if Path(f"{self.run_id}.finish").exists():
                self.save()
                self.publish(exit_code=0)
                return 0
            at_epoch = self.request is not None and self.request["at"] == "epoch"
            asked = self.request is not None and (epoch_ended or not at_epoch)
            if asked and self.behaviour == "dies":
                self.publish("saving")
                os.kill(os.getpid(), signal.SIGKILL)
            if (asked or self.signalled) and self.behaviour != "stuck":
                self.save()
                held = self.request is not None and self.request["then"] == "hold"
                code = 76 if held else 75
                self.publish("leaving", exit_code=code)
                return code
            self.publish("received")

    def on_signal(self, _number: int, _frame: object) -> None:
        """Leave at the next step."""
        self.signalled = True

    def listen(self) -> None:
        """Read the request that stands."""
        try:
            self.request = json.loads((self.jobs / "requests" / f"{self.run_id}.json").read_bytes())
        except FileNotFoundError:
            self.request = None

    def save(self) -> None:
        """Write the state."""
        self.state.write_text(str(self.step))
        self.saved = {"time": time.time(), "step": self.step, "durable": time.time()}

    def describe(self) -> None:
        """Say who trains."""
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        self.write(
            f"{self.run_id}.json",
            {
                "version": 1,
                "run_id": self.run_id,
                "pid": os.getpid(),
                "pid_ns": Path("/proc/self/ns/pid").stat().st_ino,
                "start_ticks": int(stat[19]),
                "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
                "model": "yolov8n",
                "batch": 1,
                "imgsz": 64,
                "amp": False,
                "epochs": 1000,
            },
        )

    def publish(self, answer: str = "received", exit_code: int | None = None) -> None:
        """Say how it goes."""
        self.sequence += 1
        status: dict[str, object] = {
            "version": 1,
            "run_id": self.run_id,
            "sequence": self.sequence,
            "phase": "train",
            "phase_since": time.time(),
            "heartbeat": time.time(),
            "epoch": self.step // STEPS,
            "step": self.step,
            "checkpoint": self.saved,
        }
        if self.request is not None:
            status["request"] = {"decision_id": self.request["decision_id"], "state": answer}
        if exit_code is not None:
            status["exit"] = {"code": exit_code, "reason": "test", "time": time.time()}
        self.write(f"{self.run_id}.status.json", status)

    def write(self, name: str, document: dict[str, object]) -> None:
        """Replace a job file."""
        part = self.jobs / "jobs" / f".{name}.{os.getpid()}"
        part.write_text(json.dumps(document))
        part.replace(self.jobs / "jobs" / name)


if __name__ == "__main__":
    sys.exit(main())
