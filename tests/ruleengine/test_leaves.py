"""Leave requests of a scheduler: taken on or refused, followed to the proof, taken back."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.ruleengine.engines import World, running
from tests.ruleengine.planners import AS, HOST, LIMITS, TOKENS, becomes, body, planning
from tests.ruleengine.reclaim.scenes import JOB, OTHER_NODE, Scene
from tests.ruleengine.reclaim.test_softer_acts import passing
from tests.ruleengine.test_api import check
from tests.ruleengine.worlds import NODE, Job

from gpuwarden.agent_api import Action
from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.leave_guards import REFUSALS
from gpuwarden.ruleengine.leave_records import LeaveState

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]


def test_from_the_request_to_the_proof_every_step_is_told_with_its_time(servers: World) -> None:
    """Signed, delivered, answered, saved, left, free; the platform is never told to end it."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with planning(scene) as client:
            answer = await client.post("/v1/leaves", json=body())
            description = (await client.get("/v1/openapi.json")).json()
            check(description, "/v1/leaves", "post", answer)
            assert answer.status_code == 202
            name = answer.json()["id"]
            told = await becomes(client, name, "waiting")
            assert list(told["steps"]) == ["notified"]
            (request,) = scene.nodes.asked(Action.REQUEST_LEAVE)
            assert (request.at, request.then, request.grace) == ("epoch", "requeue", 600.0)
            assert request.reason == "priority: high-1 of team speech goes first"
            assert (request.run_id, request.job_id) == ("run-1", JOB)
            job, now = scene.world.fleet.jobs[0], scene.world.clock.wall()
            job.answered = {"received": now + 1, "saving": now + 2, "leaving": now + 3}
            job.saved = now + 2.5
            await scene.world.tick()
            scene.nodes.holds[HOST] = False
            told = await becomes(client, name, "left")
            assert told["steps"] == {
                "notified": 1_800_000_001.0,
                "acknowledged": now + 1,
                "saved": now + 2.5,
                "left": 1_800_000_009.0,
                "freed": 1_800_000_010.0,
            }
            assert scene.scheduler.calls == []
            kinds = ["leave_authorised", "leave_watched", "leave_asked", "leave_left"]
            assert [kind for kind in scene.world.kinds(JOB) if kind in kinds] == kinds
            metrics = scene.world.told()
            step = f'gpuwarden_receipt_timestamp_seconds{{job_id="{JOB}",step="freed"}}'
            assert metrics[step] == 1_800_000_010.0
            assert metrics['gpuwarden_leaves_total{cause="priority",outcome="left"}'] == 1
            assert metrics["gpuwarden_leaves_open"] == 0

    asyncio.run(story())


def test_a_repeated_request_is_answered_and_not_made_again(servers: World) -> None:
    """Whoever lost the answer asks with the same key; another order under it is refused."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with planning(scene) as client:
            answers = await asyncio.gather(
                *(client.post("/v1/leaves", json=body()) for _ in range(4))
            )
            assert {answer.status_code for answer in answers} == {202}
            assert len({answer.json()["id"] for answer in answers}) == 1
            await becomes(client, answers[0].json()["id"], "waiting")
            other = await client.post("/v1/leaves", json=body(then="hold"))
            assert (other.status_code, other.json()["error"]) == (409, "key_reused")
            again = await client.post("/v1/leaves", json=body(key="pre-2"))
            assert (again.status_code, again.json()["error"]) == (409, "already_asked")
            # Keys are whose they are.
            theirs = await client.post("/v1/leaves", json=body(), headers=AS["other"])
            assert theirs.json()["error"] == "already_asked"
            assert len(scene.nodes.asked(Action.REQUEST_LEAVE)) == 1

    asyncio.run(story())


def test_a_run_names_its_job_and_two_that_claim_it_name_none(servers: World) -> None:
    """A scheduler knows the run; the attempt is the engine's to find."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with planning(scene) as client:
            wrong = await client.post("/v1/leaves", json=body(run_id="run-9"))
            assert (wrong.status_code, wrong.json()["error"]) == (409, "other_run")
            none = await client.post("/v1/leaves", json=body(job_id="", run_id="run-9"))
            assert (none.status_code, none.json()["error"]) == (404, "unknown_job")
            answer = await client.post("/v1/leaves", json=body(job_id="", run_id="run-1"))
            assert answer.json()["job_id"] == JOB
        scene.world.fleet.jobs.append(
            Job("proc-2", uuid="GPU-7", run={"run_id": "run-2"}, utilization=0.9)
        )
        scene.world.fleet.jobs.append(
            Job("proc-3", uuid="GPU-8", run={"run_id": "run-2"}, utilization=0.9)
        )
        async with planning(scene, LIMITS.replace("50%", "100%")) as client:
            twice = await client.post("/v1/leaves", json=body(job_id="", run_id="run-2", key="k"))
            assert (twice.status_code, twice.json()["error"]) == (409, "two_jobs")
            claimed = await client.post("/v1/leaves", json=body(job_id="proc-2", key="k"))
            assert (claimed.status_code, claimed.json()["error"]) == (409, "no_run")
            metrics = scene.world.told()
            # Of this life of the engine: the first two were refused by the one before.
            reasons = ("other_run", "two_jobs", "no_run", "kept")
            counts = [
                metrics[f'gpuwarden_leave_refusals_total{{reason="{reason}"}}']
                for reason in reasons
            ]
            assert counts == [0, 1, 1, 0]
            assert metrics['gpuwarden_leaves_total{cause="booking",outcome="unheeded"}'] == 0

    asyncio.run(story())


def test_every_reason_of_a_refusal_is_told_of() -> None:
    """The table of docs/operations.md names the reasons that the metric begins with, and these."""
    page = (ROOT / "docs" / "operations.md").read_text()
    table = page.split("| Refused | When |", 1)[1].split("\n\n", 1)[0]
    named = set()
    for row in table.splitlines()[2:]:
        named |= set(re.findall(r"`(\w+)`", row.split("|")[1]))
    assert named == REFUSALS


def _dark(scene: Scene) -> None:
    scene.world.fleet.nodes[NODE] = False


def _skewed(scene: Scene) -> None:
    scene.world.fleet.skew = 60.0


def _blind(scene: Scene) -> None:
    scene.world.fleet.down = True


def _killed(scene: Scene) -> None:
    (scene.world.folder / "halt").touch()


def _paused(scene: Scene) -> None:
    scene.world.engine.pauses.begin(by="root", role="admin", reason="an upgrade", seconds=None)


def _whitelisted(scene: Scene) -> None:
    scene.world.rules(
        whitelist="whitelist:\n- {match: {user: alice}, rules: [idle-held], reason: thesis, "
        "approved_by: ops, expires: 2099-01-01T00:00:00+00:00}\n"
    )


def _spoiled(scene: Scene) -> None:
    (scene.world.folder / "rules.yaml").write_text("version: 7\n")


def _being_written(scene: Scene) -> None:
    path = scene.world.folder / "rules.yaml"
    path.write_text(path.read_text() + "# more is to come\n")


def _unreachable(scene: Scene) -> None:
    scene.world.agent.silent = True


def _no_run(scene: Scene) -> None:
    scene.world.fleet.jobs[0].run = {}


def _gone(scene: Scene) -> None:
    scene.world.fleet.jobs = []


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        (_dark, 409, "facts_incomplete"),
        (_skewed, 409, "facts_incomplete"),
        (_blind, 503, "no_facts"),
        (_killed, 409, "kill_switch"),
        (_paused, 409, "paused"),
        (_whitelisted, 409, "protected"),
        (_spoiled, 409, "bad_files"),
        (_being_written, 409, "changing_files"),
        (_unreachable, 503, "agent_unreachable"),
        (_no_run, 409, "no_run"),
        (_gone, 404, "unknown_job"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_whatever_stops_an_end_stops_a_leave(
    servers: World, change: Callable[[Scene], None], status: int, word: str
) -> None:
    """Nothing is sent, nothing is written, and the scheduler is told why."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with planning(scene) as client:
            change(scene)
            # Facts of the last tick are too old by now.
            scene.world.clock.pass_(6.0)
            answer = await client.post("/v1/leaves", json=body())
            assert (answer.status_code, answer.json()["error"]) == (status, word)
            assert scene.world.engine.leaves.store.newest(9) == []
            assert scene.world.agent.requests == []

    asyncio.run(story())


def test_an_engine_that_has_just_started_asks_nobody(servers: World) -> None:
    """Before its first tick, and until it has seen the fleet for long enough."""
    scene = Scene.of(servers)

    async def story() -> None:
        scene.world.web = LIMITS
        async with running(scene.world) as world:
            app = EngineApp(
                world.engine,
                world.hop,
                notify_token=None,
                operator_token=None,
                ticket_key=None,
                tokens=TOKENS,
            )
            transport = httpx.ASGITransport(app=app.starlette())
            async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
                answer = await client.post("/v1/leaves", json=body(), headers=AS["planner"])
                assert (answer.status_code, answer.json()["error"]) == (409, "settling")

    asyncio.run(story())


def test_a_keep_protects_from_a_scheduler_as_well(servers: World) -> None:
    """Until its time is over."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with planning(scene) as client:
            with scene.world.engine.ledger.transaction() as db:
                now = scene.world.clock.wall()
                db.execute(
                    "INSERT INTO keeps (rule_id, job_id, run_id, role, by, reason, seconds, "
                    "granted_at, until) VALUES ('idle-held', 'proc-0', 'run-1', 'owner', 'alice', "
                    "'mine', 60, ?, ?)",
                    (now, now + 60),
                )
            kept = await client.post("/v1/leaves", json=body())
            assert (kept.status_code, kept.json()["error"]) == (409, "kept")
            await scene.world.tick(5)
            assert (await client.post("/v1/leaves", json=body())).status_code == 202

    asyncio.run(story())


def test_limits_hold_however_a_scheduler_asks(servers: World) -> None:
    """At once, within the hour, for one run; asking and taking back is no way around them."""
    scene = Scene.of(servers)

    async def story() -> None:
        fleet = scene.world.fleet
        fleet.jobs += [
            Job(f"proc-{n}", uuid=f"GPU-{n}", run={"run_id": f"r-{n}"}) for n in range(10, 13)
        ]
        async with planning(scene) as client:

            async def ask(job: str, key: str) -> tuple[int, str]:
                answer = await client.post("/v1/leaves", json=body(job_id=job, key=key))
                return answer.status_code, answer.json().get("error", answer.json().get("id"))

            names = [(await ask(job, f"a-{job}"))[1] for job in (JOB, "proc-10")]
            assert await ask("proc-11", "b") == (429, "share_of_running")
            for name in names:
                await client.delete(f"/v1/leaves/{name}")
                await becomes(client, name, "withdrawn")
            status, again = await ask(JOB, "c")
            assert status == 202
            await client.delete(f"/v1/leaves/{again}")
            await becomes(client, again, "withdrawn")
            assert await ask(JOB, "d") == (429, "limit_per_run_per_day")
            for job in ("proc-11", "proc-12"):
                status, name = await ask(job, f"e-{job}")
                assert status == 202
                await client.delete(f"/v1/leaves/{name}")
                await becomes(client, name, "withdrawn")
            assert await ask("proc-12", "f") == (429, "limit_per_hour")
            late = await client.post(
                "/v1/leaves", json=body(job_id="proc-12", key="g", deadline_seconds=1801)
            )
            assert (late.status_code, late.json()["error"]) == (409, "deadline")

    asyncio.run(story())


def test_without_a_limit_in_engine_yaml_nobody_is_asked(servers: World) -> None:
    """Nothing that costs a job its place has a default."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with planning(scene, "") as client:
            answer = await client.post("/v1/leaves", json=body())
            assert (answer.status_code, answer.json()["error"]) == (403, "closed")

    asyncio.run(story())


def test_who_may_ask_and_who_sees_what(servers: World) -> None:
    """Schedulers and operators ask; owners see what concerns them; a scheduler sees no jobs."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with planning(scene) as client:
            for name, status in (("alice", 403), ("bob", 403), ("planner", 202)):
                answer = await client.post("/v1/leaves", json=body(), headers=AS[name])
                assert answer.status_code == status
            leave = answer.json()["id"]
            for name, status in (
                *(("alice", 200), ("bob", 404), ("olga", 200), ("root", 200)),
                *(("planner", 200), ("other", 404)),
            ):
                seen = await client.get(f"/v1/leaves/{leave}", headers=AS[name])
                assert (name, seen.status_code) == (name, status)
                listed = (await client.get("/v1/leaves", headers=AS[name])).json()["leaves"]
                assert [item["id"] for item in listed] == ([leave] if status == 200 else [])
            assert (await client.get("/v1/jobs")).json()["jobs"] == []
            keep = {"job_id": JOB, "rule": "idle-held", "for": "1h", "reason": "mine"}
            assert (await client.post("/v1/keeps", json=keep)).status_code == 404
            assert (await client.get("/v1/audit")).status_code == 403
            pause = await client.post("/v1/enforcement/pause", json={"reason": "x"})
            assert pause.status_code == 403
            for name, status in (("alice", 403), ("other", 404), ("olga", 200)):
                back = await client.delete(f"/v1/leaves/{leave}", headers=AS[name])
                assert (name, back.status_code) == (name, status)
            no = await client.post("/v1/leaves", json=body(), headers={"Authorization": ""})
            assert no.status_code == 401

    asyncio.run(story())


def test_what_is_taken_back_is_cancelled_at_the_node(servers: World) -> None:
    """The trainer goes on, and may be asked another time."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with planning(scene) as client:
            name = (await client.post("/v1/leaves", json=body())).json()["id"]
            await becomes(client, name, "waiting")
            for _ in range(2):
                assert (await client.delete(f"/v1/leaves/{name}")).status_code == 200
            told = await becomes(client, name, "withdrawn")
            assert told["why"] == "taken back by planner"
            assert len(scene.nodes.asked(Action.CANCEL)) == 1
            assert (await client.delete(f"/v1/leaves/{name}")).json()["state"] == "withdrawn"

    asyncio.run(story())


@pytest.mark.parametrize("change", [_killed, _paused], ids=["kill-switch", "pause"])
def test_whoever_stops_enforcement_calls_standing_leaves_back(
    servers: World, change: Callable[[Scene], None]
) -> None:
    """A leave costs a job its place: "nothing is ended" means that it stays."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with planning(scene) as client:
            name = (await client.post("/v1/leaves", json=body())).json()["id"]
            await becomes(client, name, "waiting")
            change(scene)
            await scene.world.tick()
            told = await becomes(client, name, "withdrawn")
            assert "kill switch" in told["why"] or "paused" in told["why"]
            assert scene.nodes.asked(Action.CANCEL)

    asyncio.run(story())


def test_a_job_that_stays_beyond_its_deadline_is_told_of_and_not_asked_again(
    servers: World,
) -> None:
    """Nobody ends it; the scheduler takes another."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with planning(scene) as client:
            name = (await client.post("/v1/leaves", json=body())).json()["id"]
            await becomes(client, name, "waiting")
            await scene.world.tick(43)
            told = await becomes(client, name, "unheeded")
            assert list(told["steps"]) == ["notified"]
            assert scene.nodes.asked(Action.CANCEL)
            again = await client.post("/v1/leaves", json=body(key="pre-2"))
            assert again.json()["error"] == "already_asked"
            assert scene.scheduler.calls == []

    asyncio.run(story())


def test_of_a_job_that_left_without_proof_is_said_what_was_seen(servers: World) -> None:
    """It has left; that its memory is free nobody has seen."""
    scene = Scene.of(servers)
    scene.nodes.unproven[HOST] = "driver_silent"

    async def story() -> None:
        async with planning(scene) as client:
            name = (await client.post("/v1/leaves", json=body())).json()["id"]
            await becomes(client, name, "waiting")
            scene.nodes.holds[HOST] = False
            await scene.world.tick(43)
            told = await becomes(client, name, "left")
            assert set(told["steps"]) == {"notified", "left"}
            assert "does not prove" in told["why"]

    asyncio.run(story())


def test_a_job_on_two_nodes_has_left_when_both_say_so(servers: World) -> None:
    """One of them is not the job."""
    scene = Scene.of(servers, NODE, OTHER_NODE)

    async def story() -> None:
        async with planning(scene) as client:
            name = (await client.post("/v1/leaves", json=body())).json()["id"]
            await becomes(client, name, "waiting")
            scene.nodes.holds[HOST] = False
            await asyncio.sleep(0.2)
            assert (await client.get(f"/v1/leaves/{name}")).json()["state"] == "waiting"
            assert "left" not in (await client.get(f"/v1/leaves/{name}")).json()["steps"]
            scene.nodes.holds["localhost"] = False
            told = await becomes(client, name, "left")
            assert {"left", "freed"} <= set(told["steps"])

    asyncio.run(story())


def test_a_trainer_that_cannot_be_reached_is_undeliverable_and_may_be_asked_later(
    servers: World,
) -> None:
    """A pod without the folder, say: the scheduler is told at once, and takes another."""
    scene = Scene.of(servers)
    scene.nodes.delivers = False

    async def story() -> None:
        async with planning(scene) as client:
            name = (await client.post("/v1/leaves", json=body())).json()["id"]
            told = await becomes(client, name, "undeliverable")
            assert told["steps"] == {}
            scene.nodes.delivers = True
            again = await client.post("/v1/leaves", json=body(key="pre-2"))
            assert again.status_code == 202

    asyncio.run(story())


def test_a_restarted_engine_goes_on_where_it_was(servers: World) -> None:
    """The trainer is asked once, by whichever life of the engine; the proof comes to the second."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with planning(scene) as client:
            name = (await client.post("/v1/leaves", json=body())).json()["id"]
            await becomes(client, name, "waiting")
        async with planning(scene) as client:
            scene.nodes.holds[HOST] = False
            told = await becomes(client, name, "left")
            assert {"notified", "left", "freed"} <= set(told["steps"])
            assert len(scene.nodes.asked(Action.REQUEST_LEAVE)) == 1

    asyncio.run(story())


def test_a_rule_that_ends_the_job_overtakes_its_leave(servers: World) -> None:
    """One request at a time: the rule's own stands, and the leave's is not taken back over it."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with planning(scene) as client:
            limit = {"deadline_seconds": 1800}
            name = (await client.post("/v1/leaves", json=body(**limit))).json()["id"]
            await becomes(client, name, "waiting")
            scene.world.fleet.jobs[0].utilization = 0.0
            for _ in range(80):
                if scene.world.engine.ledger.job_decisions(JOB):
                    break
                await scene.world.tick()
            told = await becomes(client, name, "overtaken")
            assert "idle-held" in told["why"]
            assert scene.nodes.asked(Action.CANCEL) == []
            leave = scene.world.engine.leaves.store.get(name)
            assert leave is not None
            assert leave.state is LeaveState.OVERTAKEN
            await passing(scene.world, lambda: "end terminate" in scene.scheduler.calls)
            assert scene.scheduler.calls.count("end terminate") == 1

    asyncio.run(story())


def test_of_a_job_whose_node_went_dark_nobody_says_that_it_left_or_stayed(servers: World) -> None:
    """Its cards are not given away on a guess."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with planning(scene) as client:
            name = (await client.post("/v1/leaves", json=body())).json()["id"]
            await becomes(client, name, "waiting")
            scene.world.fleet.nodes[NODE] = False
            scene.world.agent.silent = True
            await scene.world.tick(43)
            told = await becomes(client, name, "unheeded")
            assert set(told["steps"]) == {"notified"}
            assert "nobody knows whether it is still there" in told["why"]

    asyncio.run(story())
