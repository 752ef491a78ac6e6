"""Who leaves where only the engine can say what then fits: quotas in cohorts, limits of accounts.

As `preemptions.choose`, but for an engine whose room is no number of cards in a pool. It is asked
once for every job in question, cheapest first, and once more for each that was taken. Pure.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from gpuwarden.scheduling.preemption_terms import Choice, Code, Request, Running, Terms
from gpuwarden.scheduling.preemptions import (
    asked_words,
    candidates,
    counted_cards,
    listed,
    passing_refusal,
    ripening,
    victim_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


def choose_fitting(
    request: Request,
    running: Iterable[Running],
    history: Mapping[str, Sequence[float]],
    *,
    terms: Terms,
    fits: Callable[[frozenset[str]], bool],
    now: float,
) -> Choice:
    """Say who is told to leave for a request.

    Args:
        request: that cannot start now.
        running: every job that holds cards, those that are leaving included.
        history: job id -> when it was preempted before.
        terms: of the policy.
        fits: whether the request fits once the jobs of these ids have left, as the engine sees it;
            more of them never fit worse.
        now: Unix time.
    """
    jobs = sorted(running, key=lambda job: job.id)
    mine = [job for job in jobs if job.told is not None and job.told.successor == request.id]
    coming = [job.id for job in mine if job.told is not None and now < job.told.deadline]
    base = Choice(
        coming=tuple(coming), overdue=tuple(job.id for job in mine if job.id not in coming)
    )
    if fits(frozenset()):
        return dataclasses.replace(base, code=Code.FITS, words="It fits as it is.")
    if coming and fits(frozenset(coming)):
        return dataclasses.replace(
            base,
            code=Code.COMING,
            words=f"{listed(coming)} {'was' if len(coming) == 1 else 'were'} told to leave for it, "
            "and nobody else has to.",
        )
    able, later = candidates(request, jobs, history, terms=terms, now=now)
    ranked = sorted(
        able,
        key=lambda job: (
            terms.value(job.priority),
            job.lost_gpu_seconds(now),
            -job.started,
            job.id,
        ),
    )
    taken: list[Running] = []
    for job in ranked:
        taken.append(job)
        if fits(frozenset((*coming, *(each.id for each in taken)))):
            break
    else:
        ripe = ripening(later, history, terms=terms, now=now)
        for number, (again, _job) in enumerate(ripe, 1):
            needed = [job for _time, job in ripe[:number]]
            if fits(frozenset((*coming, *(each.id for each in (*able, *needed))))):
                return passing_refusal(base, needed, again=again, now=now)
        if base.overdue:
            return passing_refusal(base, (), again=None, now=now)
        may = sorted(terms.preempts.get(request.priority or "", ()))
        who = f"jobs of {listed(may)} cannot give them" if may else "it may ask nobody"
        return dataclasses.replace(
            base,
            code=Code.NO_VICTIM,
            words=f"It needs {counted_cards(request.gpus)}, and {who}.",
        )
    # Whoever was taken early may have turned out not to be needed: the dearest is spared first.
    for job in reversed(taken[:-1]):
        rest = [each for each in taken if each is not job]
        if fits(frozenset((*coming, *(each.id for each in rest)))):
            taken = rest
    victims = tuple(victim_of(job, request, history, terms=terms, now=now) for job in taken)
    return dataclasses.replace(base, victims=victims, words=asked_words(request, victims))
