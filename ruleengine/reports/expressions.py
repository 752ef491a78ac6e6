"""What is asked of Prometheus for a report. Pure.

Of what a recording rule writes, every sample of a bin is added up, and each stands for the interval
of the rule. Without it the expression itself is evaluated at evenly spaced moments, each of which
stands for the time since the one before, as far as the node answered in it: a gap is never use.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden import durations
from gpuwarden.ruleengine import signals

if TYPE_CHECKING:
    from collections.abc import Collection

JOB: Final = 'job="gpuwarden"'
IDLE_RATIO: Final = 0.05
"""A card is held idle while its job did not use more of it for so long."""
IDLE_SECONDS: Final = 300.0
"""Of which half must have been seen, as the recording rules have it."""
HOUR_SECONDS: Final = 3600.0
RECORDED_WIDTH_SECONDS: Final = 300.0
"""Of `...:sum5m` and `...:increase5m`: what fell into the five minutes before the sample."""
MARKER: Final = "fleet:gpus_seen:count5m"
"""Written with those, also while nobody uses anything."""
SHARE: Final = "card:gpu_share:ratio"
"""How many cards a card or a MIG instance is, as money.yml records it."""
_PER_JOB: Final = "on (instance, job_id)"


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of the fleet over time.

    Attributes:
        name: by which the rest of the report knows it.
        by: labels of its rows.
        level: a height (a ratio), of which means are told; else something that adds up.
        whole: only its sum over the period is wanted: of too many rows to keep every bin.
        sampled: PromQL for moments, or an empty string.
        recorded: name of the series that a recording rule writes, or an empty string.
        matcher: of those series, such as `{team="vision"}`.
        each: seconds that one unit of a recorded sample stands for, or None: the rule's interval.
        width: seconds that a recorded sample is about; shorter bins are not told from it.
    """

    name: str
    by: tuple[str, ...] = ()
    level: bool = False
    whole: bool = False
    sampled: str = ""
    recorded: str = ""
    matcher: str = ""
    each: float | None = None
    width: float = 0.0

    @property
    def marker(self) -> str:
        """A recorded series that is there as long as the rules are and any node is scraped."""
        return MARKER if self.width else self.recorded

    @property
    def selectors(self) -> int:
        """How many series selectors its expression has: what the server holds of it at once."""
        return max(1, self.sampled.count(JOB) + self.sampled.count(SHARE))

    def binned(self, seconds: float) -> str:
        """The recorded series over a bin that ends at the moment of evaluation.

        Args:
            seconds: of the window.
        """
        series = f"{self.recorded}{self.matcher}[{durations.render(seconds)}]"
        if self.level:
            return f"avg(avg_over_time({series}))"
        grouped = f" by ({', '.join(self.by)}) " if self.by else ""
        kept = " > 0" if self.whole else ""
        return f"sum{grouped}(sum_over_time({series})){kept}"


def marks(series: str, seconds: float) -> str:
    """How many samples a recorded series has in a window that ends at the evaluation."""
    return f"max(count_over_time({series}[{durations.render(seconds)}]))"


def measures(
    *,
    scrape: float,
    step: float,
    inside: float,
    team: str | None = None,
    users: Collection[str] | None = None,
) -> dict[str, Measure]:
    """Every measure by name.

    Args:
        scrape: seconds between two samples of a node.
        step: seconds between two moments of evaluation.
        inside: the same as a window in which no sample lies that is another moment's.
        team: whose jobs are counted, or None: the whole fleet's.
        users: of that team, or None.
    """
    window = durations.render(signals.FRESH_SCRAPES * scrape)
    # Of the time since the last moment, that in which the node was seen: so a gap is no use.
    # Where moments lie closer together than samples, it is that since the last sample was due.
    since = max(step, scrape)
    answered = (
        f"on (instance) group_left () clamp_max(max by (instance) (sum_over_time(up{{{JOB}}}"
        f"[{durations.render(since - step + inside)}])) * {scrape / since:.9g}, 1)"
    )
    whose = f"{JOB}{_matcher(users)}"
    info = f"max by (instance, job_id, user) (gpu_job_info{{{whose}}})"
    all_held = _fresh("gpu_job_holds_gpu", window)
    held = all_held if users is None else f"({all_held} and {_PER_JOB} gpu_job_info{{{whose}}})"
    tenants = f"count by (instance, uuid) ({all_held})"
    # Of a MIG instance its share, where money.yml records it as it does beside recorded hours.
    share = (
        f"on (instance, uuid) group_left () (max by (instance, uuid) ({SHARE})"
        f" or on (instance, uuid) (0 * {tenants} + 1))"
    )
    shared = f"({held} * {answered} / on (instance, uuid) group_left () {tenants} * {share})"
    seen = f"gpu_job_utilization_ratio{{{JOB}}}[{durations.render(IDLE_SECONDS)}]"
    least = math.ceil(IDLE_SECONDS / 2 / scrape)
    by_user = f"* {_PER_JOB} group_left (user) {info}"
    idle = (
        f"({shared} and on (instance, uuid, job_id) (max_over_time({seen}) <= {IDLE_RATIO:g})"
        f" and on (instance, uuid, job_id) (count_over_time({seen}) >= {least}))"
    )
    if users is None:
        ratio = _fresh("gpu_utilization_ratio", window)
        present = f"count by (instance, uuid) ({_fresh('gpu_up', window)})"
        cards = f"sum({present} * {answered})"
    else:
        fresh = _fresh("gpu_job_utilization_ratio", window)
        ratio = f"({fresh} and {_PER_JOB} gpu_job_info{{{whose}}})"
        cards = f"sum({shared})"

    of_team = "" if team is None else f'{{team="{_quoted(team)}"}}'

    def fleet(name: str) -> str:
        return name if users is None else ""

    def hours(name: str, suffix: str, sampled: str, *, whole: bool = False) -> Measure:
        level, by = ("job", ("job_id", "user", "team")) if whole else ("user", ("user", "team"))
        return Measure(
            name,
            by,
            whole=whole,
            sampled=sampled,
            recorded=f"{level}:{suffix}",
            matcher=of_team,
            each=HOUR_SECONDS,
            width=RECORDED_WIDTH_SECONDS,
        )

    def money(name: str, suffix: str, *more: str) -> Measure:
        return Measure(
            name,
            ("user", "team", *more),
            recorded=f"user:{suffix}",
            matcher=of_team,
            each=1.0,
            width=RECORDED_WIDTH_SECONDS,
        )

    found = [
        Measure("cards", sampled=cards, recorded=fleet("fleet:gpus:count")),
        Measure(
            "utilization",
            level=True,
            sampled=f"avg({ratio})",
            recorded=fleet("fleet:gpu_utilization_ratio:avg"),
        ),
        *(
            Measure(
                f"p{share}",
                level=True,
                sampled=f"quantile({share / 100:g}, {ratio})",
                recorded=fleet(f"fleet:gpu_utilization_ratio:p{share}"),
            )
            for share in (10, 50, 90)
        ),
        Measure("jobs", sampled=f"count(max by (job_id) ({held}))"),
        hours("held", "gpu_hours:sum5m", f"sum by (user) ({shared} {by_user})"),
        hours("idle", "gpu_held_idle_hours:sum5m", f"sum by (user) ({idle} {by_user})"),
        hours(
            "idle_jobs",
            "gpu_held_idle_hours:sum5m",
            f"sum by (job_id, user) ({idle} {by_user})",
            whole=True,
        ),
        money("cost", "gpu_cost:sum5m", "currency"),
        money("idle_cost", "gpu_held_idle_cost:sum5m", "currency"),
        hours("lost", "lost_gpu_hours:increase5m", ""),
        money("lost_cost", "lost_cost:increase5m", "currency"),
        hours("reclaimed", "reclaimed_gpu_hours:increase5m", ""),
    ]
    return {measure.name: measure for measure in found}


def jobs_per_card(seconds: float, users: Collection[str] | None = None) -> str:
    """How many jobs held each card at some time of a window that ends at the evaluation."""
    window = durations.render(seconds)
    held = f"present_over_time(gpu_job_holds_gpu{{{JOB}}}[{window}])"
    if users is not None:
        whose = f"{JOB}{_matcher(users)}"
        held = f"({held} and {_PER_JOB} present_over_time(gpu_job_info{{{whose}}}[{window}]))"
    return f"count by (instance, gpu) (max by (instance, gpu, job_id) ({held}))"


def nodes_up(seconds: float) -> tuple[str, str, str]:
    """Over a window: samples with an answer, nodes that were asked, and how often one was."""
    window = f"up{{{JOB}}}[{durations.render(seconds)}]"
    return (
        f"sum(sum_over_time({window}))",
        f"count(count_over_time({window}))",
        f"max(count_over_time({window}))",
    )


def one_node(instance: str) -> str:
    """Whether one node answered."""
    return f'up{{{JOB},instance="{_quoted(instance)}"}}'


def _fresh(metric: str, window: str) -> str:
    series = f"{metric}{{{JOB}}}"
    return f"({series} and present_over_time({series}[{window}]))"


def _matcher(users: Collection[str] | None) -> str:
    """The part of a selector that names users; of nobody it matches nothing."""
    if users is None:
        return ""
    if not users:
        return ',user=""'
    # Only these mean something to Prometheus' RE2, which takes no needless backslash.
    listed = "|".join(re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", user) for user in sorted(users))
    return f',user=~"{_quoted(listed)}"'


def _quoted(text: str) -> str:
    """A text between the quotes of PromQL."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
