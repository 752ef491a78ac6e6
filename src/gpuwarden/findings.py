"""What `gpuwarden doctor` looks for and finds: checks that take none of the others down.

Every check has a name that does not change, a meaning and a remedy (they stand in docs/doctor.md),
its own limit of time, and yields what it found of each thing that it looked at. One that fails
itself, or does not end in time, is told as not checked, with the reason.
"""

from __future__ import annotations

import threading
import time
import unicodedata
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

SCHEMA: Final = "gpuwarden.doctor/v1"
HEALTHY, FOUND, UNCHECKED = 0, 1, 3
"""Exit statuses: nothing to do; something is; it cannot be told."""
AT_ONCE: Final = 8
"""Checks that are made side by side."""
_MAX_TEXT: Final = 600
_MAX_FINDINGS: Final = 1000
"""Of one check; a fleet of which every node has the same trouble is one trouble."""


class Status(StrEnum):
    """How it is with one thing."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_CHECKED = "not_checked"


class CannotCheck(Exception):
    """A check cannot be made, and the text says why.

    Attributes:
        needed: whether that is a trouble of its own; not where there is nothing to check.
    """

    def __init__(self, why: str, *, needed: bool = True) -> None:
        super().__init__(why)
        self.needed = needed


@dataclass(frozen=True, slots=True)
class Known:
    """What a check is about.

    Attributes:
        id: its name, which does not change.
        title: what should be so, in a few words.
        means: what follows if it is not.
        remedy: what to do.
        runbook: page of the repository that tells more, or an empty string.
    """

    id: str
    title: str
    means: str
    remedy: str
    runbook: str = ""

    def ok(self, said: str, subject: str = "") -> Finding:
        """It is as it should be."""
        return Finding(self, Status.OK, said, subject)

    def warning(self, said: str, subject: str = "", *, remedy: str = "") -> Finding:
        """It works, and will not always."""
        return Finding(self, Status.WARNING, said, subject, remedy=remedy)

    def failed(self, said: str, subject: str = "", *, remedy: str = "") -> Finding:
        """It does not work."""
        return Finding(self, Status.FAILED, said, subject, remedy=remedy)

    def unchecked(self, said: str, subject: str = "", *, needed: bool = True) -> Finding:
        """It cannot be told; `needed`: somebody should know why."""
        return Finding(self, Status.NOT_CHECKED, said, subject, needed=needed)


@dataclass(frozen=True, slots=True)
class Finding:
    """How it is with one thing that a check looked at.

    Attributes:
        known: the check.
        status: how it is.
        said: what was seen.
        subject: of what, such as a node's address; empty where there is one thing only.
        remedy: what to do here; the check's own where it is empty.
        needed: of what was not checked, whether somebody should know why.
    """

    known: Known
    status: Status
    said: str
    subject: str = ""
    remedy: str = ""
    needed: bool = True

    @property
    def counts(self) -> bool:
        """Whether there is something to do."""
        return self.status in (Status.WARNING, Status.FAILED)

    def document(self) -> dict[str, Any]:
        """The finding for JSON."""
        return {
            "id": self.known.id,
            "title": self.known.title,
            "status": self.status.value,
            "subject": self.subject,
            "said": self.said,
            "means": self.known.means,
            "remedy": self.remedy or self.known.remedy,
            "runbook": self.known.runbook,
            "needed": self.needed,
        }


@dataclass(frozen=True, slots=True)
class Check:
    """Looks at something, and changes nothing.

    Attributes:
        known: what it is about.
        run: yields what it finds; may raise anything.
        seconds: how long it may take.
    """

    known: Known
    run: Callable[[], Iterable[Finding]]
    seconds: float = 10.0


class _Made:
    """A check that is being made, by a thread that dies with the process."""

    def __init__(self, check: Check, done: threading.Condition) -> None:
        self.check = check
        self.end = time.monotonic() + check.seconds
        self.findings: list[Finding] | None = None
        self._done = done
        threading.Thread(target=self._run, name=check.known.id, daemon=True).start()

    def _run(self) -> None:
        findings = _findings(self.check)
        with self._done:
            self.findings = findings
            self._done.notify()


def _findings(check: Check) -> list[Finding]:
    found: list[Finding] = []
    try:
        for finding in check.run():
            found.append(finding)
            if len(found) >= _MAX_FINDINGS:
                break
    except CannotCheck as error:
        found.append(check.known.unchecked(str(error), needed=error.needed))
    except Exception as error:  # noqa: BLE001 (whatever is wrong with one: the others go on)
        why = f"the check itself failed ({type(error).__name__}: {error})"
        found.append(check.known.unchecked(why))
    return found


def examine(
    checks: Sequence[Check],
    *,
    at_once: int = AT_ONCE,
    told: Callable[[Check, list[Finding]], None] = lambda _check, _findings: None,
) -> list[Finding]:
    """Make every check, each within its time.

    Args:
        checks: in the order in which their findings are given.
        at_once: how many are made side by side.
        told: called, in no order, as each is done.
    """
    done = threading.Condition()
    waiting, running = list(range(len(checks))), dict[int, _Made]()
    found: dict[int, list[Finding]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            number = waiting.pop(0)
            running[number] = _Made(checks[number], done)
        with done:
            if not any(made.findings is not None for made in running.values()):
                first = min(made.end for made in running.values())
                done.wait(max(0.0, first - time.monotonic()))
            now = time.monotonic()
            over = {
                number: made
                for number, made in running.items()
                if made.findings is not None or made.end <= now
            }
        for number, made in over.items():
            del running[number]
            known = made.check.known
            late = [known.unchecked(f"not done within {made.check.seconds:g} s")]
            found[number] = late if made.findings is None else made.findings
            told(made.check, found[number])
    return [finding for number in range(len(checks)) for finding in found[number]]


def exit_status(findings: Iterable[Finding]) -> int:
    """What a shell is told: 1 something is to be done, 3 something cannot be told, else 0."""
    listed = list(findings)
    if any(finding.counts for finding in listed):
        return FOUND
    unknown = any(f.status is Status.NOT_CHECKED and f.needed for f in listed)
    return UNCHECKED if unknown else HEALTHY


def hidden(findings: Iterable[Finding], secrets: Iterable[str]) -> list[Finding]:
    """The findings without any secret: servers tell in their errors what they were sent."""
    words = sorted({word for word in secrets if len(word) >= 4}, key=len, reverse=True)

    def cover(text: str) -> str:
        for word in words:
            text = text.replace(word, "[hidden]")
        return text

    return [
        Finding(f.known, f.status, cover(f.said), cover(f.subject), cover(f.remedy), f.needed)
        for f in findings
    ]


def report(findings: Sequence[Finding], *, version: str, at: str) -> dict[str, Any]:
    """All findings as one document.

    Args:
        findings: of every check.
        version: of who looked.
        at: when, in RFC 3339.
    """
    counts = Counter(finding.status for finding in findings)
    return {
        "schema": SCHEMA,
        "version": version,
        "time": at,
        "exit_status": exit_status(findings),
        "counts": {status.value: counts[status] for status in Status},
        "findings": [finding.document() for finding in findings],
    }


def lines(findings: Sequence[Finding], *, everything: bool = True) -> list[str]:
    """All findings for people; what is to be done stands below each.

    Args:
        findings: of every check.
        everything: also what is as it should be, or does not concern this place.
    """
    shown = [f for f in findings if everything or f.counts or (f.needed and not _well(f))]
    width = max((len(finding.known.id) for finding in shown), default=0)
    found = []
    for number, finding in enumerate(shown):
        word = {Status.NOT_CHECKED: "-", Status.OK: "ok"}.get(finding.status)
        word = word or finding.status.value.upper()
        subject = f"{finding.subject}: " if finding.subject else ""
        text = _one_line(f"{subject}{finding.said or finding.known.title}")
        found.append(f"{word:7} {finding.known.id:{width}}  {text}")
        following = shown[number + 1].known if number + 1 < len(shown) else None
        if finding.known is not following:
            same = [f for f in shown if f.known is finding.known and f.counts]
            found += [f"{' ' * (width + 10)}{line}" for line in _advice(same)]
    counts = Counter(finding.status for finding in findings)
    found.append(
        f"{counts[Status.OK]} ok, {counts[Status.WARNING]} warnings, "
        f"{counts[Status.FAILED]} failed, {counts[Status.NOT_CHECKED]} not checked"
    )
    return found


def _advice(findings: Sequence[Finding]) -> list[str]:
    """What findings of one check mean, and what to do; once for all of them."""
    if not findings:
        return []
    known = findings[0].known
    remedies = dict.fromkeys(finding.remedy or known.remedy for finding in findings)
    found = [f"means: {_one_line(known.means)}"]
    found += [f"do:    {_one_line(remedy)}" for remedy in remedies]
    return found + ([f"see:   {known.runbook}"] if known.runbook else [])


def _well(finding: Finding) -> bool:
    return finding.status is Status.OK


def _one_line(text: str) -> str:
    """What a terminal cannot obey, cut to what somebody reads."""
    shown = "".join(
        mark
        if unicodedata.category(mark)[0] != "C"
        else " "
        if mark in "\n\t"
        else "\N{REPLACEMENT CHARACTER}"
        for mark in text
    )
    shown = " ".join(shown.split())
    return shown if len(shown) <= _MAX_TEXT else f"{shown[: _MAX_TEXT - 1]}…"
