"""What a snapshot asks of the driver: a bounded number of calls for each card, none for a process.

A call on a real driver takes from a tenth of a millisecond to some milliseconds, and it holds locks
that trainings need too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpuwarden.exporter.simulated import Card, Scenario, SimulatedProcess, calls

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuwarden.exporter.nvml import Nvml

MAX_CALLS_PER_CARD = 32


def _calls_of_a_snapshot(
    driver: Callable[[Scenario], Nvml], scenario: Path, *, cards: int, processes: int
) -> int:
    nvml = driver(
        Scenario(
            cards=[Card(index) for index in range(cards)],
            processes=[
                SimulatedProcess(card, 100 + number, memory=1, sm=1, ghost=1)
                for card in range(cards)
                for number in range(processes)
            ],
        )
    )
    # The first snapshot also reads what does not change, and finds how long the lists are.
    nvml.snapshot()
    before = calls(scenario)
    nvml.snapshot()
    return calls(scenario) - before


@pytest.mark.parametrize("cards", [1, 8])
def test_no_call_per_process(
    driver: Callable[[Scenario], Nvml], scenario_file: Path, cards: int
) -> None:
    """A card with 200 processes takes no more calls than one with a single process."""
    few = _calls_of_a_snapshot(driver, scenario_file, cards=cards, processes=1)
    many = _calls_of_a_snapshot(driver, scenario_file, cards=cards, processes=200)
    assert many == few


def test_calls_per_card_are_bounded(
    driver: Callable[[Scenario], Nvml], scenario_file: Path
) -> None:
    """Each further card costs the same few calls."""
    one, two, eight = (
        _calls_of_a_snapshot(driver, scenario_file, cards=cards, processes=2) for cards in (1, 2, 8)
    )
    per_card = two - one
    assert per_card <= MAX_CALLS_PER_CARD
    assert eight == one + 7 * per_card
