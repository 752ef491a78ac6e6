"""The client of the nodes' agents, against the real agent where the contract is the agent's."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.exporter.agent.nodes import AgentProcess, Cards
from tests.ruleengine.worlds import Sink
from tests.servers import free_port

from gpuwarden.agent_api import Action, ActionReport, ActionRequest, ActionState, NodeInfo, Outcome
from gpuwarden.errors import InvalidInput, RefusedAction, ServiceUnavailable
from gpuwarden.exporter.agent import keys
from gpuwarden.ruleengine.reclaim.node import AgentClient, Signer, host_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass
class Node:
    """A real agent and the key that it obeys."""

    template: str
    signer: Signer
    info: NodeInfo

    def request(self, **changes: object) -> ActionRequest:
        """A request that this node would take on."""
        fields: dict[str, object] = {
            "decision_id": "1-1-abc",
            "epoch": 1,
            "node": self.info.node,
            "boot_id": self.info.boot_id,
            "job_id": "proc-deadbeef-1-1",
            "action": Action.TERMINATE,
            "grace": 30.0,
            "expires": time.time() + 30,
            **changes,
        }
        return ActionRequest(**fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A real agent process over two simulated cards."""
    folder = tmp_path_factory.mktemp("agent")
    pair = keys.generate(folder / "keys")
    cards = Cards(folder / "scenario")
    cards.write()
    port = free_port()
    process = AgentProcess(
        [
            f"--web.listen-address=127.0.0.1:{port}",
            "--node=node-1",
            f"--keys={folder / 'keys'}",
            f"--journal={folder / 'journal'}",
            f"--jobs.directory={folder / 'jobs'}",
            f"--gpus=simulated:{cards.path}",
            f"--kill-switch={folder / 'halt'}",
        ],
        f"http://127.0.0.1:{port}",
        folder / "log",
    )
    process.start()
    try:
        template = f"http://{{host}}:{port}"
        info = asyncio.run(_node(template))
        yield Node(template, Signer.load(pair.private), info)
    finally:
        process.stop()


async def _node(template: str) -> NodeInfo:
    client = AgentClient(template)
    try:
        return await client.node("127.0.0.1")
    finally:
        await client.aclose()


def test_the_agent_names_the_key_that_the_engine_signs_with(node: Node) -> None:
    """Both sides derive the same short name from the same key."""
    assert node.signer.key_id in node.info.key_ids
    assert node.info.node == "node-1"


def test_a_signed_request_is_taken_on_and_its_report_can_be_read(node: Node) -> None:
    """The agent does not know the job and says so; a repeat gives the same report."""

    async def story() -> None:
        client = AgentClient(node.template)
        try:
            signed = node.signer.sign(node.request(decision_id="1-1-known"))
            report = await client.send("127.0.0.1", signed)
            for _ in range(200):
                if report.state is ActionState.FINISHED:
                    break
                await asyncio.sleep(0.05)
                report = await client.report("127.0.0.1", "1-1-known") or report
            assert report.outcome is Outcome.REFUSED
            assert report.reason
            assert await client.send("127.0.0.1", signed) == report
        finally:
            await client.aclose()

    asyncio.run(story())


def test_what_the_agent_never_saw_is_none(node: Node) -> None:
    """404 is an answer: nothing was taken on."""

    async def story() -> ActionReport | None:
        client = AgentClient(node.template)
        try:
            return await client.report("127.0.0.1", "never-sent")
        finally:
            await client.aclose()

    assert asyncio.run(story()) is None


@pytest.mark.parametrize(
    "changes",
    [{"expires": 1.0}, {"node": "node-2"}, {"boot_id": "another"}],
)
def test_a_request_for_another_node_boot_or_time_is_refused(
    node: Node, changes: dict[str, object]
) -> None:
    """The refusal carries the agent's own word."""

    async def story() -> None:
        client = AgentClient(node.template)
        try:
            with pytest.raises(RefusedAction) as refused:
                await client.send("127.0.0.1", node.signer.sign(node.request(**changes)))
            assert refused.value.reason
            assert not refused.value.reason.startswith("http_")
        finally:
            await client.aclose()

    asyncio.run(story())


def test_a_foreign_key_is_refused(node: Node) -> None:
    """Only the engine's key commands."""

    async def story() -> None:
        client = AgentClient(node.template)
        stranger = Signer(Ed25519PrivateKey.generate())
        try:
            with pytest.raises(RefusedAction):
                await client.send("127.0.0.1", stranger.sign(node.request(decision_id="1-1-x")))
        finally:
            await client.aclose()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("instance", "host"),
    [
        ("node-7.example.org:9835", "node-7.example.org"),
        ("10.0.0.7:9835", "10.0.0.7"),
        ("[fd00::7]:9835", "[fd00::7]"),
        ("node7", "node7"),
    ],
)
def test_only_the_host_of_a_target_is_taken(instance: str, host: str) -> None:
    """Port and everything else come from the operator's template."""
    assert host_of(instance) == host


@pytest.mark.parametrize(
    "instance",
    [
        "",
        "evil/path:9835",
        "user@host:1",
        "host:9835/../..",
        "a..b:1",
        "host#x",
        "host?x=1",
        "-host",
        "ho st:1",
        "host:9835:1",
        "[::1",
        "host\n:1",
    ],
)
def test_a_target_that_is_no_host_is_refused(instance: str) -> None:
    """A label must not be able to send the engine elsewhere."""
    with pytest.raises(RefusedAction, match="not the address of a node"):
        host_of(instance)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (500, b"{}", ServiceUnavailable),
        (429, b"{}", ServiceUnavailable),
        (202, b"not json", ServiceUnavailable),
        (202, b"{}", ServiceUnavailable),
        (302, b"", ServiceUnavailable),
        (403, b"[]", RefusedAction),
    ],
)
def test_only_a_refusal_says_that_nothing_was_taken_on(
    status: int, body: bytes, error: type[Exception]
) -> None:
    """Everything unclear is left open: the request may have arrived."""

    async def story(port: int) -> None:
        client = AgentClient(f"http://{{host}}:{port}")
        signer = Signer(Ed25519PrivateKey.generate())
        request = ActionRequest("d", 1, "n", "b", "j", Action.INSPECT, 1.0, 1.0)
        try:
            with pytest.raises(error):
                await client.send("127.0.0.1", signer.sign(request))
        finally:
            await client.aclose()

    with Sink(lambda *_: (status, body)) as sink:
        asyncio.run(story(sink.port))


def test_nobody_there_is_unavailable() -> None:
    """And worth another try."""

    async def story() -> None:
        client = AgentClient(f"http://{{host}}:{free_port()}")
        try:
            with pytest.raises(ServiceUnavailable, match="does not answer"):
                await client.node("127.0.0.1")
        finally:
            await client.aclose()

    asyncio.run(story())


def test_a_key_that_cannot_be_used_says_what_to_do(tmp_path: Path) -> None:
    """Missing, or no key: the setting is named."""
    with pytest.raises(InvalidInput, match="gpuwarden agent keys"):
        Signer.load(tmp_path / "missing")
    (tmp_path / "bad").write_text("no key")
    with pytest.raises(InvalidInput, match=r"agents\.key_file"):
        Signer.load(tmp_path / "bad")
