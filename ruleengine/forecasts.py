"""What happens next to a job that breaks a rule, and when, if everything stays as it is. Pure.

Only what the state machine of `cases` would do by itself is foretold; what the guards hold back is
told beside it, not here. Times are the earliest ones: the engine acts at the tick that follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuwarden.ruleengine import cases
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.condition_differences import words
from gpuwarden.ruleengine.grade_clocks import UNKNOWN_LIMIT_SECONDS
from gpuwarden.ruleengine.messages import about
from gpuwarden.ruleengine.model import Action, Mode

if TYPE_CHECKING:
    from gpuwarden.ruleengine.cases import Case
    from gpuwarden.ruleengine.model import Rule, Stage

_IF_SO = "if it stays so"
_DOES = {
    Action.CHECKPOINT: "the job is asked to save",
    Action.YIELD: "the job is asked to leave after its epoch, and is queued again",
    Action.REQUEUE: "the job is ended, and queued again",
    Action.TERMINATE: "the job is ended",
}
_NOTED = {
    Action.CHECKPOINT: "the request to save",
    Action.YIELD: "the request to leave",
    Action.REQUEUE: "the requeue of the job",
    Action.TERMINATE: "the end of the job",
}


@dataclass(frozen=True, slots=True)
class Forecast:
    """One thing that is going to happen.

    Attributes:
        kind: found, log, notify, checkpoint, yield, requeue, terminate, close, held or answer;
            `would_` before it where the rule's mode only writes it down.
        what: the same for people, without the time: `its owner is told`.
        seconds: from now, at the earliest; None where nobody knows.
        condition: on what it depends, in words, or an empty string.
        stage: key of the stage, or an empty string.
        level: light, moderate, severe, or an empty string.
    """

    kind: str
    what: str
    seconds: float | None
    condition: str = ""
    stage: str = ""
    level: str = ""

    def document(self, now: float, *, read_at: float | None = None) -> dict[str, Any]:
        """The forecast for the API.

        Args:
            now: Unix time from which `seconds` count.
            read_at: Unix time at which it is read; `now` by default.
        """
        read_at = now if read_at is None else read_at
        at = None if self.seconds is None else max(read_at, now + self.seconds)
        return {
            "kind": self.kind,
            "what": self.what,
            "in_seconds": None if at is None else round(at - read_at, 3),
            "at": None if at is None else rfc3339(at),
            "if": self.condition,
            "stage": self.stage,
            "level": self.level,
        }


def counted_from(now: float, *, looked_at: float | None, tick: float) -> float:
    """The moment as of which the clocks of cases stand, for who reads them between two ticks.

    Counted from the reading, the earliest end would be told later than it comes. After an outage
    the clocks have stood still: no more than one tick has passed for them.

    Args:
        now: Unix time of the reading.
        looked_at: Unix time of the last completed tick, or None.
        tick: seconds between two of them.

    Returns:
        Unix time, at most one tick before `now`.
    """
    return now if looked_at is None else now - min(max(0.0, now - looked_at), tick)


def forecasts(
    case: Case, rule: Rule, *, now: float, kept_until: float | None = None
) -> tuple[Forecast, ...]:
    """What comes next, soonest first.

    Args:
        case: as the last tick left it.
        rule: as it now reads.
        now: Unix time.
        kept_until: Unix time to which keeps protect the job, or None.

    Returns:
        Empty where nothing more follows.
    """
    if case.state in cases.OPEN_DECISION and not case.leaving:
        return (Forecast("answer", "what became of its end is waited for", None),)
    closing = _closing(case, rule)
    if closing is not None:
        return (closing,)
    if case.over:
        return ()
    found = _stages(case, rule, now, kept_until)
    if case.leaving:
        what = "the job was asked to leave: it does, or its time for that is over"
        found.append(Forecast("answer", what, None))
    return tuple(sorted(found, key=_order))


def _order(item: Forecast) -> float:
    return -1.0 if item.seconds is None else item.seconds


def _closing(case: Case, rule: Rule) -> Forecast | None:
    """A case that is on its way to its end; its clocks do not run."""
    if case.last == "missing":
        left = cases.GONE_AFTER_SECONDS - case.missing_for
        return Forecast("close", "the case is closed: the job is gone", max(left, 0.0), _IF_SO)
    if case.last == "word":
        what = "its clock stands still, for as long as what the job says of itself is believed"
        return Forecast("held", what, None, _IF_SO)
    if case.last == "unknown":
        left = UNKNOWN_LIMIT_SECONDS - case.unknown_for
        what = "the case is closed, since too little is known; until then its clock stands still"
        return Forecast("close", what, max(left, 0.0), _IF_SO)
    if case.last == "no" and not case.over:
        left = max(rule.clear_after - case.no_for, 0.0)
        return Forecast("close", "the case is closed: the rule is kept again", left, _IF_SO)
    return None


def _stages(case: Case, rule: Rule, now: float, kept_until: float | None) -> list[Forecast]:
    found = []
    wait = 0.0
    if case.detected_at is None:
        wait = max(0.0, rule.for_ - case.yes_for)
        what = f"the rule {rule.id} counts it as broken"
        found.append(Forecast("found", what, wait, _IF_SO))
    for key, stage in rule.keyed_stages:
        mark = case.mark(key)
        if stage.do.acts and rule.mode is Mode.ENFORCE:
            ahead = cases.ahead(case, key, stage)
        else:
            again = mark is not None and stage.do is Action.NOTIFY and mark.mode != rule.mode
            ahead = mark is None or again
        if ahead:
            found.append(_stage(case, rule, key, stage=stage, wait=wait, now=now, kept=kept_until))
    return found


def _stage(
    case: Case,
    rule: Rule,
    key: str,
    *,
    stage: Stage,
    wait: float,
    now: float,
    kept: float | None,
) -> Forecast:
    after = cases.terms(case, key, stage).after if stage.do.acts else stage.after
    seconds = max(0.0, wait + after - case.elapsed, cases.lacking(case, rule, key, stage))
    kind, condition = stage.do.value, _IF_SO
    if stage.when is not None and case.clock(key).last != "yes":
        condition = f"{_IF_SO}, and from now on {words(stage.when)}"
    if stage.do.takes and rule.mode is Mode.ENFORCE:
        # Before the notice is due, its age cannot begin to count.
        told = min((s.after for s in rule.stages if s.do is Action.NOTIFY), default=0.0)
        first = max(0.0, wait + told - case.elapsed) if case.notified_at is None else 0.0
        notice = cases.terms(case, key, stage).notice_delivered_for
        age = case.notice_age if case.notified_at is not None else 0.0
        protected = 0.0 if kept is None else kept - now
        leaving = cases.leaving_for(case, rule, now=now)
        seconds = max(seconds, first + notice - age, case.retry_in, protected, leaving)
        what = f"{_DOES[stage.do]} at the earliest"
        if case.notified_at is None:
            what = f"{what}, and not before its owner has had the notice for {about(notice)}"
    elif stage.do.acts and rule.mode is not Mode.ENFORCE:
        kind = f"would_{stage.do.value}"
        what = f"{_NOTED[stage.do]} is noted, not done ({rule.mode.value})"
    elif stage.do.acts:
        what, seconds = _DOES[stage.do], max(seconds, 0.0 if kept is None else kept - now)
    elif stage.do is Action.NOTIFY and rule.mode is Mode.OBSERVE:
        kind, what = "would_notify", "a notice to its owner is noted, not sent (observe)"
    elif stage.do is Action.NOTIFY:
        what = "its owner is told"
    else:
        what = "it is written down"
    return Forecast(kind, what, seconds, condition, key, stage.level.value)
