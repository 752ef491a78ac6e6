"""Debian's Chromium for suites and pictures, without a screen."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

from playwright.async_api import async_playwright

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser of its own, closed when the context ends.

    Raises:
        AssertionError: if there is none, with the command that installs it.
    """
    path = shutil.which("chromium")
    if path is None:
        raise AssertionError("no chromium: apt-get install chromium (`make setup` does)")
    async with async_playwright() as playwright:
        # Its own sandbox needs rights that a container does not give.
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()
