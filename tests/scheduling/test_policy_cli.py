"""`gpuwarden policy`: what it prints, what it does to an engine, and how it exits."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result
from tests.scheduling.daemons import running
from tests.scheduling.policy_files import NOW, TEXT
from tests.scheduling.shelves import Shelf

from gpuwarden.cli import main
from gpuwarden.scheduling.policy_cli import policy

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A policy in order."""
    path = tmp_path / "policy.yaml"
    path.write_text(TEXT)
    return path


@pytest.fixture
def shelf() -> Shelf:
    """An engine on which only the file by hand is in place."""
    found = Shelf()
    found.put("file", "shelf.conf", marked=False, zone="Europe/Berlin")
    return found


def run(*words: str | Path, shelf: Shelf | None = None, answer: str = "") -> Result:
    """Run a command of `policy`, with a shelf as the engine."""
    factory = None if shelf is None else shelf.adapter
    return CliRunner().invoke(policy, [str(word) for word in words], obj=factory, input=answer)


def applied(file: Path, shelf: Shelf, tmp_path: Path) -> Path:
    """Apply a policy; the answer is where its record is."""
    record = tmp_path / "state" / "record.json"
    result = run("apply", file, "--yes", "--record", record, shelf=shelf)
    assert result.exit_code == 0, result.output
    return record


def test_check_says_every_mistake_and_exits_two(file: Path) -> None:
    """Each with its line; a file in order is counted."""
    good = run("check", file)
    assert good.exit_code == 0
    assert "0 errors, 0 warnings; 2 teams, 40 cards, hash " in good.stdout
    file.write_text(TEXT.replace("deadline: 20m", "deadline: 20").replace("[low]", "[lo]"))
    bad = run("check", file)
    assert bad.exit_code == 2
    assert "error[GW107]: preemption.deadline: " in bad.stdout
    assert 'error[GW601]: priorities[2].preempts[0]: there is no priority "lo"' in bad.stdout
    found = json.loads(run("check", file, "-o", "json").stdout)
    assert [item["code"] for item in found["diagnostics"]] == ["GW601", "GW107"]


def test_check_knows_who_is_known_here(file: Path) -> None:
    """Only if it is asked: a file is often checked on another machine than it is used on."""
    assert run("check", file).stdout.count("GW659") == 0
    result = run("check", file, "--here", "-o", "json")
    assert result.exit_code == 0
    words = [item["message"] for item in json.loads(result.stdout)["diagnostics"]]
    assert 'teams[0].users[0]: this machine knows no user "ana"' in words
    assert 'operators.groups[0]: this machine knows no group "ops"' in words
    assert not [text for text in words if '"root"' in text]


def test_the_file_may_come_from_the_environment(file: Path) -> None:
    """So that nobody names it in every command."""
    result = CliRunner().invoke(policy, ["check"], env={"GPUWARDEN_POLICY": str(file)})
    assert result.exit_code == 0, result.output


def test_what_is_not_usable_is_told_by_every_command(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And ends with status 2."""
    file.write_text(TEXT.replace("share: 3", "shares: 3"))
    for command in ("render", "diff", "apply", "undo", "drift"):
        with pytest.raises(SystemExit) as caught:
            main(["policy", command, str(file)])
        assert caught.value.code == 2
        assert 'did you mean "share"?' in capsys.readouterr().err


def test_explain_says_what_a_policy_means_for_somebody(file: Path) -> None:
    """Their team's cards, whose jobs leave for whose, budgets and hours, in words."""
    result = run("explain", file, "--user", "ana")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "vision"
    assert "cards 16 of 32 a100-40 at any time, 8 more while nobody else needs them" in lines
    assert "lends 16 a100-40, 4 h100-80, as long as it does not use them" in lines
    assert "priorities high: jobs of low leave for it, of any team" in lines
    assert "leaving its jobs of low have to leave for high" in lines
    hard = "hard: once they are used no job starts, and those that run go on"
    assert f"budgets 5,000.0 GPU-hours per month, {hard}" in lines
    assert "300.0 GPU-hours per day, soft: it is told, and nothing stops" in lines
    assert any(line.startswith("windows off-peak: mon, tue, wed") for line in lines)
    assert any("at most 16 a100-40, 4 h100-80 at once for all teams" in line for line in lines)
    document = json.loads(run("explain", file, "-o", "json").stdout)
    assert [team["team"] for team in document["teams"]] == ["vision", "speech"]
    for words in (("--team", "visoin"), ("--user", "nobody"), ("--team", "speech", "--user", "bo")):
        refused = run("explain", file, *words)
        assert getattr(refused.exception, "exit_code", None) == 1
    assert 'did you mean "vision"?' in str(run("explain", file, "--team", "visoin").exception)


def test_apply_tells_that_the_daemon_goes_by_another_policy(
    file: Path, shelf: Shelf, tmp_path: Path
) -> None:
    """The engine has the new one by then, and the daemon only once it is told."""
    file.write_text(TEXT.replace("share: 3", "share: 4"))
    home = tmp_path / "daemon"
    home.mkdir()
    with running(home, TEXT, now=NOW) as daemon:
        variables = {"GPUWARDEN_SCHEDULER_SOCKET": str(daemon.settings.socket)}
        words = ["apply", str(file), "--yes", "--record", str(tmp_path / "r.json")]
        result = CliRunner().invoke(policy, words, obj=shelf.adapter, env=variables)
        assert result.exit_code == 0, result.output
        assert "systemctl reload gpuwarden-scheduler" in result.stderr
        file.write_text(TEXT)
        again = CliRunner().invoke(policy, words, obj=shelf.adapter, env=variables)
        assert "reload" not in again.stderr


def test_init_writes_a_file_once(tmp_path: Path) -> None:
    """And never over another."""
    path = tmp_path / "new.yaml"
    words = ("init", "--engine", "local", "--timezone", "Asia/Shanghai", "--out", path)
    assert run(*words).exit_code == 0
    assert run("check", path).exit_code == 0
    again = run(*words)
    assert again.exit_code != 0
    assert "is there already" in str(again.exception)
    assert run("init", "--engine", "local", "--timezone", "CET").exit_code == 2


def test_render_shows_every_object_for_the_version_that_is_found(file: Path, shelf: Shelf) -> None:
    """What the engine cannot do of the policy is said beside it."""
    result = run("render", file, shelf=shelf)
    assert result.exit_code == 0
    assert "# class high\nclass high\n" in result.stdout
    assert "# by hand, file shelf.conf: copy it, and restart\nzone=Europe/Berlin\n" in result.stdout
    assert "? windows[0]: a shelf has no clock" in result.stderr
    found = json.loads(run("render", file, "-o", "json", shelf=shelf).stdout)
    assert (found["version"], found["engine"], shelf.closed) == ("2.1", "slurm", 2)


def test_render_needs_no_engine(file: Path, shelf: Shelf) -> None:
    """It says for which version it is then, and takes another."""
    shelf.silent = True
    result = run("render", file, "-o", "json", shelf=shelf)
    assert json.loads(result.stdout)["version"] == "9.9"
    assert "--engine-version" in result.stderr
    named = run("render", file, "-o", "json", "--engine-version", "1.0", shelf=shelf)
    assert json.loads(named.stdout)["version"] == "1.0"
    assert "not known" not in named.stderr


def test_render_writes_a_folder(file: Path, shelf: Shelf, tmp_path: Path) -> None:
    """Files under their own names, and nothing outside of the folder."""
    out = tmp_path / "out"
    result = run("render", file, "--init", "--out", out, shelf=shelf)
    assert result.exit_code == 0, result.output
    names = sorted(path.name for path in out.iterdir())
    assert names == [
        "01-class-low.txt",
        "02-class-normal.txt",
        "03-class-high.txt",
        "04-account-vision.txt",
        "05-account-speech.txt",
        "shelf.conf",
        "start.sh",
    ]
    assert (out / "shelf.conf").read_text() == "zone=Europe/Berlin\n"
    modes = [
        stat.S_IMODE((out / name).stat().st_mode) & 0o111 for name in ("shelf.conf", "start.sh")
    ]
    assert modes == [0, 0o111]


def test_diff_shows_what_apply_would_do(file: Path, shelf: Shelf) -> None:
    """Made, changed, taken away, in the way, by hand: each with its sign."""
    shelf.put("account", "vision", marked=True, share="1")
    shelf.put("account", "old", marked=True, share="1")
    shelf.put("account", "speech", marked=False, share="1")
    shelf.put("account", "theirs", marked=False, share="1")
    shelf.put("file", "shelf.conf", marked=False, zone="UTC")
    result = run("diff", file, shelf=shelf)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "+ create class low",
        "    value: nothing -> 10",
        "+ create class normal",
        "    value: nothing -> 100",
        "+ create class high",
        "    value: nothing -> 1000",
        "~ change account vision",
        "    share: 1 -> 3",
        "- delete account old",
        "! account speech is there, and not gpuwarden's: it is left as it is",
        "* by hand: file shelf.conf (copy it, and restart)",
        "    zone: UTC -> Europe/Berlin",
        "? windows[0]: a shelf has no clock",
    ]
    document = json.loads(run("diff", file, "-o", "json", shelf=shelf).stdout)
    assert document["in_the_way"] == [{"kind": "account", "name": "speech"}]
    assert shelf.done == []


def test_apply_shows_asks_and_does(file: Path, shelf: Shelf, tmp_path: Path) -> None:
    """Without a yes nothing is done; done once, it finds nothing more to do."""
    record = tmp_path / "record.json"
    refused = run("apply", file, "--record", record, shelf=shelf, answer="n\n")
    assert (refused.exit_code, shelf.done) == (1, [])
    nobody = run("apply", file, "--record", record, shelf=shelf)
    assert (nobody.exit_code, shelf.done) == (1, [])
    assert "say --yes" in nobody.stderr
    assert run("apply", file, "--dry-run", shelf=shelf).exit_code == 0
    assert (shelf.done, record.exists()) == ([], False)
    result = run("apply", file, "--record", record, shelf=shelf, answer="y\n")
    assert result.exit_code == 0, result.output
    assert "[5/5] create account speech" in result.stderr
    assert "5 steps done" in result.stderr
    assert run("diff", file, shelf=shelf).exit_code == 0
    again = run("apply", file, "--record", record, shelf=shelf)
    assert again.exit_code == 0
    assert "Nothing is to be done" in again.stdout
    assert len(shelf.done) == 5


def test_a_record_that_cannot_be_kept_is_told(file: Path, shelf: Shelf, tmp_path: Path) -> None:
    """The engine has the policy all the same; only `drift` will not know of it."""
    (tmp_path / "state").write_text("no folder")
    result = run("apply", file, "--yes", "--record", tmp_path / "state" / "r.json", shelf=shelf)
    assert result.exit_code == 0
    assert "warning: what was applied cannot be kept in" in result.stderr
    assert len(shelf.done) == 5


def test_apply_does_nothing_at_all_if_something_is_in_the_way(
    file: Path, shelf: Shelf, tmp_path: Path
) -> None:
    """Somebody else's object is never touched, not even if it is just as wanted."""
    shelf.put("class", "low", marked=False, value="10")
    result = run("apply", file, "--yes", "--record", tmp_path / "r.json", shelf=shelf)
    assert (result.exit_code, shelf.done) == (1, [])
    assert "! class low is there" in result.stdout
    assert "Rename or remove" in result.stderr
    assert "  shelf mark class low\n" in result.stderr
    assert "mark class high" not in result.stderr


def test_a_step_that_fails_is_where_it_goes_on(file: Path, shelf: Shelf, tmp_path: Path) -> None:
    """What was done is said, and kept; what was not is done the next time."""
    shelf.refuses = ("class", "high")
    record = tmp_path / "record.json"
    result = run("apply", file, "--yes", "--record", record, shelf=shelf)
    assert result.exit_code == 1
    assert "create class high failed: high is in use" in result.stderr
    assert "2 steps were done, 2 were not tried" in result.stderr
    kept = json.loads(record.read_text())
    assert [each["name"] for each in kept["objects"]] == ["low", "normal", "shelf.conf"]
    shelf.refuses = None
    assert run("apply", file, "--yes", "--record", record, shelf=shelf).exit_code == 0
    assert [step.name for step in shelf.done] == ["low", "normal", "high", "vision", "speech"]


def test_an_engine_that_does_not_answer_is_status_three(
    file: Path, shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is asked again later; nothing was decided."""
    shelf.silent = True
    for command in ("diff", "apply", "undo"):
        result = run(command, file, shelf=shelf)
        assert getattr(result.exception, "exit_code", None) == 3
    assert capsys.readouterr().err == ""
    assert shelf.closed == 3


def test_drift_is_what_somebody_did_since(file: Path, shelf: Shelf, tmp_path: Path) -> None:
    """A change of the file is none; a change by hand is named with what it was."""
    record = applied(file, shelf, tmp_path)
    file.write_text(TEXT.replace("share: 3", "share: 4"))
    clean = run("drift", file, "--record", record, shelf=shelf)
    assert (clean.exit_code, clean.stdout) == (0, "No drift: the engine is as it was applied.\n")
    shelf.put("account", "vision", marked=True, share="9")
    shelf.put("class", "high", marked=False, value="1000")
    del shelf.objects["class", "low"]
    shelf.put("account", "copied", marked=True, share="1")
    shelf.put("file", "shelf.conf", marked=False, zone="UTC")
    result = run("drift", file, "--record", record, shelf=shelf)
    assert result.exit_code == 1
    assert sorted(result.stdout.splitlines()) == [
        "account copied carries gpuwarden's mark, and was not applied",
        "account vision: share is 9, and was 3",
        "class high has lost gpuwarden's mark",
        "class low is gone",
        "file shelf.conf: zone is UTC, and was Europe/Berlin",
    ]


RECORD = """{"schema": "gpuwarden.policy-record/v1", "engine": "slurm", "version": "1",
"policy": "x", "at": 1, "who": "root", "objects": [%s]}"""
DAMAGE = (
    *("", "{}", "[1]", '{"schema": "gpuwarden.policy-record/v1"}', "[" * 100_000),
    RECORD % '{"kind": "qos", "name": "high", "by": "apply", "values": [1]}',
    RECORD % '{"kind": "qos", "name": "high", "by": "nobody", "values": {}}',
    RECORD % '{"kind": "qos", "name": 7, "by": "apply", "values": {}}',
    (RECORD % "").replace('"at": 1', '"at": NaN'),
    (RECORD % "").replace('"slurm"', '"pbs"'),
)


@pytest.mark.parametrize("damage", DAMAGE, ids=range(len(DAMAGE)))
def test_a_damaged_record_is_told(file: Path, shelf: Shelf, tmp_path: Path, damage: str) -> None:
    """And a missing one: nothing is guessed."""
    record = tmp_path / "record.json"
    missing = run("drift", file, "--record", record, shelf=shelf)
    assert "nothing was applied from this machine" in str(missing.exception)
    record.write_text(damage)
    result = run("drift", file, "--record", record, shelf=shelf)
    assert getattr(result.exception, "exit_code", None) == 2
    assert "is no record" in str(result.exception)


def test_undo_takes_away_what_is_marked_and_nothing_else(
    file: Path, shelf: Shelf, tmp_path: Path
) -> None:
    """The last made first; the record goes too."""
    record = applied(file, shelf, tmp_path)
    shelf.put("account", "theirs", marked=False, share="1")
    assert run("undo", file, "--dry-run", "--record", record, shelf=shelf).exit_code == 0
    assert run("undo", file, "--record", record, shelf=shelf, answer="n\n").exit_code == 1
    result = run("undo", file, "--yes", "--record", record, shelf=shelf)
    assert result.exit_code == 0, result.output
    assert sorted(shelf.objects) == [("account", "theirs"), ("file", "shelf.conf")]
    assert [step.name for step in shelf.done[5:]] == ["speech", "vision", "high", "normal", "low"]
    assert not record.exists()
    assert "Nothing of gpuwarden's" in run("undo", file, "--record", record, shelf=shelf).stderr


def test_diff_against_another_file_says_who_gains(file: Path, tmp_path: Path) -> None:
    """No engine is asked."""
    new = tmp_path / "new.yaml"
    new.write_text(
        TEXT.replace("a100-40: 16", "a100-40: 18").replace("deadline: 20m", "deadline: 15m")
    )
    result = run("diff", new, "--against", file)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "teams.vision.quota.a100-40: 16 -> 18 (vision gains)",
        "preemption.deadline: 20m -> 15m (stricter)",
    ]
    assert run("diff", file, "--against", file).exit_code == 0
    document = json.loads(run("diff", new, "--against", file, "-o", "json").stdout)
    assert [change["effect"] for change in document["changes"]] == ["gains", "stricter"]
