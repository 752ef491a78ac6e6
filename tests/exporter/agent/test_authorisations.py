from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gpuwarden import agent_api
from gpuwarden.errors import InvalidInput
from gpuwarden.exporter.agent import keys
from gpuwarden.exporter.agent.authorisations import Authoriser, Rejected
from gpuwarden.exporter.agent.keys import KeyRing

if TYPE_CHECKING:
    from pathlib import Path

    from tests.exporter.agent.nodes import Engine


@dataclasses.dataclass
class FakeClock:
    """A clock that stands still."""

    now: float = 1_000_000.0

    def wall(self) -> float:
        """Unix time."""
        return self.now

    def monotonic(self) -> float:
        """Likewise."""
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    """The node's clock."""
    return FakeClock()


@pytest.fixture
def authoriser(engine: Engine, clock: FakeClock) -> Authoriser:
    """Believes the engine."""
    return Authoriser(KeyRing(engine.private.parent), engine.node, "boot-1", clock)


def body_of(engine: Engine, **about) -> bytes:
    """A request that is good on this boot and at this moment."""
    fields = {"boot_id": "boot-1", "expires": 1_000_030.0, **about}
    return engine.request("proc-1", **fields).encode()


def reason(authoriser: Authoriser, body: bytes, signature: str | None) -> tuple[int, str]:
    """Status and word of a rejection."""
    with pytest.raises(Rejected) as rejected:
        authoriser.admit(authoriser.read(body, signature))
    return rejected.value.status, rejected.value.error


def test_a_signed_request_is_read(authoriser: Authoriser, engine: Engine) -> None:
    """What the engine signed for this node, boot and moment is believed."""
    body = body_of(engine, run_id="run-1")
    assert authoriser.read(body, engine.sign(body)).run_id == "run-1"


def test_an_unsigned_request_is_refused(authoriser: Authoriser, engine: Engine) -> None:
    """No signature, or something that is none, is not looked at further."""
    assert reason(authoriser, b"{", None) == (401, "unsigned")
    assert reason(authoriser, body_of(engine), "nonsense") == (401, "unsigned")


def test_a_foreign_key_is_refused(authoriser: Authoriser, engine: Engine, tmp_path: Path) -> None:
    """A key that this node does not know commands nothing, also under a known key's name."""
    pair, body = keys.generate(tmp_path / "foreign"), body_of(engine)
    foreign = dataclasses.replace(engine, private=pair.private, key_id=pair.key_id)
    assert reason(authoriser, body, foreign.sign(body)) == (401, "unknown_key")
    posing = dataclasses.replace(engine, private=pair.private)
    assert reason(authoriser, body, posing.sign(body)) == (401, "bad_signature")


def test_an_altered_request_is_refused(authoriser: Authoriser, engine: Engine) -> None:
    """The signature covers every byte of the body."""
    body = body_of(engine)
    signature = engine.sign(body)
    assert reason(authoriser, body.replace(b"proc-1", b"proc-2"), signature)[1] == "bad_signature"


@pytest.mark.parametrize(
    ("about", "error"),
    [
        ({"node": "node-2"}, "wrong_node"),
        ({"boot_id": "boot-0"}, "wrong_boot"),
        ({"expires": 1_000_000.0}, "expired"),
        ({"expires": 1_000_000.0 + agent_api.MAX_LIFETIME_SECONDS + 1}, "lifetime"),
    ],
)
def test_a_request_for_elsewhere_is_refused(
    about: dict, error: str, authoriser: Authoriser, engine: Engine
) -> None:
    """A request holds for one node, one boot and at most a minute."""
    body = body_of(engine, **about)
    assert reason(authoriser, body, engine.sign(body)) == (403, error)


def test_a_captured_request_expires(
    authoriser: Authoriser, engine: Engine, clock: FakeClock
) -> None:
    """The same bytes that were good are refused once their time is over."""
    body = body_of(engine)
    signature = engine.sign(body)
    authoriser.admit(authoriser.read(body, signature))
    clock.now += 31
    assert reason(authoriser, body, signature) == (403, "expired")


def test_a_clock_that_goes_back_makes_nothing_good_again(
    authoriser: Authoriser, engine: Engine, clock: FakeClock
) -> None:
    """What has expired stays so when the node's clock is set back; the right time heals it."""
    old = body_of(engine)
    clock.now += 3600
    young = body_of(engine, expires=clock.now + 30)
    authoriser.admit(authoriser.read(young, engine.sign(young)))
    clock.now -= 3600
    assert reason(authoriser, old, engine.sign(old)) == (403, "clock")
    clock.now += 3600 - 4
    # So little is the work of NTP, and counts as the time that it was.
    authoriser.admit(authoriser.read(young, engine.sign(young)))
    assert reason(authoriser, old, engine.sign(old)) == (403, "expired")


@pytest.mark.parametrize("run_id", ["../../etc/passwd", "a/b", ".", ""])
def test_a_run_is_a_plain_name(run_id: str, authoriser: Authoriser, engine: Engine) -> None:
    """The name of a file is made of a run id: nothing but a plain name is one."""
    body = body_of(engine, run_id=run_id)
    assert reason(authoriser, body, engine.sign(body)) == (400, "malformed")


def test_a_malformed_request_names_its_field(authoriser: Authoriser, engine: Engine) -> None:
    """The engine's author learns which field is wrong."""
    body = body_of(engine).replace(b'"epoch":1', b'"epoch":"one"')
    with pytest.raises(Rejected, match="epoch is not a whole number") as rejected:
        authoriser.read(body, engine.sign(body))
    assert rejected.value.status == 400


def test_keys_rotate_without_a_restart(tmp_path: Path, engine: Engine) -> None:
    """A key counts as soon as its file is there, and no longer than that."""
    ring = KeyRing(engine.private.parent)
    pair = keys.generate(tmp_path / "next")
    message = b"message"
    signature = Ed25519PrivateKey.generate().sign(message).hex()
    assert ring.verify(pair.key_id, signature, message) is None
    (engine.private.parent / "next.pub").write_bytes(pair.public.read_bytes())
    assert ring.key_ids == tuple(sorted((engine.key_id, pair.key_id)))
    assert ring.verify(pair.key_id, signature, message) is False
    (engine.private.parent / "engine.pub").unlink()
    assert ring.key_ids == (pair.key_id,)


def test_a_key_that_others_can_write_is_none(engine: Engine) -> None:
    """Who can change a key file could command the node."""
    ring = KeyRing(engine.private.parent)
    (engine.private.parent / "engine.pub").chmod(0o666)
    assert ring.key_ids == ()
    engine.private.parent.chmod(0o777)
    with pytest.raises(InvalidInput, match="no public key"):
        KeyRing(engine.private.parent)


def test_a_broken_key_does_not_disable_the_others(engine: Engine) -> None:
    """A file that is no key is reported, and the good ones still count."""
    (engine.private.parent / "a.pub").write_text("not a key")
    (engine.private.parent / "b.pub").symlink_to("/nowhere")
    assert KeyRing(engine.private.parent).key_ids == (engine.key_id,)


def test_a_pair_is_written_once(tmp_path: Path) -> None:
    """Keys are private from the first byte on, and never overwritten."""
    pair = keys.generate(tmp_path / "k")
    assert pair.private.stat().st_mode & 0o777 == 0o600
    assert pair.public.stat().st_mode & 0o777 == 0o644
    assert KeyRing(tmp_path / "k").key_ids == (pair.key_id,)
    content = pair.private.read_bytes()
    with pytest.raises(InvalidInput, match="would be overwritten"):
        keys.generate(tmp_path / "k")
    assert pair.private.read_bytes() == content
