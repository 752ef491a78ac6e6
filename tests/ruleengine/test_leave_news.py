"""What the owner of a job that a scheduler asked to leave is told, and reads."""

from __future__ import annotations

import asyncio
import io
from typing import TYPE_CHECKING, Any

from rich.console import Console
from tests.ruleengine.planners import AS, HOST, becomes, body, planning
from tests.ruleengine.reclaim.scenes import JOB, Scene

from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.why_cli import print_document

if TYPE_CHECKING:
    from tests.ruleengine.engines import World


def test_its_owner_reads_who_asked_for_what_and_what_became_of_it(servers: World) -> None:
    """On the job's page and by `gpuwarden why`, also by the run once the job is gone."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with planning(scene) as client:
            name = (await client.post("/v1/leaves", json=body())).json()["id"]
            await becomes(client, name, "waiting")
            page = (await client.get(f"/jobs/{JOB}", headers=AS["alice"])).text
            assert "planner asked it at" in page
            assert "at the end of its epoch" in page
            assert "By now it has not left yet." in page
            scene.nodes.holds[HOST] = False
            await becomes(client, name, "left")
            scene.world.fleet.jobs = []
            await scene.world.tick(2)
            assert (await client.get(f"/v1/jobs/{JOB}", headers=AS["bob"])).status_code == 404
            found = (await client.get(f"/v1/jobs/{JOB}", headers=AS["alice"])).json()
            (leave,) = found["leaves"]
            assert (leave["id"], leave["state"]) == (name, "left")
            matches = (await client.get("/v1/matches/run-1", headers=AS["alice"])).json()
            assert [row["job_id"] for row in matches["matches"]] == [JOB]
            nobody = (await client.get("/v1/matches/run-1", headers=AS["bob"])).json()
            assert nobody["matches"] == []
            told = io.StringIO()
            print_document(Console(file=told, width=1000), found, everything=False)
            assert "because of priority: high-1 of team speech goes first" in told.getvalue()
            assert "  freed at " in told.getvalue()

    asyncio.run(story())


def test_its_owner_is_told_and_what_is_taken_back_is_no_news(servers: World) -> None:
    """Once it is delivered; by whom, until when, why, and that nothing has to be done."""
    scene = Scene.of(servers)

    def news() -> list[dict[str, Any]]:
        (newest,) = scene.world.alerts.received[-1:]
        kind = "GpuwardenJobLeaving"
        return [item for item in newest.json() if item["labels"]["alertname"] == kind]

    async def story() -> None:
        async with planning(scene) as client:
            name = (await client.post("/v1/leaves", json=body())).json()["id"]
            await becomes(client, name, "waiting")
            await scene.world.tick()
            (alert,) = news()
            assert (alert["labels"]["user"], alert["labels"]["team"]) == ("alice", "vision")
            told = alert["annotations"]["description"]
            assert "planner asked your job" in told
            assert "the end of its epoch, by" in told
            assert "high-1 of team speech goes first" in told
            assert "goes on where it was" in alert["annotations"]["next"]
            sent = [item.json()["channel"] for item in scene.world.slack.received]
            assert "U0ALICE01" in sent
            await client.delete(f"/v1/leaves/{name}")
            await becomes(client, name, "withdrawn")
            await scene.world.tick()
            assert all(item["endsAt"] <= rfc3339(scene.world.clock.wall()) for item in news())

    asyncio.run(story())
