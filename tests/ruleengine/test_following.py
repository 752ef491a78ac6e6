"""What `gpuwarden follow` shows of the engine, from the engine's own answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.ruleengine.test_app import asked

from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.trainer import following

if TYPE_CHECKING:
    from tests.ruleengine.engines import World


def test_a_training_is_shown_the_rule_that_it_breaks(servers: World) -> None:
    """Whoever looks at their training sees what is about to happen to it, and when."""

    async def story() -> None:
        async with asked(servers) as (world, client):
            await world.until(CaseState.NOTIFIED)
            listing = (await client.get("/v1/jobs")).json()
            listing["jobs"][0]["run_id"] = "run1"
            assert following.jobs_of(listing, "run1") == ["proc-1"]
            assert following.jobs_of(listing, "run2") == []
            said = following.verdicts((await client.get("/v1/jobs/proc-1")).json())
            assert said[0] == "engine: job proc-1 breaks 1 rule"
            assert "idle-held (enforce): notified, nothing happens before 20" in said[1]

    asyncio.run(story())
