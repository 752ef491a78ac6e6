"""Rules on trial in a running engine: who is ended, what puts it back to warn, and who lifts that.

By the hash of the rule `idle-held`, alice is beyond the first 67 % of the owners and bob within
the first 64 %.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import World, running
from tests.ruleengine.test_pauses import ADMIN, OPERATOR, asked
from tests.ruleengine.worlds import Job

from gpuwarden.ruleengine import tickets
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.ledger_upkeep import prune

if TYPE_CHECKING:
    import httpx

RULE = "idle-held"


def trial(world: World, share: str = "100%", appeals: int = 2, regrets: int = 1) -> None:
    """Put the world's rule on trial."""
    path = world.folder / "rules.yaml"
    back = f"{{appeals: {appeals}, regrets: {regrets}, within: 7d}}"
    text = re.sub(r"^  canary: .*\n", "", path.read_text(), flags=re.MULTILINE)
    path.write_text(
        text.replace(
            "  target: job\n",
            f"  target: job\n  canary: {{share: {share}, back_to_warn: {back}}}\n",
        )
    )


def idle(job_id: str, user: str, number: int, **fields: object) -> Job:
    """Another idle job of a user, on a card of its own."""
    return dataclasses.replace(
        Job(job_id, user=user, uuid=f"GPU-{number}", activity={"cpu": 1_799_990_000.0}),
        **fields,  # type: ignore[arg-type]
    )


async def ended(world: World) -> None:
    """Tick until the first job is ended, and that is proven."""
    for _ in range(120):
        if world.agent.requests:
            break
        await world.tick()
    await world.settled()
    assert world.state() is CaseState.VERIFIED


async def appeal(
    client: httpx.AsyncClient, job: str = "proc-1", headers: dict[str, str] | None = None
) -> httpx.Response:
    """Object to the end of a job."""
    body = {"job_id": job, "rule": RULE, "reason": "it waits for a colleague"}
    return await client.post("/v1/appeals", json=body, headers=headers or OPERATOR)


def test_outside_of_the_share_the_owner_is_warned_and_told_of_no_end(servers: World) -> None:
    """The notice is that of warn; the case never becomes due, and the page says why."""
    trial(servers, "50%")

    async def story() -> None:
        async with asked(servers) as (world, client):
            await world.until(CaseState.NOTIFIED)
            notice = world.slack.received[-1].json()
            assert "ended" not in str(notice).replace("not ended", "")
            assert "on trial" not in str(notice)
            await world.tick(60)
            assert world.state() is CaseState.NOTIFIED
            assert world.agent.requests == []
            (rule,) = (await client.get("/v1/jobs/proc-1")).json()["rules"]
            assert rule["mode"] == "warn"
            assert rule["case"]["not_before"] is None
            reasons = {b["reason"]: b["sentence"] for b in rule["why_not"]}
            assert reasons["canary"] == (
                "the rule is on trial with 50 % of the owners; this owner's jobs are outside"
            )
            assert "would_terminate" in world.kinds()

    asyncio.run(story())


def test_inside_of_the_share_the_job_is_ended_as_without_a_canary(servers: World) -> None:
    """Announced, due, authorised and proven."""
    trial(servers)

    async def story() -> None:
        async with running(servers) as world:
            await ended(world)
            notice = world.slack.received[0].json()["text"]
            assert "This rule is on trial: if the end would be wrong, object" in notice
            assert {"notified", "due", "authorised", "verified"} <= set(world.kinds())

    asyncio.run(story())


def test_one_owner_with_all_jobs_does_not_make_the_trial_larger_than_its_share(
    servers: World,
) -> None:
    """Bob is in the share of 65 %; with one job found, one end would be more than 65 % of it."""
    trial(servers, "65%")
    servers.fleet.jobs = [idle("proc-1", "bob", 1)]

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.DUE)
            await world.tick(5)
            assert world.why() == {"canary_share"}
            # A second job that is found, whoever it is of, leaves room for one end.
            world.fleet.jobs.append(idle("proc-2", "alice", 2))
            await world.tick(40)
            await world.settled()
            assert [d.job_id for d in world.engine.ledger.ends_since(0.0)] == ["proc-1"]
            assert world.state("proc-2") is CaseState.NOTIFIED

    asyncio.run(story())


def test_appeals_of_enough_owners_put_the_rule_back_over_restarts_and_changes(
    servers: World,
) -> None:
    """One owner counts once; after the second owner's appeal nothing is ended any more."""
    trial(servers)
    servers.fleet.jobs.append(idle("proc-2", "bob", 2))
    servers.fleet.jobs.append(idle("proc-3", "alice", 3))

    async def story() -> None:
        async with asked(servers) as (world, client):
            await world.until(CaseState.NOTIFIED)
            for job in ("proc-1", "proc-3"):
                answer = (await appeal(client, job)).json()
                assert (answer["first"], answer["held_back"]) == (True, "")
            again = (await appeal(client)).json()
            assert (again["first"], again["held_back"]) == (False, "")
            answer = (await appeal(client, "proc-2")).json()
            assert answer["held_back"].startswith("the rule has fallen back to warn since ")
            assert "2 owner's appeals within 7d" in answer["held_back"]
            appeals = 'gpuwarden_objections_total{kind="appeal",rule="idle-held"}'
            assert world.told()[appeals] == 3
            await world.tick(60)
            assert world.agent.requests == []
            # The owners are told anew, since no end comes any more.
            assert world.case().mark("moderate-notify").mode == "warn"  # type: ignore[union-attr]
            series = world.told()
            assert series['gpuwarden_rule_held_back{reason="appeals",rule="idle-held"}'] == 1
            objections = 'gpuwarden_canary_objections{kind="appeal",rule="idle-held"}'
            assert series[objections] == 2
        # A restart, then the canary taken out of the file: still an admin's word is missing.
        async with asked(servers) as (world, client):
            await world.tick(40)
            world.rules()
            await world.tick(20)
            (rule,) = (await client.get("/v1/rules")).json()["rules"]
            assert (rule["mode"], rule["canary"]) == ("enforce", "")
            assert rule["held_back"]
            assert world.agent.requests == []
            assert {b.reason for b in world.engine.view.halted} == set()

    asyncio.run(story())


def test_only_an_admin_lets_the_rule_enforce_again_and_old_appeals_count_no_more(
    servers: World,
) -> None:
    """An operator may not; afterwards the same trial goes on, and ends the job."""
    trial(servers, appeals=1)

    async def story() -> None:
        async with asked(servers) as (world, client):
            await world.until(CaseState.NOTIFIED)
            await appeal(client)
            path, body = "/v1/enforcement/resume", {"rule": RULE, "reason": "was a test"}
            assert (await client.post(path, json=body, headers=OPERATOR)).status_code == 403
            held = (await client.get("/v1/enforcement", headers=OPERATOR)).json()["held_back"]
            assert [(item["rule"], item["reason"]) for item in held] == [(RULE, "appeals")]
            answer = await client.post(path, json=body, headers=ADMIN)
            assert (answer.status_code, answer.json()["held_back"]) == (200, [])
            assert (await client.post(path, json=body, headers=ADMIN)).status_code == 409
            await ended(world)
            (state,) = (await client.get("/v1/trials")).json()["trials"]
            assert (state["appeals"], state["appeals_allowed"], state["held_back"]) == (0, 1, "")

    asyncio.run(story())


def test_an_end_whose_run_is_back_on_a_card_is_regretted_by_the_engine_itself(
    servers: World,
) -> None:
    """The owner starts the same run again within the hour: the rule only warns from then on."""
    trial(servers)
    run = {"run_id": "coco-7", "model": "yolov8m"}
    servers.fleet.jobs = [idle("proc-1", "bob", 1, run=run)]

    async def story() -> None:
        async with running(servers) as world:
            await ended(world)
            world.fleet.jobs = [idle("proc-9", "bob", 1, run=run)]
            await world.tick()
            (held,) = world.engine.trials.held
            assert (held.rule_id, held.reason) == (RULE, "regrets")
            noted = [e for e in world.engine.ledger.events("proc-1") if e["kind"] == "regret"]
            assert noted[0]["detail"]["reason"] == (  # type: ignore[index]
                "the run coco-7 is back on a card as proc-9"
            )
            await world.tick(120)
            assert len(world.agent.requests) == 1

    asyncio.run(story())


def test_an_operator_regrets_an_end_once_and_an_owner_may_not(servers: World) -> None:
    """Of a decision that ended nothing, or that does not exist, nobody can."""
    trial(servers, regrets=2)

    async def story() -> None:
        async with asked(servers) as (world, client):
            await ended(world)
            (decision,) = world.engine.ledger.job_decisions("proc-1")
            body = {"decision_id": decision.id, "reason": "the owner was at lunch"}
            assert (await client.post("/v1/regrets", json=body)).status_code == 401
            first = (await client.post("/v1/regrets", json=body, headers=OPERATOR)).json()
            again = (await client.post("/v1/regrets", json=body, headers=OPERATOR)).json()
            assert (first["first"], again["first"]) == (True, False)
            assert first["held_back"] == again["held_back"] == ""
            unknown = {"decision_id": "none", "reason": "x"}
            answer = await client.post("/v1/regrets", json=unknown, headers=OPERATOR)
            assert answer.status_code == 404

    asyncio.run(story())


def test_an_owners_keep_counts_as_an_appeal_and_an_operators_does_not(servers: World) -> None:
    """Who puts the end of their own job off objects to it."""
    trial(servers, appeals=1)

    async def story() -> None:
        async with asked(servers) as (world, client):
            await world.until(CaseState.NOTIFIED)
            body = {"job_id": "proc-1", "rule": RULE, "for": "30m", "reason": "a demo"}
            answer = await client.post("/v1/keeps", json=body, headers=OPERATOR)
            assert answer.status_code == 201
            assert world.engine.trials.held == ()
            stored = world.engine.cases.get(RULE, "proc-1")
            rule = world.engine.rulebook.rule(RULE)
            assert stored is not None
            assert rule is not None
            world.engine.keep(stored, rule, role="owner", by="alice", reason="mine", seconds=60)
            assert [held.reason for held in world.engine.trials.held] == ["appeals"]

    asyncio.run(story())


def test_nobody_appeals_for_a_job_that_the_rule_does_not_touch(servers: World) -> None:
    """Nor by another job's ticket, nor to a rule that only tells."""
    trial(servers, "50%")

    async def story() -> None:
        async with asked(servers) as (world, client):
            assert (await appeal(client, "proc-7")).status_code == 404
            await world.until(CaseState.NOTIFIED)
            answer = await appeal(client)
            assert (answer.status_code, answer.json()["error"]) == (409, "not_enforced")
            ticket = tickets.issue(b"k" * 32, RULE, "proc-2")
            body = {"job_id": "proc-1", "rule": RULE, "reason": "x", "ticket": ticket}
            answer = await client.post("/v1/appeals", json=body)
            assert (answer.status_code, answer.json()["error"]) == (403, "bad_ticket")
            assert world.engine.ledger.rows("SELECT * FROM objections") == []

    asyncio.run(story())


@pytest.mark.parametrize("table", ["canary_holds", "objections"])
def test_a_trial_that_cannot_be_read_only_warns(servers: World, table: str) -> None:
    """A table that is gone: a due job is not ended, and the reason is told."""
    trial(servers)

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            with world.engine.ledger.transaction() as db:
                db.execute(f"ALTER TABLE {table} RENAME TO away")
            await world.tick(60)
            assert world.agent.requests == []
            assert world.engine.trials.rule_for(world.case()).mode == "warn"  # type: ignore[union-attr]
            (block,) = world.engine.trials.objections(world.case())
            assert block.reason == "held_back"
            assert "cannot be read" in block.sentence
            assert block.sentence in world.engine.problems

    asyncio.run(story())


def test_objections_are_forgotten_only_once_they_can_count_for_no_trial(servers: World) -> None:
    """They outlive the shortest retention by far; a case's own audit does not."""

    async def story() -> None:
        async with running(servers) as world:
            trials, ledger = world.engine.trials, world.engine.ledger
            for job in ("old", "young"):
                trials.regret(RULE, job, job, by="olga", role="operator", reason="x")
                world.clock.pass_(2 * 86400)
            now = world.clock.wall()
            # Four and two days have passed since.
            for days, left in ((60, ["old", "young"]), (87, ["young"]), (89, [])):
                prune(ledger, now=now + days * 86400, keep=7 * 86400.0, jobs=(), runs=())
                assert [job for (job,) in ledger.rows("SELECT job_id FROM objections")] == left

    asyncio.run(story())
