"""The exporter put together: driver, attribution, sampler, server."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from gpuwarden.exporter import app, kubelets, state_files
from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.inquiries import Inquiry
from gpuwarden.exporter.job_servers import JobServers
from gpuwarden.exporter.nvml import open_gpus
from gpuwarden.exporter.pages import Format
from gpuwarden.exporter.processes import Launchers, boot_id
from gpuwarden.exporter.releases import ReleaseWatch, restart
from gpuwarden.exporter.runs import prepare
from gpuwarden.exporter.sampler import Sampler
from gpuwarden.exporter.slurm import SlurmQuestions

if TYPE_CHECKING:
    from gpuwarden.exporter.kubelets import KubeletView
    from gpuwarden.exporter.settings import ExporterSettings
    from gpuwarden.exporter.slurm import SlurmView

SLURM_SECONDS = 30.0
"""Between two questions to Slurm's controller, which every node of the cluster asks."""
KUBELET_SECONDS = 10.0
ONCE_SECONDS = 10.0
"""How long a single page waits for the platforms' answers."""

_SWITCH_SECONDS = 0.0002
"""How long a thread may keep the interpreter while another one wants it. With Python's 5 ms a
scrape that meets a snapshot waits as long before each of its steps."""
_YOUNG_OBJECTS = 20_000
"""Objects that are made before a collection: a snapshot makes thousands, and drops the last one's
without one."""

_logger = structlog.get_logger(__name__)


def build(settings: ExporterSettings) -> Sampler:
    """Everything but the server; nothing is read yet.

    Args:
        settings: of this exporter.

    Raises:
        InvalidInput: `--gpus` or its scenario is wrong.
    """
    nvml = open_gpus(settings.gpus, settings.collectors)
    try:
        prepare(settings.jobs_directory)
    except OSError as error:
        _logger.warning(
            "job files' folder cannot be made; trainings are not seen until it is there",
            folder=str(settings.jobs_directory),
            error=error.strerror,
        )
    # Nobody becomes a job of his own by making his command line hang.
    servers = JobServers(unknown=False)
    launchers = Launchers.with_extra(settings.launchers, servers.includes)
    attribution = Attribution(
        settings.jobs_directory,
        launchers=launchers,
        slurm=_slurm() if "slurm" in settings.collectors else None,
        kubelet=_kubelet() if "kubernetes" in settings.collectors else None,
    )
    if settings.state_file is None:
        return Sampler(settings, nvml, attribution)
    state = state_files.StateFile(settings.state_file)
    sampler = Sampler(settings, nvml, attribution, state=state)
    known = state_files.load(settings.state_file, boot_id())
    if known is not None:
        sampler.recall(known)
    return sampler


def _slurm() -> Inquiry[SlurmView]:
    return Inquiry("slurm", SlurmQuestions().ask, every=SLURM_SECONDS)


def _kubelet() -> Inquiry[KubeletView]:
    return Inquiry("kubelet", kubelets.questions().ask, every=KUBELET_SECONDS)


def run(settings: ExporterSettings) -> None:
    """Serve until told to stop.

    Args:
        settings: of this exporter.

    Raises:
        GpuwardenError: it cannot start.
    """
    sampler = build(settings)
    _settle()

    def again() -> None:
        sampler.keep()
        restart()

    watch = ReleaseWatch(settings.release_file, sampler, restart=again)
    watch.start()
    try:
        app.serve(settings, sampler)
    finally:
        watch.stop()


def _settle() -> None:
    """Set the interpreter up for a process that does the same for months."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    # What has been loaded stays; no collection looks at it again.
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)


def once(settings: ExporterSettings) -> str:
    """One page in the text format.

    Args:
        settings: of this exporter.

    Raises:
        GpuwardenError: it cannot start.
    """
    # It may run beside the one that serves, whose state is its own.
    sampler = build(replace(settings, state_file=None))
    ReleaseWatch(settings.release_file, sampler, restart=restart).look()
    try:
        if settings.collectors & {"slurm", "kubernetes"}:
            # What they answer counts for whom was seen before they were asked.
            sampler.sample()
            sampler.ask_platforms(ONCE_SECONDS)
        return sampler.sample().body[Format.TEXT].decode()
    finally:
        sampler.stop()
