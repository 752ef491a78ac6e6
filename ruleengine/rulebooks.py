"""The rules and the directory in force, and their reload: all or nothing, and never silently."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from gpuwarden.errors import InvalidInput
from gpuwarden.files import fingerprint
from gpuwarden.ruleengine.budgets import load_budgets
from gpuwarden.ruleengine.directories import EMPTY
from gpuwarden.ruleengine.directory_checks import load_directory
from gpuwarden.ruleengine.loading import load_rule_files, rule_set_hash

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.ruleengine.budgets import Budgets
    from gpuwarden.ruleengine.directories import Directory
    from gpuwarden.ruleengine.model import Rule, RuleSet
    from gpuwarden.ruleengine.settings import Settings

log = structlog.get_logger(__name__)


class RuleBook:
    """What the engine goes by.

    Args:
        settings: which files to read.

    Raises:
        InvalidInput: a file is wrong; an engine does not start on wrong rules.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seen = self._fingerprint()
        self.rules, self.directory, self.budgets = self._read()
        self.hash = rule_set_hash(self.rules)
        self._ahead = (self._seen, self.rules)
        self.problem = ""
        """Why the files on disk are not those in force, or an empty string."""
        self.changing = ""
        """Why what is in force may be half of what somebody is writing, or an empty string."""

    @property
    def files_hash(self) -> str:
        """A hash over names and contents of the files in force, the directory included."""
        return self._seen

    def rule(self, rule_id: str) -> Rule | None:
        """A rule in force, or None."""
        return next((rule for rule in self.rules.rules if rule.id == rule_id), None)

    def refresh(self, *, tick: bool = False) -> bool:
        """Read the files again if they have changed.

        The first half of a file can be a file too, without the protections or the canary that
        stand below: until a tick finds what the one before it found, files are `changing`.

        Args:
            tick: that a tick begins with it. Any other look may come too soon after the one before
                it to show that nobody writes.

        Returns:
            Whether others are now in force. A bad file changes nothing, is said at every call, and
            is tried again at every call.
        """
        try:
            seen = self._fingerprint()
            if seen == self._seen and tick:
                self.changing = ""
            if seen == self._seen and not self.problem:
                return False
            rules, directory, budgets = self._read()
        except InvalidInput as error:
            self.problem = f"the files on disk are not usable, the old rules stay in force: {error}"
            log.warning("reload refused; the old rules stay in force", errors=str(error))
            return False
        changed = seen != self._seen
        self._seen, self.problem = seen, ""
        self.rules, self.directory, self.budgets = rules, directory, budgets
        self.hash = rule_set_hash(rules)
        if changed:
            self.changing = (
                "the rule files or the directory changed since the last tick: nothing is ended "
                "until a tick finds them as they are now, since they may be half written"
            )
            log.info("rules reloaded", hash=self.hash, rules=len(rules.rules))
        return changed

    def on_disk(self) -> RuleSet | None:
        """The rules as their files read now, whether they are in force yet or not.

        Returns:
            None while a file is not usable. What is in force stays as it is, also while a tick
            that judges by it is on its way.
        """
        try:
            seen = self._fingerprint()
            if seen == self._seen:
                return self.rules
            if seen != self._ahead[0]:
                self._ahead = (seen, self._read()[0])
        except InvalidInput:
            return None
        return self._ahead[1]

    def _paths(self) -> tuple[Path, ...]:
        named = (self._settings.values.directory, self._settings.values.budgets)
        extra = [self._settings.path(name) for name in named if name is not None]
        return (*self._settings.rule_files(), *extra)

    def _fingerprint(self) -> str:
        return fingerprint(self._paths())

    def _read(self) -> tuple[RuleSet, Directory, Budgets | None]:
        files = self._settings.rule_files()
        if not files:
            names = ", ".join(self._settings.values.rules)
            raise InvalidInput(f"rules: no file matches {names}")
        rules = load_rule_files(files, scrape_interval=self._settings.values.scrape_interval)
        name = self._settings.values.directory
        directory = EMPTY if name is None else load_directory(self._settings.path(name))
        return rules, directory, self._budgets(directory)

    def _budgets(self, directory: Directory) -> Budgets | None:
        name, prices = self._settings.values.budgets, self._settings.values.prices
        if name is None:
            return None
        currencies = frozenset() if prices is None else prices.currencies
        return load_budgets(self._settings.path(name), directory, currencies=currencies)
