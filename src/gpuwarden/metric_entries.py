"""What an entry of the catalogue of metrics says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MetricType(StrEnum):
    """Prometheus' metric types that the product uses."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    """Classic buckets: the series are called <name>_bucket (with label le), _sum and _count."""


class Source(StrEnum):
    """Which program exports a metric."""

    EXPORTER = "exporter"
    ENGINE = "engine"
    SCHEDULER = "scheduler"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family.

    Attributes:
        name: full name, with `_total` for counters.
        type: gauge, counter or histogram.
        unit: base unit, or an empty string for counts, states and info metrics.
        labels: label names in the order of exposition.
        help: one sentence that names the source and every conversion.
        source: the program that exports it.
    """

    name: str
    type: MetricType
    unit: str
    labels: tuple[str, ...]
    help: str
    source: Source = Source.EXPORTER
