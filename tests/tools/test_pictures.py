"""Pictures in docs/ are made by tools/pictures: what it keeps, and that none is missing."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest
from grafana import build, lint
from PIL import Image
from tools.pictures import boards
from tools.pictures.albums import FOLDER, MOST_BYTES, Album, PictureTooLargeError

ROOT = Path(__file__).parents[2]
BOARDS = sorted(build.FOLDER.glob("*.json"))


def png(image: Image.Image) -> bytes:
    """What a browser would have taken."""
    kept = io.BytesIO()
    image.save(kept, "PNG")
    return kept.getvalue()


def test_a_picture_is_kept_with_few_colours_and_looks_the_same(tmp_path: Path) -> None:
    """Flat areas keep their colour, and the album knows the file."""
    album = Album(tmp_path / "new")
    path = album.put("page", png(Image.new("RGB", (300, 200), (18, 52, 86))))
    assert album.made == [path]
    kept = Image.open(path)
    assert (kept.mode, kept.size) == ("P", (300, 200))
    assert kept.convert("RGB").getpixel((150, 100)) == (18, 52, 86)


def test_a_picture_that_is_too_large_is_refused(tmp_path: Path) -> None:
    """And leaves no file behind."""
    noise = Image.frombytes("RGB", (800, 800), os.urandom(800 * 800 * 3))
    with pytest.raises(PictureTooLargeError, match=r"page\.png has \d+ kB, 300 kB are the most"):
        Album(tmp_path).put("page", png(noise))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_the_preview_can_draw_every_panel_and_variable(path: Path) -> None:
    """A new type of panel or variable needs a component in tools/preview first."""
    sources = ROOT / "tools" / "preview" / "src"
    main = (sources / "main.tsx").read_text()
    listed = re.search(r"const PLUGINS[^{]*{(.*?)};", main, re.DOTALL)
    assert listed is not None
    panels = set(re.findall(r"^  '?([\w-]+)'?[,:]", listed[1], re.MULTILINE)) | {"row"}
    variables = set(re.findall(r"case '(\w+)':", (sources / "board.ts").read_text()))
    board = json.loads(path.read_text())
    assert {panel["type"] for panel in lint.every_panel(board)} <= panels
    assert {one["type"] for one in board["templating"]["list"]} <= variables


def test_every_board_has_a_view_of_its_own() -> None:
    """By its uid, and with what a reader must choose first."""
    assert {view.uid for view in boards.views()} == {path.stem for path in BOARDS}
    (job,) = [view for view in boards.views() if view.uid == "gpuwarden-job"]
    assert job.variables["job_id"]


def test_an_address_names_board_theme_and_choice() -> None:
    """As the preview reads it."""
    view = boards.View("gpuwarden-job", "board-job", {"job_id": "a b"})
    assert boards.address("http://x", view, "light") == (
        "http://x/?board=gpuwarden-job&theme=light&var-job_id=a+b"
    )


def test_the_guide_to_the_boards_names_panels_that_they_have() -> None:
    """Every panel in italics is on one of the boards of its line."""
    titles = {}
    for path in BOARDS:
        panels = lint.every_panel(json.loads(path.read_text()))
        titles[path.stem.removeprefix("gpuwarden-")] = {panel["title"] for panel in panels}
    guide = (ROOT / "docs" / "boards.md").read_text()
    lines = re.findall(r"^\|[^|]+\| (\w[^|]*) \| (.+) \|$", guide, re.MULTILINE)[1:]
    assert len(lines) > 5
    for named, look in lines:
        there = set().union(*(titles[name.lower()] for name in named.split(", ")))
        assert set(re.findall(r"\*([^*]+)\*", look)) <= there, named


def test_pictures_in_docs_are_small() -> None:
    """All of them, however they were made."""
    large = [path.name for path in FOLDER.glob("*.png") if path.stat().st_size > MOST_BYTES]
    assert large == []


def test_pictures_that_pages_show_are_there() -> None:
    """In README.md and docs/."""
    wanted = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        wanted |= set(re.findall(r"pictures/([\w-]+\.(?:png|svg))", page.read_text()))
    assert wanted
    assert sorted(wanted - {path.name for path in FOLDER.iterdir()}) == []
