"""The governance board: for whoever answers for the rules, and for whoever writes them.

Top row: what was done, whether it is proven, and what speaks against it. Below: decisions and how
long they took, what they brought and cost, false alarms, notices and drills, and whether the engine
itself may be relied on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana import benefits, boards
from grafana.links import Link, to_engine
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
    timeline,
)
from grafana.selectors import ENGINE, RULED

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders import dashboard
    from grafana_foundation_sdk.builders.prometheus import Dataquery

LIVES = f"max(up{{{ENGINE}}} == 1)"
"""1 while the engine answers: what proves that a nought is one."""

ENDING = 'action=~"terminate|requeue",mode="enforce"'
RULES_PAGE = Link("Rule (engine)", '${engine}/rules#${__data.fields["Rule"]}', elsewhere=True)


def board() -> dashboard.Dashboard:
    """The board, ready to be built."""
    board = boards.begin(
        "Governance",
        "What do the rules do, is it proven, what does it bring, and whom does it hit wrongly?",
        variables=(boards.teams(), boards.rules()),
        hours=24,
    )
    boards.add(board, (*_answer(), *_rules()))
    boards.add(board, _decisions(), title="Decisions")
    boards.add(board, benefits.panels(), title="What it brings, and what idleness costs")
    boards.add(board, _alarms(), title="False alarms")
    boards.add(board, _told(), title="Notices and drills")
    boards.add(board, _leave(), title="Can the engine be relied on?")
    boards.add_folded(board, "The engine's ticks, verdicts and rule files", _engine())
    return board


def grown(selector: str, by: str = "") -> str:
    """How often it was counted in the shown time, to whole numbers: increase() extrapolates."""
    of = f" by ({by})" if by else ""
    return f"round(sum{of} (increase({selector}[$__range])))"


def _answer() -> tuple:
    decided = f"gpuwarden_decisions_total{{{RULED},{ENDING}"
    objections = grown(f"gpuwarden_objections_total{{{RULED}}}")
    returns = grown(f"gpuwarden_jobs_came_back_total{{{RULED}}}")
    proven = f'{decided},outcome="verified"}}'
    waits = f"sum by (le) (increase(gpuwarden_decision_wait_seconds_bucket{{{RULED}}}[$__range]))"
    verdicts = f"sum(increase(gpuwarden_verdicts_total{{{RULED}}}[$__range]))"
    unknown = f'sum(increase(gpuwarden_verdicts_total{{{RULED},truth="unknown"}}[$__range]))'
    return (
        number(
            "Jobs ended",
            "Ended by a rule in the shown time, and proven: NVML lists none of their processes.",
            now(grown(proven)),
        ),
        number(
            "Not proven",
            "NVML still listed a process when the time for the proof was over, or the agent met an "
            "error.",
            now(grown(f'{decided},outcome=~"incomplete|failed"}}')),
            steps=((None, GREEN), (1, RED)),
        ),
        number(
            "Memory back",
            "Measured: GPU memory of the ended processes, as NVML had it right before their end. "
            "Of all rules.",
            now(f"sum(increase(gpu_memory_freed_bytes_total{{{ENGINE}}}[$__range]))"),
            unit="bytes",
        ),
        number(
            "Objections",
            "For each job that was ended: appeals of owners, ends that operators regret, and jobs "
            "that came back by themselves. More than a few in a hundred: look at the rules below. "
            "n/a: no job was ended.",
            now(f"({objections} + {returns}) / ({grown(proven)} > 0) or 0 * {LIVES} - 1"),
            unit="percentunit",
            steps=((None, GREY), (0, GREEN), (0.05, ORANGE), (0.2, RED)),
        ),
        number(
            "Time to act",
            "Median time from the moment a rule's condition was met to the decision that was "
            "carried out: what owners have for saving their work. From buckets, an estimate. n/a: "
            "nothing was decided.",
            now(f"(histogram_quantile(0.5, {waits}) >= 0) or 0 * {LIVES} - 1"),
            unit="s",
        ),
        number(
            "Unknown",
            "Share of all verdicts that could not be reached: data was missing, or too old. They "
            "do nothing. n/a: nothing was judged.",
            now(f"{unknown} / ({verdicts} > 0) or 0 * {LIVES} - 1"),
            unit="percentunit",
            steps=((None, GREY), (0, GREEN), (0.1, ORANGE), (0.3, RED)),
        ),
        number(
            "Cannot be told",
            "Open cases that wait for ever, since no notice can reach the owner: add an address, "
            "or a deputy, to the directory.",
            now(f"max(gpuwarden_engine_notices_undeliverable{{{ENGINE}}})"),
            steps=((None, GREEN), (1, ORANGE)),
        ),
        number(
            "May end jobs",
            "`halted`: the engine ends nobody, since something looks like a fault of the data. "
            "`paused`: a person has stopped every end. No data: the engine does not answer.",
            now(
                f"2 * max(gpuwarden_engine_enforcement_paused{{{ENGINE}}} == 1) "
                f"or max(gpuwarden_engine_enforcement_halted{{{ENGINE}}}) or 0 * {LIVES}"
            ),
            states=(("0", "yes", GREEN), ("1", "halted", RED), ("2", "paused", ORANGE)),
        ),
    )


def _decisions() -> tuple:
    every = f"gpuwarden_decisions_total{{{RULED}}}"
    decided = f'gpuwarden_decisions_total{{{RULED},action!="log"}}'
    return (
        graph(
            "Decisions",
            "By action, mode and outcome, without those that only write down. In observe and warn "
            "nothing is done: `would` counts what would have been.",
            [
                query(
                    f"sum by (action, mode, outcome) (increase({decided}[$__rate_interval])) > 0",
                    "{{action}} ({{mode}}): {{outcome}}",
                )
            ],
            unit="short",
            stacked=True,
        ),
        heat(
            "From detection to action",
            "How long jobs had between the moment a rule's condition was met and the decision that "
            "was carried out. A cell is a span of time; the brighter, the more decisions.",
            query(
                "sum by (le) (increase(gpuwarden_decision_wait_seconds_bucket"
                f"{{{RULED}}}[$__rate_interval]))",
                "{{le}}",
            ),
            unit="s",
        ),
        listing(
            "What was decided",
            "In the shown time. `verified` is proven by NVML; `refused` is the agent's word (its "
            "protect list, a kill switch, another process than was meant); `lapsed` never arrived; "
            "`unheeded`, `undeliverable` and `withdrawn` are of requests to save or to leave.",
            [
                rows(
                    f"topk(100, {grown(every, 'rule, action, mode, outcome')} > 0)",
                )
            ],
            columns=(
                Column("rule", "Rule", links=(RULES_PAGE, to_engine("decisions", "Decisions"))),
                Column("action", "Action"),
                Column("mode", "Mode"),
                Column("outcome", "Outcome"),
                Column("Value", "Times"),
            ),
            span=14,
        ),
        listing(
            "How long each action took",
            "Mean time from detection to the decision that was carried out.",
            [
                rows(
                    "topk(100, sum by (rule, action) "
                    f"(increase(gpuwarden_decision_wait_seconds_sum{{{RULED}}}[$__range])) "
                    "/ (sum by (rule, action) "
                    f"(increase(gpuwarden_decision_wait_seconds_count{{{RULED}}}[$__range])) > 0))",
                )
            ],
            columns=(
                Column("rule", "Rule", links=(RULES_PAGE,)),
                Column("action", "Action"),
                Column("Value", "Mean time", "s"),
            ),
            span=10,
        ),
    )


def _rules() -> tuple:
    verdicts = f"sum by (rule) (increase(gpuwarden_verdicts_total{{{RULED}}}[$__range]))"
    unknown = verdicts.replace("}", ',truth="unknown"}')

    def known(expression: str, ref: str) -> Dataquery:
        """Every rule that judged has the column; 0 is true where nothing was counted."""
        return rows(f"{expression} or on (rule) {verdicts} * 0", ref)

    decided = f"gpuwarden_decisions_total{{{RULED},{ENDING}"
    return (
        listing(
            "Rules",
            "What each rule that judged in the shown time came to, and what speaks against it. A "
            "rule with many open cases and many objections asks for too much; one without verdicts "
            "is missing here.",
            [
                known(f"count by (rule) (gpuwarden_violation_active{{{RULED}}})", "A"),
                known(grown(f'{decided},outcome="verified"}}', "rule"), "B"),
                known(grown(f'{decided},outcome=~"incomplete|failed"}}', "rule"), "C"),
                known(grown(f"gpuwarden_keeps_total{{{RULED}}}", "rule"), "D"),
                known(grown(f"gpuwarden_objections_total{{{RULED}}}", "rule"), "E"),
                known(grown(f"gpuwarden_jobs_came_back_total{{{RULED}}}", "rule"), "F"),
                known(f"count by (rule) (gpuwarden_protected{{{RULED}}})", "G"),
                rows(
                    f"{unknown} / ({verdicts} > 0) or on (rule) {verdicts} * 0 - 1",
                    "H",
                ),
            ],
            columns=(
                Column("rule", "Rule", links=(RULES_PAGE,)),
                Column("Value #A", "Open cases", steps=((None, GREY), (1, ORANGE))),
                Column("Value #B", "Ended"),
                Column("Value #C", "Not proven", steps=((None, GREY), (1, RED))),
                Column("Value #D", "Keeps"),
                Column("Value #E", "Objections", steps=((None, GREY), (1, ORANGE))),
                Column("Value #F", "Came back", steps=((None, GREY), (1, ORANGE))),
                Column("Value #G", "Protected now"),
                Column(
                    "Value #H",
                    "Unknown",
                    "percentunit",
                    steps=((None, GREY), (0, GREEN), (0.1, ORANGE), (0.3, RED)),
                ),
            ),
        ),
    )


def _alarms() -> tuple:
    return (
        bars(
            "What spoke against rules",
            "In the shown time: keeps (owners or operators who asked for more time), appeals of "
            "owners, ends that operators regret, and jobs that came back by themselves. Each is a "
            "hint of a false alarm, and none is proof of one.",
            [
                now(
                    f"topk(20, {grown(f'gpuwarden_keeps_total{{{RULED}}}', 'rule, role')} > 0)",
                    "{{rule}}: keep of {{role}}",
                    "A",
                ),
                now(
                    "topk(20, "
                    f"{grown(f'gpuwarden_objections_total{{{RULED}}}', 'rule, kind')} > 0)",
                    "{{rule}}: {{kind}}",
                    "B",
                ),
                now(
                    f"topk(20, {grown(f'gpuwarden_jobs_came_back_total{{{RULED}}}', 'rule')} > 0)",
                    "{{rule}}: came back",
                    "C",
                ),
            ],
            unit="short",
        ),
        graph(
            "Protected jobs",
            "Jobs that a rule would have judged, by what protects them: the whitelist, a keep, or "
            "a guard. A whitelist that only grows hides rules that are wrong.",
            [
                query(
                    "count by (reason) "
                    f"(max by (rule, job_id, reason) (gpuwarden_protected{{{RULED}}}))",
                    "{{reason}}",
                )
            ],
            unit="short",
            span=6,
            stacked=True,
        ),
        listing(
            "Rules on trial",
            "Rules that may end only a share of the owners' jobs (`canary`), what counts against "
            "them now, and which of them have fallen back to warn.",
            [
                rows(f"max by (rule) (gpuwarden_canary_share_ratio{{{RULED}}})", "A"),
                rows(
                    "sum by (rule) (gpuwarden_canary_objections"
                    f'{{{RULED},kind="appeal"}}) or on (rule) '
                    f"max by (rule) (gpuwarden_canary_share_ratio{{{RULED}}}) * 0",
                    "B",
                ),
                rows(
                    "sum by (rule) (gpuwarden_canary_objections"
                    f'{{{RULED},kind="regret"}}) or on (rule) '
                    f"max by (rule) (gpuwarden_canary_share_ratio{{{RULED}}}) * 0",
                    "C",
                ),
                rows(
                    "topk(100, "
                    f"max by (rule, reason) (gpuwarden_rule_held_back{{{RULED}}}) or on (rule) "
                    "label_replace(max by (rule) "
                    f'(gpuwarden_canary_share_ratio{{{RULED}}}) * 0, "reason", "no", "", ""))',
                    "D",
                ),
            ],
            columns=(
                Column("rule", "Rule", links=(RULES_PAGE,)),
                Column("Value #A", "Of owners", "percentunit", width=100),
                Column("Value #B", "Appeals", width=90),
                Column("Value #C", "Regrets", width=90),
                Column("reason", "Fallen back for"),
            ),
            span=10,
            height=8,
        ),
    )


def _told() -> tuple:
    sent = f"gpuwarden_notices_total{{{ENGINE}"
    # a hundred, those that are due first
    nodes = f"bottomk(100, max by (node) (gpuwarden_drill_due_timestamp_seconds{{{ENGINE}}}))"
    good = 'outcome="delivered"'
    return (
        graph(
            "Notices",
            "What the last hop sent to owners, by channel and outcome. A notice counts as told "
            "only with the channel's proof of this one message; without it nothing severe follows.",
            [
                query(
                    f"sum by (channel, outcome) (increase({sent}}}[$__rate_interval]))",
                    "{{channel}}: {{outcome}}",
                )
            ],
            unit="short",
            span=8,
            stacked=True,
        ),
        listing(
            "Delivered",
            "Attempts in the shown time, and the share of them that the channel proved.",
            [
                rows(f"sum by (channel) (increase({sent}}}[$__range]))", "A"),
                rows(
                    f"sum by (channel) (increase({sent},{good}}}[$__range])) "
                    f"/ (sum by (channel) (increase({sent}}}[$__range])) > 0)"
                    f" or on (channel) sum by (channel) (increase({sent}}}[$__range])) * 0 - 1",
                    "B",
                ),
            ],
            columns=(
                Column("channel", "Channel", width=110),
                Column(
                    "Value #B",
                    "Proven",
                    "percentunit",
                    steps=((None, GREY), (0, RED), (0.5, ORANGE), (0.9, GREEN)),
                ),
            ),
            span=5,
            height=8,
        ),
        listing(
            "Drills",
            "Real ends of processes that exist only for it, node by node: the proof that an end "
            "would work today. n/a: never proven.",
            [
                rows(
                    "(max by (node) (time() - gpuwarden_drill_last_success_timestamp_seconds"
                    f"{{{ENGINE}}}) or on (node) {nodes} * 0 - 1) and on (node) {nodes}",
                    "A",
                ),
                rows(f"{nodes} - time()", "B"),
                rows(
                    f"(max by (node, result) (gpuwarden_drill_result{{{ENGINE}}}) or on (node) "
                    f'label_replace({nodes} * 0, "result", "none yet", "", "")) '
                    f"and on (node) {nodes}",
                    "C",
                ),
            ],
            columns=(
                Column("node", "Node"),
                Column("result", "Last drill"),
                Column("Value #A", "Last proven, ago", "s"),
                Column("Value #B", "Due in", "s", steps=((None, RED), (0, GREEN))),
            ),
            span=11,
            height=8,
        ),
    )


def _leave() -> tuple:
    return (
        timeline(
            "Ends",
            "Whether the engine may end jobs, and why it does not: halted by what looks like a "
            "fault of the data, or paused by a person. A gap: the engine did not answer.",
            [
                query(
                    f"max(gpuwarden_engine_enforcement_paused{{{ENGINE}}}) * 2",
                    "paused by a person",
                    "A",
                ),
                query(
                    f"max(gpuwarden_engine_enforcement_halted{{{ENGINE}}}) or 0 * {LIVES}",
                    "halted by the engine",
                    "B",
                ),
                query(
                    f"3 - 3 * min(gpuwarden_rules_reload_success{{{ENGINE}}})",
                    "rule files",
                    "C",
                ),
            ],
            states=(
                ("0", "as it should be", GREEN),
                ("1", "halted", RED),
                ("2", "paused", ORANGE),
                ("3", "a bad file is not in force", RED),
            ),
            height=6,
        ),
    )


def _engine() -> tuple:
    return (
        graph(
            "Lag",
            "Age of the last completed tick, and how long a tick takes. Over a minute no rule "
            "moves, and nothing is ended.",
            [
                query(
                    f"max(time() - gpuwarden_engine_tick_timestamp_seconds{{{ENGINE}}})",
                    "since the last tick",
                    "A",
                ),
                query(f"max(gpuwarden_engine_tick_seconds{{{ENGINE}}})", "tick takes", "B"),
            ],
            unit="s",
            span=8,
            colours={"since the last tick": ORANGE, "tick takes": BLUE},
        ),
        graph(
            "Ticks",
            "By outcome: `discarded` for want of whole and fresh data, `overrun` for taking too "
            "long. Either changes nothing.",
            [
                query(
                    "sum by (outcome) "
                    f"(increase(gpuwarden_engine_ticks_total{{{ENGINE}}}[$__rate_interval]))",
                    "{{outcome}}",
                )
            ],
            unit="short",
            span=8,
            stacked=True,
            colours={"completed": GREEN, "discarded": ORANGE, "overrun": RED},
        ),
        graph(
            "Why verdicts are unknown",
            "Verdicts that could not be reached, by reason.",
            [
                query(
                    "topk(12, sum by (reason) "
                    f"(increase(gpuwarden_unknown_total{{{RULED}}}[$__rate_interval])))",
                    "{{reason}}",
                )
            ],
            unit="short",
            span=8,
            stacked=True,
        ),
        listing(
            "Rule sets in force",
            "Hashes of the rule sets in the shown time, and how long each was in force; the lines "
            "in the graphs mark the changes.",
            [
                rows(
                    "max by (hash) (count_over_time("
                    f"gpuwarden_rules_info{{{ENGINE}}}[$__range:1m])) * 60"
                )
            ],
            columns=(
                Column("hash", "Rule set", links=(to_engine("rules", "Rules (engine)"),)),
                Column("Value", "In force for", "s"),
            ),
            span=8,
            height=8,
        ),
        listing(
            "Nodes that the engine sees",
            "Expected and lit nodes: with over 10 % of them dark no job is ended anywhere.",
            [rows(f"max by (state) (gpuwarden_engine_nodes{{{ENGINE}}})")],
            columns=(Column("state", "State"), Column("Value", "Nodes")),
            span=8,
            height=8,
        ),
        graph(
            "Waiting results",
            "Age of the oldest decision whose result is not known: its cards count as held until "
            "the end is proven. No data: every decision has its result.",
            [
                query(
                    "max(time() - gpuwarden_engine_oldest_open_decision_timestamp_seconds"
                    f"{{{ENGINE}}})",
                    "oldest open decision",
                )
            ],
            unit="s",
            span=8,
        ),
    )
