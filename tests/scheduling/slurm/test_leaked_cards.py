"""Cards that are in use by nobody are told of, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.scheduling.slurm.test_queue import NODE, NOW, a_job

from gpuwarden.scheduling.slurm.leaked_cards import LASTING_SECONDS, lasting, leaked, words_of
from gpuwarden.scheduling.slurm.queues import Reading

if TYPE_CHECKING:
    from gpuwarden.platforms.slurm_nodes import SlurmNode


def node(idle: int, **changes: object) -> SlurmNode:
    """A node with four cards, some of which are idle."""
    return replace(NODE, cards={"a100": 4}, idle={"a100": idle}, **changes)  # type: ignore[arg-type]


def found(*jobs: object, idle: int = 0, **changes: object) -> dict[str, int]:
    """What is leaked on that node beside some jobs."""
    return leaked(Reading("ci", NOW, jobs=jobs, nodes=(node(idle, **changes),)))  # type: ignore[arg-type]


def test_what_no_job_has_is_leaked() -> None:
    """Jobs that complete still have theirs, and those that wait have none."""
    running = a_job(1, state="RUNNING", gpus=2)
    completing = a_job(2, state="COMPLETED COMPLETING", gpus=1)
    assert found(running, completing, idle=1) == {}
    assert found(running, a_job(3), idle=1) == {"n1": 1}
    assert found() == {"n1": 4}
    assert found(idle=4) == {}


def test_where_it_is_not_known_who_has_how_many_nothing_is_told() -> None:
    """Those on several nodes need not have as many on each; nor is a drained node looked at."""
    wide = a_job(1, state="RUNNING", gpus=4, nodes=("n1", "n2"))
    assert found(wide) == {}
    assert found(a_job(1, state="RUNNING", gpus=0, gpus_known=False)) == {}
    assert found(usable=False) == {}
    assert found(a_job(1, state="RUNNING", gpus=0, nodes=("n1", "n2"))) == {"n1": 4}


def test_only_what_lasts_is_told() -> None:
    """Nodes are read a moment after jobs, and one of these may have begun in between."""
    known = lasting({"n1": 3, "n2": 1}, {}, NOW)
    assert words_of(known, NOW) is None
    known = lasting({"n1": 2}, known, NOW + 20)
    known = lasting({"n1": 3, "n2": 1}, known, NOW + 61)
    words = words_of(known, NOW + 61)
    assert words is not None
    assert words.startswith("2 cards in use by no job (n1: 2): `scontrol reconfigure`")
    assert words_of(lasting({}, known, NOW + 80), NOW + 80 + LASTING_SECONDS) is None
