"""The units' sandboxes, tried: the programs work in them, and cannot do what they must not.

Where a machine can have no sandbox these tests are skipped by name; the project's CI runs as root
and has them all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.deploy import sandboxes
from tests.exporter.agent.conftest import cards, engine, jobs
from tests.exporter.agent.nodes import AgentProcess, until
from tests.scheduling.policy_files import TEXT as POLICY_TEXT
from tests.servers import free_port

from gpuwarden.agent_api import Outcome
from gpuwarden.exporter import simulated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.exporter.agent.nodes import Cards, Engine, Jobs

__all__ = ["cards", "engine", "jobs"]

HERE = Path(__file__).parent
SCRIPT = HERE / "sandboxes.py"
OBSTACLE = sandboxes.obstacle()
pytestmark = pytest.mark.skipif(OBSTACLE != "", reason=f"NO SANDBOX IS TRIED HERE: {OBSTACLE}")

USER, TENANT = sandboxes.USER, 4242
ANYBODY = {
    "write its own folder",
    "start a program",
    "open a unix socket",
}
NET = {"open an internet socket"}
LOOKS = {
    "read another's file",
    "see another's process",
    "see what another runs",
    # CAP_SYS_PTRACE opens /proc/PID/mem, which no filter of calls can tell from another file:
    # docs/security.md says what closes it.
    "read another's memory",
}
ALLOWED = {
    "gpuwarden-exporter": ANYBODY | NET | LOOKS,
    "gpuwarden-agent": ANYBODY
    | NET
    | LOOKS
    | {"signal another", "signal init", "write another's file", "write another's memory"},
    "gpuwarden-engine": ANYBODY | NET,
    "gpuwarden-report": ANYBODY | NET,
    "gpuwarden-scheduler": ANYBODY | NET,
    "gpuwarden-drill": ANYBODY | {"see another's process"},
}


def confined(unit: str, *words: str | Path, show: Path | None = None) -> list[str]:
    """The command that runs words in a unit's sandbox."""
    command = [sys.executable, str(SCRIPT), unit]
    if show is not None:
        command += ["--show", str(show)]
    return [*command, "--", *(str(word) for word in words)]


@pytest.mark.parametrize("unit", ALLOWED)
def test_a_unit_can_do_what_it_needs_and_nothing_else(
    unit: str, jobs: Jobs, tmp_path: Path
) -> None:
    """Each forbidden thing is tried: files, processes, namespaces, sockets, clock, kernel."""
    tenant = jobs.start("tenant").pids[1]
    own = tmp_path / "own"
    own.mkdir()
    os.chown(own, USER, USER)
    file = tmp_path / "theirs"
    file.write_text("x")
    file.chmod(0o600)
    os.chown(file, TENANT, TENANT)
    tmp_path.chmod(0o755)
    probe = "/mnt/sources/tests/deploy/probes.py"
    done = subprocess.run(
        confined(unit, "{python}", probe, str(tenant), file, own, show=tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == ALLOWED[unit]


def test_the_sandbox_is_what_refuses(jobs: Jobs, tmp_path: Path) -> None:
    """Without one root can do most of it: the attempts themselves are no duds."""
    tenant = jobs.start("tenant").pids[1]
    file = tmp_path / "theirs"
    file.write_text("x")
    words = [sys.executable, str(HERE / "probes.py"), str(tenant), str(file), str(tmp_path)]
    done = subprocess.run(
        # A mount namespace of its own, as one of the attempts mounts something.
        [shutil.which("unshare") or "", "--mount", "--uts", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    found = set(json.loads(done.stdout))
    assert len(found) >= 20
    assert {
        "write /etc",
        "trace another",
        "read another's memory",
        "read another's memory at once",
        "signal another",
        "make a setuid file",
        "mount",
        "open a raw socket",
        "open a netlink socket",
        "make a namespace",
        "change the personality",
    } <= found


def page(url: str) -> str:
    """What a server answers at once, or an empty text."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read().decode()
    except (OSError, urllib.error.URLError):
        return ""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts programs, and ends them by their pid."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"log-{len(running)}").open("ab") as log:
            running.append(subprocess.Popen(command, stdout=log, stderr=log))
        return running[-1]

    yield start
    for process in running:
        process.terminate()
        process.wait(30)


def owned(folder: Path) -> Path:
    """A folder of the unit's user."""
    folder.mkdir(exist_ok=True)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER, USER)
    return folder


def test_the_exporter_measures_other_peoples_jobs_in_its_sandbox(
    cards: Cards, jobs: Jobs, tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whose job holds which card and what it runs; it writes its state and nowhere else."""
    host = jobs.start("tenant")
    cards.hold(host.pids[1])
    cache = tmp_path / "cache"
    cache.mkdir()
    simulated.build(cache / "gpuwarden")
    owned(cache)
    for path in tmp_path.glob("scenario*"):
        os.chown(path, USER, USER)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    port = free_port()
    program = started(
        *confined(
            "gpuwarden-exporter",
            *("{python}", "-m", "gpuwarden", "exporter", "--gpus", f"simulated:{cards.path}"),
            *("--state.path", "/var/lib/gpuwarden-exporter/state.json"),
            *("--web.listen-address", f"127.0.0.1:{port}"),
            show=tmp_path,
        )
    )

    def measured() -> str:
        assert program.poll() is None, (tmp_path / "log-0").read_text()
        text = page(f"http://127.0.0.1:{port}/metrics")
        return text if "gpu_job_memory_bytes{" in text else ""

    text = until(measured)
    assert "gpuwarden_nvml_up 1" in text
    (line,) = (line for line in text.splitlines() if line.startswith("gpu_job_info{"))
    assert 'user="' in line
    # What only the right to look at others' processes tells.
    assert "gpu_job_read_bytes_total{" in text
    # In its own view of /run and /var/lib: the folders of its units, made for it.
    view = Path(f"/proc/{program.pid}/root")
    assert (view / "run/gpuwarden/jobs").stat().st_mode & 0o7777 == 0o1777
    state = view / "var/lib/gpuwarden-exporter/state.json"
    until(state.exists)


@pytest.mark.parametrize(
    ("unit", "outcome", "reason"),
    [
        ("gpuwarden-agent", Outcome.RECLAIMED, ""),
        ("gpuwarden-exporter", Outcome.REFUSED, "permission"),
    ],
)
def test_the_agent_ends_another_users_job_in_its_sandbox(
    unit: str, outcome: Outcome, reason: str, *, jobs: Jobs, cards: Cards, engine: Engine,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its unit is enough for it; without the right to signal it refuses, and says why."""
    host = jobs.start("tenant")
    tenant = host.pids[1]
    cards.hold(tenant)
    state = tmp_path / "state"
    state.mkdir()
    simulated.build(state / "gpuwarden")
    owned(state)
    for path in tmp_path.glob("scenario*"):
        os.chown(path, USER, USER)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(state))
    plain = AgentProcess.beside(tmp_path, cards, engine)
    arguments = [
        item.replace(f"={tmp_path}/", f"={state}/")
        if item.startswith(("--journal", "--jobs.directory"))
        else item
        for item in plain.arguments
    ]
    command = confined(unit, "{python}", "-m", "gpuwarden", "agent", show=tmp_path)
    agent = AgentProcess(arguments, plain.url, plain.log, command=command)
    agent.start()
    try:
        request = engine.request(host.part(tenant), grace=5.0)
        agent.post(engine, request)
        report = agent.outcome(request.decision_id)
    finally:
        agent.stop()
    assert (report.outcome, report.reason) == (outcome, reason)
    assert (tenant in host.states()) is (outcome is Outcome.REFUSED)


ENGINE = """version: 1
prometheus: {{url: "http://127.0.0.1:9"}}
expected_nodes: 1
rules: [rules.yaml]
directory: directory.yaml
ledger: /var/lib/gpuwarden/ledger.sqlite
alertmanagers: ["http://127.0.0.1:9"]
web: {{listen: "127.0.0.1:{port}", read: everyone}}
kill_switch: /var/lib/gpuwarden/halt
external_url: http://localhost:9837
"""


def test_the_engine_serves_in_its_sandbox(
    tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """Without any right, with no other process in sight; its ledger is read by nobody else."""
    port = free_port()
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "engine.yaml").write_text(ENGINE.format(port=port))
    (folder / "rules.yaml").write_text("version: 1\n")
    (folder / "directory.yaml").write_text("version: 1\noperators: {email: [ops@example.org]}\n")
    tmp_path.chmod(0o755)
    program = started(
        *confined(
            "gpuwarden-engine",
            *("{python}", "-m", "gpuwarden", "engine", "--config", str(folder / "engine.yaml")),
            show=tmp_path,
        )
    )

    def serves() -> str:
        assert program.poll() is None, (tmp_path / "log-0").read_text()
        return page(f"http://127.0.0.1:{port}/-/healthy")

    until(serves)
    view = Path(f"/proc/{program.pid}/root")
    assert (view / "var/lib/gpuwarden/ledger.sqlite").stat().st_mode & 0o077 == 0
    assert (view / "var/lib/gpuwarden").stat().st_uid == USER
    assert not (view / "proc/meminfo").exists()
    status = Path(f"/proc/{program.pid}/status").read_text()
    assert all(f"Cap{kind}:\t{0:016x}" in status for kind in ("Prm", "Eff", "Bnd", "Amb"))
    assert "Seccomp:\t2" in status


WRITES = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
os.setgroups([]); os.setresgid(4242, 4242, 4242); os.setresuid(4242, 4242, 4242)
def new(path): path.write_text("x")
def over(path):
    mine = path.with_name("mine-" + path.name)
    mine.write_text("x")
    mine.replace(path)
tries = {
    "its own job file": lambda: new(folder / "jobs/mine.json"),
    "another's job file": lambda: (folder / "jobs/theirs.json").write_text("x"),
    "in place of another's": lambda: over(folder / "jobs/theirs.json"),
    "remove another's": lambda: (folder / "jobs/theirs.json").unlink(),
    "a request of its own": lambda: new(folder / "requests/mine.json"),
    "a request that stands": lambda: (folder / "requests/run-1.json").write_text("x"),
    "take a request away": lambda: (folder / "requests/run-1.json").unlink(),
    "another folder of requests": lambda: (folder / "requests").rename(folder / "old"),
    "the halt file": lambda: new(folder / "halt"),
    "the release file": lambda: new(folder / "release"),
}
found = []
for name, attempt in tries.items():
    try: attempt()
    except OSError: continue
    found.append(name)
print(json.dumps(found))
"""


def test_who_trains_writes_job_files_and_nothing_else(tmp_path: Path) -> None:
    """No request is forged or taken away, no other user's file touched, no switch thrown."""
    root = tmp_path / "root"
    conf = sandboxes.UNITS / "gpuwarden.tmpfiles.conf"
    for tool in ("sysusers", "tmpfiles"):
        folder = root / f"etc/{tool}.d"
        folder.mkdir(parents=True)
        shutil.copy(conf.with_name(f"gpuwarden.{tool}.conf"), folder / "gpuwarden.conf")
    for words in (["systemd-sysusers"], ["systemd-tmpfiles", "--create"]):
        done = subprocess.run(
            [*words, f"--root={root}", "gpuwarden.conf"], check=False, timeout=60,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    run = root / "run/gpuwarden"
    for name, user in (("jobs/theirs.json", 4545), ("requests/run-1.json", 0)):
        (run / name).write_text("{}")
        os.chown(run / name, user, user)
    done = subprocess.run(
        [sys.executable, "-c", WRITES, "."],
        cwd=run,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert json.loads(done.stdout) == ["its own job file"], done.stderr


def test_a_unit_with_a_key_that_nobody_tries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit cannot promise what these tests do not show."""
    monkeypatch.setattr(sandboxes, "APPLIED", sandboxes.APPLIED - {"PrivateTmp"})
    with pytest.raises(LookupError, match="PrivateTmp"):
        sandboxes.service("gpuwarden-engine")


WHO = """
import sys
from pathlib import Path
from gpuwarden.scheduling.daemon_clients import DaemonClient
print(DaemonClient(Path(sys.argv[1])).ask("GET", "/v1/whoami"))
"""


def test_the_scheduler_knows_who_asks_in_its_sandbox(
    tmp_path: Path,
    started: Callable[..., subprocess.Popen[bytes]],
    request: pytest.FixtureRequest,
) -> None:
    """Root and a user without an account, whatever the unit hides; its store is its own."""
    # Not below pytest's folder, which nobody else may enter.
    place = Path(tempfile.mkdtemp(prefix="gpuwarden-"))
    request.addfinalizer(lambda: shutil.rmtree(place))
    policy, socket, port = place / "policy.yaml", place / "run/s.sock", free_port()
    policy.write_text(POLICY_TEXT)
    owned(place / "run")
    place.chmod(0o755)
    program = started(
        *confined(
            "gpuwarden-scheduler",
            *("{python}", "/mnt/sources/tests/deploy/played_schedulers.py", policy),
            *("/var/lib/gpuwarden-scheduler", socket, str(port)),
            show=place,
        )
    )

    def ready() -> str:
        assert program.poll() is None, (tmp_path / "log-0").read_text()
        return page(f"http://127.0.0.1:{port}/-/ready")

    assert until(ready) == "ready\n"
    for uid, name, role in ((0, "root", "operator"), (TENANT, f"#{TENANT}", "user")):
        words = [sys.executable, "-c", WHO, str(socket)]
        done = subprocess.run(
            ["setpriv", f"--reuid={uid}", "--clear-groups", *words],  # noqa: S607
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert f"'name': '{name}', 'role': '{role}'" in done.stdout
    view = Path(f"/proc/{program.pid}/root/var/lib/gpuwarden-scheduler")
    assert (view / "scheduler.sqlite").stat().st_mode & 0o777 == 0o600
