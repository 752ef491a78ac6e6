"""systemd units: accepted by systemd, and no wider than what each program needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gpuwarden.errors import InvalidInput
from gpuwarden.ruleengine.ledger import LedgerUnusable

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
MOST_EXPOSED = 30
"""Of `systemd-analyze security`, in tenths: 0 is a closed box, 100 a service without limits."""

ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
READING = {"CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"}
RIGHTS = {
    "gpuwarden-exporter": READING,
    "gpuwarden-agent": READING | {"CAP_KILL", "CAP_DAC_OVERRIDE"},
    "gpuwarden-engine": set(),
    "gpuwarden-drill": set(),
    "gpuwarden-report": set(),
    "gpuwarden-scheduler": set(),
}
USERS = {"gpuwarden-report": "gpuwarden-engine"}
"""Of programs that read what another one owns."""


def service(path: Path) -> dict[str, list[str]]:
    """The [Service] section: key -> its values in order."""
    found: dict[str, list[str]] = {}
    section = path.read_text().split("[Service]", 1)[1].split("\n[", 1)[0]
    for line in section.splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=[path.stem for path in UNITS])
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    """`systemd-analyze verify` has nothing to say, and the exposure stays low."""
    # The program is not installed where the unit expects it.
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/gpuwarden/bin/gpuwarden", "/bin/true"))
    for words in (
        ["verify", "--man=no", "--recursive-errors=no", str(copy)],
        ["security", "--offline=true", "--no-pager", f"--threshold={MOST_EXPOSED}", str(copy)],
    ):
        done = subprocess.run(
            [str(ANALYZE), *words], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""


@pytest.mark.parametrize("unit", UNITS, ids=[path.stem for path in UNITS])
def test_each_program_has_its_rights_and_no_other(unit: Path) -> None:
    """The exporter may read, the agent may signal besides, the engine may nothing; none is root."""
    settings = service(unit)
    for key in ("AmbientCapabilities", "CapabilityBoundingSet"):
        assert set(settings[key][0].split()) == RIGHTS[unit.stem]
    assert settings["User"] == [USERS.get(unit.stem, unit.stem)]
    assert settings["NoNewPrivileges"] == ["yes"]
    assert settings["ProtectSystem"] == ["strict"]


@pytest.mark.parametrize("name", ["gpuwarden-exporter", "gpuwarden-agent"])
def test_who_may_see_processes_may_not_trace_them(name: str) -> None:
    """CAP_SYS_PTRACE is for /proc: ptrace and reading another's memory are denied by seccomp."""
    (_, denied) = service(FOLDER / f"{name}.service")["SystemCallFilter"]
    assert denied.startswith("~@debug ")
    assert {"process_vm_readv", "process_vm_writev"} <= set(denied.split())


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("systemd-sysusers") is None,
    reason="needs root, and systemd's tools",
)
def test_users_and_folders_are_made(tmp_path: Path) -> None:
    """Trainings may write jobs/, each its own files; requests/ is the agent's alone."""
    for tool in ("sysusers", "tmpfiles"):
        folder = tmp_path / f"etc/{tool}.d"
        folder.mkdir(parents=True)
        shutil.copy(FOLDER / f"gpuwarden.{tool}.conf", folder / "gpuwarden.conf")
    for words in (["systemd-sysusers"], ["systemd-tmpfiles", "--create"]):
        done = subprocess.run(
            [*words, f"--root={tmp_path}", "gpuwarden.conf"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
    jobs, requests = tmp_path / "run/gpuwarden/jobs", tmp_path / "run/gpuwarden/requests"
    assert jobs.stat().st_mode & 0o7777 == 0o1777
    assert requests.stat().st_mode & 0o7777 == 0o755
    assert jobs.stat().st_uid != requests.stat().st_uid != 0


def test_a_drill_is_the_users_whom_the_examples_name_and_the_timer_starts_it() -> None:
    """The unit's user, the rule's, the directory's and engine.yaml's are one."""
    examples = FOLDER.parent / "examples"
    user = service(FOLDER / "gpuwarden-drill.service")["User"][0]
    for name in ("drill.yaml", "directory.yaml", "engine.yaml"):
        assert user in (examples / name).read_text()
    assert user in (FOLDER / "gpuwarden.sysusers.conf").read_text()
    assert "OnCalendar=" in (FOLDER / "gpuwarden-drill.timer").read_text()


def test_the_engine_is_started_again_unless_its_files_are_wrong() -> None:
    """A full disk outlasts any number of tries; a wrong configuration is not mended by them."""
    path = FOLDER / "gpuwarden-engine.service"
    assert service(path)["Restart"] == ["always"]
    assert "\nStartLimitIntervalSec=0\n" in path.read_text()
    (given_up_on,) = service(path)["RestartPreventExitStatus"]
    assert int(given_up_on) == InvalidInput.exit_code
    assert LedgerUnusable.exit_code != InvalidInput.exit_code


def test_the_scheduler_sees_who_asks() -> None:
    """In a user namespace of its own every peer of its socket would have the uid of nobody."""
    assert service(FOLDER / "gpuwarden-scheduler.service")["PrivateUsers"] == ["no"]


def test_on_a_labs_box_nothing_of_the_daemons_box_is_left_around_jobs() -> None:
    """They inherit all of it: a device that is closed to the daemon is closed to every training."""
    closed = service(FOLDER / "gpuwarden-scheduler.service")
    opened = service(FOLDER / "gpuwarden-scheduler-local.conf")
    boxes = {
        key
        for key in closed
        if key.startswith(("Private", "Protect", "Restrict", "SystemCall", "Lock", "Proc"))
    } - {"PrivateUsers", "RestartPreventExitStatus"}
    assert boxes >= {"ProtectClock", "ProtectKernelModules", "SystemCallFilter"}
    for key in boxes:
        (value,) = opened[key]
        assert value in {"", "no", "default", "all"}, key
    assert opened["KillMode"] == ["process"]
    assert opened["OOMPolicy"] == ["continue"]


@needs_systemd
def test_systemd_takes_the_drop_in_of_a_labs_box(tmp_path: Path) -> None:
    """Together with the unit that it changes."""
    unit = tmp_path / "gpuwarden-scheduler.service"
    text = (FOLDER / unit.name).read_text()
    unit.write_text(text.replace("/opt/gpuwarden/bin/gpuwarden", "/bin/true"))
    folder = tmp_path / f"{unit.name}.d"
    folder.mkdir()
    change = (FOLDER / "gpuwarden-scheduler-local.conf").read_text()
    (folder / "local.conf").write_text(change.replace("/usr/bin/nvidia-modprobe", "/bin/true"))
    done = subprocess.run(
        [str(ANALYZE), "verify", "--man=no", "--recursive-errors=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
