"""A task as a batch script of Slurm's, which works as well where nothing of gpuwarden runs. Pure.

The last line is `exec gpuwarden train ...`: the trainer itself gets the signals that Slurm sends to
a batch script, which a shell would keep from it. It leaves with status 75, by which Slurm queues it
again (RequeueExit), and goes on where it was.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import InvalidInput
from gpuwarden.scheduling import windows
from gpuwarden.scheduling.slurm.meanings import MARK
from gpuwarden.scheduling.slurm.names import account_of, partition_of, qos_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.tasks import Task

SIGNAL: Final = "USR1"
MOST_NOTICE_SECONDS: Final = 65_535
"""What `sbatch --signal` takes."""
USUAL_NOTICE_SECONDS: Final = 300
"""Where neither the epoch nor the policy's deadline is known."""
TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{8,64}")
_JOB = re.compile(r"[0-9]{1,10}(_[0-9]{1,10})?")
_COMMENT = re.compile(
    rf"{MARK}:(?P<token>[A-Za-z0-9_-]{{8,64}})(?::run=(?P<run>[A-Za-z0-9_-]{{1,64}}))?"
    r"(?::window=(?P<window>[A-Za-z0-9._-]{1,63}))?"
)


@dataclass(frozen=True, slots=True)
class Comment:
    """What the comment of a submitted job says.

    A job's user may write into it whatever he likes: it says something about his own job only.

    Attributes:
        token: of the submission.
        run_id: of the trainer, or None.
        window: of the policy, in which alone it may run, or None.
    """

    token: str
    run_id: str | None = None
    window: str | None = None

    def __str__(self) -> str:
        """As it is given to `sbatch --comment`."""
        run = "" if self.run_id is None else f":run={self.run_id}"
        return f"{MARK}:{self.token}{run}{'' if self.window is None else f':window={self.window}'}"


def read_comment(text: str) -> Comment | None:
    """What a comment says; None of one that is not gpuwarden's."""
    found = _COMMENT.fullmatch(text.strip())
    return None if found is None else Comment(found["token"], found["run"], found["window"])


@dataclass(frozen=True, slots=True)
class Script:
    """What `sbatch` is given.

    Attributes:
        text: the batch script, with everything that was asked for.
        warnings: what could not be asked for as the task says.
    """

    text: str
    warnings: tuple[str, ...] = ()


def notice_seconds(task: Task, policy: Policy) -> int:
    """How long before its end a job is told, in seconds: two epochs and a save.

    Never more than half of its time limit: it would be told as soon as it began.
    """
    if task.epoch_seconds is not None:
        wanted = 2 * task.epoch_seconds + (task.save_seconds or 0.0)
    elif policy.preemption is not None:
        wanted = policy.preemption.deadline
    else:
        wanted = USUAL_NOTICE_SECONDS
    if task.time_limit_seconds is not None:
        wanted = min(wanted, limit_minutes(task.time_limit_seconds) * 30)
    return max(1, min(math.ceil(wanted), MOST_NOTICE_SECONDS))


def limit_minutes(seconds: float) -> int:
    """A time limit in Slurm's minutes, of which a begun one counts whole."""
    return max(1, math.ceil(seconds / 60))


def script(task: Task, policy: Policy, now: float) -> Script:
    """The batch script of a task.

    Args:
        task: what is to be run.
        policy: whose accounts, QOS and cards it names.
        now: Unix time, for the window's next opening.

    Raises:
        InvalidInput: the task cannot be said to Slurm.
    """
    if policy.team(task.team) is None:
        raise InvalidInput(f"the policy has no team {task.team}")
    warnings: list[str] = []
    lines = [
        f"--job-name={task.name}",
        f"--account={account_of(policy, task.team)}",
        *_if("--qos", qos_of(policy, task.priority)),
        *_if("--partition", partition_of(policy, task.gpu_type or "", task.priority)),
        "--nodes=1",
        "--ntasks=1",
        f"--gres=gpu:{_cards(task, policy)}",
        *_host(task, policy),
        *_limit(task, warnings),
        "--requeue",
        "--open-mode=append",
        f"--output={task.name}-%j.log",
        f"--chdir={_directory(task)}",
        f"--signal={_signal(task, policy, warnings)}",
        *_if("--begin", begin(task, policy, now)),
        *_if("--dependency", _dependency(task)),
        *policy.slurm.sbatch,
    ]
    if task.deadline is not None:
        warnings.append("Slurm is not told of the deadline: a job that misses it goes on")
    head = "\n".join(f"#SBATCH {line}" for line in lines)
    body = f"{_end(task)}exec {_command(task, policy)}\n"
    return Script(f"#!/bin/sh\n{head}\n\n{body}", tuple(warnings))


def _end(task: Task) -> str:
    """Tells the trainer when Slurm will end it, which Slurm before 23.02 does not."""
    if task.time_limit_seconds is None:
        return ""
    seconds = 60 * limit_minutes(task.time_limit_seconds)
    return f': "${{SLURM_JOB_END_TIME:=$(($(date +%s) + {seconds}))}}"\nexport SLURM_JOB_END_TIME\n'


def _command(task: Task, policy: Policy) -> str:
    patient = policy.preemption is not None and policy.preemption.notice == "epoch"
    if patient and not any(each.startswith("--on-signal") for each in task.options):
        task = dataclasses.replace(task, options=(*task.options, "--on-signal=epoch"))
    if task.image is None:
        return shlex.join(task.command)
    if not policy.slurm.container:
        raise InvalidInput(
            "slurm.container of the policy does not say how a job is run in an image: add it, or "
            "submit without --image"
        )
    around = (word.replace("{image}", task.image) for word in policy.slurm.container)
    return shlex.join((*around, *task.command))


def _cards(task: Task, policy: Policy) -> str:
    card = policy.card(task.gpu_type) if task.gpu_type is not None else None
    if card is None:
        return str(task.gpus)
    if card.slurm is None:
        raise InvalidInput(f"cards: {card.name} has no `slurm:`, by which Slurm would know it")
    return f"{card.slurm.gres}:{task.gpus}"


def _host(task: Task, policy: Policy) -> Sequence[str]:
    """Processors and memory of the node, where the policy says how many go with a card."""
    card = policy.card(task.gpu_type) if task.gpu_type is not None else None
    if card is None or card.slurm is None:
        return ()
    cpus, memory = card.slurm.cpus, card.slurm.host_memory
    return (
        *(() if cpus is None else (f"--cpus-per-task={cpus * task.gpus}",)),
        *(() if memory is None else (f"--mem={math.ceil(memory * task.gpus / 2**20)}M",)),
    )


def _limit(task: Task, warnings: list[str]) -> Sequence[str]:
    if task.time_limit_seconds is None:
        warnings.append(
            "no time limit: Slurm cannot start it in front of a booking or of a larger job; say "
            "--time"
        )
        return ()
    return (f"--time={limit_minutes(task.time_limit_seconds)}",)


def _signal(task: Task, policy: Policy, warnings: list[str]) -> str:
    """By which signal it is told, how long before; `R` also lets it start in front of a booking.

    A job that Slurm may have to end for a reservation is started in front of it only if it asked to
    be told (R), and then Slurm needs to know how long it would run.
    """
    seconds = notice_seconds(task, policy)
    if task.epoch_seconds is not None and seconds < task.epoch_seconds:
        warnings.append(
            "the notice is shorter than an epoch: the job saves within the epoch that it is in"
        )
    may_make_way = policy.bookings is not None and task.time_limit_seconds is not None
    # A reservation (MaxStartDelay) lets nobody in front of it who wants a longer notice.
    if may_make_way and policy.bookings is not None and seconds > policy.bookings.lead_time:
        warnings.append(
            "its notice is longer than bookings.lead_time of the policy: it cannot start in front "
            "of a booking"
        )
    return f"{'RB' if may_make_way else 'B'}:{SIGNAL}@{seconds}"


def begin(task: Task, policy: Policy, now: float) -> str | None:
    """When it may start at the earliest: at once (None), or a moment in Slurm's words.

    Raises:
        InvalidInput: the policy has no such window.
    """
    earliest = max(now, task.not_before or 0.0)
    if task.window is not None:
        window = policy.window(task.window)
        if window is None:
            raise InvalidInput(f"the policy has no window {task.window}")
        spans = window.openings(policy.timezone, earliest)
        if windows.opening_at(spans, earliest) is None:
            following = windows.next_opening(spans, earliest)
            if following is None:
                raise InvalidInput(f"window {task.window} does not open within nine days")
            earliest = following.begin
    return None if earliest <= now else f"uts{math.ceil(earliest)}"


def _dependency(task: Task) -> str | None:
    wrong = [job for job in task.after if not _JOB.fullmatch(job)]
    if wrong:
        raise InvalidInput(f"{', '.join(wrong)}: no number of a job of Slurm's, such as 12 or 12_3")
    return ":".join(("afterok", *task.after)) if task.after else None


def _directory(task: Task) -> str:
    """Where it starts, quoted for a line `#SBATCH`, which Slurm splits by rules of its own."""
    if "%" in task.directory or "\\" in task.directory:
        raise InvalidInput(
            f"{task.directory}: for Slurm, % and \\ in a folder's name mean something else; start "
            "the training in another one"
        )
    return '"' + task.directory.replace('"', '\\"') + '"'


def _if(option: str, value: str | None) -> Sequence[str]:
    return () if value is None else (f"{option}={value}",)
