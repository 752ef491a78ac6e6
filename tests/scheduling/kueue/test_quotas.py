"""Shares and what fits, as Kueue counts them; bookings move cards and lose none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.scheduling.kueue.clusters import kueue_policy
from tests.scheduling.policy_files import a_policy

from gpuwarden.scheduling.kueue.quotas import POOL, Ledger, Share, Use, shares_of
from gpuwarden.scheduling.slots import Slot


def a_slot(gpus: int, team: str = "vision", *, name: str = "b1", start: float = 100.0) -> Slot:
    """A booking of the fleet's one kind of cards."""
    return Slot(name, team, "ana", gpus, "a100-40", start, start + 3600.0, 600.0)


@given(st.lists(st.tuples(st.integers(1, 40), st.sampled_from(["vision", "speech"]))))
def test_bookings_lose_and_make_no_card(wishes: list[tuple[int, str]]) -> None:
    """However many there are: the sum stays the fleet's, and nobody has less than nothing."""
    policy = a_policy(engine="kueue")
    slots = [
        a_slot(gpus, team, name=f"b{index}", start=float(index))
        for index, (gpus, team) in enumerate(wishes)
    ]
    before, after = shares_of(policy), shares_of(policy, slots)
    for card in ("a100-40", "h100-80"):
        total = [share.own for (_team, kind), share in before.items() if kind == card]
        now = [share.own for (_team, kind), share in after.items() if kind == card]
        assert sum(total) == sum(now)
        assert min(now) >= 0
    assert all(0 <= share.lends <= share.own or team == POOL for (team, _), share in after.items())
    assert after == shares_of(policy, reversed(slots))
    assert shares_of(policy) == before


def test_a_booking_takes_nobodys_cards_first() -> None:
    """Then those of the others, in proportion; what the team has of its own, from nobody."""
    policy = a_policy(engine="kueue")

    def own(gpus: int) -> dict[str, int]:
        shares = shares_of(policy, [a_slot(gpus)])
        return {key[0]: share.own for key, share in shares.items() if key[1] == "a100-40"}

    assert own(10) == {POOL: 4, "vision": 16, "speech": 12}
    assert own(18) == {POOL: 2, "vision": 18, "speech": 12}
    assert own(22) == {POOL: 0, "vision": 22, "speech": 10}
    assert own(99) == {POOL: 0, "vision": 32, "speech": 0}


def test_booked_cards_are_not_lent() -> None:
    """They are there when the team comes; and what a team has booked, no other booking takes."""
    policy = a_policy(engine="kueue")
    shares = shares_of(policy, [a_slot(10)])
    assert shares["vision", "a100-40"] == Share(16, 8, 6)
    both = shares_of(policy, [a_slot(99), a_slot(5, "speech", name="b2")])
    assert both["speech", "a100-40"].own == 5


def test_what_fits() -> None:
    """Own cards, borrowed ones up to the limit, and none that somebody does not lend."""
    shares = {
        (POOL, "a"): Share(1, 0, 0),
        ("x", "a"): Share(2, 2, 2),
        ("y", "a"): Share(3, 0, 1),
    }
    empty = Ledger(shares)
    assert empty.fits("x", ("a",), 4) == "a"  # 2 own, 1 of the cohort's, 1 lent
    assert empty.fits("x", ("a",), 5) is None  # its limit is 2 more than its own
    busy = Ledger(shares, (Use("j", "y", "a", 3),))
    assert busy.fits("x", ("a",), 3) == "a"
    assert busy.fits("x", ("a",), 4) is None
    assert busy.fits("x", ("a",), 4, without=frozenset({"j"})) == "a"
    lent = Ledger(shares, (Use("j", "x", "a", 4),))
    assert lent.fits("y", ("a",), 2) == "a"  # what it does not lend is there whatever happens
    assert lent.fits("y", ("a",), 3) is None
    assert lent.borrows("x", "a")
    assert not busy.borrows("y", "a")
    assert empty.never("x", ("a",), 5)
    assert not busy.never("x", ("a",), 4)


def test_the_first_kind_that_has_room() -> None:
    """The preferred kind is the first one, and an unknown one has no room."""
    shares = {("x", "a"): Share(1, 0, 1), ("x", "b"): Share(4, 0, 4), (POOL, "a"): Share(0, 0, 0)}
    ledger = Ledger(shares, (Use("j", "x", "a", 1),))
    assert ledger.fits("x", ("a", "b"), 1) == "b"
    assert ledger.fits("x", ("c",), 1) is None


def test_the_whole_request_fits_one_kind() -> None:
    """Cards of two kinds are no place for one job."""
    policy = kueue_policy()
    ledger = Ledger(shares_of(policy))
    assert ledger.fits("vision", ("a100-40",), 2) == "a100-40"
    assert ledger.fits("vision", ("a100-40",), 3) is None
