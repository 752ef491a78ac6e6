"""compose.yaml and what it mounts. No Docker engine runs here, so nothing is started by it.

What can be shown without one: the file is valid, every file that it mounts exists and is accepted
by the program that reads it, and the scripts of deploy/compose do what the services need of them.
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.deploy.dockerfiles import stages
from tests.servers import Server, binary, fetch, free_port, running, until

from gpuwarden.exporter import scenarios

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "compose"
STAGES = stages(ROOT / "deploy" / "docker" / "Dockerfile")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
COMMAND = Path(sys.executable).with_name("gpuwarden")


def run(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    return subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        **options,
    )


def test_compose_takes_the_file() -> None:
    """The file follows the compose specification's schema."""
    checker = Path(sys.executable).with_name("check-jsonschema")
    done = run(checker, "--builtin-schema", "vendor.compose-spec", ROOT / "compose.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_mounted_file_is_in_the_repository() -> None:
    """A path that does not exist would be mounted as an empty folder."""
    mounts = [
        volume.split(":")[0]
        for service in SERVICES.values()
        for volume in service.get("volumes", [])
    ]
    paths = [mount for mount in mounts if mount.startswith(".")]
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
    names = {mount for mount in mounts if not mount.startswith(".")}
    assert names == set(COMPOSE["volumes"])


def test_no_service_has_more_rights_than_it_needs() -> None:
    """Capabilities are dropped, roots are read-only, ports are on loopback, images are pinned."""
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        if "build" not in service:
            assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), name


def test_every_lasting_service_can_be_seen_to_be_healthy() -> None:
    """Each service that others wait for has a health check, its own or its image's."""
    for service in SERVICES.values():
        for name, wish in service.get("depends_on", {}).items():
            waited = SERVICES[name]
            if wish["condition"] == "service_healthy":
                target = waited.get("build", {}).get("target")
                assert "healthcheck" in waited or STAGES[target].all("HEALTHCHECK")
            elif wish["condition"] == "service_completed_successfully":
                assert waited["restart"] == "no"


def test_every_image_that_is_built_is_one_of_the_dockerfiles() -> None:
    """By the stage's name."""
    used = {service["build"]["target"] for service in SERVICES.values() if "build" in service}
    assert used <= set(STAGES)


def test_no_service_can_take_the_machine() -> None:
    """Memory, processor and processes are bounded, and none runs as root."""
    for name, service in SERVICES.items():
        assert re.fullmatch(r"\d+[mg]", service["mem_limit"]), name
        assert service["cpus"] > 0, name
        assert service["pids_limit"] > 0, name
        assert int(service["user"].partition(":")[0]) > 0, name


def test_logs_are_a_profile_and_lead_to_the_jobs() -> None:
    """What Alloy is shown is what the exporter lists, under the same names."""
    assert {name for name, one in SERVICES.items() if "profiles" in one} == {"loki", "alloy"}
    mounts = {
        name: {tuple(volume.split(":")[:2]) for volume in SERVICES[name]["volumes"]}
        for name in ("exporter", "jobs", "alloy")
    }
    assert ("job-logs", "/var/log/jobs") in mounts["exporter"] & mounts["jobs"] & mounts["alloy"]
    (flag,) = [word for word in SERVICES["exporter"]["command"] if "targets-file" in word]
    assert flag.partition("=")[2] in (ROOT / "deploy/logs/node.alloy").read_text()
    assert ("job-files", "/run/gpuwarden") in mounts["exporter"] & mounts["alloy"]


def test_alertmanager_is_the_shipped_one_but_for_the_mail_server() -> None:
    """deploy/compose/alertmanager.yml differs from alerting/alertmanager.yml in two lines only."""
    theirs = (ROOT / "alerting" / "alertmanager.yml").read_text().splitlines()
    ours = (FOLDER / "alertmanager.yml").read_text().splitlines()
    changed = {
        line
        for line in difflib.ndiff(theirs, ours)
        if line[0] in "+-" and not line[2:].startswith("#")
    }
    assert changed == {
        "-   smtp_smarthost: mail:587",
        "+   smtp_smarthost: mail:1025",
        "-   smtp_require_tls: true",
        "+   smtp_require_tls: false",
    }
    done = run(binary(("amtool",)), "check-config", FOLDER / "alertmanager.yml")
    # its templates are mounted beside it
    assert done.returncode == 0, done.stdout + done.stderr


def test_hosts_in_the_files_are_services() -> None:
    """Every host that a mounted file names is a service or an alias of one."""
    hosts = set(SERVICES)
    for service in SERVICES.values():
        networks = service.get("networks", {})
        hosts |= set(networks.get("default", {}).get("aliases", []))
    texts = [
        (FOLDER / "engine.yaml").read_text(),
        (FOLDER / "alertmanager.yml").read_text(),
        (FOLDER / "init.sh").read_text(),
        (FOLDER / "scheduler-targets.yml").read_text(),
        *(path.read_text() for path in (ROOT / "alerting" / "targets").glob("*.yml")),
        *(path.read_text() for path in (ROOT / "grafana" / "provisioning").glob("*/*.yaml")),
        (ROOT / "deploy" / "logs" / "grafana-datasource.yaml").read_text(),
        str(SERVICES["alloy"]["environment"]),
    ]
    named = set()
    for text in texts:
        lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        named |= set(re.findall(r"https?://([a-z-]+):\d+", lines))
        named |= set(re.findall(r"'([a-z-]+):\d+'", lines))
        named |= set(re.findall(r"(?:host|smtp_smarthost): ([a-z-]+)", lines))
    assert named - {"localhost"} <= hosts
    assert {"engine", "node", "scheduler", "mail", "deadman", "slack", "loki"} <= named


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A folder in which init.sh has run; /keys and /secrets are below it."""
    script = tmp_path / "init.sh"
    text = (FOLDER / "init.sh").read_text()
    for path in ("/keys", "/secrets/engine", "/secrets/alertmanager", "/secrets/scheduler"):
        target = tmp_path / path[1:]
        target.mkdir(parents=True)
        text = text.replace(path, str(target))
    script.write_text(text)
    environment = {"PATH": f"{COMMAND.parent}:/usr/bin:/bin"}
    for _ in range(2):
        done = run("sh", script, env=environment)
        assert done.returncode == 0, done.stderr
    return tmp_path


def test_init_makes_what_the_services_share(prepared: Path) -> None:
    """Keys and tokens are made once, private where they must be; a second run changes nothing."""
    engine, manager = prepared / "secrets/engine", prepared / "secrets/alertmanager"
    assert {path.stat().st_mode & 0o777 for path in engine.iterdir()} == {0o600}
    assert (engine / "notify_token").read_text() == (manager / "notify_token").read_text()
    assert len((engine / "operator_token").read_text()) > 30
    assert (prepared / "keys/engine.pub").stat().st_mode & 0o777 == 0o444


def test_the_engine_takes_its_configuration(prepared: Path) -> None:
    """`gpuwarden engine --check` accepts engine.yaml, the directory and the rules as mounted."""
    mounted = prepared / "etc"
    (mounted / "rules").mkdir(parents=True)
    text = (FOLDER / "engine.yaml").read_text().replace("/secrets/", f"{prepared}/secrets/")
    (mounted / "engine.yaml").write_text(text)
    (mounted / "directory.yaml").write_text((FOLDER / "directory.yaml").read_text())
    (mounted / "rules/compose.yaml").write_text((FOLDER / "rules.yaml").read_text())
    done = run(COMMAND, "engine", "--config", mounted / "engine.yaml", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    interval = yaml.safe_load((ROOT / "alerting" / "prometheus.yml").read_text())
    (node,) = [one for one in interval["scrape_configs"] if one["job_name"] == "gpuwarden"]
    assert yaml.safe_load(text)["scrape_interval"] == node["scrape_interval"]


def test_the_scheduler_takes_its_policy_and_the_pages_token(prepared: Path) -> None:
    """`gpuwarden scheduler --check`; the engine's pages bear the token that the scheduler knows."""
    mounted = prepared / "etc"
    mounted.mkdir()
    tokens = mounted / "tokens.yaml"
    given = (FOLDER / "tokens.yaml").read_text()
    tokens.write_text(given.replace("/secrets/", f"{prepared}/secrets/"))
    policy = f"--policy={FOLDER / 'policy.yaml'}"
    done = run(COMMAND, "scheduler", policy, f"--tokens={tokens}", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith(", tokens 1")
    pages = yaml.safe_load((FOLDER / "engine.yaml").read_text())["scheduler"]["token_file"]
    known = (prepared / "secrets/scheduler/pages_token").read_text()
    assert known == (prepared / pages.lstrip("/")).read_text()


@pytest.fixture
def sinks(tmp_path: Path) -> Iterator[Server]:
    """The message sinks of the stack."""
    port = free_port()
    words = ["--http-port", str(port), "--smtp-port", str(free_port())]
    command = [sys.executable, str(FOLDER / "sinks.py"), *words]
    with running(Server(f"http://127.0.0.1:{port}", tmp_path / "log", command)) as server:
        yield server


def test_sinks_speak_as_slack_does(sinks: Server) -> None:
    """`chat.postMessage` answers with a timestamp, which is the proof that the engine keeps."""
    answer = sinks.json("/api/chat.postMessage", {"channel": "U1", "text": "<b>hello</b>"})
    assert answer["ok"] is True
    assert re.fullmatch(r"\d+\.\d{6}", answer["ts"])
    (message,) = sinks.json("/messages")
    assert (message["kind"], message["to"]) == ("slack", "U1")


def test_what_arrived_cannot_script_the_page(sinks: Server) -> None:
    """Messages are shown as text."""
    sinks.json("/api/chat.postMessage", {"channel": "<i>", "text": "<script>alert(1)</script>"})
    page = fetch(sinks.url + "/").decode()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_the_simulated_node_runs_a_training_and_a_crashed_notebook(tmp_path: Path) -> None:
    """Real processes stand on simulated cards; the script ends them when it is told to leave."""
    path = tmp_path / "gpus.scenario"
    script = [sys.executable, str(FOLDER / "workloads.py"), f"--scenario={path}"]
    assert run(*script, "--free").returncode == 0
    assert [card.memory for card in scenarios.read(path).cards] == [40 * scenarios.GIB] * 4
    with subprocess.Popen(script) as process:
        try:
            busy, idle = until(lambda: scenarios.read(path).processes)
            assert (busy.sm, idle.sm) == (85, 0)
            assert all(Path(f"/proc/{one.pid}").exists() for one in (busy, idle))
        finally:
            process.terminate()
            process.wait(timeout=30)
    assert not any(Path(f"/proc/{one.pid}").exists() for one in (busy, idle))


def test_the_node_is_in_the_namespace_that_the_agent_insists_on() -> None:
    """Exporter, agent and jobs speak of the same pids: the host's."""
    names = ("exporter", "agent", "jobs", "scheduler")
    assert {SERVICES[name]["pid"] for name in names} == {"host"}


def test_agent_and_engine_agree_on_the_port() -> None:
    """The engine's template leads to the port that the agent of the stack listens on."""
    engine = yaml.safe_load((FOLDER / "engine.yaml").read_text())
    (listen,) = [word for word in SERVICES["agent"]["command"] if "listen-address" in word]
    assert engine["agents"]["url"].rpartition(":")[2] == listen.rpartition(":")[2]
