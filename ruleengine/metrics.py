"""The engine's own page of metrics: names and help from the catalogue, counters from the ledger.

What the ledger counts survives restarts; only ticks and verdicts count from the start.
Counters count what is never taken back: events of the audit, and decisions that have their result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gpuwarden import __version__
from gpuwarden.catalogue import CATALOGUE, Source
from gpuwarden.metric_families import families
from gpuwarden.ruleengine import canaries, deadlines, health, prospects
from gpuwarden.ruleengine.ledger_counters import WAIT_BOUNDS
from gpuwarden.ruleengine.model import Action
from gpuwarden.ruleengine.nodes import NodeState
from gpuwarden.ruleengine.profiles import expectation
from gpuwarden.ruleengine.returns import CAME_BACK
from gpuwarden.ruleengine.slices import slice_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.metrics_core import Metric

    from gpuwarden.metric_families import Row
    from gpuwarden.ruleengine.case_records import Case
    from gpuwarden.ruleengine.engine import Engine

RECEIPT_SECONDS = 86400.0
"""Steps of a decision are shown for a day; the ledger keeps them."""


class EngineCollector(Collector):
    """Families of one engine, made when they are asked for.

    Args:
        engine: read, never changed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield every family of the catalogue that the engine exports."""
        rows = dict(self._rows())
        yield from families(Source.ENGINE, rows)
        yield self._waits()

    def _rows(self) -> Iterator[tuple[str, Iterable[Row]]]:
        engine, ticks = self._engine, self._engine.ticks
        yield "gpuwarden_engine_build_info", [((__version__,), 1.0)]
        yield "gpuwarden_rules_info", [((engine.rulebook.hash,), 1.0)]
        yield "gpuwarden_rules_reload_success", [((), 0.0 if engine.rulebook.problem else 1.0)]
        if ticks.last_completed is not None:
            yield "gpuwarden_engine_tick_timestamp_seconds", [((), ticks.last_completed)]
            yield "gpuwarden_engine_tick_seconds", [((), ticks.last_seconds)]
        outcomes = {"completed": 0, "discarded": 0, "overrun": 0} | ticks.outcomes
        yield (
            "gpuwarden_engine_ticks_total",
            _counted(((outcome,), count) for outcome, count in outcomes.items()),
        )
        yield "gpuwarden_unknown_total", _counted(ticks.unknown.items())
        halted = sorted({block.reason for block in engine.view.halted})
        yield "gpuwarden_engine_enforcement_halted", [((reason,), 1.0) for reason in halted]
        paused = engine.pauses.current() is not None
        yield "gpuwarden_engine_enforcement_paused", [((), float(paused))]
        yield "gpuwarden_engine_nodes", self._nodes()
        yield (
            "gpuwarden_engine_prometheus",
            [(pair, 1.0) for pair in sorted(engine.servers.states().items())],
        )
        yield (
            "gpuwarden_ledger_size_bytes",
            [((part,), float(size)) for part, size in engine.ledger.sizes().items()],
        )
        yield from health.rows(engine)
        yield from self._directory()
        yield from self._cases()
        yield from self._decisions()
        yield from self._expectations()
        yield from self._money()
        yield from self._engine.budgets.rows()

    def _money(self) -> Iterator[tuple[str, Iterable[Row]]]:
        """What a card costs now, and what share of one its instances are."""
        prices, facts = self._engine.settings.prices, self._engine.view.facts
        cards = () if facts is None else facts.cards.values()
        seen = {gpu.name for card in cards for gpu in card.gpus if gpu.name}
        slices = {model: found.share for model in seen if (found := slice_of(model))}
        yield (
            "gpuwarden_gpu_share_ratio",
            [((model,), share) for model, share in sorted(slices.items())],
        )
        yield (
            "gpuwarden_reclaimed_gpu_seconds_total",
            [(tuple(whose), n) for whose, n in self._engine.usage.reclaimed.seconds().items()],
        )
        now = self._engine.clock.wall()
        models = sorted(seen | prices.models) if prices else ()
        rates = {model: prices.rate(model, now) for model in models} if prices else {}
        yield (
            "gpuwarden_price_per_gpu_hour",
            [
                ((model, rate.price.currency), rate.price.amount)
                for model, rate in rates.items()
                if rate is not None
            ],
        )

    def _nodes(self) -> Iterable[Row]:
        facts, nodes = self._engine.view.facts, self._engine.nodes
        if facts is not None:
            yield ("expected",), float(facts.expected_nodes)
            yield ("lit",), float(facts.lit_nodes)
        if nodes is not None:
            states = [nodes.state(node) for node in nodes.present()]
            for state in (NodeState.REGISTERED, NodeState.SILENT):
                yield (state.value,), float(states.count(state))

    def _directory(self) -> Iterator[tuple[str, Iterable[Row]]]:
        directory = self._engine.rulebook.directory
        users = directory.users
        yield "gpuwarden_user_info", [((name, user.team), 1.0) for name, user in users.items()]
        budgets = [(name, each) for name, team in directory.teams.items() for each in team.budget]
        yield (
            "gpuwarden_budget_gpu_hours",
            [((name, each.period), each.gpu_hours) for name, each in budgets],
        )
        teams = {user.team for user in users.values()} | directory.teams.keys()
        used = self._engine.usage.seconds(teams)
        yield (
            "gpuwarden_team_gpu_seconds_total",
            _counted(((team,), seconds) for team, seconds in used.items()),
        )

    def _cases(self) -> Iterator[tuple[str, Iterable[Row]]]:
        found = [s.case for s in self._engine.cases.all() if s.case.detected_at is not None]
        yield (
            "gpuwarden_violation_active",
            [((case.rule_id, case.level, case.job_id), 1.0) for case in found],
        )
        yield (
            "gpuwarden_violation_cause",
            [((case.rule_id, case.job_id, case.cause), 1.0) for case in found if case.cause],
        )
        yield (
            "gpuwarden_violation_detected_timestamp_seconds",
            [((case.rule_id, case.job_id), case.detected_at or 0.0) for case in found],
        )
        yield "gpuwarden_violation_due_timestamp_seconds", self._dues(found)
        yield "gpuwarden_protected", [(key, 1.0) for key in sorted(self._protected())]

    def _dues(self, found: Iterable[Case]) -> Iterable[Row]:
        """The soonest thing that each case leads to, by clocks that stand as of the last tick."""
        tick = self._engine.ticks.last_completed
        for case in found:
            rule = self._engine.rulebook.rule(case.rule_id)
            if tick is None or rule is None:
                continue
            for _key, stage, wait in deadlines.upcoming(case, rule, now=tick)[:1]:
                yield (case.rule_id, case.job_id, stage.do.value), tick + wait

    def _protected(self) -> set[tuple[str, str, str]]:
        engine = self._engine
        found = {(rule, job, "whitelist") for rule, job in engine.view.protected}
        for (rule, job), blocks in engine.view.blocks.items():
            found |= {(rule, job, block.reason) for block in blocks}
        now = engine.clock.wall()
        for stored in engine.cases.all():
            until = engine.kept_until(stored.case)
            if until is not None and until > now:
                found.add((stored.case.rule_id, stored.case.job_id, "kept"))
        return found

    def _decisions(self) -> Iterator[tuple[str, Iterable[Row]]]:
        ledger, drills = self._engine.ledger, self._engine.drills.rule_id
        ends = ledger.result_counts()
        rules = self._engine.rulebook.rules.rules
        counts = (
            dict.fromkeys(prospects.decisions(rules), 0)
            | {(rule, action, "enforce", state): n for (rule, action, state), n in ends.items()}
            | {
                (rule, action, mode, outcome): n
                for (rule, action, mode, outcome), n in ledger.stage_counts().items()
            }
        )
        yield "gpuwarden_decisions_total", _counted(counts.items())
        yield "gpuwarden_notices_total", _counted(ledger.notice_attempts().items())
        # A drill frees nothing that anybody waited for.
        freed = sum(
            n
            for (rule, do, word), n in ends.items()
            if word == "verified" and Action(do).takes and rule != drills
        )
        failed = sum(
            n
            for (rule, do, word), n in ends.items()
            if word in ("incomplete", "failed") and Action(do).ends and rule != drills
        )
        keeps = {(rule.id, role): 0 for rule in rules for role in ("owner", "operator")}
        yield "gpuwarden_keeps_total", _counted((keeps | ledger.keep_counts()).items())
        objections = {(rule.id, kind.value): 0 for rule in rules for kind in canaries.Objection}
        objections |= ledger.objection_counts()
        yield "gpuwarden_objections_total", _counted(objections.items())
        back = {rule.id: 0 for rule in rules} | ledger.events_by_rule(CAME_BACK)
        yield "gpuwarden_jobs_came_back_total", [((rule,), float(n)) for rule, n in back.items()]
        idle = ledger.count_events("idle_detected", but=drills)
        yield "gpu_idle_detected_total", [((), float(idle))]
        yield "gpu_released_success_total", [((), float(freed))]
        yield "gpu_release_failed_total", [((), float(failed))]
        yield "gpu_memory_freed_bytes_total", [((), float(ledger.freed_bytes(but=drills)))]
        steps: dict[tuple[str, ...], float] = {}
        for decision in ledger.recent_decisions(self._engine.clock.wall() - RECEIPT_SECONDS):
            report = decision.decoded_report
            for step, moment in {} if report is None else report.steps.items():
                steps[decision.job_id, step] = moment
        yield from self._leaves(steps)

    def _leaves(self, steps: dict[tuple[str, ...], float]) -> Iterator[tuple[str, Iterable[Row]]]:
        """What a scheduler has asked for, its receipts beside those of rules' decisions."""
        desk = self._engine.leaves
        for leave in desk.store.since(self._engine.clock.wall() - RECEIPT_SECONDS):
            for step, moment in desk.steps(leave).items():
                steps[leave.job_id, step] = moment
        yield "gpuwarden_receipt_timestamp_seconds", list(steps.items())
        yield "gpuwarden_leaves_total", _counted(desk.store.counts().items())
        refusals = (((reason,), count) for reason, count in desk.refusals.items())
        yield "gpuwarden_leave_refusals_total", _counted(refusals)
        yield "gpuwarden_leaves_open", [((), float(len(desk.store.open())))]

    def _waits(self) -> HistogramMetricFamily:
        metric = CATALOGUE["gpuwarden_decision_wait_seconds"]
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        waits: dict[tuple[str, str], dict[int, tuple[int, float]]] = {
            key: {} for key in prospects.acts(self._engine.rulebook.rules.rules)
        }
        for labels, counts in sorted((waits | self._engine.ledger.decision_waits()).items()):
            below, buckets = 0, []
            for bound in WAIT_BOUNDS:
                below += counts.get(bound, (0, 0.0))[0]
                buckets.append((str(float(bound)), float(below)))
            buckets.append(("+Inf", float(below + counts.get(0, (0, 0.0))[0])))
            total = sum(seconds for _count, seconds in counts.values())
            family.add_metric(labels, buckets=buckets, sum_value=total)
        return family

    def _expectations(self) -> Iterator[tuple[str, Iterable[Row]]]:
        facts = self._engine.view.facts
        names = {
            "throughput": "gpuwarden_expected_throughput_images_per_second",
            "gpu_memory": "gpuwarden_expected_gpu_memory_bytes",
            "gpu_utilization": "gpuwarden_expected_gpu_utilization_ratio",
        }
        found: dict[str, list[Row]] = {name: [] for name in names.values()}
        for job in () if facts is None else facts.jobs.values():
            known = expectation(job, self._engine.rulebook.rules.profiles)
            for signal, expected in known.values.items():
                found[names[signal]].append(((job.job_id,), expected.value))
        yield from found.items()


def _counted(counts: Iterable[tuple[tuple[str, ...], float]]) -> list[Row]:
    return [(labels, float(count)) for labels, count in sorted(counts)]


def render(collector: EngineCollector, accept: str) -> tuple[bytes, str]:
    """The page in the format that a scraper asks for, with its content type."""
    registry = CollectorRegistry()
    registry.register(collector)
    encode, content_type = choose_encoder(accept)
    body: bytes = encode(registry)
    return body, content_type
