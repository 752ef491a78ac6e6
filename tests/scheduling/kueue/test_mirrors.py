"""Copies of the cluster go on whatever becomes of watches, and one dead webhook stops nobody."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from tests.scheduling.kueue.clusters import Scene, kueue_policy, scene
from tests.scheduling.kueue.lives import life
from tests.servers import until

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.scheduling.kueue import mirrors, names
from gpuwarden.scheduling.kueue.mirrors import Mirror

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

WEBHOOK = {
    "message": 'Internal error occurred: failed calling webhook "mworkload.kb.io": no endpoints',
    "reason": "InternalError",
    "code": 500,
}


class Ticks:
    """A clock that a test owns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def wall(self) -> float:
        """Unix time."""
        return self.now

    def monotonic(self) -> float:
        """Seconds."""
        return self.now


def followed(found: Scene, clock: Ticks, story: Callable[[Mirror], Awaitable[None]]) -> None:
    """Follow the cohorts of a cluster while a story goes on."""

    async def run() -> None:
        client = found.client()
        mirror = Mirror(
            client,
            names.COHORTS,
            clock=clock,
            changed=lambda: None,
            trim=mirrors.whole,
            pause=0.01,
        )
        task = asyncio.create_task(mirror.run())
        try:
            await when(mirror.current)
            await story(mirror)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.aclose()

    asyncio.run(run())


async def when(condition: Callable[[], bool]) -> None:
    """Wait until something is so, while the loop goes on."""
    await asyncio.to_thread(until, condition)


def test_a_quiet_kind_behind_a_proxy(tmp_path: Path) -> None:
    """Every stream is cut while it is idle: that it is taken up again proves the server."""
    with scene(tmp_path, kueue_policy()) as found:
        clock = Ticks()

        async def story(mirror: Mirror) -> None:
            for _ in range(2):
                clock.now += mirrors.STALE_SECONDS - 1.0
                asked = found.cluster.asked("GET", "/cohorts$")
                found.cluster.cut()
                await when(lambda: found.cluster.asked("GET", "/cohorts$") > asked)  # noqa: B023
                await when(mirror.current)
            clock.now += mirrors.STALE_SECONDS + 1.0
            assert not mirror.current(), "one that is never cut and says nothing is not believed"

        followed(found, clock, story)


def test_a_version_that_is_never_taken_again(tmp_path: Path) -> None:
    """A server that was set back, say: after a few tries everything is listed anew."""
    with scene(tmp_path, kueue_policy()) as found:
        clock = Ticks()
        future = {"message": "Too large resource version: 9999, current: 1", "code": 504}

        async def story(mirror: Mirror) -> None:
            found.cluster.fail("GET", "/cohorts$", 504, times=3, body=future)
            found.cluster.patch("Cohort", "gpuwarden", {"metadata": {"labels": {"a": "b"}}}, None)
            await when(lambda: "a" in mirror.objects()[0]["metadata"]["labels"])
            found.cluster.cut()
            await when(lambda: found.cluster.faults[-1].times == 0)
            found.cluster.patch("Cohort", "gpuwarden", {"metadata": {"labels": {"a": "c"}}}, None)
            await when(lambda: mirror.objects()[0]["metadata"]["labels"]["a"] == "c")
            assert mirror.problem == ""

        followed(found, clock, story)


def test_everything_is_listed_anew_now_and_then(tmp_path: Path) -> None:
    """Whatever a watch has not told is seen then at the latest."""
    with scene(tmp_path, kueue_policy()) as found:
        clock = Ticks()

        async def story(mirror: Mirror) -> None:
            key = next(key for key in found.cluster.store.objects if key[0].kind == "Cohort")
            del found.cluster.store.objects[key]
            clock.now += mirrors.RELIST_SECONDS
            assert len(mirror.objects()) == 1
            found.cluster.cut()
            await when(lambda: mirror.objects() == [])

        followed(found, clock, story)


def test_a_webhook_that_is_down_stops_nobody_else(tmp_path: Path) -> None:
    """What fails is told and comes last in the next round; one in which all fails has failed."""
    teams = [{"name": "vision", "users": ["ana"], "quota": {"a100-40": 4}}]
    with life(tmp_path, kueue_policy(teams=teams), asks=False) as found:
        jobs = [found.run(f"job{index}") for index in range(4)]
        found.scene.time.pass_(100.0)
        high = found.submit("high", "high", gpus=4)
        last = found.workload(jobs[0])["metadata"]["name"]
        path = f"/workloads/(?!{last}$)"
        found.scene.cluster.fail("PATCH", path, 500, times=1000, body=WEBHOOK)
        with pytest.raises(ServiceUnavailable, match="failed calling webhook"):
            found.tick(seconds=6.0)
        found.tick(2, seconds=6.0)
        assert [found.active(job) for job in jobs] == [False, True, True, True]
        assert "refused" in found.codes()
        found.scene.cluster.faults.clear()
        found.tick(4, seconds=6.0)
        assert not any(found.active(job) for job in jobs)
        assert found.active(high)
