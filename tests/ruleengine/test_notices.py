"""What owners and operators read, and which alerts stand."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from tests.ruleengine.test_cases import YES, due, fresh, rule, run

from gpuwarden.agent_api import Action, ActionReport, ActionState, Outcome
from gpuwarden.ruleengine import acts, cases, messages, notices
from gpuwarden.ruleengine.cases import Case, CaseState
from gpuwarden.ruleengine.directories import User
from gpuwarden.ruleengine.layouts import Message
from gpuwarden.ruleengine.messages import Outlook
from gpuwarden.ruleengine.model import OwnerMay
from gpuwarden.ruleengine.notices import Context
from gpuwarden.ruleengine.records import Decision, Notice
from gpuwarden.ruleengine.verdicts import Evidence, Truth

NOW = 1_800_000_000.0
CONTEXT = Context(NOW, "UTC", "http://engine:9837")
ALICE = User(email="alice@example.org", team="vision", timezone="Asia/Shanghai")
OUTLOOK = Outlook(
    remaining=1500.0,
    grace=60.0,
    owner_may=OwnerMay.model_validate({"keep": "2h", "times": 2}),
    keeps_used=1,
    ticket="TICKET",
    work_lost=5400.0,
    cards=(("GPU-0", "0", "A100"),),
)
EVIDENCE = (
    Evidence("gpu_utilization max over 60s at most 5 %", Truth.YES, measured="GPU 0: 0 %"),
    Evidence("throughput", Truth.YES, measured="3 img/s", expected="78 img/s (yolov8m)"),
    Evidence("something else", Truth.NO, measured="not told"),
)


def told(state: CaseState = CaseState.NOTIFIED, mode: str = "enforce") -> Case:
    """A case whose owner has the notice."""
    case = run(fresh(), *[YES] * 20, by=rule(mode)).case
    return msgspec.structs.replace(
        case,
        state=state,
        user="alice",
        instance="node-7:9835",
        detected_at=NOW - 600,
        cause="idle",
        because="memory is held and nothing runs",
        remedy="End the kernel.",
    )


def alerts(case: Case, mode: str = "enforce") -> list[notices.Alert]:
    """The alerts of a case."""
    return notices.case_alerts(
        case, rule(mode), evidence=EVIDENCE, outlook=OUTLOOK, owner=ALICE, context=CONTEXT
    )


def test_a_notice_says_what_why_when_and_how_to_keep_it() -> None:
    """Seen, expected, cause, remedy, the moment in the owner's zone, and the command."""
    (alert,) = alerts(told())
    text = Message.of(alert.annotations, alert.url).plain()
    for part in (
        "GPU 0: 0 %",
        "78 img/s (yolov8m)",
        "Idle: memory is held and nothing runs",
        "End the kernel.",
        "(Asia/Shanghai)",
        "SIGTERM, and SIGKILL 1m later",
        "gpuwarden keep proc-1 --rule idle --for 2h",
        "--ticket TICKET",
        "1 of 2 left",
        "1h30m",
        "http://engine:9837/jobs/proc-1",
    ):
        assert part in text
    assert "not told" not in text


@pytest.mark.parametrize(
    ("run_id", "says", "never"),
    [
        ("run-a", "is asked to save and leave", "No trainer"),
        (None, "No trainer is known in it that could be asked to save", "asked to save and leave"),
    ],
)
def test_only_a_training_is_told_that_it_is_asked_to_save(
    run_id: str | None, says: str, never: str
) -> None:
    """A notebook cannot save on request: its owner must do it before the end."""
    (alert,) = alerts(msgspec.structs.replace(told(), run_id=run_id))
    assert says in alert.annotations["next"]
    assert never not in alert.annotations["next"]
    assert "SIGTERM, and SIGKILL 1m later" in alert.annotations["next"]


def test_a_notice_says_from_where_the_lost_work_counts() -> None:
    """Without a saved state it is everything, and that is said."""
    (alert,) = alerts(told())
    assert "no saved state is known" in alert.annotations["work"]
    saved = dataclasses.replace(OUTLOOK, saved=True)
    (alert,) = notices.case_alerts(
        told(), rule(), evidence=EVIDENCE, outlook=saved, owner=ALICE, context=CONTEXT
    )
    assert alert.annotations["work"] == "1h30m since its last saved state; 1.5 GPU-hours"


def test_labels_are_identity_only() -> None:
    """Numbers and prose would make a new alert of every change."""
    (first,) = alerts(told())
    later = msgspec.structs.replace(told(), elapsed=999.0, because="other", remedy="other")
    (second,) = alerts(later)
    assert first.labels == second.labels
    assert first.starts_at == second.starts_at
    assert first.annotations != second.annotations
    assert first.labels == {
        "alertname": "GpuwardenJobNotice",
        "service": "gpuwarden-jobs",
        "rule": "idle",
        "job_id": "proc-1",
        "node": "node-7",
        "user": "alice",
        "team": "vision",
        "level": "moderate",
        "mode": "enforce",
        "stage": "moderate-notify",
        "target": "",
    }


def test_a_warning_promises_that_nothing_is_done() -> None:
    """No deadline, and no command against one."""
    (alert,) = notices.case_alerts(
        told(mode="warn"),
        rule("warn"),
        evidence=EVIDENCE,
        outlook=dataclasses.replace(OUTLOOK, remaining=None),
        owner=ALICE,
        context=CONTEXT,
    )
    assert "Nothing is done to the job" in alert.annotations["next"]
    assert alert.annotations["keep"] == ""


def test_observe_tells_nobody() -> None:
    """A stage that would have told stands in the audit only."""
    assert alerts(told(mode="observe"), "observe") == []


def test_an_ending_replaces_the_notice_and_is_replaced_by_the_end() -> None:
    """Of one case one alert stands; after the decision it is the decision's."""
    acting = cases.authorised(due(), rule(), "d", key="severe-terminate", wall=NOW)
    (alert,) = alerts(acting)
    assert alert.labels["alertname"] == "GpuwardenJobEnding"
    assert alert.labels["level"] == "severe"
    assert alerts(cases.settled(acting, "d", acts.ActState.VERIFIED)) == []


@pytest.mark.parametrize("run_id", ["run-a", None])
def test_an_ending_says_what_happens_and_no_more(run_id: str | None) -> None:
    """Only who runs a trainer is asked to save; both get SIGTERM, the grace, SIGKILL."""
    acting = msgspec.structs.replace(
        cases.authorised(due(), rule(), "d", key="severe-terminate", wall=NOW), run_id=run_id
    )
    (alert,) = alerts(acting)
    text = alert.annotations["description"]
    assert ("asked to save" in text) is (run_id is not None)
    assert "SIGTERM at Fri 15 Jan 16:00:00 (Asia/Shanghai), and SIGKILL 1m later" in text


@pytest.mark.parametrize(
    ("steps", "says", "never"),
    [
        ({"leave_requested": NOW}, "resume=auto", "gone"),
        ({"sigterm": NOW}, "what it had not saved by itself is gone", "resume=auto"),
    ],
)
def test_the_news_of_an_end_promises_only_what_was_asked_for(
    steps: dict[str, float], says: str, never: str
) -> None:
    """Whether a request to save was left is in the agent's report."""
    report = ActionReport(
        "d", "proc-1", Action.TERMINATE, ActionState.FINISHED, Outcome.RECLAIMED, steps=steps
    )
    ended = dataclasses.replace(made("verified"), report=report.encode().decode())
    (alert,) = notices.decision_alerts(ended, freed=None, owner=ALICE, context=CONTEXT)
    assert says in alert.annotations["next"]
    assert never not in alert.annotations["next"]
    assert "scheduler" not in alert.annotations["next"]


def made(state: str, finished: float = NOW - 10) -> Decision:
    """A decision with a result."""
    return Decision(
        id="d",
        epoch=1,
        case_id=1,
        rule_id="idle",
        job_id="proc-1",
        user="alice",
        action="terminate",
        state=state,
        host="node-7",
        body=b"",
        signature="",
        gpus=(),
        evidence="[]",
        grace=60.0,
        expires=0.0,
        created_at=finished - 60,
        finished_at=finished,
        reason="survivor",
    )


@pytest.mark.parametrize(
    ("state", "levels"),
    [
        ("verified", ["ended"]),
        ("incomplete", ["ended", "page"]),
        ("failed", ["ended", "page"]),
        ("refused", []),
        ("lapsed", []),
    ],
)
def test_the_end_of_a_job_is_an_alert_of_its_own(state: str, levels: list[str]) -> None:
    """For the owner; for operators too where it could not be proven."""
    found = notices.decision_alerts(made(state), freed=2.0**34, owner=ALICE, context=CONTEXT)
    assert [alert.labels["level"] for alert in found] == levels


def test_the_news_of_an_end_stands_for_a_quarter_of_an_hour() -> None:
    """Longer than any group_wait, and not for ever."""
    old = made("verified", NOW - 900)
    assert notices.decision_alerts(old, freed=None, owner=ALICE, context=CONTEXT) == []


@pytest.mark.parametrize(
    ("notice", "waited", "stands"),
    [
        (None, 100.0, False),
        (None, 301.0, True),
        (
            Notice("moderate-notify:enforce", "email", "a", "failed", 1, "", "550 no", 0.0),
            1.0,
            True,
        ),
        (Notice("moderate-notify:enforce", "email", "a", "pending", 0, "", "", 0.0), 1.0, False),
    ],
)
def test_operators_hear_of_a_notice_that_does_not_arrive(
    notice: Notice | None, waited: float, *, stands: bool
) -> None:
    """At once where it failed, after a while where nothing is heard of it."""
    case = msgspec.structs.replace(told(CaseState.DETECTED), notified_at=None)
    marks = tuple(dataclasses.replace(mark, at=NOW - waited) for mark in case.marks)
    found = notices.undeliverable_alerts(
        msgspec.structs.replace(case, marks=marks),
        rule(),
        [] if notice is None else [notice],
        undelivered_after=300.0,
        owner=ALICE,
        context=CONTEXT,
    )
    assert bool(found) is stands
    assert all(alert.labels["level"] == "page" for alert in found)


def test_times_are_told_in_the_owners_zone() -> None:
    """An unknown zone is UTC, not an error at the moment of a notice."""
    assert messages.clock_time(NOW, "Asia/Shanghai") == "Fri 15 Jan 16:00:00 (Asia/Shanghai)"
    assert messages.local_time(NOW, "Nowhere/Land").utcoffset() is not None
    assert messages.about(59.6) == "1m"
    assert messages.about(5399.0) == "1h30m"
