"""A training watched from a terminal: its own files, and what the engine makes of it.

Only reads. Without an engine everything but its line is there.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden import job_files
from gpuwarden.errors import InvalidInput
from gpuwarden.job_files import RunDescription, RunStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuwarden.clock import Clock

ENGINE_SECONDS = 10.0
"""Between two questions to the engine."""
ENGINE_TIMEOUT_SECONDS = 3.0
ENGINE_BYTES = 4 << 20
SILENCE_SECONDS = 60.0
"""A loop that has not moved for so long is told of."""
_ENDINGS = {
    job_files.EXIT_DONE: "complete",
    job_files.EXIT_REQUEUE: "left, state saved: to be brought back",
    job_files.EXIT_HOLD: "left, state saved: held, because a rule ended it",
    job_files.EXIT_NOT_RESUMABLE: "left, and not resumable",
    job_files.EXIT_FAULT: "ended by a fault",
}


@dataclass(frozen=True, slots=True)
class Sight:
    """What is known of a run at one moment.

    Attributes:
        run_id: of the run.
        now: Unix time.
        status: the newest.
        description: None until the attempt has described itself.
        alive: whether its process is there; None: not known, being of another namespace.
        engine: lines about what the engine makes of it.
    """

    run_id: str
    now: float
    status: RunStatus
    description: RunDescription | None = None
    alive: bool | None = None
    engine: tuple[str, ...] = field(default_factory=tuple)

    @property
    def ended(self) -> bool:
        """Whether this attempt writes no more."""
        return self.status.exit is not None or self.alive is False

    @property
    def steps(self) -> int | None:
        """Batches that the whole run will train on."""
        described = self.description
        if described is None or not described.steps_per_epoch:
            return None
        return described.epochs * described.steps_per_epoch

    @property
    def share(self) -> float | None:
        """How much of the run is done, from 0 to 1."""
        return min(1.0, self.status.step / self.steps) if self.steps else None

    @property
    def remaining(self) -> float | None:
        """Seconds until the end, validations and saves included, at this attempt's own pace."""
        done, seconds = self.status.counters.steps, self.status.counters.phase_seconds
        if self.steps is None or not done or self.ended:
            return None
        spent = sum(seconds.get(phase, 0.0) for phase in ("train", "validate", "checkpoint"))
        if self.status.phase in ("train", "validate", "checkpoint"):
            spent += max(0.0, self.now - self.status.heartbeat)
        return max(0, self.steps - self.status.step) * spent / done


def runs(root: Path) -> list[str]:
    """Runs that have a status, the one that moved last first.

    Args:
        root: of the job files.
    """
    found = []
    for path in (root / "jobs").glob("*.status.json"):
        run_id = path.name.removesuffix(".status.json")
        if job_files.RUN_ID.fullmatch(run_id):
            try:
                found.append((path.lstat().st_mtime, run_id))
            except FileNotFoundError:
                continue
    return [run_id for _time, run_id in sorted(found, reverse=True)]


def look(root: Path, run_id: str, *, now: float, engine: Iterable[str] = ()) -> Sight:
    """What the run's files say now.

    Args:
        root: of the job files.
        run_id: of the run.
        now: Unix time.
        engine: what the engine was found to say.

    Raises:
        InvalidInput: there is no such run here.
    """
    try:
        status = RunStatus.decode(job_files.read(job_files.status_path(root, run_id)).content)
    except FileNotFoundError:
        known = ", ".join(runs(root)[:10]) or "none"
        raise InvalidInput(
            f"{root}/jobs has no run {run_id}; those there: {known}. Its files are on the node "
            "that trains it, in the folder of its --jobs-directory"
        ) from None
    except job_files.JobFileError as error:
        raise InvalidInput(str(error)) from error
    description = None
    try:
        opened = job_files.read(job_files.description_path(root, run_id))
        description = RunDescription.decode(opened.content)
    except (FileNotFoundError, job_files.JobFileError):
        pass
    return Sight(run_id, now, status, description, _alive(description), tuple(engine))


def _alive(description: RunDescription | None) -> bool | None:
    if description is None:
        return None
    try:
        here = Path("/proc/self/ns/pid").stat().st_ino
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return None
    if (here, boot) != (description.pid_ns, description.boot_id):
        return None
    try:
        fields = Path(f"/proc/{description.pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return None
    return int(fields[19]) == description.start_ticks and fields[0] != b"Z"


# ---------------------------------------------------------------------------------------------
# In words


def lines(sight: Sight) -> list[str]:
    """What is seen, for people, one fact a line."""
    status, described = sight.status, sight.description
    said = [_headline(sight)]
    if described is not None:
        said.append(
            clean(
                f"{described.model}, batch {described.batch}, imgsz {described.imgsz}, "
                f"{'mixed' if described.amp else 'full'} precision, "
                f"{described.world_size} process{'es' if described.world_size > 1 else ''}"
            )
        )
    said.append(_progress(sight))
    said += filter(None, [_pace(sight), _figures(status), _memory(status), _saved(sight)])
    if status.request is not None:
        said.append(
            clean(f"asked to leave by {status.request.decision_id}: {status.request.state}")
        )
    said += [clean(line) for line in sight.engine]
    return said


def _headline(sight: Sight) -> str:
    status = sight.status
    if status.exit is not None:
        ending = _ENDINGS.get(status.exit.code, f"ended with status {status.exit.code}")
        return clean(
            f"{sight.run_id}: {ending} ({status.exit.reason}), {age(sight.now, status.exit.time)}"
        )
    if sight.alive is False:
        return (
            f"{sight.run_id}: its process is gone without a word, as after SIGKILL; started again "
            "with the same words it goes on from the state below"
        )
    silent = sight.now - status.heartbeat
    since = f"{status.phase} since {duration(sight.now - status.phase_since)}"
    if silent > SILENCE_SECONDS:
        return f"{sight.run_id}: {since}; the loop has not moved for {duration(silent)}"
    return f"{sight.run_id}: {since}"


def _progress(sight: Sight) -> str:
    status, described = sight.status, sight.description
    epochs = f" of {described.epochs}" if described else ""
    steps = f" of {sight.steps}" if sight.steps else ""
    text = f"epoch {status.epoch + 1}{epochs}, step {status.step}{steps}"
    if sight.share is not None:
        text += f", {100 * sight.share:.1f} %"
    if sight.remaining is not None:
        text += f", about {duration(sight.remaining)} left"
    return text


def _pace(sight: Sight) -> str:
    status, counters = sight.status, sight.status.counters
    parts = []
    if status.throughput is not None and not sight.ended:
        parts.append(f"{status.throughput:.3g} images/s while training")
    seconds = counters.phase_seconds
    trained = seconds.get("train", 0.0)
    if trained > 0:
        parts.append(f"waiting for data {100 * min(1, counters.data_wait_seconds / trained):.0f} %")
    whole = sum(seconds.values())
    if whole > 0:
        shares = [
            f"{phase} {100 * spent / whole:.0f} %"
            for phase, spent in sorted(seconds.items(), key=lambda item: -item[1])
            if spent >= 0.005 * whole
        ]
        parts.append(f"time: {', '.join(shares)}")
    return "; ".join(parts)


def _figures(status: RunStatus) -> str:
    values = [*status.losses.items(), *status.metrics.items()]
    parts = [f"{name.removeprefix('metrics/')} {value:.4g}" for name, value in values]
    if status.counters.nonfinite_losses:
        parts.append(f"{status.counters.nonfinite_losses} losses were not finite")
    return clean(", ".join(parts))


def _memory(status: RunStatus) -> str:
    parts = [
        f"{name} {value / (1 << 30):.1f} GiB"
        for name, value in (
            ("reserved", status.gpu_memory_reserved),
            ("peak", status.gpu_memory_peak),
        )
        if value is not None
    ]
    return f"GPU memory: {', '.join(parts)}" if parts else ""


def _saved(sight: Sight) -> str:
    saved, upload = sight.status.checkpoint, sight.status.upload
    if saved is None:
        text = "no state saved yet"
    else:
        behind = max(0, sight.status.step - saved.step)
        text = f"state of step {saved.step} saved {age(sight.now, saved.durable or saved.time)}"
        text += f", {behind} steps behind" if behind else ""
    text += f"; resumes {_RESUMES.get(sight.status.resume_mode, sight.status.resume_mode)}"
    if upload is not None:
        if upload.pending is not None:
            text += f"; upload is {duration(sight.now - upload.pending)} behind"
        elif upload.uploaded is not None:
            text += "; uploaded"
    return clean(text)


_RESUMES = {"exact": "exactly", "epoch": "from whole epochs", "none": "not known how"}


def duration(seconds: float) -> str:
    """A length of time, in its two largest units."""
    whole = max(0, math.floor(seconds))
    parts: list[str] = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m"), (1, "s")):
        count, whole = divmod(whole, size)
        if count or parts:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2]) or "0s"


def age(now: float, then: float) -> str:
    """How long ago it was."""
    return f"{duration(now - then)} ago"


def clean(text: str) -> str:
    """A job's or server's words without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


# ---------------------------------------------------------------------------------------------
# The engine


class EngineView:
    """What the engine makes of one run, asked at most every `ENGINE_SECONDS`.

    Args:
        url: of the engine; None: nobody is asked.
        run_id: the run.
        clock: monotonic.
    """

    def __init__(self, url: str | None, run_id: str, *, clock: Clock) -> None:
        self._url, self._run_id, self._clock = url, run_id, clock
        self._asked = float("-inf")
        self._lines: tuple[str, ...] = ()

    def lines(self) -> tuple[str, ...]:
        """One line of the job, one of each rule that it breaks; never raises."""
        now = self._clock.monotonic()
        if self._url is not None and now - self._asked >= ENGINE_SECONDS:
            self._asked = now
            try:
                self._lines = tuple(self._ask(self._url.rstrip("/")))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                self._lines = (f"engine: no answer from {self._url} ({_reason(error)})",)
        return self._lines

    def _ask(self, url: str) -> list[str]:
        own = jobs_of(_get(f"{url}/v1/jobs"), self._run_id)
        if len(own) != 1:
            return [unclear(own)]
        return verdicts(_get(f"{url}/v1/jobs/{urllib.parse.quote(own[0], safe='')}"))


def jobs_of(document: dict[str, Any], run_id: str) -> list[str]:
    """Ids of the jobs with a run.

    Args:
        document: the engine's answer to /v1/jobs.
        run_id: the run.
    """
    return [job["job_id"] for job in document["jobs"] if job["run_id"] == run_id]


def unclear(own: list[str]) -> str:
    """What to say where not exactly one job has the run."""
    if not own:
        return "engine: sees no job with this run"
    return f"engine: {len(own)} jobs claim this run ({', '.join(own[:3])})"


def verdicts(document: dict[str, Any]) -> list[str]:
    """What the engine makes of a job, a line for each rule that it breaks.

    Args:
        document: the engine's answer to /v1/jobs/{job_id}.
    """
    job_id = document["job_id"]
    broken = [rule for rule in document["rules"] if rule["case"]]
    if not broken:
        return [f"engine: job {job_id} breaks no rule"]
    said = [f"engine: job {job_id} breaks {len(broken)} rule{'s' if len(broken) > 1 else ''}"]
    for rule in broken:
        case = rule["case"]
        line = f"  {rule['rule']} ({rule['mode']}): {case['state']}"
        if case["not_before"]:
            line += f", nothing happens before {case['not_before']}"
        if case["cause"]:
            line += f"; {case['cause']['because']} {case['cause']['remedy']}"
        said.append(line)
    return said


def _get(url: str) -> Any:
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("not an http(s) URL")
    request = urllib.request.Request(url, headers={"Accept": "application/json"})  # noqa: S310 -- checked above
    with urllib.request.urlopen(request, timeout=ENGINE_TIMEOUT_SECONDS) as response:  # noqa: S310 -- likewise
        return json.loads(response.read(ENGINE_BYTES))


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
