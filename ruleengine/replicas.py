"""Several servers in the place of one: replicas that hold the same, shards that hold parts.

One question, such as the facts of a tick, is answered by one replica of each shard and by no other:
where that fails, everything is asked anew of the next. Rows of shards are put together.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, TypeVar

import structlog

from gpuwarden.errors import GpuwardenError, ServiceUnavailable
from gpuwarden.ruleengine.prometheus import QueryRefused, table

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from gpuwarden.ruleengine.prometheus import Sample, Source, Table
    from gpuwarden.ruleengine.verdicts import FleetFacts

FRESH_SCRAPES = 2.0
PROBE_SECONDS = 3.0
"""A replica that hangs holds up no tick: it is asked last."""

_LAST_SEEN = "last_over_time(gpuwarden_snapshot_timestamp_seconds[1h])"
"""Of each node; for as long as a server remembers what it held."""
_Homes = dict[str, int]
"""Node -> number of its shard, of nodes that several know."""

log = structlog.get_logger(__name__)
_Answer = TypeVar("_Answer")


class Replica:
    """One server.

    Args:
        name: its address.
        source: how it is asked.
    """

    def __init__(self, name: str, source: Source) -> None:
        self.name = name
        self.failed: GpuwardenError | None = None
        self._source = source

    async def instant(self, query: str, time: float) -> list[Sample]:
        """Ask; it is remembered if that fails."""
        return await self._remembering(self._source.instant(query, time))

    async def table(self, query: str, time: float, labels: tuple[str, ...]) -> Table:
        """Ask; it is remembered if that fails."""
        return await self._remembering(table(self._source, query, time, labels))

    async def clock_skew(self) -> float:
        """Ask; it is remembered if that fails."""
        return await self._remembering(self._source.clock_skew())

    async def _remembering(self, answer: Awaitable[_Answer]) -> _Answer:
        try:
            return await answer
        except (ServiceUnavailable, QueryRefused) as error:
            # Thanos refuses a query as such when one of its stores is away.
            self.failed = error
            raise


class Servers:
    """Every server of engine.yaml.

    Args:
        groups: shards, each with its replicas in order of preference.
        wall: Unix time.
        scrape_interval: of the nodes, in seconds.
        probe: seconds in which a replica must say how many nodes it sees.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Replica]],
        *,
        wall: Callable[[], float],
        scrape_interval: float,
        probe: float = PROBE_SECONDS,
    ) -> None:
        self._groups = [list(group) for group in groups]
        self._wall = wall
        self._interval = scrape_interval
        self._probe = probe
        self._used = [group[0] for group in self._groups]

    def states(self) -> dict[str, str]:
        """Address -> used, spare or failed (when it was last asked)."""
        return {
            replica.name: "failed"
            if replica.failed is not None
            else "used"
            if replica in self._used
            else "spare"
            for group in self._groups
            for replica in group
        }

    async def ask(
        self, question: Callable[[Source], Awaitable[FleetFacts]], *, again: bool = False
    ) -> FleetFacts:
        """Have a question answered by one replica of each shard.

        What a replica refuses of it, another may allow; where none does, it stays unknown.

        Args:
            question: asked anew, from its beginning, for every choice of replicas.
            again: about what was just answered: only those that answered then are asked.

        Raises:
            ServiceUnavailable: no replica of some shard answers, or the question has none.
            QueryRefused: no replica of some shard accepts its queries.
        """
        if again:
            return await question(self._source(self._used))
        orders = await asyncio.gather(*(self._order(group) for group in self._groups))
        kept: tuple[FleetFacts, list[Replica]] | None = None
        while True:
            chosen = [order[0] for order in orders]
            for replica in chosen:
                replica.failed = None
            try:
                answer = await question(self._source(chosen))
            except (ServiceUnavailable, QueryRefused) as error:
                if _pass_over(orders, str(error)):
                    continue
                # Not a server failed but the question, or a shard has no replica left.
                if kept is None:
                    raise
                answer, chosen = kept
            else:
                refused = _refused(answer)
                if refused and _pass_over(orders, refused):
                    kept = kept or (answer, chosen)
                    continue
            self._use(chosen)
            return answer

    def _use(self, chosen: list[Replica]) -> None:
        for replica in chosen:
            replica.failed = None  # what was refused is told by the facts
        if chosen != self._used:
            log.warning("another replica is used", used=[r.name for r in chosen])
            self._used = chosen

    def current(self) -> Source:
        """Those that answered last; for figures that no verdict rests on."""
        return self._source(self._used)

    def each(self) -> tuple[Source, ...]:
        """Likewise, one of each shard: for sums over all nodes, which no shard has."""
        return tuple(self._used)

    def _source(self, chosen: Sequence[Replica]) -> Source:
        if len(chosen) == 1:
            return chosen[0]
        return Shards(chosen, scrape_interval=self._interval)

    async def _order(self, group: list[Replica]) -> list[Replica]:
        """Replicas as they are to be tried: those that see more nodes first."""
        if len(group) == 1:
            return list(group)
        seen = await asyncio.gather(*(self._lit(replica) for replica in group))
        lit = dict(zip(group, seen, strict=True))
        return sorted(group, key=lambda r: (-lit[r], r not in self._used))

    async def _lit(self, replica: Replica) -> float:
        """How many nodes a replica sees now; below 0 if it does not answer."""
        limit = FRESH_SCRAPES * self._interval
        query = (
            "count(timestamp(gpuwarden_snapshot_timestamp_seconds) "
            f">= time() - {limit:g}) or vector(0)"
        )
        try:
            async with asyncio.timeout(self._probe):
                rows = await replica.instant(query, self._wall())
        except TimeoutError:
            replica.failed = ServiceUnavailable(f"no answer within {self._probe:g} s")
            return -1.0
        except GpuwardenError:
            return -1.0
        replica.failed = None
        return max((row.value for row in rows), default=0.0)


def _refused(facts: FleetFacts) -> str:
    """Why a value of our own is not known, which another replica may allow; or an empty string."""
    return next((why for key, why in facts.failed.items() if not key.promql), "")


def _pass_over(orders: Sequence[list[Replica]], why: str) -> bool:
    """Take the next replica of each shard whose first one has failed; False where none is left."""
    failed = [order for order in orders if order[0].failed is not None]
    if not failed or any(len(order) == 1 for order in failed):
        return False
    names = [order.pop(0).name for order in failed]
    log.warning("the next replica is asked everything anew", failed=names, error=why)
    return True


class Shards:
    """A `Source` of several that hold different nodes.

    A node may move from one to another, as when targets are hashed over one server more: the former
    one remembers for an hour what it held. Each node is that of the shard which has seen it last,
    and what others say of it is left out.

    Args:
        parts: one of each shard.
        scrape_interval: of the nodes, in seconds.
    """

    def __init__(self, parts: Sequence[Replica], *, scrape_interval: float) -> None:
        self._parts = parts
        self._apart = 2 * FRESH_SCRAPES * scrape_interval
        self._homes: tuple[float, asyncio.Task[_Homes]] | None = None

    async def instant(self, query: str, time: float) -> list[Sample]:
        """The rows of all shards.

        What two shards say with the same labels cannot be put together: an aggregate over part of
        the nodes, say of a job on nodes of both, is left out, and so UNKNOWN.

        Raises:
            ServiceUnavailable: a shard does not answer, or two of them scrape the same node.
        """
        homes, answers = await asyncio.gather(
            self._homes_at(time),
            asyncio.gather(*(part.instant(query, time) for part in self._parts)),
        )
        found: dict[frozenset[tuple[str, str]], Sample] = {}
        twice: set[frozenset[tuple[str, str]]] = set()
        for number, answer in enumerate(answers):
            own: dict[frozenset[tuple[str, str]], Sample] = {}
            for row in answer:
                if homes.get(row.labels.get("instance", ""), number) == number:
                    own[frozenset(row.labels.items())] = row
            twice |= own.keys() & found.keys()
            found |= own
        for key in twice:
            instance = found.pop(key).labels.get("instance")
            if instance is not None:
                raise self._shared(instance)
        return list(found.values())

    async def _homes_at(self, time: float) -> _Homes:
        """Where each node is that more than one shard knows; asked once for all queries."""
        if self._homes is None or self._homes[0] != time:
            self._homes = (time, asyncio.ensure_future(self._find_homes(time)))
        return await asyncio.shield(self._homes[1])

    async def _find_homes(self, time: float) -> _Homes:
        answers = await asyncio.gather(*(part.instant(_LAST_SEEN, time) for part in self._parts))
        seen: dict[str, list[tuple[float, int]]] = {}
        for number, answer in enumerate(answers):
            for row in answer:
                # NaN is in no order; who dates a snapshot wrongly does so at every shard.
                if not math.isnan(row.value):
                    name = row.labels.get("instance", "")
                    seen.setdefault(name, []).append((row.value, number))
        homes: dict[str, int] = {}
        for name, times in seen.items():
            latest, *others = sorted(times, reverse=True)
            if others and latest[1] != others[0][1]:
                if latest[0] - others[0][0] <= self._apart:
                    raise self._shared(name)
                homes[name] = latest[1]
        return homes

    def _shared(self, instance: str) -> ServiceUnavailable:
        names = ", ".join(part.name for part in self._parts)
        return ServiceUnavailable(
            f"{instance} is scraped by two of the shards {names}, or was until a moment ago: each "
            "node belongs to one; servers that scrape the same nodes are `replicas`"
        )

    async def clock_skew(self) -> float:
        """That of the clock which is furthest from ours."""
        found = await asyncio.gather(*(part.clock_skew() for part in self._parts))
        return max(found, key=abs)


class AnyReplica:
    """A `Source` on which no verdict rests: of each shard's replicas the first that answers.

    Unlike `Servers` it asks each query by itself: rows of two queries may be of two replicas.

    Args:
        shards: each with its replicas.
    """

    def __init__(self, shards: Sequence[Sequence[Source]]) -> None:
        self._shards = tuple(tuple(shard) for shard in shards)

    async def instant(self, query: str, time: float) -> list[Sample]:
        """The rows of all shards.

        Raises:
            ServiceUnavailable: no replica of a shard answers.
            QueryRefused: Prometheus refuses the query.
        """
        parts = await asyncio.gather(*(_first(shard, query, time) for shard in self._shards))
        return [row for part in parts for row in part]

    async def clock_skew(self) -> float:
        """0: who asks says of which moment, and no verdict rests on the answer."""
        return 0.0


async def _first(replicas: Sequence[Source], query: str, time: float) -> list[Sample]:
    error: ServiceUnavailable | None = None
    for replica in replicas:
        try:
            return await replica.instant(query, time)
        except ServiceUnavailable as failed:
            error = failed
    raise error or ServiceUnavailable("no server is named")
