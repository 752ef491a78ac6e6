"""What people did while history was made, as a ledger has it: keeps, and pauses.

A replay looks at them as of each moment: a keep counts from its granting on, a pause while it was
in force. What a keep is worth follows from the rules that are replayed, by the same terms as live:
its rule's `owner_may` says how far and how often an owner may put an end off; operators may more.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden import durations
from gpuwarden.errors import InvalidInput
from gpuwarden.ruleengine import ledger_files, notices
from gpuwarden.ruleengine.keeps import MAX_KEEP_SECONDS
from gpuwarden.ruleengine.ledger_files import LedgerDamaged
from gpuwarden.ruleengine.ledger_handles import LedgerUnusable
from gpuwarden.ruleengine.pauses import pause_sentence
from gpuwarden.ruleengine.records import Keep, Pause
from gpuwarden.ruleengine.replay_reports import iso

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection
    from pathlib import Path

    from gpuwarden.ruleengine.model import Rule, RuleSet
    from gpuwarden.ruleengine.views import Pair

PAUSES_SINCE_VERSION = 3
"""Ledgers of earlier versions have no pauses."""
QUIET_SECONDS = 3600.0
"""So long before the replay's end a ledger's newest line may be: the engine had nothing to say."""


@dataclass(frozen=True, slots=True)
class PastPause:
    """A pause, and the Unix time at which it was over: infinite where it never was."""

    pause: Pause
    over: float

    def holds(self, time: float) -> bool:
        """Whether it was in force at a Unix time."""
        return self.pause.begun_at <= time < self.over


@dataclass(frozen=True, slots=True)
class People:
    """What people did. Times are Unix seconds.

    Attributes:
        file: the ledger, for people.
        keeps: every keep that was granted, the oldest first.
        pauses: every pause, the oldest first; each was in the place of any earlier one.
        since: from when on the ledger knows everything, or None where it holds nothing at all.
        newest: of its newest line, or None.
        knows_pauses: whether its version has them.
    """

    file: str
    keeps: tuple[Keep, ...] = ()
    pauses: tuple[PastPause, ...] = ()
    since: float | None = None
    newest: float | None = None
    knows_pauses: bool = True

    def pause(self, time: float) -> PastPause | None:
        """The pause that was in force at a Unix time, or None."""
        number = bisect.bisect_right(self.pauses, time, key=lambda item: item.pause.begun_at)
        last = self.pauses[number - 1] if number else None
        return last if last is not None and last.holds(time) else None


def read(path: Path) -> People:
    """Read a ledger, or a copy of one, at one moment; its engine may run, and is not held up.

    Args:
        path: the file; it is neither locked nor migrated nor written to.

    Raises:
        InvalidInput: it cannot be read, is damaged, or is no ledger that this version knows.
    """
    try:
        with ledger_files.reading(path, aside=True) as db:
            version = ledger_files.version_of(db, path)
            db.execute("BEGIN")
            return _read(db, path, version)
    except (LedgerUnusable, LedgerDamaged) as error:
        raise InvalidInput(f"--ledger: {error}") from error


def _read(db: sqlite3.Connection, path: Path, version: int) -> People:
    keeps = db.execute(
        "SELECT rule_id, job_id, run_id, role, by, reason, seconds, granted_at, until "
        "FROM keeps ORDER BY granted_at, id"
    )
    knows_pauses = version >= PAUSES_SINCE_VERSION
    pauses = (
        db.execute(
            "SELECT id, by, reason, begun_at, until, ended_at FROM pauses ORDER BY begun_at, id"
        )
        if knows_pauses
        else ()
    )
    past = [
        PastPause(
            Pause(number, by, reason, begun, until),
            min(math.inf if at is None else at for at in (until, ended)),
        )
        for number, by, reason, begun, until, ended in pauses
    ]
    found = tuple(Keep(*row) for row in keeps)
    kept = db.execute("SELECT value FROM meta WHERE name='audit_kept_from'").fetchone()
    first, last = db.execute("SELECT min(time), max(time) FROM events").fetchone()
    begun = [first, *(keep.granted_at for keep in found), *(item.pause.begun_at for item in past)]
    known = [at for at in begun if at is not None]
    newest = max([at for at in (last, *known) if at is not None], default=None)
    since = min(known, default=None)
    if kept is not None:
        since = float(kept[0])
    return People(str(path), found, tuple(past), since, newest, knows_pauses)


@dataclass(slots=True)
class Grant:
    """A keep, under a rule that is replayed.

    Attributes:
        keep: as it was granted.
        seconds: that the rule allows of it; 0 where it allows none.
        why: why that is less than was granted, or an empty string.
        denied: seconds that the rule allows less of this keep and of those that it followed on.
        moved: jobs whose deadline it moved here.
        held: jobs whose end nothing but it held here.
    """

    keep: Keep
    seconds: float
    why: str = ""
    denied: float = 0.0
    moved: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)

    @property
    def until(self) -> float:
        """Unix time to which it protects: what its owner was told, less what the rule denies."""
        return self.keep.until - self.denied if self.seconds else self.keep.granted_at


class Promises:
    """What keeps and pauses come to for one rule set, and what they held there.

    Args:
        people: what they did, or None: nobody kept a job, and nobody paused.
        rules: the rule set; without one no keep concerns any rule.
    """

    def __init__(self, people: People | None = None, rules: RuleSet | None = None) -> None:
        self.people = people
        keeps = () if people is None else people.keeps
        self.pauses: dict[int, set[str]] = defaultdict(set)
        """Number of a pause -> jobs whose end nothing but it held."""
        self._known = {} if rules is None else {rule.id: rule for rule in rules.rules}
        self._by_job: dict[Pair, list[Grant]] = defaultdict(list)
        self._by_run: dict[Pair, list[Grant]] = defaultdict(list)
        self._used: Counter[tuple[str, ...]] = Counter()
        """Owners' keeps that count for `times`: of (rule, attempt, run), where one may be empty."""
        self._next: dict[tuple[Pair, str], int] = defaultdict(int)
        """How many of a case's grants were taken: by its attempt (empty), or by a run."""
        self._standing: dict[Pair, list[Grant]] = defaultdict(list)
        self._of_job: dict[str, list[Keep]] = defaultdict(list)
        self._of_run: dict[str, list[Keep]] = defaultdict(list)
        self.grants: list[Grant] = []
        for keep in keeps:
            self._of_job[keep.job_id].append(keep)
            if keep.run_id is not None:
                self._of_run[keep.run_id].append(keep)
            rule = self._known.get(keep.rule_id)
            if rule is not None:
                self._add(self._grant(rule, keep))

    def _add(self, grant: Grant) -> None:
        keep = grant.keep
        earlier = self._by_job[keep.rule_id, keep.job_id]
        grant.denied = keep.seconds - grant.seconds
        if earlier and earlier[-1].keep.until > keep.granted_at:
            # It was granted on top of that one.
            grant.denied += earlier[-1].denied
        self.grants.append(grant)
        earlier.append(grant)
        if keep.run_id is not None:
            self._by_run[keep.rule_id, keep.run_id].append(grant)
        if keep.role == "owner" and grant.seconds:
            run_id = keep.run_id or ""
            whose = {(keep.job_id, ""), ("", run_id), (keep.job_id, run_id)}
            self._used.update((keep.rule_id, *names) for names in whose - {("", "")})

    def _grant(self, rule: Rule, keep: Keep) -> Grant:
        """What a rule allows of a keep: people who may have less take what they may have."""
        if keep.role != "owner":
            return Grant(keep, min(keep.seconds, MAX_KEEP_SECONDS))
        may = notices.keep_allowance(rule)
        if may is None:
            return Grant(keep, 0.0, f"the rule {rule.id} cannot be put off by owners")
        used = self._used[rule.id, keep.job_id, ""]
        if keep.run_id:
            # Of the attempt or of its run: what is of both counts once.
            used += self._used[rule.id, "", keep.run_id]
            used -= self._used[rule.id, keep.job_id, keep.run_id]
        if used >= may.times:
            times = "once" if may.times == 1 else f"{may.times} times"
            return Grant(keep, 0.0, f"the rule {rule.id} can be put off {times}")
        if keep.seconds > may.keep:
            most = durations.render(may.keep)
            return Grant(keep, may.keep, f"the rule {rule.id} allows {most} at a time")
        return Grant(keep, keep.seconds)

    def __bool__(self) -> bool:
        """Whether there is anything to look at."""
        return self.people is not None

    def granted(self, pair: Pair, run_id: str | None, time: float) -> list[Grant]:
        """Grants that concern a case and have come since it was last asked for, oldest first.

        Args:
            pair: of the case.
            run_id: of the job's run, or None.
            time: Unix time of the tick.
        """
        own = self._new(self._by_job.get(pair), pair, "", time)
        if run_id is None:
            found = own
        else:
            of_run = self._new(self._by_run.get((pair[0], run_id)), pair, run_id, time)
            found = own + [grant for grant in of_run if grant.keep.job_id != pair[1]]
            found.sort(key=lambda grant: grant.keep.granted_at)
        if found:
            self._standing[pair] += [grant for grant in found if grant.seconds]
        return found

    def _new(self, grants: list[Grant] | None, pair: Pair, run_id: str, time: float) -> list[Grant]:
        if grants is None:
            return []
        begin = end = self._next[pair, run_id]
        while end < len(grants) and grants[end].keep.granted_at <= time:
            end += 1
        self._next[pair, run_id] = end
        return grants[begin:end]

    def paused(self, time: float) -> str:
        """Who had paused enforcement at a Unix time, until when and why, or an empty string."""
        found = None if self.people is None else self.people.pause(time)
        return "" if found is None else pause_sentence(found.pause)

    def held(self, pair: Pair, reason: str, time: float) -> list[str]:
        """Write down that nothing but a keep, or a pause, held a case's end at a tick.

        Args:
            pair: of the case.
            reason: of the only guard that spoke against it.
            time: Unix time.

        Returns:
            Whose keeps it was.
        """
        pause = self.people.pause(time) if self.people and reason == "paused" else None
        if pause is not None:
            self.pauses[pause.pause.id].add(pair[1])
        if reason != "kept":
            return []
        standing = [grant for grant in self._standing[pair] if time < grant.until]
        self._standing[pair] = standing
        for grant in standing:
            grant.held.add(pair[1])
        return [grant.keep.by for grant in standing]

    def kept(self, job_id: str, run_id: str | None, time: float) -> str:
        """Whose keep of a job was in force at a Unix time, from whichever rule, in words; or ""."""
        keeps = [*self._of_job.get(job_id, ()), *self._of_run.get(run_id or "", ())]
        found = [keep for keep in keeps if keep.granted_at <= time < keep.until]
        if not found:
            return ""
        last = max(found, key=lambda keep: keep.until)
        return f"by {last.by} from {last.rule_id} until {iso(last.until)}"

    def cautions(self, begin: float, end: float, seen: Collection[str]) -> list[str]:
        """What of the period a ledger does not tell, or tells of other rules or another cluster.

        Args:
            begin: Unix time of the first tick.
            end: of the last one.
            seen: jobs that any rule was about.
        """
        people = self.people
        if people is None:
            return []
        found = []
        if people.since is None or people.newest is None:
            found.append(f"{people.file} holds nothing: whether somebody kept a job is not known")
        elif people.since > begin:
            found.append(
                f"{people.file} begins at {iso(people.since)}: who kept or paused what before "
                "is not known"
            )
        if people.newest is not None and people.newest < end - QUIET_SECONDS:
            found.append(
                f"the newest line of {people.file} is of {iso(people.newest)}: if it was "
                "copied then, what people did later is not known"
            )
        if not people.knows_pauses:
            found.append(f"{people.file} is of a version that knew no pauses")
        within = [keep for keep in people.keeps if keep.granted_at <= end and keep.until > begin]
        if within and not any(keep.job_id in seen for keep in within):
            found.append(
                f"of the {len({keep.job_id for keep in within})} jobs that somebody kept then "
                f"none was seen here: is {people.file} the ledger of this cluster?"
            )
        others = Counter(keep.rule_id for keep in within if keep.rule_id not in self._known)
        if others:
            named = ", ".join(f"{rule} ({count})" for rule, count in sorted(others.items()))
            found.append(
                f"keeps from rules that are not replayed hold nothing here: {named}; jobs that "
                "are ended in spite of one are marked"
            )
        return found
