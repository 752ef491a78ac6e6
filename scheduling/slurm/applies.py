"""The commands by which sacctmgr makes, changes and takes away single objects. Pure.

Every change names the cluster: a slurmdbd may serve several, and only this one is the policy's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import RefusedAction
from gpuwarden.scheduling.engines import Act
from gpuwarden.scheduling.slurm.accounts import (
    ACCOUNT,
    BETWEEN,
    QOS,
    TRES_FIELDS,
    USER,
)
from gpuwarden.scheduling.slurm.configs import clock_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpuwarden.scheduling.engines import EngineObject, FoundObject, Step
    from gpuwarden.scheduling.slurm.readings import Bookkeeping

_BUILT_IN_QOS = "normal"
"""Every database has it, and other associations may rest on it."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of sacctmgr.

    Attributes:
        words: after the program's name.
    """

    words: tuple[str, ...]

    @property
    def again(self) -> bool:
        """Whether its complaint that there is nothing to do is as good as done.

        What is to be deleted was seen a moment ago: it must be there.
        """
        return self.words[0] != "delete"


def commands_of(step: Step, there: Bookkeeping, cluster: str) -> tuple[Command, ...]:
    """What carries out a step, from what is there now; nothing where it is done already.

    Args:
        step: of a plan.
        there: as it was read just before.
        cluster: its name.

    Raises:
        RefusedAction: what it would touch is not gpuwarden's, or was taken by somebody meanwhile.
    """
    have = {each.key: each for each in there.found((step.name,))}.get((step.kind, step.name))
    if have is not None and not have.marked:
        raise RefusedAction(
            "not_ours", f"{have} is there, and does not carry gpuwarden's mark: it is left alone"
        )
    if step.act is Act.DELETE:
        return () if have is None else tuple(_deletion(have, there, cluster))
    if step.wanted is None:
        raise RefusedAction("no_object", f"{step} names nothing that could be made")
    return tuple(_making(step.wanted, have, there, cluster))


def account_in(name: str) -> str:
    """The account of an association, by its name."""
    return _pair(name)[1]


def merged(commands: Sequence[Command]) -> tuple[Command, ...]:
    """The same, with those about people that differ in nothing else made one; these come last.

    What has to be done before somebody can go, such as another default account, comes before.
    """
    people: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    others: list[Command] = []
    for command in commands:
        words = command.words
        at = next((n for n, word in enumerate(words) if word.startswith("name=")), None)
        if at is None or words[:2] not in _OF_PEOPLE:
            others.append(command)
        else:
            key = (words[:at], words[at + 1 :])
            people.setdefault(key, []).append(words[at].removeprefix("name="))
    lists = (
        Command((*before, f"name={','.join(names)}", *after))
        for (before, after), names in people.items()
    )
    return (*others, *lists)


_OF_PEOPLE: Final = (("add", "user"), ("delete", "user"))


def _making(
    wanted: EngineObject, have: FoundObject | None, there: Bookkeeping, cluster: str
) -> Iterator[Command]:
    if wanted.kind == USER:
        if have is None:
            user, account = _pair(wanted.name)
            words = ("add", "user", f"name={user}", f"account={account}", f"cluster={cluster}")
            yield Command(words)
        return
    if have is None:
        fields = [word for word in _changes(wanted.values, {}) if not word.endswith("=")]
        here = [f"cluster={cluster}"] if wanted.kind == ACCOUNT else []
        yield Command(("add", wanted.kind, f"name={wanted.name}", *fields, *here))
        return
    if wanted.kind == QOS:
        if changed := _changes(wanted.values, have.values):
            yield Command(("modify", "qos", wanted.name, "set", *changed))
        return
    yield from _account_changes(wanted, have, there, cluster)


def _account_changes(
    wanted: EngineObject, have: FoundObject, there: Bookkeeping, cluster: str
) -> Iterator[Command]:
    """A description is the account's, on all clusters; all else is of its association here."""
    if not there.is_here(wanted.name):
        parent = f"parent={wanted.values['Parent']}"
        yield Command(("add", "account", f"name={wanted.name}", parent, f"cluster={cluster}"))
    changed = _changes(wanted.values, have.values)
    described = [word for word in changed if word.startswith("description=")]
    here = [word for word in changed if word not in described]
    if described:
        yield Command(("modify", "account", "set", *described, "where", f"name={wanted.name}"))
    if here:
        where = ("where", f"name={wanted.name}", f"cluster={cluster}")
        yield Command(("modify", "account", "set", *here, *where))


def _changes(wanted: Mapping[str, str], have: Mapping[str, str]) -> list[str]:
    """`field=value` of all that differs."""
    words = []
    for name, value in wanted.items():
        found = have.get(name)
        if (found or "") == value:
            continue
        if name in TRES_FIELDS:
            words.append(f"{name.lower()}={_tres_change(value, found or '')}")
        else:
            words.append(f"{name.lower()}={_assigned(name, value)}")
    return words


def _tres_change(wanted: str, found: str) -> str:
    """Limits, and -1 for each that is to go: those not named stay as they are."""
    keep = {word.partition("=")[0] for word in wanted.split(",") if word}
    gone = {word.partition("=")[0] for word in found.split(",") if word} - keep
    return ",".join(filter(None, (wanted, *(f"{name}=-1" for name in sorted(gone)))))


def _assigned(name: str, value: str) -> str:
    """A value as it is set, where that is not how it is shown."""
    if name == "PreemptExemptTime":
        return value or "-1"  # which clears it
    if name == "GraceTime":
        return str(clock_seconds(value))
    return value


def _deletion(have: FoundObject, there: Bookkeeping, cluster: str) -> Iterator[Command]:
    if have.kind == QOS:
        if have.name == _BUILT_IN_QOS:
            # It was handed over by its description, and is given back as it came.
            fields = ("description=Normal QOS default", "priority=0", "preempt=", "gracetime=0")
            clear = ("preemptexempttime=-1", "flags-=DenyOnLimit")
            yield Command(("modify", "qos", have.name, "set", *fields, *clear))
        else:
            yield Command(("delete", "qos", f"name={have.name}"))
        return
    if have.kind == ACCOUNT:
        # Where no other cluster uses it all of it goes: a rest would keep its mark for ever.
        here = (f"cluster={cluster}",) if have.name in there.elsewhere else ()
        yield Command(("delete", "account", "where", f"name={have.name}", *here))
        return
    user, account = _pair(have.name)
    others = [name for name in there.accounts_of(user) if name != account]
    if others and there.default_of(user) == account:
        # Slurm keeps the account that is somebody's default.
        usual = min(others, key=lambda name: (not there.is_ours(name), name))
        words = ("set", f"defaultaccount={usual}", "where", f"name={user}", f"cluster={cluster}")
        yield Command(("modify", "user", *words))
    yield Command(
        ("delete", "user", "where", f"name={user}", f"account={account}", f"cluster={cluster}")
    )


def _pair(name: str) -> tuple[str, str]:
    user, _, account = name.rpartition(BETWEEN)
    return user, account
