"""Nodes that register: who is expected, until when, and what is refused."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.worlds import OwnedClock

from gpuwarden.node_api import Goodbye, Registration, RegistrationRefused, Target
from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.ledger_schema import MIGRATIONS
from gpuwarden.ruleengine.nodes import OFTEN_AT_ONCE, Nodes, NodeState

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PEER = "10.0.0.1"
ONE, TWO = "a" * 64, "b" * 64


class Registry:
    """Nodes on a ledger of their own, at a time that the test moves."""

    def __init__(self, file: Path) -> None:
        self.clock = OwnedClock()
        self._file = file
        self._ledger = Ledger(file)
        self.nodes = Nodes(self._ledger, self.clock, heartbeat=60, limit=3)

    def restart(self, *, limit: int = 3, allowed: tuple[str, ...] = ()) -> None:
        """Replace the engine."""
        self.nodes.close()
        self._ledger.close()
        self._ledger = Ledger(self._file)
        self.nodes = Nodes(self._ledger, self.clock, heartbeat=60, limit=limit, allowed=allowed)

    def close(self) -> None:
        """Release the file."""
        self._ledger.close()

    def say(self, address: str, key: str = ONE, *, peer: str = PEER, scheme: str = "http") -> None:
        """A node registers."""
        target = Target.parse(address)
        self.nodes.register(Registration(target, key, "boot-1", scheme, "0.1.0"), peer=peer)

    def leave(self, address: str, key: str = ONE) -> None:
        """A node says goodbye."""
        self.nodes.leave(Goodbye(Target.parse(address), key))

    def states(self) -> dict[str, str]:
        """Address -> state."""
        return {node.address: self.nodes.state(node).value for node in self.nodes.all()}

    def targets(self) -> list[str]:
        """Every address that Prometheus is told."""
        found: list[str] = []
        for group in self.nodes.targets():
            addresses = group["targets"]
            assert isinstance(addresses, list)
            found += addresses
        return found


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """Nobody has registered yet."""
    made = Registry(tmp_path / "ledger.sqlite")
    yield made
    made.close()


def _refused(reason: str) -> pytest.RaisesExc[RegistrationRefused]:
    return pytest.raises(RegistrationRefused, check=lambda error: error.reason == reason)


class TestLife:
    """From registration to goodbye."""

    def test_a_node_is_expected_from_its_registration_on(self, registry: Registry) -> None:
        """It is a target at once, and on disk: a restarted engine knows it."""
        registry.say("node1:9835")
        registry.say("node2:9835", TWO, scheme="https")
        wanted = [
            {"targets": ["node1:9835"], "labels": {}},
            {"targets": ["node2:9835"], "labels": {"__scheme__": "https"}},
        ]
        assert registry.nodes.targets() == wanted
        registry.restart()
        assert registry.nodes.targets() == wanted
        assert set(registry.states().values()) == {"registered"}

    def test_a_silent_node_stays_expected(self, registry: Registry) -> None:
        """One that vanished without a word stays a target, over any time and restart."""
        registry.say("node1:9835")
        registry.clock.pass_(180)
        assert registry.states() == {"node1:9835": "registered"}
        registry.clock.pass_(1)
        assert registry.states() == {"node1:9835": "silent"}
        registry.clock.pass_(30 * 86400)
        registry.restart()
        assert registry.targets() == ["node1:9835"]
        registry.say("node1:9835")
        assert registry.states() == {"node1:9835": "registered"}

    def test_after_a_restart_of_the_engine_nodes_have_their_time(self, registry: Registry) -> None:
        """While there was no engine nobody could be heard."""
        registry.say("node1:9835")
        registry.clock.pass_(3600)
        registry.restart()
        assert registry.states() == {"node1:9835": "registered"}
        registry.clock.pass_(181)
        assert registry.states() == {"node1:9835": "silent"}

    def test_goodbye(self, registry: Registry) -> None:
        """Who said goodbye is not expected, is shown for a while, and may come back."""
        registry.say("node1:9835")
        registry.leave("node1:9835")
        assert registry.targets() == []
        registry.restart()
        assert (registry.targets(), registry.states()) == ([], {"node1:9835": "left"})
        registry.say("node1:9835")
        assert registry.targets() == ["node1:9835"]

    def test_an_operator_forgets(self, registry: Registry) -> None:
        """A forgotten node is gone; one that is still there registers again."""
        registry.say("node1:9835")
        registry.nodes.forget("node1:9835", by="olga", role="operator")
        registry.restart()
        assert registry.states() == {}
        with _refused("unknown_node"):
            registry.nodes.forget("node1:9835", by="olga", role="operator")
        with _refused("unknown_node"):
            registry.leave("node1:9835")
        registry.say("node1:9835")
        assert registry.targets() == ["node1:9835"]

    def test_when_a_node_was_last_heard_is_kept(self, registry: Registry) -> None:
        """Heartbeats are not written one by one, and the last is not lost."""
        registry.say("node1:9835")
        began = registry.clock.wall()
        registry.clock.pass_(50)
        registry.say("node1:9835")
        registry.restart()
        (node,) = registry.nodes.all()
        assert (node.registered_at, node.seen_at) == (began, began + 50)


class TestRefusals:
    """What no node may do to others, or to the engine."""

    def test_an_address_belongs_to_its_machine(self, registry: Registry) -> None:
        """No other node takes an address over, or says goodbye for it."""
        registry.say("node1:9835")
        with _refused("foreign_address"):
            registry.say("node1:9835", TWO)
        with _refused("foreign_address"):
            registry.leave("node1:9835", TWO)
        assert registry.states() == {"node1:9835": "registered"}

    def test_a_machine_that_was_replaced(self, registry: Registry) -> None:
        """Once its node is silent an address may be another machine's; then it is not the old's."""
        registry.say("node1:9835")
        registry.clock.pass_(181)
        with _refused("foreign_address"):
            registry.leave("node1:9835", TWO)
        registry.say("node1:9835", TWO)
        with _refused("foreign_address"):
            registry.say("node1:9835")

    def test_so_many_and_no_more(self, registry: Registry) -> None:
        """Past the limit nobody is taken in, and who is there is heard; goodbyes make room."""
        for number in range(3):
            registry.say(f"node{number}:9835")
        with _refused("too_many"):
            registry.say("node3:9835")
        registry.say("node0:9835")
        registry.leave("node0:9835")
        registry.say("node3:9835")
        assert registry.targets() == ["node1:9835", "node2:9835", "node3:9835"]

    def test_nodes_that_left_do_not_pile_up(self, registry: Registry) -> None:
        """However many come and go, what is kept is bounded."""
        for number in range(20):
            registry.say(f"node{number}:9835")
            registry.leave(f"node{number}:9835")
        assert len(registry.nodes.all()) <= 4
        registry.clock.pass_(8 * 86400)
        registry.say("node99:9835")
        assert registry.states() == {"node99:9835": "registered"}

    def test_who_speaks_too_often(self, registry: Registry) -> None:
        """One node cannot keep the engine busy; the others are heard."""
        registry.say("node1:9835")
        registry.say("node2:9835")
        for _ in range(int(OFTEN_AT_ONCE)):
            registry.say("node1:9835")
        with _refused("too_often"):
            registry.say("node1:9835")
        with _refused("too_often"):
            registry.leave("node1:9835")
        registry.say("node2:9835")
        registry.clock.pass_(60)
        registry.say("node1:9835")

    def test_too_many_new_addresses(self, registry: Registry) -> None:
        """Who makes up addresses is slowed down, and makes room for nobody's loss."""
        registry.restart(limit=100_000)
        with _refused("too_often"):
            for number in range(2000):
                registry.say(f"node{number}:9835")
        assert len(registry.targets()) == 1000

    @pytest.mark.parametrize("own", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
    def test_a_loopback_address(self, registry: Registry, own: str) -> None:
        """Only the engine's own machine may say that it is reached by the loopback."""
        for address in ("127.0.0.1:9835", "localhost:9835"):
            with _refused("forbidden_address"):
                registry.say(address)
        registry.say("127.0.0.1:9835", peer=own)
        assert registry.targets() == ["127.0.0.1:9835"]

    @pytest.mark.parametrize(
        ("address", "taken"),
        [
            ("10.1.2.3:9835", True),
            ("10.2.0.1:9835", False),
            ("[fd00::7]:9835", True),
            ("a.gpu.lan:9835", True),
            ("a.b.gpu.lan:9835", True),
            ("gpu.lan:9835", False),
            ("evilgpu.lan:9835", False),
            ("login:9835", True),
        ],
    )
    def test_networks_that_are_allowed(self, registry: Registry, address: str, taken: bool) -> None:
        """Where the operator names networks and domains, only theirs are taken."""
        registry.restart(allowed=("10.1.0.0/16", "fd00::/8", "*.gpu.lan", "login"))
        if taken:
            registry.say(address)
        else:
            with _refused("not_allowed"):
                registry.say(address)
        assert bool(registry.targets()) is taken


def test_a_ledger_from_before(tmp_path: Path) -> None:
    """A ledger of the first version gets its table of nodes, and keeps what it had."""
    file = tmp_path / "ledger.sqlite"
    with contextlib.closing(sqlite3.connect(file)) as old:
        old.executescript(f"{MIGRATIONS[0]};PRAGMA user_version=1;")
        old.execute("INSERT INTO meta VALUES ('epoch', '41')")
        old.commit()
    registry = Registry(file)
    registry.say("node1:9835")
    registry.restart()
    assert registry.targets() == ["node1:9835"]
    registry.close()
    with Ledger(file) as ledger:
        assert ledger.next_epoch() == 42


def test_states_are_words_of_the_catalogue() -> None:
    """What operators read is what they alert on."""
    assert {state.value for state in NodeState} == {"registered", "silent", "left"}
