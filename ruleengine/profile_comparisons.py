"""Profiles beside the estimate by formula, and beside what runs really measured. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuwarden import estimate_tables, estimates, quantities
from gpuwarden.ruleengine.profile_fits import SIGNALS, Kind
from gpuwarden.ruleengine.profile_texts import kind_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.ruleengine.model import Profile
    from gpuwarden.ruleengine.profile_fits import Run

SCHEMA = "gpuwarden.profile-comparison/v1"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One signal of one kind of training, in its base unit; None where it is not known.

    Attributes:
        words: the kind, for people.
        signal: what is compared.
        profile: what a profile expects.
        low, high: what the formula estimates.
        measured: median of the runs' medians.
        runs: how many measured it.
        tolerance: the profile's own, or None.
        seen: whether any such run was there at all, measured or not.
    """

    words: str
    signal: str
    profile: float | None
    low: float | None
    high: float | None
    measured: float | None
    runs: int
    tolerance: float | None = None
    seen: bool = False

    @property
    def deviation(self) -> float | None:
        """How far what was measured is from the profile, as a share; above is positive."""
        if self.profile is None or self.measured is None:
            return None
        return self.measured / self.profile - 1.0

    @property
    def remark(self) -> str:
        """What to think of it, in a few words."""
        deviation = self.deviation
        if deviation is None:
            if self.measured is None:
                return "seen, but nothing of it counts" if self.seen else "never seen"
            return "no profile" if self.low is not None else "no profile, no estimate"
        if abs(deviation) <= (self.tolerance or 0.0) or abs(deviation) < 0.05:
            return "fits"
        return "learn it anew" if self.tolerance is not None else "has no tolerance"


def comparisons(profiles: Sequence[Profile], runs: Sequence[Run]) -> list[Comparison]:
    """Every profile with the runs that it fits, then kinds of runs that none fits.

    Args:
        profiles: of rule files.
        runs: healthy or not, since this is a look and not a lesson.
    """
    measured: dict[Kind, list[Run]] = {}
    for run in runs:
        measured.setdefault(run.kind, []).append(run)
    found, used = [], set[Kind]()
    for profile in profiles:
        fitting = [kind for kind in measured if _fits(profile, kind)]
        used.update(fitting)
        kinds = fitting or [_kind_of(profile)]
        for kind in kinds:
            found += _compared(kind, profile, measured.get(kind, []))
    for kind in sorted(set(measured) - used):
        found += _compared(kind, None, measured[kind])
    return found


def _fits(profile: Profile, kind: Kind) -> bool:
    known = (profile.model, profile.batch, profile.imgsz, profile.hardware, profile.gpus)
    return (
        known == (kind.model, kind.batch, kind.imgsz, kind.hardware, kind.gpus)
    ) and profile.amp in (None, kind.amp)


def _kind_of(profile: Profile) -> Kind:
    amp = True if profile.amp is None else profile.amp
    return Kind(profile.model, profile.batch, profile.imgsz, amp, profile.hardware, profile.gpus)


def _compared(kind: Kind, profile: Profile | None, runs: Sequence[Run]) -> list[Comparison]:
    estimate = _estimate(kind)
    expected = {} if profile is None else profile.expected
    rows = []
    for signal in SIGNALS:
        known = [value for run in runs if (value := run.median(signal)) is not None]
        band = estimate.get(signal)
        if signal not in expected and (profile is not None or not known):
            continue
        rows.append(
            Comparison(
                words=kind_words(kind),
                signal=signal,
                profile=expected.get(signal),
                low=None if band is None else band.low,
                high=None if band is None else band.high,
                measured=statistics.median(known) if known else None,
                runs=len(known),
                tolerance=None if profile is None else profile.tolerance,
                seen=bool(runs),
            )
        )
    return rows


def _estimate(kind: Kind) -> dict[str, estimates.Range]:
    found = estimate_tables.expected(
        kind.model,
        kind.batch,
        imgsz=kind.imgsz,
        amp=kind.amp,
        hardware=kind.hardware,
        gpus=kind.gpus,
    )
    if isinstance(found, estimates.Unknown):
        return {}
    return {"throughput": found.throughput, "gpu_memory": found.gpu_memory}


def amounts(item: Comparison) -> tuple[str, str, str, str]:
    """Profile, estimate, measured and deviation, for people."""
    unit = SIGNALS[item.signal]

    def said(value: float | None) -> str:
        return "" if value is None else quantities.render(value, unit)

    band = "" if item.low is None else f"{said(item.low)} to {said(item.high)}"
    deviation = "" if item.deviation is None else f"{item.deviation:+.0%}"
    return said(item.profile), band, said(item.measured), deviation


def comparison_document(items: Sequence[Comparison]) -> dict[str, Any]:
    """The same for programs."""
    return {
        "schema": SCHEMA,
        "comparisons": [
            {
                "kind": item.words,
                "signal": item.signal,
                "profile": item.profile,
                "tolerance": item.tolerance,
                "estimate": None if item.low is None else [item.low, item.high],
                "measured": item.measured,
                "runs": item.runs,
                "deviation": item.deviation,
                "remark": item.remark,
            }
            for item in items
        ],
    }
