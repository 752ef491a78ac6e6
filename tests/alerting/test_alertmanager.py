"""alertmanager.yml in a real Alertmanager: what arrives where, and in which words."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.servers import Server, alertmanager, binary, free_port, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
ALERTING = ROOT / "alerting"
JOB = {
    "alertname": "GpuwardenJobNotice",
    "service": "gpuwarden-jobs",
    "rule": "idle-held",
    "node": "n1",
    "user": "ana",
    "team": "robotics",
    "mode": "enforce",
}


@pytest.fixture(scope="module")
def sinks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, int]]:
    """compose.yaml's mailbox and Slack, and the port of their SMTP server."""
    http, smtp = free_port(), free_port()
    words = ["--http-port", str(http), "--smtp-port", str(smtp)]
    command = [sys.executable, str(ROOT / "deploy/compose/sinks.py"), *words]
    log = tmp_path_factory.mktemp("sinks") / "log"
    with running(Server(f"http://127.0.0.1:{http}", log, command)) as server:
        yield server, smtp


@pytest.fixture(scope="module")
def manager(
    sinks: tuple[Server, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """An Alertmanager with the shipped file; only hosts, secrets' paths and waits are changed."""
    http, smtp = sinks
    folder = tmp_path_factory.mktemp("alertmanager")
    secrets = {
        "slack_url": f"{http.url}/services/T0/B0/secret",
        "smtp_password": "x",
        "notify_token": "of the last hop",
    }
    for name, value in secrets.items():
        (folder / name).write_text(value)
    text = (ALERTING / "alertmanager.yml").read_text()
    for old, new in (
        ("/etc/alertmanager/secrets", str(folder)),
        ("http://engine:9837", http.url),
        ("http://deadman:8025", http.url),
        ("mail:587", f"127.0.0.1:{smtp}"),
        ("smtp_require_tls: true", "smtp_require_tls: false"),
        ("templates/*.tmpl", f"{ALERTING}/templates/*.tmpl"),
        ("group_wait: 30s", "group_wait: 0s"),
        ("group_wait: 10s", "group_wait: 0s"),
        ("group_interval: 30s", "group_interval: 1s"),
        # it is always night
        ("end_time: '07:00'", "end_time: '24:00'"),
    ):
        assert old in text
        text = text.replace(old, new)
    with alertmanager(text, folder / "state") as server:
        yield server


def post(manager: Server, **labels: str) -> None:
    """Give Alertmanager one firing alert."""
    now = dt.datetime.now(tz=dt.UTC)
    alert = {
        "labels": labels,
        "annotations": {"summary": "What happened.", "runbook_url": "docs/runbooks/x.md"},
        "startsAt": now.isoformat(),
        "endsAt": (now + dt.timedelta(minutes=5)).isoformat(),
    }
    manager.json("/api/v2/alerts", [alert])


def arrived(sinks: tuple[Server, int], word: str, count: int = 1) -> list[dict[str, Any]]:
    """The messages that contain `word`, once there are `count` of them."""

    def look() -> list[dict[str, Any]]:
        found = [
            message
            for message in sinks[0].json("/messages")
            if word in message["text"] + message["subject"]
        ]
        return found if len(found) >= count else []

    return until(look, 20)


def test_amtool_takes_the_configuration() -> None:
    """`amtool check-config` finds no fault, templates included."""
    done = subprocess.run(
        [binary(("amtool",)), "check-config", str(ALERTING / "alertmanager.yml")],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 templates" in done.stdout


def test_matchers_are_quoted_as_later_parsers_want_it() -> None:
    """Every matcher has a quoted value: 0.27's parser reads unquoted ones differently."""

    def matchers(node: object) -> Iterator[str]:
        if isinstance(node, dict):
            for key, value in node.items():
                if str(key).endswith("matchers"):
                    yield from value
                else:
                    yield from matchers(value)
        elif isinstance(node, list):
            for item in node:
                yield from matchers(item)

    config = yaml.safe_load((ALERTING / "alertmanager.yml").read_text())
    assert all(matcher.endswith('"') for matcher in matchers(config))


def test_a_page_arrives_in_slack_and_mail(manager: Server, sinks: tuple[Server, int]) -> None:
    """A health alert that pages is told by Alertmanager itself, with what to do."""
    post(manager, alertname="GpuwardenNoNodes", service="gpuwarden", severity="page")
    mail, slack = sorted(arrived(sinks, "GpuwardenNoNodes", 2), key=lambda one: one["kind"])
    assert mail["to"] == "gpu-ops@example.com"
    assert mail["subject"] == "[FIRING 1] GpuwardenNoNodes"
    assert mail["text"] == "What happened.\nWhat to do: docs/runbooks/x.md"
    assert slack["to"] == "#gpu-ops"
    assert slack["subject"] == "[FIRING 1] GpuwardenNoNodes"
    assert slack["text"].startswith("<!channel> What happened.")


def test_the_heartbeat_goes_out(manager: Server, sinks: tuple[Server, int]) -> None:
    """The Watchdog is sent to the dead man's receiver and to nobody else."""
    post(manager, alertname="Watchdog", service="gpuwarden", severity="none")
    assert [message["to"] for message in arrived(sinks, "Watchdog")] == ["/deadman"]


def test_job_notices_go_to_the_last_hop(manager: Server, sinks: tuple[Server, int]) -> None:
    """A notice reaches the engine's receiver with the token, and grouped by job."""
    post(manager, **JOB, job_id="one-job", level="moderate")
    (message,) = arrived(sinks, "one-job")
    assert message["to"] == "/v1/notify/slack+email"
    assert message["authorization"] == "Bearer of the last hop"
    assert '"groupLabels":{"alertname":"GpuwardenJobNotice","job_id":"one-job"' in (message["text"])


def test_a_team_reads_along(manager: Server, sinks: tuple[Server, int]) -> None:
    """A team's channel reaches the engine as Slack's name for it, beside the owner's notice."""
    post(manager, **JOB | {"team": "vision"}, job_id="vision-job", level="severe")
    targets = {message["to"] for message in arrived(sinks, "vision-job", 2)}
    assert targets == {"/v1/notify/slack+email", "/v1/notify/slack?channel=%23vision-gpu"}


def test_off_hours_mute_the_mild_word_of_a_rule_that_ends_nothing(
    manager: Server, sinks: tuple[Server, int]
) -> None:
    """At night it is kept back; what precedes an action arrives at any hour, mild or not."""
    post(manager, **JOB | {"mode": "warn"}, job_id="by-day", level="light")
    for level in ("light", "moderate", "severe"):
        post(manager, **JOB, job_id=f"any-hour-{level}", level=level)
    # The muted one was first; when the others have arrived, it had its turn.
    arrived(sinks, "any-hour-", 3)
    post(manager, **JOB | {"mode": "warn"}, job_id="by-night", level="moderate")
    arrived(sinks, "by-night")
    assert not [m for m in sinks[0].json("/messages") if "by-day" in m["text"] + m["subject"]]


def test_a_higher_level_silences_the_lower(manager: Server) -> None:
    """Severe inhibits moderate of the same rule and job, not another rule's or another job's."""
    post(manager, **JOB, job_id="inhibited", level="severe")
    post(manager, **JOB, job_id="inhibited", level="moderate")
    post(manager, **JOB | {"rule": "memory-hog"}, job_id="inhibited", level="moderate")
    post(manager, **JOB, job_id="another", level="moderate")

    def states() -> dict[tuple[str, str, str], str]:
        query = urllib.parse.urlencode({"filter": 'job_id=~"inhibited|another"'})
        alerts = manager.json(f"/api/v2/alerts?{query}")
        found = {
            (
                alert["labels"]["job_id"],
                alert["labels"]["rule"],
                alert["labels"]["level"],
            ): alert["status"]["state"]
            for alert in alerts
        }
        return found if len(found) == 4 and "unprocessed" not in found.values() else {}

    assert until(states, 20) == {
        ("inhibited", "idle-held", "severe"): "active",
        ("inhibited", "idle-held", "moderate"): "suppressed",
        ("inhibited", "memory-hog", "moderate"): "active",
        ("another", "idle-held", "moderate"): "active",
    }
