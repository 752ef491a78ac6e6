"""What a GPU hour costs: the `prices` part of engine.yaml, with tariffs and the unit of billing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BeforeValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from gpuwarden import hours
from gpuwarden.fields import Seconds, Strict, as_tuple, aware
from gpuwarden.hours import Hours
from gpuwarden.ruleengine.slices import slice_of

Price = Annotated[float, Field(strict=True, ge=0, le=1_000_000)]
"""Of one hour of one card."""
Currency = Annotated[str, StringConstraints(pattern=r"^[A-Z]{3}$")]
"""Three letters, such as EUR, USD or CNY."""
Models = Mapping[Annotated[str, StringConstraints(min_length=1, max_length=200)], Price]
"""Model as NVML names it -> price of an hour."""

_NONE: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Money:
    """An amount of a currency."""

    amount: float
    currency: str

    def __str__(self) -> str:
        return f"{self.amount:.2f} {self.currency}"

    def document(self) -> dict[str, Any]:
        """For the API."""
        return {"amount": round(self.amount, 2), "currency": self.currency}


class _PriceList(Strict):
    """Prices by model, and one for all others."""

    per_gpu_hour: Models = Field(default_factory=lambda: _NONE)
    """Model as NVML names it (label `name` of gpu_info) -> its price. A MIG instance may be named
    with its profile; one that is not costs its share of the card's price."""
    default: Price | None = None
    """Of every other model; without it their price is not known, and no money is named."""

    @model_validator(mode="after")
    def _some(self) -> _PriceList:
        if not self.per_gpu_hour and self.default is None:
            raise PydanticCustomError(
                "GW111", "prices names none: give per_gpu_hour or default", {}
            )
        return self

    def amount(self, model: str) -> float | None:
        """The price of an hour of a model, or None where this list does not tell."""
        if model in self.per_gpu_hour:
            return self.per_gpu_hour[model]
        part = slice_of(model)
        if part is None:
            return self.default
        whole = self.per_gpu_hour.get(part.card, self.default)
        return None if whole is None else whole * part.share


class Tariff(_PriceList):
    """Other prices at some times: nights and weekends, or from a day on."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?$")]
    """Shown in statements, such as night."""
    during: Annotated[tuple[Hours, ...], BeforeValidator(as_tuple)] = ()
    """Hours of the week in which it counts, by the clocks of a zone; always by default."""
    from_: Annotated[AwareDatetime, BeforeValidator(aware)] | None = Field(
        default=None, alias="from"
    )
    """The moment from which on it counts, with its offset from UTC: 2027-01-01T00:00:00+01:00."""
    until: Annotated[AwareDatetime, BeforeValidator(aware)] | None = None
    """The moment from which on it counts no more."""
    currency: Currency | None = None
    """Of these prices; that of all others by default."""

    @model_validator(mode="after")
    def _some_time(self) -> Tariff:
        if self.from_ is not None and self.until is not None and self.until <= self.from_:
            raise PydanticCustomError(
                "GW107", "this tariff ends before it begins", {"at": ("until",)}
            )
        if not self.during and self.from_ is None and self.until is None:
            raise PydanticCustomError(
                "GW111",
                "a tariff that always counts hides all prices below it: give during, from or until",
                {},
            )
        return self

    def counts(self, at: float) -> bool:
        """Whether it counts at a Unix time."""
        if self.from_ is not None and at < self.from_.timestamp():
            return False
        if self.until is not None and at >= self.until.timestamp():
            return False
        return hours.within(self.during, at)


class Billing(Strict):
    """How the time of an attempt on a card is rounded in statements."""

    unit: Annotated[Seconds, Field(gt=0, le=86400)]
    """Every unit that is begun is charged: with 1m, 5 min 10 s on a card cost six minutes."""
    round: Literal["up"] = "up"
    """To the next whole unit; nobody is charged less than was used."""
    minimum: Annotated[Seconds, Field(ge=0, le=86400)] = 0.0
    """Charged at least, for each attempt on each card; rounded up as well."""

    def billed(self, seconds: float, *, whole: bool = True) -> float:
        """The seconds that are charged for a use.

        Args:
            seconds: of one attempt on one card; nothing is charged for no use.
            whole: whether it is the attempt's whole time, for which the minimum holds.
        """
        if seconds <= 0:
            return 0.0
        least = max(seconds, self.minimum) if whole else seconds
        # What sums of binary fractions add must not begin another unit.
        units = math.ceil(least / self.unit - 1e-9)
        return max(seconds, units * self.unit)


@dataclass(frozen=True, slots=True)
class Rate:
    """The price of one hour of one card, and by which tariff.

    Attributes:
        price: of the hour.
        tariff: its name, or an empty string for the prices that hold otherwise.
    """

    price: Money
    tariff: str = ""


class Prices(_PriceList):
    """What an hour of a card costs, for what notices, pages and statements say in money."""

    currency: Currency
    """Of all prices here; a tariff may have another. Different currencies are never added up."""
    tariffs: Annotated[tuple[Tariff, ...], BeforeValidator(as_tuple)] = ()
    """Prices at some times. The first that counts at the moment and tells the model's price is
    taken, else the prices beside this list."""
    billing: Billing | None = None
    """How statements round; without it what was measured is charged, to the second."""

    @model_validator(mode="after")
    def _each_name_once(self) -> Prices:
        names = [tariff.name for tariff in self.tariffs]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise PydanticCustomError(
                    "GW111",
                    "there is another tariff {name}",
                    {"name": name, "at": ("tariffs", index, "name")},
                )
        return self

    def rate(self, model: str, at: float) -> Rate | None:
        """The price of an hour of a model at a moment, or None where it is not known.

        Args:
            model: as NVML names it.
            at: Unix time.
        """
        for tariff in self.tariffs:
            amount = tariff.amount(model) if tariff.counts(at) else None
            if amount is not None:
                return Rate(Money(amount, tariff.currency or self.currency), tariff.name)
        amount = self.amount(model)
        return None if amount is None else Rate(Money(amount, self.currency))

    @property
    def currencies(self) -> frozenset[str]:
        """Every currency in which there is a price."""
        return frozenset(
            {self.currency, *(each.currency or self.currency for each in self.tariffs)}
        )

    @property
    def models(self) -> frozenset[str]:
        """Every model that a price is named for."""
        return frozenset(self.per_gpu_hour).union(*(each.per_gpu_hour for each in self.tariffs))
