"""What the words of a training ask for is read as ultralytics reads them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

from gpuwarden.errors import InvalidInput
from gpuwarden.estimates import ModelCosts, Unknown
from gpuwarden.scheduling import yolo_words
from gpuwarden.scheduling.trainings import read_training


def test_what_is_not_said_is_ultralytics_default() -> None:
    """Batch 16, 640 pixels, 100 epochs, mixed precision."""
    found = read_training(["model=yolov8m.pt", "data=coco.yaml"], gpus=1)
    assert isinstance(found.model, ModelCosts)
    assert (found.model_name, found.batch, found.imgsz, found.epochs) == ("yolov8m", 16, 640, 100)
    assert (found.amp, found.optimizer, found.classes) == (True, "auto", 80)
    assert (found.images, found.validated, found.seconds) == (118_287, 5000, None)


def test_a_model_to_classify_has_smaller_images() -> None:
    """224 pixels, as ultralytics overrides its default by the task."""
    assert read_training(["model=yolov8m-cls"], gpus=1).imgsz == 224


def test_the_last_of_a_word_counts() -> None:
    """As for `yolo train`."""
    assert read_training(["model=yolov8m", "batch=8", "batch=32"], gpus=1).batch == 32


@pytest.mark.parametrize(
    ("words", "batch", "share"),
    [
        (["batch=-1"], None, 0.6),
        (["batch=0.7"], None, 0.7),
        (["batch=64"], 64, 0.6),
        (["batch=None"], 16, 0.6),
    ],
)
def test_a_batch_may_be_left_to_the_card(words: list[str], batch: int | None, share: float) -> None:
    """-1 is six tenths of its memory, a number below 1 another share."""
    found = read_training(["model=yolov8m", *words], gpus=1)
    assert (found.batch, found.memory_share) == (batch, share)


@pytest.mark.parametrize(
    ("words", "images"),
    [(["fraction=0.5"], 500), (["fraction=100"], 100), (["fraction=None"], 1000), ([], 1000)],
)
def test_a_fraction_is_a_share_or_a_number(words: list[str], images: int) -> None:
    """What is left out is not waited for."""
    assert read_training(["model=yolov8m", "data=1000", *words], gpus=1).images == images


def test_sizes_that_change_are_reckoned_with_at_their_largest() -> None:
    """Memory has to hold the largest batch of pixels."""
    found = read_training(["model=yolov8m", "multi_scale=0.25"], gpus=1)
    assert (found.imgsz, found.largest_imgsz) == (640, 800)
    assert read_training(["model=yolov8m", "multi_scale=True"], gpus=1).largest_imgsz == 960


def test_a_time_in_hours_goes_before_the_epochs() -> None:
    """`time=1.5` trains for an hour and a half, whatever `epochs` says."""
    assert read_training(["model=yolov8m", "time=1.5"], gpus=1).seconds == 5400


def test_a_training_without_validation_waits_for_none() -> None:
    """val=False."""
    assert read_training(["model=yolov8m", "data=coco.yaml", "val=False"], gpus=1).validated == 0


def test_every_mistake_is_said_at_once() -> None:
    """With what to write instead."""
    words = ["model=yolov8m", "batch=-2", "imgsz=20", "amp=maybe", "optimizer=Lion", "epochs=x"]
    with pytest.raises(InvalidInput) as caught:
        read_training([*words, "time=0", "multi_scale=3", "fraction=-1", "data=10"], gpus=1)
    text = str(caught.value)
    assert len(text.splitlines()) == 8
    assert "batch=-2: write a whole number" in text
    assert "optimizer=Lion is none of auto, sgd" in text


def test_a_word_that_is_nearly_a_setting_is_refused() -> None:
    """Else the training would end in its first second, hours after it was queued."""
    with pytest.raises(InvalidInput, match="did you mean batch="):
        read_training(["model=yolov8m", "bacth=64"], gpus=1)
    newer = read_training(["model=yolov8m", "quantum_flux=1"], gpus=1)
    assert newer.doubts == ("quantum_flux= is no setting that ultralytics 8.4.190 knows",)
    assert read_training(["model=yolov8m", "lr0=0.01", "cos_lr=True"], gpus=1).doubts == ()


def test_the_settings_are_those_of_ultralytics() -> None:
    """Of the version that is installed here."""
    spec = importlib.util.find_spec("ultralytics")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "cfg" / "default.yaml").read_text("utf-8")
    assert yaml.safe_load(text).keys() == yolo_words.SETTINGS


def test_a_file_of_settings_counts_below_the_words(tmp_path: Path) -> None:
    """As `cfg=` does for `yolo train`; what is not the user's to set is refused."""
    file = tmp_path / "my.yaml"
    file.write_text("batch: 32\nepochs: 7\nimgsz: [640, 480]\ntime: null\n", "utf-8")
    found = read_training(["epochs=9", "model=yolov8m", f"cfg={file}"], gpus=1)
    assert (found.batch, found.epochs, found.imgsz) == (32, 9, 640)
    file.write_text("device: 0,1\n", "utf-8")
    with pytest.raises(InvalidInput, match="sets device"):
        read_training(["model=yolov8m", f"cfg={file}"], gpus=1)
    for content in ("- a\n", "a: [\n", "1: 2\n"):
        file.write_text(content, "utf-8")
        with pytest.raises(InvalidInput, match="cfg="):
            read_training(["model=yolov8m", f"cfg={file}"], gpus=1)
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_training(["model=yolov8m", f"cfg={tmp_path}/none.yaml"], gpus=1)


def test_a_line_of_yolo_may_be_pasted() -> None:
    """Its bare words are taken as it takes them."""
    words = ["yolo", "segment", "train", "model=yolov8m-seg"]
    assert yolo_words.spelt_out(words) == ("task=segment", "model=yolov8m-seg")


@pytest.mark.parametrize("text", ["640,480", "[480, 640]", "(640,640)"])
def test_of_two_sides_the_longer_counts(text: str) -> None:
    """Ultralytics trains on squares."""
    assert read_training(["model=yolov8m", f"imgsz={text}"], gpus=1).imgsz == 640


@pytest.mark.parametrize("batch", ["9", "1", "-1", "0.5"])
def test_several_cards_share_a_batch_evenly(batch: str) -> None:
    """And ultralytics chooses none for them."""
    with pytest.raises(InvalidInput, match=r"cannot be shared|chooses no batch"):
        read_training(["model=yolov8m", f"batch={batch}"], gpus=2)


def test_data_that_are_not_there_are_said_to_be_missing(tmp_path: Path) -> None:
    """And how to go on where this machine cannot see them."""
    with pytest.raises(InvalidInput, match=r"there is no such file.*say --images N"):
        read_training(["model=yolov8m", f"data={tmp_path}/my.yaml"], gpus=1)
    found = read_training(["model=yolov8m", f"data={tmp_path}/my.yaml"], gpus=1, images=77)
    assert (found.images, found.validated) == (77, None)


def test_without_data_the_images_are_unknown() -> None:
    """They are not guessed."""
    found = read_training(["model=yolov8m"], gpus=1).images
    assert isinstance(found, Unknown)


def test_files_that_would_be_downloaded_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare name means weights; ultralytics' own YAML of a model comes with it."""
    monkeypatch.chdir(tmp_path)
    absent = read_training(["model=yolov8m", "data=coco.yaml"], gpus=1).absent
    assert absent == ("yolov8m.pt", "coco.yaml")
    (tmp_path / "yolov8m.pt").touch()
    assert read_training(["model=yolov8m", "data=10"], gpus=1).absent == ()
    assert read_training(["model=yolov8n.yaml", "data=10"], gpus=1).absent == ()


def test_a_model_of_ones_own_is_unknown(tmp_path: Path) -> None:
    """Also if it is called like one of the table: it may be another."""
    own = tmp_path / "yolov8m.yaml"
    own.write_text("nc: 3\n", "utf-8")
    found = read_training([f"model={own}"], gpus=1)
    assert isinstance(found.model, Unknown)
    assert "gpuwarden estimate" in str(found.model)
    assert found.model_name == "yolov8m"


def test_weights_are_known_by_what_they_were_trained_from(tmp_path: Path) -> None:
    """The args.yaml of their run says it."""
    weights = tmp_path / "train" / "weights" / "best.pt"
    weights.parent.mkdir(parents=True)
    weights.touch()
    (tmp_path / "train" / "args.yaml").write_text("model: yolo11s.pt\n", "utf-8")
    assert read_training([f"model={weights}"], gpus=1).model_name == "yolo11s"


def test_classes_are_those_of_the_data_set(tmp_path: Path) -> None:
    """Its names, its number, or one if they are not told apart."""
    images = tmp_path / "images"
    images.mkdir()
    (images / "1.jpg").touch()
    data = tmp_path / "my.yaml"
    data.write_text(f"train: {images}\nval: {images}\nnames: [cat, dog, owl]\n", "utf-8")
    words = ["model=yolov8m", f"data={data}"]
    assert read_training(words, gpus=1).classes == 3
    assert read_training([*words, "single_cls=True"], gpus=1).classes == 1
