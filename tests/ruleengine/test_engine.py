"""The whole loop on owned time: what is found, told, waited for and ended, and what never is."""

from __future__ import annotations

import asyncio

import pytest
from tests.ruleengine.engines import TICK, World, running
from tests.ruleengine.worlds import Job

from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.explain import answer, job_document


def test_an_idle_job_is_found_told_waited_for_ended_and_proven(servers: World) -> None:
    """From the first YES to the proof, every step is in the audit, in its order."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            assert world.agent.requests == []
            for _ in range(60):
                await world.tick()
                if world.agent.requests:
                    break
            await world.settled()
            assert world.state() is CaseState.VERIFIED
            steps = [kind for kind in world.kinds() if kind != "idle_detected"]
            assert steps[:3] == ["detected", "log", "notify"]
            assert steps[3:6] == ["notified", "due", "authorised"]
            assert steps[-1] == "verified"
            (request,) = world.agent.requests
            assert request.job_id == "proc-1"
            assert request.grace == 60.0
            assert request.then == "hold"
            assert [ref.pid for ref in request.seen] == [4711]
            document = job_document(world.engine, "proc-1")
            assert document is not None
            assert "was ended by the rule idle-held" in answer(document)

    asyncio.run(story())


def test_nothing_is_ended_before_both_deadlines_are_over(servers: World) -> None:
    """The decision comes no earlier than `after`, and `notice_delivered_for` after the proof."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            stored = world.engine.cases.get("idle-held", "proc-1")
            assert stored is not None
            while not world.agent.requests:
                await world.tick()
            (authorised,) = [
                event
                for event in world.engine.ledger.events("proc-1")
                if event["kind"] == "authorised"
            ]
            detected, proven = stored.case.detected_at, stored.case.notified_at
            assert detected is not None
            assert proven is not None
            assert float(str(authorised["time"])) >= detected + 8 * 60
            assert float(str(authorised["time"])) >= proven + 5 * 60

    asyncio.run(story())


def test_without_proof_of_the_notice_nothing_is_ended_and_operators_are_told(
    servers: World,
) -> None:
    """Slack's 200 with ok:false is no delivery: the case stays detected, and a page stands."""

    async def story() -> None:
        async with running(servers) as world:
            world.slack_reply["body"] = {"ok": False, "error": "channel_not_found"}
            await world.tick(80)
            assert world.state() is CaseState.DETECTED
            assert world.agent.requests == []
            names = {alert["labels"]["alertname"] for alert in world.alerts.received[-1].json()}
            assert "GpuwardenNoticeUndeliverable" in names
            world.slack_reply["body"] = None
            await world.tick(2)
            assert world.state() is CaseState.NOTIFIED

    asyncio.run(story())


def test_a_user_without_an_address_is_never_ended(servers: World) -> None:
    """Nobody in the directory: no proof is possible, so no end is."""
    servers.fleet.jobs[0].user = "stranger"

    async def story() -> None:
        async with running(servers) as world:
            await world.tick(80)
            assert world.state() is CaseState.DETECTED
            assert world.agent.requests == []
            assert world.slack.received == []

    asyncio.run(story())


@pytest.mark.parametrize("mode", ["observe", "warn"])
def test_only_enforce_ends_jobs(servers: World, mode: str) -> None:
    """In the other modes the end is written down as what would have been done."""
    servers.rules(mode)

    async def story() -> None:
        async with running(servers) as world:
            await world.tick(80)
            assert world.agent.requests == []
            assert "would_terminate" in world.kinds()
            told = bool(world.slack.received)
            assert told is (mode == "warn")

    asyncio.run(story())


def test_a_whitelisted_job_has_no_case(servers: World) -> None:
    """Its verdict says why, so that the page can."""
    servers.rules(
        whitelist="whitelist:\n- {match: {user: alice}, rules: [idle-held], reason: demo, "
        "approved_by: ops, expires: 2099-01-01T00:00:00+00:00}\n"
    )

    async def story() -> None:
        async with running(servers) as world:
            await world.tick(20)
            assert world.state() is None
            document = job_document(world.engine, "proc-1")
            assert document is not None
            assert "protected" in answer(document)
            assert "demo" in answer(document)

    asyncio.run(story())


def test_prometheus_down_changes_nothing_and_an_outage_sends_due_cases_back(
    servers: World,
) -> None:
    """Time without facts does not count, and what was due is judged afresh first."""

    async def story() -> None:
        async with running(servers) as world:
            (world.folder / "halt").touch()
            await world.until(CaseState.DUE)
            before = world.engine.cases.all()
            world.fleet.down = True
            await world.tick(10)
            assert world.engine.cases.all() == before
            assert world.engine.ticks.outcomes["discarded"] == 10
            (world.folder / "halt").unlink()
            world.fleet.down = False
            await world.tick(3)  # by then it is asked again, for all its failures
            assert "postponed" in world.kinds()
            assert world.agent.requests == []
            assert {b.reason for b in world.engine.view.halted} == {"settling"}
            await world.tick(4)
            assert len(world.agent.requests) == 1

    asyncio.run(story())


def test_a_restart_neither_advances_a_deadline_nor_acts_at_once(servers: World) -> None:
    """Elapsed time travels with the case; the time in which the engine was down does not count."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            stored = world.engine.cases.get("idle-held", "proc-1")
            assert stored is not None
        servers.clock.pass_(3600)
        async with running(servers) as world:
            await world.tick()
            again = world.engine.cases.get("idle-held", "proc-1")
            assert again is not None
            assert again.case.elapsed == stored.case.elapsed
            assert again.case.notice_age == stored.case.notice_age
            assert again.case.notified_at == stored.case.notified_at
            assert world.agent.requests == []
            while not world.agent.requests:
                await world.tick()
            assert world.kinds().count("notified") == 1

    asyncio.run(story())


def test_fresh_facts_right_before_the_act_have_the_last_word(servers: World) -> None:
    """The tick saw an idle job; the last look sees it work: it is not ended."""

    async def story() -> None:
        async with running(servers) as world:
            (world.folder / "halt").touch()
            await world.until(CaseState.DUE)
            (world.folder / "halt").unlink()
            world.clock.pass_(TICK)
            asked = world.fleet.queries
            await world.engine._gather()
            per_round = world.fleet.queries - asked
            seen = world.fleet.queries

            def wake_up() -> None:
                if world.fleet.queries - seen > per_round:
                    world.fleet.jobs[0].utilization = 0.9

            world.fleet.before_answer = wake_up
            await world.engine.tick()
            assert world.agent.requests == []
            assert world.why() == {"not_confirmed"}
            assert world.state() is CaseState.NOTIFIED

    asyncio.run(story())


def test_the_kill_switch_stops_everything(servers: World) -> None:
    """While the file exists a due case waits; when it is gone, it does not."""
    (servers.folder / "halt").touch()

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.DUE)
            await world.tick(5)
            assert world.why() == {"kill_switch"}
            assert world.agent.requests == []
            (world.folder / "halt").unlink()
            await world.tick()
            assert len(world.agent.requests) == 1

    asyncio.run(story())


def test_a_keep_moves_the_deadline_and_is_counted_for_life(servers: World) -> None:
    """The deadline moves by what was asked; a restart does not forget it."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            stored = world.engine.cases.get("idle-held", "proc-1")
            rule = world.engine.rulebook.rule("idle-held")
            assert stored is not None
            assert rule is not None
            world.engine.keep(
                stored, rule, role="owner", by="alice", reason="in a meeting", seconds=3600
            )
            await world.tick(100)
            assert world.agent.requests == []
        async with running(servers) as world:
            await world.tick(20)
            assert world.agent.requests == []
            (again,) = world.engine.cases.all()
            outlook = world.engine.teller.outlook(
                again.case, rule, world.engine.view, now=world.clock.wall()
            )
            assert outlook.keeps_used == 1
            for _ in range(200):
                await world.tick()
                if world.agent.requests:
                    break
            assert len(world.agent.requests) == 1

    asyncio.run(story())


def test_a_stricter_rule_does_not_shorten_a_promise(servers: World) -> None:
    """What the notice said holds, also for a rule that was changed since."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            stored = world.engine.cases.get("idle-held", "proc-1")
            assert stored is not None
            path = world.folder / "rules.yaml"
            path.write_text(path.read_text().replace("after: 8m", "after: 2m"))
            left = 8 * 60 - stored.case.elapsed
            await world.tick(int(left / TICK) - 1)
            assert world.agent.requests == []
            await world.tick(3)
            assert len(world.agent.requests) == 1

    asyncio.run(story())


def test_a_bad_file_keeps_the_old_rules_and_ends_nothing_until_it_is_mended(
    servers: World,
) -> None:
    """Reload is all or nothing, and never silent."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            path = world.folder / "rules.yaml"
            good = path.read_text()
            path.write_text(good.replace("do: notify", "do: notfy"))
            await world.tick(40)
            assert world.state() is CaseState.DUE
            assert world.why() == {"bad_files"}
            assert any("notfy" in problem for problem in world.engine.problems)
            path.write_text(good)
            await world.tick()
            assert world.engine.problems == []
            assert len(world.agent.requests) == 1

    asyncio.run(story())


def test_a_rule_that_is_removed_closes_its_cases(servers: World) -> None:
    """Nothing hangs on a rule that is no longer there."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            path = world.folder / "rules.yaml"
            path.write_text(path.read_text().replace("id: idle-held", "id: idle-other"))
            await world.tick()
            assert world.engine.cases.get("idle-held", "proc-1") is None
            assert world.kinds()[-1] == "closed"

    asyncio.run(story())


def test_a_dark_node_freezes_its_cases(servers: World) -> None:
    """UNKNOWN never acts, and its time does not count."""
    servers.fleet.nodes["127.0.0.2:9835"] = True
    servers.fleet.jobs[0].instance = "127.0.0.2:9835"

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            stored = world.engine.cases.get("idle-held", "proc-1")
            assert stored is not None
            world.fleet.nodes["127.0.0.2:9835"] = False
            await world.tick(20)
            frozen = world.engine.cases.get("idle-held", "proc-1")
            assert frozen is not None
            assert frozen.case.elapsed == stored.case.elapsed
            assert world.agent.requests == []
            await world.tick(30)
            assert world.state() is None
            assert world.kinds()[-1] == "closed"

    asyncio.run(story())


def test_one_owner_is_not_hit_twice_within_the_cool_down(servers: World) -> None:
    """The second job of the same owner waits, with the reason."""
    servers.fleet.jobs.append(Job("proc-2", uuid="GPU-2", activity={"cpu": 1_799_990_000.0}))

    async def story() -> None:
        async with running(servers) as world:
            while not world.agent.requests:
                await world.tick()
            await world.settled()
            first = world.agent.requests[0].job_id
            second = "proc-2" if first == "proc-1" else "proc-1"
            world.fleet.jobs = [job for job in world.fleet.jobs if job.job_id == second]
            await world.tick()
            assert "cool_down" in world.why(second)
            await world.tick(45)
            assert [request.job_id for request in world.agent.requests] == [first, second]

    asyncio.run(story())


def test_many_owners_due_at_once_are_taken_for_a_fault_of_the_data(servers: World) -> None:
    """Above the share of running jobs nothing is ended, and the operators are paged."""
    servers.fleet.jobs = [
        Job(
            f"proc-{n}",
            user="alice" if n % 2 else "bob",
            uuid=f"GPU-{n}",
            activity={"cpu": 1_799_990_000.0},
            utilization=0.0 if n <= 6 else 0.9,
        )
        for n in range(1, 21)
    ]
    for number, job in enumerate(servers.fleet.jobs[:6]):
        job.user = f"user{number}"
    users = "".join(f"  user{n}: {{slack: U0USER00{n}}}\n" for n in range(6))
    (servers.folder / "directory.yaml").write_text(f"version: 1\nusers:\n{users}")

    async def story() -> None:
        async with running(servers) as world:
            await world.tick(60)
            assert world.agent.requests == []
            assert {b.reason for b in world.engine.view.halted} == {"share_of_running"}
            names = {alert["labels"]["alertname"] for alert in world.alerts.received[-1].json()}
            assert "GpuwardenEnforcementHalted" in names
            for job in world.fleet.jobs[1:6]:
                job.utilization = 0.9
            await world.tick(3)
            assert [request.job_id for request in world.agent.requests] == ["proc-1"]

    asyncio.run(story())


def test_a_heartbeat_protects_only_within_the_budget(servers: World) -> None:
    """What a job says of itself delays for `trust_for`, once."""
    servers.fleet.jobs[0].activity = {"cpu": 1_799_990_000.0, "heartbeat": 1_800_000_000.0}

    async def story() -> None:
        async with running(servers) as world:
            for _ in range(60):
                world.fleet.jobs[0].activity["heartbeat"] = world.clock.wall() + TICK
                await world.tick()
            assert world.state() is None
            for _ in range(62):
                world.fleet.jobs[0].activity["heartbeat"] = world.clock.wall() + TICK
                await world.tick()
            assert world.state() is not None

    asyncio.run(story())


def test_a_jump_of_the_wall_clock_moves_no_deadline(servers: World) -> None:
    """Elapsed time is measured on the monotonic clock."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            stored = world.engine.cases.get("idle-held", "proc-1")
            assert stored is not None
            world.clock.jump(7200)
            await world.tick(2)
            after = world.engine.cases.get("idle-held", "proc-1")
            assert after is not None
            assert after.case.elapsed <= stored.case.elapsed + 2 * TICK
            assert world.agent.requests == []

    asyncio.run(story())


def test_the_notice_is_sent_once_however_often_it_is_repeated(servers: World) -> None:
    """Resends, repeats and restarts lead to one message per stage and recipient."""

    async def story() -> None:
        async with running(servers) as world:
            (world.folder / "halt").touch()
            await world.tick(40)
        async with running(servers) as world:
            await world.tick(10)
            assert len(world.slack.received) == 1
            text = world.slack.received[0].json()["text"]
            assert "Europe/Berlin" in text
            assert "gpuwarden keep proc-1 --rule idle-held" in text

    asyncio.run(story())


def test_only_the_last_level_of_a_case_fires(servers: World) -> None:
    """A change of level resolves the old alert and fires the new one in one post."""
    servers.agent.finish = False

    async def story() -> None:
        async with running(servers) as world:
            while not world.agent.requests:
                await world.tick()
            posted = world.alerts.received[-1].json()
            now = rfc3339(world.clock.wall())
            levels = {alert["labels"]["level"]: alert["endsAt"] > now for alert in posted}
            assert levels == {"moderate": False, "severe": True}

    asyncio.run(story())


def test_cases_are_frozen_values(servers: World) -> None:
    """A view or a page cannot change a case behind the ledger's back."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.DETECTED)
            stored = world.engine.cases.all()[0]
            with pytest.raises(AttributeError):
                stored.case.elapsed = 1e9  # type: ignore[misc]

    asyncio.run(story())
