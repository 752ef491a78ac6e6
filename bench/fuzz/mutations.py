"""Inputs made from right ones."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

MAX_INPUT = 16_384
_NUMBERS = (b"0", b"-1", b"1", b"65536", b"2147483648", b"18446744073709551616", b"1e400")


class Mutations:
    """Inputs made from right ones."""

    def __init__(
        self, seeds: tuple[bytes, ...], words: tuple[bytes, ...], chance: random.Random
    ) -> None:
        """Begin with the right ones.

        Args:
            seeds: inputs that are in order.
            words: what is often of importance in them.
            chance: decides.
        """
        self._pool = list(seeds)
        self._seeds = len(seeds)
        self._words = (*words, *_NUMBERS)
        self._chance = chance

    def next(self) -> bytes:
        """Another input."""
        chance = self._chance
        data = bytearray(chance.choice(self._pool))
        for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
            self._change(data)
        made = bytes(data[:MAX_INPUT])
        if chance.random() < 0.05:
            # Changes of changes: some go far from where they began.
            at = self._seeds + chance.randrange(64)
            self._pool[at : at + 1] = [made]
        return made

    def _change(self, data: bytearray) -> None:
        chance = self._chance
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.choice((1, 2, 4, 16, 64)))
        match chance.randrange(7):
            case 0 if data:
                data[at - 1] ^= 1 << chance.randrange(8)
            case 1:
                data[at:at] = bytes([chance.randrange(256)])
            case 2:
                del data[at:end]
            case 3:
                data[at:at] = data[at:end] * chance.choice((1, 2, 50))
            case 4:
                other = chance.choice(self._pool)
                data[at:end] = other[chance.randrange(len(other) + 1) :][:256]
            case 5:
                found = list(re.finditer(rb"[0-9]+", data))
                if found:
                    number = chance.choice(found)
                    data[number.start() : number.end()] = chance.choice(_NUMBERS)
            case _:
                data[at : chance.choice((at, end))] = chance.choice(self._words)
