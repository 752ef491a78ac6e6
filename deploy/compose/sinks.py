#!/usr/bin/env python3
"""A mailbox and a Slack that keep what they are sent: where compose.yaml's messages arrive.

Speaks SMTP, Slack's `chat.postMessage` and incoming webhooks, and any other webhook. What arrived
is shown on `/` and given as JSON on `/messages`. For trying gpuwarden out: it forwards nothing,
forgets all at its end, and asks nobody for a password.
"""

from __future__ import annotations

import argparse
import email
import email.policy
import html
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import uvicorn
from aiosmtpd.controller import Controller
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

if TYPE_CHECKING:
    from aiosmtpd.smtp import SMTP, Envelope, Session
    from starlette.requests import Request

KEPT = 1000
"""Messages that are kept; older ones are forgotten."""


@dataclass(frozen=True, slots=True)
class Message:
    """Something that arrived.

    Attributes:
        time: Unix seconds.
        kind: mail, slack or webhook.
        to: mail address, Slack channel or path.
        subject: of a mail, or the title of a Slack attachment.
        text: the body as a person reads it; the JSON of a webhook.
        authorization: the header as it came.
    """

    time: float
    kind: str
    to: str
    subject: str
    text: str
    authorization: str = ""


class Sinks:
    """Keeps messages; the handlers of both servers."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque(maxlen=KEPT)
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/-/ready", self._ready),
                Route("/messages", self._list),
                Route("/api/chat.postMessage", self._slack_api, methods=["POST"]),
                Route("/services/{path:path}", self._slack_webhook, methods=["POST"]),
                Route("/{path:path}", self._webhook, methods=["POST"]),
            ]
        )

    async def handle_DATA(  # noqa: N802 - the name is aiosmtpd's protocol
        self, _server: SMTP, _session: Session, envelope: Envelope
    ) -> str:
        """Keep a mail."""
        mail = email.message_from_bytes(envelope.content or b"", policy=email.policy.default)
        body = mail.get_body(("plain", "html"))
        self.messages.append(
            Message(
                time.time(),
                "mail",
                ", ".join(envelope.rcpt_tos),
                str(mail["subject"]),
                "" if body is None else body.get_content().replace("\r\n", "\n").strip(),
            )
        )
        return "250 2.0.0 OK kept"

    async def _slack_api(self, request: Request) -> Response:
        body = await request.json()
        message = self._keep_slack(request, body)
        return JSONResponse({"ok": True, "channel": message.to, "ts": f"{message.time:.6f}"})

    async def _slack_webhook(self, request: Request) -> Response:
        self._keep_slack(request, await request.json())
        return PlainTextResponse("ok")

    def _keep_slack(self, request: Request, body: dict[str, Any]) -> Message:
        attachments = body.get("attachments") or [{}]
        message = Message(
            time.time(),
            "slack",
            str(body.get("channel", "")),
            str(attachments[0].get("title", "")),
            str(body.get("text") or attachments[0].get("text", "")).strip(),
            request.headers.get("authorization", ""),
        )
        self.messages.append(message)
        return message

    async def _webhook(self, request: Request) -> Response:
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        text = (await request.body()).decode(errors="replace")
        authorization = request.headers.get("authorization", "")
        self.messages.append(Message(time.time(), "webhook", path, "", text, authorization))
        return Response(status_code=204)

    async def _list(self, _request: Request) -> Response:
        return JSONResponse([asdict(message) for message in self.messages])

    async def _ready(self, _request: Request) -> Response:
        return PlainTextResponse("ready\n")

    async def _page(self, _request: Request) -> Response:
        rows = "".join(
            f"<tr><td>{time.strftime('%H:%M:%S', time.gmtime(message.time))}Z<td>{message.kind}"
            f"<td>{html.escape(message.to)}<td><b>{html.escape(message.subject)}</b>"
            f"<pre>{html.escape(message.text)}</pre>"
            for message in reversed(self.messages)
            if message.kind != "webhook"
        )
        return HTMLResponse(
            "<!doctype html><meta charset=utf-8><meta http-equiv=refresh content=5>"
            "<title>Messages of gpuwarden</title><style>body{font:15px sans-serif}"
            "td{vertical-align:top;padding:.3em 1em;border-top:1px solid #ccc}"
            "pre{white-space:pre-wrap;margin:.3em 0}</style>"
            f"<h1>What mail and Slack received</h1><table>{rows or '<tr><td>Nothing yet.'}</table>"
        )


def main() -> None:
    """Run both servers until a signal ends them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--smtp-port", type=int, default=1025)
    parser.add_argument("--http-port", type=int, default=8025)
    options = parser.parse_args()
    sinks = Sinks()
    smtp = Controller(sinks, hostname=options.host, port=options.smtp_port)
    smtp.start()
    try:
        uvicorn.run(sinks.app, host=options.host, port=options.http_port, log_level="warning")
    finally:
        smtp.stop()


if __name__ == "__main__":
    main()
