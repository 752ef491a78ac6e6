"""Where the demo's notices arrive: a real SMTP server, and a server that speaks Slack's API."""

from __future__ import annotations

import email
import email.policy
import threading
import time
import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn
from aiosmtpd.controller import Controller
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from tests.servers import free_port, until

if TYPE_CHECKING:
    from starlette.requests import Request


@dataclass(frozen=True, slots=True)
class Received:
    """One message: when (Unix time), by which channel, to whom, its subject and its text."""

    time: float
    channel: str
    to: str
    subject: str
    text: str


class Sinks:
    """Both servers; `received` grows as messages arrive.

    Attributes:
        smtp_port: port of the SMTP server on 127.0.0.1.
        slack_url: base URL of the Slack-like API.
        slack_refuses: error that Slack answers with, or None to accept.
        mail_refuses: SMTP reply that refuses every recipient, or None to accept.
    """

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.slack_refuses: str | None = None
        self.mail_refuses: str | None = None
        self.smtp_port = free_port()
        self._slack_port = free_port()
        self.slack_url = f"http://127.0.0.1:{self._slack_port}/api/"
        self._smtp = Controller(self, hostname="127.0.0.1", port=self.smtp_port)
        routes = [
            Route("/api/deadman", self._ready, methods=["POST"]),
            Route("/api/{method:path}", self._slack, methods=["POST"]),
            Route("/-/ready", self._ready),
        ]
        self._http = uvicorn.Server(
            uvicorn.Config(
                Starlette(routes=routes),
                host="127.0.0.1",
                port=self._slack_port,
                log_level="warning",
            )
        )
        # Off the main thread, uvicorn leaves the signal handlers alone.
        self._thread = threading.Thread(target=self._http.run, name="slack-sink", daemon=True)

    def start(self) -> None:
        """Start both servers and wait until they listen."""
        self._smtp.start()
        self._thread.start()
        until(lambda: self._http.started)

    def stop(self) -> None:
        """Stop both servers."""
        self._smtp.stop()
        self._http.should_exit = True
        self._thread.join(timeout=10)

    async def handle_RCPT(  # noqa: N802 - the name is aiosmtpd's protocol
        self, _server: Any, _session: Any, envelope: Any, address: str, _options: Any
    ) -> str:
        """Accept or refuse a recipient."""
        if self.mail_refuses is not None:
            return self.mail_refuses
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(  # noqa: N802 - the name is aiosmtpd's protocol
        self, _server: Any, _session: Any, envelope: Any
    ) -> str:
        """Keep a mail; the reply names its number, as mail servers do."""
        message = email.message_from_bytes(envelope.content, policy=email.policy.default)
        body = message.get_body(("plain",))
        self.received.append(
            Received(
                time.time(),
                "email",
                ", ".join(envelope.rcpt_tos),
                str(message["subject"]),
                "" if body is None else body.get_content().strip(),
            )
        )
        return f"250 2.0.0 OK queued as {len(self.received)}"

    async def _slack(self, request: Request) -> JSONResponse:
        if request.headers.get("content-type", "").startswith("application/json"):
            body = await request.json()
        else:
            # As the Web API's own clients may; `request.form` would want one more package for it.
            body = dict(urllib.parse.parse_qsl((await request.body()).decode()))
        if self.slack_refuses is not None:
            return JSONResponse({"ok": False, "error": self.slack_refuses})
        if request.path_params["method"] == "auth.test":  # who am I: no message
            return JSONResponse({"ok": True, "user": "gpuwarden", "team": "demo"})
        now = time.time()
        # Alertmanager's own integration writes attachments, the engine's last hop writes text.
        parts = [body.get("text", ""), *(a.get("text", "") for a in body.get("attachments", []))]
        text = "\n".join(part for part in parts if part)
        self.received.append(Received(now, "slack", str(body.get("channel")), "", text))
        return JSONResponse({"ok": True, "ts": f"{now:.6f}", "channel": body.get("channel")})

    async def _ready(self, _request: Request) -> JSONResponse:
        return JSONResponse({})
