"""The board of one node and its cards: are they well, who uses them, and what holds them back.

The banner on top never folds. Each of its figures keeps three things apart: a reading, "n/a" where
this hardware or this exporter does not tell, and Grafana's "No data" where nobody tells any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana import boards, owners
from grafana.links import job_links, to_job_of_series
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
from grafana.selectors import (
    APPLICATIONS_XIDS,
    CARD,
    NODE,
    per_user,
)

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders import dashboard
    from grafana_foundation_sdk.builders.prometheus import Dataquery

HERE = f"sum(gpu_up{{{CARD}}} * 0)"
"""0 while the exporter tells of cards: what proves that a nought was looked for."""

NOT_TOLD = f"{HERE} - 1"

HOLDS_BACK = (
    ("hw_thermal", "too hot", RED),
    ("hw_power_brake", "power brake", RED),
    ("hw_slowdown", "slowed by hardware", RED),
    ("sw_thermal", "near too hot", ORANGE),
    ("sw_power_cap", "at its power limit", YELLOW),
    ("sync_boost|application_clocks|display_clocks", "clocks are set", BLUE),
)
"""Reasons that lower the clocks, the gravest first: NVML's names, ours, and a colour."""

UNATTRIBUTED_BYTES = 256 * 2**20
"""From here on memory of no listed process is shown as a row: less is the driver's own."""


def board() -> dashboard.Dashboard:
    """The board, ready to be built."""
    board = boards.begin(
        "Node",
        "Are this node and its cards well, who uses them, and what holds them back?",
        variables=(boards.nodes(single=True), boards.gpus()),
    )
    boards.add(board, _banner())
    holders = owners.panel("Who holds its cards", cards='gpu=~"$gpu"', people=False, height=7)
    boards.add(board, (holders, _cards(), _processes()))
    boards.add(board, _uses(), title="Use by job")
    boards.add(board, _hardware(), title="Hardware")
    boards.add_folded(board, "Host and data loading", _host())
    return board


def _banner() -> tuple:
    grave = "|".join(reason for reason, _, colour in HOLDS_BACK if colour != YELLOW)
    grave = grave.removesuffix(f"|{HOLDS_BACK[-1][0]}")
    xids = (
        f'time() - gpu_xid_last_timestamp_seconds{{{CARD},xid!~"{APPLICATIONS_XIDS}"}} < $__range_s'
    )
    alarm = ((None, GREEN), (1, RED))
    return (
        number(
            "Exporter",
            "Age of the newest snapshot; over 15 s the node is dark: nothing is judged or ended "
            "there. `dark`: the exporter does not answer the scrape, or has no current snapshot.",
            now(
                f"max(time() - gpuwarden_snapshot_timestamp_seconds{{{NODE}}}) "
                f"or max(up{{{NODE}}}) * 0 - 1"
            ),
            unit="s",
            steps=((None, GREEN), (15, RED)),
            states=(("-1", "dark", RED),),
        ),
        number(
            "Driver",
            "Whether NVML answers.",
            now(f"min(gpuwarden_nvml_up{{{NODE}}})"),
            states=(("0", "down", RED), ("1", "answers", GREEN)),
        ),
        number(
            "Cards lost",
            "Cards that do not answer while others do: gone from the bus, or in need of a reset.",
            now(f"count(gpu_up{{{CARD}}} == 0) or {HERE}"),
            steps=alarm,
        ),
        number(
            "Hardware XIDs",
            "Cards with an XID in the shown time that no program causes. n/a: the exporter does "
            "not listen for XIDs.",
            now(
                f"count(max by (uuid) ({xids})) "
                f'or max(gpuwarden_collector_success{{{NODE},collector="xid"}} == 1) * 0 '
                f"or {NOT_TOLD}"
            ),
            steps=alarm,
        ),
        number(
            "ECC errors",
            "Uncorrected memory errors in the shown time. n/a: cards without ECC.",
            now(
                f'sum(increase(gpu_ecc_errors_total{{{CARD},error="uncorrected"}}[$__range])) '
                # errors of the shown time are no reading of an exporter that is dead now
                f"+ {HERE} "
                f"or {NOT_TOLD}"
            ),
            steps=((None, GREEN), (0.5, RED)),
        ),
        number(
            "Slowed down",
            "Cards that are slowed by heat or by a power brake now. Being at the power limit is "
            "usual under load, and not counted. n/a: the driver does not tell.",
            now(
                f'count(max by (uuid) (gpu_throttle_active{{{CARD},reason=~"{grave}"}} == 1)) '
                f"or sum(gpu_throttle_active{{{CARD}}} * 0) or {NOT_TOLD}"
            ),
            steps=alarm,
        ),
        number(
            "Hottest card",
            "Temperature of the hottest die.",
            now(f"max(gpu_temperature_celsius{{{CARD}}}) or {NOT_TOLD}"),
            unit="celsius",
            steps=((None, GREEN), (80, ORANGE), (90, RED)),
        ),
        number(
            "Unattributed",
            "Used memory of the cards that no listed process accounts for. Some hundred MiB a card "
            "are the driver's; more is a process in another namespace, or one that died badly.",
            now(f"sum(gpu_memory_unattributed_bytes{{{CARD}}}) or {NOT_TOLD}"),
            unit="bytes",
            steps=((None, GREEN), (float(2**30), ORANGE), (float(8 * 2**30), RED)),
        ),
    )


def _cards() -> object:
    """Cards, and the MIG instances of those that are cut."""
    by = "(gpu, uuid)"

    def instance(metric: str, label: str = "") -> str:
        """A series of MIG instances, named by their own uuid."""
        found = f'label_replace({metric}{{{CARD}}}, "uuid", "$1", "mig_uuid", "(.*)")'
        return f'label_replace({found}, "name", "$1", "{label}", "(.*)")' if label else found

    every = f"(max by {by} (gpu_up{{{CARD}}}) or max by {by} ({instance('gpu_mig_info')}))"

    def known(metric: str, mig: str, ref: str) -> Dataquery:
        """The column of cards and instances; n/a where it is not told."""
        slices = f"or max by {by} ({instance(mig)}) " if mig else ""
        return rows(f"max by {by} ({metric}{{{CARD}}}) {slices}or on (uuid) ({every} * 0 - 1)", ref)

    names = (
        f"max by (gpu, uuid, name) (gpu_info{{{CARD}}}) "
        f"or max by (gpu, uuid, name) ({instance('gpu_mig_info', 'profile')})"
    )
    return listing(
        "Cards",
        "Cards of the node, and the instances of those that MIG cuts. n/a: not told of this card "
        "(a cut card has no utilisation of its own).",
        [
            rows(names, "A"),
            rows(every, "B"),
            known("gpu_utilization_ratio", "gpu_mig_utilization_ratio", "C"),
            known("gpu_memory_used_bytes", "gpu_mig_memory_used_bytes", "D"),
            known("gpu_memory_total_bytes", "gpu_mig_memory_total_bytes", "E"),
            known("gpu_processes", "", "F"),
            known("gpu_power_watts", "", "G"),
            known("gpu_temperature_celsius", "", "H"),
        ],
        columns=(
            Column("gpu", "GPU", width=70),
            Column("name", "Model", width=230),
            Column("uuid", "UUID"),
            Column("Value #B", "State", names=(("1", "answers", GREEN), ("0", "lost", RED))),
            Column("Value #C", "Utilisation", "percentunit"),
            Column("Value #D", "Memory used", "bytes"),
            Column("Value #E", "Memory", "bytes"),
            Column("Value #F", "Processes"),
            Column("Value #G", "Power", "watt"),
            Column("Value #H", "Temperature", "celsius", width=120),
        ),
        sort=("GPU", False),
        height=7,
    )


def _processes() -> object:
    by = "(gpu, pid, user, job_id)"

    def process(metric: str) -> str:
        found = f"max by {by} ({metric}{{{CARD}}})"
        return f'label_replace({found}, "user", "unknown", "user", "")'

    memory = process("gpu_process_memory_bytes")
    nobodys = f"max by (gpu) (gpu_memory_unattributed_bytes{{{CARD}}}) > {UNATTRIBUTED_BYTES}"
    nobodys = f'label_replace({nobodys}, "user", "nobody known", "", "")'
    nobodys = f'label_replace({nobodys}, "pid", "not listed", "", "")'
    # an exporter may leave processes out (--no-collector.process-detail): then the jobs' sums
    jobs = per_user(
        f"sum by (gpu, job_id) (gpu_job_memory_bytes{{{CARD}}}) "
        f"unless on (gpu, job_id) gpu_process_memory_bytes{{{CARD}}}"
    )
    jobs = f'label_replace({jobs}, "pid", "all", "", "")'
    shown = f"topk(100, {memory} or {nobodys} or {jobs})"

    def known(expression: str, ref: str) -> Dataquery:
        return rows(f"({expression} or {shown} * 0 - 1) and on {by} {shown}", ref)

    return listing(
        "Processes",
        "What holds memory on the cards, the most first. `unknown`: a process whose user could not "
        "be found. `nobody known`: memory that no listed process accounts for. Where the exporter "
        "does not export processes, the sums of jobs.",
        [
            rows(shown, "A"),
            known(process("gpu_process_utilization_ratio"), "B"),
            known(f"time() - {process('gpu_process_start_time_seconds')}", "C"),
        ],
        columns=(
            Column("gpu", "GPU", width=70),
            Column("pid", "PID", width=110),
            Column(
                "user",
                "User",
                names=(("unknown", "unknown", ORANGE), ("nobody known", "nobody known", RED)),
            ),
            Column("job_id", "Job", links=job_links()),
            Column("Value #A", "Memory", "bytes"),
            Column("Value #B", "Utilisation", "percentunit"),
            Column("Value #C", "Age", "s"),
        ),
        sort=("Memory", True),
        height=6,
    )


def _uses() -> tuple:
    """A panel of each for every card: Grafana repeats it for the values of `gpu`."""
    use = per_user(f"sum by (gpu, job_id) (gpu_job_utilization_ratio{{{CARD}}})")
    memory = per_user(f"sum by (gpu, job_id) (gpu_job_memory_bytes{{{CARD}}})")
    whole = (
        f"max by (gpu) (gpu_utilization_ratio{{{CARD}}}) "
        f"unless on (gpu) gpu_job_utilization_ratio{{{CARD}}}"
    )
    repeated = (
        graph(
            "GPU $gpu: utilisation by job",
            "Share of time in which a kernel of the job ran, jobs of one card on another. `card`: "
            "what the card tells while no job's share can be measured, or no job is there.",
            [
                query(use, "{{user}} {{job_id}}", "A"),
                query(f"{whole} or max by (gpu) (gpu_up{{{CARD}}} * 0)", "card", "B"),
            ],
            unit="percentunit",
            span=24,
            stacked=True,
            colours={"card": GREY},
            links=(to_job_of_series(),),
        ),
        graph(
            "GPU $gpu: memory by job",
            "Memory of each job, what no listed process accounts for, and (dashed) the card's.",
            [
                query(memory, "{{user}} {{job_id}}", "A"),
                query(
                    f"max by (gpu) (gpu_memory_unattributed_bytes{{{CARD}}})", "nobody known", "B"
                ),
                query(f"max by (gpu) (gpu_memory_total_bytes{{{CARD}}})", "card", "C"),
            ],
            unit="bytes",
            span=24,
            stacked=True,
            colours={"card": GREY, "nobody known": RED},
            styles={"card": "limit"},
            links=(to_job_of_series(),),
        ),
    )
    # a whole card, or more where MIG's instances are added up
    repeated[0].axis_soft_max(1)
    return tuple(panel.repeat("gpu").max_per_row(4) for panel in repeated)


def _hardware() -> tuple:
    def each(metric: str, labels: str = "") -> str:
        return f"max by (gpu) ({metric}{{{CARD}{labels}}})"

    def rate(metric: str) -> str:
        return f"max by (gpu) (rate({metric}{{{CARD}}}[$__rate_interval]))"

    state = " or ".join(
        f'max by (gpu) (gpu_throttle_active{{{CARD},reason=~"{reason}"}} == 1) * 0 + {place}'
        for place, (reason, _, _) in enumerate(HOLDS_BACK, 1)
    )
    # a reason that is not there leaves its place to the next, one of no card at all to n/a
    state = (
        f"{state} or max by (gpu) (gpu_throttle_active{{{CARD}}}) * 0 or {each('gpu_up')} * 0 - 1"
    )
    return (
        timeline(
            "What holds the clocks back",
            "The gravest reason at each moment. n/a: the driver does not tell. A gap: nobody told.",
            [query(state, "GPU {{gpu}}")],
            states=(
                ("0", "nothing", "#2f3437"),
                *(
                    (str(place), name, colour)
                    for place, (_, name, colour) in enumerate(HOLDS_BACK, 1)
                ),
            ),
            height=6,
        ),
        graph(
            "Power",
            "Of each card, and (dashed) the highest limit among them.",
            [
                query(each("gpu_power_watts"), "GPU {{gpu}}", "A"),
                query(f"max(gpu_power_limit_watts{{{CARD}}})", "limit", "B"),
            ],
            unit="watt",
            span=8,
            styles={"limit": "dashed"},
            colours={"limit": GREY},
        ),
        graph(
            "Temperature",
            "Of each die.",
            [query(each("gpu_temperature_celsius"), "GPU {{gpu}}")],
            unit="celsius",
            span=8,
        ),
        graph(
            "Clocks",
            "Of each card's multiprocessors: what stays below the others is held back.",
            [query(each("gpu_clock_hertz", ',clock="sm"'), "GPU {{gpu}}")],
            unit="hertz",
            span=8,
        ),
        graph(
            "PCIe",
            "Bytes a second from the host (in) and to it (out). A lower bound where the card's "
            "counters wrap.",
            [
                query(rate("gpu_pcie_receive_bytes_total"), "GPU {{gpu}} in", "A"),
                query(rate("gpu_pcie_transmit_bytes_total"), "GPU {{gpu}} out", "B"),
            ],
            unit="Bps",
        ),
        graph(
            "NVLink",
            "Bytes a second over all links of a card. Empty on cards without NVLink.",
            [
                query(rate("gpu_nvlink_receive_bytes_total"), "GPU {{gpu}} in", "A"),
                query(rate("gpu_nvlink_transmit_bytes_total"), "GPU {{gpu}} out", "B"),
            ],
            unit="Bps",
        ),
    )


def _host() -> tuple:
    def of_jobs(metric: str) -> str:
        """The twenty jobs that have most of it."""
        counter = f"rate({metric}{{{NODE}}}[$__rate_interval])"
        value = counter if metric.endswith("_total") else f"{metric}{{{NODE}}}"
        return per_user(f"topk(20, max by (job_id) ({value}))")

    return (
        graph(
            "Pressure of the node",
            "Share of time in which some process waited for the resource (PSI). n/a in a kernel "
            "without it.",
            [
                query(
                    "max by (resource) (rate(gpuwarden_node_pressure_seconds_total"
                    f"{{{NODE}}}[$__rate_interval]))",
                    "{{resource}}",
                )
            ],
            unit="percentunit",
        ),
        graph(
            "CPU by job",
            "Cores that a job's processes use: a loader that is at all of its cores starves the "
            "card.",
            [query(of_jobs("gpu_job_cpu_seconds_total"), "{{user}} {{job_id}}")],
            unit="short",
            stacked=True,
        ),
        graph(
            "Loader processes by job",
            "Processes that load data.",
            [query(of_jobs("gpu_job_loader_workers"), "{{user}} {{job_id}}")],
            unit="short",
            span=8,
        ),
        graph(
            "Reading by job",
            "Bytes a second from storage; what comes from the page cache is not counted.",
            [query(of_jobs("gpu_job_read_bytes_total"), "{{user}} {{job_id}}")],
            unit="Bps",
            span=8,
        ),
        graph(
            "Host memory by job",
            "Resident memory of a job's processes.",
            [query(of_jobs("gpu_job_resident_memory_bytes"), "{{user}} {{job_id}}")],
            unit="bytes",
            span=8,
            stacked=True,
        ),
    )
