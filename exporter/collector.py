"""From one snapshot of the node to metric families; names, labels and help are the catalogue's."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from gpuwarden import __version__
from gpuwarden.catalogue import PHASES
from gpuwarden.exporter import compat
from gpuwarden.exporter.pages import Families
from gpuwarden.exporter.resources import STATES
from gpuwarden.exporter.switches import DEFAULT_COLLECTORS, SWITCHES
from gpuwarden.exporter.vocabularies import MAX_RUNS, RUNS, Vocabularies

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from gpuwarden.exporter.devices import DeviceSnapshot, Gpu, XidErrors
    from gpuwarden.exporter.jobs import GpuProcessRow, Job, NodeSnapshot, Run

COLLECTORS = ("nvml", "jobs", "xid", "slurm", "kubernetes")
MAX_ON_CARD = 512
"""Jobs of a card, each with some forty series; those with the least memory have none beyond it."""
MAX_WAITING = 64
"""Jobs of a user that hold no card: trainings that are being set up, or whose card is gone."""
MAX_WAITING_IN_ALL = 512
DROP_REASONS = (
    "command_value",
    "contradiction",
    "duplicate_series",
    "enumeration",
    "executable",
    "future",
    "hanging",
    "invalid_sample",
    "invalid_value",
    "job_file_claimed_twice",
    "job_file_hangs",
    "job_file_owner",
    "job_file_waits",
    "job_limit",
    "kubernetes_device",
    "kubernetes_pod",
    "log_owner",
    "no_process",
    "nvml_error",
    "permission",
    "pid",
    "private_cgroup",
    "process_limit",
    "process_table",
    "run_limit",
    "series_limit",
    "slurm_cards",
    "slurm_pending",
    "slurm_unknown_job",
    "slurm_unresolved",
    "stale_sample",
    "unsupported",
)
"""Reasons that are shown from the start, so that the first one is seen as an increase."""


def collect(
    snapshot: NodeSnapshot,
    *,
    totals: Mapping[str, int],
    collectors: Collection[str] = DEFAULT_COLLECTORS,
    max_processes: int = 256,
    previous: Families | None = None,
    vocabularies: Vocabularies | None = None,
) -> tuple[Families, dict[str, int]]:
    """Families of a whole snapshot.

    Args:
        snapshot: the node.
        totals: reason -> values dropped since the exporter started.
        collectors: names of `switches.SWITCHES` and of `compat.COMPATIBILITIES` that are on.
        max_processes: rows per card for them.
        previous: the last answer, which saves work.
        vocabularies: what jobs have said in labels before; kept from page to page.

    Returns:
        The families, and what the collector itself left out, by reason.
    """
    families = Families(previous)
    dropped: Counter[str] = Counter()
    devices = snapshot.devices
    if devices is not None:
        _devices(families, devices, snapshot, collectors)
    if "process" in collectors:
        dropped["process_limit"] += _processes(families, snapshot.processes, max_processes)
    said = vocabularies if vocabularies is not None else Vocabularies()
    jobs = shown(snapshot.jobs)
    dropped["job_limit"] += len(snapshot.jobs) - len(jobs)
    for job in jobs:
        dropped["series_limit"] += _job(families, job, said)
        dropped["series_limit"] += _command(families, job, said)
        runs = [run for run in job.runs if said.admit(job.job_id, RUNS, run.description.run_id)]
        runs = runs[:MAX_RUNS]
        dropped["run_limit"] += len(job.runs) - len(runs)
        for run in runs:
            dropped["series_limit"] += _run(families, job.job_id, run, said)
    said.forget({job.job_id for job in snapshot.jobs})
    for resource, seconds in snapshot.node_pressure.items():
        families.add("gpuwarden_node_pressure_seconds_total", seconds, resource)
    for (user, reason), seconds in snapshot.lost_gpu_seconds.items():
        families.add("gpuwarden_lost_gpu_seconds_total", seconds, user, reason)
    families.add("gpuwarden_host_pids", float(snapshot.host_pids))
    complete = devices is not None and devices.complete and not snapshot.failed
    if complete:
        families.add("gpuwarden_snapshot_timestamp_seconds", snapshot.taken_at)
    dropped["duplicate_series"] = families.duplicates
    failed = {*snapshot.failed, *snapshot.impaired}
    if devices is None or not devices.xids_heard:
        # Nobody is judged by these: without them the snapshot is complete.
        failed.add("xid")
    if devices is not None and not devices.complete:
        # A part of the node is hidden, and no snapshot is judged by: that must not go unseen.
        failed.add("nvml")
    own(families, up=devices is not None, failed=failed, totals=totals, collectors=collectors)
    return families, {reason: count for reason, count in dropped.items() if count}


def own(
    families: Families,
    *,
    up: bool,
    failed: Iterable[str],
    totals: Mapping[str, int],
    collectors: Collection[str] = DEFAULT_COLLECTORS,
) -> None:
    """What the exporter says of itself, also where it has nothing else to say.

    Args:
        families: the page.
        up: whether NVML is initialised and answers.
        failed: collectors without a current result.
        totals: reason -> values dropped since the exporter started.
        collectors: names of `switches.SWITCHES` that are on.
    """
    failed = frozenset(failed)
    families.add("gpuwarden_nvml_up", float(up))
    for name in COLLECTORS:
        if name in SWITCHES and name not in collectors:
            continue
        bad = name in failed or (name == "nvml" and not up)
        families.add("gpuwarden_collector_success", float(not bad), name)
    for reason in sorted({*DROP_REASONS, *totals}):
        families.add("gpuwarden_dropped_values_total", totals.get(reason, 0), reason)
    families.add("gpuwarden_exporter_build_info", 1, __version__)


def _devices(
    families: Families,
    devices: DeviceSnapshot,
    snapshot: NodeSnapshot,
    collectors: Collection[str],
) -> None:
    for gpu in devices.gpus:
        _gpu(families, gpu, snapshot)
        _instances(families, gpu)
    _xids(families, devices.xids)
    if compat.DCGM in collectors:
        compat.add_dcgm(families, devices.gpus, compat.node_name())


def _gpu(families: Families, gpu: Gpu, snapshot: NodeSnapshot) -> None:
    at = (str(gpu.index), gpu.uuid)
    devices = snapshot.devices
    if devices is not None and gpu.uuid:
        families.add(
            "gpu_info",
            1,
            *at,
            gpu.name,
            gpu.pci_bus_id,
            devices.driver_version,
            "true" if devices.simulated else "false",
        )
    families.add("gpu_up", float(gpu.up), *at)
    if gpu.processes is not None:
        families.add("gpu_processes", len(gpu.processes), *at)
    for name, value in (
        ("gpu_utilization_ratio", gpu.utilization_ratio),
        ("gpu_tensor_activity_ratio", gpu.tensor_activity_ratio),
        ("gpu_memory_activity_ratio", gpu.memory_activity_ratio),
        ("gpu_memory_total_bytes", gpu.memory_total_bytes),
        ("gpu_memory_used_bytes", gpu.memory_used_bytes),
        ("gpu_memory_free_bytes", gpu.memory_free_bytes),
        ("gpu_memory_reserved_bytes", gpu.memory_reserved_bytes),
        ("gpu_memory_unattributed_bytes", _unattributed(gpu, snapshot.unattributed)),
        ("gpu_memory_unified", gpu.memory_unified),
        ("gpu_temperature_celsius", gpu.temperature_celsius),
        ("gpu_power_watts", gpu.power_watts),
        ("gpu_power_limit_watts", gpu.power_limit_watts),
        ("gpu_energy_joules_total", gpu.energy_joules),
    ):
        families.add(name, value, *at)
    for clock, hertz in gpu.clocks_hertz.items():
        families.add("gpu_clock_hertz", hertz, *at, clock)
    for reason, active in gpu.throttle.items():
        families.add("gpu_throttle_active", float(active), *at, reason)
    for error, count in gpu.ecc_errors.items():
        families.add("gpu_ecc_errors_total", count, *at, error)
    for counter, count in gpu.traffic_bytes.items():
        families.add(f"gpu_{counter}_bytes_total", count, *at)


def _unattributed(gpu: Gpu, by_place: Mapping[str, int]) -> int | None:
    """Of the card with all its MIG instances."""
    places = (gpu.uuid, *(item.uuid for item in gpu.instances))
    known = [by_place[uuid] for uuid in places if uuid in by_place]
    return sum(known) if len(known) == len(places) else None


def _instances(families: Families, gpu: Gpu) -> None:
    for item in gpu.instances:
        at = (str(gpu.index), gpu.uuid, item.uuid)
        ids = (str(item.gpu_instance_id), str(item.compute_instance_id))
        if gpu.up:
            families.add("gpu_mig_info", 1, *at, *ids, item.profile)
        families.add("gpu_mig_memory_total_bytes", item.memory_total_bytes, *at)
        families.add("gpu_mig_memory_used_bytes", item.memory_used_bytes, *at)
        families.add("gpu_mig_utilization_ratio", item.utilization_ratio, *at)
        families.add("gpu_mig_tensor_activity_ratio", item.tensor_activity_ratio, *at)


def _xids(families: Families, xids: Iterable[XidErrors]) -> None:
    for errors in xids:
        labels = (str(errors.index), errors.uuid, str(errors.code))
        families.add("gpu_xid_errors_total", errors.count, *labels)
        families.add("gpu_xid_last_timestamp_seconds", errors.last_seen, *labels)


def _processes(families: Families, rows: Iterable[GpuProcessRow], limit: int) -> int:
    """Add the rows of the processes with the most memory on each card; gives how many are not."""
    shown: Counter[str] = Counter()
    left_out = 0
    for row in sorted(rows, key=lambda row: (-(row.memory_bytes or 0), row.pid)):
        shown[row.uuid] += 1
        if shown[row.uuid] > limit:
            left_out += 1
            continue
        labels = (str(row.index), row.uuid, str(row.pid), row.user, row.job_id)
        families.add("gpu_process_memory_bytes", row.memory_bytes, *labels)
        families.add("gpu_process_utilization_ratio", row.utilization_ratio, *labels)
        families.add("gpu_process_start_time_seconds", row.start_time, *labels)
    return left_out


def shown(jobs: Iterable[Job]) -> list[Job]:
    """The jobs that have room on the page, in the order that they have.

    On a card the jobs with the most memory; of those that hold none, each user's oldest: anybody
    can start ten thousand processes and declare a training of each.

    Args:
        jobs: all of them.
    """
    jobs = list(jobs)
    held: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    waiting: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for at, job in enumerate(jobs):
        for holding in job.holdings:
            held[holding.uuid].append((-(holding.memory_bytes or 0), at))
        if not job.holdings:
            waiting[job.user].append((job.start_time or 0.0, at))
    oldest = sorted(item for of_user in waiting.values() for item in sorted(of_user)[:MAX_WAITING])
    kept = {at for _, at in oldest[:MAX_WAITING_IN_ALL]}
    for of_card in held.values():
        kept.update(at for _, at in sorted(of_card)[:MAX_ON_CARD])
    return [job for at, job in enumerate(jobs) if at in kept]


def _platform(families: Families, job: Job) -> None:
    facts = job.platform
    if facts.platform:
        families.add(
            "gpu_job_platform_info",
            1,
            job.job_id,
            facts.platform,
            facts.number,
            facts.cluster,
            facts.partition,
            facts.account,
            facts.namespace,
            facts.name,
        )
    for container in facts.containers:
        families.add("gpu_job_container_info", 1, job.job_id, container)
    families.add("gpu_job_submit_timestamp_seconds", facts.submit_time, job.job_id)


def _job(families: Families, job: Job, said: Vocabularies) -> int:
    """Add a job; gives how many of its own series were one too many."""
    name = job.job_id
    left_out = 0
    interactive = "true" if job.interactive else "false"
    families.add("gpu_job_info", 1, name, job.user, job.source, job.framework, interactive)
    for executable, cgroup in job.executables:
        if said.admit(name, "gpu_job_executable", executable, cgroup):
            families.add("gpu_job_executable", 1, name, executable, cgroup)
        elif left_out == 0:
            # One that matches nothing stands for the rest: a whitelist must match every process.
            families.add("gpu_job_executable", 1, name, "", "")
            left_out += 1
        else:
            left_out += 1
    for holding in job.holdings:
        card = (name, str(holding.index), holding.uuid)
        families.add("gpu_job_holds_gpu", 1, *card)
        families.add("gpu_job_utilization_ratio", holding.utilization_ratio, *card)
        families.add("gpu_job_memory_bytes", holding.memory_bytes, *card)
    _platform(families, job)
    families.add("gpu_job_start_time_seconds", job.start_time, name)
    families.add("gpu_job_first_gpu_use_timestamp_seconds", job.first_gpu_use, name)
    for signal, time in job.activity.items():
        families.add("gpu_job_activity_timestamp_seconds", time, name, signal)
    usage = job.resources
    if usage is not None:
        families.add("gpu_job_cpu_seconds_total", usage.cpu_seconds, name)
        families.add("gpu_job_read_bytes_total", usage.read_bytes, name)
        families.add("gpu_job_io_wait_seconds_total", usage.io_wait_seconds, name)
        families.add("gpu_job_threads", usage.threads, name)
        families.add("gpu_job_loader_workers", usage.loader_workers, name)
        families.add("gpu_job_resident_memory_bytes", usage.resident_bytes, name)
        for state in STATES:
            families.add("gpu_job_processes", usage.states.get(state, 0), name, state)
        for resource, seconds in usage.pressure.items():
            families.add("gpu_job_pressure_seconds_total", seconds, name, resource)
    return left_out


def _command(families: Families, job: Job, said: Vocabularies) -> int:
    """Add a training known from its command line; gives how many series are one too many."""
    command = job.command
    if command is None:
        return 0
    details = (command.model, command.batch, command.imgsz, "", command.project)
    if not said.admit(job.job_id, "yolo_info", *details):
        return 1
    # No run of a trainer: whatever asks for one by this label finds none.
    families.add("yolo_info", 1, job.job_id, "", *details)
    if command.epochs.isdecimal():
        families.add("yolo_epochs_planned", int(command.epochs), job.job_id, "")
    families.add("yolo_devices", command.devices, job.job_id, "")
    return 0


def _run(families: Families, job_id: str, run: Run, said: Vocabularies) -> int:
    """Add a declared training; gives how many of its own series were one too many."""
    described, status = run.description, run.status
    at = (job_id, described.run_id)
    left_out = 0

    def say(name: str, value: float, *words: str) -> None:
        nonlocal left_out
        if said.admit(job_id, name, *words, run_id=described.run_id):
            families.add(name, value, *at, *words)
        else:
            left_out += 1

    say(
        "yolo_info",
        1,
        described.model,
        str(described.batch),
        # Of no single size is anything expected.
        described.sizes or str(described.imgsz),
        "true" if described.amp else "false",
        described.project,
    )
    families.add("yolo_epochs_planned", described.epochs, *at)
    families.add("yolo_devices", described.world_size, *at)
    if status is None:
        return left_out
    for phase in PHASES:
        families.add("yolo_phase", float(phase == status.phase), *at, phase)
        seconds = status.counters.phase_seconds.get(phase)
        families.add("yolo_phase_seconds_total", _positive(seconds), *at, phase)
    counters, checkpoint = status.counters, status.checkpoint
    for name, value in (
        ("yolo_phase_start_timestamp_seconds", run.phase_since),
        ("yolo_epoch", status.epoch),
        ("yolo_images_total", counters.images),
        ("yolo_steps_total", counters.steps),
        ("yolo_optimizer_steps_total", counters.optimizer_steps),
        ("yolo_loader_workers", status.loader_workers),
        ("yolo_data_wait_seconds_total", _positive(counters.data_wait_seconds)),
        ("yolo_nonfinite_loss_total", counters.nonfinite_losses),
        ("yolo_gradient_norm", status.gradient_norm),
        ("yolo_amp_scale", status.amp_scale),
        ("yolo_checkpoint_timestamp_seconds", run.checkpoint_time),
        ("yolo_checkpoint_durable_timestamp_seconds", run.checkpoint_durable),
        ("yolo_checkpoint_bytes", checkpoint.bytes if checkpoint is not None else None),
        ("yolo_checkpoint_seconds_total", _positive(counters.checkpoint_seconds)),
        ("yolo_stop_latency_seconds", _positive(status.stop_latency)),
        ("yolo_replay_seconds_total", _positive(counters.replay_seconds)),
        ("yolo_upload_lag_seconds", run.upload_lag),
        ("yolo_gpu_memory_peak_bytes", status.gpu_memory_peak),
        ("yolo_gpu_memory_allocated_bytes", status.gpu_memory_allocated),
        ("yolo_gpu_memory_reserved_bytes", status.gpu_memory_reserved),
    ):
        families.add(name, value, *at)
    say("yolo_resume_mode", 1, status.resume_mode)
    for name, values in (
        ("yolo_leave_request_timestamp_seconds", run.answered),
        ("yolo_loss", status.losses),
        ("yolo_metric", status.metrics),
        ("yolo_learning_rate", status.lr),
    ):
        for label, value in values.items():
            say(name, value, label)
    return left_out


def _positive(value: float | None) -> float | None:
    """A length of time; a negative one is not known."""
    return value if value is not None and value >= 0 else None
