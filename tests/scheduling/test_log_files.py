"""The end of a job's log, whatever a job has made of the file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.scheduling.log_files import last_lines, opened_log

if TYPE_CHECKING:
    from pathlib import Path


def test_the_last_lines_are_shown_and_progress_bars_as_they_ended(tmp_path: Path) -> None:
    """What follows is read on from there."""
    log = tmp_path / "log"
    log.write_bytes(b"one\ntwo\n 1%\r 99%\r100%\n\xff\n")
    with opened_log(log) as file:
        assert last_lines(file, 3) == ["two", "100%", "�"]
        with log.open("ab") as more:
            more.write(b"new\n")
        assert file.readlines() == [b"new\n"]


def test_what_is_no_log_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe would be waited for, and a link leads elsewhere."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/passwd")
    for name in ("pipe", "link"):
        with pytest.raises(RefusedAction):
            opened_log(tmp_path / name)
    with pytest.raises(ServiceUnavailable, match="has not begun"):
        opened_log(tmp_path / "log")
