"""docs/doctor.md tells of every finding, and every page that it sends people to is there."""

from __future__ import annotations

from pathlib import Path

from gpuwarden.doctors import doctor_reference
from gpuwarden.exporter import doctor_findings as of_nodes
from gpuwarden.ruleengine import doctor_findings as of_centres

ROOT = Path(__file__).parents[2]
KNOWN = (*of_nodes.KNOWN, *of_centres.KNOWN)


def test_the_page_is_that_of_the_checks() -> None:
    """Regenerate with `gpuwarden doctor reference > docs/doctor.md`."""
    assert (ROOT / "docs/doctor.md").read_text() == doctor_reference()


def test_every_finding_says_what_to_do() -> None:
    """Under a name of its own, with a page that is there."""
    assert len({known.id for known in KNOWN}) == len(KNOWN)
    for known in KNOWN:
        assert known.means.endswith(".")
        assert known.remedy.endswith((".", "?"))
        page = known.runbook.partition("#")[0]
        assert not page or (ROOT / page).is_file(), known.id
