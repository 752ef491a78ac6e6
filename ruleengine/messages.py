"""What notices say: what was seen, what was expected, why, what happens when, what to do.

The engine writes them, in the time zone of the owner and in each language that the directory knows;
Alertmanager carries them as annotations, and the last hop lays out the one of each reader. Words
are in `texts`; what a job says of itself never becomes markup.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from gpuwarden import durations
from gpuwarden.budget_terms import quantity
from gpuwarden.quantities import Unit
from gpuwarden.ruleengine.cases import next_stage
from gpuwarden.ruleengine.causes import DATA_LOADING, HYPERPARAMETERS, MODEL, UNKNOWN
from gpuwarden.ruleengine.conditions import ProfileCondition, leaves
from gpuwarden.ruleengine.described import described
from gpuwarden.ruleengine.model import Action
from gpuwarden.ruleengine.texts import causes, conditions, records
from gpuwarden.ruleengine.texts.speeches import about, local_time, speech

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gpuwarden.ruleengine.budget_uses import Standing
    from gpuwarden.ruleengine.cases import Case
    from gpuwarden.ruleengine.guards import Blocked
    from gpuwarden.ruleengine.leave_records import Leave
    from gpuwarden.ruleengine.model import OwnerMay, Rule
    from gpuwarden.ruleengine.profiles import Expected
    from gpuwarden.ruleengine.records import Decision
    from gpuwarden.ruleengine.returns import Return
    from gpuwarden.ruleengine.texts.speeches import Language, Speech
    from gpuwarden.ruleengine.verdicts import Evidence

__all__ = [
    "Outlook",
    "UpcomingAct",
    "about",
    "clock_time",
    "ended",
    "ending",
    "halted",
    "in_languages",
    "local_time",
    "notice",
    "undeliverable",
    "unproven",
    "withdrawn",
]

LANGUAGE = "language"
"""Annotation: the language of the texts whose names have no suffix."""
KEEP_LINK = "keep_link"
"""Annotation: the address at which the owner may keep the job; for nobody else."""
KEEP_COMMAND = "keep_command"
"""Annotation: the command by which the owner may keep it; likewise."""
_EXPECTED_OF: Mapping[str, frozenset[str]] = {
    DATA_LOADING: frozenset({"throughput"}),
    HYPERPARAMETERS: frozenset({"gpu_memory", "throughput"}),
    MODEL: frozenset({"throughput"}),
}
"""Cause -> expectations that it is told from."""
_WORDLESS = frozenset({KEEP_LINK, KEEP_COMMAND})
"""Annotations that are the same in every language."""


def clock_time(moment: float, zone: str) -> str:
    """A Unix time for people: `Sun 29 Nov 18:05:07 (Asia/Shanghai)`."""
    return speech("en").time(moment, zone)


def in_languages(
    languages: Sequence[Language], texts: Callable[..., Mapping[str, str]]
) -> dict[str, str]:
    """The same texts in several languages, as annotations.

    Args:
        languages: the first is the operators': it is what Alertmanager itself shows.
        texts: gives the annotations of one language; called with `speech`.

    Returns:
        The first language's under their names, every other's under `name_<language>`.
    """
    first, *others = languages
    found = {**texts(speech=speech(first)), LANGUAGE: first}
    for language in others:
        for name, text in texts(speech=speech(language)).items():
            if name not in _WORDLESS:
                found[f"{name}_{language}"] = text
    return found


@dataclass(frozen=True, slots=True)
class UpcomingAct:
    """What is going to be done to a job if nothing changes.

    Attributes:
        do: checkpoint, yield, requeue or terminate.
        at: Unix time, at the earliest.
        grace: seconds that the job then has.
    """

    do: str
    at: float
    grace: float = 0.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """What lies ahead of a case, and what else its notice needs.

    Attributes:
        remaining: seconds until the job may be ended at the earliest, or None if nothing follows.
        grace: seconds between SIGTERM and SIGKILL.
        owner_may: what the owner may still do, or None.
        keeps_used: how often the owner has kept it, over the life of the run.
        ticket: the owner's proof for `gpuwarden keep`, or an empty string.
        link: address of the page on which the owner may keep it, or an empty string.
        work_lost: seconds of work that an end now would cost, or None where not known.
        saved: whether it counts from a saved state.
        cards: the cards it holds: (UUID, index, product name or an empty string).
        expected: what the job should show by its profile or by the formula.
        acts: what is going to be done, soonest first.
        cost: money that the lost work is worth, in words; empty where not known.
    """

    remaining: float | None = None
    grace: float = 0.0
    owner_may: OwnerMay | None = None
    keeps_used: int = 0
    ticket: str = ""
    link: str = ""
    work_lost: float | None = None
    saved: bool = False
    cards: tuple[tuple[str, str, str], ...] = ()
    expected: Mapping[str, Expected] = field(default_factory=lambda: MappingProxyType({}))
    acts: tuple[UpcomingAct, ...] = ()
    cost: str = ""


def notice(
    case: Case,
    rule: Rule,
    evidence: Sequence[Evidence],
    outlook: Outlook,
    *,
    speech: Speech,
    now: float,
    zone: str,
    engine_url: str,
) -> dict[str, str]:
    """Annotations, in one language, of a notice that a job breaks a rule."""
    phrases, say = speech.phrases, speech.say
    node = case.instance.rpartition(":")[0] or case.instance
    where = say(phrases.on_node, node=node) if node else ""
    since = case.detected_at if case.detected_at is not None else case.opened_at
    what = described(rule.description, speech.language)
    texts = {
        "summary": say(
            phrases.notice_summary,
            job=case.job_id,
            where=where,
            what=what.rstrip(phrases.full_stop) or rule.id,
        ),
        "description": speech.sentences(
            say(
                phrases.notice_description,
                job=case.job_id,
                where=where,
                rule=rule.id,
                time=speech.time(since, zone),
            ),
            what,
        ),
        "seen": _listed(
            conditions.seen(
                rule,
                evidence,
                speech,
                gpus={uuid: index for uuid, index, _ in outlook.cards},
                expected=outlook.expected,
            )
        ),
        "expected": _listed(
            conditions.expectations(_worth_telling(case, rule, outlook), speech)
            or dict.fromkeys(item.expected for item in evidence if item.expected)
        ),
        **_cause(case, speech),
        "next": _next(case, rule, outlook, speech, now=now, zone=zone),
        "keep": _keep(outlook, speech),
        "gpus": speech.listed(
            [
                say(phrases.card_named if name else phrases.card, index=index or uuid, name=name)
                for uuid, index, name in outlook.cards
            ]
        ),
        "work": _work(outlook, speech),
    }
    if texts["keep"] and outlook.owner_may is not None and _keeps_left(outlook) > 0:
        texts[KEEP_COMMAND] = _command(case, outlook.owner_may, outlook.ticket, engine_url)
        texts[KEEP_LINK] = outlook.link
    return texts


def _worth_telling(case: Case, rule: Rule, outlook: Outlook) -> tuple[Expected, ...]:
    """What the job should show, where that has to do with what it is told."""
    asked = {
        name
        for condition in rule.conditions
        for leaf in leaves(condition)
        if isinstance(leaf, ProfileCondition)
        for name in leaf.profile.entries
    }
    asked |= _EXPECTED_OF.get(case.cause, frozenset())
    return tuple(item for name, item in outlook.expected.items() if name in asked)


def _lines(parts: Iterable[str]) -> str:
    return "\n".join(parts)


def _listed(parts: Iterable[str]) -> str:
    """One line, or several with a mark before each."""
    lines = list(parts)
    return lines[0] if len(lines) == 1 else _lines(f"- {line}" for line in lines)


def _cause(case: Case, speech: Speech) -> dict[str, str]:
    """The probable cause and what helps; as diagnosed where its figures are missing."""
    if case.cause in ("", UNKNOWN):
        return {"cause": "", "remedy": ""}  # it would only say again what was seen
    name = causes.name(case.cause, speech)
    because = causes.because(case.cause, case.figures, speech) if case.figures else case.because
    helps = causes.remedy(case.cause, case.figures, speech) if case.figures else case.remedy
    return {
        "cause": speech.capital(f"{name}{speech.phrases.colon}{because}" if because else name),
        "remedy": speech.capital(helps),
    }


def _work(outlook: Outlook, speech: Speech) -> str:
    if outlook.remaining is None or outlook.work_lost is None:
        return ""
    phrases, say = speech.phrases, speech.say
    template = phrases.work_since_saved if outlook.saved else phrases.work_since_start
    text = say(template, length=speech.about(outlook.work_lost))
    if outlook.cards:
        hours = outlook.work_lost * len(outlook.cards) / 3600
        text += say(phrases.work_gpu_hours, hours=speech.number(hours))
    return text + (say(phrases.work_cost, amount=outlook.cost) if outlook.cost else "")


def _next(
    case: Case, rule: Rule, outlook: Outlook, speech: Speech, *, now: float, zone: str
) -> str:
    phrases, say = speech.phrases, speech.say
    if outlook.remaining is None and not outlook.acts:
        return say(phrases.next_nothing, rule=rule.id)
    condition = phrases.next_if
    final = next_stage(case, rule)
    if final is not None and final[1].when is not None:
        far = conditions.words(final[1].when, speech)
        condition += say(phrases.next_if_far, condition=far)
    if rule.only_if_waiting is not None:
        condition += phrases.next_if_waiting
    if outlook.acts:
        text = _acts(condition, outlook.acts, speech, zone=zone)
    else:
        template = phrases.next_asked if case.run_id is not None else phrases.next_ended
        text = say(
            template,
            condition=condition,
            time=speech.time(now + (outlook.remaining or 0.0), zone),
            grace=speech.about(outlook.grace),
        )
    further = [] if case.run_id is not None else [phrases.next_save_yourself]
    if rule.canary is not None:
        further.append(phrases.next_on_trial)
    return speech.sentences(text, *further) if further else text


def _acts(condition: str, acts: Sequence[UpcomingAct], speech: Speech, *, zone: str) -> str:
    """Each step with its time, a line for each if there are several."""
    phrases = speech.phrases
    templates = {
        "checkpoint": phrases.next_checkpoint,
        "yield": phrases.next_yield,
        "requeue": phrases.next_requeue,
        "terminate": phrases.next_terminate,
    }
    steps = [
        speech.say(templates[act.do], time=speech.time(act.at, zone), grace=speech.about(act.grace))
        for act in acts
    ]
    if len(steps) == 1:
        return speech.sentences(f"{condition}{phrases.comma}{steps[0]}")
    return _lines([f"{condition}{phrases.colon}".rstrip(), *(f"- {step}" for step in steps)])


def _keeps_left(outlook: Outlook) -> int:
    return 0 if outlook.owner_may is None else outlook.owner_may.times - outlook.keeps_used


def _keep(outlook: Outlook, speech: Speech) -> str:
    phrases, say, may = speech.phrases, speech.say, outlook.owner_may
    if may is None or (outlook.remaining is None and not outlook.acts):
        return ""
    left = _keeps_left(outlook)
    if left <= 0:
        return say(phrases.keep_used_up, used=outlook.keeps_used)
    return say(phrases.keep_terms, length=speech.length(may.keep), left=left, times=may.times)


def _command(case: Case, may: OwnerMay, ticket: str, engine_url: str) -> str:
    words = ["gpuwarden", "keep", case.job_id, "--rule", case.rule_id]
    words += ["--for", durations.render(may.keep), "--reason", "WHY", "--engine.url", engine_url]
    return shlex.join([*words, "--ticket", ticket] if ticket else words)


def ending(
    case: Case, rule: Rule, grace: float, *, speech: Speech, now: float, zone: str
) -> dict[str, str]:
    """Annotations of the message that a job is being ended now."""
    phrases, say = speech.phrases, speech.say
    what = described(rule.description, speech.language).rstrip(phrases.full_stop) or rule.id
    return {
        "summary": say(phrases.ending_summary, job=case.job_id, what=what),
        "description": say(
            phrases.ending_description,
            job=case.job_id,
            rule=rule.id,
            asked=phrases.ending_asked if case.run_id is not None else "",
            time=speech.time(now, zone),
            grace=speech.about(grace),
        ),
        **_cause(case, speech),
    }


def ended(decision: Decision, freed: float | None, *, speech: Speech, zone: str) -> dict[str, str]:
    """Annotations of the message that a job was ended, or that this could not be proven."""
    phrases, say = speech.phrases, speech.say
    names = {
        "job": decision.job_id,
        "rule": decision.rule_id,
        "time": speech.time(decision.finished_at or decision.created_at, zone),
    }
    if decision.state != "verified":
        reason = records.reason(decision.reason or decision.state, speech)
        return {
            "summary": say(phrases.unproven_summary, **names),
            "description": say(phrases.unproven_description, reason=reason, **names),
        }
    summary, description = {
        Action.YIELD.value: (phrases.left_summary, phrases.left_description),
        Action.REQUEUE.value: (phrases.requeued_summary, phrases.requeued_description),
    }.get(decision.action, (phrases.ended_summary, phrases.ended_description))
    memory = "" if freed is None else speech.amount(freed, Unit.BYTES)
    texts = {
        "summary": say(summary, **names),
        "description": say(description, **names)
        + (say(phrases.ended_freed, memory=memory) if memory else ""),
    }
    if decision.action == Action.YIELD.value:
        return texts
    return {
        **texts,
        "next": phrases.ended_saved if decision.asked_to_save else phrases.ended_unsaved,
    }


def withdrawn(case: Case, *, rule_gone: bool, speech: Speech) -> dict[str, str]:
    """Annotations of the message that what an earlier notice announced does not happen.

    Args:
        case: whose end was announced.
        rule_gone: whether the rule is no longer in force; else it only observes now.
        speech: the language.
    """
    phrases, say = speech.phrases, speech.say
    why = phrases.withdrawn_rule_gone if rule_gone else phrases.withdrawn_observes
    return {
        "summary": say(phrases.withdrawn_summary, job=case.job_id),
        "description": say(
            phrases.withdrawn_description, rule=case.rule_id, job=case.job_id, why=why
        ),
        "next": phrases.withdrawn_next,
    }


def came_back(case: Case, back: Return, *, zone: str, speech: Speech) -> dict[str, str]:
    """Annotations of the message that a job which was ended has come back.

    Args:
        case: of the job that is there now.
        back: how often it was ended, and until when it is left alone.
        zone: of the owner.
        speech: the language.
    """
    phrases, say = speech.phrases, speech.say
    return {
        "summary": say(phrases.came_back_summary, job=case.job_id),
        "description": say(
            phrases.came_back_description,
            rule=case.rule_id,
            job=case.job_id,
            work=back.work,
            times=back.times,
            last=speech.time(back.last, zone),
        ),
        "next": say(phrases.came_back_next, until=speech.time(back.until, zone)),
    }


def leaving(leave: Leave, *, zone: str, speech: Speech) -> dict[str, str]:
    """Annotations of the message that a scheduler has asked a job to leave.

    Args:
        leave: what was asked.
        zone: of the owner.
        speech: the language.
    """
    phrases, say = speech.phrases, speech.say
    return {
        "summary": say(phrases.leaving_summary, job=leave.job_id),
        "description": say(
            phrases.leaving_description,
            by=leave.by,
            job=leave.job_id,
            asked=speech.time(leave.created_at, zone),
            where=phrases.leaving_where[leave.at],
            until=speech.time(leave.created_at + leave.deadline, zone),
            reason=leave.reason,
        ),
        "next": phrases.leaving_next[leave.after],
    }


# -- for operators


def undeliverable(
    case: Case, waited: float, errors: Sequence[str], *, speech: Speech
) -> dict[str, str]:
    """Annotations of the operators' alert that an owner cannot be told.

    Args:
        case: that waits for it.
        waited: seconds since the notice was due.
        errors: why no server took it; empty if nothing was heard of it at all.
        speech: the language.
    """
    phrases, say = speech.phrases, speech.say
    return {
        "summary": say(phrases.undeliverable_summary, job=case.job_id),
        "description": say(
            phrases.undeliverable_description,
            user=case.user or phrases.unknown_user,
            rule=case.rule_id,
            waited=speech.about(max(0.0, waited)),
            why=records.errors(errors, speech) or phrases.undeliverable_unheard,
        ),
    }


def halted(shares: Sequence[Blocked], *, whole: bool, speech: Speech) -> dict[str, str]:
    """Annotations of the operators' alert that nothing is ended because too much would be.

    Args:
        shares: what is too much, over all rules or by those of a file.
        whole: whether that holds for all rules, or only for those of a file.
        speech: the language.
    """
    phrases = speech.phrases
    return {
        "summary": phrases.halted_summary if whole else phrases.halted_part_summary,
        "description": speech.sentences(*(_share(block, speech) for block in shares)),
    }


def _share(block: Blocked, speech: Speech) -> str:
    """What is too much, in a sentence."""
    known, phrases = dict(block.figures), speech.phrases
    file, limit = known["file"], known["limit"]
    return speech.say(
        phrases.halted_share,
        owners=known["owners"],
        running=known["running"],
        limit=limit if isinstance(limit, str) else speech.amount(limit, Unit.RATIO),
        of=speech.say(phrases.halted_of_file, file=file) if file else "",
    )


def budget(standing: Standing, share: float, *, zone: str, speech: Speech) -> dict[str, str]:
    """Annotations of the news that a share of a team's budget is used.

    Args:
        standing: of the budget; its use is known.
        share: that was reached.
        zone: in which its end is told.
        speech: the language.
    """
    phrases, say, known = speech.phrases, speech.say, standing.budget
    outlook = ""
    if standing.forecast is not None:
        outlook = say(
            phrases.budget_forecast,
            **{name: quantity(n, known.unit) for name, n in standing.forecast.document().items()},
        )
    return {
        "summary": say(
            phrases.budget_summary,
            team=known.team,
            share=speech.amount(share, Unit.RATIO),
            period=phrases.budget_periods[known.per],
        ),
        "description": say(
            phrases.budget_description,
            used=quantity(standing.used or 0.0, known.unit),
            limit=str(known.limit),
            end=speech.time(standing.span.end, zone),
            forecast=outlook,
        ),
    }


def unproven(decision: Decision, *, speech: Speech) -> dict[str, str]:
    """Annotations of the operators' alert that a job's end could not be proven."""
    phrases, say = speech.phrases, speech.say
    return {
        "summary": say(
            phrases.pager_summary,
            job=decision.job_id,
            state=phrases.outcome_names.get(decision.state, decision.state),
        ),
        "description": say(
            phrases.pager_description,
            reason=records.reason(decision.reason, speech)
            if decision.reason
            else phrases.no_reason,
        ),
    }
