"""Policies at random, in order but for what one engine alone may refuse."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from gpuwarden.hours import DAYS
from gpuwarden.scheduling.policies import Policy

ZONES = ("Europe/Berlin", "UTC", "Asia/Shanghai", "America/New_York", "Australia/Lord_Howe")
_WORDS = ("vision", "speech", "nlp", "x", "a-1", "team-of-the-very-long-name-0123456789")
_DURATIONS = st.sampled_from(("1m", "90s", "20m", "1h30m", "7d", "500ms"))


def _some(words: tuple[str, ...] | list[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(words), unique=True, max_size=len(words))


def _lower(words: tuple[str, ...]) -> st.SearchStrategy[list[str]]:
    return _some(words) if words else st.just([])


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A policy as its YAML would be read."""
    cards = [
        {
            "name": f"card-{index}",
            "model": f"NVIDIA {index}",
            "memory": draw(st.sampled_from(("40GiB", "10.5GiB", "80GB", "24576MiB"))),
            "count": draw(st.integers(1, 64)),
            "slurm": {"gres": f"type{index}", "partition": draw(st.sampled_from(("gpu", "big")))},
            "kueue": {"node_labels": {"nvidia.com/gpu.product": f"NVIDIA-{index}"}},
        }
        for index in range(draw(st.integers(1, 3)))
    ]
    names = draw(st.lists(st.sampled_from(_WORDS), min_size=1, max_size=4, unique=True))
    left = {card["name"]: card["count"] for card in cards}
    teams = []
    for index, name in enumerate(names):
        team: dict[str, Any] = {"name": name, "users": [f"u{index}", f"v{index}"], "quota": {}}
        for card in cards:
            if draw(st.booleans()):
                team["quota"][card["name"]] = draw(st.integers(0, left[card["name"]]))
                left[card["name"]] -= team["quota"][card["name"]]
        for key in ("borrow", "lend"):
            if draw(st.booleans()):
                chosen = draw(_some([card["name"] for card in cards]))
                team[key] = {card: draw(st.integers(0, 64)) for card in chosen}
        if draw(st.booleans()):
            team["share"] = draw(st.integers(1, 9))
        teams.append(team)
    classes = ("low", "normal", "high", "urgent")[: draw(st.integers(1, 4))]
    priorities = [
        {
            "name": name,
            "value": 10 * index,
            "preempts": draw(_some(classes[:index]) if index else st.just([])),
        }
        for index, name in enumerate(classes)
    ]
    document: dict[str, Any] = {
        "version": 1,
        "timezone": draw(st.sampled_from(ZONES)),
        "engine": draw(st.sampled_from(("slurm", "kueue", "local"))),
        "cards": cards,
        "teams": teams,
        "priorities": priorities,
        "budgets": draw(_budgets(names)),
        "windows": draw(_windows()),
        "preemption": {
            "minimum_run": draw(_DURATIONS),
            "notice": draw(st.sampled_from(("step", "epoch"))),
            "deadline": draw(_DURATIONS),
            "back_off": draw(_DURATIONS),
            "at_most": {"times": draw(st.integers(1, 9)), "per": draw(_DURATIONS)},
        },
        "images": [
            {
                "name": "yolo:m-cu124",
                "image": "registry.example.com/yolo@sha256:" + "0f" * 32,
                "models": ["yolov8*"],
            }
        ],
    }
    if draw(st.integers(0, 3)) == 0:
        document["slurm"] = {"preempt": "partitions"}
    if draw(st.booleans()):
        document["bookings"] = {
            "lead_time": draw(_DURATIONS),
            "longest": draw(_DURATIONS),
            "ahead": draw(_DURATIONS),
            "no_show_after": draw(_DURATIONS),
            "at_most_share": draw(st.sampled_from(("50%", "100%", "12.5%"))),
        }
    return document


@st.composite
def _budgets(draw: st.DrawFn, teams: list[str]) -> list[dict[str, Any]]:
    found = []
    for team in teams:
        for per in draw(_some(("day", "week", "month"))):
            amount = draw(st.integers(1, 10**6)) / 10
            budget = {"team": team, "per": per, "limit": f"{amount} GPU-hours", "kind": "soft"}
            if draw(st.booleans()):
                running = draw(st.sampled_from(("finish", "leave")))
                budget |= {"kind": "hard", "running": running, "warn_at": ["80%"]}
            found.append(budget)
    return found


@st.composite
def _windows(draw: st.DrawFn) -> list[dict[str, Any]]:
    found = []
    for name in draw(_some(("night", "weekend"))):
        opens, closes = draw(
            st.tuples(st.integers(0, 1439), st.integers(0, 1440)).filter(lambda e: e[0] != e[1])
        )
        days = draw(_some(list(DAYS))) or ["sat"]
        clocks = [f"{each // 60:02d}:{each % 60:02d}" for each in (opens, closes)]
        running = draw(st.sampled_from(("finish", "leave")))
        found.append(
            {"name": name, "days": days, "from": clocks[0], "to": clocks[1], "running": running}
        )
    return found


def policies() -> st.SearchStrategy[Policy]:
    """Policies whose form is right, and that Slurm's partitions alone may be unable to do."""
    return documents().map(Policy.model_validate)
