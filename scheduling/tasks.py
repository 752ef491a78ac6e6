"""A training that somebody wants to be run, and the port by which engines take it. Pure.

A task is what `gpuwarden submit` makes of a command line and hands to an engine. It travels as a
document too (`gpuwarden.task/v1`): to the daemon of a lab box over its socket, and into its store.
Whoever decodes one has no reason to trust it: every value is checked, and who asks is what the
socket says, never what the document says.

The job's command line is always `gpuwarden train --run-id NAME ...`: an ordinary training, which
continues itself when the engine starts it anew, also where no daemon of gpuwarden runs.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from gpuwarden.errors import InvalidInput
from gpuwarden.job_files import RUN_ID

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA: Final = "gpuwarden.task/v1"
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Of a task, a team, a priority, a kind of cards: what every engine can carry as a label."""
MAX_GPUS: Final = 1024
MAX_WORDS: Final = 200
MAX_TEXT: Final = 4096
"""Longest word, option and path."""
MAX_SIZE: Final = 16 * 1024
"""Characters of words, options and jobs to wait for together, and of an estimate: whoever keeps a
queue reads every task of it again and again."""
MAX_DEPTH: Final = 8
"""Of an estimate's lists and objects in one another."""
_WORD = re.compile(r"[a-z_][a-z0-9_]{0,63}=.+", re.DOTALL)
_OPTION = re.compile(r"--[a-z][a-z-]{0,40}(=.+)?", re.DOTALL)
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9./:_-]{0,400}@sha256:[0-9a-f]{64}")
_RESERVED_WORDS: Final = {
    "device": "the engine chooses the cards; say how many with --gpus",
    "resume": "the run continues by itself; give it another --name to begin anew",
    "mode": "only trainings are submitted",
}
_RESERVED_OPTIONS: Final = {
    "--run-id": "it is made from --name",
    "--resume": "the run continues by itself; give it another --name to begin anew",
    "--nproc": "it follows from --gpus",
    "--follow": "it trains nothing; say gpuwarden follow",
    "--jobs-directory": "it is the node's",
    "--with-parent": "the engine watches over the job",
}
_TEXTS = ("name", "run_id", "user", "team", "priority", "directory", "program")
_OPTIONAL_TEXTS = ("gpu_type", "image", "window")
_LISTS = ("words", "options", "after")
_LONGEST: Final = 10 * 366 * 86400.0
_LAST_MOMENT: Final = 253_000_000_000.0
"""Of the calendar that can be shown: in the year 9987."""
_MOST: Final = {
    "memory_bytes": 2.0**60,
    **dict.fromkeys(("not_before", "deadline"), _LAST_MOMENT),
    **dict.fromkeys(("time_limit_seconds", "epoch_seconds", "save_seconds"), _LONGEST),
}
"""Whoever gets a task may calculate with what it says, and show it."""


def word_problem(word: str) -> str | None:
    """Why a word of `yolo train` cannot be submitted, or None."""
    shown = _shown(word)
    if (hidden := _hidden(word)) is not None:
        return f"{shown} {hidden}"
    if not _WORD.fullmatch(word):
        return f"{shown} is no KEY=VALUE, such as model=yolov8m"
    key = word.partition("=")[0]
    if key in _RESERVED_WORDS:
        return f"{key}= cannot be said: {_RESERVED_WORDS[key]}"
    return None


def option_problem(option: str) -> str | None:
    """Why an option of `gpuwarden train` cannot be submitted, or None."""
    shown = _shown(option)
    if (hidden := _hidden(option)) is not None:
        return f"{shown} {hidden}"
    if not _OPTION.fullmatch(option):
        return f"{shown} is no --option or --option=value of gpuwarden train"
    key = option.partition("=")[0]
    if key in _RESERVED_OPTIONS:
        return f"{key} cannot be said: {_RESERVED_OPTIONS[key]}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A training that is to be run.

    Attributes:
        name: for people and as the job's name.
        run_id: of the trainer, stable over every attempt.
        words: of `yolo train`, each KEY=VALUE, in the order in which they were said.
        options: of `gpuwarden train`, each `--option` or `--option=value`.
        user: who asks; a daemon replaces it by whom the socket names.
        team: of the policy.
        priority: of the policy.
        gpus: cards, all of one node.
        gpu_type: kind of cards by the policy's name; None takes whatever there is.
        memory_bytes: that the training needs on each card, at the upper end of what is expected;
            None where it is not known.
        image: with its digest; None runs `program` as it is installed.
        window: of the policy, in which alone it may run; None is any time.
        after: ids by the engine of jobs that must have succeeded before.
        not_before: Unix time before which it may not start; None is at once.
        deadline: Unix time by which it should be done; None is none.
        time_limit_seconds: after which the engine may end an attempt; None where it is not known.
        epoch_seconds: upper end of what an epoch takes, for a notice that lets one end.
        save_seconds: upper end of what writing its state takes.
        estimate: what was expected of it, as a document for people; not interpreted.
        directory: where it starts; absolute, with the engine's own meaning of it.
        program: `gpuwarden`, or its absolute path in the training's environment.
    """

    name: str
    run_id: str
    words: tuple[str, ...]
    user: str
    team: str
    priority: str
    gpus: int
    directory: str
    options: tuple[str, ...] = ()
    gpu_type: str | None = None
    memory_bytes: float | None = None
    image: str | None = None
    window: str | None = None
    after: tuple[str, ...] = ()
    not_before: float | None = None
    deadline: float | None = None
    time_limit_seconds: float | None = None
    epoch_seconds: float | None = None
    save_seconds: float | None = None
    estimate: Mapping[str, Any] | None = None
    program: str = "gpuwarden"

    def __post_init__(self) -> None:
        """Refuse what no engine should see.

        Raises:
            InvalidInput: every problem, one a line.
        """
        if found := _problems(self):
            raise InvalidInput("\n".join(found))

    @property
    def command(self) -> tuple[str, ...]:
        """The job's command line: program and arguments, for `exec` without a shell."""
        # Indices count what CUDA_VISIBLE_DEVICES leaves: every engine sets it for its jobs.
        devices = ",".join(str(number) for number in range(self.gpus))
        several = (f"device={devices}",) if self.gpus > 1 else ()
        options = ("--run-id", self.run_id, *self.options)
        return (self.program, "train", *options, *self.words, *several)

    def word(self, key: str) -> str | None:
        """The value of the last word of this key, or None."""
        found = [word.partition("=")[2] for word in self.words if word.partition("=")[0] == key]
        return found[-1] if found else None

    def as_document(self) -> dict[str, Any]:
        """For machines; what is not known is absent."""
        found = {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if getattr(self, item.name) is not None
        }
        return {"schema": SCHEMA} | {
            key: list(value) if isinstance(value, tuple) else value for key, value in found.items()
        }

    @classmethod
    def from_document(cls, document: object) -> Self:
        """Read what `as_document` writes; unknown fields are ignored.

        Raises:
            InvalidInput: it is no task of a version that is known here; every problem, one a line.
        """
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise InvalidInput(f"this is no document of {SCHEMA}")
        known = {item.name: item for item in dataclasses.fields(cls)}
        given: dict[str, Any] = {key: value for key, value in document.items() if key in known}
        missing = [
            name
            for name, item in known.items()
            if item.default is dataclasses.MISSING and name not in given
        ]
        wrong = [f"{key} is of a wrong type" for key, value in given.items() if _wrong(key, value)]
        if missing or wrong:
            raise InvalidInput("\n".join([*(f"{name} is missing" for name in missing), *wrong]))
        lists = {key: tuple(value) for key, value in given.items() if key in _LISTS}
        return cls(**(given | lists))


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """What an engine says of a task before it takes it.

    Attributes:
        earliest: Unix time at which it would start, or None where the engine cannot tell.
        latest: likewise, the end of the interval.
        samples: how many observations the interval rests on; 0 is the engine's own plan.
        words: one sentence for people: what it waits for, or why that cannot be told.
    """

    earliest: float | None = None
    latest: float | None = None
    samples: int = 0
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    """A task that an engine has taken.

    Attributes:
        engine: slurm, kueue or local.
        id: the engine's name of the job, as `gpuwarden queue` shows it.
        name: of the task.
        run_id: of the trainer.
        words: one sentence for people: where it is, and how to follow it.
        warnings: what the engine could not take as it was asked for.
    """

    engine: str
    id: str
    name: str
    run_id: str
    words: str
    warnings: tuple[str, ...] = ()


class Submitter(Protocol):
    """How an engine takes tasks."""

    @property
    def engine(self) -> str:
        """The engine's name: slurm, kueue or local."""

    def foresee(self, task: Task) -> Foreseen:
        """Ask when a task would start; nothing is changed.

        Raises:
            ServiceUnavailable: the engine does not answer.
            RefusedAction: it would not take the task; its words, and the remedy.
        """

    def doubts(self, task: Task) -> tuple[str, ...]:
        """What may keep a task that left from coming back and going on, each with what to do.

        Raises:
            ServiceUnavailable: the engine does not answer.
        """

    def render(self, task: Task) -> str:
        """What would be sent: a batch script, a manifest, a request; for `--dry-run`."""

    def submit(self, task: Task, *, token: str) -> SubmittedJob:
        """Hand a task over, once.

        Args:
            task: what is to be run.
            token: made anew for every submission; the engine keeps it with the job, and a try after
                a lost answer looks for it before it submits again.

        Raises:
            ServiceUnavailable: the engine does not answer, and it is known not to have the job.
            RefusedAction: it does not take the task; its words, and the remedy.
        """

    def close(self) -> None:
        """Let go of connections; nothing is asked afterwards."""


def run_id_of(name: str) -> str:
    """A run id made of a task's name: what it may not hold becomes `-`."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)[:64]


def _problems(task: Task) -> list[str]:
    found = [
        f"{field}={_shown(value)} may hold letters, digits, '.', '_' and '-', begins with a letter "
        "or digit, and has 63 characters at most"
        for field in ("name", "team", "priority", "gpu_type", "window")
        if (value := getattr(task, field)) is not None and not NAME.fullmatch(value)
    ]
    if not RUN_ID.fullmatch(task.run_id):
        found.append(f"run_id={_shown(task.run_id)} may hold 64 letters, digits, '_' and '-'")
    if not 1 <= task.gpus <= MAX_GPUS:
        found.append(f"gpus={task.gpus} is not between 1 and {MAX_GPUS}")
    found += _too_much(task)
    found += [problem for word in task.words if (problem := word_problem(word))]
    found += [problem for option in task.options if (problem := option_problem(option))]
    if task.word("model") is None:
        found.append("no model is named: say model=yolov8m, for example")
    if task.image is not None and not _IMAGE.fullmatch(task.image):
        found.append(f"image={_shown(task.image)} is not pinned: NAME@sha256:DIGEST is")
    found += [
        f"after={_shown(job)} is no id of a job"
        for job in task.after
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,252}", job)
    ]
    found += [
        f"{field}={_shown(value)} {hidden}"
        for field, value in (("directory", task.directory), ("program", task.program))
        if (hidden := _hidden(value)) is not None
    ]
    if not task.directory.startswith("/"):
        found.append(f"directory={_shown(task.directory)} is not absolute")
    if not (task.program == "gpuwarden" or task.program.startswith("/")):
        found.append(f"program={_shown(task.program)} is neither gpuwarden nor an absolute path")
    if not task.user or _hidden(task.user) is not None:
        found.append(f"user={_shown(task.user)} is nobody's name")
    found += [
        f"{field}={_shown(str(value))} is not more than 0 and at most {most:g}"
        for field, most in _MOST.items()
        if (value := getattr(task, field)) is not None and not (0 < value <= most)
    ]
    return found


def _too_much(task: Task) -> list[str]:
    said, found = (*task.words, *task.options, *task.after), []
    if len(said) > MAX_WORDS:
        found.append(f"more than {MAX_WORDS} words, options and jobs to wait for")
    if sum(map(len, said)) > MAX_SIZE:
        found.append(f"words, options and jobs to wait for have more than {MAX_SIZE} characters")
    if _size(task.estimate, MAX_DEPTH) > MAX_SIZE:
        found.append(f"estimate has more than {MAX_SIZE} characters, or {MAX_DEPTH} levels")
    return found


def _wrong(key: str, value: object) -> bool:
    """Whether a field of a document is of another type than the task's."""
    if key in _TEXTS or key in _OPTIONAL_TEXTS:
        return not isinstance(value, str)
    if key in _LISTS:
        return not isinstance(value, list) or not all(isinstance(item, str) for item in value)
    if key == "estimate":
        return not isinstance(value, dict)
    whole = (int,) if key == "gpus" else (int, float)
    return isinstance(value, bool) or not isinstance(value, whole)


def _size(value: object, depth: int) -> float:
    """About how many characters a value of JSON has; infinitely many if it is too deep."""
    if isinstance(value, dict | list):
        if not depth:
            return math.inf
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return sum(2.0 + _size(part, depth - 1) for part in parts)
    return float(len(value)) if isinstance(value, str) else 8.0


def _hidden(text: str) -> str | None:
    """What makes a text unfit for a script, a manifest or a terminal, or None.

    A newline would end a line of a batch script, a NUL an argument; what a terminal obeys could
    show people another command than the one that runs.
    """
    if len(text) > MAX_TEXT:
        return f"is longer than {MAX_TEXT} characters"
    if not text.isprintable():
        return "holds a character that cannot be shown"
    return None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
