"""Statements: sums of holdings, whatever the order, the cut or the clocks."""

from __future__ import annotations

import datetime as dt
import itertools
import zoneinfo
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.hours import Hours
from gpuwarden.periods import Span
from gpuwarden.ruleengine.costs import LABELS, Costs, Extra, Level, Line, Use, spans, switches
from gpuwarden.ruleengine.prices import Prices

A100, MIG = "A100", "A100 MIG 1g.5gb"
DAY = 86400.0
WHOLE = Span(0.0, 3600.0)
PRICES = Prices.model_validate({"currency": "EUR", "per_gpu_hour": {A100: 3.5, "H100": 6}})
ROUNDED = PRICES.model_copy(
    update={
        "billing": Prices.model_validate(
            {"currency": "EUR", "default": 1, "billing": {"unit": "1m"}}
        ).billing
    }
)
LEVELS = tuple(LABELS)


def use(
    job: str = "j", card: str = "g0", model: str = A100, *, held: float = 310.0, share: float = 1.0,
    idle: float = 0.0, **labels: str,
) -> Use:  # fmt: skip
    """One holding of ana's."""
    known = {"job_id": job, "user": "ana", "team": "vision", "project": "none"} | labels
    return Use(known, ("n1", card), model, held, held * share, idle * share)


def total(*uses: Use, prices: Prices | None = PRICES, by: Level = "team", **fields: Any) -> Line:
    """The sum of a statement of these."""
    costs = Costs(WHOLE, prices, **fields)
    costs.add(WHOLE, uses)
    return costs.statement(by).total


def test_five_minutes_and_ten_seconds_cost_six() -> None:
    """On each card: eight cards cost eight times one."""
    one = total(use(), prices=ROUNDED)
    assert one.billed_gpu_seconds == 360
    assert one.cost == {"EUR": pytest.approx(3.5 * 360 / 3600)}
    eight = total(*(use(card=f"g{n}") for n in range(8)), prices=ROUNDED)
    assert eight.cost["EUR"] == pytest.approx(8 * one.cost["EUR"])
    assert (eight.jobs, eight.gpu_seconds) == (1, 8 * 310)


def test_what_came_back_of_jobs_of_yesterday_is_in_every_total() -> None:
    """A job that held nothing in this time has a line for what others hold of it now."""
    labels = {"job_id": "old", "user": "ben", "team": "speech"}
    costs = Costs(WHOLE, PRICES, reclaimed=[Extra(labels, 1800.0)])
    costs.add(WHOLE, [use()])
    for by in ("team", "user", "job"):
        assert costs.statement(by).total.reclaimed_gpu_seconds == 1800.0
    lines = {line.labels["job_id"]: line for line in costs.statement("job").lines}
    assert (lines["old"].gpu_seconds, lines["old"].reclaimed_gpu_seconds) == (0.0, 1800.0)


def test_an_attempt_that_runs_on_is_not_rounded_yet() -> None:
    """The statement in which it ends rounds it, once."""
    assert total(use(), prices=ROUNDED, runs_on={"j"}).billed_gpu_seconds == 310
    assert total(use(), prices=ROUNDED, runs_on={"other"}).billed_gpu_seconds == 360


def test_the_parts_of_an_attempt_are_rounded_together() -> None:
    """Tariffs cut it, its rounding does not; each part bears its share of it."""
    night = {"name": "night", "until": "1970-01-01T00:30:00Z", "per_gpu_hour": {A100: 1.75}}
    prices = Prices.model_validate(
        {"currency": "EUR", "default": 3.5, "tariffs": [night], "billing": {"unit": "1m"}}
    )
    costs = Costs(WHOLE, prices)
    first, second = spans(prices, WHOLE)
    assert (first, second) == (Span(0, 1800), Span(1800, 3600))
    costs.add(first, [use(held=200)])
    costs.add(second, [use(held=110)])
    found = costs.statement("job").total
    assert found.billed_gpu_seconds == pytest.approx(360)
    assert found.tariffs == {"night": 200, "": 110}
    expected = (200 * 1.75 + 110 * 3.5) / 3600 * 360 / 310
    assert found.cost["EUR"] == pytest.approx(expected)


def test_a_slice_costs_its_share_and_a_shared_card_is_shared() -> None:
    """A seventh of a card for ten minutes; a third of another."""
    assert total(use(model=MIG, share=1 / 7, held=600)).cost["EUR"] == pytest.approx(3.5 / 7 / 6)
    third = [use(job, share=1 / 3, held=600, idle=300) for job in "abc"]
    found = total(*third)
    assert found.gpu_seconds == pytest.approx(600)
    assert found.cost["EUR"] == pytest.approx(3.5 / 6)
    assert found.idle_cost["EUR"] == pytest.approx(3.5 / 12)


def test_currencies_are_never_added_up() -> None:
    """Each has its sum; what has no price is told apart, and costs nothing."""
    tariff = {
        "name": "t",
        "until": "1990-01-01T00:00:00Z",
        "currency": "USD",
        "per_gpu_hour": {"H100": 6},
    }
    prices = Prices.model_validate(
        {"currency": "EUR", "per_gpu_hour": {A100: 3.5}, "tariffs": [tariff]}
    )
    found = total(
        use(held=3600),
        use(card="h", model="H100", held=3600),
        use(card="x", model="L4"),
        prices=prices,
    )
    assert found.cost == {"EUR": 3.5, "USD": 6}
    assert found.unpriced_gpu_seconds == 310
    assert found.gpu_seconds == 2 * 3600 + 310
    assert total(use(), prices=None).cost == {}


def test_what_is_not_known_at_a_level_is_not_zero() -> None:
    """Lost work of a job is the ledger's to tell; of a project nobody tells."""
    lost = [
        Extra({"user": "ana", "team": "vision"}, 60.0, {"EUR": 1.0}),
        Extra({"job_id": "j"}, 40.0),
    ]
    back = [Extra({"job_id": "j", "user": "ana", "team": "vision"}, 90.0)]

    def told(by: Level, **fields: Any) -> tuple[float | None, float | None]:
        found = total(use(), by=by, lost=lost, reclaimed=back, **fields)
        return found.lost_gpu_seconds, found.reclaimed_gpu_seconds

    assert told("team") == told("user") == (60.0, 90.0)
    assert told("job") == (None, 90.0)
    assert told("job", jobs_known=True) == (40.0, 90.0)
    assert told("project") == (None, None)
    assert total(use()).lost_gpu_seconds == 0.0


_words = st.sampled_from(["a", "b", "c"])
_uses = st.lists(
    st.builds(
        use,
        _words,
        st.sampled_from(["g0", "g1", "g2"]),
        st.sampled_from([A100, "H100", "L4"]),
        held=st.floats(0.0, 1e5),
        share=st.floats(0.01, 1.0),
        user=_words,
        team=_words,
        project=_words,
    ),
    max_size=12,
)


@given(uses=_uses, by=st.sampled_from(LEVELS), rounded=st.booleans())
def test_lines_add_up_to_the_total(uses: list[Use], by: Level, rounded: bool) -> None:
    """At every level, in hours and in every currency; and every level has the same total."""
    costs = Costs(WHOLE, ROUNDED if rounded else PRICES)
    costs.add(WHOLE, uses)
    found, other = costs.statement(by), costs.statement("team")
    for name in ("gpu_seconds", "billed_gpu_seconds", "unpriced_gpu_seconds"):
        whole = getattr(found.total, name)
        assert sum(getattr(line, name) for line in found.lines) == pytest.approx(whole)
        assert getattr(other.total, name) == pytest.approx(whole)
    for currency in found.currencies:
        parts = sum(line.cost.get(currency, 0.0) for line in found.lines)
        assert parts == pytest.approx(found.total.cost[currency])
    assert found.total.billed_gpu_seconds >= found.total.gpu_seconds * (1 - 1e-9)


@given(uses=_uses, seed=st.randoms(use_true_random=False))
def test_the_order_of_what_was_measured_does_not_matter(uses: list[Use], seed: Any) -> None:
    """Nor in how many answers it came."""
    mixed = list(uses)
    seed.shuffle(mixed)
    first, second = Costs(WHOLE, ROUNDED), Costs(WHOLE, ROUNDED)
    first.add(WHOLE, uses)
    for each in mixed:
        second.add(WHOLE, [each])
    a, b = first.statement("job").total, second.statement("job").total
    assert a.billed_gpu_seconds == pytest.approx(b.billed_gpu_seconds)
    assert a.cost == pytest.approx(b.cost)


@given(shares=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8), held=st.floats(1.0, 1e6))
def test_the_slices_of_a_card_cost_what_it_costs(shares: list[float], held: float) -> None:
    """However it is divided among its holders."""
    whole = sum(shares)
    parts = [use(f"j{n}", share=part / whole, held=held) for n, part in enumerate(shares)]
    assert total(*parts).cost["EUR"] == pytest.approx(total(use(held=held)).cost["EUR"])


def hours(zone: str = "Europe/Berlin", **fields: Any) -> Hours:
    """The night, by the clocks of a zone."""
    return Hours.model_validate({"from": "22:00", "to": "06:00", "zone": zone} | fields)


def length(chosen: Hours, whole: Span) -> float:
    """Seconds of a time that lie within hours of the week."""
    edges = (whole.begin, *switches(chosen, whole), whole.end)
    return sum(b - a for a, b in itertools.pairwise(edges) if chosen.include((a + b) / 2))


def local(text: str, zone: str) -> float:
    """Unix time of a local time."""
    return dt.datetime.fromisoformat(text).replace(tzinfo=zoneinfo.ZoneInfo(zone)).timestamp()


@pytest.mark.parametrize(
    ("zone", "day", "whole", "night"),
    [
        ("Europe/Berlin", "2026-03-29", 23, 7),
        ("Europe/Berlin", "2026-10-25", 25, 9),
        ("Europe/Berlin", "2026-06-01", 24, 8),
        ("America/New_York", "2026-11-01", 25, 9),
        ("Australia/Lord_Howe", "2026-04-05", 24.5, 8.5),
        ("Asia/Shanghai", "2026-03-29", 24, 8),
    ],
)
def test_a_day_has_the_hours_that_its_clocks_show(
    zone: str, day: str, whole: float, night: float
) -> None:
    """23 or 25 where they are changed; the night grows or shrinks with them."""
    begin = local(f"{day}T00:00", zone)
    end = local(f"{dt.date.fromisoformat(day) + dt.timedelta(days=1)}T00:00", zone)
    span = Span(begin, end)
    assert span.seconds == whole * 3600
    assert length(hours(zone), span) == night * 3600
    assert length(hours(zone, **{"from": "00:00", "to": "24:00"}), span) == whole * 3600


@given(
    begin=st.integers(1_760_000_000, 1_800_000_000),
    seconds=st.integers(1, 20 * 86400),
    start=st.sampled_from(["00:00", "02:30", "08:00", "22:00"]),
    end=st.sampled_from(["03:00", "06:15", "20:00", "24:00"]),
    zone=st.sampled_from(["Europe/Berlin", "America/New_York", "Asia/Kolkata", "UTC"]),
)
def test_no_price_changes_within_a_part(
    begin: int, seconds: int, start: str, end: str, zone: str
) -> None:
    """And the parts are the whole, without a gap."""
    chosen = hours(zone, **{"from": start, "to": end})
    whole = Span(float(begin), float(begin + seconds))
    edges = [whole.begin, *switches(chosen, whole), whole.end]
    assert edges == sorted(edges)
    for a, b in itertools.pairwise(edges):
        if b - a < 2:
            continue
        inside = {chosen.include(a + (b - a) * n / 7) for n in range(1, 7)}
        assert len(inside) == 1


def test_a_long_time_is_asked_for_day_by_day() -> None:
    """Without tariffs too; answers stay small."""
    parts = spans(PRICES, Span(0.0, 90 * DAY))
    assert len(parts) == 90
    assert sum(part.seconds for part in parts) == 90 * DAY
    assert all(a.end == b.begin for a, b in itertools.pairwise(parts))
