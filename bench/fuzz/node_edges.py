"""What a stranger can put before the exporter, and what must hold whatever it is."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import itertools
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from bench.fuzz.edges import JSON_WORDS, SPLIT, YAML_WORDS, Attack, require
from gpuwarden.errors import InvalidInput
from gpuwarden.exporter import classification, drivers, releases, web_configs
from gpuwarden.exporter.app import patience_of, takes_gzip, wanted_format
from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.cgroups import own_cgroup, platform_of
from gpuwarden.exporter.collector import collect
from gpuwarden.exporter.devices import DeviceSnapshot, Gpu, GpuProcess, ProcessKind
from gpuwarden.exporter.jobs import Job, NodeSnapshot, Run
from gpuwarden.exporter.nvml import Nvml
from gpuwarden.exporter.pages import Bodies, Format
from gpuwarden.exporter.processes import Process
from gpuwarden.exporter.recollections import Recollection
from gpuwarden.exporter.runs import prepare
from gpuwarden.exporter.scenarios import Card, Fault, Scenario, SimulatedProcess
from gpuwarden.exporter.servers import parse_address
from gpuwarden.exporter.simulated import build
from gpuwarden.job_files import JobFileError, LeaveRequest, RunDescription, RunStatus

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

BOOT = "01234567-89ab-cdef-0123-456789abcdef"
PID = 4242
HASH = "$2b$04$lvWxGMI6mZHMqFa8nTdcF.59v0VehtDhjzl7piJBOwCi79PIbu0pW"
NAMESPACE = 4026531836
NOW = 1_800_000_000.0


def check_page(snapshot: NodeSnapshot) -> None:
    """A page of a snapshot is one that both parsers take, with finite values, each series once."""
    families, _ = collect(snapshot, totals={})
    bodies = Bodies(families)
    seen = set()
    for family in parse_text(bodies[Format.TEXT].decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            require(holds=key not in seen, what=f"twice: {key}")
            require(holds=math.isfinite(sample.value), what=f"not finite: {key}")
            require(
                holds=not sample.name.endswith("_ratio") or 0 <= sample.value <= 1,
                what=f"no share: {key} {sample.value}",
            )
            seen.add(key)
    # Counters below 0 are refused by this parser.
    read: Any = parse_openmetrics
    counted = sum(len(family.samples) for family in read(bodies[Format.OPENMETRICS].decode()))
    require(holds=counted == len(seen), what="the formats differ")


# ---------------------------------------------------------------------------------------------
# Job files

DESCRIPTION = RunDescription(
    run_id="run-1",
    pid=PID,
    pid_ns=NAMESPACE,
    start_ticks=77,
    boot_id=BOOT,
    model="yolov8n",
    batch=16,
    imgsz=640,
    amp=True,
    epochs=3,
    log="/var/log/x",
)
STATUS = RunStatus(
    run_id="run-1",
    sequence=1,
    phase="train",
    phase_since=NOW - 10,
    heartbeat=NOW - 1,
    losses={"box": 1.5},
    metrics={"mAP50": 0.5},
    lr={"pg0": 0.01},
    gradient_norm=1.0,
    stop_latency=0.5,
)
_JSON_WORDS = (
    *JSON_WORDS,
    *(b'"run-1"', b'"counters":{"images":', b'"checkpoint":{"time":', b'"exit":{"code":'),
    b'"request":{',
)


def _job() -> Job:
    root = Process(PID, 1, PID, PID, 0, "S", 77, 1000, "python", "/a", 100, 4)
    return Job(
        job_id="proc-01234567-4242-77",
        user="ann",
        source="trainer",
        framework="ultralytics",
        interactive=False,
        root=root,
        executables=(("/usr/bin/python3.11", "/a"),),
        holdings=(),
        start_time=NOW,
        first_gpu_use=None,
        activity={},
    )


def _show(run: Run) -> None:
    job = dataclasses.replace(_job(), runs=(run,))
    check_page(NodeSnapshot(taken_at=NOW, devices=None, jobs=(job,)))


def _descriptions(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        with suppress(JobFileError):
            _show(Run(RunDescription.decode(data), STATUS))

    return attack


def _statuses(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        with suppress(JobFileError):
            _show(Run(DESCRIPTION, RunStatus.decode(data)))

    return attack


def _requests(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        with suppress(JobFileError):
            LeaveRequest.decode(data).encode()

    return attack


# ---------------------------------------------------------------------------------------------
# Processes


def _arguments(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        words = tuple(item.decode(errors="replace") for item in data.rstrip(b"\0").split(b"\0"))
        classification.is_kernel(words)
        command = classification.yolo_command(words)
        if command is not None:
            job = dataclasses.replace(_job(), command=command)
            check_page(NodeSnapshot(taken_at=NOW, devices=None, jobs=(job,)))

    return attack


def _cgroups(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        path = own_cgroup(data)
        lines = data.decode(errors="replace").split("\n")
        require(
            holds=path == "" or any(line.endswith(f":{path}") for line in lines),
            what=f"{path!r} is no path of these",
        )
        platform_of(path)

    return attack


def _stat(comm: bytes = b"python") -> bytes:
    rest = b"S 1 4242 4242 0 -1 0 0 0 0 0 3 4 5 6 20 0 1 0 77 0 9" + b" 0" * 20
    return b"%d (%s) %s\n" % (PID, comm, rest)


_PROC_SEED = SPLIT.join(
    [
        _stat(),
        b"Name:\tpython\nUid:\t1000\t1000\t1000\t1000\nNSpid:\t4242\t1\n",
        b"0::/user.slice/session-1.scope\n",
        b"rchar: 1\nread_bytes: 5\nwrite_bytes: 6\n",
        b"yolo\0train\0model=yolov8n.pt\0batch=16\0",
        b"some avg10=0.00 avg60=0.00 avg300=0.00 total=12345\n",
    ]
)


def _proc(folder: Path, stack: ExitStack) -> Callable[[bytes], None]:
    proc = folder / "proc"
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text(f"{BOOT}\n")
    (proc / "stat").write_text("cpu  1 2 3\nbtime 1700000000\n")
    for who in ("self", str(PID), "1"):
        (proc / who / "ns").mkdir(parents=True)
        for kind in ("pid", "mnt"):
            (proc / who / "ns" / kind).touch()
    (proc / "pressure").mkdir()
    (proc / "1/stat").write_bytes(_stat(b"systemd").replace(b"4242 (", b"1 ("))
    (proc / "1/status").write_bytes(b"Name:\tsystemd\nUid:\t0\t0\t0\t0\n")
    (proc / "1/cgroup").write_bytes(b"0::/init.scope\n")
    jobs = folder / "gpuwarden"
    prepare(jobs)
    listed = (GpuProcess(PID, ProcessKind.COMPUTE, 1000, 0.5),)
    gpu = Gpu(0, "GPU-a", "x", utilization_ratio=0.5, memory_used_bytes=2000, processes=listed)
    devices = DeviceSnapshot(NOW, "1", simulated=True, gpus=(gpu,))
    attribution = Attribution(jobs, proc=proc)
    stack.callback(attribution.close)
    files = ("stat", "status", "cgroup", "io", "cmdline")

    def attack(data: bytes) -> None:
        parts = [*data.split(SPLIT), *[b""] * len(files)]
        for name, content in zip(files, parts, strict=False):
            (proc / str(PID) / name).write_bytes(content)
        (proc / "pressure/cpu").write_bytes(parts[len(files)])
        check_page(attribution.observe(devices))

    return attack


# ---------------------------------------------------------------------------------------------
# The web


def _headers(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        text = data.decode("latin-1")
        wanted_format(text)
        takes_gzip(text)
        require(holds=0 <= patience_of(text) <= 30, what="it would be waited for")

    return attack


def _addresses(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        with suppress(InvalidInput):
            _, port = parse_address(data.decode(errors="replace"), default_port=9835)
            require(holds=0 <= port <= 65535, what=f"no port: {port}")

    return attack


def _web_files(folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    file = folder / "web.yml"

    def attack(data: bytes) -> None:
        file.write_bytes(data)
        with suppress(InvalidInput):
            web_configs.read(file)

    return attack


def _credentials(folder: Path, stack: ExitStack) -> Callable[[bytes], None]:
    file = folder / "web.yml"
    file.write_text(f"basic_auth_users: {{a: '{HASH}'}}")
    web = web_configs.Web(file)
    runner = stack.enter_context(asyncio.Runner())

    def attack(data: bytes) -> None:
        for text in (data.decode("latin-1"), "Basic " + base64.b64encode(data).decode()):
            allowed = runner.run(web.allows(text))
            require(holds=not allowed, what="somebody without the password was let in")

    return attack


def _releases(folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    file = folder / "release"

    def attack(data: bytes) -> None:
        file.write_bytes(data)
        order = releases.read(file)
        require(holds=order is not None, what="an order of root's was not followed")

    return attack


def _states(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        with suppress(ValueError):
            Recollection.decode(data).encode()

    return attack


# ---------------------------------------------------------------------------------------------
# The driver


def _texts(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        require(holds=drivers.printable(data).isprintable(), what="not printable")

    return attack


_CALLS = (
    "nvmlDeviceGetComputeRunningProcesses*",
    "nvmlDeviceGetGraphicsRunningProcesses*",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetMemoryInfo*",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetTemperature*",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMigMode",
    "*",
)


def _answers(folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    file = folder / "scenario"
    library = build()

    def attack(data: bytes) -> None:
        numbers = itertools.chain(data, itertools.repeat(0))

        def pick(*values: int) -> int:
            return values[next(numbers) % len(values)]

        odd = (0, 1, 50, 100, 101, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1)
        large = (0, 1, 2**20, 2**30, 2**40, 2**50, 2**60, 2**62 - 1)
        cards = [
            Card(
                at,
                memory=pick(2**35, *large),
                reserved=pick(0, *large),
                told_used=pick(*large),
                utilization=pick(*odd),
                activity=pick(*odd),
                temperature=pick(*odd),
                limit=pick(*odd),
                power=pick(*odd),
                energy=pick(*large),
                sm_clock=pick(*odd),
                ecc_corrected=pick(*large),
                throttle=pick(*large),
                mig=pick(0, 0, 0, 1),
            )
            for at in range(2)
        ]
        processes = [
            SimulatedProcess(
                pick(0, 1),
                pick(0, 1, PID, 2**22, 2**31, 2**32 - 1),
                memory=pick(*large),
                sm=pick(*odd),
                sample_age=float(pick(0, 0, 0, 3, 100, 100_000)),
                kind=("compute", "graphics", "mps")[pick(0, 1, 2)],
                ghost=1,
            )
            for _ in range(pick(0, 1, 2, 3))
        ]
        faults = [
            Fault(
                _CALLS[next(numbers) % len(_CALLS)],
                pick(0, 2, 3, 4, 6, 7, 15, 16, 28, 999),
                card=pick(0, 1),
                count=pick(0, 1, 65, 70_000, 2**32 - 1),
            )
            for _ in range(pick(0, 1, 2))
        ]
        scenario = Scenario(cards, processes, faults=faults, row_bytes=pick(24, 24, 32))
        nvml = Nvml(library, scenario=scenario.write(file))
        nvml.open()
        try:
            for _ in range(2):
                check_page(NodeSnapshot(taken_at=NOW, devices=nvml.snapshot()))
        finally:
            nvml.close()

    return attack


_STATE = Recollection(BOOT, NOW, {}, {}, (), {}).encode()
_YAML_WORDS = (
    *YAML_WORDS,
    *(b"tls_server_config:\n", b"basic_auth_users:\n", b"  cert_file: a\n"),
)

ATTACKS = (
    Attack("job descriptions", _descriptions, (DESCRIPTION.encode(),), _JSON_WORDS),
    Attack("job statuses", _statuses, (STATUS.encode(),), _JSON_WORDS),
    Attack("leave requests", _requests, (LeaveRequest("d", NOW).encode(),), _JSON_WORDS),
    Attack(
        "command lines",
        _arguments,
        (
            b"yolo\0detect\0train\0model=a/yolov8n.pt\0batch=16\0epochs=100\0",
            b"python\0train.py\0--weights\0yolov5s.pt\0--batch-size=16\0--img\x00640\0",
            b"python\0-m\0ipykernel_launcher\0-f\0x.json\0",
        ),
        (b"\0", b"=", b"train", b"--epochs", b"999999", b"-1", b"model=", b"-m", b"\xff"),
    ),
    Attack(
        "cgroup files",
        _cgroups,
        (
            b"0::/system.slice/slurmstepd.scope/job_211/step_0/user/task_0\n",
            b"3:memory:/slurm/uid_1000/job_31/step_batch\n0::/user.slice\n",
            b"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-"
            b"pod0b9e4f0c_1111_2222_3333_444455556666.slice/cri-containerd-"
            + b"a" * 64
            + b".scope\n",
        ),
        (
            b"\n",
            b"0::",
            b"\x0c",
            b"\r",
            b"\xe2\x80\xa8",
            b"/job_",
            b"kubepods",
            b"pod",
            b"..",
            b":",
        ),
    ),
    Attack(
        "files of /proc",
        _proc,
        (_PROC_SEED, _PROC_SEED.replace(b"python", b") S 1 (x\n")),
        (b")", b"(", b"\n", b" Z ", b"-1", b"18446744073709551616", b"\nUid:\t", SPLIT, b"\0"),
        pure=False,
    ),
    Attack(
        "headers of scrapes",
        _headers,
        (b"application/openmetrics-text;version=1.0.0;q=0.6,text/plain;q=0.5", b"10", b"gzip;q=0"),
        (b";q=", b",", b"1e309", b"nan", b"*/*", b"inf", b"-1"),
    ),
    Attack("listen addresses", _addresses, (b"[::1]:9835", b"host:1"), (b":", b"[", b"]", b"%")),
    Attack(
        "web configurations",
        _web_files,
        (f"basic_auth_users: {{a: '{HASH}'}}\n".encode(), b"tls_server_config: {cert_file: a}\n"),
        _YAML_WORDS,
    ),
    Attack(
        "credentials",
        _credentials,
        (b"a:b", b"Basic YTpi"),
        (b":", b"a:", b"\0", b"Basic "),
        pure=False,
    ),
    Attack("release files", _releases, (b'{"version": 1, "until": 5}',), _JSON_WORDS),
    Attack("state files", _states, (_STATE,), _JSON_WORDS),
    Attack("texts of the driver", _texts, (b"NVIDIA A100\0", b"\xf8\xff"), (b"\0", b"\x7f")),
    Attack("answers of the driver", _answers, (bytes(range(64)), bytes(64)), pure=False),
)
