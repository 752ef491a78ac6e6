"""`gpuwarden estimate`: what is asked, what is answered, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from gpuwarden.errors import InvalidInput
from gpuwarden.estimates import GIB
from gpuwarden.trainer.estimate_answers import Answer
from gpuwarden.trainer.estimate_cli import estimate
from gpuwarden.trainer.estimate_words import parse

if TYPE_CHECKING:
    from pathlib import Path


def asked(*words: str) -> dict[str, Any]:
    """The answer for machines."""
    return Answer.to(parse(words)).as_dict()


def told(*words: str) -> str:
    """The answer for people."""
    return Answer.to(parse(words)).as_text()


def test_the_example_of_the_help_is_answered() -> None:
    """Memory with its band, speed with its range, the largest batch, workers and sources."""
    answer = asked("model=yolov8m", "batch=64", "imgsz=640", "gpu=A100 40GB")
    memory, images = answer["memory_total_bytes"], answer["images_per_second"]
    assert 20 * GIB < memory["low"] < memory["expected"] < memory["high"] < 40 * GIB
    assert 80 < images["low"] < images["expected"] < images["high"] < 400
    assert answer["fits"] is True
    assert answer["largest_batch"] >= 64
    assert answer["workers"] >= 2
    assert answer["limit"] == "memory bandwidth"
    assert any("A100 40GB" in source for source in answer["sources"])
    text = told("model=yolov8m", "batch=64", "imgsz=640", "gpu=A100 40GB")
    for part in ("reserved by torch", "nvidia-smi", "fits", "images/s", "workers", "rests on"):
        assert part in text


def test_without_a_card_there_is_memory_and_no_speed() -> None:
    """And the answer says how to ask for more."""
    answer = asked("model=yolov8n")
    assert "memory_reserved_bytes" in answer
    assert not {"gpu", "images_per_second", "largest_batch"} & answer.keys()
    assert 'say gpu="A100 40GB"' in told("model=yolov8n")


def test_time_is_images_through_throughput() -> None:
    """For one epoch and for all of them; the fast end of one is the short end of the other."""
    answer = asked("model=yolov8m", "gpu=T4", "data=coco.yaml", "epochs=100")
    assert answer["images"] == 118287
    images, epoch = answer["images_per_second"], answer["epoch_seconds"]
    assert epoch["expected"] == pytest.approx(118287 / images["expected"], rel=0.01)
    assert epoch["low"] == pytest.approx(118287 / images["high"], rel=0.01)
    assert answer["training_seconds"]["high"] == pytest.approx(100 * epoch["high"], rel=1e-4)
    text = told("model=yolov8m", "gpu=T4", "data=coco.yaml", "epochs=100")
    assert "100 epochs, without validation" in text


def test_few_cores_bound_the_speed_and_are_named() -> None:
    """Two cores prepare 160 images of 640 px a second, whatever the card could do."""
    free = asked("model=yolov8n", "batch=128", "gpu=H100 NVL")
    bound = asked("model=yolov8n", "batch=128", "gpu=H100 NVL", "cores=2", "workers=8")
    assert free["images_per_second"]["expected"] > 160
    assert bound["images_per_second"] == {"low": 160.0, "expected": 160.0, "high": 160.0}
    assert bound["limit"] == "data loading"
    assert bound["workers"] == 2


def test_a_tiny_batch_on_a_big_card_is_told_from_which_batch_on_it_pays() -> None:
    """Launching the operations takes as long for one image as for many."""
    text = told("model=yolov8n", "batch=2", "gpu=H100 NVL")
    assert "bound by launches" in text
    assert "a step takes no less time below batch" in text


def test_what_does_not_fit_is_said_and_is_the_exit_status() -> None:
    """1: the answer is no; the largest batch is still said."""
    done = CliRunner().invoke(estimate, ["model=yolov8x", "batch=64", "gpu=T4"])
    assert "does not fit" in done.output
    status = subprocess.run(
        [sys.executable, "-m", "gpuwarden", "estimate", "model=yolov8x", "batch=64", "gpu=T4"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert status.returncode == 1
    assert "largest   batch" in status.stdout


def test_json_is_json_and_nothing_else() -> None:
    """On standard output, for scripts."""
    done = CliRunner().invoke(
        estimate, ["model=yolo11s", "gpu=4090", "gpus=2", "batch=32", "--json"]
    )
    assert json.loads(done.output)["workload"]["gpus"] == 2


def test_several_cards_share_the_batch() -> None:
    """Each needs less memory; together they are faster."""
    one = asked("model=yolov8m", "batch=64", "gpu=A100 40GB")
    four = asked("model=yolov8m", "batch=64", "gpu=A100 40GB", "gpus=4")
    assert four["memory_total_bytes"]["expected"] < one["memory_total_bytes"]["expected"] / 2
    assert four["images_per_second"]["expected"] > 2 * one["images_per_second"]["expected"]
    assert "on 4 x A100 40GB" in told("model=yolov8m", "batch=64", "gpu=A100 40GB", "gpus=4")


def test_classification_is_asked_at_its_own_size() -> None:
    """224 px unless another is said."""
    assert asked("model=yolov8n-cls", "gpu=T4")["workload"]["imgsz"] == 224
    assert asked("model=yolov8n-cls", "imgsz=320")["workload"]["imgsz"] == 320


def test_minus_one_is_the_largest_batch_that_fits() -> None:
    """As ultralytics' own batch=-1, but for this card and with the whole training."""
    answer = asked("model=yolo11s", "gpu=T4", "batch=-1", "gpus=2")
    assert answer["workload"]["batch"] == answer["largest_batch"] > 16
    assert answer["workload"]["batch"] % 2 == 0
    assert answer["fits"] is True


@pytest.mark.parametrize("model", ["/x/yolo11s.pt", "yolo11s.yaml", "'yolo11s.pt'", '"yolo11s"'])
def test_weights_of_a_run_are_known_by_its_arguments(tmp_path: Path, model: str) -> None:
    """best.pt says nothing; the args.yaml that ultralytics writes beside does."""
    weights = tmp_path / "train" / "weights" / "best.pt"
    weights.parent.mkdir(parents=True)
    weights.touch()
    with pytest.raises(InvalidInput, match="is in no table"):
        parse([f"model={weights}"])
    arguments = tmp_path / "train" / "args.yaml"
    arguments.write_text(f"task: detect\nmodel: {model}\ndata: x.yaml\n", "utf-8")
    assert parse([f"model={weights}"]).model.name == "yolo11s"
    arguments.write_bytes(b"model: \xff\n")
    with pytest.raises(InvalidInput, match="is in no table"):
        parse([f"model={weights}"])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "which model"),
        (["model=yolov8m", "batch=-1"], "on which card"),
        (["model=yolov8x", "imgsz=8192", "gpu=T4", "batch=-1"], "with no batch"),
        (["model=yolov8m", "gpu=T4", "gpus=0", "batch=-1"], "gpus=0 is not between"),
        (["model=yolov8m", "gpu=T4", "gpus=4", "batch=15"], "among 4 cards: .* say 12 or 16"),
        (["yolov8m"], "'yolov8m' is no KEY=VALUE"),
        (["model="], "no KEY=VALUE"),
        (["model=yolov8m", "bacth=3"], "'bacth' is no word .*did you mean \"batch\""),
        (["model=yolov8m", "batch=3", "batch=4"], "batch= is said twice"),
        (["model=yolov8m", "batch=many"], "batch=many: write a whole number"),
        (["model=yolov8m", "batch=1.5"], "write a whole number"),
        (["model=yolov8m", "batch=-2"], "batch=-2 is not between"),
        (["model=yolov8m", "nc=0"], "^nc=0 is not between"),
        (["model=yolov8q"], r"did you mean .*yolov8n\. Of any other"),
        (["model=yolov8m", "amp=maybe"], "amp=maybe: write true or false"),
        (["model=yolov8m", "optimizer=sdg"], "optimizer=sdg is none of"),
        (["model=yolov8m", "epochs=0"], "epochs=0 is less than 1"),
        (["model=yolov8m", "cores=0"], "cores=0 is less than 1"),
        (["model=yolv8m"], "did you mean .*yolov8m"),
        (["model=best.pt"], "give the YAML that it was made from"),
        (["model=yolov8m-seg", "task=detect"], "a model to segment, not to detect"),
        (["model=yolov8m", "gpu=V100"], "several cards 'V100'; did you mean .*V100 SXM2 16GB"),
        (["model=yolov8m", "gpu=RTX 4900"], "is in no table; did you mean .*RTX 4090"),
        (["model=yolov8m", "data=nowhere"], "there is no such file"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_remedy(words: list[str], complaint: str) -> None:
    """Every refusal says what to write instead."""
    with pytest.raises(InvalidInput, match=complaint):
        parse(words)


def test_help_teaches_without_torch() -> None:
    """Words, examples and statuses; torch is imported only where a YAML has to be measured."""
    code = (
        "import sys\nfrom gpuwarden.cli import main\n"
        "try:\n    main(['estimate', 'model=yolov8m', 'gpu=T4'])\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "assert not {'torch', 'ultralytics', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    text = CliRunner().invoke(estimate, ["--help"]).output
    for part in ("gpu=", "largest", "Exit status", "cores", "docs/estimates.md", "--json"):
        assert part in text


def test_a_yaml_without_ultralytics_names_the_remedy(tmp_path: Path) -> None:
    """The command alone needs click; a model of one's own needs what builds it."""
    model = tmp_path / "mine.yaml"
    model.write_text("nc: 2\n", "utf-8")
    code = (
        "import sys; sys.modules['ultralytics'] = None; sys.modules['torch'] = None\n"
        f"from gpuwarden.cli import main; main(['estimate', 'model={model}'])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ran.returncode, "pip install 'gpuwarden[yolo]'" in ran.stderr) == (2, True), ran.stderr
