"""Job parts: what several nodes say of one job, put together. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def agreed(known: Mapping[str, str], told: Mapping[str, str]) -> dict[str, str]:
    """Labels of a job as two nodes tell them; whichever comes first, the same.

    Whose job it is must not be a guess: a node whose directory does not answer names its users by
    number, and neither a whitelist nor a notice finds them by that.

    Args:
        known: by the nodes until now; an empty user is one that they did not agree on.
        told: by the next one.
    """
    found = {**known, **told}
    for name in known.keys() & told.keys():
        if known[name] != told[name]:
            found[name] = "" if name == "user" else min(known[name], told[name])
    return found
