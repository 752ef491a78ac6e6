"""Run a command beside the Slurm of another Debian, in a root that is made once.

Debian 13 ("trixie") has Slurm 24.11; `make test-slurm-next` runs the tests of scheduling with it
as they run with this machine's. Needs root: debootstrap unpacks (three minutes, 1 GB of disk), and
the tree, its Python and /tmp are shown to the root, so that jobs find what they run. They are
shown in a mount namespace of the command's own: nothing of this machine stays below the root,
which may be removed like any folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

TREE = Path(__file__).resolve().parent.parent
HOME = Path("/srv/t")
RELEASE = "trixie"
MIRROR = "http://deb.debian.org/debian"
PACKAGES = (
    "slurmctld",
    "slurmd",
    "slurmdbd",
    "slurm-client",
    "munge",
    # What this machine's Python and ultralytics' opencv link against.
    "libffi8",
    "libgl1",
    "libglib2.0-0t64",
    "libgomp1",
    "libreadline8t64",
    "libsqlite3-0",
    "libssl3t64",
)


class MakingFailed(Exception):
    """A step failed; the text says which, and what to do."""


def main() -> int:
    """Make what is missing and run the command; return its status for the shell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=HOME, help="where it is, or is to be")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="+", help="such as: -- python -m pytest tests/scheduling")
    options = parser.parse_args()
    try:
        if options.inside:
            bind(options.root)
            install(options.root)
        else:
            check(options.root)
            unpack(options.root)
    except MakingFailed as error:
        say(str(error))
        return 2
    words = options.command
    if not options.inside:
        again = [sys.executable, __file__, "--inside", "--root", str(options.root), "--", *words]
        words = ["unshare", "--mount", "--propagation", "private", "--", *again]
    environment = {**os.environ, "GPUWARDEN_TEST_SLURM_ROOT": str(options.root)}
    return subprocess.run(words, env=environment, check=False).returncode


def say(text: str) -> None:
    """Tell the user what happens."""
    sys.stderr.write(f"slurm_next: {text}\n")
    sys.stderr.flush()


def check(root: Path) -> None:
    """Refuse where it cannot be done.

    Raises:
        MakingFailed: no right, no debootstrap, or a Python that another Debian cannot run.
    """
    if os.geteuid():
        raise MakingFailed("only root may make a root, and enter it")
    if shutil.which("debootstrap") is None and not (root / "bin/sh").exists():
        raise MakingFailed("debootstrap is missing: apt-get install debootstrap")
    if Path(sys.base_prefix) == Path("/usr"):
        raise MakingFailed(
            f"{sys.executable} is this Debian's own Python, which another Debian cannot run: make "
            "the .venv with a Python that has a folder of its own, such as pyenv's"
        )


def unpack(root: Path) -> None:
    """A minimal Debian, if none is there."""
    if not (root / "bin/sh").exists():
        run(["debootstrap", "--variant=minbase", RELEASE, str(root), MIRROR])


def bind(root: Path) -> None:
    """Show the root what jobs need of this machine, under the same names."""
    wanted = (Path("/proc"), Path("/dev"), Path("/tmp"), *python_folders())  # noqa: S108
    mounted = Path("/proc/self/mounts").read_text(encoding="utf-8").split("\n")
    there = {line.split(" ")[1] for line in mounted if line}
    for folder in wanted:
        place = root / folder.relative_to("/")
        if str(place) not in there:
            place.mkdir(parents=True, exist_ok=True)
            run(["mount", "--bind", str(folder), str(place)])


def python_folders() -> tuple[Path, ...]:
    """The tree, the virtual environment and the Python that it was made with; none twice."""
    folders = {TREE, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    return tuple(
        sorted(
            each
            for each in folders
            if not any(other != each and other in each.parents for other in folders)
        )
    )


def install(root: Path) -> None:
    """Slurm and what the tests' jobs link against, once; no daemon starts in a root."""
    if (root / "usr/sbin/slurmdbd").exists():
        return
    (root / "usr/sbin/policy-rc.d").write_text("#!/bin/sh\nexit 101\n")
    (root / "usr/sbin/policy-rc.d").chmod(0o755)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["chroot", str(root), "apt-get", "update"], environment)
    words = ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]
    run(["chroot", str(root), *words], environment)


def run(words: list[str], environment: dict[str, str] | None = None) -> None:
    """Run a command, its output on standard error.

    Raises:
        MakingFailed: it fails.
    """
    say(" ".join(words))
    done = subprocess.run(words, env=environment, stdout=sys.stderr, check=False)
    if done.returncode:
        raise MakingFailed(f"{words[0]} ended with status {done.returncode}")


if __name__ == "__main__":
    raise SystemExit(main())
