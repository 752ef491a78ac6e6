"""What an agent is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpuwarden.exporter.agent.guards import DEFAULT_KILL_SWITCH
from gpuwarden.exporter.releases import DEFAULT_RELEASE_FILE
from gpuwarden.job_files import DEFAULT_DIRECTORY

DEFAULT_PORT = 9836
DEFAULT_JOURNAL = Path("/var/lib/gpuwarden/agent.journal")
MINIMUM_GRACE_SECONDS = 1.0
MAXIMUM_GRACE_SECONDS = 3600.0
MAXIMUM_WATCH_SECONDS = 10_800.0
"""A watch lasts longer than the grace: its platform has one of its own, and may have to be asked
again."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of one agent.

    Attributes:
        node: its name, as engine and requests call it.
        keys: folder of the engine's public keys.
        host: address to listen on.
        port: likewise; 0 lets the system choose.
        tls_certificate: PEM file of the server's certificate, or None for plain HTTP.
        tls_key: PEM file of its key.
        journal: the journal's file.
        jobs: the job directory.
        gpus: `nvml`, or `simulated:FILE`.
        kill_switch: nothing is signalled while this file exists.
        release_file: the driver is let go, and actions are refused, as this file orders.
        protect: names or executables that are never signalled.
        launchers: further names of processes that start jobs; must equal the exporter's.
        proof_timeout: seconds that NVML has to forget ended processes.
        terminates_per_hour: ladders that may be begun within any hour.
        restart_cooldown: seconds for which a job that was ended and came back is left alone.
    """

    node: str
    keys: Path
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    journal: Path = DEFAULT_JOURNAL
    jobs: Path = DEFAULT_DIRECTORY
    gpus: str = "nvml"
    kill_switch: Path = DEFAULT_KILL_SWITCH
    release_file: Path = DEFAULT_RELEASE_FILE
    protect: frozenset[str] = frozenset()
    launchers: tuple[str, ...] = ()
    proof_timeout: float = 30.0
    terminates_per_hour: int = 12
    restart_cooldown: float = 600.0
