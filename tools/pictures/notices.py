"""Pictures of notices: the mail, and what it looks like in Slack, of a made-up job."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tests.browsers import chromium
from tools.pictures import programs

if TYPE_CHECKING:
    from tools.pictures.albums import Album

RULES = Path(__file__).resolve().parents[2] / "ruleengine" / "rules" / "defaults.yaml"
WIDTH = 760


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice as it is pictured; the attributes are options of `gpuwarden notices preview`."""

    name: str
    channel: str
    language: str
    scheme: Literal["light", "dark"] = "light"


NOTICES = (
    Notice("notice-mail", "email", "en"),
    Notice("notice-mail-zh-dark", "email", "zh", "dark"),
    Notice("notice-slack", "slack", "en"),
)


async def take(album: Album) -> None:
    """Picture every form that is told apart in the documentation."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-notices-") as folder:
        async with chromium() as browser:
            for notice in NOTICES:
                page = Path(folder) / f"{notice.name}.html"
                await programs.run(
                    *("notices", "preview", "--rule", str(RULES), "--id", "idle-held"),
                    *("--channel", notice.channel, "--language", notice.language),
                    *("--html", str(page)),
                )
                shown = await browser.new_page(
                    viewport={"width": WIDTH, "height": 400}, color_scheme=notice.scheme
                )
                await shown.goto(page.as_uri())
                album.put(notice.name, await shown.screenshot(full_page=True))
                await shown.close()
