"""The course of one reclaim, in the order of time: engine, recipients, people and nodes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.messages import about

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gpuwarden.ruleengine.dossiers import Dossier, Line

_KINDS = {
    "idle_detected": "it is counted as idle",
    "due": "both deadlines are over: from now on only the guards hold it back",
    "notice_open": "another recipient must have the notice: the deadline waits for that proof",
    "authorised": "the decision is on disk",
    "acting": "the act has begun",
    "asked": "its trainer and its platform's notice have asked it to leave, where there are such",
    "left": "it has left before its platform had to end it",
    "ending": "its platform is told to end it",
    "withdrawing": "what was asked for is taken back",
    "verified": "the ended processes are gone from NVML",
    "incomplete": "its end is not proven",
    "refused": "it was refused",
    "failed": "it failed",
    "lapsed": "the request has expired: nothing was done",
    "retry": "the wait after a refusal is over",
    "withdrawn": "the request is called off",
    "came_back": "the job has come back",
    "done": "it has done what it was asked for",
    "unheeded": "it has not done what it was asked for",
    "undeliverable": "there is nobody in it that could be asked",
    "appeal": "its owner objects",
    "regret": "somebody regrets it",
}


def _says(detail: Mapping[str, Any]) -> str:
    """What a platform said, where it was news."""
    held = f", held up by {str(detail['obstacle']).replace('_', ' ')}" if detail["obstacle"] else ""
    after = f", followed by {detail['successor']}" if detail["successor"] else ""
    return f"it says {detail['word'] or 'nothing'}{held}{after}"


_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "detected": lambda detail: (
        f"it has held for {about(detail['for'])} without a break: the case counts"
    ),
    "log": lambda detail: f"stage {detail['stage']}: noted",
    "notify": lambda detail: f"stage {detail['stage']}: the owner is told",
    "notified": lambda _: "every required recipient has the notice, by proof: the deadline runs",
    "kept": lambda detail: f"kept for {about(detail['seconds'])}: {detail.get('reason', '')}",
    "postponed": lambda detail: f"it is due no longer: {detail['why']}",
    "watched": lambda detail: (
        f"processes that the agents of {', '.join(detail['nodes'])} hold: {detail['processes']}"
    ),
    "platform": _says,
    "told": lambda detail: (
        "its platform has taken that"
        if not detail.get("why")
        else f"its platform has not taken that: {detail['why']}"
    ),
    "closed": lambda detail: (
        f"the case is closed: {str(detail.get('reason', '')).replace('_', ' ')}"
    ),
}
"""Events whose details make the sentence."""
_STEPS = {
    "watching": "the agent holds its processes by pidfd",
    "journalled": "the order is in the agent's journal",
    "verified": "it is the process that was meant, and it holds the card",
    "leave_requested": "its trainer is asked to save and leave",
    "stopped": "the job is stopped, so that nothing escapes",
    "sigterm": "SIGTERM",
    "sigkill": "SIGKILL for what is left",
    "exited": "its last process has ended",
    "proven": "NVML was asked whether the memory came back",
}


# What has the same time: a result and what follows from it come after the agent's own last step.
_ORDER = {
    "due": 5,
    **dict.fromkeys(("authorised", "acting", "refused"), 7),
    **dict.fromkeys(("verified", "incomplete", "failed", "done", "unheeded", "closed"), 9),
}


@dataclass(frozen=True, slots=True)
class _Moment:
    """One line; `order` decides among those of the same time."""

    time: float
    order: int
    who: str
    what: str
    sentence: str

    def record(self, begun: float, before: float) -> dict[str, Any]:
        return {
            "at": rfc3339(self.time),
            "since_first": round(self.time - begun, 3),
            "since_last": round(self.time - before, 3),
            "who": self.who,
            "what": self.what,
            "sentence": self.sentence,
        }


def timeline(dossier: Dossier) -> list[dict[str, Any]]:
    """Everything that has a time, oldest first, with the seconds between."""
    found = [
        _sample(dossier),
        *_notices(dossier),
        *_holds(dossier),
        *(_event(line, dossier) for line in dossier.events),
        *_look(dossier),
        *_agents(dossier),
        *_later(dossier),
    ]
    found.sort(key=lambda moment: (moment.time, moment.order))
    begun = before = found[0].time
    records = []
    for moment in found:
        records.append(moment.record(begun, before))
        before = moment.time
    return records


def _sample(dossier: Dossier) -> _Moment:
    rule = dossier.decision.rule_id
    words = [
        f"{item['condition']}: {item['measured']}" if item["measured"] else item["condition"]
        for item in (() if dossier.opening is None else dossier.opening.document["evidence"])
        if item["truth"] == "YES"
    ]
    seen = f": {'; '.join(words)}" if words else ""
    return _Moment(dossier.case.opened_at, 0, "engine", "sample", f"{rule} says YES{seen}")


def _notices(dossier: Dossier) -> Iterator[_Moment]:
    for item in dossier.tellings:
        stage = item.stage.partition(":")[0]
        if item.required_at is not None:
            text = f"the notice of {stage} goes by {item.channel}"
            yield _Moment(item.required_at, 3, "engine", "notice", text)
        for at, error in item.refusals:
            hidden = error.replace(item.recipient, "(the recipient)")
            yield _Moment(at, 4, item.channel, "not taken", hidden)
        if item.state == "proven":
            tries = "the first try" if item.attempts <= 1 else f"try {item.attempts}"
            text = f"the notice of {stage} was taken, with {tries}"
            yield _Moment(item.time, 4, item.channel, "taken", text)


def _holds(dossier: Dossier) -> Iterator[_Moment]:
    for hold in dossier.holds:
        yield _Moment(hold.begun_at, 6, "engine", "held back", hold.sentence)
        if hold.ended_at is not None:
            words = hold.reason.replace("_", " ")
            yield _Moment(hold.ended_at, 5, "engine", "no longer", f"{words} holds it back no more")


def _event(line: Line, dossier: Dossier) -> _Moment:
    order = _ORDER.get(line.kind, 2)
    who = str(line.detail.get("by") or "engine")
    if line.kind == "platform" and dossier.platform is not None:
        who = dossier.platform.platform
    return _Moment(line.time, order, who, line.kind, _sentence(line, dossier))


def _sentence(line: Line, dossier: Dossier) -> str:
    if line.kind.startswith("would_"):
        stage = line.detail.get("stage")
        return f"stage {stage}: only noted, for the rule's mode was {line.mode}"
    made = _WORDS.get(line.kind)
    if made is not None:
        return made(line.detail)
    own = line.detail.get("decision")
    other = f" (decision {own})" if own not in (None, dossier.decision.id) else ""
    why = str(line.detail.get("reason") or line.detail.get("why") or "")
    words = _KINDS.get(line.kind, line.kind.replace("_", " "))
    return words + (f": {why}" if why else "") + other


def _look(dossier: Dossier) -> Iterator[_Moment]:
    if dossier.look is None:
        return
    found = dossier.look.document
    text = (
        f"the last look: {found['truth']} on facts {found['facts']['age']:.1f} s old, "
        "no guard objects"
    )
    yield _Moment(dossier.look.time, 6, "engine", "looked", text)


def _agents(dossier: Dossier) -> Iterator[_Moment]:
    for order in dossier.orders:
        for name, at in ({} if order.report is None else order.report.get("steps", {})).items():
            yield _Moment(at, 8, order.host, name, _STEPS.get(name, name.replace("_", " ")))


def _later(dossier: Dossier) -> Iterator[_Moment]:
    for item in dossier.later:
        if item.seen_at is not None:
            text = f"the run's next attempt {item.job_id} breaks a rule"
            yield _Moment(item.seen_at, 10, "engine", "seen again", text)
