"""The fleet of the simulation: 64 cards in 8 hosts, four teams, and their policy."""

from __future__ import annotations

import dataclasses
from typing import Final

from gpuwarden.scheduling.policies import Policy
from gpuwarden.scheduling.preemption_terms import Pool
from gpuwarden.scheduling.slots import Slot
from gpuwarden.yaml_files import load_located

HOSTS: Final = 8
CARDS_PER_HOST: Final = 8
CARDS: Final = HOSTS * CARDS_PER_HOST
KIND: Final = "a100-40"
BEGIN: Final = 1_767_567_600.0
"""Monday, 2026-01-05 00:00 in Berlin: no clock is changed in the month that follows."""
DAY: Final = 86_400.0
HOUR: Final = 3_600.0
POLICY: Final = """\
version: 1
timezone: Europe/Berlin
engine: local
cards:
- {name: a100-40, model: NVIDIA A100-SXM4-40GB, memory: 40GiB, count: 64}
teams:
- {name: vision, users: [ana], quota: {a100-40: 24}, borrow: {a100-40: 40}, share: 3}
- {name: robotics, users: [bo], quota: {a100-40: 16}, borrow: {a100-40: 32}, share: 2}
- {name: speech, users: [cy], quota: {a100-40: 16}, borrow: {a100-40: 32}, share: 2}
- {name: students, users: [di], quota: {a100-40: 8}, borrow: {a100-40: 40}, share: 1}
priorities:
- {name: low, value: 10}
- {name: normal, value: 100, preempts: [low], default: true}
- {name: high, value: 1000, preempts: [low, normal]}
windows:
- {name: off-peak, from: "20:00", to: "08:00", running: leave}
preemption:
  minimum_run: 30m
  notice: epoch
  deadline: 20m
  back_off: 30m
  at_most: {times: 3, per: 24h}
bookings: {lead_time: 20m, longest: 1d, ahead: 90d, no_show_after: 30m, at_most_share: 50%}
"""


def policy(**parts: object) -> Policy:
    """The fleet's policy.

    Args:
        parts: keys of the file that are otherwise; None leaves one out.
    """
    root = load_located(POLICY).root
    if root is None:
        raise ValueError("the policy is no YAML")
    document = root.data() | parts
    return Policy.model_validate({key: value for key, value in document.items() if value})


def pools() -> dict[Pool, int]:
    """Every host with its cards."""
    return {Pool(KIND, f"node{number}"): CARDS_PER_HOST for number in range(1, HOSTS + 1)}


def bookings(days: float) -> list[Slot]:
    """What is booked: a course each Wednesday, a robot's test stand twice a week.

    Args:
        days: from the beginning on.
    """
    weekly = [
        Slot("course", "students", "di", 8, KIND, 2 * DAY + 10 * HOUR, 2 * DAY + 12 * HOUR, 1200.0),
        Slot("stand", "robotics", "bo", 8, KIND, DAY + 14 * HOUR, DAY + 18 * HOUR, 1200.0),
        Slot("stand", "robotics", "bo", 8, KIND, 3 * DAY + 14 * HOUR, 3 * DAY + 18 * HOUR, 1200.0),
    ]
    found = [
        dataclasses.replace(
            each,
            id=f"{each.id}.{week}.{int(each.start // DAY)}",
            start=BEGIN + each.start + week * 7 * DAY,
            end=BEGIN + each.end + week * 7 * DAY,
        )
        for week in range(int(days // 7) + 1)
        for each in weekly
    ]
    return [slot for slot in found if slot.end <= BEGIN + days * DAY]
