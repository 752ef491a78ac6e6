"""The report's plots as inline SVG, with words for who cannot see them. Pure.

Colours come from the page's style sheet, so that they follow light, dark and paper. What is not
known is drawn as a gap: hatched, never as nothing and never as a line across.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup

from gpuwarden.ruleengine.reports.wording import percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

WIDTH: Final = 720
_LEFT, _RIGHT, _TOP = 46, 712, 12
WEEKDAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_HATCH = Markup(
    '<defs><pattern id="{0}" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path class="hatch" d="M0 0V6"/></pattern></defs>'
)


def _svg(name: str, height: int, words: str, parts: Sequence[Markup]) -> Markup:
    head = Markup('<svg class="plot" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
        WIDTH, height, words
    )
    return Markup().join((head, _HATCH.format(f"gap-{name}"), *parts, Markup("</svg>")))


def _gap(name: str, left: float, width: float, span: tuple[float, float]) -> Markup:
    return Markup(
        '<rect class="gap" fill="url(#gap-{})" x="{:.1f}" y="{:.1f}" width="{:.1f}" '
        'height="{:.1f}"><title>no data</title></rect>'
    ).format(name, left, span[0], width, span[1] - span[0])


def band(pieces: Sequence[Mapping[str, Any]]) -> Markup:
    """Utilisation over time: the middle, and from the lower to the upper tenth of the cards."""
    bottom, height = 190, 220
    step = (_RIGHT - _LEFT) / max(len(pieces), 1)

    def x(number: int) -> float:
        return _LEFT + step * (number + 0.5)

    def y(value: float) -> float:
        return bottom - (bottom - _TOP) * min(max(value, 0.0), 1.0)

    parts = [*_scale(bottom), *_labels(pieces, step, bottom)]
    for number, piece in enumerate(pieces):
        if piece["p50"] is None:
            parts.append(_gap("band", _LEFT + step * number, step, (_TOP, bottom)))
    for run in _pieces(pieces, "p50"):
        upper = [(x(n), y(pieces[n]["p90"] or 0)) for n in run]
        lower = [(x(n), y(pieces[n]["p10"] or 0)) for n in run]
        middle = [(x(n), y(pieces[n]["p50"])) for n in run]
        if len(run) == 1:  # one alone is as wide as its place
            upper, lower, middle = (
                [(points[0][0] - step / 3, points[0][1]), (points[0][0] + step / 3, points[0][1])]
                for points in (upper, lower, middle)
            )
        outline = _path([*upper, *reversed(lower)])
        parts.append(Markup('<path class="band" d="{}Z"/>').format(outline))
        parts.append(Markup('<path class="line" d="{}"/>').format(_path(middle)))
    known = [each["p50"] for each in pieces if each["p50"] is not None]
    words = (
        "Utilisation over time: not known"
        if not known
        else (
            f"Utilisation of the middle card over time, from {percent(min(known))} to "
            f"{percent(max(known))}; the table below has each day"
        )
    )
    return _svg("band", height, words, parts)


def columns(
    name: str, pieces: Sequence[Mapping[str, Any]], figures: Sequence[str], words: str
) -> Markup:
    """A column for each piece of time; of several figures the later ones are part of the first."""
    bottom, height = 170, 200
    step = (_RIGHT - _LEFT) / max(len(pieces), 1)
    top = max((piece[figures[0]] or 0 for piece in pieces), default=0) or 1
    top = _round_up(top)
    parts = [*_scale(bottom, top), *_labels(pieces, step, bottom)]
    for number, piece in enumerate(pieces):
        left, width = _LEFT + step * (number + 0.12), step * 0.76
        if not piece["coverage"]:
            parts.append(_gap(name, _LEFT + step * number, step, (_TOP, bottom)))
            continue
        for place, figure in enumerate(figures):
            tall = (bottom - _TOP) * (piece[figure] or 0) / top
            parts.append(
                Markup(
                    '<rect class="bar{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">'
                    "<title>{}: {}</title></rect>"
                ).format(place, left, bottom - tall, width, tall, piece["from"], piece[figure])
            )
    return _svg(name, height, words, parts)


def shares(name: str, pieces: Sequence[Mapping[str, Any]], figure: str, words: str) -> Markup:
    """A share from nothing to all for each piece of time; what is missing of it is hatched."""
    bottom, height = 80, 108
    step = (_RIGHT - _LEFT) / max(len(pieces), 1)
    parts = [*_scale(bottom), *_labels(pieces, step, bottom)]
    for number, piece in enumerate(pieces):
        value = piece[figure] or 0.0
        left, width = _LEFT + step * number, max(step - 0.5, 0.5)
        tall = (bottom - _TOP) * value
        if value < 1:
            parts.append(_gap(name, left, width, (_TOP, bottom - tall)))
        parts.append(
            Markup(
                '<rect class="bar0" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">'
                "<title>{}: {}</title></rect>"
            ).format(left, bottom - tall, width, tall, piece["from"], percent(piece[figure]))
        )
    return _svg(name, height, words, parts)


def heat(week: Sequence[Sequence[float | None]], within: Sequence[Sequence[float]]) -> Markup:
    """Utilisation by weekday and hour: the fuller, the busier; hours outside stay empty."""
    side, tall, top = (_RIGHT - _LEFT) / 24, 22, 8
    parts = []
    for row, hours in enumerate(week):
        y = top + row * tall
        parts.append(_text(_LEFT - 8, y + tall * 0.7, "end", WEEKDAYS[row]))
        for hour, value in enumerate(hours):
            x = _LEFT + side * hour
            if not within[row][hour]:
                continue
            if value is None:
                parts.append(_gap("heat", x, side - 1, (y, y + tall - 1)))
                continue
            parts.append(
                Markup(
                    '<rect class="cell" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{}" '
                    'fill-opacity="{:.2f}"><title>{} {:02d}:00 {}</title></rect>'
                ).format(
                    x, y, side - 1, tall - 1, 0.06 + 0.94 * min(value, 1.0),
                    WEEKDAYS[row], hour, percent(value),
                )
            )  # fmt: skip
    below = top + 7 * tall + 14
    parts += [
        _text(_LEFT + side * hour, below, "start", f"{hour:02d}:00") for hour in range(0, 24, 3)
    ]
    known = [
        (value, f"{WEEKDAYS[row]} {hour:02d}:00")
        for row, hours in enumerate(week)
        for hour, value in enumerate(hours)
        if value is not None
    ]
    words = "Utilisation by hour of the week: not known"
    if known:
        (low, quiet), (high, busy) = min(known), max(known)
        words = (
            f"Utilisation by hour of the week: lowest {percent(low)} on {quiet}, highest "
            f"{percent(high)} on {busy}; the table below has each hour"
        )
    return _svg("heat", below + 6, words, parts)


def _scale(bottom: float, top: float | None = None) -> Iterator[Markup]:
    """The axis with its lines: shares of one, or numbers up to `top`."""
    for part in (0.0, 0.5, 1.0):
        y = bottom - (bottom - _TOP) * part
        yield Markup('<path class="axis" d="M{} {:.1f}H{}"/>').format(_LEFT, y, _RIGHT)
        label = f"{part:.0%}" if top is None else f"{top * part:,.4g}"
        yield _text(_LEFT - 6, y + 4, "end", label)


def _labels(pieces: Sequence[Mapping[str, Any]], step: float, bottom: float) -> Iterator[Markup]:
    """As many labels as have room."""
    every = max(1, -(-len(pieces) // 9))
    for number in range(0, len(pieces), every):
        x = _LEFT + step * (number + 0.5)
        yield _text(x, bottom + 18, "middle", pieces[number]["label"])


def _text(x: float, y: float, anchor: str, words: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(
        x, y, anchor, words
    )


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _pieces(pieces: Sequence[Mapping[str, Any]], figure: str) -> Iterator[list[int]]:
    """Numbers of pieces that follow one another and are known."""
    run: list[int] = []
    for number, piece in enumerate(pieces):
        if piece[figure] is not None:
            run.append(number)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _round_up(value: float) -> float:
    """The next number that reads well on an axis."""
    size = 10.0 ** math.floor(math.log10(value))
    return next(size * step for step in (1, 2, 4, 5, 10) if value <= size * step * 1.0001)
