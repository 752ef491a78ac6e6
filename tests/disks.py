"""A file system of a test's own, small enough to be filled."""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A tmpfs of one MiB; the test is skipped where this user may mount none."""
    folder.mkdir()
    mount = ["/bin/mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, timeout=30, capture_output=True).returncode:
        pytest.skip("to mount a file system takes root")
    try:
        yield folder
    finally:
        subprocess.run(["/bin/umount", str(folder)], check=True, timeout=30)
