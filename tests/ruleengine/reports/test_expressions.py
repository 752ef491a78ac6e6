"""What is asked of Prometheus: always something that it understands, whoever is asked about."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import promql_parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.ruleengine.reports import expressions

if TYPE_CHECKING:
    from gpuwarden.ruleengine.reports.expressions import Measure


def found(**whose: object) -> dict[str, Measure]:
    """The measures of a team's people, or of everybody."""
    return expressions.measures(scrape=5.0, step=60.0, inside=59.999, **whose)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=12), max_size=4), st.text(min_size=1, max_size=12))
def test_names_never_break_a_query(users: list[str], team: str) -> None:
    """Quotes, backslashes, line breaks and signs of regular expressions are only themselves."""
    for measure in found(team=team, users=users).values():
        if measure.sampled:
            promql_parser.parse(measure.sampled)
        if measure.recorded:
            promql_parser.parse(measure.binned(899.999))


@pytest.mark.parametrize("user", ["a.b", r"EXAMPLE\ana", "ana@example.org", "x|y", "$", "é+ü"])
def test_a_name_matches_itself_alone(user: str) -> None:
    """As RE2 reads it; a dot is no sign for anything."""
    selector = re.search(r'user=~"((?:[^"\\]|\\.)*)"', found(users=[user])["held"].sampled)
    assert selector is not None
    pattern = selector[1].replace('\\"', '"').replace("\\\\", "\\")

    assert re.fullmatch(pattern, user)
    assert not re.fullmatch(pattern, user.replace(".", "x") + "y")
    # RE2 refuses every other escape
    assert "\\" not in re.sub(r"\\[\\.+*?()|\[\]{}^$]", "", pattern)


def test_a_team_without_people_matches_nobody() -> None:
    """And not everybody."""
    assert 'user=""' in found(users=[])["held"].sampled
