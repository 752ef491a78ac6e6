"""The queue for people: what stands in a row, and the sentences of one job. Pure."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from gpuwarden import durations
from gpuwarden.errors import RefusedAction
from gpuwarden.schedule_api import STEPS, EntryState
from gpuwarden.scheduling.moments import show_moment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from zoneinfo import ZoneInfo

    from gpuwarden.schedule_api import Interval, Preemption, QueueEntry, ScheduleDocument

STALE_SECONDS = 60.0
"""A queue that was read longer ago is told to be old."""
_STEPS = {
    "notified": "asked to leave",
    "acknowledged": "its trainer has read it",
    "saved": "its state is saved",
    "left": "it has left",
    "freed": "the cards are free",
    "started": "the successor has started",
}
_OVER = (EntryState.DONE, EntryState.FAILED)
_WAITS = (EntryState.PENDING, EntryState.HELD)


def row(item: QueueEntry, *, now: float, zone: ZoneInfo) -> tuple[str, ...]:
    """A job as a row: id, name, user, team, priority, state, cards, since, expected, why."""
    card = f" {item.gpu_type}" if item.gpu_type else ""
    place = f" #{item.position}" if item.position is not None and item.state in _WAITS else ""
    return (
        item.id,
        item.name,
        item.user,
        item.team,
        item.priority,
        f"{item.standing}{place}",
        f"{'' if item.tasks == 1 else f'{item.tasks} x '}{item.gpus}{card}",
        _since(item, now),
        expected(item, now=now, zone=zone),
        item.words or item.why,
    )


def _since(item: QueueEntry, now: float) -> str:
    begun = item.started if item.started is not None and item.state not in _WAITS else None
    return about(max(0.0, now - (item.submitted if begun is None else begun)))


def expected(item: QueueEntry, *, now: float, zone: ZoneInfo) -> str:
    """When it will start or end, as an interval, with what that rests on."""
    if item.state in _OVER:
        return ""
    if item.state in _WAITS:
        return "" if item.start is None else f"starts {between(item.start, now=now, zone=zone)}"
    return "" if item.finish is None else f"ends {between(item.finish, now=now, zone=zone)}"


def between(interval: Interval, *, now: float, zone: ZoneInfo) -> str:
    """An interval in words: `20:10 to 21:40 (n=12)`; 0 cases are the engine's own plan."""
    first, last = (
        dt.datetime.fromtimestamp(at, zone) for at in (interval.earliest, interval.latest)
    )
    today = dt.datetime.fromtimestamp(now, zone).date()
    near = dt.timedelta(days=180)
    texts = [
        f"{at:%H:%M}"
        if at.date() == today
        else f"{at:%a %m-%d %H:%M}"
        if abs(at.date() - today) < near
        else f"{at:%Y-%m-%d %H:%M}"
        for at in (first, last)
    ]
    if texts[0] == texts[1]:
        texts.pop()
    elif first.date() == last.date():
        texts[1] = f"{last:%H:%M}"
    basis = f"n={interval.samples}" if interval.samples else "planned"
    past = ", has passed" if interval.latest < now else ""
    return f"{' to '.join(texts)} ({basis}{past})"


def about(seconds: float) -> str:
    """A length of time in its two largest units, such as 1d4h."""
    unit = 86400 if seconds >= 86400 * 10 else 3600 if seconds >= 86400 else 60
    if seconds < 60:
        return f"{int(seconds)}s"
    return durations.render(seconds // unit * unit)


def found(document: ScheduleDocument, name: str, *, open_only: bool = False) -> QueueEntry | None:
    """The job that somebody means by its id or, where that is no number, its name or run.

    Args:
        document: the queue.
        name: as it was typed.
        open_only: whether, of names, only those of jobs count that have not ended; else an open one
            goes before those that have, and of these the last.

    Raises:
        RefusedAction: several open jobs have this name.
    """
    for item in document.entries:
        if item.id == name:
            return item
    if name.isdigit():
        return None
    named = [item for item in document.entries if name in (item.name, item.run_id)]
    ones = [item for item in named if item.state not in _OVER]
    if len(ones) > 1:
        ids = ", ".join(item.id for item in ones)
        raise RefusedAction("several", f"{name} is the name of the jobs {ids}: say which")
    if ones or open_only:
        return ones[0] if ones else None
    return max(named, key=lambda item: item.submitted, default=None)


def commanded(verb: str, job: str, entry: QueueEntry | None) -> str:
    """What became of a command.

    Args:
        verb: cancel, hold or release.
        job: its id.
        entry: as it was before; None: not known.
    """
    name = job if entry is None or not entry.name else f"{job} {entry.name}"
    if entry is None:
        return f"{name}: {verb} is done"
    if verb == "release":
        return f"{name}: waits for its turn again"
    if entry.state in _WAITS:
        return f"{name}: {'out of the queue' if verb == 'cancel' else 'held'}"
    return f"{name}: asked to leave{' for good' if verb == 'cancel' else ', and held then'}"


def age(document: ScheduleDocument, now: float) -> str:
    """A sentence where the queue is old, else nothing."""
    if not document.taken:
        return f"{document.engine} has not been seen yet."
    late = now - document.taken
    if late <= STALE_SECONDS:
        return ""
    return f"This is as of {about(late)} ago: {document.engine} has not been seen since."


def about_entry(
    item: QueueEntry, document: ScheduleDocument, *, now: float, zone: ZoneInfo
) -> Iterator[str]:
    """Everything about one job, a line each."""
    cards = f"{item.gpus} x {item.gpu_type}" if item.gpu_type else _cards(item.gpus)
    yield f"{item.id} {item.name}: {item.standing}"
    each = "" if item.tasks == 1 else f" for each of {item.tasks} tasks"
    whose = f"{item.user} of {item.team or 'no team'}, priority {item.priority or 'none'}"
    yield f"  {whose}, {cards}{each}"
    if item.run_id is not None or item.job_id is not None:
        known = [text for text in (item.run_id, item.job_id) if text]
        yield f"  run {', job '.join(known)}"
    yield f"  submitted {show_moment(item.submitted, zone)}"
    if item.started is not None:
        yield f"  started {show_moment(item.started, zone)}"
    if item.requeues:
        yield f"  came back {'once' if item.requeues == 1 else f'{item.requeues} times'}"
    if item.state in _WAITS:
        yield from _waiting(item, document, now=now, zone=zone)
    elif item.state not in _OVER:
        yield f"  {expected(item, now=now, zone=zone) or 'when it ends nobody can tell yet'}"
        if item.words:
            yield f"  {item.words}"
    elif item.words:
        yield f"  {item.words}"
    for preemption in document.preemptions:
        if item.id in (preemption.victim, preemption.successor):
            yield from about_preemption(preemption, zone=zone)


def _waiting(
    item: QueueEntry, document: ScheduleDocument, *, now: float, zone: ZoneInfo
) -> Iterator[str]:
    place = "" if item.position is None else f" at place {item.position}"
    yield f"  waits{place}: {item.words or item.why or 'the engine does not say why'}"
    if item.start is None:
        yield "  when it starts nobody can tell"
    else:
        yield f"  starts {between(item.start, now=now, zone=zone)}"
    names = {each.id: each for each in document.entries}
    for number, other in enumerate(item.must_end):
        there = names.get(other)
        whose = "" if there is None else f" {there.name} of {there.user}, {_cards(there.gpus)}"
        ends = "" if there is None else expected(there, now=now, zone=zone)
        head = "  would have to end:" if number == 0 else "                    "
        yield f"{head} {other}{whose}{f', {ends}' if ends else ''}"


def _cards(number: int) -> str:
    return f"{number} card{'' if number == 1 else 's'}"


def about_preemption(item: Preemption, *, zone: ZoneInfo) -> Iterator[str]:
    """The receipts of a preemption, a line each, with the time between them."""
    yield (
        f"  {item.victim} leaves for {item.successor} ({item.cause}, at the {item.at}): "
        f"{item.outcome}"
    )
    before: float | None = None
    for step in STEPS:
        if step not in item.steps:
            continue
        at = item.steps[step]
        gap = "" if before is None else f"  +{max(0.0, at - before):.1f} s"
        local = dt.datetime.fromtimestamp(at, zone)
        yield f"    {local:%H:%M:%S}  {_STEPS[step]}{gap}"
        before = at
    if item.outcome == "open" and item.deadline is not None:
        yield f"    deadline {show_moment(item.deadline, zone)}"
    if item.lost_seconds is not None:
        yield f"    lost {item.lost_seconds:,.0f} GPU-seconds of work"
    if item.words:
        yield f"    {item.words}"
