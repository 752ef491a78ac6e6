"""Patterns of files, such as rules/*.yaml: within bounds, so that none can walk all of a disk.

As in a shell `*`, `?` and `[...]` stand for parts of one name, `**` for any number of folders, and
a name that begins with a dot is found only by a pattern that does: editors and mounted ConfigMaps
keep copies under such names.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_ANY_DEPTH: Final = "**"


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far one pattern may lead.

    Attributes:
        names: of files and folders that are looked at.
        files: that are found.
        depth: of the folders that `**` enters.
        seconds: for which it is looked: the engine waits for it.
    """

    names: int = 10_000
    files: int = 1_000
    depth: int = 16
    seconds: float = 2.0


_USUAL: Final = Bounds()


def is_pattern(name: str) -> bool:
    """Whether a name stands for any number of files."""
    return any(char in name for char in "*?[")


def matching(
    pattern: Path, *, bounds: Bounds = _USUAL, now: Callable[[], float] = time.monotonic
) -> tuple[Path, ...]:
    """The files that a pattern finds, sorted; folders and what is no plain file are left out.

    Links to files are followed, and those to folders too unless `**` would lead through them.

    Args:
        pattern: relative to the working directory, or absolute.
        bounds: within which it must stay.
        now: seconds, by which it is bounded in time.

    Raises:
        InvalidInput: it leads to more than may be looked at, or a folder cannot be listed.
    """
    start, parts = Path(pattern.anchor or "."), list(pattern.parts[bool(pattern.anchor) :])
    if parts and parts[-1] == _ANY_DEPTH:
        parts.append("*")
    single = [
        part for index, part in enumerate(parts) if part != _ANY_DEPTH or parts[index - 1] != part
    ]
    return tuple(sorted(_Search(pattern, bounds, now).files(start, single)))


class _Search:
    """One look for the files of one pattern.

    Args:
        pattern: for messages.
        bounds: within which it must stay.
        now: seconds.
    """

    def __init__(self, pattern: Path, bounds: Bounds, now: Callable[[], float]) -> None:
        self._pattern = pattern
        self._bounds = bounds
        self._now = now
        self._until = now() + bounds.seconds
        self._names = 0

    def files(self, start: Path, parts: Sequence[str]) -> set[Path]:
        """What is found below a folder."""
        found: set[Path] = set()
        for path in self._below(start, parts, depth=0):
            found.add(path)
            if len(found) > self._bounds.files:
                raise self._refused(f"finds more than {self._bounds.files:,} files")
        return found

    def _below(self, folder: Path, parts: Sequence[str], *, depth: int) -> Iterator[Path]:
        if not parts:
            return
        first, rest = parts[0], parts[1:]
        if first == _ANY_DEPTH:
            yield from self._below(folder, rest, depth=depth)
            most = self._bounds.depth
            for entry in self._entries(folder):
                if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                    continue
                if depth >= most:
                    raise self._refused(f"leads more than {most} folders deep, below {folder}")
                yield from self._below(folder / entry.name, parts, depth=depth + 1)
            return
        for path in self._named(folder, first):
            if rest:
                yield from self._below(path, rest, depth=depth)
            elif path.is_file():
                yield path

    def _named(self, folder: Path, name: str) -> Iterator[Path]:
        if not is_pattern(name):
            yield folder / name
            return
        fits, hidden = re.compile(translate(name)).match, name.startswith(".")
        for entry in self._entries(folder):
            if fits(entry.name) and hidden == entry.name.startswith("."):
                yield folder / entry.name

    def _entries(self, folder: Path) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    self._names += 1
                    if self._names > self._bounds.names:
                        raise self._refused(f"looks at more than {self._bounds.names:,} names")
                    if self._now() > self._until:
                        raise self._refused(f"takes longer than {self._bounds.seconds:g} s")
                    yield entry
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            why = error.strerror or str(error)
            raise InvalidInput(f"{self._pattern}: {folder} cannot be listed: {why}") from error

    def _refused(self, what: str) -> InvalidInput:
        return InvalidInput(
            f"{self._pattern}: this pattern {what}: name the folder that holds just these files, "
            "such as rules/*.yaml"
        )
