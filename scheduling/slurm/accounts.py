"""A policy as what sacctmgr keeps: qualities of service, accounts below one, people in them.

What is gpuwarden's carries a mark where Slurm has room for words: the description. An association
of a person has none, and is gpuwarden's if its account is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from gpuwarden.scheduling.engines import OWNER, EngineObject
from gpuwarden.scheduling.slurm.configs import preemptible, preempting, written_clock
from gpuwarden.scheduling.slurm.names import account_of, qos_of, top_account_of, tres_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.scheduling.policies import Policy, Priority, Team

QOS: Final = "qos"
ACCOUNT: Final = "account"
USER: Final = "user"
KINDS: Final = (QOS, ACCOUNT, USER)
"""In the order in which they are made."""
BETWEEN: Final = "@"
"""Between a person and an account in the name of an association, such as ana@vision."""
TRES_FIELDS: Final = ("GrpTRES", "GrpTRESMins")
"""Limits by what is counted: written one by one, and taken away by -1."""


def mark(kind: str, name: str) -> str:
    """The description of what is gpuwarden's."""
    return f"{OWNER}: {kind} {name}"


def is_marked(description: str) -> bool:
    """Whether a description is one of `mark`."""
    return description.startswith(f"{OWNER}: ")


def marking(kind: str, name: str, description: str) -> str:
    """The command by which an administrator hands something over to gpuwarden."""
    return f'sacctmgr modify {kind} {name} set description="{description}"'


def account_objects(policy: Policy) -> tuple[EngineObject, ...]:
    """Everything that sacctmgr is to keep for a policy, in the order in which it is made."""
    top = top_account_of(policy)
    objects = [_qos(policy, each) for each in _ascending(policy)]
    objects.append(_top(policy))
    for team in sorted(policy.teams, key=lambda each: each.name):
        account = account_of(policy, team.name)
        objects.append(_account(policy, team, top))
        objects += [_user(account, user) for user in sorted(set(team.users))]
    # People after all accounts: deleted the other way round, they leave before their account.
    return tuple(sorted(objects, key=lambda each: KINDS.index(each.kind)))


def written_tres(limits: Mapping[str, int]) -> str:
    """Limits in one order, such as `gres/gpu=24,gres/gpu:a100=24`."""
    return ",".join(f"{name}={limits[name]}" for name in sorted(limits))


def normal_tres(text: str) -> str:
    """Limits as Slurm prints them, in the order of `written_tres`."""
    words = [word for word in text.split(",") if word]
    return ",".join(sorted(words, key=lambda word: word.partition("=")[0]))


def normal_words(text: str) -> str:
    """Names as Slurm prints them, in one order."""
    return ",".join(sorted(word.strip() for word in text.split(",") if word.strip()))


def month_limit_minutes(policy: Policy, team: str) -> int | None:
    """GPU-minutes that a team's hard budget of a month allows, or None."""
    limits = [
        each.limit.amount
        for each in policy.budgets_of(team)
        if each.kind == "hard" and each.per == "month"
    ]
    return math.floor(min(limits) * 60) if limits else None


def has_moving_cap(policy: Policy, team: str) -> bool:
    """Whether a hard budget of a shorter period moves the team's cap while the daemon runs."""
    return any(each.kind == "hard" and each.per != "month" for each in policy.budgets_of(team))


def team_limits(policy: Policy, most: Mapping[str, int]) -> dict[str, int]:
    """Limits on what is counted: by type, and over all types.

    The sum over all types matters as well: Slurm counts a card of a type only for jobs that ask for
    the type by name.

    Args:
        policy: which.
        most: kind of cards -> how many.
    """
    limits = {"gres/gpu": sum(most.values())}
    for card, count in most.items():
        name = tres_of(policy, card)
        if name != "gres/gpu":
            limits[name] = limits.get(name, 0) + count
    return limits


def _ascending(policy: Policy) -> Sequence[Priority]:
    """Lower ones first: a QOS that is named as preempted must be there already."""
    return sorted(policy.priorities, key=lambda each: (each.value, each.name))


def _qos(policy: Policy, priority: Priority) -> EngineObject:
    name = qos_of(policy, priority.name) or priority.name
    terms = policy.preemption
    leaves = terms is not None and preempting(policy) and priority.name in preemptible(policy)
    preempts = priority.preempts if preempting(policy) else ()
    values = {
        "Description": mark("priority", priority.name),
        "Priority": str(priority.value),
        "Preempt": normal_words(",".join(qos_of(policy, each) or each for each in preempts)),
        # Both are those of the job that leaves.
        "GraceTime": written_clock(terms.deadline if leaves and terms else 0),
        "PreemptExemptTime": written_clock(terms.minimum_run) if leaves and terms else "",
        "Flags": "DenyOnLimit",
    }
    return _object(QOS, name, values, described=True)


def _top(policy: Policy) -> EngineObject:
    top = top_account_of(policy)
    counts = {each.name: each.count for each in policy.cards}
    values = {
        "Description": mark("all", "teams"),
        "Parent": "root",
        "FairShare": "1",
        "GrpTRES": written_tres(team_limits(policy, counts)),
    }
    return _object(ACCOUNT, top, values, described=True)


def _account(policy: Policy, team: Team, top: str) -> EngineObject:
    allowed = [each.name for each in policy.priorities if team.may_choose(each.name)]
    usual = policy.usual_priority.name
    if usual not in allowed:
        usual = min(allowed, key=lambda name: _value(policy, name))
    most = {each.name: team.most(each.name) for each in policy.cards}
    values = {
        "Description": mark("team", team.name),
        "Parent": top,
        "FairShare": str(team.share),
        "QOS": normal_words(",".join(qos_of(policy, each) or each for each in allowed)),
        "DefaultQOS": qos_of(policy, usual) or usual,
        "GrpTRES": written_tres(team_limits(policy, most)),
    }
    if not has_moving_cap(policy, team.name):
        minutes = month_limit_minutes(policy, team.name)
        values["GrpTRESMins"] = "" if minutes is None else f"gres/gpu={minutes}"
    return _object(ACCOUNT, account_of(policy, team.name), values, described=True)


def _user(account: str, user: str) -> EngineObject:
    return _object(USER, f"{user}{BETWEEN}{account}", {"Account": account})


def _object(
    kind: str, name: str, values: Mapping[str, str], *, described: bool = False
) -> EngineObject:
    """An object; one with a description is taken over by the mark in it."""
    text = _text(kind, name, values)
    take_over = marking(kind, name, values["Description"]) if described else ""
    return EngineObject(kind, name, values, text, take_over=take_over)


def _text(kind: str, name: str, values: Mapping[str, str]) -> str:
    """The command that a person would type for it."""
    if kind == USER:
        return f"sacctmgr add user {name.partition(BETWEEN)[0]} account={values['Account']}"
    words = [
        f'{key}="{value}"' if " " in value else f"{key}={value}"
        for key, value in values.items()
        if value
    ]
    return " ".join([f"sacctmgr add {kind} {name}", *words])


def _value(policy: Policy, name: str) -> int:
    found = policy.priority(name)
    return 0 if found is None else found.value
