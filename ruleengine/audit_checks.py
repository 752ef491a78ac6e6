"""What an audit shows of the design's invariants: each held, was broken, or cannot be told. Pure.

They are checked on the document alone, so that whoever has it can do so without the engine that
made it. The numbers are those of the list of invariants in docs/operations.md.
"""

from __future__ import annotations

import datetime as dt
import itertools
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gpuwarden.ruleengine.verdicts import MAX_DARK_SHARE, MAX_SKEW_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SLACK_SECONDS = 0.002
"""What rounding to milliseconds may make of two times."""
_SET_BACK = "the engine's clock was set back meanwhile: times do not tell what came first"
STANDS = ("authorised", "acting", "verified", "incomplete", "failed")
"""States of a decision that was not taken back: at most one may end an attempt."""
_ENDS = ("terminate", "requeue")
_TAKES = (*_ENDS, "yield")
# A job is stopped before each signal, and the last time stands there.
_LADDER = ("journalled", "verified", "leave_requested", "sigterm", "sigkill", "exited", "proven")


@dataclass(frozen=True, slots=True)
class Check:
    """One invariant on one reclaim.

    Attributes:
        number: of the invariant.
        name: a stable word.
        claim: what must be true.
        holds: whether it is; None where the audit cannot tell.
        why: what it rests on, or what is wrong.
    """

    number: int
    name: str
    claim: str
    holds: bool | None
    why: str

    def record(self) -> dict[str, Any]:
        """As it stands in a document."""
        return asdict(self)


_Finding = tuple[bool | None, str]


def checks(document: Mapping[str, Any]) -> list[Check]:
    """Every invariant that can be looked for in an audit."""
    return [Check(number, name, claim, *look(document)) for number, name, claim, look in _CHECKS]


def failed(found: list[Check]) -> list[Check]:
    """Those that do not hold."""
    return [check for check in found if check.holds is False]


# -- each invariant


def _fresh_facts(document: Mapping[str, Any]) -> _Finding:
    look = document["last_look"]
    if look is None:
        return None, "no last look was kept"
    wrong = []
    if not 0 <= look["facts_age"] <= look["facts_allowed_age"]:
        wrong.append(f"the facts were {look['facts_age']:g} s old")
    if look["problems"]:
        wrong.append(f"the facts were not whole: {'; '.join(look['problems'])}")
    dark = look["expected_nodes"] - look["lit_nodes"]
    if look["expected_nodes"] < 1 or dark > MAX_DARK_SHARE * look["expected_nodes"]:
        wrong.append(f"{dark} of {look['expected_nodes']} nodes were dark")
    if look["clock_skew"] > MAX_SKEW_SECONDS:
        wrong.append(f"clocks were {look['clock_skew']:g} s apart")
    right = (
        f"{look['facts_age']:g} s old ({look['facts_allowed_age']:g} s are allowed), "
        f"{look['lit_nodes']} of {look['expected_nodes']} nodes lit, clocks "
        f"{look['clock_skew']:g} s apart"
    )
    return _told(wrong, right)


def _own_word(document: Mapping[str, Any]) -> _Finding:
    look = document["last_look"]
    if look is None:
        return None, "no last look was kept"
    if look["self_report_only"]:
        return True, "its own word spoke against it, beyond what trust_for allows"
    conditions = [item for item in document["evidence"] if item["truth"] == "YES"]
    if look["truth"] != "YES" or not conditions:
        return False, f"the rule said {look['truth']} on {len(conditions)} conditions that held"
    return True, f"{len(conditions)} conditions held on what NVML and /proc showed"


def _in_order(document: Mapping[str, Any]) -> _Finding:
    """The engine's own times follow one another, and so do those of each node."""
    if document["clock_set_back"]:
        return None, _SET_BACK
    deadlines, decision, look = (document[k] for k in ("deadlines", "decision", "last_look"))
    # A request to save waits for no notice.
    notified_at = deadlines["notified_at"] if decision["action"] in _TAKES else None
    course: list[tuple[str, str | None]] = [
        ("the first sample", deadlines["opened_at"]),
        ("for met", deadlines["detected_at"]),
        ("the notice proven", notified_at),
        ("the last look", None if look is None else look["at"]),
        ("decided", decision["created_at"]),
        ("finished", decision["finished_at"]),
    ]
    wrong = _disorder([(name, _seconds(at)) for name, at in course if at is not None])
    begun, ended = _seconds(decision["created_at"]), decision["finished_at"]
    for node in document["nodes"]:
        steps = {step["step"]: _seconds(step["at"]) for step in node["steps"]}
        ladder = [(name, steps[name]) for name in _LADDER if name in steps]
        wrong += [f"{node['host']}: {text}" for text in _disorder(ladder)]
        if not steps or node["decision"] not in (None, node["request"]["decision_id"]):
            continue  # an earlier order's ladder, which this one was answered with
        # A node's clock may be as far off as the guards allow.
        if min(steps.values()) < begun - MAX_SKEW_SECONDS:
            wrong.append(f"{node['host']} acted before the decision was on disk")
        if ended is not None and max(steps.values()) > _seconds(ended) + MAX_SKEW_SECONDS:
            wrong.append(f"{node['host']} went on after the result was known")
    times = [_seconds(item["at"]) for item in document["timeline"]]
    if times != sorted(times):
        wrong.append("the timeline is not in order")
    return _told(wrong, f"{len(document['timeline'])} moments, each step on disk before the next")


def _disorder(course: list[tuple[str, float]]) -> list[str]:
    return [
        f"{later} came before {earlier}"
        for (earlier, first), (later, then) in itertools.pairwise(course)
        if then < first - SLACK_SECONDS
    ]


def _notice(document: Mapping[str, Any]) -> _Finding:
    """Every required recipient had the notice, for as long as was promised."""
    if document["decision"]["action"] not in _TAKES:
        return None, "a request to save takes nothing from the job"
    told, look = document["deadlines"], document["last_look"]
    promised = told["told_notice_delivered_for"]
    stages = {
        f"{stage['stage']}:{stage['mode']}"
        for stage in document["stages"]
        if stage["do"] == "notify" and not stage["would"]
    }
    known = document["notices"] if look is None else look["notices"]
    notices = [notice for notice in known if notice["stage"] in stages]
    if promised is None or not notices:
        return False, "decided without a notice to anybody"
    wrong = [
        f"{notice['stage']} by {notice['channel']} was {notice['state']}"
        for notice in notices
        if notice["state"] != "proven"
    ]
    wrong += [
        f"{notice['stage']} by {notice['channel']} has no proof"
        for notice in document["notices"]
        if notice["state"] == "proven" and not notice["proof"]
    ]
    if told["notice_age"] is not None and told["notice_age"] < promised - SLACK_SECONDS:
        wrong.append(f"by the engine's own clock it was had for {told['notice_age']:g} s")
    if wrong or document["clock_set_back"]:
        return (False, "; ".join(wrong)) if wrong else (None, _SET_BACK)
    proven = max(_seconds(notice["proven_at"]) for notice in notices)
    had = _seconds(told["decided_at"]) - proven
    words = f"had for {had:.1f} s of {promised:g} s that were told"
    return had >= promised - SLACK_SECONDS, f"{len(notices)} proven, {words}"


def _looked_again(document: Mapping[str, Any]) -> _Finding:
    look, decided = document["last_look"], _seconds(document["decision"]["created_at"])
    if look is None:
        return None, "no last look was kept"
    wrong = []
    if look["truth"] != "YES":
        wrong.append(f"the rule said {look['truth']}")
    if look["protected"]:
        wrong.append(f"it was protected: {look['protected']}")
    if look["kill_switch"] is not False:
        wrong.append("the kill switch was not known to be off")
    if look["paused"]:
        wrong.append(f"enforcement was paused: {look['paused']}")
    wrong += [
        f"{keep['by']} had kept it until {keep['until']}"
        for keep in document["keeps"]
        if _seconds(keep["granted_at"]) <= decided < _seconds(keep["until"])
    ]
    gap = decided - _seconds(look["at"])
    if not -SLACK_SECONDS <= gap <= look["facts_allowed_age"]:
        wrong.append(f"the look was {gap:.1f} s before the decision")
    return _told(wrong, f"{gap:.3f} s before the decision; whitelist, keeps and kill switch too")


def _once(document: Mapping[str, Any]) -> _Finding:
    decision, wrong = document["decision"], []
    others = [
        item["id"]
        for item in document["other_decisions"]
        if item["action"] in _ENDS and item["state"] in STANDS
    ]
    if decision["action"] in _ENDS and decision["state"] in STANDS and others:
        wrong.append(f"the attempt was ended by {', '.join(others)} as well")
    for node in document["nodes"]:
        names = [step["step"] for step in node["steps"]]
        if len(names) != len(set(names)):
            wrong.append(f"{node['host']} took a step twice")
    return _told(wrong, "one decision that stands; each node took each step once")


def _limits(document: Mapping[str, Any]) -> _Finding:
    look = document["last_look"]
    if look is None:
        return None, "no last look was kept"
    if not look["limits"]:
        return False, "no limit was in force"
    wrong = [
        f"{item['limit']}{' of ' + item['of'] if item['of'] else ''}: {item['used']} of "
        f"{item['allowed']} were used"
        for item in look["limits"]
        if item["used"] >= item["allowed"]
    ]
    used = ", ".join(f"{i['limit']} {i['used']} of {i['allowed']}" for i in look["limits"])
    return _told(wrong, used)


def _promises(document: Mapping[str, Any]) -> _Finding:
    told, wrong = document["deadlines"], []
    if document["decision"]["action"] not in _TAKES:
        return None, "a request to save takes nothing from the job"
    if told["told_after"] is None:
        return False, "nothing was told before it was decided"
    after = told["told_after"] + told["kept"]
    if told["passed"] is None:
        return None, "the stage that acted is not marked"
    if told["passed"] < after - SLACK_SECONDS:
        wrong.append(f"{told['passed']:g} s had passed of {after:g} s that were told")
    if told["grace"] < told["told_grace"] - SLACK_SECONDS:
        wrong.append(f"{told['grace']:g} s of grace, and {told['told_grace']:g} s were told")
    right = f"{told['passed']:g} s passed of {after:g} s told, {told['grace']:g} s of grace"
    return _told(wrong, right)


def _files(document: Mapping[str, Any]) -> _Finding:
    look = document["last_look"]
    if look is None:
        return None, "no last look was kept"
    wrong = [look["bad_files"]] if look["bad_files"] else []
    return _told(wrong, f"rules {document['rule']['rule_set_hash']} were those on disk")


def _own_tool(document: Mapping[str, Any]) -> _Finding:
    """Only a job that no platform owns is signalled by an agent."""
    job = document["job"]["job_id"]
    signalled = [n["host"] for n in document["nodes"] if n["request"]["action"] == "terminate"]
    if job.startswith("proc-"):
        return True, "no platform owns it: its node's agent acted"
    if signalled:
        return False, f"the agent of {', '.join(signalled)} was told to signal a platform's job"
    return True, "its platform's own tool acted; the agents only watched"


def _proven(document: Mapping[str, Any]) -> _Finding:
    state, action = document["decision"]["state"], document["decision"]["action"]
    if action not in _TAKES:
        return None, "nothing was to be reclaimed"
    if state == "verified":
        proving = [n for n in document["nodes"] if n["request"]["action"] in ("terminate", "watch")]
        wrong = [f"NVML gave no proof on {n['host']}" for n in proving if n["gone"] is not True]
        left = document["result"]["survivors"]
        wrong += [f"{left} processes survived"] if left else []
        wrong += [] if proving else ["no agent was asked"]
        return _told(wrong, f"gone from NVML on {len(proving)} of {len(proving)} nodes")
    if state in ("authorised", "acting"):
        return None, "the result is not known yet"
    if state in ("refused", "lapsed"):
        touched = [
            process
            for node in document["nodes"]
            for process in node["processes"]
            if process["ended_by"] not in (None, "gone")
        ]
        return _told(["processes were ended all the same"] if touched else [], f"it was {state}")
    return True, f"it does not count as reclaimed: {state}"


def _nothing_down(document: Mapping[str, Any]) -> _Finding:
    if document["decision"]["action"] not in _TAKES:
        return None, "a request to save is held back by no limit and no promise"
    decided = _seconds(document["decision"]["created_at"])
    standing = [
        hold["reason"]
        for hold in document["held_back"]
        if _seconds(hold["from"]) < decided - SLACK_SECONDS
        and (hold["until"] is None or _seconds(hold["until"]) > decided + SLACK_SECONDS)
    ]
    look = document["last_look"]
    if look is None and not document["held_back"]:
        return None, "what held the end back was not kept"
    if document["clock_set_back"]:
        return None, _SET_BACK
    wrong = [f"{reason.replace('_', ' ')} held it back" for reason in standing]
    before = len(document["held_back"])
    return _told(wrong, f"reasons that had held it back before: {before}; none did then")


_CHECKS: tuple[tuple[int, str, str, Callable[[Mapping[str, Any]], _Finding]], ...] = (
    (1, "fresh_facts", "It acted on fresh, whole facts of a lit fleet.", _fresh_facts),
    (2, "own_word", "What the job says of itself neither damned nor saved it.", _own_word),
    (3, "in_order", "Each step came after the one before.", _in_order),
    (4, "notice", "The owner had the notice, by proof, for as long as was told.", _notice),
    (5, "looked_again", "Everything was looked at again right before.", _looked_again),
    (6, "once", "The attempt was ended at most once.", _once),
    (7, "limits", "No limit was used up.", _limits),
    (8, "promises", "Nothing came earlier, or with less grace, than was told.", _promises),
    (9, "files", "The rules in force were those on disk.", _files),
    (10, "own_tool", "The tool of whoever owns the job ended it.", _own_tool),
    (11, "proven", "It counts as reclaimed only with NVML's proof.", _proven),
    (
        12,
        "nothing_down",
        "Nothing that holds an end back stood then.",
        _nothing_down,
    ),
)


def _told(wrong: list[str], right: str) -> _Finding:
    return (False, "; ".join(wrong)) if wrong else (True, right)


def _seconds(text: str) -> float:
    return dt.datetime.fromisoformat(text).timestamp()


def lines(found: list[Check]) -> Iterator[str]:
    """Each check in a line."""
    words = {True: "holds", False: "BROKEN", None: "not known"}
    for check in found:
        yield f"{check.number:>2} {words[check.holds]:<9} {check.claim} {check.why}."
