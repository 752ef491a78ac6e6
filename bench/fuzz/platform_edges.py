"""What Slurm, the kubelet and Kubernetes answer: at nodes, and at the engine."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bench.fuzz.edges import JSON_WORDS, Attack, require
from gpuwarden.errors import ServiceUnavailable
from gpuwarden.exporter import grpc_calls
from gpuwarden.platforms import (
    hostlists,
    kubelet,
    kubernetes,
    kubernetes_scheduling,
    slurm,
    slurm_accounting,
    slurm_attempts,
    slurm_limits,
    slurm_listings,
    slurm_nodes,
    slurm_queue,
    slurm_reasons,
    slurm_reservations,
    slurm_texts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import ExitStack

MARK = "|0123456789abcdef"
_ANSWERS = Path(__file__).parents[2] / "tests"
_JOB = slurm.SlurmJob(1, name="a b=c")


def _recorded(name: str) -> bytes:
    return (_ANSWERS / "kernel/platforms/answers" / name).read_bytes()


# ---------------------------------------------------------------------------------------------
# Slurm


def _json(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        with suppress(ServiceUnavailable):
            answer = slurm.decode_json(data)
            for job in answer.jobs:
                name = slurm.attempt_id(job, "c1")
                slurm.parse_attempt_id(name)

    return attack


def _rows(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        text = data.decode(errors="replace")
        for decode in (
            slurm_texts.decode_list,
            slurm_queue.decode_queue,
            slurm_attempts.decode_records,
            slurm_listings.decode_listing,
            slurm_accounting.decode_accounting,
        ):
            with suppress(ServiceUnavailable):
                decode(text, MARK)

    return attack


def _texts(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        text = data.decode(errors="replace")
        slurm_texts.decode_details(text, _JOB)
        for decode in (
            slurm_texts.decode_config,
            slurm_texts.decode_version,
            slurm_texts.decode_gres,
            slurm_nodes.decode_nodes,
            slurm_nodes.decode_tiers,
            slurm_limits.decode_limits,
            slurm_reservations.decode_reservations,
        ):
            with suppress(ServiceUnavailable):
                decode(text)
        slurm_texts.node_names(text, {"gpu01"})
        slurm_texts.step_job(text)
        slurm_attempts.asked_signal(text)
        slurm_reasons.explain(text).words.format(account="a", qos="q", partition="p", user="u")
        slurm_listings.clock_seconds(text)
        slurm_attempts.accounted_state(text, 1796011113)
        slurm.decode_tres(text)
        slurm.gpu_indexes(text)
        slurm.parse_attempt_id(text)

    return attack


def _hostlists(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        text = data.decode(errors="replace")
        with suppress(ValueError):
            found = hostlists.expand(text)
            require(holds=len(found) <= hostlists.MAX_HOSTS, what="more hosts than there may be")
        with suppress(ValueError):
            hostlists.numbers(text)

    return attack


# ---------------------------------------------------------------------------------------------
# The kubelet, and Kubernetes' API server


def _devices(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        with suppress(ServiceUnavailable):
            kubelet.decode_list(data)
        kubelet.decode_log_folder(data.decode(errors="replace"))

    return attack


class _Server:
    """Answers each connection to a unix socket with the same bytes."""

    def __init__(self, path: Path) -> None:
        self.answer = b""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.recv(4096)
                connection.sendall(self.answer)

    def close(self) -> None:
        """Answer nobody any more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def _grpc(folder: Path, stack: ExitStack) -> Callable[[bytes], None]:
    path = folder / "kubelet.sock"
    server = _Server(path)
    stack.callback(server.close)

    def attack(data: bytes) -> None:
        server.answer = data
        with suppress(ServiceUnavailable):
            grpc_calls.call(path, "/v1.PodResourcesLister/List", seconds=2.0)

    return attack


def _objects(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            return
        if not isinstance(found, dict):
            return
        for read in (
            kubernetes.read_pod,
            kubernetes.reference_of,
            kubernetes.controller_of,
            kubernetes_scheduling.read_offer,
            kubernetes_scheduling.read_claimant,
        ):
            with suppress(kubernetes.UnexpectedObject):
                read(found)

    return attack


def _row(fields: Sequence[str]) -> bytes:
    values = {
        "JobID": "12",
        "JobIDRaw": "12",
        "ArrayJobID": "12",
        "UserID": "1000",
        "State": "RUNNING",
        "SubmitTime": "1795985617",
        "Submit": "1795985617",
        "tres-alloc": "cpu=4,gres/gpu=2",
        "NodeList": "gpu[01-02]",
    }
    return ("".join(f"{values.get(name, 'N/A')}{MARK}" for name in fields) + "\n").encode()


_JOBS = json.dumps(
    {
        "jobs": [
            {
                "job_id": 12,
                "cluster": "c1",
                "submit_time": {"set": True, "number": 5},
                "restart_cnt": 0,
                "job_state": ["RUNNING"],
                "user_id": 1000,
                "nodes": "gpu[01-02]",
                "tres_alloc_str": "cpu=4,gres/gpu=2",
                "gres_detail": ["gpu:2(IDX:0-1)"],
                "array_job_id": {"set": True, "number": 12},
                "array_task_id": 3,
            }
        ],
        "errors": [],
    }
).encode()
_LINE = (
    b"NodeName=node1 CPUAlloc=1 CPUEfctv=8 CPUTot=8 Gres=gpu:a100:4(S:0-1) GresDrain=N/A "
    b"GresUsed=gpu:a100:3(IDX:0-2) NodeAddr=127.0.0.1 NodeHostName=vm RealMemory=1000 AllocMem=200 "
    b"State=MIXED Partitions=main,side CfgTRES=cpu=8 AllocTRES=cpu=1 CapWatts=n/a\n"
)
_CONFIG = b"ClusterName             = c1\nGresTypes = gpu\nSLURM_VERSION = 24.11.5\n"
_GRES = b"NodeName=gpu[01-02] Name=gpu Type=a100 File=/dev/nvidia[0-3] Count=4\n"
_VERSION = b"slurm 24.11.5\n"
_ACCT = b"1796011000|FAILED\n1796011113|CANCELLED by 1000\n"
_SCRIPT = b"#!/bin/sh\n#SBATCH --requeue --signal=B:USR1@120\n#SBATCH --gres gpu:2\nexec true\n"
_POD = json.dumps(
    {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "a-1",
            "namespace": "lab",
            "uid": "0b9e4f0c-1111-2222-3333-444455556666",
            "creationTimestamp": "2026-11-01T10:00:00Z",
            "labels": {"team": "x"},
            "annotations": {"gpuwarden.io/run": "run-1"},
            "ownerReferences": [
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "name": "a",
                    "uid": "1",
                    "controller": True,
                }
            ],
        },
        "spec": {
            "nodeName": "node1",
            "priority": 5,
            "nodeSelector": {"gpu": "a100"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "containers": [
                {
                    "name": "c",
                    "resources": {
                        "requests": {"cpu": "500m", "memory": "1Gi"},
                        "limits": {"nvidia.com/gpu": "1"},
                    },
                }
            ],
            "terminationGracePeriodSeconds": 30,
        },
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }
).encode()
_NODE = json.dumps(
    {
        "metadata": {"name": "node1", "labels": {"gpu": "a100"}},
        "spec": {"taints": [{"key": "gpu", "effect": "NoSchedule"}], "unschedulable": False},
        "status": {
            "allocatable": {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "4", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
).encode()
# Pods with their devices, as kubelets encode them: protocol buffers.
_DEVICES = (
    b"\x0a\x2e\x0a\x03job\x12\x03lab\x1a\x22\x0a\x02c0"
    b"\x12\x1c\x0a\x0envidia.com/gpu\x12\x0aGPU-abcdef"
)
_FRAMES = (
    b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x05\x00\x00\x40\x00"  # SETTINGS
    b"\x00\x00\x00\x04\x01\x00\x00\x00\x00"  # its acknowledgement
    b"\x00\x00\x01\x01\x04\x00\x00\x00\x01\x88"  # HEADERS: 200
    b"\x00\x00\x05\x00\x01\x00\x00\x00\x01\x00\x00\x00\x00\x00"  # DATA: an empty message
)

ATTACKS = (
    Attack(
        "Slurm's JSON",
        _json,
        (
            _recorded("scontrol-24.11-array.json")[:6000],
            _recorded("scontrol-24.11-het.json")[:6000],
            _JOBS,
        ),
        (*JSON_WORDS, b'"number":', b'"set": true', b"IDX:0-99999999", b"gpu[0-99999999]"),
        of="platforms",
    ),
    Attack(
        "Slurm's rows",
        _rows,
        tuple(
            _row(fields)
            for fields in (
                slurm_texts.LIST_FIELDS,
                slurm_queue.QUEUE_FIELDS,
                slurm_attempts.RECORD_FIELDS,
                slurm_listings.LISTING_FIELDS,
                slurm_accounting.ACCOUNTING_FIELDS,
            )
        ),
        (MARK.encode(), b"\n", b"(null)", b"N/A", b"[0-99999999]", b"gres/gpu:a100=", b"PENDING"),
        of="platforms",
    ),
    Attack(
        "Slurm's texts",
        _texts,
        (
            *(_recorded("scontrol-24.11-job.txt"), _LINE, _CONFIG, _GRES, _SCRIPT, _VERSION, _ACCT),
            _recorded("slurm-24.11-assoc-mgr.txt")[:4000],
            _recorded("slurm-24.11-reservations.txt"),
        ),
        (b"\n", b"=", b"IDX:", b"[", b"]", b"0-18446744073709551616", b"#SBATCH ", b"  ", b"\x1f"),
        of="platforms",
    ),
    Attack(
        "host lists",
        _hostlists,
        (b"gpu[01-04,7],login", b"a[1-2]b[3-4]", b"0-3,7"),
        (b"[", b"]", b"-", b",", b"0", b"99999999999", b"00000000001", b"[1-9999]", b"\xd9\xa3"),
        of="platforms",
    ),
    Attack(
        "the kubelet's pods",
        _devices,
        (_DEVICES, b"lab_job-1_0b9e4f0c-1111-2222-3333-444455556666"),
        (b"\x0a", b"\x12", b"\x1a", b"\xff" * 10, b"\x0a\xff\xff\xff\x7f", b"_"),
        of="platforms",
    ),
    Attack(
        "the kubelet's frames",
        _grpc,
        (_FRAMES, _FRAMES[:15]),
        (b"\x00\x00\x00\x04\x00", b"\x07\x00", b"\x03\x00", b"\xff\xff\xff", b"\x88", b"\x00" * 9),
        pure=False,
        of="platforms",
    ),
    Attack(
        "Kubernetes' objects",
        _objects,
        (_POD, _NODE),
        (
            *JSON_WORDS,
            b'"metadata":',
            b'"1e999"',
            b'"500m"',
            b'"9223372036854775808Ei"',
            b'"limits":',
        ),
        of="platforms",
    ),
)
