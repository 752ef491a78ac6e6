"""Each edge that a stranger reaches takes whatever comes: `bench.exporter.hostile`, in short."""

from __future__ import annotations

import random

import pytest
from bench.exporter.attacks import ATTACKS, SPLIT, Attack, prepared
from bench.exporter.hostile import Mutations

INPUTS = 1000
SLOW_INPUTS = 60


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name.replace(" ", "-"))
def test_an_edge_takes_whatever_comes(attack: Attack) -> None:
    """Inputs made from right ones are taken or refused, and leave a page that can be read."""
    mutations = Mutations(attack.seeds, attack.words, random.Random(7))  # noqa: S311 (no secret)
    with prepared(attack) as run:
        for seed in attack.seeds:
            run(seed)
        for _ in range(INPUTS if attack.pure else SLOW_INPUTS):
            run(mutations.next())


STAT = b"4242 (x) S 1 1 1 0 -1 0 0 0 0 0 %d 4 5 6 20 0 1 0 77 0 9\n"
STATUS = b"Name:\tx\nUid:\t1000\t1000\t1000\t1000\n"
FOUND = (
    ("files of /proc", b"4242 () S 1 4242 4242 0 -1 0 0 0 0 g5 0\n"),
    ("files of /proc", SPLIT.join((STAT % -30, STATUS, b"0::/a\n"))),
    ("files of /proc", SPLIT.join((STAT % 3, STATUS, b"0::/a\0b\n"))),
    ("credentials", b"Basic YTpi\xad"),
    ("cgroup files", b"0::/user.slice/x\x0c0::/slurm/uid_1000/job_31\n"),
)
"""Inputs that were faults once."""


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_what_was_a_fault_once(name: str, data: bytes) -> None:
    """Faults that were found stay mended."""
    (attack,) = (item for item in ATTACKS if item.name == name)
    with prepared(attack) as run:
        run(data)
