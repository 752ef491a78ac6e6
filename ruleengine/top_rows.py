"""A job of the fleet's document as the cells of a row, and in words. Pure."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

from gpuwarden.ruleengine.top_layouts import Cell, Style, band_text, one_line, short_time
from gpuwarden.ruleengine.top_pictures import NO_ENGINE

if TYPE_CHECKING:
    from collections.abc import Mapping

GIB = 2.0**30
_STYLES = {
    "ok": Style.GOOD,
    "protected": Style.FAINT,
    "unknown": Style.FAINT,
    NO_ENGINE: Style.FAINT,
    "watching": Style.PLAIN,
    "detected": Style.WARNING,
    "notified": Style.WARNING,
    "refused": Style.WARNING,
}
"""Of the other states of a case: bad."""
_ACTS = {
    "log": "noted",
    "notify": "told",
    "checkpoint": "save",
    "yield": "leave",
    "requeue": "requeue",
    "terminate": "end",
    "close": "closes",
    "found": "counts",
    "answer": "waits",
    "held": "held",
}


def row_cells(job: Mapping[str, Any], passed: float, *, ascii_only: bool) -> dict[str, Cell]:
    """What stands in each column for a job.

    Args:
        job: of the fleet's document.
        passed: seconds since the document was made, for what is counted down.
        ascii_only: whether the terminal shows nothing else.
    """

    def clean(text: str) -> str:
        return one_line(text, ascii_only=ascii_only)

    old = Style.FAINT if not job["fresh"] else Style.PLAIN
    host = clean(_host(job["node"]))
    cards = ",".join(map(clean, job["gpus"]))
    if job["nodes"] > 1:
        host = f"{host}+{job['nodes'] - 1}"
    node = host if _address(host) else host.partition(".")[0]
    place = (f"{host}:{cards}", f"{node}:{cards}", f"{node}:{len(job['gpus'])}x")
    model = clean(job["model"]) or clean(job["framework"])
    batch = "" if job["batch"] is None else f" b{job['batch']}"
    size = "" if job["imgsz"] is None else f" {job['imgsz']}"
    return {
        "user": Cell((clean(job["user"]) or "?",), old),
        "team": Cell((clean(job["team"]),), old),
        "place": Cell(place, old),
        "job": Cell((clean(job["job_id"]),), old),
        "model": Cell((f"{model}{batch}{size}", f"{model}{batch}", model), old),
        "phase": Cell((clean(job["phase"] or ""),), old),
        "epoch": Cell((_epoch(job),), old),
        "left": Cell((short_time(job["time_left"]),), old),
        "utilization": _beside(job, "utilization", scale=0.01, unit="%", places=0),
        "memory": _beside(job, "memory_bytes", scale=GIB, unit="G", places=1),
        "rate": _beside(job, "throughput", scale=1.0, unit="", places=0),
        "verdict": Cell(
            tuple(map(clean, verdict_forms(job, passed))),
            _STYLES.get(job["verdict"]["state"], Style.BAD),
        ),
    }


def _host(node: str) -> str:
    head, colon, port = node.rpartition(":")
    return head if colon and port.isdigit() else node


def _address(host: str) -> bool:
    return host.replace(".", "").replace(":", "").isdigit() or host.startswith("[")


def _epoch(job: Mapping[str, Any]) -> str:
    if job["epoch"] is None:
        return ""
    now = int(job["epoch"]) + 1
    return f"{now}" if job["epochs"] is None else f"{now}/{int(job['epochs'])}"


def _beside(job: Mapping[str, Any], name: str, *, scale: float, unit: str, places: int) -> Cell:
    """What is, and what should be: `30.0/20.7-32.7G`; in less space a mark says how it differs."""
    value, band = job[name], job[f"{name.removesuffix('_bytes')}_expected"]
    if not job["fresh"] or value is None:
        # A card's use is always there to be measured; a rate only where a training tells it.
        return Cell(("-" if job["gpus"] and name != "throughput" else "",), Style.FAINT)
    text = f"{value / scale:.{places}f}"
    if band is None:
        return Cell((f"{text}{unit}",))
    mark = "-" if value < band["low"] * 0.95 else "+" if value > band["high"] * 1.05 else ""
    style = Style.WARNING if mark else Style.PLAIN
    expected = band_text(band, scale, places)
    near = f"{(band['low'] + band['high']) / 2 / scale:.{places}f}"
    forms = (f"{text}/{expected}{unit}", f"{text}/{near}{unit}", f"{text}{unit}{mark}")
    return Cell(forms, style)


def verdict_forms(job: Mapping[str, Any], passed: float) -> tuple[str, ...]:
    """The verdict in words, from the longest to the shortest."""
    verdict = job["verdict"]
    state, rule = verdict["state"], verdict["rule"]
    if not rule:
        return _plain_forms(job, state)
    more = f" +{verdict['others']}" if verdict["others"] else ""
    level = f" ({verdict['level']})" if verdict["level"] else ""
    coming = _coming(verdict, passed)
    mode = "" if verdict["mode"] in ("enforce", "") else f" [{verdict['mode']}]"
    return (
        f"{state} {rule}{level}{mode}: {coming}{more}"
        if coming
        else f"{state} {rule}{level}{mode}",
        f"{state} {rule}: {coming}{more}" if coming else f"{state} {rule}{more}",
        f"{rule}: {coming}" if coming else f"{state} {rule}",
        f"{state}: {coming}" if coming else state,
        state,
    )


def _plain_forms(job: Mapping[str, Any], state: str) -> tuple[str, ...]:
    verdict = job["verdict"]
    if state == NO_ENGINE:
        return ("no engine",)
    if not job["fresh"]:
        return (f"unknown: {job['not_fresh_reason'] or 'its node is dark'}", "dark")
    if state == "protected":
        return (f"protected: {verdict['protected']}", "protected")
    if state == "unknown":
        return (f"unknown: {', '.join(verdict['unknown'])}", "unknown")
    return (state,)


def _coming(verdict: Mapping[str, Any], passed: float) -> str:
    """What comes next and when, or what stands against it."""
    if verdict["kept_until"]:
        return f"kept to {local_time(verdict['kept_until'])}"
    if verdict["held"]:
        return f"held, {verdict['held'][0]['reason']}"
    found = verdict["end"] or verdict["next"]
    if found is None:
        return ""
    kind = found["kind"].removeprefix("would_")
    act = _ACTS.get(kind, kind)
    act = f"({act})" if kind != found["kind"] else act
    if found["in_seconds"] is None:
        return act
    left = found["in_seconds"] - passed
    return f"{act} in {short_time(left)}" if left >= 1 else f"{act} now"


def local_time(moment: str) -> str:
    """A time of the API in the zone of whoever looks: 14:32, with its day if not today.

    What no calendar here has stays as it was written.
    """
    try:
        then = dt.datetime.fromisoformat(moment).astimezone()
    except (ValueError, OverflowError):
        return moment
    today = dt.datetime.now(dt.UTC).astimezone().date()
    return f"{then:%H:%M}" if then.date() == today else f"{then:%d %b %H:%M}"


def row_words(job: Mapping[str, Any], passed: float) -> list[tuple[str, str]]:
    """Everything that the fleet's document says of a job, as (name, text)."""

    def band(name: str, scale: float, unit: str, places: int) -> str:
        expected = band_text(job[name], scale, places)
        return f", expected {expected} {unit}" if expected else ""

    use, memory, rate = job["utilization"], job["memory_bytes"], job["throughput"]
    found = [
        ("job", job["job_id"]),
        ("user", job["user"] or "not known"),
        ("team", job["team"]),
        ("node", f"{job['node']}, GPU {', '.join(job['gpus'])}"),
        ("cards", job["hardware"]),
        ("framework", job["framework"]),
        ("run", job["run_id"] or ""),
        ("model", job["model"]),
        ("batch", "" if job["batch"] is None else f"{job['batch']}, {job['imgsz']} px"),
        ("phase", job["phase"] or ""),
        ("epoch", _epoch(job)),
        ("time left", short_time(job["time_left"])),
        ("started", "" if job["started_at"] is None else local_time(job["started_at"])),
        ("utilization", "" if use is None else f"{use:.0%}"),
        ("memory", "" if memory is None else f"{memory / GIB:.1f} GiB"),
        ("throughput", "" if rate is None else f"{rate:.0f} img/s"),
        ("expected", job["expected_text"]),
        ("verdict", verdict_forms(job, passed)[0]),
    ]
    bands = {
        "utilization": band("utilization_expected", 0.01, "%", 0),
        "memory": band("memory_expected", GIB, "GiB", 1),
        "throughput": band("throughput_expected", 1.0, "img/s", 0),
    }
    return [(name, text + bands.get(name, "")) for name, text in found if text]
