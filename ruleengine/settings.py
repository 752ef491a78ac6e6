"""engine.yaml: what the engine talks to, how often, and where it keeps what it knows.

Relative paths are relative to the file. Secrets are files, never values.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from gpuwarden.errors import InvalidInput
from gpuwarden.fields import Seconds, Strict, as_tuple, some_tuple
from gpuwarden.node_api import RegistrationRefused, Target
from gpuwarden.ruleengine.base_paths import ExternalUrl
from gpuwarden.ruleengine.bot_settings import BotName, BotSettings
from gpuwarden.ruleengine.directories import Email
from gpuwarden.ruleengine.drill_settings import DrillSettings
from gpuwarden.ruleengine.kubernetes_settings import KubernetesSettings
from gpuwarden.ruleengine.leave_settings import LeaveSettings
from gpuwarden.ruleengine.path_patterns import is_pattern, matching
from gpuwarden.ruleengine.prices import Prices
from gpuwarden.ruleengine.prometheus_settings import URL, PrometheusSettings, Url
from gpuwarden.ruleengine.report_settings import ReportSettings
from gpuwarden.ruleengine.schedule_settings import SchedulerSettings
from gpuwarden.ruleengine.web_settings import DEFAULT_LISTEN, File, WebSettings
from gpuwarden.yaml_files import load_file

if TYPE_CHECKING:
    from pathlib import Path


def _template(text: str) -> str:
    if text.count("{host}") != 1 or URL.fullmatch(text.replace("{host}", "node")) is None:
        raise PydanticCustomError(
            "GW107",
            "{text} is not an agent's address: write it like {example}",
            {"text": repr(text), "example": "http://{host}:9836"},
        )
    return text


def _target(text: str) -> str:
    try:
        return str(Target.parse(text))
    except RegistrationRefused as error:
        raise PydanticCustomError("GW107", "{why}", {"why": str(error)}) from error


def _allowed(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        if re.fullmatch(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*", text) is None:
            raise PydanticCustomError(
                "GW107",
                "{text} is neither a network nor a host name: write 10.1.0.0/16, or "
                "*.gpu.example.org",
                {"text": repr(text)},
            ) from None
        return text


class AgentSettings(Strict):
    """How the nodes' agents are reached."""

    url: Annotated[str, AfterValidator(_template)]
    """Address with {host} in it, which the host of the node's scrape target replaces."""
    key_file: File
    """The engine's private key (engine.key of `gpuwarden agent keys`)."""
    ca_file: File | None = None
    """Certificates for the agents' TLS; the system's by default."""


class SmtpSettings(Strict):
    """The mail server."""

    host: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.:-]{1,253}$")]
    """Its name or address."""
    port: Annotated[int, Field(strict=True, ge=1, le=65535)] = 587
    """587 for submission, 25 for a relay, 465 with tls: implicit."""
    tls: Literal["starttls", "implicit", "none"] = "starttls"
    """How the connection is protected; none only for a relay on a trusted network."""
    sender: Email
    """Address in From."""
    username: str | None = None
    """For authentication, with password_file."""
    password_file: File | None = None
    """Password of the username."""
    ca_file: File | None = None
    """Certificates for the server's TLS; the system's by default."""
    timeout: Annotated[Seconds, Field(gt=0)] = 20.0
    """For one message."""

    @model_validator(mode="after")
    def _login(self) -> SmtpSettings:
        if (self.username is None) != (self.password_file is None):
            raise PydanticCustomError(
                "GW111", "username and password_file are given together or not at all", {}
            )
        return self


class SlackSettings(Strict):
    """Slack's Web API."""

    url: Url = "https://slack.com/api"
    """Base address; another one only for a proxy or a test."""
    token_file: File
    """Bot token (xoxb-...) with the scope chat:write."""
    timeout: Annotated[Seconds, Field(gt=0)] = 10.0
    """For one message."""


class RegistrationSettings(Strict):
    """How nodes make themselves known (`gpuwarden exporter --engine.url`)."""

    token_file: File
    """The nodes' bearer token; every node has a copy (--engine.token-file)."""
    heartbeat: Annotated[Seconds, Field(ge=1, le=3600)] = 60.0
    """How often a node is to be heard; one that was not for three times this is silent, and stays
    expected until it is back or `gpuwarden nodes forget`."""
    limit: Annotated[int, Field(strict=True, ge=1, le=100_000)] = 10_000
    """How many nodes may be registered."""
    allow: Annotated[
        tuple[Annotated[str, AfterValidator(_allowed)], ...], BeforeValidator(as_tuple)
    ] = ()
    """Networks (10.1.0.0/16) and host names (*.gpu.example.org) that may be registered; any by
    default."""


class NodeSettings(Strict):
    """Which nodes there should be: all that are named, and without promql Prometheus' targets."""

    registration: RegistrationSettings | None = None
    """Nodes make themselves known; Prometheus finds them by /v1/sd/prometheus."""
    names: Annotated[
        tuple[Annotated[str, AfterValidator(_target)], ...], BeforeValidator(as_tuple)
    ] = ()
    """HOST:PORT of each, as Prometheus' label `instance` has them."""
    promql: str | None = None
    """An expression whose rows name them by the label `instance`, or whose one row without it is
    their number, such as count(kube_node_labels{label_gpu="true"})."""

    @model_validator(mode="after")
    def _some(self) -> NodeSettings:
        if self.registration is None and not self.names and self.promql is None:
            raise PydanticCustomError(
                "GW111", "nodes names none: give registration, names or promql", {}
            )
        return self


class NoticeSettings(Strict):
    """How alerts are kept alive, and when silence becomes a problem."""

    resend: Annotated[Seconds, Field(ge=1)] = 60.0
    """How often firing alerts are repeated to Alertmanager; they end four times this after the
    engine's death."""
    undelivered_after: Annotated[Seconds, Field(gt=0)] = 300.0
    """Operators are told when a notice that precedes an end is not proven after this long."""


class RetentionSettings(Strict):
    """How long the ledger remembers."""

    audit: Annotated[Seconds, Field(ge=7 * 86400)] = 365 * 86400.0
    """Closed cases with their events, notices, proofs, decisions and keeps; counters stay for ever.
    At least a week: limits look back a day. What runs, is open or is not proven is never
    forgotten."""


class SlurmSettings(Strict):
    """How Slurm is asked, for `only_if_waiting: {slurm: ...}`, and told to end what it owns."""

    squeue: File = "/usr/bin/squeue"
    """Slurm's command; the engine's user must be allowed to see the jobs of all users."""
    scontrol: File = "/usr/bin/scontrol"
    """Tells what is idle and what a job is, and requeues it: for that the engine's user must be
    Slurm's operator."""
    scancel: File = "/usr/bin/scancel"
    """Ends jobs and gives them the signal that they asked for; likewise."""
    sacct: File | None = None
    """Knows jobs that Slurm's controller has forgotten; only where there is accounting."""
    config: File | None = None
    """slurm.conf; where Slurm looks for it by default."""
    timeout: Annotated[Seconds, Field(gt=0, le=60)] = 5.0
    """For one question. Until it is answered a tick waits; not answered, nothing is ended."""


class EngineSettings(Strict):
    """engine.yaml."""

    version: Literal[1]
    """Of this file's format."""
    prometheus: PrometheusSettings
    """Where every fact comes from."""
    scrape_interval: Annotated[Seconds, Field(gt=0)] = 5.0
    """How often Prometheus scrapes the nodes; must be what prometheus.yml says, since every
    freshness gate is a multiple of it."""
    tick: Annotated[Seconds, Field(ge=1)] = 15.0
    """How often every rule is evaluated. Shorter finds more quickly and costs more queries."""
    expected_nodes: Annotated[int, Field(strict=True, ge=1)] | None = None
    """How many nodes there are; by default as many as Prometheus has targets for. Better named one
    by one: see `nodes`."""
    nodes: NodeSettings | None = None
    """Which nodes there should be, by name, and how they make themselves known."""
    rules: Annotated[tuple[File, ...], BeforeValidator(some_tuple)]
    """Rule files or patterns such as rules/*.yaml; read again when they change. A pattern may find
    1,000 files and look at 10,000 names; names that begin with a dot are left out."""
    directory: File | None = None
    """Users, teams and addresses; read again when it changes."""
    ledger: File = "/var/lib/gpuwarden/ledger.sqlite"
    """What the engine knows for certain. Back it up; losing it forgets limits and keeps."""
    retention: RetentionSettings = Field(default_factory=RetentionSettings)
    """How long the ledger remembers."""
    alertmanagers: Annotated[tuple[Url, ...], BeforeValidator(as_tuple)] = ()
    """Every replica of one cluster, not a load balancer."""
    notices: NoticeSettings = Field(default_factory=NoticeSettings)
    """How alerts are kept alive."""
    agents: AgentSettings | None = None
    """How nodes are reached; without it nothing can be ended."""
    web: WebSettings = Field(default_factory=WebSettings)
    """The engine's own pages and API."""
    smtp: SmtpSettings | None = None
    """The mail server; without it no mail is sent."""
    slack: SlackSettings | None = None
    """Slack; without it no message is sent."""
    bots: dict[BotName, BotSettings] = Field(default_factory=dict)
    """Bots in groups of WeCom, DingTalk, Feishu or Lark, by a name of your choice."""
    drill: DrillSettings | None = None
    """Rehearsals: jobs of one user that are ended for practice; without it there are none."""
    slurm: SlurmSettings | None = None
    """Slurm, which ends its own jobs, and whose queue rules may ask who waits."""
    prices: Prices | None = None
    """What a GPU hour costs; without it no money is named."""
    budgets: File | None = None
    """Budgets of teams by the calendar; read again when it changes. docs/money.md."""
    scheduler: SchedulerSettings | None = None
    """Whose queue, bookings and budgets the pages show; without it, none."""
    leaves: LeaveSettings | None = None
    """How many running jobs a scheduler may have asked to leave; without it, none."""
    kubernetes: KubernetesSettings | None = None
    """Kubernetes, whose controllers end pods; without it no pod is ended."""
    reports: ReportSettings | None = None
    """Weekly reports by mail (`gpuwarden report --send`); without it nobody gets one."""
    kill_switch: File = "/run/gpuwarden/halt"
    """While this file exists nothing is ended."""
    external_url: ExternalUrl = f"http://{DEFAULT_LISTEN}"
    """How people reach the engine's pages; written into notices."""
    cool_down: Seconds = 600.0
    """Between two ends of one owner's jobs, so that there is time to react to the first."""
    comeback: Annotated[Seconds, Field(gt=0)] = 600.0
    """A job whose work was ended and is started again within this came back by itself: it is told,
    and not ended again for six times this, then twelve times; after three ends within a day not
    for a day."""
    settle: Annotated[Seconds, Field(gt=0)] | None = None
    """Unbroken fresh data that must follow a start or an outage before anything is ended; three
    scrapes and two ticks by default."""

    @model_validator(mode="after")
    def _one_expectation(self) -> EngineSettings:
        if self.expected_nodes is not None and self.nodes is not None:
            raise PydanticCustomError(
                "GW111", "expected_nodes and nodes exclude each other: by number, or by name", {}
            )
        if self.prometheus.shards and self.expected_nodes is None and self.nodes is None:
            raise PydanticCustomError(
                "GW111", "with prometheus.shards, say which nodes there should be: nodes", {}
            )
        if self.reports is not None and self.smtp is None:
            raise PydanticCustomError("GW111", "reports are sent by mail: give smtp as well", {})
        return self

    @property
    def channels(self) -> tuple[str, ...]:
        """Names of the channels that are configured, as receivers name them."""
        known = (("email", self.smtp), ("slack", self.slack))
        return (*(name for name, chosen in known if chosen is not None), *self.bots)

    @property
    def reading_along(self) -> tuple[str, ...]:
        """Names of those of them that prove nothing to an owner."""
        return tuple(name for name, bot in self.bots.items() if not bot.proves)

    @property
    def settle_after(self) -> float:
        """`settle` or its default, in seconds."""
        if self.settle is not None:
            return self.settle
        return max(3 * self.scrape_interval, 2 * self.tick)


class Settings:
    """engine.yaml with its place, which relative paths depend on.

    Attributes:
        values: what the file says.
        base: the file's directory.
    """

    def __init__(self, values: EngineSettings, base: Path) -> None:
        self.values = values
        self.base = base

    def path(self, name: str) -> Path:
        """A path of the file, relative to it."""
        return self.base / name

    def rule_files(self) -> tuple[Path, ...]:
        """The rule files that exist now, sorted; a plain name is listed even if it is missing.

        Raises:
            InvalidInput: a pattern leads to more than may be looked at, or nowhere it may look.
        """
        found: dict[Path, None] = {}
        for name in self.values.rules:
            path = self.path(name)
            found.update(dict.fromkeys(matching(path) if is_pattern(name) else (path,)))
        return tuple(found)


def load_settings(path: Path) -> Settings:
    """Read engine.yaml.

    Raises:
        InvalidInput: its text shows every finding with its line and a caret.
    """
    values = load_file(EngineSettings, path)
    settings = Settings(values, path.resolve().parent)
    if not settings.rule_files():
        raise InvalidInput(f"{path}: rules: no file matches {', '.join(values.rules)}")
    return settings
