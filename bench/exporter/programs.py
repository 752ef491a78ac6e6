"""The programs that are measured, each as its users run it, and what /proc says of them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuwarden.exporter.simulated import SCENARIO_VARIABLE, build

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).parents[2]
PEER = "nvitop-exporter==1.7.2"
OWN = f"{ROOT}[exporter,simulated]"
"""What a node installs: an environment with more in it loads more (structlog, for one, loads rich
wherever that is installed)."""
_READY_SECONDS = 60.0
_SCRAPE_SECONDS = 30.0
_SCHEDULED = 2
"""CPUCLOCK_SCHED: what the scheduler has counted."""

# What Prometheus 2.42 sends.
SCRAPE_HEADERS = {
    "Accept": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;"
    "version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Accept-Encoding": "gzip",
    "User-Agent": "Prometheus/2.42.0",
    "X-Prometheus-Scrape-Timeout-Seconds": "5",
}


@dataclass(frozen=True, slots=True)
class Program:
    """A running exporter.

    Attributes:
        name: of the program.
        pid: its process; neither program has children.
        port: of the loopback.
        scenario: the driver's scenario that it alone reads.
    """

    name: str
    pid: int
    port: int
    scenario: Path

    def scrape(self, headers: Mapping[str, str] = SCRAPE_HEADERS) -> tuple[float, bytes]:
        """Get the page as Prometheus does: seconds from connecting to the last byte, and its body.

        Raises:
            OSError: it does not answer.
            RuntimeError: it answers something else.
        """
        lines = ["GET /metrics HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        request = "\r\n".join((*lines, "", "")).encode()
        parts = []
        began = time.perf_counter()
        # As little as can be of a client: what it takes itself would hide what the server takes.
        with socket.create_connection(("127.0.0.1", self.port), _SCRAPE_SECONDS) as connection:
            connection.sendall(request)
            while part := connection.recv(1 << 20):
                parts.append(part)
        spent = time.perf_counter() - began
        head, _, body = b"".join(parts).partition(b"\r\n\r\n")
        status = head.split(b" ", 2)[1:2]
        if status != [b"200"]:
            raise RuntimeError(f"{self.name} answered {head[:200]!r}")
        return spent, body

    def cpu_seconds(self) -> float:
        """CPU time that all its threads have used, also those that have ended.

        The clock of clock_getcpuclockid(3): nanoseconds, where /proc has hundredths of a second.
        """
        return time.clock_gettime((~self.pid << 3) | _SCHEDULED)

    def resident_bytes(self) -> int:
        """Resident memory now."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"{self.name} has ended")


def install(folder: Path, *requirements: str) -> Path:
    """A virtual environment of a program's own, made once for the same requirements.

    Args:
        folder: where to make it.
        requirements: as for pip.

    Returns:
        Its python.
    """
    python, mark = folder / "bin/python", folder / "installed"
    wanted = "\n".join((*requirements, (ROOT / "pyproject.toml").read_text()))
    if not mark.exists() or mark.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--quiet"]
        command += ["--constraint", str(ROOT / "constraints.txt"), *requirements]
        subprocess.run(command, check=True, timeout=600)
        mark.write_text(wanted)
    return python


@contextlib.contextmanager
def _running(
    name: str,
    command: Sequence[str],
    *,
    port: int,
    scenario: Path,
    environment: Mapping[str, str],
) -> Iterator[Program]:
    log = scenario.with_name(f"{name}.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **environment}
        )
    program = Program(name, process.pid, port, scenario)
    try:
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            try:
                # Both write a card's UUID once they have read the cards.
                if b"GPU-00000007" in program.scrape({})[1]:
                    break
            except OSError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield program
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """A TCP port of the loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def gpuwarden(
    python: Path, folder: Path, scenario: Path
) -> contextlib.AbstractContextManager[Program]:
    """The exporter of gpuwarden with its defaults.

    Args:
        python: of the environment that has it.
        folder: for what is in /run/gpuwarden on a node.
        scenario: of the driver.
    """
    port = free_port()
    command = [
        *(str(python), "-m", "gpuwarden", "exporter"),
        *("--gpus", f"simulated:{scenario}"),
        *("--web.listen-address", f"127.0.0.1:{port}"),
        *("--jobs.directory", str(folder / "jobs")),
        *("--release-file", str(folder / "release")),
        # So that each job is one of its own, and not all of them one of this benchmark's.
        *("--attribution.launcher", Path("/proc/self/comm").read_text().strip()),
    ]
    return _running("gpuwarden", command, port=port, scenario=scenario, environment={})


def nvitop(python: Path, scenario: Path) -> contextlib.AbstractContextManager[Program]:
    """nvitop-exporter with its defaults, on the same driver's library.

    Args:
        python: of the environment that has it.
        scenario: of the driver.
    """
    port = free_port()
    environment = {
        "LD_LIBRARY_PATH": str(build().parent),
        SCENARIO_VARIABLE: str(scenario),
    }
    command = [
        *(str(python), "-m", "nvitop_exporter"),
        *("--bind-address", "127.0.0.1", "--port", str(port)),
    ]
    return _running(
        "nvitop-exporter", command, port=port, scenario=scenario, environment=environment
    )
