"""docs/tree.md tells of every module of the engine and the scheduler, and of none that is gone."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "folder",
    ["ruleengine", "scheduling", "scheduling/local", "scheduling/slurm", "scheduling/kueue"],
)
def test_every_module_is_on_the_map(folder: str) -> None:
    """A new module has its place in the table, and each word of the table stands for something."""
    page = (ROOT / "docs/tree.md").read_text()
    section = re.split(rf"^##+ .*`{folder}/`$", page, flags=re.MULTILINE)[1]
    table = re.split(r"^##", section, flags=re.MULTILINE)[0].partition("| about |")[2]
    words = re.findall(r"`([\w*/]+)`", re.sub(r"^\|[^|]*\|", "|", table, flags=re.MULTILINE))
    things = {
        path.stem if path.suffix else f"{path.name}/"
        for path in (ROOT / folder).iterdir()
        if not path.name.startswith("_") and path.suffix in ("", ".py")
    }
    told = things - {"alerting_rules/", "rules/"}  # files that are shipped, and no code
    assert {thing for thing in told if not any(fnmatchcase(thing, word) for word in words)} == set()
    assert [word for word in words if not any(fnmatchcase(thing, word) for thing in told)] == []
