"""The commands of docs/deployment.md and docs/upgrades.md, run where they can run.

Installations go below a scratch root with systemd's own tools; what would download, or needs a
running systemd, is only noted. Backup and restore are the very commands, on a running engine.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from tests.deploy.dockerfiles import ROOT
from tests.servers import Server, free_port, running

from gpuwarden.cli import gpuwarden
from gpuwarden.scheduling.holdings import Holding
from gpuwarden.scheduling.stores import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("deployment", "upgrades")}
BIN = Path(sys.executable).parent


def block(page: str, heading: str) -> str:
    """The first block of shell commands below a heading."""
    section = PAGES[page].split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    found = re.search(r"^```sh\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert found, heading
    return found[1]


def commands(text: str) -> Iterator[list[str]]:
    """Every call of gpuwarden in blocks of commands, whatever runs it."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"(?:^    \S.*\n)+", text, re.MULTILINE)
    for part in blocks:
        for line in part.replace("\\\n", " ").splitlines():
            plain = line.replace("$(date +%F)", "DATE").replace("/opt/gpuwarden/bin/", "")
            words = shlex.split(plain, comments=True)
            if "gpuwarden" in words and not {"helm", "rm"} & set(words) and "pip" not in line:
                last = len(words) - 1 - words[::-1].index("gpuwarden")
                if "exec" in words or last == 0:
                    yield words[last + 1 :]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_gpuwarden_and_its_options_exist(page: str) -> None:
    """A reader who copies a line is not told that there is no such option."""
    found = list(commands(PAGES[page]))
    assert found
    for words in found:
        command: click.Command = gpuwarden
        context = click.Context(command)
        rest = list(words)
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            inner = command.get_command(context, rest[0])
            if inner is None:
                break
            command, rest = inner, rest[1:]
            context = click.Context(command, parent=context)
        known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
        asked = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert asked <= known, words


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    """Files of the repository, in commands and in links."""
    named = set(
        re.findall(r"(?<![\w/.])((?:deploy|tests|alerting|ruleengine)/[\w./-]+\w)", PAGES[page])
    )
    named |= {f"docs/{name}" for name in re.findall(r"\]\(((?!http)[\w./-]+)", PAGES[page])}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


NOTED = ("pip", "systemctl", "python3", "gpuwarden")
"""Noted with their words, and not run: they download, or need a running systemd."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A scratch root, with programs in the place of those that cannot run below it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in NOTED:
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/noted\n')
    for name in ("systemd-sysusers", "systemd-tmpfiles"):
        tool = shutil.which(name)
        (folder / name).write_text(f'#!/bin/sh\nexec {tool} --root={tmp_path}/root "$@"\n')
    # An owner or group of the scratch root is none of this machine.
    (folder / "install").write_text(
        "#!/bin/sh\n"
        'for word; do shift; case "$word" in -o|-g) skip=1;; gpuwarden-*) '
        '[ -n "$skip" ] && skip= || set -- "$@" "$word";; *) set -- "$@" "$word";; esac; done\n'
        'exec /usr/bin/install "$@"\n'
    )
    for path in folder.iterdir():
        path.chmod(0o755)
    for name in ("etc/default", "opt/gpuwarden/bin"):
        (tmp_path / "root" / name).mkdir(parents=True)
    for name in ("pip", "gpuwarden"):
        shutil.copy(folder / name, tmp_path / "root/opt/gpuwarden/bin" / name)
    return tmp_path


def _install(root: Path, script: str) -> Path:
    """Run a walk-through below the scratch root; gives the root."""
    for name in ("deploy", "ruleengine"):
        (root / name).symlink_to(ROOT / name)
    (root / "engine.pub").write_text("public")
    (root / "keys").mkdir()
    (root / "keys/engine.key").write_text("private")
    script = re.sub(r"(?<![\w.])/(etc|opt)/", rf"{root}/root/\1/", script)
    done = subprocess.run(
        ["/bin/sh", "-e"],
        input=script,
        cwd=root,
        env={"PATH": f"{root}/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return root / "root"


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("systemd-sysusers") is None,
    reason="needs root, and systemd's tools",
)


@needs_root
def test_a_node_is_installed_as_the_page_says(root: Path) -> None:
    """Units, users, folders, the key and the flags are where the units look for them."""
    here = _install(root, block("deployment", "A node with systemd"))
    for unit in ("exporter", "agent"):
        text = (here / f"etc/systemd/system/gpuwarden-{unit}.service").read_text()
        (environment,) = re.findall(r"^EnvironmentFile=-(\S+)$", text, re.MULTILINE)
        arguments = (here / environment.lstrip("/")).read_text()
        assert re.fullmatch(r'ARGS="--web\.listen-address 0\.0\.0\.0:983\d"\n', arguments)
        assert f"gpuwarden-{unit}:" in (here / "etc/passwd").read_text()
    assert (here / "etc/gpuwarden/keys/engine.pub").is_file()
    assert (here / "run/gpuwarden/jobs").stat().st_mode & 0o7777 == 0o1777
    assert (here / "run/gpuwarden/logs").stat().st_mode & 0o7777 == 0o2750
    noted = (root / "noted").read_text().splitlines()
    assert noted[-1] == "systemctl enable --now gpuwarden-exporter gpuwarden-agent"
    assert f"python3 -m venv {here}/opt/gpuwarden" in noted


@needs_root
def test_an_engine_is_installed_as_the_page_says(root: Path) -> None:
    """Its configuration lies where the unit looks, and the key is for the engine alone."""
    here = _install(root, block("deployment", "The engine"))
    unit = (here / "etc/systemd/system/gpuwarden-engine.service").read_text()
    assert "--config /etc/gpuwarden/engine.yaml" in unit
    for name in ("engine.yaml", "directory.yaml", "rules/defaults.yaml", "rules/profiles.yaml"):
        assert (here / "etc/gpuwarden" / name).is_file()
    key = here / "etc/gpuwarden/secrets/engine.key"
    assert key.stat().st_mode & 0o777 == 0o600
    text = (here / "etc/gpuwarden/engine.yaml").read_text()
    assert "key_file: secrets/engine.key" in text
    assert "rules/*.yaml" in text


CONFIG = """\
version: 1
prometheus: {url: "http://127.0.0.1:9"}
rules: [rules/*.yaml]
directory: directory.yaml
ledger: LEDGER
kill_switch: halt
web: {listen: "127.0.0.1:PORT", token_file: token, operator_token_file: token}
"""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Server]:
    """An engine below a scratch root, whose Prometheus is away."""
    folder, port = tmp_path / "etc/gpuwarden", free_port()
    (folder / "rules").mkdir(parents=True)
    shutil.copy(ROOT / "deploy/compose/rules.yaml", folder / "rules")
    shutil.copy(ROOT / "deploy/compose/directory.yaml", folder)
    (folder / "token").write_text("sixteen or more characters")
    ledger = tmp_path / "ledger.sqlite"
    text = CONFIG.replace("LEDGER", str(ledger)).replace("PORT", str(port))
    (folder / "engine.yaml").write_text(text)
    (tmp_path / "backup").mkdir()
    command = [str(BIN / "gpuwarden"), "engine", "--config", str(folder / "engine.yaml")]
    server = Server(f"http://127.0.0.1:{port}", tmp_path / "log", command, ready_path="/-/healthy")
    with running(server):
        yield server


def _run(script: str, folder: Path) -> str:
    script = re.sub(r"(?<![\w.])/(etc|backup)/", rf"{folder}/\1/", script)
    done = subprocess.run(
        ["/bin/sh", "-e"],
        input=script,
        env={"PATH": f"{BIN}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_backup_is_made_while_the_engine_runs_and_is_put_back(engine: Server) -> None:
    """The documented commands, but for systemctl: the engine that is started again has the copy."""
    folder = engine.log.parent
    _run(block("upgrades", "Backup"), folder)
    (copy,) = (folder / "backup").glob("ledger-*.sqlite")
    assert copy.stat().st_mode & 0o777 == 0o600
    stop, restore, start = block("upgrades", "Restore").splitlines()
    assert (stop, start) == (
        "systemctl stop gpuwarden-engine",
        "systemctl start gpuwarden-engine",
    )
    engine.stop()
    (folder / "ledger.sqlite").write_bytes(b"damaged" * 1000)
    _run(restore, folder)
    engine.start()
    assert list(folder.glob("ledger.sqlite.*")), "the former file is kept"


def test_a_running_engines_ledger_is_not_put_back_under_it(engine: Server) -> None:
    """Whoever forgets to stop it is told."""
    folder = engine.log.parent
    _run(block("upgrades", "Backup"), folder)
    restore = block("upgrades", "Restore").splitlines()[1]
    with pytest.raises(AssertionError, match="engine"):
        _run(restore, folder)


def test_the_schedulers_file_is_copied_while_it_runs_and_put_back(tmp_path: Path) -> None:
    """By the documented command, on a file that a daemon has open; nobody else reads the copy."""
    section = PAGES["upgrades"].split("\n## Backup\n", 1)[1].split("\n## ", 1)[0]
    script = re.findall(r"^```sh\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[-1]
    script = script.replace("/opt/gpuwarden/bin/python", sys.executable)
    state = tmp_path / "var/lib/gpuwarden-scheduler"
    for folder in (state, tmp_path / "backup", tmp_path / "other"):
        folder.mkdir(parents=True)
    with contextlib.closing(Store(state)) as store:
        held = Holding("slurm", "4711", "ana", "vision", gpus=2, start=900.0, end=990.0)
        store.keep_holdings([held], since=800.0, now=1000.0)
        _run(script.replace("/var/lib/", f"{tmp_path}/var/lib/"), tmp_path)
    (copy,) = (tmp_path / "backup").glob("scheduler-*.sqlite")
    assert copy.stat().st_mode & 0o777 == 0o600
    copy.rename(tmp_path / "other" / "scheduler.sqlite")
    with contextlib.closing(Store(tmp_path / "other")) as restored:
        assert restored.holdings("slurm", 800.0, 1000.0) == (held,)
