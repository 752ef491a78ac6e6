"""The catalogue follows Prometheus' naming rules and the design's own."""

import re

import pytest

from gpuwarden.catalogue import CATALOGUE, LABEL_NAMES_FORBIDDEN, Metric, MetricType, Source

METRICS = list(CATALOGUE.values())


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_names_units_and_labels_follow_the_rules(metric: Metric) -> None:
    """`_total` on counters only, the unit in the name, no forbidden label, help is a sentence."""
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
    assert not LABEL_NAMES_FORBIDDEN & set(metric.labels)
    assert metric.unit in metric.name
    assert metric.help.endswith(".")
    if metric.name.startswith("yolo_"):
        assert metric.labels[:2] == ("job_id", "run_id")
        assert "rank" not in metric.labels


def test_only_the_engine_exports_the_four_counters_that_the_customer_named() -> None:
    """Their names start with gpu_, but they are conclusions, not facts about hardware."""
    mine = {m.name for m in METRICS if m.source is Source.ENGINE and m.name.startswith("gpu_")}
    assert mine == {
        "gpu_idle_detected_total",
        "gpu_released_success_total",
        "gpu_release_failed_total",
        "gpu_memory_freed_bytes_total",
    }


def test_points_in_time_are_timestamps() -> None:
    """Never seconds since: those go stale in silence."""
    assert not [m.name for m in METRICS if re.search(r"_(age|since)(_|$)", m.name)]
