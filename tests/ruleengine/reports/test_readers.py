"""Whose names a report tells."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.reports.stocks import TEAMS, gathered, ledger, told

from gpuwarden.ruleengine.names import Pseudonyms
from gpuwarden.ruleengine.reports.pages import page
from gpuwarden.ruleengine.reports.readers import Reader
from gpuwarden.ruleengine.reports.rulings import rulings
from gpuwarden.ruleengine.reports.tables import table

if TYPE_CHECKING:
    from pathlib import Path

KEY = Pseudonyms(b"k" * 32)
HELD = {"ana": [1.0] * 7, "ben": [2.0] * 7, "cho": [3.0] * 7}


@pytest.mark.parametrize(
    ("reader", "read"),
    [
        (Reader(TEAMS), {"ana", "ben", "cho"}),
        (Reader(TEAMS, opened=False), set()),
        (Reader(TEAMS, "vision"), {"ana", "cho"}),
        (Reader(TEAMS, "vision", names="everyone"), {"ana", "ben", "cho"}),
        (Reader(TEAMS, "vision", names="nobody"), set()),
    ],
)
def test_a_team_reads_its_own_names_alone(reader: Reader, read: set[str]) -> None:
    """In no form of the report stands another's name, also if it is among the figures."""
    found = told(gathered(HELD, HELD), reader)
    for text in (json.dumps(found["people"]), page(found), table(found)):
        for user in TEAMS:
            assert (f">{user}<" in text or f'"{user}"' in text or f",{user}," in text) is (
                user in read
            ), user


def test_a_pseudonym_is_the_same_as_on_the_pages() -> None:
    """It follows from the engine's secret and the name alone."""
    reader = Reader(TEAMS, "vision", pseudonyms=KEY)

    assert reader.shown("ben") == Pseudonyms(b"k" * 32).of("ben")
    assert reader.shown("ben") != Reader(TEAMS, "vision").shown("ben")


def test_a_teams_report_counts_decisions_about_its_own_jobs(tmp_path: Path) -> None:
    """Neither another team's ends nor their keeps, nor what anybody gave as a reason."""
    path = tmp_path / "ledger.sqlite"
    ledger(path)
    begin, end = 1_764_028_800.0, 1_764_633_600.0

    vision = rulings(path, begin, end, Reader(TEAMS, "vision"))
    robotics = rulings(path, begin, end, Reader(TEAMS, "robotics"))

    assert (vision["decisions"], vision["reclaims"], vision["regrets"]) == (1, 0, 1)
    assert (robotics["decisions"], robotics["reclaims"], robotics["appeals"]) == (2, 2, 1)
    assert (vision["keeps"]["count"], robotics["keeps"]["count"]) == (0, 1)
    assert "secret" not in json.dumps([vision, robotics])
