"""Bots in groups, against servers that answer as theirs are documented to."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import hmac
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from tests.ruleengine.test_ledger import add
from tests.ruleengine.worlds import Sink, webhook

from gpuwarden.clock import SystemClock
from gpuwarden.errors import InvalidInput
from gpuwarden.ruleengine.bot_settings import BotSettings
from gpuwarden.ruleengine.bots import GROUP, KINDS, inert, markdown
from gpuwarden.ruleengine.channels import Undelivered
from gpuwarden.ruleengine.deliveries import NO_ADDRESS, LastHop
from gpuwarden.ruleengine.directories import Directory
from gpuwarden.ruleengine.layouts import Message, Part
from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.messages import KEEP_COMMAND, KEEP_LINK
from gpuwarden.ruleengine.records import Change
from gpuwarden.ruleengine.texts.speeches import speech

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gpuwarden.ruleengine.bots import BotChannel

KEY = "0123456789abcdef"
SECRET = "SEC0123456789"
STAGE = "moderate-notify:enforce"
ALICE = {"wecom": "alice.w", "dingtalk": "13800000000", "feishu": "ou_0123456789"}
TAKEN: dict[str, dict[str, Any]] = {
    "wecom": {"errcode": 0, "errmsg": "ok"},
    "dingtalk": {"errcode": 0, "errmsg": "ok"},
    "feishu": {
        "StatusCode": 0,
        "StatusMessage": "success",
        "code": 0,
        "data": {},
        "msg": "success",
    },
}
MESSAGE = Message(
    "Job proc-1: idle",
    "It is idle.",
    (Part("next", "What happens next", "It is ended."), Part("seen", "Seen", "GPU 0: 0 %")),
    url="http://engine:9837/jobs/proc-1",
    level="moderate",
    rule="idle",
)


@dataclasses.dataclass
class Server:
    """One of the three servers."""

    kind: str
    sink: Sink
    bot: BotChannel

    def body(self) -> Any:
        """What it was sent last."""
        return self.sink.received[-1].json()


async def _sent(
    kind: str,
    answer: tuple[int, bytes],
    *,
    message: Message = MESSAGE,
    to: str = GROUP,
    secret: str | None = None,
) -> tuple[str, Server]:
    """Send one message to a server that gives this answer."""
    with Sink(lambda *_: answer) as sink:
        settings = BotSettings.model_validate({"kind": kind, "key_file": "k", "url": sink.url})
        bot = KINDS[kind](settings, KEY, secret=secret, clock=SystemClock())
        try:
            proof = await bot.send(to, message)
        finally:
            await bot.aclose()
        return proof, Server(kind, sink, bot)


def _answer(document: object, status: int = 200) -> tuple[int, bytes]:
    return status, json.dumps(document).encode()


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_number_0_is_the_proof_and_the_key_is_in_no_proof(kind: str) -> None:
    """Its words are kept, with whom it mentioned."""
    proof, _ = asyncio.run(_sent(kind, _answer(TAKEN[kind]), to=ALICE[kind]))
    assert "=0" in proof
    assert ALICE[kind] in proof
    assert KEY not in proof


def test_older_feishu_answers_are_a_proof_too() -> None:
    """Without `code`, by StatusCode alone."""
    proof, _ = asyncio.run(_sent("feishu", _answer({"StatusCode": 0, "StatusMessage": "success"})))
    assert proof == "feishu StatusCode=0 success"


REFUSALS: list[tuple[str, tuple[int, bytes], bool]] = [
    # https://developer.work.weixin.qq.com/document/path/90313
    ("wecom", _answer({"errcode": 93000, "errmsg": "invalid webhook url"}), True),
    ("wecom", _answer({"errcode": 40008, "errmsg": "invalid message type"}), True),
    ("wecom", _answer({"errcode": 45009, "errmsg": "api freq out of limit"}), False),
    ("wecom", _answer({"errcode": -1, "errmsg": "system busy"}), False),
    ("dingtalk", _answer({"errcode": 310000, "errmsg": "sign not match"}), True),
    ("dingtalk", _answer({"errcode": 300001, "errmsg": "token is not exist"}), True),
    ("dingtalk", _answer({"errcode": 130101, "errmsg": "send too fast, exceed 20 times"}), False),
    ("dingtalk", _answer({"errcode": 410100, "errmsg": "send too fast"}), False),
    ("feishu", _answer({"code": 19021, "msg": "sign match fail or timestamp"}), True),
    ("feishu", _answer({"code": 19024, "msg": "Key Words Not Found"}), True),
    ("feishu", _answer({"code": 9499, "msg": "Bad Request", "data": {}}), True),
    ("feishu", _answer({"code": 9499, "msg": "too many request", "data": {}}), False),
    ("feishu", _answer({"code": 11232, "msg": "frequency limited"}), False),
    ("feishu", _answer({"StatusCode": 0, "code": 19001, "msg": "param invalid"}), True),
    *((kind, (status, b"{}"), status == 404) for kind in KINDS for status in (404, 429, 500, 302)),
]


@pytest.mark.parametrize(("kind", "answer", "permanent"), REFUSALS)
def test_a_code_other_than_0_is_a_refusal_also_with_http_200(
    kind: str, answer: tuple[int, bytes], *, permanent: bool
) -> None:
    """Too many messages and a busy server pass; a wrong key, secret or form does not."""
    with pytest.raises(Undelivered) as caught:
        asyncio.run(_sent(kind, answer))
    assert caught.value.permanent is permanent
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>welcome</html>",
        b"[]",
        b"0",
        b"{}",
        b'{"ok": true}',
        b'{"errcode": "0", "code": "0"}',
        b'{"errcode": false, "code": false}',
        b'{"errcode": null, "code": null}',
        b'{"errcode": 0.0, "code": 0.0}',
        b'{"errmsg": "ok", "msg": "success"}',
    ],
)
def test_what_is_not_their_answer_is_no_proof(kind: str, body: bytes) -> None:
    """A proxy's or a portal's page with HTTP 200; it is tried again."""
    with pytest.raises(Undelivered) as caught:
        asyncio.run(_sent(kind, (200, body)))
    assert not caught.value.permanent


def test_a_wecom_user_is_mentioned_in_markdown_and_a_number_in_text() -> None:
    """Only plain text can mention a mobile number there."""
    _, server = asyncio.run(_sent("wecom", _answer(TAKEN["wecom"]), to="alice.w"))
    assert server.sink.received[0].path == f"/cgi-bin/webhook/send?key={KEY}"
    assert server.body()["msgtype"] == "markdown"
    assert server.body()["markdown"]["content"].startswith("<@alice.w>\n")
    _, server = asyncio.run(_sent("wecom", _answer(TAKEN["wecom"]), to="13800000000"))
    assert server.body()["text"]["mentioned_mobile_list"] == ["13800000000"]
    assert "**" not in server.body()["text"]["content"]


def test_a_dingtalk_message_is_signed_and_mentions_by_number() -> None:
    """The signature is over the moment and the secret, both in the address."""
    answer = _answer(TAKEN["dingtalk"])
    _, server = asyncio.run(_sent("dingtalk", answer, to="13800000000", secret=SECRET))
    query = parse_qs(urlsplit(server.sink.received[0].path).query)
    (stamp,), (sign,) = query["timestamp"], query["sign"]
    digest = hmac.digest(SECRET.encode(), f"{stamp}\n{SECRET}".encode(), hashlib.sha256)
    assert sign == base64.b64encode(digest).decode()
    assert query["access_token"] == [KEY]
    assert server.body()["at"] == {"atMobiles": ["13800000000"], "isAtAll": False}
    assert "@13800000000" in server.body()["markdown"]["text"]


def test_a_feishu_message_is_a_signed_card_of_plain_texts() -> None:
    """Nothing that a user chose is in a field that is read as markup."""
    nasty = dataclasses.replace(MESSAGE, description="<at id=all></at> [x](http://evil)")
    answer = _answer(TAKEN["feishu"])
    _, server = asyncio.run(
        _sent("feishu", answer, to="ou_0123456789", secret=SECRET, message=nasty)
    )
    body = server.body()
    signed = f"{body['timestamp']}\n{SECRET}".encode()
    assert body["sign"] == base64.b64encode(hmac.digest(signed, b"", hashlib.sha256)).decode()
    marked = [
        element["text"]["content"]
        for element in body["card"]["elements"]
        if element.get("text", {}).get("tag") == "lark_md"
    ]
    assert marked[0] == "<at id=ou_0123456789></at>"
    assert not any("evil" in text or "all" in text for text in marked)


@pytest.mark.parametrize("kind", ["wecom", "dingtalk"])
def test_nothing_that_a_user_chose_is_markup_or_a_mention(kind: str) -> None:
    """A job's name pages nobody, and links nowhere."""
    nasty = dataclasses.replace(
        MESSAGE, subject="<@all> [x](http://evil)", description="**<@bob>** `x`\n# big"
    )
    _, server = asyncio.run(_sent(kind, _answer(TAKEN[kind]), message=nasty))
    text = json.dumps(server.body(), ensure_ascii=False)
    for markup in ("<@all>", "<@bob>", "[x](", "\n# "):
        assert markup not in text.replace("\\n", "\n")


@pytest.mark.parametrize("limit", [2048, 4096])
@pytest.mark.parametrize("word", ["显存", "x ", "\N{GRINNING FACE}"])
def test_a_long_message_keeps_to_the_servers_limit_and_says_what_comes(
    limit: int, word: str
) -> None:
    """Bytes are counted, not characters; what happens next is given up last."""
    parts = tuple(Part(name, name, word * 1500) for name in ("seen", "cause", "expected"))
    after = Part("next", "Next", "ENDS AT NOON")
    long = dataclasses.replace(MESSAGE, parts=(*parts, after))
    text = markdown(long, limit=limit, first="<@alice.w>")
    assert len(text.encode()) <= limit
    assert "ENDS AT NOON" in text
    assert "http://engine:9837/jobs/proc-1" in text
    assert "the rest is on the job's page" in text


def test_text_made_inert_reads_as_before() -> None:
    """Figures, names and paths are left as they are."""
    assert inert("GPU 0: 0 % of /data/set-1") == "GPU 0: 0 % of /data/set-1"


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_whole_address_in_the_key_file_is_refused_with_what_to_write(kind: str) -> None:
    """It is what the bot's page shows; only its end is the key."""
    settings = BotSettings.model_validate({"kind": kind, "key_file": "secrets/key"})
    with pytest.raises(InvalidInput, match="write only what stands after"):
        KINDS[kind](settings, "https://x/y?key=abc", secret=None, clock=SystemClock())


# -- between Alertmanager and the ledger


PEOPLE = Directory.model_validate(
    {
        "version": 1,
        "operators": {"slack": "#gpu-ops"},
        "users": {"alice": ALICE, "bob": {"email": "bob@example.org"}},
    }
)


@dataclasses.dataclass
class Group:
    """A channel that takes everything."""

    got: list[tuple[str, Message]] = dataclasses.field(default_factory=list)

    async def send(self, recipient: str, message: Message) -> str:
        """Take it."""
        self.got.append((recipient, message))
        return "wecom errcode=0 ok"

    async def aclose(self) -> None:
        """Nothing is held."""


async def _told(
    folder: Path, user: str, *, proves: bool, labels: Mapping[str, str] | None = None
) -> tuple[Group, dict[str, str], bool]:
    """What the group got of one notice, what the ledger requires, and whether it is complete."""
    bot = BotSettings.model_validate({"kind": "wecom", "key_file": "k", "proves": proves})
    with Ledger(folder / "l") as ledger:
        stored = add(ledger)
        owned = msgspec.structs.replace(stored.case, user=user)
        ledger.save([Change(stored.id, owned, "enforce")], time=2.0)
        group = Group()
        hop = LastHop(
            ledger,
            {"vision": group},
            directory=lambda: PEOPLE,
            clock=SystemClock(),
            bots={"vision": bot},
        )
        alert = {
            "labels": {
                "alertname": "GpuwardenJobNotice",
                "rule": "idle",
                "job_id": "proc-1",
                "user": user,
                "level": "moderate",
                "mode": "enforce",
                "stage": "moderate-notify",
                **(labels or {}),
            },
            "annotations": {
                "summary": "s",
                "keep": "k",
                KEEP_LINK: "http://engine/keep/SIGNED",
                KEEP_COMMAND: "gpuwarden keep --ticket TICKET",
            },
            "startsAt": "2026-01-01T00:00:00Z",
        }
        await hop.receive(webhook([alert]), ["vision"])
        notices = {n.recipient: n.error or n.state for n in ledger.notices(stored.id)}
        return group, notices, ledger.delivery(stored.id, [STAGE]).complete


@pytest.mark.parametrize("proves", [True, False])
def test_a_group_counts_for_its_owner_only_where_the_operator_says_so(
    tmp_path: Path, *, proves: bool
) -> None:
    """Both are mentioned; by default nothing is required of it, and nothing proven."""
    group, notices, complete = asyncio.run(_told(tmp_path, "alice", proves=proves))
    ((to, message),) = group.got
    assert to == "alice.w"
    assert complete is proves
    assert notices == ({"alice.w": "proven"} if proves else {})
    assert (message.keep_url, message.keep_command) == ("", "")


def test_an_owner_whom_a_group_cannot_mention_is_not_told_by_it(tmp_path: Path) -> None:
    """It is posted, mentions nobody, and the notice is known not to have arrived."""
    group, notices, complete = asyncio.run(_told(tmp_path, "bob", proves=True))
    assert [to for to, _ in group.got] == [GROUP]
    assert list(notices.values()) == [NO_ADDRESS]
    assert not complete


def test_a_page_goes_to_the_group_and_mentions_no_owner(tmp_path: Path) -> None:
    """It is the operators' affair."""
    group, notices, _ = asyncio.run(_told(tmp_path, "alice", proves=True, labels={"level": "page"}))
    assert [to for to, _ in group.got] == [GROUP]
    assert notices == {}


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_long_card_stays_within_what_feishu_takes_and_says_that_it_is_cut(
    secret: str | None,
) -> None:
    """20 KB for a whole request: what happens next and how to keep the job are given up last."""
    names = ("seen", "expected", "cause", "remedy", "next", "keep", "work", "gpus")
    parts = tuple(Part(name, name.upper(), name + "\u9577" * 1400) for name in names)
    long = dataclasses.replace(MESSAGE, description="\u9577" * 1500, parts=parts, language="zh")
    _, server = asyncio.run(_sent("feishu", _answer(TAKEN["feishu"]), message=long, secret=secret))
    sent = server.sink.received[-1].body
    assert len(sent) <= 20_000
    text = sent.decode()
    assert "**NEXT**" in text
    assert "**KEEP**" in text
    assert "**GPUS**" not in text
    assert speech("zh").phrases.cut in text
