"""Servers that start jobs and whose name does not tell it: `python -m jupyterlab`, PyCharm's java.

Each kernel or terminal of such a server is a job of its own. An interpreter's name says nothing, so
its command line is looked at: once per process, and never for longer than a moment.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.exporter.blocking_calls import BlockingCalls
from gpuwarden.exporter.processes import CLOCK_TICKS, PROC, arguments

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gpuwarden.exporter.processes import Process

MAX_KNOWN = 8192
"""Processes whose answer is kept; beyond it all are asked again."""
SETTLED_SECONDS = 2.0
"""A younger process may still be about to become another program."""

_INTERPRETERS = re.compile(r"(?:python|pypy)[0-9.]*|java")
_TAKES_VALUE = re.compile(r"[cmXW]")
_PACKAGES = frozenset(
    {
        "batchspawner",
        "enterprise_gateway",
        "jupyter_server",
        "jupyterhub",
        "jupyterlab",
        "kernel_gateway",
        "nbclassic",
        "notebook",
        "voila",
    }
)
_SCRIPTS = frozenset(
    {
        "batchspawner-singleuser",
        "jupyter-enterprisegateway",
        "jupyter-kernelgateway",
        "jupyter-lab",
        "jupyter-labhub",
        "jupyter-nbclassic",
        "jupyter-notebook",
        "jupyter-server",
        "jupyter-voila",
        "jupyterhub",
        "jupyterhub-singleuser",
        "spyder",
        "voila",
    }
)
_SUBCOMMANDS = frozenset({"lab", "labhub", "nbclassic", "notebook", "server", "voila"})
_IDES = (
    "com.intellij.idea.",
    "com.jetbrains.",
    "-Didea.paths.selector=",
    "-Didea.platform.prefix=",
)


class JobServers:
    """Says of processes whether they are such servers. Safe for threads."""

    def __init__(
        self, *, unknown: bool, calls: BlockingCalls | None = None, proc: Path = PROC
    ) -> None:
        """Know nobody yet.

        Args:
            unknown: the answer for a process whose command line is not to be had in time.
            calls: makes calls that a process may make hang.
            proc: where procfs is mounted.
        """
        self._unknown = unknown
        self._proc = proc
        self._calls = calls if calls is not None else BlockingCalls()
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int, str], bool] = {}

    def includes(self, process: Process) -> bool:
        """Whether a process is a server that starts jobs, by its command line."""
        if not _INTERPRETERS.fullmatch(process.comm):
            return False
        # A process that becomes another program mostly gets another name.
        key = (*process.identity, process.comm)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                return known
            words = self._calls.make(process.uid, lambda: arguments(process.pid, self._proc))
            if words is None:
                return self._unknown
            found = is_job_server(words)
            if _age(process) >= SETTLED_SECONDS:
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                self._known[key] = found
            return found


def _age(process: Process) -> float:
    """Seconds since a process started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_ticks / CLOCK_TICKS


@dataclass(frozen=True, slots=True)
class PythonProgram:
    """What a command line of Python's runs.

    Attributes:
        module: its dotted name (`-m`), or an empty string.
        script: its path, or an empty string.
        arguments: the program's own.
    """

    module: str = ""
    script: str = ""
    arguments: Sequence[str] = ()

    @property
    def package(self) -> str:
        """The module's top package, also of one that is run as `PACKAGE/__main__.py`."""
        folder, _, name = self.script.rpartition("/")
        return folder.rpartition("/")[2] if name == "__main__.py" else self.module.partition(".")[0]

    @property
    def name(self) -> str:
        """The script's name without its folder."""
        return self.script.rpartition("/")[2]


def is_job_server(words: Sequence[str]) -> bool:
    """Whether a command line is that of a server each of whose children is a job of its own."""
    program = python_program(words)
    if program.name in _SCRIPTS or program.package in _PACKAGES:
        return True
    if "jupyter" in (program.name, program.module):
        given = (word for word in program.arguments if not word.startswith("-"))
        return next(given, "") in _SUBCOMMANDS
    if words and words[0].rpartition("/")[2] == "java":
        return any(word.startswith(_IDES) for word in words)
    return False


def python_program(words: Sequence[str]) -> PythonProgram:
    """What a command line of Python's runs; nothing for code (`-c`), and where it is none.

    Args:
        words: the command line, the interpreter first.
    """
    at = 1
    while at < len(words):
        word = words[at]
        if not word.startswith("-") or word == "-":
            return PythonProgram(script=word, arguments=words[at + 1 :])
        if word.startswith("--"):
            at += 2 if word == "--check-hash-based-pycs" else 1
            continue
        # One letter is one flag, until one that takes the rest of the word or the next one.
        flag = _TAKES_VALUE.search(word)
        if flag is not None and flag[0] == "c":
            return PythonProgram()
        glued = "" if flag is None else word[flag.end() :]
        if flag is not None and flag[0] == "m":
            named = (glued, *words[at + 1 :]) if glued else words[at + 1 :]
            return PythonProgram(module="".join(named[:1]), arguments=list(named[1:]))
        at += 2 if flag is not None and not glued else 1
    return PythonProgram()
