"""What is said of a change of a policy: whom it gives to, takes from, and how strict it is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.scheduling.policy_files import NOW, TEXT

from gpuwarden.scheduling.policy_checks import load_policy
from gpuwarden.scheduling.policy_differences import (
    difference_lines,
    differences,
    differences_json,
)

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.scheduling.policies import Policy


def policy(folder: Path, text: str) -> Policy:
    """A policy file, read."""
    path = folder / "policy.yaml"
    path.write_text(text)
    return load_policy(path, now=NOW)


CHANGES = (
    ("a100-40: 16", "a100-40: 12", "teams.vision.quota.a100-40: 16 -> 12 (vision loses)"),
    (
        "h100-80: 4}\n  borrow",
        "h100-80: 5}\n  borrow",
        "teams.vision.quota.h100-80: 4 -> 5 (vision gains)",
    ),
    (
        ", h100-80: 4}\n  borrow",
        "}\n  borrow",
        "teams.vision.quota.h100-80: 4 -> none (vision loses)",
    ),
    ("lend: {a100-40: 6}", "lend: {a100-40: 3}", "teams.speech.lend.a100-40: 6 -> 3 (stricter)"),
    ("  lend: {a100-40: 6}\n", "", "teams.speech.lend: gone (laxer)"),
    ("share: 3", "share: 4", "teams.vision.share: 3 -> 4 (vision gains)"),
    (
        "share: 3",
        "share: 3\n  priorities: [normal, low]",
        "teams.vision.priorities: none -> low, normal (stricter for vision)",
    ),
    ("users: [cy]", "users: [cy, dan]", "teams.speech.users: + dan (dan gains)"),
    ("users: [ana, bo]", "users: [bo, ana]", ""),
    ("groups: [ops]", "groups: []", "operators.groups: - ops (ops loses)"),
    ("count: 8", "count: 16", "cards.h100-80.count: 8 -> 16 (everybody gains)"),
    ("memory: 80GiB", "memory: 79GiB", "cards.h100-80.memory: 80GiB -> 79GiB (different)"),
    (
        "preempts: [low]",
        "preempts: [low, normal]",
        "priorities.high.preempts: + normal (stricter for normal)",
    ),
    ("preempts: [low]", "preempts: []", "priorities.high.preempts: - low (laxer for low)"),
    ("value: 1000", "value: 900", "priorities.high.value: 1000 -> 900 (different)"),
    (
        "limit: 5000",
        "limit: 4000",
        "budgets.vision per month.limit: 5000 GPU-hours -> 4000 GPU-hours (stricter for vision)",
    ),
    (
        "limit: 300",
        "limit: 400",
        "budgets.vision per day.limit: 300 GPU-hours -> 400 GPU-hours (different for vision)",
    ),
    (
        "running: finish",
        "running: leave",
        "budgets.vision per month.running: finish -> leave (stricter for vision)",
    ),
    (
        "- {team: vision, per: day, limit: 300 GPU-hours, kind: soft}\n",
        "",
        "budgets.vision per day: gone (different for vision)",
    ),
    ('to: "07:00"', 'to: "06:00"', "windows.off-peak.to: 07:00 -> 06:00 (different)"),
    ("thu, fri]", "thu]", "windows.off-peak.days: - fri (stricter)"),
    ("[mon, tue", "[tue, mon", ""),
    ("  running: leave", "  running: finish", "windows.off-peak.running: leave -> finish (laxer)"),
    ("minimum_run: 30m", "minimum_run: 10m", "preemption.minimum_run: 30m -> 10m (stricter)"),
    ("deadline: 20m", "deadline: 1200s", ""),
    ("notice: epoch", "notice: step", "preemption.notice: epoch -> step (stricter)"),
    ("times: 3", "times: 2", "preemption.at_most.times: 3 -> 2 (laxer)"),
    ("lead_time: 20m", "lead_time: 1h", "bookings.lead_time: 20m -> 1h (laxer)"),
    ("at_most_share: 50%", "at_most_share: 25%", "bookings.at_most_share: 50% -> 25% (stricter)"),
    ('models: ["yolov8m*"]', 'models: ["yolo11m*"]', "images.yolo:m-cu124.models: "),
)


@pytest.mark.parametrize(("old", "new", "words"), CHANGES, ids=[new for _, new, _ in CHANGES])
def test_a_change_is_told_in_words(tmp_path: Path, old: str, new: str, words: str) -> None:
    """Layout, order and other ways to write the same are none."""
    assert old in TEXT
    found = differences(policy(tmp_path, TEXT), policy(tmp_path, TEXT.replace(old, new, 1)))
    lines = [str(each) for each in found]
    if not words:
        assert lines == []
    else:
        assert all(line.startswith(words) for line in lines)
        assert lines


def test_cards_that_come_and_go_are_told_once(tmp_path: Path) -> None:
    """And not for each of their fields; the order of those that stay is told if it changed."""
    text = TEXT.replace("name: h100-80\n", "name: h100\n").replace("h100-80: 4", "h100: 4")
    lines = difference_lines(differences(policy(tmp_path, TEXT), policy(tmp_path, text)))
    assert [line for line in lines if line.startswith("cards")] == [
        "cards.h100-80: gone (everybody loses)",
        "cards.h100: new (everybody gains)",
    ]
    begin, middle, end = (TEXT.index(each) for each in ("- name: a100", "- name: h100", "teams:"))
    turned = TEXT[:begin] + TEXT[middle:end] + TEXT[begin:middle] + TEXT[end:]
    assert difference_lines(differences(policy(tmp_path, TEXT), policy(tmp_path, turned))) == [
        "cards: a100-40, h100-80 -> h100-80, a100-40 (different)"
    ]


def test_nothing_is_said_to_have_changed_if_nothing_has(tmp_path: Path) -> None:
    """In words, and as a document."""
    one = policy(tmp_path, TEXT)
    assert difference_lines(differences(one, one)) == ["Nothing changed in meaning."]
    assert json.loads(differences_json(())) == {
        "schema": "gpuwarden.policy-differences/v1",
        "changes": [],
    }
