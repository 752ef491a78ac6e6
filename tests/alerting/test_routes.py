"""Who hears what: the table in alerting/routes_test.yaml against alerting/alertmanager.yml."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from tests.servers import binary

ALERTING = Path(__file__).parents[2] / "alerting"
CONFIG = ALERTING / "alertmanager.yml"
CASES = yaml.safe_load((ALERTING / "routes_test.yaml").read_text())


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_route(case: dict) -> None:
    """Each kind of alert reaches exactly the receivers that the table names."""
    done = subprocess.run(
        [
            binary(("amtool",)),
            "config",
            "routes",
            "test",
            f"--config.file={CONFIG}",
            f"--verify.receivers={','.join(case['receivers'])}",
            *(f"{name}={value}" for name, value in case["labels"].items()),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_receiver_is_reached_by_a_case() -> None:
    """No receiver is configured that the table does not show in use."""
    receivers = {receiver["name"] for receiver in yaml.safe_load(CONFIG.read_text())["receivers"]}
    assert receivers == {name for case in CASES for name in case["receivers"]}
