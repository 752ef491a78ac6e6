"""Lints of inline tests: names that lead nowhere, moments out of place, histories too large."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.diagnostics import Severity, did_you_mean
from gpuwarden.ruleengine.histories import made_names
from gpuwarden.ruleengine.linting import Finding
from gpuwarden.ruleengine.model import Target
from gpuwarden.ruleengine.notations import parse_selector

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.ruleengine.notations import SeriesName
    from gpuwarden.ruleengine.rule_tests import Expectation, RuleTest
    from gpuwarden.yaml_files import Step

MAX_SAMPLES = 5_000_000
"""About what a minute is enough for; a longer history needs a longer interval."""
MAX_TICKS = 50_000
_SERIES_OF_A_JOB = 40
_SERIES_OF_A_CARD = 15


def lint_tests(
    tests: Sequence[tuple[int, RuleTest]], rules: Sequence[Rule], *, known: Sequence[str]
) -> Iterator[Finding]:
    """Lint the tests of one file.

    Args:
        tests: with their index in the file.
        rules: the well-formed rules of all files.
        known: ids of all rules, well-formed or not.

    Returns:
        Findings with paths that begin at the list of tests.
    """
    names: set[str] = set()
    for index, test in tests:
        if test.name in names:
            yield _error("GW231", (index, "name"), "another test of this file has this name")
        names.add(test.name)
        yield from _size(index, test)
        yield from _jobs(index, test)
        yield from _series(index, test)
        yield from _operators(index, test, known)
        for number, item in enumerate(test.expect):
            yield from _expectation((index, "expect", number), item, test, rules, known)


def _error(code: str, path: tuple[Step, ...], message: str, hint: str | None = None) -> Finding:
    return Finding(code, Severity.ERROR, path, message, hint)


def _size(index: int, test: RuleTest) -> Iterator[Finding]:
    series = sum(
        _SERIES_OF_A_JOB + _SERIES_OF_A_CARD * len(job.card_names) for job in test.jobs
    ) + len(test.series)
    samples = series * test.length / test.interval
    if samples > MAX_SAMPLES:
        message = f"makes about {samples:,.0f} samples; {MAX_SAMPLES:,} are allowed"
        yield _error("GW232", (index,), message, "give a longer interval, or end it earlier")
    if test.length / test.tick > MAX_TICKS:
        message = f"has more than {MAX_TICKS:,} evaluations"
        yield _error("GW232", (index,), message, "give a longer tick, or end it earlier")


def _jobs(index: int, test: RuleTest) -> Iterator[Finding]:
    ids: set[str] = set()
    for number, job in enumerate(test.jobs):
        place = (index, "jobs", number)
        if job.job in ids:
            yield _error("GW231", (*place, "job"), "another job of this test has this name")
        ids.add(job.job)
        if len(set(job.uuids)) < len(job.uuids):
            yield _error("GW231", (*place, "uuids"), "a card is named twice")
        for conduct, where in [(job, place)] + [
            (change, (*place, "then", step)) for step, change in enumerate(job.then)
        ]:
            if len(conduct.cards) > len(job.card_names):
                message = f"the job has only {len(job.card_names)}"
                yield _error("GW231", (*where, "cards"), message)
    nodes = {job.node for job in test.jobs}
    for number, outage in enumerate(test.outages):
        place = (index, "outages", number)
        if outage.node not in nodes:
            hint = did_you_mean(outage.node, nodes)
            yield _error("GW231", (*place, "node"), "no job of this test is on this node", hint)
        if outage.until <= outage.begin:
            yield _error("GW230", (*place, "until"), "must be later than `from`")


def _operators(index: int, test: RuleTest, known: Sequence[str]) -> Iterator[Finding]:
    """What owners and operators do in a test."""
    jobs = {job.job for job in test.jobs}
    before = 0.0
    for number, keep in enumerate(test.keeps):
        place = (index, "keeps", number)
        if keep.rule not in known:
            hint = did_you_mean(keep.rule, known)
            yield _error("GW231", (*place, "rule"), f'there is no rule "{keep.rule}"', hint)
        elif keep.rule not in test.rules:
            message = "nothing is expected of this rule, so that the test does not judge by it"
            yield _error("GW231", (*place, "rule"), message)
        if keep.job not in jobs and not test.series:
            hint = did_you_mean(keep.job, jobs)
            yield _error("GW231", (*place, "job"), f'no job of this test is "{keep.job}"', hint)
        if keep.at < before:
            yield _error("GW230", (*place, "at"), "is earlier than that of the keep before it")
        before = keep.at
    for number, halt in enumerate(test.kill_switch):
        if halt.until <= halt.begin:
            until = (index, "kill_switch", number, "until")
            yield _error("GW230", until, "must be later than `from`")


def _series(index: int, test: RuleTest) -> Iterator[Finding]:
    """Given series: each once, and with all labels of the one that they are to replace."""
    seen: set[SeriesName] = set()
    made = made_names(test) if test.series else set()
    for number, given in enumerate(test.series):
        place, name = (index, "series", number, "series"), parse_selector(given.series)
        if name in seen:
            yield _error("GW231", place, "another series of this test has these labels")
        seen.add(name)
        if name in made:
            continue
        meant = next((other for other in made if _meant(name, other)), None)
        if meant is not None:
            labels = ",".join(f'{label}="{text}"' for label, text in meant.labels)
            message = "stands beside the one that the job makes, and does not replace it"
            yield _error("GW233", place, message, f"write {meant.metric}{{{labels}}}")


def _meant(name: SeriesName, made: SeriesName) -> bool:
    """Whether a series is of the same thing as one that a job makes, but for where it is seen."""
    seen_at = ("gpu", "instance", "job")
    given, known = dict(name.labels), dict(made.labels)
    elsewhere = given.get("instance", known.get("instance")) != known.get("instance")
    return (
        name.metric == made.metric
        and not elsewhere
        and {k: v for k, v in given.items() if k not in seen_at}
        == {k: v for k, v in known.items() if k not in seen_at}
    )


def _expectation(
    place: tuple[Step, ...],
    item: Expectation,
    test: RuleTest,
    rules: Sequence[Rule],
    known: Sequence[str],
) -> Iterator[Finding]:
    rule = next((rule for rule in rules if rule.id == item.rule), None)
    if item.rule not in known:
        hint = did_you_mean(item.rule, known)
        yield _error("GW231", (*place, "rule"), f'there is no rule "{item.rule}"', hint)
    if rule is not None:
        yield from _of_the_rule(place, item, rule)
    # What is given in full may be of any job: only without it are all of them known.
    jobs = {job.job for job in test.jobs}
    cards = {uuid for job in test.jobs for uuid in (*job.card_names, *job.whole_cards)}
    for key, name, names in (("job", item.job, jobs), ("gpu", item.gpu, cards)):
        if name is not None and name not in names and not test.series and item.verdict != "none":
            message = f'no job of this test {"is" if key == "job" else "holds"} "{name}"'
            yield _error("GW231", (*place, key), message, did_you_mean(name, names))


def _of_the_rule(place: tuple[Step, ...], item: Expectation, rule: Rule) -> Iterator[Finding]:
    key = "job" if item.job is not None else "gpu"
    if key != rule.target.value:
        wanted = "a card: give gpu" if rule.target is Target.GPU else "a job: give job"
        yield _error("GW231", (*place, key), f"the rule judges {wanted}")
    stages = [name for name, _ in rule.keyed_stages]
    if item.stage is not None and item.stage not in (*stages, "none"):
        message = f'the rule has no stage "{item.stage}"; it has {", ".join(stages)}'
        yield _error("GW231", (*place, "stage"), message, did_you_mean(item.stage, stages))
