"""What a GPU hour costs: the `prices` part of engine.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from gpuwarden.ruleengine.fields import Strict

Price = Annotated[float, Field(strict=True, ge=0, le=1_000_000)]
"""Of one hour of one card."""


class Prices(Strict):
    """What an hour of a card costs, for what notices, pages and boards say of lost work."""

    currency: Annotated[str, StringConstraints(pattern=r"^[A-Z]{3}$")]
    """Three letters, such as EUR, USD or CNY; one for all prices."""
    per_gpu_hour: Mapping[
        Annotated[str, StringConstraints(min_length=1, max_length=200)], Price
    ] = Field(default_factory=lambda: MappingProxyType({}))
    """Model as NVML names it (label `name` of gpu_info; of a MIG instance with its profile) -> its
    price."""
    default: Price | None = None
    """Of every other model; without it their price is not known, and no money is named."""

    @model_validator(mode="after")
    def _some(self) -> Prices:
        if not self.per_gpu_hour and self.default is None:
            raise PydanticCustomError(
                "GW111", "prices names none: give per_gpu_hour or default", {}
            )
        return self

    def of(self, model: str) -> float | None:
        """The price of an hour of a model, or None where it is not known."""
        return self.per_gpu_hour.get(model, self.default)
