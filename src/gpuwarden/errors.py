"""The exception tree. Two behaviours matter to callers: worth another try, or not.

::

    GpuwardenError               exit 1
    |-- TemporaryError           exit 3   worth another try; nothing was decided
    |   `-- ServiceUnavailable            a server did not answer, or not usefully
    `-- PermanentError           exit 1   trying again changes nothing
        |-- InvalidInput         exit 2   what the user wrote; carries every diagnostic
        |-- MissingExtra         exit 2   a component's dependencies are not installed
        |-- RefusedAction        exit 1   a guard said no; carries a machine-readable reason
        `-- DriverUnavailable    exit 3   NVML cannot be loaded or initialised
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.diagnostics import Diagnostic


class GpuwardenError(Exception):
    """Root of every error that gpuwarden raises on purpose."""

    exit_code = 1


class TemporaryError(GpuwardenError):
    """The same call may succeed later."""

    exit_code = 3


class ServiceUnavailable(TemporaryError):
    """A server that is needed did not answer, or answered with an error of its own."""


class PermanentError(GpuwardenError):
    """The same call will fail again until somebody changes something."""


class InvalidInput(PermanentError):
    """Files or flags that a person wrote are wrong.

    Attributes:
        diagnostics: every finding, in the order of files and positions.
    """

    exit_code = 2

    def __init__(self, message: str, diagnostics: Sequence[Diagnostic] = ()) -> None:
        super().__init__(message)
        self.diagnostics = tuple(diagnostics)


class MissingExtra(PermanentError):
    """A component was called whose optional dependencies are not installed."""

    exit_code = 2

    def __init__(self, command: str, module: str, extra: str) -> None:
        super().__init__(
            f"`gpuwarden {command}` needs the Python module {module!r}: "
            f"pip install 'gpuwarden[{extra}]'"
        )
        self.module = module
        self.extra = extra


class RefusedAction(PermanentError):
    """An action was refused.

    Attributes:
        reason: a short machine-readable word, stable across releases.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class DriverUnavailable(PermanentError):
    """NVML cannot be loaded or initialised.

    Attributes:
        nvml_code: NVML's return code, or None where the library itself was not found.
    """

    exit_code = 3

    def __init__(self, message: str, nvml_code: int | None = None) -> None:
        super().__init__(message)
        self.nvml_code = nvml_code
