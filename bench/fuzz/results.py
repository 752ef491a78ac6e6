"""What came of an attack."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(slots=True)
class Result:
    """What came of one attack; `faults`: where and what -> how often."""

    name: str
    way: str
    inputs: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)


def keep(folder: Path, name: str, data: bytes) -> Path:
    """Keep an input that was a fault; the same input is kept once.

    Args:
        folder: for all of them.
        name: of the attack.
        data: the input.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace(' ', '-')}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path
