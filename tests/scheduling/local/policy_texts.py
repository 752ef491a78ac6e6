"""Policies of lab boxes, as their owners write them."""

from __future__ import annotations

import copy
from typing import Any

from gpuwarden.scheduling.policies import Policy

_BOX: dict[str, Any] = {
    "version": 1,
    "timezone": "Europe/Berlin",
    "engine": "local",
    "cards": [{"name": "a100", "model": "NVIDIA A100", "memory": "40GiB", "count": 4}],
    "teams": [
        {"name": "vision", "users": ["ana"], "quota": {"a100": 2}, "borrow": {"a100": 2}},
        {"name": "nlp", "users": ["bo"], "quota": {"a100": 2}, "borrow": {"a100": 2}},
    ],
    "priorities": [
        {"name": "low", "value": 10},
        {"name": "normal", "value": 100},
        {"name": "high", "value": 1000, "preempts": ["low"]},
    ],
    "windows": [
        {"name": "nights", "from": "20:00", "to": "07:00", "running": "leave"},
        {"name": "evenings", "from": "18:00", "to": "22:00", "running": "finish"},
    ],
    "preemption": {
        "minimum_run": "10m",
        "notice": "epoch",
        "deadline": "20m",
        "back_off": "30m",
        "at_most": {"times": 3, "per": "24h"},
    },
    "bookings": {
        "lead_time": "15m",
        "longest": "7d",
        "ahead": "90d",
        "no_show_after": "30m",
        "at_most_share": "50%",
    },
}


def document(**changes: Any) -> dict[str, Any]:
    """The policy of a box of four cards as a document, with other parts; None leaves one out."""
    said = {**copy.deepcopy(_BOX), **changes}
    return {key: each for key, each in said.items() if each is not None}


def box(**changes: Any) -> Policy:
    """The same as a policy."""
    return Policy.model_validate(document(**changes))
