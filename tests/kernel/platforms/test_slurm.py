"""Slurm's answers as its versions write them; those in answers/ were recorded from Debian's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.platforms.slurm import (
    SlurmAttempt,
    SlurmJob,
    attempt_id,
    decode_json,
    decode_tres,
    gpu_indexes,
    parse_attempt_id,
)

ANSWERS = Path(__file__).parent / "answers"


def _number(value: int, **changes: object) -> dict[str, object]:
    return {"set": True, "infinite": False, "number": value, **changes}


OLD: dict[str, Any] = {
    "job_id": 12,
    "array_job_id": 0,
    "array_task_id": None,
    "het_job_id": 0,
    "het_job_offset": 0,
    "cluster": "ci",
    "user_id": 1000,
    "user_name": "ann",
    "name": "train",
    "job_state": "RUNNING",
    "restart_cnt": 1,
    "submit_time": 1795985617,
    "start_time": 1795985618,
    "end_time": 1827521618,
    "time_limit": 525600,
    "nodes": "gpu[01-02]",
    "tres_alloc_str": "cpu=2,node=2,gres/gpu=3",
    "gres_detail": ["gpu:a100:2(IDX:0-1)", "gpu:a100:1(IDX:5)"],
}
"""As 22.05 writes it."""
NEW: dict[str, Any] = OLD | {
    "array_job_id": _number(0),
    "array_task_id": _number(0, set=False),
    "het_job_id": _number(0),
    "het_job_offset": _number(0),
    "job_state": ["RUNNING"],
    "submit_time": _number(1795985617),
    "start_time": _number(1795985618),
    "end_time": _number(1827521618),
    "time_limit": _number(525600),
}
"""As 24.11 writes it."""


def _job(content: dict[str, Any]) -> SlurmJob:
    answer = decode_json(json.dumps({"meta": {}, "errors": [], "jobs": [content]}))
    assert answer.errors == ()
    (job,) = answer.jobs
    return job


class TestRecorded:
    """Answers of a real 24.11."""

    def test_a_job(self) -> None:
        """A running job with one card."""
        answer = decode_json((ANSWERS / "scontrol-24.11-job.json").read_bytes())
        assert (answer.cluster, answer.version, answer.errors) == ("ci", (24, 11), ())
        (job,) = answer.jobs
        assert (job.job_id, job.name, job.user_name, job.user_id) == (1, "a b=c", "root", 0)
        assert (job.states, job.restarts, job.partition) == ({"RUNNING"}, 0, "main")
        assert (job.submit_time, job.start_time) == (1795985801.0, 1795985802.0)
        assert (job.time_limit, job.array_job_id, job.het_job_id) == (None, None, None)
        assert (job.nodes, job.gpus) == (("node1",), {"node1": (0,)})
        assert job.tres == {"cpu": "1", "node": "1", "billing": "1"}

    def test_an_array(self) -> None:
        """Tasks have numbers of their own; one of them has the array's."""
        jobs = decode_json((ANSWERS / "scontrol-24.11-array.json").read_bytes()).jobs
        assert {(job.job_id, job.number) for job in jobs} == {(2, "2_4"), (6, "2_3")}
        assert [attempt_id(job, "ci") for job in jobs] == ["slurm-ci-2_4-0", "slurm-ci-2_3-0"]

    def test_components(self) -> None:
        """A heterogeneous job's components wait with no node and no card."""
        jobs = decode_json((ANSWERS / "scontrol-24.11-het.json").read_bytes()).jobs
        assert [(job.job_id, job.number) for job in jobs] == [(4, "4+0"), (5, "4+1")]
        assert [attempt_id(job, "ci") for job in jobs] == ["slurm-ci-4-0", "slurm-ci-5-0"]
        assert all((job.states, job.nodes, job.gpus) == ({"PENDING"}, (), {}) for job in jobs)
        assert not any(job.holds or job.ended for job in jobs)

    def test_nobody(self) -> None:
        """A job that is not known is an answer without jobs."""
        answer = decode_json((ANSWERS / "scontrol-24.11-nobody.json").read_bytes())
        assert (answer.jobs, answer.cluster) == ((), "ci")


@pytest.mark.parametrize("content", [OLD, NEW], ids=["22.05", "24.11"])
def test_both_shapes_are_the_same_job(content: dict[str, Any]) -> None:
    """Numbers and states are read whichever way they are written."""
    assert _job(content) == SlurmJob(
        job_id=12,
        cluster="ci",
        user_id=1000,
        user_name="ann",
        name="train",
        states=frozenset({"RUNNING"}),
        restarts=1,
        submit_time=1795985617.0,
        start_time=1795985618.0,
        end_time=1827521618.0,
        time_limit=525600 * 60.0,
        nodes=("gpu01", "gpu02"),
        tres={"cpu": "2", "node": "2", "gres/gpu": "3"},
        gpus={"gpu01": (0, 1), "gpu02": (5,)},
    )


@pytest.mark.parametrize("nodes", ["gpu[01-02]", ["gpu01", "gpu02"], ["gpu[01-02]"]])
def test_nodes(nodes: object) -> None:
    """Hosts come as one list of Slurm's, or as several."""
    assert _job(OLD | {"nodes": nodes}).nodes == ("gpu01", "gpu02")


@pytest.mark.parametrize(
    ("state", "holds", "ended"),
    [
        ("RUNNING", True, False),
        (["RUNNING", "COMPLETING"], True, False),
        (["COMPLETED", "COMPLETING"], True, False),
        ("COMPLETED", False, True),
        (["CANCELLED"], False, True),
        ("SUSPENDED", True, False),
        # Such a job may come back: it has given its nodes away, and has not ended.
        (["PREEMPTED"], False, False),
        (["PENDING", "REQUEUED"], False, False),
        (["NODE_FAIL", "REQUEUED"], False, False),
        ("CANCELLED by 1000", False, True),
        ([], False, False),
        (None, False, False),
        (["A_STATE_OF_TOMORROW"], False, False),
    ],
)
def test_states(state: object, holds: bool, ended: bool) -> None:
    """Base states and flags say whether a job has its nodes, and whether it is over."""
    job = _job(OLD | {"job_state": state})
    assert (job.holds, job.ended) == (holds, ended)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, None),
        (_number(0), None),
        (_number(60, infinite=True), None),
        (_number(60, set=False), None),
        (60, 60.0),
        ("60", 60.0),
        (4294967294, None),
        (4294967295, None),
        (True, None),
        ({}, None),
        (float("nan"), None),
        (1e300, None),
        (-5, None),
    ],
)
def test_times(value: object, seconds: float | None) -> None:
    """A time that is not set is not 1970."""
    assert _job(OLD | {"end_time": value}).end_time == seconds


@pytest.mark.parametrize(
    "details", [None, [], ["gpu:a100:2(IDX:0-1)"], ["gpu:a100:2", "gpu:a100:1(IDX:0)"], [7, 8]]
)
def test_cards_that_are_not_told(details: object) -> None:
    """Without an index for each node nothing is known; a job without any details has none."""
    job = _job(OLD | {"gres_detail": details})
    empty = {"gpu01": (), "gpu02": ()}
    assert job.gpus == (empty if details in ([], [7, 8]) else None)


@pytest.mark.parametrize(
    ("text", "indexes"),
    [
        ("gpu:a100:2(IDX:0-1)", (0, 1)),
        ("gpu:2(IDX:0,3-4)", (0, 3, 4)),
        ("gpu:a100:1(IDX:3),gpu:h100:2(IDX:0-1)", (0, 1, 3)),
        ("gpu(IDX:1)", (1,)),
        ("gpu:a100:0", ()),
        ("gpu:a100:0(IDX:N/A)", ()),
        ("mps:100", ()),
        ("shard:a100:3(0/4,3/4)", ()),
        ("craynetwork:1,gpu:1(IDX:7),nvme:1", (7,)),
        ("", ()),
        ("gpu:a100:2", None),
        ("gpu:a100:2(CNT:2)", None),
        ("gpu:a100:2(IDX:1-0)", None),
        ("gpu:a100:2(IDX:0-99999999)", None),
        ("gpu:a100:2(IDX:0-1", None),
        ("gpu:a100:2(IDX:x)", None),
        (" gpu", None),
    ],
)
def test_indexes(text: str, indexes: tuple[int, ...] | None) -> None:
    """Which cards of a node a job has, or that it is not told."""
    assert gpu_indexes(text) == indexes


@pytest.mark.parametrize(
    "content",
    ["", "no JSON", "[]", "{}", '{"jobs": 5}', "null", "[" * 100_000, '{"jobs": {"a": 1}}', "\xff"],
)
def test_what_is_no_answer(content: str) -> None:
    """Anything else is an error that may pass, not an empty list of jobs."""
    with pytest.raises(ServiceUnavailable):
        decode_json(content)


@pytest.mark.parametrize(
    "item", [5, {}, {"job_id": 0}, {"job_id": 2**40}, {"job_id": 1, "nodes": "a[1"}, None]
)
def test_a_job_that_cannot_be_made_out(item: object) -> None:
    """One bad entry does not take the others away, and is complained of."""
    answer = decode_json(json.dumps({"jobs": [item, OLD], "errors": [{"error": "e"}, "f"]}))
    assert [job.job_id for job in answer.jobs] == [12]
    assert len(answer.errors) == 3


@pytest.mark.parametrize("said", [7, True, "text", {"error": "e"}, None])
def test_complaints_that_are_no_list_are_passed_over(said: object) -> None:
    """What is told of the jobs beside them is still read."""
    answer = decode_json(json.dumps({"jobs": [OLD], "errors": said}))
    assert (len(answer.jobs), answer.errors) == (1, ())


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@given(
    changes=st.dictionaries(st.sampled_from(sorted(NEW)), _VALUES, max_size=5),
    rest=_VALUES,
)
def test_any_values(changes: dict[str, object], rest: object) -> None:
    """Whatever stands in an answer, it is decoded or refused."""
    document = {"jobs": [NEW | changes, NEW], "meta": rest, "errors": []}
    answer = decode_json(json.dumps(document))
    assert 1 <= len(answer.jobs) <= 2


@given(
    cluster=st.from_regex(r"[a-z0-9_.-]{1,20}", fullmatch=True).filter(
        lambda name: name != "unresolved"
    ),
    number=st.integers(1, 2**32 - 1),
    task=st.none() | st.integers(0, 2**31),
    restarts=st.integers(0, 9999),
)
def test_names(cluster: str, number: int, task: int | None, restarts: int) -> None:
    """A name is read back as what it was made of, whatever the cluster is called."""
    array = number if task is not None else None
    job = SlurmJob(number, array_job_id=array, array_task_id=task, restarts=restarts)
    assert parse_attempt_id(attempt_id(job, cluster)) == SlurmAttempt(cluster, job.number, restarts)


@pytest.mark.parametrize(
    "name", ["slurm-unresolved-12", "slurm-unresolved-s5K1KKYAYG5D00", "proc-1-2-3", "", "slurm-1"]
)
def test_what_is_no_attempt(name: str) -> None:
    """Nobody acts on a job that is not resolved."""
    assert parse_attempt_id(name) is None


def test_tres() -> None:
    """Amounts by name; what is no amount is left out."""
    assert decode_tres("cpu=4,gres/gpu:a100=2,=5,x,") == {"cpu": "4", "gres/gpu:a100": "2"}
