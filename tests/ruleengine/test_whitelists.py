"""The whitelist protects exactly whom it names, while it has not expired."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.fleets import NOW_FACTS, a_job, a_run, an_entry

from gpuwarden.ruleengine.verdicts import Truth
from gpuwarden.ruleengine.whitelists import matches, protection

if TYPE_CHECKING:
    from collections.abc import Mapping

NO, UNKNOWN, YES = Truth.NO, Truth.UNKNOWN, Truth.YES

BOARD = ("/usr/bin/tensorboard", "/system.slice/tensorboard.service")


@pytest.mark.parametrize(
    ("match", "executables", "truth"),
    [
        ({"executable": "/usr/bin/tensorboard"}, (BOARD,), YES),
        ({"executable": "/usr/bin/tensor"}, (BOARD,), NO),
        ({"executable": "/usr/bin/tensorboard"}, (BOARD, ("/usr/bin/python3", "/x")), NO),
        ({"executable": "/usr/bin/tensorboard"}, (("", "/x"),), NO),
        ({"executable": "/usr/bin/tensorboard"}, (), UNKNOWN),
        ({"cgroup": "/system.slice/tensorboard.service"}, (BOARD,), YES),
        ({"cgroup": "/system.slice"}, (BOARD,), YES),
        ({"cgroup": "/system.slice/tensorboard"}, (BOARD,), NO),
        ({"cgroup": "/system.slice/"}, (BOARD,), YES),
        ({"cgroup": "/system.slice"}, (), UNKNOWN),
        ({"cgroup": "/system.slice"}, (("/usr/bin/x", ""),), UNKNOWN),
        ({"cgroup": "/system.slice"}, (BOARD, ("/usr/bin/x", "")), UNKNOWN),
        ({"cgroup": "/system.slice"}, (("/usr/bin/x", ""), ("/usr/bin/y", "/user.slice")), NO),
        ({"user": "ana"}, (), YES),
        ({"user": "bob"}, (), NO),
        ({"job": "j"}, (), YES),
        ({"job": "j2"}, (), NO),
        ({"user": "bob", "executable": "/usr/bin/tensorboard"}, (), NO),
        ({"user": "ana", "executable": "/usr/bin/tensorboard"}, (), UNKNOWN),
    ],
)
def test_everything_that_is_named_must_be_true_of_every_process(
    match: Mapping[str, str], executables: tuple[tuple[str, str], ...], truth: Truth
) -> None:
    """A job with one other process on the GPU is not the protected service."""
    assert matches(an_entry(match), a_job(executables=executables)) is truth


def test_a_user_that_is_not_known_may_be_the_protected_one() -> None:
    """What cannot be checked does not count as a mismatch."""
    assert matches(an_entry({"user": "ana"}), a_job(user="")) is UNKNOWN


def test_a_run_protects_only_one_job() -> None:
    """Who claims a protected run beside another gains doubt, not protection."""
    entry = an_entry({"run": "run1"})
    assert matches(entry, a_job(run=a_run())) is YES
    assert matches(entry, a_job(run=a_run(conflict=True))) is UNKNOWN
    assert matches(entry, a_job(run=a_run(run_id="run2"))) is NO
    assert matches(entry, a_job()) is NO
    # A second training in the same job must not cost the first its protection.
    both = a_run(run_id="run0", conflict=True, claims=("run0", "run1"))
    assert matches(entry, a_job(run=both)) is UNKNOWN
    assert matches(an_entry({"run": "run2"}), a_job(run=both)) is NO


def test_an_entry_protects_until_it_expires_and_from_its_rules_only() -> None:
    """From the moment of expiry on it protects no more."""
    entry = an_entry({"user": "ana"}, expires="1970-01-12T13:46:40+00:00")
    assert protection("r", a_job(), [entry], now=NOW_FACTS - 1)[0] is YES
    assert protection("r", a_job(), [entry], now=NOW_FACTS)[0] is NO
    assert protection("other", a_job(), [entry], now=0)[0] is NO


def test_a_whitelist_that_could_not_be_read_protects_everybody() -> None:
    """A failed read means no action."""
    truth, reason = protection("r", a_job(), None, now=NOW_FACTS)
    assert truth is YES
    assert "could not be read" in reason


def test_a_sure_protection_outweighs_a_doubtful_one() -> None:
    """The order of the entries does not matter."""
    doubtful, sure = an_entry({"executable": "/usr/bin/x"}), an_entry({"user": "ana"})
    assert protection("r", a_job(), [doubtful, sure], now=NOW_FACTS)[0] is YES
    assert protection("r", a_job(), [sure, doubtful], now=NOW_FACTS)[0] is YES
    assert protection("r", a_job(), [doubtful], now=NOW_FACTS)[0] is UNKNOWN
