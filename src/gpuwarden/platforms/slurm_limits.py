"""Limits of accounts and QOS, and how much of each is used now: `scontrol show assoc_mgr`.

The controller's own counters: what `sreport` and `sacctmgr` tell is hours old. Minutes of running
jobs are added every PriorityCalcPeriod (five minutes by default).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ASKED: Final = ("--oneliner", "show", "assoc_mgr", "flags=assoc,qos")
"""What `scontrol` is asked."""
CARDS: Final = "gres/gpu"

_HEADING: Final = "Current Association Manager state"
_ACCOUNT = re.compile(
    r"ClusterName=(?P<cluster>\S*) Account=(?P<account>.*?) UserName=(?P<user>\S*) Partition="
)
_USER = re.compile(r"(?P<name>.*)\([0-9]+\)")
_PARENT = re.compile(r" ParentAccount=(?P<name>\S+)\([0-9]+\) ")
_QOS = re.compile(r"QOS=(?P<name>.+?)\([0-9]+\) ")
_LIST = re.compile(r" (?P<key>GrpTRES|GrpTRESMins|GrpTRESRunMins)=(?P<value>\S*)")
_COUNTER = re.compile(r"(?P<name>[^=,]+)=(?P<limit>N|[0-9]{1,18})\((?P<used>[0-9]{1,18})\)(?:,|$)")


@dataclass(frozen=True, slots=True)
class Counter:
    """How much of something may be used, and is.

    Attributes:
        limit: None where there is none.
        used: now; of what is counted in minutes, since the counter was last reset.
    """

    limit: int | None
    used: int

    @property
    def left(self) -> int | None:
        """How much is left; None where there is no limit."""
        return None if self.limit is None else max(0, self.limit - self.used)


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one account, of one user in it, or of one QOS.

    Attributes:
        resources: such as `gres/gpu` -> what is in use at this moment.
        minutes: likewise, by minutes.
        running_minutes: likewise, that running jobs may still use by their time limits.
    """

    resources: Mapping[str, Counter] = field(default_factory=dict)
    minutes: Mapping[str, Counter] = field(default_factory=dict)
    running_minutes: Mapping[str, Counter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AllLimits:
    """Everything that the controller counts.

    Attributes:
        accounts: by the account's name.
        users: by (account, user).
        qos: by the QOS's name.
        parents: account -> the one that it is below.
    """

    accounts: Mapping[str, Limits] = field(default_factory=dict)
    users: Mapping[tuple[str, str], Limits] = field(default_factory=dict)
    qos: Mapping[str, Limits] = field(default_factory=dict)
    parents: Mapping[str, str] = field(default_factory=dict)

    def above(self, account: str) -> tuple[str, ...]:
        """An account and those that it is below, whose limits count for it too."""
        found = [account]
        while (parent := self.parents.get(found[-1])) is not None and parent not in found:
            found.append(parent)
        return tuple(found)


def decode_limits(text: str) -> AllLimits:
    """What `scontrol` printed for `ASKED`; without accounting there is nothing in it.

    Raises:
        ServiceUnavailable: it is no such answer.
    """
    if _HEADING not in text and "accounting" not in text.lower():
        raise ServiceUnavailable("`scontrol show assoc_mgr` answered in a form that is not known")
    accounts: dict[str, Limits] = {}
    users: dict[tuple[str, str], Limits] = {}
    qos: dict[str, Limits] = {}
    parents: dict[str, str] = {}
    for line in text.split("\n"):
        if (found := _ACCOUNT.match(line)) is not None:
            limits = _limits(line[found.end() :])
            user = _USER.fullmatch(found["user"])
            if user is not None:
                users.setdefault((found["account"], user["name"]), limits)
            elif not found["user"]:
                accounts.setdefault(found["account"], limits)
                if (parent := _PARENT.search(line, found.end())) is not None:
                    parents.setdefault(found["account"], parent["name"])
        elif (found := _QOS.match(line)) is not None:
            qos.setdefault(found["name"], _limits(line[found.end() :]))
    return AllLimits(accounts, users, qos, parents)


def _limits(text: str) -> Limits:
    lists: dict[str, str] = {}
    for match in _LIST.finditer(f" {text}"):
        # What is counted for each user and account of a QOS follows, and a remark may be last.
        lists.setdefault(match["key"], match["value"])
    return Limits(
        resources=dict(_counters(lists.get("GrpTRES", ""))),
        minutes=dict(_counters(lists.get("GrpTRESMins", ""))),
        running_minutes=dict(_counters(lists.get("GrpTRESRunMins", ""))),
    )


def _counters(text: str) -> Iterator[tuple[str, Counter]]:
    for match in _COUNTER.finditer(text):
        limit = None if match["limit"] == "N" else int(match["limit"])
        yield match["name"], Counter(limit, int(match["used"]))
