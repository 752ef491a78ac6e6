"""Where pictures go, and what is made of them on the way: few colours, few bytes."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
MOST_BYTES = 300_000
"""A picture of a page: more would make the repository and its README slow."""

COLOURS = 96
"""Enough for a page of text and charts: more would only tell shades of letters' edges apart."""


class PictureTooLargeError(ValueError):
    """A picture has more bytes than the repository should carry."""


@dataclass(slots=True)
class Album:
    """A folder of pictures, and what was put into it.

    Attributes:
        folder: where they go.
        made: the files, in the order in which they were made.
    """

    folder: Path = FOLDER
    made: list[Path] = field(default_factory=list)

    def put(self, name: str, png: bytes) -> Path:
        """Keep a screenshot as a PNG of few colours.

        Args:
            name: of the file, without its ending.
            png: as the browser took it.

        Raises:
            PictureTooLargeError: if it is larger than `MOST_BYTES` even so.
        """
        whole = Image.open(io.BytesIO(png)).convert("RGB")
        # no dithering: it would speckle flat areas, and make them larger
        few = whole.quantize(COLOURS, dither=Image.Dither.NONE)
        kept = io.BytesIO()
        few.save(kept, "PNG", optimize=True)
        if len(kept.getvalue()) > MOST_BYTES:
            raise PictureTooLargeError(
                f"{name}.png has {len(kept.getvalue()) // 1000} kB, {MOST_BYTES // 1000} kB are "
                "the most: show less of the page, or fewer series"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name}.png"
        path.write_bytes(kept.getvalue())
        self.made.append(path)
        return path
