"""The driver's library, its life cycle and its calls; the only module that knows pynvml.

pynvml initialises the library, counts its users and defines its structures. Calls are made on the
library itself: return codes say more than exceptions here, and some of pynvml's wrappers raise on
answers that are in order (a list of nothing, a name that is not UTF-8).

The library is loaded here, not by pynvml, which would keep it for the life of the process: a card
cannot be reset nor a driver replaced under a process that holds it, and after an upgrade the old
library says for ever that versions differ.
"""

from __future__ import annotations

import _ctypes
import ctypes
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pynvml

from gpuwarden.errors import DriverUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

SUCCESS = 0
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
FUNCTION_NOT_FOUND = 13
NO_LIBRARY = 12
GPU_IS_LOST = 15
NO_DATA = 21
VERSIONS_DIFFER = 18
GPU_NOT_FOUND = 28
LIFE_CYCLE = frozenset({1, 9, VERSIONS_DIFFER})
"""Uninitialised, no driver, versions differ: nothing is known."""
LOST = frozenset({GPU_IS_LOST, 16, GPU_NOT_FOUND})
"""Off the bus, in need of a reset, or not found: concerns one card."""
FEATURE = frozenset({3, 13, 25, 26})
"""Not supported, function missing, struct version unknown, deprecated: the value does not exist."""
OTHER_VERSION = FEATURE | {INVALID_ARGUMENT}
"""What a driver answers to a version of a call that it does not have; some call it an argument."""
PERMISSION = frozenset({4})
ALL_BITS = 2**32 - 1
_ALL_BITS_WIDE = 2**64 - 1

DEVICE_ATTRIBUTES: Any = pynvml.c_nvmlDeviceAttributes


def _plain(structure: Any) -> Any:
    """A structure without what pynvml adds: it looks for a format whenever a field is read."""
    return type(structure.__name__, (ctypes.Structure,), {"_fields_": structure._fields_})


FIELD_VALUE: Any = _plain(pynvml.c_nvmlFieldValue_t)
MEMORY_V1: Any = _plain(pynvml.c_nvmlMemory_t)
MEMORY_V2: Any = _plain(pynvml.c_nvmlMemory_v2_t)
MEMORY_V2_VERSION = int(pynvml.nvmlMemory_v2)
PROCESS_INFO: Any = _plain(pynvml.c_nvmlProcessInfo_v3_t)
PROCESS_SAMPLE: Any = _plain(pynvml.c_nvmlProcessUtilizationSample_t)
TEMPERATURE: Any = _plain(pynvml.c_nvmlTemperature_v1_t)
TEMPERATURE_VERSION = int(pynvml.nvmlTemperature_v1)
UTILIZATION: Any = _plain(pynvml.c_nvmlUtilization_t)

SONAME = "libnvidia-ml.so.1"
_SIMULATION_MARK = "gpuwarden_simulated_scenario"
_MAX_SUSPECTS = 8
"""More calls than these do not fail in a driver that is there."""


class PciInfo(ctypes.Structure):
    """nvmlPciInfo_t; pynvml's own decodes its texts as UTF-8 whenever they are looked at."""

    _fields_ = (
        ("busIdLegacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pciDeviceId", ctypes.c_uint),
        ("pciSubSystemId", ctypes.c_uint),
        ("busId", ctypes.c_char * 32),
    )


class Lost(Exception):
    """The card that was asked is lost."""


class Driver:
    """NVML as loaded into this process, of which there can be only one.

    Attributes:
        opened: whether it is initialised.
        simulated: whether it is gpuwarden's simulation; known once it is open.
        version: of the driver.
        dropped: reason -> values that were asked for and not had; the reader resets it.
        whole: False once an unexpected error hid part of the node; the reader resets it.
    """

    _loaded: ClassVar[int] = 0
    # The sampler's driver and the one that waits for events come and go on threads of their own.
    _loading: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, library: Path | None = None, *, scenario: Path | None = None) -> None:
        """Prepare; nothing is loaded yet.

        Args:
            library: the driver's library; None: the system's.
            scenario: scenario file, for gpuwarden's simulated library.
        """
        self._library = library
        self._scenario = scenario
        self._handle: int | None = None
        self._functions: dict[str, Callable[..., int] | None] = {}
        self._suspects: set[str] = set()
        self.opened = False
        self.simulated = False
        self.version = ""
        self.dropped: Counter[str] = Counter()
        self.whole = True

    def open(self) -> None:
        """Load and initialise.

        Raises:
            DriverUnavailable: it cannot be done.
        """
        self._load()
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            # It is gone indeed: no call is to blame.
            self._suspects.clear()
            self._unload()
            code = int(error.value)
            raise DriverUnavailable(remedy(code, str(error)), code) from error
        self._functions = {}
        self.simulated = hasattr(pynvml.nvmlLib, _SIMULATION_MARK)
        self.opened = True
        try:
            self.version = self.system_text("nvmlSystemGetDriverVersion")
        except DriverUnavailable:
            self.close()
            raise

    def close(self) -> None:
        """Shut down and drop the library; a driver that is gone already is no fault then."""
        if not self.opened:
            return
        self.opened = False
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return
        finally:
            self._unload()

    def _load(self) -> None:
        name = SONAME if self._library is None else str(self._library)
        try:
            handle = _ctypes.dlopen(name, ctypes.DEFAULT_MODE)
        except OSError as error:
            if self._library is None:
                what = f"{SONAME} cannot be loaded ({error})"
                raise DriverUnavailable(remedy(NO_LIBRARY, what), NO_LIBRARY) from error
            raise DriverUnavailable(f"{self._library} cannot be loaded: {error}") from error
        self._handle = handle
        library = ctypes.CDLL(name, handle=handle)
        with Driver._loading:
            Driver._loaded += 1
            pynvml.nvmlLib = library
        if self._scenario is not None:
            getattr(library, _SIMULATION_MARK)(str(self._scenario).encode())

    def _unload(self) -> None:
        self._functions = {}
        handle, self._handle = self._handle, None
        if handle is None:
            return
        with Driver._loading:
            Driver._loaded -= 1
            if Driver._loaded == 0:
                # What pynvml keeps would be called after it is gone.
                pynvml.nvmlLib = None
                vars(pynvml)["_nvmlGetFunctionPointer_cache"].clear()
        _ctypes.dlclose(handle)

    def call(self, name: str, *arguments: Any) -> int:
        """Return code of a call; a function that this driver does not have counts as such.

        A code that says that the driver is gone is believed, and the driver is opened anew. If that
        succeeds and the same call says the same again, the call is at fault: one that a card does
        not get right must not blind the node for ever.

        Raises:
            DriverUnavailable: the driver is gone.
        """
        if name not in self._functions:
            self._functions[name] = getattr(pynvml.nvmlLib, name, None)
        function = self._functions[name]
        code = FUNCTION_NOT_FOUND if function is None else int(function(*arguments))
        if code in LIFE_CYCLE and name not in self._suspects:
            if len(self._suspects) >= _MAX_SUSPECTS:
                self._suspects.clear()
            self._suspects.add(name)
            raise DriverUnavailable(remedy(code, f"{name} failed"), code)
        return code

    def read(self, name: str, *arguments: Any, vital: bool = False) -> bool:
        """Whether a call on a card gave its value; failures that are no missing feature count.

        Args:
            name: the function.
            arguments: of the call.
            vital: whether a failure hides who is where, so that the node is not whole.

        Raises:
            Lost: the card is lost.
            DriverUnavailable: the driver is gone.
        """
        code = self.call(name, *arguments)
        if code == SUCCESS:
            return True
        self.note(code, vital=vital)
        return False

    def note(self, code: int, *, vital: bool = False) -> None:
        """Draw the consequence of a return code that is not success.

        Args:
            code: of a call on a card.
            vital: as of `read`.

        Raises:
            Lost: the card is lost.
        """
        if code in LOST:
            raise Lost
        if code not in FEATURE:
            self.count_failure(code)
            if vital:
                self.whole = False

    def count_failure(self, code: int) -> None:
        """Count a value that was not had, by why."""
        self.dropped["permission" if code in PERMISSION else "nvml_error"] += 1

    def number(
        self, name: str, handle: Any, *arguments: Any, wide: bool = False, vital: bool = False
    ) -> int | None:
        """The number that a call puts behind its last pointer, or None; wide: 64 bits.

        All bits set is how NVML writes that it does not know. They are set before the call as well,
        so that a driver which says success and writes nothing is not taken for one that says 0.
        """
        value: Any = ctypes.c_ulonglong(-1) if wide else ctypes.c_uint(-1)
        if not self.read(name, handle, *arguments, ctypes.byref(value), vital=vital):
            return None
        number = int(value.value)
        if number == (_ALL_BITS_WIDE if wide else ALL_BITS):
            self.dropped["invalid_value"] += 1
            return None
        return number

    def text(self, name: str, handle: Any, size: int, *, vital: bool = False) -> str:
        """The text of at most `size` bytes that a call on a card gives, or an empty string."""
        buffer = ctypes.create_string_buffer(size)
        if not self.read(name, handle, buffer, ctypes.c_uint(size), vital=vital):
            return ""
        return printable(buffer.value)

    def system_text(self, name: str) -> str:
        """The text that a call on the whole system gives, or an empty string."""
        buffer = ctypes.create_string_buffer(96)
        code = self.call(name, buffer, ctypes.c_uint(96))
        return printable(buffer.value) if code == SUCCESS else ""


def still_loaded() -> bool:
    """Whether a driver's library is part of this process, used or not."""
    return SONAME.removesuffix(".1") in Path("/proc/self/maps").read_text(errors="replace")


def printable(text: bytes) -> str:
    """Text of the driver: what is not UTF-8 or not printable is replaced."""
    decoded = text.split(b"\0", 1)[0].decode(errors="replace")
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in decoded)


def remedy(code: int, what: str) -> str:
    """A message that says what to do about a return code."""
    advice = {
        9: "load the NVIDIA driver (modprobe nvidia) and try again",
        NO_LIBRARY: "libnvidia-ml.so.1 was not found: install the NVIDIA driver, "
        "or run the container with its utility capability",
        VERSIONS_DIFFER: "the driver's module and its library are of different versions: "
        "finish its upgrade (reload the module, or reboot)",
        28: "the driver finds no card",
    }.get(code, "see nvidia-smi for the driver's state")
    return f"NVML: {what} (code {code}); {advice}"
