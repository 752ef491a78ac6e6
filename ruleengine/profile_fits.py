"""What trainings of one kind usually show, from runs that went well. Pure.

Robust throughout: the median of the runs' medians, and how far the runs lie from it, so that one
sick run neither moves a profile nor hides in it. A run counts once, however long it was.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gpuwarden import quantities
from gpuwarden.quantities import Unit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

SIGNALS: Final = {
    "throughput": Unit.IMAGES_PER_SECOND,
    "gpu_memory": Unit.BYTES,
    "gpu_utilization": Unit.RATIO,
}
"""What a profile may expect, with its units."""
SIGMAS: Final = 1.4826
"""Of a normal distribution, its standard deviation over its median absolute deviation."""
OUTLIER_SIGMAS: Final = 3.5
"""B. Iglewicz and D. Hoaglin, How to Detect and Handle Outliers (1993): modified z-score."""
OUTLIER_SHARE: Final = 0.1
"""Runs that agree to within this are never outliers, however much closer the others agree."""
GROUP_GAP: Final = 0.25
"""Share of the runs' median by which two groups of runs lie apart."""
GROUP_SHARE: Final = 0.25
"""Share of the runs that are a group of their own and no outliers: another data set, say."""
MAX_TOLERANCE: Final = 1.0
"""Of a value with this spread nothing is too low: it is no expectation."""
MIN_TOLERANCE: Final = 0.05
WINDOW_SHARE: Final = 0.95
"""Share of the healthy windows that a rule with the profile's own tolerance passes over."""


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """What is trained on what; profiles are kept by it."""

    model: str
    batch: int
    imgsz: int
    amp: bool
    hardware: str
    gpus: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a training, over all its attempts.

    Attributes:
        kind: what it trained on what.
        run_id: of the trainer.
        user: its owner.
        jobs: its attempts, in order.
        begin, end: Unix times of its first and last window.
        trained: seconds of training in windows that count.
        windows: signal -> its mean in each window that counts.
        unhealthy: why the run cannot be learnt from, or an empty string.
        passed_over: why windows were passed over -> how many.
    """

    kind: Kind
    run_id: str
    user: str
    jobs: tuple[str, ...]
    begin: float
    end: float
    trained: float
    windows: Mapping[str, Sequence[float]]
    unhealthy: str = ""
    passed_over: Mapping[str, int] = field(default_factory=dict)

    def median(self, signal: str) -> float | None:
        """The run's usual value, or None where it was never measured."""
        values = self.windows.get(signal, ())
        return statistics.median(values) if values else None


@dataclass(frozen=True, slots=True)
class Fitted:
    """One expected value.

    Attributes:
        value: median of the runs' medians.
        low, high: the runs' medians, from the least to the greatest.
        mad: median absolute deviation of the runs' medians.
        runs: how many measured it.
    """

    value: float
    low: float
    high: float
    mad: float
    runs: int


@dataclass(frozen=True, slots=True)
class Left:
    """A run that was not learnt from, and why."""

    run: Run
    why: str


@dataclass(frozen=True, slots=True)
class Fit:
    """What was learnt of one kind.

    Attributes:
        kind: what is trained on what.
        values: signal -> what is expected; empty if there is too little.
        tolerance: known spread, as a share; 0 without values.
        runs: that it was learnt from.
        left: runs that it was not, among them outliers.
        too_little: why there is no profile, or an empty string.
        disagreed: signal -> why nothing is expected of it.
    """

    kind: Kind
    values: Mapping[str, Fitted]
    tolerance: float
    runs: tuple[Run, ...]
    left: tuple[Left, ...]
    too_little: str = ""
    disagreed: Mapping[str, str] = field(default_factory=dict)

    @property
    def users(self) -> int:
        """How many people's runs it rests on."""
        return len({run.user for run in self.runs})


@dataclass(frozen=True, slots=True)
class Demands:
    """What is asked of the data before it becomes a profile.

    Attributes:
        runs: healthy runs, at least.
        users: of so many people, at least.
        days: on so many days (UTC), at least.
        trained: seconds that a run must have trained.
    """

    runs: int = 3
    users: int = 1
    days: int = 1
    trained: float = 1800.0


def fits(runs: Iterable[Run], demands: Demands) -> list[Fit]:
    """A fit for every kind that was seen, in order of kinds."""
    kinds: dict[Kind, list[Run]] = {}
    for run in runs:
        kinds.setdefault(run.kind, []).append(run)
    return [_fit(kind, found, demands) for kind, found in sorted(kinds.items())]


def _fit(kind: Kind, runs: list[Run], demands: Demands) -> Fit:
    healthy, left = [], []
    for run in sorted(runs, key=lambda item: (item.begin, item.run_id)):
        why = run.unhealthy or _too_short(run, demands)
        if why:
            left.append(Left(run, why))
        else:
            healthy.append(run)
    disagreed = {signal: why for signal in SIGNALS if (why := _groups(healthy, signal))}
    kept, outliers = _without_outliers(healthy, set(SIGNALS) - set(disagreed))
    left += outliers
    too_little = _too_little(kept, demands)
    if too_little:
        return Fit(kind, {}, 0.0, tuple(kept), tuple(left), too_little)
    values, tolerance = dict[str, Fitted](), 0.0
    for signal in SIGNALS:
        item = None if signal in disagreed else _fitted(kept, signal)
        if item is None:
            continue
        spread = _spread(kept, signal, item)
        if spread >= MAX_TOLERANCE:
            low, high = (quantities.render(end, SIGNALS[signal]) for end in (item.low, item.high))
            disagreed[signal] = f"they do not agree: {low} to {high}"
            continue
        values[signal], tolerance = item, max(tolerance, spread)
    if not values:
        too_little = "; ".join(f"{signal}: {why}" for signal, why in disagreed.items())
    return Fit(kind, values, tolerance, tuple(kept), tuple(left), too_little, disagreed)


def _groups(runs: list[Run], signal: str) -> str:
    """Why the runs are of two kinds in a signal, or an empty string.

    What is trained on makes half of the speed, and no label says what that was: a value between
    two groups is that of no run, and that of the larger one accuses the other.
    """
    known = sorted(value for run in runs if (value := run.median(signal)) is not None)
    least = max(2, math.ceil(GROUP_SHARE * len(known)))
    places = range(least, len(known) - least + 1)
    if not places:
        return ""
    at = max(places, key=lambda place: known[place] - known[place - 1])
    if known[at] - known[at - 1] <= GROUP_GAP * statistics.median(known):
        return ""
    lower, upper = (
        f"{len(part)} at {quantities.render(statistics.median(part), SIGNALS[signal])}"
        for part in (known[:at], known[at:])
    )
    return f"they are of two kinds, {lower} and {upper}"


def _too_short(run: Run, demands: Demands) -> str:
    if run.trained >= demands.trained:
        return ""
    found, wanted = (f"{seconds / 60:.0f} min" for seconds in (run.trained, demands.trained))
    return f"it trained for {found} that count; {wanted} are needed{_passed_over(run)}"


def _passed_over(run: Run) -> str:
    parts = [f"{count} windows: {why}" for why, count in sorted(run.passed_over.items())]
    return f" ({'; '.join(parts)})" if parts else ""


def _without_outliers(runs: list[Run], signals: Collection[str]) -> tuple[list[Run], list[Left]]:
    """Runs that agree in these signals, and those that do not; judged by all of them, once."""
    # By place: two people may have called their runs the same.
    why: dict[int, str] = {}
    for signal, unit in SIGNALS.items():
        known = {
            place: value
            for place, run in enumerate(runs)
            if (value := run.median(signal)) is not None
        }
        if len(known) < 3 or signal not in signals:
            continue  # of two that differ nobody knows which is sick
        middle = statistics.median(known.values())
        mad = statistics.median(abs(value - middle) for value in known.values())
        limit = max(OUTLIER_SIGMAS * SIGMAS * mad, OUTLIER_SHARE * middle)
        for place, value in known.items():
            if abs(value - middle) > limit:
                found, usual = (quantities.render(item, unit) for item in (value, middle))
                why.setdefault(place, f"outlier: {signal} {found}, where {usual} is usual")
    kept = [run for place, run in enumerate(runs) if place not in why]
    return kept, [Left(runs[place], why[place]) for place in sorted(why)]


def _too_little(runs: list[Run], demands: Demands) -> str:
    users = {run.user for run in runs}
    days = {int(moment // 86400) for run in runs for moment in (run.begin, run.end)}
    found = (
        (len(runs), demands.runs, "healthy runs"),
        (len(users), demands.users, "people"),
        (len(days), demands.days, "days"),
    )
    lacks = [f"{count} of {wanted} {what}" for count, wanted, what in found if count < wanted]
    return ", ".join(lacks)


def _fitted(runs: list[Run], signal: str) -> Fitted | None:
    known = [value for run in runs if (value := run.median(signal)) is not None]
    if not known or statistics.median(known) <= 0:
        return None
    middle = statistics.median(known)
    mad = statistics.median(abs(value - middle) for value in known)
    return Fitted(middle, min(known), max(known), mad, len(known))


def _spread(runs: list[Run], signal: str, fitted: Fitted) -> float:
    """How far healthy runs, and healthy windows of theirs, lie from what is expected."""
    runs_apart = max(fitted.high - fitted.value, fitted.value - fitted.low)
    windows = sorted(
        abs(value - fitted.value) for run in runs for value in run.windows.get(signal, ())
    )
    usual = windows[min(len(windows) - 1, math.ceil(WINDOW_SHARE * len(windows)) - 1)]
    apart = max(runs_apart, usual, OUTLIER_SIGMAS * SIGMAS * fitted.mad)
    return max(MIN_TOLERANCE, math.ceil(apart / fitted.value * 100 - 1e-9) / 100)
