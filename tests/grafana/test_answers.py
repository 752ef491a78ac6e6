"""What is said of an expression's series before it is asked: their labels, and how many at most."""

from __future__ import annotations

import promql_parser
import pytest
from grafana.answers import FLEET, answer
from grafana.expressions import recorded, substituted

from gpuwarden.catalogue import CATALOGUE, Source

CARDS = FLEET["uuid"]


@pytest.mark.parametrize(
    ("expression", "labels", "most"),
    [
        ("gpu_up", "gpu instance job uuid", CARDS),
        ("sum by (gpu) (gpu_up)", "gpu", FLEET["gpu"]),
        ("sum without (gpu, uuid, job) (gpu_up)", "instance", FLEET["instance"]),
        ("count(gpu_up) or 0 * count(up)", "", 1),
        ("time() - max(gpuwarden_snapshot_timestamp_seconds)", "", 1),
        ('gpu_throttle_active{reason="hw_thermal"} * 2', "gpu instance job reason uuid", CARDS),
        ('sum by (clock) (gpu_clock_hertz{clock=~"sm|memory"})', "clock", 2),
        ("gpu_up and on (instance) topk(3, up @ end())", "gpu instance job uuid", 3 * 56),
        ("gpu_up unless on (instance) up", "gpu instance job uuid", CARDS),
        ("gpu_up * on (instance, uuid) gpu_processes", "instance uuid", CARDS),
        (
            "max by (uuid) (gpu_up) * on (uuid) group_left (name) max by (uuid, name) (gpu_info)",
            "name uuid",
            CARDS,
        ),
        ('label_replace(max by (gpu) (gpu_up), "card", "$1", "gpu", "(.*)")', "card gpu", 8),
        ('count_values by (gpu) ("value", gpu_up)', "gpu value", CARDS),
        ("histogram_quantile(0.9, sum by (le, gpu) (gpu_up))", "gpu", 8),
        ("vector(1)", "", 1),
        ("sum_over_time(fleet:gpus:count[5m])", "", 1),
        ("team:gpus_held:count", "team", FLEET["team"]),
        ('gpu_job_info{instance=~"n1:9835"}', None, 56),
    ],
)
def test_labels_and_bound(expression: str, labels: str | None, most: int) -> None:
    """As Prometheus would answer, for a fleet of 10,000 cards, on a board for one node."""
    found = answer(promql_parser.parse(expression), frozenset({"$node"}))
    if labels is not None:
        assert found.labels == set(labels.split())
    assert found.most == most


def test_topk_over_a_range_chooses_anew_at_each_moment() -> None:
    """One moment has five; a range has whatever was among the five at any time."""
    tree = promql_parser.parse("topk(5, gpu_up)")
    assert answer(tree, ranged=False).most == 5
    assert answer(tree).most == CARDS
    assert answer(promql_parser.parse("topk(5, gpu_up @ end())")).most == 5


def test_every_recorded_series_can_be_read() -> None:
    """Each has a bound, and no label that is neither known nor made in its expression."""
    labels = {label for metric in CATALOGUE.values() for label in metric.labels}
    for name in recorded():
        found = answer(promql_parser.parse(name))
        assert found.most >= 1
        made = recorded()[name]
        assert all(label in labels | {"instance"} or label in made for label in found.labels), name


def test_series_of_the_engine_are_of_one_engine() -> None:
    """Its instance multiplies nothing."""
    rules = next(
        metric.name
        for metric in CATALOGUE.values()
        if metric.source is Source.ENGINE and metric.labels == ("rule",)
    )
    assert answer(promql_parser.parse(rules)).most == FLEET["rule"]


def test_variables_are_told_apart_in_a_tree() -> None:
    """The lengths of time that stand for Grafana's are of no other window."""
    text = "rate(x[$__rate_interval]) + increase(x[$__range]) + avg_over_time(x[$__interval])"
    assert substituted(text) == "rate(x[241s]) + increase(x[21601s]) + avg_over_time(x[61s])"
