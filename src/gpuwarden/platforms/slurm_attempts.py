"""One job of Slurm's as whoever ends it must see it, and the signal that its script asked for.

The list is asked for as in `slurm_texts`, so that no user's words can be mistaken for Slurm's.
"""

from __future__ import annotations

import re
import shlex
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from gpuwarden.platforms.slurm_texts import LIST_FIELDS, decode_rows, listed_job, rows_format

if TYPE_CHECKING:
    from gpuwarden.platforms.slurm import SlurmJob

RECORD_FIELDS: Final = (
    *LIST_FIELDS,
    "UserName",
    "Reason",
    "admin_comment",
    "BatchFlag",
    "tres-per-job",
    "tres-per-node",
    "tres-per-socket",
    "tres-per-task",
)
"""What `squeue --states=all --jobs=NUMBER -O` is asked for."""
UNKNOWN_JOB: Final = "Invalid job id specified"
"""How every command of the controller says that it knows no such job, any more or at all."""

_GPU = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?=[:=,]|$)")
_HELD: Final = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})


@dataclass(frozen=True, slots=True)
class Record:
    """What Slurm's controller keeps of a job.

    Attributes:
        job: the job.
        mark: the administrators' comment.
        batch: whether it was submitted with a script.
        gpu: whether it asks for cards.
    """

    job: SlurmJob
    mark: str = ""
    batch: bool = False
    gpu: bool = False

    @property
    def held(self) -> bool:
        """Whether it waits until a person releases it."""
        return bool(self.job.states & _HELD) or self.job.reason.startswith("JobHeld")

    @property
    def word(self) -> str:
        """Its states in Slurm's words, with why it waits where it does."""
        states = "+".join(sorted(self.job.states)) or "no state"
        reason = self.job.reason
        return states if reason in ("", "None") or self.job.nodes else f"{states} ({reason})"


def record_format(mark: str) -> str:
    """`slurm_texts.rows_format` of `RECORD_FIELDS`, whose answer `decode_records` reads."""
    return rows_format(RECORD_FIELDS, mark)


def decode_records(text: str, mark: str) -> tuple[Record, ...]:
    """Jobs of an answer in `record_format`.

    Raises:
        ServiceUnavailable: it is no such answer.
    """
    found = []
    for row in decode_rows(text, mark, RECORD_FIELDS):
        word = {name: _word(row[name]) for name in RECORD_FIELDS}
        job = replace(listed_job(row), user_name=word["UserName"], reason=word["Reason"])
        found.append(
            Record(
                job,
                mark=word["admin_comment"],
                batch=word["BatchFlag"] not in ("", "0"),
                gpu=any(_GPU.search(word[f"tres-per-{way}"]) for way in _WAYS)
                or bool(job.tres.get("gres/gpu")),
            )
        )
    return tuple(found)


_WAYS: Final = ("job", "node", "socket", "task")


def _word(text: str) -> str:
    text = text.strip()
    return "" if text in ("(null)", "N/A") else text


# ---------------------------------------------------------------------------------------------
# --signal

_SIGNAL = re.compile(
    r"(?P<flags>[RB]{1,2}:)?(?P<signal>[A-Za-z][A-Za-z0-9]{1,15}|[0-9]{1,2})(?:@[0-9]{1,6})?"
)
_NEVER: Final = frozenset({signal.SIGKILL, signal.SIGSTOP})
_MAX_SCRIPT_LINES = 10_000


@dataclass(frozen=True, slots=True)
class AskedSignal:
    """What a job asked for with `--signal`.

    Attributes:
        name: such as USR1.
        batch: for the batch shell alone; else for the job's steps.
        makes_way: whether Slurm may start the job in front of a reservation, and tells it itself
            when that begins.
    """

    name: str
    batch: bool = False
    makes_way: bool = False


def accounted_state(text: str, submit_time: int) -> str:
    """The state of one attempt in accounting; an empty string where it is not there.

    Args:
        text: of `sacct --parsable2 --noheader --format=Submit,State`, the job's attempts, the last
            of which counts. A state may be followed by who cancelled it.
        submit_time: the attempt's, Unix time, as SLURM_TIME_FORMAT=%s has sacct print it.
    """
    found = ""
    for line in text.splitlines():
        submitted, _, said = line.partition("|")
        words = said.split()
        if submitted == str(submit_time) and words:
            found = words[0]
    return found


def asked_signal(script: str) -> AskedSignal | None:
    """The signal that a batch script asks for in its own lines, or None.

    Slurm 22.05 to 24.11 tell `--signal` neither in `squeue --json` nor in `scontrol show job`;
    one that was given to `sbatch` itself is not to be had at all.

    Args:
        script: as `scontrol write batch_script` gives it.
    """
    found = None
    for line in script.split("\n")[:_MAX_SCRIPT_LINES]:
        text = line.strip()
        if text and not text.startswith("#"):
            # Slurm reads no further than the first command either.
            break
        if line.startswith("#SBATCH"):
            found = _option(line.removeprefix("#SBATCH")) or found
    return found


def _option(text: str) -> AskedSignal | None:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return None
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--signal":
            return _asked(value if equals else "".join(words[at + 1 : at + 2]))
    return None


def _asked(text: str) -> AskedSignal | None:
    match = _SIGNAL.fullmatch(text.strip())
    if match is None:
        return None
    word = match["signal"].upper()
    try:
        number = (
            signal.Signals(int(word))
            if word.isdecimal()
            else signal.Signals[f"SIG{word.removeprefix('SIG')}"]
        )
    except (ValueError, KeyError):
        return None
    if number in _NEVER:
        return None
    flags = match["flags"] or ""
    name = number.name.removeprefix("SIG")
    return AskedSignal(name, batch="B" in flags, makes_way="R" in flags)
