"""Where states lie says whether the next attempt finds them, by what a machine mounts there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.scheduling.slurm.tasks import a_task

from gpuwarden.scheduling.storages import (
    Kind,
    Mount,
    kind_of,
    mounts_here,
    read_mounts,
    states_folder,
    storage_doubt,
)

if TYPE_CHECKING:
    from pathlib import Path

TMP = "/tmp"  # noqa: S108 (a name)
NODE = (
    Mount("/", "ext4"),
    Mount(TMP, "tmpfs"),
    Mount("/home", "nfs4"),
    Mount("/scratch", "xfs"),
    Mount("/mnt/s3", "fuse.s3fs"),
    Mount(f"{TMP}/kept", "lustre"),
)


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/home/ana/runs", Kind.LASTING),
        ("/homework/runs", Kind.OF_ONE_NODE),
        ("/scratch/ana", Kind.OF_ONE_NODE),
        ("/mnt/s3/runs", Kind.LASTING),
        (f"{TMP}/ana/runs", Kind.PASSING),
        (f"{TMP}/kept/runs", Kind.LASTING),
        (f"/var{TMP}/ana", Kind.PASSING),
        ("/run/ana", Kind.PASSING),
    ],
)
def test_the_file_system_of_the_longest_mount_decides(folder: str, kind: Kind) -> None:
    """A folder for passing things is one on a disk too, unless something else is mounted there."""
    assert kind_of(folder, NODE)[0] is kind


def test_what_nobody_knows_is_not_doubted() -> None:
    """A file system of a new kind, or no list of mounts at all."""
    assert kind_of("/data/runs", (Mount("/", "ext4"), Mount("/data", "newfs")))[0] is Kind.LASTING
    assert kind_of("/data/runs", ())[0] is Kind.LASTING


def test_of_two_file_systems_on_one_folder_the_later_one_counts() -> None:
    """It hides the other."""
    assert kind_of("/data/x", (Mount("/data", "ext4"), Mount("/data", "nfs")))[0] is Kind.LASTING


def test_mounts_are_read_with_their_spaces(tmp_path: Path) -> None:
    """As proc(5) writes them; broken lines are left out, and a file that is not there is none."""
    text = (
        "36 35 98:0 /mnt1 /mnt/my\\040data rw,noatime master:1 - ext3 /dev/root rw\n"
        "37 35 0:40 / /a rw shared:2 master:1 - nfs4 server:/x rw\nbroken\n1 2 - ext4\n"
    )
    assert read_mounts(text) == (Mount("/mnt/my data", "ext3"), Mount("/a", "nfs4"))
    assert mounts_here(tmp_path / "none") == ()
    assert any(mount.point == "/" for mount in mounts_here())


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ((), "/home/ana/runs"),
        (("project=out",), "/home/ana/out"),
        (("project=/scratch/x/../y",), "/scratch/y"),
        (("project=/a", "save_dir=/b"), "/b"),
    ],
)
def test_states_lie_where_the_words_say(words: tuple[str, ...], folder: str) -> None:
    """Beside what ultralytics writes."""
    task = a_task(words=("model=yolov8n", *words), directory="/home/ana")
    assert states_folder(task) == folder


def test_a_doubt_says_what_to_do() -> None:
    """On one machine a disk is as good as any; states that are uploaded besides come back."""
    task = a_task(words=("model=yolov8n", "project=/scratch/ana"))
    assert storage_doubt(task, NODE, several_nodes=False) is None
    doubt = storage_doubt(task, NODE, several_nodes=True)
    assert doubt is not None
    assert "/scratch/ana, on a disk of this machine (xfs)" in doubt
    assert "project=FOLDER" in doubt
    kept = a_task(words=task.words, options=("--upload=s3://bucket/ana",))
    assert storage_doubt(kept, NODE, several_nodes=True) is None
    passing = a_task(words=("model=yolov8n", f"project={TMP}/ana"))
    for several, told in ((True, "of its node alone"), (False, "lost by a reboot")):
        doubt = storage_doubt(passing, NODE, several_nodes=several)
        assert doubt is not None
        assert told in doubt
