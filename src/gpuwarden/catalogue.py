"""Every metric of gpuwarden: the contract between the exporter, the engine, rules and dashboards.

`gpu_` is a fact about hardware or a process on it, `yolo_` a fact about a training, `gpuwarden_`
what this product does or concludes. Only the exporter exports the first two. Base units; `_total`
on counters only; `_info` is 1; points in time are Unix timestamps. Not known is absent: never 0,
never NaN.

Joins: `on (instance, uuid)` for a card, `on (instance, job_id)` for a job on a node.
"""

from __future__ import annotations

from gpuwarden.engine_metrics import ENGINE_METRICS
from gpuwarden.metric_entries import Metric, MetricType, Source
from gpuwarden.scheduler_metrics import SCHEDULER_METRICS

__all__ = [
    "ACTIVITY_SIGNALS",
    "CATALOGUE",
    "LABEL_NAMES_FORBIDDEN",
    "PHASES",
    "SCRAPE_JOB",
    "Metric",
    "MetricType",
    "Source",
    "metric_of",
]


PHASES = ("setup", "scan", "train", "validate", "checkpoint", "export", "done")
"""Phases of a training, in their usual order; `train` includes waiting for data."""

ACTIVITY_SIGNALS = ("log", "heartbeat", "cpu")
"""What shows that a job is alive: output, the training loop's heartbeat, CPU time."""

LABEL_NAMES_FORBIDDEN = frozenset({"job", "instance", "owner", "type"})
"""`job` and `instance` belong to Prometheus; `owner` and `type` collide with common relabelling."""

SCRAPE_JOB = "gpuwarden"
"""Value of Prometheus' `job` label for the nodes' exporters."""


_G, _C = MetricType.GAUGE, MetricType.COUNTER
_GPU = ("gpu", "uuid")
_PROCESS = ("gpu", "uuid", "pid", "user", "job_id")
_JOB = ("job_id",)
_JOB_GPU = ("job_id", "gpu", "uuid")
_RUN = ("job_id", "run_id")


def _gpu(name: str, kind: MetricType, unit: str, text: str, *labels: str) -> Metric:
    return Metric(name, kind, unit, (*_GPU, *labels), text)


def _job(name: str, kind: MetricType, unit: str, text: str, *labels: str) -> Metric:
    return Metric(name, kind, unit, (*_JOB, *labels), text)


def _run(name: str, kind: MetricType, unit: str, text: str, *labels: str) -> Metric:
    return Metric(name, kind, unit, (*_RUN, *labels), text)


_GPUS = (
    _gpu(
        "gpu_info",
        _G,
        "",
        "Identity of a GPU (nvmlDeviceGetUUID, nvmlDeviceGetName, nvmlDeviceGetPciInfo); "
        "1. simulated is true where the driver is gpuwarden's simulation.",
        "name",
        "pci_bus_id",
        "driver_version",
        "simulated",
    ),
    _gpu(
        "gpu_up",
        _G,
        "",
        "1 if the GPU answers (nvmlDeviceGetHandleByIndex), 0 if it is lost, gone or needs "
        "a reset.",
    ),
    _gpu(
        "gpu_processes",
        _G,
        "",
        "Processes on the GPU, each once (nvmlDeviceGetComputeRunningProcesses, also those "
        "of MPS and graphics); 0 is said.",
    ),
    _gpu(
        "gpu_utilization_ratio",
        _G,
        "ratio",
        "Share of time a kernel ran (nvmlDeviceGetUtilizationRates, per cent / 100).",
    ),
    _gpu(
        "gpu_tensor_activity_ratio",
        _G,
        "ratio",
        "Share of time tensor cores worked (nvmlGpmMetricsGet, per cent / 100; Hopper and "
        "later, opt-in).",
    ),
    _gpu(
        "gpu_memory_activity_ratio",
        _G,
        "ratio",
        "Share of time memory was read or written (nvmlDeviceGetUtilizationRates, per cent / 100).",
    ),
    _gpu(
        "gpu_memory_total_bytes",
        _G,
        "bytes",
        "Memory of the GPU (nvmlDeviceGetMemoryInfo_v2, bytes).",
    ),
    _gpu(
        "gpu_memory_used_bytes",
        _G,
        "bytes",
        "Allocated memory, without the driver's reserve (nvmlDeviceGetMemoryInfo_v2, "
        "bytes); absent before R510, whose sum includes it.",
    ),
    _gpu(
        "gpu_memory_free_bytes",
        _G,
        "bytes",
        "Memory that can be allocated (nvmlDeviceGetMemoryInfo_v2, bytes).",
    ),
    _gpu(
        "gpu_memory_reserved_bytes",
        _G,
        "bytes",
        "Memory that the driver keeps for itself (nvmlDeviceGetMemoryInfo_v2, bytes).",
    ),
    _gpu(
        "gpu_memory_unified",
        _G,
        "",
        "1 if the GPU uses the node's memory and has no gpu_memory_*_bytes "
        "(nvmlDeviceGetMemoryInfo not supported, or all zero), else 0.",
    ),
    _gpu(
        "gpu_memory_unattributed_bytes",
        _G,
        "bytes",
        "Used memory that no listed process accounts for (nvmlDeviceGetMemoryInfo_v2 less "
        "nvmlDeviceGetComputeRunningProcesses, bytes).",
    ),
    _gpu(
        "gpu_temperature_celsius",
        _G,
        "celsius",
        "Temperature of the GPU's die (nvmlDeviceGetTemperature).",
    ),
    _gpu(
        "gpu_power_watts", _G, "watts", "Power draw (nvmlDeviceGetPowerUsage, milliwatts / 1000)."
    ),
    _gpu(
        "gpu_power_limit_watts",
        _G,
        "watts",
        "Enforced power limit (nvmlDeviceGetEnforcedPowerLimit, milliwatts / 1000).",
    ),
    _gpu(
        "gpu_energy_joules_total",
        _C,
        "joules",
        "Energy since the driver was loaded (nvmlDeviceGetTotalEnergyConsumption, "
        "millijoules / 1000).",
    ),
    _gpu(
        "gpu_clock_hertz",
        _G,
        "hertz",
        "Current clock (nvmlDeviceGetClockInfo, MHz x 1e6).",
        "clock",
    ),
    _gpu(
        "gpu_throttle_active",
        _G,
        "",
        "1 while the reason lowers the clocks (nvmlDeviceGetCurrentClocksEventReasons, a "
        "bit each).",
        "reason",
    ),
    _gpu(
        "gpu_ecc_errors_total",
        _C,
        "",
        "Volatile ECC errors since the driver was loaded (nvmlDeviceGetTotalEccErrors).",
        "error",
    ),
    _gpu(
        "gpu_xid_errors_total",
        _C,
        "",
        "XID errors heard (nvmlEventSetWait); counted on over restarts with --state.path.",
        "xid",
    ),
    _gpu(
        "gpu_xid_last_timestamp_seconds",
        _G,
        "seconds",
        "When the XID was last heard (nvmlEventSetWait, the node's clock).",
        "xid",
    ),
    _gpu(
        "gpu_pcie_receive_bytes_total",
        _C,
        "bytes",
        "Bytes received over PCIe since first seen (nvmlDeviceGetFieldValues 198); a lower "
        "bound where it wraps.",
    ),
    _gpu(
        "gpu_pcie_transmit_bytes_total",
        _C,
        "bytes",
        "Bytes sent over PCIe since first seen (nvmlDeviceGetFieldValues 197); a lower "
        "bound where it wraps.",
    ),
    _gpu(
        "gpu_nvlink_receive_bytes_total",
        _C,
        "bytes",
        "Data received over all NVLinks since first seen (nvmlDeviceGetFieldValues 139, "
        "KiB x 1024).",
    ),
    _gpu(
        "gpu_nvlink_transmit_bytes_total",
        _C,
        "bytes",
        "Data sent over all NVLinks since first seen (nvmlDeviceGetFieldValues 138, KiB x 1024).",
    ),
    _gpu(
        "gpu_mig_info",
        _G,
        "",
        "A MIG instance of the GPU (nvmlDeviceGetMigDeviceHandleByIndex); 1. Utilization "
        "per process does not exist on it.",
        "mig_uuid",
        "gpu_instance_id",
        "compute_instance_id",
        "profile",
    ),
    _gpu(
        "gpu_mig_memory_total_bytes",
        _G,
        "bytes",
        "Memory of a MIG instance (nvmlDeviceGetMemoryInfo_v2 of it, bytes).",
        "mig_uuid",
    ),
    _gpu(
        "gpu_mig_memory_used_bytes",
        _G,
        "bytes",
        "Used memory of a MIG instance (nvmlDeviceGetMemoryInfo_v2 of it, bytes).",
        "mig_uuid",
    ),
    _gpu(
        "gpu_mig_utilization_ratio",
        _G,
        "ratio",
        "Share of time the GPU instance worked (nvmlGpmMetricsGet, per cent / 100; Hopper "
        "and later).",
        "mig_uuid",
    ),
    _gpu(
        "gpu_mig_tensor_activity_ratio",
        _G,
        "ratio",
        "Share of time tensor cores of the GPU instance worked (nvmlGpmMetricsGet, per "
        "cent / 100; opt-in).",
        "mig_uuid",
    ),
)

_PROCESSES = (
    Metric(
        "gpu_process_memory_bytes",
        _G,
        "bytes",
        _PROCESS,
        "GPU memory of a process (nvmlDeviceGetComputeRunningProcesses, bytes).",
    ),
    Metric(
        "gpu_process_utilization_ratio",
        _G,
        "ratio",
        _PROCESS,
        "Share of time a kernel of the process ran (nvmlDeviceGetProcessUtilization, per "
        "cent / 100); 0 only where the driver said so.",
    ),
    Metric(
        "gpu_process_start_time_seconds",
        _G,
        "seconds",
        _PROCESS,
        "Start of the process (/proc, boot time + start ticks).",
    ),
)

_JOBS = (
    _job(
        "gpu_job_info",
        _G,
        "",
        "A job that uses or holds a GPU; 1. source tells where its identity comes from.",
        "user",
        "source",
        "framework",
        "interactive",
    ),
    _job(
        "gpu_job_executable",
        _G,
        "",
        "Executable (exe link) and cgroup of a process of the job that holds a GPU; 1. "
        "executable is empty outside the host's mount namespace or where root does not own it.",
        "executable",
        "cgroup",
    ),
    Metric(
        "gpu_job_holds_gpu",
        _G,
        "",
        _JOB_GPU,
        "The job holds the GPU; 1. uuid is the MIG instance's where it runs on one.",
    ),
    Metric(
        "gpu_job_utilization_ratio",
        _G,
        "ratio",
        _JOB_GPU,
        "Utilization of the GPU by the job: the card's for a sole tenant, else the sum of its "
        "processes; absent where it cannot be measured.",
    ),
    Metric(
        "gpu_job_memory_bytes",
        _G,
        "bytes",
        _JOB_GPU,
        "Memory of the GPU used by the job: the sum of its processes, 0 while held and unused.",
    ),
    _job(
        "gpu_job_platform_info",
        _G,
        "",
        "The job at its platform; 1. platform_job_id is what the platform's tools take: Slurm's "
        "number, or the pod's uid. cluster, partition and account are Slurm's, workload_namespace "
        "and workload_name the pod's.",
        "platform",
        "platform_job_id",
        "cluster",
        "partition",
        "account",
        "workload_namespace",
        "workload_name",
    ),
    _job(
        "gpu_job_container_info",
        _G,
        "",
        "A container in which processes of the job hold a GPU, or run where none does; 1.",
        "container_id",
    ),
    _job(
        "gpu_job_submit_timestamp_seconds",
        _G,
        "seconds",
        "When the job was submitted, or last requeued, by Slurm's word.",
    ),
    _job(
        "gpu_job_start_time_seconds",
        _G,
        "seconds",
        "Start of the job's root process; of a job without a process, by its platform.",
    ),
    _job(
        "gpu_job_first_gpu_use_timestamp_seconds",
        _G,
        "seconds",
        "When a process of the job was first seen on a GPU.",
    ),
    _job(
        "gpu_job_activity_timestamp_seconds",
        _G,
        "seconds",
        "Last sign of life. cpu: its tree last used over 1 % of a core; first sight counts.",
        "signal",
    ),
    _job("gpu_job_cpu_seconds_total", _C, "seconds", "CPU time of the job's process tree."),
    _job("gpu_job_read_bytes_total", _C, "bytes", "Bytes read from storage (/proc/<pid>/io)."),
    _job("gpu_job_io_wait_seconds_total", _C, "seconds", "Time blocked on I/O, sampled by state."),
    _job("gpu_job_threads", _G, "", "Threads of the job's process tree."),
    _job("gpu_job_loader_workers", _G, "", "Data loader worker processes of the job."),
    _job("gpu_job_resident_memory_bytes", _G, "bytes", "Resident memory of the process tree."),
    _job(
        "gpu_job_pressure_seconds_total",
        _C,
        "seconds",
        "Pressure stall time of the job's cgroup (PSI, some).",
        "resource",
    ),
    _job("gpu_job_processes", _G, "", "Processes of the job by state.", "state"),
    Metric(
        "gpuwarden_node_pressure_seconds_total",
        _C,
        "seconds",
        ("resource",),
        "Pressure stall time of the node (PSI, some).",
    ),
)

_RUNS = (
    _run("yolo_info", _G, "", "A training; 1.", "model", "batch", "imgsz", "amp", "project"),
    _run("yolo_phase", _G, "", "1 for the phase the training is in, 0 for the others.", "phase"),
    _run("yolo_phase_start_timestamp_seconds", _G, "seconds", "When the current phase began."),
    _run("yolo_phase_seconds_total", _C, "seconds", "Time spent in a phase, by the loop.", "phase"),
    _run("yolo_epoch", _G, "", "Current epoch, from 0."),
    _run("yolo_epochs_planned", _G, "", "Epochs that the training will run."),
    _run(
        "yolo_devices",
        _G,
        "",
        "Cards that the training runs on over all nodes: its ranks, or what its command line asks "
        "for.",
    ),
    _run("yolo_images_total", _C, "", "Images trained on in this attempt."),
    _run("yolo_steps_total", _C, "", "Batches trained on in this attempt."),
    _run("yolo_optimizer_steps_total", _C, "", "Steps of the optimizer in this attempt."),
    _run("yolo_loader_workers", _G, "", "Processes that load training data."),
    _run("yolo_data_wait_seconds_total", _C, "seconds", "Time the loop waited for a batch."),
    _run("yolo_loss", _G, "", "Running mean of a loss component in the epoch.", "component"),
    _run("yolo_metric", _G, "", "Last validation metric.", "metric"),
    _run("yolo_learning_rate", _G, "", "Learning rate of a parameter group.", "group"),
    _run("yolo_nonfinite_loss_total", _C, "", "Batches whose loss was not finite."),
    _run("yolo_gradient_norm", _G, "", "Gradient norm of the last optimizer step."),
    _run("yolo_amp_scale", _G, "", "Loss scale of automatic mixed precision."),
    _run("yolo_checkpoint_timestamp_seconds", _G, "seconds", "When state was last saved."),
    _run(
        "yolo_checkpoint_durable_timestamp_seconds",
        _G,
        "seconds",
        "When state was last known to be on disk (fsync).",
    ),
    _run("yolo_checkpoint_bytes", _G, "bytes", "Size of the last saved state."),
    _run("yolo_checkpoint_seconds_total", _C, "seconds", "Time the loop stood still for saving."),
    _run("yolo_stop_latency_seconds", _G, "seconds", "From the request to leave to the exit."),
    _run("yolo_replay_seconds_total", _C, "seconds", "Time spent replaying batches on resume."),
    _run("yolo_upload_lag_seconds", _G, "seconds", "Age of the newest state not yet uploaded."),
    _run("yolo_gpu_memory_peak_bytes", _G, "bytes", "Peak memory allocated by torch."),
    _run("yolo_gpu_memory_allocated_bytes", _G, "bytes", "Memory that torch's tensors hold."),
    _run("yolo_gpu_memory_reserved_bytes", _G, "bytes", "Memory that torch holds on the card."),
    _run(
        "yolo_leave_request_timestamp_seconds",
        _G,
        "seconds",
        "When the trainer came so far with the last request to save or leave: received, saving, "
        "leaving.",
        "state",
    ),
    _run("yolo_resume_mode", _G, "", "How exactly the training can be resumed; 1.", "mode"),
)

_EXPORTER = (
    Metric("gpuwarden_nvml_up", _G, "", (), "1 if NVML is initialised, else 0."),
    Metric(
        "gpuwarden_snapshot_timestamp_seconds",
        _G,
        "seconds",
        (),
        "When the exported snapshot was taken; only with a complete and current one.",
    ),
    Metric(
        "gpuwarden_host_pids",
        _G,
        "",
        (),
        "1 if pids are the host's, 0 in a PID namespace of the exporter's own: then nobody is "
        "named.",
    ),
    Metric("gpuwarden_collector_success", _G, "", ("collector",), "1 if the collector succeeded."),
    Metric(
        "gpuwarden_dropped_values_total",
        _C,
        "",
        ("reason",),
        "Values that were read but not exported, by reason.",
    ),
    Metric(
        "gpuwarden_lost_gpu_seconds_total",
        _C,
        "seconds",
        ("user", "reason"),
        "GPU time of ended runs that no saved state covers.",
    ),
    Metric("gpuwarden_exporter_build_info", _G, "", ("version",), "Version of the exporter; 1."),
)

CATALOGUE: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        *_GPUS,
        *_PROCESSES,
        *_JOBS,
        *_RUNS,
        *_EXPORTER,
        *ENGINE_METRICS,
        *SCHEDULER_METRICS,
    )
}
"""Every metric by name, in order of exposition."""


def metric_of(series: str) -> Metric | None:
    """The metric that a series of this name belongs to, or None.

    It has the metric's own name, or that of a part of a histogram; parts only grow, like counters.
    """
    if series in CATALOGUE:
        return CATALOGUE[series]
    for suffix in ("_bucket", "_sum", "_count"):
        metric = CATALOGUE.get(series.removesuffix(suffix))
        if metric is not None and metric.type is MetricType.HISTOGRAM:
            return metric
    return None
