"""Gathering: what one tick knows of the fleet, from queries that all carry the same time.

One query for each distinct signal, window and aggregate, whatever the number of cards and rules,
and a fixed number of inventory queries. Nothing is decided here; what is missing stays missing.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import GpuwardenError, TemporaryError
from gpuwarden.ruleengine import card_expressions, signals
from gpuwarden.ruleengine.assemblies import Assembly
from gpuwarden.ruleengine.inventories import (
    LABELS,
    OF_SOME,
    OF_VALUES,
    PHASE,
    THROTTLE,
    Expectation,
    activity_queries,
    current_queries,
    phase_queries,
    remembered_queries,
    saves_queries,
    silent_query,
    throttle_query,
    training_query,
)
from gpuwarden.ruleengine.job_expressions import MAX_QUERY_BYTES, of_jobs, separable
from gpuwarden.ruleengine.needs import ACTIVITY, SAVES, needed_keys
from gpuwarden.ruleengine.prometheus import QueryRefused, table, tabulated
from gpuwarden.ruleengine.rounds import MAX_SHARE, everything

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from gpuwarden.ruleengine.held_sets import HeldSets
    from gpuwarden.ruleengine.model import RuleSet
    from gpuwarden.ruleengine.prometheus import Sample, Source, Table
    from gpuwarden.ruleengine.rounds import Rounds
    from gpuwarden.ruleengine.verdicts import FleetFacts, SignalKey

_ROWS: Final[Mapping[SignalKey, Callable[[float, Sequence[str] | None], dict[str, str]]]] = {
    ACTIVITY: activity_queries,
    SAVES: saves_queries,
}
"""Rows of the inventory that are asked as values are, of the jobs that they can concern."""
_METRIC_BYTES = 200
"""Of a query of rows, beside the names of jobs; and more than that."""
PARALLEL_QUERIES = 8
_NODE = ("instance",)

MAX_NAMES_BYTES = 3000
"""Of jobs or cards that one selector names, where a query has up to five."""


async def gather(
    source: Source,
    rules: RuleSet,
    *,
    time: float,
    scrape_interval: float,
    expected_nodes: Expectation | int | None = None,
    teams: Mapping[str, str] | None = None,
    rounds: Rounds | None = None,
    held: HeldSets | None = None,
) -> FleetFacts:
    """Gather the facts of one tick.

    Args:
        source: Prometheus, or a replay of it.
        rules: what will be judged.
        time: Unix time of every query.
        scrape_interval: of the nodes, in seconds.
        expected_nodes: which nodes should be lit, or how many; counted from `up` where not given.
        teams: user -> team, of the operator's directory.
        rounds: decide what is asked only of jobs in question; None: everything is asked of all.
        held: knows what jobs hold on nodes that have been dark for longer than `HELD_FOR`.

    Returns:
        The facts; a custom expression that fails, and a value of which the server refuses the
        query, are named in `failed`, and absent.

    Raises:
        ServiceUnavailable: the tick knows too little to judge anything; nothing should change.
        LedgerUnusable: what `held` should remember cannot be written down.
        QueryRefused: what the fleet consists of cannot be asked, say because a store is away.
    """
    if not isinstance(expected_nodes, Expectation):
        expected_nodes = Expectation(number=expected_nodes)
    assembly = Assembly(
        time=time, expected=expected_nodes, teams=teams or {}, scrape_interval=scrape_interval
    )
    asking = _Asking(source, time, assembly, scrape_interval=scrape_interval)
    try:
        skew = await asking.fleet(expected_nodes, narrow=rounds is not None)
        if held is not None:
            assembly.take_held(held)
        assembly.lay_out(sorted(needed_keys(rules)))
        questions = (
            everything(rules)
            if rounds is None
            else rounds.questions(rules, jobs=assembly.jobs, now=time)
        )
        await asking.answers(dict.fromkeys(questions.early))
        if rounds is not None:
            await asking.throttling()
        assembly.take_activity()
        facts = assembly.facts(skew)
        if rounds is not None and questions.keys != questions.early:
            chosen = rounds.in_question(questions, rules, facts)
            await asking.answers(chosen)
            assembly.take_activity()
            assembly.forget_claims()
            narrowed = {key: jobs for key, jobs in chosen.items() if jobs is not None}
            facts = replace(facts, narrowed=MappingProxyType(narrowed))
        facts = assembly.with_saves(facts)
    except BaseExceptionGroup as errors:
        raise _our_own(errors) from errors
    return facts


def _our_own(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Callers know our tree, not groups: one server fails for one reason, many times over.

    No frame that the error passes may name it: it would hold on to a tick's whole assembly.
    """
    ours = errors.subgroup(GpuwardenError)
    return errors if ours is None else ours.exceptions[0]


async def silent_nodes(source: Source, *, time: float, scrape_interval: float) -> list[str]:
    """The nodes that spoke within `HELD_FOR` and say nothing now.

    Args:
        source: Prometheus.
        time: Unix time.
        scrape_interval: of the nodes, in seconds.

    Raises:
        ServiceUnavailable: not known.
    """
    rows = await table(source, silent_query(scrape_interval), time, _NODE)
    return [node for _, (node,) in rows]


class _Asking:
    """Asks a few queries at a time, and hands each answer on before it asks for more."""

    def __init__(
        self, source: Source, time: float, assembly: Assembly, *, scrape_interval: float
    ) -> None:
        self._source, self._time, self._assembly = source, time, assembly
        self._scrape_interval = scrape_interval
        self._gate = asyncio.Semaphore(PARALLEL_QUERIES)

    async def fleet(self, expected: Expectation, *, narrow: bool) -> float:
        """Ask what the fleet consists of; the skew of the server's clock, in seconds.

        Of the phases of runs most is that they train: where `narrow`, only of those that do not
        the others are asked, and what slows cards down is left to `throttling`.
        """
        source, interval, assembly = self._source, self._scrape_interval, self._assembly
        async with asyncio.TaskGroup() as group:
            skew = group.create_task(source.clock_skew())
            silent = group.create_task(
                silent_nodes(source, time=self._time, scrape_interval=interval)
            )
            queries = current_queries(interval, expected)
            for of_jobs_in_question in _ROWS.values():
                for name in of_jobs_in_question(interval, None):
                    del queries[name]
            if narrow:
                queries = {name: query for name, query in queries.items() if name not in OF_SOME}
                queries[PHASE] = training_query(interval)
            for name, query in queries.items():
                group.create_task(self.inventory(name, query))
        async with asyncio.TaskGroup() as group:
            for name, query in remembered_queries(interval, silent.result()).items():
                group.create_task(self.inventory(name, query))
            for names in _parts(_few(*assembly.not_training())) if narrow else ():
                for name, query in phase_queries(interval, names).items():
                    group.create_task(self.inventory(name, query))
        return skew.result()

    async def throttling(self) -> None:
        """Ask what slows cards down, of those that something may slow down by their values."""
        async with asyncio.TaskGroup() as group:
            for names in _parts(_few(*self._assembly.perhaps_throttled())):
                query = throttle_query(self._scrape_interval, names)
                group.create_task(self.inventory(THROTTLE, query))
        self._assembly.take_throttling()

    async def inventory(self, name: str, query: str) -> None:
        """Ask what the fleet consists of, one question."""
        async with self._gate:
            rows = await table(self._source, query, self._time, LABELS[name])
            self._assembly.take_inventory(name, rows)

    async def answers(self, keys: Mapping[SignalKey, frozenset[str] | None]) -> None:
        """Ask for values: of the jobs that are named, of all where None is."""
        asked: dict[frozenset[str] | None, list[SignalKey]] = {}
        async with asyncio.TaskGroup() as group:
            for key, jobs in keys.items():
                if key in _ROWS:
                    for part in _parts(jobs, MAX_QUERY_BYTES - _METRIC_BYTES):
                        for name, query in _ROWS[key](self._scrape_interval, part).items():
                            group.create_task(self.inventory(name, query))
                elif jobs is not None and key.promql and not separable(key.promql):
                    for query, named in self._of_cards(key.promql, jobs):
                        group.create_task(self._values(query, [key], of=named))
                else:
                    asked.setdefault(jobs, []).append(key)
            for jobs, numbers in asked.items():
                for alike, part in self._named(numbers, jobs):
                    for query, same in queries_of(alike, self._scrape_interval, part).items():
                        group.create_task(self._values(query, same))

    def _of_cards(
        self, text: str, jobs: frozenset[str]
    ) -> Iterator[tuple[str, Collection[str] | None]]:
        """Queries of these jobs' cards, with the jobs of each; of all where one holds too many."""
        found = [
            (card_expressions.of_cards(text, some.values()), some.keys())
            for some in card_expressions.parts(text, self._assembly.cards_of(jobs))
        ]
        if any(len(query.encode()) > MAX_QUERY_BYTES for query, _ in found):
            yield text, None
        else:
            yield from found

    def _named(
        self, keys: Iterable[SignalKey], jobs: frozenset[str] | None
    ) -> Iterator[tuple[list[SignalKey], list[str] | None]]:
        """Values with the jobs to name: the fewer selectors name them, the more jobs in a query."""
        if jobs is None:
            yield list(keys), None
            return
        alike: dict[int, list[SignalKey]] = {}
        for key in keys:
            ((text, _),) = queries_of([key], self._scrape_interval, ["j"]).items()
            most = (MAX_QUERY_BYTES - len(text.encode())) // max(1, text.count("job_id=~"))
            alike.setdefault(most, []).append(key)
        for most, found in alike.items():
            for part in named_parts(jobs, most):
                yield found, part

    async def _values(
        self, query: str, keys: Sequence[SignalKey], *, of: Collection[str] | None = None
    ) -> None:
        """A server that does not answer ends the tick; what it refuses fails alone.

        It refuses a window longer than it allows, or more series, however healthy it is: one rule
        must not blind all others. What an expression costs is its author's affair.
        """
        async with self._gate:
            answer: Table | str
            try:
                answer = await table(self._source, query, self._time, OF_VALUES)
                if of is not None:  # of others a part of their cards was asked
                    answer = [row for row in answer if row[1][1] in of]
            except QueryRefused as error:
                answer = str(error)
            except TemporaryError as error:
                if not keys[0].promql:
                    raise
                answer = str(error)
            for key in keys:
                self._assembly.take_answer(key, answer, amounts=signals.amount(key) is not None)


def named_parts(names: Collection[str], most: int = MAX_NAMES_BYTES) -> list[list[str]]:
    """Jobs or cards in parts that a query can name, in their order.

    Args:
        names: their ids.
        most: bytes of names in a part, of several names.
    """
    parts: list[list[str]] = []
    size = most
    for name in sorted(names):
        length = len(signals.one_of([name]).encode()) - 1
        if not parts or size + length > most:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += length
    return parts


def _parts(
    names: Collection[str] | None, most: int = MAX_NAMES_BYTES
) -> Sequence[list[str] | None]:
    """In which parts to ask; None stands for the whole fleet."""
    return [None] if names is None else named_parts(names, most)


def _few(names: Collection[str], all_of_them: int) -> Collection[str] | None:
    """A few to be asked for by name; None where they are too many, so that the whole fleet is."""
    return None if len(names) > MAX_SHARE * all_of_them else names


def value_queries(rules: RuleSet, scrape_interval: float) -> dict[str, list[SignalKey]]:
    """PromQL of every value that rules need -> its keys; what several ask for is asked once.

    Args:
        rules: what will be judged.
        scrape_interval: of the nodes, in seconds.
    """
    return queries_of(needed_keys(rules), scrape_interval)


def queries_of(
    keys: Iterable[SignalKey], scrape_interval: float, jobs: Sequence[str] | None = None
) -> dict[str, list[SignalKey]]:
    """PromQL of values -> their keys.

    Of a share of the card's memory the amount is asked.

    Args:
        keys: what to measure.
        scrape_interval: of the nodes, in seconds.
        jobs: of which jobs; None for the whole fleet.
    """
    found: dict[str, list[SignalKey]] = {}
    for key in sorted(keys):
        asked = signals.amount(key) or key
        if key.promql and jobs is not None:
            query = of_jobs(key.promql, jobs)
        else:
            query = signals.query(asked, scrape_interval=scrape_interval, jobs=jobs)
        found.setdefault(query, []).append(key)
    return found


def assemble(
    rows: dict[str, list[Sample]],
    answers: dict[SignalKey, list[Sample] | str],
    *,
    time: float,
    skew: float,
    expected: Expectation,
    teams: Mapping[str, str],
    scrape_interval: float,
) -> FleetFacts:
    """Put the facts of one tick together from what was answered. Pure; replays call it as well.

    Args:
        rows: for every name of `inventory_queries`, its rows.
        answers: for every needed key its rows, or why there are none.
        time: Unix time of every query.
        skew: of the server's clock, in seconds.
        expected: which nodes should be lit.
        teams: user -> team.
        scrape_interval: of the nodes, in seconds.
    """
    assembly = Assembly(time=time, expected=expected, teams=teams, scrape_interval=scrape_interval)
    for name, found in rows.items():
        assembly.take_inventory(name, tabulated(found, LABELS[name]))
    assembly.lay_out(answers)
    for key, answer in answers.items():
        known = answer if isinstance(answer, str) else tabulated(answer, OF_VALUES)
        assembly.take_answer(key, known)
    return assembly.facts(skew)
