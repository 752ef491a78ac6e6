"""The shapes of the API's answers about names, and about who uses what."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gpuwarden.ruleengine.api_models import Shape, Time


class Share(Shape):
    """What one user holds."""

    user: str
    """Name, or a pseudonym that is the same everywhere; empty where no node knows it."""
    team: str
    """Empty where there is none, or where it may not be told."""
    yours: bool
    jobs: int
    cards: int
    """A card that jobs of two users share counts for both."""
    models: dict[str, int]
    """Model -> cards."""


class Shares(Shape):
    """Who uses what, most cards first."""

    schema_: Annotated[str, Field(alias="schema")]
    time: Time | None
    cards: int
    free: int
    users: list[Share]


class NamesState(Shape):
    """Whether names are hidden from who asks."""

    schema_: Annotated[str, Field(alias="schema")]
    hidden: bool
    can_open: bool
    """Whether they may open them."""
    opened_until: Time | None


class OpenRequest(Shape):
    """Why names are opened, and for how long."""

    reason: str
    for_: Annotated[str | None, Field(alias="for")] = None
    """A duration of at most 8h; an hour by default."""
