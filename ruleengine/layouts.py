"""Messages as people get them: plain text, Slack's blocks, HTML mail, and what bots show.

Every text in them may hold what a user chose: a job's name, a rule's description, a path. It is
cleaned of characters that steer terminals and readers, and escaped by each form as its reader
demands; nothing of it ever becomes a mention, a link or markup.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jinja2
from markupsafe import Markup

from gpuwarden.ruleengine.messages import KEEP_COMMAND, KEEP_LINK, LANGUAGE
from gpuwarden.ruleengine.texts.speeches import LANGUAGES, speech

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.ruleengine.texts.speeches import Language

PARTS: Final = ("seen", "expected", "cause", "remedy", "next", "keep", "work", "gpus")
"""Annotations in the order of a message, after its description."""
SHORT: Final = frozenset({"work", "gpus", "owner"})
"""Parts that are a few words, and stand side by side where there is room."""
_MAX_SUBJECT = 150
_MAX_LINE = 1500
_MAX_LINK = 2000
_LEVELS = frozenset({"light", "moderate", "severe", "ended", "page"})


def clean(text: str) -> str:
    """A text without characters that steer what shows it: controls, and changes of direction."""
    return "".join(
        mark
        for mark in text
        if mark == "\n"
        or (unicodedata.category(mark) not in ("Cc", "Cs") and mark not in _DIRECTIONS)
    )


_DIRECTIONS = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")


def shortened(text: str, limit: int, mark: str) -> str:
    """A text of at most so many characters, ended by a mark where some are missing."""
    return text if len(text) <= limit else text[: limit - len(mark) - 1].rstrip() + " " + mark


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a message.

    Attributes:
        name: of its annotation, such as seen.
        heading: in the reader's language.
        text: one line or several.
    """

    name: str
    heading: str
    text: str


@dataclass(frozen=True, slots=True)
class Message:
    """A notice in the language of its reader, ready to be laid out.

    Attributes:
        subject: one line.
        description: what it is about, in a sentence or two.
        parts: in order.
        url: the page that explains it, or an empty string.
        keep_url: the page on which the owner may keep the job; empty for everybody else.
        keep_command: likewise the command.
        language: of all of it.
        level: light, moderate, severe, ended, page, or an empty string.
        rule: id of the rule, or an empty string.
        thread: what else is about the same thing, such as the job's id.
    """

    subject: str
    description: str = ""
    parts: tuple[Part, ...] = ()
    url: str = ""
    keep_url: str = ""
    keep_command: str = ""
    language: Language = "en"
    level: str = ""
    rule: str = ""
    thread: str = ""

    @classmethod
    def of(
        cls,
        annotations: Mapping[str, object],
        url: str,
        *,
        labels: Mapping[str, str] | None = None,
        language: Language | None = None,
        private: bool = True,
    ) -> Message:
        """Lay out an alert; annotations that are no text are ignored.

        Args:
            annotations: as `messages` writes them.
            url: the page that explains it.
            labels: of the alert.
            language: the reader's; where the alert does not have it, the one that it has.
            private: whether only the owner reads it. Whoever has the link or the ticket may keep
                the job: nobody else gets them.
        """
        labels = labels or {}
        base = annotations.get(LANGUAGE)
        own: Language = next((known for known in LANGUAGES if known == base), "en")
        chosen = language or own
        if chosen != own and not annotations.get(f"summary_{chosen}"):
            chosen = own
        suffix = "" if chosen == own else f"_{chosen}"
        phrases = speech(chosen).phrases

        def text(name: str) -> str:
            value = annotations.get(f"{name}{suffix}")
            if not isinstance(value, str):
                return ""
            return shortened(clean(value).strip(), _MAX_LINE, phrases.cut)

        headings = {name: getattr(phrases, f"heading_{name}") for name in PARTS}
        parts = [Part(name, headings[name], text(name)) for name in PARTS if text(name)]
        keep, command = annotations.get(KEEP_LINK), annotations.get(KEEP_COMMAND)
        if not private:
            parts = [
                Part(part.name, part.heading, phrases.private) if part.name == "keep" else part
                for part in parts
            ]
            keep = command = ""
        level = labels.get("level", "")
        return cls(
            subject=shortened(" ".join(text("summary").split()), _MAX_SUBJECT, "...")
            or phrases.attention,
            description=text("description"),
            parts=tuple(parts),
            url=_link(url),
            keep_url=_link(keep),
            keep_command=clean(command)[:_MAX_LINE] if isinstance(command, str) else "",
            language=chosen,
            level=level if level in _LEVELS else "",
            rule=clean(labels.get("rule", ""))[:64],
            thread=labels.get("job_id", "")[:256],
        )

    def naming(self, owner: str) -> Message:
        """The same for who is not the owner: it says whose job it is about."""
        phrases = speech(self.language).phrases
        part = Part("owner", phrases.heading_owner, clean(owner)[:256])
        return replace(self, parts=(part, *self.parts))

    @property
    def tags(self) -> str:
        """Level and rule in a few words."""
        said = speech(self.language)
        phrases = said.phrases
        found = []
        if self.level:
            found.append(said.say(phrases.level_tag, level=phrases.level_names[self.level]))
        if self.rule:
            found.append(said.say(phrases.rule_tag, rule=self.rule))
        return " · ".join(found)

    @property
    def lines(self) -> tuple[tuple[str, str], ...]:
        """(Heading or an empty string, text) of everything but the subject."""
        first = (("", self.description),) if self.description else ()
        return (*first, *((part.heading, self._whole(part)) for part in self.parts))

    def _whole(self, part: Part) -> str:
        """A part with what a form with buttons shows elsewhere."""
        if part.name != "keep":
            return part.text
        phrases = speech(self.language).phrases
        found = [part.text]
        if self.keep_url:
            found.append(f"{phrases.keep_open}{phrases.colon}{self.keep_url}")
        if self.keep_command:
            run = phrases.keep_run if self.keep_url else phrases.keep_only_run
            found.append(f"{run}{phrases.colon}{self.keep_command}")
        return "\n".join(found)

    def plain(self) -> str:
        """The message as plain text."""
        said = speech(self.language)
        colon = said.phrases.colon
        parts = []
        for heading, text in self.lines:
            joint = f"{colon.rstrip()}\n" if "\n" in text else colon
            parts.append(f"{heading}{joint}{text}" if heading else text)
        if self.url:
            parts.append(f"{said.phrases.why_link}{colon}{self.url}")
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        """The message as a page for mail readers: nothing in it is fetched from anywhere."""
        said = speech(self.language)
        return mail_template().render(message=self, phrases=said.phrases)


def _link(value: object) -> str:
    """An address that people may be sent to; anything else is left out."""
    text = value if isinstance(value, str) else ""
    safe = text.startswith(("http://", "https://")) and len(text) <= _MAX_LINK
    return text if safe and re.search(r"[\s\"'<>\\^`{|}]", text) is None else ""


@functools.cache
def mail_template() -> jinja2.Template:
    """The form of a mail, read once: an upgrade on disk must not change what still runs."""
    return _environment().get_template("mail.html")


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "texts" / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


# -- Slack


_FORMATTING = re.compile(r"(?<![\w])[*_~`]|[*_~`](?![\w])")
_JOINER = "\N{WORD JOINER}"
_SECTION = 2900
"""Characters of a section; Slack takes 3000, and escapes count."""
_FIELD = 1900
_HEADER = 150


def escaped(text: str) -> str:
    """Text in Slack's mrkdwn, where these three characters make mentions and links."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _inert(text: str, limit: int, mark: str) -> str:
    """Escaped, with nothing left that would format it, and not longer than Slack takes."""
    made = escaped(_FORMATTING.sub(lambda found: f"{_JOINER}{found[0]}", text))
    while len(made) > limit:
        text = shortened(text, len(text) * 9 // 10, mark)
        made = escaped(_FORMATTING.sub(lambda found: f"{_JOINER}{found[0]}", text))
    return made


def slack_text(message: Message) -> str:
    """What Slack shows where it shows no blocks: in notifications, and to screen readers."""
    colon = speech(message.language).phrases.colon.strip()
    parts = [f"*{escaped(message.subject)}*"]
    parts += [
        f"*{heading}{colon}* {escaped(text)}" if heading else escaped(text)
        for heading, text in message.lines
    ]
    if message.url:
        why = speech(message.language).phrases.why_link
        parts.append(f"<{escaped(message.url)}|{why}>")
    return "\n".join(parts)


def slack_blocks(message: Message) -> list[dict[str, Any]]:
    """The message in Slack's Block Kit: links, and nothing that an app would have to answer."""
    phrases = speech(message.language).phrases
    blocks: list[dict[str, Any]] = [
        {
            "type": "header",
            "text": {
                "type": "plain_text",
                "text": shortened(message.subject, _HEADER, "..."),
                "emoji": False,
            },
        }
    ]
    if message.description:
        blocks.append(_section(_inert(message.description, _SECTION, phrases.cut)))
    for part in message.parts:
        if part.name in SHORT:
            continue
        blocks.append(_section(f"*{part.heading}*\n{_inert(part.text, _SECTION, phrases.cut)}"))
        if part.name == "keep" and message.keep_command:
            # What is copied must be the command itself: no mark is put into it.
            command = escaped(message.keep_command.replace("`", "'"))
            blocks.append(_section(f"```{command[:_SECTION]}```"))
    fields = [
        {
            "type": "mrkdwn",
            "text": f"*{part.heading}*\n{_inert(part.text, _FIELD, phrases.cut)}",
            "verbatim": True,
        }
        for part in message.parts
        if part.name in SHORT
    ]
    if fields:
        blocks.append({"type": "section", "fields": fields})
    buttons = [
        _button(phrases.keep_button, message.keep_url, "keep", style="primary"),
        _button(phrases.why_link, message.url, "why"),
    ]
    if any(buttons):
        blocks.append({"type": "actions", "elements": [item for item in buttons if item]})
    if message.tags:
        words = {"type": "plain_text", "text": message.tags, "emoji": False}
        blocks.append({"type": "context", "elements": [words]})
    return blocks


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text, "verbatim": True}}


def _button(text: str, url: str, name: str, *, style: str = "") -> dict[str, Any]:
    if not url:
        return {}
    made: dict[str, Any] = {
        "type": "button",
        "text": {"type": "plain_text", "text": text, "emoji": False},
        "url": url,
        "action_id": name,
    }
    return {**made, "style": style} if style else made


def slack_page(message: Message) -> str:
    """What a message looks like in Slack, near enough to judge it by; for previews."""
    found = _environment()
    found.filters["mrkdwn"] = _shown
    page = found.get_template("slack_preview.html")
    return page.render(message=message, blocks=slack_blocks(message))


def _shown(text: str) -> Markup:
    """Slack's mrkdwn, as far as `slack_blocks` makes it: bold headings, and one block of code."""
    code = re.fullmatch(r"```(.*)```", text, re.DOTALL)
    if code:
        return Markup("<pre>{}</pre>").format(Markup(code[1]))  # noqa: S704 - it is escaped already
    heading, line, rest = text.partition("\n")
    bold = re.fullmatch(r"\*(.+)\*", heading)
    if bold:
        heading = f"<b>{bold[1]}</b>"
    return Markup(heading + line + rest)  # noqa: S704 - likewise
