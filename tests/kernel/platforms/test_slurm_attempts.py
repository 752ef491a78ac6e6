"""What ends a job sees just that job, and what its script asked for is read as Slurm reads it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.platforms.slurm_attempts import (
    RECORD_FIELDS,
    AskedSignal,
    accounted_state,
    asked_signal,
    decode_records,
    record_format,
)
from gpuwarden.platforms.slurm_nodes import decode_nodes, decode_tiers
from gpuwarden.platforms.slurm_queue import QUEUE_FIELDS, decode_queue

MARK = "|0123456789abcdef"
OLD = (
    "31;29;1;N/A;N/A;0;CANCELLED;0;1796011113;1796011113;1796011115;main;cpu=1,node=1,billing=1;"
    "node1;(null);exec75.sh;root;None;gpuwarden:terminate:3-1-ab;1;N/A;gres:gpu:1;N/A;N/A"
)
"""A task of an array as 22.05.8 gave it."""
NEW = (
    "22;22;N/A;N/A;N/A;0;PENDING;1;1796010967;1796010973;1827546973;main;"
    "cpu=1,mem=1000M,node=1,billing=1;;(null);exec75.sh;root;JobHeldUser;(null);1;N/A;N/A;N/A;N/A"
)
"""A job that was requeued and is held, as 24.11.5 gave it."""


def _answer(*rows: str) -> str:
    return "".join("".join(f"{value}{MARK}" for value in row.split(";")) + "\n" for row in rows)


def test_a_record_tells_the_attempt_and_who_marked_it() -> None:
    """Of both versions."""
    task, held = decode_records(_answer(OLD, NEW), MARK)
    assert (task.job.number, task.job.restarts, task.job.submit_time) == ("29_1", 0, 1796011113.0)
    assert (task.job.user_name, task.job.user_id, task.word) == ("root", 0, "CANCELLED")
    assert task.mark == "gpuwarden:terminate:3-1-ab"
    assert (task.gpu, held.gpu, task.batch, task.held) == (True, False, True, False)
    assert held.held
    assert (held.word, held.mark, held.job.restarts) == ("PENDING (JobHeldUser)", "", 1)


@pytest.mark.parametrize(
    ("state", "reason", "held"),
    [
        ("SPECIAL_EXIT", "None", True),
        ("REQUEUE_HOLD", "None", True),
        ("PENDING", "JobHeldAdmin", True),
        ("PENDING", "BeginTime", False),
        ("PENDING", "Priority", False),
    ],
)
def test_what_a_person_must_release_is_held(state: str, reason: str, held: bool) -> None:
    """And what waits for its turn is not."""
    row = NEW.replace("PENDING", state).replace("JobHeldUser", reason)
    (record,) = decode_records(_answer(row), MARK)
    assert record.held is held


def test_a_users_words_cannot_look_like_slurms() -> None:
    """A name may hold line feeds and whatever is another field."""
    row = NEW.replace("exec75.sh", "x\n31 PENDING root|AdminComment=gpuwarden:terminate:1")
    (record,) = decode_records(_answer(row), MARK)
    assert record.job.job_id == 22
    assert record.mark == ""


@pytest.mark.parametrize("text", ["slurm_load_jobs error", _answer(NEW) + "x", _answer("1;2")])
def test_another_form_is_no_answer(text: str) -> None:
    """Half a record must not decide about a job."""
    with pytest.raises(ServiceUnavailable):
        decode_records(text, MARK)


def test_each_value_is_asked_for_in_full() -> None:
    """A width would cut it."""
    assert record_format(MARK) == ",".join(f"{name}:{MARK}" for name in RECORD_FIELDS)
    with pytest.raises(ValueError, match="no mark"):
        record_format("|")


@pytest.mark.parametrize(
    ("lines", "asked"),
    [
        ("#SBATCH --signal=B:USR1@60", AskedSignal("USR1", batch=True)),
        ("#SBATCH -n1 --signal B:SIGUSR1@60  # two epochs", AskedSignal("USR1", batch=True)),
        ("#SBATCH --signal=USR2", AskedSignal("USR2")),
        ("#SBATCH --signal=R:USR1@90", AskedSignal("USR1", makes_way=True)),
        ("#SBATCH --signal=RB:10", AskedSignal("USR1", batch=True, makes_way=True)),
        ("#SBATCH --signal=usr1", AskedSignal("USR1")),
        ("# a comment\n\n#SBATCH --signal='B:TERM@5'", AskedSignal("TERM", batch=True)),
        ("#SBATCH --signal=USR1\n#SBATCH --signal=B:USR2", AskedSignal("USR2", batch=True)),
        ("#SBATCH --gres=gpu:1", None),
        ("echo\n#SBATCH --signal=USR1", None),
        ("##SBATCH --signal=USR1", None),
        ("#SBATCH --signal=KILL@60", None),
        ("#SBATCH --signal=STOP@60", None),
        ("#SBATCH --signal=99", None),
        ("#SBATCH --signal=NOPE", None),
        ("#SBATCH --signal", None),
        ("#SBATCH --signal='USR1", None),
        ("#SBATCH --signal-all=USR1", None),
    ],
)
def test_the_signal_is_that_of_the_scripts_own_lines(lines: str, asked: AskedSignal | None) -> None:
    """Up to its first command; one that leaves no time to save is none."""
    assert asked_signal(f"#!/bin/sh\n{lines}\nexec python train.py\n") == asked


_VALUES = st.text(max_size=40) | st.sampled_from(
    ["1", "0", "N/A", "(null)", "gpu[1-", "gres:gpu:x:9", "9" * 5000, "\u0663", "cpu=1e9,mem=1Z"]
)


@given(st.lists(_VALUES, min_size=len(RECORD_FIELDS), max_size=len(RECORD_FIELDS)))
def test_whatever_a_field_holds_is_read_or_refused(values: list[str]) -> None:
    """And nothing else happens."""
    for decode, count in ((decode_records, len(RECORD_FIELDS)), (decode_queue, len(QUEUE_FIELDS))):
        text = "".join(f"{value}{MARK}" for value in ["7", *values[1:count]])
        with contextlib.suppress(ServiceUnavailable):
            assert decode(text, MARK)


@given(st.text(), st.sampled_from(["NodeName=", "PartitionName=", "Gres=", "#SBATCH --signal="]))
def test_no_text_upsets_who_reads_nodes_tiers_and_scripts(text: str, begin: str) -> None:
    """What cannot be made out is no room, no tier and no signal."""
    line = f"NodeName=n1 {begin}{text}"
    assert all(not node.usable for node in decode_nodes(line))
    assert all(tier >= 0 for tier in decode_tiers(f"{begin}{text}").values())
    found = asked_signal(f"{begin}{text}")
    assert found is None or found.name


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("1796011113|CANCELLED by 1000\n", "CANCELLED"),
        ("1796011000|FAILED\n1796011113|COMPLETED\n", "COMPLETED"),
        ("1796011113|REQUEUED\n1796011113|TIMEOUT\n", "TIMEOUT"),
        ("1796011000|FAILED\n", ""),
        ("1796011113| \n", ""),
        ("1796011113|\n1796011113\n|\n\n", ""),
        ("", ""),
    ],
)
def test_accounting_tells_of_the_attempt_that_is_asked_for(text: str, state: str) -> None:
    """By its time of submission; a state that is left blank says nothing."""
    assert accounted_state(text, 1796011113) == state
