"""Rule files: read, checked and merged, with the mistakes of all files in one pass."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpuwarden.diagnostics import Diagnostic, Severity, Span, render_text
from gpuwarden.errors import InvalidInput
from gpuwarden.fields import Strict
from gpuwarden.ruleengine import linting
from gpuwarden.ruleengine.lints_of_canaries import lint_canary
from gpuwarden.ruleengine.lints_of_grades import lint_grades
from gpuwarden.ruleengine.lints_of_limits import lint_limits
from gpuwarden.ruleengine.lints_of_matches import lint_match
from gpuwarden.ruleengine.lints_of_tests import lint_tests
from gpuwarden.ruleengine.model import (
    LimitGroup,
    Limits,
    Profile,
    Rule,
    RuleSet,
    Target,
    TerminateLimits,
    WhitelistEntry,
)
from gpuwarden.ruleengine.rule_tests import RuleTest
from gpuwarden.yaml_files import Document, load_located, path_text, validate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gpuwarden.ruleengine.linting import Finding
    from gpuwarden.yaml_files import Node, Step

_Part = TypeVar("_Part", bound=Strict)
_Owned = TypeVar("_Owned", Rule, Profile)


@dataclass(frozen=True, slots=True)
class PlacedTest:
    """An inline test and where it stands: itself, and each of its expectations."""

    test: RuleTest
    span: Span
    expected_at: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class CheckedFiles:
    """What checking rule files found.

    Attributes:
        rules: the merged set, or None if there is any error.
        diagnostics: errors and warnings of all files, in the order of files and positions.
        sources: each file's text, for the lines under the diagnostics.
        tests: the well-formed inline tests of all files.
    """

    rules: RuleSet | None
    diagnostics: tuple[Diagnostic, ...]
    sources: dict[str, str]

    tests: tuple[PlacedTest, ...] = ()

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The findings that make the files unusable."""
        return tuple(item for item in self.diagnostics if item.severity is Severity.ERROR)

    def render(self) -> str:
        """All findings for people."""
        return render_text(self.diagnostics, self.sources)


def load_rule_files(paths: Sequence[Path], *, scrape_interval: float = 5.0) -> RuleSet:
    """Read and merge rule files.

    Args:
        paths: in the order in which they are merged.
        scrape_interval: of the nodes, in seconds; windows are checked against it.

    Raises:
        InvalidInput: with every error and warning of all files.
    """
    checked = check_rule_files(paths, scrape_interval=scrape_interval)
    if checked.rules is None:
        raise InvalidInput(checked.render(), checked.diagnostics)
    return checked.rules


def check_rule_files(
    paths: Sequence[Path], *, scrape_interval: float = 5.0, now: float | None = None
) -> CheckedFiles:
    """Check rule files and say everything that is wrong with them.

    Args:
        paths: in the order in which they are merged.
        scrape_interval: of the nodes, in seconds.
        now: Unix time for expired protections; the machine's by default.
    """
    documents = [
        load_located(path) if first is None else _given_twice(path, first)
        for path, first in _firsts(paths)
    ]
    return check_documents(
        documents, scrape_interval=scrape_interval, now=time.time() if now is None else now
    )


def _firsts(paths: Sequence[Path]) -> Iterator[tuple[Path, Path | None]]:
    """Each path, with the one before it that names the same file."""
    seen: dict[str, Path] = {}
    for path in paths:
        real = os.path.realpath(path)
        yield path, seen.get(real)
        seen.setdefault(real, path)


def _given_twice(path: Path, first: Path) -> Document:
    """In place of a file whose every rule would have the id of another: itself."""
    named = "is given twice" if path == first else f"is the same as {first}"
    message = f"the file {named}: name it once"
    finding = Diagnostic("GW100", Severity.ERROR, Span(str(path), 1, 1), message)
    return Document(str(path), "", None, (finding,))


def check_documents(
    documents: Sequence[Document], *, scrape_interval: float, now: float
) -> CheckedFiles:
    """Like `check_rule_files`, of documents that were read already."""
    files = [_File(document) for document in documents]
    for file in files:
        file.check(scrape_interval)
    _across(files, now)
    found = [item for file in files for item in file.findings]
    order = {document.file: index for index, document in enumerate(documents)}
    found.sort(
        key=lambda item: (
            order.get(item.span.file, 0),
            item.span.line,
            item.span.column,
            item.code,
        )
    )
    # Of a file that is given twice the first was read.
    sources = {document.file: document.text for document in reversed(documents)}
    usable = not any(item.severity is Severity.ERROR for item in found)
    return CheckedFiles(
        _merged(files) if usable else None,
        tuple(dict.fromkeys(found)),
        sources,
        tuple(_placed(file, index, test) for file in files for index, test in file.tests),
    )


def rule_set_hash(rules: RuleSet) -> str:
    """A short name of everything that a set says; equal sets have equal hashes."""
    groups = [(sorted(group.rules), group.limits.model_dump_json()) for group in rules.groups]
    text = rules.model_dump_json(by_alias=True, exclude={"tests"}) + (str(groups) if groups else "")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class _File:
    """One file while it is checked. What is well-formed is kept even if the rest is not."""

    document: Document
    value: RuleSet | None = None
    rules: list[tuple[int, Rule]] = field(default_factory=list)
    profiles: list[tuple[int, Profile]] = field(default_factory=list)
    whitelist: list[tuple[int, WhitelistEntry]] = field(default_factory=list)
    tests: list[tuple[int, RuleTest]] = field(default_factory=list)
    findings: list[Diagnostic] = field(default_factory=list)

    def check(self, scrape_interval: float) -> None:
        self.findings += self.document.diagnostics
        if self.document.root is None:
            return
        self.value, complaints = validate(RuleSet, self.document.root)
        self.findings += complaints
        self._left_empty(self.document.root)
        self.rules = self._parts(Rule, "rules")
        self.profiles = self._parts(Profile, "profiles")
        self.whitelist = self._parts(WhitelistEntry, "whitelist")
        self.tests = self._parts(RuleTest, "tests")
        for index, rule in self.rules:
            for finding in (
                *linting.lint_rule(rule, scrape_interval=scrape_interval),
                *lint_grades(rule),
                *lint_canary(rule),
                *lint_limits(rule),
                *lint_match(rule),
            ):
                self.report(finding, ("rules", index))

    def _left_empty(self, root: Node) -> None:
        """What restricts and has no value, as a template leaves it, would restrict nothing."""
        places: list[tuple[Step, ...]] = [("team",)]
        for name, keys in (("rules", ("team", "only_during")), ("profiles", ("team",))):
            listed = root.child(name)
            count = 0 if listed is None else len(listed.items())
            places += [(name, index, key) for index in range(count) for key in keys]
        for *above, key in places:
            node = root.at(above).child(key)
            if node is not None and node.value in ("", []):
                code = "GW111" if node.value == [] else "GW107"
                found = _error(code, (*above, key), "must not be empty", "leave it out")
                self.report(found)

    def _parts(self, model: type[_Part], name: str) -> list[tuple[int, _Part]]:
        """The well-formed items of a list; what is wrong with the others was said already."""
        root = self.document.root
        node = root.child(name) if root is not None else None
        found = []
        for index, item in enumerate(node.items() if node is not None else ()):
            value, _ = validate(model, item)
            if value is not None:
                found.append((index, value))
        return found

    def raw_ids(self) -> list[tuple[int, Node]]:
        """(index, id) of all rules, well-formed or not."""
        root = self.document.root
        node = root.child("rules") if root is not None else None
        found = []
        for index, item in enumerate(node.items() if node is not None else ()):
            named = item.child("id")
            if named is not None and isinstance(named.value, str):
                found.append((index, named))
        return found

    def report(self, finding: Finding, prefix: Iterable[Step] = ()) -> None:
        root = self.document.root
        if root is None:
            return
        path = (*prefix, *finding.path)
        node = root.at(path)
        message = f"{path_text(path)}: {finding.message}" if path else finding.message
        self.findings.append(
            Diagnostic(finding.code, finding.severity, node.span, message, finding.hint)
        )


def _placed(file: _File, index: int, test: RuleTest) -> PlacedTest:
    root = file.document.root
    if root is None:
        raise ValueError("a file without content has no tests")
    expected = tuple(
        root.at(("tests", index, "expect", number)).span for number in range(len(test.expect))
    )
    return PlacedTest(test, root.at(("tests", index)).span, expected)


def _across(files: Sequence[_File], now: float) -> None:
    """What can only be seen with all files together."""
    first: dict[str, str] = {}
    for file in files:
        for index, named in file.raw_ids():
            rule_id = str(named.value)
            if rule_id in first:
                message = f'"{rule_id}" is the id of another rule, at {first[rule_id]}'
                file.report(_error("GW219", ("rules", index, "id"), message))
            first.setdefault(rule_id, f"{named.span.file}:{named.span.line}")
    _whitelists(files, list(first), now)
    _profiles(files)
    _zones(files)
    _limits(files)
    for file in files:
        _team(file)
    rules = [rule for file in files for _, rule in file.rules]
    for file in files:
        for finding in lint_tests(file.tests, rules, known=list(first)):
            file.report(finding, ("tests",))


def _zones(files: Sequence[_File]) -> None:
    telling = [file for file in files if file.value and _gives(file, "timezone")]
    zones = {file.value.timezone for file in telling if file.value}
    said = sorted(
        f"{file.value.timezone} in {file.document.file}" for file in telling if file.value
    )
    for file in telling if len(zones) > 1 else ():
        message = f"the files disagree: {', '.join(said)}"
        file.report(_error("GW222", ("timezone",), message))


def _limits(files: Sequence[_File]) -> None:
    if any(_gives(file, key) for file in files for key in ("limits", "overall_limits")):
        return
    for file in files:
        for index, rule in file.rules:
            if rule.enforces:
                file.report(
                    _error(
                        "GW218",
                        ("rules", index, "mode"),
                        "a rule that may take cards needs limits or overall_limits in a file",
                        "limits: {terminate: {per_tick: 1, per_hour: 6, per_user_per_day: 3, "
                        "halt_above_share_of_running: 10%}}",
                    )
                )


def _team(file: _File) -> None:
    """A team's file rules over its own jobs only, and exempts from its own rules only."""
    team = file.value.team if file.value is not None else ""
    if not team:
        return
    for key, why in (
        ("overall_limits", "what holds over all rules is the operators'"),
        ("timezone", "that of the set is the operators'; people have theirs in the directory"),
    ):
        if _gives(file, key):
            file.report(_error("GW223", (key,), f'this file is of the team "{team}": {why}'))
    for index, rule in file.rules:
        if rule.target is Target.GPU:
            message = f'this file is of the team "{team}", and a card belongs to no team'
            file.report(_error("GW223", ("rules", index, "target"), message))
        if rule.team not in ("", team):
            message = f'this file is of the team "{team}" and rules over no other'
            file.report(_error("GW223", ("rules", index, "team"), message))
    own = {named.value for _, named in file.raw_ids()}
    for index, entry in file.whitelist:
        for position, rule_id in enumerate(entry.rules):
            if rule_id not in own:
                message = (
                    f'this file is of the team "{team}" and cannot exempt from another\'s rule'
                )
                file.report(_error("GW223", ("whitelist", index, "rules", position), message))


def _whitelists(files: Sequence[_File], rule_ids: Sequence[str], now: float) -> None:
    for file in files:
        for index, entry in file.whitelist:
            for finding in linting.lint_whitelist([entry], rule_ids, now=now):
                file.report(_moved(finding, index), ("whitelist",))


def _profiles(files: Sequence[_File]) -> None:
    placed = [
        (file, index, _of_team(profile, file.value.team if file.value is not None else ""))
        for file in files
        for index, profile in file.profiles
    ]
    spans = [
        "" if file.document.root is None else str(file.document.root.at(("profiles", index)).span)
        for file, index, _ in placed
    ]
    for finding in linting.lint_profiles([profile for _, _, profile in placed], spans):
        position = finding.path[0]
        file, index, _ = placed[int(position)]
        file.report(_moved(finding, index), ("profiles",))


def _moved(finding: Finding, index: int) -> Finding:
    """A finding whose list index becomes that of its own file."""
    path = (index, *finding.path[1:])
    return linting.Finding(finding.code, finding.severity, path, finding.message, finding.hint)


def _error(code: str, path: tuple[Step, ...], message: str, hint: str | None = None) -> Finding:
    return linting.Finding(code, Severity.ERROR, path, message, hint)


def _gives(file: _File, key: str) -> bool:
    """Whether the file has the key, well-formed or not."""
    root = file.document.root
    return root is not None and root.child(key) is not None


def _merged(files: Sequence[_File]) -> RuleSet:
    values = [file.value for file in files if file.value is not None]
    zone = next((value.timezone for value in values if "timezone" in value.model_fields_set), "UTC")
    given = [value.limits for value in values if value.limits is not None]
    overall = [v.overall_limits for v in values if v.overall_limits is not None]
    limits = _strictest(overall or given)
    merged = RuleSet(
        version=1,
        timezone=zone,
        limits=limits,
        rules=tuple(_of_team(rule, value.team) for value in values for rule in value.rules),
        profiles=tuple(_of_team(p, value.team) for value in values for p in value.profiles),
        whitelist=tuple(entry for value in values for entry in value.whitelist),
    )
    return merged.limited(_groups(files, limits))


def _groups(files: Sequence[_File], overall: Limits | None) -> list[LimitGroup]:
    """The limits of files that say more than those over all."""
    found = []
    for file in files:
        own = file.value.limits if file.value is not None else None
        if own is None or overall is None or not file.rules:
            continue
        names = TerminateLimits.model_fields
        pairs = [(getattr(own.terminate, n), getattr(overall.terminate, n)) for n in names]
        if any(limit < most for limit, most in pairs):
            ids = frozenset(rule.id for _, rule in file.rules)
            found.append(LimitGroup(Path(file.document.file).name, ids, own.terminate))
    return found


def _of_team(part: _Owned, team: str) -> _Owned:
    return part.model_copy(update={"team": team}) if team and not part.team else part


def _strictest(limits: Sequence[Limits]) -> Limits | None:
    if not limits:
        return None
    names = TerminateLimits.model_fields
    least: dict[str, Any] = {
        name: min(getattr(item.terminate, name) for item in limits) for name in names
    }
    # Built from values that were validated already: a ratio is no text any more.
    return Limits.model_construct(terminate=TerminateLimits.model_construct(**least))
