"""Pictures of `gpuwarden report`: a made-up fortnight, as the suite of reports has it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.browsers import chromium
from tools.pictures import programs
from tools.pictures.pages import SCHEMES

if TYPE_CHECKING:
    from tools.pictures.albums import Album

WIDTH, HEIGHT = 1180, 2400
"""Of the picture: the figures, utilisation, hours and cost; tables and formulas stand below."""


async def take(album: Album) -> None:
    """Picture the beginning of the report, in light and dark."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-reports-") as name:
        await programs.run(name, module="tests.ruleengine.reports.weeks")
        page = Path(name) / "report.html"
        async with chromium() as browser:
            for scheme, suffix in SCHEMES.items():
                shown = await browser.new_page(
                    viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme
                )
                await shown.goto(page.as_uri())
                album.put(f"report{suffix}", await shown.screenshot())
                await shown.close()
