"""Rule files: all mistakes of all files in one pass, and merging that only makes stricter."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

import pytest

from gpuwarden.diagnostics import Severity
from gpuwarden.errors import InvalidInput
from gpuwarden.ruleengine.loading import (
    CheckedFiles,
    check_rule_files,
    load_rule_files,
    rule_set_hash,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Write = Callable[..., list[Path]]

NOW = 1_750_000_000.0

LIMITS = (
    "limits: {terminate: {per_tick: 1, per_hour: 6, per_user_per_day: 3, "
    "halt_above_share_of_running: 10%}}\n"
)

IDLE_HELD = """\
- id: idle-held
  mode: enforce
  target: job
  match: {framework: "ultralytics|torch|jupyter"}
  cold_start: 60s
  ignore_phases: {scan: 30m, validate: 30m, checkpoint: 10m, export: 1h}
  when:
    all:
    - {signal: gpu_utilization, agg: max, window: 3 samples, at_most: 5%, gpus: all}
    - {signal: gpu_memory_share, agg: min, window: 5m, above: 10%, gpus: any}
    - {silent_for: 5m, signals: [log, heartbeat, cpu]}
  for: 5m
  clear_after: 2m
  stages:
  - {level: light, after: 0s, do: log}
  - {level: moderate, after: 5m, do: notify, owner_may: {keep: 2h, times: 2}}
  - {level: severe, after: 15m, do: terminate, notice_delivered_for: 10m,
     grace: 60s, max_work_lost: 1h}
"""

LOOK = """\
- id: {id}
  target: job
  cold_start: 60s
  when: {when}
  for: 5m
  stages: [{{level: light, after: 0s, do: log}}]
"""

OFF = "{profile: {throughput: below 15%, gpu_memory: above 15%}, window: 5m}"
HOG = "{signal: gpu_memory_share, above: 90%, share: 80%, window: 5m, gpus: any}"

PROFILES = """\
profiles:
- {model: yolov8m, batch: 64, imgsz: 640, hardware: "NVIDIA A100-SXM4-40GB",
   gpu_memory: 10.5GiB, gpu_utilization: 82%, throughput: 78 img/s}
"""

WHITELIST = """\
whitelist:
- {match: {cgroup: "/system.slice/tensorboard.service"}, rules: [idle-held],
   reason: "shared service", approved_by: ops, expires: 2027-06-30T00:00:00+08:00}
"""


def _look(rule_id: str, when: str = HOG) -> str:
    return LOOK.format(id=rule_id, when=when)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes files a.yaml, b.yaml and so on, and gives their paths."""

    def files(*texts: str) -> list[Path]:
        paths = []
        for name, text in zip("abcdef", texts, strict=False):
            path = tmp_path / f"{name}.yaml"
            path.write_text(text)
            paths.append(path)
        return paths

    return files


def _places(paths: list[Path]) -> list[tuple[str, str, int, int]]:
    checked = check_rule_files(paths, now=NOW)
    return [
        (item.code, item.span.file.rpartition("/")[2], item.span.line, item.span.column)
        for item in checked.diagnostics
    ]


def test_the_example_of_the_design_is_usable(write: Write) -> None:
    """Every kind of condition, all three stages, profiles and the whitelist."""
    text = (
        "version: 1\ntimezone: Asia/Shanghai\n"
        + LIMITS
        + "rules:\n"
        + IDLE_HELD
        + _look("memory-hog")
        + _look("off-profile", OFF)
        + _look("custom", '{promql: "sum by (job_id) (gpu_job_memory_bytes)", above: 3}')
        + PROFILES
        + WHITELIST
    )
    checked = check_rule_files(write(text), now=NOW)
    assert checked.diagnostics == ()
    assert checked.rules is not None
    assert [rule.id for rule in checked.rules.rules] == [
        "idle-held",
        "memory-hog",
        "off-profile",
        "custom",
    ]
    assert checked.rules.rules[0].enforces


def test_five_different_mistakes_give_five_errors_each_at_its_place(write: Write) -> None:
    """In one run: an unknown key, a bare number, a wrong word, a missing key, a wrong signal."""
    text = textwrap.dedent("""\
        version: 1
        rules:
        - id: idle
          target: job
          cold_start: 60
          when: {signal: gpu_utilisation, agg: max, window: 3 samples, at_most: 5%, gpus: all}
          for: 5m
          stages: [{level: light, after: 0s, do: kill}]
        - id: hog
          target: job
          cold_start: 60s
          when: {signal: gpu_memory_share, above: 90%, share: 80%, window: 5m, gpus: any}
          stages: [{level: light, after: 0s, do: log}]
          clear_aftr: 2m
        """)
    (path,) = write(text)
    assert _places([path]) == [
        ("GW107", "a.yaml", 5, 15),
        ("GW112", "a.yaml", 6, 18),
        ("GW104", "a.yaml", 8, 42),
        ("GW105", "a.yaml", 9, 3),
        ("GW103", "a.yaml", 14, 3),
    ]
    with pytest.raises(InvalidInput) as caught:
        load_rule_files([path])
    shown = str(caught.value)
    assert shown.count("^") >= 5
    assert 'did you mean "gpu_utilization"?' in shown
    assert 'did you mean "clear_after"?' in shown


def test_a_misspelt_first_key_is_reported_beside_what_is_missing(write: Write) -> None:
    """Both begin at the same place: the mapping starts with its first key."""
    places = _places(write("version: 1\nrules:\n- idd: x\n  target: job\n"))
    assert ("GW103", "a.yaml", 3, 3) in places
    assert ("GW105", "a.yaml", 3, 3) in places


@pytest.mark.parametrize("version", ["true", "1.0", "'1'", "2", "~"])
def test_only_the_number_one_is_version_one(write: Write, version: str) -> None:
    """A later version of the language must never be read as this one."""
    assert _places(write(f"version: {version}\n")) == [("GW104", "a.yaml", 1, 10)]


def test_the_lints_of_one_rule_run_although_another_is_broken(write: Write) -> None:
    """And those of another file although this one is no YAML."""
    short = _look("short", HOG.replace("5m", "10s"))
    paths = write("version: 1\nrules:\n- id: broken\n" + short, "version: [1\n")
    codes = {(code, file) for code, file, _, _ in _places(paths)}
    assert {("GW212", "a.yaml"), ("GW105", "a.yaml"), ("GW101", "b.yaml")} <= codes


def test_an_id_can_be_used_once_in_all_files(write: Write) -> None:
    """Cases are kept by it; even a broken rule occupies its id."""
    paths = write("version: 1\nrules:\n" + _look("x"), "version: 1\nrules:\n- id: x\n")
    assert ("GW219", "b.yaml", 3, 7) in _places(paths)
    messages = [item.message for item in check_rule_files(paths, now=NOW).diagnostics]
    assert f'rules[0].id: "x" is the id of another rule, at {paths[0]}:3' in messages


def test_a_file_that_is_given_twice_is_said_once(write: Write) -> None:
    """As by `a.yaml *.yaml`, or by a link: not each of its ids to be that of another rule."""
    (path,) = write("version: 1\nrules:\n" + _look("one") + _look("two"))
    link = path.with_name("link.yaml")
    link.symlink_to(path)
    for paths in ([path, path], [path, path.parent / "." / path.name], [path, link]):
        (error,) = check_rule_files(paths).errors
        assert error.code == "GW100"
        assert error.message.endswith("name it once")


def test_enforcing_needs_limits_in_one_of_the_files(write: Write) -> None:
    """No limit is not `unlimited`."""
    rules = "version: 1\nrules:\n" + IDLE_HELD
    assert _places(write(rules)) == [("GW218", "a.yaml", 4, 9)]
    assert _places(write(rules, "version: 1\n" + LIMITS)) == []
    observing = rules.replace("mode: enforce", "mode: observe")
    assert _places(write(observing)) == []


def test_of_several_limits_the_strictest_count(write: Write) -> None:
    """A second file cannot widen what the first allows."""
    wide = LIMITS.replace("per_hour: 6", "per_hour: 60").replace("per_tick: 1", "per_tick: 0")
    rules = load_rule_files(write("version: 1\n" + LIMITS, "version: 1\n" + wide))
    assert rules.limits is not None
    limits = rules.limits.terminate
    assert (limits.per_tick, limits.per_hour, limits.per_user_per_day) == (0, 6, 3)
    assert limits.halt_above_share_of_running == 0.1


def test_a_whitelist_that_names_no_rule_protects_nobody(write: Write) -> None:
    """A typing error there would end the protected service."""
    text = "version: 1\n" + LIMITS + "rules:\n" + IDLE_HELD
    wrong = WHITELIST.replace("[idle-held]", "[idle-hold]")
    (path,) = write(text + wrong)
    checked = check_rule_files([path], now=NOW)
    assert [(item.code, item.hint) for item in checked.diagnostics] == [
        ("GW220", 'did you mean "idle-held"?')
    ]


def test_an_expired_protection_is_a_warning(write: Write) -> None:
    """The file stays usable."""
    text = "version: 1\n" + LIMITS + "rules:\n" + IDLE_HELD + WHITELIST.replace("2027", "2020")
    checked = check_rule_files(write(text), now=NOW)
    assert [(item.code, item.severity) for item in checked.diagnostics] == [
        ("GW304", Severity.WARNING)
    ]
    assert checked.rules is not None


def _with_entry(write: Write, match: str) -> CheckedFiles:
    """The whitelist's entry for whoever matches, as checked."""
    entry = re.sub(r"match: \{[^}]*\}", f"match: {match}", WHITELIST)
    return check_rule_files(
        write("version: 1\n" + LIMITS + "rules:\n" + IDLE_HELD + entry), now=NOW
    )


@pytest.mark.parametrize(
    ("match", "warned"),
    [
        ("{run: demo}", True),
        ("{run: demo, executable: /usr/bin/python3.11}", True),
        ("{run: demo, user: ana}", False),
        ("{run: demo, cgroup: /user.slice/user-1000.slice}", False),
        ("{run: demo, job: slurm-lab-1-0}", False),
        ("{user: ana}", False),
    ],
)
def test_a_run_alone_protects_whoever_calls_himself_so(
    write: Write, match: str, *, warned: bool
) -> None:
    """What the node knows of its owner has to stand beside the job's own word."""
    checked = _with_entry(write, match)
    assert ["GW319"] * warned == [item.code for item in checked.diagnostics]
    assert checked.rules is not None


@pytest.mark.parametrize(
    ("match", "warned"),
    [
        ("{executable: /usr/bin/python3.11}", True),
        ("{executable: /opt/conda/bin/python}", True),
        ("{executable: /bin/bash}", True),
        ("{executable: /usr/bin/python3.11, user: svc-board}", False),
        ("{executable: /usr/bin/python3.11, cgroup: /system.slice/board.service}", False),
        ("{executable: /usr/bin/nodectl}", False),
    ],
)
def test_an_interpreter_alone_protects_every_script(
    write: Write, match: str, *, warned: bool
) -> None:
    """TensorBoard's executable is Python, and so is every training's."""
    checked = _with_entry(write, match)
    assert ["GW321"] * warned == [item.code for item in checked.diagnostics]
    assert checked.rules is not None


def test_two_profiles_of_the_same_training_contradict_each_other(write: Write) -> None:
    """Also from two files, at the place of the second."""
    assert _places(write("version: 1\n" + PROFILES, "version: 1\n" + PROFILES)) == [
        ("GW221", "b.yaml", 3, 3)
    ]


def test_files_agree_on_the_zone(write: Write) -> None:
    """A file that gives none follows the others."""
    paths = write("version: 1\ntimezone: Asia/Shanghai\n", "version: 1\n")
    assert load_rule_files(paths).timezone == "Asia/Shanghai"
    paths = write("version: 1\ntimezone: Asia/Shanghai\n", "version: 1\ntimezone: UTC\n")
    assert [code for code, *_ in _places(paths)] == ["GW222", "GW222"]


def test_a_teams_file_rules_over_its_own_jobs_and_exempts_from_its_own_rules(write: Write) -> None:
    """Otherwise a team could protect itself from the operators' rules."""
    operators = "version: 1\n" + LIMITS + "rules:\n" + IDLE_HELD
    own = "version: 1\nteam: vision\nrules:\n" + _look("vision-hog")
    rules = load_rule_files(write(operators, own))
    assert [rule.team for rule in rules.rules] == ["", "vision"]
    assert "GW223" in [code for code, *_ in _places(write(operators, own + WHITELIST))]
    other = own.replace("  target: job\n", "  target: job\n  team: speech\n")
    assert [code for code, *_ in _places(write(operators, other))] == ["GW223"]


@pytest.mark.parametrize(
    ("given", "place", "code"),
    [
        ("  team: ''\n", "rules[0].team", "GW107"),
        ("  only_during: []\n", "rules[0].only_during", "GW111"),
        ("team: ''\n", "team", "GW107"),
    ],
)
def test_what_restricts_and_was_left_empty_does_not_restrict_nothing(
    write: Write, given: str, place: str, code: str
) -> None:
    """A template without its value: the rule of one team would judge everybody, at all hours."""
    checked = check_rule_files(write("version: 1\nrules:\n" + _look("day") + given))
    (error,) = checked.errors
    assert error.code == code
    assert error.message.startswith(f"{place}: must not be empty")


def test_the_hash_is_that_of_the_meaning(write: Write) -> None:
    """Comments and spelling do not change it, a limit does."""
    text = "version: 1\nrules:\n" + _look("x")
    same = "# a comment\nversion: 1\nrules:\n" + _look("x").replace("5m", "300s")
    other = text.replace("90%", "91%")
    hashes = [rule_set_hash(load_rule_files(write(each))) for each in (text, same, other)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_missing_file_is_an_error_at_its_name(tmp_path: Path) -> None:
    """Not an empty set of rules."""
    checked = check_rule_files([tmp_path / "none.yaml"], now=NOW)
    assert checked.rules is None
    assert [item.code for item in checked.diagnostics] == ["GW100"]
