"""Lit nodes: which nodes speak for themselves now, and why the others do not. Pure."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.verdicts import MAX_SKEW_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SNAPSHOT_INTERVAL_SECONDS = 2.0
"""How often an exporter takes its snapshot; a snapshot up to twice as old is current."""
SCRAPED_TWICE = "scraped_twice"
"""Reason: the server holds a node's series more than once, under labels that we do not ask for, or
a card's under the names of two nodes."""


def states(
    rows: Mapping[str, Sequence[tuple[float, tuple[str, ...]]]],
    *,
    time: float,
    scrape_interval: float,
) -> tuple[dict[str, str], dict[str, float]]:
    """Which nodes are not fresh, and how far the clocks of those that speak are off.

    Args:
        rows: of the inventory, by the names of their queries.
        time: Unix time of every query.
        scrape_interval: of the nodes, in seconds.

    Returns:
        Instance -> the reason, of those that are not fresh; instance -> seconds.
    """
    # Of a target whose labels have changed a server without staleness markers tells for minutes
    # what the former series said last: the latest counts.
    scraped = _latest(rows["scraped"])
    fresh_from = time - signals.FRESH_SCRAPES * scrape_interval
    # Two clusters, replicas that nobody folds, or two scrape jobs: which is which is not known.
    twice = Counter(node for at, (node,) in rows["scraped"] if at >= fresh_from)
    skews: dict[str, float] = {}
    dark: dict[str, str] = {}
    for node, taken in _latest(rows["gpuwarden_snapshot_timestamp_seconds"]).items():
        at = scraped.get(node, -math.inf)
        age = at - taken
        skew = min(0.0, age) or max(0.0, age - 2 * SNAPSHOT_INTERVAL_SECONDS)
        skews[node] = skew
        if twice[node] > 1:
            dark[node] = SCRAPED_TWICE
        elif at < fresh_from:
            dark[node] = "dark_node"
        elif abs(skew) > MAX_SKEW_SECONDS:
            dark[node] = "clock_skew"
    known = {
        texts[0]
        for name in ("gpu_job_holds_gpu", "gpu_job_info", "gpu_info")
        for _, texts in rows[name]
    }
    return dark | dict.fromkeys(known - set(skews), "dark_node"), skews


def _latest(rows: Iterable[tuple[float, tuple[str, ...]]]) -> dict[str, float]:
    """The greatest value of each node's rows; what is no number is none."""
    found: dict[str, float] = {}
    for value, (node,) in rows:
        if not math.isnan(value):
            found[node] = max(value, found.get(node, -math.inf))
    return found
