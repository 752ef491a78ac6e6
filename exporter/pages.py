"""Pages as Prometheus reads them, written from samples in one pass.

prometheus_client spends most of its time on what never changes between two snapshots: names, labels
and their escapes (figures: docs/performance.md). Here the text before the value is kept from page
to page, and both formats share it. What is written is, byte for byte, what prometheus_client writes
(tests/exporter/test_pages.py).
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

from gpuwarden.catalogue import CATALOGUE, Metric, MetricType
from gpuwarden.exporter.compat import FOREIGN

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_LABEL = 256
_KNOWN = {**CATALOGUE, **FOREIGN}
_GZIP_LEVEL = 1
"""Pages repeat themselves so much that the fastest level leaves a tenth of them."""


class Format(Enum):
    """How a page is written; the value is its content type."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Families:
    """Samples of one page by family.

    Attributes:
        duplicates: samples that were left out, for their series had one.
    """

    def __init__(self, previous: Families | None = None) -> None:
        """Begin with an empty page.

        Args:
            previous: an earlier page: the text of series that were on it is taken from there, and
                that of whole families that have not changed.
        """
        self._known = previous._starts if previous is not None else {}  # noqa: SLF001 (own class)
        self._starts: dict[tuple[str, ...], str] = {}
        self._families: dict[str, dict[str, float]] = {}
        self._known_texts = previous._texts if previous is not None else {}  # noqa: SLF001 (own class)
        self._texts: dict[str, tuple[dict[str, float], str]] = {}
        self.duplicates = 0

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """Add a sample; a value that is not known adds nothing.

        The first value of a series counts: a page that says one thing twice is refused as a whole.

        Args:
            name: of the catalogue, or of `compat.FOREIGN`.
            value: in base units; None, and what is not finite, is left out.
            labels: in the catalogue's order.

        Raises:
            KeyError: the catalogue has no such metric.
            ValueError: too many or too few labels.
        """
        series = (name, *labels)
        start = self._known.get(series)
        if start is None:
            start = _start(_KNOWN[name], labels)
        if value is None or not math.isfinite(value):
            return
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = {}
        elif start in family:
            self.duplicates += 1
            return
        family[start] = value
        self._starts[series] = start

    def written(self) -> Iterator[tuple[str, str]]:
        """Name and samples of each family, in the catalogue's order; nothing is added after it."""
        for name in _KNOWN:
            family = self._families.get(name)
            if family is not None:
                known = self._known_texts.get(name)
                if known is None or known[0] != family:
                    lines = [f"{start}{number(value)}\n" for start, value in family.items()]
                    known = (family, "".join(lines))
                self._texts[name] = known
                yield name, known[1]
        self._known_texts = {}


class Bodies(Mapping[Format, bytes]):
    """One page in every format, each written when it is first asked for.

    Attributes:
        asked: what was asked for: (format, compressed).
    """

    def __init__(self, families: Families) -> None:
        """Take the samples; nothing more is added to them.

        Args:
            families: of the page.
        """
        self._families: Families | None = families
        self._samples: list[tuple[str, str]] = []
        self._made: dict[tuple[Format, bool], bytes] = {}
        self.asked: set[tuple[Format, bool]] = set()

    def __getitem__(self, form: Format) -> bytes:
        return self.get_encoded(form, compressed=False)

    def __iter__(self) -> Iterator[Format]:
        return iter(Format)

    def __len__(self) -> int:
        return len(Format)

    def get_encoded(self, form: Format, *, compressed: bool) -> bytes:
        """The page as it is sent.

        Args:
            form: how it is written.
            compressed: whether by gzip.
        """
        self.asked.add((form, compressed))
        return self.prepare(form, compressed=compressed)

    def prepare(self, form: Format, *, compressed: bool) -> bytes:
        """As `get_encoded`, before anybody asked."""
        made = self._made.get((form, compressed))
        if made is None:
            # Two threads may do this at once, with the same result.
            if compressed:
                # Not kept: who takes gzip does not take it plain, and it is twenty times as large.
                plain = self._made.get((form, False)) or self._write(form)
                made = gzip.compress(plain, _GZIP_LEVEL, mtime=0)
            else:
                made = self._write(form)
            self._made[form, compressed] = made
        return made

    def _write(self, form: Format) -> bytes:
        families = self._families
        if families is not None:
            self._samples = list(families.written())
            self._families = None
        parts: list[str] = []
        for name, lines in self._samples:
            parts += (_HEADS[name][form], lines)
        if form is Format.OPENMETRICS:
            parts.append("# EOF\n")
        return "".join(parts).encode()


def clean(label: str) -> str:
    """A label value that every parser takes: valid UTF-8, printable, at most 256 characters."""
    if len(label) > MAX_LABEL:
        label = label[:MAX_LABEL]
    if label.isascii() and label.isprintable():
        return label
    text = label.encode("utf-8", "replace").decode()
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def number(value: float) -> str:
    """A finite number as Go writes it, with the exponents that it has from a million on."""
    # What is kept of the two zeros would be one text for both.
    return _number(value) if value else repr(float(value))


@lru_cache(maxsize=4096)
def _number(value: float) -> str:
    text = repr(float(value))
    point = text.find(".")
    if value > 0 and point > 6:
        digits = f"{text[0]}.{text[1:point]}{text[point + 1 :]}".rstrip("0.")
        return f"{digits}e+{point - 1:02d}"
    return text


@dataclass(frozen=True, slots=True)
class _Head:
    """The lines above a family's samples."""

    text: str
    openmetrics: str

    def __getitem__(self, form: Format) -> str:
        return self.text if form is Format.TEXT else self.openmetrics


def _head(metric: Metric) -> _Head:
    # OpenMetrics names the family of a counter without its suffix.
    name, kind = metric.name, metric.type.value
    short = name.removesuffix("_total") if metric.type is MetricType.COUNTER else name
    help_ = metric.help.replace("\\", "\\\\").replace("\n", "\\n")
    quoted = help_.replace('"', '\\"')
    return _Head(
        f"# HELP {name} {help_}\n# TYPE {name} {kind}\n",
        f"# HELP {short} {quoted}\n# TYPE {short} {kind}\n",
    )


_HEADS = {name: _head(metric) for name, metric in _KNOWN.items()}


def _start(metric: Metric, labels: tuple[str, ...]) -> str:
    """Everything of a sample's line that stands before its value."""
    if len(labels) != len(metric.labels):
        raise ValueError(f"{metric.name} has the labels {metric.labels}, not {labels}")
    if not labels:
        return f"{metric.name} "
    pairs = ",".join(
        f'{name}="{_escaped(clean(label))}"'
        for name, label in sorted(zip(metric.labels, labels, strict=True))
    )
    return f"{metric.name}{{{pairs}}} "


def _escaped(label: str) -> str:
    # What is cleaned has no line feed.
    return label.replace("\\", "\\\\").replace('"', '\\"')
