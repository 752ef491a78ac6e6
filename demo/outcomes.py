"""What became of the five jobs, read back from Prometheus and the ledger, and held to account.

Each check returns what is wrong in words; the demo exits 0 only if nothing is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo.jobs import IMAGES
from gpuwarden import job_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from demo.jobs import Job
    from demo.stack import Stack
    from demo.story import Record

COUNTERS = (
    "gpu_idle_detected_total",
    "gpu_released_success_total",
    "gpu_release_failed_total",
    "gpu_memory_freed_bytes_total",
)
ENDED = ("log", "notify", "notified", "due", "authorised", "acting", "verified")


@dataclass(slots=True)
class Outcome:
    """One job: what the engine concluded and did.

    Attributes:
        job: its name.
        owner: user, as Prometheus has it.
        verdict: rules that found a violation, or `fits`, or `protected`.
        cause: as the ledger has it.
        began: Unix time of the first violation, or None.
        steps: (event, seconds since the first violation), in order.
        freed: bytes freed as NVML showed it.
        wrong: what should be otherwise; empty if all is well.
    """

    job: str
    owner: str = ""
    verdict: str = ""
    cause: str = ""
    began: float | None = None
    steps: list[tuple[str, float]] = field(default_factory=list)
    freed: int = 0
    wrong: list[str] = field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note what is wrong if something does not hold."""
        if not holds:
            self.wrong.append(otherwise)


class ReadBack:
    """Reads Prometheus and the ledger for one run of the demo."""

    def __init__(self, stack: Stack, record: Record) -> None:
        self._stack = stack
        self._record = record
        with stack.open_ledger() as ledger:
            self._events = [dict(row) for row in ledger.execute("SELECT * FROM events ORDER BY id")]
            self._cases = [dict(row) for row in ledger.execute("SELECT * FROM cases ORDER BY id")]
            self._decisions = [dict(row) for row in ledger.execute("SELECT * FROM decisions")]
            self._notices = [dict(row) for row in ledger.execute("SELECT * FROM notices")]

    def outcomes(self) -> list[Outcome]:
        """One outcome a job, in the order of the demo's description."""
        checks: dict[str, Callable[[Outcome, Job], None]] = {
            "fitting": self._fitting,
            "hog": self._hog,
            "notebook": self._notebook,
            "starved": self._starved,
            "tensorboard": self._tensorboard,
        }
        results = []
        for name, check in checks.items():
            job = self._record.jobs[name]
            outcome = self._common(job)
            check(outcome, job)
            results.append(outcome)
        return results

    def counters(self) -> dict[str, float | None]:
        """The four counters that the customer named, as Prometheus has them."""
        return {name: self._stack.value(f"sum({name})") for name in COUNTERS}

    # -- each job --------------------------------------------------------------------------

    def _fitting(self, outcome: Outcome, job: Job) -> None:
        outcome.verdict = outcome.verdict or "fits its profile"
        outcome.expect(job.status == job_files.EXIT_DONE, f"ended with status {job.status}")
        outcome.expect(not self._of(self._events, job.job_id), "the ledger has events about it")
        found = self._ever("gpuwarden_violation_active", job.job_id)
        outcome.expect(not found, "Prometheus has a violation of it")
        expected = self._ever("gpuwarden_expected_throughput_images_per_second", job.job_id)
        outcome.expect(bool(expected), "Prometheus has no expectation for it")
        images = self._ever("yolo_images_total", job.job_id)
        planned = 5 * IMAGES
        outcome.expect(
            bool(images) and max(images) >= 0.8 * planned,
            f"Prometheus saw {images} of {planned} images",
        )

    def _hog(self, outcome: Outcome, job: Job) -> None:
        first = job.earlier[0] if job.earlier else job.job_id
        report = self._ended_by_rule(outcome, first, "memory-hog", "hyperparameters")
        ended = {item["ended_by"] for item in report.get("processes", [])}
        outcome.expect(ended == {"SIGTERM"}, f"its processes ended by {sorted(map(str, ended))}")
        left, last = self._record.hog_left_at, self._record.hog_ended
        if left is None or left.exit is None or left.checkpoint is None:
            outcome.wrong.append("it left no state")
            return
        held = left.exit.code == job_files.EXIT_HOLD
        outcome.expect(held, f"it left with status {left.exit.code}, not 76")
        saved = left.checkpoint.step == left.step and left.checkpoint.durable is not None
        outcome.expect(saved, f"it saved step {left.checkpoint.step} of {left.step}")
        if last is None or last.exit is None:
            outcome.wrong.append("it was not resumed to its end")
            return
        outcome.expect(last.exit.code == job_files.EXIT_DONE, f"resumed: status {last.exit.code}")
        outcome.expect(
            left.step > 0 and last.counters.steps == last.step - left.step,
            f"resumed: {last.counters.steps} new steps from {left.step} to {last.step}",
        )
        outcome.expect(last.resume_mode == "exact", f"resumed in mode {last.resume_mode}")

    def _notebook(self, outcome: Outcome, job: Job) -> None:
        report = self._ended_by_rule(outcome, job.job_id, "idle-held", "idle")
        ended = {item["ended_by"] for item in report.get("processes", [])}
        outcome.expect(ended == {"SIGKILL"}, f"its processes ended by {sorted(map(str, ended))}")
        tree = self._record.notebook_tree
        outcome.expect(len(tree) == 3, f"its tree had {len(tree)} processes")
        outcome.expect({p["pid"] for p in report.get("processes", [])} >= tree, "some were missed")
        alive = [pid for pid in tree if Path(f"/proc/{pid}").exists()]
        outcome.expect(not alive, f"survivors: {alive}")
        proof = report.get("proof") or {}
        before = sum(proof.get("device_used_before", {}).values())
        after = sum(proof.get("device_used_after", {}).values())
        outcome.expect(
            after >= before > 0, "the successor should have taken the memory over by then"
        )
        outcome.expect(not self._record.jobs["waiting"].ended, "the successor was ended too")

    def _starved(self, outcome: Outcome, job: Job) -> None:
        outcome.expect(not job.ended, f"it ended with status {job.status}")
        outcome.expect(not self._of(self._decisions, job.job_id), "a decision was taken on it")
        outcome.expect(
            self._kinds(job.job_id, "starved")[:3] == ["detected", "log", "notify"]
            and "notified" in self._kinds(job.job_id, "starved"),
            f"its events are {self._kinds(job.job_id, 'starved')}",
        )
        outcome.expect(outcome.cause == "data-loading", f"its cause is {outcome.cause!r}")
        self._expect_notice(outcome, job.job_id, "starved")
        causes = self._labels("gpuwarden_violation_cause", job.job_id, "cause")
        outcome.expect("data-loading" in causes, f"Prometheus has the causes {sorted(causes)}")

    def _tensorboard(self, outcome: Outcome, job: Job) -> None:
        outcome.expect(not job.ended, f"it ended with status {job.status}")
        outcome.expect(not self._of(self._decisions, job.job_id), "a decision was taken on it")
        outcome.expect(not self._of(self._cases, job.job_id), "a case was opened on it")
        protected = self._labels("gpuwarden_protected", job.job_id, "reason")
        outcome.expect("whitelist" in protected, f"Prometheus has the reasons {sorted(protected)}")
        about = self._stack.servers["engine"].json(f"/v1/jobs/{job.job_id}")
        reasons = {item["protected"] for item in about["rules"] if item["protected"]}
        outcome.verdict = ", ".join(sorted(reasons))
        named = any("shared TensorBoard" in reason for reason in reasons)
        outcome.expect(named, f"the engine says {sorted(reasons)}")

    # -- what several share ----------------------------------------------------------------

    def _common(self, job: Job) -> Outcome:
        outcome = Outcome(job.name)
        ids = (*job.earlier, job.job_id)
        for job_id in ids:
            outcome.owner = next(iter(self._labels("gpu_job_info", job_id, "user")), outcome.owner)
        cases = [case for job_id in ids for case in self._of(self._cases, job_id)]
        bodies = [json.loads(case["body"]) for case in cases]
        seen = [body for body in bodies if body["detected_at"] is not None]
        outcome.verdict = ", ".join(dict.fromkeys(body["rule_id"] for body in seen))
        causes = [body["cause"] for body in seen if body["rule_id"] != "off-profile"]
        outcome.cause = ", ".join(dict.fromkeys(cause for cause in causes if cause))
        for case in cases:
            if case["rule_id"] == "off-profile":
                continue
            if case["rule_id"] in [body["rule_id"] for body in seen]:
                outcome.began = case["opened_at"]
            outcome.steps += [
                (event["kind"], event["time"] - case["opened_at"])
                for event in self._events
                if event["case_id"] == case["id"]
            ]
        return outcome

    def _ended_by_rule(
        self, outcome: Outcome, job_id: str, rule: str, cause: str
    ) -> dict[str, Any]:
        kinds = [kind for kind in self._kinds(job_id, rule) if kind in ENDED]
        outcome.expect(kinds == list(ENDED), f"its events are {kinds}")
        outcome.expect(outcome.cause == cause, f"its cause is {outcome.cause!r}")
        self._expect_notice(outcome, job_id, rule)
        decisions = self._of(self._decisions, job_id)
        outcome.expect(len(decisions) == 1, f"{len(decisions)} decisions were taken")
        if not decisions or not decisions[0]["report"]:
            outcome.wrong.append("there is no report of an act")
            return {}
        report: dict[str, Any] = json.loads(decisions[0]["report"])
        outcome.expect(report["outcome"] == "reclaimed", f"the agent says {report['outcome']}")
        proof = report.get("proof") or {}
        outcome.freed = proof.get("memory_freed", 0)
        outcome.expect(bool(proof.get("gone")), "NVML still lists it")
        outcome.expect(outcome.freed > 0, "no memory was freed")
        return report

    def _expect_notice(self, outcome: Outcome, job_id: str, rule: str) -> None:
        mine = {c["id"] for c in self._of(self._cases, job_id) if c["rule_id"] == rule}
        proofs = {
            item["channel"]: item["proof"]
            for item in self._notices
            if item["case_id"] in mine and item["state"] == "proven"
        }
        outcome.expect(set(proofs) == {"email", "slack"}, f"notices proven: {sorted(proofs)}")

    def _kinds(self, job_id: str, rule: str) -> list[str]:
        events = self._of(self._events, job_id)
        return [event["kind"] for event in events if event["rule_id"] == rule]

    def _of(self, rows: list[dict[str, Any]], job_id: str) -> list[dict[str, Any]]:
        return [row for row in rows if row["job_id"] == job_id]

    def _ever(self, metric: str, job_id: str) -> list[float]:
        result = self._stack.prometheus(f'max_over_time({metric}{{job_id="{job_id}"}}[10m])')
        return [float(item["value"][1]) for item in result]

    def _labels(self, metric: str, job_id: str, label: str) -> set[str]:
        result = self._stack.prometheus(f'last_over_time({metric}{{job_id="{job_id}"}}[10m])')
        return {item["metric"].get(label, "") for item in result}
