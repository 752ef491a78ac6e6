"""A terminal in the hands of `gpuwarden top`: its size, its keys, and only what changed painted."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from typing import TYPE_CHECKING, Any, Final, Self

from gpuwarden.ruleengine.top_layouts import Style

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType, TracebackType

    from gpuwarden.ruleengine.top_layouts import Line

NAMES: Final = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1bOC": "right",
    "\x1bOD": "left",
    "\x1b[5~": "pageup",
    "\x1b[6~": "pagedown",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "\x1b[1~": "home",
    "\x1b[4~": "end",
    "\x1bOH": "home",
    "\x1bOF": "end",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x15": "clear",
    "\x06": "pagedown",
    "\x02": "pageup",
}
"""What terminals send for keys that are no character -> the key's name."""
_MAX_SEQUENCE = 16
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE = "\x1b[0m\x1b[?25h\x1b[?1049l"
_COLOURS = {
    Style.PLAIN: "",
    Style.FAINT: "2",
    Style.STRONG: "1",
    Style.GOOD: "32",
    Style.WARNING: "33",
    Style.BAD: "1;31",
    Style.TITLE: "7",
    Style.CHOSEN: "1;7",
}
_WITHOUT = {**_COLOURS, Style.GOOD: "", Style.WARNING: "1", Style.BAD: "1"}
_WAKE = b"\0"
"""In the pipe that signals are written to: somebody of this process has news."""
_WATCHED = (signal.SIGWINCH, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)


class Keys:
    """Bytes of a terminal as keys; what is not whole yet waits for the rest."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes, *, last: bool = False) -> list[str]:
        """The keys that are whole now.

        Args:
            data: what was read.
            last: nothing more came for a moment: an escape character is the key itself.
        """
        text = self._rest + data
        keys: list[str] = []
        while text:
            taken = _first_key(text, last=last)
            if taken is None:
                break
            key, length = taken
            text = text[length:]
            if key:
                keys.append(key)
        self._rest = text[-_MAX_SEQUENCE:]
        return keys

    @property
    def waiting(self) -> bool:
        """Whether a key has begun."""
        return bool(self._rest)


def _first_key(data: bytes, *, last: bool) -> tuple[str, int] | None:
    """The first key and its length in bytes; an empty name for what is no key of ours."""
    if data[0] == 0x1B:
        return _sequence(data, last=last)
    lead = data[0]
    size = 1 if lead < 0xC2 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    if any(byte & 0xC0 != 0x80 for byte in data[1:size]):
        return "", 1  # the beginning of a letter without its rest
    if len(data) < size:
        return ("", len(data)) if last else None
    mark = data[:size].decode("utf-8", errors="ignore")
    return (NAMES.get(mark) or (mark if mark.isprintable() else "")), size


def _sequence(data: bytes, *, last: bool) -> tuple[str, int] | None:
    if len(data) == 1:
        return ("escape", 1) if last else None
    if data[1] not in b"[O":
        return "escape", 1  # and then a key of its own
    for length in range(3, min(len(data), _MAX_SEQUENCE) + 1):
        if 0x40 <= data[length - 1] <= 0x7E:
            return NAMES.get(data[:length].decode("ascii", errors="ignore"), ""), length
    return ("", len(data)) if last or len(data) >= _MAX_SEQUENCE else None


def painted(line: Line, *, colour: bool) -> str:
    """A line with what makes a terminal show its styles."""
    codes = _COLOURS if colour else _WITHOUT
    return "".join(
        f"\x1b[{codes[style]}m{text}\x1b[0m" if codes[style] else text for text, style in line
    )


class Screen:
    """The terminal's other screen, from `with` to its end, however that comes.

    Args:
        colour: whether colours are used beside words.
        encoding: of the terminal.
    """

    def __init__(self, *, colour: bool, encoding: str) -> None:
        self._colour = colour
        self._encoding = encoding
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._keys = Keys()
        self._shown: list[str] = []
        self._before: list[Any] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self._wake_in, self._wake_out, self._old_wake = -1, -1, -1
        self.over = False
        """The terminal is gone, or somebody asked this process to leave."""

    def __enter__(self) -> Self:
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._handlers = {number: signal.signal(number, _noted) for number in _WATCHED}
        self._old_wake = signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)
        self._take()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_back()
        signal.set_wakeup_fd(self._old_wake)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _take(self) -> None:
        self._before = termios.tcgetattr(self._in)
        tty.setcbreak(self._in)
        self._shown = []
        self._write(_ENTER)

    def _give_back(self) -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal may be gone
            self._write(_LEAVE)
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._before)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        try:
            found = os.get_terminal_size(self._out)
        except OSError:
            return 80, 24
        return (found.columns or 80), (found.lines or 24)

    def paint(self, lines: Sequence[Line]) -> None:
        """Show these lines; what stands there already is not sent again."""
        texts = [painted(line, colour=self._colour) for line in lines]
        parts = [
            f"\x1b[{number + 1};1H{text}\x1b[K"
            for number, text in enumerate(texts)
            if number >= len(self._shown) or self._shown[number] != text
        ]
        if len(texts) < len(self._shown):
            parts.append(f"\x1b[{len(texts) + 1};1H\x1b[J")
        self._shown = texts
        if parts:
            self._write("".join(parts))

    def wake(self) -> None:
        """Let `wait` return; from any thread."""
        with contextlib.suppress(OSError):
            os.write(self._wake_out, _WAKE)

    def wait(self, seconds: float) -> list[str]:
        """Wait for keys, a signal or `wake`, at most so long.

        Returns:
            The keys that were pressed.
        """
        if self._keys.waiting:
            seconds = min(seconds, 0.05)
        ready, _, _ = select.select([self._in, self._wake_in], [], [], max(0.0, seconds))
        if self._wake_in in ready:
            self._hear(os.read(self._wake_in, 4096))
        if self._in not in ready:
            return self._keys.feed(b"", last=not ready)
        try:
            data = os.read(self._in, 4096)
        except OSError:
            data = b""
        self.over = self.over or not data
        return self._keys.feed(data)

    def _hear(self, numbers: bytes) -> None:
        if signal.SIGTSTP in numbers:
            self._give_back()
            os.kill(os.getpid(), signal.SIGSTOP)
            self._take()  # somebody has sent SIGCONT
        if signal.SIGWINCH in numbers:
            self._shown = []
            self._write("\x1b[2J")
        self.over = self.over or bool({signal.SIGINT, signal.SIGTERM, signal.SIGHUP} & {*numbers})

    def _write(self, text: str) -> None:
        data = memoryview(text.encode(self._encoding, errors="replace"))
        deadline = time.monotonic() + 10.0
        while data and time.monotonic() < deadline:
            try:
                data = data[os.write(self._out, data) :]
            except BlockingIOError:
                select.select([], [self._out], [], 0.1)
            except OSError:
                self.over = True
                return


def _noted(_number: int, _frame: FrameType | None) -> None:
    """The signal's number is in the pipe; here nothing is left to do."""
