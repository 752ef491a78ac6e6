"""Gathered figures and ledgers to report on, made by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.reports.documents import document
from gpuwarden.ruleengine.reports.gatherings import Gathered, Nodes, Rows
from gpuwarden.ruleengine.reports.periods import period_of
from gpuwarden.ruleengine.reports.plans import Sizes
from gpuwarden.ruleengine.reports.readers import Reader
from gpuwarden.ruleengine.reports.rulings import unknown
from gpuwarden.ruleengine.reports.waits import NOBODY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

BEGIN = 1_764_028_800.0
"""Tuesday, 2025-11-25 00:00 UTC."""
DAY = 86400.0
TEAMS = {"ana": "vision", "ben": "robotics", "cho": "vision"}


def gathered(
    held: Mapping[str, Sequence[float]],
    idle: Mapping[str, Sequence[float]] | None = None,
    *,
    days: int = 7,
    zone: str = "UTC",
    answered: Sequence[float] | None = None,
    cost: Mapping[str, float] | None = None,
    begin: float = BEGIN,
) -> Gathered:
    """A fleet of 10 cards on one node.

    Args:
        held: user -> hours of each day.
        idle: likewise, those of them that were idle.
        days: how many of 24 hours.
        zone: of the report.
        answered: share of each day in which the node answered; the whole of it by default.
        cost: user -> euros in all.
        begin: Unix time.
    """
    period = period_of(begin, begin + days * DAY, zone)
    per_day = period.count // days
    shares = np.repeat(np.array(answered or [1.0] * days), per_day)

    def rows(hours: Mapping[str, Sequence[float]]) -> Rows:
        return Rows(
            tuple((user, "") for user in hours),
            np.array([np.repeat(np.array(own) * 3600 / per_day, per_day) for own in hours.values()])
            if hours
            else np.zeros((0, period.count)),
            shares * period.bin,
            "sampled",
        )

    def one(values: Any, source: str = "sampled") -> Rows:
        return Rows(((),), np.array([values]), shares * period.bin, source)

    nothing = Rows((), np.zeros((0, period.count)), np.zeros(period.count), "")
    level = np.where(shares > 0, 0.5, np.nan)
    money = Rows(
        tuple((user, "", "EUR") for user in cost or {}),
        np.array([[amount, *[0.0] * (period.count - 1)] for amount in (cost or {}).values()]),
        shares,
        "user:gpu_cost:sum5m",
    )
    return Gathered(
        period,
        Nodes(shares * period.bin, np.full(period.count, period.bin)),
        {
            "cards": one(shares * 10 * period.bin),
            "utilization": one(level),
            "p10": one(level * 0),
            "p50": one(level),
            "p90": one(level * 2),
            "jobs": one(shares * 4 * period.bin),
            "held": rows(held),
            "idle": rows(idle or {}),
            "idle_jobs": Rows(
                tuple((f"job-of-{user}", user, "") for user in idle or {}),
                np.array([[sum(own) * 3600] for own in (idle or {}).values()]),
                shares,
                "sampled",
            ),
            "cost": money if cost else nothing,
            "idle_cost": money if cost else nothing,
            "lost": nothing,
            "lost_cost": nothing,
            "reclaimed": nothing,
        },
        tuple({("n1:9835", "0"): 3, ("n1:9835", "1"): 1} for _ in period.days()),
        Sizes(10, (15.0,), ()),
    )


def told(
    found: Gathered,
    reader: Reader | None = None,
    *,
    earlier: Gathered | None = None,
    rulings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The document of gathered figures."""
    said = rulings or unknown("no ledger was given")
    return document(
        found,
        reader or Reader(TEAMS),
        earlier=earlier,
        rulings=said,
        earlier_rulings=said,
        waiting=unknown(NOBODY),
        made_at=BEGIN + 8 * DAY,
    )


def ledger(path: Path) -> None:
    """A ledger with two proven ends of ben's, one refused of ana's, a keep and two objections."""
    with Ledger(path) as made, made.transaction() as db:
        for number, (user, rule) in enumerate(
            (("ben", "idle-held"), ("ben", "idle-held"), ("ana", "memory-hog")), start=1
        ):
            job = f"job-{number}"
            db.execute(
                "INSERT INTO cases (id, rule_id, job_id, state, body, opened_at) "
                "VALUES (?, ?, ?, 'verified', ?, ?)",
                (number, rule, job, json.dumps({"user": user}), BEGIN + number * 3600),
            )
            state = "refused" if user == "ana" else "verified"
            proof = {"proof": {"memory_freed": number * 2**30}}
            db.execute(
                "INSERT INTO decisions (id, epoch, case_id, rule_id, job_id, user, action, state, "
                "host, body, signature, gpus, evidence, grace, expires, created_at, finished_at, "
                "report) VALUES (?, 1, ?, ?, ?, ?, 'terminate', ?, 'n1', x'', '', ?, '', 1, 1, "
                "?, ?, ?)",
                (
                    f"d-{number}",
                    number,
                    rule,
                    job,
                    user,
                    state,
                    json.dumps(["GPU-1", "GPU-2"]),
                    BEGIN + number * 3600 + 900,
                    BEGIN + number * 3600 + 960,
                    json.dumps(proof),
                ),
            )
        db.execute(
            "INSERT INTO keeps (rule_id, job_id, role, by, reason, seconds, granted_at, until) "
            "VALUES ('idle-held', 'job-1', 'owner', 'ben', 'a secret of ben', 7200, ?, ?)",
            (BEGIN + 100, BEGIN + 7300),
        )
        for kind, job in (("appeal", "job-1"), ("regret", "job-3")):
            db.execute(
                "INSERT INTO objections (rule_id, kind, job_id, subject, source, by, role, reason, "
                "at) VALUES ('idle-held', ?, ?, ?, 'word', 'x', 'owner', 'because', ?)",
                (kind, job, job, BEGIN + 9000),
            )
        db.execute(
            "INSERT INTO losses (decision_id, instances, seconds, cards, saved, currency, "
            "gpu_seconds, counted_at) VALUES ('d-1', '[]', 60, 2, 1, '', 1800, ?)",
            (BEGIN + 9000,),
        )
        db.execute(
            "INSERT INTO losses (decision_id, instances, seconds, cards, saved, currency) "
            "VALUES ('d-2', '[]', 900, 2, 1, '')"
        )
