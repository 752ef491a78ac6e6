"""Descriptors, of which a test leaves this process only so many."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 512


@contextmanager
def descriptors_left(count: int) -> Iterator[list[int]]:
    """Leave this process so many descriptors.

    Args:
        count: how many.

    Yields:
        Those that are taken; closing one gives it back.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield taken
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
