"""What the engine's clients are answered: by Prometheus, Alertmanager, agents, chats and mail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.fuzz.agent_edges import REPORT, REQUEST
from bench.fuzz.edges import JSON_WORDS, SPLIT, Attack, require
from gpuwarden.clock import SystemClock
from gpuwarden.errors import GpuwardenError, PermanentError, ServiceUnavailable
from gpuwarden.ruleengine.alertmanager import Alert, AlertmanagerClient
from gpuwarden.ruleengine.bot_settings import BotSettings
from gpuwarden.ruleengine.bots import GROUP, BotChannel, DingtalkBot, FeishuBot, WecomBot
from gpuwarden.ruleengine.channels import EmailChannel, SlackChannel, Undelivered
from gpuwarden.ruleengine.layouts import Message
from gpuwarden.ruleengine.prometheus import PrometheusClient
from gpuwarden.ruleengine.reclaim.node import AgentClient, Signer
from gpuwarden.ruleengine.settings import SlackSettings, SmtpSettings

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

MESSAGE = Message("yolo-1 is idle", "It has held a card for 30m.", url="https://e/jobs/1")
SECONDS = 2.0
MOMENT = 1_800_000_000.1
"""That Prometheus is asked of, and that the answers it begins with are of."""
TURN_SECONDS = 0.05
"""For which a mail server waits for its client to speak."""


Ask = Callable[[], Awaitable[object]]
Make = Callable[[int, AsyncExitStack], Ask]
"""Makes a client of the server at a port, and says how it is closed."""


class Server:
    """Answers whatever comes on one loopback port with given bytes, and hangs up."""

    def __init__(self, *, greets: bool = False) -> None:
        self.answer = b""
        self._greets = greets
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = asyncio.Event()
        self._ready = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        # Cancels what is still being answered when it ends.
        asyncio.run(self._work())

    async def _work(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            self.port = int(server.sockets[0].getsockname()[1])
            self._ready.set()
            await self._over.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError):
            if not self._greets:
                await reader.read(65536)
            for part in self.answer.split(SPLIT):
                writer.write(part)
                await writer.drain()
                if self._greets:
                    await asyncio.wait_for(reader.read(65536), TURN_SECONDS)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    def close(self) -> None:
        """Answer nobody any more."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()


def _asks(stack: ExitStack, make: Make, *, greets: bool = False) -> Callable[[bytes], None]:
    """An attack on a client: what the server says is the input."""
    server = Server(greets=greets)
    stack.callback(server.close)
    runner = stack.enter_context(asyncio.Runner())
    clients = AsyncExitStack()

    async def made() -> Ask:
        return make(server.port, clients)

    ask = runner.run(made())
    stack.callback(lambda: runner.run(clients.aclose()))

    async def once() -> None:
        with suppress(ServiceUnavailable, PermanentError, Undelivered):
            await ask()

    def attack(data: bytes) -> None:
        server.answer = data
        runner.run(once())

    return attack


def _prometheus(_folder: Path, stack: ExitStack) -> Callable[[bytes], None]:
    def make(port: int, clients: AsyncExitStack) -> Ask:
        client = PrometheusClient(
            f"http://127.0.0.1:{port}", timeout=SECONDS, replica_labels=("replica",), fold=True
        )
        clients.push_async_callback(client.aclose)

        async def ask() -> None:
            for row in await client.instant("up", MOMENT):
                "".join((*row.labels, *row.labels.values())).encode()
                require(holds=isinstance(row.value, float), what=f"no number: {row}")
            await client.clock_skew()

        return ask

    return _asks(stack, make)


def _alertmanager(_folder: Path, stack: ExitStack) -> Callable[[bytes], None]:
    def make(port: int, clients: AsyncExitStack) -> Ask:
        client = AlertmanagerClient([f"http://127.0.0.1:{port}"], SystemClock())
        clients.push_async_callback(client.aclose)
        alert = Alert({"alertname": "a"}, {}, starts_at=1.0, ends_at=2.0, url="http://e/1")
        return lambda: client.post([alert])

    return _asks(stack, make)


def _agent(_folder: Path, stack: ExitStack) -> Callable[[bytes], None]:
    signer = Signer(Ed25519PrivateKey.generate())

    def make(port: int, clients: AsyncExitStack) -> Ask:
        client = AgentClient(f"http://{{host}}:{port}")
        clients.push_async_callback(client.aclose)

        async def ask() -> None:
            for call in (
                client.node("127.0.0.1"),
                client.send("127.0.0.1", signer.sign(REQUEST)),
                client.report("127.0.0.1", "d-1"),
            ):
                with suppress(GpuwardenError):
                    await call

        return ask

    return _asks(stack, make)


def _slack(_folder: Path, stack: ExitStack) -> Callable[[bytes], None]:
    def make(port: int, clients: AsyncExitStack) -> Ask:
        settings = SlackSettings.model_validate(
            {"url": f"http://127.0.0.1:{port}/api", "token_file": "t", "timeout": "2s"}
        )
        channel = SlackChannel(settings, "xoxb-1", clock=SystemClock())
        clients.push_async_callback(channel.aclose)

        async def ask() -> None:
            (await channel.send("U0ALICE01", MESSAGE)).encode()

        return ask

    return _asks(stack, make)


def _bots(_folder: Path, stack: ExitStack) -> Callable[[bytes], None]:
    kinds: tuple[tuple[str, Callable[..., BotChannel]], ...] = (
        ("wecom", WecomBot),
        ("dingtalk", DingtalkBot),
        ("feishu", FeishuBot),
    )

    def make(port: int, clients: AsyncExitStack) -> Ask:
        made = [
            cls(
                BotSettings.model_validate(
                    {
                        "kind": kind,
                        "url": f"http://127.0.0.1:{port}",
                        "key_file": "k",
                        "timeout": "2s",
                    }
                ),
                "0123456789abcdef-0123",
                secret=None,
                clock=SystemClock(),
            )
            for kind, cls in kinds
        ]
        for bot in made:
            clients.push_async_callback(bot.aclose)

        async def ask() -> None:
            for bot in made:
                with suppress(Undelivered):
                    (await bot.send(GROUP, MESSAGE)).encode()

        return ask

    return _asks(stack, make)


def _mail(_folder: Path, stack: ExitStack) -> Callable[[bytes], None]:
    def make(port: int, clients: AsyncExitStack) -> Ask:
        settings = SmtpSettings.model_validate(
            {
                "host": "127.0.0.1",
                "port": port,
                "tls": "none",
                "sender": "gpuwarden@example.org",
                "timeout": "2s",
            }
        )
        channel = EmailChannel(settings, password=None, ca_file=None, clock=SystemClock())
        clients.push_async_callback(channel.aclose)

        async def ask() -> None:
            (await channel.send("alice@example.org", MESSAGE)).encode()

        return ask

    return _asks(stack, make, greets=True)


_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
_ROWS = (
    b'{"status":"success","data":{"resultType":"vector","result":[{"metric":{"__name__":"up",'
    b'"job_id":"proc-1","gpu":"0"},"value":[1800000000.1,"1"]}]}}'
)
_SCALAR = (
    b'{"status":"success","data":{"resultType":"scalar","result":[1800000000.1,"1800000000"]}}'
)
_HTTP_WORDS = (
    *(b"\r\n", b"Content-Length: 9999999999\r\n", b"Transfer-Encoding: chunked\r\n", b"HTTP/1.1 "),
    *(
        b"Content-Encoding: gzip\r\n",
        b"Content-Encoding: deflate\r\n",
        b"Date: ",
        b"Location: /\r\n",
    ),
    *(
        b"429 x",
        b"302 x",
        b"100 x",
        b"Set-Cookie: a=b\r\n",
        b"Content-Type: text/html; charset=x\r\n",
    ),
)
_MAIL = SPLIT.join(
    (
        b"220 mail ESMTP\r\n",
        b"250-mail\r\n250 SIZE 1000000\r\n",
        b"250 ok\r\n",
        b"250 ok\r\n",
        b"354 go\r\n",
        b"250 queued as 1\r\n",
        b"221 bye\r\n",
    )
)
ATTACKS = (
    Attack(
        "answers of Prometheus",
        _prometheus,
        (_OK + _ROWS, _OK + _SCALAR, _OK + _ROWS.replace(b'{"st', b'{"warnings":["x"],"st')),
        (*JSON_WORDS, *_HTTP_WORDS, b'"histogram":[', b'"isPartial":true', b'"NaN"', b'"+Inf"'),
        pure=False,
        of="engine",
    ),
    Attack(
        "answers of Alertmanager",
        _alertmanager,
        (_OK + b"{}", b"HTTP/1.1 200 OK\r\nDate: Mon, 30 Nov 2026 08:00:00 GMT\r\n\r\n"),
        (*JSON_WORDS, *_HTTP_WORDS, b"99999999", b" -0000"),
        pure=False,
        of="engine",
    ),
    Attack(
        "answers of agents",
        _agent,
        (
            _OK + REPORT.encode(),
            b"HTTP/1.1 403 no\r\n\r\n" + b'{"error": "expired", "message": "it expired"}',
        ),
        (*JSON_WORDS, *_HTTP_WORDS),
        pure=False,
        of="engine",
    ),
    Attack(
        "answers of Slack",
        _slack,
        (_OK + b'{"ok":true,"channel":"C1","ts":"1.2"}', _OK + b'{"ok":false,"error":"not_in"}'),
        (*JSON_WORDS, *_HTTP_WORDS, b'"ok":true', b'"ts":'),
        pure=False,
        of="engine",
    ),
    Attack(
        "answers of bots",
        _bots,
        (_OK + b'{"errcode":0,"errmsg":"ok"}', _OK + b'{"code":0,"msg":"success","StatusCode":0}'),
        (*JSON_WORDS, *_HTTP_WORDS, b'"errcode":', b'"code":'),
        pure=False,
        of="engine",
    ),
    Attack(
        "answers of mail servers",
        _mail,
        (_MAIL, _MAIL.replace(b"354 go", b"554 no")),
        (
            SPLIT,
            b"250-",
            b"250 ",
            b"421 x\r\n",
            b"\r\n",
            b"STARTTLS",
            b"AUTH PLAIN",
            b"\xff",
            b"999 ",
        ),
        pure=False,
        of="engine",
    ),
)
