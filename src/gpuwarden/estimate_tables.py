"""Models and cards that estimates are known for, found by the names that people and NVML use.

`estimate_models.json` is written by `python -m bench.trainer.slopes`, `estimate_gpus.toml` by hand
from data sheets. Both are read when first asked for.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from gpuwarden import estimates
from gpuwarden.estimates import Constants, Gpu, ModelCosts, Unknown, Workload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.estimates import Expectation, Memory

_MODELS_FILE = "estimate_models.json"
_GPUS_FILE = "estimate_gpus.toml"
_NOISE = frozenset({"nvidia", "tesla", "geforce", "gpu", "rtx", "gtx", "graphics", "generation"})
_BRANDS = ("geforce ", "quadro ", "titan ", "rtx a", "a100-")
_TASK_SUFFIXES = {"segment": "-seg", "pose": "-pose", "obb": "-obb", "classify": "-cls"}


@dataclass(frozen=True, slots=True)
class Tables:
    """All that estimates rest on.

    Attributes:
        models: by their names.
        gpus: by their names.
        nvml: names by NVML, in lower case, to names of `gpus`.
        aliases: other names of cards, in lower case, likewise.
        constants: of the formula.
    """

    models: Mapping[str, ModelCosts]
    gpus: Mapping[str, Gpu]
    nvml: Mapping[str, str]
    aliases: Mapping[str, str]
    constants: Constants


@functools.cache
def tables() -> Tables:
    """The tables that are shipped."""
    folder = resources.files("gpuwarden")
    models = json.loads(folder.joinpath(_MODELS_FILE).read_text("utf-8"))
    content = tomllib.loads(folder.joinpath(_GPUS_FILE).read_text("utf-8"))
    gpus: dict[str, Gpu] = {}
    nvml: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for architecture, group in content["architectures"].items():
        for row in group["gpus"]:
            gpu = Gpu(
                name=row["name"],
                architecture=architecture,
                memory=row["memory"] * 1024.0**2,
                bandwidth=row["bandwidth"] * 1e9,
                cached=group["cached"],
                flops=row["half"] * 1e12,
                flops_fp32=row["single"] * 1e12,
                measured=row.get("measured", False),
                source=group["source"],
            )
            gpus[gpu.name] = gpu
            nvml.update({name.lower(): gpu.name for name in row["nvml"]})
            aliases.update({name.lower(): gpu.name for name in row.get("aliases", ())})
    return Tables(
        models={name: model_costs(name, row) for name, row in models["models"].items()},
        gpus=gpus,
        nvml=nvml,
        aliases=aliases,
        constants=_constants(content),
    )


def model_costs(name: str, row: Mapping[str, Any]) -> ModelCosts:
    """A row of the models' table, or of the trainer's cache.

    Raises:
        KeyError: a field is missing.
        TypeError: likewise for one that is no number.
        ValueError: likewise.
    """
    return ModelCosts(
        name=name,
        task=str(row["task"]),
        parameters=int(row["parameters"]),
        gigaflops=float(row["gigaflops"]),
        activation_bytes=float(row["activation_bytes"]),
        activation_bytes_fp32=float(row["activation_bytes_fp32"]),
        operations=int(row["operations"]),
        anchors=float(row["anchors"]),
        imgsz=int(row["imgsz"]),
        source="measured without a card (FakeTensorMode) by gpuwarden.trainer.slopes",
        body_parameters=row.get("body_parameters"),
    )


def _constants(content: Mapping[str, Any]) -> Constants:
    memory, speed = content["memory"], content["speed"]
    return Constants(
        base_bytes=memory["base_gib"] * estimates.GIB,
        context_bytes=memory["context_gib"] * estimates.GIB,
        activation_factor=memory["activation_factor"],
        loss_floats=memory["loss_floats"],
        memory_error=memory["error"],
        traffic=speed["traffic"],
        compute=speed["compute"],
        cache_gain=speed["cache_gain"],
        launch_seconds=speed["launch_microseconds"] * 1e-6,
        update_bytes=speed["update_bytes"],
        scaling=speed["scaling"],
        speed_error=speed["error"],
        speed_error_unmeasured=speed["error_unmeasured"],
        loader_seconds=content["data"]["loader_milliseconds"] * 1e-3,
    )


def find_model(name: str, task: str | None = None, *, suggest: bool = True) -> ModelCosts | Unknown:
    """A model by the name of its YAML or weights, with or without folder and suffix.

    Args:
        name: such as `yolov8m`, `yolo11n-seg.pt`, `yolov5su` or `/models/yolov8m.yaml`; also
            `yolov11n` and `yolo8m`, as many write them.
        task: of ultralytics; where it is given and the name says another one, there is no estimate.
        suggest: look for names that may have been meant; that takes longer than all else.
    """
    known = tables().models
    plain = re.sub(r"\.(pt|pth|ya?ml|onnx)$", "", re.split(r"[/\\]", name.strip())[-1].lower())
    wanted = plain
    match = re.fullmatch(r"yolo-?v?(5|8|9|10|11|12|26)-?([a-z])(u?)(-[a-z]+)?", plain)
    if match and (not match[3] or match[1] == "5"):
        letter = "v" if int(match[1]) < 11 else ""
        wanted = f"yolo{letter}{match[1]}{match[2]}{match[4] or ''}"
    suffix = _TASK_SUFFIXES.get(task or "", "")
    if suffix and wanted in known and known[wanted].task == "detect":
        wanted += suffix
    found = known.get(wanted)
    if found is None:
        close = difflib.get_close_matches(wanted, known, n=3, cutoff=0.7) if suggest else ()
        return Unknown("model", f"model {plain!r} is in no table", tuple(close))
    if task is not None and found.task != task:
        return Unknown("model", f"{wanted} is a model to {found.task}, not to {task}")
    return found


def find_gpu(name: str, *, exact: bool = False) -> Gpu | Unknown:
    """A card by NVML's name of it, or by what people call it.

    Args:
        name: such as `NVIDIA A100-SXM4-40GB`, `A100 40GB` or `rtx 4090`.
        exact: take NVML's names alone, as for what a node reports: a card that is only nearly
            the same is another one.
    """
    known = tables()
    plain = " ".join(name.split()).lower()
    # Drivers before 470 say `GeForce RTX 3090`, later ones `NVIDIA GeForce RTX 3090`.
    reported = f"nvidia {plain}" if plain.startswith(_BRANDS) else plain
    for spelt in (plain, reported):
        if spelt in known.nvml:
            return known.gpus[known.nvml[spelt]]
    if re.search(r"\bmig\b", plain):
        return Unknown("gpu", f"{name} is a part of a card (MIG), which no public figure covers")
    if exact:
        return Unknown("gpu", f"card {name!r} is in no table")
    if plain in known.aliases:
        return known.gpus[known.aliases[plain]]
    return _called(name, plain)


def _called(name: str, plain: str) -> Gpu | Unknown:
    """The card whose name has these words: all of its words, or no other card's."""
    known = tables()
    words = _words(plain)
    named = _named(known)
    same = {gpu for gpu, forms in named.items() if words in forms}
    within = {gpu for gpu, forms in named.items() if any(words < form for form in forms)}
    fitting = (same or within) if words else set()
    if len(fitting) == 1:
        return known.gpus[fitting.pop()]
    if fitting:
        return Unknown("gpu", f"there are several cards {name!r}", tuple(sorted(fitting)[:6]))
    spelt = {gpu.lower(): gpu for gpu in known.gpus}
    close = difflib.get_close_matches(plain, spelt, n=3, cutoff=0.6)
    return Unknown("gpu", f"card {name!r} is in no table", tuple(spelt[item] for item in close))


def _words(text: str) -> frozenset[str]:
    """What distinguishes a card's name: `NVIDIA A100-SXM4-40GB` and `a100 sxm4 40 gb` alike."""
    joined = re.sub(r"\b(\d+)\s*(?:gb|gib|g)\b", r"\1gb", text)
    joined = re.sub(r"\b(rtx|gtx)(?=\d)", "", joined)
    joined = re.sub(r"(\d)(ti|super)\b", r"\1 \2", joined)
    return frozenset(re.findall(r"[a-z0-9]+", joined)) - _NOISE


def _named(known: Tables) -> dict[str, list[frozenset[str]]]:
    named = {gpu: [_words(gpu.lower())] for gpu in known.gpus}
    for names in (known.nvml, known.aliases):
        for text, gpu in names.items():
            named[gpu].append(_words(text))
    return named


def expected(
    model: str,
    batch: int,
    *,
    imgsz: int,
    amp: bool,
    hardware: str,
    gpus: int = 1,
    task: str | None = None,
    classes: int | None = None,
    gpu_memory: float | None = None,
) -> Expectation | Unknown:
    """What a training should show, from what it declares and the card that NVML names.

    Args:
        model: name without folder and suffix.
        batch: images per step over all cards.
        imgsz: pixels of the images' sides.
        amp: mixed precision.
        hardware: NVML's name of the cards.
        gpus: how many of them.
        task: of ultralytics, where it is known.
        classes: of the data set, where they are known.
        gpu_memory: bytes of each card as NVML says, where they are known: some cards are sold with
            different memories under one name.
    """
    gpu = find_gpu(hardware, exact=True)
    if gpu_memory is not None and isinstance(gpu, Gpu):
        gpu = dataclasses.replace(gpu, memory=gpu_memory)
    workload = _declared(batch, imgsz, amp=amp, gpus=gpus, classes=classes)
    if isinstance(workload, Unknown):
        return workload
    return estimates.expectation(
        find_model(model, task, suggest=False),
        gpu,
        workload=workload,
        constants=tables().constants,
    )


def needed(
    model: str,
    batch: int,
    *,
    imgsz: int,
    amp: bool,
    gpus: int = 1,
    task: str | None = None,
    classes: int | None = None,
) -> Memory | Unknown:
    """What a training will reserve on each card, whatever cards these are.

    For what has no `expected`, since it cannot fit: a training that is about to run out of memory.

    Args:
        model: name without folder and suffix.
        batch: images per step over all cards.
        imgsz: pixels of the images' sides.
        amp: mixed precision.
        gpus: how many cards share the batch.
        task: of ultralytics, where it is known.
        classes: of the data set, where they are known.
    """
    found = find_model(model, task, suggest=False)
    workload = _declared(batch, imgsz, amp=amp, gpus=gpus, classes=classes)
    if isinstance(found, Unknown):
        return found
    if isinstance(workload, Unknown):
        return workload
    return estimates.memory(found, workload, tables().constants)


def _declared(
    batch: int, imgsz: int, *, amp: bool, gpus: int, classes: int | None
) -> Workload | Unknown:
    try:
        return Workload(
            batch=batch,
            imgsz=imgsz,
            amp=amp,
            gpus=gpus,
            classes=80 if classes is None else classes,
        )
    except ValueError as error:
        return Unknown("workload", str(error))
