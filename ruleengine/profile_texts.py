"""Learnt profiles as YAML for a rule file, as a table, as JSON; and put into an existing file.

What comes from Prometheus was written by users: every text is quoted before it becomes YAML.
"""

from __future__ import annotations

import datetime as dt
import difflib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from gpuwarden import quantities
from gpuwarden.errors import InvalidInput
from gpuwarden.quantities import Unit
from gpuwarden.ruleengine.model import Profile
from gpuwarden.ruleengine.profile_fits import SIGNALS
from gpuwarden.yaml_files import Node, load_located

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from gpuwarden.ruleengine.profile_fits import Fit, Fitted, Kind, Left

SCHEMA = "gpuwarden.profiles/v1"
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_AMOUNT = re.compile(r"[0-9.]+( img/s|[KMGT]?i?B|%)")
_KEYS = ("model", "batch", "imgsz", "hardware", "amp", "gpus")


def profile_fields(fit: Fit) -> dict[str, Any]:
    """The fields of the profile of a fit, as a rule file has them."""
    kind = fit.kind
    fields: dict[str, Any] = {
        "model": kind.model,
        "batch": kind.batch,
        "imgsz": kind.imgsz,
        "hardware": kind.hardware,
        "amp": kind.amp,
    }
    if kind.gpus > 1:
        fields["gpus"] = kind.gpus
    for signal in ("gpu_memory", "gpu_utilization", "throughput"):
        if signal in fit.values:
            fields[signal] = _amount(signal, fit.values[signal].value)
    return fields | {"tolerance": f"{fit.tolerance:.0%}"}


def usable(fit: Fit) -> str:
    """Why a fit cannot be a profile of a rule file, or an empty string."""
    if fit.too_little:
        return fit.too_little
    fields = profile_fields(fit)
    try:
        Profile.model_validate(fields)
    except ValidationError as error:
        return f"not a profile: {error.errors()[0]['msg']}"
    read = load_located(_flow(fields)).root
    if read is None or read.data() != fields:
        return "not a profile: its names cannot be written in YAML"
    return ""


def _amount(signal: str, value: float) -> str:
    """A value as rule files have it, such as `10.5GiB`."""
    text = quantities.render(value, SIGNALS[signal])
    return text if SIGNALS[signal] is Unit.IMAGES_PER_SECOND else text.replace(" ", "")


def _flow(fields: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{name}: {_scalar(value)}" for name, value in fields.items()) + "}"


def _scalar(value: object) -> str:
    """A value in YAML. Numbers of a unit are plain; texts of users are quoted as JSON."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and (_PLAIN.fullmatch(value) or _AMOUNT.fullmatch(value)):
        # A plain word such as `no` or `null` would be read as something else.
        return value if value.lower() not in _WORDS else json.dumps(value)
    return json.dumps(value, ensure_ascii=False)


_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})


def entry_lines(fit: Fit) -> list[str]:
    """A profile with the lines that say where it comes from."""
    trained = sum(run.trained for run in fit.runs) / 3600
    first, last = (min(r.begin for r in fit.runs), max(r.end for r in fit.runs))
    people = "1 person" if fit.users == 1 else f"{fit.users} people"
    source = f"{len(fit.runs)} runs of {people}, {_day(first)} to {_day(last)}"
    lines = [
        f"# Learnt from {source}, {trained:.1f} h of training.",
        f"# {'; '.join(_measured(name, item) for name, item in fit.values.items())}.",
    ]
    if fit.left:
        runs = "1 run was" if len(fit.left) == 1 else f"{len(fit.left)} runs were"
        lines.append(f"# {runs} left out.")
    lines += [
        f"# No {signal} was learnt of these runs: {why}." for signal, why in fit.disagreed.items()
    ]
    return [*lines, f"- {_flow(profile_fields(fit))}"]


def _measured(signal: str, item: Fitted) -> str:
    low, high = (quantities.render(end, SIGNALS[signal]) for end in (item.low, item.high))
    return f"{signal} {low} to {high}"


def _day(moment: float) -> str:
    return f"{dt.datetime.fromtimestamp(moment, tz=dt.UTC):%Y-%m-%d}"


def yaml_text(fits: Iterable[Fit], *, told: str) -> str:
    """A rule file of the profiles; `told` says in a line where they come from."""
    lines = [f"# {' '.join(told.split())}", "", "version: 1", "", "profiles:"]
    for fit in fits:
        lines += ["", *entry_lines(fit)]
    return "\n".join(lines) + "\n"


def document(fits: Sequence[Fit], refused: dict[str, str]) -> dict[str, Any]:
    """Everything that was found, for programs."""
    return {
        "schema": SCHEMA,
        "profiles": [
            {
                "profile": profile_fields(fit),
                "runs": len(fit.runs),
                "users": fit.users,
                "begin": min(run.begin for run in fit.runs),
                "end": max(run.end for run in fit.runs),
                "trained_seconds": round(sum(run.trained for run in fit.runs), 3),
                "signals": {
                    name: {
                        "median": item.value,
                        "mad": item.mad,
                        "low": item.low,
                        "high": item.high,
                        "runs": item.runs,
                    }
                    for name, item in fit.values.items()
                },
                "jobs": [job for run in fit.runs for job in run.jobs],
                "disagreed": dict(fit.disagreed),
                "left_out": [_left(item) for item in fit.left],
            }
            for fit in fits
            if not usable(fit)
        ],
        "too_little": [
            {
                "kind": kind_words(fit.kind),
                "why": usable(fit),
                "left_out": [_left(item) for item in fit.left],
            }
            for fit in fits
            if usable(fit)
        ],
        "not_known": refused,
    }


def _left(item: Left) -> dict[str, Any]:
    return {"run_id": item.run.run_id, "jobs": list(item.run.jobs), "why": item.why}


def kind_words(kind: Kind) -> str:
    """Such as `yolov8m, batch 64, 640 px, AMP on 2 x NVIDIA A100-SXM4-40GB`."""
    cards = f"{kind.gpus} x " if kind.gpus > 1 else ""
    mixed = "AMP" if kind.amp else "no AMP"
    return f"{kind.model}, batch {kind.batch}, {kind.imgsz} px, {mixed} on {cards}{kind.hardware}"


def merged(path: Path, text: str, fits: Sequence[Fit]) -> str:
    """The text of a rule file with these profiles in it, all else as it is.

    A profile of the same kind is replaced by the learnt one, with the comment lines right above it
    only where they are of an earlier learning; others are added after the last one.

    Args:
        path: of the file, for messages.
        text: its content.
        fits: that are usable.

    Raises:
        InvalidInput: the file is not one that can be added to.
    """
    places = _places(path, text)
    lines, added = text.split("\n"), list[str]()
    changes: list[tuple[int, int, list[str]]] = []
    for fit in fits:
        place = places.get(_key(profile_fields(fit)))
        if place is None:
            added += ["", *entry_lines(fit)]
            continue
        begin = place.begin
        while begin > 0 and _OURS.match(lines[begin - 1]):
            begin -= 1
        changes.append((begin, place.end, _indented(entry_lines(fit), place.indent)))
    if added and places:
        last = max(places.values(), key=lambda place: place.end)
        changes.append((last.end, last.end, _indented(added, last.indent)))
    for begin, end, new in sorted(changes, key=lambda change: change[:2], reverse=True):
        lines[begin:end] = new
    if added and not places:
        while lines and not lines[-1].strip():
            lines.pop()
        lines += ["", "profiles:", *added, ""]
    result = "\n".join(lines)
    _prove(path, text, result, fits)
    return result


def _prove(path: Path, old: str, new: str, fits: Sequence[Fit]) -> None:
    """See that the new text says what the old one did, but for these profiles.

    Raises:
        InvalidInput: it does not, whatever the reason.
    """
    before, after = (load_located(text).root for text in (old, new))
    was = before.data() if before is not None else None
    now = after.data() if after is not None else None
    if isinstance(was, dict) and isinstance(now, dict):
        learnt = [profile_fields(fit) for fit in fits]
        keys = {_key(fields) for fields in learnt}
        others = [item for item in was.pop("profiles", None) or () if _key(item) not in keys]
        found = now.pop("profiles", None) or []
        if was == now and _sorted(found) == _sorted([*others, *learnt]):
            return
    raise InvalidInput(f"{path} cannot be added to without changing what else it says")


def _sorted(profiles: Sequence[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(item, sort_keys=True) for item in profiles)


_OURS = re.compile(
    r"\s*# (Learnt from [0-9]+ runs of |1 run was left|[0-9]+ runs were left"
    r"|(throughput|gpu_memory|gpu_utilization) .+ to |No [a-z_]+ was learnt of these runs: )"
)


@dataclass(frozen=True, slots=True)
class _Place:
    """The lines of a list's item, from and before (counted from 0), and how far it is indented."""

    begin: int
    end: int
    indent: str


def _indented(lines: Sequence[str], indent: str) -> list[str]:
    return [indent + line if line else line for line in lines]


def _key(fields: dict[str, Any]) -> tuple[object, ...]:
    return tuple(fields.get(name, 1 if name == "gpus" else None) for name in _KEYS)


def _places(path: Path, text: str) -> dict[tuple[object, ...], _Place]:
    """Kind of a profile -> its place in a file.

    Raises:
        InvalidInput: it is no rule file, or its profiles are written in one bracket.
    """
    found = load_located(text)
    if not isinstance(found.root, Node) or not isinstance(found.root.value, dict):
        raise InvalidInput(f"{path} is not a rule file; see: gpuwarden rules check {path}")
    given = found.root.value.get("profiles")
    if given is None:
        return {}
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    sequence = next(value for key, value in root.value if key.value == "profiles")
    if not isinstance(sequence, yaml.SequenceNode) or sequence.flow_style or not sequence.value:
        raise InvalidInput(
            f"{path}: profiles is not a list with a line for each: write `profiles:` and below it "
            "one `- {...}` per line, or remove it"
        )
    lines, places = text.split("\n"), {}
    for item, node in zip(given.items(), sequence.value, strict=True):
        begin = node.start_mark.line
        while not lines[begin].lstrip().startswith("-"):
            begin -= 1
        indent = lines[begin][: len(lines[begin]) - len(lines[begin].lstrip())]
        data = item.data()
        key = _key(data) if isinstance(data, dict) else (begin,)
        places[key] = _Place(begin, _last_line(node) + 1, indent)
    return places


def _last_line(node: yaml.Node) -> int:
    """The line in which a node really ends; a block's mark stands behind the comments after it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _last_line(last[1] if isinstance(node, yaml.MappingNode) else last)
    end: int = node.end_mark.line
    return end


def difference(old: str, new: str, path: Path) -> str:
    """A unified diff."""
    return "".join(
        difflib.unified_diff(
            old.splitlines(keepends=True),
            new.splitlines(keepends=True),
            f"a/{path.name}",
            f"b/{path.name}",
        )
    )
