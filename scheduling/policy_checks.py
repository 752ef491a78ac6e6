"""What is wrong with a policy, and what is likely not meant: all findings of a file in one pass."""

from __future__ import annotations

import datetime as dt
import zoneinfo
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from gpuwarden import durations
from gpuwarden.budget_terms import GPU_HOURS
from gpuwarden.checked_files import CheckedFile
from gpuwarden.diagnostics import Diagnostic, Severity
from gpuwarden.hours import DAYS
from gpuwarden.scheduling.policies import Policy
from gpuwarden.scheduling.policy_names import check_names
from gpuwarden.scheduling.policy_people import check_people
from gpuwarden.scheduling.windows import moment_of, oddity
from gpuwarden.yaml_files import load_located, path_text, validate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from gpuwarden.scheduling.policies import Engine
    from gpuwarden.scheduling.policy_people import People
    from gpuwarden.yaml_files import Document, Node, Step

_HOUR = 3600.0
_LONGEST_PERIOD = {"day": 25.0, "week": 7 * 24.0 + 1, "month": 31 * 24.0 + 1}
"""Hours, where clocks are put back in it."""
_ORDER = {"day": 0, "week": 1, "month": 2}
_NO_FILE = "name another (GPUWARDEN_POLICY), or begin with `gpuwarden policy init`"
_SHORT_NOTICE = 60.0
_SHORT_EPOCH = 300.0
_OTHER_ACCOUNT = "write slurm: {account: ...} with a name that is free"
_OTHER_NAMESPACE = "write kueue: {namespace: ...} with one of the team's"
_DAYS_AHEAD = 400
"""Of days on which clocks are changed: more than a year."""
_DAY_MINUTES = 24 * 60


def check_policy(
    path: Path, *, now: float, engine: Engine | None = None, people: People | None = None
) -> CheckedFile[Policy]:
    """Say everything that is wrong with a policy file.

    Args:
        path: the file.
        now: Unix time, from which on days are named on which clocks are changed.
        engine: for which it must be complete; by default the one that it names.
        people: who is known; None asks nobody.
    """
    document = load_located(path)
    checked = check_document(path, document, now=now, engine=engine)
    if document.root is None and not path.exists():
        told = tuple(replace(each, hint=_NO_FILE) for each in checked.diagnostics)
        return replace(checked, diagnostics=told)
    if people is None or checked.content is None or document.root is None:
        return checked
    unknown = tuple(check_people(checked.content, document.root, people))
    return replace(checked, diagnostics=(*checked.diagnostics, *unknown))


def check_document(
    path: Path, document: Document, *, now: float, engine: Engine | None = None
) -> CheckedFile[Policy]:
    """Like `check_policy`, of a file that was read already."""
    found, policy = list(document.diagnostics), None
    if document.root is not None:
        policy, complaints = validate(Policy, document.root)
        said = {item.span for item in complaints}
        found += complaints
        # What has a wrong form is not told a second time as a name that nobody knows.
        wrong_names = [item for item in check_names(document.root) if item.span not in said]
        found += wrong_names
        if policy is not None:
            look = _Look(policy, document.root).findings(now, engine or policy.engine)
            # What is likely not meant often follows from a name that was misspelt.
            found += [e for e in look if not wrong_names or e.severity is Severity.ERROR]
    if any(item.severity is Severity.ERROR for item in found):
        policy = None
    return CheckedFile(path, policy, tuple(found), document.text)


def load_policy(path: Path, *, now: float, engine: Engine | None = None) -> Policy:
    """Read a policy that can be used.

    Args:
        path: the file.
        now: Unix time.
        engine: for which it must be complete; by default the one that it names.

    Raises:
        InvalidInput: its text shows every mistake with its line.
    """
    return check_policy(path, now=now, engine=engine).usable()


class _Look:
    """One look at a policy whose form is right."""

    def __init__(self, policy: Policy, root: Node) -> None:
        self._policy = policy
        self._root = root

    def findings(self, now: float, engine: Engine) -> Iterator[Diagnostic]:
        yield from self._cards(engine)
        if engine == "slurm":
            yield from self._slurm()
        yield from self._quotas()
        yield from self._lending()
        yield from self._people()
        yield from self._priorities()
        yield from self._leaving()
        yield from self._budgets()
        yield from self._windows(now)
        yield from self._preemption()
        yield from self._borrowed()
        yield from self._bookings()
        yield from self._images(engine)

    def _error(self, code: str, path: tuple[Step, ...], text: str, hint: str = "") -> Diagnostic:
        return self._finding(code, Severity.ERROR, path, text, hint)

    def _warning(self, code: str, path: tuple[Step, ...], text: str, hint: str = "") -> Diagnostic:
        return self._finding(code, Severity.WARNING, path, text, hint)

    def _finding(
        self, code: str, severity: Severity, path: tuple[Step, ...], text: str, hint: str
    ) -> Diagnostic:
        # A key of a mapping is where its value is missing or wrong; an item of a list is itself.
        key = self._root.at(path[:-1]).keys.get(str(path[-1]))
        place = key or self._root.at(path).span
        return Diagnostic(code, severity, place, f"{path_text(path)}: {text}", hint or None)

    # -- cards and teams

    def _cards(self, engine: Engine) -> Iterator[Diagnostic]:
        policy = self._policy
        if engine != "local":
            for index, card in enumerate(policy.cards):
                if getattr(card, engine) is None:
                    example = (
                        "slurm: {gres: a100}"
                        if engine == "slurm"
                        else "kueue: {node_labels: {nvidia.com/gpu.product: NVIDIA-A100}}"
                    )
                    text = f"{engine} has to know these cards by something"
                    yield self._error("GW605", ("cards", index), text, f"write {example}")
        marks: dict[Engine, Sequence[object]] = {
            "local": [card.model for card in policy.cards],
            "slurm": [c.slurm and (c.slurm.gres, c.slurm.partition) for c in policy.cards],
            "kueue": [
                c.kueue and (c.kueue.resource, *sorted(c.kueue.node_labels.items()))
                for c in policy.cards
            ],
        }
        words = {"local": "model", "slurm": "gres and partition", "kueue": "labels and resource"}
        yield from self._same("cards", marks[engine], words[engine])
        accounts = [team.account.lower() for team in policy.teams]
        if engine == "slurm":
            yield from self._same("teams", accounts, "account")
        for index, team in enumerate(policy.teams):
            above = policy.slurm.account.lower()
            if engine == "slurm" and accounts[index] in ("root", above):
                what = "Slurm's own" if accounts[index] == "root" else "that of all teams"
                text = f"the account {accounts[index]} is {what}"
                yield self._error("GW607", ("teams", index), text, _OTHER_ACCOUNT)
            if engine == "kueue" and team.namespace.startswith("kube-"):
                text = f"the namespace {team.namespace} is Kubernetes' own"
                yield self._error("GW607", ("teams", index), text, _OTHER_NAMESPACE)

    def _slurm(self) -> Iterator[Diagnostic]:
        policy = self._policy
        for index, team in enumerate(policy.teams):
            for place, user in enumerate(team.users):
                if "\\" in user and policy.slurm.preempt == "qos":
                    text = f"Slurm's database garbles the backslash in {user}"
                    path: tuple[Step, ...] = ("teams", index, "users", place)
                    hint = (
                        "have nodes know people without a domain, or with @domain behind the name"
                    )
                    yield self._error("GW610", path, text, hint)
        if policy.slurm.preempt == "qos":
            return
        # A partition tier preempts everything below it that may be preempted at all.
        leaving = {name for each in policy.priorities for name in each.preempts}
        for index, high in enumerate(policy.priorities):
            for low in policy.priorities:
                spared = low.name in leaving and low.name not in high.preempts
                if spared and low.value < high.value:
                    text = (
                        f"in Slurm's partitions jobs of {low.name} would leave for {high.name} too"
                    )
                    hint = f"add {low.name} to its preempts, or write slurm: {{preempt: qos}}"
                    yield self._error("GW610", ("priorities", index), text, hint)

    def _same(self, kind: str, marks: Sequence[object], words: str) -> Iterator[Diagnostic]:
        names = [entry.name for entry in getattr(self._policy, kind)]
        for index, mark in enumerate(marks):
            first = marks.index(mark)
            if mark is not None and names[first] != names[index]:
                text = f"has the same {words} as {kind}[{first}]: the engine cannot tell them apart"
                yield self._error("GW607", (kind, index), text)

    def _quotas(self) -> Iterator[Diagnostic]:
        for card in self._policy.cards:
            teams = enumerate(self._policy.teams)
            promised = [(index, team) for index, team in teams if team.own(card.name)]
            total = sum(team.own(card.name) for _, team in promised)
            if total > card.count:
                parts = " + ".join(f"{team.own(card.name)} {team.name}" for _, team in promised)
                text = f"{total} {card.name} are promised ({parts}), and there are {card.count}"
                path = ("teams", promised[-1][0], "quota", card.name)
                yield self._error("GW604", path, text, "lower a quota, or let teams borrow")

    def _lending(self) -> Iterator[Diagnostic]:
        policy = self._policy
        for index, team in enumerate(policy.teams):
            for name, wanted in team.borrow.items():
                lent = policy.lendable(name, team.name)
                path: tuple[Step, ...] = ("teams", index, "borrow", name)
                if policy.card(name) is None or not wanted:
                    continue
                if lent == 0:
                    text = f"nobody lends {name}: all of them are quotas of teams that keep theirs"
                    yield self._warning("GW650", path, text, "let a team `lend` some")
                elif wanted > lent:
                    text = f"at most {lent} {name} can ever be borrowed, not {wanted}"
                    yield self._warning("GW650", path, text)
            for name, offered in (team.lend or {}).items():
                path = ("teams", index, "lend", name)
                if policy.card(name) is None or not offered:
                    continue
                if offered > team.own(name):
                    text = f"{team.name} has {team.own(name)} {name} of its own, and cannot lend "
                    yield self._warning("GW650", path, f"{text}{offered}")
                elif not any(e.borrow.get(name) for e in policy.teams if e.name != team.name):
                    yield self._warning("GW650", path, f"no other team borrows {name}")

    def _people(self) -> Iterator[Diagnostic]:
        first: dict[str, str] = {}
        for index, team in enumerate(self._policy.teams):
            if not team.users:
                path: tuple[Step, ...] = ("teams", index, "users")
                text = "without users nobody can submit for this team"
                yield self._warning("GW655", path, text)
            for place, user in enumerate(team.users):
                other = first.setdefault(user, team.name)
                if other != team.name:
                    text = f"{user} is in {other} too: `gpuwarden submit` asks for --team"
                    yield self._warning("GW654", ("teams", index, "users", place), text)
            if not any(team.most(card.name) for card in self._policy.cards):
                text = f"{team.name} may use no card: it has no quota, and borrows none"
                yield self._warning("GW655", ("teams", index), text)

    # -- priorities, and whatever asks jobs to leave

    def _priorities(self) -> Iterator[Diagnostic]:
        policy = self._policy
        defaults = [i for i, each in enumerate(policy.priorities) if each.default]
        for index in defaults[1:]:
            name = policy.priorities[defaults[0]].name
            text = f"{name} is the default already"
            yield self._error("GW609", ("priorities", index, "default"), text)
        usual = policy.usual_priority
        for index, team in enumerate(policy.teams):
            if not team.may_choose(usual.name):
                text = f"{usual.name}, which is chosen where a task names none, is not among these"
                path: tuple[Step, ...] = ("teams", index, "priorities")
                yield self._warning("GW655", path, text, "its people have to name one each time")
        for index, high in enumerate(policy.priorities):
            if high.default and high.preempts:
                text = f"whoever names no priority has jobs of {', '.join(high.preempts)} leave"
                yield self._warning("GW657", ("priorities", index, "default"), text)
            yield from self._preempted(index)
            same = [e.name for e in policy.priorities[:index] if e.value == high.value]
            if same:
                text = f"{same[0]} has the value {high.value} too: neither goes first"
                yield self._warning("GW657", ("priorities", index, "value"), text)
            yield from self._inherited(index)
            if not any(team.may_choose(high.name) for team in policy.teams):
                text = f"no team may choose {high.name}"
                yield self._warning("GW655", ("priorities", index), text)

    def _preempted(self, index: int) -> Iterator[Diagnostic]:
        policy, high = self._policy, self._policy.priorities[index]
        for place, name in enumerate(high.preempts):
            low = policy.priority(name)
            path: tuple[Step, ...] = ("priorities", index, "preempts", place)
            if name == high.name:
                text = f"{name} cannot preempt itself: equals wait for one another"
                yield self._error("GW602", path, text)
            elif low is not None and low.value >= high.value:
                text = f"{name} has value {low.value}, which is not lower than {high.value} of "
                text += high.name
                if policy.preempts(name, high.name):
                    text += ", and preempts it in turn: they would end each other for ever"
                yield self._error("GW602", path, text, "a priority preempts lower ones only")

    def _inherited(self, index: int) -> Iterator[Diagnostic]:
        """Preempting who preempts somebody, and not that somebody."""
        policy, high = self._policy, self._policy.priorities[index]
        for name in high.preempts:
            middle = policy.priority(name)
            for below in () if middle is None or name == high.name else middle.preempts:
                if below not in high.preempts and below != high.name:
                    text = f"{high.name} preempts {name}, which preempts {below}, but not {below}"
                    hint = f"add {below}, unless its jobs are to be safe from {high.name}"
                    path = ("priorities", index, "preempts")
                    yield self._warning("GW657", path, text, hint)

    def _leaving(self) -> Iterator[Diagnostic]:
        policy = self._policy
        if policy.preemption is not None:
            return
        asking: list[tuple[Step, ...]] = [
            ("priorities", index, "preempts")
            for index, each in enumerate(policy.priorities)
            if each.preempts
        ]
        asking += [
            ("windows", index, "running")
            for index, each in enumerate(policy.windows)
            if each.running == "leave"
        ]
        asking += [
            ("budgets", index, "running")
            for index, each in enumerate(policy.budgets)
            if each.running == "leave"
        ]
        for path in asking:
            text = "jobs are asked to leave here, and the file has no `preemption` that says how"
            hint = "write preemption: {minimum_run: 30m, notice: epoch, deadline: 20m, ...}"
            yield self._error("GW603", path, text, hint)

    # -- budgets, windows

    def _budgets(self) -> Iterator[Diagnostic]:
        policy, seen = self._policy, set[tuple[str, str, str]]()
        for index, each in enumerate(policy.budgets):
            path: tuple[Step, ...] = ("budgets", index, "limit")
            if each.unit != GPU_HOURS:
                text = f"{each.limit} is money, and a policy knows no prices"
                yield self._error("GW608", path, text, "write it like 500 GPU-hours")
                continue
            if each.key in seen:
                text = f"there is another budget of {each.team} per {each.per}"
                yield self._error("GW600", ("budgets", index), text, "remove one of them")
            seen.add(each.key)
            for other in policy.budgets_of(each.team):
                if other.unit != GPU_HOURS or _ORDER[other.per] <= _ORDER[each.per]:
                    continue
                if each.limit.amount >= other.limit.amount:
                    text = f"{each.limit} per {each.per} are never reached: the budget per "
                    yield self._warning("GW651", path, f"{text}{other.per} is {other.limit}")
            team = policy.team(each.team)
            most = 0 if team is None else sum(team.most(card.name) for card in policy.cards)
            possible = most * _LONGEST_PERIOD[each.per]
            if team is not None and each.limit.amount > possible:
                text = f"{each.team} may use {most} cards, at most {possible:,.0f} GPU-hours per "
                text += f"{each.per}: {each.limit} are never reached"
                yield self._warning("GW651", path, text)

    def _windows(self, now: float) -> Iterator[Diagnostic]:
        zone = self._policy.timezone
        changes = clock_changes(zone, now)
        for index, window in enumerate(self._policy.windows):
            # The end of a day is the beginning of the next.
            closes = window.to % _DAY_MINUTES
            next_day = closes <= window.from_
            for key, minutes, opens in (("from", window.from_, True), ("to", closes, False)):
                said: set[str] = set()
                for day in changes:
                    opened = day - dt.timedelta(days=1) if next_day and not opens else day
                    kind = oddity(day, minutes, zone)
                    if kind is None or kind in said or DAYS[opened.weekday()] not in window.days:
                        continue
                    said.add(kind)
                    text = _change_words(day, minutes, zone, kind=kind, opens=opens)
                    begin = moment_of(opened, window.from_, zone, later=False)
                    last = opened + dt.timedelta(days=1) if next_day else opened
                    if moment_of(last, closes, zone, later=True) <= begin:
                        text = text.partition(": ")[0] + ": the window does not open on that day"
                    yield self._warning("GW652", ("windows", index, key), text)

    # -- leaving in time

    def _preemption(self) -> Iterator[Diagnostic]:
        terms = self._policy.preemption
        if terms is None:
            return
        deadline = durations.render(terms.deadline)
        if terms.deadline < _SHORT_NOTICE:
            text = f"{deadline} are hardly enough to save: what is not saved by then is lost"
            yield self._warning("GW653", ("preemption", "deadline"), text)
        elif terms.notice == "epoch" and terms.deadline < _SHORT_EPOCH:
            text = f"an epoch that takes longer than {deadline} is not finished: its job saves in "
            text += "the middle of it shortly before"
            hint = "give it an epoch and a save, or write notice: step"
            yield self._warning("GW653", ("preemption", "deadline"), text, hint)
        fastest = terms.minimum_run + terms.back_off
        reached = fastest * terms.at_most.times
        if reached > terms.at_most.per:
            text = f"a job has to leave once in {durations.render(fastest)} at most (minimum_run "
            text += f"and back_off), never more than {terms.at_most.times} times in "
            text += durations.render(terms.at_most.per)
            yield self._warning("GW658", ("preemption", "at_most"), text)
        if fastest == 0:
            text = "with minimum_run and back_off of 0s a job may be asked again as soon as it is "
            yield self._warning("GW653", ("preemption", "back_off"), f"{text}back")

    def _borrowed(self) -> Iterator[Diagnostic]:
        if self._policy.preemption is not None:
            return
        for index, team in enumerate(self._policy.teams):
            if any(team.borrow.values()):
                text = "without `preemption` borrowed cards come back only when their jobs end"
                yield self._warning("GW656", ("teams", index, "borrow"), text)

    def _bookings(self) -> Iterator[Diagnostic]:
        policy = self._policy
        terms = policy.bookings
        if terms is None:
            return
        if policy.preemption is None:
            text = "without `preemption` nobody is asked to leave for a slot"
            yield self._warning("GW656", ("bookings",), text)
        elif terms.lead_time < policy.preemption.deadline:
            text = f"who is told {durations.render(terms.lead_time)} before a slot may stay for "
            text += f"{durations.render(policy.preemption.deadline)} (preemption.deadline)"
            hint = f"write at least {durations.render(policy.preemption.deadline)}"
            yield self._warning("GW656", ("bookings", "lead_time"), text, hint)
        if terms.no_show_after >= terms.longest:
            text = "no slot is longer than that: none is ever released"
            yield self._warning("GW658", ("bookings", "no_show_after"), text)
        none = [card.name for card in policy.cards if int(card.count * terms.at_most_share) == 0]
        if none:
            text = f"of {', '.join(none)} that is less than a whole card: none can be booked"
            yield self._warning("GW658", ("bookings", "at_most_share"), text)
        if terms.lead_time >= terms.ahead:
            text = (
                f"no slot is booked further ahead than {durations.render(terms.ahead)}: who must "
            )
            text += "leave is always told later than that"
            yield self._warning("GW656", ("bookings", "lead_time"), text)

    def _images(self, engine: Engine) -> Iterator[Diagnostic]:
        if engine == "kueue" and not self._policy.images:
            text = "pods need an image, and jobs may use only those that are named here"
            yield self._error("GW605", ("images",), text, "write images: [{name: ..., ...}]")


def clock_changes(zone: str, now: float) -> list[dt.date]:
    """Days of the next 400 on which the clocks of a zone are changed.

    Args:
        zone: an IANA name.
        now: Unix time.
    """
    known = zoneinfo.ZoneInfo(zone)
    today = dt.datetime.fromtimestamp(now, known).date()
    days = [today + dt.timedelta(days=ahead) for ahead in range(_DAYS_AHEAD + 1)]
    offsets = [dt.datetime.combine(day, dt.time(), known).utcoffset() for day in days]
    changed = zip(days, pairwise(offsets), strict=False)
    return [day for day, (one, other) in changed if one != other]


def _change_words(day: dt.date, minutes: int, zone: str, *, kind: str, opens: bool) -> str:
    clock = f"{minutes // 60:02d}:{minutes % 60:02d}"
    does = "opens" if opens else "closes"
    if kind == "skipped":
        text = f"on {day:%a %Y-%m-%d} the clocks of {zone} skip {clock}: the window then {does} at "
        return f"{text}the moment at which they do"
    which = "first" if opens else "second"
    text = f"on {day:%a %Y-%m-%d} the clocks of {zone} show {clock} twice: the window then {does} "
    return f"{text}at the {which} of the two"
