"""Policy files: what they mean, and what is said of each mistake in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.scheduling.policy_files import DIGEST, NOW, TEXT, a_policy, findings

from gpuwarden.diagnostics import Severity
from gpuwarden.errors import InvalidInput
from gpuwarden.scheduling.policies import policy_hash
from gpuwarden.scheduling.policy_checks import load_policy
from gpuwarden.scheduling.policy_codes import CODES

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.scheduling.policies import Engine


@pytest.mark.parametrize("engine", ["slurm", "kueue", "local"])
def test_a_policy_in_order_has_no_findings(tmp_path: Path, engine: Engine) -> None:
    """One file serves every engine."""
    assert findings(tmp_path, TEXT, engine=engine) == ()


def test_a_policy_answers_what_others_ask() -> None:
    """Who may use how much, whose jobs leave for whose, and what a team's objects are called."""
    policy = a_policy()
    vision, speech = policy.teams
    assert (vision.own("a100-40"), vision.most("a100-40"), vision.own("x")) == (16, 24, 0)
    assert (vision.lends("h100-80"), speech.lends("a100-40"), speech.lends("h100-80")) == (4, 6, 0)
    assert policy.unassigned("a100-40") == 4
    assert policy.lendable("a100-40", "vision") == 10
    assert policy.lendable("h100-80", "speech") == 8
    assert policy.preempts("high", "low")
    assert not policy.preempts("high", "normal")
    assert policy.usual_priority.name == "normal"
    assert (policy.team_of("ana"), policy.team_of("nobody")) == ("vision", "")
    assert (vision.account, vision.namespace) == ("vision", "vision")
    image = policy.image("yolo:m-cu124")
    assert image is not None
    assert (image.serves("yolov8m-seg"), image.serves("yolov8n")) == (True, False)


def test_without_a_default_the_lowest_priority_is_the_usual_one() -> None:
    """So that whoever says nothing pushes nobody aside."""
    priorities = [{"name": "high", "value": 9}, {"name": "low", "value": 1}]
    assert a_policy(priorities=priorities).usual_priority.name == "low"


def test_the_hash_is_of_what_is_said_and_not_of_its_layout(tmp_path: Path) -> None:
    """Comments and quotes change nothing; a number does."""
    path = tmp_path / "policy.yaml"
    path.write_text(f"# ours\n{TEXT}")
    read = policy_hash(load_policy(path, now=NOW))
    assert read == policy_hash(a_policy())
    path.write_text(TEXT.replace("count: 8", "count: 9"))
    assert policy_hash(load_policy(path, now=NOW)) != read


VISION_QUOTA = "quota: {a100-40: 16, h100-80: 4}"
WRONG = (
    ("quota: {a100-40: 12}", "quota: {a100-44: 12}", "GW601", 'did you mean "a100-40"?'),
    ("borrow: {h100-80: 4}", "borrow: {h100: 4}", "GW601", 'there is no card "h100"'),
    ("preempts: [low]", "preempts: [lo]", "GW601", 'did you mean "low"?'),
    ("team: vision, per: day", "team: vison, per: day", "GW601", 'did you mean "vision"?'),
    ("share: 3", "priorities: [hihg]", "GW601", 'did you mean "high"?'),
    ("name: speech", "name: vision", "GW600", "another team"),
    ("users: [ana, bo]", "users: [ana, ana]", "GW600", "named twice"),
    ("preempts: [low]", "preempts: [high]", "GW602", "cannot preempt itself"),
    ("value: 10}", "value: 10, preempts: [high]}", "GW602", "preempts it in turn"),
    ("value: 10}", "value: 1000}", "GW602", "which is not lower than 1000 of high"),
    ("a100-40: 12", "a100-40: 17", "GW604", "33 a100-40 are promised (16 vision + 17 speech)"),
    ("limit: 300 GPU-hours", "limit: 300 EUR", "GW608", "knows no prices"),
    ("limit: 300 GPU-hours", "limit: 300", "GW107", "is not a limit"),
    ("kind: hard, running: finish", "kind: hard", "GW105", "running: finish"),
    ("kind: soft", "kind: soft, running: leave", "GW111", "touches no job"),
    ("per: day", "per: month", "GW600", "another budget of vision per month"),
    (f"@{DIGEST}", ":latest", "GW606", "not pinned by its digest"),
    ('to: "07:00"', 'to: "20:00"', "GW107", "has no length"),
    ('to: "07:00"', "to: 7:00", "GW107", "is not a time of day"),
    ("deadline: 20m", "deadline: 20", "GW107", "lacks a unit"),
    ("memory: 40GiB", "memory: 40", "GW107", "lacks a unit"),
    ("value: 10}", "value: 10, default: true}", "GW609", "the default already"),
    ("notice: epoch", "notice: batch", "GW104", "step"),
    ("timezone: Europe/Berlin", "timezone: CET", "GW107", "time zone"),
    ("slurm: {gres: h100, partition: gpu}", "", "GW605", "write slurm: {gres: a100}"),
    ("gres: h100", "gres: a100", "GW607", "same gres and partition as cards[0]"),
    ("version: 1\n", "version: 1\nslurm: {sbatch: [--time=3]}\n", "GW610", "writes --time itself"),
    ("version: 1\n", "version: 1\nslurm: {sbatch: ['--x y']}\n", "GW107", "does not match"),
    ("share: 3", "slurm: {account: SPEECH}", "GW607", "same account as teams[0]"),
    ("share: 3", "slurm: {account: Root}", "GW607", "the account root is Slurm's own"),
    ("share: 3", "slurm: {account: gpuwarden}", "GW607", "is that of all teams"),
    ("share: 3", "shares: 3", "GW103", 'did you mean "share"?'),
)


@pytest.mark.parametrize(
    ("old", "new", "code", "words"), WRONG, ids=[f"{new}-{code}" for _, new, code, _ in WRONG]
)
def test_a_mistake_is_told_with_its_place_and_remedy(
    tmp_path: Path, old: str, new: str, *, code: str, words: str
) -> None:
    """And makes the whole file unusable."""
    assert old in TEXT
    found = findings(tmp_path, TEXT.replace(old, new, 1))
    (mistake,) = [item for item in found if item.severity is Severity.ERROR]
    assert mistake.code == code
    assert words in f"{mistake.message}; {mistake.hint}"
    assert mistake.span.line > 1
    if code in ("GW600", "GW601"):
        assert found == (mistake,)
    with pytest.raises(InvalidInput, match=code):
        load_policy(tmp_path / "policy.yaml", now=NOW)


DOUBTFUL = (
    ("lend: {a100-40: 6}", "lend: {a100-40: 6, h100-80: 1}", "GW650", "cannot lend 1"),
    ("borrow: {a100-40: 8}", "borrow: {a100-40: 11}", "GW650", "at most 10"),
    ("borrow: {h100-80: 4}", "borrow: {}", "", ""),
    ("lend: {a100-40: 6}", "lend: {a100-40: 12}", "", ""),
    ("lend: {a100-40: 6}", "lend: {a100-40: 13}", "GW650", "cannot lend 13"),
    ("borrow: {a100-40: 8}", "borrow: {a100-40: 10}", "", ""),
    ("limit: 5000 GPU-hours", "limit: 300 GPU-hours", "GW651", "budget per month is 300.0"),
    ("limit: 5000 GPU-hours", "limit: 301 GPU-hours", "", ""),
    ("limit: 5000 GPU-hours", "limit: 20860 GPU-hours", "", ""),
    ("quota: {a100-40: 12}", "quota: {a100-40: 16}", "GW650", "at most 6 a100-40"),
    ("limit: 5000 GPU-hours", "limit: 250 GPU-hours", "GW651", "budget per month is 250.0"),
    ("limit: 5000", "limit: 50000", "GW651", "at most 20,860 GPU-hours per month"),
    ('from: "20:00"', 'from: "02:30"', "", ""),
    ("days: [mon, tue, wed, thu, fri]", "days: [sat]", "", ""),
    ("deadline: 20m", "deadline: 30s", "GW653", "hardly enough"),
    ("deadline: 20m", "deadline: 1m", "GW653", "an epoch that takes longer than 1m"),
    ("deadline: 20m", "deadline: 5m", "", ""),
    ("lead_time: 20m", "lead_time: 5m", "GW656", "may stay for 20m"),
    ("users: [cy]", "users: [cy, ana]", "GW654", "ana is in vision too"),
    ("users: [cy]", "users: []", "GW655", "nobody can submit"),
    ("value: 100,", "value: 1000,", "GW657", "neither goes first"),
    ("per: 24h", "per: 2h", "GW658", "never more than 3 times in 2h"),
    ("per: 24h", "per: 3h", "", ""),
    ("lead_time: 20m", "lead_time: 19m", "GW656", "may stay for 20m"),
    ("no_show_after: 30m", "no_show_after: 7d", "GW658", "none is ever released"),
    ("at_most_share: 50%", "at_most_share: 4%", "GW658", "of h100-80 that is less than a whole"),
    ("ahead: 90d", "ahead: 20m", "GW656", "told later than that"),
    ("share: 3", "priorities: [low, high]", "GW655", "normal, which is chosen where"),
    (
        "value: 100, default: true",
        "value: 100, default: true, preempts: [low]",
        "GW657",
        "names no",
    ),
)


@pytest.mark.parametrize(
    ("old", "new", "code", "words"), DOUBTFUL, ids=[f"{new}-{code}" for _, new, code, _ in DOUBTFUL]
)
def test_what_is_hardly_meant_is_a_warning(
    tmp_path: Path, old: str, new: str, *, code: str, words: str
) -> None:
    """The file stays usable; where nothing is doubtful nothing is said."""
    assert old in TEXT
    found = findings(tmp_path, TEXT.replace(old, new, 1))
    assert all(item.severity is Severity.WARNING for item in found)
    assert [item.code for item in found] == ([code] if code else [])
    assert all(words in item.message for item in found)


def test_preempting_who_preempts_is_said(tmp_path: Path) -> None:
    """High takes from normal, normal from low, and high not from low: hardly meant."""
    text = TEXT.replace("value: 100, default: true", "value: 100, preempts: [low]")
    text = text.replace("value: 1000, preempts: [low]", "value: 1000, preempts: [normal]")
    (found,) = findings(tmp_path, text)
    assert (found.code, found.severity) == ("GW657", Severity.WARNING)
    assert findings(tmp_path, text.replace("[normal]", "[low, normal]")) == ()


def test_whatever_asks_jobs_to_leave_needs_terms_for_it(tmp_path: Path) -> None:
    """Priorities, windows and budgets alike; nothing that ends a job has a default."""
    begin, end = TEXT.index("preemption:"), TEXT.index("images:")
    text = TEXT[:begin] + TEXT[end:].replace("running: finish", "running: leave")
    text = text.replace("running: finish", "running: leave")
    found = findings(tmp_path, text)
    wrong = [item for item in found if item.severity is Severity.ERROR]
    assert {item.code for item in wrong} == {"GW603"}
    assert [item.message.partition(":")[0] for item in wrong] == [
        "priorities[2].preempts",
        "windows[0].running",
        "budgets[0].running",
    ]
    assert [item.code for item in found if item.severity is Severity.WARNING] == ["GW656"] * 3


def test_a_wrong_form_does_not_hide_a_wrong_name(tmp_path: Path) -> None:
    """Everything is told in one pass."""
    text = TEXT.replace("deadline: 20m", "deadline: 20").replace("preempts: [low]", "preempts: [x]")
    assert {item.code for item in findings(tmp_path, text)} == {"GW107", "GW601"}


def test_what_has_a_wrong_name_itself_makes_no_others_unknown(tmp_path: Path) -> None:
    """A card without a readable name is one mistake, and not one for each quota of it."""
    found = findings(tmp_path, TEXT.replace("- name: a100-40", "- name: [a100-40]"))
    assert [item.code for item in found] == ["GW106"]


def test_a_kueue_policy_needs_images_and_labels(tmp_path: Path) -> None:
    """Pods have to be of something, and go somewhere."""
    begin, end = TEXT.index("images:"), TEXT.index("bookings:")
    text = (TEXT[:begin] + TEXT[end:]).replace("NVIDIA-H100-80GB-HBM3", "NVIDIA-A100-SXM4-40GB")
    found = findings(tmp_path, text, engine="kueue")
    assert [item.code for item in found] == ["GW607", "GW605"]


def test_a_namespace_of_kubernetes_itself_is_no_teams(tmp_path: Path) -> None:
    """Jobs are neither queued nor ended there."""
    text = TEXT.replace("share: 3", "kueue: {namespace: kube-system}")
    (found,) = findings(tmp_path, text, engine="kueue")
    assert (found.code, found.hint) == (
        "GW607",
        "write kueue: {namespace: ...} with one of the team's",
    )


def test_partitions_of_slurm_spare_nobody_below(tmp_path: Path) -> None:
    """Who may have to leave for one priority has to for all above it; by QOS that can be told."""
    text = TEXT.replace("value: 1000, preempts: [low]", "value: 1000, preempts: [low, normal]")
    tiers = f"{text}slurm: {{preempt: partitions}}\n"
    (found,) = findings(tmp_path, tiers)
    assert (found.code, found.severity) == ("GW610", Severity.ERROR)
    assert "jobs of low would leave for normal too" in found.message
    assert findings(tmp_path, text) == ()
    assert findings(tmp_path, tiers, engine="kueue") == ()


def test_a_name_that_slurm_garbles_is_told(tmp_path: Path) -> None:
    """Nobody could submit by it."""
    text = TEXT.replace("users: [cy]", "users: ['LAB\\cy']")
    (found,) = findings(tmp_path, text)
    assert (found.code, found.severity) == ("GW610", Severity.ERROR)
    assert findings(tmp_path, text, engine="local") == ()


def test_every_code_is_documented(tmp_path: Path) -> None:
    """None is used that the reference does not explain."""
    for old, new, *_ in (*WRONG, *DOUBTFUL):
        assert {item.code for item in findings(tmp_path, TEXT.replace(old, new, 1))} <= set(CODES)


@pytest.mark.parametrize("part", ["notice", "deadline", "minimum_run", "back_off", "at_most"])
def test_nothing_by_which_a_job_has_to_leave_has_a_default(tmp_path: Path, part: str) -> None:
    """What is left out of `preemption` is missing."""
    begin = TEXT.index(f"  {part}:")
    text = TEXT[:begin] + TEXT[TEXT.index("\n", begin) + 1 :]
    assert [item.code for item in findings(tmp_path, text)] == ["GW105"]
