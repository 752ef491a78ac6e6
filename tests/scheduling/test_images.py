"""Which images a task may use, and whether their CUDA runs on its cards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.scheduling.policy_files import DIGEST

from gpuwarden import estimate_tables
from gpuwarden.errors import RefusedAction
from gpuwarden.scheduling import images
from gpuwarden.scheduling.policies import Image

if TYPE_CHECKING:
    from gpuwarden.estimates import Gpu, Unknown


def image(name: str, *models: str) -> Image:
    """An image of the catalogue."""
    return Image.model_validate(
        {
            "name": name,
            "image": f"registry.example.com/{name.replace(':', '-')}@{DIGEST}",
            "models": list(models),
        }
    )


CATALOGUE = (
    image("yolo:m-cu118", "yolov8m*", "yolo11m*"),
    image("yolo:m-cu128", "yolov8m*", "yolo11m*"),
    image("yolo:x-cu130", "*"),
)


def card(name: str) -> Gpu | Unknown:
    """A card of the tables."""
    return estimate_tables.find_gpu(name)


@pytest.mark.parametrize(
    ("name", "release"),
    [
        ("yolo:m-cu124", (12, 4)),
        ("yolo:m-cu118", (11, 8)),
        ("yolo-cu130-v2", (13, 0)),
        ("cu92", (9, 2)),
        ("yolo:m", None),
        ("yolo:focus12", None),
    ],
)
def test_the_name_tells_the_cuda(name: str, release: tuple[int, int] | None) -> None:
    """The last digit is the minor release."""
    assert images.cuda_of(name) == release


def test_the_first_that_runs_on_the_card_is_taken() -> None:
    """Blackwell needs CUDA 12.8; on an A100 the first of the catalogue will do."""
    on_a100 = images.choose(CATALOGUE, "yolov8m", wanted=None, gpu=card("A100 SXM4 40GB"))
    assert (on_a100.image, on_a100.warnings) == (CATALOGUE[0], ())
    on_b200 = images.choose(CATALOGUE, "yolov8m", wanted=None, gpu=card("B200"))
    assert on_b200.image == CATALOGUE[1]
    assert images.choose(CATALOGUE, "yolo26x", wanted=None, gpu=card("B200")).image == CATALOGUE[2]


@pytest.mark.parametrize(
    ("name", "gpu", "words"),
    [
        ("yolo:m-cu118", "B200", "CUDA 11.8 is older than B200, which needs 12.8"),
        ("yolo:x-cu130", "Tesla V100-SXM2-16GB", "no longer runs on V100 SXM2 16GB: 12.9"),
        ("yolo:m-cu118", "NVIDIA H100 80GB HBM3", None),
        ("yolo:m", "B200", None),
        ("yolo:m-cu118", "no such card", None),
    ],
)
def test_a_cuda_that_does_not_run_there_is_told(name: str, gpu: str, words: str | None) -> None:
    """What is not known is no reason to warn."""
    why = images.mismatch(name, card(gpu))
    assert why is None if words is None else words in (why or "")


def test_what_was_asked_for_is_taken_with_a_warning() -> None:
    """By name or by its whole reference."""
    gpu = card("B200")
    by_name = images.choose(CATALOGUE, "yolov8s", wanted="yolo:m-cu118", gpu=gpu)
    assert by_name.image == CATALOGUE[0]
    assert len(by_name.warnings) == 2
    by_reference = images.choose(CATALOGUE, "yolov8m", wanted=CATALOGUE[2].image, gpu=gpu)
    assert by_reference.image == CATALOGUE[2]


@pytest.mark.parametrize(
    "wanted", ["yolo:m-cu124", "ultralytics/ultralytics:latest", f"evil/yolo@{DIGEST}", ""]
)
def test_a_foreign_image_is_refused_with_the_list(wanted: str) -> None:
    """A digest alone does not make an image one of ours."""
    with pytest.raises(RefusedAction, match="yolo:m-cu118") as caught:
        images.choose(CATALOGUE, "yolov8m", wanted=wanted, gpu=card("B200"))
    assert caught.value.reason == "image"
    with pytest.raises(RefusedAction, match="lists no images"):
        images.choose((), "yolov8m", wanted="yolo:m-cu118", gpu=card("B200"))


def test_without_a_catalogue_the_job_runs_what_is_installed() -> None:
    """And where none is recommended for the model, that is said."""
    assert images.choose((), "yolov8m", wanted=None, gpu=card("B200")) == images.Chosen(None)
    none = images.choose(CATALOGUE[:2], "yolov8n", wanted=None, gpu=card("B200"))
    assert none.image is None
    assert "yolo:m-cu118 (yolov8m*, yolo11m*)" in none.warnings[0]
