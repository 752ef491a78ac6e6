"""A cause is named with the figures that speak for it, and only where they do."""

from __future__ import annotations

import pytest
from tests.ruleengine.fleets import A100, GIB, a_job, a_profile, a_run

from gpuwarden.ruleengine.causes import diagnose
from gpuwarden.ruleengine.verdicts import (
    Cause,
    Evidence,
    GpuFacts,
    JobFacts,
    SignalKey,
    Truth,
    Verdict,
)

VERDICT = Verdict("r", "j", Truth.YES, (Evidence("x <= 5 %", Truth.YES, measured="GPU 0: 2 %"),))


def _job(throttle: tuple[str, ...] = (), *, declared: bool = True, **figures: float) -> JobFacts:
    per_card = {"gpu_utilization", "gpu_memory"}
    values = {
        SignalKey(name, "avg", 300): {"g0" if name in per_card else "": value}
        for name, value in figures.items()
    }
    gpu = GpuFacts("g0", "0", A100, 40 * GIB, throttle=throttle)
    return a_job(values, gpus=(gpu,), run=a_run() if declared else None)


def _cause(job: JobFacts) -> Cause:
    return diagnose(job, VERDICT, [a_profile()])


def test_memory_far_above_the_declared_batch_is_hyperparameters() -> None:
    """Even if it also waits for data: what was declared is not what runs."""
    cause = _cause(_job(gpu_memory=37 * GIB, throughput=8, data_wait_share=0.9))
    assert cause.name == "hyperparameters"
    assert "37 GiB of GPU memory are held, where 10 GiB are expected" in cause.because
    assert "8 img/s of 100 img/s expected" in cause.because
    assert "batch=64" in cause.remedy


def test_a_loop_that_waits_is_data_loading() -> None:
    """The share of the waiting and the throughput are in the reason."""
    cause = _cause(
        _job(gpu_utilization=0.9, gpu_memory=10 * GIB, throughput=2, data_wait_share=0.93)
    )
    assert cause.name == "data-loading"
    assert "93 % of its time" in cause.because
    assert "2 img/s of 100 img/s expected" in cause.because
    assert "workers" in cause.remedy


def test_without_the_loops_word_blocked_processes_speak_for_data_loading() -> None:
    """An older trainer does not count its waiting."""
    cause = _cause(_job(gpu_memory=10 * GIB, throughput=20, job_io_wait=3.2, job_cpu_cores=0.4))
    assert cause.name == "data-loading"
    assert "3.2 processes are blocked on I/O" in cause.because
    assert "0.4 cores" in cause.because


def test_waiting_at_full_throughput_is_no_cause() -> None:
    """It is in line with its profile: nothing is wrong with its loader."""
    assert _cause(_job(throughput=100, data_wait_share=0.8)).name == "unknown"


@pytest.mark.parametrize("declared", [True, False])
def test_memory_held_and_nothing_done_is_idle(declared: bool) -> None:
    """Whether or not a trainer speaks."""
    cause = _cause(
        _job(declared=declared, gpu_utilization=0.0, gpu_memory=10 * GIB, job_cpu_cores=0.001)
    )
    assert cause.name == "idle"
    assert "10 GiB of GPU memory are held and the GPU is used 0 %" in cause.because


def test_heat_lowers_clocks_and_is_the_machines_fault() -> None:
    """The owner can do nothing about it; the power cap is how a busy card runs."""
    figures = {"gpu_utilization": 0.95, "gpu_memory": 10 * GIB, "throughput": 60.0}
    assert _cause(_job(("hw_thermal",), **figures)).name == "hardware"
    assert _cause(_job(("sw_power_cap",), **figures)).name == "model"


def test_a_busy_card_that_yields_little_leaves_the_model() -> None:
    """Nothing waits, memory fits, clocks are up."""
    cause = _cause(
        _job(gpu_utilization=0.97, gpu_memory=10 * GIB, throughput=60, data_wait_share=0.02)
    )
    assert cause.name == "model"
    assert "97 % of the time" in cause.because


def test_where_nothing_is_known_the_verdicts_evidence_is_quoted() -> None:
    """An honest `unknown` beats a guess."""
    cause = _cause(_job(declared=False))
    assert cause == Cause("unknown", "x <= 5 %: GPU 0: 2 %")


def test_the_longest_window_is_used() -> None:
    """A short window of another rule says less."""
    job = a_job(
        {
            SignalKey("data_wait_share", "avg", 20): {"": 0.1},
            SignalKey("data_wait_share", "avg", 300): {"": 0.9},
        },
        run=a_run(),
    )
    assert diagnose(job, VERDICT, []).name == "data-loading"
