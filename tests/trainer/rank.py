"""A rank without a training, for the launcher's tests; run as a script by the launcher.

$TEST_FOLDER/<rank> says what it does, one word after the other: `exit:N`, `die` (by SIGKILL),
`wait` (for a signal that it heeds), `deaf` (waits, and heeds none), `durable` and `hold` (told to
the launcher), `child` (starts a process that heeds nothing), `say:TEXT` (on standard error),
`print:TEXT`, `slow` (some time before it heeds signals).
It writes its pid, and those of its children, to $TEST_FOLDER/<rank>.pids when it waits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gpuwarden.trainer import ranks
from gpuwarden.trainer.leaving import SIGNALS


class Rank:
    """What this process has heard and started."""

    def __init__(self) -> None:
        self.file = Path(os.environ["TEST_FOLDER"]) / os.environ["RANK"]
        self.heard: list[int] = []
        self.pids = [os.getpid()]

    def run(self) -> None:
        """Do what the file says."""
        words = self.file.read_text("utf-8").split()
        self.file.with_suffix(".started").touch()
        if "slow" in words:
            time.sleep(1)
        for number in SIGNALS:
            signal.signal(number, lambda number, _frame: self.heard.append(number))
        ranks.bind()
        for word in words:
            name, _, value = word.partition(":")
            getattr(self, f"do_{name}")(value)

    def do_slow(self, _value: str) -> None:
        """Was done before."""

    def do_exit(self, value: str) -> None:
        """End with a status; as a training does, without heeding signals any more."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        sys.exit(int(value))

    def do_die(self, _value: str) -> None:
        """End as the kernel ends a process when memory is short."""
        os.kill(os.getpid(), signal.SIGKILL)

    def do_durable(self, _value: str) -> None:
        """Say that a state is on disk."""
        ranks.tell(ranks.DURABLE)

    def do_hold(self, _value: str) -> None:
        """Say that the job is to be held."""
        ranks.tell(ranks.HOLD)

    def do_child(self, _value: str) -> None:
        """Start a process that heeds nothing."""
        self.pids.append(subprocess.Popen([sys.executable, "-c", _CHILD]).pid)

    def do_say(self, value: str) -> None:
        """Complain."""
        sys.stderr.write(f"{value}\n")

    def do_print(self, value: str) -> None:
        """Report."""
        sys.stdout.write(f"{value}\n")

    def do_wait(self, _value: str) -> None:
        """Until a signal comes."""
        self._ready()
        while not self.heard:
            time.sleep(0.01)
        self.file.with_suffix(".heard").write_text(signal.Signals(self.heard[0]).name, "utf-8")

    def do_deaf(self, _value: str) -> None:
        """For good."""
        self._ready()
        while True:
            signal.pause()

    def _ready(self) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(" ".join(map(str, self.pids)), "utf-8")
        new.rename(self.file.with_suffix(".pids"))


_CHILD = """\
import signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
while True:
    signal.pause()
"""

if __name__ == "__main__":
    Rank().run()
