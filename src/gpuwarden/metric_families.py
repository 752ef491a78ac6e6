"""Families of a program's page of metrics, by the catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from gpuwarden.catalogue import CATALOGUE, MetricType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from gpuwarden.catalogue import Source

Row = tuple[tuple[str, ...], float]
"""Label values in the catalogue's order, and the value."""


def families(source: Source, rows: Mapping[str, Iterable[Row]]) -> Iterator[Metric]:
    """Every family of the catalogue that a program exports and has rows for.

    Args:
        source: the program.
        rows: name of a metric -> its rows.
    """
    for name, metric in CATALOGUE.items():
        if metric.source is not source or name not in rows:
            continue
        kind = CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
        family = kind(name, metric.help, labels=metric.labels)
        for labels, value in rows[name]:
            family.add_metric(labels, value)
        yield family
