"""What the engine wrote down, and finds again on a disk that may have damaged it."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from typing import TYPE_CHECKING

from bench.fuzz.edges import JSON_WORDS, Attack, require
from gpuwarden.ruleengine.case_records import Case, CaseState
from gpuwarden.ruleengine.ledger import Ledger, LedgerUnusable
from gpuwarden.ruleengine.records import Change

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

CASE = Case(
    rule_id="idle",
    job_id="proc-1",
    run_id="run-1",
    user="alice",
    state=CaseState.NOTIFIED,
    opened_at=1_800_000_000.0,
    detected_at=1_800_000_300.0,
)


def _cases(folder: Path, stack: ExitStack) -> Callable[[bytes], None]:
    path = folder / "ledger.sqlite"
    ledger = stack.enter_context(Ledger(path))
    ledger.save([Change(None, CASE, "enforce", ())], time=1.0)
    beside = sqlite3.connect(path, isolation_level=None)
    stack.callback(beside.close)
    beside.execute("PRAGMA synchronous=OFF")

    def attack(data: bytes) -> None:
        beside.execute("UPDATE cases SET body=?", (data.decode(errors="replace"),))
        with suppress(LedgerUnusable):
            for stored in ledger.open_cases():
                require(holds=stored.case.encode() != "", what="a case that cannot be written")
        with suppress(LedgerUnusable):
            ledger.open_case("idle", "proc-1")

    return attack


ATTACKS = (
    Attack(
        "cases of the ledger",
        _cases,
        (CASE.encode().encode(),),
        (*JSON_WORDS, b'"state":"due"', b'"marks":[', b'"acts":[', b'"promises":[', b'"figures":['),
        of="engine",
    ),
)
