"""The forms of a report: a page that stands alone, a table that no spreadsheet computes, a PDF."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.dom.minidom

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ruleengine.reports.stocks import gathered, told

from gpuwarden.ruleengine.reports import drawings
from gpuwarden.ruleengine.reports.cli import FORMATS, rendered
from gpuwarden.ruleengine.reports.pages import page
from gpuwarden.ruleengine.reports.pdfs import resolved
from gpuwarden.ruleengine.reports.readers import Reader
from gpuwarden.ruleengine.reports.tables import COLUMNS, safe, table

HOSTILE = '<script>alert("x")</script>&\'=1+1'
FORMULAS = ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1", "\ufeff=1")


def hostile() -> dict[str, object]:
    """A report on somebody whose name and team are meant to be run."""
    held = {HOSTILE: [24.0] * 7, "=cmd|' /C calc'!A0": [1.0] * 7}
    return told(gathered(held, held, cost={HOSTILE: 3.0}), Reader({HOSTILE: "<b>team</b>"}))


def test_the_page_runs_nothing_and_loads_nothing() -> None:
    """No script, no address that a browser would fetch, and nothing of a name is markup."""
    text = page(hostile(), engine="https://engine.example")

    assert "<script" not in text
    assert "<b>team" not in text
    assert "&lt;b&gt;team&lt;/b&gt;" in text
    assert re.findall(r"<(?:link|img|iframe|object|base)\b", text) == []
    assert re.findall(r"(?:src|@import|url\()\s*[=(]?\s*[\"']?(?!#)\w+:", text) == []
    assert "default-src 'none'" in text


def test_an_address_of_the_engine_that_is_none_is_no_link() -> None:
    """Only web addresses become links."""
    assert "javascript:" not in page(hostile(), engine="javascript:alert(1)")


def test_every_plot_has_words_and_a_table() -> None:
    """Who cannot see a plot hears what is in it, and finds each figure below."""
    text = page(told(gathered({"ana": [24.0] * 7})))

    plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(plots) == 5
    for plot in plots:
        label = re.search(r'role="img" aria-label="([^"]{20,})"', plot)
        assert label is not None
        xml.dom.minidom.parseString(plot)  # noqa: S318 - our own text
    assert text.count("<table") >= 5
    for note in re.findall(r'href="#(note-[a-z_]+)"', text):
        assert f'id="{note}"' in text


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.one_of(st.none(), st.floats(0, 1)),
        min_size=1,
        max_size=100,
    )
)
def test_a_line_never_crosses_a_gap(heights: list[float | None]) -> None:
    """Each stretch of what is known is a line of its own, and each gap is hatched."""
    pieces = [
        {"p10": height, "p50": height, "p90": height, "label": str(number), "from": "x"}
        for number, height in enumerate(heights)
    ]

    drawn = str(drawings.band(pieces))

    runs = "".join("x" if height is not None else " " for height in heights).split()
    assert drawn.count('class="line"') == len(runs)
    assert drawn.count('class="gap"') == heights.count(None)


def test_the_table_can_be_read_back() -> None:
    """Every row has the columns of the header; figures are numbers, and their units are named."""
    found = told(gathered({"ana": [24.0] * 7}, {"ana": [6.0] * 7}))
    rows = list(csv.DictReader(io.StringIO(table(found))))

    assert list(rows[0]) == list(COLUMNS)
    (held,) = (
        row
        for row in rows
        if (row["section"], row["user"], row["figure"]) == ("people", "ana", "held_hours")
    )
    assert (float(held["value"]), held["unit"], held["team"]) == (168.0, "card-hours", "vision")
    days = [row for row in rows if row["section"] == "days" and row["figure"] == "idle_hours"]
    assert sum(float(row["value"]) for row in days) == 42.0


@pytest.mark.parametrize("text", FORMULAS)
def test_no_cell_is_a_formula(text: str) -> None:
    """Whatever a user is called, a spreadsheet shows it and does not compute it."""
    assert str(safe(text)).startswith("'")


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=30))
def test_a_cell_that_is_harmless_stays_as_it_is(text: str) -> None:
    """Only a leading mark of a formula is guarded, and the text is kept behind the guard."""
    assert safe(text) in (text, f"'{text}")
    assert safe(-1.5) == -1.5


def test_the_whole_table_of_hostile_names_holds_no_formula() -> None:
    """Of no column, as a spreadsheet would split it."""
    for row in csv.reader(io.StringIO(table(hostile()))):
        for cell in row:
            is_number = re.fullmatch(r"-?[0-9.e+-]+", cell) is not None
            assert is_number or not cell.startswith(("=", "+", "-", "@", "\t", "\r"))


def test_the_plots_of_a_pdf_have_their_colours() -> None:
    """Each plot brings its rules along, and no colour is left to be looked up."""
    text = resolved(page(told(gathered({"ana": [24.0] * 7}))))

    assert "var(--" not in text
    plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(plots) == 5
    assert all(".bar0 { fill: #c5d9f1; }" in plot for plot in plots)


@pytest.mark.parametrize("form", FORMATS)
def test_every_form_is_made_of_the_same_document(form: str) -> None:
    """Page, document, table and PDF of a report with a gap."""
    found = told(gathered({"ana": [24.0, 0.0, 12.0]}, days=3, answered=[1.0, 0.0, 0.5]))

    made = rendered(found, form)

    begins = {"html": b"<!doctype html>", "json": b"{\n", "csv": b"section,", "pdf": b"%PDF-"}
    assert made.startswith(begins[form])
    if form == "json":
        assert json.loads(made)["schema"] == "gpuwarden.report/v1"
