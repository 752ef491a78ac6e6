"""What `gpuwarden top` shows: one answer of an engine, or of exporters, and how old it is. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

SCHEMA = "gpuwarden.top/v1"
NO_ENGINE: Final = "no_engine"
"""State of every verdict where only exporters are asked."""
_OLD_TICKS = 3.0


@dataclass(frozen=True, slots=True)
class Picture:
    """The fleet at one moment.

    Attributes:
        source: engine or exporters.
        places: addresses that were asked.
        document: of the schema gpuwarden.fleet/v1.
        taken: monotonic time of the answer.
        problem: why no newer one came, or an empty string.
    """

    source: str
    places: tuple[str, ...]
    document: dict[str, Any]
    taken: float
    problem: str = ""

    def age(self, now: float) -> float | None:
        """Seconds since what is shown was so, or None where the engine has not judged yet.

        Args:
            now: monotonic time.
        """
        known = self.document["age"]
        return None if known is None else float(known) + max(0.0, now - self.taken)

    def stale(self, now: float) -> bool:
        """Whether what is shown must not be taken for the present; `now` is monotonic time."""
        age = self.age(now)
        return bool(self.problem) or age is None or age > _OLD_TICKS * self.document["tick"]

    def whole(self, now: float) -> dict[str, Any]:
        """The document of `gpuwarden top -o json`; `now` is monotonic time."""
        age = self.age(now)
        return {
            "schema": SCHEMA,
            "source": self.source,
            "places": list(self.places),
            "age": None if age is None else round(age, 3),
            "stale": self.stale(now),
            "problem": self.problem,
            "fleet": self.document,
        }


@dataclass(frozen=True, slots=True)
class Question:
    """Which part of the fleet is asked for; empty strings admit all.

    Attributes:
        user, node: a part of the name.
        team, rule: the whole name.
        broken: only jobs that a case is open for.
        sort: one of `fleet_documents.SORTS`.
        reverse: the other way round.
        offset: rows to pass over.
        limit: rows at most.
    """

    user: str = ""
    team: str = ""
    node: str = ""
    rule: str = ""
    broken: bool = False
    sort: str = "verdict"
    reverse: bool = False
    offset: int = 0
    limit: int = 100

    def parameters(self) -> dict[str, str]:
        """The query of `/v1/fleet`."""
        given = {name: getattr(self, name) for name in ("user", "team", "node", "rule")}
        flags = {name: "1" for name in ("broken", "reverse") if getattr(self, name)}
        numbers = {"offset": str(self.offset), "limit": str(self.limit)}
        return (
            {name: text for name, text in given.items() if text}
            | flags
            | numbers
            | {"sort": self.sort}
        )

    def words(self) -> str:
        """The filter, as it is typed."""
        given = {name: getattr(self, name) for name in ("user", "team", "node", "rule")}
        parts = [f"{name}:{text}" for name, text in given.items() if text]
        return " ".join(parts + (["broken"] if self.broken else []))
