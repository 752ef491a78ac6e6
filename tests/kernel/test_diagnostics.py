"""Findings show the place and the remedy."""

import json

from gpuwarden.diagnostics import (
    Diagnostic,
    Severity,
    Span,
    did_you_mean,
    render_json,
    render_text,
)

SOURCE = "rules:\n- id: idle\n\taction: kill\n"
KILL = Diagnostic(
    "GW104",
    Severity.ERROR,
    Span("idle.yaml", 3, 10, 14),
    'rules[0].action: "kill" is not an action',
    'did you mean "terminate"?',
)


def test_the_caret_stands_under_the_word_even_after_a_tab() -> None:
    """A tab before the word is repeated under it, so that both lines align."""
    head, line, caret = render_text([KILL], {"idle.yaml": SOURCE}).splitlines()
    assert (
        head == 'idle.yaml:3:10: error[GW104]: rules[0].action: "kill" is not an action; '
        'did you mean "terminate"?'
    )
    assert line == "  3 | \taction: kill"
    assert caret == "    | \t        ^^^^"


def test_findings_are_sorted_by_position() -> None:
    """Whatever the order of discovery, a person reads from top to bottom."""
    first = Diagnostic("GW101", Severity.ERROR, Span("idle.yaml", 1, 1), "first")
    text = render_text([KILL, first], {})
    assert text.splitlines()[0].startswith("idle.yaml:1:1")
    codes = [item["code"] for item in json.loads(render_json([KILL, first]))["diagnostics"]]
    assert codes == ["GW101", "GW104"]


def test_a_place_outside_the_source_shows_no_line() -> None:
    """A file that changed since it was read does not break the report."""
    assert render_text([KILL], {"idle.yaml": ""}).count("\n") == 0


def test_only_a_close_word_is_suggested() -> None:
    """A suggestion must help; a wild guess does not."""
    assert did_you_mean("trehshold", ["threshold", "window"]) == 'did you mean "threshold"?'
    assert did_you_mean("colour", ["threshold", "window"]) is None
