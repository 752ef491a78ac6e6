from __future__ import annotations

import os
import subprocess
import uuid
from typing import TYPE_CHECKING

import pytest
from tests.exporter.agent.nodes import HERE, PYTHON, Cards, Engine, Jobs, Node

from gpuwarden.exporter.agent import keys

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Starts jobs below a launcher, and ends what is left of them."""
    token, folder = uuid.uuid4().hex, tmp_path / "work"
    folder.mkdir()
    process = subprocess.Popen(
        [*PYTHON, str(HERE / "launcher.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "GPUWARDEN_TEST": token},
    )
    started = Jobs(folder, token, process)
    try:
        yield started
    finally:
        started.close()


@pytest.fixture
def cards(tmp_path: Path) -> Cards:
    """Two simulated cards."""
    found = Cards(tmp_path / "scenario")
    found.write()
    return found


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """An engine with a key pair of its own."""
    pair = keys.generate(tmp_path / "engine")
    return Engine(pair.private, pair.key_id)


@pytest.fixture
def node(tmp_path: Path, cards: Cards, engine: Engine) -> Iterator[Node]:
    """An agent in this process that obeys the engine."""
    made = Node(tmp_path / "node", cards, engine)
    try:
        yield made
    finally:
        made.close()
        made.driver.close()
