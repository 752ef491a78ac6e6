"""One decision that takes several steps, from the watch on every node to the proof.

::

    watching   every node's agent holds the job's processes; without one of them it stops here
    asking     the trainer's request, and the notice that the job itself asked its platform for
    waiting    until the job has left, or its grace is over
    ending     the platform's own tool; what may have come to speak against it is read again
               before each try: kill switch, pauses, rule, whitelist, keeps
    proving    its platform says that it is over, and every node that its processes have let go

Each step is on disk before it begins, so that an engine that was killed goes on where it was: what
was asked is not asked twice, and a platform is told again only after it was asked what became of
the attempt. Requests of the softer acts (checkpoint, yield) end with `waiting`: nobody is ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from gpuwarden.agent_api import Action, Outcome
from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.ruleengine.reclaim import outcomes
from gpuwarden.ruleengine.reclaim.outcomes import Result
from gpuwarden.ruleengine.reclaim.ports import Claim, Deed, Order, Standing
from gpuwarden.ruleengine.reclaim.questions import OPEN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.reclaim.ports import Platform, State
    from gpuwarden.ruleengine.reclaim.questions import Questions
    from gpuwarden.ruleengine.records import Decision, Part, PlatformAct

WATCH_SECONDS = 20.0
"""For how long an agent may take to find and hold the processes of a job."""
ASK_SECONDS = 15.0
"""For how long an agent may take to write a request."""
END_SECONDS = 300.0
"""For how long a platform is told again, where that is of use."""
PROOF_SECONDS = 120.0
"""After the platform's own grace, for its last word and for NVML."""
LATE_SECONDS = 900.0
"""A request or an end that comes later than this after its time, since no engine ran, is not made:
what it was decided on may not hold any more."""
END_TRIES = 5
PATIENCE = 5.0
"""So many times longer are the pauses while a job may leave by itself: its platform has others."""
SAVE_SECONDS = 5.0
"""How often the time that has passed is written down."""
WORTH_ANOTHER_TRY = frozenset({"disruption_budget"})
"""Refusals of a platform that pass by themselves."""
GONE = "gone"
"""A platform's word for: there is no such attempt any more."""

log = structlog.get_logger(__name__)


class Steps(Protocol):
    """Where a ladder writes each step before it begins."""

    def parts(self, decision_id: str) -> list[Part]:
        """What the agents of a decision's nodes were asked, in the order of that."""

    def save_part(self, part: Part) -> None:
        """Write one question down as it now is."""

    def save_act(self, act: PlatformAct, *, time: float) -> None:
        """Write down how far a decision has come."""

    def taken(self, epoch: int) -> str:
        """Why this is not the place any more where this engine writes, or an empty string."""


class Interrupted(Exception):
    """The decision stays open, and is taken up again."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What every ladder needs.

    Attributes:
        ledger: where each step is written first.
        questions: the agents.
        platforms: adapters by their name.
        clock: wall and monotonic time.
        poll: seconds between two questions.
        withheld: why nothing that cannot be undone may be done for a decision now (kill switch,
            pause, its rule, the whitelist, a keep, or that one of them cannot be read), or "".
        revoked: why a decision is to be taken back at once, since somebody has said so, or "".
        saved_at: Unix time of the newest saved state of a job, or None where that is not known.
        note: writes a step down, with a line in the audit of the decision's case.
    """

    ledger: Steps
    questions: Questions
    platforms: Mapping[str, Platform]
    clock: Clock
    poll: float
    withheld: Callable[[Decision], str]
    revoked: Callable[[Decision], str]
    saved_at: Callable[[str], float | None]
    note: Callable[[Decision, PlatformAct, str, Mapping[str, object]], None]


class Ladder:
    """One decision on its way.

    Args:
        tools: what it needs.
        decision: open in the ledger.
        act: how far it has come.
    """

    def __init__(self, tools: Tools, decision: Decision, act: PlatformAct) -> None:
        self._tools = tools
        self._clock = tools.clock
        self._decision = decision
        self._act = act
        self._order = _order(decision, act)
        # Whether the platform was told, or may have been, and nobody knows what it did.
        self._unclear = act.tries > 0
        self._refused = ""
        self._may_pass = False

    async def climb(self) -> Result:
        """Go on to the result.

        Raises:
            Interrupted: it cannot be gone on with now; it stays open.
        """
        steps = {
            "watching": self._watching,
            "asking": self._asking,
            "waiting": self._waiting,
            "ending": self._ending,
            "proving": self._proving,
            "withdrawing": self._withdrawing,
        }
        while True:
            result = await steps[self._act.step]()
            if result is not None:
                return result

    # -- writing

    def _step(self, step: str, event: str, detail: Mapping[str, object], **about: Any) -> None:
        """Write the next step down; it begins when this returns."""
        values: dict[str, Any] = {**about, "step": step, "changed_at": self._clock.wall()}
        self._act = dataclasses.replace(self._act, **values)
        self._tools.note(self._decision, self._act, event, detail)
        log.info("step", decision=self._decision.id, step=step)

    def _keep(self, **about: Any) -> None:
        """Write down more about the step that has begun."""
        self._act = dataclasses.replace(self._act, **about)
        self._tools.ledger.save_act(self._act, time=self._clock.wall())

    def _parts(self, action: Action) -> list[Part]:
        found = self._tools.ledger.parts(self._decision.id)
        return [part for part in found if part.action == action.value]

    async def _pause(self, *, times: float = 1.0) -> None:
        """Between two questions; an engine whose ledger is another's by now stops here."""
        await asyncio.sleep(times * self._tools.poll)
        taken = self._tools.ledger.taken(self._tools.questions.epoch)
        if taken:
            raise Interrupted(taken)

    # -- the steps

    async def _watching(self) -> Result | None:
        """Every node must hold its share of the job before anything is done to it."""
        deadline = self._clock.monotonic() + WATCH_SECONDS
        while True:
            parts = await self._tools.questions.put(self._parts(Action.WATCH), renew=False)
            bad = [part for part in parts if part.state not in OPEN and part.state != "reclaimed"]
            if bad:
                why = "; ".join(f"{part.host}: {part.reason or part.state}" for part in bad)
                return Result("refused", f"not watched: {why}")
            held = all(part.state not in ("pending", "accepted") for part in parts)
            if self._clock.wall() >= self._decision.expires:
                return Result("lapsed", "lapsed: not every node's agent took the watch on in time")
            if held:
                break
            if self._clock.monotonic() >= deadline:
                slow = ", ".join(p.host for p in parts if p.state in ("pending", "accepted"))
                return Result("refused", f"not watched: the agent of {slow} did not begin in time")
            await self._pause()
        why = self._tools.withheld(self._decision)
        if why:
            return Result("refused", f"withheld: {why}")
        processes = sum(len(report.processes) for report in outcomes.reports(parts))
        detail = {"nodes": [part.host for part in parts], "processes": processes}
        self._step("asking", "watched", detail, asked_at=self._clock.wall())
        return None

    async def _asking(self) -> Result | None:
        """Tell the trainer, and have the platform tell the job where that asked for it."""
        why = self._late(self._act.asked_at) or self._tools.withheld(self._decision)
        if why:
            return await self._taken_back(why)
        parts = await self._asked_trainer()
        delivered = [part for part in parts if part.state == "done"]
        soft = self._order is None
        if soft and not delivered:
            why = "; ".join(f"{part.host}: {part.reason or 'no answer'}" for part in parts)
            # Whoever did not answer may have the request, and may be asked another time.
            if any(part.state != "undeliverable" for part in parts):
                await self._withdrawn_requests()
                return Result("refused", f"not asked: {why}")
            return Result("undeliverable", why or "the job has no run that could be asked")
        if self._order is not None:
            refused = await self._asked_platform(self._order)
            if refused is not None:
                await self._withdrawn_requests()
                return refused
        heard = bool(delivered) or self._act.notice in ("sent", "tried")
        detail = {
            "requests": {part.host: part.reason or part.state for part in parts},
            "notice": self._act.notice,
            "grace": self._decision.grace,
        }
        # Nobody has heard of it: there is nobody to wait for.
        waited = 0.0 if heard else self._decision.grace
        self._step("waiting", "asked", detail, waited=waited)
        return None

    async def _asked_trainer(self) -> list[Part]:
        deadline = self._clock.monotonic() + ASK_SECONDS
        soft = self._decision.action == "checkpoint"
        action = Action.REQUEST_CHECKPOINT if soft else Action.REQUEST_LEAVE
        while True:
            parts = await self._tools.questions.put(self._parts(action))
            if all(part.state not in OPEN for part in parts):
                return parts
            if self._clock.monotonic() >= deadline:
                return parts
            await self._pause()

    async def _asked_platform(self, order: Order) -> Result | None:
        """Once: whoever cannot know whether it was done does not do it again."""
        if self._act.notice:
            return None
        platform = self._platform()
        self._keep(notice="tried")
        try:
            sent = await platform.ask(order)
        except RefusedAction as error:
            self._keep(notice="none")
            if error.reason in (GONE, "target_changed"):
                return Result("refused", f"{error.reason}: {error}")
            log.warning("no notice", decision=self._decision.id, error=str(error))
        except ServiceUnavailable as error:
            log.warning("not known whether noticed", decision=self._decision.id, error=str(error))
        else:
            self._keep(notice="sent" if sent else "none")
        return None

    async def _waiting(self) -> Result | None:
        """Until the job has left, or has done what it was asked, or its time is over."""
        begun, before, saved = self._clock.monotonic(), self._act.waited, self._act.waited
        while True:
            watches = await self._tools.questions.put(self._parts(Action.WATCH))
            if self._order is not None and await self._has_left(self._order):
                return None
            heeded = None if self._order is not None else await self._heeded(watches)
            if heeded is not None:
                return heeded
            why = "" if self._order is None else self._tools.revoked(self._decision)
            if why:
                # It need not go at all any more, and hears of that while it still may stay.
                self._keep(waited=before + self._clock.monotonic() - begun)
                return await self._taken_back(why)
            waited = before + self._clock.monotonic() - begun
            if waited >= self._decision.grace:
                break
            if waited - saved >= SAVE_SECONDS:
                self._keep(waited=waited)
                saved = waited
            await self._pause(times=PATIENCE)
        self._keep(waited=self._decision.grace)
        if self._order is None:
            await self._withdrawn_requests()
            what = "not saved" if self._decision.action == "checkpoint" else "still there"
            return Result(
                "unheeded", f"{what} when its time was over", self._report(Outcome.INCOMPLETE)
            )
        due = (self._act.asked_at or 0.0) + self._decision.grace
        why = self._tools.withheld(self._decision) or self._late(due)
        if why:
            return await self._taken_back(why)
        await self._renewed_watches(watches)
        self._step("ending", "ending", {"grace": self._grace}, ended_at=self._clock.wall())
        return None

    async def _heeded(self, watches: list[Part]) -> Result | None:
        """The result once the job has done what it was only asked for."""
        if self._decision.action == "checkpoint":
            saved = self._tools.saved_at(self._decision.job_id)
            if saved is None or saved <= (self._act.asked_at or 0.0):
                return None
            return Result("done", "a state was saved", self._report(Outcome.DONE))
        if not watches or any(part.state != "reclaimed" for part in watches):
            return None
        await self._withdrawn_requests()
        return Result("verified", "it left when it was asked to", self._report())

    async def _has_left(self, order: Order) -> bool:
        """Whether the job is over before its platform was told; the next step is then written."""
        state = await self._state(order)
        if state is None or state.standing in (Standing.RUNNING, Standing.ENDING):
            return False
        detail = {"word": state.word, "successor": state.successor}
        if self._came_back(state):
            # Its platform queues it again, and only the platform can keep it from starting.
            self._step("ending", "left", detail, ended_at=self._clock.wall())
        else:
            self._step("proving", "left", detail)
        return True

    async def _ending(self) -> Result | None:
        """The platform's own tool, and again only where it is not known to have acted."""
        order = self._order
        if order is None:
            raise Interrupted(f"{self._decision.id} has no platform that could end it")
        deadline = self._clock.monotonic() + END_SECONDS
        while True:
            known = await self._known(order, deadline) if self._unclear else None
            if (
                known is not None
                and (known.standing is not Standing.RUNNING)
                and not (self._came_back(known))
            ):
                break
            why = self._why_not(deadline, unknown=self._unclear and known is None)
            if why:
                if not await self._has_acted(order):
                    await self._withdrawn_requests()
                    return Result("refused", self._refused or why)
                self._keep(why=why)
                break
            if await self._told(order):
                break
            if self._refused and not self._may_pass:
                if await self._has_acted(order):
                    break
                await self._withdrawn_requests()
                return Result("refused", self._refused)
            await self._pause()
        self._step("proving", "told", {"tries": self._act.tries, "why": self._act.why})
        return None

    async def _known(self, order: Order, deadline: float) -> State | None:
        """What became of the attempt, asked until the platform says it; None once time is over."""
        while True:
            state = await self._state(order)
            if state is not None or self._clock.monotonic() >= deadline:
                return state
            await self._pause()

    def _why_not(self, deadline: float, *, unknown: bool) -> str:
        """Why the platform is not told, or not again, or an empty string."""
        why = self._tools.withheld(self._decision) or self._late(self._act.ended_at)
        if why:
            return f"withheld: {why}"
        over = self._act.tries >= END_TRIES or self._clock.monotonic() >= deadline
        # A second blow without knowing what the first has done would be one too many.
        return "unanswered: its platform did not answer" if over or unknown else ""

    def _late(self, due: float | None) -> str:
        """Why a step is not taken any more whose time came long ago, or an empty string."""
        late = self._clock.wall() - (due or 0.0)
        if late <= LATE_SECONDS:
            return ""
        return f"no engine ran when its time came, {late:.0f} s ago: it is to be judged anew"

    async def _has_acted(self, order: Order) -> bool:
        """Whether the attempt is over or on its way out, or may be: then it is to be proven."""
        state = await self._state(order)
        if state is None:
            return self._unclear
        return state.standing is not Standing.RUNNING

    async def _told(self, order: Order) -> bool:
        """Tell the platform once; whether nothing more is to be told."""
        platform = self._platform()
        self._refused, self._may_pass = "", False
        self._keep(tries=self._act.tries + 1)
        try:
            await platform.end(order)
        except RefusedAction as error:
            if error.reason == GONE:
                return True
            self._refused = f"{error.reason}: {error}"
            self._may_pass = error.reason in WORTH_ANOTHER_TRY
            if self._may_pass:
                # Refused for sure, so that it is no try that could have acted.
                self._keep(tries=self._act.tries - 1, obstacle=error.reason)
                return False
            self._keep(why=self._refused)
            return False
        except ServiceUnavailable as error:
            log.warning("not known to be ended", decision=order.decision_id, error=str(error))
            self._unclear = True
            return False
        return True

    def _came_back(self, state: State) -> bool:
        """Whether a job that is to be held is, or will be, there again as another attempt."""
        held = self._order is not None and self._order.deed is Deed.TERMINATE
        return held and state.standing is Standing.RETURNED

    async def _proving(self) -> Result | None:
        """Until the platform says that it is over and every node has looked, or time is."""
        order = self._order
        if order is None:
            raise Interrupted(f"{self._decision.id} has no platform that could tell")
        deadline = self._clock.monotonic() + self._grace + PROOF_SECONDS
        state: State | None = None
        while True:
            watches = await self._tools.questions.put(self._parts(Action.WATCH))
            state = await self._state(order) or state
            over = state is not None and state.standing in (Standing.ENDED, Standing.RETURNED)
            if state is not None and self._came_back(state) and self._may_hold():
                await self._told(order)
                over = False
            if over and all(part.state not in OPEN for part in watches):
                break
            if self._clock.monotonic() >= deadline:
                break
            await self._pause()
        await self._withdrawn_requests()
        return outcomes.proven(
            self._decision,
            self._act,
            state,
            order.deed,
            self._tools.ledger.parts(order.decision_id),
        )

    def _may_hold(self) -> bool:
        """Whether the platform may be told once more, so that what has come back does not start."""
        if self._refused or self._act.tries >= END_TRIES:
            return False
        # What comes back long after its end was perhaps started by its owner.
        since = self._act.changed_at if self._act.ended_at is None else self._act.ended_at
        late = self._late(since + self._grace + PROOF_SECONDS)
        return not (late or self._tools.withheld(self._decision))

    async def _withdrawing(self) -> Result | None:
        """Take back what was asked for, for as long as it would hold."""
        deadline = self._clock.monotonic() + self._decision.grace
        while True:
            withdrawn = await self._withdrawn_requests()
            watches = await self._tools.questions.put(self._parts(Action.WATCH))
            if self._decision.action != "checkpoint":
                # Who has left by then cannot be called back, and counts as whoever leaves.
                heeded = await self._heeded(watches)
                if heeded is not None:
                    return heeded
            if withdrawn or self._clock.monotonic() >= deadline:
                return Result("withdrawn", self._act.why, self._report(Outcome.DONE))
            await self._pause()

    # -- its hands

    @property
    def _grace(self) -> float:
        """Seconds that the job has once its platform was told to end it."""
        if self._act.ended_at is None and self._act.step == "proving":
            return 0.0
        claim = None if self._order is None else self._order.claim.grace
        return self._decision.grace if claim is None else claim

    def _platform(self) -> Platform:
        found = self._tools.platforms.get(self._act.platform)
        if found is None:
            raise Interrupted(
                f"engine.yaml says no more how {self._act.platform} is reached: "
                f"{self._decision.id} stays open until it does"
            )
        return found

    async def _state(self, order: Order) -> State | None:
        """What the platform says now, written down where it is news; None where it says nothing."""
        try:
            state = await self._platform().state(order)
        except (ServiceUnavailable, RefusedAction) as error:
            log.warning("its platform says nothing", decision=order.decision_id, error=str(error))
            return None
        told: dict[str, Any] = {
            "word": state.word,
            "obstacle": state.obstacle,
            "successor": state.successor,
        }
        if any(getattr(self._act, name) != value for name, value in told.items()):
            act = dataclasses.replace(
                self._act, **told, detail=json.dumps(dict(state.detail), sort_keys=True)
            )
            self._act = act
            self._tools.note(
                self._decision, act, "platform", {"standing": state.standing.value, **told}
            )
        return state

    async def _renewed_watches(self, watches: list[Part]) -> None:
        """A watch that has run out before the end would prove nothing of it."""
        survived = [part for part in watches if part.reason.startswith("survivors")]
        for part in survived:
            again = self._tools.questions.again(part, number=int(self._clock.wall()))
            self._tools.ledger.save_part(again)
        if survived:
            await self._tools.questions.put(self._parts(Action.WATCH))

    async def _taken_back(self, why: str) -> Result:
        """The result where nothing may be done any more, once its requests are taken back."""
        await self._withdrawn_requests()
        return Result("refused", f"withheld: {why}")

    async def _withdrawn_requests(self) -> bool:
        """Take back the requests that trainers may have; whether none can be left."""
        asked = [
            part
            for action in (Action.REQUEST_LEAVE, Action.REQUEST_CHECKPOINT)
            for part in self._parts(action)
            if part.state == "done" or part.state in OPEN
        ]
        known = {part.host for part in self._parts(Action.CANCEL)}
        for part in asked:
            if part.host not in known:
                cancel = self._tools.questions.again(part, action=Action.CANCEL)
                self._tools.ledger.save_part(cancel)
        parts = await self._tools.questions.put(self._parts(Action.CANCEL))
        return all(part.state not in OPEN for part in parts)

    def _report(self, outcome: Outcome = Outcome.RECLAIMED) -> str:
        parts = self._tools.ledger.parts(self._decision.id)
        return outcomes.merged(self._decision, self._act, parts, outcome=outcome)


def _order(decision: Decision, act: PlatformAct) -> Order | None:
    """What the platform is told, as it was decided; None where only agents act."""
    if not act.platform:
        return None
    claim = json.loads(act.claim)
    return Order(
        decision_id=decision.id,
        claim=Claim(
            platform=act.platform,
            identity=MappingProxyType(claim["identity"]),
            nodes=tuple(claim["nodes"]),
            grace=claim["grace"],
            also=claim["also"],
            returns=claim["returns"],
        ),
        deed=Deed(decision.action),
        grace=decision.grace,
        reason=json.loads(decision.body)["reason"],
    )
