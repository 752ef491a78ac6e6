"""The tasks of an array of Slurm's that have not begun, as one line of its queue has them.

Slurm writes `1-40:3%2`: tasks 1, 4, 7 and so on, two of them at a time. Its commands take neither
the step nor the limit back. A long list is cut off, by `...`; how long it may be SLURM_BITSTR_LEN
says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

SHOWN: Final = 48
"""Characters of a list that are part of a job's number."""
MOST_NAMED: Final = 2_000
"""Tasks that are named one by one, because their list has a step."""
_LIST = re.compile(
    r"(?P<list>[0-9][0-9,:-]*)(?P<cut>\.\.\.)?(?:%(?P<limit>[0-9]{1,7}))?(?P<end>\.\.\.)?"
)
_PART = re.compile(
    r"(?P<first>[0-9]{1,7})(?:-(?P<last>[0-9]{1,7})(?::(?P<step>[1-9][0-9]{0,6}))?)?"
)


@dataclass(frozen=True, slots=True)
class ArrayTasks:
    """Tasks that have not begun.

    Attributes:
        text: as Slurm writes them.
        count: how many, or None where the list is cut off.
        ranges: the list as its commands take it, without steps; empty where it is cut off, or too
            long without.
        limit: how many may run at a time, or None.
    """

    text: str
    count: int | None
    ranges: str = ""
    limit: int | None = None

    @property
    def shown(self) -> str:
        """The list for people, of bounded length."""
        return self.text if len(self.text) <= SHOWN else f"{self.text[:SHOWN]}..."


def decode_tasks(text: str) -> ArrayTasks | None:
    """Tasks of a value of `squeue -O ArrayTaskID`; None of a single task, and of no array."""
    match = _LIST.fullmatch(text)
    if match is None or text.isdecimal():
        return None
    limit = None if match["limit"] is None else int(match["limit"])
    if match["cut"] or match["end"]:
        return ArrayTasks(text, None, limit=limit)
    parts: list[str] = []
    count = 0
    for part in match["list"].split(","):
        found = _PART.fullmatch(part)
        if found is None:
            return ArrayTasks(text, None, limit=limit)
        first, last = int(found["first"]), int(found["last"] or found["first"])
        tasks = range(first, last + 1, int(found["step"] or 1))
        count += len(tasks)
        if tasks.step == 1 and len(tasks) > 1:
            parts.append(f"{first}-{last}")
        else:
            parts += map(str, tasks[: MOST_NAMED + 1])
    return ArrayTasks(text, count, ",".join(parts) if len(parts) <= MOST_NAMED else "", limit)
