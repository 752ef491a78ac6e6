"""Running inline tests, each on a Prometheus of its own, and what is told of them."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from gpuwarden import durations
from gpuwarden.errors import InvalidInput
from gpuwarden.ruleengine.histories import history
from gpuwarden.ruleengine.prometheus import QueryRefused
from gpuwarden.ruleengine.range_sources import RangeSource
from gpuwarden.ruleengine.rehearsals import rehearse, tick_times
from gpuwarden.ruleengine.temporary_servers import temporary_prometheus

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuwarden.ruleengine.loading import PlacedTest
    from gpuwarden.ruleengine.model import RuleSet
    from gpuwarden.ruleengine.rehearsals import Mismatch

SCHEMA = "gpuwarden.rule-tests/v1"
FUTURE_SECONDS = 540.0
"""Prometheus refuses samples that are more than ten minutes ahead of its clock."""


@dataclass(frozen=True, slots=True)
class RehearsalResult:
    """How one test went; `seconds` is what it took."""

    placed: PlacedTest
    mismatches: tuple[Mismatch, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every expectation was met."""
        return not self.mismatches


def chosen(tests: Sequence[PlacedTest], wanted: Sequence[str]) -> list[PlacedTest]:
    """The tests of these names or about rules of these ids; all of them if nothing is wanted."""
    if not wanted:
        return list(tests)
    return [
        item for item in tests if item.test.name in wanted or item.test.rules & frozenset(wanted)
    ]


async def run_until_told(placed: PlacedTest, rules: RuleSet) -> RehearsalResult:
    """Like `run_test`, in the main thread; SIGTERM ends it, and its Prometheus with it.

    Raises:
        CancelledError: on SIGTERM.
    """
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run_test(placed, rules)


async def run_test(placed: PlacedTest, rules: RuleSet) -> RehearsalResult:
    """Run one test.

    Raises:
        InvalidInput: the history ends in the future, of which Prometheus takes nothing.
        ServiceUnavailable: Prometheus is not installed, or fails.
        QueryRefused: a query of our own is refused, say because its series are ambiguous.
    """
    begun = time.monotonic()
    test = placed.test
    if test.start.timestamp() + test.length > time.time() + FUTURE_SECONDS:
        raise InvalidInput(
            f"{placed.span}: {test.name}: ends in the future, of which Prometheus takes no "
            "samples: give it an earlier start"
        )
    async with (
        temporary_prometheus(history(test)) as url,
        httpx.AsyncClient(timeout=60.0, trust_env=False) as client,
    ):
        source = RangeSource(url, client, times=tick_times(test))
        try:
            found = await rehearse(test, rules, source)
        except QueryRefused as error:
            raise QueryRefused(f"{placed.span}: {test.name}: {error}") from error
    return RehearsalResult(placed, tuple(found), time.monotonic() - begun)


def result_lines(result: RehearsalResult) -> list[str]:
    """What is told of one test, for people."""
    test = result.placed.test
    word = "ok  " if result.passed else "FAIL"
    lines = [f"{word}  {test.name} ({result.seconds:.1f} s)"]
    for item in result.mismatches:
        expected = test.expect[item.index]
        place = result.placed.expected_at[item.index]
        lines.append(
            f"      {place}: {durations.render(expected.at)} in, {expected.rule} about "
            f"{expected.subject}: {item.field} is {item.actual}, not {item.expected}"
        )
        lines += [f"        {line}" for line in _found(item)]
    return lines


def _found(item: Mismatch) -> list[str]:
    """What the mismatch rests on: verdict, evidence, and what holds the job."""
    moment = item.moment
    known = moment.verdict in ("yes", "none") or not moment.reasons
    why = "" if known else f" ({', '.join(moment.reasons)})"
    ended = ", ended" if moment.terminated else ""
    if not moment.terminated and moment.act != "none":
        ended = f", {moment.act} done"
    lines = [f"verdict {moment.verdict}{why}, stage {moment.stage}{ended}"]
    for part in moment.evidence:
        about = "; ".join(text for text in (part.measured, part.expected, part.reason) if text)
        lines.append(f"{part.truth.word:7} {part.condition}" + (f": {about}" if about else ""))
    lines += [f"held by {block.reason}: {block.sentence}" for block in moment.blocks]
    return lines


def summary_line(results: Sequence[RehearsalResult]) -> str:
    """The last line, for people."""
    failed = sum(1 for result in results if not result.passed)
    word = "test" if len(results) == 1 else "tests"
    return f"{len(results)} {word}: {len(results) - failed} passed, {failed} failed"


def results_json(results: Iterable[RehearsalResult]) -> str:
    """One versioned JSON document, for CI."""
    return json.dumps({"schema": SCHEMA, "tests": [_document(item) for item in results]}, indent=2)


def _document(result: RehearsalResult) -> dict[str, Any]:
    span = result.placed.span
    return {
        "name": result.placed.test.name,
        "file": span.file,
        "line": span.line,
        "passed": result.passed,
        "seconds": round(result.seconds, 3),
        "mismatches": [
            {
                "line": result.placed.expected_at[item.index].line,
                "at": result.placed.test.expect[item.index].at,
                "rule": result.placed.test.expect[item.index].rule,
                "subject": result.placed.test.expect[item.index].subject,
                "field": item.field,
                "expected": item.expected,
                "actual": item.actual,
                "verdict": item.moment.verdict,
                "reasons": list(item.moment.reasons),
                "stage": item.moment.stage,
                "terminated": item.moment.terminated,
                "act": item.moment.act,
                "held_by": [block.reason for block in item.moment.blocks],
                "evidence": [
                    {
                        "condition": part.condition,
                        "truth": part.truth.word,
                        "measured": part.measured,
                        "expected": part.expected,
                        "reason": part.reason,
                    }
                    for part in item.moment.evidence
                ],
            }
            for item in result.mismatches
        ],
    }
