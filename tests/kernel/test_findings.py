"""Checks take none of the others down, and their findings are told whole."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.findings import (
    CannotCheck,
    Check,
    Finding,
    Known,
    Status,
    examine,
    exit_status,
    hidden,
    lines,
    report,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

A = Known("a.one", "one is so", "one follows", "do one", "docs/one.md")
B = Known("b.two", "two is so", "two follows", "do two")


def test_findings_come_in_the_order_of_their_checks() -> None:
    """However long each takes; and each is told as it is done."""
    gate, seen = threading.Event(), list[str]()

    def slow() -> Iterator[Finding]:
        gate.wait(60)
        yield A.ok("slow")

    def fast() -> Iterator[Finding]:
        yield B.ok("fast", "x")
        yield B.warning("fast", "y")

    def told(check: Check, _findings: list[Finding]) -> None:
        seen.append(check.known.id)
        gate.set()

    found = examine([Check(A, slow, 90.0), Check(B, fast)], told=told)
    assert [(f.known.id, f.subject) for f in found] == [
        ("a.one", ""),
        ("b.two", "x"),
        ("b.two", "y"),
    ]
    assert seen == ["b.two", "a.one"]


def test_a_check_that_hangs_or_fails_takes_no_other_down() -> None:
    """It is not checked, with the reason; what it had found before it failed stays."""
    never = threading.Event()

    def hangs() -> Iterator[Finding]:
        never.wait()
        yield A.ok("")

    def breaks() -> Iterator[Finding]:
        yield B.failed("first")
        raise ZeroDivisionError("oh")

    def cannot() -> Iterator[Finding]:
        raise CannotCheck("there is none here", needed=False)
        yield B.ok("")

    checks = [Check(A, hangs, 0.2)] * 3 + [Check(B, breaks), Check(B, cannot)]
    found = examine(checks, at_once=2)
    never.set()
    assert [f.status for f in found] == [
        *[Status.NOT_CHECKED] * 3,
        Status.FAILED,
        *[Status.NOT_CHECKED] * 2,
    ]
    assert found[0].said == "not done within 0.2 s"
    assert "ZeroDivisionError: oh" in found[4].said
    assert (found[5].said, found[5].needed) == ("there is none here", False)


def test_no_check_floods_the_report() -> None:
    """A fleet of which every node has the same trouble is one trouble."""

    def floods() -> Iterator[Finding]:
        while True:
            yield A.failed("again")

    assert len(examine([Check(A, floods)])) == 1000


@pytest.mark.parametrize(
    ("findings", "status"),
    [
        ([A.ok("")], 0),
        ([], 0),
        ([A.ok(""), B.unchecked("", needed=False)], 0),
        ([A.ok(""), B.unchecked("")], 3),
        ([A.warning(""), B.unchecked("")], 1),
        ([A.failed("")], 1),
    ],
)
def test_the_exit_status_tells_what_is_to_be_done(findings: list[Finding], status: int) -> None:
    """Something to do goes before something that is not known."""
    assert exit_status(findings) == status


def test_what_is_to_be_done_stands_below_what_was_found() -> None:
    """Once for all findings of a check; quiet leaves out what is well."""
    findings = [A.failed("x", "n1"), A.failed("y", "n2", remedy="do that"), B.ok("fine")]
    text = "\n".join(lines(findings))
    assert text.count("means: one follows") == 1
    assert "do:    do one" in text
    assert "do:    do that" in text
    assert "see:   docs/one.md" in text
    assert text.endswith("1 ok, 0 warnings, 2 failed, 0 not checked")
    quiet = "\n".join(lines([*findings, B.unchecked("", needed=False)], everything=False))
    assert "b.two" not in quiet
    assert "FAILED  a.one  n1: x" in quiet


def test_the_document_is_whole() -> None:
    """Every finding with its meaning, and how many there are of each kind."""
    document = json.loads(json.dumps(report([A.warning("x", "s")], version="1", at="now")))
    assert document["schema"] == "gpuwarden.doctor/v1"
    assert (document["exit_status"], document["counts"]["warning"]) == (1, 1)
    (finding,) = document["findings"]
    assert finding == {
        "id": "a.one",
        "title": "one is so",
        "status": "warning",
        "subject": "s",
        "said": "x",
        "means": "one follows",
        "remedy": "do one",
        "runbook": "docs/one.md",
        "needed": True,
    }


def test_secrets_are_taken_out() -> None:
    """Also where one is a part of another; words of three letters are no secrets."""
    found = hidden(
        [A.failed("token s3cret-long and s3cret", "s3cret", remedy="is")],
        ["s3cret", "s3cret-long", "is"],
    )
    assert (found[0].said, found[0].subject) == ("token [hidden] and [hidden]", "[hidden]")
    assert found[0].remedy == "is"


@given(st.text(max_size=900), st.text(max_size=50))
def test_no_server_writes_to_the_terminal(said: str, subject: str) -> None:
    """Whatever one answers: a line that can be printed, not longer than somebody reads."""
    for line in lines([A.failed(said, subject)]):
        assert line.isprintable() or not any(ord(mark) < 32 or mark == "\x9b" for mark in line)
        assert len(line) < 700
