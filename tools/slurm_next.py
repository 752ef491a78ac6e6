"""Make the root of another Debian with its Slurm, for `make test-slurm-next`.

Debian 13 ("trixie") has Slurm 24.11; the tests of scheduling then run with it as they do with this
machine's. Needs root: debootstrap unpacks, and the tree, its Python and /tmp are bound into the
root, so that jobs find what they run. It takes some three minutes and 1 GB of disk, once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
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
    """Make what is missing; print the root's path, and return a status for the shell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=HOME, help="where it is, or is to be")
    options = parser.parse_args()
    started = time.monotonic()
    try:
        check(options.root)
        if not (options.root / "bin/sh").exists():
            unpack(options.root)
        bind(options.root)
        if not (options.root / "usr/sbin/slurmdbd").exists():
            install(options.root)
    except MakingFailed as error:
        say(str(error))
        return 2
    say(f"{options.root} is ready after {time.monotonic() - started:.0f} s")
    return 0


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
    """A minimal Debian."""
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
    """Slurm and what the tests' jobs link against; no daemon starts in a root."""
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
