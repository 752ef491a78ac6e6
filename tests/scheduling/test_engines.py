"""The port to engines: what differs, what is done about it, and how that ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from tests.scheduling.shelves import Keeper, Shelf

from gpuwarden.errors import RefusedAction
from gpuwarden.scheduling.engines import (
    Act,
    By,
    EngineObject,
    FoundObject,
    Rendering,
    Step,
    carry_out,
    plan,
    undoing,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.scheduling.engines import Outcome

names = st.sampled_from("abcd")
values = st.dictionaries(st.sampled_from("xy"), st.sampled_from("12"))
wanted_objects = st.lists(
    st.builds(EngineObject, st.just("kind"), names, values, st.just(""), st.sampled_from(By)),
    unique_by=lambda each: each.name,
)
found_objects = st.lists(
    st.builds(FoundObject, st.just("kind"), names, values, st.booleans()),
    unique_by=lambda each: each.name,
)


def rendering(objects: list[EngineObject]) -> Rendering:
    """Objects that are wanted."""
    return Rendering("slurm", "1", "hash", tuple(objects))


@given(wanted_objects, found_objects)
def test_carrying_a_plan_out_leaves_nothing_to_do_and_touches_nothing_of_others(
    wanted: list[EngineObject], found: list[FoundObject]
) -> None:
    """Whatever there was: done twice it does nothing, and undone it leaves what was not ours."""
    chosen = plan(rendering(wanted), found)
    foreign = {each.key for each in found if not each.marked}
    assert not {(step.kind, step.name) for step in chosen.steps} & foreign
    assert {each.key for each in chosen.in_the_way} <= foreign
    shelf = Shelf(objects={each.key: each for each in found})
    outcome = asyncio.run(carry_out(Keeper(shelf), chosen.steps, lambda *_: None))
    assert outcome.done == chosen.steps
    again = plan(rendering(wanted), list(shelf.objects.values()))
    assert again.steps == ()
    assert again.by_hand == chosen.by_hand
    gone = undoing(list(shelf.objects.values()))
    asyncio.run(carry_out(Keeper(shelf), gone.steps, lambda *_: None))
    assert list(shelf.objects.values()) == [each for each in found if not each.marked]


def test_what_is_not_compared_does_not_differ() -> None:
    """An engine has fields of its own, which a policy says nothing of."""
    wanted = EngineObject("qos", "high", {"priority": "9", "preempt": ""}, "")
    found = FoundObject("qos", "high", {"priority": "9", "grace": "0"}, marked=True)
    assert plan(rendering([wanted]), [found]).nothing


def test_what_is_taken_away_goes_in_the_opposite_order() -> None:
    """Users before their account, jobs before their queue."""
    found = [FoundObject("account", name, {}, marked=True) for name in ("root", "team", "user")]
    assert [step.name for step in undoing(found).steps] == ["user", "team", "root"]
    assert [step.name for step in plan(rendering([]), found).steps] == ["user", "team", "root"]


class Crowd(Keeper):
    """A keeper that does steps of one kind at once, unless one is of a name that it refuses."""

    def __init__(self, shelf: Shelf, *, refuses: str = "") -> None:
        super().__init__(shelf)
        self.batches: list[str] = []
        self._refuses = refuses

    def together(self, first: Step, other: Step) -> bool:
        """Those of one kind."""
        return first.kind == other.kind

    async def carry_out_all(self, steps: Sequence[Step]) -> None:
        """Do them, or refuse them."""
        self.batches.append("".join(step.name for step in steps))
        for step in steps:
            await self.carry_out(step)

    async def carry_out(self, step: Step) -> None:
        """Do one."""
        if step.name == self._refuses:
            raise RefusedAction("refused", f"not {step.name}")
        await super().carry_out(step)


def crowded(adapter: Crowd) -> tuple[Outcome, list[int]]:
    """What comes of five steps, and which were told of."""
    objects = [EngineObject("qos", "a", {"x": "1"}, "")]
    objects += [EngineObject("user", name, {"x": "1"}, "") for name in "bcd"]
    objects += [EngineObject("end", "e", {"x": "1"}, "")]
    told: list[int] = []
    steps = plan(rendering(objects), []).steps
    return asyncio.run(carry_out(adapter, steps, lambda number, _: told.append(number))), told


def test_what_can_be_done_at_once_is() -> None:
    """In its turn, and each step is told of."""
    adapter = Crowd(Shelf())
    outcome, told = crowded(adapter)
    assert adapter.batches == ["bcd"]
    assert [step.name for step in outcome.done] == list("abcde")
    assert told == [1, 2, 3, 4, 5]


def test_of_steps_at_once_the_one_that_fails_is_named() -> None:
    """They are done one after the other then; what was done of them is done."""
    outcome, told = crowded(Crowd(Shelf(), refuses="c"))
    assert outcome.failed is not None
    assert outcome.failed.name == "c"
    assert str(outcome.error) == "not c"
    assert [step.name for step in outcome.done] == ["a", "b"]
    assert [step.name for step in outcome.left] == ["d", "e"]
    assert told == [1, 2, 3, 4]


def test_an_interruption_says_what_was_done() -> None:
    """Ctrl-C in the middle of a step: the one in hand may have been done, the rest was not."""

    class Stuck(Keeper):
        def __init__(self, shelf: Shelf) -> None:
            super().__init__(shelf)
            self.reached = asyncio.Event()

        async def carry_out(self, step: Step) -> None:
            if step.name == "b":
                self.reached.set()
                await asyncio.Event().wait()
            await super().carry_out(step)

    async def interrupted() -> None:
        adapter = Stuck(Shelf())
        objects = [EngineObject("qos", name, {"x": "1"}, "") for name in "abc"]
        steps = plan(rendering(objects), []).steps
        assert [step.act for step in steps] == [Act.CREATE] * 3
        task = asyncio.create_task(carry_out(adapter, steps, lambda *_: None))
        await adapter.reached.wait()
        task.cancel()
        outcome = await task
        assert [step.name for step in outcome.done] == ["a"]
        assert (outcome.failed, outcome.error) == (steps[1], None)
        assert [step.name for step in outcome.left] == ["c"]

    asyncio.run(interrupted())
