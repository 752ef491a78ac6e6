"""The port to engines: a policy as an engine's own objects, and what differs from those it has.

An adapter renders a policy, reads what the engine has, and carries out single steps. What is to be
done is decided here, purely: what carries gpuwarden's mark and differs is changed, what is marked
and no longer wanted is deleted, and what has a wanted name but no mark is never touched.
"""

from __future__ import annotations

import asyncio
import importlib
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gpuwarden.errors import GpuwardenError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gpuwarden.scheduling.policies import Engine, Policy

MOST_AT_ONCE = 50
"""Steps that are done at once: a command takes no endless list."""
OWNER = "gpuwarden"
"""The word by which an adapter marks what is gpuwarden's, wherever the engine keeps such words."""


class By(StrEnum):
    """Who puts an object in its place."""

    APPLY = "apply"
    """`gpuwarden policy apply`."""
    HAND = "hand"
    """A person: files of machines that this program does not write to, such as slurm.conf."""


@dataclass(frozen=True, slots=True)
class EngineObject:
    """One object that a policy comes to.

    Attributes:
        kind: of the engine's kinds, such as `qos` or `ClusterQueue`.
        name: unique within its kind; of a file its name.
        values: what of it is compared, by field; all texts as the engine itself gives them back. An
            empty one is the same as none.
        text: the whole of it, as a person reads it or would write it into a file.
        by: who puts it in place.
        note: what a person has to know or do for it, or an empty string.
        take_over: the command by which an administrator hands over one of this name that is there
            already, or an empty string.
    """

    kind: str
    name: str
    values: Mapping[str, str]
    text: str
    by: By = By.APPLY
    note: str = ""
    take_over: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What no other object has."""
        return (self.kind, self.name)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Remark:
    """Something of a policy that an engine does otherwise than it says, or not at all.

    Attributes:
        path: of the policy, such as `budgets[1]`.
        text: what does not hold, and who sees to it instead.
    """

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Rendering:
    """A policy as an engine's objects.

    Attributes:
        engine: whose.
        version: of the engine that it is for.
        policy: the policy's hash.
        objects: in the order in which they are made; what is deleted goes the other way.
        remarks: what the engine cannot do of it.
    """

    engine: Engine
    version: str
    policy: str
    objects: tuple[EngineObject, ...]
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True, slots=True)
class FoundObject:
    """One object that an engine has.

    Attributes:
        kind: as of `EngineObject`.
        name: likewise.
        values: by field; fields that no wanted object has are left out of comparisons.
        marked: whether it carries gpuwarden's mark.
        held_for: of somebody else's object that gpuwarden holds: the key of the wanted object for
            whose sake it does. Without that one it is given back, and never deleted.
    """

    kind: str
    name: str
    values: Mapping[str, str]
    marked: bool
    held_for: tuple[str, str] | None = None

    @property
    def key(self) -> tuple[str, str]:
        """What no other object has."""
        return (self.kind, self.name)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class Act(StrEnum):
    """What a step does."""

    CREATE = "create"
    CHANGE = "change"
    DELETE = "delete"
    RELEASE = "release"
    """Give back what is somebody else's, and held by gpuwarden."""


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One field that differs; None where one side does not have it."""

    field: str
    found: str | None
    wanted: str | None

    def __str__(self) -> str:
        found = "nothing" if self.found is None else self.found or "nothing"
        wanted = "nothing" if self.wanted is None else self.wanted or "nothing"
        return f"{self.field}: {found} -> {wanted}"


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do.

    Attributes:
        act: what.
        kind: of the object.
        name: of the object.
        wanted: the object; None of one that is deleted.
        changes: by field; of a deleted one what it had.
    """

    act: Act
    kind: str
    name: str
    wanted: EngineObject | None
    changes: tuple[FieldChange, ...] = ()

    def __str__(self) -> str:
        return f"{self.act} {self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What makes an engine be as a policy wants it.

    Attributes:
        steps: in order.
        in_the_way: what has a wanted name and is not gpuwarden's: nothing is done to it.
        by_hand: what a person has to put in place, with what differs of it now.
    """

    steps: tuple[Step, ...] = ()
    in_the_way: tuple[FoundObject, ...] = ()
    by_hand: tuple[Step, ...] = ()

    @property
    def nothing(self) -> bool:
        """Whether the engine is as it should be."""
        return not (self.steps or self.in_the_way or self.by_hand)


class Adapter(Protocol):
    """One engine. Making one asks the engine nothing."""

    def render(self, policy: Policy, *, version: str | None, init: bool = False) -> Rendering:
        """Say what a policy comes to. Pure, and the same for the same policy.

        Args:
            policy: that checks without errors for this engine.
            version: of the engine; None is the newest that is known.
            init: everything for a new, small engine of its own instead.
        """

    async def version(self) -> str:
        """The engine's version.

        Raises:
            ServiceUnavailable: it does not answer.
        """

    async def read(self, wanted: Rendering) -> tuple[FoundObject, ...]:
        """Say what the engine has: everything marked, and everything that has a wanted name.

        Raises:
            ServiceUnavailable: it does not answer, or not all of it.
        """

    async def carry_out(self, step: Step) -> None:
        """Do one step; done before, it changes nothing.

        Raises:
            ServiceUnavailable: the engine does not answer; it may or may not have been done.
            RefusedAction: the engine refuses it, or what is to be changed is not gpuwarden's.
        """

    async def aclose(self) -> None:
        """Let go of connections."""


@runtime_checkable
class Batching(Protocol):
    """An adapter that can do some steps at once, where each alone would take long."""

    def together(self, first: Step, other: Step) -> bool:
        """Whether two steps, one of which follows the other, can be done at once."""

    async def carry_out_all(self, steps: Sequence[Step]) -> None:
        """Do steps that can be done at once; done before, they change nothing.

        Raises:
            ServiceUnavailable: the engine does not answer; any of them may or may not be done.
            RefusedAction: the engine refuses one of them; any of them may or may not be done.
        """


def adapter_of(engine: Engine, policy: Policy) -> Adapter:
    """The adapter of an engine: `adapter(policy)` of its package's module `adapters`.

    Raises:
        MissingExtra: what it needs is not installed.
    """
    try:
        module = importlib.import_module(f"gpuwarden.scheduling.{engine}.adapters")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "gpuwarden":
            raise
        extra = "kubernetes" if engine == "kueue" else "scheduling"
        raise MissingExtra(f"policy --engine {engine}", missing, extra) from error
    adapter: Adapter = module.adapter(policy)
    return adapter


# -- deciding


def plan(wanted: Rendering, found: Sequence[FoundObject]) -> Plan:
    """What has to be done.

    Args:
        wanted: the policy's objects.
        found: what the engine has.
    """
    there = {each.key: each for each in found}
    steps, by_hand, in_the_way = list[Step](), list[Step](), list[FoundObject]()
    for each in wanted.objects:
        have = there.get(each.key)
        step = _step(each, have)
        if step is None:
            continue
        if each.by is By.HAND:
            by_hand.append(step)
        elif have is not None and not have.marked:
            in_the_way.append(have)
        else:
            steps.append(step)
    keys = {each.key for each in wanted.objects}
    # A foreign object that happens to be as wanted is in the way too: undo would not find it.
    in_the_way += [
        there[each.key]
        for each in wanted.objects
        if each.by is By.APPLY
        and each.key in there
        and not there[each.key].marked
        and there[each.key] not in in_the_way
    ]
    gone = [
        _farewell(each)
        for each in reversed(found)
        if each.marked and (each.held_for or each.key) not in keys
    ]
    return Plan((*steps, *gone), tuple(in_the_way), tuple(by_hand))


def undoing(found: Iterable[FoundObject]) -> Plan:
    """What takes everything away that carries gpuwarden's mark, the last made first.

    What is somebody else's and held is given back.
    """
    return Plan(tuple(_farewell(each) for each in reversed(list(found)) if each.marked))


def _step(wanted: EngineObject, found: FoundObject | None) -> Step | None:
    have = {} if found is None else found.values
    changes = tuple(
        FieldChange(name, have.get(name), value)
        for name, value in wanted.values.items()
        if have.get(name, "") != value
    )
    if found is not None and not changes:
        return None
    act = Act.CREATE if found is None else Act.CHANGE
    return Step(act, wanted.kind, wanted.name, wanted, changes)


def _farewell(found: FoundObject) -> Step:
    changes = tuple(FieldChange(name, value, None) for name, value in found.values.items())
    act = Act.DELETE if found.held_for is None else Act.RELEASE
    return Step(act, found.kind, found.name, None, changes)


# -- doing


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a plan.

    Attributes:
        done: steps that were carried out.
        failed: the step at which it ended, or None.
        error: why; None with `failed` means that somebody interrupted it.
        left: steps that were not tried.
    """

    done: tuple[Step, ...]
    failed: Step | None = None
    error: GpuwardenError | None = None
    left: tuple[Step, ...] = ()


async def carry_out(
    adapter: Adapter, steps: Sequence[Step], tell: Callable[[int, Step], None]
) -> Outcome:
    """Do steps one after another, and stop at the first that fails.

    What an adapter can do at once is done so; if that fails, one after the other, for it to be
    known which of them does.

    Args:
        adapter: of the engine.
        steps: of a plan.
        tell: is told of each step before it is tried, with its number from 1 on.
    """
    done = 0
    while done < len(steps):
        batch = _batch(adapter, steps[done:])
        if len(batch) > 1 and isinstance(adapter, Batching):
            for number, step in enumerate(batch, start=done + 1):
                tell(number, step)
            try:
                await adapter.carry_out_all(batch)
                done += len(batch)
                continue
            except GpuwardenError:
                pass
            except asyncio.CancelledError:
                return _stopped(steps, done)
        for step in batch:
            if len(batch) == 1:
                tell(done + 1, step)
            try:
                await adapter.carry_out(step)
            except GpuwardenError as error:
                return _stopped(steps, done, error)
            except asyncio.CancelledError:
                # Ctrl-C: what was done is still kept and told.
                return _stopped(steps, done)
            done += 1
    return Outcome(tuple(steps))


def _batch(adapter: Adapter, steps: Sequence[Step]) -> Sequence[Step]:
    """The first of some steps, and those behind it that can be done with it."""
    if not isinstance(adapter, Batching):
        return steps[:1]
    count = 1
    while count < min(len(steps), MOST_AT_ONCE) and adapter.together(steps[0], steps[count]):
        count += 1
    return steps[:count]


def _stopped(steps: Sequence[Step], done: int, error: GpuwardenError | None = None) -> Outcome:
    return Outcome(tuple(steps[:done]), steps[done], error, tuple(steps[done + 1 :]))
