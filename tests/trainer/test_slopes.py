"""What a model costs is measured without a card, for any YAML that ultralytics can build."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.trainer.conftest import TINY_MODEL

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
        ("- 1\n", "cannot build it"),
        ("nc: 2\nbackbone: []\nhead: []\n", "cannot build it"),
        ("nc: 2\nbackbone:\n  - [-1, 1, Nothing, [1]]\nhead: []\n", "cannot build it"),
        (TINY_MODEL.replace("[32, 3, 2]", "[32, 3, 2, 5, 6, 7, 8, 9]"), "cannot build it"),
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


def test_the_command_takes_files_and_ultralytics_own_models(tmp_path: Path) -> None:
    """By path, and by the name of a model that is in no table."""
    request = parse([f"model={written(tmp_path, TINY_MODEL)}", "batch=4"])
    assert request.model.name == "tiny.yaml"
    request = parse(["model=yolov8n-ghost.yaml"])
    assert request.model.name == "yolov8n-ghost.yaml"
    assert 1e6 < request.model.parameters < 3e6
    with pytest.raises(InvalidInput, match="is in no table"):
        parse(["model=yolov8n-nothing.yaml"])
