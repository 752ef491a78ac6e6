"""Score the estimates on public figures: `python -m bench.trainer.estimates [--check]`.

Fits the few constants that are fitted, on all figures and once more without each card in turn
(leave one GPU out), and writes the tables into docs/estimates.md. Exits with 1 where the shipped
constants are not those that are found, where a median error is more than 20 %, or where a shipped
band holds fewer figures than it says. `--check` writes nothing, and also fails where the page would
change.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden import estimate_tables, estimates
from gpuwarden.estimate_tables import model_costs, tables
from gpuwarden.estimates import Constants, Gpu, ModelCosts, Unknown, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

FIGURES = Path(__file__).with_name("figures.toml")
PAGE = Path(__file__).parents[2] / "docs/estimates.md"
BEGIN = "<!-- written by `python -m bench.trainer.estimates` -->"
END = "<!-- end of what is written -->"

MEDIAN_TARGET = 0.20
BAND_SHARES = {"memory": 0.9, "speed": 0.8}
"""How many of the public figures lie within the shipped bands."""
_PROBE_BASE = 0.19 * estimates.GIB
"""Fitted on the probes alone."""
_UNITS = {"GiB": float(estimates.GIB), "GB": 1e9}
_ROBUST = 0.1
"""Ratio at which a figure's error begins to count by its size instead of its square."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What somebody measured.

    Attributes:
        source: where it is told.
        kind: `training`, `probe` or `epochs`.
        gpu: the card.
        model: what was trained.
        workload: how.
        memory: bytes, or None.
        images: per second, or None.
        reason: why it is neither fitted nor scored; empty where it is.
    """

    source: str
    kind: str
    gpu: Gpu
    model: ModelCosts
    workload: Workload
    memory: float | None
    images: float | None
    reason: str

    def fitted(self, what: str) -> bool:
        """Whether constants are fitted on it."""
        return not (self.reason or (what == "memory" and self.kind == "probe"))


@dataclass(frozen=True, slots=True)
class Fitted:
    """Constants that are fitted, by their names in `Constants`, with the digits that are shipped.

    Attributes:
        names: to the number of digits, in the unit of `scale`.
        scale: from what is shipped to `Constants`.
    """

    names: dict[str, int]
    scale: dict[str, float]


MEMORY = Fitted({"base_bytes": 2, "activation_factor": 2}, {"base_bytes": estimates.GIB})
SPEED = Fitted(
    {"traffic": 1, "compute": 2, "cache_gain": 2, "launch_seconds": 1}, {"launch_seconds": 1e-6}
)


def load() -> tuple[list[Figure], list[Figure]]:
    """All figures, and the largest batches that fitted."""
    content = tomllib.loads(FIGURES.read_text("utf-8"))
    own = {name: model_costs(name, row) for name, row in content["models"].items()}

    def read(group: dict[str, Any], row: dict[str, Any]) -> Figure:
        model = own.get(row["model"]) or estimate_tables.find_model(row["model"])
        gpu = estimate_tables.find_gpu(group["gpu"])
        if isinstance(model, Unknown) or isinstance(gpu, Unknown):
            raise TypeError(f"{FIGURES.name}: {model if isinstance(model, Unknown) else gpu}")
        extra = {key: row[key] for key in ("amp", "optimizer", "classes", "objects") if key in row}
        printed, unit = row.get("memory"), _UNITS[group.get("unit", "GiB")]
        return Figure(
            source=group["source"],
            kind=group.get("kind", "training"),
            gpu=gpu,
            model=model,
            workload=Workload(
                batch=row["batch"], imgsz=row["imgsz"], **{"optimizer": "SGD", **extra}
            ),
            memory=None if printed is None else printed * unit,
            images=row.get("images"),
            reason=group.get("reason", ""),
        )

    figures = [read(group, row) for group in content["figures"] for row in group["rows"]]
    largest = [read(group, row) for group in content["largest"] for row in group["rows"]]
    return figures, largest


def predicted_memory(figure: Figure, constants: Constants) -> float:
    """Bytes that torch would have reserved."""
    model = figure.model
    if figure.kind == "probe":
        # No EMA, no moments, no loss: weights, gradients and AMP's copies alone; and nothing yet
        # of what loops of training and validation leave behind in torch's allocator.
        constants = dataclasses.replace(constants, base_bytes=_PROBE_BASE)
        share = (8 + 2 * figure.workload.amp) / (16 + 2 * figure.workload.amp)
        model = dataclasses.replace(model, parameters=round(model.parameters * share), anchors=0.0)
    return estimates.memory(model, figure.workload, constants).reserved.expected


def predicted_images(figure: Figure, constants: Constants) -> float:
    """Images per second."""
    if figure.kind == "probe":
        constants = dataclasses.replace(constants, update_bytes=0.0)
    return estimates.speed(figure.model, figure.gpu, figure.workload, constants).images.expected


def error(figure: Figure, constants: Constants, *, what: str) -> float:
    """Logarithm of predicted to measured."""
    if what == "memory":
        return math.log(predicted_memory(figure, constants) / (figure.memory or math.nan))
    return math.log(predicted_images(figure, constants) / (figure.images or math.nan))


def fit(figures: Sequence[Figure], start: Constants, *, what: str) -> Constants:
    """The constants with the smallest error; a search in steps that halve, always the same.

    Args:
        figures: to fit on.
        start: the constants that are not fitted, and where the search begins.
        what: `memory` or `speed`.
    """
    names = list((MEMORY if what == "memory" else SPEED).names)

    def cost(constants: Constants) -> float:
        errors = (error(figure, constants, what=what) for figure in figures)
        return sum(math.sqrt(1 + (value / _ROBUST) ** 2) for value in errors)

    best, least, step = start, cost(start), 0.5
    while step > 0.002:
        moved = False
        for name in names:
            for factor in (math.exp(step), math.exp(-step)):
                trial = dataclasses.replace(best, **{name: getattr(best, name) * factor})
                value = cost(trial)
                if value < least - 1e-9:
                    best, least, moved = trial, value, True
        if not moved:
            step /= 2
    return best


def left_out(figures: Sequence[Figure], start: Constants, *, what: str) -> dict[str, Constants]:
    """Constants fitted without each card in turn, by the card's name."""
    cards = sorted({figure.gpu.name for figure in figures})
    return {
        card: fit([item for item in figures if item.gpu.name != card], start, what=what)
        for card in cards
    }


def rounded(constants: Constants, fitted: Fitted) -> dict[str, float]:
    """What is shipped of the fitted constants, by name."""
    return {
        name: round(getattr(constants, name) / fitted.scale.get(name, 1.0), digits)
        for name, digits in fitted.names.items()
    }


def main() -> int:
    """Fit, score, write; 0 if everything is as it is shipped."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.trainer.estimates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    text, faults = report()
    before = PAGE.read_text("utf-8")
    after = before[: before.index(BEGIN) + len(BEGIN)] + f"\n{text}" + before[before.index(END) :]
    if not arguments.check:
        PAGE.write_text(after, "utf-8")
        print(text)
    elif before != after:
        faults.append(f"{PAGE.name} is not what the command writes")
    for fault in faults:
        print(f"missed: {fault}", file=sys.stderr)
    return 1 if faults else 0


def report() -> tuple[str, list[str]]:
    """What the page says in Markdown, and what is missed."""
    figures, largest = load()
    shipped = tables().constants
    parts, faults = [], []
    for what, fitted in (("memory", MEMORY), ("speed", SPEED)):
        value = "memory" if what == "memory" else "images"
        all_of_it = [item for item in figures if getattr(item, value) is not None]
        used = [item for item in all_of_it if item.fitted(what)]
        # Begun afresh, so that what is found does not depend on what was shipped before.
        start = dataclasses.replace(shipped, **_STARTS[what])
        found = fit(used, start, what=what)
        without = left_out(used, start, what=what)
        for name, number in rounded(found, fitted).items():
            has = getattr(shipped, name) / fitted.scale.get(name, 1.0)
            if not math.isclose(number, has, abs_tol=1e-9):
                faults.append(f"{name} is shipped as {has:g}, found is {number:g}")
        groups = {
            "fitted": used,
            "AutoBatch's probes, not fitted": [
                item for item in all_of_it if item.kind == "probe" and not item.fitted(what)
            ],
        }
        errors = {
            name: [error(item, shipped, what=what) for item in group]
            for name, group in groups.items()
            if group
        }
        errors["card left out of the fit"] = [
            error(item, without[item.gpu.name], what=what) for item in used
        ]
        parts.append(_section(what, all_of_it, shipped=shipped, without=without))
        parts.append(_scores(what, errors))
        faults += _missed(what, used, errors, shipped=shipped)
    parts.append(_largest(largest, shipped))
    return "\n".join(parts), faults


_STARTS: dict[str, dict[str, float]] = {
    "memory": {"base_bytes": 0.25 * estimates.GIB, "activation_factor": 1.2},
    "speed": {"traffic": 20.0, "compute": 1.0, "cache_gain": 1.5, "launch_seconds": 15e-6},
}


def _missed(
    what: str,
    used: Sequence[Figure],
    errors: dict[str, list[float]],
    *,
    shipped: Constants,
) -> list[str]:
    faults = []
    for name, values in errors.items():
        median = statistics.median(_ratios(values))
        if median > MEDIAN_TARGET:
            faults.append(f"{what}, {name}: the median error is {median:.0%}, more than 20 %")
    if what == "memory":
        factors = dict.fromkeys(errors, 1 + shipped.memory_error)
    else:
        factors = dict.fromkeys(errors, shipped.speed_error_unmeasured)
        factors["fitted"] = shipped.speed_error
    if not all(item.gpu.measured for item in used if item.images is not None and what == "speed"):
        faults.append("a card whose speed is fitted is not marked as measured")
    for name, values in errors.items():
        held = sum(abs(value) <= math.log(factors[name]) for value in values)
        if held < BAND_SHARES[what] * len(values):
            faults.append(f"{what}, {name}: its band holds {held} of {len(values)} figures")
    return faults


def _ratios(errors: Iterable[float]) -> list[float]:
    """Errors as people state them: 0.2 is a fifth too much or too little."""
    return [abs(math.expm1(value)) for value in errors]


def _signed(value: float) -> str:
    return f"{math.expm1(value):+.0%}".replace("%", " %")


def _section(
    what: str,
    figures: Sequence[Figure],
    *,
    shipped: Constants,
    without: dict[str, Constants],
) -> str:
    unit = "GiB" if what == "memory" else "images/s"
    rows = [
        ("card", "model", "px", "batch", f"measured ({unit})", "predicted", "error", "left out"),
        ("---", "---", "---:", "---:", "---:", "---:", "---:", "---:"),
    ]
    notes: list[str] = []
    predict: Callable[[Figure, Constants], float] = (
        predicted_memory if what == "memory" else predicted_images
    )
    for item in figures:
        amount = item.memory if what == "memory" else item.images
        scale = estimates.GIB if what == "memory" else 1.0
        if item.source not in notes:
            notes.append(item.source)
        mark = f" ({notes.index(item.source) + 1})"
        left = "not fitted"
        if item.fitted(what):
            left = _signed(error(item, without[item.gpu.name], what=what))
        rows.append(
            (
                item.gpu.name + mark,
                item.model.name + ("" if item.workload.amp else ", no AMP"),
                str(item.workload.imgsz),
                str(item.workload.batch),
                f"{(amount or math.nan) / scale:.3g}",
                f"{predict(item, shipped) / scale:.3g}",
                _signed(error(item, shipped, what=what)),
                left,
            )
        )
    reasons = {item.source: item.reason for item in figures if item.reason}
    listed = "".join(
        f"{number}. {source}{'. Not fitted: ' + reasons[source] if source in reasons else ''}\n"
        for number, source in enumerate(notes, 1)
    )
    title = "Memory that torch reserves" if what == "memory" else "Images per second"
    return f"### {title}\n\n{_markdown(rows)}\n{listed}"


def _scores(what: str, errors: dict[str, list[float]]) -> str:
    rows: list[tuple[str, ...]] = [
        (what, "figures", "median", "80 % within", "90 % within", "worst"),
        ("---", "---:", "---:", "---:", "---:", "---:"),
    ]
    for name, values in errors.items():
        ratios = sorted(_ratios(values))
        quantiles = [ratios[math.ceil(share * len(ratios)) - 1] for share in (0.8, 0.9, 1.0)]
        shown = [f"{value:.0%}".replace("%", " %") for value in quantiles]
        median = f"{statistics.median(ratios):.0%}".replace("%", " %")
        rows.append((name, str(len(ratios)), median, *shown))
    return _markdown(rows)


def _largest(figures: Sequence[Figure], shipped: Constants) -> str:
    rows = [
        ("card", "model", "batch that fitted", "its memory (GiB)", "largest that is advised"),
        ("---", "---", "---:", "---:", "---:"),
    ]
    for item in figures:
        needed = estimates.memory(item.model, item.workload, shipped).reserved
        advised = estimates.largest_batch(
            item.model, item.gpu.memory, workload=item.workload, constants=shipped
        )
        rows.append(
            (
                item.gpu.name,
                item.model.name,
                str(item.workload.batch),
                f"{needed.expected / estimates.GIB:.1f} of {item.gpu.memory / estimates.GIB:.1f}",
                str(advised),
            )
        )
    return (
        "### The largest batch\n\n"
        f"{_markdown(rows)}\n"
        f"{figures[0].source} names the batches. The advice keeps the upper end of the band below "
        "the card's memory, and is meant to be smaller than what can be made to fit.\n"
    )


def _markdown(rows: Sequence[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
