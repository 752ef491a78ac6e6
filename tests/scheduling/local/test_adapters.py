"""A policy and the single host: what the daemon goes by, and what the file says by now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result
from tests.scheduling.daemons import running
from tests.scheduling.policy_files import NOW, TEXT

from gpuwarden.scheduling.local.adapters import LocalAdapter
from gpuwarden.scheduling.policies import policy_hash
from gpuwarden.scheduling.policy_checks import load_policy
from gpuwarden.scheduling.policy_cli import policy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.scheduling.daemons import Running

LOCAL = TEXT.replace("engine: slurm", "engine: local")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A daemon that goes by `LOCAL`."""
    with running(tmp_path_factory.mktemp("daemon"), LOCAL, now=NOW) as found:
        yield found


def run(here: Running, *words: str | Path) -> Result:
    """A command of `policy` on the daemon's machine."""
    variables = {"GPUWARDEN_SCHEDULER_SOCKET": str(here.settings.socket)}
    return CliRunner().invoke(policy, [str(word) for word in words], env=variables)


def test_a_file_that_is_in_force_is_no_difference(here: Running, tmp_path: Path) -> None:
    """However it is laid out."""
    file = tmp_path / "policy.yaml"
    file.write_text(f"# ours\n{LOCAL}")
    result = run(here, "diff", file)
    assert result.exit_code == 0, result.output
    assert "the engine is as the policy wants it" in result.stdout


def test_a_file_that_the_daemon_has_not_taken_yet_is_shown(here: Running, tmp_path: Path) -> None:
    """With each value, and what a person has to do: nothing is written for them."""
    file = tmp_path / "policy.yaml"
    file.write_text(LOCAL.replace("share: 3", "share: 5"))
    result = run(here, "diff", file)
    assert result.exit_code == 1
    assert "* by hand: policy in force (write it to the file" in result.stdout
    assert "    teams.vision.share: 3 -> 5" in result.stdout
    applied = run(here, "apply", file, "--yes", "--record", tmp_path / "record.json")
    assert applied.exit_code == 0, applied.output
    assert "by hand" in applied.stdout
    assert run(here, "diff", file).exit_code == 1


def test_what_the_file_has_no_more_is_a_difference_too(here: Running, tmp_path: Path) -> None:
    """A budget that was taken out is in no line of the file."""
    file = tmp_path / "policy.yaml"
    budget = "- {team: vision, per: day, limit: 300 GPU-hours, kind: soft}\n"
    file.write_text(LOCAL.replace(budget, ""))
    result = run(here, "diff", file)
    assert result.exit_code == 1
    assert f"-> {policy_hash(load_policy(file, now=NOW))}" in result.stdout


def test_render_writes_the_policy_for_a_new_host(here: Running, tmp_path: Path) -> None:
    """It reads back as the same policy."""
    file, out = tmp_path / "policy.yaml", tmp_path / "out"
    file.write_text(LOCAL)
    result = run(here, "render", file, "--init", "--out", out)
    assert result.exit_code == 0, result.output
    assert load_policy(out / "policy.yaml", now=NOW) == load_policy(file, now=NOW)


def test_without_a_daemon_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    """That is status 3, and not "no difference"."""
    file = tmp_path / "policy.yaml"
    file.write_text(LOCAL)
    variables = {"GPUWARDEN_SCHEDULER_SOCKET": str(tmp_path / "none.sock")}
    result = CliRunner().invoke(policy, ["diff", str(file)], env=variables)
    assert getattr(result.exception, "exit_code", None) == 3
    assert "does not answer" in str(result.exception)


def test_what_this_engine_does_not_do_is_said(tmp_path: Path) -> None:
    """Budgets in money and images: they bind people, and nothing waits for them here."""
    file = tmp_path / "policy.yaml"
    file.write_text(LOCAL)
    said = load_policy(file, now=NOW, engine="local")
    remarks = LocalAdapter().render(said, version=None).remarks
    images = [f"images[{index}]" for index in range(len(said.images))]
    money = [f"budgets[{n}]" for n, each in enumerate(said.budgets) if each.unit != "GPU-hours"]
    assert [each.path for each in remarks] == [*money, *images]
    assert images
