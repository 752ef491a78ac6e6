"""`gpuwarden doctor node`: what exporter and agent answer, and whose clock goes how."""

from __future__ import annotations

import ctypes
import email.utils
import re
import time
from typing import TYPE_CHECKING, Final

from gpuwarden import __version__
from gpuwarden.agent_api import ApiError, NodeInfo
from gpuwarden.errors import InvalidInput
from gpuwarden.exporter import doctor_findings as known
from gpuwarden.exporter.agent.keys import KeyRing
from gpuwarden.exporter.doctor_places import get
from gpuwarden.exporter.processes import boot_id, read_process
from gpuwarden.findings import CannotCheck, Check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.exporter.doctor_places import Places
    from gpuwarden.findings import Finding

SKEW_WARNING, SKEW_FAILED = 2.0, 5.0
"""Seconds between two clocks; beyond the second nothing here is judged."""
OLD_SECONDS: Final = 15.0
_SAMPLE = re.compile(r"^([a-z_]+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_UNSYNCHRONISED = 0x40
"""STA_UNSYNC of adjtimex(2)."""

Page = dict[str, list[tuple[dict[str, str], float]]]


def service_checks(places: Places) -> list[Check]:
    """Every check that asks a server."""
    return [
        Check(known.EXPORTER, lambda: _exporter(places), 15.0),
        Check(known.COLLECTORS, lambda: _collectors(places), 15.0),
        Check(known.AGENT, lambda: _agent(places), 15.0),
        Check(known.LISTENING, lambda: _listening(places)),
        Check(known.CLOCK, lambda: _clock(places), 25.0),
    ]


def read_page(text: str) -> Page:
    """The samples of a page by name; of a line that cannot be read, none."""
    found: Page = {}
    for name, labels, value in _SAMPLE.findall(text):
        try:
            found.setdefault(name, []).append((dict(_LABEL.findall(labels)), float(value)))
        except ValueError:
            continue
    return found


def _page(places: Places) -> Page:
    answer = get(f"{places.exporter_url}/metrics", places.ca_file)
    if answer.status != 200:
        raise CannotCheck(f"{places.exporter_url}/metrics: HTTP {answer.status}")
    return read_page(answer.body.decode(errors="replace"))


def _exporter(places: Places) -> Iterator[Finding]:
    try:
        page = _page(places)
    except CannotCheck as error:
        protected = "HTTP 401" in str(error)
        make = known.EXPORTER.unchecked if protected else known.EXPORTER.failed
        yield make(f"{error}" + ("; it asks for a password" if protected else ""))
        return
    if "gpuwarden_nvml_up" not in page:
        yield known.EXPORTER.failed("what answers is no exporter of gpuwarden", places.exporter_url)
        return
    wrong = False
    if page["gpuwarden_nvml_up"][0][1] != 1:
        wrong = True
        yield known.EXPORTER.failed("it has no driver (gpuwarden_nvml_up 0)")
    taken = page.get("gpuwarden_snapshot_timestamp_seconds")
    if taken is None:
        wrong = True
        yield known.EXPORTER.failed("it has no complete, current snapshot")
    elif abs(time.time() - taken[0][1]) > OLD_SECONDS:
        wrong = True
        yield known.EXPORTER.failed(f"its snapshot is {time.time() - taken[0][1]:.0f} s old")
    version = page.get("gpuwarden_exporter_build_info", [({}, 1.0)])[0][0].get("version", "")
    if version != __version__:
        wrong = True
        text = f"it is version {version or 'unknown'}, and this is {__version__}"
        yield known.EXPORTER.warning(text, remedy="Restart it after an upgrade.")
    if not wrong:
        jobs = len(page.get("gpu_job_info", ()))
        yield known.EXPORTER.ok(f"version {version}, {jobs} jobs", places.exporter_url)


def _collectors(places: Places) -> Iterator[Finding]:
    page = _page(places)
    collectors = page.get("gpuwarden_collector_success", [])
    failing = [labels.get("collector", "") for labels, value in collectors if value != 1]
    for name in failing:
        yield known.COLLECTORS.warning("fails", name)
    if page.get("gpuwarden_host_pids", [({}, 1.0)])[0][1] != 1:
        text = "the exporter runs in a PID namespace of its own: nobody is named"
        yield known.COLLECTORS.failed(text, remedy="Run it with the host's (hostPID, --pid=host).")
    if not collectors:
        raise CannotCheck("the page tells of no collector")
    if not failing:
        yield known.COLLECTORS.ok(f"{len(collectors)} collectors succeed")


def _agent(places: Places) -> Iterator[Finding]:
    try:
        answer = get(f"{places.agent_url}/v1/node", places.ca_file)
        info = NodeInfo.decode(answer.body)
    except CannotCheck as error:
        if places.agent is None and not places.keys.exists():
            raise CannotCheck("no agent is set up here", needed=False) from error
        yield known.AGENT.failed(str(error))
        return
    except ApiError as error:
        yield known.AGENT.failed(f"what answers is no agent: {error}", places.agent_url)
        return
    wrong = False
    if info.boot_id != boot_id(places.proc):
        wrong = True
        yield known.AGENT.failed("it speaks of another boot: is it another machine's agent?")
    try:
        here = set(KeyRing(places.keys).key_ids)
    except InvalidInput:
        here = set()  # another check tells
    if here and here != set(info.key_ids):
        wrong = True
        text = f"it accepts {', '.join(info.key_ids) or 'no key'}; in {places.keys} are "
        yield known.AGENT.failed(text + ", ".join(sorted(here)))
    if not wrong:
        keys = ", ".join(info.key_ids)
        yield known.AGENT.ok(f"node {info.node}, keys {keys}", places.agent_url)


def _listening(places: Places) -> Iterator[Finding]:
    looked = False
    for name, of in (("exporter", places.exporter), ("agent", places.agent)):
        if of is None:
            continue
        looked = True
        listen = of.flag("--web.listen-address") or "127.0.0.1"
        if not listen.startswith(("127.", "localhost", "[::1]")):
            yield known.LISTENING.ok(listen, name)
        elif _centre_is_here(places):
            yield known.LISTENING.ok(f"{listen}, and Prometheus runs on this machine", name)
        else:
            text = f"it listens on {listen}: only this machine reaches it"
            yield known.LISTENING.warning(text, name)
    if not looked:
        raise CannotCheck("neither exporter nor agent is seen to run here", needed=False)


def _centre_is_here(places: Places) -> bool:
    names = (read_process(int(p.name), places.proc) for p in places.proc.glob("[0-9]*"))
    return any(process is not None and process.comm == "prometheus" for process in names)


# ---------------------------------------------------------------------------------------------
# Clocks


class _Timex(ctypes.Structure):
    """struct timex of adjtimex(2), of which only modes and status are looked at."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


def _clock(places: Places) -> Iterator[Finding]:
    wrong = False
    timex = _Timex()
    if ctypes.CDLL(None).adjtimex(ctypes.byref(timex)) >= 0 and timex.status & _UNSYNCHRONISED:
        wrong = True
        yield known.CLOCK.warning("the kernel says that nobody keeps it (STA_UNSYNC)")
    asked = [url for url in (places.engine_url, places.prometheus_url) if url]
    for url in asked:
        before = time.time()
        date = get(f"{url.rstrip('/')}/-/healthy", places.ca_file).headers.get("date", "")
        after = time.time()
        try:
            # Its seconds are whole: it was up to one later.
            theirs = email.utils.parsedate_to_datetime(date).timestamp()
        except ValueError:
            yield known.CLOCK.unchecked("it does not say its time", url)
            continue
        skew = max(0.0, theirs - after, before - (theirs + 1.0))
        text = f"{skew:.1f} s from this machine's clock"
        if skew > SKEW_FAILED:
            wrong = True
            yield known.CLOCK.failed(text, url)
        elif skew > SKEW_WARNING:
            wrong = True
            yield known.CLOCK.warning(text, url)
    if not wrong:
        others = f", and agrees with {', '.join(asked)}" if asked else ""
        yield known.CLOCK.ok(f"it is kept{others}")
