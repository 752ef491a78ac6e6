"""Messages as Slack and mail readers get them: whole, within limits, and inert."""

from __future__ import annotations

import email.policy
import json
import re
from email import message_from_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.clock import SystemClock
from gpuwarden.ruleengine.channels import EmailChannel, encoded
from gpuwarden.ruleengine.layouts import (
    PARTS,
    Message,
    clean,
    slack_blocks,
    slack_page,
    slack_text,
)
from gpuwarden.ruleengine.messages import KEEP_COMMAND, KEEP_LINK
from gpuwarden.ruleengine.settings import SmtpSettings

NASTY = "<!channel> <@U1> <http://evil|click> & *bold* _it_ ~no~ `x` </script><img src=http://evil>"
TEXTS = {"summary": NASTY, "description": NASTY, **dict.fromkeys(PARTS, NASTY)}


def _message(**changes: str) -> Message:
    texts = {
        **TEXTS,
        KEEP_LINK: "http://engine/keep/a",
        KEEP_COMMAND: "gpuwarden keep x",
        **changes,
    }
    return Message.of(
        texts,
        "http://engine:9837/jobs/proc-1",
        labels={"level": "severe", "rule": "idle", "job_id": "proc-1"},
    )


def _marked(blocks: list[dict]) -> list[str]:
    """Every text that Slack reads as markup."""
    found: list[str] = []

    def below(value: object) -> None:
        if isinstance(value, dict):
            if value.get("type") == "mrkdwn":
                found.append(value["text"])
                assert value["verbatim"] is True
            for item in value.values():
                below(item)
        elif isinstance(value, list):
            for item in value:
                below(item)

    below(blocks)
    return found


def test_slacks_blocks_hold_no_mention_link_or_format_of_others() -> None:
    """Only our own headings are bold."""
    texts = [*_marked(slack_blocks(_message())), slack_text(_message())]
    assert texts
    for text in texts:
        for markup in ("<!channel>", "<@U1>", "<http://evil"):
            assert markup not in text
    for text in texts[:-1]:
        body = text.split("\n", 1)[-1]
        assert not re.search(r"(?:^|\s)\*bold\*(?:\s|$)", body)


@given(st.lists(st.text(max_size=4000), min_size=10, max_size=10), st.text(max_size=400))
def test_whatever_is_said_slack_would_take_it(texts: list[str], subject: str) -> None:
    """Within its limits: 50 blocks, 3000 characters, 2000 for a field, 150 for a header."""
    names = ("description", *PARTS, KEEP_COMMAND)
    message = Message.of(
        {**dict(zip(names, texts, strict=True)), "summary": subject}, "http://engine/jobs/x"
    )
    blocks = slack_blocks(message)
    assert len(blocks) <= 50
    for block in blocks:
        if block["type"] == "header":
            assert 0 < len(block["text"]["text"]) <= 150
        if block["type"] == "section" and "text" in block:
            assert 0 < len(block["text"]["text"]) <= 3000
        for item in block.get("fields", ()):
            assert len(item["text"]) <= 2000
    assert len(slack_text(message)) < 40_000
    json.dumps(blocks)


def test_buttons_are_links_and_carry_nothing_to_answer() -> None:
    """An app without interactivity can send them."""
    (actions,) = [block for block in slack_blocks(_message()) if block["type"] == "actions"]
    assert [item["url"] for item in actions["elements"]] == [
        "http://engine/keep/a",
        "http://engine:9837/jobs/proc-1",
    ]
    assert not any("value" in item for item in actions["elements"])


@pytest.mark.parametrize(
    "url",
    [
        "javascript:alert(1)",
        "http://a/\"onmouseover='x'",
        "http://a/<b>",
        "http://a/ b",
        "file:///etc/passwd",
        "http://a/" + "x" * 3000,
    ],
)
def test_only_plain_addresses_become_links(url: str) -> None:
    """Whatever Alertmanager hands on."""
    message = Message.of({"summary": "s", KEEP_LINK: url}, url)
    assert (message.url, message.keep_url) == ("", "")


def test_the_mail_fetches_nothing_and_runs_nothing() -> None:
    """Neither picture, script, form nor style from elsewhere; what users chose is text."""
    page = _message().html()
    assert not re.search(r"<(img|script|link|iframe|form|object|video)\b", page)
    assert "url(" not in page
    assert set(re.findall(r'href="([^"]*)"', page)) == {
        "http://engine/keep/a",
        "http://engine:9837/jobs/proc-1",
    }
    assert "&lt;img src=http://evil&gt;" in page


def test_text_cannot_turn_the_line_around_nor_steer_a_terminal() -> None:
    """Changes of direction and controls are left out; scripts and emoji stay."""
    text = clean("a\u202eb\u2066c\x1b[31md\x00 \u05d0\u0628 \N{GRINNING FACE}\n")
    assert text == "abc[31md \u05d0\u0628 \N{GRINNING FACE}\n"


def _mail(message: Message) -> email.message.EmailMessage:
    smtp = SmtpSettings(host="mail", sender="gpuwarden@example.org", tls="none")
    channel = EmailChannel(smtp, password=None, ca_file=None, clock=SystemClock())
    parsed = message_from_bytes(
        encoded(channel.mail("alice@example.org", message)), policy=email.policy.default
    )
    assert isinstance(parsed, email.message.EmailMessage)
    return parsed


def test_mails_of_one_job_stand_together_and_call_for_no_answer() -> None:
    """By a first mail that is never sent; lists and responders know what they are."""
    first, second = (_mail(_message(summary=text)) for text in ("one", "two"))
    assert first["References"] == second["References"] == first["In-Reply-To"]
    assert first["Message-ID"] != second["Message-ID"]
    assert first["Auto-Submitted"] == "auto-generated"
    assert "<gpuwarden-notices.example.org>" in first["List-Id"]
    other = _mail(Message.of({"summary": "s"}, "", labels={"job_id": "proc-2"}))
    assert other["References"] != first["References"]


def test_a_mail_says_the_same_in_plain_and_in_rich() -> None:
    """Who reads plain text misses nothing, the link and the command included."""
    plain, rich = (part.get_content() for part in _mail(_message(next="ENDS AT NOON")).iter_parts())
    for text in ("ENDS AT NOON", "http://engine/keep/a", "gpuwarden keep x", "What happens next"):
        assert text in plain
        assert text in rich


def test_the_preview_of_slack_shows_what_is_sent() -> None:
    """Headings, the command and both buttons; and it is as inert as the message."""
    page = slack_page(_message())
    for text in ("<b>Seen</b>", "<pre>gpuwarden keep x</pre>", "http://engine/keep/a"):
        assert text in page
    assert "<img" not in page
