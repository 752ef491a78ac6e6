"""What the page says of its own values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gpuwarden.exporter
from gpuwarden.catalogue import CATALOGUE, Metric, Source

OF_CARDS = [
    metric
    for metric in CATALOGUE.values()
    if metric.source is Source.EXPORTER and metric.labels[:2] == ("gpu", "uuid")
]
SOURCES = "".join(
    file.read_text() for file in Path(next(iter(gpuwarden.exporter.__path__))).glob("*.py")
)


@pytest.mark.parametrize("metric", OF_CARDS, ids=lambda metric: metric.name)
def test_values_of_the_driver_name_its_call(metric: Metric) -> None:
    """Each value of a card names the call that it comes from, one that is made."""
    if metric.name == "gpu_process_start_time_seconds":
        assert "/proc" in metric.help
        return
    calls = re.findall(r"nvml[A-Z]\w+", metric.help)
    assert calls
    assert all(f'"{call}' in SOURCES for call in calls)


@pytest.mark.parametrize(
    ("unit", "conversion"),
    [("ratio", "/ 100"), ("watts", "milliwatts / 1000"), ("joules", "millijoules / 1000")],
)
def test_conversions_are_told(unit: str, conversion: str) -> None:
    """What the driver says in another unit names the conversion."""
    told = [metric for metric in OF_CARDS if metric.unit == unit]
    assert told
    assert [metric.name for metric in told if conversion not in metric.help] == []
