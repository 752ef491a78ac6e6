"""The command loads a component only when it is called, and says what it lacks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwarden import __version__, cli
from gpuwarden.errors import MissingExtra


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )


def test_the_overview_imports_no_component() -> None:
    """`gpuwarden --help` is instant: no torch, no server, no YAML."""
    done = run(
        "import sys\nfrom gpuwarden import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "heavy = {'torch', 'ultralytics', 'pydantic', 'starlette', 'pynvml', 'yaml'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    assert done.returncode == 0, done.stderr
    for command in ("exporter", "agent", "train", "engine", "rules"):
        assert command in done.stdout


def test_a_missing_extra_names_the_pip_command() -> None:
    """The message is the remedy."""
    done = run(
        "import sys\nsys.modules['pynvml'] = None\nsys.modules['starlette'] = None\n"
        "sys.modules['structlog'] = None\n"
        "from gpuwarden import cli\ncli.main(['exporter', '--once'])\n"
    )
    assert done.returncode == 2
    assert "pip install 'gpuwarden[exporter]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_click_the_base_install_says_which_extras_there_are() -> None:
    """The base distribution has no dependencies, so the command explains itself without any."""
    done = run("import sys\nsys.modules['click'] = None\nfrom gpuwarden import cli\n")
    assert done.returncode == 2
    assert "gpuwarden[exporter]" in done.stderr


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, as for every wrong usage."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(["exprter"])
    assert stopped.value.code == 2
    assert "exprter" in capsys.readouterr().err


def test_the_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints it and exits 0."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert __version__ in capsys.readouterr().out
    assert "gpuwarden[yolo]" in str(MissingExtra("train", "ultralytics", "yolo"))


def test_plain_doctor_looks_at_what_is_set_up_here(tmp_path: Path) -> None:
    """An engine.yaml that the environment names is that of this machine."""
    config = tmp_path / "engine.yaml"
    config.write_text("version: 2\n")
    done = subprocess.run(
        [sys.executable, "-m", "gpuwarden", "doctor", "-o", "json"],
        env={**os.environ, "GPUWARDEN_ENGINE_CONFIG": str(config)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    found = {item["id"]: item["status"] for item in json.loads(done.stdout)["findings"]}
    assert found["engine.config"] == "failed"


def test_shells_complete_commands() -> None:
    """As docs/doctor.md says."""
    words = {"COMP_WORDS": "gpuwarden doctor ", "COMP_CWORD": "2"}
    code = "import sys\nsys.argv = ['gpuwarden']\nfrom gpuwarden.cli import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **words, "_GPUWARDEN_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert {"plain,node", "plain,engine"} <= set(done.stdout.splitlines()), done.stderr
