"""Random stretches of history, with every gap and contradiction that a fleet can show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.inventories import Expectation, inventory_queries
from gpuwarden.ruleengine.needs import needed_keys
from gpuwarden.ruleengine.replay_columns import Columns, Ticks
from gpuwarden.ruleengine.replay_frames import Frame

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from gpuwarden.ruleengine.model import RuleSet
    from gpuwarden.ruleengine.verdicts import SignalKey

BEGIN = 1_772_438_400.0
GIB = 2.0**30
NODES = ("n1:9835", "n2:9835")
CARDS = {"GPU-1": "n1:9835", "GPU-2": "n1:9835", "GPU-3": "n2:9835", "GPU-4": "n2:9835"}
JOBS = ("proc-1", "proc-2", "slurm-3", "proc-4", "proc-5")
_MODELS = ("yolov8m", "yolov8m", "yolov8s", "unheard-of")
_NEAR = (
    9.0,
    10.0,
    68.0,
    0.0,
    0.02,
    0.05,
    0.05000001,
    0.1,
    0.2,
    0.3,
    0.8,
    0.9,
    0.95,
    1.0,
    3.0,
    30.0,
    80.0,
    300.0,
)


class RandomFrame:
    """One random stretch.

    Args:
        seed: of everything.
        rules: whose queries are answered.
        ticks: how many.
        step: seconds between two.
    """

    def __init__(self, seed: int, rules: RuleSet, *, ticks: int = 24, step: float = 60.0) -> None:
        self._random = np.random.default_rng(seed)
        self._devices = np.random.default_rng([seed, 1])
        # A stretch in which something vanishes all the time shows nothing else.
        self._unrest = float(self._random.choice([0.0, 0.002, 0.01, 0.05]))
        self._rules = rules
        self._ticks = Ticks(BEGIN, step, ticks)
        self._rows: dict[str, list[tuple[dict[str, str], NDArray[np.float64]]]] = {
            name: [] for name in inventory_queries(5.0, Expectation())
        }

    def frame(self) -> Frame:
        """It, as it would have been fetched."""
        for node in NODES:
            self._node(node)
        for number, (card, node) in enumerate(CARDS.items()):
            self._card(card, node, number)
        for job in JOBS:
            self._job(job)
        self._add("expected", {}, 2.0, often=0.97)
        return Frame(
            ticks=self._ticks,
            rows={name: self._columns(rows) for name, rows in self._rows.items()},
            answers={key: self._answer(key) for key in sorted(needed_keys(self._rules))},
            scrape_interval=5.0,
            expected=Expectation(),
            teams={"ana": "vision"},
        )

    def _columns(self, rows: list[tuple[dict[str, str], NDArray[np.float64]]]) -> Columns:
        values = np.array([own for _, own in rows]).reshape(len(rows), self._ticks.count)
        return Columns([labels for labels, _ in rows], values)

    def _chance(self, often: float) -> bool:
        return bool(self._random.random() < often)

    def _there(self, often: float) -> NDArray[np.bool_]:
        """Mostly the same for a while."""
        flips = self._random.random(self._ticks.count) < self._unrest
        state = np.cumsum(flips) % 2 == 0
        return state if self._chance(often) else ~state

    def _add(
        self,
        name: str,
        labels: Mapping[str, str],
        value: float | NDArray[np.float64],
        *,
        often: float = 0.9,
    ) -> None:
        values = np.where(self._there(often), value, np.nan)
        if self._chance(0.01):
            values = np.where(self._random.random(len(values)) < 0.2, np.inf, values)
        self._rows[name].append((dict(labels), values))

    def _node(self, node: str) -> None:
        times = self._ticks.times
        late = np.where(self._random.random(len(times)) < 2 * self._unrest, 30.0, 2.0)
        skew = 60.0 if self._chance(0.1) else 1.0
        here = {"instance": node}
        there = self._there(0.95)
        for name, value in (
            ("scraped", times - late),
            ("gpuwarden_snapshot_timestamp_seconds", times - late - skew),
        ):
            self._rows[name].append((here, np.where(there, value, np.nan)))

    def _card(self, card: str, node: str, number: int) -> None:
        where = {"instance": node, "uuid": card, "gpu": str(number)}
        hardware = self._random.choice(["NVIDIA A100-SXM4-40GB"] * 3 + ["NVIDIA GeForce RTX 4090"])
        self._add("gpu_info", where | {"name": str(hardware)}, 1.0, often=0.95)
        self._add("gpu_memory_total_bytes", where, 40 * GIB, often=0.95)
        self._add("gpu_throttle_active", where | {"reason": "sw_thermal"}, 1.0, often=0.5)
        if self._chance(0.2):
            part = where | {"mig_uuid": f"MIG-{card}", "profile": "1g.5gb"}
            self._add("gpu_mig_info", part, 1.0)
            self._add("gpu_mig_memory_total_bytes", part, 5 * GIB)

    def _job(self, job: str) -> None:
        times = self._ticks.times
        for card in self._random.choice(list(CARDS), size=self._random.choice([1, 1, 2])):
            base = {"instance": CARDS[str(card)], "job_id": job}
            about = {"user": str(self._random.choice(["ana", "ben", "root", ""]))}
            about |= {
                "source": "process",
                "framework": str(self._random.choice(["torch", "torch", "jax"])),
            }
            about["interactive"] = str(self._random.choice(["true", "false"]))
            self._add("gpu_job_info", base | about, 1.0)
            paths = {"executable": "/usr/bin/python3", "cgroup": "/user.slice"}
            self._add("gpu_job_executable", base | paths, 1.0)
            self._add("gpu_job_holds_gpu", base | {"uuid": str(card)}, 1.0)
            begin = BEGIN - float(self._random.choice([7200.0, self._random.uniform(-1200, 1200)]))
            self._add("gpu_job_start_time_seconds", base, begin)
            self._add("gpu_job_first_gpu_use_timestamp_seconds", base, begin + 60, often=0.7)
            self._add("gpu_process_start_time_seconds", base | {"pid": "9"}, begin)
            for channel in ("log", "heartbeat", "cpu"):
                age = float(self._random.choice([2.0, self._random.uniform(-1200, 1200)]))
                last = times - age if self._chance(0.5) else np.full(len(times), BEGIN - age)
                name = "gpu_job_activity_timestamp_seconds"
                self._add(name, base | {"signal": channel}, last, often=0.8)
            if self._chance(0.8):
                run = "r1" if self._chance(0.15) else f"run-{job}"
                self._run(base | {"run_id": run})

    def _run(self, names: dict[str, str]) -> None:
        model = str(self._random.choice(_MODELS))
        about = {"model": model, "batch": "64", "imgsz": "640", "amp": "true", "project": "p"}
        self._add("yolo_info", names | about, 1.0)
        phase = str(self._random.choice(["train", "validate", "scan", "checkpoint"]))
        self._add("yolo_phase", names | {"phase": phase}, 1.0)
        since = BEGIN - float(self._random.uniform(-1200, 1500))
        self._add("yolo_phase_start_timestamp_seconds", names, since)
        self._add("yolo_checkpoint_timestamp_seconds", names, BEGIN - 100)
        self._add("yolo_resume_mode", names | {"mode": "exact"}, 1.0, often=0.3)
        partly = self._devices.random(self._ticks.count) < self._devices.choice(
            [0.0, 0.0, 0.1, 1.0]
        )
        self._rows["yolo_devices"].append((names, np.where(partly, 1.0, np.nan)))

    # -- answers

    def _answer(self, key: SignalKey) -> Columns:
        rows = []
        for labels in self._labels(key):
            if self._chance(0.85):
                steady = self._random.choice(_NEAR)
                loose = self._random.choice(_NEAR, size=self._ticks.count)
                changes = self._random.choice([0.0, 0.05, 0.3])
                values = np.where(self._random.random(self._ticks.count) < changes, loose, steady)
                values = values * (GIB if key.signal == "gpu_memory" else 1.0)
                rows.append((labels, np.where(self._there(0.9), values, np.nan)))
        found = self._columns(rows)
        if key.promql and self._chance(0.3):
            return Columns(found.labels, found.values, ((3, 7, "refused"),))
        return found

    def _labels(self, key: SignalKey) -> list[dict[str, str]]:
        spec = signals.SIGNALS.get(key.signal)
        if key.signal == "waiting":
            return [{}]
        if spec is not None and spec.device:
            return [{"instance": node, "uuid": card} for card, node in CARDS.items()]
        if spec is not None and spec.per_gpu:
            return [
                {"instance": node, "uuid": card, "job_id": job}
                for card, node in CARDS.items()
                for job in JOBS
            ]
        if spec is not None and not spec.training:
            return [{"instance": node, "job_id": job} for node in NODES for job in JOBS]
        return [{"job_id": job} for job in JOBS]
