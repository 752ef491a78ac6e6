"""Ending Slurm's jobs by Slurm's own commands, and never a process by its number."""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Self

import structlog

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.platforms.slurm import PENDING, attempt_id, parse_attempt_id
from gpuwarden.platforms.slurm_attempts import (
    UNKNOWN_JOB,
    accounted_state,
    asked_signal,
    decode_records,
    record_format,
)
from gpuwarden.platforms.slurm_nodes import decode_nodes
from gpuwarden.platforms.slurm_texts import EVERYTHING, decode_config
from gpuwarden.ruleengine.guards import Blocked
from gpuwarden.ruleengine.reclaim.ports import Claim, Deed, Standing, State
from gpuwarden.ruleengine.reclaim.slurm_attempts import (
    NAME,
    Identity,
    Look,
    standing,
    strange,
    together,
)
from gpuwarden.ruleengine.reclaim.slurm_nodes import disagreement
from gpuwarden.ruleengine.slurm_settings import slurm_commands

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from gpuwarden.platforms.slurm import SlurmAttempt
    from gpuwarden.platforms.slurm_attempts import Record
    from gpuwarden.platforms.slurm_texts import ClusterConfig
    from gpuwarden.ruleengine.reclaim.ports import Order
    from gpuwarden.ruleengine.settings import Settings
    from gpuwarden.ruleengine.verdicts import JobFacts
    from gpuwarden.slurm_commands import Answer, SlurmCommands

PREFIX: Final = "slurm-"
MARK: Final = "gpuwarden:"
"""How the administrators' comment begins that says which decision a job was ended by."""

_DECISION = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_FORBIDDEN = re.compile(r"permission denied|not permitted|invalid user|access", re.IGNORECASE)
_NO_REQUEUE = re.compile(r"presently disabled|only batch jobs", re.IGNORECASE)
_OVER = re.compile(rf"{UNKNOWN_JOB}|already complet", re.IGNORECASE)
_REMEMBERED = 10_000

log = structlog.get_logger(__name__)


class _Memory:
    """What was done in this life of the engine; the oldest is forgotten first."""

    def __init__(self) -> None:
        self._known: OrderedDict[object, None] = OrderedDict()

    def add(self, key: object) -> None:
        self._known[key] = None
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def __contains__(self, key: object) -> bool:
        return key in self._known


class Slurm:
    """Slurm as the owner of jobs.

    Args:
        commands: of its only cluster: `squeue`, `scontrol` and `scancel`.
    """

    name = NAME
    prefix = PREFIX

    def __init__(self, commands: SlurmCommands) -> None:
        self._commands = commands
        self._cluster = ""
        self._asked = _Memory()
        self._told = _Memory()

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """That of engine.yaml, or None where it has no `slurm`."""
        commands = slurm_commands(settings)
        return None if commands is None else cls(commands)

    async def aclose(self) -> None:
        """Nothing is kept open."""

    # -- recognising

    async def find(
        self, job: JobFacts, deed: Deed, *, offenders: Collection[str] = ()
    ) -> Claim | Blocked:
        """Recognise a job's attempt; see the port."""
        attempt = parse_attempt_id(job.job_id)
        if attempt is None:
            text = f"{job.job_id} names no attempt whose cluster and restarts are known"
            return Blocked("attempt_unknown", text)
        try:
            config = await self._config()
            records = await self._whole(attempt.number)
            return await self._claim(
                job, deed, attempt, config=config, records=records, offenders=offenders
            )
        except ServiceUnavailable as error:
            return Blocked("platform_unreachable", str(error))

    async def _claim(
        self,
        job: JobFacts,
        deed: Deed,
        attempt: SlurmAttempt,
        *,
        config: ClusterConfig,
        records: Sequence[Record] | None,
        offenders: Collection[str],
    ) -> Claim | Blocked:
        if config.name != attempt.cluster:
            text = (
                f"the job is of {attempt.cluster}; slurm.config of engine.yaml is {config.name}'s"
            )
            return Blocked("other_cluster", text)
        if records is None:
            return Blocked("gone", f"Slurm knows no job {attempt.number}")
        own = next((r for r in records if attempt_id(r.job, config.name) == job.job_id), None)
        blocked = strange(own, records, job) or together(
            records, config.name, {job.job_id, *offenders}
        )
        if own is None or blocked is not None:
            return blocked or Blocked("gone", f"Slurm knows no job {attempt.number}")
        nodes = tuple(dict.fromkeys(node for r in records for node in r.job.nodes))
        text = await disagreement(self._commands, job, own.job.nodes)
        if text:
            return Blocked("nodes_differ", text)
        leader = next((r for r in records if r.job.job_id == r.job.het_job_id), own)
        number = str(leader.job.job_id) if len(records) > 1 else attempt.number
        if deed is Deed.REQUEUE and not await self._requeueable(leader, number):
            return Blocked("not_requeueable", f"Slurm does not requeue job {number}")
        beside = [r.job for r in records if r is not own]
        others = [str(item.job_id) for item in beside]
        return Claim(
            NAME,
            identity={
                "cluster": config.name,
                "number": number,
                "job_id": leader.job.job_id,
                "submit_time": int(leader.job.submit_time or 0),
                "restarts": leader.job.restarts,
                "user_id": leader.job.user_id,
                "user": leader.job.user_name,
            },
            nodes=nodes,
            grace=config.kill_wait,
            also="" if not others else f"components {', '.join(others)} of the same job",
            returns=config.requeues_by_exit,
            company=tuple(sorted(attempt_id(item, config.name) for item in beside)),
        )

    async def _config(self) -> ClusterConfig:
        config = decode_config(await self._commands.output("scontrol", "show", "config"))
        self._cluster = config.name
        return config

    async def _whole(self, number: str) -> tuple[Record, ...] | None:
        """A job, with all its components where it has some; None where it is not known."""
        records = await self._records(number)
        if records is None:
            return None
        leaders = {r.job.het_job_id for r in records if r.job.het_job_id is not None}
        if not leaders:
            return records
        return await self._records(str(min(leaders)))

    async def _records(self, number: str) -> tuple[Record, ...] | None:
        """What the controller keeps of a job, or None where it says that it knows none.

        Raises:
            ServiceUnavailable: it does not say; an empty answer is no answer, since Slurm also
                keeps silent about what one may not see.
        """
        mark = f"|{secrets.token_hex(8)}"
        words = (*EVERYTHING, "--states=all", f"--jobs={number}", "-O", record_format(mark))
        answer = await self._commands.run("squeue", *words)
        if answer.status:
            if UNKNOWN_JOB in answer.complaint:
                return None
            raise ServiceUnavailable(f"squeue failed: {answer.complaint}")
        records = decode_records(answer.output, mark)
        if not records:
            raise ServiceUnavailable(
                f"squeue shows no job {number} and does not say that there is none: the engine's "
                "user must see all jobs (PrivateData=jobs: an operator of Slurm)"
            )
        return records

    async def _requeueable(self, record: Record, number: str) -> bool:
        if not record.batch:
            return False
        text = await self._commands.output("scontrol", "show", "job", number)
        # The job's own words could say more or less of itself here, and be refused by Slurm then.
        match = re.search(r"^ +Requeue=([01])\b", text, re.MULTILINE)
        return match is not None and match[1] == "1"

    # -- acting

    async def ask(self, order: Order) -> bool:
        """Send the signal that the job's script asked for, once to an attempt; see the port."""
        identity = Identity.of(order.claim)
        record = await self._own(identity)
        key = (identity.number, identity.submit_time, identity.restarts)
        word = f"asked:{identity.restarts}:"
        if key in self._asked or record.mark.startswith(f"{MARK}{word}"):
            return True
        if "RUNNING" not in record.job.states or "COMPLETING" in record.job.states:
            return False
        answer = await self._commands.run(
            "scontrol", "write", "batch_script", str(identity.job_id), "-"
        )
        if answer.complaint:
            # No script, as of an interactive job, is no signal either.
            log.info("no batch script", job=identity.number, error=answer.complaint)
        wanted = None if answer.status else asked_signal(answer.output)
        if wanted is None:
            return False
        self._asked.add(key)
        # Before it is sent: whoever restarts in between must not send it again.
        await self._mark(identity, record, f"{word}{order.decision_id}")
        words = ["--batch"] if wanted.batch else []
        sent = await self._commands.run(
            "scancel", *words, f"--signal={wanted.name}", identity.number
        )
        log.info("Slurm's signal", decision=order.decision_id, job=identity.number, sig=wanted.name)
        self._judge(sent, identity, "scancel --signal")
        return True

    async def end(self, order: Order) -> None:
        """End the attempt, and for `terminate` keep it from coming back; see the port."""
        identity = Identity.of(order.claim)
        look = await self._look(identity)
        if look is None:
            self._over(order, "Slurm knows the job no more")
        elif identity.has(look.record.job) and not look.record.job.states & PENDING:
            await self._end(order, identity, look.record)
        elif identity.has(look.record.job) or identity.follows(look.record.job):
            await self._after(order, identity, look.record)
        else:
            text = f"job {identity.number} is another one by now ({look.record.word})"
            raise RefusedAction("target_changed", text)

    async def _end(self, order: Order, identity: Identity, record: Record) -> None:
        """End what is the attempt itself."""
        if not record.job.holds:
            self._over(order, f"job {identity.number} is {record.word}")
            return
        await self._mark(identity, record, f"{order.deed}:{order.decision_id}")
        self._told.add(order.decision_id)
        if order.deed is Deed.TERMINATE:
            # Also where it is COMPLETING: that keeps Slurm from taking it back into its queue.
            answer = await self._commands.run("scancel", identity.number)
            self._judge(answer, identity, "scancel")
        elif "COMPLETING" not in record.job.states:
            answer = await self._commands.run("scontrol", "requeue", identity.number)
            self._judge(answer, identity, "scontrol requeue")

    async def _after(self, order: Order, identity: Identity, record: Record) -> None:
        """See to an attempt that has come after it."""
        job = record.job
        if order.deed is Deed.REQUEUE or job.ended or record.held:
            self._over(order, f"job {identity.number} is {record.word}")
            return
        if job.holds or job.nodes:
            text = f"job {identity.number} has been started again since ({record.word})"
            raise RefusedAction("target_changed", text)
        await self._mark(identity, record, f"{order.deed}:{order.decision_id}")
        self._told.add(order.decision_id)
        # As its user could have done it, so that he may release it.
        answer = await self._commands.run("scontrol", "uhold", identity.number)
        self._judge(answer, identity, "scontrol uhold")

    def _over(self, order: Order, text: str) -> None:
        """It is over: by us, so that nothing is left to do, or without us."""
        if order.decision_id not in self._told:
            raise RefusedAction("gone", text)

    def _judge(self, answer: Answer, identity: Identity, what: str) -> None:
        """What follows from how a command ended; that a job is over by now is no error."""
        said = answer.complaint or " ".join(answer.output.split())
        if not answer.status and "error" not in said.lower():
            return
        text = f"{what} {identity.number}: {said or f'status {answer.status}'}"
        if _OVER.search(said) or "pending execution" in said:
            return
        if _NO_REQUEUE.search(said):
            raise RefusedAction("not_requeueable", text)
        if _FORBIDDEN.search(said):
            raise RefusedAction("forbidden", f"{text}; the engine must be an operator of Slurm")
        raise ServiceUnavailable(text)

    async def _mark(self, identity: Identity, record: Record, word: str) -> None:
        """Leave in Slurm's own record who did it, unless the site keeps something there."""
        text = f"{MARK}{word}"
        if record.mark not in ("", text) and not record.mark.startswith(MARK):
            return
        if not _DECISION.fullmatch(word.rpartition(":")[2]):
            return
        try:
            answer = await self._commands.run(
                "scontrol", "update", f"JobId={identity.number}", f"AdminComment={text}"
            )
            error = answer.complaint if answer.status else ""
        except ServiceUnavailable as unknown:
            error = str(unknown)
        if error:
            # What is to be done does not hang on it.
            log.warning("no comment in Slurm", job=identity.number, error=error)

    # -- looking

    async def state(self, order: Order) -> State:
        """What has become of the attempt; see the port."""
        identity = Identity.of(order.claim)
        look = await self._look(identity)
        if look is None:
            # It neither counts nodes as the job's nor could start it: that is its end for Slurm.
            return await self._forgotten(identity)
        record, job = look.record, look.record.job
        if not (identity.has(job) or identity.follows(job)):
            return State(Standing.ENDED, "REPLACED", detail={"by": record.word})
        stands = standing(identity, look)
        successor = ""
        if stands is Standing.RETURNED:
            successor = attempt_id(job, identity.cluster)
        lost = await self._lost(job.nodes) if stands is Standing.ENDING else ()
        return State(
            stands,
            record.word,
            obstacle="node_lost" if lost else "",
            successor=successor,
            detail={"nodes": ",".join(lost)} if lost else {},
        )

    async def _lost(self, nodes: Sequence[str]) -> list[str]:
        """Nodes that the controller cannot reach, for which it waits with what ends there."""
        if not nodes:
            return []
        words = ("show", "node", "--details", "--oneliner", ",".join(nodes))
        try:
            text = await self._commands.output("scontrol", *words)
        except ServiceUnavailable:
            return []
        return [node.name for node in decode_nodes(text) if node.lost]

    async def _forgotten(self, identity: Identity) -> State:
        """The end of a job that the controller has dropped, from accounting where there is some."""
        word = "FORGOTTEN"
        if self._commands.has("sacct"):
            words = ("--duplicates", "--allocations", "--parsable2", "--noheader")
            answer = await self._commands.run(
                "sacct", *words, f"--jobs={identity.number}", "--format=Submit,State"
            )
            if not answer.status:
                word = accounted_state(answer.output, identity.submit_time) or word
        return State(Standing.ENDED, word)

    async def _own(self, identity: Identity) -> Record:
        """What is kept of the attempt itself.

        Raises:
            RefusedAction: it is over, or another one by now.
        """
        look = await self._look(identity)
        if look is None:
            raise RefusedAction("gone", f"Slurm knows no job {identity.number} any more")
        if not identity.has(look.record.job):
            text = f"job {identity.number} is another attempt by now ({look.record.word})"
            raise RefusedAction("target_changed", text)
        return look.record

    async def _look(self, identity: Identity) -> Look | None:
        """What is kept under the attempt's number, or None.

        Raises:
            ServiceUnavailable: not known; also where Slurm answers for another cluster.
        """
        cluster = self._cluster or (await self._config()).name
        if cluster != identity.cluster:
            raise ServiceUnavailable(f"Slurm answers for {cluster}, not {identity.cluster}")
        # By its own number: asked for as a task, one that is forgotten would be an empty answer.
        records = await self._records(str(identity.job_id)) or ()
        record = next((r for r in records if r.job.job_id == identity.job_id), None)
        if record is None:
            return None
        parts = [r for r in records if r is not record and r.job.het_job_id is not None]
        return Look(record, any(part.job.holds for part in parts))
