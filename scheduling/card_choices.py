"""Which kind of cards a task takes: the one that was said, or the cheapest that will do. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpuwarden.diagnostics import did_you_mean
from gpuwarden.errors import InvalidInput, RefusedAction
from gpuwarden.estimates import GIB, Range, Unknown
from gpuwarden.scheduling import recommendations
from gpuwarden.scheduling.estimations import CardEstimate, Fit
from gpuwarden.scheduling.predictions import Prediction, Unforeseen
from gpuwarden.scheduling.recommendations import span

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpuwarden.scheduling.policies import Team
    from gpuwarden.scheduling.submissions import Asked
    from gpuwarden.scheduling.trainings import Training
    from gpuwarden.training_profiles import Profile


def none_of(word: str, known: Sequence[str]) -> str:
    """What the policy knows, where somebody said something else."""
    if not known:
        return "the policy has none"
    hint = did_you_mean(word, known)
    return f"the policy knows {', '.join(known)}" + (f"; {hint}" if hint else "")


def choose_card(
    asked: Asked,
    training: Training,
    everywhere: Sequence[CardEstimate],
    *,
    team: Team,
    profiles: Sequence[Profile],
    history: Mapping[str, Prediction | Unforeseen],
    now: float,
) -> tuple[CardEstimate, str]:
    """The card that it takes: the one that was said, or the cheapest that will do."""
    if asked.card is not None:
        found = next((each for each in everywhere if each.kind.name == asked.card), None)
        if found is None:
            names = [each.kind.name for each in everywhere]
            raise InvalidInput(f"--card {asked.card}: {none_of(asked.card, names)}")
        if (why := _forbidden(found, asked.gpus, team)) is not None:
            raise RefusedAction("card", why)
        if found.fit is Fit.NO:
            raise RefusedAction("memory", _no_room(training, [found], everywhere, asked, profiles))
        return found, "as was said"
    allowed = [each for each in everywhere if _forbidden(each, asked.gpus, team) is None]
    if not allowed:
        reasons = [_forbidden(each, asked.gpus, team) or "" for each in everywhere]
        raise RefusedAction("card", "\n".join(reasons))
    if all(each.fit is Fit.UNKNOWN for each in allowed):
        raise RefusedAction("unknown", _unknown_card(allowed))
    roomy = [each for each in allowed if each.fit is Fit.YES]
    roomy = roomy or [each for each in allowed if each.fit is Fit.TIGHT]
    if not roomy:
        raise RefusedAction("memory", _no_room(training, allowed, everywhere, asked, profiles))
    longest = {each.kind.name: _longest(each, history.get(each.kind.name)) for each in roomy}
    timely = [
        each
        for each in roomy
        if asked.deadline is None or now + (longest[each.kind.name] or math.inf) <= asked.deadline
    ]
    if not timely:
        raise RefusedAction("deadline", _too_late(longest, asked.deadline or now, now))
    chosen = timely[0]
    return chosen, _why(allowed[: allowed.index(chosen)])


def _forbidden(each: CardEstimate, gpus: int, team: Team) -> str | None:
    kind = each.kind
    if gpus > kind.count:
        return f"{kind.name}: there are {kind.count}, fewer than {gpus}"
    if gpus > kind.allowed:
        return (
            f"{kind.name}: team {team.name} may hold {kind.allowed} at once by its quota and what "
            f"it may borrow, fewer than {gpus}"
        )
    return None


def _longest(each: CardEstimate, foretold: Prediction | Unforeseen | None) -> float | None:
    """Upper end of what it takes on a card, by history or else by the estimate."""
    return foretold.longest if isinstance(foretold, Prediction) else high(each.training_seconds)


def _why(passed: Iterable[CardEstimate]) -> str:
    reasons = [
        f"{each.kind.name} has no room"
        if each.fit in (Fit.NO, Fit.TIGHT)
        else f"nothing is known of {each.kind.name}"
        if each.fit is Fit.UNKNOWN
        else f"{each.kind.name} takes too long"
        for each in passed
    ]
    if not reasons:
        return "the cheapest"
    return "the cheapest that will do: " + ", ".join(reasons)


def _no_room(
    training: Training,
    tried: Sequence[CardEstimate],
    everywhere: Sequence[CardEstimate],
    asked: Asked,
    profiles: Sequence[Profile],
) -> str:
    needs = next((each.memory for each in tried if isinstance(each.memory, Range)), None)
    amount = (
        ""
        if needs is None
        else f" needs {needs.expected / GIB:.1f} GiB ({needs.low / GIB:.1f} to "
        f"{needs.high / GIB:.1f}) on each card and"
    )
    cards = " or ".join(each.kind.name for each in tried)
    lines = [f"{training.words}{amount} has no room on {cards}"]
    if fitting := recommendations.batches_that_fit(tried):
        lines += ["what would have room:", *(f"  {line}" for line in fitting)]
    others = [
        each.kind.name
        for each in everywhere
        if each not in tried and each.fit is Fit.YES and each.kind.allowed >= asked.gpus
    ]
    if others:
        lines.append(f"  --card {others[0]}")
    smaller = recommendations.smaller_models(
        training, tried[-1], gpus=asked.gpus, profiles=profiles
    )
    if smaller is not None:
        lines.append(f"  {smaller}")
    return "\n".join(lines)


def _unknown_card(allowed: Sequence[CardEstimate]) -> str:
    reasons = dict.fromkeys(reason for each in allowed for reason in each.reasons())
    return (
        "UNKNOWN: "
        + "; ".join(reasons).removesuffix("?")
        + ". Nothing is guessed: say which cards and how long, with --card and --time"
    )


def _too_late(longest: Mapping[str, float | None], deadline: float, now: float) -> str:
    left = span(max(1.0, deadline - now))
    lines = [f"it cannot be done within {left}, by the upper end of what is expected:"]
    for card, high in longest.items():
        lines.append(f"  {card}: {'UNKNOWN' if high is None else span(high)}")
    lines.append("Say a later --deadline, fewer epochs=, or more --gpus")
    return "\n".join(lines)


def high(value: Range | Unknown) -> float | None:
    """Upper end of what is expected; None where it is not known."""
    return value.high if isinstance(value, Range) else None
