"""What the words of a training ask for, as far as an estimate needs to know it.

Only `model` and `data` are looked up, on this machine; nothing is downloaded and no code of a
user's is run. What cannot be known is an `Unknown` with its reason, never a guess.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from gpuwarden import estimate_tables, image_counts, named_files
from gpuwarden.errors import InvalidInput, MissingExtra
from gpuwarden.estimates import MAX_BATCH, OPTIMIZER_STATE_BYTES, ModelCosts, Unknown
from gpuwarden.scheduling import yolo_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Of ultralytics 8.4.190, cfg/default.yaml.
DEFAULT_BATCH: Final = 16
DEFAULT_EPOCHS: Final = 100
DEFAULT_IMGSZ: Final = 640
DEFAULT_CLASSIFY_IMGSZ: Final = 224
AUTOMATIC_SHARE: Final = 0.6
"""Of a card's memory that `batch=-1` aims at, by ultralytics."""
NOMINAL_BATCH: Final = 64
"""`nbs`: up to here ultralytics sums gradients over several batches before each step."""
_COCO_CLASSES: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is to be trained.

    Attributes:
        model_name: as it is spoken of: without folder and suffix.
        model: what an image of it costs, or why that is not known.
        batch: images per step over all cards; None: ultralytics chooses it when it starts.
        memory_share: of the card that it chooses by, where it does.
        imgsz: pixels of the images' sides.
        largest_imgsz: likewise of the largest, where the size changes from batch to batch.
        amp: mixed precision.
        optimizer: by ultralytics, in lower case.
        classes: of the data set; 80 where it does not say.
        epochs: over it.
        seconds: for which it trains, whatever the epochs; None: as long as they take.
        images: of one epoch, or why they could not be counted.
        validated: images of the validation after each epoch; 0 without one, None where not known.
        data: as it was said, or empty.
        workers: loader processes for each card.
        absent: files that it needs and that are not in sight here: ultralytics would download them,
            which a training under gpuwarden does not.
        doubts: words that ultralytics may not know.
    """

    model_name: str
    model: ModelCosts | Unknown
    batch: int | None
    memory_share: float
    imgsz: int
    largest_imgsz: int
    amp: bool
    optimizer: str
    classes: int
    epochs: int
    seconds: float | None
    images: int | Unknown
    validated: int | None
    data: str
    workers: int
    absent: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Such as `yolov8m, batch 64, 640 px`."""
        batch = "a batch of its own choice" if self.batch is None else f"batch {self.batch}"
        mixed = "" if self.amp else ", no AMP"
        return f"{self.model_name}, {batch}, {self.imgsz} px{mixed}"


def read_training(
    words: Sequence[str], *, gpus: int, images: int | None = None, imgsz: int | None = None
) -> Training:
    """Read the words of `yolo train`; those that no estimate needs are not looked at.

    Args:
        words: each KEY=VALUE; of a key that is said twice the last counts, as for ultralytics.
        gpus: cards that the batch is spread over.
        images: of one epoch, where the data set is out of sight.
        imgsz: pixels, where no word says them; None is ultralytics' own default.

    Raises:
        InvalidInput: words that ultralytics would refuse, or a data set that is not there; every
            problem, one a line.
    """
    return _Reader(words, gpus).read(images, imgsz)


class _Reader:
    """Reads the words and collects what is wrong with them."""

    def __init__(self, words: Sequence[str], gpus: int) -> None:
        self._said = yolo_words.settings_of(words)
        self._gpus = gpus
        self._problems, self._doubts = yolo_words.misspelt(words)

    def read(self, images: int | None, default_imgsz: int | None) -> Training:
        name = self._said.get("model", "")
        model = _model(name, self._said.get("task"))
        classify = model.task == "classify" if isinstance(model, ModelCosts) else False
        usual = DEFAULT_CLASSIFY_IMGSZ if classify else DEFAULT_IMGSZ
        imgsz = self._imgsz(default_imgsz or usual)
        batch, share = self._batch()
        optimizer = self._said.get("optimizer", "auto").lower()
        if optimizer not in OPTIMIZER_STATE_BYTES:
            known = ", ".join(OPTIMIZER_STATE_BYTES)
            self._problems.append(f"optimizer={self._said['optimizer']} is none of {known}")
        found = Training(
            model_name=model.name if isinstance(model, ModelCosts) else plain_name(name),
            model=model,
            batch=batch,
            memory_share=share,
            imgsz=imgsz,
            largest_imgsz=math.ceil(imgsz * (1 + self._multi_scale())),
            amp=self._truth("amp", default=True),
            optimizer=optimizer,
            classes=self._classes(),
            epochs=self._whole("epochs", DEFAULT_EPOCHS, least=1, most=1_000_000),
            seconds=self._hours(),
            images=self._images(images),
            validated=self._validated() if self._truth("val", default=True) else 0,
            data=self._said.get("data", ""),
            workers=self._whole("workers", 8, least=0, most=1024),
            absent=tuple(self._absent(name)),
            doubts=tuple(self._doubts),
        )
        if self._problems:
            raise InvalidInput("\n".join(dict.fromkeys(self._problems)))
        return found

    def _whole(self, key: str, default: int, *, least: int, most: int) -> int:
        text = self._said.get(key)
        if text is None or text.lower() == "none":
            return default
        if re.fullmatch(r"-?[0-9]{1,9}", text) and least <= int(text) <= most:
            return int(text)
        self._problems.append(f"{key}={text}: write a whole number from {least} to {most}")
        return default

    def _imgsz(self, default: int) -> int:
        """The longer side, where two are said: ultralytics trains on squares of it."""
        parts = re.findall(r"[0-9]+", self._said.get("imgsz", ""))
        if len(parts) > 1:
            self._said["imgsz"] = max(parts, key=int)
        return self._whole("imgsz", default, least=32, most=8192)

    def _number(self, key: str) -> float | None:
        text = self._said.get(key)
        if text is None or text.lower() == "none":
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isfinite(value):
            return value
        self._problems.append(f"{key}={text}: write a number")
        return None

    def _truth(self, key: str, *, default: bool) -> bool:
        text = self._said.get(key)
        if text is None:
            return default
        # amp= takes the names of precisions besides.
        choices = {"true": True, "1": True, "fp16": True, "bf16": True}
        choices |= {"false": False, "0": False, "fp32": False}
        if text.lower() not in choices:
            self._problems.append(f"{key}={text}: write True or False")
        return choices.get(text.lower(), default)

    def _batch(self) -> tuple[int | None, float]:
        """The batch, or None with the share of memory by which it will be chosen."""
        text = self._said.get("batch", str(DEFAULT_BATCH))
        value = self._number("batch") if "batch" in self._said else float(DEFAULT_BATCH)
        if value is None:
            return DEFAULT_BATCH, AUTOMATIC_SHARE
        if value == -1 or 0 < value < 1:
            if self._gpus > 1:
                self._problems.append(
                    f"batch={text}: ultralytics chooses no batch for several cards; say how many "
                    "images they share"
                )
            return None, AUTOMATIC_SHARE if value == -1 else value
        if value != int(value) or not 1 <= value <= MAX_BATCH:
            self._problems.append(
                f"batch={text}: write a whole number from 1 to {MAX_BATCH}, -1, or a share such "
                "as 0.7"
            )
            return DEFAULT_BATCH, AUTOMATIC_SHARE
        batch, cards = int(value), self._gpus
        if batch % cards:
            less = max(batch // cards * cards, cards)
            self._problems.append(
                f"batch={batch} cannot be shared among {cards} cards: the batch is that of all "
                f"together; say {less} or {batch // cards * cards + cards}"
            )
        return batch, AUTOMATIC_SHARE

    def _multi_scale(self) -> float:
        """By how much images may be larger than imgsz, as a share of it."""
        text = self._said.get("multi_scale", "0")
        if text.lower() in ("true", "false"):  # older versions: half as large again
            return 0.5 if text.lower() == "true" else 0.0
        value = self._number("multi_scale") or 0.0
        if not 0 <= value <= 1:
            self._problems.append(f"multi_scale={text}: write a share from 0 to 1")
            return 0.0
        return value

    def _hours(self) -> float | None:
        hours = self._number("time")
        if hours is not None and hours <= 0:
            self._problems.append(f"time={self._said['time']}: write hours, more than 0")
            return None
        return None if hours is None else hours * 3600

    def _classes(self) -> int:
        if self._truth("single_cls", default=False):
            return 1
        data = self._said.get("data", "")
        try:
            found = image_counts.count_classes(data) if data else None
        except (InvalidInput, MissingExtra):
            return _COCO_CLASSES  # the images say the same, and what is wrong
        return found or _COCO_CLASSES

    def _images(self, said: int | None) -> int | Unknown:
        data = self._said.get("data", "")
        if said is not None:
            return max(1, math.ceil(said * self._fraction(said)))
        if re.fullmatch(r"[0-9]+", data):
            self._doubts.append(f"data={data} counts as that many images, and is no data set")
        if not data:
            return Unknown("data", "no data= is said, so that its images cannot be counted")
        try:
            count = image_counts.count_images(data)
        except (InvalidInput, MissingExtra) as error:
            said_so = str(error) if str(error).endswith("?") else f"{error}."
            self._problems.append(f"{said_so} Where the data are out of sight, say --images N")
            return Unknown("data", str(error))
        return max(1, math.ceil(count * self._fraction(count)))

    def _absent(self, model: str) -> Iterator[str]:
        path = named_files.named(model)
        if not path.suffix:  # as ultralytics takes a bare name
            path = path.with_suffix(".pt")
        if path.suffix.lower() == ".pt" and not path.exists():
            yield str(path)
        data = self._said.get("data", "")
        if data and not re.fullmatch(r"[0-9]+", data) and not named_files.named(data).exists():
            yield data

    def _fraction(self, count: int) -> float:
        value = self._number("fraction")
        if value is None:
            return 1.0
        if value <= 0:
            self._problems.append(f"fraction={self._said['fraction']}: write a share, such as 0.5")
            return 1.0
        return min(1.0, value if value <= 1 else value / count)

    def _validated(self) -> int | None:
        data = self._said.get("data", "")
        try:
            return image_counts.count_images(data, split="val") if data else None
        except (InvalidInput, MissingExtra):
            return None


def plain_name(model: str) -> str:
    """A model's name without folder and suffix, in lower case."""
    return re.sub(r"\.(pt|pth|ya?ml|onnx)$", "", PurePath(model).name.lower())


def _model(name: str, task: str | None) -> ModelCosts | Unknown:
    path = named_files.named(name)
    if path.suffix.lower() in (".yaml", ".yml") and path.is_file():
        # A file of that name need not be what the table measured under it.
        return Unknown(
            "model",
            f"{name} is a model of your own, of which nothing is known here: gpuwarden estimate "
            f"model={name} measures it where ultralytics is installed",
        )
    found = estimate_tables.find_model(name, task)
    if isinstance(found, Unknown) and (base := named_files.trained_from(path)) is not None:
        found = estimate_tables.find_model(base, task)
    return found
