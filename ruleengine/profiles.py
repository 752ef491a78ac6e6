"""Profiles: what a job should need here, by what it declares and by the cards it holds. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuwarden.ruleengine.model import Profile
    from gpuwarden.ruleengine.verdicts import JobFacts


def expectation(job: JobFacts, profiles: Iterable[Profile]) -> Profile | None:
    """The profile that a job should be like.

    Args:
        job: its declared model, batch, image size and AMP, and the cards it holds.
        profiles: all profiles; one that names `amp` is preferred to one that does not.

    Returns:
        None where the job declares nothing, where two jobs claim its run, or where no profile fits
        exactly: an expectation is never extrapolated.
    """
    run = job.run
    if run is None or run.conflict or not job.gpus:
        return None
    fitting = [
        profile
        for profile in profiles
        if (profile.model, profile.batch, profile.imgsz) == (run.model, run.batch, run.imgsz)
        and profile.gpus == len(job.gpus)
        and all(gpu.name == profile.hardware for gpu in job.gpus)
        and (profile.amp is None or profile.amp == run.amp)
    ]
    return min(fitting, key=lambda profile: profile.amp is None, default=None)


def describe(profile: Profile) -> str:
    """A profile in words, such as `yolov8m, batch 64, 640 px on NVIDIA A100-SXM4-40GB`."""
    cards = f"{profile.gpus} x " if profile.gpus > 1 else ""
    amp = {True: ", AMP", False: ", no AMP", None: ""}[profile.amp]
    return (
        f"{profile.model}, batch {profile.batch}, {profile.imgsz} px{amp} "
        f"on {cards}{profile.hardware}"
    )
