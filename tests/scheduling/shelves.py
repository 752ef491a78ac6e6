"""An engine for tests: a shelf of objects, behind the port that real engines lie behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.scheduling.engines import (
    Act,
    By,
    EngineObject,
    FoundObject,
    Remark,
    Rendering,
    Step,
)
from gpuwarden.scheduling.policies import policy_hash

if TYPE_CHECKING:
    from gpuwarden.scheduling.policies import Engine, Policy


@dataclass
class Shelf:
    """What an engine has, and what it refuses.

    Attributes:
        engine: that it stands for.
        objects: by kind and name.
        silent: whether it answers nothing.
        refuses: the object that it takes no change of.
        done: every step that was carried out.
        closed: how often an adapter let go of it.
    """

    engine: Engine = "slurm"
    objects: dict[tuple[str, str], FoundObject] = field(default_factory=dict)
    silent: bool = False
    refuses: tuple[str, str] | None = None
    done: list[Step] = field(default_factory=list)
    closed: int = 0

    def adapter(self, engine: Engine, _policy: Policy) -> Keeper:
        """What `policy` commands are given in place of a real engine's."""
        assert engine == self.engine
        return Keeper(self)

    def put(self, kind: str, name: str, *, marked: bool, **values: str) -> None:
        """Place an object as somebody else would."""
        self.objects[kind, name] = FoundObject(kind, name, values, marked)


class Keeper:
    """The adapter of a shelf: an account for each team, a class for each priority."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def render(self, policy: Policy, *, version: str | None, init: bool = False) -> Rendering:
        """One object for each team and priority, and one by hand."""
        objects = [
            EngineObject(
                "class",
                each.name,
                {"value": str(each.value)},
                f"class {each.name}",
                take_over=f"shelf mark class {each.name}",
            )
            for each in policy.priorities
        ]
        objects += [
            EngineObject("account", team.account, {"share": str(team.share)}, f"team {team.name}")
            for team in policy.teams
        ]
        zone = {"zone": policy.timezone}
        text = f"zone={policy.timezone}"
        note = "copy it, and restart"
        objects.append(EngineObject("file", "shelf.conf", zone, text, By.HAND, note))
        if init:
            objects.append(EngineObject("file", "start.sh", {}, "#!/bin/sh\nexec shelf", By.HAND))
        remarks = (Remark("windows[0]", "a shelf has no clock"),) if policy.windows else ()
        known = version or "9.9"
        return Rendering(self._shelf.engine, known, policy_hash(policy), tuple(objects), remarks)

    async def version(self) -> str:
        """Of the shelf."""
        self._ask()
        return "2.1"

    async def read(self, wanted: Rendering) -> tuple[FoundObject, ...]:
        """Everything marked, and everything that has a wanted name."""
        self._ask()
        keys = {each.key for each in wanted.objects}
        return tuple(e for e in self._shelf.objects.values() if e.marked or e.key in keys)

    async def carry_out(self, step: Step) -> None:
        """Place, change or take away one object."""
        self._ask()
        key = (step.kind, step.name)
        if key == self._shelf.refuses:
            raise RefusedAction("in_use", f"{step.name} is in use")
        if step.act is Act.DELETE:
            self._shelf.objects.pop(key, None)
        else:
            assert step.wanted is not None
            values = dict(step.wanted.values)
            self._shelf.objects[key] = FoundObject(step.kind, step.name, values, marked=True)
        self._shelf.done.append(step)

    async def aclose(self) -> None:
        """Count it."""
        self._shelf.closed += 1

    def _ask(self) -> None:
        if self._shelf.silent:
            raise ServiceUnavailable("the shelf does not answer")
