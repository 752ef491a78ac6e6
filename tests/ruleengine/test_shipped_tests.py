"""The tests that are shipped with the default rules pass, and leave none of them untried."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gpuwarden.ruleengine.loading import check_rule_files
from gpuwarden.ruleengine.rehearsal_runs import result_lines, run_test

SHIPPED = sorted((Path(__file__).parents[2] / "ruleengine" / "rules").glob("*.yaml"))
CHECKED = check_rule_files(SHIPPED)


def test_every_shipped_test_passes() -> None:
    """As `gpuwarden rules test` on an operator's machine."""
    assert CHECKED.rules is not None
    results = [asyncio.run(run_test(placed, CHECKED.rules)) for placed in CHECKED.tests]
    assert results
    failed = [result for result in results if not result.passed]
    assert not failed, "\n".join(line for result in failed for line in result_lines(result))


def test_every_default_rule_has_one_that_breaks_it_and_one_that_does_not() -> None:
    """So that a change that finds nobody, or everybody, is seen."""
    assert CHECKED.rules is not None
    expected = {
        (item.rule, item.verdict) for placed in CHECKED.tests for item in placed.test.expect
    }
    wanted = {(rule.id, word) for rule in CHECKED.rules.rules for word in ("yes", "no")}
    assert wanted - expected == set()
