"""Telling "we cannot look just now" from "nobody is there".

A process that could not be read because this one had no descriptor or memory left is as alive as
before. Taken for gone it would lose what was fixed at its first sight: its job would end, and come
back under another name.
"""

from __future__ import annotations

import errno

_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def is_shortage(error: BaseException | None) -> bool:
    """Whether an error tells of our own or the node's lack of descriptors or memory.

    Args:
        error: what was raised, or what that was raised from.
    """
    return isinstance(error, OSError) and error.errno in _OURS
