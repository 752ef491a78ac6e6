"""`gpuwarden notices`: read what owners would read, and try whether it reaches them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from pydantic_core import PydanticCustomError

from gpuwarden.clock import SystemClock
from gpuwarden.consoles import printable
from gpuwarden.diagnostics import did_you_mean
from gpuwarden.errors import InvalidInput, RefusedAction
from gpuwarden.fields import known_zone
from gpuwarden.option_values import config_option
from gpuwarden.ruleengine.bot_settings import BotSettings
from gpuwarden.ruleengine.bots import GROUP, KINDS
from gpuwarden.ruleengine.channels import EmailChannel, Undelivered
from gpuwarden.ruleengine.layouts import Message, slack_blocks, slack_page, slack_text
from gpuwarden.ruleengine.loading import load_rule_files
from gpuwarden.ruleengine.model import Action, Target
from gpuwarden.ruleengine.notice_examples import JOB, Scene, example
from gpuwarden.ruleengine.rulebooks import RuleBook
from gpuwarden.ruleengine.serving import open_channels, read_secrets
from gpuwarden.ruleengine.settings import SmtpSettings, load_settings
from gpuwarden.ruleengine.texts.speeches import LANGUAGES, speech

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.ruleengine.channels import Channel
    from gpuwarden.ruleengine.model import Rule, RuleSet
    from gpuwarden.ruleengine.settings import Settings
    from gpuwarden.ruleengine.texts.speeches import Language

_FILE = click.Path(path_type=Path, dir_okay=False)
_CHANNELS = ("text", "email", "slack", *KINDS)


def _read_zone(_: click.Context, __: click.Parameter, text: str | None) -> str | None:
    """A zone that is not known would be shown as UTC under its name."""
    try:
        return None if text is None else known_zone(text)
    except PydanticCustomError as error:
        raise click.BadParameter(error.message()) from error


# In it, \b is the character by which click leaves the lines that follow as they are.
_EXAMPLES = """\b
Examples:
  gpuwarden notices preview --rule rules/defaults.yaml --id idle-held
  gpuwarden notices preview --rule rules/defaults.yaml --language zh --channel slack
  gpuwarden notices preview --rule rules/defaults.yaml --channel email --html notice.html
  gpuwarden notices send-test --config engine.yaml --to lin"""


@click.group(epilog=_EXAMPLES)
def notices() -> None:
    """Read notices before anybody gets one, and try whether they arrive."""


@notices.command()
@click.option(
    "--rule",
    "files",
    type=_FILE,
    required=True,
    multiple=True,
    metavar="FILE",
    help="A rule file; several give the whole set.",
)
@click.option("--id", "rule_id", metavar="ID", help="The rule; by default the first that notifies.")
@click.option(
    "--job", "job_id", default=JOB, show_default=True, metavar="JOB", help="Id of the made-up job."
)
@click.option(
    "--language",
    type=click.Choice(LANGUAGES),
    default="en",
    show_default=True,
    help="Of its reader.",
)
@click.option(
    "--channel",
    type=click.Choice(_CHANNELS),
    default="text",
    show_default=True,
    help="The form: plain text, or what the server of a channel is sent.",
)
@click.option(
    "--html",
    type=_FILE,
    metavar="FILE",
    help="Also write a page to FILE: the HTML of the mail, or for slack what it looks like there.",
)
@click.option(
    "--zone",
    metavar="ZONE",
    callback=_read_zone,
    help="Time zone of its reader; the rules' by default.",
)
@click.option(
    "--external-url",
    default="https://gpuwarden.example.org",
    show_default=True,
    help="How people reach the engine.",
)
def preview(
    files: tuple[Path, ...],
    rule_id: str | None,
    *,
    job_id: str,
    language: Language,
    channel: str,
    html: Path | None,
    zone: str | None,
    external_url: str,
) -> None:
    """Show the notice that a rule would send about a made-up job that breaks it.

    Figures are made up, a plain margin beyond the rule's limits; the words, the cause, the steps
    and their times are those of a real one. Nothing is sent. Exit status: 0 shown; 2 the rules
    cannot be used, or have no such rule.
    """
    rules = load_rule_files(files)
    clock = SystemClock()
    scene = Scene(clock.wall(), zone or rules.timezone, external_url.rstrip("/"), job_id)
    message = example(_chosen(rules, rule_id), rules.profiles, scene, language=language)
    click.echo(printable(_form(message, channel, clock)).rstrip("\n"))
    if html is not None:
        page = slack_page(message) if channel == "slack" else message.html()
        try:
            html.write_text(page, encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"{html} cannot be written: {error.strerror}") from error


def _chosen(rules: RuleSet, rule_id: str | None) -> Rule:
    telling = [
        rule
        for rule in rules.rules
        if rule.target is Target.JOB and any(stage.do is Action.NOTIFY for stage in rule.stages)
    ]
    named = [rule for rule in telling if rule_id in (None, rule.id)]
    if named:
        return named[0]
    names = [rule.id for rule in telling]
    if rule_id is None:
        raise InvalidInput("no rule of these files notifies anybody")
    hint = did_you_mean(rule_id, names)
    raise InvalidInput(
        f"no rule that notifies is called {rule_id!r}"
        + (f"; {hint}" if hint else f"; there are {', '.join(names) or 'none'}")
    )


def _form(message: Message, channel: str, clock: SystemClock) -> str:
    """What the server of a channel is sent."""
    if channel == "text":
        return f"{message.subject}\n\n{message.plain()}"
    if channel == "email":
        smtp = SmtpSettings(host="mail", sender="gpuwarden@example.org", tls="none")
        mailer = EmailChannel(smtp, password=None, ca_file=None, clock=clock)
        return mailer.mail("owner@example.org", message).as_string().replace("\r\n", "\n")
    if channel == "slack":
        body: Mapping[str, object] = {
            "channel": "U012ABCDEF",
            "text": slack_text(message),
            "blocks": slack_blocks(message),
        }
    else:
        bot = KINDS[channel](
            BotSettings.model_validate({"kind": channel, "key_file": "key"}),
            "x" * 16,
            secret=None,
            clock=clock,
        )
        body = bot.body("", message)
    return json.dumps(body, ensure_ascii=False, indent=2)


@notices.command("send-test")
@config_option("engine.yaml, which names the channels and the directory.", required=True)
@click.option("--to", "user", metavar="USER", help="A user of the directory.")
@click.option("--operators", is_flag=True, help="The operators, in the place of a user.")
@click.option(
    "--channel",
    "only",
    multiple=True,
    metavar="NAME",
    help="Only through this channel: email, slack or a bot's name; by default through all.",
)
@click.pass_context
def send_test(
    context: click.Context,
    config: Path,
    *,
    user: str | None,
    operators: bool,
    only: tuple[str, ...],
) -> None:
    """Send one marked test message through each channel, and show what the servers answered.

    What is shown is the proof that a deadline would start from. Nothing is written to the ledger.
    Exit status: 0 every server took it; 1 one did not, or there is no address; 2 the configuration
    cannot be used, or the directory has no such user.
    """
    if (user is None) is not operators:
        raise click.UsageError("give either --to USER or --operators")
    settings = load_settings(config)
    unknown = sorted(set(only) - set(settings.values.channels))
    if unknown:
        raise click.UsageError(
            f"{', '.join(unknown)}: not configured; there is "
            f"{', '.join(settings.values.channels) or 'no channel'}"
        )
    failed = asyncio.run(_send(settings, user, only or settings.values.channels))
    if failed:
        context.exit(1)


async def _send(settings: Settings, user: str | None, names: tuple[str, ...]) -> bool:
    """Send, and say what came of it; whether anything failed."""
    directory = RuleBook(settings).directory
    if user is not None and user not in directory.users:
        hint = did_you_mean(user, directory.users)
        text = f'the directory has no user "{printable(user)}"' + (f"; {hint}" if hint else "")
        raise RefusedAction("unknown_user", text)
    bots = settings.values.bots
    person = None if user is None else directory.user(user)
    reads = directory.operators_language if person is None else directory.language_of(person)
    channels = open_channels(settings, read_secrets(settings), SystemClock())
    failed = False
    try:
        for name in names:
            bot = bots.get(name)
            if person is None:
                found = (GROUP,) if bot is not None else directory.operators.addresses(name)
            else:
                own = person.address(name if bot is None else bot.kind)
                found = (own or GROUP,) if bot is not None else (own,) if own else ()
            if not found:
                failed = True
                click.echo(f"{name}: the directory has no address")
            language = reads if bot is None or bot.language is None else bot.language
            along = "" if bot is None or bot.proves else "  (reads along: proves nothing)"
            for to in found:
                told = await _try(channels[name], to, trial_message(user or "gpuwarden", language))
                failed = failed or not told.startswith("proven")
                click.echo(f"{name} {to}: {printable(told)}{along}")
    finally:
        for channel in channels.values():
            await channel.aclose()
    return failed


async def _try(channel: Channel, recipient: str, message: Message) -> str:
    try:
        return f"proven: {await channel.send(recipient, message)}"
    except Undelivered as error:
        again = "final" if error.permanent else "would be tried again"
        return f"FAILED ({again}): {error}"


def trial_message(user: str, language: Language) -> Message:
    """A message that says of itself that it is a test."""
    said = speech(language)
    phrases = said.phrases
    texts = {
        "language": language,
        "summary": f"[{phrases.test_mark}] {said.say(phrases.test_summary, user=user)}",
        "description": said.say(phrases.test_description, user=user),
        "next": phrases.test_next,
    }
    return Message.of(texts, "", language=language)
