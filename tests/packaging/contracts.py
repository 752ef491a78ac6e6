"""Writes and reads one of everything that programs of two versions hand to each other.

Run by a Python that has some version of gpuwarden: `contracts.py write FOLDER` makes the files as
that version does, `contracts.py read FOLDER` prints as JSON what that version understands of them.
Only what versions have in common is used here; a new contract is added to both halves.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden import agent_api, job_files, node_api
from gpuwarden.catalogue import CATALOGUE, SCRAPE_JOB
from gpuwarden.diagnostics import Severity
from gpuwarden.exporter.agent.handles import Identity
from gpuwarden.exporter.agent.journal import Journal, Record
from gpuwarden.exporter.recollections import Recollection
from gpuwarden.ruleengine.case_records import Case
from gpuwarden.ruleengine.directory_checks import check_directory
from gpuwarden.ruleengine.ledger import Ledger, LedgerUnusable
from gpuwarden.ruleengine.loading import check_rule_files
from gpuwarden.ruleengine.records import Change
from gpuwarden.ruleengine.settings import load_settings
from gpuwarden.trainer.runs import RunRecord
from gpuwarden.trainer.states import Manifest

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = 1_800_000_000.0
BOOT = "01234567-89ab-cdef-0123-456789abcdef"
JOB = "proc-01234567-4242-77"
CASE = {
    "rule_id": "idle-held",
    "job_id": JOB,
    "run_id": "run-1",
    "user": "alice",
    "state": "notified",
    "opened_at": NOW - 900,
    "detected_at": NOW - 600,
}


def _description() -> bytes:
    return job_files.RunDescription(
        run_id="run-1",
        pid=4242,
        pid_ns=4026531836,
        start_ticks=77,
        boot_id=BOOT,
        model="yolov8n",
        batch=16,
        imgsz=640,
        amp=True,
        epochs=3,
        log="/var/log/x",
    ).encode()


def _status() -> bytes:
    return job_files.RunStatus(
        run_id="run-1",
        sequence=5,
        phase="train",
        phase_since=NOW - 10,
        heartbeat=NOW - 1,
        losses={"box": 1.5},
        metrics={"mAP50": 0.5},
        lr={"pg0": 0.01},
    ).encode()


def _order() -> bytes:
    return agent_api.ActionRequest(
        decision_id="d-1",
        epoch=3,
        node="node1",
        boot_id=BOOT,
        job_id=JOB,
        action=agent_api.Action.TERMINATE,
        grace=60.0,
        expires=NOW,
        run_id="run-1",
        reason="idle for 30m",
        seen=(agent_api.ProcessRef(4242, 77),),
        gpus=("GPU-a",),
    ).encode()


def _report() -> agent_api.ActionReport:
    return agent_api.ActionReport(
        decision_id="d-1",
        job_id=JOB,
        action=agent_api.Action.TERMINATE,
        state=agent_api.ActionState.FINISHED,
        outcome=agent_api.Outcome.RECLAIMED,
        reason="",
        message="ended",
        steps={"journalled": NOW, "proven": NOW + 5},
        processes=(agent_api.SignalledProcess(4242, 77, "SIGTERM", 2**30),),
    )


def _registration() -> bytes:
    target = node_api.Target.parse("10.0.0.5:9835")
    key = node_api.node_key(target, "0123456789abcdef0123456789abcdef")
    return node_api.Registration(target, key, BOOT, exporter="0.1.0").encode()


def _manifest() -> bytes:
    return Manifest(
        lineage="0123456789abcdef",
        epoch=1,
        batch=5,
        step=105,
        batches=100,
        epochs=3,
        batch_size=16,
        dataset="d",
        order="stateless-1",
        exact=True,
        reason="periodic",
        time=NOW,
        words={"model": "yolov8n.pt"},
        fitness=0.5,
        sequence=1,
    ).encode()


def _journal(path: Path) -> None:
    journal = Journal(path)
    root = Identity(4242, 77, 1000)
    journal.append(
        "finished",
        Record(
            report=_report(),
            epoch=3,
            boot_id=BOOT,
            run_id="run-1",
            grace=60.0,
            at="step",
            then="hold",
            reason="idle",
            accepted=NOW,
            begun=NOW,
            begun_at=100.0,
            root=root,
            members=(root,),
            terminating=True,
            sigterm_at=101.0,
        ),
        time=NOW,
    )
    journal.alias("d-2", "d-1", time=NOW)
    journal.close()


def _ledger(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.next_epoch()
        case = Case.decode(json.dumps({**_defaults(), **CASE}))
        (stored,) = ledger.save([Change(None, case, "enforce", ())], time=NOW)
        ledger.require(
            stored.id,
            "moderate-notify:enforce",
            (("email", "a@example.org"),),
            channels=("email",),
            time=NOW,
        )


def _defaults() -> dict[str, Any]:
    """What a case must have besides, in the words of the version that writes."""
    found: dict[str, Any] = {}
    for name, item in inspect.signature(Case).parameters.items():
        if item.default is inspect.Parameter.empty:
            kind = str(item.annotation)
            found[name] = 0.0 if "float" in kind else [] if "tuple" in kind else "x"
    return found


def _catalogue() -> bytes:
    told = {
        name: {"type": str(metric.type), "unit": metric.unit, "labels": list(metric.labels)}
        for name, metric in CATALOGUE.items()
    }
    return json.dumps({"job": SCRAPE_JOB, "metrics": told}, indent=0, sort_keys=True).encode()


def write(folder: Path) -> None:
    """One of everything, as this version writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "description.json": _description(),
        "status.json": _status(),
        "leave.json": job_files.LeaveRequest("d-1", NOW, reason="idle").encode(),
        "order.json": _order(),
        "report.json": _report().encode(),
        "node.json": agent_api.NodeInfo("node1", BOOT, ("0123456789abcdef",)).encode(),
        "registration.json": _registration(),
        "state.json": Recollection(BOOT, NOW, {}, {}, (), {}).encode(),
        "manifest.json": _manifest(),
        "catalogue.json": _catalogue(),
    }.items():
        (folder / name).write_bytes(content)
    RunRecord("run-1", "0123456789abcdef", {"model": "a"}, NOW).having_answered("d-1").write(folder)
    _journal(folder / "agent.journal")
    _ledger(folder / "ledger.sqlite")


# ---------------------------------------------------------------------------------------------


def _plain(found: Any) -> Any:
    """As JSON's types."""
    return json.loads(json.dumps(dataclasses.asdict(found), default=str))


def _read_journal(path: Path) -> Any:
    journal = Journal(path)
    try:
        return {
            "epoch": journal.epoch,
            "aliases": journal.aliases,
            "records": {key: _plain(record) for key, record in journal.records.items()},
            "spent": journal.attempt(JOB) is not None,
        }
    finally:
        journal.close()


def _read_ledger(path: Path) -> Any:
    try:
        with Ledger(path) as ledger:
            stored = ledger.open_case("idle-held", JOB)
            case = None if stored is None else json.loads(stored.case.encode())
            kept = None if case is None else {name: case[name] for name in CASE}
            notices = ledger.notices(stored.id) if stored is not None else ()
            return {
                "case": kept,
                "notices": [(item.channel, item.recipient, item.state) for item in notices],
                "epoch": ledger.next_epoch(),
            }
    except LedgerUnusable as error:
        return {"refused": str(error)}


def _read_settings(path: Path) -> Any:
    load_settings(path)
    return "taken"


def _read_rules(path: Path) -> Any:
    checked = check_rule_files([path], now=NOW)
    wrong = [item.message for item in checked.diagnostics if item.severity is Severity.ERROR]
    return {
        "errors": wrong,
        "rules": sorted(rule.id for rule in checked.rules.rules) if checked.rules else None,
    }


def _read_directory(path: Path) -> Any:
    checked = check_directory(path, now=NOW)
    return {"users": sorted(checked.content.users) if checked.content else None}


READERS: dict[str, Callable[[Path], Any]] = {
    "description.json": lambda p: _plain(job_files.RunDescription.decode(p.read_bytes())),
    "status.json": lambda p: _plain(job_files.RunStatus.decode(p.read_bytes())),
    "leave.json": lambda p: _plain(job_files.LeaveRequest.decode(p.read_bytes())),
    "order.json": lambda p: _plain(agent_api.ActionRequest.decode(p.read_bytes())),
    "report.json": lambda p: _plain(agent_api.ActionReport.decode(p.read_bytes())),
    "node.json": lambda p: _plain(agent_api.NodeInfo.decode(p.read_bytes())),
    "registration.json": lambda p: _plain(node_api.Registration.decode(json.loads(p.read_bytes()))),
    "state.json": lambda p: _plain(Recollection.decode(p.read_bytes())),
    "manifest.json": lambda p: _plain(Manifest.decode(p.read_bytes())),
    "run.json": lambda p: _plain(RunRecord.read(p.parent)),
    "catalogue.json": lambda p: json.loads(p.read_bytes()),
    "agent.journal": _read_journal,
    "ledger.sqlite": _read_ledger,
    "rules/defaults.yaml": _read_rules,
    "directory.yaml": _read_directory,
    "engine.yaml": _read_settings,
}


def read(folder: Path) -> dict[str, Any]:
    """What this version understands of each file that is there; why not, where it does not."""
    found = {}
    for name, reader in READERS.items():
        path = folder / name
        if path.exists():
            try:
                found[name] = reader(path)
            except Exception as error:  # noqa: BLE001 (whatever it is, it is what is to be told)
                found[name] = {"failed": f"{type(error).__name__}: {error}"}
    return found


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        sys.stdout.write(json.dumps(read(Path(sys.argv[2])), sort_keys=True))
