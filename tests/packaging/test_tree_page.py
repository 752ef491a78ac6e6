"""docs/tree.md tells of every module of the engine, and of none that is gone."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_module_of_the_engine_is_on_the_map() -> None:
    """A new module has its place in the table, and each word of the table stands for something."""
    table = (ROOT / "docs/tree.md").read_text().partition("| about |")[2]
    words = re.findall(r"`([\w*/]+)`", re.sub(r"^\|[^|]*\|", "|", table, flags=re.MULTILINE))
    things = {
        path.stem if path.suffix else f"{path.name}/"
        for path in (ROOT / "ruleengine").iterdir()
        if not path.name.startswith("_") and path.suffix in ("", ".py")
    }
    told = things - {"alerting_rules/", "rules/"}  # files that are shipped, and no code
    assert {thing for thing in told if not any(fnmatchcase(thing, word) for word in words)} == set()
    assert [word for word in words if not any(fnmatchcase(thing, word) for thing in told)] == []
