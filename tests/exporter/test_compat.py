"""dcgm-exporter's names: what dashboard 12239 asks for, asked of a real Prometheus."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.parse
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.exporter.nodes import eventually
from tests.servers import Server, binary, fetch, free_port, prometheus, until

from gpuwarden.exporter.compat import FOREIGN
from gpuwarden.exporter.simulated import GIB, Card, Fault, Scenario, SimulatedProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CARDS = Scenario(
    [
        Card(0, gpm=1, tensor=35, temperature=61, sm_clock=1980, power=650, pci="00000000:18:00.0"),
        Card(1, name="Tesla T4", temperature=40, power=27),
        Card(2, mig=1),
        Card(3),
    ],
    [SimulatedProcess(0, 1, memory=5 * GIB, sm=97, ghost=1)],
    faults=[Fault("*", 15, card=3), Fault("nvmlDeviceGetPowerUsage", 3, card=1)],
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts exporters on the cards and ends them with the test."""
    scenario = CARDS.write(tmp_path / "scenario")
    started: list[Server] = []

    def begin(*flags: str) -> Server:
        port = free_port()
        command = [sys.executable, "-m", "gpuwarden", "exporter", f"--gpus=simulated:{scenario}"]
        command += [f"--web.listen-address=127.0.0.1:{port}", f"--jobs.directory={tmp_path}"]
        command += ["--collect.interval=150ms", *flags]
        server = Server(
            f"http://127.0.0.1:{port}", tmp_path / "log", command, ready_path="/-/healthy"
        )
        server.start()
        started.append(server)
        return server

    yield begin
    for server in started:
        server.stop()


def _page(server: Server) -> dict[str, dict[str, float]]:
    """Family -> card -> value."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(fetch(server.url + "/metrics").decode()):
        if family.name.startswith("DCGM"):
            found[family.name] = {item.labels["gpu"]: item.value for item in family.samples}
    return found


def test_off_by_default(start: Callable[..., Server]) -> None:
    """Beside a dcgm-exporter nobody is counted twice without having asked for it."""
    server = start()
    assert until(lambda: "gpu_up" in fetch(server.url + "/metrics").decode())
    assert _page(server) == {}


def test_values_in_dcgms_units(start: Callable[..., Server]) -> None:
    """MHz, per cent and MiB; what a card does not tell is absent, and a lost card has nothing."""
    server = start("--compat=dcgm")
    page = eventually(
        lambda: _page(server), until=lambda seen: "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE" in seen
    )
    assert page == {
        "DCGM_FI_DEV_SM_CLOCK": {"0": 1980, "1": 1410, "2": 1410},
        "DCGM_FI_DEV_GPU_TEMP": {"0": 61, "1": 40, "2": 41},
        "DCGM_FI_DEV_POWER_USAGE": {"0": 650, "2": page["DCGM_FI_DEV_POWER_USAGE"]["2"]},
        "DCGM_FI_DEV_GPU_UTIL": {"0": 97, "1": 0},
        "DCGM_FI_DEV_FB_USED": {"0": 5 * 1024, "1": 0, "2": 0},
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": {"0": 0.35},
    }
    assert set(page) == set(FOREIGN)


def test_a_switch_that_is_off_is_on_for_it(start: Callable[..., Server]) -> None:
    """Whoever asks for dcgm's families gets the clock too."""
    server = start("--compat=dcgm", "--no-collector.clock")
    assert until(lambda: _page(server).get("DCGM_FI_DEV_SM_CLOCK"))


def test_what_the_dashboard_asks(start: Callable[..., Server], tmp_path: Path) -> None:
    """The variables and panels of dashboard 12239 have an answer for every card that has one."""
    server = start("--compat=dcgm")
    target = server.url.removeprefix("http://")
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "gpu", "static_configs": [{"targets": [target]}]}],
    }
    with prometheus(json.dumps(config), tmp_path / "tsdb") as found:

        def values(label: str) -> list[str]:
            match = urllib.parse.urlencode({"match[]": "DCGM_FI_DEV_GPU_TEMP"})
            answer: list[str] = found.json(f"/api/v1/label/{label}/values?{match}")["data"]
            return answer

        until(lambda: found.query("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"))
        assert values("instance") == [target]
        assert values("gpu") == ["0", "1", "2"]
        chosen = f'{{instance=~"{target}", gpu=~"(0|1|2)"}}'

        def cards(expression: str) -> dict[str, float]:
            rows = found.query(expression.replace("@", chosen))
            return {row["metric"].get("gpu", ""): float(row["value"][1]) for row in rows}

        assert cards("DCGM_FI_DEV_GPU_TEMP@") == {"0": 61, "1": 40, "2": 41}
        assert cards("avg(DCGM_FI_DEV_GPU_TEMP@)") == {"": pytest.approx(142 / 3)}
        assert set(cards("DCGM_FI_DEV_POWER_USAGE@")) == {"0", "2"}
        assert cards("sum(DCGM_FI_DEV_POWER_USAGE@)")[""] >= 650
        assert cards("DCGM_FI_DEV_SM_CLOCK@ * 1000000")["0"] == 1.98e9
        assert cards("DCGM_FI_DEV_GPU_UTIL@") == {"0": 97, "1": 0}
        assert cards("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE@") == {"0": 0.35}
        assert cards("DCGM_FI_DEV_FB_USED@")["0"] == 5120
        (row,) = found.query('DCGM_FI_DEV_GPU_TEMP{gpu="0"}')
        labels = row["metric"]
    assert labels["UUID"] == CARDS.cards[0].uuid
    assert labels["modelName"] == "NVIDIA A100-SXM4-40GB"
    assert (labels["device"], labels["pci_bus_id"]) == ("nvidia0", "00000000:18:00.0")
    assert labels["Hostname"] == labels["hostname"] == socket.gethostname()


def test_the_page_is_still_one_that_is_read(start: Callable[..., Server]) -> None:
    """Names in capitals are valid; of promtool's complaints none is of another kind."""
    server = start("--compat=dcgm")
    until(lambda: _page(server))
    text = fetch(server.url + "/metrics", Accept="application/openmetrics-text;version=1.0.0")
    assert text.endswith(b"# EOF\n")
    page = fetch(server.url + "/metrics")
    done = subprocess.run(
        [binary(("promtool",)), "check", "metrics"],
        input=page,
        capture_output=True,
        check=False,
        timeout=60,
    )
    complaints = {
        line.partition(" ")[2] for line in done.stderr.decode().splitlines() if "DCGM" not in line
    }
    assert complaints == set()
