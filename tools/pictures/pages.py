"""Pictures of the engine's pages, as a real engine serves them.

Of the generated day, but for the audit of a reclaim: that is of the fleet of tests/ruleengine,
where an agent ends jobs. Clocks are the suites' own, so that times are always the same.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tests.browsers import chromium
from tests.ruleengine.browsing import OLGA, browsed
from tests.ruleengine.engines import world
from tests.servers import free_port
from tools.pictures import days

from gpuwarden.ruleengine.case_records import CaseState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from playwright.async_api import Browser
    from tests.ruleengine.engines import World
    from tools.pictures.albums import Album

DESK, PHONE = (1280, 800), (390, 844)
SCHEMES: dict[Literal["light", "dark"], str] = {"light": "", "dark": "-dark"}
HELD_BACK_TICKS = 7
"""For so long the kill switch is on."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page as it is pictured.

    Attributes:
        path: of the engine.
        name: of the picture, without its ending.
        size: of the window in pixels; of a page the picture shows no more than its height.
    """

    path: str
    name: str
    size: tuple[int, int] = DESK


OF_THE_DAY = (
    Page("/", "overview", (1280, 600)),
    Page("/jobs", "jobs", (1280, 580)),
    Page("/jobs/j-ben", "job", (1280, 1400)),
    Page("/jobs/j-ben", "job-phone", PHONE),
    Page("/jobs/j-cho", "job-training", (1280, 860)),
    Page("/cards", "cards", (1280, 600)),
    Page("/shares", "shares", (1280, 460)),
)
"""Of the engine that judges the generated day."""


OF_THE_SCHEDULE = (
    Page("/queue", "queue", (1280, 720)),
    Page("/calendar", "calendar", (1280, 640)),
    Page("/calendar", "calendar-phone", PHONE),
    Page("/receipts", "receipts", (1280, 920)),
)
"""Of a scheduler beside the fleet."""


@contextlib.asynccontextmanager
async def fleet() -> AsyncIterator[tuple[World, str]]:
    """An engine with its pages at an address, at the moment when an owner has been told."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-pages-") as folder:
        port = free_port()
        with world(Path(folder)) as servers:
            async with browsed(servers, port) as made:
                yield made, f"http://127.0.0.1:{port}"


async def take(album: Album) -> None:
    """Picture the pages as an operator reads them, in light and dark."""
    async with days.engine() as (_, url), chromium() as browser:
        await _take(album, browser, url, OF_THE_DAY)
    async with fleet() as (made, url), chromium() as browser:
        await _take(album, browser, url, OF_THE_SCHEDULE)
        # what held an end back is part of its audit
        kill_switch = made.folder / "halt"
        kill_switch.touch()
        await made.until(CaseState.DUE)
        await made.tick(HELD_BACK_TICKS)
        kill_switch.unlink()
        await made.until(CaseState.VERIFIED)
        (decision,) = made.engine.ledger.job_decisions("proc-1")
        path = f"/decisions/{decision.id}"
        await _take(album, browser, url, [Page(path, "reclaim", (1280, 2000))])


async def _take(album: Album, browser: Browser, url: str, pages: Sequence[Page]) -> None:
    for scheme, suffix in SCHEMES.items():
        context = await browser.new_context(color_scheme=scheme)
        shown = await context.new_page()
        await shown.goto(f"{url}/sign-in")
        await shown.get_by_label("Your token").fill(OLGA)
        await shown.get_by_role("button", name="Sign in").click()
        for page in pages:
            width, height = page.size
            await shown.set_viewport_size({"width": width, "height": height})
            answer = await shown.goto(url + page.path)
            if answer is None or not answer.ok:
                raise RuntimeError(f"no page at {page.path}: {await shown.inner_text('body')}")
            album.put(page.name + suffix, await shown.screenshot())
        await context.close()
