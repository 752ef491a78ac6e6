"""The scheduling board: for whoever answers for the queue, and for whoever waits in it.

Top row: who waits, for how long, and whether what was promised holds. Below: the queue, what
preemption costs and how fast it is, budgets and bookings, and the scheduler itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana import boards
from grafana.links import to_engine
from grafana.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    Column,
    bars,
    graph,
    heat,
    listing,
    now,
    number,
    query,
    rows,
)
from grafana.selectors import ENGINE, SCHEDULED, SCHEDULER

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders import dashboard

LIVES = f"max(up{{{SCHEDULER}}} == 1)"
"""1 while the scheduler answers: what proves that a nought is one."""

WAITS = 'state=~"pending|held|suspended"'
STATES = {"running": GREEN, "leaving": ORANGE, "pending": BLUE, "held": GREY}


def board() -> dashboard.Dashboard:
    """The board, ready to be built."""
    board = boards.begin(
        "Scheduling",
        "Who waits, why does it take so long, and does whoever is asked to leave go politely?",
        variables=(boards.teams(),),
        hours=24,
    )
    boards.add(board, _answer())
    boards.add(board, _queue(), title="Queue")
    boards.add(board, _preemption(), title="Preemption and its receipts")
    boards.add(board, _leaves(), title="Asked through the engine")
    boards.add(board, _limits(), title="Budgets and bookings")
    boards.add_folded(board, "The scheduler's ticks, policy and problems", _daemon())
    return board


def _of(name: str, more: str = "", *, teams: bool = True) -> str:
    """A selector of the scheduler's, of the chosen teams where the metric has them."""
    labels = SCHEDULED if teams else SCHEDULER
    return f"gpuwarden_scheduler_{name}{{{labels}{',' if more else ''}{more}}}"


def _answer() -> tuple:
    booked = f"sum({_of('booked_gpus')})"
    return (
        number(
            "Waiting",
            "Jobs that wait: for cards, for a window or a budget, or until somebody releases them.",
            now(f"sum({_of('jobs', WAITS)}) or 0 * {LIVES}"),
        ),
        number(
            "Cards wanted",
            "Cards that the waiting jobs ask for.",
            now(f"sum({_of('gpus', WAITS)}) or 0 * {LIVES}"),
        ),
        number(
            "Longest wait",
            "Of a job that waits for cards and nothing else. n/a: none does.",
            now(f"max({_of('oldest_wait_seconds')}) or 0 * {LIVES} - 1"),
            unit="s",
            steps=((None, GREY), (0, GREEN), (4 * 3600, ORANGE), (86400, RED)),
        ),
        number(
            "Leaving",
            "Jobs that were asked to leave for others, and are on their way.",
            now(f"max({_of('preemptions_open', teams=False)})"),
        ),
        number(
            "Overdue",
            "Jobs that were asked to leave, are past their deadline, and still there.",
            now(f"count({_of('victim_overdue', teams=False)} == 1) or 0 * {LIVES}"),
            steps=((None, GREEN), (1, RED)),
        ),
        number(
            "Loops",
            "Jobs that came back again and again without a new epoch, and are held.",
            now(f"max({_of('requeue_loops', teams=False)})"),
            steps=((None, GREEN), (1, RED)),
        ),
        number(
            "Bookings used",
            "Of the cards of slots whose time has come, those that jobs of the team hold. n/a: no "
            "slot's time has come.",
            now(f"sum({_of('booked_used_gpus')}) / ({booked} > 0) or 0 * {LIVES} - 1"),
            unit="percentunit",
            steps=((None, GREY), (0, RED), (0.5, ORANGE), (0.8, GREEN)),
        ),
        number(
            "Engine read",
            "How long ago the scheduler last read its engine in whole. No data: the scheduler does "
            "not answer.",
            now(f"max(time() - {_of('engine_seen_timestamp_seconds', teams=False)})"),
            unit="s",
            steps=((None, GREEN), (60, ORANGE), (300, RED)),
        ),
    )


def _queue() -> tuple:
    waits = "increase(" + _of("wait_seconds_{part}") + "[$__range])"
    total, count = (waits.replace("{part}", part) for part in ("sum", "count"))
    by = "by (team, priority)"
    return (
        graph(
            "Jobs by state",
            "Held jobs start at no time by themselves: a window, a budget or a person lets them.",
            [query(f"sum by (state) ({_of('jobs')})", "{{state}}")],
            unit="short",
            stacked=True,
            colours=STATES,
        ),
        graph(
            "Who waits",
            "Waiting jobs by priority; the table below has them by team.",
            [query(f"sum by (priority) ({_of('jobs', WAITS)})", "{{priority}}")],
            unit="short",
            stacked=True,
        ),
        heat(
            "From submission to start",
            "How long jobs had waited when they first started. A cell is a span of time; the "
            "brighter, the more jobs.",
            query(
                f"sum by (le) (increase({_of('wait_seconds_bucket')}[$__rate_interval]))", "{{le}}"
            ),
            unit="s",
        ),
        listing(
            "Waiting by team and priority",
            "Jobs that first started in the shown time, and how long they had waited on average; "
            "the longest that waits now. n/a: none.",
            [
                rows(f"topk(100, round(sum {by} ({count})))", "A"),
                rows(
                    f"topk(100, sum {by} ({total}) / (sum {by} ({count}) > 0) "
                    f"or on (team, priority) sum {by} ({count}) * 0 - 1)",
                    "B",
                ),
                rows(
                    f"topk(100, max {by} ({_of('oldest_wait_seconds')}) and on (team, priority) "
                    f"sum {by} ({count}) or on (team, priority) sum {by} ({count}) * 0 - 1)",
                    "C",
                ),
            ],
            columns=(
                Column("team", "Team", width=120),
                Column("priority", "Priority", width=110),
                Column("Value #A", "Started", width=90),
                Column("Value #B", "Mean wait", "s", width=120),
                Column(
                    "Value #C",
                    "Longest now",
                    "s",
                    steps=((None, GREY), (0, GREEN), (4 * 3600, ORANGE), (86400, RED)),
                    width=120,
                ),
            ),
            sort=("Mean wait", True),
            span=12,
            height=8,
        ),
    )


def _preemption() -> tuple:
    step = _of("receipt_step_seconds_{part}", teams=False)
    total, count = (
        f"sum by (step) (increase({step.replace('{part}', part)}[$__range]))"
        for part in ("sum", "count")
    )
    requeues = f"{_of('requeues_total')}[$__rate_interval]"
    buckets = f"sum by (step, le) (increase({step.replace('{part}', 'bucket')}[$__range]))"
    return (
        graph(
            "Asked to leave",
            "By cause and what became of it. `withdrawn`: it became useless before it was "
            "followed; `ended`: the job was done by itself; `failed`: it left without saving.",
            [
                query(
                    "sum by (cause, outcome) (increase("
                    f"{_of('preemptions_total', teams=False)}[$__rate_interval])) > 0",
                    "{{cause}}: {{outcome}}",
                )
            ],
            unit="short",
            stacked=True,
        ),
        listing(
            "Receipts",
            "Each step of preemptions in the shown time, and how long it took from the step that "
            "was seen before: `acknowledged` by the trainer, `saved`, `left` (its processes have "
            "ended), `freed` (its cards hold nothing of it), `started` (who waited runs).",
            [
                rows(f"topk(20, round({count}))", "A"),
                rows(f"topk(20, {total} / ({count} > 0) or on (step) {count} * 0 - 1)", "B"),
                rows(
                    f"topk(20, (histogram_quantile(0.95, {buckets}) >= 0) "
                    f"or on (step) {count} * 0 - 1)",
                    "C",
                ),
            ],
            columns=(
                Column("step", "Step", links=(to_engine("receipts", "Receipts (engine)"),)),
                Column("Value #A", "Seen"),
                Column("Value #B", "Mean", "s"),
                Column("Value #C", "95 of 100 within", "s"),
            ),
            span=12,
            height=8,
        ),
        graph(
            "Work lost",
            "GPU time of work that preemptions have lost, where that is known, in cards: 1 is one "
            "card that works for nothing all the time.",
            [
                query(
                    "sum by (cause) (rate("
                    f"{_of('lost_gpu_seconds_total', teams=False)}[$__rate_interval]))",
                    "{{cause}}",
                )
            ],
            unit="short",
            span=8,
        ),
        graph(
            "Came back",
            "Times that jobs came back to the queue, by team. A team that comes back all the time "
            "has too little quota, or jobs that die at their start.",
            [
                query(f"topk(20, sum by (team) (increase({requeues})))", "{{team}}"),
            ],
            unit="short",
            span=8,
            stacked=True,
        ),
        graph(
            "On their way",
            "Jobs that are asked to leave, and those of them that are past their deadline.",
            [
                query(f"max({_of('preemptions_open', teams=False)})", "leaving", "A"),
                query(
                    f"count({_of('victim_overdue', teams=False)} == 1) or 0 * {LIVES}",
                    "overdue",
                    "B",
                ),
            ],
            unit="short",
            span=8,
            colours={"leaving": ORANGE, "overdue": RED},
        ),
    )


def _leaves() -> tuple:
    """What the engine makes of the requests of a scheduler that is not the jobs' own parent."""
    results = f"gpuwarden_leaves_total{{{ENGINE}}}"
    refusals = f"gpuwarden_leave_refusals_total{{{ENGINE}}}"
    return (
        graph(
            "What became of requests",
            "Only the engine signs: it asks the nodes' agents in a scheduler's place. `unheeded`: "
            "the job stayed beyond its deadline; `undeliverable`: nobody in it can read the "
            "request; `lapsed`: no agent took it on; `overtaken`: a rule decided about the job.",
            [query(f"sum by (outcome) (increase({results}[$__rate_interval])) > 0", "{{outcome}}")],
            unit="short",
            span=10,
            stacked=True,
            colours={
                "left": GREEN,
                "withdrawn": GREY,
                "overtaken": BLUE,
                "unheeded": ORANGE,
                "undeliverable": RED,
                "lapsed": RED,
            },
        ),
        graph(
            "Requests on their way",
            "Jobs that a scheduler has asked through the engine to leave, and of which it is not "
            "known what they do.",
            [query(f"max(gpuwarden_leaves_open{{{ENGINE}}})", "open")],
            unit="short",
            span=6,
            colours={"open": ORANGE},
        ),
        listing(
            "Refused requests",
            "Leaves that the engine did not take on in the shown time, by the first reason. Limits "
            "are those of `leaves` in engine.yaml.",
            [rows(f"topk(30, round(sum by (reason) (increase({refusals}[$__range]))) > 0)")],
            columns=(
                Column("reason", "Reason", links=(to_engine("receipts", "Receipts (engine)"),)),
                Column("Value", "Times"),
            ),
            span=8,
            height=8,
        ),
    )


def _limits() -> tuple:
    key = "on (team, per)"
    used, forecast = (
        f"max by (team, per) ({_of(f'budget_{name}_gpu_hours')})" for name in ("used", "forecast")
    )
    limit = f"max by (team, per, kind) ({_of('budget_limit_gpu_hours')})"
    plain = f"max by (team, per) ({_of('budget_limit_gpu_hours')})"
    return (
        listing(
            "Budgets of the policy",
            "GPU-hours of the period that runs. A hard budget lets nothing of the team start once "
            "it is used up; a soft one only warns. n/a: not known.",
            [
                rows(f"topk(100, {limit})", "A"),
                rows(f"topk(100, {used} or {key} {plain} * 0 - 1)", "B"),
                rows(f"topk(100, {used} / {key} ({plain} > 0) or {key} {plain} * 0 - 1)", "C"),
                rows(f"topk(100, {forecast} or {key} {plain} * 0 - 1)", "D"),
            ],
            columns=(
                Column(
                    "team", "Team", links=(to_engine("budgets", "Budgets (engine)"),), width=110
                ),
                Column("per", "Per", width=80),
                Column("kind", "Kind", width=80),
                Column("Value #B", "Used", "short", width=90),
                Column("Value #A", "Of", "short", width=90),
                Column(
                    "Value #C",
                    "Share",
                    "percentunit",
                    steps=((None, GREY), (0, GREEN), (0.8, ORANGE), (1, RED)),
                    width=90,
                ),
                Column("Value #D", "At the end", "short", width=100),
            ),
            sort=("Share", True),
            span=14,
            height=8,
        ),
        bars(
            "Slots",
            "Of the last week and of those ahead: `idle` has begun and is not used, `released` was "
            "given back.",
            [now(f"max by (state) ({_of('booking_slots', teams=False)})", "{{state}}")],
            unit="short",
            span=10,
        ),
        graph(
            "Booked, and used",
            "Cards of slots whose time has come, and those of them that jobs of the team hold: the "
            "gap is idle, and others may run there.",
            [
                query(f"sum({_of('booked_gpus')})", "booked", "A"),
                query(f"sum({_of('booked_used_gpus')})", "used by the team", "B"),
            ],
            unit="short",
            colours={"booked": BLUE, "used by the team": GREEN},
            styles={"booked": "dashed"},
        ),
        graph(
            "Cards of jobs",
            "What running and leaving jobs hold, and what waiting ones ask for.",
            [query(f"sum by (state) ({_of('gpus')})", "{{state}}")],
            unit="short",
            stacked=True,
            colours=STATES,
        ),
    )


def _daemon() -> tuple:
    return (
        graph(
            "Scheduler's ticks",
            "By outcome: `unseen` is one in which its engine did not answer, so that nothing was "
            "decided.",
            [
                query(
                    "sum by (outcome) (increase("
                    f"{_of('ticks_total', teams=False)}[$__rate_interval]))",
                    "{{outcome}}",
                )
            ],
            unit="short",
            span=8,
            stacked=True,
            colours={"completed": GREEN, "unseen": ORANGE, "failed": RED},
        ),
        graph(
            "Reading the engine",
            "How long ago it was last read in whole, how long a tick takes, and how long ago the "
            "last one began.",
            [
                query(
                    f"max(time() - {_of('engine_seen_timestamp_seconds', teams=False)})",
                    "since it was read",
                    "A",
                ),
                query(f"max({_of('tick_seconds', teams=False)})", "a tick takes", "B"),
                query(
                    f"max(time() - {_of('tick_timestamp_seconds', teams=False)})",
                    "since the last tick",
                    "C",
                ),
            ],
            unit="s",
            span=8,
            colours={"since it was read": ORANGE, "a tick takes": BLUE},
        ),
        listing(
            "What is wrong",
            "Problems that the scheduler tells, and cards that the engine counts as taken while no "
            "job holds them.",
            [rows(f"max by (code) ({_of('problem', teams=False)})")],
            columns=(
                Column("code", "Problem", links=(to_engine("queue", "Queue (engine)"),)),
                Column("Value", "Stands"),
            ),
            span=8,
            height=8,
        ),
        graph(
            "Quota leak",
            "Cards that the engine counts as taken and no job holds, for longer than a job takes "
            "to leave.",
            [query(f"max by (engine) ({_of('quota_leak_gpus', teams=False)})", "{{engine}}")],
            unit="short",
            colours={"kueue": RED, "slurm": RED, "local": RED},
        ),
        listing(
            "Policies in force",
            "Hashes of the policy in the shown time, and how long each was in force.",
            [
                rows(
                    "max by (hash) (count_over_time("
                    f"{_of('policy_info', teams=False)}[$__range:1m])) * 60"
                )
            ],
            columns=(Column("hash", "Policy"), Column("Value", "In force for", "s")),
            span=12,
            height=8,
        ),
        listing(
            "Versions",
            "Of the scheduler, and the engine whose queue it keeps.",
            [rows(f"max by (version, engine) ({_of('build_info', teams=False)})")],
            columns=(
                Column("version", "Version"),
                Column("engine", "Engine"),
                Column("Value", "Runs"),
            ),
            span=12,
            height=8,
        ),
    )
