from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpuwarden.exporter.classification import is_kernel, loaded_framework, yolo_command
from gpuwarden.exporter.jobs import YoloCommand

if TYPE_CHECKING:
    from tests.exporter.nodes import Children


@pytest.mark.parametrize(
    ("line", "kernel"),
    [
        ("python -m ipykernel_launcher -f /run/user/1000/jupyter/kernel-1.json", True),
        ("/usr/bin/python3 -Xfrozen_modules=off -m ipykernel_launcher -f x", True),
        ("python /opt/lib/ipykernel_launcher.py -f x", True),
        ("python -m ipykernel -f x", True),
        ("python train.py --notes jupyter", False),
        ("python -m torch.distributed.run ipykernel_launcher", False),
        ("python a b c d ipykernel_launcher", False),
        ("", False),
    ],
)
def test_kernels(line: str, kernel: bool) -> None:
    """A Jupyter kernel is one by the module it runs, not by a word somewhere in its line."""
    assert is_kernel(line.split()) is kernel


@pytest.mark.parametrize(
    ("line", "command"),
    [
        (
            "python /bin/yolo train model=/w/yolov8m.pt batch=64 imgsz=640 project=/d/traffic x=y",
            YoloCommand("yolov8m", "64", "640", project="traffic"),
        ),
        ("yolo train model=yolo11n.yaml", YoloCommand("yolo11n")),
        ("yolo mode=train batch=-1", YoloCommand(batch="-1")),
        ("python -m ultralytics train batch=0.8", YoloCommand(batch="0.8")),
        (
            "python train.py --img 640 --batch-size 16 --epochs=3 --weights yolov5s.pt",
            YoloCommand("yolov5s", "16", "640", "3", framework="torch"),
        ),
        (
            "python /y/yolov7/train_aux.py --batch 8 --cfg cfg/training/yolov7-w6.yaml",
            YoloCommand("yolov7-w6", "8", framework="torch"),
        ),
        ("yolo predict model=yolov8n.pt", None),
        ("python train.py", None),
        ("python main.py --batch-size 16", None),
        ("", None),
    ],
)
def test_yolo_commands(line: str, command: YoloCommand | None) -> None:
    """An undeclared training is recognised with what its command line says, and no more."""
    assert yolo_command(line.split()) == command


def test_words_that_are_no_values() -> None:
    """What does not look like a model's name or a number is not passed on."""
    line = ["yolo", "train", "model=a b'$(x)", "batch=1;2", "imgsz=" + "9" * 99, "project=\udcff"]
    assert yolo_command(line) == YoloCommand()


def test_no_framework(children: Children) -> None:
    """A process without a framework's library has none; neither has nobody."""
    assert loaded_framework(children.start().pid) == ""
    assert loaded_framework(2**22 - 1) == ""
