"""Names in a policy file: each defined once, and whatever is named, defined.

This looks at what was read rather than at what it means, so that a wrong duration in one place does
not hide a misspelt team in another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.diagnostics import Diagnostic, Severity, did_you_mean
from gpuwarden.yaml_files import path_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuwarden.diagnostics import Span
    from gpuwarden.yaml_files import Node, Step

_KINDS = {
    "cards": "card",
    "teams": "team",
    "priorities": "priority",
    "windows": "window",
    "images": "image",
}
"""Key of the file -> what one of its entries is."""


def check_names(root: Node) -> Iterator[Diagnostic]:
    """Say which names are given twice, and which are of nothing.

    Args:
        root: of the file; whatever in it has no name that can be read is left out.
    """
    for kind, word in _KINDS.items():
        yield from _repeats(root, kind, word)
    cards, teams = _defined(root, "cards"), _defined(root, "teams")
    priorities = _defined(root, "priorities")
    for index, team in enumerate(_entries(root, "teams")):
        for key in ("quota", "borrow", "lend"):
            yield from _unknown_keys(team, ("teams", index, key), cards)
        yield from _unknown_items(team, ("teams", index, "priorities"), priorities, "priority")
        yield from _twice(team, ("teams", index, "users"))
    for index, priority in enumerate(_entries(root, "priorities")):
        path: tuple[Step, ...] = ("priorities", index, "preempts")
        yield from _unknown_items(priority, path, priorities, "priority")
    for index, budget in enumerate(_entries(root, "budgets")):
        named = budget.child("team")
        if named is not None and teams is not None:
            yield from _unknown(named, ("budgets", index, "team"), teams, "team")


def _entries(root: Node, kind: str) -> Sequence[Node]:
    found = root.child(kind)
    return () if found is None else found.items()


def _defined(root: Node, kind: str) -> tuple[str, ...] | None:
    """Names of a kind, or None where one cannot be read: what is unknown is unknown then."""
    found = root.child(kind)
    if found is None or not isinstance(found.value, list):
        return None
    names = [None if (name := item.child("name")) is None else name.value for item in found.items()]
    known = tuple(name for name in names if isinstance(name, str))
    return known if len(known) == len(names) else None


def _repeats(root: Node, kind: str, word: str) -> Iterator[Diagnostic]:
    seen: dict[str, Span] = {}
    for index, item in enumerate(_entries(root, kind)):
        name = item.child("name")
        if name is None or not isinstance(name.value, str):
            continue
        if name.value in seen:
            text = f'{kind}[{index}].name: there is another {word} "{name.value}" in line '
            text += str(seen[name.value].line)
            yield Diagnostic("GW600", Severity.ERROR, name.span, text, "give it another name")
        seen.setdefault(name.value, name.span)


def _twice(entry: Node, path: tuple[Step, ...]) -> Iterator[Diagnostic]:
    found, seen = entry.child(path[-1]), set[str]()
    for index, item in enumerate(() if found is None else found.items()):
        if not isinstance(item.value, str):
            continue
        if item.value in seen:
            text = f'{path_text((*path, index))}: "{item.value}" is named twice'
            yield Diagnostic("GW600", Severity.ERROR, item.span, text, "remove one of them")
        seen.add(item.value)


def _unknown_keys(
    entry: Node, path: tuple[Step, ...], known: tuple[str, ...] | None
) -> Iterator[Diagnostic]:
    found = entry.child(path[-1])
    if found is None or known is None:
        return
    for name, span in found.keys.items():
        if name not in known:
            yield _finding(path, name, span, known, "card")


def _unknown_items(
    entry: Node, path: tuple[Step, ...], known: tuple[str, ...] | None, word: str
) -> Iterator[Diagnostic]:
    found = entry.child(path[-1])
    if found is None or known is None:
        return
    for index, item in enumerate(found.items()):
        yield from _unknown(item, (*path, index), known, word)


def _unknown(
    node: Node, path: tuple[Step, ...], known: tuple[str, ...], word: str
) -> Iterator[Diagnostic]:
    if isinstance(node.value, str) and node.value not in known:
        yield _finding(path, node.value, node.span, known, word)


def _finding(
    path: tuple[Step, ...], name: str, span: Span, known: tuple[str, ...], word: str
) -> Diagnostic:
    text = f'{path_text(path)}: there is no {word} "{name}"'
    hint = did_you_mean(name, known) or f"there are {', '.join(known)}"
    return Diagnostic("GW601", Severity.ERROR, span, text, hint)
