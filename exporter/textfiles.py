"""The page as a file for node_exporter's textfile collector, where no further port may be open."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from gpuwarden.exporter.pages import Format
from gpuwarden.exporter.replaced_files import ReplacedFile

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.exporter.sampler import Rendered, Sampler

NAME = "gpuwarden.prom"
_STOP_SECONDS = 0.5


class Textfile:
    """Writes each new page to a folder, from a thread of its own: a disk may hang.

    Whoever reads the file cannot tell how old its values are. So it is replaced as a whole, also by
    a page that says that nothing is known, and is removed at the end.
    """

    def __init__(self, folder: Path, sampler: Sampler, *, interval: float) -> None:
        """Prepare.

        Args:
            folder: node_exporter's `--collector.textfile.directory`.
            sampler: where pages come from.
            interval: seconds between two looks for a new page.
        """
        self._file = ReplacedFile(folder / NAME, mode=0o644, complaint="textfile not written")
        self._sampler = sampler
        self._interval = interval
        self._stop = threading.Event()
        self._written: Rendered | None = None
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="textfile", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self) -> None:
        """Write no more, and remove the file."""
        self._stop.set()
        self._thread.join(_STOP_SECONDS)
        if not self._thread.is_alive():
            with contextlib.suppress(OSError):
                self._file.path.unlink()

    def write(self) -> None:
        """Write the newest page, if it is not there yet."""
        page = self._sampler.page()
        if page is self._written:
            return
        if self._file.write(page.body[Format.TEXT]):
            self._written = page

    def _work(self) -> None:
        # Before the first snapshot there is nothing to say.
        self._sampler.wait(self._interval)
        while not self._stop.is_set():
            self.write()
            self._stop.wait(self._interval)
