"""A day of a small fleet as OpenMetrics text: with a gap, a dark node and a shared card."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

BEGIN = 1_749_945_600
"""2025-06-15 00:00 UTC."""
HOUR = 3600
SCRAPE = 30
GAP = range(BEGIN + 10 * HOUR, BEGIN + 11 * HOUR + 1)
"""Prometheus was down."""
DARK = range(BEGIN + 20 * HOUR, BEGIN + 22 * HOUR)
"""The second node did not answer."""
CARDS = {("n1:9835", "0"): "ana", ("n1:9835", "1"): "ben", ("n2:9835", "0"): "cho"}
TEAMS = {"ana": "vision", "ben": "robotics", "cho": "vision"}
MODEL, PRICE = "NVIDIA A100-SXM4-40GB", 2.5

NOON = BEGIN + 12 * HOUR
HELD = (
    ("j-ana", "ana", ("n1:9835", "0"), BEGIN),
    ("j-eve", "eve", ("n1:9835", "0"), NOON),
    ("j-ben", "ben", ("n1:9835", "1"), BEGIN),
    ("j-cho", "cho", ("n2:9835", "0"), NOON),
)
"""Job, owner, card, and since when: ana trains and shares her card from noon on, ben idles."""


def _series() -> Iterator[tuple[str, dict[str, str], float, int]]:
    """Name, labels, value and beginning of each."""
    for node in ("n1:9835", "n2:9835"):
        yield "up", {"instance": node}, 1, BEGIN
    for (node, gpu), user in CARDS.items():
        card = {"instance": node, "gpu": gpu, "uuid": f"GPU-{node[:2]}-{gpu}"}
        yield "gpu_up", card, 1, BEGIN
        yield "gpu_info", card | {"name": MODEL}, 1, BEGIN
        yield "gpu_utilization_ratio", card, 0 if user == "ben" else 0.8, BEGIN
    for job, owner, (node, gpu), since in HELD:
        own = {"instance": node, "job_id": job}
        card = {"gpu": gpu, "uuid": f"GPU-{node[:2]}-{gpu}"}
        yield "gpu_job_info", own | {"user": owner}, 1, since
        yield "gpu_job_holds_gpu", own | card, 1, since
        yield "gpu_job_utilization_ratio", own | card, 0 if owner == "ben" else 0.8, since
    price = {"instance": "engine", "model": MODEL, "currency": "EUR"}
    yield "gpuwarden_price_per_gpu_hour", price, PRICE, BEGIN
    for user, team in TEAMS.items():
        yield "gpuwarden_user_info", {"instance": "engine", "user": user, "team": team}, 1, BEGIN


def history(*, scrape: int = SCRAPE, hours: int = 24) -> Iterator[str]:
    """The day, or its first hours, as OpenMetrics text.

    Args:
        scrape: seconds between two samples.
        hours: how much of the day.
    """
    named = ""
    for name, labels, value, since in sorted(_series(), key=lambda item: item[0]):
        if name != named:
            yield f"# TYPE {name} gauge"
            named = name
        labels |= {"job": "gpuwarden"}
        text = ",".join(f'{key}="{word}"' for key, word in labels.items())
        for time in range(since, BEGIN + hours * HOUR, scrape):
            dark = time in DARK and labels["instance"] == "n2:9835"
            if time not in GAP and (name == "up" or not dark):
                yield f"{name}{{{text}}} {0 if dark else value} {time}"
