"""Lab boxes of two cards under a policy by which preemption needs no hour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.scheduling.local.policy_texts import box

if TYPE_CHECKING:
    from tests.scheduling.local.boxes import LabBox

    from gpuwarden.scheduling.policies import Policy


def quick(**changes: Any) -> Policy:
    """A box of two cards, and terms under which preemption needs no hour."""
    preemption = {
        "minimum_run": "0s",
        "notice": "epoch",
        "deadline": "5m",
        "back_off": "0s",
        "at_most": {"times": 3, "per": "24h"},
    }
    cards = [{"name": "a100", "model": "NVIDIA A100", "memory": "40GiB", "count": 2}]
    teams = [{"name": name, "users": [], "quota": {"a100": 4}} for name in ("vision", "nlp")]
    return box(**{"preemption": preemption, "cards": cards, "teams": teams, **changes})


def trains(lab: LabBox, name: str, entry: str) -> None:
    """Tick until a job has published that it trains."""
    lab.until(lambda: lab.state_of(entry) == "running")
    lab.until((lab.jobs / "jobs" / f"{name}.status.json").exists)
    lab.tick()


def attempts(lab: LabBox) -> list[tuple[str, float]]:
    """(job, start) of every attempt there ever was."""
    return [(each.entry, each.start) for each in lab.driver.usage(0.0, 4e9)]
