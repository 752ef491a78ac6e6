"""Handing tasks to Slurm, each of them once whatever gets lost on the way."""

from __future__ import annotations

import contextlib
import re
import secrets
import tempfile
import time
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.platforms.slurm_texts import EVERYTHING, decode_rows, rows_format
from gpuwarden.scheduling.slurm.configs import no_return_of_left
from gpuwarden.scheduling.slurm.refusals import is_down, refusal_of_job
from gpuwarden.scheduling.slurm.scripts import TOKEN, Comment, read_comment, script
from gpuwarden.scheduling.storages import mounts_here, storage_doubt
from gpuwarden.scheduling.tasks import Foreseen, SubmittedJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slurm.clusters import Cluster
    from gpuwarden.scheduling.tasks import Task

ENGINE: Final = "slurm"
LOOKS: Final = 4
"""How often a job is looked for whose submission got no answer, before it is sent again."""
LOOK_SECONDS: Final = 2.0
TRIES: Final = 2
FORESEEABLE_SECONDS: Final = 180 * 86_400.0
"""A job without a time limit counts as one of a year, or of thousands: that is no answer."""

_ID = re.compile(r"(?P<job>[0-9]{1,10})(?:;\S+)?")
_NODES = re.compile(r"\bTotalNodes=([0-9]{1,9})\b")
_PLAN = re.compile(r"to start at (?P<time>[0-9]{1,18}) using")
_LOOK_FIELDS: Final = ("JobID", "State", "NodeList", "Comment")


class SlurmSubmitter:
    """How Slurm takes tasks, in the name of whoever runs this.

    Args:
        policy: whose accounts, QOS and cards tasks name.
        cluster: that takes them.
        environment: that jobs inherit, as `sbatch` has it.
        now: tells the Unix time.
        pause: waits for so many seconds.
    """

    engine = ENGINE

    def __init__(
        self,
        policy: Policy,
        cluster: Cluster,
        *,
        environment: Mapping[str, str],
        now: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._policy = policy
        self._cluster = cluster
        self._environment = dict(environment)
        self._now = now
        self._pause = pause

    def close(self) -> None:
        """Let go of the cluster's commands."""
        self._cluster.close()

    def render(self, task: Task) -> str:
        """The batch script that would be sent.

        Raises:
            InvalidInput: the task cannot be said to Slurm.
        """
        return script(task, self._policy, self._now()).text

    def foresee(self, task: Task) -> Foreseen:
        """When Slurm would start a task, by its own plan; nothing is changed.

        Raises:
            InvalidInput: the task cannot be said to Slurm.
            RefusedAction: it would not take it.
            ServiceUnavailable: it does not answer.
        """
        now = self._now()
        with _written(script(task, self._policy, now).text) as path:
            answer = self._cluster.run("sbatch", "--test-only", path)
        if answer.status:
            raise refusal_of_job(answer)
        found = _PLAN.search(f"{answer.output}\n{answer.complaint}")
        planned = None if found is None else float(found["time"])
        if planned is None or planned - now > FORESEEABLE_SECONDS:
            return Foreseen(
                words="Slurm cannot tell when: it waits behind jobs without a time limit, or for a "
                "limit of its team"
            )
        return Foreseen(
            earliest=planned,
            latest=planned,
            words="in it every job runs up to its time limit, and no better one comes",
        )

    def doubts(self, task: Task) -> tuple[str, ...]:
        """Whether Slurm queues it again when it has left, and another node finds its states.

        Raises:
            ServiceUnavailable: it does not answer.
        """
        back = no_return_of_left(self._cluster.settings)
        nodes = most_nodes(
            self._cluster.output("scontrol", "--all", "show", "partition", "--oneliner")
        )
        lost = storage_doubt(task, mounts_here(), several_nodes=nodes != 1)
        return tuple(each for each in (back, lost) if each is not None)

    def submit(self, task: Task, *, token: str) -> SubmittedJob:
        """Hand a task over, once.

        An answer that is lost leaves open whether Slurm has the job: before it is sent again, the
        job is looked for by its token, and where that cannot be done it is not sent again.

        Raises:
            InvalidInput: the task cannot be said to Slurm.
            RefusedAction: Slurm does not take it.
            ServiceUnavailable: Slurm does not answer, and is known not to have the job; or that
                cannot be known, and the text says how to find out.
        """
        if not TOKEN.fullmatch(token):
            raise ValueError(f"{token!r} is no token")
        made = script(task, self._policy, self._now())
        comment = str(Comment(token, task.run_id, task.window))
        lost: ServiceUnavailable | None = None
        with _written(made.text) as path:
            for attempt in range(TRIES):
                # A caller may try again with a token of a submission before this process.
                found = self._known(token, lost, looks=LOOKS if attempt else 1)
                if found is not None:
                    return self._taken(found, task, made.warnings)
                try:
                    answer = self._cluster.run(
                        "sbatch",
                        "--parsable",
                        f"--comment={comment}",
                        path,
                        environment=self._environment,
                    )
                except ServiceUnavailable as error:
                    lost = error
                    continue
                if is_down(answer):
                    lost = ServiceUnavailable(
                        f"Slurm's controller does not answer: {answer.complaint}"
                    )
                    continue
                if answer.status:
                    raise refusal_of_job(answer)
                number = _ID.fullmatch(answer.output.strip())
                if number is not None:
                    return self._taken(
                        number["job"], task, (*made.warnings, *_said(answer.complaint))
                    )
                lost = ServiceUnavailable("sbatch took the job and did not say its number")
        found = self._known(token, lost, looks=LOOKS)
        if found is not None:
            return self._taken(found, task, made.warnings)
        raise ServiceUnavailable(f"the job was not submitted, and Slurm does not have it: {lost}")

    def _known(self, token: str, lost: ServiceUnavailable | None, *, looks: int) -> str | None:
        """The number of the job with a token, or None if Slurm is known not to have it.

        Raises:
            ServiceUnavailable: that cannot be known.
        """
        unseen: ServiceUnavailable | None = None
        for look in range(looks):
            if look:
                self._pause(LOOK_SECONDS)
            mark = f"|{secrets.token_hex(8)}"
            try:
                listed = self._cluster.output(
                    "squeue",
                    *EVERYTHING,
                    "--states=all",
                    "--me",
                    "-O",
                    rows_format(_LOOK_FIELDS, mark),
                )
            except ServiceUnavailable as error:
                unseen = error
                continue
            unseen = None
            for row in decode_rows(listed, mark, _LOOK_FIELDS):
                comment = read_comment(row["Comment"])
                # A job that was refused is kept for a while as one that failed on no node.
                refused = row["State"].strip() == "FAILED" and not row["NodeList"].strip()
                if comment is not None and comment.token == token and not refused:
                    return row["JobID"].strip()
        if unseen is None:
            return None
        if lost is None:
            raise unseen
        raise ServiceUnavailable(
            f"it is not known whether Slurm has the job: {lost}; look with `squeue --me -O "
            f"JobID,Comment:100` for {token} before you submit it again"
        ) from unseen

    def _taken(self, number: str, task: Task, warnings: tuple[str, ...]) -> SubmittedJob:
        return SubmittedJob(
            engine=ENGINE,
            id=number,
            name=task.name,
            run_id=task.run_id,
            words=f"job {number} is in Slurm's queue; `gpuwarden queue show {number}` tells why it "
            f"waits, and {task.directory}/{task.name}-{number}.log what it says",
            warnings=warnings,
        )


def most_nodes(partitions: str) -> int | None:
    """Nodes of the largest partition, by `scontrol show partition`; None: it does not tell."""
    return max((int(each) for each in _NODES.findall(partitions)), default=None)


def _said(complaint: str) -> tuple[str, ...]:
    return (f"Slurm says: {complaint}",) if complaint else ()


@contextlib.contextmanager
def _written(text: str) -> Iterator[str]:
    """A file of one's own with a text, by its path."""
    with tempfile.NamedTemporaryFile("w", prefix="gpuwarden-", suffix=".sh") as file:
        file.write(text)
        file.flush()
        yield file.name
