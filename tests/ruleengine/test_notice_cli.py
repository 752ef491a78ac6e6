"""What operators see before anybody is told, and whether a message arrives."""

from __future__ import annotations

import json
from email import message_from_string
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from aiosmtpd.controller import Controller
from click.testing import CliRunner, Result
from tests.ruleengine.test_deliveries import Mailbox
from tests.ruleengine.worlds import Sink, slack
from tests.servers import free_port

from gpuwarden.errors import InvalidInput, RefusedAction
from gpuwarden.ruleengine.loading import load_rule_files
from gpuwarden.ruleengine.model import Action, Target
from gpuwarden.ruleengine.notice_cli import notices
from gpuwarden.ruleengine.notice_examples import Scene, example
from gpuwarden.ruleengine.texts.speeches import LANGUAGES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.ruleengine.texts.speeches import Language

FOLDER = Path(__file__).parents[2] / "ruleengine" / "rules"
SHIPPED = load_rule_files([FOLDER / "defaults.yaml", FOLDER / "profiles.yaml"])
TELLING = [
    rule
    for rule in SHIPPED.rules
    if rule.target is Target.JOB and any(stage.do is Action.NOTIFY for stage in rule.stages)
]
SCENE = Scene(1_800_000_000.0, "Asia/Shanghai", "https://engine.example.org")


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("rule", TELLING, ids=lambda rule: rule.id)
def test_every_shipped_rule_has_a_notice_that_says_what_was_seen(
    rule: Any, language: Language
) -> None:
    """Its example breaks the rule; no figure, name of a signal or PromQL is left unexplained."""
    message = example(rule, SHIPPED.profiles, SCENE, language=language)
    parts = {part.name: part.text for part in message.parts}
    assert parts["seen"]
    assert parts["next"]
    for word in ("gpu_", "max by", "min by", "not known", "own figure"):
        assert word not in parts["seen"]
    if rule.takes:
        assert parts["keep"]
        assert "Asia/Shanghai" in parts["next"]


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(notices, arguments, catch_exceptions=False)


def _preview(*arguments: str) -> str:
    done = _run("preview", "--rule", str(FOLDER / "defaults.yaml"), *arguments)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_preview_is_what_each_server_would_be_sent(tmp_path: Path) -> None:
    """Text for people, a mail with both parts, JSON for the others."""
    assert "Work that would be lost" in _preview("--id", "idle-held")
    mail = message_from_string(_preview("--id", "idle-held", "--channel", "email"))
    assert [part.get_content_type() for part in mail.get_payload()] == ["text/plain", "text/html"]
    blocks = json.loads(_preview("--channel", "slack", "--html", str(tmp_path / "s.html")))[
        "blocks"
    ]
    assert blocks[0]["type"] == "header"
    assert "Keep this job" in (tmp_path / "s.html").read_text()
    for channel, kind in (("wecom", "msgtype"), ("dingtalk", "msgtype"), ("feishu", "msg_type")):
        assert kind in json.loads(_preview("--channel", channel, "--language", "zh"))


def test_a_rule_that_is_not_there_is_named_with_a_hint() -> None:
    """As everywhere."""
    arguments = ["preview", "--rule", str(FOLDER / "defaults.yaml"), "--id", "idle-hold"]
    done = CliRunner().invoke(notices, arguments)
    assert 'did you mean "idle-held"' in str(done.exception)


@pytest.mark.parametrize("zone", ["Mars/Phobos", "EST", "../etc/passwd", "/etc/localtime"])
def test_a_zone_that_is_none_is_refused(zone: str) -> None:
    """Its times would be those of UTC, under another name."""
    done = _run("preview", "--rule", str(FOLDER / "defaults.yaml"), "--zone", zone)
    assert (done.exit_code, "write an IANA name" in done.output) == (2, True)


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """By its name and the reason."""
    page = str(tmp_path / "none" / "notice.html")
    with pytest.raises(InvalidInput, match=r"notice\.html cannot be written: No such file"):
        _run("preview", "--rule", str(FOLDER / "defaults.yaml"), "--html", page)


# -- send-test


@pytest.fixture
def config(tmp_path: Path) -> Iterator[tuple[Path, Mailbox, Sink, dict[str, Any]]]:
    """engine.yaml with a mail server, Slack and a WeCom bot."""
    mailbox, port = Mailbox(), free_port()
    controller = Controller(mailbox, hostname="127.0.0.1", port=port)
    controller.start()
    answer = {"errcode": 0, "errmsg": "ok"}
    try:
        with slack() as (sink, _), Sink(lambda *_: (200, json.dumps(answer).encode())) as wecom:
            (tmp_path / "token").write_text("xoxb-0123456789abcdef\n")
            (tmp_path / "key").write_text("0123456789abcdef\n")
            (tmp_path / "rules.yaml").write_text((FOLDER / "defaults.yaml").read_text())
            (tmp_path / "directory.yaml").write_text(
                "version: 1\noperators: {email: [ops@example.org]}\nusers:\n"
                "  lin: {email: lin@example.org, slack: U012ABCDEF, language: zh}\n"
                "  mute: {}\n"
            )
            (tmp_path / "engine.yaml").write_text(
                "version: 1\nprometheus: {url: http://127.0.0.1:1}\nrules: [rules.yaml]\n"
                "directory: directory.yaml\n"
                f"smtp: {{host: 127.0.0.1, port: {port}, tls: none, sender: g@example.org}}\n"
                f"slack: {{token_file: token, url: {sink.url}}}\n"
                f"bots: {{ops: {{kind: wecom, key_file: key, url: {wecom.url}}}}}\n"
            )
            yield tmp_path / "engine.yaml", mailbox, sink, answer
    finally:
        controller.stop()


def test_a_test_message_goes_through_each_channel_and_shows_the_proofs(
    config: tuple[Path, Mailbox, Sink, dict[str, Any]],
) -> None:
    """Marked as one, in the reader's language; what reads along is named so."""
    path, mailbox, sink, _ = config
    done = _run("send-test", "--config", str(path), "--to", "lin")
    assert done.exit_code == 0, done.output
    assert "email lin@example.org: proven: smtp 250" in done.output
    assert "slack U012ABCDEF: proven: slack channel=U012ABCDEF ts=" in done.output
    assert "ops group: proven: wecom errcode=0 ok  (reads along: proves nothing)" in done.output
    assert [to for to, _ in mailbox.mails] == [["lin@example.org"]]
    assert "[测试]" in sink.received[0].json()["text"]


def test_a_server_that_refuses_is_an_exit_status_of_1(
    config: tuple[Path, Mailbox, Sink, dict[str, Any]],
) -> None:
    """With its own words, and whether another try would help."""
    path, mailbox, _, answer = config
    mailbox.refuse = "550 no such user"
    answer["errcode"] = 45009
    done = _run("send-test", "--config", str(path), "--operators")
    assert done.exit_code == 1
    assert "email ops@example.org: FAILED (final): the mail server said 550" in done.output
    assert "slack: the directory has no address" in done.output
    assert "ops group: FAILED (would be tried again): wecom: 45009" in done.output


def test_who_has_no_address_or_is_unknown_cannot_be_tried(
    config: tuple[Path, Mailbox, Sink, dict[str, Any]],
) -> None:
    """And nothing is sent to anybody else."""
    path, mailbox, _, _ = config
    done = _run("send-test", "--config", str(path), "--to", "mute", "--channel", "email")
    assert (done.exit_code, done.output) == (1, "email: the directory has no address\n")
    failed = CliRunner().invoke(notices, ["send-test", "--config", str(path), "--to", "lim"])
    assert isinstance(failed.exception, RefusedAction)
    assert 'did you mean "lin"' in str(failed.exception)
    assert mailbox.mails == []
