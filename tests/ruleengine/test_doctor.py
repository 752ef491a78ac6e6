"""`gpuwarden doctor engine`: each finding is provoked on real servers that have the trouble."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
import time
import zoneinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.disks import small_disk
from tests.ruleengine.schedules import document, scheduler
from tests.ruleengine.worlds import Agent, Keys, Sink, agent
from tests.servers import Server, alertmanager, backfill, free_port, prometheus

from gpuwarden.clock import SystemClock
from gpuwarden.findings import Finding, Status, examine
from gpuwarden.ruleengine.doctor_cli import centre_checks
from gpuwarden.ruleengine.doctor_findings import KNOWN
from gpuwarden.ruleengine.doctor_prometheus_checks import SHIPPED_RULES, written
from gpuwarden.ruleengine.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Iterator

FAILED, WARNING, OK, NOT_CHECKED = Status.FAILED, Status.WARNING, Status.OK, Status.NOT_CHECKED
RULES = """version: 1
timezone: Europe/Berlin
limits: {terminate: {per_tick: 1, per_hour: 6, per_user_per_day: 3,
  halt_above_share_of_running: 10%}}
rules: []
"""
DIRECTORY = """version: 1
operators: {slack: "#gpu-ops"}
users:
  alice: {slack: U0ALICE01, team: vision}
  nadia: {slack: U0NADIA01}
"""


class Centre:
    """An engine's files, changed by tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = {
            "version": 1,
            "prometheus": {"url": f"http://127.0.0.1:{free_port()}"},
            "rules": ["rules.yaml"],
            "directory": "directory.yaml",
            "ledger": "ledger.sqlite",
            "kill_switch": "halt",
            "web": {"listen": f"127.0.0.1:{free_port()}"},
        }
        (folder / "rules.yaml").write_text(RULES)
        (folder / "directory.yaml").write_text(DIRECTORY)

    def secret(self, name: str, text: str = "s3cret-of-the-test") -> str:
        """A file with a secret, for the owner alone."""
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o400)
        return str(path)

    def find(self, *names: str, **options: Any) -> list[Finding]:
        """What some checks find."""
        path = self.folder / "engine.yaml"
        path.write_text(yaml.safe_dump(self.config))
        checks, cover = centre_checks(path, **options)
        return cover(examine([check for check in checks if check.known.id in names]))

    def said(self, name: str, **options: Any) -> list[tuple[Status, str, str]]:
        """Status, subject and words of what one check finds."""
        return [(f.status, f.subject, f.said) for f in self.find(name, **options)]

    def one(self, name: str, **options: Any) -> tuple[Status, str]:
        """Status and words of the only finding of a check."""
        ((status, subject, said),) = self.said(name, **options)
        return status, f"{subject}: {said}"


@pytest.fixture
def centre(tmp_path: Path) -> Centre:
    """An engine's files, without any server."""
    return Centre(tmp_path)


def test_every_check_is_made_and_known(centre: Centre) -> None:
    """In one order, that of the list which docs/doctor.md is made from."""
    path = centre.folder / "engine.yaml"
    path.write_text(yaml.safe_dump(centre.config))
    checks, _ = centre_checks(path)
    assert [check.known.id for check in checks] == [known.id for known in KNOWN]


def test_without_any_server_every_check_still_ends(centre: Centre) -> None:
    """What needs one is failed or not checked, with the reason; the others are made."""
    found = centre.find(*(known.id for known in KNOWN))
    state = {finding.known.id: finding.status for finding in found}
    assert state["engine.config"] is OK
    assert state["engine.zones"] is OK
    assert state["ledger.disk"] in (OK, WARNING)
    for name in ("engine.answer", "prometheus.answer"):
        assert state[name] is FAILED
    for name in ("engine.ticks", "prometheus.nodes", "prometheus.metrics", "ledger.whole"):
        assert state[name] is NOT_CHECKED
    assert all(finding.said for finding in found)
    assert not any("the check itself failed" in finding.said for finding in found)


def test_files_that_cannot_be_used(centre: Centre) -> None:
    """A rule file with a mistake, and an engine.yaml with one: with line and caret."""
    (centre.folder / "rules.yaml").write_text(RULES.replace("version: 1", "versoin: 1"))
    status, said = centre.one("engine.config")
    assert status is FAILED
    assert "rules.yaml:1:1" in said
    assert centre.one("engine.zones")[0] is NOT_CHECKED
    centre.config["tick"] = "often"
    assert centre.one("engine.config")[0] is FAILED


def test_secrets_that_others_can_read(centre: Centre) -> None:
    """Are named by their files, and never by what is in them."""
    centre.config["web"]["token_file"] = centre.secret("token")
    assert centre.one("engine.secret_files")[0] is OK
    (centre.folder / "token").chmod(0o644)
    status, said = centre.one("engine.secret_files")
    assert status is FAILED
    assert "token: others may read or change it (-rw-r--r--)" in said
    (centre.folder / "token").unlink()
    assert centre.one("engine.secret_files")[0] is FAILED


def test_a_machine_without_time_zone_data(centre: Centre, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that files say of times is as people read it."""
    assert centre.one("engine.zones") == (OK, ": time zone data is there; 1 zones are named")
    for part in ("", ".zoneinfo.Asia", ".zoneinfo.Europe", ".zoneinfo.America"):
        monkeypatch.setitem(sys.modules, f"tzdata{part}", None)  # as where it is not installed
    zoneinfo.reset_tzpath(to=[str(centre.folder)])
    zoneinfo.ZoneInfo.clear_cache()
    try:
        status, said = centre.one("engine.zones")
    finally:
        zoneinfo.reset_tzpath()
    assert status is FAILED
    assert "it does not know Asia/Shanghai, Europe/Berlin" in said


# ---------------------------------------------------------------------------------------------
# The engine


HEALTH: dict[str, Any] = {
    "version": "0.1.0",
    "problems": [],
    "ticks": {"age": 3.0, "every": 15.0, "seconds": 0.5},
    "rules": {"hash": "0" * 64, "count": 4, "problem": ""},
    "enforcement": {"paused": None, "kill_switch": False, "held_back": [], "halted": []},
}


@contextlib.contextmanager
def engine_that_says(**changes: Any) -> Iterator[str]:
    """An engine of which only the health matters."""
    body = json.dumps({**HEALTH, **changes}).encode()
    with Sink(lambda _method, request: (200, body if "health" in request.path else b"{}")) as sink:
        yield sink.url


@pytest.mark.parametrize(
    ("name", "changes", "status", "words"),
    [
        ("engine.answer", {}, OK, "ready"),
        ("engine.answer", {"problems": ["no tick yet"]}, FAILED, "no tick yet"),
        ("engine.answer", {"version": "0.0.1"}, WARNING, "it is version 0.0.1"),
        ("engine.ticks", {}, OK, "3 s ago"),
        ("engine.ticks", {"ticks": {**HEALTH["ticks"], "age": None}}, FAILED, "none has"),
        ("engine.ticks", {"ticks": {**HEALTH["ticks"], "age": 90.0}}, FAILED, "90 s ago"),
        ("engine.ticks", {"ticks": {**HEALTH["ticks"], "seconds": 20.0}}, WARNING, "longer"),
        ("engine.rule_hash", {}, FAILED, "in force are 000000000000, on disk"),
        (
            "engine.rule_hash",
            {"rules": {"hash": "", "count": 0, "problem": "the files are not usable"}},
            FAILED,
            "the files are not usable",
        ),
        ("engine.enforcement", {}, OK, "carried out"),
        (
            "engine.enforcement",
            {
                "enforcement": {
                    **HEALTH["enforcement"],
                    "halted": [{"reason": "dark", "sentence": "too many nodes are dark"}],
                }
            },
            WARNING,
            "too many nodes are dark",
        ),
        (
            "engine.enforcement",
            {"enforcement": {**HEALTH["enforcement"], "kill_switch": True}},
            WARNING,
            "the kill switch is on",
        ),
        (
            "engine.enforcement",
            {"enforcement": {**HEALTH["enforcement"], "paused": {"by": "olga", "reason": "work"}}},
            WARNING,
            "paused by olga: work",
        ),
    ],
)
def test_what_the_engine_says_of_itself(
    centre: Centre, name: str, changes: dict[str, Any], *, status: Status, words: str
) -> None:
    """Its ticks, its rules, and what holds every end back."""
    with engine_that_says(**changes) as url:
        found = centre.one(name, url=url)
    assert found[0] is status, found
    assert words in found[1]


# ---------------------------------------------------------------------------------------------
# Prometheus, on a fleet of which much is wrong


def _wrong_fleet(now: int) -> str:
    """OpenMetrics of five minutes, up to a little in the future."""
    times = range(now - 300, now + 300, 5)
    rows: dict[str, list[str]] = {}

    def add(name: str, value: Any, every: int = 5, until: int = 300, **labels: str) -> None:
        text = ",".join(f'{key}="{word}"' for key, word in {"job": "gpuwarden", **labels}.items())
        for at in times:
            if (at - now + 300) % every == 0 and at <= now + until:
                number = value(at) if callable(value) else value
                rows.setdefault(name, []).append(f"{name}{{{text}}} {number} {at}")

    def node(instance: str, every: int = 5, behind: int = 1, **labels: str) -> None:
        add("up", 1, every, instance=instance)
        snapshot = "gpuwarden_snapshot_timestamp_seconds"
        add(snapshot, lambda at: at - behind, every, instance=instance, **labels)
        collector = {"collector": "gpus", "instance": instance, **labels}
        add("gpuwarden_collector_success", 1, every, **collector)

    for instance in ("well:1", "slow:1", "late:1", "bare:1", "twice:1"):
        node(
            instance,
            every=30 if instance == "slow:1" else 5,
            behind=40 if instance == "late:1" else 1,
        )
        if instance != "bare:1":
            add("gpu_info", 1, instance=instance, uuid=f"GPU-{instance}", gpu="0")
    node("twice:1", replica="b")
    add("gpu_info", 1, instance="alias:1", uuid="GPU-well:1", gpu="0")
    add("gpuwarden_collector_success", 0, instance="well:1", collector="slurm")
    add("up", 0, instance="dark:1")
    add("up", 1, instance="blind:1")
    add("up", 0, instance="engine:1", job="gpuwarden-engine")
    for user in ("alice", "nadia", "mallory"):
        add("gpu_job_info", 1, instance="well:1", job_id=f"proc-{user}", user=user)
    add("gpu_job_memory_bytes", 1, instance="well:1", job_id="x", exported_job_id="y", uuid="u")
    add("gpu_power_watts", 1, instance="well:1", exported_instance="z", uuid="u")
    lines = []
    for name, samples in rows.items():
        lines += [f"# TYPE {name} gauge", *samples]
    return "\n".join([*lines, "# EOF", ""])


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Prometheus that holds such a fleet, with rules of which one is old and one is missing."""
    folder = tmp_path_factory.mktemp("wrong")
    backfill(_wrong_fleet(int(time.time())), folder / "tsdb")
    (folder / "rules").mkdir()
    for path in SHIPPED_RULES.glob("*.yml"):
        shutil.copy(path, folder / "rules" / path.name)
    changed = yaml.safe_load((folder / "rules/recording.yml").read_text())
    rules = changed["groups"][0]["rules"]
    rules[0]["expr"] = "vector(1)"
    del rules[1]
    (folder / "rules/recording.yml").write_text(yaml.safe_dump(changed))
    config = folder / "prometheus.yml"
    config.write_text(f"rule_files: ['{folder}/rules/*.yml']\n")
    with prometheus(config, folder / "tsdb") as server:
        yield server


def test_nodes_that_are_not_well(centre: Centre, wrong: Server) -> None:
    """Dark, blind, not scraped at all; named, each with what is wrong with it."""
    centre.config["prometheus"] = {"url": wrong.url}
    centre.config["nodes"] = {"names": ["well:1", "gone:1"]}
    found = {subject: (status, said) for status, subject, said in centre.said("prometheus.nodes")}
    assert found["dark:1"] == (FAILED, "its scrape fails")
    assert found["gone:1"] == (FAILED, "expected, and Prometheus has no target for it")
    assert found["blind:1"][1].startswith("scraped, but without a current snapshot")
    assert found[""][0] is OK
    assert "well:1" not in found
    del centre.config["nodes"]
    centre.config["expected_nodes"] = 99
    assert any("99 expected" in said for _, _, said in centre.said("prometheus.nodes"))


def test_scrapes_that_are_not_as_engine_yaml_says(centre: Centre, wrong: Server) -> None:
    """A node that is scraped every 30 s; and all of them, where engine.yaml is wrong."""
    centre.config["prometheus"] = {"url": wrong.url}
    ((status, subject, said),) = centre.said("prometheus.interval")
    assert (status, subject) == (FAILED, "slow:1")
    assert "engine.yaml says 5 s" in said
    centre.config["scrape_interval"] = "30s"
    assert "slow:1" not in {subject for _, subject, _ in centre.said("prometheus.interval")}


def test_targets_labels_and_series_that_are_wrong(centre: Centre, wrong: Server) -> None:
    """Scraped twice, renamed, or missing: joins would fail without a word."""
    centre.config["prometheus"] = {"url": wrong.url}
    targets = centre.said("prometheus.targets")
    assert (FAILED, "twice:1", "its series are there twice") in targets
    assert {subject for _, subject, _ in targets} == {"twice:1", "GPU-well:1"}
    labels = [said for _, _, said in centre.said("prometheus.labels")]
    assert any("exported_job or exported_instance" in said for said in labels)
    assert any("exported_job_id is there" in said for said in labels)
    metrics = centre.said("prometheus.metrics")
    assert (FAILED, "bare:1", "gpu_info is missing") in metrics
    assert (WARNING, "well:1", "the collector slurm fails") in metrics


def test_rules_of_another_version(centre: Centre, wrong: Server) -> None:
    """One that is missing, and one with another expression; spaces are no difference."""
    centre.config["prometheus"] = {"url": wrong.url}
    # Once this server has evaluated its rules, some of them also fail on such a fleet.
    found = [(status, said) for status, _, said in centre.said("prometheus.rules")]
    assert next(said for status, said in found if status is FAILED).startswith("1 not loaded: ")
    assert next(s for status, s in found if status is WARNING).startswith("1 loaded with another")
    assert written("sum by(a)( x{b='c'} )") == written('sum by (a) (x{b="c"})')


def test_clocks_and_the_engine_as_a_target(centre: Centre, wrong: Server) -> None:
    """A node whose snapshots are of another time; an engine whose scrape fails."""
    centre.config["prometheus"] = {"url": wrong.url}
    clocks = centre.said("engine.clocks")
    assert clocks[0][0] is OK
    assert (clocks[1][0], clocks[1][1]) == (FAILED, "late:1")
    assert centre.one("prometheus.engine") == (FAILED, "engine:1: its scrape fails")
    assert centre.one("prometheus.answer")[0] is OK


def test_people_whom_the_directory_does_not_know(centre: Centre, wrong: Server) -> None:
    """Seen with a card within a day; and who is of no team."""
    centre.config["prometheus"] = {"url": wrong.url}
    found = {subject: said for _, subject, said in centre.said("directory.people")}
    assert "is not in the directory" in found["mallory"]
    assert "is of no team" in found["nadia"]
    assert "alice" not in found
    del centre.config["directory"]
    assert centre.one("directory.people")[0] is WARNING


@pytest.mark.parametrize(("skew", "status"), [(0, OK), (3, WARNING), (60, FAILED), (-60, FAILED)])
def test_a_prometheus_of_another_time(centre: Centre, skew: float, status: Status) -> None:
    """Its clock is read from what it answers."""

    def answer(_method: str, _request: Any) -> tuple[int, bytes]:
        value = [time.time(), str(time.time() + skew)]
        return 200, json.dumps(
            {"status": "success", "data": {"resultType": "scalar", "result": value}}
        ).encode()

    with Sink(answer) as sink:
        centre.config["prometheus"] = {"url": sink.url}
        assert centre.said("engine.clocks")[0][0] is status


# ---------------------------------------------------------------------------------------------
# Who is told

ROUTES = """
route: {receiver: nobody, routes: [ROUTE]}
receivers:
- name: nobody
- name: hop
  webhook_configs: [{url: 'http://127.0.0.1:1/v1/notify/slack'}]
"""


def test_alertmanagers_and_the_routes_in_force(centre: Centre, tmp_path: Path) -> None:
    """Away, strangers to each other, with routes that lose what precedes an end."""
    centre.config["alertmanagers"] = [f"http://127.0.0.1:{free_port()}"]
    assert centre.one("alertmanager.answer")[0] is FAILED
    assert centre.one("alertmanager.routes")[0] is NOT_CHECKED
    lost = ROUTES.replace("ROUTE", "{matchers: ['alertname=\"Watchdog\"'], receiver: hop}")
    with alertmanager(lost, tmp_path / "one") as one, alertmanager(lost, tmp_path / "two") as two:
        centre.config["alertmanagers"] = [one.url]
        assert centre.one("alertmanager.answer")[0] is OK
        assert FAILED in {status for status, _, _ in centre.said("alertmanager.routes")}
        centre.config["alertmanagers"] = [one.url, two.url]
        found = centre.said("alertmanager.answer")
    assert [status for status, _, _ in found] == [WARNING, WARNING]
    assert "engine.yaml names 2" in found[0][2]
    centre.config["alertmanagers"] = []
    assert centre.one("alertmanager.answer")[0] is WARNING


def test_a_prometheus_that_alerts_nobody(centre: Centre, wrong: Server) -> None:
    """Its health rules fire, and nobody hears."""
    centre.config |= {"prometheus": {"url": wrong.url}, "alertmanagers": ["http://127.0.0.1:1"]}
    assert "it sends alerts to nobody" in centre.one("alertmanager.prometheus")[1]


def test_a_mail_server_and_a_slack_that_refuse(centre: Centre) -> None:
    """Nothing is sent to anybody; the token that Slack says back is not shown."""
    assert centre.one("channels.email")[0] is NOT_CHECKED
    centre.config["smtp"] = {"host": "127.0.0.1", "port": free_port(), "sender": "a@b.c"}
    assert centre.one("channels.email")[0] is FAILED
    token = "xoxb-of-this-test-only"
    replies = [
        {"ok": False, "error": f"invalid_auth {token}"},
        {"ok": True, "user": "warden", "team": "lab"},
    ]
    with Sink(
        lambda *_: (200, json.dumps(replies[min(len(sink.received) - 1, 1)]).encode())
    ) as sink:
        centre.config["slack"] = {"url": sink.url, "token_file": centre.secret("slack", token)}
        refused, taken = centre.one("channels.slack"), centre.one("channels.slack")
        assert {request.path for request in sink.received} == {"/auth.test"}
    assert refused == (FAILED, f"{sink.url}: auth.test: invalid_auth [hidden]")
    assert taken == (OK, ": as warden of lab")
    centre.config["bots"] = {
        "ops": {"kind": "feishu", "key_file": centre.secret("key"), "proves": False}
    }
    assert centre.one("channels.bots")[0] in (NOT_CHECKED, OK)


# ---------------------------------------------------------------------------------------------
# Agents, ledger, Grafana


@pytest.fixture
def agents(tmp_path: Path, centre: Centre) -> Iterator[tuple[Agent, Keys]]:
    """A node of which Prometheus knows, and its agent."""
    keys = Keys(tmp_path)
    row = {"metric": {"instance": "127.0.0.1:9835"}, "value": [time.time(), "1"]}
    scalar = {"resultType": "scalar", "result": [time.time(), str(time.time())]}

    def answer(_method: str, request: Any) -> tuple[int, bytes]:
        vector = {"resultType": "vector", "result": [row]}
        data = scalar if b"query=time()" in request.body else vector
        return 200, json.dumps({"status": "success", "data": data}).encode()

    with Sink(answer) as sink, agent(keys) as (server, state):
        centre.config["prometheus"] = {"url": sink.url}
        centre.config["agents"] = {
            "url": f"http://{{host}}:{server.port}",
            "key_file": str(keys.file),
        }
        yield state, keys


@pytest.mark.usefixtures("agents")
def test_agents_that_answer(centre: Centre) -> None:
    """With the engine's key."""
    assert centre.one("agents.answer")[0] is OK
    assert centre.one("agents.keys")[0] is OK


@pytest.mark.usefixtures("agents")
def test_agents_that_know_another_key(centre: Centre, tmp_path: Path) -> None:
    """Or do not answer at all."""
    (tmp_path / "other").mkdir()
    other = Keys(tmp_path / "other")
    centre.config["agents"]["key_file"] = str(other.file)
    status, said = centre.one("agents.keys")
    assert status is FAILED
    assert other.id in said
    centre.config["agents"]["url"] = f"http://{{host}}:{free_port()}"
    assert centre.one("agents.answer")[0] is FAILED
    assert centre.one("agents.keys") == (NOT_CHECKED, ": no agent answers")
    del centre.config["agents"]
    assert centre.one("agents.answer")[0] is NOT_CHECKED


def test_a_damaged_ledger(centre: Centre) -> None:
    """Is told; a whole one is counted, one that is not there yet cannot be."""
    assert centre.one("ledger.whole")[0] is NOT_CHECKED
    path = centre.folder / "ledger.sqlite"
    Ledger(path).close()
    assert centre.one("ledger.whole")[0] is OK
    content = bytearray(path.read_bytes())
    content[4096:12288] = b"\xff" * 8192
    path.write_bytes(content)
    assert centre.one("ledger.whole")[0] is FAILED


def test_a_ledger_on_a_full_disk(centre: Centre, tmp_path: Path) -> None:
    """Of a file system of its own."""
    with small_disk(tmp_path / "small") as small:
        centre.config["ledger"] = str(small / "ledger.sqlite")
        status, said = centre.one("ledger.disk")
    assert status is FAILED
    assert "1 MiB free" in said
    centre.config["ledger"] = str(small / "none/ledger.sqlite")
    assert centre.one("ledger.disk")[0] is NOT_CHECKED


def test_a_grafana_without_the_boards(centre: Centre) -> None:
    """It is looked at only where it is named."""
    assert centre.one("grafana.answer")[0] is NOT_CHECKED
    away = f"http://127.0.0.1:{free_port()}"
    assert centre.one("grafana.answer", grafana=away)[0] is FAILED

    def answer(_method: str, request: Any) -> tuple[int, bytes]:
        if request.path == "/api/health":
            return 200, b'{"version": "12.0.0"}'
        known = request.path.endswith(("fleet", "job"))
        closed = request.headers.get("authorization") != "Bearer s3cret-of-the-test"
        return (401 if closed else 200 if known else 404), b"{}"

    with Sink(answer) as sink:
        assert centre.one("grafana.answer", grafana=sink.url)[0] is NOT_CHECKED
        token = Path(centre.secret("grafana"))
        status, said = centre.one("grafana.answer", grafana=sink.url, grafana_token_file=token)
        centre.config["scheduler"] = {"url": "http://127.0.0.1:9"}
        also = centre.one("grafana.answer", grafana=sink.url, grafana_token_file=token)[1]
    assert status is FAILED
    assert said.endswith("it lacks gpuwarden-node, gpuwarden-governance")
    assert also.endswith("it lacks gpuwarden-node, gpuwarden-governance, gpuwarden-scheduling")


def test_a_scheduler_that_does_not_answer_or_may_not_ask(centre: Centre) -> None:
    """Its problems are told here, too; limits without a token, and a token without limits."""
    assert centre.one("scheduler.answer")[0] is NOT_CHECKED
    limits = {"per_hour": 9, "per_run_per_day": 3, "share_of_running": "10%", "longest": "20m"}
    centre.config["leaves"] = limits
    status, said = centre.one("scheduler.answer")
    assert status is WARNING
    assert "no token has the role scheduler" in said
    del centre.config["leaves"]
    centre.config["scheduler"] = {"url": f"http://127.0.0.1:{free_port()}"}
    status, said = centre.one("scheduler.answer")
    assert status is FAILED
    assert "tells nothing" in said
    with scheduler(SystemClock()) as (told, sink):
        centre.config["scheduler"] = {"url": sink.url}
        status, said = centre.one("scheduler.answer")
        assert status is WARNING
        assert "came back three times" in said
        whole = dataclasses.replace(document(SystemClock().wall()), problems=())
        told.body = whole.encode()
        assert centre.one("scheduler.answer")[0] is OK
