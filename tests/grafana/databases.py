"""Prometheus's database of a past that no server saw; for the suite and for pictures of boards.

What is written into the past has no marks of its end, by which a Prometheus knows at once that a
series stops: it would be seen for five minutes more, beside what came in its place. So servers of
the past look back less far than from one sample to the next (`EXACT`, `SHORT`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.grafana import recordings
from tests.grafana.histories import DAY
from tests.servers import backfill, prometheus

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from tests.grafana.histories import Window
    from tests.grafana.scenarios import Scenario

NO_CONFIG = "global: {}\n"
EXACT, SHORT = "--query.lookback-delta=4s", "--query.lookback-delta=59s"
"""For a server that records, at moments of samples alone, and for one asked by the minute."""


def write(storage: Path, scenarios: Sequence[Scenario], *, fine: Collection[str] = ()) -> None:
    """Histories first, then recorded series layer by layer: each rests on what is there.

    Args:
        storage: folder of the database.
        scenarios: what it holds.
        fine: names of series that are finer in a window's fine part, beside those that recording
            rules look at.
    """
    layers = recordings.layers()
    fine = {*fine, *recordings.needed(layers)}
    for scenario in scenarios:
        _fill(scenario.history().text(fine), storage, scenario.window)
    for layer in layers:
        with prometheus(NO_CONFIG, storage, flags=[EXACT]) as server:
            texts = [recordings.recorded(server, layer, one.window) for one in scenarios]
        for scenario, text in zip(scenarios, texts, strict=True):
            _fill(text, storage, scenario.window)


def _fill(text: str, storage: Path, window: Window) -> None:
    path = storage.with_name("history.txt")
    path.write_text(text)
    backfill(path, storage, block="54h" if window is DAY else "2h")
    path.unlink()
