"""The simulated driver: a real `libnvidia-ml.so.1` of our own, built on first use.

`build` compiles `nvml_simulated.c` against NVIDIA's header (PyPI's nvidia-nvml-dev) and keeps the
result in a private cache. Because the library carries the driver's SONAME, loading it once makes
pynvml's own loader find it; other programs take it by `LD_LIBRARY_PATH` and
`GPUWARDEN_SIMULATED_SCENARIO`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.resources
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from gpuwarden.errors import InvalidInput, MissingExtra, PermanentError
from gpuwarden.exporter.scenarios import (
    GIB,
    NOT_AVAILABLE,
    Card,
    Delay,
    Fault,
    Scenario,
    SimulatedInstance,
    SimulatedProcess,
    SimulatedXid,
    parse,
    read,
)

__all__ = [
    "GIB",
    "NOT_AVAILABLE",
    "SCENARIO_VARIABLE",
    "SONAME",
    "Card",
    "Delay",
    "Fault",
    "Scenario",
    "SimulatedInstance",
    "SimulatedProcess",
    "SimulatedXid",
    "build",
    "calls",
    "parse",
    "read",
]

SONAME = "libnvidia-ml.so.1"
SCENARIO_VARIABLE = "GPUWARDEN_SIMULATED_SCENARIO"
"""Names the scenario file for programs that load the library by themselves."""

_COMPILE_SECONDS = 120
_SOURCE = "nvml_simulated.c"
# Where nvml_simulated.c counts calls in FILE.state: behind the magic number and the entries.
_CALLS_OFFSET = 8 + 16384 * 32


def calls(scenario: Path) -> int:
    """How many calls of the driver all users of a scenario have made.

    Args:
        scenario: the scenario's file.
    """
    with scenario.with_name(f"{scenario.name}.state").open("rb") as file:
        file.seek(_CALLS_OFFSET)
        return int.from_bytes(file.read(8), sys.byteorder)


def build(cache: Path | None = None) -> Path:
    """Compile the library, or find it in the cache.

    Args:
        cache: folder to keep it in; `$XDG_CACHE_HOME/gpuwarden` or `~/.cache/gpuwarden` by default.

    Returns:
        Path of the library; its file name is its SONAME.

    Raises:
        MissingExtra: NVIDIA's header is not installed.
        PermanentError: there is no C compiler, or it failed.
        InvalidInput: somebody other than this user and root can write the cache folder.
    """
    source = importlib.resources.files("gpuwarden.exporter").joinpath(_SOURCE).read_bytes()
    header = _header()
    digest = hashlib.sha256(b"\0".join((source, header.read_bytes(), _machine()))).hexdigest()
    folder = _private(_private(cache or _default_cache()) / f"nvml-{digest[:16]}")
    library = folder / SONAME
    if library.exists():
        return library
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise PermanentError(
            "simulated GPUs need a C compiler: apt-get install gcc libc6-dev, or name one in $CC"
        )
    # Built beside its place and moved there: two processes may start at once.
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as temporary:
        built, code = Path(temporary) / SONAME, Path(temporary) / _SOURCE
        code.write_bytes(source)
        command = [compiler, "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
        command += [f"-Wl,-soname,{SONAME}", f"-I{header.parent}", "-o", str(built), str(code)]
        try:
            subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_COMPILE_SECONDS,
            )
        except subprocess.CalledProcessError as error:
            raise PermanentError(
                f"{compiler} could not build the simulated driver (are libc's headers installed? "
                f"apt-get install libc6-dev): {error.stderr.strip()[-2000:]}"
            ) from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PermanentError(f"{compiler} could not be run: {error}") from error
        built.chmod(0o700)
        built.replace(library)
    return library


def _header() -> Path:
    try:
        files = importlib.metadata.files("nvidia-nvml-dev") or []
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtra("exporter --gpus simulated:FILE", "nvidia-nvml-dev", "simulated") from (
            None
        )
    for file in files:
        if file.name == "nvml.h":
            found = Path(str(file.locate()))
            if found.is_file():
                return found
    raise PermanentError(
        "nvidia-nvml-dev is installed without its nvml.h: "
        "pip install --force-reinstall nvidia-nvml-dev"
    )


def _machine() -> bytes:
    return f"{platform.machine()}-{platform.libc_ver()[0]}".encode()


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "gpuwarden"


def _private(folder: Path) -> Path:
    """Make a folder that only this user, or root, can write: code is loaded from it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.lstat()
    others = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ours = about.st_uid in (0, os.geteuid())
    if not stat.S_ISDIR(about.st_mode) or not ours or others:
        raise InvalidInput(
            f"{folder} is not a folder that only you can write; remove it, or set XDG_CACHE_HOME"
        )
    return folder
