"""Runs a command as systemd would run a unit's, on a machine that has no systemd: for tests.

`sandboxes.py UNIT [--show PATH]... [--user UID] [--no-network] -- WORD...`, as root. What the
unit says of users, capabilities, files, system calls, devices and addresses is done with the
kernel's own means: a mount namespace, seccomp (by libseccomp, with systemd's own groups of calls),
capabilities. A key of [Service] that is neither applied nor known to be somebody else's ends it: a
unit cannot promise more than the tests try. --show PATH stays where it is, writable, whatever the
unit hides.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

UNITS = Path(__file__).resolve().parents[2] / "deploy/systemd"
SOURCES = Path(__file__).resolve().parents[2]
USER = 4343
INSIDE = Path("/mnt")
"""Where interpreter, packages and sources are found inside: they may lie in a home."""

CAPABILITIES = {
    "CAP_DAC_OVERRIDE": 1,
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_KILL": 5,
    "CAP_SYS_PTRACE": 19,
}
APPLIED = frozenset(
    (
        *("AmbientCapabilities", "CapabilityBoundingSet", "NoNewPrivileges", "UMask", "User"),
        *("ProtectSystem", "ReadWritePaths", "ReadOnlyPaths", "StateDirectory", "ProtectHome"),
        *("StateDirectoryMode", "PrivateTmp", "PrivateDevices", "ProtectControlGroups"),
        *("ProtectKernelTunables", "ProtectKernelModules", "ProtectKernelLogs", "ProtectClock"),
        *("ProtectHostname", "ProtectProc", "ProcSubset", "LockPersonality", "RestrictRealtime"),
        *("RestrictAddressFamilies", "RestrictNamespaces", "RestrictSUIDSGID", "PrivateUsers"),
        *("SystemCallFilter", "SystemCallErrorNumber", "SystemCallArchitectures", "LimitNOFILE"),
        *("MemoryDenyWriteExecute", "TasksMax"),
    )
)
ELSEWHERE = {
    "DeviceAllow": "a program of the kernel's control group of devices, which systemd loads",
    "DevicePolicy": "likewise",
    "MemoryHigh": "a control group's",
    "MemoryMax": "a control group's",
    "CPUWeight": "a control group's",
    "OOMScoreAdjust": "what goes first when memory runs out",
    "RemoveIPC": "what is left behind by a user",
    "Type": "how systemd learns that it runs",
    "WatchdogSec": "likewise",
    "ExecStart": "what a test runs is named by the test",
    "ExecStartPre": "likewise",
    "ExecReload": "likewise",
    "EnvironmentFile": "likewise",
    "Environment": "likewise",
    "Restart": "what follows of an end",
    "RestartSec": "likewise",
    "RestartPreventExitStatus": "likewise",
    "SuccessExitStatus": "likewise",
    "TimeoutStopSec": "likewise",
    "TimeoutStartSec": "likewise",
    "RuntimeMaxSec": "likewise",
    "KillMode": "likewise",
    "Nice": "how much of the machine it gets",
    "IOSchedulingClass": "likewise",
    "LogsDirectory": "where it may write its log",
    "RuntimeDirectory": "where its socket lies; a test shows a folder of its own",
    "RuntimeDirectoryMode": "likewise",
}

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000
_NAMESPACES = 0x7E020000  # CLONE_NEWNS .. CLONE_NEWNET, without CLONE_NEWTIME
_BIND, _REC, _PRIVATE, _REMOUNT, _RDONLY, _NOSUID, _NODEV = 4096, 16384, 1 << 18, 32, 1, 2, 4
_SETID_BITS = 0o6000
_MODES = {
    "chmod": 1,
    "fchmod": 1,
    "fchmodat": 2,
    "mkdir": 1,
    "mkdirat": 2,
    "mknod": 1,
    "mknodat": 2,
}
"""Calls that give a mode, and which argument it is."""
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EQUAL, _MASKED = 4, 7


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


LIBC = ctypes.CDLL(None, use_errno=True)


def service(unit: str) -> dict[str, list[str]]:
    """The [Service] section: key -> its values in order.

    Raises:
        LookupError: it holds a key that nobody has thought of here.
    """
    found: dict[str, list[str]] = {}
    section = (UNITS / f"{unit}.service").read_text("utf-8").split("[Service]", 1)[1]
    for line in section.split("\n[", 1)[0].splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    unknown = set(found) - APPLIED - set(ELSEWHERE)
    if unknown:
        raise LookupError(f"{unit}: {sorted(unknown)}: apply it here, or say who does")
    return found


def _call(name: str, *arguments: object) -> None:
    if getattr(LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


def _mount(source: str, target: Path, kind: str = "", flags: int = 0, data: str = "") -> None:
    _call("mount", source.encode(), os.fsencode(target), kind.encode(), flags, data.encode())


class Files:
    """The unit's view of files, in a mount namespace of this process."""

    def __init__(self, settings: dict[str, list[str]], shown: list[Path], user: int) -> None:
        self._settings = settings
        self._shown = shown
        self._user = user

    def _is(self, key: str, value: str = "yes") -> bool:
        return self._settings.get(key, [""])[-1] == value

    def make(self) -> None:
        """Hide, close and bind, as the unit says."""
        _mount("none", Path("/"), "", _REC | _PRIVATE)
        self._bring_python()
        kept = INSIDE / "shown"
        for number, path in enumerate(self._shown):
            place = kept / str(number)
            place.mkdir(parents=True)
            _mount(str(path), place, "", _BIND | _REC)
        self._own_folders()
        if self._is("PrivateDevices"):
            self._few_devices()
        if self._is("ProtectSystem", "strict"):
            self._close_all()
        if self._is("PrivateTmp"):
            for path in ("/tmp", "/var/tmp"):  # noqa: S108 (where a mount goes)
                _mount("tmpfs", Path(path), "tmpfs", _NOSUID | _NODEV, "mode=1777")
        if self._is("ProtectHome"):
            for name in ("/home", "/root", "/run/user"):
                if Path(name).is_dir():
                    flags = _NOSUID | _NODEV | _RDONLY  # CAP_DAC_OVERRIDE heeds no mode
                    _mount("tmpfs", Path(name), "tmpfs", flags, "mode=000")
        self._close_kernel()
        for number, path in enumerate(self._shown):
            path.mkdir(parents=True, exist_ok=True)
            _mount(str(kept / str(number)), path, "", _BIND | _REC)
            _remount(path, writable=True)

    def _bring_python(self) -> None:
        _mount("tmpfs", INSIDE, "tmpfs", _NOSUID | _NODEV, "mode=755")
        for name, source in (
            ("python", sys.base_prefix),
            ("packages", sysconfig.get_path("purelib")),
            ("sources", str(SOURCES)),
        ):
            place = INSIDE / name
            place.mkdir()
            _mount(source, place, "", _BIND | _REC)

    def _own_folders(self) -> None:
        """State, and what the unit may write below /run: folders of this run's own."""
        mode = int(self._settings.get("StateDirectoryMode", ["0755"])[-1], 8)
        for place, names, bits in (
            (Path("/var/lib"), self._settings.get("StateDirectory", []), mode),
            (Path("/run"), self._below_run(), 0o755),
        ):
            if not names:
                continue
            _mount("tmpfs", place, "tmpfs", _NOSUID | _NODEV, "mode=755")
            for name in names:
                (place / name).mkdir(parents=True, mode=bits)
                os.chown(place / name, self._user, self._user)

    def _below_run(self) -> list[str]:
        return [path.removeprefix("/run/") for path in self._writable() if path.startswith("/run/")]

    def _writable(self) -> list[str]:
        state = [f"/var/lib/{name}" for name in self._settings.get("StateDirectory", [])]
        listed = " ".join(self._settings.get("ReadWritePaths", [])).split()
        return [*(path.removeprefix("-") for path in listed), *state]

    def _close_all(self) -> None:
        """Everything but /dev, /proc and /sys is read, but for what is named."""
        for path in self._writable():
            if Path(path).is_dir():
                _mount(path, Path(path), "", _BIND | _REC)
        left = (*self._writable(), "/dev", "/proc", "/sys")
        for point in _mount_points():
            if not any(point == name or point.startswith(f"{name}/") for name in left):
                _remount(Path(point), writable=False)

    def _few_devices(self) -> None:
        kept = INSIDE / "devices"
        kept.mkdir()
        names = ("null", "zero", "full", "random", "urandom")
        for name in names:
            (kept / name).touch()
            _mount(f"/dev/{name}", kept / name, "", _BIND)
        _mount("tmpfs", Path("/dev"), "tmpfs", _NOSUID, "mode=755")
        for name in names:
            Path("/dev", name).touch()
            _mount(str(kept / name), Path("/dev", name), "", _BIND)

    def _close_kernel(self) -> None:
        if self._is("ProtectProc", "invisible"):
            options = "hidepid=invisible"
            if self._is("ProcSubset", "pid"):
                options += ",subset=pid"
            _mount("proc", Path("/proc"), "proc", 0, options)
        if self._is("ProtectKernelTunables"):
            for name in ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/sys"):
                if Path(name).exists():
                    _mount(name, Path(name), "", _BIND)
                    _remount(Path(name), writable=False)
        if self._is("ProtectControlGroups"):
            for point in _mount_points():
                if point.startswith("/sys/fs/cgroup"):
                    _remount(Path(point), writable=False)
        if self._is("ProtectKernelLogs") and Path("/dev/kmsg").exists():
            _mount("/dev/null", Path("/dev/kmsg"), "", _BIND)


def _mount_points() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text("utf-8").splitlines()
    return [line.split()[4].replace("\\040", " ") for line in lines]


def _remount(path: Path, *, writable: bool) -> None:
    try:
        _mount("none", path, "", _REMOUNT | _BIND | (0 if writable else _RDONLY))
    except OSError as error:
        # A mount below one that was hidden since is out of reach, for the program as well.
        if error.errno not in (errno.EINVAL, errno.ENOENT, errno.EACCES):
            raise


def groups() -> dict[str, list[str]]:
    """Systemd's groups of system calls, by name with the @."""
    done = subprocess.run(
        [shutil.which("systemd-analyze") or "", "syscall-filter", "--no-pager"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in done.stdout.splitlines():
        if line.startswith("@"):
            current = found.setdefault(line.strip(), [])
        elif line.startswith("    ") and not line.strip().startswith("#"):
            current.append(line.strip())
    return found


def _flat(words: list[str], known: dict[str, list[str]]) -> set[str]:
    found: set[str] = set()
    for word in words:
        found |= _flat(known[word], known) if word.startswith("@") else {word}
    return found


class Calls:
    """The unit's filter of system calls."""

    def __init__(self, settings: dict[str, list[str]]) -> None:
        self._settings = settings
        self._library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
        self._library.seccomp_init.restype = ctypes.c_void_p
        known = groups()
        self._allowed: set[str] = set()
        for value in settings["SystemCallFilter"]:
            words = value.removeprefix("~").split()
            if value.startswith("~"):
                self._allowed -= _flat(words, known)
            else:
                self._allowed |= _flat([*words, "@default"], known)
        denied = []
        for key, group in (
            ("ProtectClock", "@clock"),
            ("ProtectKernelModules", "@module"),
            ("ProtectHostname", ""),
        ):
            if settings.get(key) == ["yes"]:
                denied += [group] if group else ["sethostname", "setdomainname"]
        self._allowed -= _flat(denied, known) - {"adjtimex", "clock_adjtime"}
        if settings.get("ProtectKernelLogs") == ["yes"]:
            self._allowed.discard("syslog")

    def load(self) -> None:
        """From now on this process and what it starts makes no other call."""
        library = self._library
        refused = _ERRNO | errno.EPERM
        context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(refused)))
        looked_at = {"socket", "clone", "unshare", "setns"}
        if self._settings.get("LockPersonality") == ["yes"]:
            looked_at.add("personality")
            for kind in (0, 0xFFFFFFFF):  # Linux, and the question which it is
                self._rule(context, "personality", _ALLOW, _Comparison(0, _EQUAL, kind, 0))
        if self._settings.get("RestrictSUIDSGID") == ["yes"]:
            looked_at |= {*_MODES, "fchmodat2"}
            for name, at in _MODES.items():
                self._rule(context, name, _ALLOW, _Comparison(at, _MASKED, _SETID_BITS, 0))
        for name in sorted(self._allowed - looked_at):
            self._rule(context, name, _ALLOW)
        self._sockets(context)
        self._namespaces(context)
        if library.seccomp_load(context) != 0:
            raise OSError("the filter of system calls cannot be loaded")

    def _rule(self, context: ctypes.c_void_p, name: str, action: int, *about: _Comparison) -> None:
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            return  # another machine's
        comparisons = (_Comparison * max(1, len(about)))(*about)
        self._library.seccomp_rule_add_array(
            context, ctypes.c_uint32(action), number, len(about), comparisons
        )

    def _sockets(self, context: ctypes.c_void_p) -> None:
        for word in " ".join(self._settings.get("RestrictAddressFamilies", [])).split():
            family = int(getattr(socket, word))
            self._rule(context, "socket", _ALLOW, _Comparison(0, _EQUAL, family, 0))

    def _namespaces(self, context: ctypes.c_void_p) -> None:
        if self._settings.get("RestrictNamespaces") != ["yes"]:
            for name in {"clone", "unshare", "setns"} & self._allowed:
                self._rule(context, name, _ALLOW)
            return
        self._rule(context, "clone", _ALLOW, _Comparison(0, _MASKED, _NAMESPACES, 0))
        self._library.seccomp_rule_add_array(
            context,
            ctypes.c_uint32(_ERRNO | errno.ENOSYS),  # libc then takes clone, which can be looked at
            self._library.seccomp_syscall_resolve_name(b"clone3"),
            0,
            None,
        )


def _rights(settings: dict[str, list[str]], user: int) -> None:
    """Become the user, with the unit's capabilities over the exec that follows, and no others."""
    keep = {CAPABILITIES[word] for word in settings["AmbientCapabilities"][0].split()}
    bound = {CAPABILITIES[word] for word in settings["CapabilityBoundingSet"][0].split()}
    for number in range(64):
        if number not in bound:
            LIBC.prctl(24, number, 0, 0, 0)  # PR_CAPBSET_DROP: there are fewer than 64
    _call("prctl", 8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    mask = sum(1 << number for number in keep)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0))
    for number in keep:
        _call("prctl", 47, 2, number, 0, 0)  # PR_CAP_AMBIENT_RAISE
    if settings.get("NoNewPrivileges") == ["yes"]:
        _call("prctl", 38, 1, 0, 0, 0)


def main() -> None:
    """Confine this process, and become the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("unit")
    parser.add_argument("--show", type=Path, action="append", default=[])
    parser.add_argument("--user", type=int, default=USER)
    parser.add_argument("--no-network", action="store_true")
    parser.add_argument("words", nargs="+")
    given = parser.parse_args()
    settings = service(given.unit)
    calls = Calls(settings)
    _call("unshare", _CLONE_NEWNS | (_CLONE_NEWNET if given.no_network else 0))
    Files(settings, given.show, given.user).make()
    os.umask(int(settings.get("UMask", ["0022"])[-1], 8))
    _rights(settings, given.user)
    environment = {
        name: value for name, value in os.environ.items() if name in ("PATH", "XDG_CACHE_HOME")
    } | {
        "PYTHONHOME": str(INSIDE / "python"),
        "PYTHONPATH": f"{INSIDE}/sources/src:{INSIDE}/sources:{INSIDE}/packages",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LD_LIBRARY_PATH": f"{INSIDE}/python/lib",
    }
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    words = [item.replace("{python}", f"{INSIDE}/python/bin/{version}") for item in given.words]
    os.chdir("/")
    calls.load()
    os.execvpe(words[0], words, environment)  # noqa: S606 (it is to become the command)


def obstacle() -> str:
    """Why this machine can try no sandbox, or an empty text."""
    if os.geteuid() != 0:
        return "only root can make one"
    if shutil.which("systemd-analyze") is None:
        return "systemd-analyze, which names groups of system calls, is not installed"
    try:
        ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return "libseccomp2 is not installed"
    # In a process of its own, which ends.
    probe = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x20000) != 0)"
    done = subprocess.run([sys.executable, "-c", probe], check=False, timeout=60)
    return "" if done.returncode == 0 else "this container may make no mount namespace"


if __name__ == "__main__":
    main()
