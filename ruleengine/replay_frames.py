"""One stretch of a replay: every answer for its ticks, cut into groups that judge alone.

What a rule says of a job depends on the job, on whoever shares a card with it, and on whoever
claims its run: a group is all that hang together so. The facts of one group at one tick are put
together by the live engine's own code, from the rows of that group.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.facts import assemble
from gpuwarden.ruleengine.inventories import FOUND_BY, SAVED, Expectation
from gpuwarden.ruleengine.lit_nodes import SNAPSHOT_INTERVAL_SECONDS
from gpuwarden.ruleengine.prometheus import Sample
from gpuwarden.ruleengine.verdicts import MAX_SKEW_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from gpuwarden.ruleengine.replay_columns import Columns, Ticks
    from gpuwarden.ruleengine.verdicts import FleetFacts, JobFacts, SignalKey

    Bools = NDArray[np.bool_]
    Floats = NDArray[np.float64]
    Numbers = NDArray[np.int64]

SNAPSHOTS: Final = "gpuwarden_snapshot_timestamp_seconds"
NODE_ROWS: Final = (SNAPSHOTS, "scraped", "expected")
"""What is known of nodes and not of a job or card."""
KNOWN_BY_ROWS: Final = ("gpu_job_holds_gpu", "gpu_job_info", "gpu_info")
"""A node that has any of these and no snapshot is dark."""
UNJUDGED_ROWS: Final = frozenset({"gpu_throttle_active"})
"""Told in causes only: no verdict depends on it, and it flaps."""
VALUED_ROWS: Final = frozenset(
    {
        "gpu_memory_total_bytes",
        "gpu_mig_memory_total_bytes",
        "gpu_job_start_time_seconds",
        "gpu_job_first_gpu_use_timestamp_seconds",
        "yolo_phase_start_timestamp_seconds",
    }
)
"""Of these the value itself means something; of the others, that they are there."""
_ABSENT: Final = -1.7e308
REMEMBERED_TICKS: Final = 64
"""Facts of one group that are kept, since several rules look at the same ticks."""


@dataclass(frozen=True, eq=False)
class Group:
    """Jobs and cards that hang together.

    Attributes:
        frame: the stretch.
        jobs: ids of jobs, sorted.
        cards: UUIDs, sorted.
        instances: targets of their nodes.
        rows: inventory query -> numbers of its rows that are of this group.
        answers: signal -> likewise.
    """

    frame: Frame
    jobs: tuple[str, ...]
    cards: tuple[str, ...]
    instances: tuple[str, ...]
    rows: Mapping[str, Sequence[int]]
    answers: Mapping[SignalKey, Sequence[int]]
    _facts: dict[int, FleetFacts] = field(default_factory=dict)

    def facts(self, tick: int) -> FleetFacts:
        """What the live engine would have known of this group at a tick."""
        if tick not in self._facts:
            if len(self._facts) >= REMEMBERED_TICKS:
                self._facts.clear()
            self._facts[tick] = self.frame.facts_of(
                self.rows, self.answers, tick, nodes=self.instances
            )
        return self._facts[tick]

    @property
    def known_ticks(self) -> list[int]:
        """Ticks whose facts are at hand."""
        return list(self._facts)

    def subject(self, name: str, tick: int) -> JobFacts | None:
        """A job's or card's facts, or None where there is none at that tick."""
        facts = self.facts(tick)
        return facts.jobs.get(name) or facts.cards.get(name)

    def rows_of(self, name: str, label: str, wanted: str) -> list[int]:
        """Numbers of an inventory query's rows with this label."""
        labels = self.frame.rows[name].labels
        return [number for number in self.rows[name] if labels[number].get(label) == wanted]

    @functools.cached_property
    def epochs(self) -> Numbers:
        """A number for each tick; the same where the same series are there with the same values.

        Everything that a verdict depends on is in it, but times that are compared with now, and
        the values of signals: whoever is judged, whom the cards belong to, which nodes are lit.
        """
        frame, parts = self.frame, []
        for name, numbers in self.rows.items():
            if name in NODE_ROWS or name in UNJUDGED_ROWS or not len(numbers):
                continue
            own = frame.rows[name].values[list(numbers)]
            there = own if name in VALUED_ROWS else np.isinf(own) + 1.0
            parts.append(np.where(np.isnan(own), _ABSENT, there))
        parts += [codes for node in self.instances for codes in frame.node_codes(node)]
        parts += [frame.silent(node).astype(np.float64) for node in self.instances]
        return _epochs(parts, frame.ticks.count)

    def saved(self, job: str, tick: int) -> float | None:
        """When a job's trainer last saved its state, as the live facts have it."""
        found = None
        for name in SAVED:
            for number in self.rows_of(name, "job_id", job):
                value = float(self.frame.rows[name].values[number, tick])
                found = value if math.isfinite(value) else found
        return found


@dataclass(eq=False)
class Frame:
    """One stretch of history.

    Attributes:
        ticks: its moments.
        rows: inventory query -> its values.
        answers: signal -> its values.
        scrape_interval: of the nodes, in seconds.
        expected: which nodes should be lit.
        teams: user -> team.
        activity: job_id -> the highest utilization of its cards at each tick, NaN where unknown.
    """

    ticks: Ticks
    rows: Mapping[str, Columns]
    answers: Mapping[SignalKey, Columns]
    scrape_interval: float
    expected: Expectation
    teams: Mapping[str, str]
    activity: Mapping[str, Floats] = field(default_factory=dict)
    _codes_of: dict[str, tuple[Floats, ...]] = field(default_factory=dict)
    _silent: dict[str, Bools] = field(default_factory=dict)
    _fleets: dict[int, FleetFacts] = field(default_factory=dict)

    def facts_of(
        self,
        rows: Mapping[str, Sequence[int]],
        answers: Mapping[SignalKey, Sequence[int]],
        tick: int,
        *,
        nodes: Sequence[str] = (),
    ) -> FleetFacts:
        """Facts from some rows at one tick; of these nodes it is asked whether they are silent."""
        found: dict[SignalKey, list[Sample] | str] = {}
        for key, numbers in answers.items():
            columns = self.answers[key]
            why = columns.failure(tick) if columns.failures else None
            found[key] = why if why is not None else _samples(columns, numbers, tick)
        time = self.ticks.begin + self.ticks.step * tick
        inventory = {
            name: _samples(self.rows[name], numbers, tick) for name, numbers in rows.items()
        }
        # Of a node that is known by other groups' rows only: a snapshot that was never scraped.
        inventory[SNAPSHOTS] += [
            Sample({"instance": node}, time) for node in nodes if self.silent(node)[tick]
        ]
        return assemble(
            inventory,
            found,
            time=time,
            skew=0.0,
            expected=self.expected,
            teams=self.teams,
            scrape_interval=self.scrape_interval,
        )

    def fleet(self, tick: int) -> FleetFacts:
        """What is known of the nodes, and the numbers of the whole cluster; of no job or card."""
        epoch = int(self._fleet_epochs[tick])
        if epoch not in self._fleets:
            self._fleets[epoch] = self._fleet(tick)
        return dataclasses.replace(
            self._fleets[epoch], time=self.ticks.begin + self.ticks.step * tick
        )

    @functools.cached_property
    def _fleet_epochs(self) -> Numbers:
        """The same number for ticks at which the same nodes are lit and the same is expected."""
        nodes = sorted(self._node_rows[SNAPSHOTS])
        parts = [codes for node in nodes for codes in self.node_codes(node)]
        parts += list(self.rows["expected"].values)
        for columns in self._waiting.values():
            parts += list(columns.values)
            for begin, end, _ in columns.failures:
                parts.append(np.zeros(self.ticks.count))
                parts[-1][begin:end] = 1.0
        return _epochs([np.nan_to_num(part, nan=_ABSENT) for part in parts], self.ticks.count)

    @property
    def _waiting(self) -> dict[SignalKey, Columns]:
        return {key: found for key, found in self.answers.items() if key.signal == "waiting"}

    def _fleet(self, tick: int) -> FleetFacts:
        rows = {
            name: range(len(columns.labels)) if name in NODE_ROWS else ()
            for name, columns in self.rows.items()
        }
        waiting = {key: range(len(found.labels)) for key, found in self._waiting.items()}
        return self.facts_of(rows, waiting, tick)

    @functools.cached_property
    def blind(self) -> Bools:
        """Ticks at which the server itself knew nothing: no target, and no node's snapshot."""
        seen = np.zeros(self.ticks.count, dtype=bool)
        for name in NODE_ROWS:
            seen |= np.any(~np.isnan(self.rows[name].values), axis=0)
        return ~seen

    # -- nodes

    @functools.cached_property
    def _node_rows(self) -> dict[str, dict[str, list[int]]]:
        return {name: _by_label(self.rows[name], "instance") for name in (SNAPSHOTS, "scraped")}

    def node_codes(self, node: str) -> tuple[Floats, ...]:
        """One row for each snapshot series of a node: 0 not there, 1 lit, 2 dark, 3 skewed."""
        if node not in self._codes_of:
            self._codes_of[node] = self._node_codes(node)
        return self._codes_of[node]

    def _node_codes(self, node: str) -> tuple[Floats, ...]:
        taken_rows = self._node_rows[SNAPSHOTS].get(node, [])
        scraped_rows = self._node_rows["scraped"].get(node, [])
        if not taken_rows:
            return (np.zeros(self.ticks.count),)
        at = np.full(self.ticks.count, -np.inf)
        for number in scraped_rows:
            own = self.rows["scraped"].values[number]
            at = np.where(np.isnan(own), at, own)
        return tuple(self._codes(self.rows[SNAPSHOTS].values[number], at) for number in taken_rows)

    def _codes(self, taken: Floats, at: Floats) -> Floats:
        with np.errstate(invalid="ignore"):
            age = at - taken
            skew = np.where(age < 0, age, np.maximum(0.0, age - 2 * SNAPSHOT_INTERVAL_SECONDS))
            late = at < self.ticks.times - signals.FRESH_SCRAPES * self.scrape_interval
            skewed = ~(np.abs(skew) <= MAX_SKEW_SECONDS)
        codes = np.where(late, 2.0, np.where(skewed, 3.0, 1.0))
        return np.where(np.isnan(taken), 0.0, codes)

    def lit(self, node: str, tick: int) -> bool:
        """Whether a node has a current snapshot at a tick."""
        return any(codes[tick] == 1 for codes in self.node_codes(node))

    def silent(self, node: str) -> Bools:
        """Ticks at which a node is known by its cards or jobs, and has no snapshot."""
        if node not in self._silent:
            known = np.zeros(self.ticks.count, dtype=bool)
            for name in KNOWN_BY_ROWS:
                for number in self._known_rows[name].get(node, ()):
                    known |= ~np.isnan(self.rows[name].values[number])
            spoken = np.any([codes > 0 for codes in self.node_codes(node)], axis=0)
            self._silent[node] = known & ~spoken
        return self._silent[node]

    @functools.cached_property
    def _known_rows(self) -> dict[str, dict[str, list[int]]]:
        return {name: _by_label(self.rows[name], "instance") for name in KNOWN_BY_ROWS}

    @functools.cached_property
    def running(self) -> Numbers:
        """At each tick: jobs all of whose nodes are lit."""
        there: dict[tuple[str, str], Bools] = {}
        whole: dict[str, Bools] = {}
        for name, columns in self.rows.items():
            if name in NODE_ROWS:
                continue
            for labels, own in zip(columns.labels, columns.values, strict=True):
                job = labels.get("job_id", "")
                if job:
                    pair = (job, labels.get("instance", ""))
                    seen = ~np.isnan(own)
                    there[pair] = there.get(pair, False) | seen
                    if name in FOUND_BY:
                        whole[job] = whole.get(job, False) | seen
        broken: dict[str, Bools] = {}
        for (job, node), seen in there.items():
            codes = self.node_codes(node)
            lit = ~self.silent(node) & np.all([(each == 1) | (each == 0) for each in codes], axis=0)
            broken[job] = broken.get(job, False) | (seen & ~lit)
        count = np.zeros(self.ticks.count, dtype=np.int64)
        for job, seen in whole.items():
            count += seen & ~broken[job]
        return count

    # -- groups

    def groups(self) -> list[Group]:
        """Every job and card, each in exactly one group; in the order of their names."""
        sets = _Sets()
        members: dict[tuple[str, int], str] = {}
        for name, columns in self.rows.items():
            if name in NODE_ROWS:
                continue
            for number, labels in enumerate(columns.labels):
                names = list(_names(labels))
                if names:
                    members[name, number] = names[0]
                    sets.join(names)
        rows: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        instances: dict[str, set[str]] = defaultdict(set)
        for (name, number), member in members.items():
            root = sets.root(member)
            rows[root][name].append(number)
            instances[root].add(self.rows[name].labels[number].get("instance", ""))
        answers = self._answer_rows(sets)
        return [
            self._group(names, rows[root], answers[root], instances[root])
            for root, names in sorted(sets.members().items(), key=lambda item: min(item[1]))
        ]

    def _answer_rows(self, sets: _Sets) -> dict[str, dict[SignalKey, list[int]]]:
        found: dict[str, dict[SignalKey, list[int]]] = defaultdict(lambda: defaultdict(list))
        for key, columns in self.answers.items():
            spec = signals.SIGNALS.get(key.signal)
            label, kind = (
                ("uuid", "card") if spec is not None and spec.device else ("job_id", "job")
            )
            for number, labels in enumerate(columns.labels):
                member = f"{kind}:{labels.get(label, '')}"
                if member in sets:
                    found[sets.root(member)][key].append(number)
        return found

    def _group(
        self,
        names: Iterable[str],
        rows: Mapping[str, Sequence[int]],
        answers: Mapping[SignalKey, Sequence[int]],
        instances: Iterable[str],
    ) -> Group:
        parted: dict[str, list[str]] = defaultdict(list)
        for name in names:
            kind, _, rest = name.partition(":")
            parted[kind].append(rest)
        nodes = tuple(sorted(instances))
        own = {name: rows.get(name, ()) for name in self.rows}
        own["expected"] = ()
        for name, by_node in self._node_rows.items():
            own[name] = [number for node in nodes for number in by_node.get(node, ())]
        return Group(
            frame=self,
            jobs=tuple(sorted(parted["job"])),
            cards=tuple(sorted(parted["card"])),
            instances=nodes,
            rows=own,
            answers={key: answers.get(key, ()) for key in self.answers},
        )


def _epochs(parts: Sequence[Floats], count: int) -> Numbers:
    """A number for each tick, by the values of all parts; no value is NaN."""
    if not parts:
        return np.zeros(count, dtype=np.int64)
    table = np.vstack([np.atleast_2d(part) for part in parts])
    changes = np.flatnonzero(np.any(table[:, 1:] != table[:, :-1], axis=0)) + 1
    starts = np.concatenate(([0], changes)).astype(np.intp)
    known: dict[bytes, int] = {}
    names = [known.setdefault(table[:, at].tobytes(), len(known)) for at in starts]
    return np.repeat(np.array(names, dtype=np.int64), np.diff(np.append(starts, count)))


def _names(labels: Mapping[str, str]) -> Iterable[str]:
    """Who a row of the inventory is about; all of them hang together."""
    for label, kind in (
        ("job_id", "job"),
        ("uuid", "card"),
        ("mig_uuid", "card"),
        ("run_id", "run"),
    ):
        if labels.get(label):
            yield f"{kind}:{labels[label]}"


def _by_label(columns: Columns, label: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for number, labels in enumerate(columns.labels):
        found[labels.get(label, "")].append(number)
    return found


def _samples(columns: Columns, numbers: Sequence[int], tick: int) -> list[Sample]:
    if not len(numbers):
        return []
    labels, column = columns.labels, columns.values[:, tick]
    return [
        Sample(labels[number], float(value))
        for number in numbers
        if (value := column[number]) == value  # NaN: no sample
    ]


class _Sets:
    """Names that hang together, found by joining (union-find)."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._parents

    def root(self, name: str) -> str:
        """The one name that stands for all that hang together with this one."""
        while (parent := self._parents[name]) != name:
            self._parents[name] = self._parents[parent]
            name = parent
        return name

    def join(self, names: Sequence[str]) -> None:
        """Say that these hang together."""
        for name in names:
            self._parents.setdefault(name, name)
        first = self.root(names[0])
        for name in names[1:]:
            self._parents[self.root(name)] = first

    def members(self) -> dict[str, list[str]]:
        """Root -> names."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in self._parents:
            found[self.root(name)].append(name)
        return found
