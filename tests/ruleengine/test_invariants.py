"""The twelve invariants of the design, on a whole engine.

Their pure halves are tested with guards, cases, evaluation and signals.
Each test breaks exactly one thing while a job is due, and sees that nothing is ended for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.ruleengine.engines import RULES, TICK, World, running
from tests.ruleengine.worlds import Job

from gpuwarden.agent_api import Outcome
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.ledger import LedgerUnusable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from gpuwarden.agent_api import ActionRequest

LONG_AGO = 1_799_990_000.0
PROTECTED = (
    "whitelist:\n- {match: {user: alice}, rules: [idle-held], reason: demo, approved_by: ops, "
    "expires: 2099-01-01T00:00:00+00:00}\n"
)


@contextlib.asynccontextmanager
async def due(servers: World) -> AsyncIterator[World]:
    """A world in which only the kill switch keeps proc-1 from its end, and then does not."""
    (servers.folder / "halt").touch()
    async with running(servers) as world:
        await world.until(CaseState.DUE)
        (world.folder / "halt").unlink()
        yield world


def more_jobs(world: World, *owners: str, since: int = 2) -> None:
    """Idle jobs proc-2, proc-3, ... on cards of their own."""
    world.fleet.jobs += [
        Job(f"proc-{number}", user=owner, uuid=f"GPU-{number}", activity={"cpu": LONG_AGO})
        for number, owner in enumerate(owners, start=since)
    ]


# -- 1. Data that is old, partial, mostly dark or of clocks that differ


def _dark(world: World) -> None:
    for number in range(3, 9):
        world.fleet.nodes[f"127.0.0.{number}:9835"] = True
    world.fleet.nodes["127.0.0.3:9835"] = False


def _skewed(world: World) -> None:
    world.fleet.skew = 5.5


def _down(world: World) -> None:
    world.fleet.down = True


def _slow(world: World) -> None:
    """Prometheus answers so late that the facts are older than two scrapes."""
    asked = world.fleet.queries

    def delay() -> None:
        if world.fleet.queries == asked + 1:
            world.clock.pass_(10.5)

    world.fleet.before_answer = delay


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_dark, {"dark_nodes", "facts_incomplete"}),
        (_skewed, {"clock_skew", "facts_incomplete"}),
        (_slow, {"stale_facts", "late_tick"}),
        (_down, {"no_facts"}),
    ],
)
def test_nothing_is_ended_on_doubtful_data(
    servers: World, spoil: Callable[[World], None], why: set[str]
) -> None:
    """1: a due job stays while a tenth of the nodes is dark, clocks differ, or facts are old."""

    async def story() -> None:
        async with due(servers) as world:
            spoil(world)
            await world.tick()
            assert world.agent.requests == []
            assert world.why() == why

    asyncio.run(story())


# -- 3. On disk before it takes effect


def test_a_decision_is_on_disk_when_the_agent_hears_of_it(servers: World) -> None:
    """3: another reader of the file sees decision, case and audit at the moment of the request."""
    seen: list[tuple[str, str, str]] = []

    def look(action: ActionRequest) -> None:
        with contextlib.closing(sqlite3.connect(servers.folder / "ledger.sqlite")) as other:
            (decision,) = other.execute(
                "SELECT state FROM decisions WHERE id=?", (action.decision_id,)
            ).fetchone()
            (case,) = other.execute("SELECT state FROM cases").fetchone()
            (event,) = other.execute("SELECT kind FROM events ORDER BY id DESC LIMIT 1").fetchone()
            seen.append((decision, case, event))

    servers.agent.on_action = look

    async def story() -> None:
        async with due(servers) as world:
            await world.tick()

    asyncio.run(story())
    assert seen == [("authorised", "authorised", "authorised")]


def test_a_recipient_is_on_disk_before_the_message_leaves(servers: World) -> None:
    """3: a crash right after Slack took it still knows whose proof is missing."""
    seen: list[tuple[str, str]] = []
    answer = servers.slack._answer

    def look(method: str, request: object) -> tuple[int, bytes]:
        with contextlib.closing(sqlite3.connect(servers.folder / "ledger.sqlite")) as other:
            seen.extend(other.execute("SELECT recipient, state FROM notices").fetchall())
        return answer(method, request)  # type: ignore[arg-type]

    servers.slack._answer = look

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)

    asyncio.run(story())
    assert seen == [("U0ALICE01", "pending")]


def test_a_decision_that_cannot_be_written_is_not_sent(servers: World) -> None:
    """3: a disk that takes nothing more ends the engine, with a remedy, and not the job."""

    async def story() -> None:
        async with due(servers) as world:

            def fill() -> None:
                world.fleet.before_answer = None
                world.engine.ledger._db.execute("PRAGMA query_only=ON")

            def asked() -> None:
                world.fleet.before_answer = fill

            world.agent.on_node = asked
            with pytest.raises(LedgerUnusable, match="Free space on its disk"):
                await world.tick()
            assert world.agent.requests == []
            assert world.state() is CaseState.DUE
            assert world.engine.ledger.open_decisions() == []

    asyncio.run(story())


# -- 4. The deadline is that of the last required recipient's proof


def test_a_recipient_who_comes_up_later_starts_the_notice_anew(servers: World) -> None:
    """4: an address that the directory adds must be reached too, and its proof starts the time."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            stored = world.engine.cases.get("idle-held", "proc-1")
            assert stored is not None
            stage = "moderate-notify:enforce"
            both = [("slack", "U0ALICE01"), ("email", "alice@example.org")]
            world.engine.ledger.require(
                stored.id, stage, both, channels=["slack", "email"], time=world.clock.wall()
            )
            await world.tick(60)
            assert world.agent.requests == []
            assert world.state() is CaseState.DETECTED
            assert "notice_open" in world.kinds()

    asyncio.run(story())


# -- 5. Everything is read again right before the act


def _whitelisted(world: World) -> None:
    world.rules(whitelist=PROTECTED)


def _unreadable(world: World) -> None:
    world.rules(whitelist=PROTECTED.replace("reason: demo, ", ""))


def _killed(world: World) -> None:
    (world.folder / "halt").touch()


def _observed(world: World) -> None:
    world.rules("observe")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_whitelisted, {"protected", "not_confirmed"}),
        (_unreadable, {"bad_files"}),
        (_killed, {"kill_switch"}),
        (_observed, {"mode"}),
        (_down, {"not_confirmed"}),
    ],
)
def test_what_changes_after_the_guards_first_word_still_counts(
    servers: World, change: Callable[[World], None], why: set[str]
) -> None:
    """5: whitelist, kill switch, mode and facts are read again after the agent has answered."""

    async def story() -> None:
        async with due(servers) as world:
            world.agent.on_node = lambda: change(world)
            await world.tick()
            assert world.agent.requests == []
            # In the mode observe the promise to the owner is void as well: more may be said.
            assert world.why() >= why

    asyncio.run(story())


def test_a_file_that_is_half_written_ends_nobody(servers: World) -> None:
    """5: a rule without what stands at its end is a rule too, for a tick that comes in between.

    A file that was really changed is believed by the tick that finds it unchanged.
    """
    path = servers.folder / "rules.yaml"
    half = path.read_text()
    whole = half + "  only_if_waiting: {promql: vector(0), above: 0}\n"

    async def story() -> None:
        async with due(servers) as world:
            path.write_text(whole)
            await world.tick(2)
            assert "changing_files" not in world.why()
            path.write_text(half)
            await world.tick()
            assert world.why() == {"changing_files"}
            path.write_text(whole)
            await world.tick(2)
            assert world.why() == {"waiting_unknown"}
            # The other half comes during the last look at the case.
            path.write_text(half)
            await world.tick()
            world.agent.on_node = lambda: path.write_text(f"{half}# still writing\n") and None
            await world.tick()
            assert world.why() == {"changing_files"}
            assert world.agent.requests == []
            world.agent.on_node = None
            await world.tick()
            assert len(world.agent.requests) == 1

    asyncio.run(story())


def test_a_keep_that_comes_in_during_the_last_look_counts(servers: World) -> None:
    """5: the owner was granted time while the facts were being gathered for the last time."""

    async def story() -> None:
        async with due(servers) as world:

            def grant() -> None:
                world.fleet.before_answer = None
                stored = world.engine.cases.get("idle-held", "proc-1")
                rule = world.engine.rulebook.rule("idle-held")
                assert stored is not None
                assert rule is not None
                world.engine.keep(
                    stored, rule, role="owner", by="alice", reason="mine", seconds=600
                )

            def asked() -> None:
                world.fleet.before_answer = grant

            world.agent.on_node = asked
            await world.tick()
            assert world.agent.requests == []
            assert "kept" in world.why()

    asyncio.run(story())


# -- 6. Once, whoever asks


def test_a_refused_repeat_does_not_make_the_first_try_undone(servers: World) -> None:
    """6: the answer was lost, and the repeat came too late: only the agent's report counts."""
    servers.agent.lose_answers = 1
    servers.agent.refuse_repeats = True

    async def story() -> None:
        async with due(servers) as world:
            await world.tick()
            await world.settled()
            (decision,) = world.engine.ledger.job_decisions("proc-1")
            assert decision.state == "verified"
            assert world.agent.ended == ["proc-1"]
            assert len(world.agent.requests) == 2

    asyncio.run(story())


def test_two_rules_end_one_attempt_once(servers: World) -> None:
    """6: the second rule's case is due as well, and finds the attempt taken."""
    text = RULES.replace("MODE", "enforce").replace("WHITELIST", "")
    head, _, rule = text.partition("- id: idle-held")
    (servers.folder / "rules.yaml").write_text(
        f"{head}- id: idle-held{rule}\n- id: idle-too{rule}".replace("per_tick: 1", "per_tick: 5")
    )
    servers.agent.finish = False

    async def story() -> None:
        async with due(servers) as world:
            await world.tick(5)
            assert len(world.agent.requests) == 1
            states = {s.case.rule_id: s.case.state for s in world.engine.cases.all()}
            assert sorted(states.values()) == ["acting", "due"]

    asyncio.run(story())


# -- 7. Limits


def test_limits_survive_a_restart_and_slide(servers: World) -> None:
    """7: what an earlier life ended counts for the hour, and not for longer."""
    more_jobs(servers, "bob")
    path = servers.folder / "rules.yaml"
    path.write_text(path.read_text().replace("per_hour: 3", "per_hour: 1"))

    async def story() -> None:
        async with due(servers) as world:
            await world.tick()
            await world.settled()
            (first,) = world.agent.ended
            world.fleet.jobs = [job for job in world.fleet.jobs if job.job_id != first]
        (second,) = (job.job_id for job in servers.fleet.jobs)
        async with running(servers) as world:
            await world.tick(10)
            assert world.why(second) == {"limit_per_hour"}
            assert world.agent.ended == [first]
            # One tick before the hour is over it holds still.
            await world.tick(1, 3600 - 11 * TICK)
            await world.tick(4)
            assert world.agent.ended == [first, second]

    asyncio.run(story())


def test_who_has_waited_longest_goes_first(servers: World) -> None:
    """7: the limits defer the others, whatever they are called."""
    servers.fleet.jobs = [Job("proc-9", user="bob", uuid="GPU-9", activity={"cpu": LONG_AGO})]

    async def story() -> None:
        (servers.folder / "halt").touch()
        async with running(servers) as world:
            while world.state("proc-9") is not CaseState.DUE:
                await world.tick()
            world.fleet.jobs.insert(0, Job("proc-1", activity={"cpu": LONG_AGO}))
            await world.until(CaseState.DUE)
            (world.folder / "halt").unlink()
            await world.tick()
            assert world.agent.ended == ["proc-9"]
            assert world.why() == {"limit_per_tick"}
            await world.tick()
            assert world.agent.ended == ["proc-9", "proc-1"]

    asyncio.run(story())


# -- 9. Reload


def test_a_reload_keeps_the_cases_of_the_other_rules(servers: World) -> None:
    """9: a rule that is added leaves the clocks of those that were there alone."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            stored = world.engine.cases.get("idle-held", "proc-1")
            assert stored is not None
            path = world.folder / "rules.yaml"
            text = path.read_text()
            path.write_text(text + text.partition("rules:")[2].replace("idle-held", "idle-more"))
            await world.tick()
            after = world.engine.cases.get("idle-held", "proc-1")
            assert after is not None
            assert after.case == msgspec.structs.replace(
                stored.case,
                elapsed=stored.case.elapsed + TICK,
                yes_for=stored.case.yes_for + TICK,
                notice_age=stored.case.notice_age + TICK,
                because=after.case.because,
            )
            assert world.engine.cases.get("idle-more", "proc-1") is not None

    asyncio.run(story())


# -- 10. The platform's own tool


@pytest.mark.parametrize("job_id", ["slurm-c1-4711-0", "pod-0b7f6c1e"])
def test_a_platforms_job_is_never_handed_to_the_agent(servers: World, job_id: str) -> None:
    """10: signals to its processes would go behind the scheduler's back."""
    servers.fleet.jobs[0].job_id = job_id

    async def story() -> None:
        async with running(servers) as world:
            while world.state(job_id) is not CaseState.DUE:
                await world.tick()
            await world.tick(5)
            assert world.why(job_id) == {"platform"}
            assert world.agent.requests == []

    asyncio.run(story())


# -- 11. Reclaimed means gone from NVML


def test_what_is_not_proven_is_not_counted_as_reclaimed(servers: World) -> None:
    """11: neither a success nor freed memory, and the owner is told that it is not proven."""
    servers.agent.outcome = Outcome.INCOMPLETE

    async def story() -> None:
        async with due(servers) as world:
            await world.tick()
            await world.settled()
            await world.tick()
            ledger = world.engine.ledger
            assert ledger.freed_bytes() == 0
            assert ledger.result_counts() == {("idle-held", "terminate", "incomplete"): 1}
            texts = json.dumps(world.alerts.received[-1].json())
            assert "its end could not be proven" in texts
            assert "GPU memory were freed" not in texts

    asyncio.run(story())


# -- 12. Everything down


def test_without_alertmanager_nobody_is_told_and_nothing_is_ended(servers: World) -> None:
    """12: no proof of a notice can come to be; /-/ready says why."""
    servers.alerts_reply["status"] = 503
    servers.forwarding = False

    async def story() -> None:
        async with running(servers) as world:
            await world.tick(80)
            assert world.state() is CaseState.DETECTED
            assert world.agent.requests == []
            (problem,) = world.engine.problems
            assert "no Alertmanager takes the alerts" in problem

    asyncio.run(story())


def test_without_its_agent_a_node_is_left_alone(servers: World) -> None:
    """12: the case stays due, and acts once the agent is back."""
    servers.agent.silent = True

    async def story() -> None:
        async with due(servers) as world:
            await world.tick(3)
            assert world.why() == {"agent_unreachable"}
            assert world.state() is CaseState.DUE
            world.agent.silent = False
            await world.tick()
            assert world.agent.ended == ["proc-1"]

    asyncio.run(story())


def test_a_dead_agent_holds_up_no_other_node(servers: World) -> None:
    """12: all agents are asked at once; one that hangs does not age the facts of the others."""
    more_jobs(servers, "bob")
    servers.fleet.jobs[1].instance = "localhost:9835"
    servers.fleet.nodes["localhost:9835"] = True
    both = threading.Barrier(2, timeout=20)

    async def story() -> None:
        async with due(servers) as world:
            # Each waits for the other: asked one after the other, neither would answer.
            world.agent.on_node = both.wait
            await world.tick()
            (ended,) = world.agent.ended
            (other,) = {"proc-1", "proc-2"} - {ended}
            assert world.why(other) == {"limit_per_tick"}

    asyncio.run(story())


def test_a_rule_that_breaks_ends_nothing_and_stops_no_other(servers: World) -> None:
    """12: an error of ours in one rule costs neither a job nor the engine."""
    text = RULES.replace("MODE", "enforce").replace("WHITELIST", "")
    rule = text.partition("- id: idle-held")[2]
    (servers.folder / "rules.yaml").write_text(f"{text}\n- id: idle-too{rule}")

    async def story() -> None:
        async with due(servers) as world:
            book = world.engine.rulebook
            good = book.rules
            broken, other = good.rules
            broken = broken.model_copy(update={"cold_start": None})
            book.rules = good.model_copy(update={"rules": (broken, other)})
            await world.tick()
            assert world.engine.ticks.outcomes["failed_rule"] == 1
            assert world.why() == {"rule_failed"}
            (request,) = world.agent.requests
            assert "idle-too" in request.reason

    asyncio.run(story())
