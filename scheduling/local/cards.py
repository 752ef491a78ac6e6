"""The cards of this host, as NVML sees them; the only module here that knows pynvml.

Read anew whenever it is asked, so that a driver that is replaced or reset is found again. What a
card does not tell counts against it: a card is only used if it is known to be free.

pynvml finds `libnvidia-ml.so.1` by the dynamic linker: `LD_LIBRARY_PATH` and
`GPUWARDEN_SIMULATED_SCENARIO` name gpuwarden's simulated driver to a daemon as to any program.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gpuwarden.errors import DriverUnavailable, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


ANSWER_SECONDS = 10.0
"""How long the driver is waited for: with a card that hangs, its calls may never come back."""
_FORBIDDEN = "its compute mode lets nobody compute on it: nvidia-smi -c DEFAULT"


@dataclass(frozen=True, slots=True)
class CardSeen:
    """A card as of one moment.

    Attributes:
        uuid: by which jobs are given it.
        index: NVML's.
        model: its product name.
        used: bytes in use, without what the driver keeps for itself; None: not told.
        pids: processes that use it to compute; None: not told.
        drawing: processes that only draw on it, such as a display server.
        whole: False in MIG mode: its instances are not this engine's to give.
        lost: whether it does not answer: it fell off the bus, or wants a reset.
        problem: why nobody can compute on it, whoever is there; or empty.
    """

    uuid: str
    index: int
    model: str
    used: int | None
    pids: frozenset[int] | None
    drawing: frozenset[int] = frozenset()
    whole: bool = True
    lost: bool = False
    problem: str = ""


class Cards(Protocol):
    """Whoever can see the cards."""

    def read(self) -> Sequence[CardSeen]:
        """Every card, as it is now.

        Raises:
            DriverUnavailable: nothing is known.
        """


class _Reading(threading.Thread):
    """One look at the cards, in a thread that may hang for good.

    Args:
        look: what it does.
    """

    def __init__(self, look: Callable[[], Sequence[CardSeen]]) -> None:
        super().__init__(name="nvml", daemon=True)
        self._look = look
        self.begun = time.monotonic()
        self.seen: Sequence[CardSeen] = ()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Look, and keep what came of it."""
        try:
            self.seen = self._look()
        except BaseException as error:  # noqa: BLE001 (it is raised where it is asked for)
            self.error = error


class NvmlCards:
    """The cards that NVML tells of.

    Args:
        patience: seconds for one look at all of them.
    """

    def __init__(self, patience: float = ANSWER_SECONDS) -> None:
        try:
            import pynvml  # noqa: PLC0415 (an extra of its own)
        except ModuleNotFoundError as error:
            raise MissingExtra("scheduler, for engine local", "pynvml", "local") from error
        self._nvml: Any = pynvml
        self._patience = patience
        self._open = False
        self._known: dict[int, CardSeen] = {}
        self._reading: _Reading | None = None

    def read(self) -> Sequence[CardSeen]:
        """Every card, as it is now.

        Raises:
            DriverUnavailable: nothing is known; or the driver hangs, and is waited for once.
        """
        if self._reading is not None and self._reading.is_alive():
            raise self._hangs(self._reading)
        reading = self._reading = _Reading(self._look)
        reading.start()
        reading.join(self._patience)
        if reading.is_alive():
            raise self._hangs(reading)
        if reading.error is not None:
            raise reading.error
        return reading.seen

    def _hangs(self, reading: _Reading) -> DriverUnavailable:
        since = time.monotonic() - reading.begun
        return DriverUnavailable(
            f"NVML has not answered for {since:.0f} s: a card may hang; see dmesg, and whether "
            "nvidia-smi comes back"
        )

    def _look(self) -> Sequence[CardSeen]:
        nvml = self._nvml
        try:
            if not self._open:
                nvml.nvmlInit()
                self._open = True
            count = nvml.nvmlDeviceGetCount()
            return [self._card(index) for index in range(count)]
        except nvml.NVMLError as error:
            self._shut()
            raise DriverUnavailable(
                f"NVML does not tell what cards there are: {error}; see nvidia-smi"
            ) from error

    def close(self) -> None:
        """Let go of the driver, if it does not hang; the next `read` takes it up again."""
        if self._reading is None or not self._reading.is_alive():
            self._shut()

    def _shut(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            return

    def _card(self, index: int) -> CardSeen:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            model = _text(nvml.nvmlDeviceGetName(handle))
        except (nvml.NVMLError_Uninitialized, nvml.NVMLError_DriverNotLoaded):
            raise
        except nvml.NVMLError as error:
            return self._lost(index, error)
        pids = self._asked(lambda: _pids(nvml.nvmlDeviceGetComputeRunningProcesses(handle)))
        drawing = self._asked(lambda: _pids(nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)))
        mode = self._asked(lambda: nvml.nvmlDeviceGetComputeMode(handle))
        forbidden = mode == nvml.NVML_COMPUTEMODE_PROHIBITED
        self._known[index] = CardSeen(
            uuid=uuid,
            index=index,
            model=model,
            used=self._asked(lambda: int(self._memory(handle))),
            pids=pids,
            # Who computes and draws is told of in both lists.
            drawing=(drawing or frozenset()) - (pids or frozenset()),
            whole=not self._asked(lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0])),
            problem=_FORBIDDEN if forbidden else "",
        )
        return self._known[index]

    def _lost(self, index: int, error: Exception) -> CardSeen:
        """A card that does not answer, by the name that it had: the others are not concerned."""
        known = self._known.get(index)
        return CardSeen(
            uuid=f"number {index}" if known is None else known.uuid,
            index=index,
            model="" if known is None else known.model,
            used=None,
            pids=None,
            lost=True,
            problem=f"it does not answer ({error}): see dmesg for its Xid; it may want a reset",
        )

    def _memory(self, handle: Any) -> int:
        nvml = self._nvml
        try:
            return int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            return int(nvml.nvmlDeviceGetMemoryInfo(handle).used)

    def _asked(self, question: Callable[[], Any]) -> Any:
        """The answer, or None where this card does not tell."""
        nvml = self._nvml
        try:
            return question()
        except (nvml.NVMLError_Uninitialized, nvml.NVMLError_DriverNotLoaded):
            raise
        except nvml.NVMLError:
            return None


def _pids(processes: Sequence[Any]) -> frozenset[int]:
    return frozenset(int(each.pid) for each in processes)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
