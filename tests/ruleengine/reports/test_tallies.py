"""What gathered figures come to: sums that agree, means over what is known, gaps as gaps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ruleengine.reports.stocks import TEAMS, gathered, told

from gpuwarden.ruleengine.reports import tallies
from gpuwarden.ruleengine.reports.readers import Reader

HOURS = st.lists(st.floats(0, 24), min_size=3, max_size=3)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["ana", "ben", "cho", "dan", "eve"]), HOURS),
    st.floats(0, 1),
)
def test_teams_add_up_to_the_whole(held: dict[str, list[float]], share: float) -> None:
    """People to teams, teams and days to the total; whoever has no team is in it too."""
    idle = {user: [share * hours for hours in own] for user, own in held.items()}
    found = told(gathered(held, idle, days=3), Reader(TEAMS))

    for name in ("held_hours", "idle_hours"):
        total = sum(sum(own) for own in (held if name == "held_hours" else idle).values())
        for rows in (found["people"], found["teams"], found["days"], found["timeline"]):
            # each row is rounded to a thousandth of an hour
            within = 0.001 * (len(rows) + 1)
            assert sum(row[name] for row in rows) == pytest.approx(total, abs=within)
        assert found["totals"][name] == pytest.approx(total, abs=0.001)


def test_a_gap_is_told_as_a_gap() -> None:
    """A day without samples has no utilisation, no jobs and no hours; means leave it out."""
    found = told(gathered({"ana": [24.0, 0.0, 12.0]}, days=3, answered=[1.0, 0.0, 0.5]))

    assert [day["coverage"] for day in found["days"]] == [1.0, 0.0, 0.5]
    assert [day["utilization"] for day in found["days"]] == [0.5, None, 0.5]
    assert found["days"][1]["jobs_at_once"] is None
    assert found["totals"]["utilization"] == 0.5
    assert found["totals"]["coverage"] == 0.5
    assert found["week"][2] == [None] * 24
    assert any("2025-11-26" in text for text in found["cautions"])


def test_hours_of_the_week_are_those_of_the_zone() -> None:
    """The 25th hour of the day on which clocks go back is in the hour that comes twice."""
    begin = 1_761_429_600.0  # 2025-10-26 00:00 in Berlin
    found = gathered({}, days=1, zone="Europe/Berlin", begin=begin)

    hours = tallies.week_hours(found)

    assert hours[6][2] == 2.0
    assert sum(map(sum, hours)) == 24.0
    assert tallies.week(found)[6][2] == 0.5
    assert tallies.week(found)[0][2] is None


def test_cards_nobody_held_have_had_no_job() -> None:
    """Jobs per card is over all cards that answered: four jobs on ten cards."""
    (day,) = tallies.days(gathered({}, days=1))

    assert (day["cards"], day["jobs_per_card"], day["most_jobs_on_a_card"]) == (10, 0.4, 3)


def test_periods_that_are_not_covered_alike_are_not_compared_without_a_word() -> None:
    """The caution names both coverages."""
    now = gathered({"ana": [24.0] * 7}, answered=[1.0] * 7)
    before = gathered({"ana": [24.0] * 7}, answered=[1.0] * 5 + [0.0] * 2)

    found = told(now, earlier=before)

    assert any("71 % before, 100 % now" in text for text in found["cautions"])
    row = next(row for row in found["comparison"] if row["figure"] == "held_hours")
    assert (row["now"], row["before"], row["change"]) == (168.0, 168.0, 0.0)


def test_what_a_report_calls_idle_is_said_where_nothing_was() -> None:
    """A rule with a shorter window may have ended an idle job all the same."""
    _, wasted, _ = told(gathered({"ana": [24.0] * 7}))["answer"]

    assert wasted.startswith("Nothing was held idle for 5 minutes on end")


def test_the_answer_says_what_was_done_wasted_and_changed() -> None:
    """Three sentences that stand alone."""
    held = {"ana": [24.0] * 7, "ben": [12.0] * 7}
    found = told(
        gathered(held, {"ben": [6.0] * 7}, cost={"ana": 10.0}),
        earlier=gathered(held, {"ben": [12.0] * 7}),
    )

    did, wasted, changed = found["answer"]
    assert did == (
        "2 people of 2 teams held cards for 252 card-hours (15 % of all) from 25 November to "
        "1 December 2025; the cards were busy for 50 % of the time."
    )
    assert wasted == "42.0 card-hours were held idle, 17 % of what was held (10.00 EUR)."
    assert changed == (
        "Against 25 November to 1 December 2025: utilisation stayed at 50 %; the idle share fell "
        "from 33 % to 17 %; what was held stayed at 252 card-hours."
    )


def test_money_that_was_recorded_of_another_team_is_in_the_sums() -> None:
    """Whoever has changed teams since has two rows, and is one person; no amount is left out."""
    found = told(gathered({"ana": [24.0]}, days=1, cost={"ana": 10.0, "was-elsewhere": 5.0}))

    for rows in (found["people"], found["teams"]):
        assert sum(row["cost"].get("EUR", 0.0) for row in rows) == 15.0
    assert found["totals"]["cost"] == {"EUR": 15.0}
    assert found["totals"]["people"] == 1


def test_a_fleet_that_nobody_used_is_told_in_one_sentence() -> None:
    """Without hours there is no share of them."""
    found = told(gathered({}))

    assert found["answer"][0].startswith("The fleet used no card from 25 November")
    assert found["totals"]["idle_share"] is None
