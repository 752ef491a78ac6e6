"""Prolog, epilog and submit filter under a real Slurm, with a real exporter, on simulated cards."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.servers import Server, fetch, free_port, running, until
from tests.slurm_servers import CLUSTER, FREEZER, SlurmCluster, binary, slurm

from gpuwarden.exporter.simulated import GIB, Card, Scenario, SimulatedProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FOLDER = Path(__file__).parents[2] / "deploy" / "slurm"
SCRIPT = "echo $$; exec sleep 600"


def under_slurm(test: Callable[[Node], None]) -> Callable[[Node], None]:
    """It takes half a minute, and cgroups v1 of the test's own."""
    needs = pytest.mark.skipif(not os.access(FREEZER, os.W_OK), reason="needs cgroups v1")
    return pytest.mark.sweep(needs(test))


@dataclass(frozen=True, slots=True)
class Node:
    """A node of Slurm with its hook, and its exporter."""

    cluster: SlurmCluster
    scenario: Path
    jobs: Path

    def start(self) -> tuple[int, int]:
        """A job with one card, in whose cgroup a process is; gives its number and the pid."""
        number = self.cluster.submit(SCRIPT, "--gres=gpu:1")
        self.cluster.wait_for_state(number, "RUNNING")
        output = self.cluster.folder / f"log/job-{number}.out"
        (pid,) = until(lambda: output.read_text().split() if output.exists() else [])
        return number, int(pid)

    def hold(self, pid: int, *, linger: float) -> None:
        """The process is on the first card, and NVML goes on listing its memory after its end."""
        held = SimulatedProcess(0, pid, memory=30 * GIB, sm=30, linger=linger)
        Scenario([Card(0), Card(1)], [held]).write(self.scenario)

    def free(self) -> None:
        """Nobody's memory is on any card."""
        Scenario([Card(0), Card(1)]).write(self.scenario)

    def state(self) -> str:
        """The node's line of states and its reason, as `scontrol` tells them."""
        return self.cluster.run("scontrol", "--oneliner", "show", "node", self.cluster.node)


def _hook(folder: Path, config: Path) -> Path:
    """The hook in a folder, with a file of settings of its own."""
    for name in ("gpuwarden_hook.sh", "gpuwarden_hook.py"):
        shutil.copy(FOLDER / name, folder)
    script = folder / "gpuwarden_hook.py"
    script.write_text(script.read_text().replace("/etc/default/gpuwarden-hook", str(config)))
    return folder / "gpuwarden_hook.sh"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """A Slurm whose prolog and epilog are the hook, drained where something was left."""
    # A socket's path has room for a hundred characters: pytest's folders are longer.
    with tempfile.TemporaryDirectory(prefix="slurm") as name:
        folder = Path(name)
        config, port = folder / "hook.conf", free_port()
        hook = _hook(folder, config)
        config.write_text(
            f"EXPORTER=http://127.0.0.1:{port}/metrics\nWAIT=8\nDRAIN=yes\n"
            f"SCONTROL={binary(('scontrol',))}\nJOBS={folder}/gpuwarden/jobs\nEXPORTER_USER=root\n"
        )
        (folder / "etc").mkdir()
        text = (FOLDER / "cli_filter.lua").read_text().replace('"CLUSTER"', f'"{CLUSTER}"')
        (folder / "etc/cli_filter.lua").write_text(text)
        settings = [f"Prolog={hook}", f"Epilog={hook}", "PrologFlags=Alloc"]
        settings += ["CliFilterPlugins=lua"]
        with slurm(
            folder, gpus=2, node=f"node{os.getpid()}", cgroups=True, settings=settings
        ) as cluster:
            scenario = Scenario([Card(0), Card(1)]).write(folder / "scenario")
            command = [sys.executable, "-m", "gpuwarden", "exporter", "--collector.slurm"]
            command += [f"--web.listen-address=127.0.0.1:{port}", "--collect.interval=500ms"]
            command += [f"--gpus=simulated:{scenario}", f"--jobs.directory={folder}/exporter"]
            command += [f"--release-file={folder}/release"]
            environment = ["env", f"SLURM_CONF={cluster.config}"]
            server = Server(
                f"http://127.0.0.1:{port}", folder / "log/exporter", environment + command
            )
            with running(server):
                yield Node(cluster, scenario, folder / "gpuwarden/jobs")


@pytest.fixture
def usable(node: Node) -> Iterator[Node]:
    """The node takes jobs, and no job is left when a test ends."""
    yield node
    node.free()
    node.cluster.run("scancel", f"--user={os.geteuid()}")
    until(lambda: not node.cluster.run("squeue", "--noheader").strip())
    if "DRAIN" in node.state():
        node.cluster.run("scontrol", "update", f"NodeName={node.cluster.node}", "State=RESUME")


def _ended(node: Node, number: int) -> None:
    node.cluster.run("scancel", str(number))
    until(lambda: not node.cluster.states(number) & {"RUNNING", "COMPLETING"})


@under_slurm
def test_the_prolog_makes_the_folder_of_the_job_files(usable: Node) -> None:
    """Each training may write its own files there; the exporter's user owns it."""
    node = usable
    node.start()
    assert node.jobs.stat().st_mode & 0o7777 == 0o1777
    assert node.jobs.stat().st_uid == 0


@under_slurm
def test_a_job_that_leaves_its_cards_free_is_passed_over(usable: Node) -> None:
    """Also where the driver takes two seconds to forget it."""
    node = usable
    number, pid = node.start()
    node.hold(pid, linger=2)
    _ended(node, number)
    assert "DRAIN" not in node.state()


@under_slurm
def test_memory_that_a_job_left_is_said_and_keeps_the_next_job_away(usable: Node) -> None:
    """The processes are gone, and NVML goes on counting their memory: a driver's fault."""
    node = usable
    number, pid = node.start()
    node.hold(pid, linger=600)
    # The exporter has it on the page before the job ends.
    until(lambda: f'pid="{pid}"' in _page(node))
    _ended(node, number)
    state = until(lambda: "DRAIN" in node.state() and node.state())
    assert f"after job {number}: GPU 0: 30720 MiB are in use and no process's" in state


def _page(node: Node) -> str:
    """What the exporter serves now."""
    config = (node.cluster.folder / "hook.conf").read_text()
    return fetch(config.split("EXPORTER=")[1].splitlines()[0]).decode()


def _run(hook: Path, context: str) -> subprocess.CompletedProcess[str]:
    environment = {"SLURM_SCRIPT_CONTEXT": context, "SLURM_JOB_ID": "7", "PATH": os.environ["PATH"]}
    return subprocess.run(
        [str(hook)], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("context", ["prolog_slurmd", "epilog_slurmd"])
@pytest.mark.parametrize(
    "config", [b"WAIT=0", b"WAIT=nan", b"WAIT=0\nLEFT_MIB=many", b"# caf\xe9\nWAIT=0"]
)
def test_without_an_exporter_the_hook_hinders_nobody(
    context: str, config: bytes, tmp_path: Path
) -> None:
    """It says that nothing is known, and ends with 0, whatever its own file says."""
    path = tmp_path / "conf"
    address = f"EXPORTER=http://127.0.0.1:{free_port()}/metrics\nJOBS={tmp_path}\n"
    path.write_bytes(address.encode() + config + b"\n")
    done = _run(_hook(tmp_path, path), context)
    assert done.returncode == 0
    assert re.search(r"job 7: not (looked at|known)", done.stderr)


@pytest.mark.parametrize("fault", ["no Python", "too old", "not there", "nobody hears it"])
def test_no_fault_of_the_hook_fails_a_job(fault: str, tmp_path: Path) -> None:
    """Slurm drains a node whose prolog or epilog does not end with 0."""
    hook = _hook(tmp_path, tmp_path / "conf")
    script = tmp_path / "gpuwarden_hook.py"
    if fault == "no Python":
        hook.write_text(hook.read_text().replace("/usr/bin/python3", "/nonexistent/python3"))
    elif fault == "too old":
        script.write_text("from __future__ import words_of_a_later_python\n")
    elif fault == "not there":
        script.unlink()
    else:
        hook.write_text(hook.read_text().replace("</dev/null", "</dev/null 2>&-"))
    assert _run(hook, "prolog_slurmd").returncode == 0


def test_the_hook_is_in_the_words_of_old_pythons() -> None:
    """Nodes bring 3.8 along for years: nothing is written, or named at its start, that is newer."""
    text = (FOLDER / "gpuwarden_hook.py").read_text()
    tree = ast.parse(text, feature_version=(3, 7))
    named = [item for item in tree.body if isinstance(item, ast.Assign | ast.AnnAssign)]
    assert not [
        ast.unparse(item)
        for item in named
        for part in ast.walk(item)
        if isinstance(part, ast.Subscript)
    ]


def _submit(node: Node, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Submit as a user does, whose terminal shows what the filter says."""
    path = node.cluster.folder / "scripts/filtered.sh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    done = subprocess.run(
        [binary(("sbatch",)), "--output=/dev/null", *words, str(path)],
        env=node.cluster.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done


@under_slurm
def test_whoever_submits_a_job_with_a_gpu_is_told_how_to_ask_about_it(usable: Node) -> None:
    """And whoever submits another is not."""
    node = usable
    done = _submit(node, "exit 0", "--gpus=1")
    number = done.stdout.split()[-1]
    assert f"gpuwarden why slurm-{CLUSTER}-{number}-0" in done.stderr
    assert "gpuwarden" not in _submit(node, "exit 0").stderr


@under_slurm
def test_a_job_with_a_gpu_is_warned_before_its_time_is_over(usable: Node) -> None:
    """The batch shell gets the signal two minutes before; one that a user asked for stays his."""
    node = usable
    seen = node.cluster.folder / "seen"
    waiting = f"trap 'echo usr1 > {seen}; exit 0' USR1\nsleep 300 & wait"
    _submit(node, waiting, "--gres=gpu:1", "--time=2")
    # Its time is two minutes, so the signal is due at once; Slurm looks every half minute.
    until(seen.exists, 100)
    own = node.cluster.folder / "own"
    mine = f"trap 'echo usr2 > {own}; exit 0' USR2\nsleep 300 & wait"
    _submit(node, mine, "--gres=gpu:1", "--time=2", "--signal=B:USR2@120")
    until(own.exists, 100)
