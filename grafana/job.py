"""The board of one job: for its owner, and for whoever asks why it was flagged.

Top row: is it well, when does something happen to it, what would an end cost. Below: the training
beside what is expected of it, what the rules found, and folded away what explains a slow one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models.dashboard import DashboardLinkType

from gpuwarden.catalogue import PHASES
from grafana import boards
from grafana.links import logs_of_variable, to_card, to_engine
from grafana.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    YELLOW,
    Column,
    graph,
    listing,
    now,
    number,
    query,
    rows,
    timeline,
)
from grafana.selectors import CLUSTER, ENGINE, RECORDED

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders.prometheus import Dataquery

JOB = f'job="gpuwarden",{CLUSTER},job_id="$job_id"'
"""Of the exporters' series: the chosen job, on whatever nodes it runs."""

OF_ENGINE = f'{ENGINE},job_id="$job_id"'
OF_RECORDED = f'{RECORDED},job_id="$job_id"'
ENGINE_LIVES = f"max(up{{{ENGINE}}} == 1)"
DETECTED = f"gpuwarden_violation_detected_timestamp_seconds{{{OF_ENGINE}}}"
DUE = f"gpuwarden_violation_due_timestamp_seconds{{{OF_ENGINE}}}"
HERE = f"max(gpu_job_holds_gpu{{{JOB}}})"
"""1 while the job holds a card."""

COLOURS = {
    "setup": BLUE,
    "scan": BLUE,
    "train": GREEN,
    "validate": "dark-green",
    "checkpoint": YELLOW,
    "export": BLUE,
    "done": GREY,
}
SILENT = str(len(PHASES))
"""Stands for the phase of a job that holds a card and has no trainer that says one."""

STATES = (
    *((str(number), phase, COLOURS[phase]) for number, phase in enumerate(PHASES)),
    (SILENT, "no trainer", GREY),
)
LEVELS = (("1", "light", YELLOW), ("2", "moderate", ORANGE), ("3", "severe", RED))

PHASE = " or ".join(
    f'max by (job_id) (yolo_phase{{{JOB},phase="{phase}"}} == 1) * 0 + {number}'
    for number, phase in enumerate(PHASES)
)
STATE = f"({PHASE}) or max by (job_id) (gpu_job_holds_gpu{{{JOB}}}) * 0 + {SILENT}"


SAVED = f"max(yolo_checkpoint_timestamp_seconds{{{JOB}}})"
SINCE_SAVED = f"time() - ({SAVED} or min(gpu_job_start_time_seconds{{{JOB}}}))"
CARDS = f"count(gpu_job_holds_gpu{{{JOB}}})"


def board() -> dashboard.Dashboard:
    """The board, ready to be built."""
    board = boards.begin(
        "Job",
        "Is this job well, what is it going to cost, and what happens to it next?",
        variables=(boards.job_ids(single=True),),
        hours=24,
    )
    board.link(_link("Why (engine)", "${engine}/jobs/${job_id}"))
    for link in logs_of_variable():
        board.link(_link(link.title, link.url))
    for name, colour, expression, title in (
        (
            "Cases of this job",
            ORANGE,
            f"max by (rule) (time() - {DETECTED}) < 60",
            "{{rule}}: found",
        ),
        (
            "Steps of a request to leave",
            BLUE,
            f"max by (step) (time() - gpuwarden_receipt_timestamp_seconds{{{OF_ENGINE}}}) < 60",
            "{{step}}",
        ),
    ):
        board.annotation(boards.annotation(name, colour, expression, title))
    boards.add(board, _answer())
    boards.add(board, (*_course(), *_findings()))
    boards.add(board, _learning(), title="Learning")
    boards.add(board, _money(), title="Cost")
    boards.add(board, _cards(), title="Cards")
    boards.add_folded(board, "Data loading, saving and price", _details())
    return board


def _link(title: str, url: str) -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink(title)
        .type(DashboardLinkType.LINK)
        .url(url)
        .target_blank(target_blank=True)
    )


def expected(what: str) -> str:
    """What the engine expects of the job."""
    return f"max(gpuwarden_expected_{what}{{{OF_ENGINE}}})"


def _answer() -> tuple:
    behind = ((None, RED), (0.5, ORANGE), (0.85, GREEN))
    return (
        number(
            "State",
            "The phase that the trainer says it is in. `no trainer`: the job holds a card and says "
            "nothing of a training. No data: no node shows the job now.",
            now(STATE),
            states=STATES,
        ),
        number(
            "Next step in",
            "Time until something may be done to the job at the earliest if nothing changes: a "
            "request to save or to leave, or its end. The engine's page says which, and how to "
            "keep the job. `none`: no rule counts against it. No data: the engine does not answer.",
            now(f"clamp_min(min({DUE}) - time(), 0) or 0 * {ENGINE_LIVES} - 1"),
            unit="s",
            steps=((None, GREEN), (0, RED), (900, ORANGE)),
            states=(("-1", "none", GREEN),),
        ),
        number(
            "Rules broken",
            "Rules that the job breaks now. 0 only while the engine answers.",
            now(
                f"count(max by (rule) (gpuwarden_violation_active{{{OF_ENGINE}}})) "
                f"or 0 * {ENGINE_LIVES}"
            ),
            steps=((None, GREEN), (1, ORANGE)),
        ),
        number(
            "Of expected",
            "Throughput: images per second while training, as a share of what its profile, or "
            "else the estimate, expects of this model, batch and card. n/a: nothing is expected, "
            "or it does not train.",
            now(
                "max(job:yolo_throughput_images_per_second:rate5m"
                f"{{{OF_RECORDED}}}) / ({expected('throughput_images_per_second')} > 0) "
                f"or 0 * {HERE} - 1"
            ),
            unit="percentunit",
            steps=behind,
        ),
        number(
            "Epochs done",
            "Share of the planned epochs that are over. n/a: no trainer says so.",
            now(f"max(yolo_epoch{{{JOB}}} / (yolo_epochs_planned{{{JOB}}} > 0)) or 0 * {HERE} - 1"),
            unit="percentunit",
        ),
        number(
            "Time left",
            "An estimate: the epochs that are left, at the pace of the last three hours. n/a: no "
            "epoch has ended in that time.",
            now(
                f"max((yolo_epochs_planned{{{JOB}}} - yolo_epoch{{{JOB}}}) "
                f"/ (deriv(yolo_epoch{{{JOB}}}[3h]) > 0)) or 0 * {HERE} - 1"
            ),
            unit="s",
        ),
        number(
            "At stake",
            "What an end now would lose: the time since the last saved state, or since the start "
            "where none was saved, times the job's cards. That GPU time would have to be spent "
            "again.",
            now(f"({SINCE_SAVED}) * {CARDS}"),
            unit="s",
            steps=((None, GREEN), (3600, YELLOW), (14400, ORANGE)),
        ),
        number(
            "Cards",
            "Cards and MIG instances that the job holds, over all nodes.",
            now(CARDS),
        ),
    )


def _course() -> tuple:
    return (
        timeline(
            "Course",
            "Above the phases of the training, below the rules that the job broke, by the level "
            "that their cases reached. A gap: nobody saw the job.",
            [
                query(STATE, "phase", "A"),
                query(
                    " or ".join(
                        "max by (rule) (gpuwarden_violation_active"
                        f'{{{OF_ENGINE},level="{level}"}}) * 0 + 1{value}'
                        for value, level, _ in reversed(LEVELS)
                    ),
                    "{{rule}}",
                    "B",
                ),
            ],
            states=(*STATES, *((f"1{value}", level, colour) for value, level, colour in LEVELS)),
            span=24,
            height=6,
        ),
    )


def _findings() -> tuple:
    cases = f"max by (rule) (gpuwarden_violation_active{{{OF_ENGINE}}})"

    def known(expression: str, ref: str) -> Dataquery:
        return rows(f"{expression} or on (rule) ({cases} * 0 - 1)", ref)

    return (
        listing(
            "Why it is flagged",
            "Open cases, with the probable cause and the time until the next step. The engine's "
            "page says what was measured, against which limit, and why nothing happened yet. "
            "n/a: nothing follows, or it is not known.",
            [
                rows(
                    f"max by (rule, level) (gpuwarden_violation_active{{{OF_ENGINE}}})",
                    "A",
                ),
                rows(
                    f"max by (rule, cause) (gpuwarden_violation_cause{{{OF_ENGINE}}}) "
                    f'or on (rule) label_replace({cases}, "cause", "not known", "", "")',
                    "B",
                ),
                known(f"max by (rule) (time() - {DETECTED})", "C"),
                known(f"min by (rule) (clamp_min({DUE} - time(), 0))", "D"),
                rows(
                    f"max by (rule, action) ({DUE}) * 0 + 1 "
                    f'or on (rule) label_replace({cases}, "action", "nothing", "", "")',
                    "E",
                ),
            ],
            columns=(
                Column("rule", "Rule", links=(to_engine("jobs/${job_id}", "Why (engine)"),)),
                Column("level", "Level", width=110),
                Column("cause", "Probable cause"),
                Column("Value #C", "For", "s"),
                Column("action", "Next"),
                Column(
                    "Value #D",
                    "At the earliest in",
                    "s",
                    steps=((None, GREY), (0, RED), (900, ORANGE), (3600, GREEN)),
                ),
            ),
            span=16,
            height=5,
        ),
        listing(
            "What protects it",
            "Rules that would have judged the job, and why they do nothing: the whitelist, a keep "
            "of its owner's, or a guard.",
            [rows(f"max by (rule, reason) (gpuwarden_protected{{{OF_ENGINE}}})")],
            columns=(
                Column("rule", "Rule"),
                Column("reason", "Protected by", links=(to_engine("protections", "Protections"),)),
            ),
            span=8,
            height=5,
        ),
    )


def _learning() -> tuple:
    metric = f'yolo_metric{{{JOB},metric=~"metrics/mAP.*"}}'
    # `@ end()`: at each moment the best is that of the whole shown time, not of the time before it
    best = f"max by (metric) (max_over_time({metric}[$__range] @ end()))"
    return (
        graph(
            "Throughput",
            "Images per second while training, beside what is expected. It falls to 0 where the "
            "trainer hangs; a gap is validation, or saving, of more than four minutes in five.",
            [
                query(
                    f"max(job:yolo_throughput_images_per_second:rate5m{{{OF_RECORDED}}})",
                    "images/s",
                    "A",
                ),
                query(expected("throughput_images_per_second"), "expected", "B"),
            ],
            unit="short",
            span=8,
            colours={"images/s": GREEN, "expected": GREY},
            styles={"expected": "dashed"},
        ),
        graph(
            "Loss",
            "Running mean of each component in the epoch.",
            [query(f"max by (component) (yolo_loss{{{JOB}}})", "{{component}}")],
            unit="short",
            span=8,
        ),
        graph(
            "mAP",
            "Of the last validation. Points mark the best in the shown time: where they end, the "
            "training no longer gets better.",
            [
                query(f"max by (metric) ({metric})", "{{metric}}", "A"),
                query(f"max by (metric) ({metric}) == on (metric) {best}", "best {{metric}}", "B"),
            ],
            unit="short",
            span=8,
            styles={f"best metrics/{name}(B)": "points" for name in ("mAP50", "mAP50-95")},
        ),
        graph(
            "Step time",
            "Seconds for a batch while training, and those of them in which the loop waited for "
            "its data.",
            [
                query(
                    f'max(rate(yolo_phase_seconds_total{{{JOB},phase="train"}}[$__rate_interval]) '
                    "/ on (instance, job_id, run_id) "
                    f"(rate(yolo_steps_total{{{JOB}}}[$__rate_interval]) > 0))",
                    "step",
                    "A",
                ),
                query(
                    f"max(rate(yolo_data_wait_seconds_total{{{JOB}}}[$__rate_interval]) "
                    "/ on (instance, job_id, run_id) "
                    f"(rate(yolo_steps_total{{{JOB}}}[$__rate_interval]) > 0))",
                    "of it waiting for data",
                    "B",
                ),
            ],
            unit="s",
            span=8,
            colours={"step": BLUE, "of it waiting for data": RED},
        ),
        graph(
            "Waits for data",
            "Share of the training time in which the loop waited for a batch. Above a fifth the "
            "card starves: more loader processes, faster storage, or a cache of the images.",
            [query(f"max(job:yolo_data_wait_ratio:rate5m{{{OF_RECORDED}}})", "waits for data")],
            unit="percentunit",
            span=8,
            highest=1,
            colours={"waits for data": RED},
        ),
        graph(
            "Since the last saved state",
            "What an end at each moment would have cost, in time of the job.",
            [query(SINCE_SAVED, "not saved")],
            unit="s",
            span=8,
            colours={"not saved": ORANGE},
        ),
    )


def _money() -> tuple:
    def spent(name: str, by: str = "") -> str:
        """What was recorded over the shown time: a piece every five minutes, and gaps are 0."""
        of = f" by ({by})" if by else ""
        return f"sum{of} (sum_over_time(job:{name}:sum5m{{{OF_RECORDED}}}[$__range]))"

    hours, idle = spent("gpu_hours"), spent("gpu_held_idle_hours")
    cost = spent("gpu_cost", "currency")
    idle_cost = spent("gpu_held_idle_cost", "currency")
    return (
        number(
            "GPU time",
            "GPU-hours that the job held in the shown time: eight cards for an hour are eight, a "
            "shared card is shared out, a MIG instance is its share of the card. Time in which "
            "nobody looked is no use. No data: it held none.",
            now(hours),
            unit="h",
            span=6,
        ),
        number(
            "Cost so far",
            "The same at the price of each card at that moment, in the shown time. An estimate: "
            "what is billed is rounded by the rules of engine.yaml (`gpuwarden costs`). No data: a "
            "card without a price.",
            now(cost, "{{currency}}"),
            unit="short",
            span=6,
        ),
        number(
            "Wasted",
            "Share of that time in which the job used its card at most 5 % for five minutes. What "
            "cannot be measured is not called wasted.",
            now(f"({idle} or 0 * {hours}) / ({hours} > 0)"),
            unit="percentunit",
            steps=((None, GREEN), (0.1, ORANGE), (0.3, RED)),
            span=6,
        ),
        number(
            "Wasted cost",
            "The price of the wasted time.",
            now(f"{idle_cost} or 0 * {cost}", "{{currency}}"),
            unit="short",
            steps=((None, BLUE),),
            span=6,
        ),
    )


def _cards() -> tuple:
    busy, memory = f"gpu_job_utilization_ratio{{{JOB}}}", f"gpu_job_memory_bytes{{{JOB}}}"
    held = f"max by (instance, uuid) (gpu_job_holds_gpu{{{JOB}}})"
    # A MIG instance has a uuid and a memory of its own.
    every = f'job="gpuwarden",{CLUSTER}'
    sizes = (
        f"(max by (instance, uuid) (gpu_memory_total_bytes{{{every}}}) or "
        f"label_replace(max by (instance, mig_uuid) (gpu_mig_memory_total_bytes{{{every}}}), "
        '"uuid", "$1", "mig_uuid", "(.+)"))'
    )
    key = "max by (instance, gpu, uuid)"
    table = f"{key} (gpu_job_holds_gpu{{{JOB}}})"
    return (
        graph(
            "Utilisation",
            "Of the job's cards: their mean and the least busy one, beside what its profile "
            "expects. A gap: a shared card, or a MIG instance, that cannot be measured.",
            [
                query(f"avg({busy})", "mean", "A"),
                query(f"min({busy})", "least busy card", "B"),
                query(expected("gpu_utilization_ratio"), "expected", "C"),
            ],
            unit="percentunit",
            highest=1,
            colours={"mean": GREEN, "least busy card": ORANGE, "expected": GREY},
            styles={"expected": "dashed"},
        ),
        graph(
            "Memory of the fullest card",
            "What the job holds, beside what is expected and what the card has; and of it what "
            "torch reserved and what its tensors fill. Much reserved and little filled: the batch "
            "would fit a smaller card, or could be larger.",
            [
                query(f"max({memory})", "held", "A"),
                query(expected("gpu_memory_bytes"), "expected", "B"),
                query(f"min({sizes} and on (instance, uuid) {held})", "smallest card", "C"),
                query(f"max(yolo_gpu_memory_reserved_bytes{{{JOB}}})", "reserved by torch", "D"),
                query(f"max(yolo_gpu_memory_allocated_bytes{{{JOB}}})", "in tensors", "E"),
            ],
            unit="bytes",
            colours={"held": BLUE, "expected": GREY, "smallest card": RED},
            styles={"expected": "dashed", "smallest card": "dashed"},
        ),
        listing(
            "Each card",
            "The job's use of each of its cards, the least busy first. n/a: not measurable, as on "
            "a shared card without figures per process.",
            [
                rows(f"topk(100, {table})", "A"),
                rows(f"{key} ({busy}) or {table} * 0 - 1", "B"),
                rows(f"{key} ({memory}) or {table} * 0 - 1", "C"),
            ],
            columns=(
                Column("instance", "Node"),
                Column("gpu", "GPU", links=(to_card(),), width=80),
                Column(
                    "Value #B",
                    "Utilisation",
                    "percentunit",
                    steps=((None, GREY), (0, RED), (0.05, ORANGE), (0.3, YELLOW), (0.7, GREEN)),
                ),
                Column("Value #C", "Memory", "bytes"),
                Column("uuid", "Card or MIG instance"),
            ),
            height=6,
        ),
    )


def _details() -> tuple:
    def rate(name: str) -> str:
        return f"sum(rate({name}{{{JOB}}}[$__rate_interval]))"

    price = f"sum by (currency) (holder:gpu_cost_per_hour:sum{{{OF_RECORDED}}})"
    return (
        graph(
            "CPU",
            "Cores that the job's processes use, over all nodes, and its loader processes.",
            [
                query(rate("gpu_job_cpu_seconds_total"), "cores", "A"),
                query(f"sum(gpu_job_loader_workers{{{JOB}}})", "loader processes", "B"),
            ],
            unit="short",
            span=8,
        ),
        graph(
            "Read from storage",
            "Bytes per second that the job's processes read.",
            [query(rate("gpu_job_read_bytes_total"), "read")],
            unit="Bps",
            span=8,
        ),
        graph(
            "Waits of the node's resources",
            "Share of time in which something of the job waited for storage (blocked), or its "
            "cgroup stood for want of a resource.",
            [
                query(rate("gpu_job_io_wait_seconds_total"), "blocked on storage", "A"),
                query(
                    "max by (resource) "
                    f"(rate(gpu_job_pressure_seconds_total{{{JOB}}}[$__rate_interval]))",
                    "pressure: {{resource}}",
                    "B",
                ),
            ],
            unit="percentunit",
            span=8,
        ),
        graph(
            "Saving",
            "Share of time in which the loop stood still to save.",
            [
                query(
                    f"max(rate(yolo_checkpoint_seconds_total{{{JOB}}}[$__rate_interval]))",
                    "saving",
                )
            ],
            unit="percentunit",
            span=8,
        ),
        graph(
            "Learning rate",
            "Of each group of parameters.",
            [query(f"max by (group) (yolo_learning_rate{{{JOB}}})", "group {{group}}")],
            unit="short",
            span=8,
        ),
        graph(
            "Gradient norm",
            "Of the last step of the optimizer, and losses that were not finite in each interval.",
            [
                query(f"max(yolo_gradient_norm{{{JOB}}})", "gradient norm", "A"),
                query(
                    f"max(increase(yolo_nonfinite_loss_total{{{JOB}}}[$__rate_interval]))",
                    "not finite",
                    "B",
                ),
            ],
            unit="short",
            span=8,
            colours={"not finite": RED},
        ),
        graph(
            "Price per hour",
            "What the job costs an hour at each moment, and what of it is wasted.",
            [
                query(price, "{{currency}}", "A"),
                query(
                    "sum by (currency) (holder:gpu_held_idle_cost_per_hour:sum"
                    f"{{{OF_RECORDED}}}) or 0 * {price}",
                    "{{currency}}, wasted",
                    "B",
                ),
            ],
            unit="short",
            span=8,
        ),
    )
