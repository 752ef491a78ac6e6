"""What a cluster has of a policy's objects, by sacctmgr and scontrol."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.scheduling.engines import FoundObject
from gpuwarden.scheduling.slurm.accounts import (
    ACCOUNT,
    BETWEEN,
    QOS,
    TRES_FIELDS,
    USER,
    is_marked,
    normal_tres,
    normal_words,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_QOS_FIELDS: Final = {
    "Name": "Name",
    "Priority": "Priority",
    "Preempt": "Preempt",
    "GraceTime": "GraceTime",
    "PreemptExemptTime": "PreemptExemptTime",
    "Flags": "Flags",
    "Description": "Description",
}
"""People's words come last: they may hold what separates values."""
_ASSOC_FIELDS: Final = {
    "Cluster": "Cluster",
    "Account": "Account",
    "User": "User",
    "Parent": "ParentName",
    "FairShare": "Share",
    "QOS": "QOS",
    "DefaultQOS": "DefaultQOS",
    "GrpTRES": "GrpTRES",
    "GrpTRESMins": "GrpTRESMins",
}
QOS_QUESTION: Final = (
    "show",
    "qos",
    "--parsable2",
    "--noheader",
    f"format={','.join(_QOS_FIELDS.values())}",
)
ACCOUNT_QUESTION: Final = (
    "show",
    "account",
    "--parsable2",
    "--noheader",
    "format=Account,Description",
)
_USER_FIELDS: Final = ("User", "DefaultAccount")
USER_QUESTION: Final = (
    "show",
    "user",
    "--parsable2",
    "--noheader",
    f"format={','.join(_USER_FIELDS)}",
)


ASSOC_QUESTION: Final = (
    "show",
    "assoc",
    "--parsable2",
    "--noheader",
    f"format={','.join(_ASSOC_FIELDS.values())}",
)
"""Of all clusters: an account that another one uses is not taken away there."""


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """What sacctmgr keeps of one cluster.

    Attributes:
        qos: name -> fields.
        descriptions: account -> its description, of all clusters.
        associations: (account, user or an empty text) -> fields, on this cluster.
        elsewhere: accounts that other clusters use.
        defaults: person -> the account that jobs without one are charged to.
    """

    qos: Mapping[str, Mapping[str, str]]
    descriptions: Mapping[str, str]
    associations: Mapping[tuple[str, str], Mapping[str, str]]
    elsewhere: frozenset[str]
    defaults: Mapping[str, str]

    def found(self, people: Iterable[str] = ()) -> Iterator[FoundObject]:
        """Everything, in the order in which it would be made: parents before children.

        Args:
            people: names of wanted associations. Slurm writes people in small letters, unless its
                database is told otherwise: these are spelled as they are wanted.
        """
        spelled = {name.lower(): name for name in people}
        for name, values in sorted(
            self.qos.items(), key=lambda each: (_number(each[1]["Priority"]), each[0])
        ):
            yield FoundObject(QOS, name, values, is_marked(values["Description"]))
        for account in sorted(self.descriptions, key=self._depth):
            here = self.associations.get((account, ""))
            ours = self.is_ours(account)
            if here is None and ours and account in self.elsewhere:
                continue  # it is that cluster's, and of no use here
            described = {"Description": self.descriptions[account], **(here or {})}
            yield FoundObject(ACCOUNT, account, described, ours)
        for account, user in sorted(self.associations):
            if user:
                name = f"{user}{BETWEEN}{account}"
                name = spelled.get(name.lower(), name)
                yield FoundObject(USER, name, {"Account": account}, self.is_ours(account))

    def is_ours(self, account: str) -> bool:
        """Whether an account carries gpuwarden's mark."""
        return is_marked(self.descriptions.get(account, ""))

    def accounts_of(self, user: str) -> tuple[str, ...]:
        """Where a person has an association."""
        wanted = user.lower()
        found = (account for account, name in self.associations if name.lower() == wanted)
        return tuple(sorted(found))

    def default_of(self, user: str) -> str | None:
        """The account that a person's jobs without one are charged to."""
        wanted = user.lower()
        found = (account for name, account in self.defaults.items() if name.lower() == wanted)
        return next(found, None)

    def is_here(self, account: str) -> bool:
        """Whether an account can be charged on this cluster; Slurm keeps the rest for long."""
        return (account, "") in self.associations

    def _depth(self, account: str) -> tuple[int, str]:
        depth, at = 0, account
        while at and depth < len(self.associations):
            at = self.associations.get((at, ""), {}).get("Parent", "")
            depth += 1
        return depth, account


def decode_bookkeeping(cluster: str, qos: str, account: str, assoc: str, user: str) -> Bookkeeping:
    """What the four questions were answered with; an empty text where one was not asked.

    Args:
        cluster: whose associations are meant.
        qos: answer to `QOS_QUESTION`.
        account: to `ACCOUNT_QUESTION`.
        assoc: to `ASSOC_QUESTION`.
        user: to `USER_QUESTION`.

    Raises:
        ServiceUnavailable: in another form than was asked for.
    """
    qualities = {row["Name"]: _qos_values(row) for row in _rows(qos, tuple(_QOS_FIELDS))}
    described = {
        row["Account"]: row["Description"] for row in _rows(account, ("Account", "Description"))
    }
    rows = _rows(assoc, tuple(_ASSOC_FIELDS))
    associations = {
        (row["Account"], row["User"]): _assoc_values(row)
        for row in rows
        if row["Cluster"] == cluster
    }
    elsewhere = frozenset(row["Account"] for row in rows if row["Cluster"] != cluster)
    defaults = {row["User"]: row["DefaultAccount"] for row in _rows(user, _USER_FIELDS)}
    return Bookkeeping(qualities, described, associations, elsewhere, defaults)


def decode_partitions(text: str) -> dict[str, dict[str, str]]:
    """Name -> settings of each partition of `scontrol --oneliner show partition`."""
    found = {}
    for line in text.splitlines():
        values = dict(re.findall(r"(\w+)=(\S*)", line))
        if "PartitionName" in values:
            found[values["PartitionName"]] = values
    return found


def _rows(text: str, names: Sequence[str]) -> list[dict[str, str]]:
    """Rows of an answer with `|` between values; the last may hold one."""
    rows = []
    for line in text.splitlines():
        values = line.split("|", len(names) - 1)
        if len(values) == len(names):
            rows.append(dict(zip(names, values, strict=True)))
        elif line.strip():
            raise ServiceUnavailable("sacctmgr answered in another form than it was asked for")
    return rows


def _qos_values(row: Mapping[str, str]) -> dict[str, str]:
    return {
        "Description": row["Description"],
        "Priority": row["Priority"],
        "Preempt": normal_words(row["Preempt"]),
        "GraceTime": row["GraceTime"],
        "PreemptExemptTime": row["PreemptExemptTime"],
        "Flags": normal_words(row["Flags"]),
    }


def _assoc_values(row: Mapping[str, str]) -> dict[str, str]:
    return {
        "Parent": row["Parent"],
        "FairShare": row["FairShare"],
        "QOS": normal_words(row["QOS"]),
        "DefaultQOS": row["DefaultQOS"],
        **{name: normal_tres(row[name]) for name in TRES_FIELDS},
    }


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0
