"""Tables and the picture of docs/scheduling-simulation.md, of what was measured."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import TYPE_CHECKING, Any, Final

from bench.scheduling.arms import ARMS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bench.scheduling.measures import Measures

Results = dict[str, list["Measures"]]
"""Arm -> what was measured, a month for each seed."""
_GROUPS: Final = (
    *("high", "normal", "low", "off-peak"),
    *("1 card", "2-4 cards", "8 cards", "all"),
)
_COLOURS: Final = ("#3b6fb5", "#d98032", "#4f9a57")
_PICTURED: Final = ("fcfs", "kill", "gpuwarden")


def tables(results: Mapping[str, Sequence[Measures]]) -> str:
    """Markdown: outcomes, waits, and what the arms are."""
    parts = [
        _table(
            [
                *("policy", "useful", "lost card-hours", "left, per job", "most, one job"),
                *("fairness", "slowdown", "half done in", "bookings on time"),
            ],
            [
                [
                    name,
                    _spread(runs, lambda each: 100 * each.useful, "{:.1f} %"),
                    _spread(runs, lambda each: each.lost_hours, "{:.0f}"),
                    _spread(runs, lambda each: each.left, "{:.2f}"),
                    _spread(runs, lambda each: each.most_left, "{:.0f}"),
                    _spread(runs, lambda each: each.fairness, "{:.2f}"),
                    _spread(runs, lambda each: each.slowdown, "{:.1f}"),
                    _spread(runs, lambda each: each.turnaround / 60, "{:.0f} min"),
                    _spread(runs, lambda each: 100 * each.on_time, "{:.0f} %"),
                ]
                for name, runs in results.items()
            ],
        ),
        "Minutes until a job first starts, mean / median / 95th percentile:",
        _table(
            ["policy", *_GROUPS],
            [[name, *(_waits(runs, group) for group in _GROUPS)] for name, runs in results.items()],
        ),
    ]
    return "\n\n".join(parts)


def described() -> str:
    """Markdown: what each arm is."""
    return "\n".join(f"- **{arm.name}**: {arm.words}" for arm in ARMS)


def as_json(results: Mapping[str, Sequence[Measures]]) -> str:
    """Everything that was measured; what there is none of is null."""
    document = {
        name: [_without_nan(dataclasses.asdict(each)) for each in runs]
        for name, runs in results.items()
    }
    return json.dumps(document, indent=1)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _spread(runs: Sequence[Measures], of: Callable[[Measures], float], form: str) -> str:
    """The mean over the seeds, and from where to where they lie."""
    values = [of(each) for each in runs]
    if any(math.isnan(value) for value in values):
        return "-"
    shown = form.format(_mean(values))
    if len(values) == 1:
        return shown
    number = form.partition("}")[0] + "}"
    return f"{shown} ({number.format(min(values))} to {number.format(max(values))})"


def _waits(runs: Sequence[Measures], group: str) -> str:
    found = [each.waits[group] for each in runs]
    parts = (
        _mean([each.mean for each in found]),
        _mean([each.half for each in found]),
        _mean([each.most for each in found]),
    )
    return " / ".join("-" if math.isnan(part) else f"{part / 60:.0f}" for part in parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ---------------------------------------------------------------------------------------------
# The picture


def picture(results: Mapping[str, Sequence[Measures]]) -> str:
    """SVG: waits by priority, work lost, and useful time, for the three policies side by side.

    Bars are means over the seeds; a line shows from where to where these lie.
    """
    shown = [name for name in _PICTURED if name in results]
    panels: list[tuple[str, list[tuple[str, Callable[[Measures], float]]]]] = [
        (
            "95th percentile of the wait, hours",
            [(group, functools.partial(_most_hours, group)) for group in ("high", "normal", "low")],
        ),
        ("card-hours lost", [("", lambda each: each.lost_hours)]),
        ("useful, % of all card-hours", [("", lambda each: 100 * each.useful)]),
        ("bookings on time, %", [("", lambda each: 100 * each.on_time)]),
    ]
    body, left = [], 20.0
    for title, groups in panels:
        drawn, width = _panel(title, groups, [results[name] for name in shown], left)
        body += drawn
        left += width + 34
    legend = [
        f'<rect x="{20 + 150 * place}" y="250" width="12" height="12" fill="{colour}"/>'
        f'<text x="{38 + 150 * place}" y="260">{name}</text>'
        for place, (name, colour) in enumerate(zip(shown, _COLOURS, strict=False))
    ]
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left:.0f} 276" '
                'font-family="sans-serif" font-size="12" role="img" '
                'aria-label="Waits, work lost, useful time and bookings under three policies">'
            ),
            f'<rect width="{left:.0f}" height="276" fill="#ffffff"/>',
            *body,
            *legend,
            "</svg>\n",
        ]
    )


def _most_hours(group: str, measures: Measures) -> float:
    return measures.waits[group].most / 3600


def _panel(
    title: str,
    groups: Sequence[tuple[str, Callable[[Measures], float]]],
    arms: Sequence[Sequence[Measures]],
    left: float,
) -> tuple[list[str], float]:
    """One group of bars for each of `groups`; returns its elements and its width."""
    bar, gap, height, base = 26.0, 18.0, 170.0, 222.0
    values = [[[of(each) for each in runs] for runs in arms] for _name, of in groups]
    highest = max((v for group in values for runs in group for v in runs), default=1.0) or 1.0
    width = max(len(groups) * (len(arms) * bar + gap), 7.0 * len(title))
    found = [
        f'<text x="{left:.1f}" y="22" font-weight="bold">{title}</text>',
        f'<line x1="{left:.1f}" y1="{base}" x2="{left + width:.1f}" y2="{base}" stroke="#888"/>',
    ]
    for place, (name, _of) in enumerate(groups):
        start = left + place * (len(arms) * bar + gap)
        for number, runs in enumerate(values[place]):
            x, mean = start + number * bar, _mean(runs)
            tall = height * mean / highest
            middle = x + bar / 2 - 2
            ends = [base - height * end / highest for end in (min(runs), max(runs))]
            found += [
                (
                    f'<rect x="{x:.1f}" y="{base - tall:.1f}" width="{bar - 4:.1f}" '
                    f'height="{tall:.1f}" fill="{_COLOURS[number]}"/>'
                ),
                (
                    f'<line x1="{middle:.1f}" y1="{ends[0]:.1f}" x2="{middle:.1f}" '
                    f'y2="{ends[1]:.1f}" stroke="#222"/>'
                ),
                (
                    f'<text x="{middle:.1f}" y="{min(ends[1], base - tall) - 4:.1f}" '
                    f'text-anchor="middle" font-size="10">{_number(mean)}</text>'
                ),
            ]
        found.append(
            f'<text x="{start + len(arms) * bar / 2 - 2:.1f}" y="238" '
            f'text-anchor="middle">{name}</text>'
        )
    return found, width


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
