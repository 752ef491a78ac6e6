"""The table of `gpuwarden top`: it fits every terminal, whatever names users have chosen."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.ruleengine.top_frames import frame, page, rows_of
from gpuwarden.ruleengine.top_layouts import (
    COLUMNS,
    Style,
    fitted,
    one_line,
    short_time,
    span_texts,
    table,
    width_of,
    wrapped,
)
from gpuwarden.ruleengine.top_pictures import NO_ENGINE, Picture
from gpuwarden.ruleengine.top_rows import row_cells
from gpuwarden.ruleengine.top_views import Mode, View

HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07",
    "a\u202egnp.exe",
    "\u05d0\u05d1\u05d2 123",
    "\u0627\u0644\u0639\u0631\u0628",
    "训练任务-八",
    "\uff46\uff55\uff4c\uff4c",
    "e\u0301\u0301\u0301\u0327" * 20,
    "👩\u200d👩\u200d👧\u200d👦🇩🇪\ufe0f",
    "\u1100\u1161\u11a8",
    "two\nlines\r\tand a tab",
    "\u2028\u2029\x85\x9b31m",
    "[red]markup[/red] :smile:",
    "\ud800",
    "x" * 500,
    "",
)


def a_verdict(**changes: Any) -> dict[str, Any]:
    """A verdict as the API has it."""
    plain = {"state": "ok", "rule": "", "mode": "", "level": "", "next": None, "end": None}
    rest = {"kept_until": None, "held": [], "protected": "", "unknown": [], "others": 0}
    return {**plain, **rest, **changes}


def a_job(**changes: Any) -> dict[str, Any]:
    """A row of the fleet's document."""
    return {
        "job_id": "proc-5f2e91ab-40185-8816555",
        "user": "alice",
        "team": "vision",
        "node": "gpu06.example.org:9835",
        "nodes": 1,
        "framework": "ultralytics",
        "interactive": False,
        "gpus": ["0", "1"],
        "hardware": "NVIDIA A100-SXM4-40GB",
        "fresh": True,
        "not_fresh_reason": "",
        "started_at": "2027-01-15T05:13:20.000Z",
        "run_id": "night-run",
        "model": "yolov8m",
        "batch": 64,
        "imgsz": 640,
        "phase": "train",
        "epoch": 12.0,
        "epochs": 100.0,
        "time_left": 7980.0,
        "utilization": 0.31,
        "utilization_expected": {"low": 0.82, "high": 0.82},
        "memory_bytes": 30 * 2.0**30,
        "memory_total_bytes": 40 * 2.0**30,
        "memory_expected": {"low": 9 * 2.0**30, "high": 12 * 2.0**30},
        "throughput": 78.0,
        "throughput_expected": {"low": 120.0, "high": 200.0},
        "expected_text": "yolov8m, batch 64",
        "verdict": a_verdict(),
        **changes,
    }


def a_picture(*jobs: dict[str, Any], taken: float = 100.0, **changes: Any) -> Picture:
    """An engine's answer."""
    document = {
        "schema": "gpuwarden.fleet/v1",
        "time": "2027-01-15T08:03:30.000Z",
        "age": 2.0,
        "tick": 15.0,
        "figures_at": None,
        "problem": "",
        "nodes": {"expected": 2, "lit": 2},
        "cards": 8,
        "held": 4,
        "halted": [],
        "sort": "verdict",
        "total": len(jobs),
        "broken": 0,
        "offset": 0,
        "jobs": list(jobs),
    }
    return Picture("engine", ("http://engine:9837",), {**document, **changes}, taken)


COMING = {
    "kind": "terminate",
    "what": "the job is ended at the earliest",
    "in_seconds": 345.0,
    "at": "2027-01-15T08:09:15.000Z",
    "if": "if it stays so",
    "stage": "severe-terminate",
    "level": "severe",
}


def texts(
    width: int, *jobs: dict[str, Any], passed: float = 0.0, ascii_only: bool = False
) -> list[str]:
    """The lines of a table."""
    cells = [row_cells(job, passed, ascii_only=ascii_only) for job in jobs]
    lines = table(cells, width, chosen=None, ascii_only=ascii_only)
    return ["".join(text for text, _ in line) for line in lines]


@pytest.mark.parametrize("width", range(40, 201))
def test_every_width_is_filled_and_never_exceeded(width: int) -> None:
    """User, node, use and verdict are always there; every line is exactly as wide as the screen."""
    jobs = [a_job(), a_job(user="b", node="10.0.0.1:9835", gpus=["0"], verdict=a_verdict())]
    lines = texts(width, *jobs)
    assert [width_of(line) for line in lines] == [width] * 3
    for title in ("USER", "NODE:GPU", "UTIL", "VERDICT"):
        assert title in lines[0]
    assert all("ok" in line for line in lines[1:])


def test_eighty_columns_say_what_should_be_and_what_comes() -> None:
    """A case with its rule and the time of the end; a mark where use is outside its band."""
    case = a_verdict(state="notified", rule="idle-held", mode="enforce", level="moderate")
    (_, line) = texts(80, a_job(verdict={**case, "next": COMING, "end": COMING}))
    assert "idle-held: end in 5m45s" in line
    assert "30.0G+" in line
    assert "13/100" in line
    assert "2h13m" in line
    assert "31%" in line


def test_a_wide_screen_shows_everything() -> None:
    """All columns, and expectations as bands."""
    case = a_verdict(state="notified", rule="idle-held", mode="enforce", level="moderate", others=2)
    (titles, line) = texts(230, a_job(verdict={**case, "next": COMING, "end": COMING}))
    assert titles.split() == [column.title for column in COLUMNS]
    for part in (
        "gpu06.example.org:0,1",
        "proc-5f2e91ab-40185-8816555",
        "yolov8m b64 640",
        "31/82%",
        "30.0/9.0-12.0G",
        "78/120-200",
        "notified idle-held (moderate): end in 5m45s +2",
    ):
        assert part in line


def test_what_comes_is_counted_down_between_answers() -> None:
    """And a time that is over is now, not less than nothing."""
    case = a_verdict(state="notified", rule="idle-held", mode="enforce", next=COMING, end=COMING)
    assert "end in 45s" in texts(120, a_job(verdict=case), passed=300.0)[1]
    assert "end now" in texts(120, a_job(verdict=case), passed=900.0)[1]


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (a_verdict(), "ok"),
        (a_verdict(state="protected", protected="whitelist: shared service"), "protected: whit"),
        (a_verdict(state="unknown", unknown=["idle", "memory-hog"]), "unknown: idle, memory-hog"),
        (a_verdict(state=NO_ENGINE), "no engine"),
        (
            a_verdict(
                state="due",
                rule="idle",
                mode="enforce",
                held=[{"reason": "kill_switch", "sentence": "the kill switch is on"}],
            ),
            "due idle: held, kill_switch",
        ),
        (
            a_verdict(
                state="notified",
                rule="idle",
                mode="enforce",
                end=COMING,
                kept_until="2020-01-15T10:00:00.000Z",
            ),
            "notified idle: kept to 15 Jan",
        ),
        (
            a_verdict(
                state="detected", rule="idle", mode="warn", next={**COMING, "kind": "would_notify"}
            ),
            "detected idle [warn]: (told) in 5m45s",
        ),
    ],
)
def test_every_verdict_has_its_words(verdict: dict[str, Any], words: str) -> None:
    """Kept, held, protected, unknown, only written down: none looks like another."""
    assert words in texts(200, a_job(verdict=verdict))[1]


def test_a_dark_node_is_no_zero() -> None:
    """Its jobs' last figures are not shown as if they were measured."""
    dark = a_job(
        fresh=False, not_fresh_reason="its node is dark", verdict=a_verdict(state="unknown")
    )
    (_, line) = texts(140, dark)
    assert "unknown: its node is dark" in line
    assert "31%" not in line
    cells = row_cells(dark, 0.0, ascii_only=False)
    assert {cells[name].style for name in ("user", "utilization", "verdict")} == {Style.FAINT}


NAMES = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=60))


@settings(max_examples=150, deadline=None)
@given(NAMES, NAMES, NAMES, st.integers(1, 220), st.booleans())
def test_no_name_leaves_its_column(
    one: str, two: str, three: str, width: int, ascii_only: bool
) -> None:
    """Whatever a user calls things: each line keeps its width, and the terminal obeys nothing."""
    job = a_job(user=one, node=two, job_id=three, model=one, team=two, phase=three)
    job["verdict"] = a_verdict(state="unknown", unknown=[three])
    for line in texts(width, job, a_job(), ascii_only=ascii_only):
        assert width_of(line) == width
        assert line.isascii() or not ascii_only
        for mark in line:
            assert unicodedata.category(mark) not in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
            assert unicodedata.bidirectional(mark) not in {"R", "AL", "AN"}
            assert unicodedata.combining(mark) == 0


@settings(max_examples=150, deadline=None)
@given(NAMES, st.integers(20, 120), st.integers(1, 50), st.sampled_from(Mode), st.booleans())
def test_no_screen_is_exceeded(
    name: str, width: int, height: int, mode: Mode, ascii_only: bool
) -> None:
    """Rows, help, details and the prompt have as many lines as the screen, none too wide."""
    picture = a_picture(*[a_job(user=name, job_id=f"{name}{number}") for number in range(60)])
    view = View(chosen_id=picture.document["jobs"][0]["job_id"], mode=mode, typed=name, scroll=3)
    lines = frame(view, picture, size=(width, height), now=101.0, ascii_only=ascii_only)
    assert len(lines) == height
    for line in lines:
        text = "".join(part for part, _ in line)
        assert width_of(text) <= width
        assert text.isprintable()
        assert text.isascii() or not ascii_only


@given(NAMES, st.integers(1, 80))
def test_wrapped_lines_lose_nothing(name: str, width: int) -> None:
    """Broken between words, or within one that is too long."""
    lines = wrapped(name, width)
    whole = one_line(name)
    if width > 1:
        assert all(width_of(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == whole.replace(" ", "")


def test_a_picture_that_is_old_is_marked_so() -> None:
    """With its age, first on the second line; a new one is not."""
    picture = a_picture(a_job())
    lines = span_texts(frame(View(), picture, size=(100, 20), now=105.0))
    assert lines[1].startswith("sort verdict")
    later = frame(View(), picture, size=(100, 20), now=170.0)
    assert span_texts(later)[1].startswith("OLD, 1m12s: the engine does not tick")
    assert later[1][0][1] is Style.BAD
    away = Picture("engine", ("http://e:1",), picture.document, 100.0, "the engine does not answer")
    line = span_texts(frame(View(), away, size=(100, 20), now=103.0))[1]
    assert line.startswith("OLD, 5s: the engine does not answer")


def test_before_the_first_answer_it_says_what_it_waits_for() -> None:
    """And why there is none."""
    assert "waiting" in span_texts(frame(View(), None, size=(80, 24), now=1.0))[1]
    text = "\n".join(span_texts(frame(View(), None, size=(40, 24), now=1.0, problem="x " * 60)))
    assert text.count("x") == 60


def test_on_paper_every_row_is_shown_and_what_was_left_out_is_said() -> None:
    """With what holds everything back above the table."""
    block = {"reason": "kill_switch", "sentence": "the kill switch is on"}
    picture = a_picture(a_job(), a_job(), total=7, halted=[block])
    lines = span_texts(page(picture, width=100, now=100.0))
    assert "no job is ended now: the kill switch is on" in lines
    assert lines[-1] == "5 more: --limit, or a filter"
    assert sum("alice" in line for line in lines) == 2


def test_a_screen_has_room_for_a_row_however_small() -> None:
    """It asks for no less than one."""
    assert [rows_of(height) for height in (1, 5, 6, 24)] == [1, 1, 1, 19]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, ""),
        (-3.0, "0s"),
        (45.0, "45s"),
        (345.0, "5m45s"),
        (7980.0, "2h13m"),
        (3 * 86400.0, "3d"),
        (1e12, ">999d"),
    ],
)
def test_durations_are_short(seconds: float | None, words: str) -> None:
    """Two units at most."""
    assert short_time(seconds) == words


def test_cut_texts_say_that_they_were_cut() -> None:
    """At their end, or at their beginning where the end tells more."""
    assert fitted("gpu06.example.org", 8) == "gpu06.e…"
    assert fitted("proc-5f2e91ab-40185", 8, tail=True) == "…b-40185"
    assert fitted("gpu06.example.org", 8, ascii_only=True) == "gpu06..."[:6] + ".."
    assert fitted("训练任务", 5) == "训练…"
    assert fitted("训练任务", 4, right=True) == " 训…"
