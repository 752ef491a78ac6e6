"""Job files: written by strangers, so every shape of wrong is refused by name."""

import contextlib
import dataclasses
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden import job_files
from gpuwarden.job_files import (
    Checkpoint,
    Counters,
    JobFileError,
    LeaveRequest,
    NoticeSeen,
    RequestProgress,
    RequestState,
    RunDescription,
    RunExit,
    RunStatus,
)

DESCRIPTION = RunDescription(
    run_id="wheat-7",
    pid=4321,
    pid_ns=4026531836,
    start_ticks=123456,
    boot_id="0b5d2cf2-93a7-4d1f-8a53-3b1f9a2f0a11",
    model="yolov8n",
    batch=16,
    imgsz=640,
    amp=True,
    epochs=100,
    project="wheat",
    log="/home/ada/runs/train/train.log",
)
STATUS = RunStatus(
    run_id="wheat-7",
    sequence=12,
    phase="train",
    phase_since=1_700_000_000.5,
    heartbeat=1_700_000_012.25,
    epoch=3,
    step=411,
    throughput=78.5,
    counters=Counters(images=6576, steps=411, data_wait_seconds=3.5, phase_seconds={"train": 80.0}),
    losses={"box_loss": 1.25},
    metrics={"mAP50": 0.5},
    lr={"pg0": 0.01},
    checkpoint=Checkpoint(
        time=1_700_000_000.0, step=400, durable=1_700_000_001.0, bytes=51_000_000
    ),
    request=RequestProgress("d-1", RequestState.SAVING),
    notice=NoticeSeen("SIGUSR1", "epoch", 1_700_000_011.5),
    exit=RunExit(76, "leave request d-1", 1_700_000_013.0),
)


def changed(content: bytes, **fields: object) -> bytes:
    """The same document with some fields replaced."""
    return json.dumps({**json.loads(content), **fields}).encode()


def test_what_is_written_is_read_back() -> None:
    """Each of the three documents survives a round trip unchanged."""
    request = LeaveRequest("d-1", 1_700_000_060.0, at="epoch", then="hold", reason="idle for 20m")
    assert RunDescription.decode(DESCRIPTION.encode()) == DESCRIPTION
    assert RunStatus.decode(STATUS.encode()) == STATUS
    assert LeaveRequest.decode(request.encode()) == request


def test_fields_of_a_newer_trainer_are_ignored() -> None:
    """A reader that is older than the writer still understands what it knows."""
    assert RunStatus.decode(changed(STATUS.encode(), colour="red")) == STATUS


@pytest.mark.parametrize(
    ("fields", "reason", "names"),
    [
        ({"version": 2}, "version", "version 2"),
        ({"version": True}, "version", "version True"),
        ({"run_id": "../../etc/passwd"}, "run_id", "not a run id"),
        ({"run_id": "x" * 65}, "field", "run_id"),
        ({"pid": 0}, "field", "pid"),
        ({"pid": "4321"}, "field", "pid"),
        ({"pid": True}, "field", "pid"),
        ({"pid": 2**63}, "field", "pid"),
        ({"batch": 16.5}, "field", "batch"),
        ({"amp": 1}, "field", "amp"),
        ({"model": None}, "field", "model is missing"),
        ({"model": "m" * 129}, "field", "model"),
        ({"log": ["a"]}, "field", "log"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, object], reason: str, names: str) -> None:
    """The reason is a word for a counter, the message names the field."""
    with pytest.raises(JobFileError, match=names) as caught:
        RunDescription.decode(changed(DESCRIPTION.encode(), **fields))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"version": 1, "heartbeat": NaN}',
        b'{"version": 1, "heartbeat": Infinity}',
        b"[" * 60_000,
        STATUS.encode()[:40],
    ],
    ids=["empty", "null", "list", "not utf-8", "nan", "infinity", "deep", "torn"],
)
def test_what_is_not_json_is_refused(content: bytes) -> None:
    """Malformed and hostile content is one kind of refusal, never another exception."""
    with pytest.raises(JobFileError) as caught:
        RunStatus.decode(content)
    assert caught.value.reason == "json"


@pytest.mark.parametrize(
    "fields",
    [
        {"phase": "sleeping"},
        {"heartbeat": 10**400},
        {"losses": {"box": "high"}},
        {"losses": {str(i): 1.0 for i in range(65)}},
        {"losses": {"n" * 65: 1.0}},
        {"counters": [1]},
        {"counters": {"images": -1}},
        {"request": {"decision_id": "d", "state": "ignored"}},
        {"checkpoint": {"time": 1.0}},
    ],
    ids=str,
)
def test_a_status_out_of_shape_is_refused(fields: dict[str, object]) -> None:
    """Nothing that is not a finite number of the right kind reaches a metric."""
    with pytest.raises(JobFileError):
        RunStatus.decode(changed(STATUS.encode(), **fields))


@given(
    st.binary(max_size=300)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
        max_leaves=8,
    ).map(lambda value: json.dumps({**json.loads(STATUS.encode()), "counters": value}).encode())
)
def test_no_content_raises_anything_but_a_job_file_error(content: bytes) -> None:
    """Whatever a user writes, the exporter meets one exception type."""
    with contextlib.suppress(JobFileError):
        assert RunStatus.decode(content).run_id


def test_a_file_is_replaced_whole_and_readable(tmp_path: Path) -> None:
    """The new content is there with its mode, and no temporary file is left."""
    path = tmp_path / "wheat-7.json"
    job_files.write(path, b"old")
    job_files.write(path, b"new", mode=0o600, durable=True)
    opened = job_files.read(path)
    assert opened.content == b"new"
    assert opened.uid == os.geteuid()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in tmp_path.iterdir()] == ["wheat-7.json"]


def test_a_planted_link_is_never_written_through(tmp_path: Path) -> None:
    """In a directory that everybody may write, a link waiting at our temporary name is harmless."""
    target = tmp_path / "victim"
    target.write_text("keep")
    path = tmp_path / "wheat-7.json"
    (tmp_path / f".{path.name}.{os.getpid()}.tmp").symlink_to(target)
    path.symlink_to(target)
    job_files.write(path, b"new")
    assert target.read_text() == "keep"
    assert not path.is_symlink()


def test_links_pipes_directories_and_large_files_are_not_read(tmp_path: Path) -> None:
    """Each is refused with its reason and without waiting."""
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (tmp_path / "link").symlink_to(secret)
    (tmp_path / "hard").hardlink_to(secret)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "large").write_bytes(b" " * (job_files.MAX_BYTES + 1))
    reasons = {}
    for name in ("link", "hard", "pipe", "folder", "large"):
        with pytest.raises(JobFileError) as caught:
            job_files.read(tmp_path / name)
        reasons[name] = caught.value.reason
    assert reasons == {
        "link": "open",
        "hard": "kind",
        "pipe": "kind",
        "folder": "kind",
        "large": "size",
    }
    with pytest.raises(FileNotFoundError):
        job_files.read(tmp_path / "absent")


def test_paths_stay_inside_the_directory() -> None:
    """A run id cannot name a file elsewhere."""
    root = Path("/run/gpuwarden")
    assert job_files.status_path(root, "a-1") == root / "jobs" / "a-1.status.json"
    for build in (job_files.description_path, job_files.status_path, job_files.request_path):
        with pytest.raises(JobFileError):
            build(root, "../a")


def test_the_directory_comes_from_the_environment() -> None:
    """An empty variable means the default, as a shell user expects."""
    assert job_files.directory({}) == Path("/run/gpuwarden")
    assert job_files.directory({"GPUWARDEN_JOBS": ""}) == Path("/run/gpuwarden")
    assert job_files.directory({"GPUWARDEN_JOBS": "/srv/jobs"}) == Path("/srv/jobs")


def test_a_status_with_a_value_that_is_not_finite_cannot_be_written() -> None:
    """NaN is not JSON: it is caught where it is written, not at every reader."""
    broken = dataclasses.replace(STATUS, losses={"box_loss": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        broken.encode()
