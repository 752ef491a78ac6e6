"""The pages in a real browser: what operators and owners do, and whether they can read it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.browsers import chromium
from tests.ruleengine.browsing import ALICE, KEY, OLGA, ROOT, browsed
from tests.servers import free_port

from gpuwarden.ruleengine.case_records import CaseState
from gpuwarden.ruleengine.links import Links

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.async_api import Page
    from tests.ruleengine.engines import World

# What Chromium computed for every text that is shown: its colour against what lies behind it, by
# the formula of WCAG 2.2; and every field without a label.
LOOK = """() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b]
    .map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const faint = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let texts = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const front = parse(element.closest("svg") ? style.fill : style.color);
    const [high, low] = [light(front), light(behind(element))].sort((a, b) => b - a);
    texts += 1;
    if ((high + 0.05) / (low + 0.05) < 4.5) faint.push(walker.currentNode.data.trim());
  }
  const fields = [...document.querySelectorAll("input:not([type=hidden]), select, textarea")];
  return {
    texts, faint,
    unlabelled: fields.filter(field => !field.labels.length).map(field => field.name),
    wider: document.documentElement.scrollWidth - window.innerWidth,
    unnamed: document.querySelectorAll("svg:not([aria-label])").length,
    titles: document.querySelectorAll("h1").length,
  };
}"""
PATHS = (
    "/shares",
    "/names",
    "/",
    "/jobs",
    "/cards",
    "/jobs/proc-1",
    "/decisions",
    "/rules",
    "/protections",
    "/engine",
    "/audit",
    "/queue",
    "/calendar",
    "/receipts",
    "/budgets",
)


async def sign_in(page: Page, url: str, token: str, path: str = "/") -> None:
    """Open a page, and sign in when asked."""
    await page.goto(url + path)
    await page.get_by_label("Your token").fill(token)
    await page.get_by_role("button", name="Sign in").click()


def test_an_operator_finds_a_job_and_keeps_it(servers: World) -> None:
    """Signs in, filters, opens it, says how long and why, and reads that it is done."""
    port = free_port()

    async def story() -> None:
        async with browsed(servers, port) as world, chromium() as browser:
            page = await browser.new_page()
            await sign_in(page, f"http://127.0.0.1:{port}", OLGA, "/jobs")
            assert page.url.endswith("/jobs")
            await page.get_by_label("User").fill("alice")
            await page.get_by_label("Show").select_option(label="only jobs that break a rule")
            await page.get_by_role("button", name="Filter").click()
            assert await page.locator("main tbody tr").count() == 2
            await page.get_by_role("link", name="proc-1", exact=True).click()
            first = await page.locator(".answer").inner_text()
            assert first.startswith("This job breaks the rule idle-held. It is not ended now: ")
            assert await page.locator("svg.chart").count() == 3
            await page.get_by_label("For how long").fill("2h")
            await page.get_by_label("Why; operators read it").fill("demo for a customer")
            await page.get_by_role("button", name="Keep the job").click()
            assert "The job is kept until" in await page.get_by_role("status").inner_text()
            (keep,) = world.engine.ledger.keeps("idle-held", "proc-1", None)
            assert (keep.by, keep.seconds, keep.reason) == ("olga", 7200.0, "demo for a customer")
            await page.get_by_role("link", name="Protections").click()
            assert "demo for a customer" in await page.locator("main").inner_text()

    asyncio.run(story())


def test_an_owner_keeps_by_the_link_and_a_scanner_does_not(servers: World) -> None:
    """On a telephone, without signing in."""
    port = free_port()

    async def story() -> None:
        async with browsed(servers, port) as world, chromium() as browser:
            stored = world.engine.cases.get("idle-held", "proc-1")
            assert stored is not None
            link = Links(KEY, f"http://127.0.0.1:{port}").url(stored.case, 480.0)
            context = await browser.new_context(viewport={"width": 390, "height": 844})
            page = await context.new_page()
            for _ in range(2):  # as a scanner would, with scripts and all
                await page.goto(link)
            assert "kept" not in world.kinds()
            await page.get_by_label("Why; operators read it").fill("back in ten minutes")
            await page.get_by_role("button", name="Keep the job").click()
            assert "The job is kept" in await page.get_by_role("status").inner_text()
            assert world.kinds()[-1] == "kept"
            assert not await context.cookies()

    asyncio.run(story())


def test_another_sites_form_keeps_nothing(servers: World, tmp_path: Path) -> None:
    """The browser of somebody who has signed in is led to a page that sends our form for him."""
    port, evil = free_port(), free_port()
    (tmp_path / "evil").mkdir()
    target = f"http://127.0.0.1:{port}/jobs/proc-1/keep"
    (tmp_path / "evil" / "index.html").write_text(
        f"<form method=post action={target}><input name=rule value=idle-held>"
        "<input name=for value=1h><input name=reason value=x><button>Win</button></form>"
    )

    async def story() -> None:
        async with browsed(servers, port) as world, chromium() as browser:
            page = await browser.new_page()
            await sign_in(page, f"http://127.0.0.1:{port}", ALICE)
            await page.route(
                f"http://localhost:{evil}/",
                lambda route: route.fulfill(path=tmp_path / "evil" / "index.html"),
            )
            await page.goto(f"http://localhost:{evil}/")
            await page.get_by_role("button", name="Win").click()
            await page.wait_for_url(f"http://127.0.0.1:{port}/**")
            assert "The job is kept" not in await page.content()
            assert "kept" not in world.kinds()

    asyncio.run(story())


@pytest.mark.sweep
def test_an_admin_pauses_and_resumes(servers: World) -> None:
    """Every page shows it meanwhile."""
    port = free_port()

    async def story() -> None:
        async with browsed(servers, port) as world, chromium() as browser:
            page = await browser.new_page()
            await sign_in(page, f"http://127.0.0.1:{port}", ROOT, "/engine")
            await page.get_by_label("Why; it stands on every page").fill("storage outage")
            await page.get_by_label("For how long").fill("2h")
            await page.get_by_role("button", name="Pause").click()
            assert world.engine.pauses.current() is not None
            await page.goto(f"http://127.0.0.1:{port}/rules")
            assert "paused by root until" in await page.locator(".banner").inner_text()
            await page.goto(f"http://127.0.0.1:{port}/engine")
            await page.get_by_label("Why it is safe again").fill("storage is back")
            await page.get_by_role("button", name="Resume").click()
            assert world.engine.pauses.current() is None
            await page.get_by_role("button", name="Sign out").click()
            assert page.url.endswith("/sign-in")

    asyncio.run(story())


def test_every_page_can_be_read(servers: World) -> None:
    """In light and dark, on a screen and on a telephone: contrast, labels, no sideways scrolling.

    And no page asks the browser for anything that our own policy forbids.
    """
    port = free_port()
    faults: list[str] = []

    async def look(page: Page, path: str, name: str) -> None:
        seen: dict[str, Any] = await page.evaluate(LOOK)
        assert seen["texts"] > 5, path
        assert seen["titles"] == 1, path
        kinds = ("faint", "unlabelled", "unnamed")
        faults.extend(f"{name} {path}: {kind} {seen[kind]}" for kind in kinds if seen[kind])
        if seen["wider"] > 0:
            faults.append(f"{name} {path}: {seen['wider']} px too wide")

    async def story() -> None:
        async with browsed(servers, port) as world, chromium() as browser:
            await world.until(CaseState.VERIFIED)
            (decision,) = world.engine.ledger.job_decisions("proc-1")
            broken = next(s.case for s in world.engine.cases.all() if not s.case.over)
            paths = (*PATHS, f"/decisions/{decision.id}", f"/jobs/{broken.job_id}")
            world.engine.pauses.begin(by="root", role="admin", reason="an upgrade", seconds=None)
            await world.tick()
            for scheme in ("light", "dark"):
                for width in (1280, 390):
                    context = await browser.new_context(
                        color_scheme="light" if scheme == "light" else "dark",
                        viewport={"width": width, "height": 844},
                    )
                    page = await context.new_page()
                    page.on(
                        "console",
                        lambda said: faults.append(said.text) if said.type == "error" else None,
                    )
                    name = f"{scheme} {width}"
                    await page.goto(f"http://127.0.0.1:{port}/sign-in")
                    await look(page, "/sign-in", name)
                    await sign_in(page, f"http://127.0.0.1:{port}", ROOT)
                    for path in paths:
                        await page.goto(f"http://127.0.0.1:{port}{path}")
                        await look(page, path, name)
                    await context.close()

    asyncio.run(story())
    assert faults == []
