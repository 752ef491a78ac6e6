"""States on their way to a second home, with the back ends that can be had here."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
from tests.trainer.conftest import draft, wait_for
from tests.trainer.trainings import BATCHES, Trainings, at_batch, digest_of

from gpuwarden.errors import InvalidInput, MissingExtra, ServiceUnavailable
from gpuwarden.trainer import LeftTraining, uploading
from gpuwarden.trainer.remotes import Orders, Remote
from gpuwarden.trainer.runs import RunRecord
from gpuwarden.trainer.states import FOLDER, Manifest, StateStore
from gpuwarden.trainer.uploading import Uploader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A local server that speaks S3, and a bucket on it."""
    from moto.server import ThreadedMotoServer  # noqa: PLC0415 -- takes a second to import

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket/runs"
    server.stop()


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place of each kind."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3")) + f"/{tmp_path.name}"
    return f"file://{tmp_path}/there" if request.param == "file" else f"memory://{tmp_path}"


class Run:
    """A run's folder on this disk."""

    def __init__(self, save_dir: Path) -> None:
        self.save_dir, self.folder = save_dir, save_dir / FOLDER
        self.folder.mkdir(parents=True)
        (save_dir / "weights").mkdir()
        self.record = RunRecord("run", "mine", {"epochs": "3"}, 1.0)
        self.record.write(self.folder)
        self.store = StateStore(self.folder, "mine")

    def save(self, step: int) -> Manifest:
        """A state, and weights that belong to it."""
        (self.save_dir / "weights" / "best.pt").write_bytes(b"best of %d" % step)
        begun = dataclasses.replace(draft(step), time=float(step))
        weights = {"w": torch.full((3000,), float(step))}
        return self.store.write({"model": weights, "ema": weights}, begun)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """One that has just begun."""
    return Run(tmp_path / "here")


def test_what_was_put_there_comes_back(url: str, run: Run, tmp_path: Path) -> None:
    """Record, newest state and its weights; older states than the last three go there as here."""
    remote = Remote(url, "run")
    assert remote.record() is None
    remote.put_record(run.folder)
    for step in range(1, 6):
        remote.put_state(run.folder, run.save(step).sequence)
    assert RunRecord.decode(remote.record() or b"", where="there") == run.record
    assert [manifest.step for manifest in remote._manifests()] == [5, 4, 3]
    empty = tmp_path / "empty"
    assert remote.fetch(empty, "mine") == 5
    found = StateStore(empty / FOLDER, "mine").newest()
    assert found is not None
    assert found[0].step == 5
    assert (empty / "weights" / "best.pt").read_bytes() == b"best of 5"
    assert remote.fetch(empty, "mine", after=5) is None
    assert remote.fetch(empty, "theirs") is None


def test_what_arrived_damaged_is_passed_over(run: Run, tmp_path: Path) -> None:
    """A state is compared with its manifest's sum; the one before it is taken instead."""
    remote = Remote(f"file://{tmp_path}/there", "run")
    for step in (1, 2, 3):
        remote.put_state(run.folder, run.save(step).sequence)
    there = tmp_path / "there" / "run" / FOLDER
    content = bytearray((there / "000003.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (there / "000003.pt").write_bytes(content)
    (there / "000002.pt").unlink()
    assert remote.fetch(tmp_path / "empty", "mine") == 1
    assert not list((tmp_path / "empty" / FOLDER).glob(".*"))


@pytest.mark.training
def test_where_all_is_damaged_a_run_is_not_begun_anew(trainings: Trainings, tmp_path: Path) -> None:
    """Its first states would take the place of those that somebody may still mend."""
    url = f"file://{tmp_path}/there"
    with pytest.raises(LeftTraining):
        trainings.attempt("run", {}, hooks=at_batch(0, 2), upload=url)
    there = tmp_path / "there" / "run" / FOLDER
    for damage in ((there / "000001.pt").unlink, lambda: (there / "000001.json").write_text("{")):
        damage()
        other = Trainings(trainings.material, tmp_path / "other", trainings.jobs)
        with pytest.raises(InvalidInput, match=r"000001\) and none is here.*--resume never"):
            other.attempt("run", {}, upload=url)
        assert not (tmp_path / "other" / "runs" / "run").exists()
    trainings.attempt("run", {"epochs": 3}, upload=url)  # what is here goes on
    assert trainings.status("run").counters.steps == 3 * BATCHES - 2


def test_a_fresh_start_supersedes_what_is_there_only_once_it_has_a_state(
    run: Run, tmp_path: Path
) -> None:
    """Until then the former training can still be had."""
    url = f"file://{tmp_path}/there"
    remote = Remote(url, "run")
    remote.put_state(run.folder, run.save(1).sequence)
    other = Run(tmp_path / "other")
    other.store = StateStore(other.folder, "theirs")
    remote.put_record(other.folder)
    assert [manifest.lineage for manifest in remote._manifests()] == ["mine"]
    other.save(1)
    sequence = other.save(2).sequence
    remote.put_state(other.folder, sequence)
    assert [manifest.lineage for manifest in remote._manifests()] == ["theirs"]


def test_a_complete_run_leaves_all_that_it_has_made(run: Run, tmp_path: Path) -> None:
    """On a machine whose disk is gone with it, nothing else would be left of the training."""
    for name in ("weights/last.pt", "weights/best.pt", "results.csv", "args.yaml"):
        (run.save_dir / name).write_bytes(name.encode())
    RunRecord("run", "mine", {}, 1.0, finished=2.0).write(run.folder)
    Remote(f"file://{tmp_path}/there", "run").put_record(run.folder)
    there = sorted(path.name for path in (tmp_path / "there" / "run").iterdir())
    assert there == ["args.yaml", "best.pt", "last.pt", "results.csv", "run.json"]


def test_the_newest_wins_and_the_lag_is_that_of_the_oldest_on_its_way(
    run: Run, tmp_path: Path
) -> None:
    """States that come faster than they can be sent are not queued up."""
    uploader = Uploader(f"file://{tmp_path}/there", "run", run.save_dir, keep=3)
    for step in range(1, 4):
        uploader.committed(run.save(step))
        assert uploader.progress.pending == 1.0
    uploader.recorded()
    assert uploader.flush(60)
    assert (uploader.progress.uploaded, uploader.progress.pending) == (3.0, None)
    there = tmp_path / "there" / "run"
    assert (there / "run.json").exists()
    assert (there / FOLDER / "000003.json").exists()
    uploader.close()


def test_what_fails_is_told_once_and_tried_again(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The training goes on; when the place can be written again, the state gets there."""
    there = tmp_path / "there"
    there.write_text("a file where a folder should be", "utf-8")
    uploader = Uploader(f"file://{there}", "run", run.save_dir, keep=3)
    uploader.committed(run.save(1))
    wait_for(lambda: (uploader.poll(), "states stay on this disk" in caplog.text)[1])
    assert uploader.progress.pending == 1.0
    there.unlink()
    assert uploader.flush(60)
    assert "work again" in caplog.text or caplog.text.count("states stay on this disk") == 1
    assert (there / "run" / FOLDER / "000001.json").exists()
    uploader.close()


def test_signals_to_the_group_are_not_for_the_upload(run: Run, tmp_path: Path) -> None:
    """A scheduler's SIGTERM must not cut off the very state that it made the training save."""
    uploader = Uploader(f"file://{tmp_path}/there", "run", run.save_dir, keep=3)
    uploader.recorded()
    assert uploader.flush(60)
    process = uploader._process
    assert process is not None
    assert os.getpgid(process.pid) != os.getpgid(0)
    os.kill(process.pid, signal.SIGTERM)
    uploader.committed(run.save(1))
    assert uploader.flush(60)
    assert process.poll() is None
    uploader.close()
    assert process.poll() == 0


def test_a_process_that_was_killed_is_started_again(run: Run, tmp_path: Path) -> None:
    """By the kernel for want of memory, say; what it had not sent is sent by the next."""
    uploader = Uploader(
        f"file://{tmp_path}/there", "run", run.save_dir, keep=3, restart_seconds=0.0
    )
    uploader.recorded()
    assert uploader.flush(60)
    assert uploader._process is not None
    uploader._process.kill()
    uploader._process.wait()
    uploader.committed(run.save(1))
    assert uploader.flush(60)
    uploader.close()
    assert (tmp_path / "there" / "run" / FOLDER / "000001.json").exists()


def test_the_process_outlives_a_killed_training_for_its_last_state_only(
    run: Run, tmp_path: Path
) -> None:
    """It holds no GPU, and ends by itself when its training is gone."""
    run.save(1)
    process = subprocess.Popen(
        [
            sys.executable,
            *("-m", "gpuwarden.trainer.remotes", "serve"),
            *(f"file://{tmp_path}/there", "run", str(run.save_dir), "3"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    out, _ = process.communicate(b'{"state": 1}\n', timeout=60)
    assert process.returncode == 0
    assert json.loads(out) == {"state": 1}


@pytest.mark.parametrize(
    ("url", "error", "complaint"),
    [
        ("nowhere://x", InvalidInput, "nowhere"),
        ("oss://bucket/x", MissingExtra, r"gpuwarden\[oss\]"),
    ],
)
def test_a_url_that_nothing_is_installed_for_is_refused_at_once(
    url: str, error: type[Exception], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after hours, when the first state would have been sent."""
    monkeypatch.setitem(sys.modules, "ossfs", None)
    with pytest.raises(error, match=complaint):
        uploading.check(url)


@pytest.mark.training
@pytest.mark.timeout(300)
def test_a_run_goes_on_on_a_machine_that_has_never_seen_it(
    s3: str, trainings: Trainings, material: Any, tmp_path: Path
) -> None:
    """From S3, at the very step, and ends as if it had never moved; then both know it complete."""
    calm = trainings.attempt("calm", {})
    with pytest.raises(LeftTraining):
        trainings.attempt("run", {}, hooks=at_batch(1, 3), upload=s3)
    status = trainings.status("run")
    assert status.upload is not None
    assert status.upload.pending is None
    assert status.checkpoint is not None
    assert status.upload.uploaded == status.checkpoint.time
    other = Trainings(material, tmp_path / "other", trainings.jobs)
    trainer = other.attempt("run", {}, upload=s3)
    assert other.status("run").counters.steps == 3 * BATCHES - BATCHES - 3
    assert digest_of(trainer) == digest_of(calm)
    sequence = other.status("run").sequence
    Trainings(material, tmp_path / "third", trainings.jobs).attempt("run", {}, upload=s3)
    assert other.status("run").sequence == sequence  # complete: nothing was trained
    with pytest.raises(InvalidInput, match="epochs=5 instead of 3"):
        Trainings(material, tmp_path / "fourth", trainings.jobs).attempt(
            "run", {"epochs": 5}, upload=s3
        )


@pytest.mark.training
def test_a_run_begun_from_weights_moves_before_its_first_state(
    trainings: Trainings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it began from is still where it was put, and is fetched."""

    def die(_trainer: Any) -> None:
        raise ZeroDivisionError

    options: dict[str, Any] = {"upload": f"file://{tmp_path}/there", "on_mismatch": "weights"}
    with pytest.raises(LeftTraining):
        trainings.attempt("run", {}, hooks=at_batch(0, 2), **options)
    other_words = {"batch": 4, "epochs": 1}
    with pytest.raises(ZeroDivisionError):
        trainings.attempt("run", other_words, hooks={"on_train_start": die}, **options)
    other = Trainings(trainings.material, tmp_path / "other", trainings.jobs)
    caplog.clear()
    caplog.set_level("INFO", "gpuwarden")
    other.attempt("run", other_words, **options)
    assert "begins anew from weights" in caplog.text
    assert trainings.status("run").counters.steps == 2 * BATCHES


@pytest.mark.training
def test_a_stale_disk_does_not_set_a_run_back(trainings: Trainings, tmp_path: Path) -> None:
    """It was continued elsewhere meanwhile: the newer state is there, and is fetched."""
    url = f"file://{tmp_path}/there"
    with pytest.raises(LeftTraining):
        trainings.attempt("run", {}, hooks=at_batch(0, 2), upload=url)
    other = Trainings(trainings.material, tmp_path / "other", trainings.jobs)
    with pytest.raises(LeftTraining):
        other.attempt("run", {}, hooks=at_batch(2, 1), upload=url)
    trainings.attempt("run", {}, upload=url)
    assert trainings.status("run").counters.steps == BATCHES - 1


@pytest.mark.training
def test_a_place_that_does_not_answer_never_becomes_a_new_training(
    trainings: Trainings, tmp_path: Path
) -> None:
    """Where nothing is here, days of work may be there; what is here goes on without it."""
    url = f"file://{tmp_path}/there"
    with pytest.raises(LeftTraining):
        trainings.attempt("run", {}, hooks=at_batch(0, 2), upload=url)
    record = tmp_path / "there" / "run" / "run.json"
    record.unlink()
    record.mkdir()
    other = Trainings(trainings.material, tmp_path / "other", trainings.jobs)
    with pytest.raises(ServiceUnavailable, match="--resume never"):
        other.attempt("run", {}, upload=url)
    assert not (tmp_path / "other" / "runs").exists()
    (tmp_path / "there" / "run" / FOLDER).rename(tmp_path / "gone")
    (tmp_path / "there" / "run" / FOLDER).write_bytes(b"")
    trainings.attempt("run", {}, upload=url, upload_wait=0)
    assert trainings.status("run").counters.steps == 3 * BATCHES - 2


def test_orders_are_read_whole_however_they_come() -> None:
    """A pipe may hand over half a line, or several at once; of states the newest counts."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", 0) as stream:
        orders = Orders(stream)
        seen = []
        for part in (b'{"sta', b'te": 1}\n{"state": 2}\n{"rec', b'ord": true}\n'):
            os.write(writing, part)
            orders.read(10)
            seen.append((orders.state, orders.record))
        assert seen == [(None, False), (2, False), (2, True)]
        os.close(writing)
        orders.read(10)
        signal.alarm(0)
        assert orders.ended
