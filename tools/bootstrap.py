"""Install what `make demo` and `make test` need; standard library only, so that any Python runs it.

Debian packages first (with apt-get as root or through sudo; without either right the exact command
is printed), then `.venv` with gpuwarden and its extras. What is already there is not touched: a
stamp in `.venv` holds a hash of everything that decides its content.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "gpuwarden.stamp"
CONSTRAINTS = ROOT / "constraints.txt"

# File that shows that a Debian package is there (a pattern below /) -> the package. The last two
# are what ultralytics' opencv links against, and what no Python package brings.
DEBIAN = {
    "usr/bin/prometheus": "prometheus",
    "usr/bin/prometheus-alertmanager": "prometheus-alertmanager",
    "usr/bin/gcc": "gcc",
    "usr/include/stdlib.h": "libc6-dev",
    "usr/sbin/slurmctld": "slurmctld",
    "usr/sbin/slurmd": "slurmd",
    "usr/bin/scontrol": "slurm-client",
    "usr/sbin/slurmdbd": "slurmdbd",
    "usr/sbin/mariadbd": "mariadb-server",
    "usr/sbin/munged": "munge",
    "usr/bin/tmux": "tmux",
    "usr/bin/chromium": "chromium",
    "usr/lib/*/libpangoft2-1.0.so.0": "libpangoft2-1.0-0",
    "usr/bin/systemd-analyze": "systemd",
    "usr/lib/*/libseccomp.so.2": "libseccomp2",
    "usr/lib/*/libGL.so.1": "libgl1",
    "usr/lib/*/libgthread-2.0.so.0": "libglib2.0-0",
}


def main() -> int:
    """Install what is missing; return a status for the shell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 - this runs before anything has checked it
        say(f"Python 3.11 or later is needed, this is {sys.version.split()[0]}")
        return 2
    started = time.monotonic()
    status = install_debian_packages()
    if status:
        return status
    status = install_python_packages()
    if not status:
        say(f"ready after {time.monotonic() - started:.0f} s")
    return status


def say(text: str) -> None:
    """Tell the user what happens, apart from the output of what is set up."""
    sys.stderr.write(f"setup: {text}\n")
    sys.stderr.flush()


def install_debian_packages() -> int:
    """Install missing Debian packages, or print the command that does."""
    root = Path("/")
    missing = [package for pattern, package in DEBIAN.items() if not any(root.glob(pattern))]
    if not can_make_venv():
        missing.append(f"python3.{sys.version_info.minor}-venv")
    if not missing:
        return 0
    steps = [
        ["apt-get", "update"],
        ["apt-get", "install", "-y", "--no-install-recommends", *missing],
    ]
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if not shutil.which("apt-get"):
        say(f"missing: {', '.join(missing)}; install them by your system's package manager")
        return 2
    if sudo and (
        not shutil.which("sudo") or subprocess.run([*sudo, "true"], check=False).returncode
    ):
        command = " && ".join("sudo " + " ".join(step) for step in steps)
        say(f"no right to install packages; run this, then make again:\n\n  {command}\n")
        return 2
    say(f"installing {', '.join(missing)}")
    # DEBIAN_FRONTEND: a question on a terminal would block an unattended run.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in steps:
        done = subprocess.run(
            [*sudo, *step],
            env=environment,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode:
            sys.stderr.buffer.write(done.stdout)
            say(f"failed: {' '.join(step)}")
            return 2
    return 0


def can_make_venv() -> bool:
    """Whether this Python can make virtual environments (Debian ships ensurepip apart)."""
    probe = subprocess.run(
        [sys.executable, "-c", "import ensurepip, venv"], check=False, stderr=subprocess.DEVNULL
    )
    return probe.returncode == 0


def install_python_packages() -> int:
    """Make `.venv` hold gpuwarden, editable, with everything that demo and tests use."""
    wanted = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__)):
        wanted.update(path.read_bytes())
    wanted.update(f"{ROOT}{sys.version_info[:2]}".encode())
    if STAMP.exists() and STAMP.read_text() == wanted.hexdigest():
        return 0
    if not (VENV / "bin" / "python").exists():
        say("creating .venv")
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    quiet = [] if sys.stderr.isatty() else ["-q"]
    say("installing Python packages; torch is large, the first time takes some minutes")
    install = [*pip, "install", *quiet, "-c", str(CONSTRAINTS), "-e", f"{ROOT}[dev]"]
    if subprocess.run(install, check=False).returncode:
        say("pip failed; its message is above. A proxy or mirror is set by PIP_INDEX_URL")
        return 2
    STAMP.write_text(wanted.hexdigest())
    return 0


if __name__ == "__main__":
    sys.exit(main())
