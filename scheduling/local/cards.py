"""The cards of this host, as NVML sees them; the only module here that knows pynvml.

Read anew whenever it is asked, so that a driver that is replaced or reset is found again. What a
card does not tell counts against it: a card is only used if it is known to be free.

pynvml finds `libnvidia-ml.so.1` by the dynamic linker: `LD_LIBRARY_PATH` and
`GPUWARDEN_SIMULATED_SCENARIO` name gpuwarden's simulated driver to a daemon as to any program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gpuwarden.errors import DriverUnavailable, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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


class NvmlCards:
    """The cards that NVML tells of."""

    def __init__(self) -> None:
        try:
            import pynvml  # noqa: PLC0415 (an extra of its own)
        except ModuleNotFoundError as error:
            raise MissingExtra("scheduler, for engine local", "pynvml", "local") from error
        self._nvml: Any = pynvml
        self._open = False
        self._known: dict[int, CardSeen] = {}

    def read(self) -> Sequence[CardSeen]:
        """Every card, as it is now.

        Raises:
            DriverUnavailable: nothing is known.
        """
        nvml = self._nvml
        try:
            if not self._open:
                nvml.nvmlInit()
                self._open = True
            count = nvml.nvmlDeviceGetCount()
            return [self._card(index) for index in range(count)]
        except nvml.NVMLError as error:
            self.close()
            raise DriverUnavailable(
                f"NVML does not tell what cards there are: {error}; see nvidia-smi"
            ) from error

    def close(self) -> None:
        """Let go of the driver; the next `read` takes it up again."""
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
