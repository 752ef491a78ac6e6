"""What a task may hold, and how it travels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import InvalidInput
from gpuwarden.scheduling.tasks import Task, run_id_of, word_problem


def task(**changes: Any) -> Task:
    """A task that anybody may submit, with some of its fields changed."""
    return Task(
        **{
            "name": "exp1",
            "run_id": "exp1",
            "words": ("model=yolov8m", "data=my data.yaml", "epochs=3"),
            "user": "ana",
            "team": "vision",
            "priority": "high",
            "gpus": 1,
            "directory": "/home/ana",
        }
        | changes
    )


def test_the_command_is_an_ordinary_training() -> None:
    """One card: the words as they were said; nothing names a device."""
    assert task().command == (
        *("gpuwarden", "train", "--run-id", "exp1"),
        *("model=yolov8m", "data=my data.yaml", "epochs=3"),
    )


def test_several_cards_are_named_by_number() -> None:
    """The trainer launches one process for each card that the word device names."""
    found = task(gpus=2, options=("--checkpoint-every=2m",), program="/opt/venv/bin/gpuwarden")
    assert found.command[0] == "/opt/venv/bin/gpuwarden"
    assert found.command[4] == "--checkpoint-every=2m"
    assert found.command[-1] == "device=0,1"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"words": ("model=x", "name=a\nb")}, "cannot be shown"),
        ({"not_before": 10**400}, "is not more than 0 and at most 2.53e"),
        ({"deadline": 1e12}, "is not more than 0 and at most 2.53e"),
        ({"time_limit_seconds": 1e308}, "is not more than 0 and at most 3.1"),
        ({"memory_bytes": float("nan")}, "is not more than 0 and at most 1.1"),
        ({"estimate": {"x": "y" * 17_000}}, "estimate has more than 16384 characters"),
        ({"estimate": {"x": [[[[[[[[1]]]]]]]]}}, "or 8 levels"),
        (
            {"options": tuple(f"--name={'x' * 4000}" for _ in range(5))},
            "more than 16384 characters",
        ),
        ({"words": ("model=x", "name=a\x1b[2K")}, "cannot be shown"),
        ({"words": ("model=x", "name=a\u202eb")}, "cannot be shown"),
        ({"words": ("model=x", "--nproc")}, "is no KEY=VALUE"),
        ({"words": ("model=x", "device=0,1,2")}, "--gpus"),
        ({"words": ("model=x", "resume=never")}, "continues by itself"),
        ({"words": ("data=x",)}, "no model"),
        ({"options": ("--run-id=other",)}, "made from --name"),
        ({"options": ("upload",)}, "is no --option"),
        ({"name": "-rf"}, "begins with a letter"),
        ({"name": "a b"}, "may hold"),
        ({"team": "x;id"}, "may hold"),
        ({"run_id": "a.b"}, "run_id"),
        ({"gpus": 0}, "between 1"),
        ({"image": "registry/yolo:latest"}, "not pinned"),
        ({"after": ("1 && reboot",)}, "no id"),
        ({"after": ("--dependency",)}, "no id"),
        ({"directory": "runs"}, "not absolute"),
        ({"program": "sh"}, "neither gpuwarden"),
        ({"user": ""}, "nobody's name"),
        ({"time_limit_seconds": 0.0}, "not more than 0"),
        ({"memory_bytes": float("nan")}, "not more than 0"),
    ],
)
def test_what_no_engine_should_see_is_refused(changes: dict[str, Any], words: str) -> None:
    """Lines of scripts, options and identities cannot be smuggled in by a task."""
    with pytest.raises(InvalidInput, match=words):
        task(**changes)


def test_every_problem_is_said_at_once() -> None:
    """Who mends one thing after the other loses patience."""
    with pytest.raises(InvalidInput) as caught:
        task(gpus=0, run_id="", directory="x")
    assert len(str(caught.value).splitlines()) == 3


def test_a_task_survives_its_document() -> None:
    """What a socket or a store returns is the task that went in."""
    full = task(
        gpu_type="a100-40",
        memory_bytes=1e10,
        image=f"registry.example.com/yolo@sha256:{'0' * 64}",
        window="off-peak",
        after=("12",),
        not_before=1.0,
        time_limit_seconds=3600.0,
        epoch_seconds=60.0,
        estimate={"card": "a100-40"},
    )
    for one in (task(), full):
        assert (
            Task.from_document(one.as_document() | {"later": "a field of a newer version"}) == one
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "gpuwarden.task/v2"}, "no document of"),
        ({"gpus": True}, "gpus is of a wrong type"),
        ({"gpus": 1.5}, "gpus is of a wrong type"),
        ({"words": "model=x"}, "words is of a wrong type"),
        ({"words": ["model=x", 1]}, "words is of a wrong type"),
        ({"estimate": []}, "estimate is of a wrong type"),
        ({"program": "/bin/x\ny"}, "cannot be shown"),
    ],
)
def test_a_document_is_not_believed(change: dict[str, Any], words: str) -> None:
    """What arrives over a socket is checked as what a person types."""
    with pytest.raises(InvalidInput, match=words):
        Task.from_document(task().as_document() | change)


def test_a_field_that_is_missing_is_named() -> None:
    """A document of an older client says what it lacks."""
    document = task().as_document()
    del document["team"]
    with pytest.raises(InvalidInput, match="team is missing"):
        Task.from_document(document)
    with pytest.raises(InvalidInput, match="no document"):
        Task.from_document([])


@given(st.text(max_size=80))
def test_any_text_becomes_a_run_id_or_nothing(name: str) -> None:
    """A name of any letters gives a run id that the trainer takes."""
    if name:
        assert dataclasses.replace(task(), run_id=run_id_of(name)).run_id


@given(st.text(max_size=40))
def test_no_value_breaks_the_line(value: str) -> None:
    """A word that is accepted is one printable line."""
    word = f"name={value}"
    if word_problem(word) is None:
        assert word.splitlines() == [word]
        assert word.isprintable()
