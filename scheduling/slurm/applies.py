"""The commands by which sacctmgr makes, changes and takes away single objects. Pure.

Every change names the cluster: a slurmdbd may serve several, and only this one is the policy's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.errors import RefusedAction
from gpuwarden.scheduling.engines import Act
from gpuwarden.scheduling.slurm.accounts import (
    ACCOUNT,
    BETWEEN,
    QOS,
    TRES_FIELDS,
    USER,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpuwarden.scheduling.engines import EngineObject, FoundObject, Step
    from gpuwarden.scheduling.slurm.readings import Bookkeeping

_ADDED = ("Description", "Parent")
"""Fields of an account that are given when it is made."""
_ORGANIZATION = "gpuwarden"
_BUILT_IN_QOS = "normal"
"""Every database has it, and other associations may rest on it."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of sacctmgr.

    Attributes:
        words: after the program's name.
        settled: what it complains of where it was done before, in small letters; then that is no
            failure.
    """

    words: tuple[str, ...]
    settled: str = "nothing"


def commands_of(step: Step, there: Bookkeeping, cluster: str) -> tuple[Command, ...]:
    """What carries out a step, from what is there now; nothing where it is done already.

    Args:
        step: of a plan.
        there: as it was read just before.
        cluster: its name.

    Raises:
        RefusedAction: what it would touch is not gpuwarden's, or was taken by somebody meanwhile.
    """
    have = {each.key: each for each in there.found()}.get((step.kind, step.name))
    if have is not None and not have.marked:
        raise RefusedAction(
            "not_ours", f"{have} is there, and does not carry gpuwarden's mark: it is left alone"
        )
    if step.act is Act.DELETE:
        return () if have is None else tuple(_deletion(have, there, cluster))
    if step.wanted is None:
        raise RefusedAction("no_object", f"{step} names nothing that could be made")
    return tuple(_making(step.wanted, have, cluster))


def _making(wanted: EngineObject, have: FoundObject | None, cluster: str) -> Iterator[Command]:
    values = wanted.values
    if wanted.kind == USER:
        if have is None:
            user, account = _pair(wanted.name)
            words = ("add", "user", f"name={user}", f"account={account}", f"cluster={cluster}")
            yield Command(words)
        return
    if have is None:
        yield _addition(wanted, cluster)
    changed = _changes(values, {} if have is None else have.values)
    if wanted.kind == QOS:
        if changed:
            yield Command(("modify", "qos", wanted.name, "set", *changed))
        return
    yield from _account_changes(wanted, have, changed, cluster)


def _addition(wanted: EngineObject, cluster: str) -> Command:
    words = [
        "add",
        wanted.kind,
        f"name={wanted.name}",
        f"description={wanted.values['Description']}",
    ]
    if wanted.kind == ACCOUNT:
        words += [
            f"organization={_ORGANIZATION}",
            f"parent={wanted.values['Parent']}",
            f"cluster={cluster}",
        ]
    return Command(tuple(words))


def _account_changes(
    wanted: EngineObject, have: FoundObject | None, changed: list[str], cluster: str
) -> Iterator[Command]:
    """A description is the account's, on all clusters; all else is of its association here."""
    described = [word for word in changed if word.startswith("description=")]
    here = [word for word in changed if word not in described]
    if have is not None and described:
        yield Command(("modify", "account", "set", *described, "where", f"name={wanted.name}"))
    if here:
        where = ("where", f"name={wanted.name}", f"cluster={cluster}")
        yield Command(("modify", "account", "set", *here, *where))


def _changes(wanted: Mapping[str, str], have: Mapping[str, str]) -> list[str]:
    """`field=value` of all that differs; what was given with the object's making is left out."""
    words = []
    for name, value in wanted.items():
        found = have.get(name)
        if found == value or (not have and (name in _ADDED or not value)):
            continue
        if name in TRES_FIELDS:
            words.append(f"{name.lower()}={_tres_change(value, found or '')}")
        else:
            words.append(f"{name.lower()}={value or _nothing(name)}")
    return words


def _tres_change(wanted: str, found: str) -> str:
    """Limits, and -1 for each that is to go: those not named stay as they are."""
    keep = {word.partition("=")[0] for word in wanted.split(",") if word}
    gone = {word.partition("=")[0] for word in found.split(",") if word} - keep
    return ",".join(filter(None, (wanted, *(f"{name}=-1" for name in sorted(gone)))))


def _nothing(name: str) -> str:
    """What clears a field."""
    return "-1" if name == "PreemptExemptTime" else ""


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
        yield Command(("delete", "account", "where", f"name={have.name}", f"cluster={cluster}"))
        return
    user, account = _pair(have.name)
    others = [name for name in there.accounts_of(user) if name != account]
    if others and there.defaults.get(user) == account:
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
