"""What `gpuwarden submit` shows before it submits, for people and for machines."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.estimates import GIB, Range, Unknown
from gpuwarden.scheduling import expectations
from gpuwarden.scheduling.estimations import Fit
from gpuwarden.scheduling.predictions import Unforeseen
from gpuwarden.scheduling.recommendations import span

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuwarden.scheduling.estimations import CardEstimate
    from gpuwarden.scheduling.submissions import Plan
    from gpuwarden.scheduling.tasks import Foreseen, SubmittedJob

SCHEMA: Final = "gpuwarden.submission/v1"
_HEAD = (
    "",
    "card",
    "memory needed",
    "of",
    "room",
    "largest batch",
    "epoch",
    "training",
    "GPU-h",
    "cost",
)
_ROOM = {Fit.YES: "yes", Fit.TIGHT: "may not", Fit.NO: "no", Fit.UNKNOWN: "UNKNOWN"}


_AT_LIMIT = {
    "slurm": "at most for an attempt; told before it, it saves, leaves, and goes on in the next",
    "kueue": "at most for all attempts together; then Kueue has it save and leave, and it does not "
    "come back by itself",
    "local": "foretold at most; it may take longer",
}


def as_text(plan: Plan, *, engine: str = "slurm") -> str:
    """For people: all that can be said without the engine.

    Args:
        plan: of the task.
        engine: that it goes to, by which its time limit means this or that.
    """
    task, gpus = plan.task, plan.task.gpus
    cards = f"{gpus} cards" if gpus > 1 else "1 card"
    epochs = (
        f"{span(plan.training.seconds)} long"
        if plan.training.seconds is not None
        else f"{plan.training.epochs} epochs"
    )
    images = plan.training.images
    lines = [
        f"{task.name}: {plan.training.words}, {epochs}"
        + (f" of {images} images" if isinstance(images, int) else "")
        + f", {cards}",
        f"for team {task.team}, priority {task.priority}"
        + (f", in window {task.window}" if task.window else "")
        + (f", after {', '.join(task.after)}" if task.after else ""),
        "",
        *_table(
            [_HEAD, *(_row(each, gpus, chosen=each is plan.chosen) for each in plan.estimates)]
        ),
        "",
        f"card     {plan.chosen.kind.name}: {plan.why_card}",
        f"rests on {_basis(plan.chosen)}",
        *_history(plan),
    ]
    if task.time_limit_seconds is not None:
        lines.append(f"time     {span(task.time_limit_seconds)} {_AT_LIMIT[engine]}")
        lines += [f"         by {plan.limit_words}"] if plan.limit_words else []
    if plan.image is not None:
        lines.append(f"image    {plan.image.name} ({plan.image.image})")
    if plan.sizes:
        lines.append(f"smaller  {_sizes(plan.sizes)}")
    lines += [f"advice   {line}" for line in plan.advice]
    lines += [f"warning  {line}" for line in plan.warnings]
    return "\n".join(lines)


def as_document(
    plan: Plan,
    foreseen: Foreseen,
    *,
    job: SubmittedJob | None = None,
    rendered: str | None = None,
) -> dict[str, Any]:
    """For machines: bytes, seconds, Unix time; what is not known is absent.

    Args:
        plan: of the task.
        foreseen: what the engine says of its start.
        job: as the engine took it; None: nothing was submitted.
        rendered: what would be sent.
    """
    gpus = plan.task.gpus
    start = {key: value for key, value in dataclasses.asdict(foreseen).items() if value is not None}
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "submitted": job is not None,
        "task": plan.task.as_document(),
        "estimates": [each.as_document(gpus) for each in plan.estimates],
        "card": plan.chosen.kind.name,
        "why_card": plan.why_card,
        "start": start,
        "smaller_models": {name: each.as_document(gpus) for name, each in plan.sizes},
        "advice": list(plan.advice),
        "warnings": list(plan.warnings),
    }
    if plan.limit_words:
        found["time_limit_rests_on"] = plan.limit_words
    if plan.history:
        found["history"] = {
            card: expectations.as_document(each) for card, each in plan.history.items()
        }
    if job is not None:
        found["job"] = dataclasses.asdict(job) | {"warnings": list(job.warnings)}
    if rendered is not None:
        found["rendered"] = rendered
    return found


def _row(each: CardEstimate, gpus: int, *, chosen: bool) -> tuple[str, ...]:
    hours = each.gpu_hours(gpus)
    return (
        ">" if chosen else "",
        each.kind.name,
        "UNKNOWN"
        if isinstance(each.memory, Unknown)
        else f"{each.memory.expected / GIB:.1f} ({each.memory.low / GIB:.1f} to "
        f"{each.memory.high / GIB:.1f}) GiB",
        f"{each.offered / GIB:.1f} GiB",
        _ROOM[each.fit],
        "UNKNOWN" if each.largest_batch is None else str(each.largest_batch or "none"),
        _seconds(each.epoch_seconds),
        _seconds(each.training_seconds),
        "UNKNOWN" if hours is None else f"{hours.expected:.1f}",
        each.cost(gpus) or "",
    )


def _seconds(value: Range | Unknown) -> str:
    if isinstance(value, Unknown):
        return "UNKNOWN"
    return f"{span(value.expected)} ({span(value.low)} to {span(value.high)})"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    rows = [row[:-1] for row in rows] if not any(row[-1] for row in rows[1:]) else rows
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _basis(chosen: CardEstimate) -> str:
    if not chosen.basis:
        return "nothing: " + "; ".join(chosen.reasons())
    formula = "the formula of docs/estimates.md"
    words = {"profile": "a profile of this training here", "formula": formula}
    return " and ".join(words[part] for part in chosen.basis.split(", "))


def _history(plan: Plan) -> list[str]:
    """What trainings like it took, where somebody was asked."""
    found = plan.foretold
    if found is None:
        return []
    if isinstance(found, Unforeseen):
        return [f"history  {found.words}"]
    between = f"{span(found.middle)} ({span(found.shortest)} to {span(found.longest)})"
    share = f"{100 * found.claim:.0f} % should lie between"
    return [f"history  {between}, from {found.runs} trainings like it here; {share}"]


def start_line(foreseen: Foreseen, zone: dt.tzinfo) -> str:
    """When it would start, by the engine.

    Args:
        foreseen: what the engine says.
        zone: whose clocks are shown.
    """
    return f"start    {_start(foreseen, zone)}"


def _start(foreseen: Foreseen, zone: dt.tzinfo) -> str:
    if foreseen.earliest is None:
        return foreseen.words or "UNKNOWN: the engine does not tell"
    moments = [foreseen.earliest]
    if foreseen.latest is not None and foreseen.latest - foreseen.earliest >= 60:
        moments.append(foreseen.latest)
    shown = " to ".join(
        dt.datetime.fromtimestamp(moment, zone).strftime("%a %d %b %H:%M") for moment in moments
    )
    rests = (
        f"from {foreseen.samples} jobs before" if foreseen.samples else "by the engine's own plan"
    )
    return f"{shown}, {rests}" + (f"; {foreseen.words}" if foreseen.words else "")


def _sizes(sizes: Iterable[tuple[str, CardEstimate]]) -> str:
    shown = [
        f"{name} {span(each.training_seconds.expected)}"
        for name, each in sizes
        if isinstance(each.training_seconds, Range) and each.fit is Fit.YES
    ]
    return ", ".join(shown) or "none of its family is known to have room"
