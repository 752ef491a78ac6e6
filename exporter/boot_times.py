"""When this node was booted, for who asks with each snapshot."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gpuwarden.exporter.processes import PROC, boot_time

if TYPE_CHECKING:
    from pathlib import Path


class BootTime:
    """`boot_time` for who asks often: /proc/stat grows with cores and interrupts."""

    def __init__(self, proc: Path = PROC) -> None:
        """Read nothing yet.

        Args:
            proc: where procfs is mounted.
        """
        self._proc = proc
        self._offset: float | None = None
        self._booted = 0.0

    def read(self) -> float:
        """Unix time of boot; looked up again when the wall clock was set."""
        offset = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        if self._offset is None or abs(offset - self._offset) > 0.1:
            self._booted, self._offset = boot_time(self._proc), offset
        return self._booted
