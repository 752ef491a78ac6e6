"""`gpuwarden train` on several devices: starts the ranks, and leaves none behind.

The launcher imports no torch. It starts one process per device, each in a group of its own, passes
signals on, labels what ranks other than the first say, and ends with the status that the training
has: rank 0 speaks for it. However it ends, no rank and no loader worker is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Self

from gpuwarden import job_files
from gpuwarden.errors import InvalidInput
from gpuwarden.trainer import ranks
from gpuwarden.trainer.leaving import INSISTENCE, PATIENT_SIGNALS, REPEAT_SECONDS, SIGNALS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

log = logging.getLogger(__name__)

PEER_SECONDS = 10.0
"""How long the other ranks have when one has failed: they cannot go on without it."""
MAX_RANKS = 64
_TOGETHER_SECONDS = 1.0
"""So far apart ranks may end that leave together."""
_MAX_LINE = 64 * 1024
_INTERRUPTED = 130
_LEFT = (job_files.EXIT_REQUEUE, job_files.EXIT_HOLD, job_files.EXIT_NOT_RESUMABLE)


# ---------------------------------------------------------------------------------------------
# What was asked for


def devices_of(words: Sequence[str], nproc: int | None) -> tuple[str, ...]:
    """The device of each rank that a command asks for.

    Args:
        words: of `yolo train`, as typed.
        nproc: number of ranks, if that was said.

    Returns:
        `cpu` or an index per rank; empty if one process is to train, whatever its device.

    Raises:
        InvalidInput: the two contradict one another, or the devices are of no known kind.
    """
    said = _word(words, "device")
    text = re.sub(r"[\s\[\]()'\"]", "", said or "").lower()
    items = [item.removeprefix("cuda:") for item in text.split(",") if item]
    several = len(items) > 1
    if nproc is None and not several:
        return ()
    if not all(item.isdecimal() for item in items) and items != ["cpu"]:
        raise InvalidInput(
            f"device={said}: several processes train on cards that are named by number, such as "
            "device=0,1, or on the CPU: --nproc 2 device=cpu"
        )
    if len(set(items)) != len(items):
        raise InvalidInput(f"device={said} names a card twice")
    if nproc is None:
        nproc = len(items)
    if not 1 <= nproc <= MAX_RANKS:
        raise InvalidInput(f"{nproc} ranks: from 1 to {MAX_RANKS} can be launched")
    if items == ["cpu"]:
        return ("cpu",) * nproc if nproc > 1 else ()
    if not items:
        items = [str(number) for number in range(nproc)]
    if len(items) != nproc:
        raise InvalidInput(f"--nproc {nproc} with device={said}: one process per card, please")
    return tuple(items) if nproc > 1 else ()


def _word(words: Sequence[str], name: str) -> str | None:
    """The value of the last `name=value`, also where the shell was given spaces around `=`."""
    text = "\0".join(words)
    found = re.findall(rf"(?:^|\0)(?:--)?{name}\0?=\0?([^\0]*)", text)
    return found[-1].removesuffix(",") if found else None


def rank_environment(
    devices: Sequence[str], rank: int, *, port: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """The environment of one rank, which decides what torch will see when it is imported.

    Args:
        devices: of all ranks.
        rank: whose.
        port: of the rendezvous, on the loopback interface.
        environ: the launcher's own.

    Raises:
        InvalidInput: the card is not among those that the launcher was given.
    """
    world = str(len(devices))
    environment = {
        **environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    # As torchrun: the ranks' thread pools would else fight for the cores.
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if devices[rank] == "cpu":
        environment[ranks.DEVICE_VARIABLE] = "cpu"
        return environment
    # A rank that sees only its own card cannot leave a context on another's.
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        chosen = devices[rank]
    else:
        cards = [card.strip() for card in visible.split(",") if card.strip()]
        if int(devices[rank]) >= len(cards):
            raise InvalidInput(
                f"device={devices[rank]}: $CUDA_VISIBLE_DEVICES names {len(cards)} card(s), "
                f"counted from 0: {visible!r}"
            )
        chosen = cards[int(devices[rank])]
    environment["CUDA_VISIBLE_DEVICES"] = chosen
    environment[ranks.DEVICE_VARIABLE] = "0"
    return environment


# ---------------------------------------------------------------------------------------------
# The ranks


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    line: socket.socket
    output: IO[bytes]
    text: bytes = b""
    status: int | None = None
    killed: bool = False


@dataclass
class Launcher:
    """Runs the ranks of one training.

    Attributes:
        command: of a rank, the same for each.
        devices: one per rank, see `devices_of`.
        grace: seconds from the first request to leave until what is left is killed.
        patience: seconds that the other ranks have when one has failed, or rank 0 has ended.
        patient: the ranks finish their epoch after one of `PATIENT_SIGNALS`: it starts no grace.
    """

    command: Sequence[str]
    devices: Sequence[str]
    grace: float
    patience: float = PEER_SECONDS
    patient: bool = False
    _ranks: list[_Rank] = field(default_factory=list)
    _deadline: float = float("inf")
    _told_at: float = float("inf")
    _why: str = ""
    _asked: bool = False
    _insisted: bool = False
    _signals: list[int] = field(default_factory=list)
    _counted: int = 0
    _counted_time: float = 0.0
    _durable: bool = False
    _hold: bool = False
    _failed: _Rank | None = None

    def run(self) -> int:
        """Start the ranks, wait for their end; returns the training's exit status.

        Raises:
            InvalidInput: a device that is not there.
        """
        with _Wakeups(self._signals) as wakeups, selectors.DefaultSelector() as selector:
            selector.register(wakeups.reader, selectors.EVENT_READ, None)
            try:
                self._start()
                for rank in self._ranks:
                    selector.register(rank.output, selectors.EVENT_READ, rank)
                    selector.register(rank.line, selectors.EVENT_READ, rank)
                while any(rank.status is None for rank in self._ranks):
                    self._wait(selector, wakeups)
                    self._forward()
                    self._note_ends()
                    if time.monotonic() >= self._told_at:
                        self._told_at = float("inf")
                        self._signal_all(signal.SIGTERM)
                    if time.monotonic() >= self._deadline:
                        self._kill_rest()
            finally:
                self._sweep()
            self._drain()
        return self._verdict()

    def _start(self) -> None:
        with socket.socket() as store:
            store.bind(("127.0.0.1", 0))
            store.listen(2 * MAX_RANKS)
            port = store.getsockname()[1]
            environments = [
                rank_environment(self.devices, rank, port=port, environ=os.environ)
                for rank in range(len(self.devices))
            ]
            # A rank takes its signals when it is ready for them: see `ranks.Line.bind`.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                for number, environment in enumerate(environments):
                    self._ranks.append(self._start_one(number, environment, store))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        log.info("%d ranks on %s", len(self._ranks), ", ".join(self.devices))

    def _start_one(self, number: int, environment: dict[str, str], store: socket.socket) -> _Rank:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            passed = (theirs.fileno(), store.fileno()) if number == 0 else (theirs.fileno(),)
            environment[ranks.LAUNCHER_VARIABLE] = (
                f"{os.getpid()}:{theirs.fileno()}:{passed[-1]}:{self.grace:g}"
            )
            process = subprocess.Popen(
                self.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                # Rank 0 has standard output to itself: its progress bar, and the log behind it.
                stdout=None if number == 0 else subprocess.PIPE,
                stderr=subprocess.PIPE if number == 0 else subprocess.STDOUT,
                pass_fds=passed,
                process_group=0,
            )
        output = process.stderr if number == 0 else process.stdout
        if output is None:
            raise RuntimeError("the rank's output was to be a pipe")
        os.set_blocking(output.fileno(), False)
        ours.settimeout(0)
        return _Rank(number, process, ours, output)

    # -- while they run

    def _wait(self, selector: selectors.BaseSelector, wakeups: _Wakeups) -> None:
        left = min(self._deadline, self._told_at) - time.monotonic()
        for key, _events in selector.select(min(max(left, 0.0), 1.0)):
            rank = key.data
            if rank is None:
                wakeups.clear()
            elif key.fileobj is rank.output:
                if not self._relay(rank):
                    selector.unregister(rank.output)
            elif not self._listen(rank):
                selector.unregister(rank.line)

    def _relay(self, rank: _Rank) -> bool:
        """Pass a rank's output on, line by line; returns whether more may come."""
        try:
            part = os.read(rank.output.fileno(), _MAX_LINE)
        except BlockingIOError:
            return True
        *lines, rank.text = (rank.text + part).split(b"\n")
        if rank.text and (not part or len(rank.text) >= _MAX_LINE):
            lines.append(rank.text)
            rank.text = b""
        if lines:
            label = f"[rank {rank.number}] ".encode()
            _write_error(b"".join(label + line.rstrip(b"\r") + b"\n" for line in lines))
        return bool(part)

    def _listen(self, rank: _Rank) -> bool:
        try:
            words = rank.line.recv(256)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._durable |= ranks.DURABLE in words
        self._hold |= ranks.HOLD in words
        return bool(words)

    def _forward(self) -> None:
        """Pass on the signals that came; the first that lets nobody wait starts the grace."""
        while self._signals:
            number = self._signals.pop(0)
            now = time.monotonic()
            if not self._counted or now - self._counted_time >= REPEAT_SECONDS:
                self._counted, self._counted_time = self._counted + 1, now
            self._signal_all(number)
            if not (self.patient and number in PATIENT_SIGNALS):
                self._ask(signal.Signals(number).name)
            if number == signal.SIGINT and self._counted >= INSISTENCE:
                self._insisted = True
                self._deadline = now

    def _ask(self, why: str) -> None:
        if not self._asked:
            self._asked, self._why = True, why
            self._deadline = min(self._deadline, time.monotonic() + self.grace)

    def _signal_all(self, number: int) -> None:
        for rank in self._ranks:
            if rank.status is None:
                # Not by Popen, which would reap one that has ended, unseen by `_note_ends`: until
                # it is reaped there its number is its own.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, number)

    def _note_ends(self) -> None:
        for rank in self._ranks:
            if rank.status is None and _has_ended(rank.process.pid):
                _kill_group(rank.process.pid)  # its workers, before its number can be another's
                rank.status = rank.process.wait()
                self._note_end(rank)

    def _note_end(self, rank: _Rank) -> None:
        status = rank.status
        if rank.number == 0 and not rank.killed:
            # The others can save nothing without it, and may wait for it for good.
            self._deadline = min(self._deadline, time.monotonic() + self.patience)
        if status == job_files.EXIT_DONE or rank.killed:
            return
        if status in _LEFT:
            # One that was told alone, where it need not ask the others? They mostly leave by
            # themselves, and one that is at its very end should be let end.
            if not self._asked:
                self._ask(f"rank {rank.number} left")
                self._told_at = time.monotonic() + _TOGETHER_SECONDS
            return
        if self._failed is None:
            self._failed = rank
            self._deadline = min(self._deadline, time.monotonic() + self.patience)

    def _kill_rest(self) -> None:
        for rank in self._ranks:
            if rank.status is None and not rank.killed:
                rank.killed = True
                if self._failed is None:
                    log.warning("rank %d is killed: %s", rank.number, self._reason_to_kill())
                _kill_group(rank.process.pid)
        self._deadline = float("inf")

    def _reason_to_kill(self) -> str:
        if self._insisted:
            return "you insist"
        if self._ranks[0].status is not None:
            return "rank 0 has ended, and it does not"
        return f"{self._why}, and {self.grace:g} s later it had not left"

    # -- when they have ended

    def _sweep(self) -> None:
        """Whatever happened: leave no process."""
        for rank in self._ranks:
            if rank.status is None:
                _kill_group(rank.process.pid)
                rank.status = rank.process.wait()

    def _drain(self) -> None:
        for rank in self._ranks:
            while self._relay_rest(rank):
                pass
            self._listen(rank)
            rank.line.close()
            rank.output.close()

    def _relay_rest(self, rank: _Rank) -> bool:
        try:
            part = os.read(rank.output.fileno(), _MAX_LINE)
        except OSError:
            part = b""
        rank.text += part
        if not part and rank.text:
            label = f"[rank {rank.number}] ".encode()
            lines = rank.text.rstrip(b"\n").split(b"\n")
            _write_error(b"".join(label + line.rstrip(b"\r") + b"\n" for line in lines))
            rank.text = b""
        return bool(part)

    def _verdict(self) -> int:
        """The training's exit status: rank 0's, if it ended by itself."""
        first, failed = self._ranks[0], self._failed
        if self._insisted:
            return _INTERRUPTED
        if not first.killed and first.status in (job_files.EXIT_DONE, *_LEFT):
            if first.status == job_files.EXIT_DONE and failed is not None:
                told = _told(failed.status)
                log.warning("rank %d ended with %s, after all was done", failed.number, told)
            return first.status
        of_the_signal = -(first.status or 0) in SIGNALS
        if self._asked and (first.killed or of_the_signal):
            log.warning(
                "the ranks left no word of their own; %s",
                "the newest durable state is continued" if self._durable else "no state was saved",
            )
            if not self._durable:
                return job_files.EXIT_NOT_RESUMABLE
            return job_files.EXIT_HOLD if self._hold else job_files.EXIT_REQUEUE
        # What rank 0 says of itself tells more than the first to fail, but for a lost connection.
        speaks = not first.killed and (first.status or 0) > job_files.EXIT_FAULT
        return self._fault(first if speaks or failed is None else failed)

    def _fault(self, failed: _Rank) -> int:
        status = failed.status or job_files.EXIT_FAULT
        if status == InvalidInput.exit_code:
            return status  # it has said what is wrong
        log.warning(
            "rank %d ended with %s, and the others with it; %s",
            failed.number,
            _told(status),
            "states saved before it stay: the same command goes on from the newest"
            if self._durable
            else "no state had been saved",
        )
        return status if status > 0 else job_files.EXIT_FAULT


def _told(status: int | None) -> str:
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        if -status == signal.SIGKILL:
            return f"{name} (the kernel's, when memory is short; see `dmesg`)"
        return name
    return f"status {status}"


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; it is not reaped, so that its number stays its own."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _write_error(text: bytes) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.flush()
        view = memoryview(text)
        while view:
            view = view[os.write(2, view) :]


class _Wakeups:
    """Within, signals are collected, and wake the selector as children that end do.

    Args:
        signals: gets the numbers of those to pass on.
    """

    def __init__(self, signals: list[int]) -> None:
        self._signals = signals
        self._previous: dict[int, object] = {}
        self.reader, self._writer = socket.socketpair()
        for end in (self.reader, self._writer):
            end.settimeout(0)
        self._wakeup = -1

    def __enter__(self) -> Self:
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._collect)
        self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _ignore)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number in self._previous:
            # The status is decided: the interpreter's end must not be a crash instead.
            signal.signal(number, signal.SIG_IGN if number in SIGNALS else signal.SIG_DFL)
        self.reader.close()
        self._writer.close()

    def _collect(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)

    def clear(self) -> None:
        """Forget the wake-ups so far."""
        with contextlib.suppress(BlockingIOError):
            while self.reader.recv(4096):
                pass


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Its coming alone wakes the selector."""


def rank_command(options: Sequence[str], words: Sequence[str]) -> list[str]:
    """The command of each rank.

    Args:
        options: gpuwarden's own.
        words: of `yolo train`.
    """
    # -P: what `-m` would put first on the path, the current folder, is not the user's choice.
    return [sys.executable, "-P", "-m", "gpuwarden", "train", *options, "--", *words]


def options_said(context: object) -> Iterator[str]:
    """The options of a click command that were typed, as they would be typed again.

    Args:
        context: click's, of the command.
    """
    import click

    if not isinstance(context, click.Context):
        raise TypeError("not a click context")
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        value = context.params.get(name)
        if not isinstance(parameter, click.Option) or value is None:
            continue
        if source is not click.core.ParameterSource.COMMANDLINE:
            continue
        if parameter.is_flag:
            yield (parameter.opts if value else parameter.secondary_opts or parameter.opts)[0]
            continue
        for item in value if parameter.multiple else (value,):
            yield f"{parameter.opts[0]}={item}"
