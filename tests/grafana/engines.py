"""What the engine of a small fleet would have exported: cases, decisions, notices, drills, budgets.

Beside it the alert that proves that alerts are evaluated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.grafana.fleets import CARDS, GIB, JOBS, Card, Job
from tests.grafana.histories import HOUR, History

from gpuwarden.ruleengine.ledger_counters import WAIT_BOUNDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.grafana.fleets import Value
    from tests.grafana.histories import Window

LABELS = {"job": "gpuwarden-engine", "instance": "engine:9837"}
TEAMS = {"ana": "vision", "ben": "robotics", "cho": "vision", "dan": "robotics"}
"""Of the directory, which does not know eve."""

CASES = (
    ("idle-held", "moderate", "j-ben", "idle"),
    ("off-profile", "light", "j-cho", "data-loading"),
)
DECISIONS = {
    ("idle-held", "terminate", "enforce", "verified"): 24,
    ("idle-held", "terminate", "enforce", "incomplete"): 1,
    ("idle-held", "terminate", "enforce", "failed"): 1,
    ("idle-held", "terminate", "enforce", "refused"): 2,
    ("idle-held", "terminate", "enforce", "lapsed"): 1,
    ("idle-held", "notify", "enforce", "done"): 40,
    ("idle-held", "log", "enforce", "done"): 60,
    ("starved", "checkpoint", "enforce", "done"): 12,
    ("starved", "yield", "enforce", "unheeded"): 3,
    ("starved", "yield", "enforce", "undeliverable"): 1,
    ("starved", "yield", "enforce", "withdrawn"): 1,
    ("memory-hog", "requeue", "warn", "would"): 7,
    ("off-profile", "log", "observe", "done"): 9,
    ("off-profile", "terminate", "observe", "would"): 5,
}
"""Rule, action, mode and outcome of what was decided in the window, and how often."""


@dataclass(frozen=True)
class Engine:
    """What there is to export.

    Attributes:
        cards, jobs: that the engine knows.
        dies: whether it dies before the window's end.
    """

    cards: tuple[Card, ...] = CARDS
    jobs: tuple[Job, ...] = JOBS
    dies: bool = False

    def write(self, history: History) -> None:
        """Add every series of the engine."""
        window = history.window

        end = window.dies if self.dies else math.inf

        def add(name: str, value: Value, /, **labels: str) -> None:
            history.add(name, LABELS | labels, value, until=end)

        history.add("up", LABELS, lambda time: 0 if self.dies and time >= window.dies else 1)
        watchdog = {"alertname": "Watchdog", "alertstate": "firing", "service": "gpuwarden"}
        history.add("ALERTS", watchdog, 1)
        _health(add, history)
        _directory(add, self.cards, window.start)
        _decisions(add, history)
        _governance(add, history)
        if self.jobs:
            _cases(add, history)
            _expectations(add, self.jobs)


def _after(time: int, value: float) -> Callable[[int], float]:
    return lambda now: value if now >= time else 0


def _health(add: Callable[..., None], history: History) -> None:
    window = history.window
    middle = window.middle
    add("gpuwarden_engine_build_info", 1, version="0.1.0")
    add("gpuwarden_engine_tick_timestamp_seconds", lambda time: time - 2)
    add("gpuwarden_engine_tick_seconds", lambda time: 0.4 + time % 300 / 1000)
    add(
        "gpuwarden_engine_start_timestamp_seconds",
        lambda time: middle if time >= middle else window.start - 86400,
    )
    add("gpuwarden_rules_info", lambda time: 1 if time < middle else None, hash="aaaa")
    add("gpuwarden_rules_info", lambda time: 1 if time >= middle else None, hash="bbbb")
    add("gpuwarden_rules_reload_success", 1)
    for outcome, rate in (("completed", 1 / 15), ("discarded", 1 / 3600), ("overrun", 0)):
        add(
            "gpuwarden_engine_ticks_total",
            lambda time, rate=rate: int(rate * (time - window.start)),
            outcome=outcome,
        )
    for rule in ("idle-held", "starved", "off-profile", "memory-hog"):
        for truth, rate in (("yes", 0.05), ("no", 0.4), ("unknown", 0.02)):
            add(
                "gpuwarden_verdicts_total",
                lambda time, rate=rate: int(rate * (time - window.start)),
                rule=rule,
                truth=truth,
            )
        add(
            "gpuwarden_unknown_total",
            lambda time: int(0.02 * (time - window.start)),
            rule=rule,
            reason="not_measured",
        )
    for name, value in (
        ("gpuwarden_engine_failed_ticks", 0),
        ("gpuwarden_engine_enforcement_paused", 0),
        ("gpuwarden_engine_notices_undeliverable", 1),
        ("gpuwarden_engine_unproven_cards", 1),
        ("gpuwarden_engine_oldest_open_decision_timestamp_seconds", window.end - 120),
    ):
        add(name, value)
    add("gpuwarden_engine_enforcement_halted", lambda time: 1 if middle <= time < middle + 300
        else None, reason="many_at_once")  # fmt: skip
    add("gpuwarden_engine_alertmanager_up", 1, alertmanager="http://alertmanager:9093")
    add("gpuwarden_engine_prometheus", 1, server="http://prometheus:9090", state="used")
    for state, count in (("expected", 2), ("lit", 2), ("registered", 2), ("silent", 0)):
        add("gpuwarden_engine_nodes", count, state=state)
    for peer in ("fleet", "alertmanager"):
        add("gpuwarden_engine_clock_skew_seconds", 0.1, peer=peer)
    for part in ("used", "free", "wal"):
        add("gpuwarden_ledger_size_bytes", 4 * 2**20, part=part)


def _directory(add: Callable[..., None], cards: tuple[Card, ...], start: int) -> None:
    for user, team in TEAMS.items():
        add("gpuwarden_user_info", 1, user=user, team=team)
    for model in dict.fromkeys(card.name for card in cards):
        add("gpuwarden_price_per_gpu_hour", 2.5, model=model, currency="EUR")
    for card in cards:
        if card.slices:
            model = f"{card.name} MIG 1g.10gb"
            add("gpuwarden_gpu_share_ratio", 1 / 7, model=model)
            add("gpuwarden_price_per_gpu_hour", 2.5 / 7, model=model, currency="EUR")
    for team, hours in (("vision", 500), ("robotics", 100)):
        add("gpuwarden_budget_gpu_hours", hours, team=team, period="month")
        add("gpuwarden_team_gpu_seconds_total", lambda time: 2 * (time - start), team=team)
        add("gpuwarden_booking_gpus", 1, team=team)
        of = {"team": team, "period": "month"}
        add("gpuwarden_budget_limit", hours, **of, unit="GPU-hours", kind="hard")
        add("gpuwarden_budget_limit", hours * 0.9, **of, unit="GPU-hours", kind="soft")
        add("gpuwarden_budget_limit", hours * 2.5, **of, unit="EUR", kind="soft")
        # what was used in money is not known, as where a card has no price
        add("gpuwarden_budget_used", 80, **of, unit="GPU-hours")
        for bound, share in (("low", 1.4), ("expected", 1.5), ("high", 1.7)):
            add("gpuwarden_budget_forecast", 80 * share, **of, unit="GPU-hours", bound=bound)
        for kind in ("hard", "soft"):
            add("gpuwarden_budget_used_ratio", 80 / hours, **of, kind=kind)


def waited(place: int) -> int:
    """Seconds from the detection to the decision, of the one at this place."""
    return 600 + place * 7 % 10 * 300


def _decisions(add: Callable[..., None], history: History) -> None:
    """Spread over the window: the last of each is in the middle of its last hour."""
    window = history.window

    def times(count: int, late: int = 0) -> list[int]:
        last = window.middle - late
        lapse = (last - window.start) // count
        return [last - place * lapse for place in range(count)]

    def counted(times: list[int], each: float = 1) -> Callable[[int], float]:
        return lambda now: each * sum(time <= now for time in times)

    for (rule, action, mode, outcome), count in DECISIONS.items():
        # one end is marked in the last hour: the others' last ones are before it
        at = times(count, 0 if outcome == "verified" else HOUR)
        add("gpuwarden_decisions_total", counted(at), rule=rule, action=action, mode=mode,
            outcome=outcome)  # fmt: skip
    ends = times(24)
    for rule, action, at in (
        ("idle-held", "terminate", ends),
        ("starved", "checkpoint", times(12)),
    ):
        named = {"rule": rule, "action": action}
        for bound in (*WAIT_BOUNDS, None):
            short = [
                time for place, time in enumerate(at) if bound is None or waited(place) <= bound
            ]
            add(
                "gpuwarden_decision_wait_seconds_bucket",
                counted(short),
                **named,
                le="+Inf" if bound is None else f"{bound}.0",
            )
        total = sum(waited(place) for place in range(len(at)))
        add("gpuwarden_decision_wait_seconds_sum", counted(at, total / len(at)), **named)
        add("gpuwarden_decision_wait_seconds_count", counted(at), **named)
    add("gpu_idle_detected_total", counted(ends))
    add("gpu_released_success_total", counted(ends))
    add("gpu_release_failed_total", 0)
    add("gpu_memory_freed_bytes_total", counted(ends, 30 * GIB))
    # what j-dan held until noon others have held since
    noon = window.end - 12 * HOUR
    add("gpuwarden_reclaimed_gpu_seconds_total", lambda time: max(0, time - noon - HOUR) / 2,
        job_id="j-dan", user="dan", team="robotics", rule="idle-held")  # fmt: skip


LEAVES = {("priority", "left"): 14, ("priority", "unheeded"): 2, ("booking", "undeliverable"): 1}
"""Cause and outcome of what a scheduler asked for in the window, and how often."""


def _leaves(add: Callable[..., None], window: Window) -> None:
    add("gpuwarden_leaves_open", 1)
    grown = window.end - window.start
    for (cause, outcome), count in LEAVES.items():
        add(
            "gpuwarden_leaves_total",
            lambda time, count=count: int(count * (time - window.start) / grown),
            cause=cause,
            outcome=outcome,
        )
    for reason, count in (("no_run", 5), ("limit_per_hour", 2), ("kept", 0)):
        add(
            "gpuwarden_leave_refusals_total",
            lambda time, count=count: count * (time - window.start) // grown,
            reason=reason,
        )


def _governance(add: Callable[..., None], history: History) -> None:
    window = history.window
    _leaves(add, window)
    for channel in ("email", "slack"):
        for outcome, rate in (("delivered", 1 / 1800), ("refused", 1 / 7200)):
            add(
                "gpuwarden_notices_total",
                lambda time, rate=rate: int(rate * (time - window.start)),
                channel=channel,
                outcome=outcome,
            )
    add("gpuwarden_keeps_total", _after(window.middle, 2), rule="idle-held", role="owner")
    for kind in ("appeal", "regret"):
        add("gpuwarden_objections_total", _after(window.middle, 1), rule="idle-held", kind=kind)
        add("gpuwarden_canary_objections", 1, rule="starved", kind=kind)
    add("gpuwarden_canary_share_ratio", 0.1, rule="starved")
    add("gpuwarden_rule_held_back", lambda time: 1 if time >= window.middle else None,
        rule="starved", reason="appeals")  # fmt: skip
    add("gpuwarden_jobs_came_back_total", _after(window.middle, 1), rule="idle-held")
    for node, result in (("n1:9835", "passed"), ("n2:9835", "slow")):
        add("gpuwarden_drill_last_success_timestamp_seconds", window.start - HOUR, node=node)
        add("gpuwarden_drill_due_timestamp_seconds", window.end + HOUR, node=node)
        add("gpuwarden_drill_result", 1, node=node, result=result)
        add("gpuwarden_drill_step_seconds", 4, node=node, step="detected")
    add("gpuwarden_drill_step_budget_seconds", 60, step="detected")


def _cases(add: Callable[..., None], history: History) -> None:
    middle = history.window.middle

    def since(value: float) -> Callable[[int], float | None]:
        return lambda time: value if time >= middle else None

    for rule, level, job, cause in CASES:
        one = {"rule": rule, "job_id": job}
        add("gpuwarden_violation_active", since(1), **one, level=level)
        add("gpuwarden_violation_cause", since(1), **one, cause=cause)
        add("gpuwarden_violation_detected_timestamp_seconds", since(middle), **one)
    for rule, job, action in (
        ("idle-held", "j-ben", "terminate"),
        ("off-profile", "j-cho", "checkpoint"),
    ):
        add("gpuwarden_violation_due_timestamp_seconds", since(middle + 2700), rule=rule,
            job_id=job, action=action)  # fmt: skip
    # a case whose cause is not known yet, of a job that no exporter shows any more
    gone = {"rule": "memory-hog", "job_id": "j-gone"}
    add("gpuwarden_violation_active", 1, **gone, level="light")
    add("gpuwarden_violation_detected_timestamp_seconds", history.window.start, **gone)
    for job, reason in (("j-eve", "whitelist"), ("j-cho", "kept")):
        add("gpuwarden_protected", 1, rule="idle-held", job_id=job, reason=reason)
    for step, ago in (("received", 10), ("saving", 30), ("leaving", 110)):
        add("gpuwarden_receipt_timestamp_seconds", since(middle + ago), job_id="j-cho", step=step)


def _expectations(add: Callable[..., None], jobs: tuple[Job, ...]) -> None:
    for job in jobs:
        if job.images is not None:
            add("gpuwarden_expected_throughput_images_per_second", 78, job_id=job.job_id)
            add("gpuwarden_expected_gpu_memory_bytes", 10.5 * GIB, job_id=job.job_id)
            add("gpuwarden_expected_gpu_utilization_ratio", 0.82, job_id=job.job_id)
