"""Decisions, outcomes and objections of a period, out of a ledger that is only read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.ruleengine.reports.stocks import BEGIN, DAY, TEAMS, ledger

from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.ledger_handles import LedgerUnusable
from gpuwarden.ruleengine.reports.periods import period_of
from gpuwarden.ruleengine.reports.readers import Reader
from gpuwarden.ruleengine.reports.rulings import rulings
from gpuwarden.ruleengine.reports.runs import Sources, told_by

if TYPE_CHECKING:
    from pathlib import Path


def test_proven_and_estimated_are_kept_apart(tmp_path: Path) -> None:
    """Memory and cards count where NVML showed it; hours from then on are an estimate of their own.

    Two ends with two cards each, an hour apart, and a period that ends a day later.
    """
    path = tmp_path / "ledger.sqlite"
    ledger(path)

    found = rulings(path, BEGIN, BEGIN + DAY, Reader(TEAMS))

    assert found["proven"] == {
        "cards": 4,
        "memory_bytes": 3 * 2**30,
        "median_seconds_from_detection": 960.0,
    }
    hours = sum(2 * (DAY - number * 3600 - 960) / 3600 for number in (1, 2))
    assert found["estimated"]["hours_at_most"] == pytest.approx(hours, abs=0.01)
    assert found["lost"] == {
        "counted_hours": 0.5,
        "estimated_hours": 0.5,
        "ends": {"counted": 1, "estimated": 1, "unknown": 0},
    }
    assert [row["job_id"] for row in found["largest"]] == ["job-2", "job-1"]


def test_a_moment_is_in_one_period_alone(tmp_path: Path) -> None:
    """What is decided when one period ends belongs to the next."""
    path = tmp_path / "ledger.sqlite"
    ledger(path)
    cut = BEGIN + 2 * 3600 + 900  # of the second decision

    parts = [rulings(path, *span, Reader(TEAMS)) for span in ((BEGIN, cut), (cut, BEGIN + DAY))]

    assert [part["decisions"] for part in parts] == [1, 2]
    assert [len(part["rules"]) for part in parts] == [1, 2]


def test_a_ledger_is_read_while_its_engine_runs(tmp_path: Path) -> None:
    """Neither the engine's lock nor its open file stands in the way."""
    path = tmp_path / "ledger.sqlite"
    ledger(path)
    with Ledger(path):
        assert rulings(path, BEGIN, BEGIN + DAY, Reader(TEAMS))["decisions"] == 3


def test_without_the_engines_file_the_report_says_so(tmp_path: Path) -> None:
    """On another machine than the engine's; one that was asked for by name must be there."""
    elsewhere = tmp_path / "ledger.sqlite"
    period = period_of(BEGIN, BEGIN + DAY, "UTC")
    implied = Sources("http://x", httpx.AsyncClient(), ledger=elsewhere, ledger_optional=True)

    found = told_by(implied, period, Reader(TEAMS))

    assert found["known"] is False
    assert "--ledger names a copy" in found["why"]
    with pytest.raises(LedgerUnusable):
        told_by(replace(implied, ledger_optional=False), period, Reader(TEAMS))


@pytest.mark.parametrize("content", [None, b"", b"not a database, and longer than a header" * 9])
def test_what_is_no_ledger_is_said(tmp_path: Path, content: bytes | None) -> None:
    """A missing, an empty and a foreign file."""
    path = tmp_path / "ledger.sqlite"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(LedgerUnusable, match=r"ledger\.sqlite"):
        rulings(path, BEGIN, BEGIN + DAY, Reader(TEAMS))
