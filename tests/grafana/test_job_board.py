"""The Job board says how one job does, when something happens to it, and what an end would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from grafana import job
from tests.grafana.asking import target_of
from tests.grafana.fleets import BEST_EPOCH, EPOCH_SECONDS, EPOCHS, GIB
from tests.grafana.scenarios import DEAD, ENGINE_DEAD, HEALTHY, MIG, SHARED, Scenario

if TYPE_CHECKING:
    from tests.servers import Server

DAY_SECONDS = HEALTHY.window.end - HEALTHY.window.start
STATES = {value: name for value, name, _ in job.STATES}


def figure(
    past: Server, title: str, job_id: str, scenario: Scenario = HEALTHY, ref: str = "A"
) -> list[float]:
    """The values of one query for a job, at the end of the scenario."""
    found = target_of(title, ref).ask(past, scenario, job_id=job_id)
    return [float(row["value"][1]) for row in found]


def test_the_state_is_the_phase_or_that_there_is_no_trainer(past: Server) -> None:
    """And nothing at all where no node shows the job any more."""
    for job_id, name in (("j-cho", "train"), ("j-ben", "no trainer")):
        (state,) = figure(past, "State", job_id)
        assert STATES[f"{state:g}"] == name
    assert figure(past, "State", "j-dan") == []
    assert figure(past, "State", "j-cho", DEAD) == []


def test_the_next_step_is_told_by_a_living_engine_only(past: Server) -> None:
    """Seconds where a rule counts, "none" where none does, and nothing from a dead engine."""
    assert figure(past, "Next step in", "j-cho") == [900]
    assert figure(past, "Next step in", "j-ana-1") == [-1]
    assert figure(past, "Next step in", "j-cho", ENGINE_DEAD) == []
    assert figure(past, "Rules broken", "j-cho") == [1]
    assert figure(past, "Rules broken", "j-ana-1") == [0]
    assert figure(past, "Rules broken", "j-ana-1", ENGINE_DEAD) == []


def test_a_training_is_held_against_what_is_expected_of_it(past: Server) -> None:
    """The starved one does a twenty-sixth of it; a notebook has nothing to be held against."""
    assert figure(past, "Of expected", "j-cho") == [
        # the edges of the phases fall between two samples
        pytest.approx(3 / 78, rel=0.1)
    ]
    assert figure(past, "Of expected", "j-ben") == [-1]
    done = DAY_SECONDS // EPOCH_SECONDS
    assert figure(past, "Epochs done", "j-cho") == [pytest.approx(done / EPOCHS)]
    (left,) = figure(past, "Time left", "j-cho")
    assert left == pytest.approx((EPOCHS - done) * EPOCH_SECONDS, rel=0.02)


def test_what_an_end_would_lose_counts_every_card_since_the_last_saved_state(past: Server) -> None:
    """Without a saved state it is everything since the start, else the time since the last one."""
    assert figure(past, "At stake", "j-ben") == [4 * 3600 + 30]
    assert figure(past, "At stake", "j-ana-1") == [2 * (DAY_SECONDS % EPOCH_SECONDS)]
    (lines,) = target_of("Since the last saved state").ask(past, over="50m", job_id="j-ana-1")
    ages = [float(value) for _, value in lines["values"]]
    assert 0 <= min(ages) < 60
    assert EPOCH_SECONDS - 60 <= max(ages) < EPOCH_SECONDS


def test_the_best_epoch_is_marked_and_no_other(past: Server) -> None:
    """Points stand where mAP was at its height, for as long as no later epoch had another."""
    began = HEALTHY.window.start
    for series in target_of("mAP", "B").ask(past, job_id="j-cho"):
        epochs = {(int(time) - began) // EPOCH_SECONDS for time, _ in series["values"]}
        assert epochs == {BEST_EPOCH}


def test_why_it_is_flagged_has_a_row_for_each_rule_with_every_column(past: Server) -> None:
    """Also of a case that leads to nothing, and whose cause is not known."""
    row = {ref: target_of("Why it is flagged", ref).ask(past) for ref in "ABCDE"}
    assert row["A"][0]["metric"] == {"rule": "off-profile", "level": "light"}
    assert row["B"][0]["metric"] == {"rule": "off-profile", "cause": "data-loading"}
    assert row["E"][0]["metric"] == {"rule": "off-profile", "action": "checkpoint"}
    assert [float(row[ref][0]["value"][1]) for ref in "CD"] == [1800, 900]
    gone = {ref: target_of("Why it is flagged", ref).ask(past, job_id="j-gone") for ref in "ABCDE"}
    assert gone["B"][0]["metric"] == {"rule": "memory-hog", "cause": "not known"}
    assert gone["E"][0]["metric"] == {"rule": "memory-hog", "action": "nothing"}
    assert [float(gone[ref][0]["value"][1]) for ref in "CD"] == [86400, -1]


def test_a_card_that_cannot_be_measured_reads_not_known(past: Server) -> None:
    """A shared card without figures per process, and a MIG instance, are never called idle."""
    assert figure(past, "Each card", "j-dim-1", SHARED, "B") == [-1]
    assert figure(past, "Each card", "j-two-2", SHARED, "B") == [0.3]
    assert figure(past, "Each card", "j-mig-2", MIG, "B") == [-1]


def test_a_mig_instance_is_held_against_its_own_memory(past: Server) -> None:
    """Not against that of the card that it is a slice of."""
    (size,) = target_of("Memory of the fullest card", "C").ask(past, MIG, job_id="j-mig-1")
    assert {float(value) for _, value in size["values"]} == {10 * GIB}


def test_a_day_on_a_card_is_24_hours_of_it(past: Server) -> None:
    """And costs as many times its price; of a card that was held idle all of it is wasted."""
    assert figure(past, "GPU time", "j-cho") == [pytest.approx(24, rel=0.01)]
    assert figure(past, "Cost so far", "j-cho") == [pytest.approx(24 * 2.5, rel=0.01)]
    assert figure(past, "Wasted", "j-cho") == [0]
    # two cards for a day; and the half of a card that two share
    assert figure(past, "GPU time", "j-ana-1") == [pytest.approx(48, rel=0.01)]
    assert figure(past, "GPU time", "j-eve") == [pytest.approx(12, rel=0.01)]
    # it is idle from its first five minutes on
    assert figure(past, "Wasted", "j-ben") == [pytest.approx(1 - 5 / 240, rel=0.01)]
