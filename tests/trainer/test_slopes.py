"""What a model costs is measured without a card, for any YAML that ultralytics can build."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from demo.datasets import TINY_MODEL

from gpuwarden.errors import InvalidInput
from gpuwarden.trainer import slopes
from gpuwarden.trainer.estimate_words import parse

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gpuwarden" / "slopes"


def written(folder: Path, content: str, name: str = "tiny.yaml") -> Path:
    """A model's YAML."""
    file = folder / name
    file.write_text(content, "utf-8")
    return file


def test_a_model_of_ones_own_is_measured(tmp_path: Path) -> None:
    """Its activations by hand: what each block keeps of an image of 640 px."""
    costs = slopes.costs(written(tmp_path, TINY_MODEL))
    assert (costs.name, costs.task, costs.imgsz) == ("tiny", "detect", 640)
    assert 0.1e6 < costs.parameters < 0.3e6
    assert costs.anchors == 80**2 + 40**2 + 20**2
    # The first block has 8 channels of 320 x 320 pixels of 2 bytes and keeps them three times:
    # after convolution, normalization and activation. What follows has a quarter of the pixels.
    first = 3 * 8 * 320**2 * 2
    assert first < costs.activation_bytes < 6 * first
    assert costs.activation_bytes_fp32 == pytest.approx(2 * costs.activation_bytes, rel=0.1)


def test_what_was_measured_is_recalled_by_its_content(tmp_path: Path, cache: Path) -> None:
    """The same content under the same name; another content is measured anew."""
    model = written(tmp_path, TINY_MODEL)
    costs = slopes.costs(model)
    (file,) = cache.iterdir()
    row = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**row, "parameters": 7}), "utf-8")
    assert slopes.costs(model).parameters == 7
    other = slopes.costs(written(tmp_path, TINY_MODEL.replace("nc: 2", "nc: 3")))
    assert other.parameters > costs.parameters


@pytest.mark.parametrize("content", ["{", '{"task": "detect"}'])
def test_a_spoilt_cache_is_measured_anew(tmp_path: Path, cache: Path, content: str) -> None:
    """Whatever somebody else's process left there."""
    model = written(tmp_path, TINY_MODEL)
    costs = slopes.costs(model)
    (file,) = cache.iterdir()
    file.write_text(content, "utf-8")
    assert slopes.costs(model) == costs
    assert json.loads(file.read_text("utf-8"))["parameters"] == costs.parameters


def test_without_a_writable_cache_it_only_takes_longer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A home that is a file: said, and not in the way."""
    nowhere = tmp_path / "file"
    nowhere.touch()
    assert slopes.costs(written(tmp_path, TINY_MODEL), cache=nowhere / "x").parameters
    assert "measured again next time" in caplog.text


def test_end_to_end_heads_cost_more(tmp_path: Path) -> None:
    """They have two heads, which are both trained."""
    plain = slopes.costs(written(tmp_path, TINY_MODEL))
    both = slopes.costs(written(tmp_path, f"end2end: True\n{TINY_MODEL}", "both.yaml"))
    assert both.parameters > plain.parameters
    assert both.activation_bytes > plain.activation_bytes
    assert both.operations > plain.operations


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "describes no model"),
        ("nc: 2\n", "describes no model"),
        ("- 1\n", "cannot build or run it"),
        ("nc: 2\nbackbone: []\nhead: []\n", "cannot build or run it"),
        ("nc: 2\nbackbone:\n  - [-1, 1, Nothing, [1]]\nhead: []\n", "cannot build or run it"),
        (TINY_MODEL.replace("[32, 3, 2]", "[32, 3, 2, 5, 6, 7, 8, 9]"), "cannot build or run it"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    """With ultralytics' own reason."""
    with pytest.raises(InvalidInput, match=complaint):
        slopes.costs(written(tmp_path, content))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Rather than looked for elsewhere."""
    with pytest.raises(InvalidInput, match=r"absent\.yaml: No such file"):
        slopes.costs(tmp_path / "absent.yaml")


def test_the_command_takes_files(tmp_path: Path) -> None:
    """By path; a name that is no file and no model of ultralytics is in no table."""
    request = parse([f"model={written(tmp_path, TINY_MODEL)}", "batch=4"])
    assert request.model.name == "tiny.yaml"
    with pytest.raises(InvalidInput, match="is in no table"):
        parse(["model=yolov8n-nothing.yaml"])


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("yoloe-v8n", "text embeddings"),
        pytest.param("yolov8n-world", "guide", marks=pytest.mark.sweep),
        pytest.param("yolov8n-rtdetr", "no known task", marks=pytest.mark.sweep),
        pytest.param("yolo26n-depth", "task depth", marks=pytest.mark.sweep),
    ],
)
def test_models_that_need_more_than_images_are_refused(name: str, complaint: str) -> None:
    """Text, or another kind of training: said with the reason, never estimated."""
    with pytest.raises(InvalidInput, match=complaint):
        slopes.measure(f"{name}.yaml")


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    [
        *("yolov3", "yolov3-tiny", "yolov5n6", "yolov5n-p6", "yolov6n", "yolov8n-p2", "yolov8n-p6"),
        *("yolov8n-ghost", "yolo26n-p2", "yolo26n-p6", "yolov8-cls-resnet50"),
    ],
)
def test_models_of_ultralytics_that_are_in_no_table_are_measured(name: str) -> None:
    """As users name them, with a size or without."""
    model = parse([f"model={name}.yaml"]).model
    assert model.parameters > 1e6
    assert model.activation_bytes > 1e6
