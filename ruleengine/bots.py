"""Group bots of WeCom, DingTalk and Feishu: what they are sent, and which answer is a proof.

All three answer HTTP 200 to what they refuse. The proof is the number 0 in the body, and nothing
else: an answer without it, of a proxy or a portal, proves nothing. (docs/decisions/0025.)
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import httpx

from gpuwarden.errors import InvalidInput, ServiceUnavailable
from gpuwarden.exchanges import exchange
from gpuwarden.ruleengine.channels import Undelivered, keepable
from gpuwarden.ruleengine.layouts import shortened
from gpuwarden.ruleengine.texts.speeches import speech

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.bot_settings import BotSettings
    from gpuwarden.ruleengine.layouts import Message

GROUP = "group"
"""The recipient that stands for a group in which nobody is mentioned."""
_ORDER: Final = ("next", "keep", "seen", "cause", "remedy", "expected", "work", "gpus")
"""Parts in the order in which they are given up last where a message is too long."""
_FEISHU_LIMIT: Final = 19_500
"""Bytes of a whole request; Feishu takes 20 KB, and the signature is added."""
_KEY = re.compile(r"[A-Za-z0-9_-]{8,128}")
_MOBILE = re.compile(r"\+?[0-9]{5,15}")
# Full-width forms look the same and are no markup, no mention and no link to any of the three.
_INERT = str.maketrans(
    {
        "<": "\uff1c",
        ">": "\uff1e",
        "[": "\uff3b",
        "]": "\uff3d",
        "*": "\uff0a",
        "`": "\u02cb",
    }
)
_HEADING = re.compile(r"(?m)^(\s*)#")


class BotChannel(ABC):
    """One bot.

    Args:
        settings: its server and time limit.
        key: what its webhook address ends with.
        secret: what messages are signed with, or None.
        clock: for the signature.

    Raises:
        InvalidInput: the key is none.
    """

    temporary: frozenset[int] = frozenset()
    """Codes of troubles that pass: too many messages, a busy server."""
    code_names: tuple[str, ...] = ("errcode",)
    word_names: tuple[str, ...] = ("errmsg",)

    def __init__(
        self, settings: BotSettings, key: str, *, secret: str | None, clock: Clock
    ) -> None:
        if _KEY.fullmatch(key) is None:
            raise InvalidInput(
                f"bots: {settings.key_file} does not hold a key: of the webhook address that the "
                f"bot's page shows, write only what stands after {self.before_key}"
            )
        self.settings = settings
        self._key = key
        self._secret = secret
        self._clock = clock
        # The servers are outside: the environment's proxy may be the only way there.
        self._client = httpx.AsyncClient(timeout=settings.timeout, follow_redirects=False)

    before_key = "key="

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def send(self, recipient: str, message: Message) -> str:
        """See Channel; the recipient is who is mentioned, or GROUP."""
        kind = self.settings.kind
        mention = "" if recipient == GROUP else recipient
        body = json.dumps(self.body(mention, message), ensure_ascii=False).encode()
        try:
            reply = await exchange(
                self._client,
                "POST",
                self.settings.server + self.path(),
                seconds=self.settings.timeout,
                content=body,
                headers={"Content-Type": "application/json; charset=utf-8"},
            )
        except ServiceUnavailable as error:
            raise Undelivered(f"{kind} does not answer: {error}", permanent=False) from error
        if reply.status != 200:
            permanent = 400 <= reply.status < 500 and reply.status not in (408, 425, 429)
            wait = None if permanent else reply.retry_after(self._clock.wall())
            text = f"{kind}: HTTP {reply.status}"
            raise Undelivered(text, permanent=permanent, retry_after=wait)
        try:
            answer = reply.json()
        except ValueError as error:
            raise Undelivered(f"{kind}'s answer is not JSON", permanent=False) from error
        return self._proof(answer, mention)

    def _proof(self, answer: object, mention: str) -> str:
        """The answer's words, if they say that the message was taken."""
        kind = self.settings.kind
        if not isinstance(answer, dict):
            raise Undelivered(f"{kind}'s answer is not an object", permanent=False)
        codes = {name: answer[name] for name in self.code_names if name in answer}
        if not codes or any(type(code) is not int for code in codes.values()):
            raise Undelivered(
                f"{kind}'s answer has no {' or '.join(self.code_names)}: it proves nothing",
                permanent=False,
            )
        word = next((str(answer[name]) for name in self.word_names if answer.get(name)), "")[:200]
        wrong = next((code for code in codes.values() if code != 0), None)
        if wrong is not None:
            raise Undelivered(
                f"{kind}: {wrong} {word}".strip(), permanent=not self.passes(wrong, word)
            )
        name = next(iter(codes))
        to = f" to={mention}" if mention else ""
        return keepable(f"{kind} {name}=0 {word}{to}".strip()[:500])

    def passes(self, code: int, _word: str) -> bool:
        """Whether a trouble goes by itself."""
        return code in self.temporary

    @abstractmethod
    def path(self) -> str:
        """Path and query of the address, with the key."""

    @abstractmethod
    def body(self, mention: str, message: Message) -> Mapping[str, Any]:
        """The message as the server takes it."""


def inert(text: str) -> str:
    """Text in which these bots' markdown finds nothing to format, to link or to mention."""
    return _HEADING.sub("\\1\uff03", text).translate(_INERT)


def markdown(message: Message, *, limit: int, first: str = "", quote_text: bool = True) -> str:
    """The message in the markdown that WeCom and DingTalk have in common.

    Args:
        message: what to say.
        limit: bytes of UTF-8 that it may have; parts are given up from the end.
        first: a line before everything else, such as a mention.
        quote_text: whether text of others is made inert; False only for plain text.
    """
    phrases = speech(message.language).phrases
    shown = inert if quote_text else str
    strong = "**" if quote_text else ""
    tail = f"[{phrases.why_link}]({message.url})" if message.url and quote_text else ""
    if message.url and not quote_text:
        tail = f"{phrases.why_link}{phrases.colon}{message.url}"
    blocks = [f"{strong}{shown(message.subject)}{strong}", shown(message.description)]
    parts = {part.name: part for part in message.parts}
    blocks += [
        f"{strong}{parts[name].heading}{strong}\n{shown(parts[name].text)}"
        for name in _ORDER
        if name in parts
    ]
    found = [first] if first else []
    room = limit - _bytes(f"\n\n{phrases.cut}\n\n{tail}")
    for index, block in enumerate(item for item in blocks if item):
        if _bytes("\n\n".join([*found, block])) > room:
            if index == 0:
                found.append(_within(block, room - _bytes("\n\n".join([*found, ""]))))
            found.append(phrases.cut)
            break
        found.append(block)
    return "\n\n".join([*found, tail] if tail else found)


def _bytes(text: str) -> int:
    return len(text.encode())


def _within(text: str, limit: int) -> str:
    """The beginning of a text, of at most so many bytes."""
    return text.encode()[: max(0, limit)].decode(errors="ignore")


class WecomBot(BotChannel):
    """WeCom: https://developer.work.weixin.qq.com/document/path/91770."""

    temporary = frozenset({-1, 45009, 45033})
    before_key = "key="

    def path(self) -> str:
        """See BotChannel."""
        return f"/cgi-bin/webhook/send?key={quote(self._key, safe='')}"

    def body(self, mention: str, message: Message) -> Mapping[str, Any]:
        """Markdown, which can mention a user id; a mobile number only plain text can mention."""
        if mention and _MOBILE.fullmatch(mention):
            content = markdown(message, limit=2048, quote_text=False)
            return {
                "msgtype": "text",
                "text": {"content": content, "mentioned_mobile_list": [mention]},
            }
        first = f"<@{mention}>" if mention else ""
        return {
            "msgtype": "markdown",
            "markdown": {"content": markdown(message, limit=4096, first=first)},
        }


class DingtalkBot(BotChannel):
    """DingTalk: https://open.dingtalk.com/document/orgapp/custom-robots-send-group-messages."""

    temporary = frozenset({-1, 130101, 410100, 33001})
    before_key = "access_token="

    def path(self) -> str:
        """See BotChannel."""
        path = f"/robot/send?access_token={quote(self._key, safe='')}"
        if self._secret is None:
            return path
        stamp = f"{self._clock.wall() * 1000:.0f}"
        digest = hmac.digest(
            self._secret.encode(), f"{stamp}\n{self._secret}".encode(), hashlib.sha256
        )
        sign = quote(base64.b64encode(digest).decode(), safe="")
        return f"{path}&timestamp={stamp}&sign={sign}"

    def body(self, mention: str, message: Message) -> Mapping[str, Any]:
        """Markdown; who is mentioned must stand in the text too."""
        first = f"@{mention}" if mention else ""
        return {
            "msgtype": "markdown",
            "markdown": {
                "title": inert(shortened(message.subject, 100, "...")),
                "text": markdown(message, limit=18_000, first=first),
            },
            "at": {"atMobiles": [mention] if mention else [], "isAtAll": False},
        }


class FeishuBot(BotChannel):
    """Feishu and Lark: https://open.feishu.cn/document/client-docs/bot-v3/add-custom-bot."""

    temporary = frozenset({11232, 11233, 19001009, 99991400})
    before_key = "/hook/"
    code_names = ("code", "StatusCode")
    word_names = ("msg", "StatusMessage")

    def passes(self, code: int, word: str) -> bool:
        """9499 is Feishu's word for a bad request and for too many of them."""
        return super().passes(code, word) or (code == 9499 and "too many" in word.lower())

    def path(self) -> str:
        """See BotChannel."""
        return f"/open-apis/bot/v2/hook/{quote(self._key, safe='')}"

    def body(self, mention: str, message: Message) -> Mapping[str, Any]:
        """A card whose texts are plain, so that nothing in them is read as markup.

        Feishu refuses what is too long as a whole, however short each part is: the parts that
        matter least are left out until it fits.
        """
        found = self._card(mention, message, cut=False)
        given_up = [name for name in reversed(_ORDER) if any(p.name == name for p in message.parts)]
        while given_up and _bytes(json.dumps(found, ensure_ascii=False)) > _FEISHU_LIMIT:
            name = given_up.pop(0)
            parts = tuple(part for part in message.parts if part.name != name)
            message = replace(message, parts=parts)
            found = self._card(mention, message, cut=True)
        if self._secret is not None:
            stamp = f"{self._clock.wall():.0f}"
            # Their order: the text is the key, and what is signed is empty.
            digest = hmac.digest(f"{stamp}\n{self._secret}".encode(), b"", hashlib.sha256)
            found |= {"timestamp": stamp, "sign": base64.b64encode(digest).decode()}
        return found

    def _card(self, mention: str, message: Message, *, cut: bool) -> dict[str, Any]:
        phrases = speech(message.language).phrases
        elements: list[dict[str, Any]] = []
        if mention:
            tag = {"tag": "lark_md", "content": f"<at id={mention}></at>"}
            elements.append({"tag": "div", "text": tag})
        if message.description:
            elements.append(_plain(message.description))
        for part in message.parts:
            heading = {"tag": "lark_md", "content": f"**{part.heading}**"}
            elements += [{"tag": "div", "text": heading}, _plain(part.text)]
        if cut:
            elements.append(_plain(phrases.cut))
        if message.url:
            button = {
                "tag": "button",
                "text": {"tag": "plain_text", "content": phrases.why_link},
                "url": message.url,
                "type": "default",
            }
            elements.append({"tag": "action", "actions": [button]})
        if message.tags:
            note = {"tag": "plain_text", "content": message.tags}
            elements.append({"tag": "note", "elements": [note]})
        colours = {"light": "green", "moderate": "orange", "severe": "red", "page": "red"}
        return {
            "msg_type": "interactive",
            "card": {
                "config": {"wide_screen_mode": True},
                "header": {
                    "title": {"tag": "plain_text", "content": message.subject},
                    "template": colours.get(message.level, "blue"),
                },
                "elements": elements,
            },
        }


def _plain(text: str) -> dict[str, Any]:
    return {"tag": "div", "text": {"tag": "plain_text", "content": _within(text, 3000)}}


KINDS: Final[Mapping[str, type[BotChannel]]] = {
    "wecom": WecomBot,
    "dingtalk": DingtalkBot,
    "feishu": FeishuBot,
}
"""The class of each kind."""
