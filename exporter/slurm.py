"""This node's Slurm jobs, as its controller knows them.

`squeue` is asked for all jobs of the node at once, by a form in which no user's words can be taken
for Slurm's; `scontrol show job` only for the cards of a job that is new. Neither is ever asked by
who takes a snapshot: see `inquiries`.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.exporter import commands
from gpuwarden.platforms import slurm as answers
from gpuwarden.platforms import slurm_texts as texts
from gpuwarden.platforms.slurm_texts import GresCard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.platforms.slurm import SlurmJob
    from gpuwarden.platforms.slurm_texts import ClusterConfig

COMMAND_SECONDS = 20.0
"""Slurm's own message timeout is 10 s by default, and a client may try a second controller."""
CONFIG_SECONDS = 3600.0
"""The cluster's name, the node's, and its list of cards are asked for again after this."""
MAX_DETAILS = 64
"""Jobs whose cards are asked for at a time; the others come with the next question."""

_CONFIGS = (
    "/etc/slurm/slurm.conf",
    "/usr/local/etc/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/opt/slurm/etc/slurm.conf",
    # Without a configuration of its own a node has the controller's here.
    "/run/slurm/conf/slurm.conf",
)
_JSON_SINCE = (23, 2)

_logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SlurmView:
    """What the controller said.

    Attributes:
        cluster: its name.
        nodes: this host's names in it; several where several slurmd run on it.
        jobs: by Slurm's own number; those that have a node of this host, or had it lately.
        cards: node -> its own list of cards; absent where that is not known: an index says nothing
            then, for Slurm's order need not be the device files'.
    """

    cluster: str
    nodes: tuple[str, ...]
    jobs: Mapping[int, SlurmJob]
    cards: Mapping[str, tuple[GresCard, ...]] = field(default_factory=dict)

    def gpus(self, job: SlurmJob) -> tuple[GresCard, ...] | None:
        """A job's cards on this host; None where they are not known."""
        if job.gpus is None:
            return None
        found = []
        for node in self.nodes:
            cards = self.cards.get(node, ())
            found += [
                cards[index] if index < len(cards) else GresCard(None)
                for index in job.gpus.get(node, ())
            ]
        return tuple(found)


def detect() -> bool:
    """Whether this host is part of a Slurm cluster."""
    named = os.environ.get("SLURM_CONF")
    configured = any(Path(path).exists() for path in ([named] if named else _CONFIGS))
    return configured and commands.find("scontrol") is not None


def host_names() -> frozenset[str]:
    """Names of this host, with and without its domain."""
    name = socket.gethostname()
    return frozenset({name, name.partition(".")[0]})


class SlurmQuestions:
    """Asks Slurm's commands; used by one thread."""

    def __init__(self, *, hosts: frozenset[str] | None = None, config: str | None = None) -> None:
        """Ask nothing yet.

        Args:
            hosts: names of this host; its own where none are given.
            config: slurm.conf; that of SLURM_CONF, or Slurm's own default, where it is not given.
        """
        self._hosts = hosts if hosts is not None else host_names()
        config = config if config is not None else os.environ.get("SLURM_CONF")
        self._environment = {
            "PATH": "/usr/bin:/bin",
            "LC_ALL": "C",
            "SLURM_TIME_FORMAT": "%s",
            **({} if config is None else {"SLURM_CONF": config}),
        }
        self._known_at = 0.0
        self._config: ClusterConfig | None = None
        self._nodes: tuple[str, ...] = ()
        self._cards: dict[str, tuple[GresCard, ...]] = {}
        self._json = False
        self._gpus: dict[tuple[int, int, float | None], Mapping[str, tuple[int, ...]] | None] = {}

    def ask(self) -> SlurmView:
        """The jobs that this node has now, and those of late that the controller has not forgotten.

        What is left of an ended job has its name too.

        Raises:
            ServiceUnavailable: Slurm is not here, does not answer, or not usefully.
        """
        try:
            return self._ask(self._cluster())
        except ServiceUnavailable:
            # The node may have another name by now.
            self._config = None
            raise

    def _ask(self, config: ClusterConfig) -> SlurmView:
        mark = f"|{secrets.token_hex(8)}"
        listed = texts.decode_list(
            self._run(
                "squeue",
                *texts.EVERYTHING,
                f"--nodelist={','.join(self._nodes)}",
                "--states=all",
                "-O",
                texts.list_format(mark),
            ),
            mark,
        )
        # A task of an array that has not begun stands for all of those: it has no node yet.
        jobs = {job.job_id: job for job in listed if job.nodes}
        return SlurmView(
            cluster=config.name,
            nodes=self._nodes,
            jobs=self._with_cards(jobs, config),
            cards=self._cards,
        )

    def _cluster(self) -> ClusterConfig:
        now = time.monotonic()
        if self._config is not None and now - self._known_at < CONFIG_SECONDS:
            return self._config
        version = texts.decode_version(self._run("scontrol", "--version"))
        config = texts.decode_config(self._run("scontrol", "show", "config"))
        nodes = texts.node_names(
            self._run("scontrol", "--all", "show", "node", "--oneliner"), self._hosts
        )
        if not nodes:
            names = " or ".join(sorted(self._hosts))
            raise ServiceUnavailable(
                f"cluster {config.name} has no node whose NodeHostName is {names}"
            )
        self._config, self._nodes, self._known_at = config, nodes, now
        self._json = version >= _JSON_SINCE
        lists = ((node, self._list_of_cards(node)) for node in nodes)
        self._cards = {node: cards for node, cards in lists if cards}
        return config

    def _list_of_cards(self, node: str) -> tuple[GresCard, ...]:
        """A node's own list of cards; empty where it cannot be had."""
        try:
            answer = self._answer("slurmd", "-G", "-N", node)
            return texts.decode_gres(answer.output + answer.error)
        except ServiceUnavailable as error:
            _logger.warning("the node's list of cards is not known", error=str(error))
            return ()

    def _with_cards(
        self, jobs: Mapping[int, SlurmJob], config: ClusterConfig
    ) -> dict[int, SlurmJob]:
        found, kept, asked = {}, {}, 0
        for job_id, job in jobs.items():
            key = (job_id, job.restarts, job.start_time)
            if not job.holds or (config.accounts_for_gpus and "gres/gpu" not in job.tres):
                gpus: Mapping[str, tuple[int, ...]] | None = {}
            elif key in self._gpus:
                gpus = kept[key] = self._gpus[key]
            elif asked < MAX_DETAILS:
                asked += 1
                gpus = kept[key] = self._details(job)
            else:
                gpus = None
            found[job_id] = replace(job, cluster=config.name, gpus=gpus)
        self._gpus = kept
        return found

    def _details(self, job: SlurmJob) -> Mapping[str, tuple[int, ...]] | None:
        """Node -> indexes of a job's cards; None where they are not told."""
        if self._json:
            answer = self._answer("scontrol", "--json", "show", "--details", "job", job.number)
            if not answer.status:
                told = answers.decode_json(answer.output)
                return next((item.gpus for item in told.jobs if item.job_id == job.job_id), None)
            # Its plugin for JSON is a package of its own.
            _logger.info("scontrol does not speak JSON", error=answer.error[:200])
            self._json = False
        answer = self._answer("scontrol", "show", "--details", "job", job.number)
        return None if answer.status else texts.decode_details(answer.output, job)

    def _run(self, name: str, *words: str) -> str:
        answer = self._answer(name, *words)
        if answer.status:
            raise ServiceUnavailable(
                f"{name} failed: {answer.error[:300] or f'exit status {answer.status}'}"
            )
        return answer.output

    def _answer(self, name: str, *words: str) -> commands.Answer:
        path = commands.find(name)
        if path is None:
            raise ServiceUnavailable(f"{name} is not installed, or not in PATH")
        return commands.run(path, *words, seconds=COMMAND_SECONDS, environment=self._environment)
