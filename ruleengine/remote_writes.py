"""Bodies of remote writes, by which Prometheus takes samples with their times and stale markers.

https://prometheus.io/docs/specs/prw/remote_write_spec/
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from gpuwarden.ruleengine.notations import Stale

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuwarden.ruleengine.notations import SeriesName, Value

STALE_BITS: Final = 0x7FF0000000000002
"""https://github.com/prometheus/prometheus/blob/main/model/value/value.go: StaleNaN."""


def write_request(series: Iterable[tuple[SeriesName, Sequence[tuple[int, Value]]]]) -> bytes:
    """A WriteRequest of remote write 1.0; samples of a series must be in order of time."""
    return b"".join(delimited(1, _time_series(name, samples)) for name, samples in series)


def _time_series(name: SeriesName, samples: Sequence[tuple[int, Value]]) -> bytes:
    labels = sorted((("__name__", name.metric), *name.labels))
    parts = [
        delimited(1, delimited(1, label.encode()) + delimited(2, text.encode()))
        for label, text in labels
    ]
    parts += [delimited(2, _sample(time, value)) for time, value in samples]
    return b"".join(parts)


def _sample(time: int, value: Value) -> bytes:
    number = (
        struct.pack("<Q", STALE_BITS)
        if isinstance(value, Stale) or value is None
        else struct.pack("<d", value)
    )
    return b"\x09" + number + b"\x10" + varint(time & (2**64 - 1))


def delimited(number: int, content: bytes) -> bytes:
    """A field of protobuf with its length before it."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    """A whole number, not negative, as protobuf and snappy write it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def uncompressed(content: bytes) -> bytes:
    """Content in the block format of snappy, as literals: it need not be small, only readable."""
    parts = [varint(len(content))]
    for begin in range(0, len(content), 2**16):
        piece = content[begin : begin + 2**16]
        parts += [bytes((61 << 2,)), struct.pack("<H", len(piece) - 1), piece]
    return b"".join(parts)
