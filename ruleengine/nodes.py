"""Which nodes there are: those that registered, and what else should be there.

A node that registered is expected until it says goodbye or an operator forgets it: one that falls
silent stays a target of Prometheus, is dark, and counts against the tenth that may be. Registering
is on disk before it is answered; when a node was last heard is in memory, and on disk at times.
"""

from __future__ import annotations

import ipaddress
import json
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

import structlog

from gpuwarden.node_api import RegistrationRefused
from gpuwarden.ruleengine.buckets import Bucket
from gpuwarden.ruleengine.records import Node

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuwarden.clock import Clock
    from gpuwarden.node_api import Goodbye, Registration, Target
    from gpuwarden.ruleengine.ledger import Ledger

SILENT_HEARTBEATS = 3
"""A node that was not heard for so many of them has vanished."""
NEW_PER_SECOND, NEW_AT_ONCE = 20.0, 1000.0
"""New addresses, over all nodes: each costs a write to disk."""
OFTEN_PER_HEARTBEAT, OFTEN_AT_ONCE = 4.0, 20.0
"""Requests for one address."""
FLUSH_SECONDS = 60.0
KEEP_LEFT_SECONDS = 7 * 86400.0
"""Nodes that left are shown for a week."""

log = structlog.get_logger(__name__)


class NodeState(StrEnum):
    """What is known of a node that registered."""

    REGISTERED = "registered"
    SILENT = "silent"
    LEFT = "left"


class Nodes:
    """The nodes that registered.

    Args:
        ledger: where they are kept.
        clock: wall and monotonic time.
        heartbeat: seconds after which a node should be heard again.
        limit: how many there may be.
        allowed: networks and host names that an address must be of; empty: any.
    """

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        *,
        heartbeat: float,
        limit: int,
        allowed: Iterable[str] = (),
    ) -> None:
        self.heartbeat = heartbeat
        self._ledger = ledger
        self._clock = clock
        self._limit = limit
        self._allowed = tuple(allowed)
        self._nodes: dict[str, Node] = {node.address: node for node in ledger.nodes()}
        # Nobody could be heard while there was no engine.
        self._started = clock.monotonic()
        self._heard: dict[str, float] = {}
        self._unsaved: set[str] = set()
        self._flushed_at = self._started
        self._new = Bucket(NEW_PER_SECOND, NEW_AT_ONCE, clock)
        self._often: dict[str, Bucket] = {}

    def register(self, said: Registration, *, peer: str) -> Node:
        """Take a node in, or hear of it again.

        Args:
            said: what it says of itself.
            peer: the address that it spoke from.

        Raises:
            RegistrationRefused: `not_allowed`, `foreign_address`, `too_many` or `too_often`.
            LedgerUnusable: it cannot be written down.
        """
        address, now = str(said.target), self._clock.wall()
        self._check(said.target, peer)
        known = self._nodes.get(address)
        self._ration(address, known)
        if known is not None and known.left_at is None:
            if known.key != said.key and self.state(known) is not NodeState.SILENT:
                raise RegistrationRefused(
                    "foreign_address",
                    f"{address} is another machine's; where that is gone for good: "
                    f"gpuwarden nodes forget {address}",
                )
            since = known.registered_at
        else:
            self._make_room()
            since = now
        node = Node(address, said.key, said.scheme, said.boot_id, said.exporter, since, now)
        self._heard[address] = self._clock.monotonic()
        if known is None or replace(known, seen_at=now) != node:
            self._ledger.save_nodes([node])
            log.info("node registered", address=address, exporter=said.exporter)
        else:
            self._unsaved.add(address)
        self._nodes[address] = node
        self._flush()
        return node

    def leave(self, said: Goodbye) -> None:
        """A node says goodbye: it is not expected any more.

        Raises:
            RegistrationRefused: `unknown_node`, `foreign_address` or `too_often`.
            LedgerUnusable: it cannot be written down.
        """
        address, now = str(said.target), self._clock.wall()
        known = self._nodes.get(address)
        if known is None:
            raise RegistrationRefused("unknown_node", f"{address} is not registered")
        self._ration(address, known)
        if known.key != said.key:
            raise RegistrationRefused("foreign_address", f"{address} is another machine's")
        node = replace(known, seen_at=now, left_at=now)
        self._ledger.save_nodes([node])
        self._nodes[address] = node
        self._unsaved.discard(address)
        log.info("node left", address=address)

    def forget(self, address: str, *, by: str, role: str, reason: str = "") -> None:
        """An operator says that a node will not come back; it is in the audit.

        Args:
            address: as it registered.
            by: who says so.
            role: what lets them.
            reason: why, where they say it.

        Raises:
            RegistrationRefused: `unknown_node`.
            LedgerUnusable: it cannot be written down.
        """
        if address not in self._nodes:
            raise RegistrationRefused("unknown_node", f"{address} is not registered")
        detail = {"address": address, "by": by, "role": role, "reason": reason}
        with self._ledger.transaction() as db:
            db.execute(
                "INSERT INTO events (time, rule_id, job_id, kind, mode, detail) "
                "VALUES (?, '', '', 'node_forgotten', '', ?)",
                (self._clock.wall(), json.dumps(detail, sort_keys=True)),
            )
        self._drop([address])
        log.info("node forgotten", address=address, by=by)

    def state(self, node: Node) -> NodeState:
        """Whether a node is there, silent, or gone."""
        if node.left_at is not None:
            return NodeState.LEFT
        heard = self._heard.get(node.address, self._started)
        silent = self._clock.monotonic() - heard > SILENT_HEARTBEATS * self.heartbeat
        return NodeState.SILENT if silent else NodeState.REGISTERED

    def all(self) -> list[Node]:
        """Every node, by address; those that left too."""
        return [self._nodes[address] for address in sorted(self._nodes)]

    def present(self) -> list[Node]:
        """Nodes that did not leave, by address: those that should be there."""
        return [node for node in self.all() if node.left_at is None]

    def targets(self) -> list[dict[str, object]]:
        """All of them as Prometheus' HTTP service discovery wants them."""
        groups: dict[str, list[str]] = {}
        for node in self.present():
            groups.setdefault(node.scheme, []).append(node.address)
        return [
            {"targets": addresses, "labels": {"__scheme__": scheme} if scheme != "http" else {}}
            for scheme, addresses in groups.items()
        ]

    def close(self) -> None:
        """Write down when each node was last heard."""
        self._flush(last=True)

    # -----------------------------------------------------------------------------------------

    def _check(self, target: Target, peer: str) -> None:
        if target.loopback and not _is_loopback(peer):
            raise RegistrationRefused(
                "forbidden_address",
                f"{target} means another machine to Prometheus than to the node; say "
                "--engine.advertise-address",
            )
        if self._allowed and not any(_is_of(target.host, entry) for entry in self._allowed):
            raise RegistrationRefused(
                "not_allowed",
                f"{target.host} is not in nodes.registration.allow of engine.yaml "
                f"({', '.join(self._allowed)})",
            )

    def _ration(self, address: str, known: Node | None) -> None:
        if known is None:
            if not self._new.take():
                raise RegistrationRefused("too_often", "too many new nodes at once; try again")
            return
        rate = OFTEN_PER_HEARTBEAT / self.heartbeat
        bucket = self._often.setdefault(address, Bucket(rate, OFTEN_AT_ONCE, self._clock))
        if not bucket.take():
            raise RegistrationRefused("too_often", f"{address} speaks too often")

    def _make_room(self) -> None:
        now = self._clock.wall()
        left = [node for node in self._nodes.values() if node.left_at is not None]
        old = [node.address for node in left if now - (node.left_at or 0) > KEEP_LEFT_SECONDS]
        if len(self._nodes) - len(left) >= self._limit:
            raise RegistrationRefused(
                "too_many",
                f"{self._limit} nodes are registered (nodes.registration.limit of engine.yaml); "
                "forget those that are gone: gpuwarden nodes list",
            )
        if len(left) >= self._limit:
            old = [node.address for node in left]
        if old:
            self._drop(old)

    def _drop(self, addresses: Iterable[str]) -> None:
        addresses = list(addresses)
        self._ledger.delete_nodes(addresses)
        for address in addresses:
            del self._nodes[address]
            self._often.pop(address, None)
            self._heard.pop(address, None)
            self._unsaved.discard(address)

    def _flush(self, *, last: bool = False) -> None:
        now = self._clock.monotonic()
        if self._unsaved and (last or now - self._flushed_at >= FLUSH_SECONDS):
            self._flushed_at = now
            self._ledger.save_nodes([self._nodes[address] for address in sorted(self._unsaved)])
            self._unsaved = set()


def node_documents(
    nodes: Nodes | None, *, lit: Mapping[str, bool], expected: Iterable[str]
) -> list[dict[str, object]]:
    """Every node that is known by name, for people and programs.

    Args:
        nodes: those that registered, or None where none can.
        lit: target of Prometheus -> whether it has a complete, current snapshot.
        expected: names of nodes that should be there.
    """
    registered = {node.address: node for node in nodes.all()} if nodes is not None else {}
    names = set(expected)
    found = []
    for address in sorted({*registered, *lit, *names}):
        node = registered.get(address)
        state = None if node is None or nodes is None else nodes.state(node).value
        found.append(
            {
                "address": address,
                "state": state or "not registered",
                "lit": lit.get(address, False),
                "expected": address in names,
                "registered_at": None if node is None else node.registered_at,
                "seen_at": None if node is None else node.seen_at,
                "left_at": None if node is None else node.left_at,
                "exporter": None if node is None else node.exporter,
            }
        )
    return found


def _is_loopback(peer: str) -> bool:
    try:
        number = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return False
    # A socket of both families shows IPv4 in this form.
    return (getattr(number, "ipv4_mapped", None) or number).is_loopback


def _is_of(host: str, entry: str) -> bool:
    """Whether a host is in a network, is a name, or is below `*.domain`."""
    try:
        network = ipaddress.ip_network(entry)
    except ValueError:
        entry = entry.lower()
        return host == entry or (entry.startswith("*.") and host.endswith(entry[1:]))
    try:
        return ipaddress.ip_address(host) in network
    except ValueError:
        return False
