"""Starting jobs, and finding them again: claims, records, environments."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden import job_files
from gpuwarden.errors import PermanentError, TemporaryError
from gpuwarden.scheduling.local import stubs
from gpuwarden.scheduling.local.processes import ProcessId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.scheduling.tasks import Task

LAUNCH_SECONDS = 60.0
MAX_RECORD_BYTES = 64 * 1024
GIVEN_UP = b"{}"
"""The claim of a daemon that found an attempt without one: no stub may start it any more."""


class LaunchFailed(PermanentError):
    """A job could not be started, for a reason of its own."""


class HostUnfit(TemporaryError):
    """Nothing can be started here now: no memory, no room, too many processes."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that was started.

    Attributes:
        boot: id of the boot that it belongs to.
        stub: its parent.
        job: the process itself.
    """

    boot: str
    stub: ProcessId
    job: ProcessId


@dataclass(frozen=True, slots=True)
class Record:
    """How a job ended.

    Attributes:
        code: exit status; negative: the signal that ended it.
        time: Unix time.
        error: why its program could not be started, or empty.
        empty: when nothing of it was left, or None.
    """

    code: int
    time: float
    error: str = ""
    empty: float | None = None


@dataclass(frozen=True, slots=True)
class User:
    """Whose job it is."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str

    @classmethod
    def of(cls, uid: int) -> User:
        """A user of this host.

        Raises:
            LaunchFailed: there is none.
        """
        try:
            entry = pwd.getpwuid(uid)
        except KeyError as error:
            raise LaunchFailed(f"there is no user with the number {uid} on this host") from error
        return cls(entry.pw_name, uid, entry.pw_gid, entry.pw_dir, entry.pw_shell)


class Launcher:
    """Starts jobs, and reads what became of them.

    Args:
        folder: of claims and records; for this program's user alone.
        jobs: the job files' folder.
    """

    def __init__(self, folder: Path, jobs: Path) -> None:
        self._folder, self._jobs = folder, jobs
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def launch(
        self, attempt: int, task: Task, user: User, *, entry: str, cards: Sequence[str]
    ) -> Claim:
        """Start a job; it is claimed, or it never begins.

        Args:
            attempt: number that no other launch has.
            task: what to run.
            user: as whom.
            entry: the job's id, for its log and its environment.
            cards: UUIDs.

        Raises:
            LaunchFailed: it was not started, and another one might be.
            HostUnfit: no job could be started; this one was not.
            TemporaryError: whether it was started is not known: `settle` tells later.
        """
        orders = {
            "claim": str(self._claim(attempt)),
            "record": str(self._record(attempt)),
            "argv": list(task.command),
            "environment": self.environment(task, user, entry=entry, cards=cards),
            "directory": task.directory,
            "log": log_path(task, entry).name,
            "user": user.name,
            "uid": user.uid,
            "gid": user.gid,
        }
        try:
            answer = subprocess.run(
                # -I -S: neither the folder nor the environment of anybody has a say in it.
                [sys.executable, "-I", "-S", stubs.__file__],
                input=json.dumps(orders),
                capture_output=True,
                text=True,
                timeout=LAUNCH_SECONDS,
                check=False,
                env={"PATH": os.defpath, "LC_ALL": "C.UTF-8"},
                start_new_session=True,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            found = self.settle(attempt)
            if found is not None:
                return found
            raise HostUnfit(f"its parent process could not be started: {error}") from error
        found = self.settle(attempt)
        if found is None:
            said = (answer.stdout or answer.stderr).strip()[-500:]
            kind = LaunchFailed if stubs.GIVEN_UP in said else HostUnfit
            raise kind(f"its parent process did not start it: {said or 'it said nothing'}")
        return found

    def environment(
        self, task: Task, user: User, *, entry: str, cards: Sequence[str]
    ) -> dict[str, str]:
        """All that a job finds in its environment: nothing of the daemon's own."""
        here = str(Path(sys.executable).parent)
        programs = str(Path(task.program).parent) if task.program.startswith("/") else here
        return {
            "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
            "HOME": user.home,
            "USER": user.name,
            "LOGNAME": user.name,
            "SHELL": user.shell,
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(cards),
            job_files.DIRECTORY_VARIABLE: str(self._jobs),
            "GPUWARDEN_RUN_ID": task.run_id,
            "GPUWARDEN_ENTRY": entry,
        }

    def settle(self, attempt: int) -> Claim | None:
        """The claim of an attempt; where there is none, nobody can make it any more.

        Raises:
            TemporaryError: the folder cannot be used.
        """
        path = self._claim(attempt)
        part = path.with_name(f".{path.name}")
        try:
            part.write_bytes(GIVEN_UP)
            with contextlib.suppress(FileExistsError):
                os.link(part, path)
            part.unlink()
            # A stub's claim is whole before it has its name: one that a power cut emptied is ours.
            content = json.loads(path.read_bytes() or GIVEN_UP)
        except (OSError, ValueError) as error:
            raise TemporaryError(f"{path} cannot be read: {error}") from error
        if not content:
            return None
        return Claim(content["boot"], ProcessId(*content["stub"]), ProcessId(*content["job"]))

    def record(self, attempt: int) -> Record | None:
        """How an attempt ended, if it has."""
        try:
            with self._record(attempt).open("rb") as file:
                content: dict[str, Any] = json.loads(file.read(MAX_RECORD_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise TemporaryError(f"{self._record(attempt)} cannot be read: {error}") from error
        return Record(
            int(content["code"]),
            float(content["time"]),
            str(content.get("error", "")),
            content.get("empty"),
        )

    def forget(self, attempt: int) -> None:
        """Remove the files of an attempt that is over."""
        self._claim(attempt).unlink(missing_ok=True)
        self._record(attempt).unlink(missing_ok=True)

    def _claim(self, attempt: int) -> Path:
        return self._folder / f"{attempt}.claim"

    def _record(self, attempt: int) -> Path:
        return self._folder / f"{attempt}.record"


def log_path(task: Task, entry: str) -> Path:
    """Where a job's output goes: beside its work, written by its user, all attempts in one file."""
    return Path(task.directory) / f"{task.name}-{entry}.log"
