"""What becomes of a job whose attempt has ended, and what its notice has come to. Pure."""

from __future__ import annotations

import dataclasses
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuwarden import job_files
from gpuwarden.schedule_api import CANCELLED, Outcome
from gpuwarden.scheduling.drivers import LOOP

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.job_files import RunStatus
    from gpuwarden.scheduling.engine_terms import LocalTerms
    from gpuwarden.scheduling.local.launches import Record
    from gpuwarden.scheduling.local.queues import Attempt, Job, Note

_OURS = frozenset({-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGKILL})
"""How a job ends that was signalled and said nothing of its own."""
_LEFT = (job_files.EXIT_REQUEUE, job_files.EXIT_HOLD, job_files.EXIT_NOT_RESUMABLE)
NOT_STARTED = "not_started"
"""Code of a job that is held because it could not be started."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What is to be written.

    Attributes:
        attempt: columns of the attempt.
        job: columns of the job.
        note: columns of the notice that stood; empty if none did.
    """

    attempt: Mapping[str, Any]
    job: Mapping[str, Any]
    note: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended.

    Attributes:
        code: exit status, negative for a signal; None: nobody saw.
        time: Unix time.
        error: why it could not be started, or empty.
        rebooted: whether its host was restarted under it.
        published: exit status that the training told in its job files; None: it told none.
        broken: what is wrong with a card that it had, or empty.
        unproven: it was asked to leave and ended with 0, which a program that obeyed says as one
            that was complete does.
    """

    code: int | None
    time: float
    error: str = ""
    rebooted: bool = False
    published: int | None = None
    broken: str = ""
    unproven: bool = False

    @property
    def failed(self) -> bool:
        """Whether it ended by a fault, and not as it was to end or was asked to."""
        return self.code is not None and self.code not in (job_files.EXIT_DONE, *_LEFT)


def seen(record: Record | None, status: RunStatus | None, *, rebooted: bool, now: float) -> Ended:
    """How an attempt ended, by whoever saw it.

    Args:
        record: of its parent process, which saw it.
        status: what it published itself last: that counts where its parent was killed.
        rebooted: whether its host was restarted under it.
        now: Unix time.
    """
    if record is not None:
        told = None if status is None or status.exit is None else status.exit.code
        return Ended(record.code, record.time, record.error, published=told)
    if status is not None and status.exit is not None:
        return Ended(status.exit.code, status.exit.time)
    last = now if status is None else min(now, status.heartbeat)
    return Ended(None, last, rebooted=rebooted)


def ending(
    job: Job,
    attempt: Attempt,
    ended: Ended,
    *,
    note: Note | None,
    terms: LocalTerms,
    minimum_run: float,
) -> Ending:
    """What is to be written of an attempt that ended.

    Args:
        job: whose it is.
        attempt: with the last that was seen of its progress.
        ended: how.
        note: the notice that stood.
        terms: of the policy.
        minimum_run: seconds after which an attempt without a new epoch has got somewhere.
    """
    asked = job.then_what == "hold" or (note is not None and note.notified is not None)
    columns: dict[str, Any] = {"ended": ended.time, "exit": ended.code}
    ended = _meant(ended, asked=asked or attempt.term_at is not None)
    values = _progress(job, attempt, ended, minimum_run=minimum_run, asked=asked)
    values["then_what"] = ""
    if job.then_what == "cancel":
        values |= _over("failed", CANCELLED, _cancelled(job, attempt, ended), ended)
    else:
        after = dataclasses.replace(job, barren=values["barren"])
        values |= _outcome(after, attempt, ended, terms)
    columns["why"] = str(values.get("words", ""))
    return Ending(columns, values, {} if note is None else _receipt(attempt, ended, note))


def _meant(ended: Ended, *, asked: bool) -> Ended:
    """What an end with 0 means: a training that has left is not done, whatever its program says.

    Where nothing tells, one that was asked to leave goes on: `gpuwarden train` of a run that is
    complete sees that at once, and the work of one that is not would be lost.
    """
    if ended.code != job_files.EXIT_DONE or ended.published == job_files.EXIT_DONE:
        return ended
    if ended.published in _LEFT:
        return dataclasses.replace(ended, code=ended.published)
    return dataclasses.replace(ended, code=None, unproven=True) if asked else ended


def _cancelled(job: Job, attempt: Attempt, ended: Ended) -> str:
    """Who cancelled a job, and whether it can be gone on with."""
    words = job.words.rstrip(".") or "It was cancelled"
    if ended.code == job_files.EXIT_DONE:
        return f"{words}; it had just become complete."
    if _is_whole(attempt, ended):
        return f"{words}; it saved its state before it left."
    if attempt.saved is not None:
        return f"{words}; it left without saving, a state of before is there."
    return f"{words}; no state of it is there."


def _is_whole(attempt: Attempt, ended: Ended) -> bool:
    """Whether the state on disk is that of the attempt's last step."""
    left = ended.code in (job_files.EXIT_DONE, job_files.EXIT_REQUEUE, job_files.EXIT_HOLD)
    return left and attempt.saved_step is not None and attempt.saved_step >= (attempt.step or 0)


def not_started(reason: str) -> str:
    """What to say of a job that is held because it could not be started."""
    return f"It could not be started: {reason}. Release it when that is mended, or cancel it."


def _progress(
    job: Job, attempt: Attempt, ended: Ended, *, minimum_run: float, asked: bool
) -> dict[str, Any]:
    epoch = -1 if attempt.epoch is None else attempt.epoch
    step = -1 if attempt.step is None else attempt.step
    began = attempt.began
    long = began is not None and ended.time - began >= minimum_run and step > job.step
    somewhere = epoch > job.epoch or long
    values: dict[str, Any] = {
        # One that made way for others, before it could get anywhere, is in no loop.
        "barren": 0 if somewhere else job.barren + (0 if asked else 1),
        "epoch": max(epoch, job.epoch),
        "step": max(step, job.step),
    }
    return values


def _outcome(job: Job, attempt: Attempt, ended: Ended, terms: LocalTerms) -> dict[str, Any]:
    """State, and its reason, that a job has from now on."""
    code = ended.code
    if ended.error:
        # Held, and not failed: a folder that is not mounted would empty the whole queue.
        return _back(job, held=not_started(ended.error), code=NOT_STARTED)
    if code == job_files.EXIT_DONE:
        return _over("done", "", "", ended)
    if code == job_files.EXIT_HOLD:
        words = "It left because a rule ended it (exit 76): release it when the cause is gone."
        held = job.words if job.then_what == "hold" else words
        return _back(job, held=held, requeue=True)
    asked = attempt.term_at is not None and code in _OURS
    if code is None or code == job_files.EXIT_REQUEUE or asked:
        return _left(job, ended, asked=asked, terms=terms)
    return _failed(job, code, ended, terms)


def _failed(job: Job, code: int, ended: Ended, terms: LocalTerms) -> dict[str, Any]:
    """A job that ended by a fault: its card's, or its own."""
    if ended.broken:
        words = f"A card of it failed: {ended.broken}; it goes on from its newest state on others."
        return _back(job, words=words, requeue=True)
    if job.failures < terms.retries:
        words = f"It failed ({_said(code)}) and is tried again."
        return _back(job, words=words) | {"failures": job.failures + 1}
    words = f"It failed: {_said(code)}; see gpuwarden queue logs {job.id}."
    return _over("failed", "failed", words, ended)


def _left(job: Job, ended: Ended, *, asked: bool, terms: LocalTerms) -> dict[str, Any]:
    """A job that is to go on where it was, unless somebody or the loop guard holds it."""
    if job.then_what == "hold":
        return _back(job, held=job.words or "It was held while it ran.", requeue=True)
    if job.barren >= terms.barren_restarts:
        words = f"It came back {job.barren} times without a new epoch: see its log, and release it."
        return _back(job, held=words, requeue=True, code=LOOP)
    return _back(job, words=_came_back(ended, asked=asked), requeue=True)


def _over(state: str, code: str, words: str, ended: Ended) -> dict[str, Any]:
    return {"state": state, "code": code, "words": words, "held": "", "ended": ended.time}


def _back(
    job: Job, *, held: str = "", words: str = "", requeue: bool = False, code: str = ""
) -> dict[str, Any]:
    return {
        "state": "waiting",
        "held": held,
        "code": code,
        "words": words,
        "requeues": job.requeues + (1 if requeue else 0),
    }


def _came_back(ended: Ended, *, asked: bool) -> str:
    if ended.rebooted:
        return "Its host was restarted; it goes on from its newest state."
    if asked:
        return "It was ended after its deadline; it goes on from its newest state."
    if ended.unproven:
        return (
            "It was asked to leave and ended with exit 0, and nothing tells that it is complete: "
            "it goes on from its newest state, or ends at once if it is."
        )
    if ended.code is None:
        return "It ended, and nobody saw how; it goes on from its newest state."
    return "It left, and goes on from there when its turn comes."


def _said(code: int) -> str:
    if code == job_files.EXIT_NOT_RESUMABLE:
        return "it left, and no state could be saved (exit 77)"
    if code == -signal.SIGKILL:
        return "it was ended by SIGKILL, which is the kernel's too when memory is short: see dmesg"
    if code < 0:
        try:
            return f"it was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"it was ended by signal {-code}"
    return f"exit {code}"


def _receipt(attempt: Attempt, ended: Ended, note: Note) -> dict[str, Any]:
    """What a notice has come to, now that its job has left."""
    values: dict[str, Any] = {"left": ended.time}
    told = note.notified if note.notified is not None else note.made
    if note.saved is None and attempt.saved is not None and attempt.saved >= told:
        values["saved"] = attempt.saved
    complete = ended.code in (job_files.EXIT_DONE, job_files.EXIT_REQUEUE, job_files.EXIT_HOLD)
    if ended.code == job_files.EXIT_DONE or _is_whole(attempt, ended):
        values["lost"] = 0.0
    else:
        begun = attempt.created if attempt.began is None else attempt.began
        since = begun if attempt.saved is None else max(begun, attempt.saved)
        values["lost"] = max(0.0, ended.time - since) * attempt.gpus
    if ended.code == job_files.EXIT_DONE:
        values |= {"outcome": Outcome.ENDED.value, "last": "It was done before it had to leave."}
    elif complete:
        values |= {"outcome": Outcome.DONE.value, "last": "It saved its state and left."}
    else:
        values |= {"outcome": Outcome.FAILED.value, "last": "It ended without a state of its end."}
    return values
