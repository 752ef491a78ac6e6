"""Undeclared YOLO trainings by their command lines, as people write them."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.exporter.jobs import YoloCommand
from gpuwarden.exporter.yolo_commands import yolo_command

V8 = YoloCommand("yolov8m", "64", "640", "100")
V5 = YoloCommand("yolov5s", "16", "640", "3", framework="torch")
V5_LINE = "train.py --img 640 --batch-size 16 --epochs 3 --weights yolov5s.pt"
V7_LINE = "python train.py --device 0 --batch 32 --img 640 640 --cfg cfg/training/yolov7.yaml"
V8_LINE = "train model=yolov8m.pt batch=64 imgsz=640 epochs=100"


@pytest.mark.parametrize(
    ("line", "command"),
    [
        (f"yolo {V8_LINE}", V8),
        (f"yolo detect {V8_LINE}", V8),
        ("yolo task=detect mode=train model=yolov8m.pt batch=64 imgsz=640 epochs=100", V8),
        (f"/opt/env/bin/python /opt/env/bin/yolo {V8_LINE}", V8),
        (f"python3.11 -u -m ultralytics {V8_LINE}", V8),
        (f"python -m ultralytics.cfg {V8_LINE}", V8),
        (f"gpuwarden {V8_LINE}", V8),
        ("yolo train model = yolov8m.pt batch= 64 imgsz =640 epochs=100", V8),
        ("yolo train --model=/w/yolov8m.pt, --batch=64 --imgsz=640, --epochs=100", V8),
        ("yolo train model=yolov8m.pt batch=8 batch=64 imgsz=640 epochs=100", V8),
        # Without a mode ultralytics trains.
        ("yolo model=yolo11n.yaml data=coco8.yaml", YoloCommand("yolo11n")),
        ("yolo segment data=coco8-seg.yaml model=yolo11n-seg.pt", YoloCommand("yolo11n-seg")),
        ("yolo train", YoloCommand()),
        ("yolo train cfg=my.yaml model=yolov8m.pt", YoloCommand("yolov8m")),
        ("yolo train resume model=runs/detect/train/weights/last.pt", YoloCommand()),
        ("yolo predict model=yolov8n.pt", None),
        ("yolo mode=val model=yolov8n.pt", None),
        ("yolo export model=train.pt format=onnx", None),
        ("yolo help", None),
        ("yolo settings runs_dir=/train", None),
        ("yolo", None),
        ("python my.py --name yolo train", None),
        ("vim yolo train", None),
    ],
)
def test_ultralytics(line: str, command: YoloCommand | None) -> None:
    """The CLI in all its spellings; other modes are no training."""
    assert yolo_command(line.split()) == command


@pytest.mark.parametrize(
    ("line", "command"),
    [
        (f"python {V5_LINE}", V5),
        ("python train.py --imgsz=640 --batch=16 --epoch=3 --weight=yolov5s.pt", V5),
        ("python train.py --img-size 640 640 --batch 16 --epochs 3 --weights '' --cfg yolov5s", V5),
        (
            "python segment/train.py --weights yolov5s-seg.pt --batch 16",
            YoloCommand("yolov5s-seg", "16", framework="torch"),
        ),
        (
            f"{V7_LINE} --weights yolov7_training.pt --name y7",
            YoloCommand("yolov7", "32", "640", devices=1, framework="torch"),
        ),
        (
            "python /y/yolov7/train_aux.py --batch 8 --cfg cfg/training/yolov7-w6.yaml",
            YoloCommand("yolov7-w6", "8", framework="torch"),
        ),
        (
            "python train_dual.py --device 0,1,2,3 --batch 64 --cfg models/detect/yolov9-c.yaml",
            YoloCommand("yolov9-c", "64", devices=4, framework="torch"),
        ),
        (
            "python tools/train.py --batch 32 --conf-file configs/yolov6s.py --img 640",
            YoloCommand("yolov6s.py", "32", "640", framework="torch"),
        ),
        (
            "python train.py --batch 16 --data coco128.yaml",
            YoloCommand(batch="16", framework="torch"),
        ),
        (
            "python train.py --resume --weights runs/train/exp/weights/last.pt --batch 16",
            YoloCommand(batch="16", framework="torch"),
        ),
        (
            "python train.py --project runs/traffic --img 640 --rect --batch --cache",
            YoloCommand(imgsz="640", project="traffic", framework="torch"),
        ),
        # Whoever calls his script so need not train YOLO.
        ("python train.py --batch-size 256 --epochs 90 --arch resnet50", None),
        ("python train.py", None),
        ("python main.py --batch-size 16 --img 640", None),
        ("python -c train.py --img 640", None),
        ("", None),
    ],
)
def test_scripts(line: str, command: YoloCommand | None) -> None:
    """yolov5's, yolov7's and yolov9's scripts, whose options may be cut short."""
    assert yolo_command(shlex.split(line)) == command


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun --nproc_per_node 4",
        "torchrun --standalone --nnodes=1 --nproc-per-node=gpu",
        "python -m torch.distributed.run --nproc_per_node 4 --master_port 29500",
        "python -m torch.distributed.launch --use_env --nproc_per_node 4",
        "/env/bin/python /env/bin/torchrun --nproc_per_node 4",
        "/env/bin/python /env/bin/accelerate launch --num_processes 4 --mixed_precision fp16",
        "python -m accelerate.commands.launch --num_processes 4",
        "deepspeed --num_gpus 4",
        "srun --gres=gpu:1 -J yolo python",
        "mpirun -np 4 python -u",
        "nohup python",
        "env CUDA_VISIBLE_DEVICES=0 python",
        "conda run -n train --no-capture-output python",
        "uv run --with ultralytics python",
        "nsys profile -o yolo python",
        "taskset -c 0-7 python3",
        "bash run.sh python",
        "sh -c :",
    ],
)
def test_behind_launchers(launcher: str) -> None:
    """What launches a training is not the training, whatever values its options have."""
    assert yolo_command([*launcher.split(), *V5_LINE.split()]) == V5
    # Launchers of scripts take an entry point's script likewise.
    program = ["/env/bin/yolo", *V8_LINE.split()]
    assert yolo_command([*launcher.split(), *program]) == V8
    assert yolo_command([*launcher.split(), "other.py", "--batch", "7"]) is None


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("batch=-1", YoloCommand()),
        ("batch=0.8", YoloCommand()),
        ("batch=auto", YoloCommand()),
        ("batch=16", YoloCommand(batch="16")),
        ("imgsz=[640,480]", YoloCommand(imgsz="640")),
        ("imgsz=480,640", YoloCommand(imgsz="640")),
        ("imgsz=(1280,720)", YoloCommand(imgsz="1280")),
        ("device=0", YoloCommand(devices=1)),
        ("device=0,1,2", YoloCommand(devices=3)),
        ("device=[0,1]", YoloCommand(devices=2)),
        ("device=cuda:1", YoloCommand(devices=1)),
        ("device=-1,-1", YoloCommand(devices=2)),
        ("device=cpu", YoloCommand(devices=0)),
        ("device=cuda", YoloCommand()),
        ("device=None", YoloCommand()),
        ("project=/d/traffic/", YoloCommand(project="traffic")),
        ("project=", YoloCommand()),
        ("lr0=0.01", YoloCommand()),
    ],
)
def test_values(words: str, command: YoloCommand) -> None:
    """What a value says; what the training finds by itself is not known, and no fault."""
    found = yolo_command(["yolo", "train", words])
    assert found == command
    assert found is not None
    assert found.refused == 0


@pytest.mark.parametrize(
    "word",
    [
        "model=a b'$(x)",
        "model=\n",
        "model=" + "a" * 65,
        "model=https://hub.example/models/0123456789?key=secret",
        "batch=1;2",
        "batch=0",
        "batch=-16",
        "batch=1e3",
        "batch=\u0661\u0662",
        "imgsz=" + "9" * 99,
        "imgsz=640x",
        "imgsz=[640,480,3]",
        "epochs=-3",
        "epochs=3.5",
        "project=\udcff",
        "project=..",
        "device=all",
        "device=" + ",".join(["0"] * 2000),
    ],
)
def test_words_that_are_no_values(word: str) -> None:
    """What does not look like what it should be is not passed on, but counted."""
    found = yolo_command(["yolo", "train", word])
    assert found == YoloCommand()
    assert found is not None
    assert found.refused == 1


_WORDS = st.lists(
    st.sampled_from(["yolo", "train", "python", "-m", "=", "train.py", "--img", "--batch", "srun"])
    | st.text(max_size=12),
    max_size=30,
)


@given(_WORDS)
def test_any_words(words: list[str]) -> None:
    """Whatever a command line is, nothing but names and numbers leaves it."""
    command = yolo_command(words)
    if command is not None:
        for value in (command.batch, command.imgsz, command.epochs):
            assert value == "" or (value.isascii() and value.isdecimal())
        for value in (command.model, command.project):
            assert all(
                letter.isascii() and (letter.isalnum() or letter in "._-") for letter in value
            )
