"""An engine among stand-ins in one process: many lives and accidents in little time.

The stand-ins keep the contracts of their ports and watch every end that reaches a node: what must
be true then is checked right there, against the world as it is, not as the engine knows it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.ruleengine.engines import DIRECTORY, RULES, TICK
from tests.ruleengine.worlds import NODE, Fleet, Job, Keys, OwnedClock, webhook

from gpuwarden.agent_api import (
    Action,
    ActionReport,
    ActionRequest,
    ActionState,
    NodeInfo,
    Outcome,
    Proof,
)
from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.ruleengine import ledger_files
from gpuwarden.ruleengine.alertmanager import AlertmanagerClient
from gpuwarden.ruleengine.channels import Undelivered
from gpuwarden.ruleengine.deliveries import LastHop
from gpuwarden.ruleengine.engine import Engine
from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.loading import check_rule_files
from gpuwarden.ruleengine.notices import notice_stage, told_marks
from gpuwarden.ruleengine.reclaim.node import AgentClient, SignedRequest, Signer
from gpuwarden.ruleengine.rulebooks import RuleBook
from gpuwarden.ruleengine.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gpuwarden.ruleengine.alertmanager import Alert
    from gpuwarden.ruleengine.cases import Case, Promise
    from gpuwarden.ruleengine.layouts import Message

BOOT = "boot-1"
LONG_AGO = 7200.0
PER_TICK, PER_HOUR, PER_USER_PER_DAY = 1, 3, 2
HOUR, DAY = 3600.0, 86400.0
USERS = ("alice", "bob")
WHITELIST = (
    "whitelist:\n- {match: {user: alice}, rules: [idle-held], reason: demo, approved_by: ops, "
    "expires: 2099-01-01T00:00:00+00:00}\n"
)


SOFTER = (
    "  - {level: moderate, after: 3m, do: checkpoint, grace: 60s}\n"
    "  - {level: severe, after: 6m, do: yield, notice_delivered_for: 3m, grace: 90s}\n"
)


def rule_text(
    *, after: str = "8m", mode: str = "enforce", whitelist: str = "", softer: str = ""
) -> str:
    """The rules of this world, with its limits; maybe with softer stages before the end."""
    text = RULES.replace("MODE", mode).replace("WHITELIST", whitelist)
    text = text.replace("after: 8m", f"after: {after}")
    return text.replace("  - {level: severe, after", f"{softer}  - {{level: severe, after")


@dataclass
class Seen:
    """What the world saw of the engine. Times are true ones: seconds that passed for everybody.

    Attributes:
        ends: (time, job, user) of every end that reached a node, once per attempt.
        left: the same of every job that left when it was asked.
        asked: (case, job, what it was asked for), in order.
        promised: (job, what is done, owner) -> until when the owner was told that it is not.
        faults: what must never be, in words.
    """

    ends: list[tuple[float, str, str]] = field(default_factory=list)
    left: list[tuple[float, str, str]] = field(default_factory=list)
    asked: list[tuple[int, str, str]] = field(default_factory=list)
    promised: dict[tuple[str, str, str], float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


class Post(AlertmanagerClient):
    """Alertmanagers that pass on at once what they take, or are down."""

    def __init__(self, lives: Lives) -> None:
        super().__init__(["http://alertmanager"], lives.clock)
        self._lives = lives

    async def post(self, alerts: Sequence[Alert]) -> int:
        """Take everything, or nothing."""
        down = self._lives.alertmanager_down
        self.replicas = {"http://alertmanager": "down" if down else ""}
        if down:
            raise ServiceUnavailable("Alertmanager is down")
        self._lives.posted = list(alerts)
        return 1


class Nodes(AgentClient):
    """Agents of every node: they end an attempt once, may be silent, and check the world then."""

    def __init__(self, lives: Lives) -> None:
        super().__init__("http://{host}:1")
        self._lives = lives
        self._reports: dict[str, ActionReport] = {}
        self._first: dict[str, str] = {}
        self._watched: dict[str, ActionRequest] = {}

    async def node(self, host: str) -> NodeInfo:
        """Who it is."""
        if self._lives.agents == "silent":
            raise ServiceUnavailable("silent")
        return NodeInfo(host, BOOT, (self._lives.keys.id,))

    async def send(self, host: str, request: SignedRequest) -> ActionReport:
        """Take an action on, and finish it."""
        if self._lives.agents == "silent":
            raise ServiceUnavailable(f"{host} is silent")
        if self._lives.agents == "refusing":
            raise RefusedAction("protected", "no")
        action = ActionRequest.decode(request.body)
        if action.action is not Action.TERMINATE:
            return self._softer(action)
        first = self._first.setdefault(action.job_id, action.decision_id)
        if first == action.decision_id and first not in self._reports:
            self._lives.watch(action.job_id, "terminate")
            self._reports[first] = ActionReport(
                first,
                action.job_id,
                action.action,
                ActionState.FINISHED,
                outcome=Outcome.RECLAIMED,
                steps=dict.fromkeys(("journalled", "sigterm", "proven"), self._lives.true_time()),
                proof=Proof(gone=True, memory_freed=2**30),
            )
        if self._lives.agents == "deaf":
            raise ServiceUnavailable("the answer was lost")
        return self._reports[first]

    def _softer(self, action: ActionRequest) -> ActionReport:
        """Hand a request over to a trainer, or watch until it has left."""
        lives, name = self._lives, action.decision_id
        if action.action is Action.REQUEST_LEAVE and lives.heeds(action.job_id):
            lives.leave(action.job_id)
        self._watched[name] = action
        if lives.agents == "deaf":
            raise ServiceUnavailable("the answer was lost")
        return self._answer(action)

    def _answer(self, action: ActionRequest) -> ActionReport:
        about = (action.decision_id, action.job_id, action.action)
        if action.action is not Action.WATCH:
            return ActionReport(
                *about,
                ActionState.FINISHED,
                outcome=Outcome.DONE,
                steps=dict.fromkeys(("journalled",), self._lives.true_time()),
            )
        if any(job.job_id == action.job_id for job in self._lives.fleet.jobs):
            return ActionReport(*about, ActionState.ACTING)
        return ActionReport(
            *about,
            ActionState.FINISHED,
            outcome=Outcome.RECLAIMED,
            steps=dict.fromkeys(("exited", "proven"), self._lives.true_time()),
            proof=Proof(gone=True, memory_freed=2**30),
        )

    async def report(self, host: str, decision_id: str) -> ActionReport | None:
        """How far an action has come."""
        if self._lives.agents in ("silent", "deaf"):
            raise ServiceUnavailable(f"{host} is silent")
        asked = self._watched.get(decision_id)
        return self._reports.get(decision_id) if asked is None else self._answer(asked)


@dataclass
class Chat:
    """Slack; what an owner is told binds the engine from then on."""

    lives: Lives

    async def send(self, recipient: str, message: Message) -> str:
        """Deliver, or not."""
        if self.lives.slack_down:
            raise Undelivered("slack is down", permanent=False)
        return f"ok {recipient} {message.subject}"

    async def aclose(self) -> None:
        """Nothing to close."""


class Lives:
    """One cluster and the lives of its engine.

    Args:
        folder: for the files; made anew for each example.
        jobs: how many, of two owners in turn.
        softer: stages of the rule before its end.
    """

    def __init__(self, folder: Path, jobs: int = 4, softer: str = "") -> None:
        self.softer = softer
        self._known: set[str] = set()
        self.folder, self.clock, self.keys, self.seen = folder, OwnedClock(), Keys(folder), Seen()
        self.offset, self.agents = 0.0, "well"
        self.alertmanager_down = self.slack_down = False
        self.posted: list[Alert] = []
        old = self.clock.wall() - LONG_AGO
        self.fleet = Fleet(
            self.clock,
            jobs=[
                Job(
                    f"proc-{n}",
                    user=USERS[n % 2],
                    uuid=f"GPU-{n}",
                    started=old,
                    activity={"cpu": old},
                    run={"run_id": f"run-{n}"} if softer else {},
                )
                for n in range(jobs)
            ],
        )
        self._born = jobs
        self._copied_at: float | None = None
        self._unknown: list[tuple[float, float]] = []
        (folder / "directory.yaml").write_text(DIRECTORY)
        (folder / "rules.yaml").write_text(rule_text(softer=softer))
        (folder / "engine.yaml").write_text(
            "version: 1\nprometheus: {url: http://127.0.0.1:1}\nrules: [rules.yaml]\n"
            f"directory: directory.yaml\nledger: ledger.sqlite\ntick: {TICK:.0f}s\n"
            "alertmanagers: [http://127.0.0.1:1]\nkill_switch: halt\ncool_down: 60s\n"
        )
        self.settings = load_settings(folder / "engine.yaml")
        self._nodes = Nodes(self)
        self.ticks_of_life, self.missed = 0, 99
        self.engine = self._begin()

    def _begin(self) -> Engine:
        book = RuleBook(self.settings)
        self.ledger = Ledger(self.settings.path(self.settings.values.ledger))
        # A disk that forgets on a power cut is not what is tried here.
        self.ledger._db.execute("PRAGMA synchronous=OFF")
        self.missed = 99
        engine = Engine(
            self.settings.values,
            self.settings.path("halt"),
            rulebook=book,
            ledger=self.ledger,
            source=self.fleet,
            alertmanager=Post(self),
            agents=self._nodes,
            signer=Signer.load(self.keys.file),
            clock=self.clock,
            poll=0.0,
        )
        self.hop = LastHop(
            self.ledger, {"slack": Chat(self)}, directory=lambda: book.directory, clock=self.clock
        )
        return engine

    # -- what may happen

    async def restart(self, pause: float = 5.0) -> None:
        """The engine ends wherever it is, and another one begins on its ledger."""
        await self.close()
        self._again(pause)

    def back_up(self) -> None:
        """A copy of the ledger is made while the engine runs."""
        ledger_files.backup(self.ledger.path, self._copy, overwrite=True)
        self._copied_at = self.clock.monotonic()

    async def restore(self) -> None:
        """The copy is put in the place of the ledger: what came after it, only the world knows."""
        if self._copied_at is None:
            return
        await self.close()
        ledger_files.restore(self._copy, self.ledger.path, aside=f".{self.clock.monotonic():.0f}")
        self._unknown.append((self._copied_at, self.clock.monotonic()))
        # Whoever was told of an end is told anew, and cases have other numbers.
        self.seen.promised.clear()
        self.seen.asked.clear()
        self._again(5.0)

    @property
    def _copy(self) -> Path:
        return self.folder / "copy.sqlite"

    def _again(self, pause: float) -> None:
        self.clock.pass_(pause)
        rules = self.folder / "rules.yaml"
        if check_rule_files([rules]).rules is None:
            rules.write_text(
                rule_text(softer=self.softer)
            )  # until somebody has mended it no engine comes up
        self.engine = self._begin()

    async def close(self) -> None:
        """End the engine."""
        await self.engine.reclaimer.aclose()
        self.ledger.close()

    def step_clock(self, seconds: float) -> None:
        """Somebody sets the clock of the engine's host; those of the others stay right."""
        self.clock.jump(seconds)
        self.offset += seconds
        self.fleet.skew = -self.offset

    def true_time(self) -> float:
        """Unix time by the clocks of the nodes."""
        return self.clock.wall() - self.offset

    def replace(self, number: int) -> None:
        """A job ends by itself, and its owner starts another one on the card."""
        old = self.fleet.jobs[number % len(self.fleet.jobs)]
        self._born += 1
        at = self.true_time() - LONG_AGO
        fresh = Job(f"proc-{self._born}", old.user, old.uuid, started=at, activity={"cpu": at})
        fresh.run = {"run_id": f"run-{self._born}"} if self.softer else {}
        self.fleet.jobs[number % len(self.fleet.jobs)] = fresh

    def hand_over(self, number: int) -> None:
        """A job is another user's from now on."""
        job = self.fleet.jobs[number % len(self.fleet.jobs)]
        job.user = USERS[1 - USERS.index(job.user)]

    async def tick(self, count: int = 1) -> None:
        """Time passes, and the engine ticks; owners get what Alertmanager passes on."""
        for _ in range(count):
            self.clock.pass_(TICK)
            self.fleet.rules = self.engine.rulebook.rules
            before = len(self.seen.ends)
            done = self.engine.ticks.outcomes.get("completed", 0)
            await self.engine.tick()
            self._look()
            for turn in range(2000):
                # At least until the agents have what this tick has decided.
                if turn >= 20 and not self.engine.reclaimer.sending:
                    break
                await asyncio.sleep(0)
            ended = len(self.seen.ends) - before
            if ended > PER_TICK:
                self.seen.faults.append(f"{ended} ends in one tick")
            if self.engine.ticks.outcomes.get("completed", 0) == done:
                self.missed += 1
            else:
                if ended and self.missed > 3:
                    self.seen.faults.append("an end in the first tick after an outage")
                self.missed = 0
            await self._forward()
            gone = {job for _, job, _ in self.seen.ends} | {job for _, job, _ in self.seen.left}
            self.fleet.jobs = [job for job in self.fleet.jobs if job.job_id not in gone]

    async def _forward(self) -> None:
        bodies = [alert.body() for alert in self.posted if alert.ends_at > self.clock.wall()]
        firing = [body for body in bodies if body["labels"]["level"] != "page"]
        if firing and not self.alertmanager_down:
            receipt = await self.hop.receive(webhook(firing), ["slack"])
            if receipt.delivered:
                self._remember()

    def _remember(self) -> None:
        """What owners have read by now: the latest word that was proven to reach each."""
        for stored in self.engine.cases.all():
            rule = self.engine.rulebook.rule(stored.case.rule_id)
            case = stored.case
            if rule is None or not case.promises or case.over:
                continue
            stages = [notice_stage(mark) for mark in told_marks(case, rule)]
            if self.ledger.delivery(stored.id, stages, case.user).complete:
                for promise in case.promises:
                    key = (case.job_id, promise.key.rsplit("-", 1)[1], case.user)
                    self.seen.promised.setdefault(key, self._told_until(case, promise))

    def _told_until(self, case: Case, promise: Promise) -> float:
        left = max(promise.after + case.kept - case.elapsed, promise.notice_delivered_for)
        return self.clock.monotonic() + max(0.0, left)

    def leave(self, job_id: str) -> None:
        """A trainer does as it was asked."""
        job = next((job for job in self.fleet.jobs if job.job_id == job_id), None)
        if job is not None and all(job_id != left for _, left, _ in self.seen.left):
            # It counts for whose it was when it was decided.
            asked = self.ledger.job_decisions(job_id)
            user = asked[-1].user if asked else job.user
            self.seen.left.append((self.clock.monotonic(), job_id, user))

    def heeds(self, job_id: str) -> bool:
        """Whether a job leaves when it is asked to: every third one does."""
        return int(job_id.rpartition("-")[2]) % 3 == 0

    def _look(self) -> None:
        """Check what was decided in this tick beside ends: the world is as it was then."""
        for decision in self.ledger.recent_decisions(0.0):
            if decision.id in self._known or decision.action == "terminate":
                continue
            self._known.add(decision.id)
            self.watch(decision.job_id, decision.action, decision.case_id)

    # -- what must be true when a job is ended, or asked for something

    def watch(self, job_id: str, do: str, case_id: int = 0) -> None:
        """Check an act against the world as it is."""
        now, seen = self.clock.monotonic(), self.seen
        job = next((job for job in self.fleet.jobs if job.job_id == job_id), None)
        before = [done for case, _, done in seen.asked if case == case_id]
        told = seen.promised.get((job_id, do, "" if job is None else job.user))
        faults = {
            "the job is not there": job is None,
            # What is asked is looked at after the tick, in which the job may then have been ended.
            "an attempt was ended before": any(
                done == job_id and (do == "terminate" or at < now) for at, done, _ in seen.ends
            ),
            "asked for too often": before.count(do) >= 3,
            "softer than before": do == "checkpoint" and "yield" in before,
            "Prometheus was down": self.fleet.down,
            "the clocks differ": abs(self.offset) > 5,
            "the kill switch was on": (self.folder / "halt").exists(),
            "its owner was never told": do != "checkpoint" and told is None,
            "its owner was told of a later time": told is not None and now < told - 0.1,
            "the rule did not enforce": self.engine.rulebook.rules.rules[0].mode != "enforce",
        }
        if job is not None:
            faults |= {
                "its use was not known": job.utilization is None or job.memory is None,
                "it was not idle": bool(job.utilization),
                "its node was dark": not self.fleet.nodes.get(NODE, False),
                "it is on the whitelist": job.user == "alice"
                and "whitelist" in (self.folder / "rules.yaml").read_text(),
            }
        # What came after a copy, the ledger that was put back does not know of.
        past = [
            (t, user)
            for t, _, user in [*seen.ends, *seen.left]
            if t > now - DAY and not any(a <= t <= b for a, b in self._unknown)
        ]
        if job is not None and do != "checkpoint":
            own = [user for _, user in past if user == job.user]
            faults["too many of one owner in a day"] = len(own) >= PER_USER_PER_DAY
            hour = [t for t, _ in past if t > now - HOUR]
            faults["too many in an hour"] = len(hour) >= PER_HOUR
        if do != "terminate":
            seen.asked.append((case_id, job_id, do))
        elif job is not None:
            seen.ends.append((now, job.job_id, job.user))
        seen.faults += [f"{job_id}: {do}: {text}" for text, wrong in faults.items() if wrong]
