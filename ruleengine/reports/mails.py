"""The weekly report as a mail: the answer in it, the whole page attached."""

from __future__ import annotations

import functools
import hashlib
import re
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.ruleengine.reports import wording
from gpuwarden.ruleengine.reports.pages import number, page, title
from gpuwarden.ruleengine.reports.rendering import environment

if TYPE_CHECKING:
    from collections.abc import Mapping
    from email.message import EmailMessage

    from jinja2 import Environment

    from gpuwarden.ruleengine.channels import EmailChannel

_LONGEST_SUBJECT: Final = 150


def mail(
    channel: EmailChannel, recipient: str, found: Mapping[str, Any], *, engine: str
) -> EmailMessage:
    """A report as a mail to one address.

    Args:
        channel: which sends it.
        recipient: one bare address.
        found: the document.
        engine: base address of the engine's pages.
    """
    made = channel.headed(
        recipient,
        " ".join(title(found).split())[:_LONGEST_SUBJECT],
        kind="reports",
        language="en",
        name=_name(recipient, found),
    )
    made.set_content(plain(found, engine))
    html = (
        _environment()
        .get_template("mail.html")
        .render(found=found, title=title(found), engine=engine)
    )
    made.add_alternative(html, subtype="html")
    made.add_attachment(
        page(found, engine=engine).encode(),
        maintype="text",
        subtype="html",
        filename=file_name(found),
        params={"charset": "utf-8"},
    )
    return made


def plain(found: Mapping[str, Any], engine: str) -> str:
    """The report in short, as plain text."""
    parts = [title(found), "\n".join(found["answer"])]
    if found["cautions"]:
        parts.append("\n".join(f"Note: {text}" for text in found["cautions"]))
    rows = found["teams"] if found["team"] is None else found["worst"]["idle_people"]
    if rows:
        lines = [
            f"  {row.get('user') or row['team']}: {wording.hours(row['held_hours'])} held, "
            f"{wording.hours(row['idle_hours'])} idle"
            for row in rows[:5]
        ]
        heading = "By team:" if found["team"] is None else "Held idle for longest:"
        parts.append("\n".join((heading, *lines)))
    parts.append(
        "The whole report is attached: a page that needs no script and loads nothing.\n"
        f"The engine's pages: {engine}/"
    )
    parts.append("-- \nYou get this since engine.yaml names your team under `reports`; who set up\n"
                 "gpuwarden there takes it out.")  # fmt: skip
    return "\n\n".join(parts) + "\n"


def file_name(found: Mapping[str, Any]) -> str:
    """Of the attachment, and safe everywhere."""
    whose = re.sub(r"[^A-Za-z0-9]+", "-", found["team"] or "fleet").strip("-") or "team"
    return f"gpuwarden-{whose[:40]}-{found['period']['from'][:10]}.html"


def _name(recipient: str, found: Mapping[str, Any]) -> str:
    """The same for the same report to the same address, so that mail servers see a repetition."""
    about = "\n".join((found["team"] or "", found["period"]["from"], recipient))
    return f"report-{hashlib.sha256(about.encode()).hexdigest()[:32]}"


@functools.cache
def _environment() -> Environment:
    return environment(percent=wording.percent, number=number, cost=wording.cost)
