"""Prometheus's database of a past that no server saw; for the suite and for pictures of boards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.grafana import recordings
from tests.grafana.histories import DAY
from tests.servers import backfill, prometheus

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.grafana.histories import Window
    from tests.grafana.scenarios import Scenario

NO_CONFIG = "global: {}\n"


def write(storage: Path, scenarios: Sequence[Scenario]) -> None:
    """Histories first, then recorded series layer by layer: each rests on what is there."""
    for scenario in scenarios:
        _fill(scenario.history().text(), storage, scenario.window)
    for layer in recordings.layers():
        with prometheus(NO_CONFIG, storage) as server:
            texts = [recordings.recorded(server, layer, one.window) for one in scenarios]
        for scenario, text in zip(scenarios, texts, strict=True):
            _fill(text, storage, scenario.window)


def _fill(text: str, storage: Path, window: Window) -> None:
    path = storage.with_name("history.txt")
    path.write_text(text)
    backfill(path, storage, block="54h" if window is DAY else "2h")
    path.unlink()
