"""What a job should need here, by what it declares and by the cards it holds. Pure.

An operator's profile counts where it fits exactly. Where none does, or where it leaves a value out,
the formula of `gpuwarden.estimates` is asked: its answer is a band, it is marked as an estimate
wherever it is shown, and a rule's tolerance begins at the band's end. A model or card that is in
no table has no expectation at all.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from gpuwarden import estimate_tables, estimates, quantities
from gpuwarden.quantities import Unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpuwarden.quantities import Deviation
    from gpuwarden.ruleengine.model import Profile
    from gpuwarden.ruleengine.verdicts import JobFacts, RunFacts

REMEMBERED_ESTIMATES: Final = 4096
"""Jobs of a fleet declare few different trainings; what users invent must not fill memory."""

_SEVERAL_NODES: Final = "it runs on several nodes, of which no figure is public"
_OTHER_CARDS: Final = "it trains on more or fewer cards than it holds"
_UNITS: Final = {
    "throughput": Unit.IMAGES_PER_SECOND,
    "gpu_memory": Unit.BYTES,
    "gpu_utilization": Unit.RATIO,
}


@dataclass(frozen=True, slots=True)
class Expected:
    """What one signal of a job should show.

    Attributes:
        signal: throughput (over all cards), gpu_memory or gpu_utilization (per card).
        value: in the signal's unit.
        low: lower end of an estimate's band; of a profile, the value itself.
        high: likewise its upper end.
        basis: what is trained on what, in words.
        estimated: whether it comes from the formula and not from a profile.
        tolerance: the profile's known spread, or None.
    """

    signal: str
    value: float
    low: float
    high: float
    basis: str
    estimated: bool = False
    tolerance: float | None = None

    def exceeded(self, value: float, deviation: Deviation) -> bool:
        """Whether a measured value deviates by more than a rule allows.

        A profile's own tolerance is the least that is allowed. Of an estimate the nearer end of
        the band might be the truth: the rule's tolerance is allowed beyond it.
        """
        if not self.estimated:
            return deviation.exceeded(value, self.value, tolerance=self.tolerance)
        if self.low <= value <= self.high:
            return False
        end = self.low if value < self.low else self.high
        return deviation.exceeded(value, end)

    @property
    def amount(self) -> str:
        """The value in words; of an estimate, the band."""
        unit = _UNITS[self.signal]
        if not self.estimated:
            return quantities.render(self.value, unit)
        low, high = (quantities.render(end, unit) for end in (self.low, self.high))
        return f"an estimated {low} to {high}"

    def __str__(self) -> str:
        """The amount and what it rests on, for people."""
        by = "estimate by formula: " if self.estimated else ""
        return f"{self.amount} ({by}{self.basis})"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a job should show.

    Attributes:
        values: signal -> what is expected of it; signals without an expectation are absent.
        missing: why there is none for the others, in words.
        reason: the same as a short word for machines: no_run, run_conflict, no_gpus or no_profile.
    """

    values: Mapping[str, Expected]
    missing: str
    reason: str = "no_profile"


def expectation(job: JobFacts, profiles: Iterable[Profile], *, team: str = "") -> Expectation:
    """What a job should show.

    Args:
        job: its declared model, batch, image size and AMP, and the cards it holds.
        profiles: all profiles; one that names `amp` is preferred to one that does not.
        team: whose rule asks; its own profiles go before those of all.

    Returns:
        The fitting profile's values, and estimates for what it leaves out; nothing where the job
        declares nothing, where two jobs claim its run, or where model or card are not known.
    """
    run = job.run
    if run is None:
        return _nothing("no_run", "it declares no training")
    if run.conflict:
        return _nothing("run_conflict", f"the run {run.run_id} is claimed twice")
    if not job.gpus:
        return _nothing("no_gpus", "it holds no card")
    if _elsewhere(job, run):
        return _nothing("no_profile", _OTHER_CARDS)
    profile = _fitting(job, run, [p for p in profiles if p.team in ("", team)])
    known = {} if profile is None else _of_profile(profile)
    found = _estimate(job, run)
    if isinstance(found, str):
        return Expectation(MappingProxyType(known), f"no profile fits, and no estimate: {found}")
    estimated = {item.signal: item for item in found}
    return Expectation(
        MappingProxyType(estimated | known), "no profile says it, and the formula does not"
    )


class Expectations:
    """`expectation` for a whole fleet: jobs that declare the same on the same cards share it.

    Args:
        profiles: all profiles.
    """

    def __init__(self, profiles: Sequence[Profile]) -> None:
        self.profiles = profiles
        self._known: dict[object, Expectation] = {}

    def of(self, job: JobFacts, team: str) -> Expectation:
        """What a job should show, asked by a rule of this team or by one of all."""
        run = job.run
        if run is None or run.conflict:
            return expectation(job, self.profiles, team=team)
        cards = tuple([(gpu.name, gpu.memory_total_bytes) for gpu in job.gpus])
        declared = (
            team,
            run.model,
            run.batch,
            run.imgsz,
            run.amp,
            len(set(job.instances)) > 1,
            _elsewhere(job, run),
            cards,
        )
        found = self._known.get(declared)
        if found is None:
            if len(self._known) >= REMEMBERED_ESTIMATES:
                self._known.clear()
            found = self._known[declared] = expectation(job, self.profiles, team=team)
        return found


def _nothing(reason: str, missing: str) -> Expectation:
    return Expectation(MappingProxyType({}), missing, reason)


def _elsewhere(job: JobFacts, run: RunFacts) -> bool:
    """Whether the batch is spread over other cards than those that the job holds.

    Of several nodes each holds fewer than the whole training runs on.
    """
    return run.other_cards and not len(set(job.instances)) > 1


def _fitting(job: JobFacts, run: RunFacts, profiles: Iterable[Profile]) -> Profile | None:
    fitting = [
        profile
        for profile in profiles
        if (profile.model, profile.batch, profile.imgsz) == (run.model, run.batch, run.imgsz)
        and profile.gpus == len(job.gpus)
        and all(gpu.name == profile.hardware for gpu in job.gpus)
        and (profile.amp is None or profile.amp == run.amp)
    ]
    return min(fitting, key=lambda profile: (not profile.team, profile.amp is None), default=None)


def _of_profile(profile: Profile) -> dict[str, Expected]:
    basis = _words(
        profile.model,
        profile.batch,
        profile.imgsz,
        amp=profile.amp,
        gpus=profile.gpus,
        hardware=profile.hardware,
    )
    return {
        signal: Expected(signal, value, value, value, basis, tolerance=profile.tolerance)
        for signal, value in profile.expected.items()
    }


def needed_memory(job: JobFacts) -> estimates.Range | str:
    """Bytes on each card that the training which a job declares will need, or why not known.

    It is not asked whether they fit: that is for who compares them with the card.
    """
    run = job.run
    if run is None:
        return "it declares no training"
    if run.conflict:
        return f"the run {run.run_id} is claimed twice"
    if not job.gpus:
        return "it holds no card"
    if not run.model or run.batch is None or run.imgsz is None or run.amp is None:
        return _undeclared(run)
    if _elsewhere(job, run) or len(set(job.instances)) > 1:
        return _OTHER_CARDS if _elsewhere(job, run) else _SEVERAL_NODES
    return _needed(run.model, run.batch, run.imgsz, amp=run.amp, gpus=len(job.gpus))


@functools.lru_cache(maxsize=REMEMBERED_ESTIMATES)
def _needed(model: str, batch: int, imgsz: int, *, amp: bool, gpus: int) -> estimates.Range | str:
    found = estimate_tables.needed(model, batch, imgsz=imgsz, amp=amp, gpus=gpus)
    return str(found) if isinstance(found, estimates.Unknown) else found.total


def _undeclared(run: RunFacts) -> str:
    given = {"model": run.model or None, "batch": run.batch, "imgsz": run.imgsz, "amp": run.amp}
    return f"{', '.join(name for name, value in given.items() if value is None)} is not known"


def _estimate(job: JobFacts, run: RunFacts) -> tuple[Expected, ...] | str:
    """The formula's answer for what a job declares, or why there is none."""
    if not run.model or run.batch is None or run.imgsz is None or run.amp is None:
        return _undeclared(run)
    if len(set(job.instances)) > 1:
        return _SEVERAL_NODES
    names = {gpu.name for gpu in job.gpus}
    if len(names) > 1:
        return "its cards differ"
    totals = [gpu.memory_total_bytes for gpu in job.gpus if gpu.memory_total_bytes is not None]
    return _estimated(
        run.model,
        run.batch,
        run.imgsz,
        amp=run.amp,
        gpus=len(job.gpus),
        hardware=names.pop(),
        gpu_memory=min(totals, default=None),
    )


@functools.lru_cache(maxsize=REMEMBERED_ESTIMATES)
def _estimated(
    model: str,
    batch: int,
    imgsz: int,
    *,
    amp: bool,
    gpus: int,
    hardware: str,
    gpu_memory: float | None,
) -> tuple[Expected, ...] | str:
    found = estimate_tables.expected(
        model, batch, imgsz=imgsz, amp=amp, hardware=hardware, gpus=gpus, gpu_memory=gpu_memory
    )
    if isinstance(found, estimates.Unknown):
        return str(found)
    basis = _words(model, batch, imgsz, amp=amp, gpus=gpus, hardware=hardware)

    def banded(signal: str, band: estimates.Range) -> Expected:
        return Expected(signal, band.expected, band.low, band.high, basis, estimated=True)

    return banded("throughput", found.throughput), banded("gpu_memory", found.gpu_memory)


def _words(
    model: str, batch: int, imgsz: int, *, amp: bool | None, gpus: int, hardware: str
) -> str:
    """Such as `yolov8m, batch 64, 640 px, AMP on 2 x NVIDIA A100-SXM4-40GB`."""
    cards = f"{gpus} x " if gpus > 1 else ""
    mixed = {True: ", AMP", False: ", no AMP", None: ""}[amp]
    return f"{model}, batch {batch}, {imgsz} px{mixed} on {cards}{hardware}"
