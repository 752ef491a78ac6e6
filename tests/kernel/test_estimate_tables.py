"""Models and cards are found by the names that people and NVML use, and no others are."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.estimate_tables import find_gpu, find_model, tables
from gpuwarden.estimates import GIB, Gpu, ModelCosts, Unknown


def name_of(found: ModelCosts | Gpu | Unknown) -> str | None:
    """Of what was found, if it was."""
    return None if isinstance(found, Unknown) else found.name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("yolov8m", "yolov8m"),
        ("yolov8m.pt", "yolov8m"),
        ("YOLOv8m.yaml", "yolov8m"),
        ("/models/yolov8m-seg.pt", "yolov8m-seg"),
        (r"C:\models\yolo11n.pt", "yolo11n"),
        ("yolov11n", "yolo11n"),
        ("yolov12x.pt", "yolo12x"),
        ("yolov26s-pose", "yolo26s-pose"),
        ("yolo8m", "yolov8m"),
        ("yolo-v8-m", "yolov8m"),
        ("yolov5su.pt", "yolov5s"),
        ("yolov5s", "yolov5s"),
        ("yolov9c", "yolov9c"),
        ("yolov10b.pt", "yolov10b"),
        ("best.pt", None),
        ("yolov8", None),
        ("yolov8u", None),
        ("yolov8mu", None),
        ("yolov8m-custom.yaml", None),
        ("yolov13n", None),
        ("yolov8m.pt.bak", None),
        ("resnet50", None),
    ],
)
def test_models_are_found_by_what_they_are_called(written: str, name: str | None) -> None:
    """Folder, suffix and case do not matter; a name that only begins alike is another model."""
    assert name_of(find_model(written)) == name


def test_a_task_chooses_the_head() -> None:
    """A detection model's name with another task is that task's model; a wrong one is refused."""
    assert name_of(find_model("yolov8m", "segment")) == "yolov8m-seg"
    assert name_of(find_model("yolov8m-seg", "segment")) == "yolov8m-seg"
    assert name_of(find_model("yolov8m", "detect")) == "yolov8m"
    refused = find_model("yolov8m-seg", "detect")
    assert isinstance(refused, Unknown)
    assert "to segment, not to detect" in refused.reason


def test_a_misspelt_model_is_told_what_may_have_been_meant() -> None:
    """The closest names first."""
    found = find_model("yolv8m")
    assert isinstance(found, Unknown)
    assert "yolov8m" in found.suggestions
    assert "did you mean" in str(found)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("nvidia a100-sxm4-40gb", "A100 40GB"),
        ("A100 40GB", "A100 40GB"),
        ("a100-40g", "A100 40GB"),
        ("A100 80GB", "A100 SXM4 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB"),
        ("V100 SXM2 32 GB", "V100 SXM2 32GB"),
        ("Tesla T4", "T4"),
        ("t4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("2080ti", "RTX 2080 Ti"),
        ("rtx 4070TiSuper", None),
        ("4070 ti super", "RTX 4070 Ti SUPER"),
        ("RTX4080Super", "RTX 4080 SUPER"),
        ("RTX 3080", "RTX 3080 10GB"),
        ("RTX 3080 Ti", "RTX 3080 Ti"),
        ("3060", "RTX 3060 12GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM 80GB"),
        ("H20", "H20"),
        ("L40S", "L40S"),
        ("RTX 6000 Ada", "RTX 6000 Ada"),
        ("A10", "A10"),
        ("RTX 4060 Laptop GPU", "RTX 4060 Laptop"),
        ("A100", None),
        ("V100", None),
        ("H100", None),
        ("RTX 6000", None),
        ("NVIDIA", None),
        ("RTX", None),
        ("", None),
        ("NVIDIA A100X", None),
        ("NVIDIA GeForce RTX 3070 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ],
)
def test_cards_are_found_by_what_they_are_called(written: str, name: str | None) -> None:
    """A name that fits several cards fits none."""
    assert name_of(find_gpu(written)) == name


def test_a_card_that_could_be_several_is_asked_about() -> None:
    """All that it could be."""
    found = find_gpu("V100")
    assert isinstance(found, Unknown)
    assert {"V100 SXM2 16GB", "V100 SXM2 32GB"} <= set(found.suggestions)


def test_what_a_node_reports_must_be_said_exactly() -> None:
    """`T4` is what people say; NVML says `Tesla T4`, and something else of another card."""
    assert name_of(find_gpu("Tesla T4", exact=True)) == "T4"
    assert isinstance(find_gpu("T4", exact=True), Unknown)


def test_every_name_of_a_card_finds_it() -> None:
    """NVML's names, aliases and our own; no name is given to two cards."""
    known = tables()
    for gpu in known.gpus.values():
        assert find_gpu(gpu.name) == gpu
        assert gpu.name in known.nvml.values()
        assert gpu.source
    for names in (known.nvml, known.aliases):
        for text, name in names.items():
            assert find_gpu(text) == known.gpus[name]


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("RTX A6000", "RTX A6000"),
        ("A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("Tesla T4", "T4"),
        ("TITAN V", "TITAN V"),
        # Another card, or a part of one.
        ("RTX 3090", None),
        ("T4", None),
        ("A100", None),
        ("A100 80GB PCIe MIG 1g.10gb", None),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA GeForce RTX 3090 Laptop GPU", None),
        ("GRID A100-40C", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA NVIDIA H200", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_a_node_is_believed_in_nvmls_own_words_alone(reported: str, name: str | None) -> None:
    """With or without the maker's name, which came with driver 470; people's words are none."""
    assert name_of(find_gpu(reported, exact=True)) == name


def test_cards_are_what_their_data_sheets_say() -> None:
    """Of every card: more half than single precision, plausible memory and bandwidth."""
    for gpu in tables().gpus.values():
        assert 3e12 <= gpu.flops_fp32 <= gpu.flops <= 3e15
        assert 100e9 <= gpu.bandwidth <= 10e12
        assert 5 * GIB <= gpu.memory <= 200 * GIB


@pytest.mark.parametrize(
    ("name", "millions", "gigaflops", "gib"),
    [
        ("yolov5s", 9.15, 24.0, 0.161),
        ("yolov8n", 3.16, 8.7, 0.090),
        ("yolov8m", 25.9, 79.1, 0.303),
        ("yolov8x", 68.2, 257.8, 0.586),
        ("yolov10b", 20.6, 98.7, 0.56),
        ("yolo11s", 9.46, 21.6, 0.196),
        ("yolo12x", 59.2, 209.0, 1.058),
        ("yolo26l", 26.3, 93.8, 0.591),
    ],
)
def test_models_cost_what_was_measured_independently(
    name: str, millions: float, gigaflops: float, gib: float
) -> None:
    """Parameters and activations as a prototype found them; arithmetic as published, to 2 %."""
    found = find_model(name)
    assert isinstance(found, ModelCosts)
    assert found.parameters / 1e6 == pytest.approx(millions, rel=0.01)
    assert found.gigaflops == pytest.approx(gigaflops, rel=0.02)
    assert found.activation_bytes / GIB == pytest.approx(gib, rel=0.02)
    assert 1.7 <= found.activation_bytes_fp32 / found.activation_bytes <= 2.1


@given(st.text(max_size=60))
def test_any_text_is_a_name_or_unknown(text: str) -> None:
    """Names come from jobs and nodes; none breaks the search."""
    assert isinstance(find_model(text), ModelCosts | Unknown)
    assert isinstance(find_gpu(text), Gpu | Unknown)


def test_nothing_is_read_before_it_is_asked_for() -> None:
    """The engine and the trainer import the module; the tables cost time only where they serve."""
    code = (
        "import sys, gpuwarden.estimate_tables as tables\n"
        "assert tables.tables.cache_info().currsize == 0\n"
        "heavy = {'torch', 'ultralytics', 'numpy', 'yaml', 'pydantic', 'click'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "tables.find_gpu('T4')\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
