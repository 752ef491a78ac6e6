"""The images that jobs may use: which one a training takes, and whether it can run on a card. Pure.

Names are like `yolo:m-cu124`: a size of the models, and the CUDA that the image brings. What CUDA
runs on which cards is NVIDIA's word: a card is older than the first release that knows it, or than
the last that builds for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.diagnostics import did_you_mean
from gpuwarden.errors import RefusedAction
from gpuwarden.estimates import Unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuwarden.estimates import Gpu
    from gpuwarden.scheduling.policies import Image

FIRST_CUDA: Final = {
    "pascal": (8, 0),
    "volta": (9, 0),
    "turing": (10, 0),
    "ampere": (11, 1),  # 11.0 for the A100, 11.1 for GeForce, A10 and A40
    "ada": (11, 8),
    "hopper": (11, 8),
    "blackwell": (12, 8),
    "blackwell-geforce": (12, 8),
}
"""The first release of the CUDA toolkit that builds for an architecture, by its release notes."""
LAST_CUDA: Final = {"pascal": (12, 9), "volta": (12, 9)}
"""The last one; CUDA 13.0 builds for Turing and later."""
_CUDA = re.compile(r"(?:^|[:._-])cu(\d{1,2})(\d)(?:$|[._-])")


@dataclass(frozen=True, slots=True)
class Chosen:
    """An image for a task.

    Attributes:
        image: of the catalogue; None: the policy has none, and the job runs what is installed.
        warnings: what does not go together.
    """

    image: Image | None
    warnings: tuple[str, ...] = ()


def cuda_of(name: str) -> tuple[int, int] | None:
    """The CUDA release in an image's name: (12, 4) of `yolo:m-cu124`; None where none is told."""
    found = _CUDA.search(name)
    return (int(found[1]), int(found[2])) if found else None


def choose(
    catalogue: Sequence[Image], model: str, *, wanted: str | None, gpu: Gpu | Unknown
) -> Chosen:
    """The image that a task uses.

    Args:
        catalogue: the policy's images, and no others.
        model: that is trained, by its plain name.
        wanted: a name or a whole reference of the catalogue; None takes the first that is
            recommended for the model and whose CUDA knows the card.
        gpu: the card.

    Raises:
        RefusedAction: `image`: what is wanted is not in the catalogue; the text lists it.
    """
    if wanted is not None:
        found = next((item for item in catalogue if wanted in (item.name, item.image)), None)
        if found is None:
            raise RefusedAction("image", _foreign(catalogue, wanted))
        return Chosen(found, tuple(_doubts(found, model, gpu)))
    serving = [item for item in catalogue if item.serves(model)]
    fitting = next((item for item in serving if mismatch(item.name, gpu) is None), None)
    if fitting is not None:
        return Chosen(fitting)
    if serving:
        return Chosen(serving[0], tuple(_doubts(serving[0], model, gpu)))
    if catalogue:
        listed = ", ".join(f"{item.name} ({', '.join(item.models)})" for item in catalogue)
        return Chosen(None, (f"no image is recommended for {model}; there are {listed}",))
    return Chosen(None)


def mismatch(name: str, gpu: Gpu | Unknown) -> str | None:
    """Why an image's CUDA does not run on a card; None where it does, or where nothing tells."""
    cuda = cuda_of(name)
    if cuda is None or isinstance(gpu, Unknown):
        return None
    first, last = FIRST_CUDA.get(gpu.architecture), LAST_CUDA.get(gpu.architecture)
    if first is not None and cuda < first:
        return f"its CUDA {_dotted(cuda)} is older than {gpu.name}, which needs {_dotted(first)}"
    if last is not None and cuda > last:
        return f"its CUDA {_dotted(cuda)} no longer runs on {gpu.name}: {_dotted(last)} is the last"
    return None


def _doubts(image: Image, model: str, gpu: Gpu | Unknown) -> Iterable[str]:
    if not image.serves(model):
        yield f"image {image.name} is recommended for {', '.join(image.models)}, not for {model}"
    if (why := mismatch(image.name, gpu)) is not None:
        yield f"image {image.name}: {why}"


def _foreign(catalogue: Sequence[Image], wanted: str) -> str:
    if not catalogue:
        return (
            f"image {wanted!r} is not allowed: the policy lists no images, so that jobs run what "
            "is installed; its `images` would allow it"
        )
    names = [item.name for item in catalogue]
    hint = did_you_mean(wanted, names)
    lines = [f"  {item.name:<20} {item.image}" for item in catalogue]
    return "\n".join(
        [f"image {wanted!r} is not among those that the policy allows{_said(hint)}:", *lines]
    )


def _said(hint: str | None) -> str:
    return f"; {hint}" if hint else ""


def _dotted(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
