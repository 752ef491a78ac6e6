"""Probable causes and remedies in the words of a language, from the figures that speak for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.quantities import Unit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.ruleengine.texts.phrases import Phrases
    from gpuwarden.ruleengine.texts.speeches import Speech

Figures = tuple[tuple[str, float | str], ...]
"""What a cause rests on: name -> value in base units, or words that are no sentence."""


def name(cause: str, speech: Speech) -> str:
    """What a cause is called; one that is not known keeps its name."""
    return speech.phrases.cause_names.get(cause, cause)


def because(cause: str, figures: Figures, speech: Speech) -> str:
    """The evidence for a cause in one sentence, or an empty string where there is none to tell."""
    known, phrases = dict(figures), speech.phrases
    template = _template(cause, known, phrases)
    if not template:
        return ""
    if "throughput" in known:
        expected = "expected_throughput" in known
        template += phrases.cause_throughput_expected if expected else phrases.cause_throughput
    if "cores" in known:
        template += phrases.cause_cores

    def amount(name: str, unit: Unit) -> str:
        value = known.get(name, 0.0)
        return value if isinstance(value, str) else speech.amount(value, unit)

    return speech.say(
        template,
        basis=known.get("basis", ""),
        blocked=amount("blocked", Unit.COUNT),
        cores=amount("cores", Unit.CORES),
        expected=_expected(known, "expected_throughput", Unit.IMAGES_PER_SECOND, speech),
        expected_memory=_expected(known, "expected_memory", Unit.BYTES, speech),
        memory=amount("memory", Unit.BYTES),
        reasons=known.get("reasons", ""),
        throughput=amount("throughput", Unit.IMAGES_PER_SECOND),
        utilization=amount("utilization", Unit.RATIO),
        wait=amount("wait", Unit.RATIO),
        workers=amount("workers", Unit.COUNT),
    )


def _template(cause: str, known: Mapping[str, float | str], phrases: Phrases) -> str:
    """What is said of a cause, by what is known; empty for one that is not known."""
    workers = "workers" in known
    wait = phrases.cause_wait_workers if workers else phrases.cause_wait
    blocked = phrases.cause_blocked_workers if workers else phrases.cause_blocked
    return {
        "hyperparameters": phrases.cause_memory,
        "data-loading": wait if "wait" in known else blocked,
        "idle": phrases.cause_idle_memory if "memory" in known else phrases.cause_idle,
        "hardware": phrases.cause_throttled,
        "model": phrases.cause_busy,
    }.get(cause, "")


def _expected(known: Mapping[str, float | str], name: str, unit: Unit, speech: Speech) -> str:
    """An expectation; of an estimate, its band."""
    value, high = known.get(name, 0.0), known.get(f"{name}_high")
    if isinstance(value, str) or isinstance(high, str):
        return str(value)
    if high is None:
        return speech.amount(value, unit)
    low, top = speech.amount(value, unit), speech.amount(high, unit)
    return speech.say(speech.phrases.estimated_band, low=low, high=top)


def remedy(cause: str, figures: Figures, speech: Speech) -> str:
    """What the owner could do, with what is set now; an empty string where nobody knows."""
    known, phrases = dict(figures), speech.phrases
    workers, loading = known.get("workers"), phrases.remedy_wait
    if isinstance(workers, float | int):
        loading = phrases.remedy_wait_workers if workers >= 1 else phrases.remedy_wait_no_workers
    template = {
        "hyperparameters": phrases.remedy_memory,
        "data-loading": loading,
        "idle": phrases.remedy_idle,
        "hardware": phrases.remedy_throttled,
        "model": phrases.remedy_busy,
    }.get(cause, "")
    whole = {name: _whole(known.get(name)) for name in ("workers", "batch", "imgsz")}
    return speech.say(template, **whole)


def _whole(value: float | str | None) -> str:
    return f"{value:.0f}" if isinstance(value, float | int) else str(value)
