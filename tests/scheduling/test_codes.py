"""Codes that people look up are written in one way, whichever engine tells them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuwarden.scheduling.preemption_terms import Code

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"([a-z]+(_[a-z0-9]+)*)?")
"""An empty one is none: there is nothing to wait for."""
CODED = frozenset({"Problem", "Fault", "Wait", "RefusedAction", "Refusal", "Objection"})
"""What takes a code first; `Refusal` after its status."""


def codes_of(tree: ast.AST) -> Iterator[str]:
    """Texts that stand where a code does: first in a call of CODED, or of a pair with words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else None
            name = node.func.id if isinstance(node.func, ast.Name) else name
            taken = node.args[1:2] if name == "Refusal" else node.args[:1]
            if name not in CODED and name not in {"_tell", "_problem"}:
                continue
        elif isinstance(node, ast.Tuple) and len(node.elts) == 2:
            taken = node.elts[:1] if isinstance(node.elts[1], ast.JoinedStr) else []
        else:
            continue
        for each in taken:
            text = each.value if isinstance(each, ast.Constant) else None
            if isinstance(text, str) and (isinstance(node, ast.Call) or " " not in text):
                yield text


@pytest.mark.parametrize("folder", ["", "local", "slurm", "kueue"])
def test_every_code_is_words_with_underscores(folder: str) -> None:
    """A board and an alert that name one find it, and nobody has to try two spellings."""
    found = {
        f"{path.name}: {code}"
        for path in (ROOT / "scheduling" / folder).glob("*.py")
        for code in codes_of(ast.parse(path.read_text("utf-8")))
    }
    assert found
    assert [each for each in sorted(found) if not CODE.fullmatch(each.partition(": ")[2])] == []


def test_a_code_with_a_dash_would_be_found() -> None:
    """Each place in which one may stand is looked at."""
    text = (
        'Problem("a-b", "words", 0.0)\nlimits.Fault("c-d", 1)\nself._tell("e-f", words)\n'
        'raise Refusal(400, "g-h", "words")\nfound = [("i-j", f"job {name}")]\n'
    )
    assert set(codes_of(ast.parse(text))) == {"a-b", "c-d", "e-f", "g-h", "i-j"}


def test_codes_of_refused_requests_are_written_so_too() -> None:
    """They are what a job that waits is told by."""
    assert all(CODE.fullmatch(code) for code in Code)
