"""Scrapes that come before there is anything to say."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING

import pytest
from tests.exporter.nodes import eventually
from tests.servers import free_port

from gpuwarden.exporter.app import patience_of
from gpuwarden.exporter.simulated import Card, Delay, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [
        ("10", 9.5),
        ("0.4", 0.2),
        ("3600", 30.0),
        ("", 0.0),
        ("-1", 0.0),
        ("nan", 0.0),
        ("inf", 0.0),
        ("soon", 0.0),
    ],
)
def test_patience(timeout: str, seconds: float) -> None:
    """A scrape is answered before its deadline, and whoever names none does not wait."""
    assert patience_of(timeout) == seconds


@pytest.fixture
def first_page(tmp_path: Path, scenario_file: Path) -> Iterator[Callable[[Scenario, str], str]]:
    """Starts an exporter and scrapes it as soon as it listens."""
    started: list[subprocess.Popen[bytes]] = []

    def scrape(scenario: Scenario, timeout: str) -> str:
        scenario.write(scenario_file)
        port, log = free_port(), tmp_path / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gpuwarden", "exporter"),
                    f"--web.listen-address=127.0.0.1:{port}",
                    f"--jobs.directory={tmp_path / 'jobs'}",
                    f"--gpus=simulated:{scenario_file}",
                ],
                stderr=file,
            )
        started.append(process)
        eventually(lambda: "listening" in log.read_text())
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/metrics",
            headers={"X-Prometheus-Scrape-Timeout-Seconds": timeout},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    yield scrape
    for process in started:
        process.kill()
        process.wait()


def test_the_first_scrape_waits(first_page: Callable[[Scenario, str], str]) -> None:
    """A driver that takes its time to open is not called down."""
    page = first_page(Scenario([Card(0)], delays=[Delay("nvmlInit*", 1000)]), "40")
    assert "\ngpuwarden_nvml_up 1" in page


def test_it_does_not_wait_for_ever(first_page: Callable[[Scenario, str], str]) -> None:
    """A driver that hangs from the start is called down, before the scraper gives up."""
    page = first_page(Scenario([Card(0)], delays=[Delay("nvmlInit*", 600_000)]), "1")
    assert "\ngpuwarden_nvml_up 0" in page
    assert "\ngpu_" not in page
