"""What pages, alerts and messages say that can be looked up: links, commands, options, programs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from gpuwarden.cli import gpuwarden

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
TRACKED = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    if (ROOT / name).is_file()
]
PAGES = [path for path in TRACKED if path.suffix == ".md"]
TELLING = [
    path
    for path in TRACKED
    if path.suffix in (".md", ".yml", ".yaml", ".tmpl", ".html", ".sh", ".py")
    and path.relative_to(ROOT).parts[0] not in ("tests", "bench", "tools")
]
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"""(?:\]\(|\bsrc=")([^)"\s]+)""")
_INLINE = re.compile(r"`(gpuwarden [^`]*)`")
_LINES = {
    ".md": re.compile(r"^    +(gpuwarden .*)$", re.MULTILINE),
    ".sh": re.compile(r"^ *(gpuwarden .*)$", re.MULTILINE),
    ".py": re.compile(r"^ {0,2}(gpuwarden .*)$", re.MULTILINE),
}
"""Lines of code, by the kind of file; a docstring's prose is indented further than its examples."""
_FENCED_LINES = re.compile(r"^ *(gpuwarden .*)$", re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """Where a link into the page may lead, by GitHub's rule."""
    found = set()
    for title in re.findall(r"^#+ (.*)$", _FENCED.sub("", page.read_text()), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    """Of those that stay in the repository."""
    broken = []
    for link in _LINK.findall(_FENCED.sub("", page.read_text())):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


def _commands(path: Path) -> Iterator[list[str]]:
    """The words of each command line of ours in code."""
    text = path.read_text().replace("\\\n", " ")
    if path.suffix == ".py":
        text = re.sub(r'"\s*\n\s*f?"', "", text)  # a message over several lines
    found = _INLINE.findall(_FENCED.sub("", text))
    if path.suffix in _LINES:
        found += _LINES[path.suffix].findall(text)
    if path.suffix == ".md":
        found += _FENCED_LINES.findall("\n".join(_FENCED.findall(text)))
    for line in found:
        yield re.split(r" [#|>;&]|\)", line)[0].split()[1:]


def _wrong(words: list[str]) -> str:
    """The word of a command line that there is not; empty where there is none."""
    command: click.Command = gpuwarden
    context = click.Context(command)
    # Behind a bare -- stand words that are handed on to another program.
    rest = iter(words[: words.index("--")] if "--" in words else words)
    for word in rest:
        options = {
            name: item.to_info_dict().get("is_flag", True) or item.to_info_dict().get("count")
            for item in command.params
            for name in (*item.opts, *item.secondary_opts)
            if isinstance(item, click.Option)
        } | dict.fromkeys(("--help", "-h", "--version"), True)
        plain, _, value = word.lstrip("[(").partition("=")
        plain = plain.rstrip("],.:;'\"")
        if re.match(r"--?[a-z]", plain):
            if plain not in options:
                return word
            if not options[plain] and not value:
                next(rest, None)
        elif isinstance(command, click.Group) and re.fullmatch(r"[a-z][a-z-]+", plain):
            found = command.get_command(context, plain)
            if found is None:
                return word
            command = found
    return ""


def test_every_command_and_option_that_is_told_exists() -> None:
    """On pages, in alerts, notices and messages: who reads one at night can run it."""
    seen, wrong = 0, []
    for path in TELLING:
        for words in _commands(path):
            seen += 1
            if _wrong(words):
                wrong.append((str(path.relative_to(ROOT)), _wrong(words), " ".join(words)))
    assert seen > 200
    assert wrong == []


def test_every_program_and_target_that_a_page_names_exists() -> None:
    """`python -m bench.x` and `make x`: by what a figure is made again."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        for module in re.findall(r"python -m ((?:bench|demo|grafana|tools)[\w.]*)", text):
            place = ROOT / module.rstrip(".").replace(".", "/")
            assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module
        assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets


def test_decisions_are_numbered_one_by_one() -> None:
    """No number is taken twice, and none is missing."""
    numbers = [path.name[:4] for path in sorted((ROOT / "docs/decisions").glob("*.md"))]
    assert numbers == [f"{number:04}" for number in range(1, len(numbers) + 1)]


def test_the_contents_of_the_operators_page_name_every_section() -> None:
    """The page is long; who looks for something begins at its top."""
    text = (ROOT / "docs/operations.md").read_text()
    contents = set(re.findall(r"\(#([\w-]+)\)", text.partition("\n## ")[0]))
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert len(contents) == len(sections)
    assert contents <= _anchors(ROOT / "docs/operations.md")


def test_the_changelog_tells_each_thing_once() -> None:
    """Two branches that are merged keep all lines, and a line of both would stand there twice."""
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    told = [line for line in lines if line.startswith("- ")]
    assert sorted({line for line in told if told.count(line) > 1}) == []
