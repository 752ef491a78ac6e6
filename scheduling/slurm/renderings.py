"""A policy as Slurm's objects: what sacctmgr keeps, and what belongs into slurm.conf. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from gpuwarden import __version__
from gpuwarden.errors import InvalidInput
from gpuwarden.scheduling.engines import By, EngineObject, Remark, Rendering
from gpuwarden.scheduling.policies import policy_hash
from gpuwarden.scheduling.slurm.accounts import account_objects, has_moving_cap
from gpuwarden.scheduling.slurm.configs import (
    Test,
    config_terms,
    preemptible,
    preempting,
)
from gpuwarden.scheduling.slurm.names import by_qos, partition_of
from gpuwarden.scheduling.slurm.versions import version_of, written

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuwarden.scheduling.policies import Policy, Priority
    from gpuwarden.scheduling.slurm.configs import ConfigTerm
    from gpuwarden.scheduling.slurm.versions import Version

FRAGMENT: Final = "gpuwarden.conf"
"""What slurm.conf includes."""
CONFIG: Final = "file"
PARTITION: Final = "partition"


def render(policy: Policy, *, version: str | None) -> Rendering:
    """What a policy comes to on a cluster that is there.

    Args:
        policy: that checks without errors for Slurm.
        version: as `scontrol --version` tells it; None is the newest that is known.

    Raises:
        InvalidInput: Slurm cannot do it in the way that `slurm.preempt` wants; or the version.
    """
    known = version_of(version)
    check_partitions(policy)
    check_people(policy)
    objects = [] if not by_qos(policy) else list(account_objects(policy))
    objects.append(_config(policy, known))
    objects += [_partition(policy, *each) for each in partitions_of(policy)]
    return Rendering(
        engine="slurm",
        version=written(known),
        policy=policy_hash(policy),
        objects=tuple(objects),
        remarks=tuple(_remarks(policy)),
    )


# -- slurm.conf


def _config(policy: Policy, version: Version) -> EngineObject:
    terms = config_terms(policy, version)
    return EngineObject(
        kind=CONFIG,
        name=FRAGMENT,
        values={term.key: term.value for term in terms},
        text=fragment(policy, version),
        by=By.HAND,
        note=(
            f"put it beside slurm.conf with `include {FRAGMENT}` as its last line, take the same "
            "keys out above it, and restart slurmctld"
        ),
    )


def fragment(policy: Policy, version: Version) -> str:
    """The file that slurm.conf includes.

    Args:
        policy: which.
        version: of the Slurm that reads it.
    """
    lines = [
        f"# gpuwarden {__version__}, Slurm {written(version)}, policy {policy_hash(policy)}.",
        "# `gpuwarden policy diff` says what of it a cluster lacks.",
        *config_lines(config_terms(policy, version)),
    ]
    partitions = [_partition_line(policy, name, each) for name, each in partitions_of(policy)]
    if partitions:
        lines += ["# Partitions of the priorities: the higher tier goes first.", *partitions]
    return "\n".join([*lines, ""])


def config_lines(terms: Sequence[ConfigTerm]) -> Iterator[str]:
    """Lines of slurm.conf, each with its reason above it."""
    for term in terms:
        note = " (with the words that are there already)" if term.test is Test.HAS else ""
        yield f"# {term.why}{note}."
        yield f"{term.key}={term.value}"


# -- partitions instead of qualities of service


def partitions_of(policy: Policy) -> list[tuple[str, Priority]]:
    """Name and priority of each partition that a policy needs; none where QOS do it."""
    if by_qos(policy):
        return []
    named = {
        partition_of(policy, card.name, priority.name) or priority.name: priority
        for card in policy.cards
        for priority in policy.priorities
    }
    return sorted(named.items(), key=lambda each: (each[1].value, each[0]))


def check_partitions(policy: Policy) -> None:
    """Refuse a policy that partitions cannot express.

    Raises:
        InvalidInput: who may be asked to leave by some is not so by all of higher value.
    """
    if by_qos(policy) or not preempting(policy):
        return
    for name in sorted(preemptible(policy)):
        lower = policy.priority(name)
        for each in policy.priorities:
            if lower is None or each.value <= lower.value or name in each.preempts:
                continue
            raise InvalidInput(
                f"priorities: with `slurm: {{preempt: partitions}}` every higher partition "
                f"preempts {name}, also {each.name}, which does not here: let it "
                f"(preempts: [{name}]), or write preempt: qos"
            )


def check_people(policy: Policy) -> None:
    """Refuse names that Slurm's database garbles.

    Raises:
        InvalidInput: a name with a backslash: it is written into SQL as it is, and never found.
    """
    for number, team in enumerate(policy.teams):
        for user in team.users:
            if "\\" in user and by_qos(policy):
                raise InvalidInput(
                    f"teams[{number}].users: Slurm's database cannot keep {user}: have the nodes "
                    "know people without a domain and a backslash before their names, or with "
                    "@domain behind them"
                )


def _partition(policy: Policy, name: str, priority: Priority) -> EngineObject:
    return EngineObject(
        kind=PARTITION,
        name=name,
        values=partition_values(policy, priority),
        text=_partition_line(policy, name, priority) + "\n",
        by=By.HAND,
        note=f"it is in {FRAGMENT}; give it the nodes that it is for",
    )


def partition_values(policy: Policy, priority: Priority) -> dict[str, str]:
    """What is compared of a partition, as `scontrol show partition` prints it."""
    leaves = preempting(policy) and priority.name in preemptible(policy)
    grace = policy.preemption.deadline if leaves and policy.preemption else 0
    return {
        "PriorityTier": str(_tier(policy, priority)),
        "PreemptMode": "REQUEUE" if leaves else "OFF",
        "GraceTime": str(math.ceil(grace)),
    }


def _partition_line(policy: Policy, name: str, priority: Priority) -> str:
    values = " ".join(f"{key}={value}" for key, value in partition_values(policy, priority).items())
    usual = " Default=YES" if priority == policy.usual_priority else ""
    return f"PartitionName={name} Nodes=ALL{usual} MaxTime=INFINITE State=UP {values}"


def _tier(policy: Policy, priority: Priority) -> int:
    """Places among the priorities: tiers end at 65,533, values do not."""
    return 1 + sorted({each.value for each in policy.priorities}).index(priority.value)


# -- what Slurm cannot do


def _remarks(policy: Policy) -> Iterator[Remark]:
    if not by_qos(policy):
        yield Remark(
            "slurm.preempt",
            "without accounting Slurm knows no quotas, shares or budgets: partitions order the "
            "queue, and nothing else of this policy holds",
        )
    yield from _remarks_of_teams(policy)
    yield from _remarks_of_budgets(policy)
    if policy.preemption is not None and preempting(policy):
        yield from _remarks_of_preemption(policy)


def _remarks_of_teams(policy: Policy) -> Iterator[Remark]:
    if not by_qos(policy):
        return
    for number, team in enumerate(policy.teams):
        if any(team.borrow.values()):
            yield Remark(
                f"teams[{number}].borrow",
                "Slurm knows a ceiling (quota and borrowed together), and not whose cards are "
                "lent: who wants its own back waits until jobs end, or preempts by priority",
            )
        if team.lend is not None:
            yield Remark(
                f"teams[{number}].lend",
                "Slurm keeps no card back for an account: give the team a partition of its own, "
                "or book the cards",
            )


def _remarks_of_budgets(policy: Policy) -> Iterator[Remark]:
    zone = policy.timezone
    for number, budget in enumerate(policy.budgets):
        path = f"budgets[{number}]"
        if not by_qos(policy):
            continue
        if budget.kind == "soft":
            yield Remark(path, "a soft budget stops nothing in Slurm; gpuwarden scheduler tells")
        elif has_moving_cap(policy, budget.team) and budget.per != "month":
            yield Remark(
                path,
                f"Slurm knows no budget of a {budget.per}: gpuwarden scheduler moves the "
                f"account's GrpTRESMins when one begins in {zone}; while it is down the former "
                "cap stays",
            )
        else:
            yield Remark(
                path, f"Slurm begins a month by its controller's clock: let that be {zone}"
            )
        if budget.running == "leave":
            yield Remark(
                f"{path}.running",
                "Slurm starts nothing that could outrun a budget, and ends nothing for it: "
                "gpuwarden scheduler asks who still runs to leave",
            )


def _remarks_of_preemption(policy: Policy) -> Iterator[Remark]:
    yield Remark(
        "preemption.minimum_run",
        "Slurm counts it from the start alone (PreemptExemptTime), not from the last save",
    )
    yield Remark(
        "preemption",
        "Slurm chooses who leaves, by priority and not by the work that would be lost; with "
        "preempt_youngest_first among SchedulerParameters, of equals who has run the shortest",
    )
    yield Remark(
        "preemption.at_most",
        "Slurm asks a job to leave as often as it likes, and knows no back_off: gpuwarden "
        "scheduler tells who had to leave more often. One that comes back by itself waits longer "
        "each time and is then held, where slurm.requeues says how often it may",
    )
    if policy.preemption is not None and policy.preemption.notice == "epoch":
        yield Remark(
            "preemption.notice",
            "the notice is a signal: it lets the epoch end in jobs of `gpuwarden submit`, and "
            "others that train with --on-signal epoch and ask for --signal=B:USR1@SECONDS",
        )
    yield Remark(
        "preemption",
        "a job that left may start again after cred_expire (AuthInfo in slurm.conf; 120 s by "
        "default)",
    )
