"""Cards that somebody left go to whom they were left for, between teams of one class too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.scheduling.local.labs import attempts, trains

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.scheduling.local.boxes import LabBox

TEAMS = [
    {"name": "vision", "users": [], "quota": {"a100": 1}, "borrow": {"a100": 1}},
    {"name": "nlp", "users": [], "quota": {"a100": 1}},
]


def test_a_borrower_that_left_does_not_take_its_cards_back_at_once(
    open_lab: Callable[..., LabBox],
) -> None:
    """It was submitted first, and neither team holds a card now: still it was left for nlp."""
    lab = open_lab(teams=TEAMS)
    borrower = lab.submit("borrower", gpus=2)
    trains(lab, "borrower", borrower)
    owner = lab.submit("owner", team="nlp")
    lab.until(lambda: lab.state_of(owner) == "running")
    for _ in range(3):
        lab.tick(1.0)
    assert [job for job, _start in attempts(lab)] == [borrower, owner]
    assert list(lab.steps(borrower))[-1] == "started"
    assert lab.state_of(borrower) == "pending"
