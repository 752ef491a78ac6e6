"""Settings of the exporter: frozen, each with its unit, default and reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.errors import InvalidInput
from gpuwarden.exporter.releases import DEFAULT_RELEASE_FILE
from gpuwarden.exporter.switches import DEFAULT_COLLECTORS
from gpuwarden.job_files import DEFAULT_DIRECTORY

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.exporter.registration import EngineSettings

DEFAULT_PORT = 9835
MAX_PROCESSES = 10_000
MAX_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class ExporterSettings:
    """How one exporter runs.

    Attributes:
        host: address to listen on; loopback by default, for the page names users.
        port: TCP port; 0 takes a free one.
        jobs_directory: the folder of the job files.
        gpus: `nvml`, or `simulated:FILE`.
        interval: seconds between two snapshots; rules count on values of the last scrape, so it
            should stay below the scrape interval.
        launchers: names of processes, beside the usual ones, that start jobs but are part of none.
        collectors: names of `switches.SWITCHES` and of `compat.COMPATIBILITIES` that are on.
        max_processes: series per card and family that they may take; those with the most memory.
        max_requests: requests that are answered at the same time.
        state_file: where is kept what must outlive the process, or None: nowhere.
        release_file: the driver is let go as this file orders.
        textfile_directory: folder to which each page is written too, or None.
        log_targets: file that says where each job's output lies, or None.
        engine: the engine that the node registers with, or None.
        web_config: file with TLS and basic authentication, or None for plain HTTP for everybody.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    jobs_directory: Path = DEFAULT_DIRECTORY
    gpus: str = "nvml"
    interval: float = 2.0
    launchers: tuple[str, ...] = ()
    collectors: frozenset[str] = DEFAULT_COLLECTORS
    max_processes: int = 256
    max_requests: int = 40
    state_file: Path | None = None
    release_file: Path = DEFAULT_RELEASE_FILE
    textfile_directory: Path | None = None
    log_targets: Path | None = None
    web_config: Path | None = None
    engine: EngineSettings | None = None

    def __post_init__(self) -> None:
        if not 0.1 <= self.interval <= 60:
            raise InvalidInput(
                f"--collect.interval {self.interval:g}s is outside 100ms to 1m: rules that look at "
                "the last samples need a snapshot for each scrape"
            )
        if not 0 <= self.max_processes <= MAX_PROCESSES:
            raise InvalidInput(
                f"--collector.process.max {self.max_processes} is outside 0 to {MAX_PROCESSES}: "
                "each process takes three series; --no-collector.process exports none"
            )
        if not 1 <= self.max_requests <= MAX_REQUESTS:
            raise InvalidInput(
                f"--web.max-requests {self.max_requests} is outside 1 to {MAX_REQUESTS}: with none "
                "nobody is answered"
            )
