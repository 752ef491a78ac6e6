"""Why a job waits is told in words, for every word that Slurm 22.05 and 24.11 have."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwarden.platforms.slurm_reasons import Kind, explain

ANSWERS = Path(__file__).parent / "answers"
WORDS = (ANSWERS / "slurm-reasons.txt").read_text().split()
OF_THE_JOB = {"account": "vision", "qos": "high", "partition": "gpu", "user": "ana"}


@pytest.mark.parametrize("word", WORDS)
def test_every_word_of_slurm_has_a_sentence(word: str) -> None:
    """None of them is shown as Slurm writes it, and each sentence can be filled in."""
    found = explain(word)
    assert found.code == word
    assert found.kind is not Kind.UNKNOWN
    said = found.words.format(**OF_THE_JOB)
    assert word not in said
    assert not said.endswith(".")


@pytest.mark.parametrize(
    ("reason", "kind", "part"),
    [
        ("AssocGrpGRES", Kind.LIMIT, "account {account} has as many cards in use as it may"),
        ("AssocGrpGRESMinutes", Kind.BUDGET, "GPU-hours of account {account} are used up"),
        ("QOSGrpGRESMinutes", Kind.BUDGET, "GPU-hours of QOS {qos} are used up"),
        ("QOSMaxGRESPerUser", Kind.LIMIT, "for {user} in use as it may"),
        ("QOSMaxWallDurationPerJobLimit", Kind.PERSON, "more time than QOS {qos} grants one job"),
        ("AssocMaxJobsLimit", Kind.LIMIT, "as many jobs for {user}"),
        ("QOSMinGRES", Kind.PERSON, "fewer cards than QOS {qos} demands"),
        ("MaxGRESPerAccount", Kind.LIMIT, "for account {account}"),
        ("BeginTime", Kind.TIME, "may not begin yet"),
        ("JobHeldAdmin", Kind.PERSON, "only an operator"),
        ("DependencyNeverSatisfied", Kind.PERSON, "never starts"),
        ("Licenses", Kind.LIMIT, "licence"),
        ("launch_failed_requeued_held", Kind.PERSON, "scontrol release"),
        ("job requeued in special exit state", Kind.PERSON, "scontrol release"),
        ("(job requeued in held state)", Kind.PERSON, "scontrol release"),
    ],
)
def test_a_limit_says_whose_it_is_and_of_what(reason: str, kind: Kind, part: str) -> None:
    """An account's is not a QOS's, a user's not a job's, and a budget is no limit of cards."""
    found = explain(reason)
    assert found.kind is kind
    assert part in found.words


@pytest.mark.parametrize(
    ("reason", "kind", "part"),
    [
        ("ReqNodeNotAvail, May be reserved for other job", Kind.TURN, "booking of others"),
        ("ReqNodeNotAvail,_May_be_reserved_for_other_job", Kind.TURN, "booking of others"),
        ("ReqNodeNotAvail, Reserved for maintenance", Kind.SITE, "maintenance"),
        ("ReqNodeNotAvail, UnavailableNodes:gpu[01-03]", Kind.SITE, "gpu[01-03]"),
        (
            (
                "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority "
                "partitions"
            ),
            Kind.SITE,
            "down, drained or reserved",
        ),
    ],
)
def test_what_slurm_adds_about_nodes_is_told(reason: str, kind: Kind, part: str) -> None:
    """Which of them are down; or that a booking is in the way, which a shorter job is not."""
    found = explain(reason)
    assert (found.code, found.kind) == ("ReqNodeNotAvail", kind)
    assert part in found.words


@pytest.mark.parametrize("reason", ["QuantumFlux", "{0.__class__}", "AssocGrpUnheardOf", "a" * 999])
def test_an_unknown_word_is_shown_as_it_is(reason: str) -> None:
    """A later version may have more; whatever it is, it can be filled in and is bounded."""
    found = explain(reason)
    assert found.kind is Kind.UNKNOWN
    assert found.words.format(**OF_THE_JOB).startswith("Slurm says: ")
    assert len(found.words) < 400


@pytest.mark.parametrize(
    "reason",
    [
        "JobHeldMaxPreemptRequeue",
        "JobHeldSomethingOf2031",
        "user_env_retrieval_failed_requeued_held",
        "launch failed requeued held",
    ],
)
def test_every_hold_waits_for_a_person(reason: str) -> None:
    """Whatever it is called, nobody but a person ends it (burrmill #15, SchedMD #209)."""
    found = explain(reason)
    assert found.kind is Kind.PERSON
    assert "scontrol release" in found.words


def test_what_stands_in_brackets_is_told() -> None:
    """Which licence; and no account is filled in where a user writes of one."""
    found = explain("Licenses(matlab@{user})")
    assert (found.code, found.kind) == ("Licenses", Kind.LIMIT)
    assert found.words.format(**OF_THE_JOB).endswith("(matlab@(user))")
