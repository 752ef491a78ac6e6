"""How much of one snapshot's time the files of each user may take.

Files are read when they change, and whoever writes thousands of large ones anew every second would
keep the exporter from its work. So each user has an allowance per scan; what is beyond it waits for
the next scan, where it comes first, and keeps nobody else waiting.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

FILES_OF_USER = 256
BYTES_OF_USER = 2 * 1024 * 1024
FILES = 2048
BYTES = 16 * 1024 * 1024
"""All users together: about a third of a second of reading and parsing."""


@dataclass(slots=True)
class Allowance:
    """What is left of one scan."""

    _files: Counter[int] = field(default_factory=Counter)
    _bytes: Counter[int] = field(default_factory=Counter)

    def takes(self, uid: int, size: int) -> bool:
        """Whether a file may still be read; if so, it is counted.

        Args:
            uid: its owner.
            size: in bytes.
        """
        if self._files[uid] >= FILES_OF_USER or self._bytes[uid] + size > BYTES_OF_USER:
            return False
        if self._files.total() >= FILES or self._bytes.total() + size > BYTES:
            return False
        self._files[uid] += 1
        self._bytes[uid] += size
        return True
