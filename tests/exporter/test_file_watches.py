"""Waiting for a file: what ends the wait, and that nothing is missed on the way."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from tests.exporter.nodes import eventually

from gpuwarden.exporter.file_watches import FileWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LONG = 600.0


class Waiter:
    """A thread that waits once, for ten minutes if nothing happens."""

    def __init__(self, watch: FileWatch) -> None:
        self._thread = threading.Thread(target=watch.wait, args=(LONG,), daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether the wait has ended."""
        return not self._thread.is_alive()


@pytest.fixture
def watch() -> Iterator[Callable[[Path], FileWatch]]:
    """Makes watches and closes them with the test."""
    made: list[FileWatch] = []

    def make(file: Path) -> FileWatch:
        made.append(FileWatch(file))
        return made[-1]

    yield make
    for one in made:
        one.close()


def _rename(file: Path) -> None:
    file.with_name("x.tmp").write_text("{}")
    file.with_name("x.tmp").replace(file)


@pytest.mark.parametrize("happens", [_rename, lambda file: file.touch(), lambda file: file.mkdir()])
def test_a_file_that_comes(
    watch: Callable[[Path], FileWatch], tmp_path: Path, happens: Callable[[Path], None]
) -> None:
    """A file that is renamed into place, made, or is no file at all, ends the wait."""
    file = tmp_path / "release"
    one = watch(file)
    assert one.watching
    waiter = Waiter(one)
    happens(file)
    eventually(lambda: waiter.over)


@pytest.mark.parametrize(
    "happens",
    [
        lambda file: file.unlink(),
        lambda file: file.rename(file.with_name("other")),
        lambda file: file.write_text("x"),
        lambda file: file.chmod(0o600),
    ],
)
def test_a_file_that_goes_or_changes(
    watch: Callable[[Path], FileWatch], tmp_path: Path, happens: Callable[[Path], None]
) -> None:
    """Removing it, moving it away, writing to it and who may read it end the wait."""
    file = tmp_path / "release"
    file.touch()
    waiter = Waiter(watch(file))
    happens(file)
    eventually(lambda: waiter.over)


def test_what_happened_between_two_waits(
    watch: Callable[[Path], FileWatch], tmp_path: Path
) -> None:
    """What happens while nobody waits ends the next wait."""
    one = watch(tmp_path / "release")
    (tmp_path / "release").touch()
    one.wait(LONG)


def test_other_files_wake_nobody(watch: Callable[[Path], FileWatch], tmp_path: Path) -> None:
    """A folder in which others write all the time costs nothing, and hides nothing."""
    one = watch(tmp_path / "release")
    for number in range(100):
        (tmp_path / f"release-{number}").write_text("x")
    began = time.monotonic()
    one.wait(0.05)
    assert time.monotonic() - began >= 0.05
    (tmp_path / "other").touch()
    (tmp_path / "release").touch()
    one.wait(LONG)


def test_it_is_woken(watch: Callable[[Path], FileWatch], tmp_path: Path) -> None:
    """Another thread ends the wait, also one that begins later, but once."""
    one = watch(tmp_path / "release")
    one.wake()
    one.wait(LONG)
    waiter = Waiter(one)
    one.wake()
    eventually(lambda: waiter.over)


def test_folders_that_come_later(watch: Callable[[Path], FileWatch], tmp_path: Path) -> None:
    """While the folder is not there, the nearest one is watched for what leads to the file."""
    folder = tmp_path / "run" / "gpuwarden"
    one = watch(folder / "release")
    for make in (folder.parent.mkdir, folder.mkdir, (folder / "release").touch):
        assert one.watching
        waiter = Waiter(one)
        make()
        eventually(lambda waiter=waiter: waiter.over)
        one.wait(0)


def test_a_folder_that_is_replaced(watch: Callable[[Path], FileWatch], tmp_path: Path) -> None:
    """A folder that is removed and made anew is watched anew."""
    folder = tmp_path / "run"
    folder.mkdir()
    one = watch(folder / "release")
    for make in (folder.rmdir, folder.mkdir, (folder / "release").touch):
        waiter = Waiter(one)
        make()
        eventually(lambda waiter=waiter: waiter.over)
        one.wait(0)
        assert one.watching


def test_what_cannot_be_watched(watch: Callable[[Path], FileWatch], tmp_path: Path) -> None:
    """Without a watch the wait ends by itself, soon enough to look; it begins when it can."""
    folder = tmp_path / "run"
    folder.touch()
    one = watch(folder / "release")
    assert not one.watching
    one.wait(LONG)
    folder.unlink()
    folder.mkdir()
    one.wait(LONG)
    assert one.watching
