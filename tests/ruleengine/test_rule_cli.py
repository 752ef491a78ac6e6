"""`gpuwarden rules` prints all findings and says by its exit status whether files are usable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result
from tests.servers import until

from gpuwarden.ruleengine.rule_cli import rules

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """\
version: 1
rules:
- id: hog
  target: job
  cold_start: 60s
  when: {signal: gpu_memory_share, above: 90%, share: 80%, window: 5m, gpus: any}
  for: 5m
  stages: [{level: light, after: 0s, do: log}]
"""


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(rules, list(arguments), standalone_mode=True)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A usable file."""
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def test_a_usable_file_exits_zero_and_names_the_hash(good: Path) -> None:
    """The hash is what `gpuwarden_rules_info` shows once they are in force."""
    result = _run("check", str(good))
    assert result.exit_code == 0
    assert result.stdout.startswith("1 file: 0 errors, 0 warnings; 1 rule, hash ")


def test_errors_are_printed_with_their_lines_and_exit_two(good: Path) -> None:
    """As people read them."""
    good.write_text(GOOD.replace("90%", "90").replace("do: log", "do: kill"))
    result = _run("check", str(good))
    assert result.exit_code == 2
    assert f"{good}:6:43: error[GW107]: rules[0].when.above: " in result.stdout
    assert f"{good}:8:42: error[GW104]: rules[0].stages[0].do: " in result.stdout
    assert result.stdout.splitlines()[-1] == "1 file: 2 errors, 0 warnings"


def test_warnings_alone_leave_a_file_usable(good: Path) -> None:
    """They are printed all the same."""
    good.write_text(GOOD.replace("90%", "100%"))
    result = _run("check", str(good))
    assert result.exit_code == 0
    assert "warning[GW303]" in result.stdout


def test_json_is_one_versioned_document(good: Path) -> None:
    """For CI."""
    good.write_text(GOOD.replace("90%", "90"))
    result = _run("check", "-o", "json", str(good))
    document = json.loads(result.stdout)
    assert document["schema"] == "gpuwarden.diagnostics/v1"
    assert [item["code"] for item in document["diagnostics"]] == ["GW107"]
    assert result.exit_code == 2


def test_windows_are_checked_against_the_scrape_interval(good: Path) -> None:
    """Which is a setting of Prometheus."""
    assert _run("check", "--scrape-interval", "2m", str(good)).exit_code == 2
    wrong = _run("check", "--scrape-interval", "5", str(good))
    assert wrong.exit_code == 2
    assert "lacks a unit" in wrong.stderr
    none = _run("check", "--scrape-interval", "0s", str(good))
    assert none.exit_code == 2
    assert "must be more than 0s" in none.stderr


TESTED = (
    GOOD
    + """\
tests:
- name: a full card
  jobs: [{job: proc-1, like: hog}]
  expect: [{at: 10m, rule: hog, job: proc-1, verdict: yes}]
- name: a mistake
  jobs: [{job: proc-1, like: healthy}]
  expect: [{at: 10m, rule: hog, job: proc-1, verdict: yes, stage: light-log}]
"""
)


def test_tests_that_fail_are_told_with_their_lines_and_what_was_measured(good: Path) -> None:
    """And exit 1; those that pass exit 0."""
    good.write_text(TESTED)
    result = _run("test", str(good))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("ok    a full card (")
    assert lines[1].startswith("FAIL  a mistake (")
    assert lines[2] == f"      {good}:15:12: 10m in, hog about proc-1: verdict is no, not yes"
    assert "GPU 0: 50 %" in lines[4]
    assert lines[-1] == "2 tests: 1 passed, 1 failed"
    chosen = _run("test", "--run", "a full card", str(good))
    assert chosen.exit_code == 0
    assert chosen.stdout.splitlines()[-1] == "1 test: 1 passed, 0 failed"


def test_results_are_one_versioned_document(good: Path) -> None:
    """For CI: each mismatch with its place, and what was found."""
    good.write_text(TESTED)
    result = _run("test", "-o", "json", "--run", "hog", str(good))
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert document["schema"] == "gpuwarden.rule-tests/v1"
    assert [item["passed"] for item in document["tests"]] == [True, False]
    first, second = document["tests"][1]["mismatches"]
    assert (first["line"], first["field"], first["expected"], first["actual"]) == (
        15,
        "verdict",
        "yes",
        "no",
    )
    assert (second["field"], second["actual"]) == ("stage", "none")
    assert first["evidence"][0]["measured"] == "GPU 0: 50 %"


def test_what_cannot_be_run_exits_two(good: Path) -> None:
    """No test at all, none of that name, or files that are not usable."""
    none = _run("test", str(good))
    assert none.exit_code == 2
    assert "no test to run" in none.stderr
    good.write_text(TESTED)
    unknown = _run("test", "--run", "hag", str(good))
    assert unknown.exit_code == 2
    assert "there are tests about hog" in unknown.stderr
    good.write_text(TESTED.replace("hog, job", "hag, job"))
    assert "error[GW231]" in _run("test", str(good)).stdout
    broken = _run("test", "-o", "json", str(good))
    assert broken.exit_code == 2
    codes = [item["code"] for item in json.loads(broken.stdout)["diagnostics"]]
    assert codes == ["GW231", "GW231"]


@pytest.mark.parametrize(
    "words", [[], ["check"], ["test"], ["explain"], ["diff"], ["schema"], ["reference"]]
)
def test_help_is_laid_out_for_people(words: list[str]) -> None:
    """Examples stand on lines of their own."""
    text = _run(*words, "--help").stdout
    assert "\\b" not in text
    assert "Usage: " in text
    if not words:
        assert "  gpuwarden rules check rules.d/*.yaml\n" in text


def test_a_missing_file_is_a_finding_of_its_own(tmp_path: Path) -> None:
    """With the others' findings beside it."""
    result = _run("check", str(tmp_path / "none.yaml"))
    assert result.exit_code == 2
    assert "GW100" in result.stdout


def test_the_schema_is_printed_for_editors() -> None:
    """It knows the signals by name."""
    document = json.loads(_run("schema").stdout)
    assert "gpu_utilization" in document["$defs"]["Signal"]["properties"]["signal"]["enum"]


def test_nothing_is_left_behind_when_it_is_told_to_stop(good: Path, tmp_path: Path) -> None:
    """CI sends SIGTERM: the temporary Prometheus and its files go with the command."""
    good.write_text(TESTED.replace("at: 10m", "at: 2d"))
    command = [sys.executable, "-m", "gpuwarden", "rules", "test", str(good)]
    folder = tmp_path / "tmp"
    folder.mkdir()
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder)}) as process:
        until(lambda: list(folder.glob("*/prometheus.log")))
        process.terminate()
        assert process.wait(60) == 143
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("command", ["check", "explain", "test"])
def test_a_folder_in_the_place_of_files_says_what_to_name(command: str, tmp_path: Path) -> None:
    """At its name, like every finding."""
    result = CliRunner().invoke(rules, [command, str(tmp_path)])
    assert result.exit_code == 2
    assert f"{tmp_path}:1:1: error[GW100]: it is a folder: name the files" in result.output
