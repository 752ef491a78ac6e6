#!/usr/bin/python3
"""Slurm's prolog and epilog on a GPU node: what of the cards is free, when a job begins and ends.

    Prolog=/etc/slurm/gpuwarden_hook.sh        # slurm.conf; PrologFlags=Alloc: at once
    Epilog=/etc/slurm/gpuwarden_hook.sh        # which lies beside this file and runs it

Before a job: the folder of the job files is there (the exporter makes it too), and memory that is
nobody's on a card that no job holds is said. After it: the node's exporter is asked until the job's
processes hold no memory and there is none that is nobody's on a card without a job, for WAIT
seconds at most; what is left then is said.

Said means: a line in syslog (journalctl -t gpuwarden-hook) and, with DRAIN=yes, the node is drained
with the same words as the reason, since the next job would fail there. It always ends with 0: a
hook that fails would drain the node or requeue the job by itself, whatever the fault. It takes the
standard library only.

/etc/default/gpuwarden-hook, with what differs from these:

    EXPORTER=http://127.0.0.1:9835/metrics
    WAIT=20                 # seconds, 90 at most
    LEFT_MIB=512            # less than this on a card without a process is the driver's own
    DRAIN=no
    SCONTROL=/usr/bin/scontrol
    JOBS=/run/gpuwarden/jobs
    EXPORTER_USER=gpuwarden-exporter
"""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import pwd
import re
import subprocess
import sys
import syslog
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Python 3.7 and 3.8 know it in annotations only.
    Sample = tuple[str, dict[str, str], float]

CONFIG = Path("/etc/default/gpuwarden-hook")
DEFAULTS = {
    "EXPORTER": "http://127.0.0.1:9835/metrics",
    "WAIT": "20",
    "LEFT_MIB": "512",
    "DRAIN": "no",
    "SCONTROL": "/usr/bin/scontrol",
    "JOBS": "/run/gpuwarden/jobs",
    "EXPORTER_USER": "gpuwarden-exporter",
}
SNAPSHOT = "gpuwarden_snapshot_timestamp_seconds"
MIB = 1024 * 1024
ASK_SECONDS = 2
PAGE_SECONDS = 5
PAGE_BYTES = 32 * MIB
MOST_SECONDS = 90

SAMPLE = re.compile(r"^([a-z_]+)\{(.*)\} ([0-9.eE+-]+)$")
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


def settings() -> dict[str, str]:
    """The defaults, and what the file says in their place."""
    found = dict(DEFAULTS)
    try:
        lines = CONFIG.read_text("utf-8", "replace").splitlines()
    except OSError:
        return found
    for line in lines:
        key, equals, value = line.partition("=")
        if equals and key.strip() in found:
            found[key.strip()] = value.split("#")[0].strip().strip("\"'")
    return found


def number(values: dict[str, str], key: str, most: float) -> float:
    """A setting that must be a number, not less than nothing and not without bound."""
    found = float(values[key])
    if not math.isfinite(found):
        raise ValueError(f"{key}={values[key]} is no number")
    return min(max(found, 0.0), most)


def page(url: str) -> list[Sample]:
    """(name, labels, value) of the exporter's samples that have labels."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=ASK_SECONDS) as answer:
        body, deadline = bytearray(), time.monotonic() + PAGE_SECONDS
        while len(body) < PAGE_BYTES and time.monotonic() < deadline:
            part = answer.read1(65536)
            if not part:
                break
            body += part
    text = body.decode("utf-8", "replace")
    found = []
    for line in text.splitlines():
        match = SAMPLE.match(line)
        if match:
            found.append((match[1], dict(LABEL.findall(match[2])), float(match[3])))
        elif line.startswith(f"{SNAPSHOT} "):
            found.append((SNAPSHOT, {}, float(line.split()[1])))
    return found


def own(job_id: str) -> bool:
    """Whether a job of the exporter's is the one that this hook runs for."""
    number = os.environ.get("SLURM_JOB_ID", "")
    task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    if task.isdecimal() and os.environ.get("SLURM_ARRAY_JOB_ID", ""):
        name = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
    else:
        name = number
    restart = os.environ.get("SLURM_RESTART_COUNT", "") or "0"
    ours = re.fullmatch(rf"slurm-.+-{re.escape(name)}-{re.escape(restart)}", job_id)
    return ours is not None or job_id == f"slurm-unresolved-{number}"


def left(samples: list[Sample], at_least: float) -> list[str]:
    """What is left: memory of this job's processes, and nobody's on cards that no other job holds.

    Which cards the job had is not asked: its processes are gone, and Slurm counts in its own way.
    """
    others = {
        labels.get("gpu", "")
        for name, labels, value in samples
        if name == "gpu_job_holds_gpu" and value > 0 and not own(labels.get("job_id", ""))
    }
    found = []
    for name, labels, value in samples:
        card = labels.get("gpu", "")
        if name == "gpu_process_memory_bytes" and own(labels.get("job_id", "")):
            pid = labels.get("pid", "?")
            found.append(f"GPU {card}: pid {pid} of the job holds {value / MIB:.0f} MiB")
        if name == "gpu_memory_unattributed_bytes" and value >= at_least and card not in others:
            found.append(f"GPU {card}: {value / MIB:.0f} MiB are in use and no process's")
    return found


def begin(values: dict[str, str]) -> list[str]:
    """Before a job: the folder is there; which free cards have memory that is nobody's."""
    jobs, name = Path(values["JOBS"]), values["EXPORTER_USER"]
    if not jobs.is_dir():
        try:
            owner = pwd.getpwnam(name)
        except KeyError:
            return [f"{jobs} is not there, nor the user {name}: no exporter here"]
        jobs.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        jobs.mkdir(0o700)
        os.chown(jobs, owner.pw_uid, owner.pw_gid)
        jobs.chmod(0o1777)  # sticky: each training writes its own files
    return left(page(values["EXPORTER"]), number(values, "LEFT_MIB", 1e9) * MIB)


def end(values: dict[str, str]) -> list[str]:
    """After a job: what is left on its cards once a snapshot of after its end is there."""
    began, deadline = time.time(), time.monotonic() + number(values, "WAIT", MOST_SECONDS)
    found = ["nothing newer than the job's end was to be had of the exporter"]
    while True:
        try:
            samples = page(values["EXPORTER"])
        except (OSError, http.client.HTTPException, ValueError) as error:
            found = [f"not known, the exporter does not answer: {error}"]
        else:
            if max((value for name, _, value in samples if name == SNAPSHOT), default=0.0) > began:
                found = left(samples, number(values, "LEFT_MIB", 1e9) * MIB)
                if not found:
                    return []
        if time.monotonic() >= deadline:
            return found
        time.sleep(0.5)


def say(text: str) -> None:
    """To syslog, and to whoever reads this program's output."""
    plain = "".join(char if char.isprintable() else "?" for char in text)
    syslog.openlog("gpuwarden-hook")
    syslog.syslog(syslog.LOG_WARNING, plain)
    sys.stderr.write(f"{plain}\n")


def drain(values: dict[str, str], reason: str) -> None:
    """Keep the next job from starting on cards that are not free."""
    node = os.environ.get("SLURMD_NODENAME", "")
    if values["DRAIN"] != "yes" or not node:
        return
    words = [f"NodeName={node}", "State=DRAIN", f"Reason=gpuwarden: {reason}"[:200]]
    subprocess.run([values["SCONTROL"], "update", *words], check=False, timeout=10)


def main() -> None:
    """Do what the moment asks for; what goes wrong is said, and is nobody's failure."""
    job = os.environ.get("SLURM_JOB_ID", "?")
    after = os.environ.get("SLURM_SCRIPT_CONTEXT", "").startswith("epilog")
    try:
        values = settings()
        found = end(values) if after else begin(values)
        if found:
            text = "; ".join(found)
            moment = "after" if after else "before"
            say(f"{moment} job {job}: {text}")
            if any(item.startswith("GPU ") for item in found):
                drain(values, f"{moment} job {job}: {text}")
    except Exception as error:  # noqa: BLE001 (a hook that fails would drain the node)
        say(f"job {job}: not looked at: {type(error).__name__}: {error}")


if __name__ == "__main__":
    # What cannot even be said must not fail either.
    with contextlib.suppress(Exception):
        main()
