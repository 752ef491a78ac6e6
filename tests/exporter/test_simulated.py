from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from gpuwarden.errors import InvalidInput, PermanentError
from gpuwarden.exporter.simulated import SCENARIO_VARIABLE, SONAME, Card, Scenario, build

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuwarden.exporter.nvml import Nvml


def test_built_once_by_many(tmp_path: Path) -> None:
    """Starting at the same time, all get the same whole library, and later ones find it."""
    with ThreadPoolExecutor(4) as pool:
        libraries = set(pool.map(lambda _: build(tmp_path / "cache"), range(4)))
    (library,) = libraries
    assert library.name == SONAME
    built = library.stat().st_mtime_ns
    assert build(tmp_path / "cache") == library
    assert library.stat().st_mtime_ns == built
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the message says what to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PermanentError, match="apt-get install gcc"):
        build(tmp_path / "cache")


def test_a_cache_that_others_can_write(tmp_path: Path) -> None:
    """Code is not loaded from a folder that somebody else can write."""
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidInput, match="only you can write"):
        build(tmp_path)


def test_a_short_scenario_has_the_same_defaults(
    driver: Callable[[Scenario], Nvml], scenario_file: Path
) -> None:
    """What a file written by hand leaves out is as for a scenario from Python."""
    scenario = Scenario([Card(0), Card(1)])
    nvml = driver(scenario)
    expected = nvml.snapshot()
    nvml.close()
    scenario_file.write_text("card index=0\ncard index=1\n")
    nvml.open()
    found = nvml.snapshot()
    assert found.complete
    assert [replace(gpu, energy_joules=None) for gpu in found.gpus] == [
        replace(gpu, energy_joules=None) for gpu in expected.gpus
    ]


def test_other_programs_take_it_for_the_driver(scenario_file: Path) -> None:
    """An unmodified program that uses pynvml runs on it, by the loader's own search path."""
    Scenario([Card(0), Card(1, utilization=42)], driver="575.1").write(scenario_file)
    program = (
        "import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(1);"
        "print(n.nvmlSystemGetDriverVersion(), n.nvmlDeviceGetCount(), n.nvmlDeviceGetName(h),"
        "n.nvmlDeviceGetUtilizationRates(h).gpu, n.nvmlDeviceGetPciInfo(h).busId)"
    )
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(build().parent),
        SCENARIO_VARIABLE: str(scenario_file),
    }
    answer = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        env=environment,
        text=True,
        timeout=60,
    )
    assert answer.stdout == "575.1 2 NVIDIA A100-SXM4-40GB 42 00000000:11:00.0\n"
