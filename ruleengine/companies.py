"""Jobs that may end together: a platform's controller or batch is often that of several.

What ends with a job is ended by the same decision, without one of its own. So it must be due by the
same stage, and nothing may speak against its own end: not in the tick, nor in the last look.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from gpuwarden.ruleengine import cases
from gpuwarden.ruleengine.guards import Blocked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpuwarden.ruleengine.enforcement import CaseTable
    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.ruleengine.records import StoredCase
    from gpuwarden.ruleengine.trials import Trials


class Company:
    """Cases by the stage that may be done to their jobs now.

    Args:
        free: cases against whose ends nothing speaks, with the name of the stage.
    """

    def __init__(self, free: Iterable[tuple[StoredCase, str]]) -> None:
        self._cases: defaultdict[tuple[str, str], list[StoredCase]] = defaultdict(list)
        for stored, key in free:
            self._cases[stored.case.rule_id, key].append(stored)

    def jobs(self, stored: StoredCase, key: str) -> frozenset[str]:
        """Ids of the jobs to which the same stage of the same rule may be done, a case's included.

        Args:
            stored: the case.
            key: name of the stage.
        """
        return frozenset(item.case.job_id for item in self._cases[stored.case.rule_id, key])

    def others(self, stored: StoredCase, key: str) -> list[StoredCase]:
        """Their cases, without the case itself.

        Args:
            stored: the case.
            key: name of the stage.
        """
        return [item for item in self._cases[stored.case.rule_id, key] if item.id != stored.id]


def spared(
    others: Iterable[StoredCase],
    key: str,
    *,
    table: CaseTable,
    trials: Trials,
    objections: Callable[[StoredCase, Rule], list[Blocked]],
) -> list[Blocked]:
    """Why a job must not end now, because of what may end with it; empty if nothing speaks.

    Which of the others a platform means is its own knowledge: one that is spared holds all.

    Args:
        others: cases that the platform was told it may end too.
        key: name of the stage.
        table: the cases as they are now.
        trials: rules as they hold for each case now.
        objections: every reason against a case's end, on fresh facts.
    """
    for other in others:
        stored = table.get(other.case.rule_id, other.case.job_id)
        rule = None if stored is None else trials.rule_for(stored.case)
        why = "it is not due any more"
        if stored is not None and rule is not None:
            following = cases.next_stage(stored.case, rule)
            if following is not None and following[0] == key:
                why = next((block.sentence for block in objections(stored, rule)), "")
        if why:
            text = f"{other.case.job_id} may end together with it, and must not: {why}"
            return [Blocked("not_all_offenders", text)]
    return []
