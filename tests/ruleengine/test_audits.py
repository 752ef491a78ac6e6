"""The audit of one reclaim: nothing left out without a word, and wrong only where it is wrong."""

from __future__ import annotations

import asyncio
import copy
import datetime as dt
import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.ruleengine.engines import World, running, world
from tests.ruleengine.worlds import Job

from gpuwarden.agent_api import Outcome
from gpuwarden.ruleengine import dossiers
from gpuwarden.ruleengine.api_audit_models import ReclaimAudit
from gpuwarden.ruleengine.audit_checks import checks, failed
from gpuwarden.ruleengine.audits import audit
from gpuwarden.ruleengine.cases import CaseState

if TYPE_CHECKING:
    from collections.abc import Callable

Document = dict[str, Any]
RUN = {"run_id": "yolov8m-coco-14", "model": "yolov8m", "batch": "64", "imgsz": "640"}


def audit_of(world: World, job: str = "proc-1") -> Document:
    """The audit of the last decision about a job, as it goes over the wire."""
    found = world.engine.ledger.job_decisions(job)[-1]
    dossier = dossiers.read(world.engine.ledger, found.id)
    assert dossier is not None
    document: Document = json.loads(json.dumps(audit(dossier, now=world.clock.wall())))
    ReclaimAudit.model_validate(document)
    return document


def told(servers: World, state: CaseState = CaseState.VERIFIED) -> Document:
    """The audit once the case of job-1 is in a state."""

    async def story() -> Document:
        async with running(servers) as world:
            await world.until(state)
            return audit_of(world)

    return asyncio.run(story())


def broken(document: Document) -> set[str]:
    """Names of the invariants that a document shows as broken."""
    return {check.name for check in failed(checks(document))}


def unknown(document: Document) -> set[str]:
    """Names of those that it cannot tell."""
    return {check.name for check in checks(document) if check.holds is None}


def test_a_reclaim_is_told_from_its_first_sample_to_its_proof(servers: World) -> None:
    """In the order of time, each step by who took it, and every invariant holds."""
    document = told(servers)
    course = [moment["what"] for moment in document["timeline"]]
    assert course == [
        "sample",
        "detected",
        "log",
        "idle_detected",
        "notify",
        "notice",
        "taken",
        "notified",
        "due",
        "looked",
        "authorised",
        "sigterm",
        "verified",
        "proven",
    ]
    first, last = document["timeline"][0], document["timeline"][-1]
    assert first["sentence"].startswith("idle-held says YES: gpu_utilization")
    assert first["since_first"] == 0.0
    assert last["since_first"] == sum(moment["since_last"] for moment in document["timeline"])
    assert document["answer"].startswith("This job was ended by the rule idle-held at ")
    assert broken(document) == unknown(document) == set()
    assert [item["what"] for item in document["missing"]] == ["the run"]


def test_it_shows_the_promql_the_times_and_the_gates_behind_the_first_yes(servers: World) -> None:
    """With the rule as it read, its hash, and what the files and the engine were."""
    document = told(servers)
    rule, sample = document["rule"], document["first_sample"]
    assert dt.datetime.fromisoformat(sample["at"]).timestamp() == sample["query_time"]
    assert {item["truth"] for item in sample["evidence"]} == {"YES"}
    (query,) = [q for q in rule["queries"] if "utilization" in q["promql"]]
    assert query["min_samples"] > 1
    assert query["max_age"] == 10
    assert "timestamp(gpu_job_utilization_ratio) >= time() - 10" in query["promql"]
    assert rule["mode"] == "enforce"
    assert rule["text"].startswith("idle-held: enforce, ")
    assert rule["changed_since_first_sample"] is False
    assert None not in (rule["hash"], rule["rule_set_hash"], rule["files_hash"])
    assert rule["engine_version"]


def test_what_was_signed_is_named_by_its_digest_and_key(servers: World) -> None:
    """And each card's memory, each process and the proof stand with their node."""
    document = told(servers)
    (node,) = document["nodes"]
    assert (node["node"], node["boot_id"], node["outcome"]) == ("node-1", "boot-1", "reclaimed")
    assert node["request"]["key_id"] == servers.keys.id
    assert len(node["request"]["sha256"]) == 64
    assert node["gone"] is True
    assert document["result"]["memory_freed"] == node["memory_freed"] == 30 * 2**30


def test_no_address_of_a_recipient_is_told(servers: World) -> None:
    """Neither as such nor inside a server's answer."""
    text = (servers.folder / "directory.yaml").read_text()
    (servers.folder / "directory.yaml").write_text(
        text.replace("slack: U0ALICE01", "slack: U0ALICE01, email: alice.liddell@example.org")
    )
    servers.slack_reply["body"] = {"ok": False, "error": "channel_not_found"}

    async def story() -> Document:
        async with running(servers) as world:
            await world.until(CaseState.DETECTED)
            await world.tick(12)
            servers.slack_reply["body"] = None
            await world.until(CaseState.VERIFIED)
            return audit_of(world)

    document = asyncio.run(story())
    assert "alice.liddell" not in json.dumps(document)
    (notice,) = document["notices"]
    assert "channel_not_found" in notice["refusals"][0]["error"]
    assert [m["what"] for m in document["timeline"]].count("not taken") == len(notice["refusals"])


def test_what_held_it_back_stands_with_its_span(servers: World) -> None:
    """A keep and the kill switch: from when until when, and by whom."""

    async def story() -> Document:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            stored = world.engine.cases.get("idle-held", "proc-1")
            assert stored is not None
            rule = world.engine.rulebook.rules.rules[0]
            world.engine.keep(stored, rule, role="owner", by="alice", reason="lunch", seconds=600.0)
            (servers.folder / "halt").touch()
            await world.until(CaseState.DUE)
            await world.tick(4)
            (servers.folder / "halt").unlink()
            await world.until(CaseState.VERIFIED)
            return audit_of(world)

    document = asyncio.run(story())
    (hold,) = [hold for hold in document["held_back"] if hold["reason"] == "kill_switch"]
    assert hold["from"] < hold["until"] <= document["decision"]["created_at"]
    assert document["keeps"][0]["reason"] == "lunch"
    assert document["deadlines"]["kept"] == 600.0
    (kept,) = [moment for moment in document["timeline"] if moment["what"] == "kept"]
    assert (kept["who"], kept["sentence"]) == ("alice", "kept for 10m: lunch")
    assert broken(document) == set()


def test_a_refused_order_is_told_as_what_it_was(servers: World) -> None:
    """Nothing was ended, and what is missing is missing for that reason."""
    servers.agent.refuse = (403, "protected")
    document = told(servers, CaseState.REFUSED)
    assert document["answer"].startswith("The rule idle-held did not end this job: protected")
    why = {item["what"]: item["why"] for item in document["missing"]}
    assert "protected" in why["the report of 127.0.0.1"]
    assert broken(document) == set()


def test_each_of_two_decisions_is_told_by_what_was_known_then(servers: World) -> None:
    """The first was refused; what the second found is not laid at its door."""
    servers.agent.refuse = (403, "protected")

    async def story() -> tuple[Document, Document]:
        async with running(servers) as world:
            await world.until(CaseState.REFUSED)
            servers.agent.refuse = None
            await world.until(CaseState.VERIFIED)
            found = world.engine.ledger.job_decisions("proc-1")
            both = [dossiers.read(world.engine.ledger, item.id) for item in found]
            one, two = (audit(d, now=0.0) for d in both if d is not None)
            return one, two

    one, two = asyncio.run(story())
    assert one["last_look"]["at"] <= one["decision"]["created_at"] < two["last_look"]["at"]
    assert one["deadlines"]["passed"] < two["deadlines"]["passed"]
    assert [item["state"] for item in two["other_decisions"]] == ["refused"]
    assert broken(one) == broken(two) == set()


@pytest.mark.parametrize("outcome", [Outcome.INCOMPLETE, Outcome.FAILED])
def test_what_is_not_proven_does_not_read_as_reclaimed(servers: World, outcome: Outcome) -> None:
    """It holds the invariant, by not counting."""
    servers.agent.outcome = outcome
    document = told(servers, CaseState(outcome.value))
    assert "is not proven" in document["answer"]
    assert broken(document) == set()


def test_the_run_that_goes_on_is_named(servers: World) -> None:
    """A later attempt of the same run, by the cases of the ledger."""
    servers.fleet.jobs[0].run = dict(RUN)

    async def story() -> Document:
        async with running(servers) as world:
            await world.until(CaseState.VERIFIED)
            world.fleet.jobs = [
                Job(
                    "proc-2",
                    uuid="GPU-9",
                    run=dict(RUN),
                    started=world.clock.wall(),
                    activity={"cpu": world.clock.wall()},
                )
            ]
            await world.tick(60)
            return audit_of(world)

    document = asyncio.run(story())
    assert "proc-2" in [item["job_id"] for item in document["afterwards"]]
    assert "the run" not in [item["what"] for item in document["missing"]]


def test_a_decision_of_an_earlier_version_says_what_was_not_kept(servers: World) -> None:
    """Checks that need it can tell nothing, and none is taken for broken."""

    async def story() -> Document:
        async with running(servers) as world:
            await world.until(CaseState.VERIFIED)
            with world.engine.ledger.transaction() as db:
                db.execute("DELETE FROM openings")
                db.execute("DELETE FROM looks")
                db.execute("DELETE FROM rule_texts")
                db.execute("UPDATE notices SET required_at=NULL")
            return audit_of(world)

    document = asyncio.run(story())
    assert [item["what"] for item in document["missing"]] == [
        "the first sample",
        "the last look",
        "the rule as it read",
        "when a notice was first tried",
        "the run",
    ]
    assert broken(document) == set()
    assert {"fresh_facts", "limits", "files", "looked_again"} <= unknown(document)


def later(text: str, seconds: float) -> str:
    """A time of a document, moved."""
    return (dt.datetime.fromisoformat(text) + dt.timedelta(seconds=seconds)).isoformat()


def _early(document: Document) -> None:
    document["deadlines"]["decided_at"] = later(document["deadlines"]["notified_at"], 60)


def _unproven(document: Document) -> None:
    document["last_look"]["notices"][0] |= {"state": "failed", "proven_at": None}


def _twice(document: Document) -> None:
    document["other_decisions"] = [{"id": "1-1-a", "action": "terminate", "state": "verified"}]


def _acted_before(document: Document) -> None:
    document["nodes"][0]["steps"][0]["at"] = later(document["decision"]["created_at"], -30)


def _ladder(document: Document) -> None:
    at = document["nodes"][0]["steps"][0]["at"]
    document["nodes"][0]["steps"].append({"step": "journalled", "at": later(at, 0.5)})


def _kept_then(document: Document) -> None:
    at = document["decision"]["created_at"]
    document["keeps"] = [{"by": "alice", "granted_at": later(at, -9), "until": later(at, 9)}]


def _held_then(document: Document) -> None:
    at = document["decision"]["created_at"]
    document["held_back"] = [{"reason": "paused", "from": later(at, -9), "until": later(at, 9)}]


def _card_listed(document: Document) -> None:
    document["nodes"][0]["gone"] = False


def _signalled(document: Document) -> None:
    document["job"]["job_id"] = "slurm-ci-7-0"


def _stale(document: Document) -> None:
    document["last_look"]["facts_age"] = 10.5


def _dark(document: Document) -> None:
    document["last_look"] |= {"expected_nodes": 10, "lit_nodes": 8}


def _used(document: Document) -> None:
    document["last_look"]["limits"][0] |= {"used": 1, "allowed": 1}


def _short_grace(document: Document) -> None:
    document["deadlines"]["grace"] -= 1


def _short_wait(document: Document) -> None:
    document["deadlines"]["passed"] -= 60


def _bad_files(document: Document) -> None:
    document["last_look"]["bad_files"] = "rules.yaml:3:1: unknown key"


def _not_yes(document: Document) -> None:
    document["last_look"]["truth"] = "UNKNOWN"


def _old_look(document: Document) -> None:
    document["last_look"]["at"] = later(document["decision"]["created_at"], -60)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_early, {"notice"}),
        (_unproven, {"notice"}),
        (_twice, {"once"}),
        (_acted_before, {"in_order"}),
        (_ladder, {"in_order"}),
        (_kept_then, {"looked_again"}),
        (_held_then, {"nothing_down"}),
        (_card_listed, {"proven"}),
        (_signalled, {"own_tool"}),
        (_stale, {"fresh_facts"}),
        (_dark, {"fresh_facts"}),
        (_used, {"limits"}),
        (_short_grace, {"promises"}),
        (_short_wait, {"promises"}),
        (_bad_files, {"files"}),
        (_not_yes, {"own_word", "looked_again"}),
        (_old_look, {"looked_again"}),
    ],
)
def test_each_invariant_is_seen_to_be_broken(
    reclaimed: Document, change: Callable[[Document], None], names: set[str]
) -> None:
    """By what breaks it, and no other is blamed."""
    document = copy.deepcopy(reclaimed)
    change(document)
    assert broken(document) == names


@pytest.fixture(scope="module")
def reclaimed(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """The audit of a reclaim in which all went well."""
    with world(tmp_path_factory.mktemp("reclaimed")) as made:
        return told(made)


def test_with_a_clock_that_was_set_back_no_order_is_made_up(reclaimed: Document) -> None:
    """Times that do not tell what came first are not held against anybody, nor taken for proof."""
    document = copy.deepcopy(reclaimed)
    document["clock_set_back"] = [{"at": document["decision"]["created_at"], "by": 3600.0}]
    document["deadlines"]["notified_at"] = later(document["decision"]["created_at"], 3000)
    assert broken(document) == set()
    assert {"in_order", "notice", "nothing_down"} <= unknown(document)
