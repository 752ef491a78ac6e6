"""Prices: which one counts for which card at which moment, and how time is rounded."""

from __future__ import annotations

import datetime as dt
import zoneinfo
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpuwarden.errors import InvalidInput
from gpuwarden.ruleengine.prices import Billing, Money, Prices, Rate
from gpuwarden.ruleengine.settings import load_settings
from gpuwarden.ruleengine.slices import share_of, slice_of

if TYPE_CHECKING:
    from pathlib import Path

H100 = "NVIDIA H100 80GB HBM3"
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
NIGHT = {
    "name": "night",
    "during": [{"from": "22:00", "to": "06:00", "zone": "Europe/Berlin"}],
    "per_gpu_hour": {H100: 1.5},
}
NEXT_YEAR = {"name": "y2027", "from": "2027-01-01T00:00:00+01:00", "default": 5, "currency": "USD"}


def prices(**fields: Any) -> Prices:
    """An H100 for 3 EUR, everything else for 1."""
    base = {"currency": "EUR", "per_gpu_hour": {H100: 3}, "default": 1}
    return Prices.model_validate(base | fields)


def at(text: str) -> float:
    """Unix time of a moment in Berlin."""
    return dt.datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp()


def test_the_first_tariff_that_counts_and_tells_the_price_is_taken() -> None:
    """A tariff that names another model leaves this one to the next, and to the base."""
    known = prices(tariffs=[NIGHT, NEXT_YEAR])
    day, night = at("2026-06-01T12:00"), at("2026-06-01T23:00")
    assert known.rate(H100, day) == Rate(Money(3, "EUR"))
    assert known.rate(H100, night) == Rate(Money(1.5, "EUR"), "night")
    assert known.rate("L4", night) == Rate(Money(1, "EUR"))
    assert known.rate("L4", at("2027-01-01T00:00")) == Rate(Money(5, "USD"), "y2027")
    assert known.rate(H100, at("2027-01-01T00:00")) == Rate(Money(1.5, "EUR"), "night")
    assert known.rate("L4", at("2026-12-31T23:59")) == Rate(Money(1, "EUR"))


def test_a_tariff_ends_when_it_says() -> None:
    """At its last moment it counts no more."""
    known = prices(tariffs=[{"name": "sale", "until": "2026-06-01T00:00:00+02:00", "default": 0}])
    assert known.rate("L4", at("2026-05-31T23:59:59")) == Rate(Money(0, "EUR"), "sale")
    assert known.rate("L4", at("2026-06-01T00:00")) == Rate(Money(1, "EUR"))


def test_what_has_no_price_has_none() -> None:
    """Not 0: nobody is told that it costs nothing."""
    known = Prices.model_validate({"currency": "EUR", "per_gpu_hour": {H100: 3}})
    assert known.rate("L4", 0.0) is None


@pytest.mark.parametrize(
    ("model", "share"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 1 / 7),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 3 / 7),
        ("NVIDIA A100-SXM4-40GB MIG 7g.40gb", 1.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", 1 / 7),
        ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", 1 / 7),
        ("NVIDIA A30 MIG 2g.12gb", 2 / 4),
        ("NVIDIA A30 MIG 4g.24gb", 1.0),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb", 1 / 4),
        (H100, 1.0),
        ("NVIDIA A100-SXM4-40GB MIG something", 1.0),
        ("", 1.0),
    ],
)
def test_a_slice_is_its_compute_slices_of_its_card(model: str, share: float) -> None:
    """By the number that the card can be cut into."""
    assert share_of(model) == pytest.approx(share)


@pytest.mark.parametrize(
    ("card", "profiles"),
    [
        ("NVIDIA A100-SXM4-40GB", ["1g.5gb"] * 7),
        ("NVIDIA A100-SXM4-40GB", ["3g.20gb", "4g.20gb"]),
        ("NVIDIA H100 80GB HBM3", ["2g.20gb", "2g.20gb", "3g.40gb"]),
        ("NVIDIA A30", ["1g.6gb"] * 4),
        ("NVIDIA A30", ["2g.12gb", "1g.6gb", "1g.6gb"]),
    ],
)
def test_the_slices_of_a_card_cost_what_it_costs(card: str, profiles: list[str]) -> None:
    """Where it is cut up without a rest."""
    known = prices(per_gpu_hour={card: 3.6})
    rates = [known.rate(f"{card} MIG {profile}", 0.0) for profile in profiles]
    assert sum(rate.price.amount for rate in rates if rate) == pytest.approx(3.6)


def test_a_slice_may_have_a_price_of_its_own() -> None:
    """Which then counts as it is; without one the card's, or that of every other model, is cut."""
    own = f"{H100} MIG 1g.10gb"
    assert prices(per_gpu_hour={own: 0.9, H100: 3}).rate(own, 0.0) == Rate(Money(0.9, "EUR"))
    found = prices(per_gpu_hour={}).rate("NVIDIA A30 MIG 1g.6gb", 0.0)
    assert found == Rate(Money(0.25, "EUR"))
    part = slice_of(own)
    assert part is not None
    assert part.card == H100


@pytest.mark.parametrize(
    ("unit", "minimum", "seconds", "billed"),
    [
        (60, 0, 310, 360),
        (60, 0, 300, 300),
        (60, 0, 300.5, 360),
        (60, 300, 10, 300),
        (60, 330, 10, 360),
        (3600, 0, 1, 3600),
        (1, 0, 309.2, 310),
        (60, 300, 0, 0),
        (0.1, 0, 0.3, 0.3),
    ],
)
def test_every_unit_that_is_begun_is_billed(
    unit: float, minimum: float, seconds: float, billed: float
) -> None:
    """5 min 10 s cost six minutes; no use costs nothing, whatever the minimum."""
    rule = Billing.model_construct(unit=unit, minimum=minimum)
    assert rule.billed(seconds) == pytest.approx(billed)


def test_the_minimum_is_for_the_whole_attempt() -> None:
    """A part of one that was told in the statement before is rounded and no more."""
    rule = Billing.model_construct(unit=60.0, minimum=300.0)
    assert rule.billed(70, whole=False) == 120


@given(
    seconds=st.floats(0.001, 1e7),
    unit=st.sampled_from([1.0, 6.0, 60.0, 900.0, 3600.0, 86400.0]),
)
def test_rounding_is_never_below_use_and_less_than_a_unit_above(
    seconds: float, unit: float
) -> None:
    """For any use and unit."""
    billed = Billing.model_construct(unit=unit, minimum=0.0).billed(seconds)
    assert seconds <= billed < seconds + unit * (1 + 1e-6)


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"tariffs": [{"name": "n", "default": 1}]}, "hides all prices below it"),
    ({"tariffs": [NIGHT, NIGHT]}, "another tariff night"),
    ({"tariffs": [{**NIGHT, "per_gpu_hour": {}}]}, "prices names none"),
    ({"tariffs": [{**NIGHT, "name": "Night shift"}]}, "String should match"),
    ({"tariffs": [{**NEXT_YEAR, "from": "2027-01-01"}]}, "offset"),
    ({"tariffs": [{**NEXT_YEAR, "until": "2026-01-01T00:00:00Z"}]}, "ends before it begins"),
    (
        {"tariffs": [{**NIGHT, "during": [{"from": "22:00", "to": "6", "zone": "UTC"}]}]},
        "time of day",
    ),
    ({"billing": {"unit": 60}}, "unit"),
    ({"billing": {"unit": "0s"}}, "greater than 0"),
    ({"billing": {"unit": "1m", "round": "down"}}, "'up'"),
    ({"discount": 0.1}, "Extra inputs"),
)


@pytest.mark.parametrize(("fields", "words"), WRONG, ids=[words for _, words in WRONG])
def test_what_is_wrong_with_prices_is_said(fields: dict[str, Any], words: str) -> None:
    """Before anything is charged by them."""
    with pytest.raises(ValidationError, match=words):
        prices(**fields)


def test_a_mistake_in_a_tariff_is_shown_at_its_line(tmp_path: Path) -> None:
    """With a caret, as in every file of ours."""
    (tmp_path / "rules.yaml").write_text("version: 1\n")
    path = tmp_path / "engine.yaml"
    path.write_text(
        "version: 1\nprometheus: {url: http://127.0.0.1:1}\nrules: rules.yaml\nprices:\n"
        "  currency: EUR\n  default: 2\n  tariffs:\n"
        "  - {name: night, during: [{from: '22:00', to: '06:00', zone: UTC}], default: 1}\n"
        "  - {name: night, from: 2027-01-01T00:00:00+01:00, default: 3}\n"
    )
    with pytest.raises(InvalidInput) as caught:
        load_settings(path)
    assert f"{path}:9:12" in str(caught.value)
    assert "another tariff night" in str(caught.value)
