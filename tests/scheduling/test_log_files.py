"""The end of a job's log, whatever a job has made of the file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.scheduling.log_files import last_lines, opened_log, shown_line

if TYPE_CHECKING:
    from pathlib import Path


def test_colours_are_left_out_and_what_else_a_terminal_obeys_is_not_let_through() -> None:
    """As ultralytics writes; a title of the window, say, is no colour, and is left to be hidden."""
    assert shown_line(b"  1/30\r\x1b[K\x1b[1;34m 30/30 done\x1b[0m\r\n") == " 30/30 done"
    assert shown_line(b"\x1b]0;gotcha\x07") == "\x1b]0;gotcha\x07"


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
