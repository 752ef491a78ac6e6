"""What the queries give, asked of a real Prometheus over back-filled history."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.fleets import GIB, NOW, SCRAPE, fleet_history
from tests.servers import Server, backfill, prometheus

from gpuwarden.catalogue import CATALOGUE
from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.verdicts import SignalKey

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Prometheus that holds ten minutes of the fleet."""
    storage = tmp_path_factory.mktemp("fleet") / "tsdb"
    backfill(fleet_history().text(), storage)
    with prometheus("global: {}\n", storage) as running:
        yield running


def _known(server: Server, key: SignalKey) -> dict[tuple[str, str], float]:
    rows = server.query(signals.query(key, scrape_interval=SCRAPE), at=NOW)
    return {
        (row["metric"].get("job_id", ""), row["metric"].get("uuid", "")): float(row["value"][1])
        for row in rows
    }


def test_every_signal_reads_a_metric_of_the_catalogue() -> None:
    """A renamed metric must not silently turn a signal into UNKNOWN."""
    assert {spec.metric for spec in signals.SIGNALS.values()} <= set(CATALOGUE)


@pytest.mark.parametrize(
    ("signal", "agg", "expected"),
    [
        ("gpu_utilization", "max", 0.9),
        ("gpu_utilization", "last", 0.9),
        ("gpu_memory", "min", 20 * GIB),
        ("gpu_memory_share", "q0.2", 0.5),
        ("job_cpu_cores", "avg", 3.5),
        ("job_read_rate", "avg", 2 * 2**20),
        ("job_io_wait", "avg", 0.5),
        ("job_loader_workers", "min", 8),
        ("job_cpu_pressure", "avg", 0.25),
        ("job_io_pressure", "avg", 0.125),
        ("job_zombie_processes", "min", 1),
        ("job_resident_memory", "last", 6 * GIB),
        ("throughput", "avg", 50),
        ("step_rate", "avg", 50 / 64),
        ("data_wait_share", "avg", 0.6),
    ],
)
def test_a_signal_of_a_healthy_training_has_its_value(
    server: Server, signal: str, agg: str, expected: float
) -> None:
    """Each query gives the figure that the history was written with."""
    key = SignalKey(signal, agg, 0 if agg == "last" else 300)
    found = {job: value for (job, _), value in _known(server, key).items()}
    assert math.isclose(found["train"], expected, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("signal", "expected"),
    [
        ("card_utilization", 0.75),
        ("card_memory_share", 0.75),
        ("card_memory_activity", 0.25),
        ("card_power", 300),
        ("card_power_share", 0.75),
        ("card_temperature", 66),
        ("card_throttled", 1),
        ("card_unattributed_memory", 3 * GIB),
    ],
)
def test_a_signal_of_a_card_has_its_value(server: Server, signal: str, expected: float) -> None:
    """Values of a card have no job: whose they are is decided where jobs are known."""
    assert _known(server, SignalKey(signal, "avg", 60))["", "free"] == expected


def test_every_signal_was_tried_against_the_server() -> None:
    """A signal that is added must be added to the two lists above."""
    tried = {
        mark.args[1][index][0]
        for test in (
            test_a_signal_of_a_healthy_training_has_its_value,
            test_a_signal_of_a_card_has_its_value,
        )
        for mark in test.pytestmark  # type: ignore[attr-defined]
        for index in range(len(mark.args[1]))
    }
    assert tried == set(signals.SIGNALS)


def test_the_power_cap_is_no_throttling_and_of_several_reasons_one_suffices(
    server: Server,
) -> None:
    """How a busy card normally runs is no fault; a card has one value, not one for each reason."""
    found = _known(server, SignalKey("card_throttled", "avg", 60))
    assert found == {("", "train"): 1, ("", "free"): 1, ("", "shared"): 0}


def test_a_mig_instance_is_a_card_of_its_own(server: Server) -> None:
    """Of an instance a job holds a share of the instance's memory; its load is the instance's."""
    share = _known(server, SignalKey("gpu_memory_share", "min", 300))
    assert share["sliced", "slice"] == 0.2
    assert share["mig", "mig"] == 0.5
    assert _known(server, SignalKey("gpu_utilization", "max", 300))["sliced", "slice"] == 0.4


@pytest.mark.parametrize("job", ["gap", "single", "stale", "mig"])
def test_what_was_not_measured_well_has_no_row(server: Server, job: str) -> None:
    """A gap in the window, a single sample, a stale series and a card without the value."""
    found = {name for name, _ in _known(server, SignalKey("gpu_utilization", "max", samples=3))}
    assert job not in found
    assert {"busy", "half", "idle"} <= found


@pytest.mark.parametrize(
    "key", [SignalKey("gpu_utilization", "avg", 300), SignalKey("gpu_utilization", "last")]
)
def test_a_full_window_whose_last_sample_is_old_has_no_row(server: Server, key: SignalKey) -> None:
    """Twelve seconds are more than two scrapes, although Prometheus still serves the value."""
    found = {name for name, _ in _known(server, key)}
    assert "stale" not in found
    assert "idle" in found
    assert server.query('gpu_job_utilization_ratio{job_id="stale"}', at=NOW)


def test_one_idle_card_of_two_is_seen_as_one(server: Server) -> None:
    """Rows are per job and card, so that nobody can mistake one card for the job."""
    found = _known(server, SignalKey("gpu_utilization", "max", samples=3))
    assert found["half", "half0"] == 0.9
    assert found["half", "half1"] == 0.0


def test_a_hung_trainer_has_no_throughput_and_a_validating_one_is_unknown(server: Server) -> None:
    """Zero means that it stands still; validation is not slowness."""
    found = {
        job: value
        for (job, _), value in _known(server, SignalKey("throughput", "avg", 300)).items()
    }
    assert found["hung"] == 0
    assert "val" not in found


def test_a_window_of_samples_holds_at_least_that_many_whatever_the_version() -> None:
    """Half a scrape of slack: Prometheus 2 keeps both ends of a window, 3 only the newer."""
    key = SignalKey("gpu_utilization", "max", samples=3)
    assert "[17s500ms]" in signals.query(key, scrape_interval=5)
    assert signals.min_samples(key, 5) == 3
    assert signals.min_samples(SignalKey("gpu_utilization", "max", 300), 5) == 48


def test_a_series_that_two_targets_export_does_not_break_the_division(server: Server) -> None:
    """The divisor is one row for each card; a second one would fail the whole fleet's query."""
    assert len(server.query('gpu_memory_total_bytes{uuid="idle"}', at=NOW)) == 2
    found = _known(server, SignalKey("gpu_memory_share", "min", 300))
    assert found["idle", "idle"] == 0.75
    assert found["busy", "busy0"] == 0.5
