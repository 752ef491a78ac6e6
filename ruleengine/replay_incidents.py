"""What a replay finds: incidents with their stages, ends, and how often rules knew anything."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuwarden.ruleengine.verdicts import Evidence, JobFacts


@dataclass
class RuleCounts:
    """How one rule fared, in ticks of one subject each.

    Attributes:
        judged: where the rule was about the subject.
        yes, unknown: of those.
        reasons: why it was unknown; one tick may have several.
        protected: where the whitelist protected it.
        subjects: jobs or cards that it was about.
    """

    judged: int = 0
    yes: int = 0
    unknown: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    protected: int = 0
    subjects: set[str] = field(default_factory=set)

    @property
    def coverage(self) -> float | None:
        """Share of the ticks at which the answer was known; None where there was none."""
        return (self.judged - self.unknown) / self.judged if self.judged else None


@dataclass(frozen=True, slots=True)
class Entered:
    """A stage of an incident: its key, level, what was (or would be) done, when, and why."""

    stage: str
    level: str
    do: str
    at: float
    evidence: tuple[Evidence, ...] = ()


@dataclass
class End:
    """A job that would have been ended.

    Attributes:
        at: Unix time.
        gpus: cards that it held then.
        work_lost: seconds since its last saved state; None where not known.
        do: terminate, or requeue.
        exempt: the reason of a whitelist entry that means this job, for whatever rule and
            however long ago it expired; empty if there is none.
        kept: a keep that was in force, from another rule or longer than this one allows, in words;
            empty if there was none.
        over: Unix time at which the job really ended, or None while it was still seen.
        seen_until: Unix time to which its history is known.
        active_again: Unix time at which it was at work again, or None.
        active_by: utilization or steps.
    """

    at: float
    gpus: int
    work_lost: float | None
    do: str = "terminate"
    exempt: str = ""
    kept: str = ""
    over: float | None = None
    seen_until: float | None = None
    active_again: float | None = None
    active_by: str = ""

    @property
    def freed_gpu_seconds(self) -> float:
        """What the end would have freed, up to the job's real end or the end of what is known."""
        until = self.over if self.over is not None else self.seen_until
        return 0.0 if until is None else self.gpus * max(0.0, until - self.at)

    @property
    def lost_gpu_seconds(self) -> float | None:
        """What of the work would have been lost; None where not known."""
        return None if self.work_lost is None else self.gpus * self.work_lost


@dataclass
class Incident:
    """A case that came to `for`. Times are Unix seconds.

    Attributes:
        rule: its rule.
        subject: job or card.
        user, team: whose it is; empty where not known.
        gpus: cards of the job when it was detected.
        instances: targets of its nodes.
        begun: the first YES.
        detected: `for` was met.
        idle_since: when the job was last at work before, or None if it never was, as far as seen.
        cause, because: what the facts told of it.
        evidence: when it was detected.
        metadata_missing: what of the job was not known then.
        stages: in order.
        due: both deadlines were over, or None.
        held: guards that kept it from being ended -> the first sentence.
        kept_by: whose keeps put its end off.
        end: if it would have been ended.
        closed: when it was over, or None.
        closed_because: cleared, unknown, gone or ended.
    """

    rule: str
    subject: str
    user: str
    team: str
    gpus: int
    instances: tuple[str, ...]
    begun: float
    detected: float
    idle_since: float | None = None
    cause: str = ""
    because: str = ""
    evidence: tuple[Evidence, ...] = ()
    metadata_missing: tuple[str, ...] = ()
    stages: list[Entered] = field(default_factory=list)
    due: float | None = None
    held: dict[str, str] = field(default_factory=dict)
    kept_by: set[str] = field(default_factory=set)
    end: End | None = None
    closed: float | None = None
    closed_because: str = ""


@dataclass(frozen=True, slots=True)
class Stale:
    """A job that a rule without gates would have ended on data that had stopped."""

    rule: str
    subject: str
    at: float


def missing_metadata(job: JobFacts) -> tuple[str, ...]:
    """What of a job the rules would need and history does not tell."""
    if not job.gpus or job.job_id == job.gpus[0].uuid:
        return ()
    known = {
        "user": bool(job.user),
        "start": job.start_time is not None or job.first_gpu_use is not None,
        "executable": bool(job.executables),
    }
    return tuple(name for name, there in known.items() if not there)
