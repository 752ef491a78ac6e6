"""Card homes: on which node a card is, where the targets of several nodes tell of it. Pure.

A card's UUID is its own. A machine that got another address is known under both names for a while,
and one that is scraped under two addresses, or by two exporters, for as long as that stays so.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    Rows: TypeAlias = "Mapping[str, Sequence[tuple[float, tuple[str, ...]]]]"
    """Inventory query -> its rows: values with the texts of their labels, the node's name first."""

_PLACES = (("gpu_info", 1), ("gpu_mig_info", 2), ("gpu_job_holds_gpu", 2))
"""Inventory queries, and where in their rows the card is named."""


def former_names(rows: Rows, dark: Mapping[str, str]) -> set[str]:
    """Dark nodes whose cards are all lit under another name: these are gone, not silent.

    A target's address changes, of one node or with a line of configuration of all: what a card
    is called stays. Else each job would be on two nodes, one of them dark, for an hour.

    Args:
        rows: of the tick.
        dark: nodes that are not to be believed, with the reason.
    """
    known: dict[str, set[str]] = defaultdict(set)
    for _, (node, uuid, *_rest) in rows["gpu_info"]:
        known[node].add(uuid)
    lit = {uuid for node, cards in known.items() if node not in dark for uuid in cards}
    return {node for node in known if dark.get(node) == "dark_node" and known[node] <= lit}


def told_twice(rows: Rows, dark: Container[str]) -> set[str]:
    """UUIDs of cards that two lit nodes tell of.

    Two exporters need not say the same, and which of them is right is not known.

    Args:
        rows: of the tick.
        dark: nodes that are not to be believed.
    """
    homes: dict[str, str] = {}
    twice: set[str] = set()
    for name, at in _PLACES:
        for _, texts in rows[name]:
            node, uuid = texts[0], texts[at]
            if homes.setdefault(uuid, node) == node or node in dark or not uuid:
                continue
            if homes[uuid] not in dark:
                twice.add(uuid)
            homes[uuid] = node
    return twice


def once(cards: Iterable[tuple[str, str]], dark: Container[str]) -> set[tuple[str, str]]:
    """Each card on one node: on a lit one where there is one.

    Args:
        cards: (node, UUID) of what a job holds, as all nodes tell it.
        dark: nodes that are not to be believed.
    """
    ordered = sorted(cards, key=lambda card: (card[0] not in dark, card))
    return {(node, uuid) for uuid, node in {uuid: node for node, uuid in ordered}.items()}
