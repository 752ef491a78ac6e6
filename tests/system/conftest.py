"""Whole stacks as processes; what goes wrong leaves its logs in the test's folder."""

from __future__ import annotations

import getpass
from typing import TYPE_CHECKING

import pytest
from demo.__main__ import write_rules
from demo.jobs import install_tensorboard
from demo.stack import Stack, as_launcher

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """A node with four simulated cards and a cluster, all up; this process may launch jobs."""
    install_tensorboard(tmp_path)
    with as_launcher(), Stack(tmp_path, write_rules(tmp_path), owner=getpass.getuser()) as running:
        yield running
