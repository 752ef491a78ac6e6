"""Small charts as inline SVG, drawn on the server: a line, and where it should be. Pure.

Colours come from the page's style sheet, so that they follow light and dark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from gpuwarden import quantities
from gpuwarden.quantities import Unit
from gpuwarden.ruleengine.messages import local_time

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuwarden.ruleengine.job_histories import Chart, JobHistory, Point

WIDTH, HEIGHT = 360, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 8, 352, 24, 122


def draw(chart: Chart, history: JobHistory, zone: str) -> Markup:
    """One chart as an element of a page.

    Args:
        chart: what is drawn.
        history: over which time.
        zone: in which its ends are told.
    """
    top = _ceiling(chart)
    span = max(history.end - history.start, 1.0)

    def x(at: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (at - history.start) / span

    def y(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * min(max(value / top, 0.0), 1.0)

    begin, end = (f"{local_time(at, zone):%H:%M}" for at in (history.start, history.end))
    parts = [
        Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
            WIDTH, HEIGHT, _words(chart, latest(chart, history, zone))
        )
    ]
    if chart.low is not None and chart.high is not None:
        upper, lower = y(chart.high), y(chart.low)
        # A profile is one value: its band would not be seen.
        height = max(lower - upper, 2.0)
        parts.append(
            Markup('<rect class="band" x="{}" y="{:.1f}" width="{}" height="{:.1f}"/>').format(
                _LEFT, upper, _RIGHT - _LEFT, height
            )
        )
    parts.append(
        Markup('<path class="axis" d="M{0} {2}H{1}M{0} {3}H{1}"/>').format(
            _LEFT, _RIGHT, _TOP, _BOTTOM
        )
    )
    for piece in _pieces(chart.points, history.step):
        line = "L".join(f"{x(at):.1f} {y(value):.1f}" for at, value in piece)
        if len(piece) == 1:
            line += f"L{x(piece[0][0]) + 1:.1f} {y(piece[0][1]):.1f}"
        parts.append(Markup('<path class="line" d="M{}"/>').format(line))
    labels = (
        (_LEFT, _TOP - 8, "start", quantities.render(top, chart.unit)),
        (_LEFT, HEIGHT - 12, "start", begin),
        (_RIGHT, HEIGHT - 12, "end", end),
    )
    parts += [
        Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>').format(*label) for label in labels
    ]
    parts.append(Markup("</svg>"))
    return Markup().join(parts)


def latest(chart: Chart, history: JobHistory, zone: str) -> str:
    """The newest value, for people; one that is not of now says of when it is."""
    at, value = chart.points[-1]
    text = quantities.render(value, chart.unit)
    if history.end - at <= 2 * history.step:
        return text
    return f"nothing now; {text} at {local_time(at, zone):%H:%M}"


def _words(chart: Chart, now: str) -> str:
    """The chart for who cannot see it."""
    values = [value for _, value in chart.points]
    low, high = (quantities.render(value, chart.unit) for value in (min(values), max(values)))
    return f"{chart.title}: {now}; from {low} to {high}; expected: {chart.expected}"


def _ceiling(chart: Chart) -> float:
    if chart.unit is Unit.RATIO:
        return 1.0
    highest = max([value for _, value in chart.points] + [chart.high or 0.0])
    return highest * 1.1 or 1.0


def _pieces(points: Sequence[Point], step: float) -> Iterator[list[Point]]:
    """The line, broken where samples are missing: what is not known is not drawn."""
    piece: list[Point] = []
    for point in points:
        if piece and point[0] - piece[-1][0] > 1.5 * step:
            yield piece
            piece = []
        piece.append(point)
    if piece:
        yield piece
