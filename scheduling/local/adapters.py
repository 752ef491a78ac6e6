"""The single host behind the port to engines: its object is the policy that its daemon goes by.

There is nothing to render: the daemon reads the policy itself. What can differ is the file and the
policy in force, since a daemon keeps the old one until it is told, and while the new one is wrong.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from gpuwarden import __version__
from gpuwarden.budget_terms import GPU_HOURS
from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.scheduling.daemon_clients import daemon_of_environment
from gpuwarden.scheduling.engines import By, EngineObject, FoundObject, Remark, Rendering
from gpuwarden.scheduling.policies import policy_hash
from gpuwarden.scheduling.policy_texts import as_written, flat, policy_yaml

if TYPE_CHECKING:
    from gpuwarden.scheduling.engines import Step
    from gpuwarden.scheduling.policies import Policy

_KIND, _NAME = "policy", "in force"
_NOTE = (
    "write it to the file that the daemon of this machine was started with, then `systemctl reload "
    "gpuwarden-scheduler`"
)
_INIT_NOTE = (
    "write it to /etc/gpuwarden/policy.yaml, then `systemctl enable --now gpuwarden-scheduler` "
    "(deploy/systemd)"
)


def adapter(_policy: Policy) -> LocalAdapter:
    """The adapter of this machine's daemon, or of the one that GPUWARDEN_SCHEDULER_URL names."""
    return LocalAdapter()


class LocalAdapter:
    """Compares a policy with the one that a daemon goes by; it changes nothing."""

    def render(self, policy: Policy, *, version: str | None, init: bool = False) -> Rendering:
        """The policy itself."""
        text = policy_yaml(policy)
        # What the file has no more is in no field of it; the hash tells that something is gone.
        values = {"hash": policy_hash(policy)} | flat(as_written(policy))
        found = EngineObject(_KIND, _NAME, values, text, By.HAND, _NOTE)
        if init:
            found = EngineObject("file", "policy.yaml", {}, text, By.HAND, _INIT_NOTE)
        known = version or __version__
        return Rendering("local", known, policy_hash(policy), (found,), _remarks(policy))

    async def version(self) -> str:
        """This program's: the daemon is a part of it."""
        return __version__

    async def read(self, _wanted: Rendering) -> tuple[FoundObject, ...]:
        """The policy in force."""
        document = await asyncio.to_thread(daemon_of_environment().ask, "GET", "/v1/policy")
        values: Any = document.get("policy")
        if not isinstance(values, dict):
            raise ServiceUnavailable("the scheduler's answer names no policy")
        there = {"hash": str(document.get("hash"))} | flat(values)
        return (FoundObject(_KIND, _NAME, there, marked=False),)

    async def carry_out(self, step: Step) -> None:
        """Refused: the file is its owner's."""
        raise RefusedAction("by_hand", f"{step.kind} {step.name} is put in place by hand")

    async def aclose(self) -> None:
        """Nothing is kept open."""


def _remarks(policy: Policy) -> tuple[Remark, ...]:
    """What of a policy this engine does not do."""
    money = "it counts GPU-hours and no money: people are told of this budget, and nothing waits"
    images = "it starts no containers: a job runs in the environment of its program"
    return (
        *(
            Remark(f"budgets[{index}]", money)
            for index, budget in enumerate(policy.budgets)
            if budget.unit != GPU_HOURS
        ),
        *(Remark(f"images[{index}]", images) for index in range(len(policy.images))),
    )
