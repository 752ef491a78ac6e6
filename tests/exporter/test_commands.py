"""Other programs' commands: limited in time and output, and without our rights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.exporter.nodes import eventually

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.exporter import commands

SHELL = shutil.which("sh") or ""


def _run(script: str, *, seconds: float = 30.0, limit: int = 10_000) -> commands.Answer:
    return commands.run(SHELL, "-c", script, seconds=seconds, environment={"A": "b"}, limit=limit)


def test_what_a_command_says() -> None:
    """Status, output and the beginning of what it complained of."""
    answer = _run("printf 'x\\377'; echo no >&2; exit 3")
    assert (answer.status, answer.output, answer.error) == (3, "x\N{REPLACEMENT CHARACTER}", "no")


def test_nothing_of_ours_reaches_it() -> None:
    """It has the environment that it is given, no input, and no terminal of ours."""
    answer = _run("env; cat; pwd")
    lines = set(answer.output.split())
    assert "A=b" in lines
    assert "/" in lines
    assert not any(line.startswith("HOME=") for line in lines)


def test_one_that_hangs(tmp_path: Path) -> None:
    """It is killed when its time is over."""
    pid = tmp_path / "pid"
    with pytest.raises(ServiceUnavailable, match="sh did not answer in time"):
        _run(f"echo $$ > {pid}; exec sleep 600", seconds=0.5)
    gone = Path("/proc") / pid.read_text().strip()
    eventually(lambda: not gone.exists())


def test_one_that_closes_its_output_and_stays() -> None:
    """Silence is not the end of it."""
    with pytest.raises(ServiceUnavailable, match="did not end within"):
        _run("exec >&- 2>&-; exec sleep 600", seconds=0.5)


@pytest.mark.parametrize("script", ["yes", "yes >&2"])
def test_one_that_never_stops_talking(script: str) -> None:
    """Output has a limit; complaints are cut."""
    with pytest.raises(ServiceUnavailable, match=r"printed more than|did not answer in time"):
        _run(script, seconds=1.0)


def test_long_complaints_are_cut() -> None:
    """What goes to a log has a limit."""
    answer = _run("yes | head -c 100000 >&2; exit 1")
    assert len(answer.error) <= commands.MAX_ERROR_BYTES


def test_no_program(tmp_path: Path) -> None:
    """A program that is not there, or is none, is an error that may pass."""
    assert commands.find("no-such-program-of-slurm") is None
    with pytest.raises(ServiceUnavailable, match="cannot be started"):
        commands.run(str(tmp_path / "none"), seconds=1, environment={})


def test_it_is_found_by_its_absolute_path() -> None:
    """What is run later is what was found."""
    found = commands.find("sh")
    assert found is not None
    assert Path(found).is_absolute()


PROGRAM = """
import sys, threading
from gpuwarden.exporter import commands
def ask():
    commands.drop_ambient_rights()
    words = ("/bin/grep", "CapAmb\\|CapEff", "/proc/self/status")
    print(commands.run(*words, seconds=30, environment={}).output)
thread = threading.Thread(target=ask)
thread.start()
thread.join()
print(open("/proc/self/status").read())
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can give rights away"
)
def test_it_has_no_right_of_ours() -> None:
    """An exporter that reads others' processes by capabilities hands none of them on."""
    rights = "+sys_ptrace,+dac_read_search"
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    words += [f"--inh-caps={rights}", f"--ambient-caps={rights}", sys.executable, "-c", PROGRAM]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    child, own = done.stdout.split("\n\n", 1)
    assert {line.split()[1] for line in child.split("\n")} == {"0" * 16}
    assert "CapAmb:\t0000000000080004" in own
