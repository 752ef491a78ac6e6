"""The contract between the scheduler and whoever shows its queue: one document, one version.

`GET /v1/schedule` -> ScheduleDocument. The scheduler writes it, the rule engine's pages and the
commands read it. A reader ignores fields that it does not know, and refuses another major version.

What is not known is absent (None), never 0: a time that was not seen, a start that nobody can tell.
Codes (`why`, `code` of a problem) are words with `_` between them. Schedulers before this rule
wrote `-` in some: a reader takes both for the same, and gives the one with `_`.
Times are Unix time in seconds; GPU-hours and GPU-seconds are those of whole cards.
This module does no I/O and needs nothing but the standard library.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self, TypeVar

from gpuwarden.errors import PermanentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

VERSION = "gpuwarden.schedule/v1"
MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_ENTRIES = 20_000
"""Rows of each list; what a scheduler leaves out beyond it is counted in `left_out`."""
MAX_NAME = 256
"""Characters of a name, which a user may have chosen."""
MAX_WORDS = 1024
"""Characters of a sentence."""
MAX_IDS = 256
"""Entries that `must_end` names."""

CANCELLED = "cancelled"
"""Code (`why`) of a job that failed because somebody did not want it any more."""
STEPS = ("notified", "acknowledged", "saved", "left", "freed", "started")
"""What becomes of a preemption, in this order; `started` is the successor's start."""


class ScheduleError(PermanentError):
    """A document does not follow the contract; the text names the field."""


class EntryState(StrEnum):
    """Where a job stands in its queue."""

    PENDING = "pending"
    HELD = "held"
    """It does not start before somebody releases it, or its window or budget opens."""
    RUNNING = "running"
    LEAVING = "leaving"
    """It was asked to leave, or is on its way out; its cards are still held."""
    SUSPENDED = "suspended"
    DONE = "done"
    FAILED = "failed"


class Cause(StrEnum):
    """Why a job was asked to leave."""

    PRIORITY = "priority"
    BOOKING = "booking"
    WINDOW = "window"
    BUDGET = "budget"


class Outcome(StrEnum):
    """How a preemption stands, or ended."""

    OPEN = "open"
    DONE = "done"
    """The cards came back."""
    WITHDRAWN = "withdrawn"
    """The notice became useless and was taken back before it was followed."""
    ENDED = "ended"
    """The victim ended by itself."""
    OVERDUE = "overdue"
    """The deadline passed and the job was still there."""
    FAILED = "failed"
    """The victim ended without having saved what it was asked to save."""


class BookingState(StrEnum):
    """Where one slot of a booking stands."""

    PROPOSED = "proposed"
    """Taken here, and not yet in the engine."""
    BOOKED = "booked"
    ACTIVE = "active"
    IDLE = "idle"
    """Its time has come, and nobody uses it."""
    RELEASED = "released"
    """Given back: cancelled, or nobody came."""
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimated moment.

    Attributes:
        earliest: Unix time.
        latest: Unix time; not before `earliest`.
        samples: how many past cases it rests on; 0 where it is the engine's own plan.
    """

    earliest: float
    latest: float
    samples: int


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """One job of an engine.

    Attributes:
        engine: slurm, kueue or local.
        id: the engine's own.
        name: as the user called it.
        run_id: the trainer's run, or None where it has none.
        user: who submitted it.
        team: by the policy; empty where the user is of none.
        priority: name of the policy's, or the engine's own word.
        state: where it stands.
        gpus: cards it asks for, or holds; of an array's tasks in one, each of them.
        gpu_type: name of the policy's kind of cards; empty where any will do.
        submitted: Unix time.
        started: Unix time of this attempt's start, or None.
        position: place among those that wait for the same cards, from 1; None where it does not
            wait, or where the engine does not tell.
        start: when it is expected to start, or None where nobody can tell.
        why: code of the reason it waits; empty where it does not.
        words: the same as one sentence for its owner.
        must_end: ids of the entries that would have to end first.
        requeues: how often it came back.
        job_id: the exporter's, where known.
        finish: when it is expected to end, or None.
        tasks: how many jobs it is: an array's tasks that have not begun are one entry. At least so
            many where the engine does not tell all of them.
    """

    engine: str
    id: str
    name: str
    user: str
    state: EntryState
    gpus: int
    submitted: float
    run_id: str | None = None
    team: str = ""
    priority: str = ""
    gpu_type: str = ""
    started: float | None = None
    position: int | None = None
    start: Interval | None = None
    why: str = ""
    words: str = ""
    must_end: tuple[str, ...] = ()
    requeues: int = 0
    job_id: str | None = None
    finish: Interval | None = None
    tasks: int = 1

    @property
    def standing(self) -> str:
        """The state in a word for people: what was cancelled is no failure."""
        gone = self.state is EntryState.FAILED and self.why == CANCELLED
        return CANCELLED if gone else self.state.value


@dataclass(frozen=True, slots=True)
class Preemption:
    """A job that was asked to leave for another, and each step with its time.

    Attributes:
        id: of the request.
        victim: id of the entry that was asked.
        successor: id of the entry, the booking's slot, or the window that wants the cards.
        cause: why.
        at: `step` or `epoch`: where it was asked to stop.
        deadline: Unix time, or None where the engine does not tell; what happens then is the
            policy's.
        run_id: the victim's run, or None.
        steps: of STEPS, each with its Unix time; one that was not seen is absent.
        outcome: how it stands.
        lost_seconds: GPU-seconds of work that were lost, or None where not known.
        words: one sentence of what happened last.
    """

    id: str
    victim: str
    successor: str
    cause: Cause
    at: str
    deadline: float | None = None
    run_id: str | None = None
    steps: dict[str, float] = field(default_factory=dict)
    outcome: Outcome = Outcome.OPEN
    lost_seconds: float | None = None
    words: str = ""


@dataclass(frozen=True, slots=True)
class BookingEntry:
    """One slot of a booking.

    Attributes:
        id: `<booking>` or `<booking>.<n>` for the n-th slot of a recurring one.
        team: whose slot it is.
        who: the user who made it.
        gpus: cards.
        gpu_type: name of the policy's kind of cards.
        start: Unix time.
        end: Unix time.
        repeat: `none`, `daily`, `weekdays` or `weekly`.
        state: where it stands.
        cost: GPU-hours of the slot.
        used_gpu_seconds: of its cards so far, or None where nobody can tell.
        words: what it is for.
    """

    id: str
    team: str
    who: str
    gpus: int
    gpu_type: str
    start: float
    end: float
    repeat: str = "none"
    state: BookingState = BookingState.BOOKED
    cost: float = 0.0
    used_gpu_seconds: float | None = None
    words: str = ""


@dataclass(frozen=True, slots=True)
class BudgetEntry:
    """A budget of the policy in its current period.

    Attributes:
        team: whose.
        per: `day` or `month`.
        limit_gpu_hours: what it grants.
        used: GPU-hours so far, or None where nobody can tell.
        forecast: GPU-hours at the period's end, or None where there is too little to go by.
        kind: `hard` or `soft`.
        period_start: Unix time.
        period_end: Unix time.
    """

    team: str
    per: str
    limit_gpu_hours: float
    kind: str
    period_start: float
    period_end: float
    used: float | None = None
    forecast: float | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that an operator should know.

    Attributes:
        code: a stable word.
        words: one sentence that says what to do.
        since: Unix time at which it began.
    """

    code: str
    words: str
    since: float


@dataclass(frozen=True, slots=True)
class Card:
    """A kind of cards of the policy.

    Attributes:
        name: the policy's.
        count: cards of this kind.
    """

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class ScheduleDocument:
    """Everything that the scheduler shows.

    Attributes:
        engine: slurm, kueue or local.
        cluster: its name.
        taken: Unix time at which the engine was last read.
        entries: jobs, those that wait in their order first.
        preemptions: open ones and those of the last days.
        bookings: slots of the last days and of those ahead.
        budgets: of the policy.
        cards: what can be booked.
        problems: what an operator should know.
        timezone: of the policy: days and weeks are shown by its clocks.
        left_out: rows that did not fit.
    """

    engine: str
    cluster: str
    taken: float
    entries: tuple[QueueEntry, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    bookings: tuple[BookingEntry, ...] = ()
    budgets: tuple[BudgetEntry, ...] = ()
    problems: tuple[Problem, ...] = ()
    cards: tuple[Card, ...] = ()
    timezone: str = "UTC"
    left_out: int = 0
    version: str = VERSION

    def encode(self) -> bytes:
        """The answer's body.

        Texts that are longer than a reader takes are cut, and rows beyond MAX_ENTRIES are left out
        and counted: one user's endless job name must not hide the whole queue.
        """
        data = dataclasses.asdict(self)
        left = self.left_out
        for name in _LISTS:
            left += max(0, len(data[name]) - MAX_ENTRIES)
            data[name] = [_cut(row) for row in data[name][:MAX_ENTRIES]]
        return json.dumps(
            {**_cut(data), "left_out": left},
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        ).encode()

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Read a document; fields that a newer scheduler adds are ignored.

        Raises:
            ScheduleError: naming the field.
        """
        row = _Row(_load(body), "the document")
        if row.text("version", MAX_NAME) != VERSION:
            raise ScheduleError(f"version {row.data['version']!r} is not {VERSION}")
        return cls(
            engine=row.text("engine", MAX_NAME),
            cluster=row.text("cluster", MAX_NAME),
            taken=row.number("taken"),
            entries=row.rows("entries", _entry),
            preemptions=row.rows("preemptions", _preemption),
            bookings=row.rows("bookings", _booking),
            budgets=row.rows("budgets", _budget),
            problems=row.rows("problems", _problem),
            cards=row.rows("cards", _card),
            timezone=row.text("timezone", MAX_NAME, default="UTC"),
            left_out=row.integer("left_out", default=0),
        )


_LISTS = ("entries", "preemptions", "bookings", "budgets", "problems", "cards")
_LONG = frozenset({"words"})
_CODES = frozenset({"why", "code"})
_ANY = TypeVar("_ANY")
_WORD = TypeVar("_WORD", bound=StrEnum)


def plain_code(text: str) -> str:
    """A code in the one way in which it is written: `victim-overdue` is `victim_overdue`."""
    return text.replace("-", "_")


def _cut(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose texts a reader takes; what is no text (half a surrogate pair) is replaced."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, str):
            limit = MAX_WORDS if name in _LONG else MAX_NAME
            cut = value.encode("utf-8", "replace").decode()[:limit]
            found[name] = plain_code(cut) if name in _CODES else cut
        elif name == "must_end":
            found[name] = [str(each)[:MAX_NAME] for each in value[:MAX_IDS]]
        else:
            found[name] = value
    return found


def _load(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_BODY_BYTES:
        raise ScheduleError(f"the document is larger than {MAX_BODY_BYTES} bytes")
    try:
        data = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise ScheduleError(f"the document is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ScheduleError("the document is not a JSON object")
    return data


@dataclass(frozen=True, slots=True)
class _Row:
    """An object of the document, and where it stands in it."""

    data: dict[str, Any]
    place: str

    def fail(self, name: str, what: str) -> ScheduleError:
        return ScheduleError(f"{self.place}: {name} is not {what}")

    def text(self, name: str, limit: int, *, default: str | None = None) -> str:
        value = self.data.get(name, default)
        if not isinstance(value, str) or len(value) > limit:
            raise self.fail(name, f"a text of at most {limit} characters")
        try:
            value.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair
            raise self.fail(name, "text") from error
        return value

    def name(self, name: str) -> str:
        return self.text(name, MAX_NAME, default="")

    def optional_text(self, name: str) -> str | None:
        return None if self.data.get(name) is None else self.text(name, MAX_NAME)

    def integer(self, name: str, *, default: int | None = None) -> int:
        value = self.data.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
            raise self.fail(name, "a whole number")
        return value

    def number(self, name: str) -> float:
        value = self.data.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.fail(name, "a number")
        try:
            found = float(value)
        except OverflowError as error:
            raise self.fail(name, "a number that can be") from error
        if not math.isfinite(found) or found < 0:
            raise self.fail(name, "a finite number of at least 0")
        return found

    def optional(self, name: str) -> float | None:
        return None if self.data.get(name) is None else self.number(name)

    def word(self, name: str, kind: type[_WORD]) -> _WORD:
        value = self.data.get(name)
        if not isinstance(value, str) or value not in set(kind):
            raise self.fail(name, f"one of {', '.join(kind)}")
        return kind(value)

    def one_of(self, name: str, words: Sequence[str]) -> str:
        value = self.data.get(name)
        if value not in words:
            raise self.fail(name, f"one of {', '.join(words)}")
        return str(value)

    def rows(self, name: str, read: Callable[[_Row], _ANY]) -> tuple[_ANY, ...]:
        value = self.data.get(name, [])
        if not isinstance(value, list) or len(value) > MAX_ENTRIES:
            raise self.fail(name, f"a list of at most {MAX_ENTRIES} rows")
        found = []
        for number, item in enumerate(value):
            place = f"{name}[{number}]"
            if not isinstance(item, dict):
                raise ScheduleError(f"{place} is not an object")
            found.append(read(_Row(item, place)))
        return tuple(found)

    def interval(self, name: str) -> Interval | None:
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, "an object")
        row = _Row(value, f"{self.place}: {name}")
        found = Interval(row.number("earliest"), row.number("latest"), row.integer("samples"))
        if found.latest < found.earliest:
            raise self.fail(name, "an interval: it ends before it begins")
        return found


def _entry(row: _Row) -> QueueEntry:
    ids = row.data.get("must_end", [])
    if not isinstance(ids, list) or len(ids) > MAX_IDS:
        raise row.fail("must_end", f"a list of at most {MAX_IDS} ids")
    position = row.data.get("position")
    return QueueEntry(
        engine=row.name("engine"),
        id=row.text("id", MAX_NAME),
        name=row.name("name"),
        user=row.name("user"),
        state=row.word("state", EntryState),
        gpus=row.integer("gpus"),
        submitted=row.number("submitted"),
        run_id=row.optional_text("run_id"),
        team=row.name("team"),
        priority=row.name("priority"),
        gpu_type=row.name("gpu_type"),
        started=row.optional("started"),
        position=None if position is None else row.integer("position"),
        start=row.interval("start"),
        why=plain_code(row.name("why")),
        words=row.text("words", MAX_WORDS, default=""),
        must_end=tuple(_Row({"must_end": each}, row.place).name("must_end") for each in ids),
        requeues=row.integer("requeues", default=0),
        job_id=row.optional_text("job_id"),
        finish=row.interval("finish"),
        tasks=max(1, row.integer("tasks", default=1)),
    )


def _preemption(row: _Row) -> Preemption:
    steps = row.data.get("steps", {})
    if not isinstance(steps, dict):
        raise row.fail("steps", "an object")
    times = _Row(steps, f"{row.place}: steps")
    return Preemption(
        id=row.text("id", MAX_NAME),
        victim=row.text("victim", MAX_NAME),
        successor=row.name("successor"),
        cause=row.word("cause", Cause),
        at=row.one_of("at", ("step", "epoch")),
        deadline=row.optional("deadline"),
        run_id=row.optional_text("run_id"),
        # A step that a newer scheduler adds is not known here.
        steps={name: times.number(name) for name in STEPS if name in steps},
        outcome=row.word("outcome", Outcome),
        lost_seconds=row.optional("lost_seconds"),
        words=row.text("words", MAX_WORDS, default=""),
    )


def _booking(row: _Row) -> BookingEntry:
    found = BookingEntry(
        id=row.text("id", MAX_NAME),
        team=row.name("team"),
        who=row.name("who"),
        gpus=row.integer("gpus"),
        gpu_type=row.name("gpu_type"),
        start=row.number("start"),
        end=row.number("end"),
        repeat=row.text("repeat", MAX_NAME, default="none"),
        state=row.word("state", BookingState),
        cost=row.number("cost"),
        used_gpu_seconds=row.optional("used_gpu_seconds"),
        words=row.text("words", MAX_WORDS, default=""),
    )
    if found.end < found.start:
        raise row.fail("end", "after the slot's start")
    return found


def _budget(row: _Row) -> BudgetEntry:
    return BudgetEntry(
        team=row.name("team"),
        per=row.name("per"),
        limit_gpu_hours=row.number("limit_gpu_hours"),
        kind=row.one_of("kind", ("hard", "soft")),
        period_start=row.number("period_start"),
        period_end=row.number("period_end"),
        used=row.optional("used"),
        forecast=row.optional("forecast"),
    )


def _problem(row: _Row) -> Problem:
    code = plain_code(row.name("code"))
    return Problem(code, row.text("words", MAX_WORDS, default=""), row.number("since"))


def _card(row: _Row) -> Card:
    return Card(row.text("name", MAX_NAME), row.integer("count"))
