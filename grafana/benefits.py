"""Panels of the governance board: what rules bring, what idleness costs, what is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.links import to_engine
from grafana.panels import (
    GREEN,
    GREY,
    ORANGE,
    RED,
    Column,
    bars,
    graph,
    listing,
    note,
    now,
    query,
    rows,
)
from grafana.selectors import ENGINE, RECORDED, RULED, highest

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders.prometheus import Dataquery

TEAM = f'{RECORDED},team=~"$team"'
"""Of recorded series that name a team: the chosen teams."""

ENGINE_TEAM = f'{ENGINE},team=~"$team"'
"""Likewise of the engine's series that name a team."""

FULL = ((None, GREY), (0, GREEN), (0.8, ORANGE), (1, RED))
"""Colours of a used share of a budget; below 0 it is not known."""

MEASURED = """
**Measured**: ends, and the memory they gave back. The agent ends processes and asks NVML until it
no longer lists one of them; memory is what NVML had for them right before. *Not proven* stays so.

**Counted**: decisions, keeps, appeals, regrets and returns, each once, by the engine's ledger.

**Estimated**: *GPU-hours given back* = hours for which other jobs held the cards of an ended job
within 24 h after its end; nobody knows whether they would have found other cards. *Cost* = cards
held x price at that moment; a shared card is shared out, a MIG instance is its share, and time in
which nobody looked is no use. *Time to act* is read from the buckets of a histogram.
Every formula with its doubts: `docs/money.md`.
"""


def panels() -> tuple:
    """What was given back, lost and left idle, in hours and money; then the budgets of teams."""

    def over(name: str, by: str, chosen: str = TEAM) -> str:
        """What was recorded over the shown time: a piece every five minutes, and gaps are 0."""
        return f"sum by ({by}) (sum_over_time({name}{{{chosen}}}[$__range]))"

    flagged = f"max by (rule, job_id) (gpuwarden_violation_active{{{RULED}}})"
    # each job in one currency, or the join would be ambiguous: that in which it costs most
    price = (
        f"topk by (job_id) (1, sum by (job_id, currency) (holder:gpu_cost_per_hour:sum{{{TEAM}}}))"
    )
    return (
        bars(
            "GPU-hours given back",
            "Estimate, by the rule that ended the job: hours for which others held its cards "
            "within a day after.",
            [
                now(
                    "topk(12, "
                    + over("job:reclaimed_gpu_hours:increase5m", "rule", f'{TEAM},rule=~"$rule"')
                    + ")",
                    "{{rule}}",
                )
            ],
            unit="h",
            span=6,
        ),
        bars(
            "Work lost by ends",
            "Price of the work since the last saved state when a job ended, by its owner's team "
            "and by how it ended, as the nodes counted it ten minutes after: hold was ended by a "
            "rule, requeue comes back, died was not asked.",
            [
                now(
                    f"topk(12, {over('team:lost_cost:increase5m', 'team, reason, currency')} > 0)",
                    "{{team}}: {{reason}}, {{currency}}",
                )
            ],
            unit="short",
            span=6,
        ),
        bars(
            "Cost of idleness by team",
            "Price of the time in which jobs held cards and used them at most 5 % for five "
            "minutes. Not measurable is not idle.",
            [
                now(
                    f"topk(12, {over('team:gpu_held_idle_cost:sum5m', 'team, currency')})",
                    "{{team}}, {{currency}}",
                )
            ],
            unit="short",
            span=6,
        ),
        bars(
            "Cost of idleness by user",
            "The same by user: the twelve highest.",
            [
                now(
                    f"topk(12, {over('user:gpu_held_idle_cost:sum5m', 'user, currency')})",
                    "{{user}}, {{currency}}",
                )
            ],
            unit="short",
            span=6,
        ),
        _budgets(),
        graph(
            "Price per hour of what rules found",
            "What the jobs with an open case cost an hour, by rule, whatever of it is of use: a "
            "job that two rules found counts for both.",
            [
                query(
                    highest(
                        12,
                        "rule, currency",
                        f"sum by (rule, currency) ({flagged} * on (job_id) group_left (currency) "
                        f"{price})",
                    ),
                    "{{rule}}, {{currency}}",
                )
            ],
            unit="short",
            span=12,
        ),
        note(
            "What of this is measured",
            "What is measured, what is counted, and what is an estimate by which formula.",
            MEASURED,
            height=6,
        ),
    )


def _budgets() -> object:
    key = "(team, period, unit)"
    # the largest, the same in every column
    limit = f"topk(100, min by {key} (gpuwarden_budget_limit{{{ENGINE_TEAM}}}))"
    used = f"max by {key} (gpuwarden_budget_used{{{ENGINE_TEAM}}})"
    forecast = f'max by {key} (gpuwarden_budget_forecast{{{ENGINE_TEAM},bound="expected"}})'

    def known(expression: str, ref: str) -> Dataquery:
        # topk() changes nothing: it says to the linter how many there are
        return rows(
            f"topk(100, {expression} and on {key} {limit} or on {key} {limit} * 0 - 1)", ref
        )

    return listing(
        "Budgets",
        "Of each team for each period of the calendar, the tighter of several; and what will be "
        "used by the period's end at the pace of late. n/a: use is not known, and then no budget "
        "counts against anybody. No data: there are no budgets, or the engine does not answer.",
        [
            rows(limit, "A"),
            known(used, "B"),
            known(f"{used} / on {key} ({limit} > 0)", "C"),
            known(f"{forecast} / on {key} ({limit} > 0)", "D"),
        ],
        columns=(
            Column("team", "Team", links=(to_engine("budgets", "Budgets (engine)"),), width=90),
            Column("period", "Period", width=80),
            Column("Value #A", "Budget", width=80),
            Column("unit", "Unit", width=100),
            Column("Value #B", "Used", width=80),
            Column("Value #C", "Used share", "percentunit", steps=FULL, width=100),
            Column("Value #D", "By the end", "percentunit", steps=FULL, width=100),
        ),
        span=12,
        height=8,
    )
