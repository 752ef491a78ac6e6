"""What tells that the engine is stuck, blind or unheard: in words, and for its page of metrics.

alerting/rules/health.yml has an alert for each of them, docs/runbooks/ what to do then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.ruleengine.ticks import FAILURES, OUTAGE_TICKS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gpuwarden.metric_families import Row
    from gpuwarden.ruleengine.engine import Engine


def problems(engine: Engine) -> list[str]:
    """Why the engine is not ready, in words; empty if it is."""
    found = [text for text in (engine.superseded, engine.reclaimer.superseded) if text]
    ticks, last = engine.ticks, engine.ticks.last_completed
    age = None if last is None else engine.clock.wall() - last
    if age is None or age > OUTAGE_TICKS * engine.settings.tick + ticks.last_seconds:
        found.append("no tick has been completed lately: is Prometheus up?")
    failures = engine.breaker.failures
    if failures >= FAILURES:
        found.append(f"Prometheus has failed {failures} times in a row: it is asked less often")
    texts = (engine.rulebook.problem, engine.teller.problem, engine.trials.problem)
    return [*found, *(text for text in texts if text)]


def rows(engine: Engine) -> Iterator[tuple[str, Iterable[Row]]]:
    """Names of families and their rows; what is not known has none.

    Args:
        engine: read, never changed.
    """
    yield "gpuwarden_engine_start_timestamp_seconds", [((), engine.started_at)]
    yield "gpuwarden_engine_failed_ticks", [((), float(engine.breaker.failures))]
    replicas = engine.teller.replicas
    yield (
        "gpuwarden_engine_alertmanager_up",
        [((url,), 0.0 if failure else 1.0) for url, failure in replicas.items()],
    )
    yield "gpuwarden_engine_clock_skew_seconds", _skews(engine)
    yield "gpuwarden_engine_notices_undeliverable", [((), float(engine.teller.undeliverable))]
    yield from engine.drills.rows()
    yield (
        "gpuwarden_rule_held_back",
        [((item.rule_id, item.reason), 1.0) for item in engine.trials.held],
    )
    trials = [rule for rule in engine.rulebook.rules.rules if rule.canary is not None]
    yield (
        "gpuwarden_canary_share_ratio",
        [((rule.id,), rule.canary.share) for rule in trials if rule.canary is not None],
    )
    yield (
        "gpuwarden_canary_objections",
        [
            ((rule.id, kind.value), float(count))
            for rule in trials
            for kind, count in engine.trials.counts(rule).items()
        ],
    )
    facts = engine.view.facts
    if facts is not None:
        unproven = engine.unproven_cards(facts)
        yield "gpuwarden_engine_unproven_cards", [((), float(len(unproven)))]
    waiting = engine.ledger.open_decisions()
    yield (
        "gpuwarden_engine_oldest_open_decision_timestamp_seconds",
        [((), waiting[0].created_at)] if waiting else [],
    )
    yield (
        "gpuwarden_verdicts_total",
        [(key, float(count)) for key, count in sorted(engine.ticks.verdicts.items())],
    )


def _skews(engine: Engine) -> Iterator[Row]:
    facts = engine.view.facts
    if facts is not None:
        yield ("fleet",), facts.clock_skew_seconds
    if engine.teller.replicas:
        yield ("alertmanager",), engine.teller.skew
