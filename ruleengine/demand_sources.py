"""Asking every platform that a rule names who waits there, while the facts are gathered.

Whatever goes wrong leaves the answer unknown, so that nothing is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import structlog

from gpuwarden.errors import ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from gpuwarden.ruleengine.conditions import Waiting
    from gpuwarden.ruleengine.demands import Demand
    from gpuwarden.ruleengine.model import RuleSet
    from gpuwarden.ruleengine.verdicts import FleetFacts

log = structlog.get_logger(__name__)


class DemandSource(Protocol):
    """A platform that knows who waits."""

    async def demand(self, *, fits: bool) -> Demand:
        """Who waits now, first in line first.

        Args:
            fits: whether also what is idle and what running jobs hold is wanted.

        Raises:
            ServiceUnavailable: not known.
        """


async def with_demands(
    facts: Awaitable[FleetFacts], rules: RuleSet, sources: Mapping[str, DemandSource]
) -> FleetFacts:
    """Facts with the demand that the rules ask for, asked at the same time.

    Args:
        facts: being gathered.
        rules: those that will be judged.
        sources: by the key of `only_if_waiting`; one that engine.yaml does not name is missing.
    """
    asking: dict[str, list[Waiting]] = {}
    for rule in rules.rules:
        waiting = rule.only_if_waiting
        if waiting is not None and waiting.platform:
            asking.setdefault(waiting.platform, []).append(waiting)
    if not asking:
        return await facts
    asked = asyncio.gather(
        *(_answer(sources.get(name), name, wanted) for name, wanted in asking.items())
    )
    try:
        found = await facts
        answers = await asked
    finally:
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
    numbers, failed = dict(found.numbers), dict(found.failed)
    demands: dict[str, Demand] = {}
    for (name, wanted), answer in zip(asking.items(), answers, strict=True):
        for waiting in wanted:
            if isinstance(answer, str):
                failed[waiting.key] = answer
            else:
                numbers[waiting.key] = float(answer.count(waiting.place))
        if not isinstance(answer, str):
            demands[name] = answer
    return replace(found, numbers=numbers, failed=failed, demands=demands)


async def _answer(source: DemandSource | None, name: str, wanted: list[Waiting]) -> Demand | str:
    """The demand of a platform, or why it is not known."""
    if source is None:
        return f"engine.yaml has no `{name}`, so that its queue cannot be asked"
    try:
        return await source.demand(fits=any(waiting.fit for waiting in wanted))
    except ServiceUnavailable as error:
        log.warning("who waits is not known", platform=name, error=str(error))
        return str(error)
