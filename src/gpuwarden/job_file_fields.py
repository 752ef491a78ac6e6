"""Reading the fields of a job file: strict in shape, and every complaint names the field."""

from __future__ import annotations

import json
import math
from typing import Any

from gpuwarden.errors import PermanentError

VERSION = 1


class JobFileError(PermanentError):
    """A job file cannot be used; `reason` is a short machine-readable word for a counter."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def encode(fields: dict[str, Any]) -> bytes:
    """A file's content: one JSON object with its version."""
    document = {"version": VERSION, **fields}
    return json.dumps(document, ensure_ascii=True, allow_nan=False).encode() + b"\n"


_MISSING: Any = object()


class Fields:
    """Typed access to a JSON object; every complaint names the field.

    Args:
        content: the file's content, or an object inside of it.
        prefix: of the object's fields in complaints.

    Raises:
        JobFileError: it is no JSON object, or of another version.
    """

    def __init__(self, content: bytes | dict[str, Any], *, prefix: str = "") -> None:
        self._prefix = prefix
        if isinstance(content, dict):
            self._data = content
            return
        try:
            # Python's reader accepts NaN and Infinity, and very deep nesting overflows its stack.
            data = json.loads(content.decode(), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise JobFileError("json", f"not valid JSON: {error}") from error
        if not isinstance(data, dict):
            raise JobFileError("json", "not a JSON object")
        version = data.get("version")
        if isinstance(version, bool) or not isinstance(version, int) or version != VERSION:
            raise JobFileError("version", f"version {version!r} is not {VERSION}")
        self._data = data

    def _get(self, name: str, default: Any) -> Any:
        value = self._data.get(name)
        if value is None:
            if default is _MISSING:
                raise JobFileError("field", f"{self._prefix}{name} is missing")
            return default
        return value

    def _wrong(self, name: str, wanted: str) -> JobFileError:
        return JobFileError("field", f"{self._prefix}{name} is not {wanted}")

    def text(self, name: str, limit: int, *, default: Any = _MISSING) -> str:
        """A string of at most so many characters."""
        value = self._get(name, default)
        if not isinstance(value, str) or len(value) > limit:
            raise self._wrong(name, f"a string of at most {limit} characters")
        return value

    def optional_text(self, name: str, limit: int) -> str | None:
        """The same, or None where it is not given."""
        return self.text(name, limit) if self._data.get(name) is not None else None

    def integer(self, name: str, minimum: int = 0, *, default: Any = _MISSING) -> int:
        """A whole number from a minimum on."""
        value = self._get(name, default)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not minimum <= value < 2**63:
            raise self._wrong(name, f"a whole number of at least {minimum}")
        return int(value)

    def optional_integer(self, name: str) -> int | None:
        """The same from 0 on, or None where it is not given."""
        return self.integer(name) if self._data.get(name) is not None else None

    def number(self, name: str, *, default: Any = _MISSING) -> float:
        """A finite number."""
        value = self._get(name, default)
        if not _is_number(value):
            raise self._wrong(name, "a finite number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """The same, or None where it is not given."""
        return self.number(name) if self._data.get(name) is not None else None

    def boolean(self, name: str) -> bool:
        """True or false."""
        value = self._get(name, _MISSING)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def numbers(self, name: str) -> dict[str, float]:
        """An object of at most 64 finite numbers."""
        value = self._get(name, {})
        if not isinstance(value, dict) or len(value) > 64:
            raise self._wrong(name, "an object of at most 64 numbers")
        for key, item in value.items():
            if len(key) > 64 or not _is_number(item):
                raise self._wrong(f"{name}.{key[:64]}", "a finite number")
        return {key: float(item) for key, item in value.items()}

    def child(self, name: str) -> Fields | None:
        """Access to an object inside this one, or None where it is not given."""
        value = self._get(name, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return Fields(value, prefix=f"{self._prefix}{name}.")


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
