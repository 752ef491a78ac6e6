"""What the commands that look read: engines and exporters for `top`, pages for `doctor`, money."""

from __future__ import annotations

import csv
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.fuzz.edges import JSON_WORDS, SPLIT, YAML_WORDS, Attack, require
from gpuwarden.errors import InvalidInput, ServiceUnavailable
from gpuwarden.exporter import doctor_services
from gpuwarden.periods import period_of
from gpuwarden.ruleengine import top_exporters
from gpuwarden.ruleengine.budgets import check_budgets
from gpuwarden.ruleengine.doctor_prometheus_checks import written
from gpuwarden.ruleengine.prices import Prices
from gpuwarden.ruleengine.reports.tables import safe
from gpuwarden.ruleengine.reports.waits import decode_accounting
from gpuwarden.ruleengine.top_answers import checked_fleet
from gpuwarden.ruleengine.top_frames import explained, frame, page
from gpuwarden.ruleengine.top_layouts import span_texts
from gpuwarden.ruleengine.top_pictures import Picture
from gpuwarden.ruleengine.top_views import View, press, settled
from gpuwarden.yaml_files import load_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

_ROOT = Path(__file__).parents[2]
_SIZE = (100, 24)
_NOW = 1_800_000_000.0


def _looked_at(picture: Picture, details: dict[str, Any] | None = None) -> None:
    """Every form in which a picture is shown."""
    view = settled(View(), picture)
    for key in ("down", "end", "pagedown", "s", "r", "b", "enter"):
        view = settled(press(view, key, picture), picture)
        lines = frame(view, picture, size=_SIZE, now=picture.taken + 3, details=details)
        require(holds=len(lines) == _SIZE[1], what="a screen of another height")
    for text in span_texts(page(picture, width=100, now=picture.taken, ascii_only=True)):
        require(holds=text.isascii() and text.isprintable(), what=f"{text!r} on a terminal")
    json.dumps(picture.whole(picture.taken), allow_nan=False)


def _engines(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    checked_fleet(_FLEET, "the seed")

    def attack(data: bytes) -> None:
        with suppress(ValueError, RecursionError):
            document = json.loads(data)
            if not isinstance(document, dict):
                return
            explained(document, 80)
            try:
                fleet = checked_fleet(document, "http://e")
            except ServiceUnavailable:
                return
            try:
                _looked_at(Picture("engine", ("http://e",), fleet, 1.0), document)
            except (ValueError, RecursionError) as error:
                raise RuntimeError(f"{type(error).__name__}: {error}") from error

    return attack


def _exporters(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        text = data.decode(errors="replace")
        page_of_doctor = doctor_services.read_page(text)
        require(holds=isinstance(page_of_doctor, dict), what="no page")
        try:
            series = top_exporters.read_page(text, "http://n")
        except ServiceUnavailable:
            return
        pages = top_exporters.Pages()
        for now in (1.0, 6.0):
            rows = pages.rows({"n": series}, now)
            cards, held = pages.cards({"n": series})
            fleet = {"schema": "gpuwarden.fleet/v1", "age": 0.0, "tick": 5.0, "problem": ""}
            fleet |= {"nodes": {"expected": 1, "lit": 1}, "halted": [], "total": len(rows)}
            fleet |= {"cards": cards, "held": held, "broken": 0, "offset": 0, "jobs": rows}
            _looked_at(Picture("exporters", ("http://n",), fleet, now))

    return attack


def _budgets(folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    path = folder / "budgets.yaml"

    def attack(data: bytes) -> None:
        path.write_bytes(data)
        checked = check_budgets(path, None, currencies=frozenset({"EUR"}))
        checked.render().encode()
        if checked.content is not None:
            for each in checked.content.budgets:
                span = period_of(each.per, checked.content.zone, _NOW)
                require(holds=span.begin <= _NOW < span.end, what="a period without its moment")
                str(each.limit).encode()

    return attack


def _tariffs(folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    path = folder / "prices.yaml"

    def attack(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(InvalidInput):
            prices = load_file(Prices, path)
            for at in (0.0, _NOW, _NOW + 86_400 * 180):
                rate = prices.rate("NVIDIA A100-SXM4-40GB", at)
                require(holds=rate is None or rate.price.amount >= 0, what="a price below nothing")
            if prices.billing is not None:
                billed = prices.billing.billed(310.0)
                require(holds=billed >= 310.0, what="less is charged than was used")

    return attack


def _accounting(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        with suppress(ServiceUnavailable):
            for wait in decode_accounting(data.decode(errors="replace")):
                require(holds=wait.seconds >= 0, what="a wait below nothing")

    return attack


def _cells(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        text = data.decode(errors="replace")
        told = io.StringIO()
        csv.writer(told, lineterminator="\r\n").writerow([safe(text), "end"])
        told.seek(0)
        (row,) = csv.reader(told)
        bare = row[0].lstrip(" \u00a0\ufeff\u200b")
        require(holds=row[1] == "end", what="a cell that breaks its row")
        require(holds=not bare.startswith(("=", "+", "-", "@")), what="a formula")
        written(text)

    return attack


_VERDICT = {
    "state": "notified",
    "rule": "idle-held",
    "mode": "enforce",
    "level": "moderate",
    "next": {
        "kind": "terminate",
        "what": "Its processes are ended",
        "if": "it stays idle",
        "stage": "severe",
        "level": "severe",
        "at": "2026-11-30T10:00:00Z",
        "in_seconds": 60.0,
    },
    "end": None,
    "kept_until": "2026-11-30T10:00:00Z",
    "protected": "",
    "unknown": [],
    "held": [{"reason": "kept", "sentence": "Its owner keeps it."}],
    "others": 1,
}
_BAND = {"low": 0.5, "high": 0.9}
_JOB = {
    "job_id": "proc-1",
    "user": "ana",
    "team": "vision",
    "node": "n1:9835",
    "nodes": 1,
    "framework": "torch",
    "interactive": False,
    "gpus": ["0"],
    "hardware": "NVIDIA A100",
    "fresh": True,
    "not_fresh_reason": "",
    "started_at": "2026-11-30T08:00:00Z",
    "run_id": "r-1",
    "model": "yolov8m",
    "batch": 64,
    "imgsz": 640,
    "phase": "train",
    "epoch": 3.0,
    "epochs": 100.0,
    "time_left": 7200.0,
    "utilization": 0.02,
    "utilization_expected": _BAND,
    "memory_bytes": 3e10,
    "memory_total_bytes": 4e10,
    "memory_expected": _BAND,
    "throughput": 80.0,
    "throughput_expected": None,
    "expected_text": "by yolov8m",
    "verdict": _VERDICT,
}
_FLEET = {
    "schema": "gpuwarden.fleet/v1",
    "time": "2026-11-30T09:00:00Z",
    "age": 3.0,
    "tick": 15.0,
    "figures_at": None,
    "problem": "",
    "nodes": {"expected": 2, "lit": 2},
    "cards": 16,
    "held": 1,
    "halted": [],
    "sort": "verdict",
    "total": 1,
    "broken": 1,
    "offset": 0,
    "jobs": [_JOB],
}
_PAGE = b"""# TYPE gpuwarden_nvml_up gauge
gpuwarden_nvml_up 1
gpuwarden_snapshot_timestamp_seconds 1.8e+09
gpu_info{gpu="0",uuid="GPU-1",name="NVIDIA A100-SXM4-40GB"} 1
gpu_memory_total_bytes{gpu="0",uuid="GPU-1"} 4.2949672960e+10
gpu_job_info{job_id="proc-1",user="ana",framework="torch",interactive="false"} 1
gpu_job_holds_gpu{job_id="proc-1",gpu="0",uuid="GPU-1"} 1
gpu_job_utilization_ratio{job_id="proc-1",gpu="0",uuid="GPU-1"} 0.5
gpu_job_memory_bytes{job_id="proc-1",gpu="0",uuid="GPU-1"} 3e+10
gpu_job_start_time_seconds{job_id="proc-1"} 1.7e+09
yolo_info{job_id="proc-1",run_id="r-1",model="yolov8m",batch="64",imgsz="640",amp="true"} 1
yolo_phase{job_id="proc-1",run_id="r-1",phase="train"} 1
yolo_epoch{job_id="proc-1",run_id="r-1"} 3
yolo_epochs_planned{job_id="proc-1",run_id="r-1"} 100
yolo_images_total{job_id="proc-1",run_id="r-1"} 4000
yolo_phase_seconds_total{job_id="proc-1",run_id="r-1",phase="train"} 60
"""
_TARIFFS = b"""currency: EUR
default: 2.5
per_gpu_hour: {NVIDIA A100-SXM4-40GB: 1.9}
tariffs:
- name: night
  during: [{days: [mon, tue], from: "20:00", to: "06:00", zone: Europe/Berlin}]
  default: 1
- name: next-year
  from: 2027-01-01T00:00:00+01:00
  until: 2028-01-01T00:00:00+01:00
  default: 3
  currency: USD
billing: {unit: 1m, minimum: 5m}
"""
ATTACKS = (
    Attack(
        "engines for top",
        _engines,
        (json.dumps(_FLEET).encode(),),
        (*JSON_WORDS, b'"jobs":', b'"verdict":', b"\\u001b[2J", b"\\u0000", b'"0001-01-01T00:00Z"'),
        of="engine",
    ),
    Attack(
        "exporters for top",
        _exporters,
        (_PAGE,),
        (b"NaN", b"+Inf", b"1e400", b'uuid="', b'job_id="', b"\\n", b"# EOF", b"{", b"}", b"\xff"),
        of="engine",
    ),
    Attack(
        "budgets",
        _budgets,
        ((_ROOT / "deploy/examples/budgets.yaml").read_bytes(),),
        (*YAML_WORDS, b"GPU-hours", b"per: ", b"zone: ", b"warn_at: ", b"limit: 1e9 EUR"),
        of="files",
    ),
    Attack(
        "tariffs",
        _tariffs,
        (_TARIFFS,),
        (*YAML_WORDS, b"from: ", b"0001-01-01T00:00:00+14:00", b"during: ", b"unit: 1e-9s"),
        of="files",
    ),
    Attack(
        "accounting of Slurm",
        _accounting,
        (b"77|ana|1799990000|1799990100|1799990400|cpu=8,gres/gpu:a100=2,node=1\n",),
        (SPLIT, b"|", b"Unknown", b"None", b"\xd9\xa3", b"gres/gpu=1", b"9" * 400),
        of="platforms",
    ),
    Attack(
        "cells and expressions",
        _cells,
        (b"=cmd|' /C calc'!A0", b"ana", b"max by (job_id) (gpu_job_threads)"),
        (b"\r\n", b'"', b",", b"=", b"\xef\xbb\xbf", b"\0", b"@", b"\t"),
        of="files",
    ),
)
