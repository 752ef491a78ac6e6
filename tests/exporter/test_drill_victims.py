"""The victim of a drill: what it holds, what it says of itself, and how it can be ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.servers import binary, until

from gpuwarden import job_files
from gpuwarden.errors import InvalidInput
from gpuwarden.exporter import scenarios
from gpuwarden.exporter.drill_victims import (
    Ending,
    OnTerm,
    SimulatedCard,
    new_run_id,
    wait_to_be_ended,
)
from gpuwarden.exporter.scenarios import Card, Scenario, SimulatedProcess

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1024 * 1024


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    """Two simulated cards; a ghost, an earlier drill that is gone, and this process on them."""
    here = SimulatedProcess(card=1, pid=os.getpid(), memory=5 * MIB)
    gone = SimulatedProcess(card=0, pid=2**22 - 3, start=77, memory=3 * MIB)
    ghost = SimulatedProcess(card=0, pid=2**22 - 4, memory=2 * MIB, ghost=1)
    cards = [Card(index=0), Card(index=1)]
    (tmp_path / "run" / "jobs").mkdir(parents=True)
    return Scenario(cards=cards, processes=[here, gone, ghost]).write(tmp_path / "gpus.scenario")


def started(scenario: Path, *words: str) -> subprocess.Popen[bytes]:
    """A victim as a process of its own; what it says is in a log."""
    command = [sys.executable, "-m", "gpuwarden", "drill", "victim"]
    where = ["--gpus", f"simulated:{scenario}", "--jobs.directory", str(scenario.parent / "run")]
    with log(scenario).open("wb") as out:
        return subprocess.Popen(
            [*command, *where, "--run-id", "drill-test-1", *words], stdout=out, stderr=out
        )


def log(scenario: Path) -> Path:
    """Where a victim writes what it says."""
    return scenario.parent / "victim.log"


def declared(scenario: Path) -> Path:
    """The file in which the victim says what it is."""
    return job_files.description_path(scenario.parent / "run", "drill-test-1")


def test_it_holds_memory_and_says_that_it_is_a_drill_until_it_is_asked_to_leave(
    scenario: Path,
) -> None:
    """By its own pid, on the card that was named; on SIGTERM it takes its word back."""
    victim = started(scenario, "--card", "1", "--memory", "64")
    until(declared(scenario).exists, 60)
    found = job_files.RunDescription.decode(declared(scenario).read_bytes())
    assert (found.run_id, found.pid) == ("drill-test-1", victim.pid)
    held = {item.pid: item for item in scenarios.read(scenario).processes}
    assert (held[victim.pid].card, held[victim.pid].memory) == (1, 64 * MIB)
    # What else stands there is left alone, but for drills that are gone.
    assert set(held) == {victim.pid, os.getpid(), 2**22 - 4}
    victim.terminate()
    assert victim.wait(60) == 0
    assert not declared(scenario).exists()


def test_a_deaf_one_is_ended_by_sigkill_alone(scenario: Path) -> None:
    """SIGTERM does nothing; its file stays, for the exporter to reap."""
    victim = started(scenario, "--on-term", "ignore")
    until(declared(scenario).exists, 60)
    victim.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        victim.wait(1)
    victim.kill()
    assert victim.wait(60) == -signal.SIGKILL
    assert declared(scenario).exists()


def test_one_that_nobody_ends_says_so(scenario: Path) -> None:
    """After its bound it leaves by itself, with a status that a timer's unit shows as failed."""
    victim = started(scenario, "--for", "100ms")
    assert victim.wait(60) == 1
    assert "nobody ended this drill" in log(scenario).read_text()


def test_on_a_node_without_a_driver_it_never_holds_silently_nothing(scenario: Path) -> None:
    """No libcuda is an error that names the way out; nothing is declared."""
    victim = started(scenario, "--gpus", "driver")
    assert victim.wait(60) == 3
    assert "--gpus simulated:FILE" in log(scenario).read_text()
    assert not declared(scenario).exists()


@pytest.mark.parametrize("words", [["--gpus", "sim"], ["--gpus", "simulated:"]])
def test_it_refuses_what_is_no_card(scenario: Path, words: list[str]) -> None:
    """Wrong usage ends with 2."""
    assert started(scenario, *words).wait(60) == 2


@pytest.mark.parametrize("run_id", ["train-1", "drill", "drill-ä", "drill-" + "x" * 70])
def test_a_run_that_is_no_drill_is_refused(scenario: Path, run_id: str) -> None:
    """Else the engine would take it for a job."""
    card = SimulatedCard(scenario, 0, MIB)
    with pytest.raises(InvalidInput, match="no drill's run id"):
        wait_to_be_ended(
            card, run_id=run_id, jobs=scenario.parent, on_term=OnTerm.LEAVE, seconds=0.0
        )


def test_it_ends_by_itself_in_the_process_that_called_it(scenario: Path) -> None:
    """The mask of signals is as before, and the word is taken back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    run_id = new_run_id("gpu.node:7", now=1_764_471_600.7)
    assert run_id == "drill-gpu-node-7-1764471600"
    ending = wait_to_be_ended(
        SimulatedCard(scenario, 0, MIB),
        run_id=run_id,
        jobs=scenario.parent / "run",
        on_term=OnTerm.IGNORE,
        seconds=0.01,
    )
    assert ending is Ending.BOUND
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert list((scenario.parent / "run" / "jobs").iterdir()) == []


LIBCUDA = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static void say(const char *what, unsigned long long value) {
    FILE *out = fopen(getenv("CALLS"), "a");
    fprintf(out, "%s %llu\\n", what, value);
    fclose(out);
}
static int fails(const char *what) {
    const char *name = getenv("FAILS");
    return name != NULL && strcmp(name, what) == 0 ? 2 : 0;
}
int cuInit(unsigned flags) { say("init", flags); return fails("init"); }
int cuDeviceGet(int *device, int index) {
    *device = index; say("device", index); return fails("device");
}
int cuCtxCreate_v2(void **context, unsigned flags, int device) {
    *context = (void *)0x1234; say("context", device); return fails("context");
}
int cuCtxDestroy_v2(void *context) { say("destroy", (unsigned long long)context); return 0; }
int cuMemAlloc_v2(unsigned long long *memory, size_t size) {
    *memory = 0x700000000001ULL; say("alloc", size); return fails("alloc");
}
int cuMemsetD8_v2(unsigned long long memory, unsigned char value, size_t size) {
    say("set", memory); return fails("set");
}
int cuGetErrorString(int status, const char **text) { *text = "out of memory"; return 0; }
"""
"""The functions of the driver's library that a victim calls, with their real signatures."""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A libcuda that writes down its calls; the file of the calls."""
    (tmp_path / "cuda.c").write_text(LIBCUDA)
    built = ["-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(tmp_path / "cuda.c")]
    subprocess.run([binary(("gcc",)), *built], check=True, timeout=60)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def test_on_a_real_card_the_memory_is_asked_of_the_driver_and_goes_with_its_context(
    scenario: Path, driver: Path
) -> None:
    """The card that was named, so many bytes, touched once; all of it freed on SIGTERM."""
    victim = started(scenario, "--gpus", "driver", "--card", "3", "--memory", "64")
    until(declared(scenario).exists, 60)
    calls = ["init 0", "device 3", "context 3", f"alloc {64 * MIB}", f"set {0x700000000001}"]
    assert driver.read_text().splitlines() == calls
    victim.terminate()
    assert victim.wait(60) == 0
    assert driver.read_text().splitlines() == [*calls, f"destroy {0x1234}"]


@pytest.mark.parametrize("call", ["init", "device", "context", "alloc", "set"])
def test_a_driver_that_refuses_is_told_with_its_own_words(
    scenario: Path, driver: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Nothing is declared, and no context is left behind."""
    monkeypatch.setenv("FAILS", call)
    assert started(scenario, "--gpus", "driver").wait(60) == 3
    assert (
        "out of memory; is there such a card, and memory left on it?" in log(scenario).read_text()
    )
    assert not declared(scenario).exists()
    calls = driver.read_text().splitlines()
    assert calls[-1].split()[0] == ("destroy" if call in ("alloc", "set") else call)
