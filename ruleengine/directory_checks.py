"""Reading a directory, and every mistake in it at its place: form first, then what it refers to.

Errors make it unusable. Warnings say who could not be told, so that an operator finds out before a
notice does: GW410 a user without an address, GW411 one who has left and whom nobody stands in for,
GW412 a team that the file says nothing of, GW413 no address for operators, GW414 an address that is
another's as well, GW415 two names that differ only in small and capital letters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.checked_files import CheckedFile, check_file
from gpuwarden.diagnostics import Diagnostic, Severity, did_you_mean
from gpuwarden.ruleengine.directories import Directory
from gpuwarden.ruleengine.recipients import day_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpuwarden.ruleengine.directories import User
    from gpuwarden.yaml_files import Node


def check_directory(path: Path, *, now: float) -> CheckedFile[Directory]:
    """Say everything that is wrong with a directory, and who could not be told.

    Args:
        path: the file.
        now: Unix time, for who has left.
    """

    def look(directory: Directory, root: Node) -> Iterator[Diagnostic]:
        yield from _references(directory, root)
        yield from _unreachable(directory, root, now)
        yield from _alike(directory, root)

    return check_file(path, Directory, look)


def load_directory(path: Path) -> Directory:
    """Read a directory that can be used.

    Raises:
        InvalidInput: its text shows every mistake with its line.
    """
    return check_directory(path, now=0.0).usable()


def _references(directory: Directory, root: Node) -> Iterator[Diagnostic]:
    for name, user in directory.users.items():
        deputy = user.deputy
        if deputy is None:
            continue
        span = root.at(("users", name, "deputy")).span
        place = f"users.{name}.deputy"
        if deputy == name:
            text = f"{place}: nobody stands in for themselves"
            yield Diagnostic("GW401", Severity.ERROR, span, text)
        elif deputy not in directory.users:
            text = f'{place}: "{deputy}" is no user of this directory'
            hint = did_you_mean(deputy, directory.users)
            yield Diagnostic("GW401", Severity.ERROR, span, text, hint)


def _unreachable(directory: Directory, root: Node, now: float) -> Iterator[Diagnostic]:
    for name, user in directory.users.items():
        place = f"users.{name}"
        users = root.child("users")
        at = root.span if users is None else users.keys.get(name, users.span)
        if user.present(day_of(user, now)):
            if not _addressed(user):
                text = f"{place}: has no address, so that no notice reaches them and no job of "
                text += "theirs is ended"
                yield Diagnostic("GW410", Severity.WARNING, at, text, "give email or slack")
        elif not _stood_in_for(directory, user, now):
            text = f"{place}: has left, and nobody stands in: no job of theirs is ended"
            yield Diagnostic("GW411", Severity.WARNING, at, text, "give a deputy")
        for team in user.member_of if directory.teams else ():
            if team not in directory.teams:
                text = f'{place}: the team "{team}" is not under teams'
                hint = did_you_mean(team, directory.teams)
                yield Diagnostic("GW412", Severity.WARNING, at, text, hint)
    operators = directory.operators
    if not operators.email and operators.slack is None:
        text = "operators: no address: nobody can be told by the engine that an owner cannot be"
        yield Diagnostic("GW413", Severity.WARNING, root.at(("operators",)).span, text)


def _alike(directory: Directory, root: Node) -> Iterator[Diagnostic]:
    """Users who may be one: whoever has gone through a proxy by mail address is then neither."""
    addresses: dict[str, str] = {}
    names: dict[str, str] = {}
    for name, user in directory.users.items():
        users = root.child("users")
        at = root.span if users is None else users.keys.get(name, users.span)
        first = names.setdefault(name.lower(), name)
        if first != name:
            text = f'users.{name}: there is "{first}" as well: is one of them misspelt?'
            yield Diagnostic("GW415", Severity.WARNING, at, text)
        for address in user.addresses:
            other = addresses.setdefault(address.lower(), name)
            if other != name:
                text = f"users.{name}: {address} is the address of {other} as well: each reads of "
                text += "the other's jobs"
                yield Diagnostic("GW414", Severity.WARNING, at, text)


def _addressed(user: User) -> bool:
    return user.email is not None or user.slack is not None


def _stood_in_for(directory: Directory, user: User, now: float) -> bool:
    deputy = None if user.deputy is None else directory.users.get(user.deputy)
    return deputy is not None and _addressed(deputy) and deputy.present(day_of(deputy, now))
