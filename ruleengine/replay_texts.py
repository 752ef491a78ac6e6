"""A replay's document for people: tables for a terminal, Markdown for a merge request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console

    from gpuwarden.ruleengine.replay_policies import Outcome

SHOWN_ROWS: Final = 50
"""Longer lists are cut, with their length: the JSON document has them whole."""
_UNKNOWN_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class Block:
    """A heading, a sentence under it, and perhaps a table."""

    title: str
    text: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def blocks(report: Mapping[str, Any], outcomes: Sequence[Outcome]) -> list[Block]:
    """What is told, in order; what there is nothing of is left out."""
    found = [
        _summary(report),
        _policies(outcomes),
        _rules(report),
        _terminations(report),
        _held(report),
        _keeps(report),
        _pauses(report),
        _incidents(report),
        _reaction(report),
        _notices(report),
        _caps(report),
        _stale(report),
        _difference(report),
        _sensitivity(report),
        _missing(report),
    ]
    return [block for block in found if block is not None]


def print_report(console: Console, found: Iterable[Block]) -> None:
    """Tables on a terminal."""
    for number, block in enumerate(found):
        console.print(("\n" if number else "") + f"[bold]{escape(block.title)}[/bold]")
        if block.text:
            console.print(escape(block.text))
        if block.rows:
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
            for name in block.columns:
                table.add_column(escape(name), overflow="fold")
            for row in block.rows:
                table.add_row(*(escape(cell) for cell in row))
            console.print(table)


def markdown(found: Iterable[Block]) -> str:
    """Markdown; what jobs are called cannot break out of its cell."""
    lines: list[str] = []
    for block in found:
        lines += [f"### {block.title}", ""]
        if block.text:
            lines += [*(_plain(line) + "  " for line in block.text.splitlines()), ""]
        if block.rows:
            lines += [_line(block.columns), _line("---" for _ in block.columns)]
            lines += [_line(_plain(cell) for cell in row) for row in block.rows]
            lines.append("")
    return "\n".join(line.rstrip() if not line.endswith("  ") else line for line in lines).rstrip()


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    for char in "\\`*_[]<>|":
        text = text.replace(char, f"\\{char}")
    return " ".join(text.split())


def _summary(report: Mapping[str, Any]) -> Block:
    period, totals, cost = report["period"], report["totals"], report["cost"]
    span = f"{period['from']} to {period['to']}, every {period['tick_seconds']:g} s"
    known = f"{totals['verdicts']} verdicts, {_percent(totals['coverage'])} of them known"
    lines = [
        f"{span}: {period['ticks']} ticks, {report['jobs']} jobs",
        f"{known}; {totals['incidents']} incidents, {totals['flapping']} of them flapping",
        _ended(totals, period["horizon_seconds"]),
        f"{cost['queries']} queries, {cost['samples']} samples, {cost['seconds']:g} s",
    ]
    if period["blind_ticks"]:
        lines.insert(
            1, f"at {period['blind_ticks']} ticks the server knew nothing: nothing changed then"
        )
    return Block("Replay", "\n".join([*lines, *report["cautions"]]))


def _ended(totals: Mapping[str, Any], horizon: float) -> str:
    if not totals["terminations"]:
        return f"no job would have been ended{_asked(totals)}"
    count, regretted = totals["terminations"], totals["regretted"]
    return (
        f"{count} {'job' if count == 1 else 'jobs'} would have been ended: "
        f"{totals['gpu_hours_freed']:g} "
        f"GPU-hours freed, {totals['gpu_hours_lost']:g} GPU-hours of work lost; "
        f"{regretted} ({_percent(totals['regret_rate'])}) {'was' if regretted == 1 else 'were'} "
        "at work again within "
        f"{horizon / 3600:g} h: regret{_asked(totals)}"
    )


def _asked(totals: Mapping[str, Any]) -> str:
    """How often trainers would have been asked for something, where a rule asks."""
    asked = totals["requests"]
    if not any(asked.values()):
        return ""
    return (
        f"; trainers asked to save {asked['checkpoint']} times, to leave {asked['yield']} times "
        "(taken as not heeded)"
    )


def _policies(outcomes: Sequence[Outcome]) -> Block | None:
    if not outcomes:
        return None
    rows = tuple(("FAIL" if item.exceeded else "ok", item.sentence) for item in outcomes)
    return Block("Policies", "", ("", "policy"), rows)


def _rules(report: Mapping[str, Any]) -> Block:
    rows = []
    asks = any(any(rule["requests"].values()) for rule in report["rules"])
    for rule in report["rules"]:
        requests = "/".join(str(count) for count in rule["requests"].values())
        reasons = list(rule["unknown_by_reason"].items())
        shown = ", ".join(f"{word} {count}" for word, count in reasons[:_UNKNOWN_SHOWN])
        more = ", ..." if len(reasons) > _UNKNOWN_SHOWN else ""
        rows.append(
            (
                rule["rule"],
                rule["mode"],
                str(rule["subjects"]),
                str(rule["ticks"]),
                str(rule["yes"]),
                _percent(rule["coverage"]),
                shown + more,
                str(rule["incidents"]),
                *((requests,) if asks else ()),
                str(rule["terminations"]),
                _percent(rule["regret_rate"]),
            )
        )
    columns = (
        *("rule", "mode", "subjects", "ticks", "yes", "known", "unknown because of"),
        *("incidents", *(("asked to save/leave",) if asks else ()), "ended", "regret"),
    )
    return Block("Rules", "", columns, tuple(rows))


def _terminations(report: Mapping[str, Any]) -> Block | None:
    requeues = any(item["do"] != "terminate" for item in report["terminations"])
    kept = any(item["kept"] for item in report["terminations"])
    rows = [
        (
            item["at"],
            item["job"],
            _owner(item),
            item["rule"],
            *((item["do"],) if requeues else ()),
            str(item["gpus"]),
            f"{'>= ' if item['at_least'] else ''}{item['gpu_hours_freed']:g}",
            "not known" if item["gpu_hours_lost"] is None else f"{item['gpu_hours_lost']:g}",
            _again(item),
            item["exempt"],
            *((item["kept"],) if kept else ()),
        )
        for item in report["terminations"]
    ]
    columns = (
        *(
            "at",
            "job",
            "owner",
            "rule",
            *(("by",) if requeues else ()),
            "GPUs",
            "GPU-hours freed",
            "GPU-hours lost",
        ),
        *("at work again", "exempt", *(("kept",) if kept else ())),
    )
    return _listed("Jobs that would have been ended", columns, rows)


def _again(item: Mapping[str, Any]) -> str:
    if item["active_again"] is None:
        return f"not until {item['seen_until']}" if item["seen_until"] else "not known"
    return f"{item['active_again']} ({item['active_by']})"


def _held(report: Mapping[str, Any]) -> Block | None:
    rows = [
        (item["due"], item["job"], _owner(item), item["rule"], "; ".join(item["held_by"].values()))
        for item in report["held"]
    ]
    columns = ("due", "job", "owner", "rule", "first held by")
    return _listed("Jobs that were due, and held", columns, rows)


def _keeps(report: Mapping[str, Any]) -> Block | None:
    rows = [
        (
            item["at"],
            item["job"],
            item["rule"],
            f"{item['by']} ({item['role']})",
            _span(item["seconds"]),
            item["until"],
            item["why_less"] or "in full",
            ", ".join(item["put_off"]) or "no end",
        )
        for item in report["keeps"]
    ]
    columns = ("granted", "job", "rule", "by", "for", "until", "allowed", "put off")
    return _listed("Keeps", columns, rows)


def _pauses(report: Mapping[str, Any]) -> Block | None:
    rows = [
        (item["from"], item["to"] or "no end", item["by"], item["reason"], str(item["ends_held"]))
        for item in report["pauses"]
    ]
    return _listed("Pauses", ("from", "to", "by", "reason", "ends held"), rows)


def _incidents(report: Mapping[str, Any]) -> Block | None:
    rows = [
        (
            item["detected"],
            item["job"],
            _owner(item),
            item["rule"],
            ", ".join(f"{stage['stage']} {stage['at'][11:19]}" for stage in item["stages"]),
            "; ".join(part["measured"] for part in item["evidence"] if part["measured"]),
            item["closed_because"] or "open",
        )
        for item in report["incidents"]
    ]
    columns = ("detected", "job", "owner", "rule", "stages", "because", "closed")
    return _listed("Incidents", columns, rows)


def _reaction(report: Mapping[str, Any]) -> Block | None:
    rows = [
        (rule["rule"], stage, _span(found["median"]), _span(found["most"]))
        for rule in report["rules"]
        for stage, found in rule["seconds_from_idle"].items()
    ]
    columns = ("rule", "stage", "median", "most")
    return _listed("Time since the job was last at work", columns, rows)


def _notices(report: Mapping[str, Any]) -> Block | None:
    rows = [
        (item["owner"] or "not known", str(item["notices"]), f"{item['per_week']:g}")
        for item in report["notices"]
    ]
    return _listed("Notices", ("owner", "notices", "per week"), rows)


def _caps(report: Mapping[str, Any]) -> Block | None:
    rows = [
        (item["limit"], str(item["ticks"]), item["first"], str(item["most_held_at_once"]))
        for item in report["caps"]
    ]
    return _listed("Limits that held something", ("limit", "ticks", "first", "jobs at most"), rows)


def _stale(report: Mapping[str, Any]) -> Block | None:
    rows = [(item["at"], item["job"], item["rule"]) for item in report["stale"]]
    title = "Jobs that a rule without gates would have ended on data that had stopped"
    return _listed(title, ("at", "job", "rule"), rows)


def _difference(report: Mapping[str, Any]) -> Block | None:
    if report["difference"] is None:
        return None
    rows = [
        (
            word,
            kind.removesuffix("s"),
            row["job"],
            row["rule"],
            row.get("at") or row.get("detected") or "",
            row.get("before", ""),
        )
        for kind, found in report["difference"].items()
        for word, items in found.items()
        for row in items
    ]
    title = "Difference to the rules of --against"
    columns = ("", "what", "job", "rule", "now", "before")
    return _listed(title, columns, rows) or Block(title, "none")


def _sensitivity(report: Mapping[str, Any]) -> Block | None:
    rows = [
        (
            item["variant"],
            str(item["incidents"]),
            str(item["terminations"]),
            f"{item['gpu_hours_freed']:g}",
            _percent(item["regret_rate"]),
        )
        for item in report["sensitivity"]
    ]
    columns = ("variant", "incidents", "ended", "GPU-hours freed", "regret")
    return _listed("Sensitivity", columns, rows)


def _missing(report: Mapping[str, Any]) -> Block | None:
    rows = [(item["job"], ", ".join(item["missing"])) for item in report["metadata_missing"]]
    return _listed("Metadata missing", ("job", "not known"), rows)


def _listed(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Block | None:
    if not rows:
        return None
    text = f"the first {SHOWN_ROWS} of {len(rows)}" if len(rows) > SHOWN_ROWS else ""
    return Block(title, text, columns, tuple(rows[:SHOWN_ROWS]))


def _owner(item: Mapping[str, Any]) -> str:
    owner = item["owner"] or "not known"
    return f"{owner} ({item['team']})" if item["team"] else owner


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


def _span(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    parts = [f"{hours}h" if hours else "", f"{minutes}m" if minutes else ""]
    return "".join(parts) + (f"{left}s" if left and not hours else "") or "0s"
