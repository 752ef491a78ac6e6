"""Drills in a running engine: followed to the proof, limited apart, and no place to hide."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.ruleengine.engines import World, running
from tests.ruleengine.test_pauses import ADMIN, OPERATOR, asked
from tests.ruleengine.test_trials import ended, idle

if TYPE_CHECKING:
    from tests.ruleengine.worlds import Job

NODE = "127.0.0.1"
DRILLS = f"""
drill:
  rule: drill
  user: dora
  per_hour: 1
  per_day: 5
  nodes: [{NODE}, n-other]
  every: 1h
"""
RULE = """
- id: drill
  description: A rehearsal
  mode: enforce
  target: job
  match: {user: dora, run_id: "drill-.*"}
  cold_start: 0s
  ignore_phases: {}
  when:
    all:
    - {signal: gpu_utilization, agg: max, window: 60s, at_most: 5%, gpus: all}
    - {signal: gpu_memory, agg: min, window: 60s, above: 1MiB, gpus: all}
  for: 15s
  clear_after: 30s
  stages:
  - {level: moderate, after: 0s, do: notify}
  - {level: severe, after: 30s, do: terminate, notice_delivered_for: 15s, grace: 15s,
     max_work_lost: 12h}
"""


def rehearsing(world: World) -> None:
    """Give the world drills, and somebody who runs them."""
    world.web = DRILLS
    path = world.folder / "rules.yaml"
    path.write_text(path.read_text() + RULE)
    people = world.folder / "directory.yaml"
    people.write_text(people.read_text() + "  dora: {slack: U0DORA001}\n")


def victim(world: World, number: int = 1, user: str = "dora") -> Job:
    """A drill's victim that has just begun."""
    run = {"run_id": f"drill-n-{number}", "model": "drill"}
    started = world.clock.wall() - 5.0
    return idle(f"proc-d{number}", user, 10 + number, run=run, started=started)


def written(world: World) -> list[tuple[int, str | None]]:
    """Number and result of every drill in the ledger, the newest first."""
    return list(world.engine.ledger.rows("SELECT id, result FROM drills ORDER BY id DESC"))


def test_a_drill_is_followed_from_the_first_sample_to_the_proof(servers: World) -> None:
    """Each step has its time; what is freed and ended counts for no report of the fleet."""
    rehearsing(servers)

    async def story() -> None:
        async with asked(servers) as (world, client):
            world.fleet.jobs = [victim(world)]
            for _ in range(40):
                await world.tick()
                if world.agent.requests:
                    break
            await world.settled()
            world.fleet.jobs = []
            await world.tick()
            document = (await client.get("/v1/drills")).json()
            (node, other) = document["nodes"]
            assert (document["problem"], node["node"], other["node"]) == ("", NODE, "n-other")
            drill = node["last"]
            assert (drill["result"], drill["run_id"], drill["by"]) == ("passed", "drill-n-1", "")
            assert [step["step"] for step in drill["steps"]][-1] == "proven"
            assert node["last_success"] == drill["finished_at"]
            assert (other["last"], other["overdue"]) == (None, False)
            told = world.told()
            assert told[f'gpuwarden_drill_result{{node="{NODE}",result="passed"}}'] == 1
            assert told["gpu_released_success_total"] == told["gpu_memory_freed_bytes_total"] == 0
            assert "drill" in world.kinds("proc-d1")
            # An hour later the next one is overdue.
            world.clock.pass_(3700)
            assert (await client.get("/v1/drills")).json()["nodes"][0]["overdue"]

    asyncio.run(story())


def test_drills_eat_no_limit_of_real_jobs_and_real_ends_none_of_theirs(servers: World) -> None:
    """Real ends: one in an hour. Drills: one in an hour. Both happen; a second of each waits."""
    servers.rules()
    path = servers.folder / "rules.yaml"
    path.write_text(path.read_text().replace("per_hour: 3", "per_hour: 1"))
    rehearsing(servers)

    async def story() -> None:
        async with running(servers) as world:
            world.fleet.jobs += [idle("proc-2", "bob", 2), victim(world), victim(world, 2)]
            await world.tick(70)
            await world.settled()
            ends = {d.job_id: d.rule_id for d in world.engine.ledger.ends_since(0.0)}
            assert len(ends) == 2
            assert sorted(ends.values()) == ["drill", "idle-held"]
            blocks = world.engine.view.blocks
            second = next(job for job in ("proc-d1", "proc-d2") if job not in ends)
            assert {b.reason for b in blocks["drill", second]} == {"limit_per_hour"}
            waiting = next(job for job in ("proc-1", "proc-2") if job not in ends)
            assert {b.reason for b in blocks["idle-held", waiting]} == {"limit_per_hour"}

    asyncio.run(story())


def test_a_real_job_that_calls_itself_a_drill_is_a_job_like_any_other(servers: World) -> None:
    """It is found, told and ended by its own rule, and no drill is written down."""
    rehearsing(servers)

    async def story() -> None:
        async with running(servers) as world:
            world.fleet.jobs = [
                idle("proc-1", "alice", 1, run={"run_id": "drill-n-1", "model": "drill"})
            ]
            await ended(world)
            (decision,) = world.engine.ledger.ends_since(0.0)
            assert (decision.rule_id, decision.user) == ("idle-held", "alice")
            assert world.engine.cases.get("drill", "proc-1") is None
            assert written(world) == []
            assert world.told()["gpu_released_success_total"] == 1

    asyncio.run(story())


def test_a_rule_that_could_strike_others_is_limited_like_every_rule(servers: World) -> None:
    """Its match is no longer pinned to the user: drills are refused, and the problem is told."""
    rehearsing(servers)
    path = servers.folder / "rules.yaml"
    path.write_text(path.read_text().replace("user: dora, run_id", 'user: "dora|alice", run_id'))

    async def story() -> None:
        async with asked(servers) as (world, client):
            await world.tick(2)
            assert "must match exactly the user dora" in world.engine.drills.problem
            assert not world.engine.drills.apart("drill")
            body = {"node": NODE, "reason": "a try"}
            answer = await client.post("/v1/drills", json=body, headers=ADMIN)
            assert (answer.status_code, answer.json()["error"]) == (409, "drill_rule")

    asyncio.run(story())


def test_a_drill_that_was_asked_for_takes_the_next_victim_of_its_node(servers: World) -> None:
    """One at a time, by an admin alone, and only on a node that is there."""
    rehearsing(servers)

    async def story() -> None:
        async with asked(servers) as (world, client):
            await world.tick(2)
            body = {"node": f"{NODE}:9835", "reason": "after the upgrade"}
            assert (await client.post("/v1/drills", json=body)).status_code == 401
            answer = await client.post("/v1/drills", json=body, headers=OPERATOR)
            assert answer.status_code == 403
            unknown = await client.post("/v1/drills", json={**body, "node": "n9"}, headers=ADMIN)
            assert unknown.status_code == 404
            first = (await client.post("/v1/drills", json=body, headers=ADMIN)).json()
            again = await client.post("/v1/drills", json=body, headers=ADMIN)
            assert (again.status_code, again.json()["error"]) == (409, "drill_runs")
            world.fleet.jobs.append(victim(world))
            await world.tick(3)
            found = (await client.get(f"/v1/drills/{first['id']}")).json()
            assert (found["job_id"], found["by"]) == ("proc-d1", "root")
            assert found["steps"][0]["ended"]
            assert len(written(world)) == 1
            # The victim is taken away before its end: that is a result, too.
            world.fleet.jobs = world.fleet.jobs[:1]
            await world.tick(8)
            found = (await client.get(f"/v1/drills/{first['id']}")).json()
            assert found["result"] == "gone"

    asyncio.run(story())


def test_silence_after_a_request_is_a_result(servers: World) -> None:
    """No victim comes: after twice the budget the drill is silent, over a restart too."""
    rehearsing(servers)

    async def story() -> None:
        async with asked(servers) as (world, client):
            await world.tick(2)
            body = {"node": NODE, "reason": "a try"}
            assert (await client.post("/v1/drills", json=body, headers=ADMIN)).status_code == 201
            await world.tick(3)
        async with running(servers) as world:
            await world.tick(8)
            ((_, result),) = written(world)
            assert result == "silent"
            assert world.told()[f'gpuwarden_drill_result{{node="{NODE}",result="silent"}}'] == 1

    asyncio.run(story())


def test_a_node_is_due_by_its_host_also_where_it_is_written_with_its_port(servers: World) -> None:
    """Its drills are written down by host: else they would count for no schedule."""
    rehearsing(servers)
    servers.web = servers.web.replace("n-other", "'n-other:9835'")

    async def story() -> None:
        async with running(servers) as world:
            assert sorted(world.engine.drills.due()) == [NODE, "n-other"]

    asyncio.run(story())


def test_a_node_that_goes_dark_does_not_end_a_drill(servers: World) -> None:
    """Nothing is known of its victim then; the drill goes on when the node is back."""
    rehearsing(servers)

    async def story() -> None:
        async with running(servers) as world:
            world.fleet.jobs = [victim(world)]
            await world.tick(2)
            ((drill, _),) = written(world)
            world.fleet.nodes = dict.fromkeys(world.fleet.nodes, False)
            await world.tick(8)
            assert written(world)[0][1] is None
            world.fleet.nodes = dict.fromkeys(world.fleet.nodes, True)
            await world.tick(2)
            assert written(world)[0][0] == drill

    asyncio.run(story())
