"""What `gpuwarden doctor engine` asks: files, the engine, and servers, each for a short time."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlencode

import httpx

from gpuwarden.errors import GpuwardenError, ServiceUnavailable
from gpuwarden.exchanges import exchange
from gpuwarden.findings import CannotCheck
from gpuwarden.ruleengine.clients import ask
from gpuwarden.ruleengine.prometheus import PrometheusClient
from gpuwarden.ruleengine.prometheus_settings import client_of
from gpuwarden.ruleengine.serving import read_secrets

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from gpuwarden.ruleengine.prometheus import Sample
    from gpuwarden.ruleengine.settings import Settings

T = TypeVar("T")

SECONDS: Final = 5.0
"""For one question."""
_MAX_BYTES: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Centre:
    """An engine's surroundings, as its engine.yaml names them.

    Attributes:
        settings: of engine.yaml.
        url: where the engine answers.
        headers: of a token, for an engine that asks for one.
        grafana: Grafana's address, or None.
        grafana_token: for it, or None.
        agents: how many agents are asked at most.
    """

    settings: Settings
    url: str
    headers: Mapping[str, str]
    grafana: str | None = None
    grafana_token: str | None = None
    agents: int = 200

    @property
    def prometheus(self) -> tuple[str, ...]:
        """Every Prometheus."""
        return tuple(url for shard in self.settings.values.prometheus.groups for url in shard)

    def engine(self, path: str) -> dict[str, Any]:
        """What the engine's API answers.

        Raises:
            CannotCheck: it does not, or not to who asks.
        """
        try:
            return ask("GET", self.url, path, headers=self.headers)
        except GpuwardenError as error:
            raise CannotCheck(f"{error} (see --engine.url and --token-file)") from error

    def rows(self, query: str, url: str | None = None) -> list[Sample]:
        """The rows of an instant query, of one server, or of one replica of each shard.

        Raises:
            CannotCheck: no server of a shard answers.
        """

        async def story() -> list[Sample]:
            values = self.settings.values.prometheus
            async with client_of(values, self.settings.path) as client:
                found: list[Sample] = []
                for shard in ((url,),) if url is not None else values.groups:
                    found += await _one_of(shard, client, query)
                return found

        return _answered(story())

    def prometheus_api(self, url: str, path: str, **query: str) -> Any:
        """The `data` of an answer of Prometheus' API.

        Raises:
            CannotCheck: it gives none; servers that only speak the query API do not know others.
        """

        async def story() -> Any:
            values = self.settings.values.prometheus
            async with client_of(values, self.settings.path) as client:
                return await _data(client, f"{url}{path}?{urlencode(query)}")

        return _answered(story())

    def get(self, url: str, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON that another server answers.

        Raises:
            CannotCheck: it does not.
        """

        async def story() -> Any:
            async with httpx.AsyncClient(timeout=SECONDS) as client:
                answer = await exchange(
                    client, "GET", url, seconds=SECONDS, headers=headers, limit=_MAX_BYTES
                )
                if answer.status != 200:
                    raise ServiceUnavailable(f"HTTP {answer.status}")
                return answer.json()

        return _answered(story())

    def secrets(self) -> set[str]:
        """Every secret that engine.yaml names, as far as this user can read them."""
        try:
            known = read_secrets(self.settings)
        except GpuwardenError:
            return set()
        words = {known.notify_token, known.operator_token, known.smtp_password, known.slack_token}
        words |= {known.node_token, known.metrics_token, self.grafana_token}
        words |= {token.secret for token in known.tokens}
        for bot in known.bots.values():
            words |= {bot.key, bot.secret}
        prometheus = self.settings.values.prometheus
        for name in (prometheus.password_file, prometheus.bearer_token_file):
            if name is not None:
                words.add(self.settings.path(name).read_text(encoding="utf-8").strip())
        words |= {text.removeprefix("Bearer ") for text in self.headers.values()}
        return {word for word in words if word}


async def _one_of(replicas: tuple[str, ...], client: httpx.AsyncClient, query: str) -> list[Sample]:
    error: GpuwardenError | None = None
    for url in replicas:
        try:
            server = PrometheusClient(url, timeout=SECONDS, client=client)
            # At the server's own time: ours may be wrong, which another check tells.
            return await server.instant(query, time.time() + await server.clock_skew())
        except ServiceUnavailable as failed:
            error = failed
    raise error or ServiceUnavailable("no server is named")


async def _data(client: httpx.AsyncClient, url: str) -> Any:
    answer = await exchange(client, "GET", url, seconds=SECONDS, limit=_MAX_BYTES)
    try:
        document = answer.json()
    except ValueError as error:
        raise ServiceUnavailable(f"HTTP {answer.status}, and no JSON") from error
    if answer.status != 200 or document.get("status") != "success":
        raise ServiceUnavailable(f"HTTP {answer.status} {answer.excerpt()}")
    return document["data"]


def _answered(story: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(story)
    except (GpuwardenError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise CannotCheck(str(error)) from error


def finite(rows: list[Sample]) -> list[Sample]:
    """Those whose value is a number."""
    return [row for row in rows if math.isfinite(row.value)]
