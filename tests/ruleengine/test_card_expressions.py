"""Expressions that join what is on a card: of which it is enough to name a job's cards."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
from bench.engine.fleets import write_fleet
from bench.engine.servers import prometheus
from tests.ruleengine.replaying import default_rules

from gpuwarden.ruleengine.card_expressions import by_card, of_cards, parts
from gpuwarden.ruleengine.needs import condition_keys
from gpuwarden.ruleengine.prometheus import PrometheusClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.ruleengine.prometheus import Sample


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus with 160 cards, a job on each: healthy, idle, starved, slow, dark."""
    with prometheus(tmp_path_factory.mktemp("cards")) as running:
        write_fleet(running.url, 160, progress=lambda _: None)
        yield running.url


async def _of_some(url: str, expression: str) -> tuple[list[Sample], list[Sample]]:
    """Rows of every third job, of the whole fleet and where their cards are named."""
    async with PrometheusClient(url) as client:
        now = time.time()
        cards: dict[str, list[tuple[str, str]]] = {}
        for row in await client.instant("gpu_job_holds_gpu", now):
            labels = row.labels
            cards.setdefault(labels["job_id"], []).append((labels["instance"], labels["uuid"]))
        chosen = dict(sorted(cards.items())[::3])
        whole = await client.instant(expression, now)
        asked = [
            row
            for some in parts(expression, chosen.items())
            for row in await client.instant(of_cards(expression, some.values()), now)
        ]
        return [row for row in whole if row.labels["job_id"] in chosen], [
            row for row in asked if row.labels["job_id"] in chosen
        ]


def _expressions_of(*rules: str) -> list[str]:
    chosen = [rule for rule in default_rules().rules if rule.id in rules]
    keys = {key for rule in chosen for each in rule.conditions for key in condition_keys(each)}
    return sorted(key.promql for key in keys if key.promql)


@pytest.mark.parametrize(
    "expression",
    [
        *_expressions_of("barely-used", "full-and-slow", "memory-runs-out"),
        "max by (job_id) (gpu_job_memory_bytes / on (instance, uuid) group_left () gpu_info)",
        "min by (job_id) (gpu_job_holds_gpu + on (instance, uuid) group_left () gpu_info)",
        "max by (job_id) (gpu_job_holds_gpu and on (instance, job_id) gpu_job_info)",
        "sum by (job_id) (gpu_job_info * on (instance, job_id) group_right () gpu_job_holds_gpu)",
        "max by (job_id) (gpu_info * on (instance, uuid) group_right () gpu_job_holds_gpu / 2)",
    ],
)
def test_an_expression_of_each_card_for_itself_gives_the_same_of_named_cards(
    url: str, expression: str
) -> None:
    """By a real Prometheus: what a job's own cards and nodes tell is all that its row rests on."""
    assert by_card(expression)
    whole, named = asyncio.run(_of_some(url, expression))
    assert whole
    assert sorted(map(repr, named)) == sorted(map(repr, whole))


@pytest.mark.parametrize(
    "expression",
    [
        # Rows that are no job's, or of one of its cards alone.
        "sum by (instance, uuid) (gpu_job_memory_bytes)",
        "gpu_job_memory_bytes",
        # What others hold of the node, or of all nodes.
        "max by (job_id) (gpu_job_holds_gpu * on (instance) sum by (instance) (gpu_info))",
        "max by (job_id) (gpu_job_holds_gpu / scalar(sum(gpu_job_memory_bytes)))",
        "max by (job_id) (gpu_job_holds_gpu * on (uuid) group_left () max by (uuid) (gpu_info))",
        "max by (job_id) (gpu_job_info and on (instance) gpu_utilization_ratio > 0.9)",
        "topk(3, gpu_job_memory_bytes)",
        "max by (job_id) (topk by (instance) (1, gpu_job_memory_bytes))",
        # What a job held before, on cards and nodes that it has left.
        (
            "max by (job_id) (gpu_job_holds_gpu offset 30m * on (instance, uuid) group_left () "
            "max by (instance, uuid) (gpu_utilization_ratio))"
        ),
        (
            "max_over_time((max by (job_id) (gpu_job_holds_gpu * on (instance, uuid) group_left () "
            "max by (instance, uuid) (gpu_utilization_ratio)))[1h:1m])"
        ),
        (
            "sum by (job_id) (count_over_time(gpu_job_holds_gpu[1h]) * on (instance, uuid) "
            "group_left () max by (instance, uuid) (gpu_utilization_ratio))"
        ),
        (
            "sum by (job_id) (rate(gpu_job_cpu_seconds_total[1h]) / on (instance) group_left () "
            "count by (instance) (gpu_job_info))"
        ),
        "max by (job_id) (gpu_job_holds_gpu or gpu_job_holds_gpu offset 1h)",
        "max by (job_id) (gpu_job_memory_bytes offset 1h unless gpu_job_memory_bytes)",
        # Rows that are there because of what another card of the node shows.
        "max by (job_id) ((gpu_job_holds_gpu > 3) or on (instance) gpu_job_threads)",
        "max by (job_id) (gpu_job_holds_gpu * on (instance) group_left (uuid) gpu_job_info)",
        "max by (job_id) (gpuwarden_expected_gpu_memory_bytes)",
        # Series of no node, unknown ones, and labels that are made up.
        "max by (job_id) (gpu_job_info * on (user) group_left () gpuwarden_user_info)",
        "max by (job_id) (custom)",
        'max by (job_id) (label_replace(gpu_job_holds_gpu, "uuid", "x", "", ""))',
        "max without (uuid) (gpu_job_memory_bytes)",
        'max by (job_id) (gpu_job_memory_bytes{uuid="a{b"})',
    ],
)
def test_an_expression_that_rests_on_more_is_not_asked_of_named_cards(expression: str) -> None:
    """The other cards of its nodes, all nodes, or somebody else's series."""
    assert not by_card(expression)
    with pytest.raises(ValueError, match="cannot be asked of some cards alone"):
        of_cards(expression, [[("node", "card")]])


def test_cards_are_named_in_parts_that_every_server_reads() -> None:
    """Each job with all its cards, and no query above the 16 KiB of VictoriaMetrics."""
    (expression,) = [text for text in _expressions_of("full-and-slow") if "clamp_max" in text]
    held = {
        f"j{n}": [(f"node{n // 4}.of.a.lab:9835", f"GPU-{n}-{c}") for c in range(8)]
        for n in range(99)
    }
    found = list(parts(expression, held.items()))
    assert {job: cards for part in found for job, cards in part.items()} == held
    assert sum(map(len, found)) == len(held)
    assert len(found) > 1
    for part in found:
        assert len(of_cards(expression, part.values()).encode()) < 16_384
    assert list(parts(expression, [])) == []
