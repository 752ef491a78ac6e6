"""Each edge that others reach takes whatever comes: `python -m bench.fuzz`, in short."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from bench.fuzz.edges import SPLIT, Attack, prepared
from bench.fuzz.mutations import Mutations
from bench.fuzz.targets import TARGETS

INPUTS = 300
SLOW_INPUTS = 20


@pytest.mark.parametrize("attack", TARGETS, ids=lambda attack: attack.name.replace(" ", "-"))
def test_an_edge_takes_whatever_comes(attack: Attack) -> None:
    """Inputs made from right ones are taken, or refused in the one way that there is for that."""
    mutations = Mutations(attack.seeds, attack.words, random.Random(7))  # noqa: S311 (no secret)
    with prepared(attack) as run:
        for seed in attack.seeds:
            run(seed)
        for _ in range(INPUTS if attack.pure else SLOW_INPUTS):
            run(mutations.next())


def test_every_program_has_its_edges_and_each_its_own_name() -> None:
    """A name stands for one edge, and nobody's parsers were left out."""
    names = [attack.name for attack in TARGETS]
    assert len(set(names)) == len(names)
    programs = {attack.of for attack in TARGETS}
    assert programs == {
        *("node", "platforms", "agent", "engine", "files", "trainer", "scheduler"),
    }


AUDIT = (Path(__file__).parents[2] / "bench/fuzz/seeds/audit.json").read_bytes()
STAT = b"4242 (x) S 1 1 1 0 -1 0 0 0 0 0 %d 4 5 6 20 0 1 0 77 0 9\n"
STATUS = b"Name:\tx\nUid:\t1000\t1000\t1000\t1000\n"
PANIC = (
    next(item for item in TARGETS if item.name == "rule files")
    .seeds[0]
    .replace(b"(gpu_job_threads)", b"(max_over_time(gpu_job_threads[" + b"9" * 60 + b"d:1s]))")
)
LAB = next(item for item in TARGETS if item.name == "exporters for top").seeds[0]
YOLO = b'yolo_epoch{job_id="proc-1",run_id="r-1"} '
FLEET = next(item for item in TARGETS if item.name == "engines for top").seeds[0]
GREETINGS = (
    b"220 mail\r\n",
    b"250 mail\r\n",
    b"250 ok\r\n",
    b"250 ok\r\n",
    b"354 go\r\n",
)
FOUND = (
    ("files of /proc", b"4242 () S 1 4242 4242 0 -1 0 0 0 0 g5 0\n"),
    ("files of /proc", SPLIT.join((STAT % -30, STATUS, b"0::/a\n"))),
    ("files of /proc", SPLIT.join((STAT % 3, STATUS, b"0::/a\0b\n"))),
    ("credentials", b"Basic YTpi\xad"),
    ("cgroup files", b"0::/user.slice/x\x0c0::/slurm/uid_1000/job_31\n"),
    (
        "answers of Alertmanager",
        b"HTTP/1.1 200 OK\r\nDate: Mon, 30 Nov 99999999999999 08:00:00 GMT\r\n\r\n{}",
    ),
    (
        "answers of mail servers",
        SPLIT.join((*GREETINGS, "250 \u90ae\u4ef6\u5df2\u63a5\u6536\r\n".encode("gbk"))),
    ),
    (
        "answers of mail servers",
        SPLIT.join((*GREETINGS, "554 \u62d2\u7edd\r\n".encode("gbk"))),
    ),
    ("PromQL of rules", b"x[" + b"2" * 60 + b":1]"),
    ("rule files", PANIC),
    ("scenarios", b'card index=0 name="\\x41\xc8"\n'),
    ("words of an estimate", b"model=~nobody-is-called-so\0gpu=A100 40GB"),
    ("words of an estimate", b"model=yolov8m\0data=~nobody-is-called-so/a.yaml"),
    ("words of an estimate", b"gpu=A100 40GB\0model=" + b"a" * 300 + b".yaml"),
    ("words of an estimate", b"model=yolov8m\0gpu=A100 40GB\0data=" + b"a" * 300),
    ("the agent's journal", b'{"version": 1, "event": "epoch", "epoch": 1e999}\n'),
    ("audits to be verified", b'{"schema": "gpuwarden.audit/v1"}'),
    ("audits to be verified", AUDIT.replace(b'"sentence"', b'"sentances"')),
    ("audits to be verified", AUDIT.replace(b'"timeline":[', b'"timeline":[7,')),
    ("exporters for top", LAB.replace(b',uuid="GPU-1"', b"", 1)),
    (
        "exporters for top",
        LAB.replace(YOLO + b"3", YOLO + b"NaN"),
    ),
    (
        "exporters for top",
        LAB.replace(YOLO + b"3", YOLO + b"+Inf"),
    ),
    ("engines for top", b'{"schema": "gpuwarden.fleet/v1"}'),
    ("engines for top", FLEET.replace(b'"jobs": [{', b'"jobs": [{"user": null, "job": {')),
    ("engines for top", FLEET.replace(b'"epoch": 3.0', b'"epoch": 1e999')),
    (
        "requests to the scheduler",
        SPLIT.join((b"GET", b"/v1/calendar.ics?team=a%0Ab", b"")),
    ),
    ("engines for top", FLEET.replace(b"2026-11-30T08:00:00Z", b"0001-01-01T00:00:00Z")),
)
"""Inputs that were faults once."""


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_what_was_a_fault_once(name: str, data: bytes) -> None:
    """Faults that were found stay mended."""
    (attack,) = (item for item in TARGETS if item.name == name)
    with prepared(attack) as run:
        run(data)
