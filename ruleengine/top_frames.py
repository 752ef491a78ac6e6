"""The whole screen of `gpuwarden top`: head, table, foot, help and details. Pure."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from gpuwarden.consoles import printable
from gpuwarden.ruleengine.top_layouts import (
    Line,
    Style,
    cropped,
    fitted,
    one_line,
    short_time,
    table,
    width_of,
    wrapped,
)
from gpuwarden.ruleengine.top_rows import row_cells, row_words
from gpuwarden.ruleengine.top_views import HELP, Mode
from gpuwarden.ruleengine.why_cli import print_document

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuwarden.ruleengine.top_pictures import Picture
    from gpuwarden.ruleengine.top_views import View

_AROUND: Final = 5
"""Lines that are no rows: two above the titles, these, and two below."""
_LEGEND: Final = (
    "UTIL and MEM: what is / what should be, per card, where that is known; with less space a + "
    "or - says that it is outside. LEFT: by the pace of the last epochs. VERDICT: the rule that "
    "has come furthest, its level, and what comes next if it stays so; without an engine there is "
    "none. A faint row is of a node that does not answer."
)


def rows_of(height: int) -> int:
    """How many jobs a screen of so many lines shows."""
    return max(1, height - _AROUND)


def frame(
    view: View,
    picture: Picture | None,
    *,
    size: tuple[int, int],
    now: float,
    problem: str = "",
    details: dict[str, Any] | None = None,
    ascii_only: bool = False,
) -> list[Line]:
    """Every line of the screen.

    Args:
        view: what is looked at.
        picture: the last one, or None: none came yet.
        size: columns and lines of the terminal.
        now: monotonic time.
        problem: why none came, or an empty string.
        details: what is known of the marked job, or None: not asked, or no more than its row.
        ascii_only: whether the terminal shows nothing else.
    """
    width, height = size

    def clean(text: str) -> str:
        return one_line(text, ascii_only=ascii_only)

    body = _body(view, picture, details, width=width, now=now, ascii_only=ascii_only)
    lines: list[Line] = []
    if picture is None:
        text = problem or "waiting for the first answer"
        style = Style.BAD if problem else Style.STRONG
        lines += [(("gpuwarden top", Style.STRONG),)]
        lines += [((part, style),) for part in wrapped(text, width, ascii_only=ascii_only)]
    else:
        lines += [((clean(_head(picture)), Style.STRONG),), (_state(view, picture, now, clean),)]
    foot = _foot(view, picture, now, clean)
    room = max(0, height - len(lines) - len(foot))
    if body is not None:
        start = min(view.scroll, max(0, len(body) - room))
        lines += body[start : start + room]
    elif picture is not None:
        passed = max(0.0, now - picture.taken)
        jobs = picture.document["jobs"][: max(0, room - 1)]
        cells = [row_cells(job, passed, ascii_only=ascii_only) for job in jobs]
        lines += table(cells, width, chosen=view.chosen, ascii_only=ascii_only)
        if not jobs:
            lines.append(
                (("no job fits" if view.question.words() else "no job runs", Style.FAINT),)
            )
    lines = lines[: max(0, height - len(foot))]
    lines += [()] * (height - len(foot) - len(lines))
    return cropped([*lines, *foot], width, height)


def scrolled(
    view: View,
    picture: Picture | None,
    *,
    size: tuple[int, int],
    now: float,
    details: dict[str, Any] | None = None,
) -> View:
    """The view with no more lines passed over than there are below the screen."""
    body = _body(view, picture, details, width=size[0], now=now, ascii_only=False)
    most = 0 if body is None else max(0, len(body) - size[1] + 3)
    return view if view.scroll <= most else replace(view, scroll=most)


def _body(
    view: View,
    picture: Picture | None,
    details: dict[str, Any] | None,
    *,
    width: int,
    now: float,
    ascii_only: bool,
) -> list[Line] | None:
    """What stands in the place of the table, or None."""
    if view.mode is Mode.HELP:
        return _help(width, ascii_only=ascii_only)
    if view.mode is Mode.DETAILS:
        return _details(view, picture, details, width=width, now=now, ascii_only=ascii_only)
    return None


def page(picture: Picture, *, width: int, now: float, ascii_only: bool = False) -> list[Line]:
    """A picture for paper: head and every row, as `--once` prints it."""
    cells = [row_cells(job, 0.0, ascii_only=ascii_only) for job in picture.document["jobs"]]
    head = one_line(_head(picture), ascii_only=ascii_only)
    lines: list[Line] = [
        ((part, Style.STRONG),) for part in wrapped(head, width, ascii_only=ascii_only)
    ]
    for text, style in _warnings(picture, now):
        lines += [((part, style),) for part in wrapped(text, width, ascii_only=ascii_only)]
    lines += table(cells, width, chosen=None, ascii_only=ascii_only)
    more = picture.document["total"] - picture.document["offset"] - len(cells)
    if more > 0:
        lines.append(((f"{more} more: --limit, or a filter", Style.FAINT),))
    return lines


def _head(picture: Picture) -> str:
    document = picture.document
    nodes = document["nodes"]
    seen = "?" if nodes is None else f"{nodes['lit']}/{nodes['expected']}"
    jobs = f"{document['total']} jobs"
    broken = f", {document['broken']} in a case" if picture.source == "engine" else ""
    place = picture.places[0].partition("://")[2].removesuffix("/metrics")
    more = f" +{len(picture.places) - 1}" if len(picture.places) > 1 else ""
    return (
        f"gpuwarden top · {jobs}{broken} · {document['held']}/{document['cards']} cards held · "
        f"{seen} nodes · {time.strftime('%H:%M:%S')} · {picture.source} {place}{more}"
    )


def _warnings(picture: Picture, now: float) -> list[tuple[str, Style]]:
    """What must be known before a row is believed, the gravest first."""
    document, age, found = picture.document, picture.age(now), []
    if picture.problem:
        found.append((f"OLD, {short_time(age) or '?'}: {picture.problem}", Style.BAD))
    elif age is None:
        found.append(("the engine has not completed a tick yet", Style.BAD))
    elif picture.stale(now):
        found.append((f"OLD, {short_time(age)}: the engine does not tick", Style.BAD))
    found += [
        (f"no job is ended now: {block['sentence']}", Style.WARNING) for block in document["halted"]
    ]
    if document["problem"]:
        found.append((document["problem"], Style.WARNING))
    return found


def _state(view: View, picture: Picture, now: float, clean: Any) -> tuple[str, Style]:
    if view.message:
        return clean(view.message), Style.BAD
    parts = [f"sort {view.question.sort}" + (", reversed" if view.question.reverse else "")]
    words = view.question.words()
    parts += [f"filter {words}"] if words else []
    parts += ["PAUSED"] if view.paused else []
    warnings = _warnings(picture, now)
    style = warnings[0][1] if warnings else Style.PLAIN
    return clean(" · ".join([*(text for text, _ in warnings), *parts])), style


def _foot(view: View, picture: Picture | None, now: float, clean: Any) -> list[Line]:
    if view.mode is Mode.PROMPT:
        what = "filter (user: team: node: rule: broken; Enter, Esc): "
        return [((clean(f"{what}{view.typed}") + "_", Style.STRONG),)]
    if view.mode is not Mode.ROWS:
        return [((clean("Esc back · up, down, PgUp, PgDn"), Style.FAINT),)]
    keys = "q quit · s sort · / filter · b broken · p pause · Enter details · ? help"
    jobs = [] if picture is None else picture.document["jobs"]
    marked: Line = ()
    if picture is not None and view.chosen < len(jobs):
        words = dict(row_words(jobs[view.chosen], max(0.0, now - picture.taken)))
        offset, total = picture.document["offset"], picture.document["total"]
        place = f"{offset + view.chosen + 1}/{total}"
        marked = ((clean(f"{place} {words['job']}: {words['verdict']}"), Style.PLAIN),)
    return [marked, ((clean(keys), Style.FAINT),)]


def _help(width: int, *, ascii_only: bool) -> list[Line]:
    lines: list[Line] = []
    for keys, text in HELP:
        parts = wrapped(text, max(10, width - 24), ascii_only=ascii_only)
        lines += [
            ((fitted(name, 23), Style.STRONG), (f" {part}", Style.PLAIN))
            for name, part in zip([keys, *[""] * len(parts)], parts, strict=False)
        ]
    lines.append(())
    return lines + [((part, Style.FAINT),) for part in wrapped(_LEGEND, width)]


def _details(
    view: View,
    picture: Picture | None,
    details: dict[str, Any] | None,
    *,
    width: int,
    now: float,
    ascii_only: bool,
) -> list[Line]:
    jobs = [] if picture is None else picture.document["jobs"]
    row = next((job for job in jobs if job["job_id"] == view.chosen_id), None)
    texts: list[str] = []
    if row is not None and picture is not None:
        passed = max(0.0, now - picture.taken)
        texts += [f"{name:12} {text}" for name, text in row_words(row, passed)]
    if details is not None and details.get("job_id") == view.chosen_id:
        texts += ["", *explained(details, width)]
    if not texts:
        texts = [f"{view.chosen_id} is not seen any more"]
    return [
        ((line, Style.PLAIN),)
        for text in texts
        for line in (
            [one_line(text, ascii_only=ascii_only)]
            if width_of(text) <= width
            else wrapped(text, width, ascii_only=ascii_only)
        )
    ]


def explained(document: dict[str, Any], width: int) -> Iterable[str]:
    """What `gpuwarden why --all` says of a job, in lines that fit."""
    page = io.StringIO()
    console = Console(
        file=page,
        width=max(20, width),
        color_system=None,
        force_terminal=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    try:
        print_document(console, document, everything=True)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
        page.write("\nThe engine says more of this job in a form that is not known here: is it of ")
        page.write("this version?\n")
    return [printable(line) for line in page.getvalue().splitlines()]
