"""Where exporter and agent of this node are, as their own command lines say."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.exporter.agent.guards import DEFAULT_KILL_SWITCH
from gpuwarden.exporter.agent.settings import DEFAULT_JOURNAL
from gpuwarden.exporter.agent.settings import DEFAULT_PORT as AGENT_PORT
from gpuwarden.exporter.processes import PROC, arguments, read_process
from gpuwarden.exporter.releases import DEFAULT_RELEASE_FILE
from gpuwarden.exporter.settings import DEFAULT_PORT as EXPORTER_PORT
from gpuwarden.findings import CannotCheck
from gpuwarden.job_files import DEFAULT_DIRECTORY

if TYPE_CHECKING:
    from collections.abc import Mapping

SECONDS: Final = 5.0
MAX_BYTES: Final = 32 * 1024 * 1024
DEFAULT_KEYS: Final = Path("/etc/gpuwarden/keys")
_MAX_PIDS = 100_000
_USERS = ("gpuwarden-exporter", "gpuwarden-agent", "gpuwarden")


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running exporter or agent.

    Attributes:
        pid: its process.
        words: its command line.
    """

    pid: int
    words: tuple[str, ...]

    def flag(self, name: str) -> str | None:
        """The value of a flag of its command line, or None."""
        for number, word in enumerate(self.words):
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
            if word == name and number + 1 < len(self.words):
                return self.words[number + 1]
        return None


def daemon(kind: str, proc: Path = PROC) -> Daemon | None:
    """The running exporter or agent of this machine, as far as this user sees it.

    Anybody can call a process so: only one of root's, of the units' users or of this user's own is
    asked where things are.

    Args:
        kind: exporter or agent.
        proc: where procfs is mounted.
    """
    trusted = {0, os.geteuid()}
    for name in _USERS:
        with contextlib.suppress(KeyError):
            trusted.add(pwd.getpwnam(name).pw_uid)
    pids = sorted(int(item.name) for item in proc.iterdir() if item.name.isdigit())
    for pid in pids[:_MAX_PIDS]:
        words = arguments(pid, proc)
        if _runs(words, kind):
            process = read_process(pid, proc)
            if process is not None and process.uid in trusted:
                return Daemon(pid, words)
    return None


def _runs(words: tuple[str, ...], kind: str) -> bool:
    """Whether a command line is `gpuwarden KIND`, with or without an interpreter before it."""
    for number, word in enumerate(words[:4]):
        if Path(word).name == "gpuwarden" and words[number + 1 : number + 2] == (kind,):
            others = {"keys", "arguments", "release", "acquire", "--help", "-h", "--once"}
            return others.isdisjoint(words[number + 2 :])
    return False


@dataclass(frozen=True, slots=True)
class Places:
    """Where everything of this node is.

    Attributes:
        exporter_url, agent_url: where they answer.
        exporter, agent: their processes, or None: not seen.
        jobs, keys, journal, kill_switch, release_file: of their flags.
        gpus: nvml, or simulated:FILE.
        engine_url, prometheus_url: whose clocks are compared, or None.
        ca_file: for TLS of exporter and agent, or None.
        proc: where procfs is mounted.
    """

    exporter_url: str
    agent_url: str
    exporter: Daemon | None
    agent: Daemon | None
    jobs: Path
    keys: Path
    journal: Path
    kill_switch: Path
    release_file: Path
    gpus: str
    engine_url: str | None
    prometheus_url: str | None
    ca_file: Path | None = None
    proc: Path = PROC


def places(
    given: Mapping[str, Any],
    *,
    exporter: Daemon | None,
    agent: Daemon | None,
) -> Places:
    """What was given by flags, else what the daemons were started with, else the defaults.

    Args:
        given: name of an attribute of `Places` -> value, or None.
        exporter: the running exporter, or None.
        agent: the running agent, or None.
    """

    def path(name: str, of: Daemon | None, flag: str, default: Path) -> Path:
        value = given.get(name) or (of and of.flag(flag)) or default
        return Path(value)

    both = exporter or agent
    return Places(
        exporter_url=given.get("exporter_url") or _url(exporter, EXPORTER_PORT),
        agent_url=given.get("agent_url") or _url(agent, AGENT_PORT),
        exporter=exporter,
        agent=agent,
        jobs=path("jobs", both, "--jobs.directory", DEFAULT_DIRECTORY),
        keys=path("keys", agent, "--keys", DEFAULT_KEYS),
        journal=path("journal", agent, "--journal", DEFAULT_JOURNAL),
        kill_switch=path("kill_switch", agent, "--kill-switch", DEFAULT_KILL_SWITCH),
        release_file=path("release_file", both, "--release-file", DEFAULT_RELEASE_FILE),
        gpus=given.get("gpus") or (both and both.flag("--gpus")) or "nvml",
        engine_url=given.get("engine_url") or (exporter and exporter.flag("--engine.url")) or None,
        prometheus_url=given.get("prometheus_url"),
        ca_file=given.get("ca_file"),
    )


def _url(of: Daemon | None, port: int) -> str:
    listen = (of and of.flag("--web.listen-address")) or f"127.0.0.1:{port}"
    host, _, number = listen.rpartition(":")
    tls = of is not None and (of.flag("--web.tls-cert-file") or of.flag("--web.config.file"))
    host = "127.0.0.1" if host in ("", "0.0.0.0", "[::]", "*") else host
    return f"{'https' if tls else 'http'}://{host}:{number}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server of this node said.

    Attributes:
        status: of HTTP.
        headers: names in lower case.
        body: as it came.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body, decoded."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise CannotCheck(f"HTTP {self.status}, and no JSON") from error


def get(url: str, ca_file: Path | None = None) -> Answer:
    """Ask a server; its errors are answers as well.

    Raises:
        CannotCheck: it does not answer.
    """
    if not url.startswith(("http://", "https://")):
        raise CannotCheck(f"{url} is no address: write http://HOST:PORT")
    try:
        context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
        # What a node tells is for no proxy.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with opener.open(url, timeout=SECONDS) as response:
            headers = {name.lower(): text for name, text in response.headers.items()}
            return Answer(response.status, headers, response.read(MAX_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            headers = {name.lower(): text for name, text in error.headers.items()}
            return Answer(error.code, headers, error.read(4096))
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise CannotCheck(f"{url} does not answer ({reason})") from error
