"""A terminal for tests: a program behind a pty, and the screen that it has painted."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_CONTROL = re.compile(rb"\x1b\[(\??)([0-9;]*)([A-Za-z])")
SECONDS = 40.0
"""How long a picture may take on a busy machine."""


class Terminal:
    """What a program has painted, as a person would see it.

    Only what `gpuwarden top` sends is understood; anything else fails the test, for a terminal
    would obey it too.

    Args:
        process: the program.
        master: the pty's other end.
        size: columns and lines.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], master: int, size: tuple[int, int]
    ) -> None:
        self.process = process
        self._master = master
        self._columns, self._lines = size
        self._rows: dict[int, str] = {}
        self._cursor = 1
        self._bytes = b""
        self.alternate = False
        self.cursor_hidden = False
        self.codes: set[str] = set()
        """Every style that was used."""
        self.sent = 0
        """Bytes that came."""

    @property
    def text(self) -> str:
        """The screen, line by line."""
        last = max(self._rows, default=0)
        return "\n".join(self._rows.get(number, "").rstrip() for number in range(1, last + 1))

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Pull at the window's corner."""
        self._columns, self._lines = columns, lines
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    def until(self, holds: Callable[[str], bool], seconds: float = SECONDS) -> str:
        """Read on until the screen is as wanted, and return it."""
        end = time.monotonic() + seconds
        while not holds(self.text):
            if time.monotonic() > end or not self._read(end - time.monotonic()):
                raise AssertionError(f"never came:\n{self.text}\n{self._bytes!r}")
        return self.text

    def ended(self, seconds: float = SECONDS) -> int:
        """Read to the program's end, and return its status."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._read(end - time.monotonic()):
            pass
        return self.process.wait(timeout=seconds)

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, seconds))
        if not ready:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux: the program has closed its end
            return False
        self.sent += len(data)
        self._bytes += data
        self._take()
        return bool(data)

    def _take(self) -> None:
        while self._bytes:
            if self._bytes[0] == 0x1B:
                found = _CONTROL.match(self._bytes)
                if found is None:
                    assert len(self._bytes) < 32, self._bytes[:32]
                    return
                self._bytes = self._bytes[found.end() :]
                self._obey(found[1] == b"?", found[2].decode(), found[3].decode())
                continue
            end = self._bytes.find(b"\x1b")
            part = self._bytes if end < 0 else self._bytes[:end]
            try:
                text = part.decode()
            except UnicodeDecodeError:
                return  # the rest of a letter is to come
            self._bytes = self._bytes[len(part) :]
            if self.alternate:
                assert text.isprintable(), repr(text)
                self._rows[self._cursor] = self._rows.get(self._cursor, "") + text
            else:
                for line in text.splitlines(keepends=True):
                    self._rows[self._cursor] = self._rows.get(self._cursor, "") + line.strip("\r\n")
                    self._cursor += line.endswith("\n")

    def _obey(self, private: bool, numbers: str, letter: str) -> None:
        if private:
            on = letter == "h"
            if numbers == "1049":
                self.alternate = on
                self._rows, self._cursor = {}, 1
            elif numbers == "25":
                self.cursor_hidden = not on
        elif letter == "H":
            line, column = map(int, numbers.split(";"))
            assert column == 1
            # What was on its way when the window was pulled smaller lands on the last line.
            line = min(line, self._lines)
            self._cursor = line
            self._rows[line] = ""
        elif letter == "J":
            self._rows = (
                {}
                if numbers == "2"
                else {line: text for line, text in self._rows.items() if line < self._cursor}
            )
        elif letter == "m":
            self.codes.add(numbers)
        else:
            assert letter == "K", letter


@contextlib.contextmanager
def terminal(
    command: Sequence[str],
    *,
    size: tuple[int, int] = (100, 24),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Terminal]:
    """Run a program in a terminal; it is ended with the context."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    known = {name: text for name, text in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**known, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **(environment or {})},
    )
    os.close(slave)
    try:
        yield Terminal(process, master, size)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(master)
