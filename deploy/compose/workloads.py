#!/usr/bin/env python3
"""The jobs of compose.yaml's simulated node: a training that works and a notebook that crashed.

Real processes on simulated cards: this script writes the scenario that the simulated driver reads.
When the notebook has been ended, another one crashes five minutes later, so that there is always
something to see.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
from pathlib import Path

from gpuwarden.exporter.scenarios import GIB, Card, Scenario, SimulatedProcess

LAUNCHER = "gw-launcher"
"""Command name that the exporter and the agent take for a launcher of jobs."""
PAUSE_SECONDS = 300
WAIT = "import signal\nwhile True:\n    signal.pause()\n"
TRAIN = """
import itertools, time
for step in itertools.count(step=100):
    print(time.strftime("%FT%TZ"), f"step={step} loss={4 / (1 + step / 1e4):.3f}", flush=True)
    time.sleep(5)
"""
CARDS = [Card(index) for index in range(4)]


def start(script: str, log: Path | None = None) -> subprocess.Popen[bytes]:
    """A job: a process in a session of its own, whose output goes to a file if there is one."""
    with (Path("/dev/null") if log is None else log).open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def on_cards(training: int, notebook: int | None) -> Scenario:
    """The scenario with a training on card 0, and a notebook on card 1 if there is one."""
    processes = [SimulatedProcess(card=0, pid=training, memory=12 * GIB, sm=85, mem=45)]
    if notebook is not None:
        held = SimulatedProcess(card=1, pid=notebook, memory=30 * GIB, sm=0, mem=0, linger=2)
        processes.append(held)
    return Scenario(cards=CARDS, processes=processes)


def main() -> None:
    """Keep the jobs running until a signal ends this script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", type=Path, required=True, help="file to write")
    parser.add_argument("--free", action="store_true", help="write four free cards, and leave")
    parser.add_argument("--logs", type=Path, help="folder that the training writes its log to")
    options = parser.parse_args()
    if options.free:
        Scenario(cards=CARDS).write(options.scenario)
        return
    leave = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: leave.set())
    Path("/proc/self/comm").write_text(LAUNCHER)
    log = None if options.logs is None else options.logs / "training.log"
    training, notebook = start(TRAIN, log), start(WAIT)
    try:
        on_cards(training.pid, notebook.pid).write(options.scenario)
        while not leave.wait(1):
            if notebook.poll() is not None:
                # The driver forgets the dead process by itself, two seconds later.
                if leave.wait(PAUSE_SECONDS):
                    break
                notebook = start(WAIT)
                on_cards(training.pid, notebook.pid).write(options.scenario)
    finally:
        for process in (training, notebook):
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
