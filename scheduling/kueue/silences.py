"""Jobs that the engine did not ask to leave: who is chosen instead, or would have to leave. Pure.

Some may not be asked, for their owner or a rule protects them, and nobody ends those. Some cannot
be: the engine does not know them, say. They too are passed over; only where nobody else will do and
the policy lets Kueue end jobs without a notice, the grace of their pods is their notice.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from gpuwarden.scheduling.fitted_preemptions import choose_fitting
from gpuwarden.scheduling.kueue.leavings import CANNOT
from gpuwarden.scheduling.kueue.views import Fault, Wait
from gpuwarden.scheduling.preemption_terms import Code
from gpuwarden.scheduling.preemptions import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from gpuwarden.scheduling.kueue.leavings import Leaving
    from gpuwarden.scheduling.kueue.views import Silence, View
    from gpuwarden.scheduling.kueue.workloads import QueuedJob
    from gpuwarden.scheduling.preemption_terms import Choice, Request, Running, Terms


def choose_askable(
    request: Request,
    running: Sequence[Running],
    history: Mapping[str, Sequence[float]],
    *,
    terms: Terms,
    fits: Callable[[frozenset[str]], bool],
    view: View,
    hard: bool,
) -> tuple[Choice, Wait | None]:
    """Say who is told to leave, of those that can be asked if they are enough.

    Args:
        request: that cannot start now.
        running: every job that holds cards; those that were not asked are deaf.
        history: job id -> when it was preempted before.
        terms: of the policy.
        fits: whether the request fits once the jobs of these ids have left.
        view: in which they are not asked.
        hard: whether those that cannot be asked may be chosen where nobody else will do.

    Returns:
        The choice; and why nobody leaves where that is for want of asking.
    """

    def chosen(heard: Collection[str]) -> Choice:
        jobs = [
            dataclasses.replace(each, deaf=False) if each.id in heard else each for each in running
        ]
        return choose_fitting(request, jobs, history, terms=terms, fits=fits, now=view.now)

    choice = chosen(())
    if choice.victims or choice.code in (Code.FITS, Code.COMING) or not view.silent:
        return choice, None
    silences = silences_of(view)
    cannot = {name for name, silence in silences.items() if not silence.protected}
    if hard and (harder := chosen(cannot)).victims:
        return harder, None
    would = [victim.id for victim in chosen(silences).victims]
    if not would:
        return choice, None
    whys = dict.fromkeys(silences[name].words for name in would if name in silences)
    leaves = f"{listed(would)} would have to leave for it"
    words = f"{leaves}, and nobody was asked: {'; '.join(whys)}."
    return choice, Wait("not_asked", words, tuple(sorted({*would, *choice.overdue})))


def silences_of(view: View) -> dict[str, Silence]:
    """Id of a job that runs -> why it was not asked."""
    return {
        job.id: silence
        for job in view.jobs
        if job.active and not job.finished and (silence := view.silence(job)) is not None
    }


def unasked(leaving: Leaving, silence: Silence | None) -> Leaving:
    """A leave of a job that may be one that cannot be asked: then its grace is its notice."""
    if silence is None:
        return leaving
    words = f"{leaving.words} The engine cannot ask it: {silence.words}."
    return dataclasses.replace(leaving, leave=CANNOT, words=words)


def not_asked(job: QueuedJob, successor: str, silence: Silence) -> Fault:
    """That a job should leave and stays, and what helps."""
    remedy = (
        "it is tried again"
        if silence.protected
        else "look whether its node has gpuwarden's agent and the engine knows it; with "
        "kueue.own_preemption: fallback it would be ended with the grace of its pods as its notice"
    )
    words = f"{job.id} should leave for {successor}, and was not asked: {silence.words}; {remedy}"
    return Fault("not_asked", job.id, words)
