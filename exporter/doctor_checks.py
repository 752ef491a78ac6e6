"""`gpuwarden doctor node`: driver, cards, kernel, folders and rights of this machine."""

from __future__ import annotations

import os
import platform
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import GpuwardenError, InvalidInput
from gpuwarden.exporter import commands, kubelets, releases, slurm
from gpuwarden.exporter import doctor_findings as known
from gpuwarden.exporter.agent.keys import KeyRing
from gpuwarden.exporter.namespaces import REMEDY as HOST_PIDS
from gpuwarden.exporter.namespaces import sees_host_pids
from gpuwarden.exporter.nvml import open_gpus
from gpuwarden.findings import CannotCheck, Check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.exporter.doctor_places import Daemon, Places
    from gpuwarden.findings import Finding

CAPABILITIES: Final = {
    "CAP_DAC_OVERRIDE": 1,
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_KILL": 5,
    "CAP_SYS_PTRACE": 19,
}
"""Bit of each in CapEff of proc(5)."""
LOW_BYTES, LEAST_BYTES = 256 * 1024**2, 32 * 1024**2
_KILL_SINCE, _PIDFD_SINCE = (5, 14), (5, 3)
_BUSY_FILES = 0.8
_PING_SECONDS = 8.0
_DEVICES = re.compile(r"nvidia\d+")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the kernel shows what a node is made of.

    Attributes:
        proc, sys, dev: where these are mounted.
        kubelet: socket of the kubelet's pod-resources API.
        pods: where the kubelet keeps its pods' logs.
    """

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    kubelet: Path = kubelets.SOCKET
    pods: Path = kubelets.LOGS


def machine_checks(places: Places, machine: Machine) -> list[Check]:
    """Every check that asks the machine itself."""
    return [
        Check(known.DRIVER, lambda: _driver(places), 20.0),
        Check(known.CARDS, lambda: _cards(places, machine), 20.0),
        Check(known.PROCESSES, lambda: _processes(places, machine)),
        Check(known.HIDEPID, lambda: _hidepid(places, machine)),
        Check(known.CGROUPS, lambda: _cgroups(machine)),
        Check(known.KERNEL, lambda: _kernel(machine)),
        Check(known.JOBS, lambda: _jobs(places)),
        Check(known.KEYS, lambda: _keys(places)),
        Check(known.KILL_SWITCH, lambda: _kill_switch(places)),
        Check(known.RELEASE, lambda: _release(places)),
        Check(known.AGENT_RIGHTS, lambda: _agent_rights(places, machine)),
        Check(known.DISK, lambda: _disk(places)),
        Check(known.FILES, lambda: _files(places, machine)),
        Check(known.SLURM, _slurm, 15.0),
        Check(known.KUBELET, lambda: _kubelet(places, machine), 15.0),
    ]


# ---------------------------------------------------------------------------------------------
# Cards


def _driver(places: Places) -> Iterator[Finding]:
    gpus = open_gpus(places.gpus)
    try:
        gpus.open()
        snapshot = gpus.snapshot()
    except GpuwardenError as error:
        yield known.DRIVER.failed(str(error))
        return
    finally:
        gpus.close()
    cards = len(snapshot.gpus)
    version = snapshot.driver_version or "of an unknown version"
    if not cards:
        yield known.DRIVER.failed(f"driver {version}, and no card")
        return
    lost = [gpu for gpu in snapshot.gpus if not gpu.up]
    for gpu in lost:
        yield known.DRIVER.failed("it does not answer", f"GPU {gpu.index} {gpu.uuid}")
    if not lost:
        yield known.DRIVER.ok(f"driver {version}, {cards} cards")


def _cards(places: Places, machine: Machine) -> Iterator[Finding]:
    folder = machine.proc / "driver/nvidia/gpus"
    if places.gpus != "nvml" and not folder.exists():
        raise CannotCheck("the driver is simulated", needed=False)
    kernel = len(list(folder.iterdir())) if folder.is_dir() else None
    devices = [item for item in machine.dev.iterdir() if _DEVICES.fullmatch(item.name)]
    gpus = open_gpus(places.gpus)
    try:
        gpus.open()
        listed = len(gpus.snapshot().gpus)
    except GpuwardenError as error:
        raise CannotCheck(str(error)) from error
    finally:
        gpus.close()
    wrong = False
    if kernel is not None and kernel != listed:
        wrong = True
        yield known.CARDS.failed(f"the kernel's module has {kernel} cards, and NVML {listed}")
    if len(devices) < listed:
        wrong = True
        yield known.CARDS.failed(f"{len(devices)} device files in /dev, and {listed} cards")
    for path in (*devices, machine.dev / "nvidiactl"):
        if not os.access(path, os.R_OK | os.W_OK):
            wrong = True
            yield known.CARDS.warning("cannot be opened by this user", str(path))
    if not wrong:
        yield known.CARDS.ok(f"{listed} cards, {len(devices)} device files")


# ---------------------------------------------------------------------------------------------
# Rights


def rights_of(daemon: Daemon, machine: Machine) -> set[str]:
    """Which of `CAPABILITIES` a process has.

    Raises:
        CannotCheck: it is gone, or cannot be seen.
    """
    try:
        text = (machine.proc / str(daemon.pid) / "status").read_text()
        bits = int(re.findall(r"^CapEff:\s*([0-9a-f]+)$", text, re.MULTILINE)[0], 16)
    except (OSError, IndexError, ValueError) as error:
        raise CannotCheck(f"process {daemon.pid} cannot be seen: {error}") from error
    return {name for name, bit in CAPABILITIES.items() if bits >> bit & 1}


def _processes(places: Places, machine: Machine) -> Iterator[Finding]:
    if places.exporter is None:
        raise CannotCheck("no exporter is seen to run here")
    missing = {"CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"} - rights_of(places.exporter, machine)
    if missing:
        yield known.PROCESSES.failed(f"the exporter lacks {', '.join(sorted(missing))}")
    if not sees_host_pids(machine.proc):
        yield known.PROCESSES.warning(
            "this command runs in a PID namespace of its own", remedy=HOST_PIDS
        )
    elif not missing:
        yield known.PROCESSES.ok("it may read every user's /proc")


def _hidepid(places: Places, machine: Machine) -> Iterator[Finding]:
    options = _options_of(machine.proc)
    found = re.search(r"\bhidepid=([a-z0-9]+)", options)
    if found is None or found[1] in ("0", "off"):
        yield known.HIDEPID.ok("processes are not hidden")
        return
    rights = set() if places.exporter is None else rights_of(places.exporter, machine)
    text = f"/proc is mounted with {found[0]}"
    if "CAP_SYS_PTRACE" in rights:
        yield known.HIDEPID.ok(f"{text}, which does not concern the exporter")
    else:
        yield known.HIDEPID.failed(f"{text}, and the exporter has no CAP_SYS_PTRACE")


def _options_of(proc: Path) -> str:
    for line in (proc / "self/mounts").read_text().splitlines():
        words = line.split()
        if len(words) > 3 and words[1] == str(proc) and words[2] == "proc":
            return words[3]
    return ""


def _agent_rights(places: Places, machine: Machine) -> Iterator[Finding]:
    if places.agent is None:
        raise CannotCheck("no agent is seen to run here", needed=False)
    missing = CAPABILITIES.keys() - rights_of(places.agent, machine)
    if missing:
        yield known.AGENT_RIGHTS.failed(f"it lacks {', '.join(sorted(missing))}")
    else:
        yield known.AGENT_RIGHTS.ok("it may signal and see every process")


# ---------------------------------------------------------------------------------------------
# The kernel


def _release_of(machine: Machine) -> tuple[int, int]:
    text = (machine.proc / "sys/kernel/osrelease").read_text()
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None:
        raise CannotCheck(f"{text.strip()} is no version of Linux")
    return int(found[1]), int(found[2])


def _cgroups(machine: Machine) -> Iterator[Finding]:
    root = machine.sys / "fs/cgroup"
    if not (root / "cgroup.controllers").exists():
        yield known.CGROUPS.warning("cgroup v1, or both at once")
    elif _release_of(machine) < _KILL_SINCE:
        yield known.CGROUPS.warning("cgroup v2, on a kernel without cgroup.kill")
    else:
        yield known.CGROUPS.ok("cgroup v2 with cgroup.kill")


def _kernel(machine: Machine) -> Iterator[Finding]:
    version = ".".join(map(str, _release_of(machine)))
    wrong = False
    if _release_of(machine) < _PIDFD_SINCE or not hasattr(os, "pidfd_open"):
        wrong = True
        yield known.KERNEL.failed(f"Linux {version} has no pidfds")
    if not (machine.proc / "pressure/cpu").exists():
        wrong = True
        yield known.KERNEL.warning("there is no /proc/pressure: pressure is not measured")
    if not wrong:
        yield known.KERNEL.ok(f"Linux {version} on {platform.machine()}")


# ---------------------------------------------------------------------------------------------
# Folders and files


def _jobs(places: Places) -> Iterator[Finding]:
    wrong = False
    owners = {"jobs": places.exporter, "requests": places.agent}
    for name, mode in (("jobs", 0o1777), ("requests", 0o755)):
        folder = places.jobs / name
        try:
            about = folder.lstat()
        except OSError as error:
            wrong = True
            yield known.JOBS.failed(str(error.strerror), str(folder))
            continue
        if not stat.S_ISDIR(about.st_mode):
            wrong = True
            yield known.JOBS.failed("is no folder", str(folder))
        elif stat.S_IMODE(about.st_mode) != mode:
            wrong = True
            text = f"has mode {stat.S_IMODE(about.st_mode):o}, not {mode:o}"
            make = known.JOBS.failed if name == "requests" else known.JOBS.warning
            yield make(text, str(folder))
        owner = owners[name]
        uid = None if owner is None else _uid(owner, places)
        if uid is not None and about.st_uid not in (uid, 0):
            wrong = True
            text = f"belongs to uid {about.st_uid}, and its writer has uid {uid}"
            yield known.JOBS.failed(text, str(folder))
    if not wrong:
        yield known.JOBS.ok("jobs/ and requests/ are there", str(places.jobs))


def _uid(owner: Daemon, places: Places) -> int | None:
    try:
        return (places.proc / str(owner.pid)).stat().st_uid
    except OSError:
        return None


def _keys(places: Places) -> Iterator[Finding]:
    if places.agent is None and not places.keys.exists():
        raise CannotCheck("no agent is seen to run here", needed=False)
    try:
        ring = KeyRing(places.keys)
    except InvalidInput as error:
        yield known.KEYS.failed(str(error))
        return
    yield known.KEYS.ok(f"accepted: {', '.join(ring.key_ids)}", str(places.keys))


def _kill_switch(places: Places) -> Iterator[Finding]:
    try:
        places.kill_switch.lstat()
    except FileNotFoundError:
        yield known.KILL_SWITCH.ok("off")
    except OSError as error:
        yield known.KILL_SWITCH.failed(str(error.strerror), str(places.kill_switch))
    else:
        yield known.KILL_SWITCH.warning("the file exists", str(places.kill_switch))


def _release(places: Places) -> Iterator[Finding]:
    try:
        order = releases.read(places.release_file)
    except OSError as error:
        yield known.RELEASE.failed(f"{error}", str(places.release_file))
        return
    if order is None:
        yield known.RELEASE.ok("not released")
    else:
        yield known.RELEASE.warning("released by an operator", str(places.release_file))


def _disk(places: Places) -> Iterator[Finding]:
    wrong, folders = False, {places.journal.parent, places.jobs}
    state = None if places.exporter is None else places.exporter.flag("--state.path")
    if state is not None:
        folders.add(Path(state).parent)
    for folder in sorted(folders):
        if not folder.exists():
            continue
        try:
            about = os.statvfs(folder)
        except OSError as error:
            wrong = True
            yield known.DISK.unchecked(str(error.strerror), str(folder))
            continue
        free = about.f_bavail * about.f_frsize
        least = min(LEAST_BYTES, about.f_blocks * about.f_frsize // 10)
        low = min(LOW_BYTES, about.f_blocks * about.f_frsize // 5)
        text = f"{free / 2**20:.0f} MiB free"
        if free < least or (about.f_files and about.f_favail < 100):
            wrong = True
            yield known.DISK.failed(f"{text}, {about.f_favail} more files", str(folder))
        elif free < low:
            wrong = True
            yield known.DISK.warning(text, str(folder))
    if not wrong:
        yield known.DISK.ok(f"enough in {', '.join(map(str, sorted(folders)))}")


def _files(places: Places, machine: Machine) -> Iterator[Finding]:
    looked = False
    for name, of in (("exporter", places.exporter), ("agent", places.agent)):
        if of is None:
            continue
        folder = machine.proc / str(of.pid)
        try:
            text = (folder / "limits").read_text()
            limit = int(re.findall(r"^Max open files\s+(\d+)", text, re.MULTILINE)[0])
            used = len(list((folder / "fd").iterdir()))
        except (OSError, IndexError) as error:
            yield known.FILES.unchecked(f"cannot be seen: {error}", name, needed=False)
            continue
        looked = True
        said = f"{used} of {limit} open"
        if used > _BUSY_FILES * limit:
            yield known.FILES.failed(said, name)
        elif limit < 1024:
            yield known.FILES.warning(said, name)
        else:
            yield known.FILES.ok(said, name)
    if not looked:
        raise CannotCheck("neither exporter nor agent can be seen", needed=False)


# ---------------------------------------------------------------------------------------------
# Platforms


def _slurm() -> Iterator[Finding]:
    if not slurm.detect():
        raise CannotCheck("this is no node of Slurm", needed=False)
    scontrol = commands.find("scontrol")
    if scontrol is None:
        raise CannotCheck("scontrol is not installed")
    kept = {name: os.environ[name] for name in ("SLURM_CONF", "PATH") if name in os.environ}
    try:
        answer = commands.run(scontrol, "ping", seconds=_PING_SECONDS, environment=kept)
    except GpuwardenError as error:
        yield known.SLURM.failed(str(error))
        return
    text = " ".join((answer.output or answer.error).split())[:200]
    up = answer.status == 0 and " is UP" in f" {text}"
    yield known.SLURM.ok(text) if up else known.SLURM.failed(text or "scontrol ping says nothing")


def _kubelet(places: Places, machine: Machine) -> Iterator[Finding]:
    if not machine.kubelet.exists() and not machine.pods.is_dir():
        raise CannotCheck("this is no node of Kubernetes", needed=False)
    if not machine.kubelet.exists():
        yield known.KUBELET.failed(f"{machine.kubelet} is not there")
    elif not os.access(machine.kubelet, os.R_OK | os.W_OK):
        yield known.KUBELET.warning("this user may not ask it", str(machine.kubelet))
    else:
        words = () if places.exporter is None else places.exporter.words
        off = "--no-collector.kubernetes" in words
        make = known.KUBELET.warning if off else known.KUBELET.ok
        yield make("the exporter does not ask it" if off else "its socket is there")
