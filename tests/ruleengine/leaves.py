"""A leave as a ledger has it, for suites that need one without an engine that asks."""

from __future__ import annotations

import dataclasses
from typing import Any

from gpuwarden.ruleengine.leave_records import Leave, LeaveState
from gpuwarden.ruleengine.records import PlatformAct


def a_leave(now: float, name: str = "leave-1", **changes: Any) -> Leave:
    """A leave that was just asked for."""
    made = Leave(
        id=name,
        key=name,
        by="planner",
        job_id="proc-1",
        run_id="run-1",
        user="alice",
        at="epoch",
        after="requeue",
        deadline=600.0,
        cause="priority",
        reason="high-1 goes first",
        successor="8",
        hosts=("127.0.0.1",),
        epoch=1,
        expires=now,
        created_at=now,
        state=LeaveState.ASKED,
        why="",
        finished_at=None,
        act=PlatformAct(name, "", "{}", "watching", now),
        receipts={},
        changed_at=now,
    )
    return dataclasses.replace(made, **changes)
