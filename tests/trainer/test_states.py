from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.trainer.conftest import draft

from gpuwarden.trainer.runs import RunIsLocked, RunLock, RunRecord
from gpuwarden.trainer.states import (
    BackgroundWrite,
    Manifest,
    NonFiniteState,
    StateStore,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def _state(value: float = 1.0) -> dict[str, Any]:
    weights = {"w": torch.full((3000,), value), "n": torch.tensor(1)}
    return {"model": weights, "ema": weights, "names": ["a"], "optimizer": {0: {"step": 1}}}


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    """An empty store."""
    return StateStore(tmp_path, "mine", keep=3)


def test_a_state_comes_back_as_it_was(store: StateStore) -> None:
    """Tensors and plain values survive, without unpickling code."""
    written = store.write(_state(2.5), draft(4))
    found = store.newest()
    assert found is not None
    assert found[0] == written
    assert (found[0].step, found[0].lineage, found[0].sequence) == (4, "mine", 1)
    assert torch.equal(found[1]["model"]["w"], torch.full((3000,), 2.5))
    assert found[1]["optimizer"] == {0: {"step": 1}}


def test_the_newest_three_stay(store: StateStore, tmp_path: Path) -> None:
    """Older states go, together with their manifests; numbering goes on after a restart."""
    for step in range(1, 6):
        store.write(_state(), draft(step))
    assert [manifest.step for manifest in store.manifests()] == [5, 4, 3]
    assert len(list(tmp_path.glob("*.pt"))) == 3
    assert StateStore(tmp_path, "mine").write(_state(), draft(6)).sequence == 6


def test_the_best_state_stays_too(tmp_path: Path) -> None:
    """However long ago it was; once there is a better one, it goes."""
    store = StateStore(tmp_path, "mine", keep=2)
    for step, fitness in enumerate((None, 0.4, 0.1, 0.2, 0.3)):
        store.write(_state(), dataclasses.replace(draft(step), fitness=fitness))
    assert [manifest.step for manifest in store.manifests()] == [4, 3, 1]
    best = store.best()
    assert best is not None
    assert best.step == 1
    store.write(_state(), dataclasses.replace(draft(5), fitness=0.4))
    assert [manifest.step for manifest in store.manifests()] == [5, 4]


def _truncate(path: Path, share: float) -> None:
    os.truncate(path, int(path.stat().st_size * share))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda path: _truncate(path, 0.0), "corrupt"),
        (lambda path: _truncate(path, 0.3), "corrupt"),
        (lambda path: _truncate(path, 0.9), "corrupt"),
        (lambda path: _truncate(path, 0.9999), "corrupt"),
        (_flip, "corrupt"),
        (lambda path: path.unlink(), "missing"),
        (lambda path: _truncate(path.with_suffix(".json"), 0.5), "corrupt"),
    ],
)
def test_a_damaged_state_is_put_aside_for_the_one_before(
    store: StateStore,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    kind: str,
) -> None:
    """Truncated, flipped, missing: reported as what it is, renamed, and never loaded."""
    store.write(_state(1.0), draft(1))
    store.write(_state(2.0), draft(2))
    damage(tmp_path / "000002.pt")
    found = store.newest()
    assert found is not None
    assert found[0].step == 1
    assert f"state 000002 is {kind}" in caplog.text
    assert (tmp_path / "000002.json.bad").exists()
    assert not (tmp_path / "000002.json").exists()


def test_a_state_of_another_version_is_left_alone(
    store: StateStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is good for the gpuwarden that wrote it."""
    store.write(_state(), draft(1))
    store.write(_state(), draft(2))
    path = tmp_path / "000002.json"
    path.write_text(path.read_text("utf-8").replace('"version": 1', '"version": 9'), "utf-8")
    found = store.newest()
    assert found is not None
    assert found[0].step == 1
    assert "state 000002 is version: version 9 is not 1" in caplog.text
    assert path.exists()


def test_states_of_another_training_are_not_ours(store: StateStore, tmp_path: Path) -> None:
    """A fresh start into the same folder neither resumes them nor keeps them."""
    StateStore(tmp_path, "theirs").write(_state(), draft(9))
    assert store.newest() is None
    store = StateStore(tmp_path, "mine")
    store.write(_state(), draft(1))
    store.discard_others()
    assert [path.name for path in sorted(tmp_path.glob("0*"))] == ["000002.json", "000002.pt"]


def test_nan_never_replaces_a_finite_state(store: StateStore, tmp_path: Path) -> None:
    """Three broken saves in a row would otherwise push out the last good one."""
    store.write(_state(), draft(1))
    for _ in range(3):
        with pytest.raises(NonFiniteState, match="model w"):
            store.write(_state(float("nan")), draft(2))
    assert [manifest.step for manifest in store.manifests()] == [1]
    assert not list(tmp_path.glob(".*"))


def test_moments_that_are_not_finite_are_weights_that_will_not_be(store: StateStore) -> None:
    """The next step would carry the optimizer's NaN into the weights."""
    state = _state()
    state["optimizer"] = {"state": {0: {"exp_avg": torch.tensor([1.0, float("inf")])}}}
    with pytest.raises(NonFiniteState, match="optimizer exp_avg 0"):
        store.write(state, draft(1))


def _fits(store: StateStore, state: dict[str, Any], step: int) -> bool:
    try:
        store.write(state, draft(step))
    except (OSError, RuntimeError):
        return False
    return True


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a file system takes root")
    yield folder
    subprocess.run(["/bin/umount", str(folder)], check=True)


def test_a_disk_that_fills_up_keeps_what_it_has(small_disk: Path) -> None:
    """What fits is whole, what does not leaves nothing, and new room is made use of."""
    store = StateStore(small_disk, "mine", keep=100)
    state = _state()
    state["model"] = {"w": torch.ones(16_000)}  # 64 KiB
    written = len(list(takewhile(lambda step: _fits(store, state, step), range(1, 20))))
    assert 3 <= written < 8
    found = store.newest()
    assert found is not None
    assert found[0].step == written
    assert not list(small_disk.glob(".*.tmp"))
    for path in (small_disk / "000001.pt", small_disk / "000002.pt"):
        path.unlink()
    store.write(state, draft(20))
    assert store.manifests()[0].step == 20


def test_a_full_disk_leaves_the_old_states(store: StateStore, tmp_path: Path) -> None:
    """Nothing is given up before the new state is whole."""
    store.write(_state(), draft(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises((OSError, RuntimeError)):
            store.write(_state(), draft(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    found = store.newest()
    assert found is not None
    assert found[0].step == 1
    assert not list(tmp_path.glob(".*"))


def test_a_write_that_was_killed_is_not_seen(tmp_path: Path) -> None:
    """SIGKILL within the write leaves a temporary file, which the next attempt removes."""
    code = (
        "import os, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from gpuwarden.trainer import states\n"
        "os.fsync = lambda number: os.kill(os.getpid(), signal.SIGKILL)\n"
        "weights = {'w': torch.zeros(100)}\n"
        "manifest = states.Manifest('', 0, 1, 1, 1, 1, 1, '', '', True, '', 0.0)\n"
        "states.StateStore(Path(sys.argv[1]), 'mine').write("
        "{'model': weights, 'ema': weights}, manifest)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert ran.returncode == -9
    assert list(tmp_path.glob(".*.tmp"))
    store = StateStore(tmp_path, "mine")
    assert store.newest() is None
    store.remove_leftovers()
    assert not list(tmp_path.iterdir())


def test_a_state_without_its_manifest_does_not_stay(store: StateStore, tmp_path: Path) -> None:
    """It can never be resumed, and would fill a disk that is full already."""
    store.write(_state(), draft(1))
    blocked = tmp_path / f".000002.json.{os.getpid()}.tmp"
    blocked.mkdir()
    with pytest.raises(OSError, match="directory"):
        store.write(_state(), draft(2))
    assert [path.name for path in sorted(tmp_path.glob("0*"))] == ["000001.json", "000001.pt"]
    (tmp_path / "000007.pt").write_bytes(b"its writer was killed before the commit")
    blocked.rmdir()
    store.remove_leftovers()
    assert [path.name for path in sorted(tmp_path.glob("0*"))] == ["000001.json", "000001.pt"]


def test_what_cannot_be_read_now_is_not_called_corrupt(
    store: StateStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A state whose bytes are right stays for a better moment, such as one with more memory."""
    store.write(_state(1.0), draft(1))
    newest = store.write(_state(2.0), draft(2))
    content = b"no archive, but what was written"
    (tmp_path / "000002.pt").write_bytes(content)
    whole = dataclasses.replace(
        newest, size=len(content), sha256=hashlib.sha256(content).hexdigest()
    )
    (tmp_path / "000002.json").write_bytes(whole.encode())
    found = store.newest()
    assert found is not None
    assert found[0].step == 1
    assert "state 000002 is unreadable" in caplog.text
    assert (tmp_path / "000002.pt").exists()


def test_a_store_knows_that_it_had_states(store: StateStore, tmp_path: Path) -> None:
    """Damaged ones count, put aside or not: only a run without any may start from nothing."""
    assert not store.has_any()
    StateStore(tmp_path, "theirs").write(_state(), draft(1))
    assert not store.has_any()
    store.discard_others()
    StateStore(tmp_path, "mine").write(_state(), draft(1))
    assert store.has_any()
    (tmp_path / "000001.json").write_text("{", "utf-8")
    assert store.has_any()
    assert store.newest() is None
    assert store.has_any()
    store.discard_others()
    assert not store.has_any()


def test_a_background_write_hands_over_its_result_or_error(store: StateStore) -> None:
    """The loop learns of both when it asks."""
    manifest, durable = BackgroundWrite(lambda: store.write(_state(), draft(1))).result()
    assert manifest.sequence == 1
    assert durable > 0
    with pytest.raises(NonFiniteState):
        BackgroundWrite(lambda: store.write(_state(float("inf")), draft(2))).result()


def test_a_record_survives_and_a_broken_one_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder whose record cannot be read belongs to no run, and that is said."""
    record = RunRecord("run", "lineage", {"epochs": "3"}, 5.0).having_answered("d1")
    record.write(tmp_path)
    assert RunRecord.read(tmp_path) == record
    for _ in range(40):
        record = record.having_answered("d2")
    assert record.answered == ("d1", "d2")
    assert not caplog.records
    for broken in ("{}", "[", '{"version": 2}'):
        (tmp_path / "run.json").write_text(broken, "utf-8")
        assert RunRecord.read(tmp_path) is None
        assert f"{tmp_path / 'run.json'}" in caplog.records[-1].message
    assert RunRecord.read(tmp_path / "nowhere") is None


def test_one_process_trains_at_a_time(tmp_path: Path) -> None:
    """The second is told who has the run; when the first has died, the lock is free."""
    folder = tmp_path / "states"
    folder.mkdir()
    code = (
        "import sys; from pathlib import Path; from gpuwarden.trainer.runs import RunLock\n"
        "lock = RunLock(Path(sys.argv[1])); lock.acquire(); print('locked', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(RunIsLocked, match=f"pid {other.pid}"):
            RunLock(folder).acquire()
        other.kill()
        lock = RunLock(folder)
        lock.acquire(wait_seconds=20)
        lock.release()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fitness", "0.5"),
        ("sequence", "1"),
        ("sequence", 2**80),
        ("epoch", True),
        ("words", {"epochs": 3}),
        ("words", []),
        ("lineage", None),
        ("size", 1.5),
    ],
)
def test_a_manifest_with_a_field_of_another_kind_is_damaged(
    store: StateStore, tmp_path: Path, name: str, value: object
) -> None:
    """It is noticed where it is read, and not in the middle of a training."""
    good = store.write(_state(), dataclasses.replace(draft(1), fitness=0.1))
    bad = {**json.loads(good.encode()), "sequence": 2, name: value}
    (tmp_path / "000002.json").write_text(json.dumps(bad), "utf-8")
    with pytest.raises(ValueError, match=name):
        Manifest.decode(json.dumps(bad).encode())
    assert store.best() == good
    assert store.manifests() == [good]
    found = store.newest()
    assert found is not None
    assert found[0] == good
    assert (tmp_path / "000002.json.bad").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("started", "1"), ("answered", "d1"), ("answered", [1]), ("words", {"a": 1})],
)
def test_a_record_with_a_field_of_another_kind_is_none(
    tmp_path: Path, name: str, value: object
) -> None:
    """Its run is passed over, as that of a record that cannot be read."""
    RunRecord("run", "lineage", {"epochs": "3"}, 5.0).write(tmp_path)
    content = json.loads((tmp_path / "run.json").read_bytes())
    (tmp_path / "run.json").write_text(json.dumps({**content, name: value}), "utf-8")
    assert RunRecord.read(tmp_path) is None
