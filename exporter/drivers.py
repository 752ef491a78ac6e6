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
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
NO_LIBRARY = 12
VERSIONS_DIFFER = 18
LIFE_CYCLE = frozenset({1, 9, 12, 18, 28})
"""Uninitialised, no driver, no library, versions differ, no GPU: nothing is known."""
LOST = frozenset({15, 16})
"""Off the bus, or in need of a reset: concerns one card."""
FEATURE = frozenset({3, 13, 25, 26})
"""Not supported, function missing, struct version unknown, deprecated: the value does not exist."""
PERMISSION = frozenset({4})

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
        """Return code of a call; a function that this driver does not have counts as such."""
        if name not in self._functions:
            self._functions[name] = getattr(pynvml.nvmlLib, name, None)
        function = self._functions[name]
        code = FUNCTION_NOT_FOUND if function is None else int(function(*arguments))
        if code in LIFE_CYCLE:
            raise DriverUnavailable(remedy(code, f"{name} failed"), code)
        return code

    def read(self, name: str, *arguments: Any) -> bool:
        """Whether a call on a card gave its value; failures that are no missing feature count."""
        code = self.call(name, *arguments)
        if code == SUCCESS:
            return True
        if code in LOST:
            raise Lost
        if code not in FEATURE:
            self.count_failure(code)
        return False

    def count_failure(self, code: int) -> None:
        """Count a value that was not had, by why."""
        self.dropped["permission" if code in PERMISSION else "nvml_error"] += 1

    def number(self, name: str, handle: Any, *arguments: Any, wide: bool = False) -> int | None:
        """The number that a call puts behind its last pointer, or None; wide: 64 bits."""
        value: Any = ctypes.c_ulonglong() if wide else ctypes.c_uint()
        if not self.read(name, handle, *arguments, ctypes.byref(value)):
            return None
        return int(value.value)

    def text(self, name: str, handle: Any, size: int) -> str:
        """The text of at most `size` bytes that a call on a card gives, or an empty string."""
        buffer = ctypes.create_string_buffer(size)
        if not self.read(name, handle, buffer, ctypes.c_uint(size)):
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
