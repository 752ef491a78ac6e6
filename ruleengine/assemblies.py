"""Assemblies: one tick's rows, and how they become facts. Pure; replays call it as well.

Rows are folded as they come, and let go: what ten thousand cards answer in a tick is some 40 MB, of
which an array of numbers for each job is kept.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.ruleengine import card_homes, lit_nodes, signals
from gpuwarden.ruleengine.inventories import ACTIVITY_METRIC, FOUND_BY, LABELS, RESUMED, SAVED
from gpuwarden.ruleengine.job_parts import agreed
from gpuwarden.ruleengine.measures import ABSENT, Layout, Measures
from gpuwarden.ruleengine.run_drafts import RunDrafts, torn
from gpuwarden.ruleengine.verdicts import (
    MAX_DARK_SHARE,
    MAX_SKEW_SECONDS,
    FleetFacts,
    GpuFacts,
    JobFacts,
    RunFacts,
    SignalKey,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from gpuwarden.ruleengine.held_sets import HeldSets
    from gpuwarden.ruleengine.inventories import Expectation
    from gpuwarden.ruleengine.prometheus import Table

LAST_MOMENT = 253_402_128_000.0
"""9999-12-30: what lies later has no date in some zone, and no node is believed so far."""
MAX_PID_DIGITS = 10

_NEVER_IF_ZERO: Final = frozenset({"avg", "max", "last"})
"""Aggregates of what is never negative that are 0 only where all of it is."""
_OF_NODES: Final = tuple(name for name in LABELS if name not in ("scraped", "expected"))
"""Inventory queries whose rows are of what a node has, and begin with its name."""

_Card = tuple[str, str]
"""(instance, uuid)."""
_Texts = tuple[str, ...]
"""Labels of a row, in the order of `LABELS`."""


def _nothing() -> array[float]:
    return array("d")


@dataclass(slots=True)
class _Draft:
    """One job while its rows are put together."""

    instances: set[str] = field(default_factory=set)
    labels: dict[str, str] = field(default_factory=dict)
    cards: set[_Card] = field(default_factory=set)
    executables: set[tuple[str, str]] = field(default_factory=set)
    start: float | None = None
    first_use: float | None = None
    processes: set[tuple[int, float]] = field(default_factory=set)
    activity: dict[str, float] = field(default_factory=dict)
    runs: dict[str, RunFacts] = field(default_factory=dict)
    uuids: tuple[str, ...] = ()
    numbers: array[float] = field(default_factory=_nothing)
    twice: bool = False


class Assembly:
    """The facts of one tick in the making: inventory first, then `lay_out`, then answers.

    Args:
        time: Unix time of every query.
        expected: which nodes should be lit.
        teams: user -> team.
        scrape_interval: of the nodes, in seconds.
    """

    def __init__(
        self,
        *,
        time: float,
        expected: Expectation,
        teams: Mapping[str, str],
        scrape_interval: float,
    ) -> None:
        self._time = time
        self._expected = expected
        self._teams = teams
        self._scrape_interval = scrape_interval
        self._rows: dict[str, list[tuple[float, _Texts]]] = {name: [] for name in LABELS}
        self._drafts: dict[str, _Draft] = {}
        self._cards: dict[_Card, GpuFacts] = {}
        self._card_numbers: dict[_Card, array[float]] = {}
        self._holders: dict[_Card, list[_Draft]] = defaultdict(list)
        self._layout = Layout(())
        self._failed: dict[SignalKey, str] = {}
        self._numbers: dict[SignalKey, float] = {}
        self._disbelieved: list[_Draft] = []
        self._twice: set[str] = set()
        self._dark: dict[str, str] = {}
        self._skews: dict[str, float] = {}

    @property
    def jobs(self) -> int:
        """How many were found; once they are laid out."""
        return len(self._drafts)

    # -- inventory

    def take_inventory(self, name: str, rows: Table) -> None:
        """Keep the answer to an inventory query, beside what is there of it already.

        Args:
            name: in `LABELS`.
            rows: its answer, with the labels of `LABELS`.
        """
        self._rows[name] += rows

    def take_held(self, held: HeldSets) -> None:
        """Add what jobs hold on dark nodes of which the server remembers nothing any more.

        Args:
            held: remembers it; what the rows tell is new to it.
        """
        dark, skews = lit_nodes.states(
            self._rows, time=self._time, scrape_interval=self._scrape_interval
        )
        rows = self._rows["gpu_job_holds_gpu"]
        rows += held.missing(rows, lit=skews.keys() - dark.keys(), time=self._time)

    def lay_out(self, keys: Iterable[SignalKey]) -> None:
        """Put jobs and cards together, with room for their values.

        Args:
            keys: of all answers that will come.
        """
        self._layout = Layout(keys)
        self._dark, self._skews = lit_nodes.states(
            self._rows, time=self._time, scrape_interval=self._scrape_interval
        )
        dark = self._dark
        self._forget_former_names(dark)
        self._drafts = self._drafted()
        self._count_cards_once(dark)
        self._cards = self._carded()
        for draft in self._drafts.values():
            held = sorted(draft.cards)
            draft.uuids = tuple([uuid for _, uuid in held])
            draft.numbers = self._layout.empty(len(held))
            for card in held:
                self._holders[card].append(draft)
        self._card_numbers = {card: self._layout.empty(1) for card in self._cards}
        self.take_throttling()

    def _forget_former_names(self, dark: Mapping[str, str]) -> None:
        former = card_homes.former_names(self._rows, dark)
        if not former:
            return
        for name in _OF_NODES:
            self._rows[name] = [row for row in self._rows[name] if row[1][0] not in former]

    def _count_cards_once(self, dark: Mapping[str, str]) -> None:
        self._twice = card_homes.told_twice(self._rows, dark)
        for draft in self._drafts.values():
            if self._twice:
                draft.twice = any(uuid in self._twice for _, uuid in draft.cards)
            if len(draft.cards) > 1 and len(draft.instances) > 1:
                draft.cards = card_homes.once(draft.cards, dark)

    def _of_jobs(self, name: str) -> Iterator[tuple[_Draft, float, _Texts]]:
        """Rows of an inventory query that belong to a job, with its draft.

        Of values that are no flags all are times: the node that counts in other units, or lies, is
        left a moment that stays as early or as late, and has a date.
        """
        drafts, found = self._drafts, name in FOUND_BY
        for value, texts in self._rows[name]:
            job_id = texts[1]
            if not job_id or not math.isfinite(value):
                continue
            draft = drafts.get(job_id)
            if draft is None:
                if not found:
                    continue
                draft = drafts[job_id] = _Draft()
            draft.instances.add(texts[0])
            yield draft, _moment(value), texts

    def _drafted(self) -> dict[str, _Draft]:
        for draft, _, (instance, _, uuid, _) in self._of_jobs("gpu_job_holds_gpu"):
            draft.cards.add((instance, uuid))
        names = LABELS["gpu_job_info"][2:]
        for draft, _, texts in self._of_jobs("gpu_job_info"):
            told = {name: text for name, text in zip(names, texts[2:], strict=True) if text}
            draft.labels = agreed(draft.labels, told) if draft.labels else told
        for draft, _, texts in self._of_jobs("gpu_job_executable"):
            draft.executables.add((texts[2], texts[3]))
        runs = RunDrafts()
        for draft, _, texts in self._of_jobs("yolo_info"):
            runs.declare(draft, texts[2], texts[3:])
        self._amend_runs(runs)
        # Of several nodes: the latest, so that no node's part is judged too early.
        for draft, at, _ in self._of_jobs("gpu_job_start_time_seconds"):
            draft.start = at if draft.start is None else max(draft.start, at)
        for draft, at, _ in self._of_jobs("gpu_job_first_gpu_use_timestamp_seconds"):
            draft.first_use = at if draft.first_use is None else max(draft.first_use, at)
        self.take_activity()
        for draft, at, (_, _, pid) in self._of_jobs("gpu_process_start_time_seconds"):
            if pid.isascii() and pid.isdecimal() and len(pid) <= MAX_PID_DIGITS:
                draft.processes.add((int(pid), at))
        return self._drafts

    def take_activity(self) -> None:
        """Fold the signs of life that were answered into their jobs; they place no job on a node.

        Who asks for them after `facts` calls it once more: they become part of those facts.
        """
        parts: dict[str, set[str]] = defaultdict(set)
        for value, (node, job_id, signal) in self._rows[ACTIVITY_METRIC]:
            draft = self._drafts.get(job_id)
            if draft is not None and math.isfinite(value):
                at = _moment(value)
                draft.activity[signal] = max(at, draft.activity.get(signal, -math.inf))
                if signal == "cpu" and len(draft.instances) > 1:
                    parts[job_id].add(node)
        # Where one node does not tell its part, whether the job computes is not known.
        for job_id, nodes in parts.items():
            if not self._drafts[job_id].instances <= nodes:
                del self._drafts[job_id].activity["cpu"]

    def _amend_runs(self, runs: RunDrafts) -> None:
        for draft, _, (_, _, run_id, phase) in self._of_jobs("yolo_phase"):
            runs.amend(draft, run_id, phase=phase)
        for draft, at, (_, _, run_id) in self._of_jobs("yolo_phase_start_timestamp_seconds"):
            runs.amend(draft, run_id, phase_since=at)
        for job_id, run_id, fields in self._saves():
            runs.amend(self._drafts[job_id], run_id, **fields)
        for draft, _, (_, _, run_id) in self._of_jobs("yolo_devices"):
            runs.amend(draft, run_id, other_cards=True)
        runs.finish()

    def _carded(self) -> dict[_Card, GpuFacts]:
        tenants: dict[_Card, int] = defaultdict(int)
        for draft in self._drafts.values():
            for card in draft.cards:
                tenants[card] += 1
        rows = self._rows
        total = {(node, uuid): at for at, (node, uuid) in rows["gpu_memory_total_bytes"]}
        total |= {(node, uuid): at for at, (node, uuid) in rows["gpu_mig_memory_total_bytes"]}
        info = {(node, uuid): (gpu, name) for _, (node, uuid, gpu, name) in rows["gpu_info"]}
        info |= {
            # A MIG instance is a card of its own, called as NVML calls it: such as
            # NVIDIA H100 80GB HBM3 MIG 1g.10gb.
            (node, part): (gpu, _mig_name(info.get((node, uuid), ("", ""))[1], profile))
            for _, (node, uuid, part, gpu, profile) in rows["gpu_mig_info"]
        }
        index = {(node, uuid): gpu for _, (node, _, uuid, gpu) in rows["gpu_job_holds_gpu"]}
        found = {}
        for card in sorted(set(info) | set(tenants)):
            gpu, name = info.get(card, ("", ""))
            found[card] = GpuFacts(
                uuid=card[1],
                index=gpu or index.get(card, ""),
                name=name,
                memory_total_bytes=total.get(card),
                tenants=tenants.get(card, 0),
                instance=card[0],
            )
        return found

    # -- what is asked of some

    def not_training(self) -> tuple[set[str], int]:
        """Jobs with a run that is not in `train`, by what was answered; and how many have runs."""
        trains = {texts[:3] for _, texts in self._rows["yolo_phase"]}
        runs = {texts[:3] for _, texts in self._rows["yolo_info"]}
        return {job_id for _, job_id, _ in runs - trains}, len(runs)

    def perhaps_throttled(self) -> tuple[set[str], int]:
        """Lit cards that something may slow down, once values are there; and how many cards are.

        Where the clocks were lowered at no time of a window, they are not lowered now.
        """
        told = [
            self._layout.first(key, 1)
            for key in self._layout.keys
            if key.signal == "card_throttled" and key.agg in _NEVER_IF_ZERO
        ]
        cards = {
            (node, uuid)
            for _, (node, uuid, *_) in self._rows["gpu_info"]
            if self._dark.get(node) != "dark_node"
        }
        found = set()
        for card in cards:
            numbers = self._card_numbers.get(card)
            if numbers is None or all(numbers[at] != 0 for at in told):
                found.add(card[1])
        return found, len(cards)

    def cards_of(self, jobs: Iterable[str]) -> Iterator[tuple[str, list[_Card]]]:
        """Jobs that were found, in order, each with all its cards, and a nameless one of each node.

        Args:
            jobs: their ids.
        """
        for job_id in sorted(jobs):
            draft = self._drafts.get(job_id)
            if draft is not None:
                yield job_id, sorted(draft.cards | {(node, "") for node in draft.instances})

    def take_throttling(self) -> None:
        """Tell the cards what slows them down, of what was answered.

        Who asks for it after `lay_out` calls it once more.
        """
        reasons: dict[_Card, set[str]] = defaultdict(set)
        for _, (node, uuid, reason) in self._rows["gpu_throttle_active"]:
            reasons[node, uuid].add(reason)
        for card in reasons.keys() & self._cards.keys():
            self._cards[card] = replace(self._cards[card], throttle=tuple(sorted(reasons[card])))

    def _saves(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Job and run, with what a row tells of it."""
        for name in SAVED:
            for _, at, (_, job_id, run_id) in self._of_jobs(name):
                yield job_id, run_id, {"checkpoint_time": at}
        for _, _, (_, job_id, run_id, mode) in self._of_jobs(RESUMED):
            yield job_id, run_id, {"resume_mode": mode}

    def with_saves(self, facts: FleetFacts) -> FleetFacts:
        """The facts with what was answered of what runs have saved.

        Args:
            facts: of this assembly.
        """
        runs: dict[str, RunFacts] = {}
        for job_id, run_id, fields in self._saves():
            run = runs.get(job_id, facts.jobs[job_id].run)
            if run is not None and run.run_id == run_id and not run.conflict:
                runs[job_id] = replace(run, **fields)
        amended = {job_id: replace(facts.jobs[job_id], run=run) for job_id, run in runs.items()}
        return replace(facts, jobs={**facts.jobs, **amended})

    # -- answers

    def take_answer(self, key: SignalKey, rows: Table | str, *, amounts: bool = False) -> None:
        """Hand the values of an answer to their jobs and cards.

        Args:
            key: one of those that were laid out.
            rows: its answer with the labels `OF_VALUES`, or why there is none.
            amounts: of a share of the card's memory, whether the rows are `signals.amount` of it.
        """
        if isinstance(rows, str):
            self._failed[key] = rows
            return
        if key.promql and len(rows) == 1 and math.isfinite(rows[0][0]):
            self._numbers[key] = rows[0][0]
        spec = signals.SIGNALS.get(key.signal)
        if spec is not None and spec.device:
            self._take_device(key, rows)
        elif spec is not None and spec.per_gpu:
            self._take_cards(key, rows, amounts=amounts)
        else:
            self._take_jobs(key, spec, rows)

    def _take_device(self, key: SignalKey, rows: Table) -> None:
        """Values of cards, whoever uses them."""
        alone, numbers_of = self._layout.first(key, 1), self._card_numbers
        for value, (instance, _, uuid) in rows:
            if not math.isfinite(value):
                continue
            card = (instance, uuid)
            numbers = numbers_of.get(card)
            if numbers is not None:
                numbers[alone] = value
            for draft in self._holders.get(card, ()):
                if len(draft.uuids) == 1:
                    draft.numbers[alone] = value
                else:
                    self._put(draft, key, uuid, value)

    def _take_cards(self, key: SignalKey, rows: Table, *, amounts: bool) -> None:
        """Values of jobs on cards."""
        drafts, alone = self._drafts, self._layout.first(key, 1)
        for value, (instance, job_id, uuid) in rows:
            draft = drafts.get(job_id)
            if draft is None or not math.isfinite(value):
                continue
            uuids = draft.uuids
            if amounts:
                card = self._cards.get((instance, uuid))
                whole = None if card is None else card.memory_total_bytes
                if not whole or not math.isfinite(value := value / whole):
                    continue
            if len(uuids) != 1:
                self._put(draft, key, uuid, value)
            elif uuids[0] == uuid:
                draft.numbers[alone] = value

    def _put(self, draft: _Draft, key: SignalKey, uuid: str, value: float) -> None:
        first = self._layout.first(key, len(draft.uuids))
        for at, each in enumerate(draft.uuids, start=first):
            if each == uuid:
                draft.numbers[at] = value

    def _take_jobs(self, key: SignalKey, spec: signals.SignalSpec | None, rows: Table) -> None:
        """Values of jobs as a whole."""
        drafts, totals, counts = self._drafts, dict[str, float](), dict[str, int]()
        for value, (_, job_id, _) in rows:
            if job_id in totals:
                # A job on several nodes has one row for each: together they are the job's.
                totals[job_id] += value
                counts[job_id] = counts.get(job_id, 1) + 1
            else:
                totals[job_id] = value
        # Of an expression, only its author knows which of two rows is meant, also if one of them is
        # no number; of a node's measure, the sum is known only when every node gave its part.
        single = spec is None or spec.training
        additive = spec is None or spec.additive
        at = self._layout.job[key]
        for job_id, total in totals.items():
            draft = drafts.get(job_id)
            if draft is None or not math.isfinite(total):
                continue
            nodes = len(draft.instances)
            wanted = 1 if single else nodes
            if counts.get(job_id, 1) == wanted and (additive or nodes == 1):
                draft.numbers[at] = total

    # -- facts

    def facts(self, skew: float) -> FleetFacts:
        """What the tick knows.

        Args:
            skew: of the server's clock, in seconds.
        """
        dark, skews = self._dark, self._skews
        self._mark_conflicts(dark)
        lit_names = set(skews) - set(dark)
        names, expected = self._expectation(lit_names)
        usable = [abs(skew) for node, skew in skews.items() if node not in dark]
        worst = max([abs(skew), *usable])
        return FleetFacts(
            time=self._time,
            jobs={
                job_id: self._job(job_id, draft, dark)
                for job_id, draft in sorted(self._drafts.items())
            },
            expected_nodes=expected,
            lit_nodes=len(lit_names),
            clock_skew_seconds=worst,
            problems=tuple(_problems(expected, len(lit_names), worst)),
            cards=self._card_subjects(dark),
            failed=self._failed,
            scrape_interval=self._scrape_interval,
            numbers=self._numbers,
            expected_names=tuple(sorted(names)),
            lit_names=tuple(sorted(lit_names)),
        )

    def _expectation(self, lit: set[str]) -> tuple[set[str], int]:
        """Names of the nodes that should be lit, and how many nodes there are with all others.

        A node that nobody expected does not stand in for one that is missing.
        """
        if self._expected.number is not None:
            return set(), self._expected.number
        rows = [(at, node) for at, (node,) in self._rows["expected"] if math.isfinite(at)]
        named = {node for _, node in rows if node}
        counted = sum(int(at) for at, node in rows if not node)
        names = named | self._expected.names
        return names, max(len(names | lit) if names else 0, counted)

    def _mark_conflicts(self, dark: Mapping[str, str]) -> None:
        """A run claimed by two jobs, or a job with two runs: nobody is believed."""
        claimed = {
            job_id: draft.runs
            for job_id, draft in self._drafts.items()
            if not draft.instances <= dark.keys()
        }
        conflicts = torn(claimed)
        for draft in self._drafts.values():
            if len(draft.runs) > 1 or not conflicts.isdisjoint(draft.runs):
                claims = tuple(sorted(draft.runs))
                draft.runs = {claims[0]: RunFacts(claims[0], conflict=True, claims=claims)}
                self._disbelieved.append(draft)
        self.forget_claims()

    def forget_claims(self) -> None:
        """Drop what jobs whose runs are in conflict say of themselves.

        Who takes answers after `facts` calls it once more: they become part of those facts.
        """
        for key in self._layout.keys:
            spec = signals.SIGNALS.get(key.signal)
            if spec is not None and spec.self_report:
                for draft in self._disbelieved:
                    draft.numbers[self._layout.job[key]] = ABSENT

    def _job(self, job_id: str, draft: _Draft, dark: Mapping[str, str]) -> JobFacts:
        instances = tuple(sorted(draft.instances))
        reasons = sorted({dark[node] for node in instances if node in dark})
        if draft.twice:
            reasons.append(lit_nodes.SCRAPED_TWICE)
        labels = draft.labels
        user = labels.get("user", "")
        return JobFacts(
            job_id=job_id,
            instance=instances[0] if instances else "",
            instances=instances,
            user=user,
            team=self._teams.get(user, ""),
            source=labels.get("source", ""),
            framework=labels.get("framework", ""),
            interactive=labels.get("interactive", "") == "true",
            executables=tuple(sorted(draft.executables)),
            gpus=tuple([self._cards[card] for card in sorted(draft.cards)]),
            start_time=draft.start,
            first_gpu_use=draft.first_use,
            run=next(iter(draft.runs.values()), None),
            processes=tuple(sorted(draft.processes)),
            activity=draft.activity,
            values=Measures(self._layout, draft.uuids, draft.numbers),
            fresh=not reasons,
            not_fresh_reason=reasons[0] if reasons else "",
        )

    def _card_subjects(self, dark: Mapping[str, str]) -> dict[str, JobFacts]:
        found: dict[str, JobFacts] = {}
        for (node, uuid), facts in self._cards.items():
            known = found.get(uuid)
            if known is not None and known.fresh and node in dark:
                continue
            reason = lit_nodes.SCRAPED_TWICE if uuid in self._twice else dark.get(node, "")
            found[uuid] = JobFacts(
                job_id=uuid,
                instance=node,
                instances=(node,),
                gpus=(facts if facts.tenants == 1 else replace(facts, tenants=1),),
                values=Measures(self._layout, (uuid,), self._card_numbers[node, uuid]),
                fresh=not reason,
                not_fresh_reason=reason,
            )
        return found


def _moment(value: float) -> float:
    """A time as a node told it, with a date."""
    return min(max(value, 0.0), LAST_MOMENT)


def _mig_name(card: str, profile: str) -> str:
    return f"{card} MIG {profile}" if card and profile else ""


def _problems(expected: int, lit: int, skew: float) -> Iterable[str]:
    if expected <= 0:
        yield "no node is expected: set expected_nodes, or check the scrape job"
    elif expected - lit > MAX_DARK_SHARE * expected:
        yield f"{expected - lit} of {expected} nodes are dark"
    if skew > MAX_SKEW_SECONDS:
        yield f"clocks are {skew:.0f} s apart"
