"""Pictures of commands on a terminal: what the command sent, drawn as a terminal would."""

from __future__ import annotations

import html
import io
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.terminal_theme import MONOKAI, TerminalTheme
from rich.text import Text
from tests.browsers import chromium
from tests.ruleengine.browsing import OLGA
from tools.pictures import days, programs

if TYPE_CHECKING:
    from playwright.async_api import Browser
    from tools.pictures.albums import Album

COLUMNS, LINES = 132, 40
COMMANDS = {"top": ("top", "--once"), "why": ("why", "j-cho")}
"""Name of the picture -> words after `gpuwarden`."""

ENGINE = "gpuwarden.example.org"
"""What stands for the loopback's address."""

LIGHT = TerminalTheme(
    (255, 255, 255),
    (31, 35, 40),
    [(36, 41, 47), (207, 34, 46), (17, 99, 41), (125, 78, 0),
     (9, 105, 218), (130, 80, 223), (27, 124, 131), (110, 119, 129)],
    [(87, 96, 106), (164, 14, 38), (26, 127, 55), (99, 60, 1),
     (33, 139, 255), (164, 117, 249), (49, 146, 170), (140, 149, 159)],
)  # fmt: skip
THEMES = {"": MONOKAI, "-light": LIGHT}
PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; padding: 14px 18px; background: {background}; width: max-content; }}
pre {{ margin: 0; font: 15px/1.3 "DejaVu Sans Mono", monospace; color: {text}; }}
</style><pre>$ {command}
{painted}</pre>"""


async def take(album: Album) -> None:
    """Picture what an operator reads about the generated day."""
    async with days.engine() as (made, url), chromium() as browser:
        token = made.folder / "token"
        token.write_text(OLGA)
        token.chmod(0o600)
        known = {"GPUWARDEN_ENGINE_URL": url, "GPUWARDEN_TOKEN_FILE": str(token)}
        for name, words in COMMANDS.items():
            painted = await programs.paint(*words, columns=COLUMNS, lines=LINES, environment=known)
            painted = painted.replace(url.removeprefix("http://"), ENGINE)
            await _draw(album, browser, name, painted, command=" ".join(("gpuwarden", *words)))


async def _draw(album: Album, browser: Browser, name: str, painted: str, *, command: str) -> None:
    with tempfile.TemporaryDirectory(prefix="gpuwarden-terminals-") as folder:
        for suffix, theme in THEMES.items():
            console = Console(record=True, width=COLUMNS, file=io.StringIO())
            console.print(Text.from_ansi(painted.replace("\r\n", "\n")), soft_wrap=True)
            words = {"background": theme.background_color.hex, "text": theme.foreground_color.hex}
            page = Path(folder) / f"{name}.html"
            drawn = console.export_html(theme=theme, inline_styles=True, code_format="{code}")
            page.write_text(PAGE.format(command=html.escape(command), painted=drawn, **words))
            shown = await browser.new_page(viewport={"width": 600, "height": 300})
            await shown.goto(page.as_uri())
            png = await shown.locator("body").screenshot()
            album.put(name + suffix, png)
            await shown.close()
