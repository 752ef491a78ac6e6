"""Pictures of the dashboards, drawn by Grafana's libraries over a real Prometheus.

The Prometheus holds the generated day of tests/grafana; the browser's clock stands at its end, so
that "the last six hours" are the same in every picture.
"""

from __future__ import annotations

import contextlib
import tempfile
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from grafana import build
from playwright.async_api import TimeoutError as NotStill
from tests.browsers import chromium
from tests.grafana import asking, databases
from tests.grafana.scenarios import HEALTHY
from tests.servers import prometheus
from tools.pictures import previews

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from playwright.async_api import Page
    from tests.servers import Server
    from tools.pictures.albums import Album

WIDTH = 1440
FIRST_HEIGHT = 1000
SETTLED_MILLISECONDS = 60_000
TALLEST = 6000


class BoardFailedError(RuntimeError):
    """A panel of a board could not be drawn."""


@dataclass(frozen=True, slots=True)
class View:
    """A board as it is pictured.

    Attributes:
        uid: of the board.
        name: of the picture, without its ending.
        variables: what is chosen; everything else as the board has it.
    """

    uid: str
    name: str
    variables: Mapping[str, str] = field(default_factory=dict)


THEMES = {"dark": "", "light": "-light"}
"""Grafana's default is dark: that picture has the plain name."""


def views() -> list[View]:
    """Every board; where a reader must choose something first, what the tests choose."""
    found = []
    for path in sorted(build.FOLDER.glob("*.json")):
        chosen = {name.lstrip("$"): at for name, at in asking.CHOSEN.get(path.stem, {}).items()}
        found.append(View(path.stem, path.stem.replace("gpuwarden", "board"), chosen))
    return found


@contextlib.contextmanager
def past(fine: Collection[str] = ()) -> Iterator[Server]:
    """A Prometheus that holds the generated day; `fine` as for `databases.write`."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-boards-") as folder:
        storage = Path(folder) / "tsdb"
        databases.write(storage, [HEALTHY], fine=fine)
        with prometheus(databases.NO_CONFIG, storage, flags=[databases.SHORT]) as server:
            yield server


@contextlib.contextmanager
def served(port: int = 0) -> Iterator[str]:
    """The address of the preview over the generated day."""
    with past() as server, previews.served(server, port) as url:
        yield url


def address(url: str, view: View, theme: str, **words: str) -> str:
    """Where the preview shows a view; `words` are further ones of its address."""
    words |= {"board": view.uid, "theme": theme}
    words |= {f"var-{name}": value for name, value in view.variables.items()}
    return f"{url}/?{urllib.parse.urlencode(words)}"


def addresses(url: str) -> list[str]:
    """Where a browser whose clock shows today finds the views, in the generated day."""
    end = HEALTHY.window.end * 1000
    shown = {"from": str(end - 6 * 3_600_000), "to": str(end)}
    return [address(url, view, "dark", **shown) for view in views()]


async def take(album: Album) -> None:
    """Picture every board in both themes.

    Raises:
        BoardFailedError: with what Prometheus or the page said.
    """
    with served() as url:
        async with chromium() as browser:
            for view in views():
                for theme, suffix in THEMES.items():
                    page = await browser.new_page(viewport={"width": WIDTH, "height": FIRST_HEIGHT})
                    png = await _picture(page, address(url, view, theme))
                    album.put(view.name + suffix, png)
                    await page.close()


async def _picture(page: Page, url: str) -> bytes:
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    await page.clock.set_fixed_time(HEALTHY.window.end)
    await page.goto(url)
    await _settled(page, faults)
    # the whole board at once: panels below the fold are drawn as those above
    whole: int = await page.evaluate("document.documentElement.scrollHeight")
    await page.set_viewport_size({"width": WIDTH, "height": min(TALLEST, whole)})
    await _settled(page, faults)
    return await page.screenshot()


async def _settled(page: Page, faults: list[str]) -> None:
    try:
        await page.wait_for_function(
            "preview.failed.length || preview.settled()", timeout=SETTLED_MILLISECONDS
        )
    except NotStill as error:
        raise BoardFailedError(f"{page.url} is not still; {'; '.join(faults)}") from error
    faults = [*faults, *await page.evaluate("preview.failed")]
    if faults:
        raise BoardFailedError("\n".join(dict.fromkeys(faults)))
