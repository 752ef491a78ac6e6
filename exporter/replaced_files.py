"""Files that others read while they are written anew: replaced as a whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from pathlib import Path

_logger = structlog.get_logger(__name__)


class ReplacedFile:
    """A file of ours in a folder that others may write."""

    def __init__(
        self, path: Path, *, mode: int, complaint: str, folder_mode: int | None = None
    ) -> None:
        """Prepare; nothing is written yet.

        Args:
            path: of the file.
            mode: its permissions.
            complaint: what the log calls it if it cannot be written, once for each reason.
            folder_mode: permissions of its folder, where that is made if it is not there.
        """
        self.path = path
        self._mode = mode
        self._complaint = complaint
        self._folder_mode = folder_mode
        self._told = ""

    def write(self, body: bytes) -> bool:
        """Replace it; False where that cannot be done, and it stays as it was."""
        # Hidden, and of another ending: nobody who reads the folder takes it for the file.
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            if self._folder_mode is not None:
                self.path.parent.mkdir(mode=self._folder_mode, exist_ok=True)
            # In a folder that others may write, nothing that waits there is written through.
            temporary.unlink(missing_ok=True)
            with temporary.open("xb") as file:
                file.write(body)
                os.fchmod(file.fileno(), self._mode)
            temporary.replace(self.path)
        except OSError as error:
            reason = error.strerror or str(error)
            if reason != self._told:
                self._told = reason
                _logger.warning(self._complaint, file=str(self.path), error=reason)
            with contextlib.suppress(OSError):
                temporary.unlink()
            return False
        self._told = ""
        return True
