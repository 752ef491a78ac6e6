"""Putting the engine together from its settings, and running it beside its HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
import uvicorn

from gpuwarden.clock import SystemClock
from gpuwarden.connections import BoundedProtocol
from gpuwarden.errors import InvalidInput, ServiceUnavailable
from gpuwarden.files import read_secret
from gpuwarden.ruleengine import tickets
from gpuwarden.ruleengine.alertmanager import AlertmanagerClient
from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.bots import KINDS
from gpuwarden.ruleengine.channels import EmailChannel, SlackChannel
from gpuwarden.ruleengine.deliveries import LastHop
from gpuwarden.ruleengine.engine import Engine
from gpuwarden.ruleengine.job_histories import PrometheusSeries
from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.names import Names
from gpuwarden.ruleengine.nodes import Nodes
from gpuwarden.ruleengine.prometheus import PrometheusClient
from gpuwarden.ruleengine.prometheus_settings import client_of
from gpuwarden.ruleengine.reclaim.kubernetes import Kubernetes
from gpuwarden.ruleengine.reclaim.node import AgentClient, Signer
from gpuwarden.ruleengine.reclaim.slurm import Slurm
from gpuwarden.ruleengine.replicas import AnyReplica, Replica, Servers
from gpuwarden.ruleengine.roles import Role
from gpuwarden.ruleengine.rulebooks import RuleBook
from gpuwarden.ruleengine.schedules import from_settings
from gpuwarden.ruleengine.sign_ins import Token
from gpuwarden.ruleengine.slurm_queues import SlurmQueue
from gpuwarden.ruleengine.slurm_settings import slurm_commands

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    import httpx
    from starlette.applications import Starlette

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.channels import Channel
    from gpuwarden.ruleengine.demand_sources import DemandSource
    from gpuwarden.ruleengine.reclaim.ports import Platform
    from gpuwarden.ruleengine.settings import Settings

MIN_TOKEN = 16
"""Characters of a token, so that nobody guesses it."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BotSecrets:
    """What a bot is reached with, and what its messages are signed with."""

    key: str
    secret: str | None


@dataclass(frozen=True, slots=True)
class Secrets:
    """Everything secret that engine.yaml names, read; None where it names nothing."""

    notify_token: str | None
    operator_token: str | None
    smtp_password: str | None
    slack_token: str | None
    node_token: str | None
    bots: Mapping[str, BotSecrets]
    signer: Signer | None
    metrics_token: str | None = None
    tokens: tuple[Token, ...] = ()


def read_secrets(settings: Settings) -> Secrets:
    """Read every secret.

    Raises:
        InvalidInput: naming the setting whose file cannot be used.
    """
    values = settings.values

    def secret(name: str | None, setting: str) -> str | None:
        return None if name is None else read_secret(settings.path(name), setting)

    smtp, slack, agents = values.smtp, values.slack, values.agents
    registration = values.nodes.registration if values.nodes else None
    return Secrets(
        notify_token=secret(values.web.token_file, "web.token_file"),
        operator_token=secret(values.web.operator_token_file, "web.operator_token_file"),
        smtp_password=secret(smtp.password_file if smtp else None, "smtp.password_file"),
        slack_token=secret(slack.token_file if slack else None, "slack.token_file"),
        node_token=secret(
            registration.token_file if registration else None, "nodes.registration.token_file"
        ),
        bots={
            name: BotSecrets(
                read_secret(settings.path(bot.key_file), f"bots: {name}: key_file"),
                secret(bot.secret_file, f"bots: {name}: secret_file"),
            )
            for name, bot in values.bots.items()
        },
        signer=Signer.load(settings.path(agents.key_file)) if agents else None,
        metrics_token=secret(values.web.metrics_token_file, "web.metrics_token_file"),
        tokens=read_tokens(settings),
    )


def read_tokens(settings: Settings) -> tuple[Token, ...]:
    """The tokens of those who have one of their own.

    Raises:
        InvalidInput: one cannot be read, can be guessed, or is that of two.
    """
    found: dict[str, Token] = {}
    for given in settings.values.web.tokens:
        setting = f"web.tokens: {given.name}"
        secret = read_secret(settings.path(given.file), setting)
        if len(secret) < MIN_TOKEN or not secret.isascii() or not secret.isprintable():
            raise InvalidInput(
                f"{setting}: the token in {given.file} is not one line of at least {MIN_TOKEN} "
                "ASCII characters; `openssl rand -hex 32` makes a good one"
            )
        if secret in found:
            raise InvalidInput(f"{setting} has the same token as {found[secret].name}")
        found[secret] = Token(given.name, Role(given.role), secret)
    return tuple(found.values())


def check_files(settings: Settings) -> RuleBook:
    """Read every file that the engine would start on.

    Raises:
        InvalidInput: the first file that cannot be used, with all its mistakes.
    """
    book = RuleBook(settings)
    reports = settings.values.reports
    if reports is not None and (strangers := reports.strangers(book.directory)):
        raise InvalidInput(f"reports.teams: nobody in the directory is of {', '.join(strangers)}")
    read_secrets(settings)
    client_of(settings.values.prometheus, settings.path)
    return book


def open_channels(settings: Settings, secrets: Secrets, clock: Clock) -> dict[str, Channel]:
    """Every way to reach people that engine.yaml names.

    Raises:
        InvalidInput: a bot's key is none.
    """
    found: dict[str, Channel] = {}
    smtp, slack = settings.values.smtp, settings.values.slack
    if smtp is not None:
        found["email"] = EmailChannel(
            smtp,
            password=secrets.smtp_password,
            ca_file=_optional(settings, smtp.ca_file),
            clock=clock,
        )
    if slack is not None and secrets.slack_token is not None:
        found["slack"] = SlackChannel(slack, secrets.slack_token, clock=clock)
    for name, bot in settings.values.bots.items():
        known = secrets.bots[name]
        found[name] = KINDS[bot.kind](bot, known.key, secret=known.secret, clock=clock)
    return found


def _prometheus(
    settings: Settings, client: httpx.AsyncClient, clock: Clock
) -> list[list[tuple[str, PrometheusClient]]]:
    """Address and client of every server, by shards."""
    chosen = settings.values.prometheus
    return [
        [
            (
                url,
                PrometheusClient(
                    url,
                    timeout=chosen.timeout,
                    client=client,
                    clock=clock,
                    replica_labels=chosen.replica_labels,
                    fold="replica_labels" in chosen.model_fields_set,
                ),
            )
            for url in shard
        ]
        for shard in chosen.groups
    ]


def _nodes(settings: Settings, ledger: Ledger, clock: Clock) -> Nodes | None:
    chosen = settings.values.nodes
    if chosen is None or chosen.registration is None:
        return None
    return Nodes(
        ledger,
        clock,
        heartbeat=chosen.registration.heartbeat,
        limit=chosen.registration.limit,
        allowed=chosen.registration.allow,
    )


def _demands(settings: Settings, platforms: Iterable[Platform]) -> dict[str, DemandSource]:
    """Who tells who waits, by the key of `only_if_waiting`."""
    commands = slurm_commands(settings)
    found: dict[str, DemandSource] = {}
    if commands is not None:
        found["slurm"] = SlurmQueue(commands)
    found |= {item.name: item.queue for item in platforms if isinstance(item, Kubernetes)}
    return found


def _platforms(settings: Settings) -> tuple[Platform, ...]:
    """Adapters of the platforms that engine.yaml names."""
    found: list[Platform] = []
    slurm = Slurm.from_settings(settings)
    if slurm is not None:
        found.append(slurm)
    if settings.values.kubernetes is not None:
        found.append(Kubernetes.from_settings(settings.values.kubernetes, settings.base))
    return tuple(found)


def _optional(settings: Settings, name: str | None) -> Path | None:
    return None if name is None else settings.path(name)


class Service:
    """An engine with everything it talks to.

    Args:
        settings: of engine.yaml.
        clock: the machine's by default.

    Raises:
        InvalidInput: a file that it needs is missing or wrong.
        LedgerUnusable: the ledger cannot be opened.
    """

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        clock = clock or SystemClock()
        values = settings.values
        rulebook = RuleBook(settings)
        secrets = read_secrets(settings)
        agents = None
        if values.agents is not None:
            agents = AgentClient(values.agents.url, _optional(settings, values.agents.ca_file))
        ticket_key = None
        if secrets.notify_token is not None:
            ticket_key = tickets.key_from(secrets.notify_token)
        self._channels = open_channels(settings, secrets, clock)
        self._client = client_of(values.prometheus, settings.path)
        self.ledger = Ledger(settings.path(values.ledger))
        self._nodes = _nodes(settings, self.ledger, clock)
        prometheus = _prometheus(settings, self._client, clock)
        self._servers = Servers(
            [[Replica(url, client) for url, client in shard] for shard in prometheus],
            wall=clock.wall,
            scrape_interval=values.scrape_interval,
        )
        self._alertmanager = AlertmanagerClient(values.alertmanagers, clock)
        self._agents = agents
        self._platforms = _platforms(settings)
        self.engine = Engine(
            values,
            settings.path(values.kill_switch),
            rulebook=rulebook,
            ledger=self.ledger,
            source=self._servers,
            alertmanager=self._alertmanager,
            agents=agents,
            signer=secrets.signer,
            clock=clock,
            ticket_key=ticket_key,
            nodes=self._nodes,
            demands=_demands(settings, self._platforms),
            platforms=self._platforms,
        )
        names = Names(
            self.engine,
            ticket_key,
            identified=bool(secrets.tokens or secrets.operator_token or values.web.proxy),
        )
        last_hop = LastHop(
            self.ledger,
            self._channels,
            directory=lambda: rulebook.directory,
            clock=clock,
            bots=values.bots,
            names=names,
        )
        self._schedules = None
        if values.scheduler is not None:
            self._schedules = from_settings(values.scheduler, settings.path, clock)
        self.app: Starlette = EngineApp(
            self.engine,
            last_hop,
            notify_token=secrets.notify_token,
            operator_token=secrets.operator_token,
            ticket_key=ticket_key,
            node_token=secrets.node_token,
            tokens=secrets.tokens,
            metrics_token=secrets.metrics_token,
            names=names,
            series=PrometheusSeries(
                [url for shard in values.prometheus.groups for url in shard], self._client
            ),
            figures=AnyReplica([[client for _, client in shard] for shard in prometheus]),
            schedules=self._schedules,
        ).starlette()
        self._settings = settings

    async def aclose(self) -> None:
        """Release everything."""
        await asyncio.gather(self.engine.reclaimer.aclose(), self.engine.leaves.aclose())
        await self._client.aclose()
        await self._alertmanager.aclose()
        if self._agents is not None:
            await self._agents.aclose()
        for platform in self._platforms:
            await platform.aclose()
        for channel in self._channels.values():
            await channel.aclose()
        if self._schedules is not None:
            await self._schedules.aclose()
        if self._nodes is not None:
            self._nodes.close()
        self.ledger.close()

    async def run(self) -> None:
        """Serve and tick until SIGTERM or SIGINT; SIGHUP begins a tick at once.

        Raises:
            ServiceUnavailable: the address to listen on cannot be had.
        """
        spare_the_collector()
        web = self._settings.values.web
        config = uvicorn.Config(
            self.app,
            host=web.host,
            port=web.port,
            # The other parser bounds no header; the exporter, in the same environment, has it.
            http=BoundedProtocol,
            ssl_certfile=_optional(self._settings, web.tls_cert_file),
            ssl_keyfile=_optional(self._settings, web.tls_key_file),
            log_config=None,
            access_log=False,
            server_header=False,
            # Who the peer is decides whose headers are believed: nobody's header may change it.
            proxy_headers=False,
            date_header=True,
            timeout_graceful_shutdown=5,
        )
        server = _Server(config)
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, self.engine.wake)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        log.info(
            "engine starts",
            listen=web.listen,
            epoch=self.engine.epoch,
            rules=self.engine.rulebook.hash,
            cases=len(self.engine.cases),
        )
        ticking = asyncio.create_task(self.engine.run(), name="engine")
        serving = asyncio.create_task(_serve(server, web.listen), name="web")
        asked = asyncio.create_task(stop.wait(), name="signals")
        try:
            done, _ = await asyncio.wait(
                (ticking, serving, asked), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            # What a tick was about to do is on disk: it may be cut off at any point.
            server.should_exit = True
            self.engine.stop()
            ticking.cancel()
            asked.cancel()
            await asyncio.gather(ticking, serving, asked, return_exceptions=True)
            await self.aclose()
        for task in done - {asked}:
            # A loop that died of an error of ours must not look like an orderly end.
            task.result()
        log.info("engine leaves")


def spare_the_collector() -> None:
    """Have Python look for garbage less often; for a process that is an engine and nothing else.

    A tick makes some million containers, nearly none of them in a cycle: by default they are all
    looked through again and again, which is a fifth of what a tick costs at 10,000 cards; with a
    threshold of 100,000 it is still a tenth.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000_000, 20, 20)


class _Server(uvicorn.Server):
    """Leaves the signals to the engine: uvicorn raises them anew before the ledger is closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


async def _serve(server: uvicorn.Server, listen: str) -> None:
    try:
        await server.serve()
    except SystemExit as error:  # uvicorn's way to say that it cannot bind
        raise ServiceUnavailable(
            f"cannot listen on {listen}: is another engine or server there? See web.listen"
        ) from error
