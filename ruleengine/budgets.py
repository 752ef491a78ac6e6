"""Budgets of teams: the file that `budgets` in engine.yaml names, and what it means. Pure.

That is a file of budgets, or the scheduler's policy file, of which only the budgets count here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, model_validator

from gpuwarden.budget_terms import GPU_HOURS, Budget, ScheduledBudget, each_once
from gpuwarden.checked_files import CheckedFile, check_file
from gpuwarden.diagnostics import Diagnostic, Severity, did_you_mean
from gpuwarden.fields import Strict, as_tuple, known_zone
from gpuwarden.yaml_files import load_located

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from gpuwarden.ruleengine.directories import Directory
    from gpuwarden.yaml_files import Node


class Budgets(Strict):
    """budgets.yaml."""

    version: Literal[1]
    """Of this file's format."""
    zone: Annotated[str, AfterValidator(known_zone)]
    """Whose calendar: an IANA name such as Europe/Berlin."""
    budgets: Annotated[tuple[Budget, ...], BeforeValidator(as_tuple)]
    """One for each team, period and unit at most."""

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        each_once(self.budgets)
        return self


class _PolicyBudgets(Strict):
    """What counts here of the scheduler's policy file; all else of it is not looked at."""

    model_config = ConfigDict(extra="ignore")

    version: Literal[1]
    timezone: Annotated[str, AfterValidator(known_zone)]
    budgets: Annotated[tuple[ScheduledBudget, ...], BeforeValidator(as_tuple)] = ()

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        each_once(self.budgets)
        return self


# -- reading


def check_budgets(
    path: Path, directory: Directory | None, *, currencies: frozenset[str] | None
) -> CheckedFile[Budgets]:
    """Say everything that is wrong with a file of budgets.

    Args:
        path: the file; a policy file of the scheduler counts by its budgets.
        directory: whose teams they are for, or None: any.
        currencies: in which engine.yaml has prices, or None: any.
    """
    if not _is_policy(load_located(path).root):
        return check_file(
            path,
            Budgets,
            lambda found, root: _references(found.budgets, root, directory, currencies),
        )
    part = check_file(
        path,
        _PolicyBudgets,
        lambda found, root: _references(found.budgets, root, directory, currencies),
    )
    content = None
    if part.content is not None:
        content = Budgets(version=1, zone=part.content.timezone, budgets=part.content.budgets)
    return CheckedFile(path, content, part.diagnostics, part.text)


def _is_policy(root: Node | None) -> bool:
    """Whether a file is the scheduler's policy: it has teams, and its zone goes by another name."""
    return root is not None and root.child("teams") is not None and root.child("zone") is None


def load_budgets(
    path: Path, directory: Directory | None, *, currencies: frozenset[str] | None
) -> Budgets:
    """Read budgets that can be used.

    Raises:
        InvalidInput: its text shows every mistake with its line.
    """
    return check_budgets(path, directory, currencies=currencies).usable()


def _references(
    budgets: Sequence[Budget],
    root: Node,
    directory: Directory | None,
    currencies: frozenset[str] | None,
) -> Iterator[Diagnostic]:
    teams = _teams(directory)
    for index, each in enumerate(budgets):
        place = f"budgets[{index}]"
        if teams is not None and each.team not in teams:
            span = root.at(("budgets", index, "team")).span
            text = f'{place}.team: the directory knows no team "{each.team}": nobody uses it up'
            hint = did_you_mean(each.team, sorted(teams))
            yield Diagnostic("GW420", Severity.WARNING, span, text, hint)
        elif directory is not None and each.warn_at and directory.team(each.team).contact is None:
            span = root.at(("budgets", index, "team")).span
            text = f"{place}.team: {each.team} has no contact in the directory: the operators are "
            text += "told in its place"
            yield Diagnostic("GW421", Severity.WARNING, span, text, "give teams.X.contact")
        if currencies is not None and each.unit not in (GPU_HOURS, *currencies):
            span = root.at(("budgets", index, "limit")).span
            text = (
                f"{place}.limit: no price in engine.yaml is in {each.unit}: its use is never known"
            )
            yield Diagnostic("GW422", Severity.ERROR, span, text)


def _teams(directory: Directory | None) -> frozenset[str] | None:
    if directory is None:
        return None
    return frozenset(directory.teams) | {user.team for user in directory.users.values()}
