"""Recorded series of the past: what the recording rules would have written, window by window.

`promtool tsdb create-blocks-from rules` does this for one stretch and one layer of rules at a time;
with rules that rest on one another four deep, in eight windows, that is too slow for a test.
"""

from __future__ import annotations

import functools
import itertools
import json
import urllib.error
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import promql_parser
import yaml
from grafana import expressions, lint
from tests.grafana.histories import HOUR
from tests.servers import ServerFailed

from gpuwarden import durations

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.grafana.histories import Window
    from tests.servers import Server

RULES = Path(__file__).parents[2] / "alerting" / "rules"
COARSE = 60
"""Seconds between evaluations before the last hour of the day, at the least."""


@dataclass(frozen=True)
class Recording:
    """A recording rule."""

    name: str
    expression: str
    interval: int


def layers() -> list[list[Recording]]:
    """The recording rules of all files; each layer rests only on those before it."""
    left = {
        rule["record"]: Recording(
            rule["record"], rule["expr"], int(durations.parse(group.get("interval", "15s")))
        )
        for path in sorted(RULES.glob("*.yml"))
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
        if "record" in rule
    }
    below = {
        name: {
            found.metric for found in expressions.selectors(promql_parser.parse(rule.expression))
        }
        for name, rule in left.items()
    }
    found = []
    while left:
        layer = [rule for name, rule in left.items() if not below[name] & left.keys()]
        assert layer, f"recording rules rest on one another: {sorted(left)}"
        found.append(layer)
        for rule in layer:
            del left[rule.name]
    return found


def needed(layers: Sequence[Sequence[Recording]]) -> frozenset[str]:
    """Names of the series that the rules look at."""
    return frozenset(
        selector.metric
        for layer in layers
        for rule in layer
        for selector in expressions.selectors(promql_parser.parse(rule.expression))
    )


@functools.cache
def summed() -> frozenset[str]:
    """Names of recorded series whose samples are added up, by rules or by boards."""
    texts = [rule.expression for layer in layers() for rule in layer]
    for path in sorted((lint.FOLDER / "dashboards").glob("*.json")):
        for panel in lint.every_panel(json.loads(path.read_text())):
            texts += [target["expr"] for target in panel.get("targets", [])]
    return frozenset(
        selector.metric
        for text in texts
        for selector in expressions.selectors(promql_parser.parse(expressions.substituted(text)))
        if selector.call == "sum_over_time"
    )


def recorded(server: Server, layer: list[Recording], window: Window) -> str:
    """OpenMetrics text of what the rules of a layer would have written in a window."""
    return "".join(itertools.chain.from_iterable(_rule(server, r, window) for r in layer)) + "# EOF"


def _rule(server: Server, rule: Recording, window: Window) -> Iterator[str]:
    yield f"# TYPE {rule.name} gauge\n"
    fine = max(window.start, window.end - HOUR)
    found: dict[str, list[str]] = {}
    for start, end, step in (
        (window.start, fine - 1, max(COARSE, rule.interval)),
        (fine, window.end, rule.interval),
    ):
        if start > end:
            continue
        words = {"query": rule.expression, "start": start, "end": end, "step": step}
        try:
            answer = server.json("/api/v1/query_range?" + urllib.parse.urlencode(words))
        except urllib.error.HTTPError as error:
            raise ServerFailed(f"{rule.name} in {window.name}: {error.read().decode()}") from error
        for series in answer["data"]["result"]:
            labels = ",".join(
                f'{name}="{text}"' for name, text in series["metric"].items() if name != "__name__"
            )
            found.setdefault(labels, []).extend(
                f"{rule.name}{{{labels}}} {value} {at}\n"
                for time, value in series["values"]
                for at in _moments(rule, time, step)
                if at >= start
            )
    for lines in found.values():
        yield from lines


def _moments(rule: Recording, time: int, step: int) -> Iterable[int]:
    """When a value is written: of series that are added up as often as the rule would have."""
    if rule.name not in summed():
        return (time,)
    return range(time - step + rule.interval, time + 1, rule.interval)
