"""Profiles: what a training should need on a card, as operators write it or as it was learnt.

The engine compares jobs with them, the scheduler estimates by them: docs/profiles.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, model_validator
from pydantic_core import PydanticCustomError

from gpuwarden.checked_files import check_file
from gpuwarden.fields import Bytes, ImagesPerSecond, Ratio, Strict, Words, as_tuple

if TYPE_CHECKING:
    from pathlib import Path


class Profile(Strict):
    """What a model with these parameters should need on this hardware."""

    model: Words
    """Model name without directory and suffix, such as yolov8m."""
    batch: Annotated[StrictInt, Field(ge=1)]
    """Images per step over all ranks."""
    imgsz: Annotated[StrictInt, Field(ge=1)]
    """Image size in pixels."""
    hardware: Words
    """Product name of the cards, as NVML gives it."""
    gpus: Annotated[StrictInt, Field(ge=1)] = 1
    """Cards that the batch is spread over."""
    amp: StrictBool | None = None
    """Automatic mixed precision; not given is either."""
    gpu_memory: Bytes | None = None
    """Per card."""
    gpu_utilization: Annotated[Ratio, Field(gt=0, le=1)] | None = None
    """Per card, mean while training."""
    throughput: ImagesPerSecond | None = None
    """Over all cards, while training."""
    tolerance: Annotated[Ratio, Field(gt=0)] | None = None
    """Known spread of this profile; widens a rule's tolerance, never narrows it."""
    team: str = ""
    """If given, only this team's rules go by it; in a team's file it is the file's."""

    @model_validator(mode="after")
    def _some(self) -> Self:
        if self.gpu_memory is None and self.gpu_utilization is None and self.throughput is None:
            raise PydanticCustomError(
                "GW111", "needs at least one of gpu_memory, gpu_utilization and throughput", {}
            )
        return self

    @property
    def expected(self) -> dict[str, float]:
        """Signal -> expected value in base units."""
        given = {
            "throughput": self.throughput,
            "gpu_memory": self.gpu_memory,
            "gpu_utilization": self.gpu_utilization,
        }
        return {name: value for name, value in given.items() if value is not None}


class ProfileFile(Strict):
    """A file of profiles alone, as `gpuwarden profiles learn` writes it."""

    version: Literal[1]
    """Of the format."""
    profiles: Annotated[tuple[Profile, ...], BeforeValidator(as_tuple)]
    """What trainings need here."""


def load_profiles(path: Path) -> tuple[Profile, ...]:
    """Read a file of profiles.

    Raises:
        InvalidInput: it cannot be read, or is none; its text shows every mistake with its line.
    """
    return check_file(path, ProfileFile, lambda _content, _root: ()).usable().profiles
