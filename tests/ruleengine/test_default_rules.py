"""The rules that gpuwarden comes with find their culprits, and nobody else."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ruleengine.fleets import END, GIB, N1, NOW, History
from tests.servers import Server, backfill, prometheus

from gpuwarden import estimate_tables, estimates
from gpuwarden.ruleengine.evaluation import evaluate, subjects
from gpuwarden.ruleengine.facts import gather
from gpuwarden.ruleengine.histories import THROTTLE_REASONS
from gpuwarden.ruleengine.loading import check_rule_files
from gpuwarden.ruleengine.model import Action, Mode, Target
from gpuwarden.ruleengine.needs import condition_keys
from gpuwarden.ruleengine.prometheus import PrometheusClient
from gpuwarden.ruleengine.verdicts import FleetFacts, Truth, Verdict

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from tests.ruleengine.fleets import Curve

    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.ruleengine.prometheus import Sample

ROOT = Path(__file__).parents[2]
SCRAPE = 30
BEGIN = END - 6000
DAY = 86_400
CARD = "NVIDIA A100-SXM4-40GB"

with resources.as_file(resources.files("gpuwarden.ruleengine") / "rules/defaults.yaml") as _file:
    _checked = check_rule_files([_file], scrape_interval=SCRAPE)
    assert _checked.rules is not None
    DEFAULTS, SHIPPED_TESTS = _checked.rules, [placed.test for placed in _checked.tests]
RULES = {rule.id: rule for rule in DEFAULTS.rules}

CULPRITS = {
    "idle-held": {"crashed"},
    "notebook-idle": {"notebook"},
    "memory-hog": {"hog"},
    "utilization-hog": {"busy-slow"},
    "off-profile": {"hog", "busy-slow", "hung", "starved"},
    "pseudo-efficient": {"hung"},
    "data-starved": {"starved", "pressed"},
    "idle-sibling": {"hung", "half"},
    "allocated-unused": {"unused"},
    "zombie": {"crashed", "defunct"},
    "barely-used": {"crashed", "notebook", "defunct", "hung", "half", "unused"},
    "full-and-slow": {"hoarder"},
    "memory-runs-out": {"leaking"},
    "will-not-fit": {"too-large"},
    "loss-broken": {"not-a-number", "diverging"},
    "learning-rate-suspect": {"swinging"},
    "overdue": {"old"},
    "over-budget": {"spender"},
    "throttled-card": {"hot"},
    "orphaned-memory": {"orphan"},
    "hot-card": {"hot"},
}
"""Rule -> the jobs or cards of `_history` that break it; all others do not."""
JOBS = sorted({"healthy", "healthy-pair"}.union(*CULPRITS.values()) - {"hot", "orphan"})


def _expected_rate() -> float:
    found = estimate_tables.expected("yolov8n", 16, imgsz=640, amp=True, hardware=CARD)
    assert isinstance(found, estimates.Expectation)
    return found.throughput.expected


RATE = _expected_rate()


def _growing(per_second: float) -> Curve:
    return lambda time: (time - BEGIN) * per_second


def _swinging(low: float, high: float) -> Curve:
    """Two minutes long, half of it high."""
    return lambda time: high if time % 120 < 60 else low


class _World:
    """A node whose jobs have a card or two each; what is not said is healthy."""

    def __init__(self) -> None:
        self.history = History(start=BEGIN, scrape=SCRAPE)
        self.history.node(N1)
        self._cards = 0

    def card(self, uuid: str, *, temperature: float = 66, orphaned: float = 0) -> None:
        """An A100."""
        add, names = self.history.add, {"gpu": str(self._cards), "uuid": uuid}
        self._cards += 1
        add("gpu_info", 1, **names, name=CARD, pci_bus_id="", driver_version="570", simulated="")
        add("gpu_memory_total_bytes", 40 * GIB, **names)
        add("gpu_temperature_celsius", temperature, **names)
        add("gpu_memory_unattributed_bytes", orphaned, **names)
        for reason in THROTTLE_REASONS:  # all of them, or none: one call of NVML tells them
            active = reason == "sw_power_cap" or (reason == "hw_thermal" and temperature > 80)
            add("gpu_throttle_active", float(active), **names, reason=reason)

    def job(
        self,
        job_id: str,
        *utilization: float | Curve,
        memory: float | Curve = 3.5 * GIB,
        silent: float = 3,
        user: str = "ana",
        interactive: str = "false",
        age: float = 2 * 3600,
        zombies: float = 0,
        io_pressure: float = 0.02,
    ) -> None:
        """A job that its platform gave one card for each utilization."""
        add, names = self.history.add, {"job_id": job_id}
        kind = {"user": user, "source": "process", "framework": "torch"}
        add("gpu_job_info", 1, **names, **kind, interactive=interactive)
        for index, value in enumerate(utilization):
            uuid = f"{job_id}-{index}"
            self.card(uuid)
            held = {**names, "gpu": "0", "uuid": uuid}
            add("gpu_job_holds_gpu", 1, **held)
            add("gpu_job_memory_bytes", memory, **held)
            add("gpu_job_utilization_ratio", value, **held)
            add("gpu_utilization_ratio", value, gpu=str(self._cards - 1), uuid=uuid)
        add("gpu_job_start_time_seconds", END - age, **names)
        add("gpu_job_first_gpu_use_timestamp_seconds", END - age, **names)
        for signal in ("log", "cpu"):
            add("gpu_job_activity_timestamp_seconds", END - silent, **names, signal=signal)
        add("gpu_job_processes", zombies, **names, state="zombie")
        add("gpu_job_io_wait_seconds_total", _growing(0.1), **names)
        for resource, share in (("cpu", 0.1), ("io", io_pressure)):
            stalled = _growing(share)
            add("gpu_job_pressure_seconds_total", stalled, **names, resource=resource)

    def run(
        self,
        job_id: str,
        *,
        rate: float = RATE,
        batch: int = 16,
        wait: float = 0.05,
        loss: float | Curve = lambda time: 3 - (time - BEGIN) / 6000,
        nonfinite: float = 0,
    ) -> None:
        """What its trainer says."""
        add, names = self.history.add, {"job_id": job_id, "run_id": f"run-{job_id}"}
        what = {"model": "yolov8n", "imgsz": "640", "amp": "true", "project": ""}
        add("yolo_info", 1, **names, **what, batch=str(batch))
        add("yolo_phase", 1, **names, phase="train")
        add("yolo_phase_start_timestamp_seconds", BEGIN, **names)
        add("yolo_images_total", _growing(rate), **names)
        add("yolo_steps_total", _growing(rate / 16), **names)
        add("yolo_data_wait_seconds_total", _growing(wait), **names)
        add("yolo_nonfinite_loss_total", _growing(nonfinite), **names)
        for component in ("box", "cls"):
            add("yolo_loss", loss, **names, component=component)


def _history() -> str:
    world = _World()
    world.card("hot", temperature=92)
    world.card("orphan", orphaned=5 * GIB)
    world.job("healthy", 0.93)
    world.run("healthy")
    world.job("healthy-pair", 0.93, 0.9)
    world.job("crashed", 0.0, memory=20 * GIB, silent=3600)
    world.job("notebook", 0.0, interactive="true")
    world.job("defunct", 0.0, zombies=1)
    world.job("hog", 0.6, memory=38 * GIB)
    world.run("hog", rate=20)
    world.job("busy-slow", 0.97)
    world.run("busy-slow", rate=20)
    world.job("hung", 1.0, 0.0)
    world.run("hung", rate=0)
    world.job("starved", 0.3)
    world.run("starved", rate=0.3 * RATE, wait=0.7)
    world.job("pressed", 0.3, io_pressure=0.6)
    world.job("half", 0.9, 0.0)
    world.job("unused", 0.0, memory=0)
    world.job("hoarder", 0.3, memory=38 * GIB)
    world.job("leaking", 0.9, memory=lambda time: (20 + 16 * (time - BEGIN) / 6000) * GIB)
    world.job("too-large", 0.5)
    world.run("too-large", batch=512, rate=0.1)
    world.job("not-a-number", 0.93)
    world.run("not-a-number", nonfinite=0.1)
    world.job("diverging", 0.93)
    world.run("diverging", loss=lambda time: 2.0 if time < END - 1500 else 6.0)
    world.job("swinging", _swinging(0.3, 0.9))
    world.run("swinging", loss=_swinging(1.0, 5.0))
    world.job("old", 0.9, age=8 * DAY)
    world.job("spender", 0.9, user="eve")
    for user, team, hours in (("ana", "vision", 10.0), ("eve", "speech", 1.0)):
        world.history.add("gpuwarden_user_info", 1, user=user, team=team)
        world.history.add("gpuwarden_budget_gpu_hours", hours, team=team, period="week")
        world.history.add("gpuwarden_team_gpu_seconds_total", _growing(1.0), team=team)
    return world.history.text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Prometheus that holds a hundred minutes of them all."""
    storage = tmp_path_factory.mktemp("defaults") / "tsdb"
    backfill(_history(), storage)
    with prometheus("global: {}\n", storage) as running:
        yield running


@pytest.fixture(scope="module")
def fleet(server: Server) -> FleetFacts:
    """What one tick knows of them."""

    async def once() -> FleetFacts:
        async with PrometheusClient(server.url) as client:
            return await gather(client, DEFAULTS, time=NOW, scrape_interval=SCRAPE)

    return asyncio.run(once())


def _truths(rule: Rule, fleet: FleetFacts) -> dict[str, Truth]:
    return {
        name: evaluate(rule, job, fleet, profiles=[], whitelist=[], now=NOW).truth
        for name, job in subjects(rule, fleet).items()
    }


@pytest.mark.parametrize("rule_id", CULPRITS)
def test_a_rule_finds_its_culprits_and_nobody_else(fleet: FleetFacts, rule_id: str) -> None:
    """Asked of a real Prometheus, over every other rule's culprits and healthy jobs."""
    truths = _truths(RULES[rule_id], fleet)
    assert {name for name, truth in truths.items() if truth is Truth.YES} == CULPRITS[rule_id]


@pytest.mark.parametrize("rule_id", CULPRITS)
def test_of_a_healthy_training_every_rule_knows_that_it_is(fleet: FleetFacts, rule_id: str) -> None:
    """NO, not UNKNOWN: no query of a rule comes back empty for want of a series or a label."""
    name = "healthy" if RULES[rule_id].target is Target.JOB else "healthy-0"
    assert _truths(RULES[rule_id], fleet)[name] is Truth.NO


def test_no_expression_of_a_rule_fails(fleet: FleetFacts) -> None:
    """A join that is ambiguous for one job would take the rule from the whole fleet."""
    assert dict(fleet.failed) == {}


def test_every_rule_has_its_culprit_here() -> None:
    """A rule that is added is added to the table above, in the order of the file."""
    assert set(CULPRITS) == set(RULES)
    assert len(RULES) >= 15


def test_every_rule_is_tested_inline_in_both_ways() -> None:
    """Whom it finds and whom it leaves alone stands beside it, for who changes it."""
    expected = [item for test in SHIPPED_TESTS for item in test.expect]
    for verdict in ("yes", "no"):
        assert set(RULES) == {item.rule for item in expected if item.verdict == verdict}


@pytest.mark.parametrize("rule_id", RULES)
def test_no_rule_does_anything_before_an_operator_says_so(rule_id: str) -> None:
    """All only observe, each says in one sentence what it finds, and all log first."""
    rule = RULES[rule_id]
    assert rule.mode is Mode.OBSERVE
    assert rule.description.endswith(".")
    assert rule.stages[0].do is Action.LOG


@pytest.mark.parametrize(
    "rule_id",
    [
        "idle-sibling",
        "pseudo-efficient",
        "data-starved",
        "memory-runs-out",
        "overdue",
        "over-budget",
    ],
)
def test_what_one_card_a_trainer_or_a_guess_says_never_ends_a_job(rule_id: str) -> None:
    """Whatever mode an operator gives it."""
    assert not RULES[rule_id].takes


@pytest.mark.parametrize("rule_id", RULES)
def test_the_page_of_the_default_rules_has_each(rule_id: str) -> None:
    """Nobody has to read YAML to know what is judged."""
    page = (ROOT / "docs/default-rules.md").read_text("utf-8")
    assert f"| `{rule_id}` |" in page


# -- what holds for every rule and every job


@dataclass
class _Recorded:
    """A `Source`: what Prometheus answered, after a change to the rows."""

    answers: dict[str, list[Sample]]
    change: Callable[[list[Sample]], list[Sample]]

    async def clock_skew(self) -> float:
        """None."""
        return 0.0

    async def instant(self, query: str, time: float) -> list[Sample]:
        """The rows that were recorded for the query, which is always asked at the same time."""
        assert time == NOW
        return self.change(list(self.answers[query]))


class _Recording:
    """A `Source` that keeps what another one answers."""

    def __init__(self, source: PrometheusClient) -> None:
        self._source = source
        self.answers: dict[str, list[Sample]] = {}

    async def clock_skew(self) -> float:
        """None: the history lies in the past."""
        return 0.0

    async def instant(self, query: str, time: float) -> list[Sample]:
        """Ask and keep."""
        self.answers[query] = await self._source.instant(query, time)
        return self.answers[query]


@pytest.fixture(scope="module")
def answers(server: Server) -> dict[str, list[Sample]]:
    """Every query of a tick with its rows."""

    async def once() -> dict[str, list[Sample]]:
        async with PrometheusClient(server.url) as client:
            source = _Recording(client)
            await gather(source, DEFAULTS, time=NOW, scrape_interval=SCRAPE)
            return source.answers

    return asyncio.run(once())


@pytest.fixture(scope="module")
def verdicts(answers: dict[str, list[Sample]]) -> dict[tuple[str, str], Verdict]:
    """What the default rules say of everybody."""
    return _verdicts(answers, lambda rows: rows)


def _verdicts(
    answers: dict[str, list[Sample]], change: Callable[[list[Sample]], list[Sample]]
) -> dict[tuple[str, str], Verdict]:
    source = _Recorded(answers, change)
    fleet = asyncio.run(gather(source, DEFAULTS, time=NOW, scrape_interval=SCRAPE))
    return {
        (rule.id, name): evaluate(rule, job, fleet, profiles=[], whitelist=[], now=NOW)
        for rule in DEFAULTS.rules
        for name, job in subjects(rule, fleet).items()
    }


@settings(deadline=None, max_examples=15)
@given(order=st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_no_verdict(
    answers: dict[str, list[Sample]],
    verdicts: dict[tuple[str, str], Verdict],
    order: random.Random,
) -> None:
    """Prometheus promises none."""

    def shuffled(rows: list[Sample]) -> list[Sample]:
        order.shuffle(rows)
        return rows

    assert _verdicts(answers, shuffled) == verdicts


@settings(deadline=None, max_examples=15)
@given(gone=st.sets(st.sampled_from(JOBS)))
def test_other_jobs_change_no_verdict(
    answers: dict[str, list[Sample]],
    verdicts: dict[tuple[str, str], Verdict],
    gone: set[str],
) -> None:
    """Whoever else runs, a job is judged by itself."""

    def without(rows: list[Sample]) -> list[Sample]:
        return [
            row
            for row in rows
            if row.labels.get("job_id") not in gone
            and row.labels.get("uuid", "").rpartition("-")[0] not in gone
        ]

    fewer = _verdicts(answers, without)
    assert fewer == {pair: verdicts[pair] for pair in fewer}
    assert bool(gone) == (len(fewer) < len(verdicts))


@pytest.mark.parametrize("rule_id", CULPRITS)
def test_losing_a_query_turns_no_verdict_around(fleet: FleetFacts, rule_id: str) -> None:
    """Whichever of a rule's queries comes back empty, a verdict is what it was, or UNKNOWN."""
    rule = RULES[rule_id]
    before = _truths(rule, fleet)
    turned = []
    for lost in condition_keys(rule.when):
        for name, job in subjects(rule, fleet).items():
            values = {key: value for key, value in job.values.items() if key != lost}
            less = dataclasses.replace(job, values=values)
            truth = evaluate(rule, less, fleet, profiles=[], whitelist=[], now=NOW).truth
            if truth not in (before[name], Truth.UNKNOWN):
                turned.append((name, lost, before[name], truth))
    assert turned == []


@pytest.mark.parametrize("rule_id", CULPRITS)
def test_a_job_or_card_of_which_nothing_is_known_breaks_no_rule(
    fleet: FleetFacts, rule_id: str
) -> None:
    """The culprits themselves, once nothing is measured of them any more, are UNKNOWN."""
    rule = RULES[rule_id]
    found = {
        evaluate(
            rule,
            dataclasses.replace(job, values={}, activity={}, run=None),
            fleet,
            profiles=[],
            whitelist=[],
            now=NOW,
        ).truth
        for name, job in subjects(rule, fleet).items()
        if name in CULPRITS[rule_id]
    }
    assert found == {Truth.UNKNOWN}
