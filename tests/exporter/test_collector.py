"""The page: names of the catalogue, valid for every parser, whatever the labels hold."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpuwarden.catalogue import CATALOGUE, Source
from gpuwarden.exporter.collector import collect
from gpuwarden.exporter.devices import (
    DeviceSnapshot,
    Gpu,
    GpuProcess,
    MigInstance,
    ProcessKind,
    XidErrors,
)
from gpuwarden.exporter.jobs import (
    GpuProcessRow,
    Holding,
    Job,
    NodeSnapshot,
    PlatformFacts,
    Resources,
    Run,
    YoloCommand,
)
from gpuwarden.exporter.pages import Bodies, Families, Format, clean
from gpuwarden.exporter.processes import Process
from gpuwarden.exporter.resources import PRESSURE_RESOURCES, STATES
from gpuwarden.exporter.switches import DEFAULT_COLLECTORS
from gpuwarden.job_files import Checkpoint, Counters, RunDescription, RunStatus

ROOT = Process(20, 10, 20, 20, 0, "S", 20, 1000, "python", "/a", 100, 4)
GPU = Gpu(
    index=0,
    uuid="GPU-a",
    name='A "100"\\',
    pci_bus_id="00000000:3B:00.0",
    utilization_ratio=0.0,
    memory_activity_ratio=0.5,
    tensor_activity_ratio=0.25,
    memory_total_bytes=1000,
    memory_used_bytes=500,
    memory_free_bytes=400,
    memory_reserved_bytes=100,
    memory_unified=False,
    temperature_celsius=50.0,
    power_watts=100.0,
    power_limit_watts=400.0,
    energy_joules=1e6,
    clocks_hertz={"sm": 1.41e9},
    throttle={"hw_thermal": False},
    ecc_errors={"corrected": 0},
    traffic_bytes={
        "pcie_receive": 3,
        "pcie_transmit": 4,
        "nvlink_receive": 5,
        "nvlink_transmit": 6,
    },
    processes=(GpuProcess(20, ProcessKind.COMPUTE, 500, 0.0),),
    instances=(MigInstance("MIG-a", 1, 0, "1g.5gb", 300, 200, 0.5, 0.25),),
)
DESCRIPTION = RunDescription(
    run_id="run-1",
    pid=20,
    pid_ns=1,
    start_ticks=20,
    boot_id="b",
    model="yolov8n",
    batch=16,
    imgsz=640,
    amp=True,
    epochs=3,
    project="p",
)
STATUS = RunStatus(
    run_id="run-1",
    sequence=1,
    phase="train",
    phase_since=90.0,
    heartbeat=99.0,
    counters=Counters(images=64, steps=4, phase_seconds={"train": 9.0}),
    losses={"box": 1.0},
    metrics={"mAP50": 0.5},
    lr={"pg0": 0.01},
    checkpoint=Checkpoint(80.0, 4, 81.0, 1000),
    gradient_norm=1.0,
    amp_scale=65536.0,
    stop_latency=0.5,
    gpu_memory_peak=500,
    gpu_memory_allocated=300,
    gpu_memory_reserved=600,
    loader_workers=8,
    resume_mode="exact",
)
RUN = Run(DESCRIPTION, STATUS, 99.0, 90.0, 80.0, 81.0, upload_lag=20.0, answered={"received": 98.0})
JOB = Job(
    job_id="proc-84cb9834-20-20",
    user="ann",
    source="trainer",
    framework="ultralytics",
    interactive=False,
    root=ROOT,
    executables=(("/usr/bin/python3.11", "/a"),),
    holdings=(Holding(0, "GPU-a", 500, 0.0),),
    start_time=1.0,
    first_gpu_use=2.0,
    activity={"log": 3.0, "heartbeat": 4.0, "cpu": 5.0},
    resources=Resources(
        cpu_seconds=1.0,
        read_bytes=2,
        io_wait_seconds=3.0,
        threads=4,
        loader_workers=5,
        resident_bytes=6,
        states=dict.fromkeys(STATES, 1),
        pressure=dict.fromkeys(PRESSURE_RESOURCES, 1.5),
    ),
    runs=(RUN,),
    platform=PlatformFacts(
        platform="slurm",
        number="211",
        cluster="main",
        partition="gpu",
        account="vision",
        submit_time=1.0,
        containers=("ab" * 32,),
    ),
)
SNAPSHOT = NodeSnapshot(
    taken_at=100.0,
    devices=DeviceSnapshot(
        99.0,
        "580.1",
        simulated=True,
        gpus=(GPU,),
        xids=(XidErrors(0, "GPU-a", 79, count=2, last_seen=98.0),),
    ),
    jobs=(JOB,),
    processes=(GpuProcessRow(0, "GPU-a", 20, "ann", JOB.job_id, 1.0, 500, 0.0),),
    unattributed={"GPU-a": 0, "MIG-a": 100},
    node_pressure=dict.fromkeys(PRESSURE_RESOURCES, 2.5),
    lost_gpu_seconds={("ann", "died"): 5.0},
)


def _page(snapshot: NodeSnapshot, form: Format = Format.TEXT) -> str:
    families, _ = collect(snapshot, totals={})
    return Bodies(families)[form].decode()


def _samples(snapshot: NodeSnapshot) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_text(_page(snapshot))
        for sample in family.samples
    }


def _names(snapshot: NodeSnapshot) -> set[str]:
    return {name for name, _ in _samples(snapshot)}


def test_every_metric_of_the_catalogue_is_on_the_page() -> None:
    """Whatever the catalogue promises of the exporter is exported."""
    promised = {name for name, metric in CATALOGUE.items() if metric.source is Source.EXPORTER}
    missing = promised - _names(SNAPSHOT)
    assert missing == set()
    assert _names(SNAPSHOT) <= promised


@pytest.mark.parametrize("snapshot", [SNAPSHOT, NodeSnapshot(1.0, None)])
def test_promtool_has_no_complaint(snapshot: NodeSnapshot) -> None:
    """Names, types and help follow the conventions that promtool knows."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    answer = subprocess.run(
        [promtool, "check", "metrics"],
        check=False,
        capture_output=True,
        input=_page(snapshot),
        text=True,
        timeout=30,
    )
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")


def test_both_formats_say_the_same() -> None:
    """Text and OpenMetrics hold the same samples."""
    families = parse_openmetrics(_page(SNAPSHOT, Format.OPENMETRICS))
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }
    assert found == _samples(SNAPSHOT)


@given(text=st.text(st.characters(codec=None), max_size=400))
def test_any_label(text: str) -> None:
    """Whatever users put into names, the page is one that every parser takes."""
    family = Families()
    family.add("gpuwarden_collector_success", 1.0, text)
    pages = Bodies(family)
    for content, parse in ((Format.TEXT, parse_text), (Format.OPENMETRICS, parse_openmetrics)):
        ((sample,),) = [item.samples for item in parse(pages[content].decode())]
        assert sample.labels == {"collector": clean(text)}
    assert len(clean(text)) <= 256


def test_what_is_not_known_is_absent() -> None:
    """A card that tells nothing has only its identity; nothing becomes 0 or NaN."""
    bare = NodeSnapshot(
        1.0, DeviceSnapshot(1.0, "1", simulated=False, gpus=(Gpu(0, "GPU-a", "x"),))
    )
    assert {name for name in _names(bare) if name.startswith("gpu_")} == {"gpu_info", "gpu_up"}
    assert "NaN" not in _page(bare)


def test_zero_is_said() -> None:
    """A measured 0 is on the page."""
    samples = _samples(SNAPSHOT)
    assert samples["gpu_utilization_ratio", (("gpu", "0"), ("uuid", "GPU-a"))] == 0.0
    key = (("job_id", JOB.job_id), ("phase", "validate"), ("run_id", "run-1"))
    assert samples["yolo_phase", key] == 0.0


@pytest.mark.parametrize(
    "snapshot",
    [
        NodeSnapshot(1.0, None),
        NodeSnapshot(1.0, DeviceSnapshot(1.0, "1", simulated=False, gpus=(), complete=False)),
        NodeSnapshot(
            1.0,
            DeviceSnapshot(1.0, "1", simulated=False, gpus=()),
            failed=frozenset({"jobs"}),
        ),
    ],
)
def test_the_snapshots_time_needs_a_whole_one(snapshot: NodeSnapshot) -> None:
    """Only a complete snapshot has a time, for that is what judging waits for."""
    assert "gpuwarden_snapshot_timestamp_seconds" not in _names(snapshot)


def test_a_run_cannot_make_endless_series() -> None:
    """What a run may say of itself is bounded, and what is left out is counted."""
    status = dataclasses.replace(STATUS, losses={str(number): 1.0 for number in range(60)})
    job = dataclasses.replace(JOB, runs=(Run(DESCRIPTION, status),))
    _, dropped = collect(dataclasses.replace(SNAPSHOT, jobs=(job,)), totals={})
    assert dropped == {"series_limit": 28}


def test_the_largest_processes_are_shown() -> None:
    """On a crowded card the processes with the most memory have series, the rest are counted."""
    rows = tuple(
        GpuProcessRow(0, "GPU-a", pid, "ann", "j", 1.0, memory_bytes=pid) for pid in range(1, 11)
    )
    families, dropped = collect(NodeSnapshot(1.0, None, processes=rows), totals={}, max_processes=3)
    samples = dict(families.written())["gpu_process_memory_bytes"].splitlines()
    assert sorted(float(line.rpartition(" ")[2]) for line in samples) == [8, 9, 10]
    assert dropped == {"process_limit": 7}


def test_processes_can_be_switched_off() -> None:
    """Without the family the jobs are still there."""
    families, _ = collect(SNAPSHOT, totals={}, collectors=DEFAULT_COLLECTORS - {"process"})
    names = {name for name, _ in families.written()}
    assert not any(name.startswith("gpu_process_") for name in names)
    assert "gpu_job_memory_bytes" in names


def test_one_series_once() -> None:
    """Labels that become the same by cleaning do not become two samples of one series."""
    families = Families()
    families.add("gpuwarden_collector_success", 1.0, "a\x00")
    families.add("gpuwarden_collector_success", 0.0, "a\x01")
    ((_, samples),) = families.written()
    assert samples == 'gpuwarden_collector_success{collector="a\N{REPLACEMENT CHARACTER}"} 1.0\n'
    assert families.duplicates == 1


def test_an_undeclared_training() -> None:
    """A recognised training has its model, and nobody to ask: no run id."""
    command = YoloCommand("yolov8s", "16", "640", "100")
    job = dataclasses.replace(JOB, runs=(), source="cmdline", command=command)
    samples = _samples(dataclasses.replace(SNAPSHOT, jobs=(job,)))
    (info,) = [dict(labels) for name, labels in samples if name == "yolo_info"]
    assert (info["model"], info["batch"], info["run_id"], info["amp"]) == ("yolov8s", "16", "", "")


def test_images_of_several_sizes_have_no_size_that_anything_is_expected_of() -> None:
    """The label says from which to which; a rule that compares with a size knows none."""
    described = dataclasses.replace(DESCRIPTION, sizes="320-960")
    job = dataclasses.replace(JOB, runs=(Run(described, STATUS),))
    samples = _samples(dataclasses.replace(SNAPSHOT, jobs=(job,)))
    (info,) = [dict(labels) for name, labels in samples if name == "yolo_info"]
    assert info["imgsz"] == "320-960"
    assert not info["imgsz"].isdecimal()


def test_a_metric_that_the_catalogue_does_not_have() -> None:
    """Names and labels cannot drift from the catalogue."""
    families = Families()
    with pytest.raises(KeyError):
        families.add("gpu_made_up", 1.0)
    with pytest.raises(ValueError, match="labels"):
        families.add("gpu_up", 1.0, "0")


def test_errors_that_are_not_heard() -> None:
    """While XID errors are not heard it is said; nobody is judged by them, so all else counts."""
    devices = DeviceSnapshot(1.0, "1", simulated=False, gpus=(GPU,), xids_heard=False)
    samples = _samples(NodeSnapshot(1.0, devices))
    assert samples["gpuwarden_collector_success", (("collector", "xid"),)] == 0.0
    assert samples["gpuwarden_collector_success", (("collector", "nvml"),)] == 1.0
    assert "gpuwarden_snapshot_timestamp_seconds" in _names(NodeSnapshot(1.0, devices))


def test_a_part_of_the_node_that_is_hidden() -> None:
    """Where a part of a card cannot be read, an operator sees which collector it is."""
    devices = DeviceSnapshot(1.0, "1", simulated=False, gpus=(GPU,), complete=False)
    samples = _samples(NodeSnapshot(1.0, devices))
    assert samples["gpuwarden_collector_success", (("collector", "nvml"),)] == 0.0
    assert samples["gpuwarden_nvml_up", ()] == 1.0
    assert samples["gpu_utilization_ratio", (("gpu", "0"), ("uuid", "GPU-a"))] == 0.0


def test_a_collector_that_is_off() -> None:
    """What is switched off neither succeeds nor fails."""
    families, _ = collect(SNAPSHOT, totals={}, collectors=DEFAULT_COLLECTORS - {"xid"})
    page = Bodies(families)[Format.TEXT].decode()
    assert 'collector="nvml"' in page
    assert 'collector="xid"' not in page
