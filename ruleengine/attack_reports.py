"""What is told of attacks: text, JSON and Markdown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gpuwarden import durations
from gpuwarden.ruleengine.attack_runs import Outcome
from gpuwarden.ruleengine.attack_tricks import TRICKS
from gpuwarden.ruleengine.attacks import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuwarden.ruleengine.attack_runs import Attacked, Result

SCHEMA = "gpuwarden.rule-attacks/v1"
_HEADS = ("trick", "the job", "outcome", "later", "what stands against it")


def report_lines(attacked: Iterable[Attacked]) -> list[str]:
    """For people at a terminal."""
    lines: list[str] = []
    for item in attacked:
        lines += [*([""] if lines else []), _sentence(item)]
        rows = [_row(item, result) for result in _bounded(item)]
        widths = [max((len(row[n]) for row in rows), default=0) for n in range(4)]
        for row in rows:
            cells = [text.ljust(width) for text, width in zip(row, widths, strict=False)]
            lines.append(f"  {'  '.join(cells)}  {row[4]}")
        if _held(item):
            lines.append(f"  without effect: {', '.join(_held(item))}")
    return lines


def summary_lines(attacked: Sequence[Attacked]) -> list[str]:
    """The last lines, for people: how many escape, and what can be done."""
    played = [item for item in attacked if not item.skipped]
    tricks = sum(len(item.results) for item in played)
    escapes = [(item, result) for item in played for result in item.escapes]
    head = f"{tricks} tricks against {len(played)} {'rule' if len(played) == 1 else 'rules'}"
    if not escapes:
        return [f"{head}: none escapes for longer than trust_for"]
    lines = [f"{head}: {len(escapes)} escape for longer than trust_for"]
    lines += [
        f"  {item.rule.id}: {result.trick.name}: {result.trick.hint}" for item, result in escapes
    ]
    return lines


def report_markdown(attacked: Sequence[Attacked]) -> str:
    """For a page or a merge request."""
    parts = []
    for item in attacked:
        lines = [f"### {item.rule.id}", "", _sentence(item, name=False)]
        rows = [_row(item, result) for result in _bounded(item)]
        if rows:
            lines += ["", f"| {' | '.join(_HEADS)} |", "| --- | --- | --- | --- | --- |"]
            lines += [f"| {' | '.join(_escaped(cell) for cell in row)} |" for row in rows]
        if _held(item):
            lines += ["", f"Without effect: {', '.join(f'`{name}`' for name in _held(item))}."]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, summary_lines(attacked)[0] + "."]) + "\n"


def tricks_markdown() -> str:
    """The catalogue of tricks as a table."""
    lines = ["| trick | kind | the job | what stands against it |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{item.name}` | {item.kind} | {_escaped(item.help)} | {_escaped(item.stands)} |"
        for item in TRICKS
    ]
    return "\n".join(lines) + "\n"


def report_json(attacked: Sequence[Attacked]) -> str:
    """One versioned JSON document, for CI."""
    return json.dumps({"schema": SCHEMA, "rules": [_document(item) for item in attacked]}, indent=2)


def _document(item: Attacked) -> dict[str, Any]:
    offender = item.offender
    return {
        "rule": item.rule.id,
        "skipped": item.skipped,
        "trust_for": item.rule.trust_for,
        "offender": None if offender is None else offender.name,
        "found_after": None if offender is None else item.found,
        "told_after": item.told,
        "dealt_with_after": None if offender is None else item.last,
        "ends": item.ends,
        "tricks": [
            {
                "trick": result.trick.name,
                "kind": result.trick.kind.value,
                "outcome": result.outcome.value,
                "later": result.later,
                "found_by": result.by,
                "told_after": result.after,
                "held_by": list(result.held_by),
                "bounded_by": _bound(item, result),
                "hint": result.trick.hint if result.outcome is Outcome.ESCAPES else "",
            }
            for result in item.results
        ],
    }


def _sentence(item: Attacked, *, name: bool = True) -> str:
    """Whom the rule finds without a trick, and when."""
    head = f"{item.rule.id}: " if name else ""
    if item.skipped or item.offender is None:
        return f"{head}not attacked: {item.skipped}" if name else f"Not attacked: {item.skipped}."
    parts = [f"found after {_time(item.found)}"]
    if item.told is not None:
        parts.append(f"told after {_time(item.told)}")
    if item.ends:
        parts.append(f"ended after {_time(item.last)}")
    words = ", ".join(parts)
    article = "an" if item.offender.name[0] in "aeiou" else "a"
    who = f"{article} {item.offender.name} ({item.offender.help})"
    text = f"{head}{who} is {words}"
    return text if name else f"{text[0].upper()}{text[1:]}."


def _bounded(item: Attacked) -> list[Result]:
    return [result for result in item.results if result.outcome is not Outcome.HELD]


def _held(item: Attacked) -> list[str]:
    return [r.trick.name for r in item.results if r.outcome is Outcome.HELD]


def _row(item: Attacked, result: Result) -> tuple[str, ...]:
    later = "" if result.later is None else _time(result.later)
    if result.later is None and result.outcome in (Outcome.ESCAPES, Outcome.ADVICE, Outcome.TOLD):
        later = "never"
    trick = result.trick
    return (trick.name, trick.help, result.outcome.value, later, _bound(item, result))


def _bound(item: Attacked, result: Result) -> str:
    """What limits a trick, in a few words."""
    trick, text = result.trick, result.trick.stands
    match result.outcome:
        case Outcome.DELAYED:
            text = f"trust_for is {_time(item.rule.trust_for)}: {trick.stands}"
        case Outcome.ELSEWHERE:
            does = "finds its card" if result.card else "tells its owner"
            text = f"{result.by} {does} after {_time(result.after or 0.0)}"
        case Outcome.TOLD:
            why = f" ({', '.join(result.held_by)})" if result.held_by else ""
            text = f"its owner is told each time, and it is not ended{why}"
        case Outcome.GRANTED if result.later is None:
            text = "its owner is told; max_work_lost, the operator's word, spares it"
        case Outcome.ADVICE:
            text = "the rule rests on the job's word, and ends nobody"
            if trick.kind is Kind.ATTEMPT:
                text = "the rule ends nobody: it helps who wants its help"
        case Outcome.ESCAPES:
            text = f"nothing: {trick.hint}"
    return text


def _time(seconds: float) -> str:
    return durations.render(float(round(seconds)))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
