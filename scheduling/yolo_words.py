"""The words of `yolo train` as people type them: their names, and files of them.

A word that ultralytics does not know ends a training in its first second, hours after it was
queued; so what is nearly one of its settings is refused here. The names are those of one version: a
word that is like none of them may be a newer version's, and is only doubted.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Final

import yaml

from gpuwarden import named_files
from gpuwarden.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SETTINGS: Final = frozenset(
    [
        "agnostic_nms",
        "amp",
        "angle",
        "augment",
        "auto_augment",
        "batch",
        "bgr",
        "box",
        "cache",
        "cfg",
        "channels_last",
        "classes",
        "close_mosaic",
        "cls",
        "cls_pw",
        "cls_remap",
        "compile",
        "conf",
        "copy_paste",
        "copy_paste_mode",
        "cos_lr",
        "cutmix",
        "data",
        "degrees",
        "deterministic",
        "device",
        "dfl",
        "dgrad",
        "dis",
        "distill_model",
        "dlam",
        "dlog",
        "dnn",
        "dropout",
        "dynamic",
        "embed",
        "epochs",
        "erasing",
        "exist_ok",
        "fliplr",
        "flipud",
        "format",
        "fraction",
        "freeze",
        "hsv_h",
        "hsv_s",
        "hsv_v",
        "imgsz",
        "iou",
        "kobj",
        "line_width",
        "lr0",
        "lrf",
        "mask_ratio",
        "max_det",
        "mixup",
        "mode",
        "model",
        "momentum",
        "mosaic",
        "multi_scale",
        "name",
        "nbs",
        "nms",
        "opset",
        "optimize",
        "optimizer",
        "overlap_mask",
        "patience",
        "perspective",
        "plots",
        "pose",
        "pretrained",
        "profile",
        "project",
        "quantize",
        "rect",
        "resume",
        "retina_masks",
        "rle",
        "save",
        "save_conf",
        "save_crop",
        "save_frames",
        "save_json",
        "save_period",
        "save_txt",
        "scale",
        "seed",
        "shear",
        "show",
        "show_boxes",
        "show_conf",
        "show_labels",
        "simplify",
        "single_cls",
        "source",
        "split",
        "stream_buffer",
        "task",
        "time",
        "tracker",
        "translate",
        "val",
        "verbose",
        "vid_stride",
        "visualize",
        "warmup_bias_lr",
        "warmup_epochs",
        "warmup_momentum",
        "weight_decay",
        "workers",
        "workspace",
    ]
)
"""Of ultralytics 8.4.190, cfg/default.yaml."""
TASKS: Final = ("detect", "segment", "semantic", "depth", "classify", "pose", "obb")
_ALIKE: Final = 0.8
_MOST_BYTES: Final = 1024 * 1024
_RESERVED: Final = ("device", "resume")


def spelt_out(words: Sequence[str]) -> tuple[str, ...]:
    """Words each as KEY=VALUE, also of a line such as `yolo detect train model=...`."""
    found = [word for word in words if word not in ("yolo", "train")]
    return tuple(f"task={word}" if word in TASKS else word for word in found)


def misspelt(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What ultralytics would refuse, and what it might; sentences.

    Args:
        words: each KEY=VALUE.
    """
    wrong, doubted = [], []
    for key in dict.fromkeys(word.partition("=")[0] for word in words):
        if key in SETTINGS:
            continue
        alike = difflib.get_close_matches(key, sorted(SETTINGS), n=1, cutoff=_ALIKE)
        if alike:
            wrong.append(f"{key}= is no setting of a training; did you mean {alike[0]}=?")
        else:
            doubted.append(f"{key}= is no setting that ultralytics 8.4.190 knows")
    return wrong, doubted


def settings_of(words: Sequence[str]) -> dict[str, str]:
    """Setting -> value as text: the last of each word, and what `cfg=` names besides.

    Raises:
        InvalidInput: the file is none, or sets what is not the user's to set.
    """
    said = dict(word.partition("=")[::2] for word in words)
    file = said.get("cfg")
    if not file or file.lower() == "none":
        return said
    read = _settings_file(file)
    for key in _RESERVED:
        if read.get(key):
            raise InvalidInput(f"cfg={file} sets {key}, which is not said to a job: leave it out")
    return {key: _as_text(value) for key, value in read.items() if value is not None} | said


def _settings_file(name: str) -> Mapping[str, Any]:
    path = named_files.named(name)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InvalidInput(f"cfg={name}: it is too large for a file of settings")
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise InvalidInput(f"cfg={name}: it cannot be read: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise InvalidInput(f"cfg={name}: it is no file of settings, such as `yolo copy-cfg` writes")
    return content


def _as_text(value: object) -> str:
    return ",".join(str(item) for item in value) if isinstance(value, list) else str(value)
