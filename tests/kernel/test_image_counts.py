"""Images of a training set are counted, whatever describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpuwarden.errors import InvalidInput
from gpuwarden.image_counts import KNOWN, count_images

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
