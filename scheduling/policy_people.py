"""Whether the people whom a policy names are known on a machine."""

from __future__ import annotations

import grp
import pwd
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.diagnostics import Diagnostic, Severity
from gpuwarden.yaml_files import path_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.yaml_files import Node, Step


@dataclass(frozen=True, slots=True)
class People:
    """Who is known.

    Attributes:
        has_user: whether there is a user of a name.
        has_group: whether there is a group of a name.
    """

    has_user: Callable[[str], bool]
    has_group: Callable[[str], bool]


def people_here() -> People:
    """Whom this machine knows, by its own files and whatever directory it asks."""

    def has_user(name: str) -> bool:
        try:
            pwd.getpwnam(name)
        except KeyError:
            return False
        return True

    def has_group(name: str) -> bool:
        try:
            grp.getgrnam(name)
        except KeyError:
            return False
        return True

    return People(has_user, has_group)


def check_people(policy: Policy, root: Node, people: People) -> Iterator[Diagnostic]:
    """Warn of everybody whom nobody knows.

    Args:
        policy: that is looked at.
        root: of its file.
        people: who is known.
    """
    named: list[tuple[tuple[Step, ...], str, Callable[[str], bool], str]] = []
    for key, names, known, word in (
        ("users", policy.operators.users, people.has_user, "user"),
        ("groups", policy.operators.groups, people.has_group, "group"),
    ):
        for index, name in enumerate(names):
            named.append((("operators", key, index), name, known, word))
    for place, team in enumerate(policy.teams):
        for index, name in enumerate(team.users):
            path: tuple[Step, ...] = ("teams", place, "users", index)
            named.append((path, name, people.has_user, "user"))
    for path, name, known, word in named:
        if not known(name):
            text = f'{path_text(path)}: this machine knows no {word} "{name}"'
            yield Diagnostic("GW659", Severity.WARNING, root.at(path).span, text)
