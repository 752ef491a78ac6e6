"""Slurm's host lists: `gpu[01-03,07],login1`."""

from __future__ import annotations

import re

MAX_HOSTS = 100_000
"""More than a cluster has; a hostile or broken range must not fill the memory."""
MAX_TEXT = 1024 * 1024

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_RANGE = re.compile(r"(?P<first>[0-9]{1,9})(?:-(?P<last>[0-9]{1,9}))?")


def expand(text: str) -> tuple[str, ...]:
    """The hosts that a list names, in its order.

    Args:
        text: as Slurm writes it; `(null)`, `None assigned` and an empty text name no host.

    Raises:
        ValueError: it is no host list, or names too many hosts.
    """
    text = text.strip()
    if text in ("", "(null)", "None", "None assigned", "N/A"):
        return ()
    if len(text) > MAX_TEXT:
        raise ValueError(f"a host list of {len(text)} characters")
    hosts: list[str] = []
    for part in _parts(text):
        hosts += _expand_part(part, room=MAX_HOSTS - len(hosts))
    return tuple(hosts)


def numbers(text: str, *, most: int = MAX_HOSTS) -> tuple[int, ...]:
    """The numbers of ranges such as `0-1,5`, in their order.

    Args:
        text: ranges.
        most: how many numbers may be named.

    Raises:
        ValueError: these are no ranges, or they name too many numbers.
    """
    found: list[int] = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise ValueError(f"{item[:40]!r} is no range of numbers")
        first, last = int(match["first"]), int(match["last"] or match["first"])
        if last < first or last - first >= most - len(found):
            raise ValueError(f"{item[:40]!r} names too many numbers, or none")
        found += range(first, last + 1)
    return tuple(found)


def _parts(text: str) -> list[str]:
    """Split at commas that are not in brackets."""
    parts, depth, begun = [], 0, 0
    for at, letter in enumerate(text):
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        elif letter == "," and not depth:
            parts.append(text[begun:at])
            begun = at + 1
        if depth not in (0, 1):
            raise ValueError(f"the brackets of {text[:80]!r} do not match")
    if depth:
        raise ValueError(f"the brackets of {text[:80]!r} do not match")
    parts.append(text[begun:])
    return parts


def _expand_part(part: str, *, room: int) -> list[str]:
    """One name with any number of bracketed ranges."""
    names = [""]
    at = 0
    while at < len(part):
        opened = part.find("[", at)
        plain = part[at:] if opened < 0 else part[at:opened]
        if not _NAME.fullmatch(plain):
            raise ValueError(f"{part[:80]!r} is no host name")
        names = [name + plain for name in names]
        if opened < 0:
            break
        closed = part.index("]", opened)
        inside = _padded(part[opened + 1 : closed], most=room)
        if len(names) * len(inside) > room:
            raise ValueError(f"{part[:80]!r} names more than {MAX_HOSTS} hosts")
        names = [name + number for name in names for number in inside]
        at = closed + 1
    if not part or len(names) > room:
        raise ValueError("a host list with an empty name, or with too many")
    return names


def _padded(ranges: str, *, most: int) -> list[str]:
    """Numbers of ranges with the zeros that they are written with."""
    found: list[str] = []
    for item in ranges.split(","):
        width = len(item.strip().partition("-")[0])
        found += [f"{number:0{width}}" for number in numbers(item, most=most - len(found))]
    return found
