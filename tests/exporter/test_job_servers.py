from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from tests.servers import until

from gpuwarden.exporter.blocking_calls import BlockingCalls
from gpuwarden.exporter.job_servers import JobServers, PythonProgram, is_job_server, python_program
from gpuwarden.exporter.processes import (
    Launchers,
    Process,
    job_root,
    read_all,
    read_process,
)

if TYPE_CHECKING:
    from pathlib import Path

KERNEL = "-m ipykernel_launcher -f /run/user/1/kernel-1.json"


@pytest.mark.parametrize(
    ("line", "server"),
    [
        ("python -m jupyterlab", True),
        ("/opt/conda/bin/python3.11 -m jupyterlab --no-browser --port 8888", True),
        ("python3 -I -X frozen_modules=off -W ignore -m notebook", True),
        ("python3 -Xfrozen_modules=off -mjupyter_server", True),
        ("python -m jupyterhub.singleuser --ip 0.0.0.0", True),
        ("python3 /usr/local/bin/jupyter-lab --allow-root", True),
        ("/usr/bin/python3 /usr/bin/jupyterhub-singleuser", True),
        ("/usr/bin/python /usr/bin/jupyter-labhub", True),
        ("python3 /usr/bin/jupyter lab", True),
        ("python -m jupyter notebook --port 1", True),
        ("python3 /venv/lib/python3/site-packages/jupyterlab/__main__.py", True),
        (
            "/opt/pycharm/jbr/bin/java -Xmx2g -cp b.jar com.intellij.idea.Main remoteDevHost",
            True,
        ),
        ("java -Didea.paths.selector=PyCharm2025.1 -x", True),
        (f"python {KERNEL}", False),
        ("python train.py --notes jupyterlab -m jupyterlab", False),
        ("python notebook.py", False),
        ("python jupyterlab_train.py", False),
        ("python -c import jupyterlab", False),
        ("python3 /usr/bin/jupyter nbconvert --execute a.ipynb", False),
        ("python -m jupyter nbconvert lab", False),
        ("python -m torch.distributed.run --nproc-per-node 2 notebook", False),
        ("python train.py com.intellij.idea.Main", False),
        ("java -jar spark.jar org.apache.spark.deploy.SparkSubmit", False),
        ("python", False),
        ("python -m", False),
        ("python -W", False),
        ("", False),
    ],
)
def test_job_servers(line: str, server: bool) -> None:
    """A server is one by the program that its interpreter runs, not by a word in its line."""
    assert is_job_server(line.split()) is server


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("python -u -m a.b x", PythonProgram("a.b", "", ["x"])),
        ("python -Im a -c", PythonProgram("a", "", ["-c"])),
        ("python --check-hash-based-pycs always t.py -m", PythonProgram("", "t.py", ["-m"])),
        ("python -uc code", PythonProgram()),
        ("python - x", PythonProgram("", "-", ["x"])),
        ("python -bEX dev -OOW ignore a", PythonProgram("", "a", [])),
        ("python -Wm a", PythonProgram("", "a", [])),
    ],
)
def test_a_command_line_of_python(line: str, program: PythonProgram) -> None:
    """Options of the interpreter are told from its program, with their values."""
    assert python_program(line.split()) == program


def test_a_hostile_line_takes_no_more_than_its_length() -> None:
    """The longest line that is read is done at once; the square of it would run into a limit."""
    for words in (
        ["python", "-" + "b" * 65_000],
        ["python", *(["-b"] * 20_000)],
        ["/" * 65_000] * 3,
    ):
        assert not is_job_server(words)


SERVER = """
import subprocess, sys
kernels = [subprocess.Popen([sys.executable, "-m", "ipykernel_launcher", "-f", str(n)],
                            stdout=subprocess.DEVNULL, start_new_session=bool(n)) for n in range(2)]
print(*(kernel.pid for kernel in kernels), flush=True)
sys.stdin.read()
for kernel in kernels:
    kernel.kill()
    kernel.wait()
"""
KERNEL_CODE = """
import os, time
os.fork()
parent = os.getppid()
while os.getppid() == parent:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("module", "root"),
    [("jupyterlab", "kernel"), ("jupyterhub/singleuser", "kernel"), ("somebody", "server")],
)
def test_a_kernel_is_the_root_and_never_the_server(module: str, root: str, tmp_path: Path) -> None:
    """Each kernel of `python -m jupyterlab` is a job of its own, with its workers."""
    file = tmp_path / f"{module}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(SERVER)
    (tmp_path / "ipykernel_launcher.py").write_text(KERNEL_CODE)
    launchers = Launchers.with_extra([], JobServers(unknown=False).includes)
    with subprocess.Popen(
        [sys.executable, "-m", module.replace("/", ".")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": ""},
        start_new_session=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        kernels = [int(word) for word in server.stdout.readline().split()]

        def workers() -> dict[int, Process] | None:
            processes = read_all()
            found = [item for item in processes.values() if item.ppid in kernels]
            return processes if len(found) == len(kernels) else None

        processes = until(workers)
        roots = {
            pid: job_root(processes, pid, launchers=launchers).pid
            for pid, item in processes.items()
            if pid in kernels or item.ppid in kernels
        }
        server.communicate("")
    for pid, found in roots.items():
        kernel = pid if pid in kernels else processes[pid].ppid
        assert (found == kernel) is (root == "kernel")
    assert len(roots) == 4


@pytest.mark.parametrize("unknown", [True, False])
def test_who_does_not_answer_is_what_the_program_takes_it_for(
    unknown: bool, tmp_path: Path
) -> None:
    """A command line that hangs is neither: the agent spares it, the exporter goes on."""
    own = read_process(os.getpid())
    assert own is not None
    calls, free = BlockingCalls(patience=0.05), threading.Event()
    servers = JobServers(unknown=unknown, calls=calls)
    assert calls.make(own.uid, free.wait) is None
    assert servers.includes(dataclasses.replace(own, comm="python3")) is unknown
    assert not servers.includes(dataclasses.replace(own, comm="train"))
    free.set()
    until(lambda: calls.stuck == 0)
    assert not servers.includes(dataclasses.replace(own, comm="python3"))
    # A process that is gone was no server.
    gone = JobServers(unknown=unknown, proc=tmp_path)
    assert not gone.includes(dataclasses.replace(own, comm="python3"))
    calls.close()
