"""Scenarios of the simulated driver: which cards there are, which processes use them, what fails.

A scenario is a text file of one fact per line; `nvml_simulated.c` reads it, and reads it again when
it is replaced. Everything but the facts is real: processes are named by their real pids, and use
their card for as long as they live::

    driver version=550.54.15
    card index=0 uuid=GPU-1 name="NVIDIA A100-SXM4-40GB" memory=42949672960
    process card=0 pid=1234 start=5678 memory=38654705664 sm=97 mem=40 linger=2
    process card=0 pid=1240 memory=8589934592 after=1234     # moves in when 1234 has left
    fault card=1 call=nvmlDeviceGetUtilizationRates code=15
    missing call=nvmlDeviceGetProcessUtilization
    delay call=* milliseconds=0.3
    xid card=0 code=79 count=1          # one more error whenever the count grows by one
    mig card=2 gi=1 ci=0 uuid=MIG-1 profile=1g.5gb      # an instance of a card with mig=1
"""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuwarden.diagnostics import Diagnostic, Severity, Span, did_you_mean, render_text
from gpuwarden.errors import InvalidInput
from gpuwarden.exporter.processes import read_process

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1024**3
MAX_BYTES = 4 * 1024 * 1024
MAX_CARDS = 64
MAX_LINE_BYTES = 2000
NOT_AVAILABLE = -1
"""Memory of a process that the driver does not tell; written `na`."""


@dataclass(frozen=True, slots=True)
class Card:
    """A simulated card.

    Attributes:
        index: NVML's index.
        uuid: made from the index where it is not given.
        name: product name; lone surrogates stand for bytes that are not UTF-8 (surrogateescape).
        memory: bytes in all.
        reserved: bytes that the driver keeps for itself.
        used: bytes used by no process.
        told_used: bytes that the driver says are used, whatever they add up to, or None.
        utilization: per cent, or None: the sum of its live processes, at most 100.
        activity: memory activity in per cent, or None: likewise.
        power: watts, or None: follows the utilization.
        limit: power limit in watts.
        temperature: degrees Celsius.
        energy: millijoules that it had used before this boot.
        throttle: bits of NVML's clocks event reasons.
        ecc_corrected, ecc_uncorrected: volatile errors.
        mig: 1 for MIG mode: no utilization.
        pcie_receive, pcie_transmit: bytes, as the driver's counters stand.
        pcie_bits: 32 or 64: after how many bits these counters wrap.
        nvlink_receive, nvlink_transmit: bytes over all links; counted in KiB.
        pci: bus id, or None: made from the index.
        minor: minor number of its device file, or None: the index.
        persistence: 1 for persistence mode.
        sm_clock, memory_clock: MHz.
        gpm: 1: the card has GPM, as Hopper and what came after it.
        tensor: per cent of time that its tensor cores work, for GPM.
    """

    index: int
    uuid: str = ""
    name: str = "NVIDIA A100-SXM4-40GB"
    memory: int = 40 * GIB
    reserved: int = GIB // 2
    used: int = 0
    told_used: int | None = None
    utilization: int | None = None
    activity: int | None = None
    power: int | None = None
    limit: int = 400
    temperature: int = 41
    energy: int = 0
    throttle: int = 0
    ecc_corrected: int = 0
    ecc_uncorrected: int = 0
    mig: int = 0
    pci: str | None = None
    minor: int | None = None
    persistence: int = 1
    sm_clock: int = 1410
    memory_clock: int = 1215
    pcie_receive: int = 0
    pcie_transmit: int = 0
    pcie_bits: int = 64
    nvlink_receive: int = 0
    nvlink_transmit: int = 0
    gpm: int = 0
    tensor: int = 0

    def __post_init__(self) -> None:
        if not self.uuid:
            made = f"GPU-{self.index:08x}-0000-4000-8000-{self.index:012x}"
            object.__setattr__(self, "uuid", made)


@dataclass(frozen=True, slots=True)
class SimulatedProcess:
    """A real process on a simulated card.

    Attributes:
        card: index of the card.
        pid: a real pid.
        memory: bytes of the card's memory, or NOT_AVAILABLE.
        sm: per cent of time that its kernels run.
        mem: per cent of time that it uses the memory's bus.
        linger: seconds for which its memory stays after its death.
        start: its start ticks; `Scenario.write` fills them in for a process that lives, else the
            line is bound to whatever has the pid when the driver first looks.
        after: the line counts only once this other pid has left the card.
        kind: compute, graphics or mps: the list that it is in.
        sample_age: age of its utilization samples in seconds; negative: they are of the future.
        ghost: 1: listed whether or not there is such a process.
        gi, ci: the GPU instance and compute instance that it runs on, or None: the card itself.
    """

    card: int
    pid: int
    memory: int = 0
    sm: int = 0
    mem: int = 0
    linger: float = 0.0
    start: int | None = None
    after: int | None = None
    kind: str = "compute"
    sample_age: float = 0.0
    ghost: int = 0
    gi: int | None = None
    ci: int | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """A call that does not work.

    Attributes:
        call: NVML's name of the function with its version suffix; a trailing `*` stands for any
            rest.
        code: NVML's return code; 0 lets a list succeed with nothing in it.
        card: index of the card, or None: every card, and calls that concern none.
        times: how many calls fail, counted by each process for itself; None: all.
        count: with code 0: how many rows a list claims to have, though none is written.
    """

    call: str
    code: int
    card: int | None = None
    times: int | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Delay:
    """A call that takes its time.

    Attributes:
        call: as in `Fault`.
        milliseconds: how long it waits before it answers.
        card: as in `Fault`.
    """

    call: str
    milliseconds: float
    card: int | None = None


@dataclass(frozen=True, slots=True)
class SimulatedInstance:
    """A MIG instance of a card in MIG mode.

    Attributes:
        card: index of the card.
        gi: id of its GPU instance.
        uuid: its own, such as MIG-....
        ci: id of its compute instance.
        profile: such as 1g.5gb.
        memory: bytes in all.
        used: bytes used by no process.
        tensor: per cent of time that its tensor cores work, for GPM.
    """

    card: int
    gi: int
    uuid: str
    ci: int = 0
    profile: str = "1g.5gb"
    memory: int = 4864 * 2**20
    used: int = 0
    tensor: int = 0


@dataclass(frozen=True, slots=True)
class SimulatedXid:
    """Errors of a card, told once to whoever listens by then.

    Attributes:
        card: index of the card.
        code: number of the error.
        count: how often it has happened; each one more is one event.
    """

    card: int
    code: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a simulated driver knows.

    Attributes:
        cards: in the order of their indices.
        processes: what runs on them.
        faults: what does not work.
        delays: what takes long.
        missing: functions that this driver does not have.
        driver: version of the driver.
        instances: of cards in MIG mode.
        xids: errors of the cards.
        row_bytes: size of a process in the third version's lists; R535.54 had 32 instead of 24.
    """

    cards: tuple[Card, ...] | list[Card] = ()
    processes: tuple[SimulatedProcess, ...] | list[SimulatedProcess] = ()
    faults: tuple[Fault, ...] | list[Fault] = ()
    delays: tuple[Delay, ...] | list[Delay] = ()
    missing: tuple[str, ...] | list[str] = ()
    driver: str = "550.54.15"
    instances: tuple[SimulatedInstance, ...] | list[SimulatedInstance] = ()
    xids: tuple[SimulatedXid, ...] | list[SimulatedXid] = ()
    row_bytes: int = 24

    def render(self) -> str:
        """The file's content."""
        rows = {} if self.row_bytes == 24 else {"row_bytes": self.row_bytes}
        lines = [_line("driver", {"version": self.driver, **rows})]
        lines += [_line("card", _fields(card)) for card in self.cards]
        lines += [_line("mig", _fields(instance)) for instance in self.instances]
        lines += [_line("process", _fields(process)) for process in self.processes]
        lines += [_line("xid", _fields(xid)) for xid in self.xids]
        lines += [_line("fault", _fields(fault)) for fault in self.faults]
        lines += [_line("missing", {"call": call}) for call in self.missing]
        lines += [_line("delay", _fields(delay)) for delay in self.delays]
        return "".join(f"{line}\n" for line in lines)

    def write(self, path: Path) -> Path:
        """Replace the file atomically; live processes are bound to their start times.

        Args:
            path: the scenario file.

        Returns:
            The same path.

        Raises:
            InvalidInput: the scenario contradicts itself.
        """
        bound = dataclasses.replace(self, processes=[_bound(item) for item in self.processes])
        text = bound.render()
        parse(text, str(path))
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(text)
        temporary.replace(path)
        return path


def _bound(process: SimulatedProcess) -> SimulatedProcess:
    if process.start is not None or process.ghost:
        return process
    found = read_process(process.pid)
    if found is None or found.ended:
        return process
    return dataclasses.replace(process, start=found.start_ticks)


_PLAIN = re.compile(r"[A-Za-z0-9_.:*/+-]+")


_ALWAYS = ("uuid", "name", "memory")


def _fields(
    item: Card | SimulatedInstance | SimulatedProcess | SimulatedXid | Fault | Delay,
) -> dict[str, Any]:
    fields = {}
    for about in dataclasses.fields(item):
        value = getattr(item, about.name)
        mandatory = about.default is dataclasses.MISSING
        if mandatory or about.name in _ALWAYS or value != about.default:
            fields[about.name] = value
    return fields


def _line(kind: str, fields: dict[str, Any]) -> str:
    words = [kind]
    for key, value in fields.items():
        if key == "memory" and value == NOT_AVAILABLE:
            words.append("memory=na")
        elif isinstance(value, str) and not _PLAIN.fullmatch(value):
            words.append(f'{key}="{_escape(value)}"')
        else:
            words.append(f"{key}={value}")
    return " ".join(words)


def _escape(text: str) -> str:
    parts = []
    for byte in text.encode("utf-8", "surrogateescape"):
        char = chr(byte)
        if char in '"\\':
            parts.append(f"\\{char}")
        elif 0x20 <= byte < 0x7F:
            parts.append(char)
        else:
            parts.append(f"\\x{byte:02x}")
    return "".join(parts)


# ---------------------------------------------------------------------------------------------
# Reading: for people's mistakes; the driver itself skips what it does not understand


@dataclass(frozen=True, slots=True)
class _Word:
    key: str
    value: str
    column: int
    end: int


_WORD = re.compile(
    r'(?P<key>[^\s=#"]+)(?:=(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<plain>[^\s"]*)))?'
    r"|(?P<comment>#.*)|(?P<bad>\S)"
)
_ESCAPED = re.compile(rb"\\x([0-9a-fA-F]{2})|\\(.)", re.DOTALL)
_KINDS: dict[str, dict[str, Any]] = {
    kind: {about.name: about.type for about in dataclasses.fields(model)}
    for kind, model in (
        ("card", Card),
        ("mig", SimulatedInstance),
        ("process", SimulatedProcess),
        ("xid", SimulatedXid),
        ("fault", Fault),
        ("delay", Delay),
    )
} | {"driver": {"version": "str", "row_bytes": "int"}, "missing": {"call": "str"}}
_MANDATORY = {
    "card": ("index",),
    "mig": ("card", "gi", "uuid"),
    "process": ("card", "pid"),
    "xid": ("card", "code"),
    "fault": ("call", "code"),
    "delay": ("call", "milliseconds"),
    "driver": ("version",),
    "missing": ("call",),
}


@dataclass(slots=True)
class _Reader:
    file: str
    lines: list[str]
    found: list[Diagnostic] = field(default_factory=list)

    def complain(
        self, line: int, column: int, message: str, *, hint: str | None = None, end: int = 0
    ) -> None:
        span = Span(self.file, line, column, end or None)
        self.found.append(Diagnostic("GW901", Severity.ERROR, span, message, hint))

    def words(self, number: int) -> list[_Word]:
        words = []
        for match in _WORD.finditer(self.lines[number - 1]):
            if match["comment"] is not None:
                break
            column, end = match.start() + 1, match.end() + 1
            if match["bad"] is not None:
                self.complain(
                    number,
                    column,
                    f"unexpected {match['bad']!r}",
                    hint='a line is a kind and key=value words; quote with "..."',
                    end=end,
                )
                return []
            if match["quoted"] is not None:
                value = _unescape(match["quoted"])
            else:
                value = match["plain"] if match["plain"] is not None else ""
            words.append(_Word(match["key"], value, column, end))
        return words

    def fact(self, number: int) -> tuple[str, dict[str, Any]] | None:
        words = self.words(number)
        if not words:
            return None
        kind, known = words[0].key, _KINDS.get(words[0].key)
        if known is None:
            self.complain(
                number,
                words[0].column,
                f"unknown kind of line {kind!r}",
                hint=did_you_mean(kind, _KINDS) or f"known are {', '.join(sorted(_KINDS))}",
                end=words[0].end,
            )
            return None
        values: dict[str, Any] = {}
        before = len(self.found)
        for word in words[1:]:
            self._value(number, word, known, values)
        for name in _MANDATORY[kind]:
            if name not in values and len(self.found) == before:
                self.complain(number, words[0].column, f"{kind} lacks {name}=", end=words[0].end)
        return (kind, values) if len(self.found) == before else None

    def _value(
        self, number: int, word: _Word, known: dict[str, Any], values: dict[str, Any]
    ) -> None:
        wanted = known.get(word.key)
        if wanted is None:
            self.complain(
                number,
                word.column,
                f"unknown field {word.key!r}",
                hint=did_you_mean(word.key, known) or f"known are {', '.join(sorted(known))}",
                end=word.end,
            )
            return
        if word.key in values:
            self.complain(number, word.column, f"{word.key} is given twice", end=word.end)
            return
        try:
            values[word.key] = _converted(word.key, word.value, wanted)
        except ValueError as error:
            self.complain(number, word.column, f"{word.key}: {error}", end=word.end)


def _converted(key: str, text: str, wanted: str) -> Any:
    if key == "memory" and text == "na":
        return NOT_AVAILABLE
    if key == "kind" and text not in ("compute", "graphics", "mps"):
        raise ValueError(f"{text!r} is none of compute, graphics, mps")
    if wanted.startswith("str"):
        return text
    try:
        value = float(text) if wanted.startswith("float") else int(text, 0)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not -(2**62) < value < 2**62 or (value < 0 and key != "sample_age"):
        raise ValueError(f"{text} is outside 0 to 2^62")
    return value


def _unescape(text: str) -> str:
    def plain(match: re.Match[bytes]) -> bytes:
        return bytes([int(match[1], 16)]) if match[1] else match[2]

    return _ESCAPED.sub(plain, text.encode("utf-8", "surrogateescape")).decode(
        "utf-8", "surrogateescape"
    )


def parse(text: str, file: str = "scenario") -> Scenario:
    """Read and check a scenario.

    Args:
        text: the file's content.
        file: its name, for messages.

    Raises:
        InvalidInput: with every mistake, each at its line and column.
    """
    reader = _Reader(file, text.splitlines())
    facts: list[tuple[int, str, dict[str, Any]]] = []
    for number, line in enumerate(reader.lines, 1):
        if len(line.encode("utf-8", "surrogateescape")) > MAX_LINE_BYTES:
            reader.complain(number, 1, f"the line is longer than {MAX_LINE_BYTES} bytes")
        elif (fact := reader.fact(number)) is not None:
            facts.append((number, *fact))
    cards = [(number, Card(**values)) for number, kind, values in facts if kind == "card"]
    processes = [
        (number, SimulatedProcess(**values)) for number, kind, values in facts if kind == "process"
    ]
    instances = [
        (number, SimulatedInstance(**values)) for number, kind, values in facts if kind == "mig"
    ]
    xids = [(number, SimulatedXid(**values)) for number, kind, values in facts if kind == "xid"]
    _check_cards(reader, cards)
    by_index = {card.index: card for _, card in cards}
    placed: list[tuple[int, SimulatedInstance | SimulatedProcess | SimulatedXid]] = [
        *instances,
        *processes,
        *xids,
    ]
    for number, item in placed:
        if item.card not in by_index:
            reader.complain(number, 1, f"there is no card {item.card}", hint="add a card line")
        elif isinstance(item, SimulatedInstance) and not by_index[item.card].mig:
            reader.complain(
                number, 1, f"card {item.card} is not in MIG mode", hint="give its line mig=1"
            )
    if reader.found:
        raise InvalidInput(render_text(reader.found, {file: text}), reader.found)
    drivers = [values for _, kind, values in facts if kind == "driver"]
    about = drivers[-1] if drivers else {}
    return Scenario(
        cards=[card for _, card in cards],
        processes=[process for _, process in processes],
        faults=[Fault(**values) for _, kind, values in facts if kind == "fault"],
        delays=[Delay(**values) for _, kind, values in facts if kind == "delay"],
        missing=[values["call"] for _, kind, values in facts if kind == "missing"],
        driver=about.get("version", "550.54.15"),
        instances=[instance for _, instance in instances],
        xids=[xid for _, xid in xids],
        row_bytes=about.get("row_bytes", 24),
    )


def _check_cards(reader: _Reader, cards: list[tuple[int, Card]]) -> None:
    if len(cards) > MAX_CARDS:
        reader.complain(cards[MAX_CARDS][0], 1, f"there are more than {MAX_CARDS} cards")
    seen: dict[str, int] = {}
    for number, card in cards:
        for name in (f"index {card.index}", f"uuid {card.uuid}"):
            if name in seen:
                reader.complain(number, 1, f"{name} is already that of line {seen[name]}")
            seen[name] = number


def read(path: Path) -> Scenario:
    """Read and check a scenario file.

    Raises:
        InvalidInput: it cannot be read, or holds mistakes.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}; name a scenario file") from error
    if len(content) > MAX_BYTES:
        raise InvalidInput(f"{path} is larger than {MAX_BYTES} bytes")
    return parse(content.decode("utf-8", "surrogateescape"), str(path))
