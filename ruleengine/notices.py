"""Alerts of the engine: which ones stand, as pure functions of cases, and what was told.

Labels are identity only: numbers and prose would make a new alert of every change. A change of
level is a resolved and a firing alert in one message.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from gpuwarden.errors import RefusedAction
from gpuwarden.ruleengine import messages
from gpuwarden.ruleengine.alertmanager import Alert
from gpuwarden.ruleengine.cases import OPEN_DECISION, RETRY_REFUSED_SECONDS
from gpuwarden.ruleengine.leave_records import LeaveState
from gpuwarden.ruleengine.model import Action
from gpuwarden.ruleengine.reclaim.node import host_of
from gpuwarden.ruleengine.returns import Return
from gpuwarden.ruleengine.unheard_news import NEWS_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpuwarden.ruleengine.budget_uses import Standing
    from gpuwarden.ruleengine.cases import Case, StageMark
    from gpuwarden.ruleengine.directories import User
    from gpuwarden.ruleengine.guards import Blocked
    from gpuwarden.ruleengine.leave_records import Leave
    from gpuwarden.ruleengine.messages import Outlook
    from gpuwarden.ruleengine.model import OwnerMay, Rule
    from gpuwarden.ruleengine.records import Decision, Notice
    from gpuwarden.ruleengine.texts.speeches import Language
    from gpuwarden.ruleengine.unheard_news import Quiet
    from gpuwarden.ruleengine.verdicts import Evidence

SERVICE = "gpuwarden-jobs"
"""Value of the label `service` of every alert here; Alertmanager routes by it."""
LIFETIMES = 4
"""Alerts end this many resend intervals after the engine falls silent."""
RESOLVED_SECONDS = 300.0
"""Resolved alerts are repeated for this long, as Alertmanager's documentation asks."""

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Context:
    """What alerts are made with.

    Attributes:
        now: Unix time.
        zone: time zone where the owner's is not known.
        external_url: how people reach the engine.
        languages: every one that a reader may want, the operators' first.
        quiet: when nobody could be told last, or None.
    """

    now: float
    zone: str
    external_url: str
    languages: tuple[Language, ...] = ("en",)
    quiet: Quiet | None = None

    @property
    def news_since(self) -> float:
        """From which moment on something is news, at the earliest; Unix time."""
        return min(self.now, self.now if self.quiet is None else self.quiet.begun) - NEWS_SECONDS

    def is_news(self, at: float) -> bool:
        """Whether what happened at a moment is told: a quarter of an hour, once it can be heard."""
        heard = at if self.quiet is None else self.quiet.heard_from(at)
        return self.now - heard < NEWS_SECONDS

    def page(self, job_id: str) -> str:
        """Address of a job's page."""
        return f"{self.external_url}/jobs/{job_id}"


def told_marks(case: Case, rule: Rule) -> tuple[StageMark, ...]:
    """Notify stages that were really entered under the rule's present mode, in order."""
    return tuple(
        mark
        for mark in case.marks
        if mark.do == "notify" and not mark.would and mark.mode == rule.mode
    )


def notice_stage(mark: StageMark) -> str:
    """Name of a stage's notices in the ledger."""
    return f"{mark.key}:{mark.mode}"


def keep_allowance(rule: Rule) -> OwnerMay | None:
    """How an owner may move the deadline: the last notify stage that says so, or None."""
    return next((s.owner_may for s in reversed(rule.stages) if s.owner_may is not None), None)


def case_alerts(
    case: Case,
    rule: Rule,
    *,
    evidence: Sequence[Evidence],
    outlook: Outlook,
    owner: User,
    context: Context,
) -> list[Alert]:
    """Alerts that stand for an open case: none, or the one of the highest stage entered."""
    zone = owner.timezone or context.zone
    marks = told_marks(case, rule)
    if case.state in OPEN_DECISION and not case.leaving:
        mark = next((m for m in reversed(case.marks) if Action(m.do).ends), None)
        if mark is not None:
            texts = messages.in_languages(
                context.languages,
                partial(messages.ending, case, rule, outlook.grace, now=mark.at, zone=zone),
            )
            return [
                _alert(
                    "GpuwardenJobEnding",
                    mark.level,
                    texts,
                    case=case,
                    rule=rule,
                    mark=mark,
                    owner=owner,
                    context=context,
                )
            ]
    if not marks or case.over:
        return []
    texts = messages.in_languages(
        context.languages,
        partial(
            messages.notice,
            case,
            rule,
            evidence,
            outlook,
            now=context.now,
            zone=zone,
            engine_url=context.external_url,
        ),
    )
    mark = marks[-1]
    return [
        _alert(
            "GpuwardenJobNotice",
            mark.level,
            texts,
            case=case,
            rule=rule,
            mark=mark,
            owner=owner,
            context=context,
        )
    ]


def undeliverable_alerts(
    case: Case,
    rule: Rule,
    notices: Sequence[Notice],
    *,
    undelivered_after: float,
    owner: User,
    context: Context,
) -> list[Alert]:
    """The operators' alert that an owner cannot be told, so that a severe stage waits for ever."""
    if not rule.enforces or case.notified_at is not None:
        return []
    for mark in told_marks(case, rule):
        own = [n for n in notices if n.stage == notice_stage(mark)]
        errors = sorted({n.error for n in own if n.state == "failed"})
        waited = context.now - mark.at
        if not errors and waited < undelivered_after:
            continue
        texts = messages.in_languages(
            context.languages,
            partial(messages.undeliverable, case, waited, errors),
        )
        return [
            _alert(
                "GpuwardenNoticeUndeliverable",
                "page",
                texts,
                case=case,
                rule=rule,
                mark=None,
                owner=owner,
                context=context,
            )
        ]
    return []


def announced(case: Case) -> bool:
    """Whether the case's owner was, or may have been, told of an end that did not come to be."""
    return bool(case.promises) and not case.over


def observed_since(case: Case, rule: Rule) -> float | None:
    """Since when (Unix time) a rule that announced an end only observes, or None."""
    if rule.mode != "observe" or not announced(case):
        return None
    return max((m.at for m in case.marks if m.do == "notify" and m.would), default=None)


def withdrawn_alerts(
    case: Case, at: float, *, rule_gone: bool, owner: User, context: Context
) -> list[Alert]:
    """The news, for a quarter of an hour, that an announced end is called off.

    Args:
        case: the case, open or closed.
        at: Unix time since when it is called off.
        rule_gone: whether the rule is no longer in force; else it only observes now.
        owner: whom it was announced to.
        context: what alerts are made with.
    """
    if not context.is_news(at):
        return []
    labels = {
        **_identity("GpuwardenNoticeWithdrawn", case, owner),
        # It goes where the notice went.
        "level": "moderate",
        "mode": "enforce",
    }
    url = context.page(case.job_id)
    texts = messages.in_languages(
        context.languages, partial(messages.withdrawn, case, rule_gone=rule_gone)
    )
    return [Alert(labels, texts, at, context.now, url)]


def came_back_alerts(case: Case, back: Return, *, owner: User, context: Context) -> list[Alert]:
    """The news, to owner and operators, that a job which was ended has come back.

    Args:
        case: of the job that is there now.
        back: how often it was ended, and until when it is left alone.
        owner: whose it is.
        context: what alerts are made with.
    """
    zone = owner.timezone or context.zone
    texts = messages.in_languages(
        context.languages, partial(messages.came_back, case, back, zone=zone)
    )
    url, identity = context.page(case.job_id), _identity("GpuwardenJobCameBack", case, owner)
    return [
        Alert({**identity, "level": level, "mode": "enforce"}, texts, back.last, context.now, url)
        for level in ("moderate", "page")
    ]


def leave_alerts(leave: Leave, *, owner: User, context: Context) -> list[Alert]:
    """The news, to its owner, that a scheduler has asked a job to leave.

    It stands while the job has the request, and for a quarter of an hour where it leaves before:
    longer than any group_wait. What was taken back is no news any more.

    Args:
        leave: what was asked, and what became of it.
        owner: whose job it is.
        context: what alerts are made with.
    """
    waits = leave.state is LeaveState.WAITING
    lately = context.is_news(leave.created_at)
    if not waits and not (leave.state is LeaveState.LEFT and lately):
        return []
    zone = owner.timezone or context.zone
    texts = messages.in_languages(context.languages, partial(messages.leaving, leave, zone=zone))
    labels = {
        "alertname": "GpuwardenJobLeaving",
        "service": SERVICE,
        "job_id": leave.job_id,
        "node": leave.hosts[0],
        "user": leave.user,
        "team": owner.team,
        "level": "moderate",
        "mode": "enforce",
    }
    return [Alert(labels, texts, leave.created_at, context.now, context.page(leave.job_id))]


def back_by(decision: Decision) -> Return | None:
    """That a bare process came back, by the word of its node's agent, or None.

    Only the node knows by which parent a command was started: its agent refuses to end it again.
    """
    if decision.state != "refused" or decision.finished_at is None:
        return None
    if not decision.reason.startswith("cooldown"):
        return None
    until = decision.finished_at + RETRY_REFUSED_SECONDS
    return Return("started again by the same parent", 1, decision.finished_at, until)


def halted_alert(
    shares: Sequence[Blocked], since: float, context: Context, *, whole: bool
) -> Alert:
    """The operators' alert that nothing is ended because too much would be.

    Args:
        shares: what is too much, over all rules or by those of a file.
        since: Unix time.
        context: what alerts are made with.
        whole: whether that holds for all rules, or only for those of a file.
    """
    return Alert(
        labels={"alertname": "GpuwardenEnforcementHalted", "service": SERVICE, "level": "page"},
        annotations=messages.in_languages(
            context.languages, partial(messages.halted, shares, whole=whole)
        ),
        starts_at=since,
        ends_at=context.now,
        url=f"{context.external_url}/jobs",
    )


def budget_alerts(standing: Standing, share: float, at: float, context: Context) -> list[Alert]:
    """The news to a team, for a quarter of an hour, that a share of its budget is used.

    Args:
        standing: of the budget.
        share: that was reached, of `warn_at`.
        at: Unix time since when.
        context: what alerts are made with.
    """
    if not context.is_news(at):
        return []
    budget = standing.budget
    texts = messages.in_languages(
        context.languages, partial(messages.budget, standing, share, zone=context.zone)
    )
    labels = {
        "alertname": "GpuwardenBudget",
        "service": SERVICE,
        "team": budget.team,
        "budget": f"{budget.per}, {budget.unit}",
        "share": f"{100 * share:g}%",
        "level": "moderate",
        "mode": "warn",
    }
    return [Alert(labels, texts, at, context.now, f"{context.external_url}/budgets")]


def decision_alerts(
    decision: Decision, *, freed: float | None, owner: User, context: Context
) -> list[Alert]:
    """The news that a job was ended; for operators too where it could not be proven."""
    if decision.state not in ("verified", "incomplete", "failed") or decision.finished_at is None:
        return []
    if not context.is_news(decision.finished_at):
        return []
    zone = owner.timezone or context.zone
    texts = messages.in_languages(
        context.languages, partial(messages.ended, decision, freed, zone=zone)
    )
    labels = {
        "service": SERVICE,
        "rule": decision.rule_id,
        "job_id": decision.job_id,
        "node": decision.host,
        "user": decision.user,
        "team": owner.team,
        "mode": "enforce",
    }
    url = context.page(decision.job_id)
    found = [
        Alert(
            {"alertname": "GpuwardenJobEnded", **labels, "level": "ended"},
            texts,
            decision.finished_at,
            context.now,
            url,
        )
    ]
    if decision.state != "verified":
        pager = messages.in_languages(context.languages, partial(messages.unproven, decision))
        found.append(
            Alert(
                {"alertname": "GpuwardenReclaimUnproven", **labels, "level": "page"},
                pager,
                decision.finished_at,
                context.now,
                url,
            )
        )
    return found


def _alert(
    name: str,
    level: str,
    texts: Mapping[str, str],
    *,
    case: Case,
    rule: Rule,
    mark: StageMark | None,
    owner: User,
    context: Context,
) -> Alert:
    labels = {
        **_identity(name, case, owner),
        "level": level,
        "mode": mark.mode if mark is not None else "enforce",
        "stage": mark.key if mark is not None else "",
        "target": "gpu" if rule.target == "gpu" else "",
    }
    starts = mark.at if mark is not None else case.detected_at or case.opened_at
    return Alert(labels, texts, starts, context.now, context.page(case.job_id))


def _identity(name: str, case: Case, owner: User) -> dict[str, str]:
    """The labels that say which alert it is, and about whose job."""
    return {
        "alertname": name,
        "service": SERVICE,
        "rule": case.rule_id,
        "job_id": case.job_id,
        "node": _node(case.instance),
        "user": case.user,
        "team": owner.team,
    }


def _node(instance: str) -> str:
    try:
        return host_of(instance)
    except RefusedAction:
        return ""


class AlertBook:
    """Which alerts Alertmanager was told, and when it must hear of them again.

    Args:
        resend: seconds between two repeats.
    """

    def __init__(self, resend: float) -> None:
        self._resend = resend
        self._firing: dict[Labels, Alert] = {}
        self._resolved: dict[Labels, Alert] = {}
        self._sent_at: float | None = None
        self._changed = False

    def update(self, alerts: Iterable[Alert], now: float) -> None:
        """Take over the alerts that stand now; those that no longer do are resolved."""
        fresh = {tuple(sorted(alert.labels.items())): alert for alert in alerts}
        for key, alert in self._firing.items():
            if key not in fresh:
                self._resolved[key] = dataclasses.replace(alert, ends_at=now)
                self._changed = True
        if fresh.keys() - self._firing.keys():
            self._changed = True
        self._firing = fresh
        self._resolved = {
            key: alert
            for key, alert in self._resolved.items()
            if key not in fresh and now - alert.ends_at < RESOLVED_SECONDS
        }

    def due(self, now: float) -> bool:
        """Whether something has changed, or everything must be repeated: also that there is none.

        So an Alertmanager that is down is known before the first notice needs it.
        """
        again = self._sent_at is None or now - self._sent_at >= self._resend or now < self._sent_at
        return self._changed or again

    def pending(self, now: float) -> list[Alert]:
        """What must be posted now, resolved ones first; empty unless it is due."""
        if not self.due(now):
            return []
        ends = now + LIFETIMES * self._resend
        firing = [dataclasses.replace(alert, ends_at=ends) for alert in self._firing.values()]
        return [*self._resolved.values(), *firing]

    def posted(self, now: float) -> None:
        """At least one replica took what `pending` returned."""
        self._sent_at = now
        self._changed = False
