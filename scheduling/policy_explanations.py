"""What a policy means for a team, in words: what it may use, and whose jobs leave for whose."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any

from gpuwarden import durations
from gpuwarden.scheduling.windows import always_open, next_opening, opening_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuwarden.scheduling.policies import Policy, Team, Window

SCHEMA = "gpuwarden.policy-explanation/v1"
_WIDTH = 10


def explain_team(policy: Policy, team: Team, *, now: float) -> dict[str, list[str]]:
    """What a policy means for a team: heading -> sentences.

    Args:
        policy: that it is in.
        team: whose meaning is asked for.
        now: Unix time, for what is open now.
    """
    found = {
        "people": [", ".join(team.users) or "nobody yet"],
        "cards": list(_cards(policy, team)),
        "lends": list(_lends(policy, team)),
        "priorities": list(_priorities(policy, team)),
        "leaving": list(_leaving(policy, team)),
        "budgets": list(_budgets(policy, team)),
        "windows": [_window(policy, each, now) for each in policy.windows],
        "bookings": list(_bookings(policy)),
    }
    return {heading: lines for heading, lines in found.items() if lines}


def explanation_lines(explained: Sequence[tuple[Team, dict[str, list[str]]]]) -> Iterator[str]:
    """Explanations of teams for people."""
    for number, (team, parts) in enumerate(explained):
        if number:
            yield ""
        yield team.name
        for heading, lines in parts.items():
            for index, line in enumerate(lines):
                yield f"  {'' if index else heading:<{_WIDTH}} {line}"


def explanation_json(explained: Sequence[tuple[Team, dict[str, list[str]]]]) -> str:
    """Explanations of teams as one versioned document."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "teams": [{"team": team.name, "words": parts} for team, parts in explained],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _cards(policy: Policy, team: Team) -> Iterator[str]:
    for card in policy.cards:
        own, borrowed = team.own(card.name), team.most(card.name) - team.own(card.name)
        possible = min(borrowed, policy.lendable(card.name, team.name))
        if own:
            text = f"{own} of {card.count} {card.name} at any time"
            yield text + (f", {possible} more while nobody else needs them" if possible else "")
        elif possible:
            yield f"{possible} of {card.count} {card.name} while nobody else needs them"
    if not any(team.most(card.name) for card in policy.cards):
        yield "none: it has no quota, and borrows none"


def _lends(policy: Policy, team: Team) -> Iterator[str]:
    lent = [f"{team.lends(c.name)} {c.name}" for c in policy.cards if team.lends(c.name)]
    if lent:
        yield f"{', '.join(lent)}, as long as it does not use them"


def _priorities(policy: Policy, team: Team) -> Iterator[str]:
    chosen = [each for each in policy.priorities if team.may_choose(each.name)]
    usual = policy.usual_priority.name
    for each in sorted(chosen, key=lambda item: -item.value):
        text = each.name + (" (if none is named)" if each.name == usual else "")
        if each.preempts:
            text += f": jobs of {', '.join(each.preempts)} leave for it, of any team"
        yield text


def _leaving(policy: Policy, team: Team) -> Iterator[str]:
    terms = policy.preemption
    if terms is None:
        yield "nobody is asked to leave"
        return
    for each in policy.priorities:
        by = [high.name for high in policy.priorities if each.name in high.preempts]
        if by and team.may_choose(each.name):
            yield f"its jobs of {each.name} have to leave for {', '.join(by)}"
    # Slurm knows a ceiling, and not whose cards are borrowed.
    if any(team.borrow.values()) and policy.engine != "slurm":
        yield "its jobs on borrowed cards have to leave when the owners want them"
    until = "finish their epoch" if terms.notice == "epoch" else "finish their step"
    yield (
        f"who is asked ran for {durations.render(terms.minimum_run)} at least; jobs {until}, save, "
        f"and are ended if they are still there after {durations.render(terms.deadline)}"
    )
    yield (
        f"not again within {durations.render(terms.back_off)} of coming back, nor more than "
        f"{terms.at_most.times} times in {durations.render(terms.at_most.per)}"
    )


def _budgets(policy: Policy, team: Team) -> Iterator[str]:
    for each in policy.budgets_of(team.name):
        text = f"{each.limit} per {each.per}, "
        if each.kind == "soft":
            yield f"{text}soft: it is told, and nothing stops"
        else:
            rest = "go on" if each.running == "finish" else "save, leave and wait"
            yield f"{text}hard: once they are used no job starts, and those that run {rest}"


def _window(policy: Policy, window: Window, now: float) -> str:
    spans = window.openings(policy.timezone, now)
    span, following = opening_at(spans, now), next_opening(spans, now)
    text = f"{window.name}: {', '.join(window.days)} "
    text += f"{_clock(window.from_)} to {_clock(window.to)}, "
    if always_open(spans, now):
        return f"{text}always open"
    moment = span.end if span is not None else None if following is None else following.begin
    when = "" if moment is None else dt.datetime.fromtimestamp(moment, policy.zone)
    text += f"{'open until' if span is not None else 'closed until'} {when:%a %H:%M}"
    rest = "go on" if window.running == "finish" else "save, leave, and go on when it opens"
    return f"{text}; at its end jobs {rest}"


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def _bookings(policy: Policy) -> Iterator[str]:
    terms = policy.bookings
    if terms is None:
        return
    most = [f"{int(c.count * terms.at_most_share)} {c.name}" for c in policy.cards]
    yield (
        f"at most {', '.join(most)} at once for all teams, up to {durations.render(terms.longest)} "
        f"long and {durations.render(terms.ahead)} ahead"
    )
    yield (
        f"who must leave is told {durations.render(terms.lead_time)} before; a slot without a job "
        f"for {durations.render(terms.no_show_after)} is released"
    )
