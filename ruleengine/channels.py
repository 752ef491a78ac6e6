"""The last hop: Slack's Web API and the mail server, and what each says that proves a delivery."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import ssl
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime, make_msgid
from typing import TYPE_CHECKING, Protocol

import aiosmtplib
import httpx

from gpuwarden.errors import GpuwardenError, ServiceUnavailable
from gpuwarden.exchanges import exchange
from gpuwarden.ruleengine.layouts import mail_template, slack_blocks, slack_text
from gpuwarden.ruleengine.texts.speeches import PHRASES, local_time

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.layouts import Message
    from gpuwarden.ruleengine.settings import SlackSettings, SmtpSettings

_MAIL = SMTP.clone(cte_type="7bit")  # no server needs 8BITMIME for it
_EMPTY_FIRST_LINE = re.compile(rb"(?m)^([A-Za-z-]+:)\r\n(?=[ \t])")
# Slack's own troubles: https://api.slack.com/methods/chat.postMessage#errors
_SLACK_TEMPORARY = frozenset(
    {
        "fatal_error",
        "internal_error",
        "ratelimited",
        "rate_limited",
        "request_timeout",
        "service_unavailable",
        "team_added_to_org",
        "message_limit_exceeded",
    }
)


class Undelivered(GpuwardenError):
    """A server did not take a message; the text is its reason.

    Attributes:
        permanent: the same message to the same address will be refused again.
        retry_after: seconds for which the server asks to be left alone, or None.
    """

    def __init__(self, message: str, *, permanent: bool, retry_after: float | None = None) -> None:
        super().__init__(keepable(message))
        self.permanent = permanent
        self.retry_after = retry_after


def keepable(words: str) -> str:
    """A server's words as they can be kept: what is no character becomes a question mark.

    Mail servers answer in their own encoding, JSON may name halves of a pair: the ledger takes
    neither, and a proof that cannot be kept would have the message sent again and again.
    """
    return words.encode(errors="replace").decode()


class Channel(Protocol):
    """One way to reach a person."""

    async def send(self, recipient: str, message: Message) -> str:
        """Deliver a message.

        Returns:
            The server's words that prove that it took the message.

        Raises:
            Undelivered: it did not.
        """

    async def aclose(self) -> None:
        """Close the connections."""


class SlackChannel:
    """`chat.postMessage`: a member id is a direct message, a channel id or #name a channel.

    Args:
        settings: the address and time limit.
        token: the bot's.
        clock: for answers that name a date.
    """

    def __init__(self, settings: SlackSettings, token: str, *, clock: Clock) -> None:
        self._clock = clock
        self._url = f"{settings.url}/chat.postMessage"
        self._timeout = settings.timeout
        # Slack is outside: the environment's proxy may be the only way there.
        self._client = httpx.AsyncClient(
            timeout=settings.timeout,
            headers={
                "Authorization": f"Bearer {token}",
                "Content-Type": "application/json; charset=utf-8",
            },
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def send(self, recipient: str, message: Message) -> str:
        """See Channel. HTTP 200 alone proves nothing: `ok` and the message's `ts` do."""
        body = {
            "channel": recipient,
            "text": slack_text(message),
            "blocks": slack_blocks(message),
            "unfurl_links": False,
            "unfurl_media": False,
        }
        try:
            reply = await exchange(
                self._client,
                "POST",
                self._url,
                seconds=self._timeout,
                content=json.dumps(body).encode(),
            )
        except ServiceUnavailable as error:
            raise Undelivered(f"Slack does not answer: {error}", permanent=False) from error
        # https://docs.slack.dev/apis/web-api/rate-limits: a 429 says when the method may be called
        # again; whoever goes on before that is put off for longer.
        wait = reply.retry_after(self._clock.wall())
        if reply.status != 200:
            text = f"Slack: HTTP {reply.status}"
            raise Undelivered(text, permanent=False, retry_after=wait)
        try:
            answer = reply.json()
        except ValueError as error:
            raise Undelivered("Slack's answer is not JSON", permanent=False) from error
        if not isinstance(answer, dict):
            raise Undelivered("Slack's answer is not an object", permanent=False)
        if answer.get("ok") is not True:
            word = str(answer.get("error", "no reason"))
            passes = word in _SLACK_TEMPORARY
            raise Undelivered(
                f"Slack: {word[:100]}", permanent=not passes, retry_after=wait if passes else None
            )
        stamp = answer.get("ts")
        if not isinstance(stamp, str) or not stamp:
            raise Undelivered("Slack said ok without the message's ts", permanent=False)
        channel = str(answer.get("channel", recipient))[:64]
        return keepable(f"slack channel={channel} ts={stamp[:32]}")


class EmailChannel:
    """SMTP: the server's reply to the end of the data is the proof.

    Args:
        settings: of the mail server.
        password: of its user, or None.
        ca_file: certificates for its TLS, or None for the system's.
        clock: for the Date header.
    """

    def __init__(
        self, settings: SmtpSettings, *, password: str | None, ca_file: Path | None, clock: Clock
    ) -> None:
        self._settings = settings
        self._password = password
        self._clock = clock
        self._domain = settings.sender.rpartition("@")[2]
        mail_template()
        self._tls: ssl.SSLContext | None = None
        if settings.tls != "none":
            self._tls = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))

    async def aclose(self) -> None:
        """Nothing is kept open between messages."""

    def headed(
        self, recipient: str, subject: str, *, kind: str, language: str, name: str = ""
    ) -> EmailMessage:
        """A mail without a body yet.

        Args:
            recipient: one bare address.
            subject: of one line.
            kind: which of our mails it is, as readers sort them.
            language: of its body.
            name: what it is known by, so that the same mail is the same if it is sent twice; a new
                one by default.
        """
        mail = EmailMessage(_MAIL)
        mail["Subject"] = f"[gpuwarden] {subject}"
        mail["From"] = self._settings.sender
        mail["To"] = recipient
        mail["Date"] = format_datetime(local_time(self._clock.wall(), "UTC"))
        mail["Message-ID"] = f"<{name}@{self._domain}>" if name else make_msgid(domain=self._domain)
        mail["List-Id"] = f"gpuwarden {kind} <gpuwarden-{kind}.{self._domain}>"
        # Both keep vacation responders from answering; the second is for Exchange.
        mail["Auto-Submitted"] = "auto-generated"
        mail["X-Auto-Response-Suppress"] = "All"
        mail["Content-Language"] = language
        return mail

    def mail(self, recipient: str, message: Message) -> EmailMessage:
        """A message as mail: plain text, and the same as HTML."""
        language = "zh-CN" if message.language == "zh" else "en"
        mail = self.headed(recipient, message.subject, kind="notices", language=language)
        if message.thread:
            # The first of a job's mails is never sent: all refer to it, and so stand together.
            word = hashlib.sha256(message.thread.encode()).hexdigest()[:32]
            root = f"<job-{word}@{self._domain}>"
            mail["In-Reply-To"] = root
            mail["References"] = root
        mail.set_content(f"{message.plain()}\n-- \n{PHRASES[message.language].footer}\n")
        mail.add_alternative(message.html(), subtype="html")
        return mail

    async def send(self, recipient: str, message: Message) -> str:
        """See Channel."""
        return await self.deliver(recipient, self.mail(recipient, message))

    async def deliver(self, recipient: str, mail: EmailMessage) -> str:
        """Hand a mail to the server.

        Returns:
            Its words that prove that it took the mail.

        Raises:
            Undelivered: it did not.
        """
        settings = self._settings
        try:
            async with asyncio.timeout(settings.timeout):
                errors, reply = await aiosmtplib.send(
                    encoded(mail),
                    sender=settings.sender,
                    recipients=[recipient],
                    hostname=settings.host,
                    port=settings.port,
                    username=settings.username,
                    password=self._password,
                    use_tls=settings.tls == "implicit",
                    start_tls=settings.tls == "starttls",
                    tls_context=self._tls,
                    timeout=settings.timeout,
                )
        except aiosmtplib.SMTPRecipientsRefused as error:
            codes = [item.code for item in error.recipients]
            raise Undelivered(
                f"the mail server refused the recipient: {error.recipients[0].message}"
                if error.recipients
                else "the mail server refused the recipient",
                permanent=bool(codes) and all(code >= 500 for code in codes),
            ) from error
        except aiosmtplib.SMTPResponseException as error:
            raise Undelivered(
                f"the mail server said {error.code} {error.message}", permanent=error.code >= 500
            ) from error
        except (TimeoutError, aiosmtplib.SMTPException, OSError, ValueError) as error:
            raise Undelivered(
                f"the mail server does not take it: {type(error).__name__} {error}",
                permanent=False,
            ) from error
        if errors:
            raise Undelivered(f"the mail server refused the recipient: {errors}", permanent=True)
        return keepable(f"smtp 250 {reply}".strip()[:500])


def encoded(mail: EmailMessage) -> bytes:
    """The mail as it goes over the wire.

    Python folds a header that is a little too long right after its name; a first line without a
    value is lawful, but readers show the fold as a space before the text.
    """
    head, blank, body = mail.as_bytes().partition(b"\r\n\r\n")
    return _EMPTY_FIRST_LINE.sub(rb"\1", head) + blank + body
