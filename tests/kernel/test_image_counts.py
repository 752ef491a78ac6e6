"""Images of a training set are counted, whatever describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpuwarden.errors import InvalidInput
from gpuwarden.image_counts import KNOWN, KNOWN_VALIDATION, count_classes, count_images

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Five images in two folders, and what is none."""
    for name in ("a/1.jpg", "a/2.PNG", "a/3.txt", "b/4.webp", "b/deep/5.tif", "b/6.jpeg", "b/x.py"):
        file = tmp_path / "set" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return tmp_path / "set"


def test_numbers_folders_and_lists_are_counted(images: Path) -> None:
    """A list has an image on each line that is not empty."""
    listed = images / "train.txt"
    listed.write_text("a/1.jpg\na/2.PNG\n\n", "utf-8")
    assert count_images("123") == 123
    assert count_images(str(images)) == 5
    assert count_images(str(images / "b")) == 3
    assert count_images(str(listed)) == 2


@pytest.mark.parametrize(
    ("content", "count"),
    [
        ("path: {set}\ntrain: a\nval: b\n", 2),
        ("path: {set}\ntrain: [a, b]\n", 5),
        ("train: set/a\n", 2),
        ("path: set\ntrain: b\n", 3),
    ],
)
def test_descriptions_are_followed_to_their_images(images: Path, content: str, count: int) -> None:
    """As ultralytics does: `path` absolute or beside the file, `train` one or several."""
    file = images.parent / "data.yaml"
    file.write_text(content.format(set=images), "utf-8")
    assert count_images(str(file)) == count


def test_ultralytics_own_sets_are_known_by_name() -> None:
    """Without having them."""
    assert count_images("coco.yaml") == 118287
    assert count_images("VisDrone.yaml") == 6471
    assert count_images("coco8") == KNOWN["coco8"] == 4


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("train: nowhere\n", "are not there; say a number"),
        ("val: a\n", "does not say where"),
        ("train: [a, 3]\n", "does not say where"),
        ("- a\n", "does not say where"),
        ("{", "no YAML"),
        ("train: data.yaml\n", "are not there"),
        ("!!python/object/apply:os.system [touch /tmp/never]\n", "no YAML"),
    ],
)
def test_a_wrong_description_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    """With what is wrong about it."""
    file = tmp_path / "data.yaml"
    file.write_text(content, "utf-8")
    with pytest.raises(InvalidInput, match=complaint):
        count_images(str(file))


def test_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    """No images, or no such data set."""
    with pytest.raises(InvalidInput, match="it has no images"):
        count_images(str(tmp_path))
    with pytest.raises(InvalidInput, match="it has no images"):
        count_images("0")
    with pytest.raises(InvalidInput, match=r'did you mean "coco\.yaml"'):
        count_images("cocoo.yaml")


def test_images_to_validate_by_are_counted_apart(images: Path) -> None:
    """A YAML says where they are; a folder that only holds images does not."""
    file = images / "data.yaml"
    file.write_text(
        f"path: {images}\ntrain: a\nval: [b/deep]\nnames: {{0: cat, 1: dog}}\n", "utf-8"
    )
    assert count_images(str(file)) == 2
    assert count_images(str(file), split="val") == 1
    assert count_images("coco.yaml", split="val") == 5000
    assert count_classes(str(file)) == 2
    assert count_classes(str(images)) is None
    assert count_classes("coco.yaml") is None
    with pytest.raises(InvalidInput, match="no folder of images to validate by"):
        count_images(str(images), split="val")


def test_a_folder_to_classify_is_trained_by_its_part_alone(images: Path) -> None:
    """Ultralytics reads the classes of `train`, and validates by `val` or what else it finds."""
    (images / "a").rename(images / "train")
    (images / "b").rename(images / "valid")
    assert count_images(str(images)) == 2
    assert count_images(str(images), split="val") == 3


def test_a_number_of_classes_is_enough(tmp_path: Path) -> None:
    """Older data sets say nc without names."""
    file = tmp_path / "data.yml"
    file.write_text("nc: 7\ntrain: x\n", "utf-8")
    assert count_classes(str(file)) == 7
    file.write_text("- a list\n", "utf-8")
    assert count_classes(str(file)) is None


def test_every_known_data_set_is_known_with_its_validation() -> None:
    """The two tables are of the same files."""
    assert KNOWN.keys() == KNOWN_VALIDATION.keys()
