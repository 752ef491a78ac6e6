"""`gpuwarden costs` over a Prometheus that recorded an hour by alerting/rules/money.yml."""

from __future__ import annotations

import contextlib
import csv
import datetime as dt
import json
import sqlite3
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from tests.ruleengine.fleets import A100, END, GIB, SCRAPE, History
from tests.servers import backfill, binary, free_port, prometheus

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine.costs_cli import costs
from gpuwarden.ruleengine.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Iterator

RULES = Path(__file__).parents[2] / "alerting" / "rules"
BEGIN = END - 3700
"""Of the hour; five minutes are a whole number of these."""
LAYERS = 3
"""Recorded series rest on recorded ones; promtool fills in one layer at a time."""


def _window(begin: float, seconds: float) -> Any:
    # History that is filled in has no mark where a series ends: it counts for a scrape more.
    return lambda time: 1.0 if begin <= time < begin + seconds - SCRAPE else None


def _history() -> History:
    """Ana's two cards for 5 min 10 s, ben's half of a card for half an hour, an unpriced card."""
    history = History(start=BEGIN)
    holdings = (
        ("short", "ana", ("a", "b"), BEGIN + 602, 310),
        ("shared-1", "ben", ("c",), BEGIN + 602, 1800),
        ("shared-2", "cho", ("c",), BEGIN + 602, 1800),
        ("=cmd()", "eve", ("d",), BEGIN + 602, 600),
    )
    for index, uuid in enumerate("abcd"):
        name = "Odd card" if uuid == "d" else A100
        history.add("gpu_info", 1, gpu=str(index), uuid=uuid, name=name)
        history.add("gpu_up", 1, gpu=str(index), uuid=uuid)
        history.add("gpu_memory_total_bytes", 40 * GIB, gpu=str(index), uuid=uuid)
    for job, user, cards, begin, seconds in holdings:
        held = _window(begin, seconds)
        history.add("gpu_job_info", held, job_id=job, user=user, source="proc", framework="torch")
        for uuid in cards:
            where = {"job_id": job, "gpu": str("abcd".index(uuid)), "uuid": uuid}
            history.add("gpu_job_holds_gpu", held, **where)
            history.add("gpu_job_utilization_ratio", held, **where)
    run = {"run_id": "r", "model": "yolov8m", "project": "=doors"}
    history.add("yolo_info", _window(BEGIN + 602, 310), job_id="short", **run)
    history.add("gpuwarden_price_per_gpu_hour", 3.0, model=A100, currency="EUR")
    for user, team in (("ana", "vision"), ("ben", "speech"), ("cho", "vision")):
        history.add("gpuwarden_user_info", 1, user=user, team=team)
    return history


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the server."""
    storage = tmp_path_factory.mktemp("money") / "tsdb"
    text = _history().text()
    backfill(text, storage)
    for _ in range(LAYERS):
        with prometheus("global: {}\n", storage) as source:
            done = subprocess.run(
                [
                    binary(("promtool",)), "tsdb", "create-blocks-from", "rules",
                    f"--url={source.url}", f"--start={BEGIN}", f"--end={END}",
                    f"--output-dir={storage}", str(RULES / "money.yml"),
                ],
                capture_output=True, text=True, check=False, timeout=60,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
    with prometheus("global: {}\n", storage) as served:
        yield served.url


@pytest.fixture
def config(server: str, tmp_path: Path) -> Path:
    """An engine.yaml whose cards cost 3 EUR an hour, by the minute."""
    (tmp_path / "rules.yaml").write_text("version: 1\n")
    path = tmp_path / "engine.yaml"
    path.write_text(
        f"version: 1\nprometheus: {{url: '{server}'}}\nrules: [rules.yaml]\nledger: ledger.sqlite\n"
        f"prices: {{currency: EUR, per_gpu_hour: {{'{A100}': 3.0}}, billing: {{unit: 1m}}}}\n"
    )
    return path


def asked(config: Path, *words: str, status: int = 0) -> str:
    """What the command answers."""
    hour = ("--from", str(_iso(BEGIN)), "--to", str(_iso(BEGIN + 3300)))
    done = CliRunner().invoke(costs, ["--config", str(config), *hour, *words])
    assert done.exit_code == status, (done.output, done.exception)
    return done.stdout


def _iso(time: int) -> str:
    return dt.datetime.fromtimestamp(time, dt.UTC).isoformat()


def lines(config: Path, *words: str) -> dict[str, dict[str, Any]]:
    """The lines of a statement by the first of their labels."""
    document = json.loads(asked(config, *words, "-o", "json"))
    return {str(next(iter(line.values()))): line for line in document["lines"]}


def test_a_statement_of_jobs_is_rounded_by_attempt_and_card(config: Path) -> None:
    """5 min 10 s on two cards cost twelve minutes; a shared card is shared; no price, no cost."""
    found = lines(config, "--by", "job")
    short, shared, odd = found["short"], found["shared-1"], found["=cmd()"]
    assert short["gpu_hours"] == pytest.approx(2 * 310 / 3600, abs=2 * SCRAPE / 3600)
    assert short["billed_gpu_hours"] == pytest.approx(2 * 360 / 3600, abs=1e-6)
    assert short["cost"] == {"EUR": 0.6}
    assert (short["project"], short["team"], short["user"]) == ("=doors", "vision", "ana")
    assert shared["gpu_hours"] == pytest.approx(0.25, abs=SCRAPE / 3600)
    assert shared["cost"] == {"EUR": 0.75}
    assert (odd["cost"], odd["unpriced_gpu_hours"]) == (
        {},
        pytest.approx(600 / 3600, abs=SCRAPE / 3600),
    )
    assert odd["team"] == "none"


def test_the_total_of_every_level_is_the_same(config: Path) -> None:
    """And of one team it is that team's."""
    totals = []
    for by in ("team", "user", "project", "job"):
        total = json.loads(asked(config, "--by", by, "-o", "json"))["total"]
        totals.append(
            {key: total[key] for key in ("jobs", "gpu_hours", "billed_gpu_hours", "cost")}
        )
    assert totals == totals[:1] * 4
    assert totals[0]["jobs"] == 4
    mine = json.loads(asked(config, "--team", "vision", "-o", "json"))["total"]
    assert mine["cost"] == {"EUR": 1.35}


def test_an_attempt_that_runs_on_is_not_rounded(config: Path) -> None:
    """Half of it is told now, and the rest, rounded, in the next statement."""
    words = ("--by", "job", "--to", _iso(BEGIN + 602 + 155))
    found = lines(config, *words)["short"]
    assert found["billed_gpu_hours"] == found["gpu_hours"]


def test_what_ends_lost_is_the_ledgers_to_tell(config: Path) -> None:
    """By job it is not known without; with it, it is, also 0."""
    assert lines(config, "--by", "job")["short"]["lost_gpu_hours"] is None
    path = config.with_name("ledger.sqlite")
    ledger = Ledger(path)
    ledger.close()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("INSERT INTO cases VALUES (1, 'idle', 'short', 'verified', '{}', 1, 2, 'gone')")
        db.execute(
            "INSERT INTO decisions (id, epoch, case_id, rule_id, job_id, user, action, state, "
            "host, body, signature, gpus, evidence, grace, expires, created_at, finished_at) "
            "VALUES ('d', 1, 1, 'idle', 'short', 'ana', 'terminate', 'verified', 'n1', x'', '', "
            "'[]', '', 1, 1, ?, ?)",
            (BEGIN + 900, BEGIN + 912),
        )
        db.execute(
            "INSERT INTO losses (decision_id, instances, cards, saved, currency, gpu_seconds) "
            "VALUES ('d', '[]', 2, 0, '', 360)"
        )
    found = lines(config, "--by", "job")
    assert found["short"]["lost_gpu_hours"] == 0.1
    assert found["shared-1"]["lost_gpu_hours"] == 0.0


def test_the_table_is_for_people_and_names_are_no_formulas(config: Path) -> None:
    """A project's name is its users' choice; a spreadsheet must not run it."""
    table = asked(config, "--by", "project")
    assert "=doors" in table
    assert "100.0 % recorded" in table
    rows = list(csv.reader(asked(config, "--by", "project", "-o", "csv").splitlines()))
    assert rows[0][2:6] == ["project", "team", "jobs", "gpu_hours"]
    assert "'=doors" in {row[2] for row in rows}


def test_large_amounts_keep_their_cents(config: Path) -> None:
    """A spreadsheet gets what the table says, to the last digit."""
    config.write_text(config.read_text().replace("3.0", "987654.32"))
    (row, *_) = csv.DictReader(asked(config, "--by", "user", "-o", "csv").splitlines())
    assert (row["user"], float(row["cost_EUR"])) == ("cho", pytest.approx(246913.58, abs=1e-6))


def test_a_replica_that_is_away_is_stood_in_for(config: Path, server: str) -> None:
    """The statement is the other one's; where none answers there is none."""
    away = f"http://127.0.0.1:{free_port()}"
    text = config.read_text()
    config.write_text(text.replace(f"url: '{server}'", f"replicas: ['{away}', '{server}']"))
    assert json.loads(asked(config, "-o", "json"))["total"]["jobs"] == 4
    config.write_text(text.replace(server, away))
    done = CliRunner().invoke(costs, ["--config", str(config), "--from", "now-1h"])
    assert isinstance(done.exception, ServiceUnavailable)


def test_nothing_recorded_is_no_statement_of_zeros(config: Path) -> None:
    """The command says what to load, and fails."""
    words = ("--from", _iso(BEGIN - 90000), "--to", _iso(BEGIN - 80000))
    done = CliRunner().invoke(costs, ["--config", str(config), *words])
    assert "money.yml" in str(done.exception)
    backwards = ("--from", _iso(BEGIN + 10), "--to", _iso(BEGIN))
    done = CliRunner().invoke(costs, ["--config", str(config), *backwards])
    assert "before --to" in str(done.exception)


def test_of_shards_each_must_have_recorded(config: Path, server: str, tmp_path: Path) -> None:
    """Half of the fleet of which nothing was recorded is half of the time; nothing counts twice."""
    with prometheus("global: {}\n", tmp_path / "empty") as other:
        both = f"shards: ['{server}', '{other.url}']"
        text = config.read_text().replace(f"url: '{server}'", both)
        config.write_text(f"{text}nodes: {{names: [n1:9835, n2:9835]}}\n")
        document = json.loads(asked(config, "-o", "json"))
    assert document["covered"] == pytest.approx(0.5, abs=0.01)
    assert document["total"]["jobs"] == 4
