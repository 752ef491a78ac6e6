"""A made-up fortnight of 80 cards, as nodes and recording rules would have written it.

Busy days and quiet nights, a team that holds more than it uses and less of it in the second week,
an outage of Prometheus on a Wednesday, a node that was dark on a Saturday; a ledger, a directory
and an accounting of Slurm beside it. For the report's picture, and for whoever wants to look at
one: `python -m tests.ruleengine.reports.weeks FOLDER`.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from click.testing import CliRunner
from tests.servers import Server, backfill, prometheus

from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.reports.cli import report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DAY, HOUR, FIVE, MINUTE = 86400, 3600, 300, 60
END = 1_750_032_000
"""Monday, 2025-06-16 00:00 UTC."""
BEGIN = END - 14 * DAY
DOWN = range(END - 5 * DAY + 3 * HOUR, END - 5 * DAY + 6 * HOUR + MINUTE)
DARK = range(END - 2 * DAY + 8 * HOUR, END - 2 * DAY + 20 * HOUR)
NODES, CARDS = 10, 8
PRICE = 2.1
TEAMS = {
    "ana": "vision", "bo": "vision", "chen": "vision", "dario": "robotics", "emil": "robotics",
    "fatou": "robotics", "gil": "speech", "hana": "speech", "ivo": "mapping", "jun": "mapping",
}  # fmt: skip
WEIGHTS = {
    "ana": 13, "bo": 9, "chen": 6, "dario": 10, "emil": 5, "fatou": 3, "gil": 8, "hana": 4,
    "ivo": 3, "jun": 2,
}  # fmt: skip
"""Cards that each holds at noon of a working day."""
IDLE = {"dario": 0.55, "emil": 0.3, "bo": 0.08, "gil": 0.12, "ivo": 0.2}
"""Share of what each holds that is idle in the first week."""


def activity(at: int) -> float:
    """How busy people are: most at three in the afternoon, least at night and on Sundays."""
    hour, weekday = at % DAY / HOUR, (at // DAY + 3) % 7
    day = 0.5 + 0.5 * math.cos((hour - 15) / 24 * 2 * math.pi)
    return (0.45 + 0.5 * day) * (0.55 if weekday == 6 else 0.75 if weekday == 5 else 1.0)


def idle(user: str, at: int) -> float:
    """Share of what a user holds that is idle: a third less once rules were in force."""
    return IDLE.get(user, 0.0) * (1.0 if at < END - 7 * DAY else 0.62)


def _series() -> Iterator[tuple[str, str, int, Callable[[int], float | None]]]:
    """Name, labels, seconds between two samples, and value at a time."""
    job = 'job="gpuwarden"'
    for node in range(NODES):
        dark = node == 6
        yield (
            "up",
            f'{job},instance="gpu{node + 1}:9835"',
            MINUTE,
            lambda at, dark=dark: float(not (dark and at in DARK)),
        )
    cards = NODES * CARDS
    yield "fleet:gpus:count", "", MINUTE, lambda at: cards - CARDS * (at in DARK)
    yield "fleet:gpus_seen:count5m", "", FIVE, lambda at: cards - CARDS * (at in DARK)
    for name, low, high in (("avg", 0.05, 0.62), ("p10", 0.0, 0.12), ("p50", 0.0, 0.88),
                            ("p90", 0.75, 1.0)):  # fmt: skip
        yield (
            f"fleet:gpu_utilization_ratio:{name}",
            "",
            MINUTE,
            lambda at, low=low, high=high: min(1.0, low + (high - low) * activity(at)),
        )
    for user, weight in WEIGHTS.items():
        who = f'user="{user}",team="{TEAMS[user]}"'
        paid = f'{who},currency="EUR"'

        def used(at: int, weight: int = weight) -> float:
            return weight * activity(at) / 12

        def wasted(at: int, user: str = user, weight: int = weight) -> float | None:
            return idle(user, at) * weight * activity(at) / 12 or None

        yield "user:gpu_hours:sum5m", who, FIVE, used
        yield "user:gpu_cost:sum5m", paid, FIVE, lambda at, used=used: used(at) * PRICE
        yield "user:gpu_held_idle_hours:sum5m", who, FIVE, wasted
        yield (
            "user:gpu_held_idle_cost:sum5m",
            paid,
            FIVE,
            lambda at, wasted=wasted: None if wasted(at) is None else (wasted(at) or 0) * PRICE,
        )
        if user in IDLE:
            yield (
                "job:gpu_held_idle_hours:sum5m",
                f'job_id="slurm-hpc-48{weight:02}-0",{who}',
                FIVE,
                wasted,
            )
            yield (
                "user:reclaimed_gpu_hours:increase5m",
                who,
                FIVE,
                lambda at: 0.02 if at >= END - 7 * DAY else None,
            )
    yield from _jobs(job)


def _jobs(job: str) -> Iterator[tuple[str, str, int, Callable[[int], float | None]]]:
    """A card's jobs follow one another: the longer, the lower its number."""
    users = list(WEIGHTS)
    for node in range(NODES):
        for gpu in range(CARDS):
            each = (4 + (node + 3 * gpu) % 17) * HOUR
            for number in range(14 * DAY // each):
                begun = BEGIN + number * each
                labels = f'{job},instance="gpu{node + 1}:9835",job_id="j-{node}-{gpu}-{number}"'
                span = range(begun, begun + each - HOUR)
                yield (
                    "gpu_job_holds_gpu",
                    f'{labels},gpu="{gpu}",uuid="GPU-{node}-{gpu}"',
                    FIVE,
                    lambda at, span=span: 1.0 if at in span else None,
                )
                yield (
                    "gpu_job_info",
                    f'{labels},user="{users[(node + gpu + number) % len(users)]}"',
                    FIVE,
                    lambda at, span=span: 1.0 if at in span else None,
                )


def history() -> Iterator[str]:
    """The fortnight as OpenMetrics text."""
    named = ""
    for name, labels, step, value in sorted(_series(), key=lambda item: item[:2]):
        if name != named:
            yield f"# TYPE {name} gauge"
            named = name
        for at in range(BEGIN, END, step):
            found = None if at in DOWN else value(at)
            if found is not None:
                yield f"{name}{{{labels}}} {found:.6g} {at}"


def write(folder: Path) -> None:
    """Everything that a report of the second week needs, but for a running Prometheus."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "history.txt"
    with text.open("w") as out:
        out.writelines(f"{line}\n" for line in history())
        out.write("# EOF\n")
    backfill(text, folder / "tsdb", block="162h")
    text.unlink()
    _ledger(folder / "ledger.sqlite")
    _slurm(folder)
    (folder / "rules.yaml").write_text("version: 1\ntimezone: UTC\nrules: []\n")
    users = {user: {"team": team} for user, team in TEAMS.items()}
    (folder / "directory.yaml").write_text(yaml.safe_dump({"version": 1, "users": users}))


def page(folder: Path, server: Server) -> Path:
    """The report of the second week as a page, compared with the first."""
    slurm = {name: str(folder / "sacct") for name in ("sacct", "squeue", "scontrol", "scancel")}
    config = {
        "version": 1,
        "prometheus": {"url": server.url},
        "rules": ["rules.yaml"],
        "directory": "directory.yaml",
        "ledger": "ledger.sqlite",
        "slurm": slurm,
        "external_url": "https://gpuwarden.example.org",
    }
    (folder / "engine.yaml").write_text(yaml.safe_dump(config))
    made = folder / "report.html"
    arguments = ["--config", str(folder / "engine.yaml"), "--compare", "previous", "-o", str(made)]
    span = ["--from", "2025-06-09", "--to", "2025-06-16"]
    done = CliRunner().invoke(report, [*arguments, *span], catch_exceptions=False)
    if done.exit_code:
        raise AssertionError(done.output)
    return made


def _slurm(folder: Path) -> None:
    """An accounting that tells of two hundred jobs."""
    users = list(WEIGHTS)
    lines = []
    for number in range(200):
        start = END - 7 * DAY + number * 2900
        waited = (number * 37 % 100) ** 2 * (3 if number % 7 == 0 else 1)
        tres = f"cpu=8,gres/gpu={1 + number % 4},mem=64G,node=1"
        times = f"{start - waited - 30}|{start - waited}|{start}"
        lines.append(f"{4800 + number}|{users[number % len(users)]}|{times}|{tres}")
    (folder / "accounting").write_text("\n".join(lines) + "\n")
    program = folder / "sacct"
    program.write_text(f"#!/bin/sh\ncat {folder / 'accounting'}\n")
    program.chmod(0o755)


def _ledger(path: Path) -> None:
    """Fourteen decisions, five of them in the first week; keeps, appeals and a regret."""
    path.unlink(missing_ok=True)
    users = ("dario", "emil", "dario", "gil", "ivo", "dario", "bo")
    with Ledger(path) as made, made.transaction() as db:
        for number in range(14):
            at = END - 9 * DAY + number * 15 * HOUR
            user, job = users[number % 7], f"slurm-hpc-{4700 + number}-0"
            rule = ("idle-held", "idle-held", "memory-hog")[number % 3]
            state = ("verified",) * 5 + ("refused", "lapsed")
            db.execute(
                "INSERT INTO cases (id, rule_id, job_id, state, body, opened_at) "
                "VALUES (?, ?, ?, 'verified', ?, ?)",
                (number + 1, rule, job, json.dumps({"user": user}), at - 1900 - 60 * number),
            )
            proof = {"proof": {"memory_freed": (18 + 7 * (number % 5)) * 2**30}}
            db.execute(
                "INSERT INTO decisions (id, epoch, case_id, rule_id, job_id, user, action, state, "
                "host, body, signature, gpus, evidence, grace, expires, created_at, finished_at, "
                "report) VALUES (?, 1, ?, ?, ?, ?, ?, ?, 'gpu1', x'', '', ?, '', 60, 1, ?, ?, ?)",
                (
                    f"d-{number}",
                    number + 1,
                    rule,
                    job,
                    user,
                    "requeue" if number % 4 == 3 else "terminate",
                    state[number % 7],
                    json.dumps([f"GPU-{card}" for card in range(1 + number % 2)]),
                    at,
                    at + 45,
                    json.dumps(proof),
                ),
            )
            if number % 2:
                db.execute(
                    "INSERT INTO losses (decision_id, instances, seconds, cards, saved, currency, "
                    "gpu_seconds, counted_at) VALUES (?, '[]', 60, 1, 1, '', ?, ?)",
                    (f"d-{number}", 240 * number, at + 700),
                )
        for number, (kind, job) in enumerate(
            (("appeal", 4707), ("appeal", 4709), ("regret", 4709))
        ):
            db.execute(
                "INSERT INTO objections (rule_id, kind, job_id, subject, source, by, role, reason, "
                "at) VALUES ('idle-held', ?, ?, ?, 'word', 'x', 'owner', 'why', ?)",
                (kind, f"slurm-hpc-{job}-0", str(number), END - 2 * DAY),
            )
        for number in range(6):
            db.execute(
                "INSERT INTO keeps (rule_id, job_id, role, by, reason, seconds, granted_at, until) "
                "VALUES ('idle-held', ?, 'owner', 'x', 'why', 7200, ?, ?)",
                (f"slurm-hpc-{4704 + number}-0", END - DAY * number - HOUR, END - DAY * number),
            )


if __name__ == "__main__":
    place = Path(sys.argv[1]).resolve()
    write(place)
    with prometheus("global: {}\n", place / "tsdb") as running:
        sys.stdout.write(f"{page(place, running)}\n")
