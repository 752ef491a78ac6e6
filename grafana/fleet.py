"""The fleet board: what operators look at first.

Top row: the answer in eight figures. Below: who holds what and how busy it is, what the rules
found, whether the trainings do what their profile expects, and what gpuwarden did about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana import boards, owners
from grafana.links import job_links, to_node
from grafana.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    YELLOW,
    Column,
    bars,
    graph,
    listing,
    now,
    number,
    query,
    rows,
)
from grafana.selectors import (
    CLUSTER,
    ENGINE,
    EVERY_JOB,
    LIT,
    NODE,
    NODES,
    RECORDED,
    RECORDED_NODE,
    TEAMS,
    USERS,
    card_errors,
    highest,
)

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders import dashboard
    from grafana_foundation_sdk.builders.prometheus import Dataquery

LEVELS = {"light": YELLOW, "moderate": ORANGE, "severe": RED}

IDLE = (
    f'sum_over_time(user:gpu_held_idle_{{what}}:sum5m{{{{{RECORDED},user=~"$user",team=~"$team"}}}}'
    "[{over}])"
)
"""GPU-hours, or their cost, of cards that were held idle; to be filled in."""

NODE_STATES = (
    ("0", "well", GREEN),
    ("1", "errors", ORANGE),
    ("2", "card lost", RED),
    ("3", "dark", RED),
)

ANYWHERE = f'job="gpuwarden",{CLUSTER},user=~"$user"'

CLAIMED = (
    f"gpu_memory_used_bytes{{{NODE}}} and on (instance, uuid) "
    f"(card:gpu_held_idle:bool5m{{{RECORDED}}} == 1)"
)
"""Memory on cards that are held idle."""

CASES = f"max by (rule, level, job_id) (gpuwarden_violation_active{{{ENGINE}}})"
CAUSES = f"max by (rule, job_id, cause) (gpuwarden_violation_cause{{{ENGINE}}})"
CASES_WITH_CAUSE = (
    f"({CASES} * on (rule, job_id) group_left (cause) {CAUSES} or on (rule, level, job_id) {CASES})"
)


def board() -> dashboard.Dashboard:
    """The board, ready to be built."""
    board = boards.begin(
        "Fleet",
        "Who uses which GPU, how well, and what gpuwarden found and did.",
        variables=(boards.nodes(), boards.teams(), boards.users()),
    )
    boards.add(
        board,
        (*_figures(), owners.panel("Who holds which GPU"), *_findings(), *_nodes(), *_trend()),
    )
    boards.add_folded(board, "Jobs: expected and actual, and who is protected", _jobs())
    boards.add_folded(board, "Users and teams", _people())
    boards.add_folded(board, "What gpuwarden did", _results())
    boards.add_folded(board, "Work lost by ends", _losses())
    return board


def _figures() -> tuple:
    cards = f"count(gpu_up{{{NODE}}})"
    alarm = ((None, GREEN), (1, RED))
    return (
        number(
            "GPUs", "Cards that the nodes list, lost ones included.", now(cards), span=4, height=3
        ),
        number(
            "Busy",
            "Cards that were busy for more than 5 % of the last minute.",
            now(f"sum(card:gpu_busy:bool1m{{{RECORDED_NODE}}})"),
            steps=((None, GREY), (1, GREEN)),
            span=4,
            height=3,
        ),
        number(
            "Held idle",
            "Cards on which a process holds memory and no kernel ran for five minutes. A card seen "
            "for less than half of that is not counted.",
            now(f"sum(card:gpu_held_idle:bool5m{{{RECORDED_NODE}}})"),
            steps=((None, GREEN), (1, ORANGE), (5, RED)),
            span=4,
            height=3,
        ),
        number(
            "Unhealthy",
            "Cards that do not answer while others of their node do, and cards with uncorrected "
            "ECC errors or an XID of their hardware in the shown time (XIDs that programs cause "
            "are not counted).",
            now(f"count(gpu_up{{{NODE}}} == 0 or {card_errors()}) or 0 * {cards}"),
            steps=alarm,
            span=4,
            height=3,
        ),
        number(
            "Dark nodes",
            "Nodes without a snapshot of the last 15 seconds. Over 10 % of them, the engine ends "
            "no job anywhere.",
            now(f"count(up{{{NODE}}} unless on (instance) {LIT}) or 0 * count(up{{{NODE}}})"),
            steps=alarm,
            span=4,
            height=3,
        ),
        number(
            "Alerts",
            "Firing alerts about gpuwarden itself. 0 only while the Watchdog fires, which shows "
            "that alerts are evaluated at all.",
            now(
                f'count(ALERTS{{{RECORDED},alertstate="firing",service="gpuwarden",'
                'alertname!="Watchdog"}) '
                f'or 0 * count(ALERTS{{{RECORDED},alertstate="firing",alertname="Watchdog"}})'
            ),
            steps=alarm,
            span=4,
            height=3,
        ),
        number(
            "Jobs",
            "Jobs that hold a card, whatever their users; a job over several nodes is one.",
            now(f"count(max by (job_id) (gpu_job_holds_gpu{{{NODE}}})) or 0 * {cards}"),
            span=4,
            height=3,
        ),
        number(
            "Flagged",
            "Jobs with an open case of any rule. 0 only while the engine answers.",
            now(
                f"count(max by (job_id) (gpuwarden_violation_active{{{ENGINE}}})) "
                f"or 0 * max(up{{{ENGINE}}} == 1)"
            ),
            steps=((None, GREEN), (1, ORANGE)),
            span=4,
            height=3,
        ),
        number(
            "Ends",
            "Whether the engine ends jobs now: paused by a person, or halted by a guard, it judges "
            "and tells, and ends nobody. No data: the engine does not answer.",
            now(
                f"max(gpuwarden_engine_enforcement_paused{{{ENGINE}}} == 1) * 0 + 1 "
                f"or max(gpuwarden_engine_enforcement_halted{{{ENGINE}}} == 1) * 0 + 2 "
                f"or max(up{{{ENGINE}}} == 1) * 0"
            ),
            states=(("0", "on", GREEN), ("1", "paused", ORANGE), ("2", "halted", RED)),
            span=4,
            height=3,
        ),
        number(
            "Idle GPU-hours, 24 h",
            "Hours of the last day for which jobs held cards and used at most 5 % of them for five "
            "minutes; a shared card is shared out.",
            now(f"sum({IDLE.format(what='hours', over='1d')}) or 0 * {cards}"),
            unit="h",
            steps=((None, GREEN), (1, ORANGE)),
            span=4,
            height=3,
        ),
        number(
            "Idle cost, 24 h",
            "The same in money, by the prices of the cards at each hour (engine.yaml); currencies "
            "are never added. No data: no card that was held idle has a price.",
            now(
                f"sum by (currency) ({IDLE.format(what='cost', over='1d')})",
                "{{currency}}",
            ),
            unit="short",
            steps=((None, BLUE), (1, ORANGE)),
            named=True,
            span=4,
            height=3,
        ),
        number(
            "Claimed, unused",
            "Memory on cards that are held idle: what others could work with.",
            now(f"sum({CLAIMED}) or 0 * {cards}"),
            unit="bytes",
            steps=((None, GREEN), (float(2**30), ORANGE)),
            span=4,
            height=3,
        ),
    )


def _findings() -> tuple:
    return (
        listing(
            "Open cases",
            "Rules whose `for` is met. The engine's page behind a job says what was seen, what "
            "comes next and why nothing happened yet. Not filtered by node: a case is the "
            "engine's.",
            [
                rows(
                    f"topk(100, ({CASES_WITH_CAUSE} * on (job_id) group_left (user) "
                    f"max by (job_id, user) (gpu_job_info{{{ANYWHERE}}} and on (user) {TEAMS})) "
                    # a job that no node shows has an open case still, and no known user
                    f"or ({CASES_WITH_CAUSE} unless on (job_id) "
                    f'gpu_job_info{{job="gpuwarden",{CLUSTER}}}))'
                )
            ],
            columns=(
                Column("level", "Level", width=110),
                Column("rule", "Rule"),
                Column("cause", "Probable cause"),
                Column("user", "User"),
                Column("job_id", "Job", links=job_links()),
            ),
            span=15,
            height=6,
        ),
        bars(
            "Idle GPU-hours by user",
            "Hours of the shown time for which a user's jobs held cards and used at most 5 % of "
            "them for five minutes: the eight highest. A shared card is shared out.",
            [
                now(
                    f"topk(8, sum by (user) ({IDLE.format(what='hours', over='$__range')}))",
                    "{{user}}",
                )
            ],
            unit="h",
            span=9,
            height=6,
        ),
    )


def _jobs() -> tuple:
    return (
        _expectations(),
        listing(
            "Protected jobs",
            "Jobs that a rule would have judged, and what protects them: the whitelist, their "
            "owner's keep, or a guard.",
            [rows(f"topk(100, max by (rule, job_id, reason) (gpuwarden_protected{{{ENGINE}}}))")],
            columns=(
                Column("rule", "Rule"),
                Column("reason", "Protected by"),
                Column("job_id", "Job", links=job_links()),
            ),
            height=6,
        ),
    )


def _expectations() -> object:
    throughput = f"job:yolo_throughput_images_per_second:rate5m{{{RECORDED}}}"
    expected = f"gpuwarden_expected_throughput_images_per_second{{{ENGINE}}}"
    share = f"max by (job_id) ({throughput} / on (job_id) ({expected} > 0))"
    worst = f"bottomk(100, {share} and {EVERY_JOB} or {EVERY_JOB} * 0 + 100)"

    def known(expression: str, ref: str) -> Dataquery:
        """Every job has the column; where the value is not known it says n/a."""
        # max by drops the metric's name: a column of its own, it would keep rows from merging.
        return rows(
            f"(max by (job_id) ({expression}) or on (job_id) ({EVERY_JOB} * 0 - 1)) "
            f"and on (job_id) {worst}",
            ref,
        )

    behind = ((None, RED), (0.5, ORANGE), (0.85, GREEN))
    memory = f"gpuwarden_expected_gpu_memory_bytes{{{ENGINE}}}"
    busy = f"gpuwarden_expected_gpu_utilization_ratio{{{ENGINE}}}"
    return listing(
        "Expected and actual",
        "What a training does beside what its profile expects of this model, batch and card. "
        "Memory is that of its fullest card, utilisation the mean of its cards over five minutes. "
        "n/a: no profile, or not a training. Of many jobs the hundred that are furthest behind.",
        [
            rows(f"{USERS} and on (job_id) {worst}", "A"),
            known(throughput, "B"),
            known(expected, "C"),
            known(share, "D"),
            known(f"job:gpu_memory_bytes:max{{{RECORDED}}}", "E"),
            known(memory, "F"),
            known(f"job:gpu_utilization_ratio:avg5m{{{RECORDED}}}", "G"),
            known(busy, "H"),
            known(f"job:yolo_data_wait_ratio:rate5m{{{RECORDED}}}", "I"),
        ],
        columns=(
            Column("job_id", "Job", links=job_links()),
            Column("user", "User"),
            Column("Value #B", "Images/s"),
            Column("Value #C", "Expected images/s"),
            Column("Value #D", "Of expected", "percentunit", steps=behind),
            Column("Value #E", "Memory", "bytes"),
            Column("Value #F", "Expected memory", "bytes"),
            Column("Value #G", "Utilisation", "percentunit"),
            Column("Value #H", "Expected utilisation", "percentunit"),
            Column("Value #I", "Waits for data", "percentunit"),
        ),
    )


def _trend() -> tuple:
    return (
        graph(
            "Utilisation of the fleet",
            "Tenth, median and ninetieth percentile over all cards: a good mean hides ten idle "
            "cards beside ten busy ones. Not filtered by node.",
            [
                query(f"fleet:gpu_utilization_ratio:p90{{{RECORDED}}}", "p90", "A"),
                query(f"fleet:gpu_utilization_ratio:p50{{{RECORDED}}}", "median", "B"),
                query(f"fleet:gpu_utilization_ratio:p10{{{RECORDED}}}", "p10", "C"),
            ],
            unit="percentunit",
            highest=1,
        ),
        graph(
            "GPU memory",
            "Used by cards that work, claimed by holders of idle cards, and free.",
            [
                query(
                    f"sum(gpu_memory_used_bytes{{{NODE}}} unless on (instance, uuid) "
                    f"(card:gpu_held_idle:bool5m{{{RECORDED}}} == 1))",
                    "in use",
                    "A",
                ),
                query(
                    f"sum({CLAIMED})",
                    "claimed, idle",
                    "B",
                ),
                query(f"sum(gpu_memory_free_bytes{{{NODE}}})", "free", "C"),
            ],
            unit="bytes",
            stacked=True,
            colours={"in use": GREEN, "claimed, idle": RED, "free": GREY},
        ),
    )


def _people() -> tuple:
    held = f'user:gpu_memory_bytes:sum{{{RECORDED},user=~"$user"}} and on (user) {TEAMS}'
    cards = f'team:gpus_held:count{{{RECORDED},team=~"$team"}}'
    return (
        graph(
            "GPU memory by user",
            "The twelve users who held most over the shown time.",
            [query(highest(12, "user", held), "{{user}}")],
            unit="bytes",
            stacked=True,
        ),
        graph(
            "Cards by team",
            "Cards held by the users of the twelve teams of the directory that held most; users "
            "of no team are missing.",
            [query(highest(12, "team", cards), "{{team}}")],
            unit="short",
            stacked=True,
        ),
    )


def _results() -> tuple:
    def counter(name: str) -> Dataquery:
        return now(f"sum(increase({name}{{{ENGINE}}}[$__range]))")

    return (
        number(
            "Idle jobs found",
            "Jobs found holding GPUs idle in the shown range.",
            counter("gpu_idle_detected_total"),
            span=6,
        ),
        number(
            "Reclaims proven",
            "Ended jobs whose processes NVML no longer lists.",
            counter("gpu_released_success_total"),
            steps=((None, BLUE),),
            span=6,
        ),
        number(
            "Reclaims not proven",
            "Ended jobs that NVML still listed when the proof's time was over.",
            counter("gpu_release_failed_total"),
            steps=((None, GREEN), (0.5, RED)),
            span=6,
        ),
        number(
            "Memory freed",
            "Memory of the ended processes, as NVML had it right before their end.",
            counter("gpu_memory_freed_bytes_total"),
            unit="bytes",
            span=6,
        ),
        graph(
            "Open cases by level",
            "Cases at each moment by the highest stage they reached.",
            [query(f"level:violations:count{{{RECORDED}}}", "{{level}}")],
            unit="short",
            stacked=True,
            colours=LEVELS,
        ),
        graph(
            "Decisions",
            "Decisions by action and mode; what came of them is on the Governance board. In "
            "observe and warn nothing is ended: these count what would have been.",
            [
                query(
                    "sum by (action, mode) "
                    f"(increase(gpuwarden_decisions_total{{{ENGINE}}}[$__rate_interval]))",
                    "{{action}} ({{mode}})",
                )
            ],
            unit="short",
        ),
    )


def _losses() -> tuple:
    # one sample stands for the recording interval of 15 s, and each loss is in it for 15 minutes
    labels = f'{{{RECORDED},team=~"$team"}}'
    over_range = "(sum_over_time({name}[$__range])) * 15 / 900"
    hours = over_range.format(name=f"team:lost_gpu_hours:increase15m{labels}")
    money = over_range.format(name=f"team:lost_cost:increase15m{labels}")
    return (
        graph(
            "Work lost by ends",
            "GPU-hours of work that no saved state covered when a training ended, in the last "
            "15 minutes, by its owner's team and by how it ended: hold was ended by a rule, "
            "requeue comes back, died was not asked. The node counts it ten minutes after the end.",
            [
                query(
                    highest(12, "team, reason", f"team:lost_gpu_hours:increase15m{labels}"),
                    "{{team}}: {{reason}}",
                )
            ],
            unit="h",
            span=8,
            stacked=True,
        ),
        bars(
            "GPU-hours lost",
            "The same over the shown range.",
            [now(f"topk(12, sum by (team, reason) {hours})", "{{team}}: {{reason}}")],
            unit="h",
        ),
        bars(
            "Lost work in money",
            "The same at the mean price of the node's cards (prices in engine.yaml). Nodes with a "
            "card that has no price are missing.",
            [
                now(
                    f"topk(12, sum by (team, reason, currency) {money})",
                    "{{team}}: {{reason}}, {{currency}}",
                )
            ],
            unit="short",
        ),
    )


def _nodes() -> tuple:
    worst = (
        f"topk(100, ({NODES} * 0 + 3 unless on (instance) {LIT}) "
        f"or on (instance) max by (instance) (gpu_up{{{NODE}}} == 0) * 0 + 2 "
        f"or on (instance) max by (instance) ({card_errors()}) * 0 + 1 "
        f"or on (instance) {NODES} * 0)"
    )

    def known(expression: str, ref: str) -> Dataquery:
        """Every node has the column; where the value is not known it says n/a."""
        return rows(
            f"(({expression}) or on (instance) ({NODES} * 0 - 1)) and on (instance) {worst}", ref
        )

    return (
        listing(
            "Nodes",
            "The worst first, a hundred at most. `dark`: no snapshot of the last 15 s, nothing is "
            "judged there; `card lost`: a card does not answer; `errors`: a card had uncorrected "
            "ECC errors or an XID of its hardware in the shown time. n/a: not known of a dark "
            "node.",
            [
                rows(worst, "A"),
                known(
                    f"max by (instance) (time() - gpuwarden_snapshot_timestamp_seconds{{{NODE}}})",
                    "B",
                ),
                known(f"count by (instance) (gpu_up{{{NODE}}})", "C"),
                known(f"sum by (instance) (card:gpu_busy:bool1m{{{RECORDED_NODE}}})", "D"),
                known(
                    f"sum by (instance) (card:gpu_held_idle:bool5m{{{RECORDED_NODE}}})",
                    "E",
                ),
                known(f"sum by (instance) (gpu_memory_used_bytes{{{NODE}}})", "F"),
                rows(
                    f"max by (instance, driver_version, simulated) (gpu_info{{{NODE}}}) "
                    f"and on (instance) {worst}",
                    "G",
                ),
            ],
            columns=(
                Column("instance", "Node", links=(to_node(),)),
                Column("Value #A", "State", names=NODE_STATES),
                Column(
                    "Value #B", "Snapshot age", "s", steps=((None, GREY), (0, GREEN), (15, RED))
                ),
                Column("Value #C", "GPUs"),
                Column("Value #D", "Busy"),
                Column("Value #E", "Held idle", steps=((None, GREY), (0, GREEN), (1, ORANGE))),
                Column("Value #F", "Memory used", "bytes"),
                Column("driver_version", "Driver"),
                Column("simulated", "Simulated"),
            ),
            sort=("State", True),
            height=6,
        ),
    )
