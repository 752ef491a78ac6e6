"""What share of its card a MIG instance is: its compute slices, of those that the card has. Pure.

The instances of a card that is cut up without a rest are together one card. Memory is no measure
for that: the instances of an A100 get seven eighths of it at most.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_PROFILE = re.compile(r"(?P<card>.+) MIG (?:(?P<part>[1-7])c\.)?(?P<slices>[1-7])g\.[0-9]+gb\S*")
_SEVEN = 7
_FEWER = (
    (re.compile(r"\bA30\b"), 4),
    (re.compile(r"\bRTX PRO 6000\b"), 4),
    (re.compile(r"\bRTX PRO 5000\b"), 2),
)
"""Cards that are cut into fewer than seven slices (NVIDIA's MIG user guide, supported profiles)."""


class Slice(NamedTuple):
    """A MIG instance.

    Attributes:
        card: the whole card's model.
        share: of the card, more than 0 and at most 1.
    """

    card: str
    share: float


def slice_of(model: str) -> Slice | None:
    """What a model's name says of an instance, or None: it names a whole card, or no profile.

    Args:
        model: as NVML names it, such as `NVIDIA H100 80GB HBM3 MIG 1g.10gb`. Of a compute instance
            (`MIG 1c.3g.40gb`) its own slices count.
    """
    found = _PROFILE.fullmatch(model)
    if found is None:
        return None
    whole = next((n for pattern, n in _FEWER if pattern.search(found["card"])), _SEVEN)
    return Slice(found["card"], min(1.0, int(found["part"] or found["slices"]) / whole))


def share_of(model: str) -> float:
    """How many cards a card or an instance counts as; one where its name tells no share."""
    found = slice_of(model)
    return 1.0 if found is None else found.share
