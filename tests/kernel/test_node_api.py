"""What a node may say of itself: its address is one that a node can have, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.node_api import Goodbye, Registration, RegistrationRefused, Target, node_key

KEY = "0" * 64
SAID = Registration(Target.parse("node7:9835"), KEY, "84cb9834-d59c-48cb", "https", "0.1.0")


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("node7:9835", "node7:9835"),
        ("GPU-7.Example.ORG:9835", "gpu-7.example.org:9835"),
        ("gpu_7.lan.:9835", "gpu_7.lan:9835"),
        ("10.1.2.3:1", "10.1.2.3:1"),
        ("100.64.0.7:9835", "100.64.0.7:9835"),
        ("[2001:DB8:0::7]:65535", "[2001:db8::7]:65535"),
        ("[fd00::7]:9835", "[fd00::7]:9835"),
        ("[::ffff:10.1.2.3]:9835", "10.1.2.3:9835"),
    ],
)
def test_addresses_of_nodes(text: str, canonical: str) -> None:
    """An address has one form, by which Prometheus and the engine know it."""
    assert str(Target.parse(text)) == canonical
    assert Target.parse(canonical) == Target.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "node7",
        "node7:",
        "node7:0",
        "node7:65536",
        "node7:9835/metrics",
        "node7:9835?x=1",
        "node7:9835#",
        "http://node7:9835",
        "user@node7:9835",
        "node7 :9835",
        "node7:9835\n",
        "node7:\uff19\uff18\uff13\uff15",
        "nöde:9835",
        "-node:9835",
        "node..lan:9835",
        ".:9835",
        f"{'a' * 64}:9835",
        f"{'a.' * 130}a:9835",
        "fe80::1:9835",
        "[::1:9835",
        "[node7]:9835",
        "[fe80::1%eth0]:9835",
        "127.1:9835",
        "2130706433:9835",
        "0x7f000001:9835",
        "0x7f.1:9835",
        "10.1.2.256:9835",
        "010.1.2.3:9835",
    ],
)
def test_what_is_no_address(text: str) -> None:
    """No path, no user, no scheme, and nothing that a resolver reads in its own way."""
    with pytest.raises(RegistrationRefused) as caught:
        Target.parse(text)
    assert caught.value.reason == "bad_address"


@pytest.mark.parametrize(
    "text",
    [
        "169.254.169.254:80",
        "169.254.1.1:9835",
        "[fe80::1]:9835",
        "[fd00:ec2::254]:80",
        "100.100.100.200:80",
        "[::ffff:169.254.169.254]:80",
        "metadata.google.internal:80",
        "METADATA.google.internal.:80",
        "metadata:80",
        "0.0.0.0:9835",
        "[::]:9835",
        "224.0.0.1:9835",
        "[ff02::1]:9835",
        "255.255.255.255:9835",
        "240.0.0.1:9835",
    ],
)
def test_addresses_that_no_node_has(text: str) -> None:
    """Link-local, the clouds' metadata, multicast and what is reserved are refused."""
    with pytest.raises(RegistrationRefused) as caught:
        Target.parse(text)
    assert caught.value.reason == "forbidden_address"


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("127.0.0.1:9835", True),
        ("127.9.9.9:9835", True),
        ("[::1]:9835", True),
        ("[::ffff:127.0.0.1]:9835", True),
        ("localhost:9835", True),
        ("a.localhost:9835", True),
        ("localhost.localdomain:9835", True),
        ("10.0.0.1:9835", False),
        ("localhost.example.org:9835", False),
    ],
)
def test_what_means_the_machine_itself(text: str, loopback: bool) -> None:
    """Such an address means another machine to whoever reads it elsewhere."""
    assert Target.parse(text).loopback is loopback


@given(st.text(max_size=80))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    """Whatever is taken has a host without any character that means something in a URL."""
    try:
        target = Target.parse(text)
    except RegistrationRefused:
        return
    assert not set(str(target)) & set("/?#@ %\\\"'<>\n\t")
    assert Target.parse(str(target)) == target


def test_a_registration_survives_its_way() -> None:
    """What a node sends is what the engine reads, and fields of later versions are ignored."""
    document = json.loads(SAID.encode())
    assert Registration.decode({**document, "later": 1}) == SAID
    goodbye = Goodbye(SAID.target, KEY)
    assert Goodbye.decode(json.loads(goodbye.encode())) == goodbye


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, "version"),
        ({"version": True}, "version"),
        ({"version": None}, "version"),
        ({"address": None}, "malformed"),
        ({"address": ["node7:9835"]}, "malformed"),
        ({"address": "node7"}, "bad_address"),
        ({"key": "short"}, "malformed"),
        ({"key": "G" * 64}, "malformed"),
        ({"boot_id": ""}, "malformed"),
        ({"boot_id": "a b"}, "malformed"),
        ({"scheme": "file"}, "malformed"),
        ({"scheme": []}, "malformed"),
        ({"exporter": "<b>"}, "malformed"),
        ({"exporter": 1}, "malformed"),
    ],
)
def test_a_registration_that_is_none(change: dict[str, Any], reason: str) -> None:
    """The field that is wrong is named, and nothing is guessed."""
    with pytest.raises(RegistrationRefused) as caught:
        Registration.decode({**json.loads(SAID.encode()), **change})
    assert caught.value.reason == reason


@pytest.mark.parametrize("document", [None, [], "x", 1, {}])
def test_a_body_that_is_none(document: object) -> None:
    """A body that is no object of this version is refused, whoever asks for what."""
    for decode in (Registration.decode, Goodbye.decode):
        with pytest.raises(RegistrationRefused):
            decode(document)


def test_a_key_is_of_one_address_and_machine() -> None:
    """No other machine has it; it stays over restarts, and is what the engine takes."""
    target = Target.parse("node7:9835")
    own = node_key(target, "machine-1")
    assert own == node_key(target, "machine-1")
    others = {node_key(target, "machine-2"), node_key(Target.parse("node8:9835"), "machine-1")}
    assert len(others | {own}) == 3
    assert Goodbye.decode(json.loads(Goodbye(target, own).encode())).key == own
