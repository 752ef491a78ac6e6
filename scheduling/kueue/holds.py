"""A job that waits until somebody releases it, and why: kept on its Workload. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Final, Self

MAX_BYTES: Final = 4 * 1024
MAX_WORDS: Final = 1024


@dataclass(frozen=True, slots=True)
class Hold:
    """A hold.

    Attributes:
        since: Unix time.
        code: a stable word for why; empty where a person holds it.
        words: one sentence for its owner.
    """

    since: float
    code: str
    words: str

    def encode(self) -> str:
        """As the annotation has it."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def decode(cls, text: object) -> Self | None:
        """Read an annotation; None where it is none of ours."""
        if not isinstance(text, str) or len(text) > MAX_BYTES:
            return None
        try:
            data = json.loads(text)
            since, code, words = data["since"], data["code"], data["words"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if isinstance(since, bool) or not isinstance(since, int | float):
            return None
        if not (math.isfinite(since) and isinstance(code, str) and isinstance(words, str)):
            return None
        return cls(float(since), code[:64], words[:MAX_WORDS])
