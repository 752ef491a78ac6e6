"""A policy as Slurm's objects: what is written, for which version, and what Slurm cannot do."""

from __future__ import annotations

from typing import Any

import pytest
from tests.scheduling.policy_files import a_policy

from gpuwarden.errors import InvalidInput
from gpuwarden.scheduling.engines import By, Rendering
from gpuwarden.scheduling.slurm.applies import Command, merged
from gpuwarden.scheduling.slurm.configs import (
    config_terms,
    hidden,
    is_slurms_own,
    no_return,
    satisfied_values,
)
from gpuwarden.scheduling.slurm.renderings import FRAGMENT, render
from gpuwarden.scheduling.slurm.versions import version_of

PRIORITIES = [
    {"name": "low", "value": 10},
    {"name": "normal", "value": 100, "default": True},
    {"name": "high", "value": 1000, "preempts": ["low", "normal"]},
]
PARTITIONS = {"slurm": {"preempt": "partitions"}}


def values(rendering: Rendering, kind: str, name: str) -> dict[str, str]:
    """The fields of one object."""
    return next(dict(each.values) for each in rendering.objects if each.key == (kind, name))


def test_a_team_may_use_its_own_and_what_it_borrows() -> None:
    """By type, and over all: Slurm counts a type only where a job names it."""
    found = values(render(a_policy(), version="24.11"), "account", "vision")
    assert found["GrpTRES"] == "gres/gpu=28,gres/gpu:a100=24,gres/gpu:h100=4"
    assert (found["Parent"], found["FairShare"]) == ("gpuwarden", "3")
    assert (found["QOS"], found["DefaultQOS"]) == ("high,low,normal", "normal")
    top = values(render(a_policy(), version="24.11"), "account", "gpuwarden")
    assert top["GrpTRES"] == "gres/gpu=40,gres/gpu:a100=32,gres/gpu:h100=8"


def test_what_a_team_may_not_choose_is_not_among_its_qualities() -> None:
    """Where the usual priority is not allowed, its lowest is the default."""
    team = {"name": "vision", "users": ["ana"], "quota": {"a100-40": 8}, "priorities": ["high"]}
    found = values(render(a_policy(teams=[team], budgets=None), version=None), "account", "vision")
    assert (found["QOS"], found["DefaultQOS"]) == ("high", "high")


def test_grace_and_exemption_are_those_of_who_leaves() -> None:
    """Slurm reads both from the job that is to leave, not from the one that wants in."""
    rendering = render(a_policy(priorities=PRIORITIES), version="24.11")
    low, high = values(rendering, "qos", "low"), values(rendering, "qos", "high")
    assert (low["GraceTime"], low["PreemptExemptTime"]) == ("00:20:00", "00:30:00")
    assert (high["GraceTime"], high["PreemptExemptTime"]) == ("00:00:00", "")
    assert high["Preempt"] == "low,normal"
    kinds = [each.kind for each in rendering.objects]
    assert kinds == sorted(kinds, key=["qos", "account", "user", "file"].index)
    assert [each.name for each in rendering.objects if each.kind == "qos"] == [
        "low",
        "normal",
        "high",
    ]


@pytest.mark.parametrize(
    ("version", "key", "other"),
    [
        ("slurm 22.05.8", "SlurmctldParameters=preempt_send_user_signal", "PreemptParameters"),
        ("slurm-wlm 23.02.1", "PreemptParameters=send_user_signal", "SlurmctldParameters"),
        ("slurm 24.11.5", "PreemptParameters=send_user_signal", "SlurmctldParameters"),
        ("slurm 25.05.0", "PreemptParameters=send_user_signal", "SlurmctldParameters"),
    ],
)
def test_no_version_gets_a_key_that_it_does_not_know(version: str, key: str, other: str) -> None:
    """An unknown key ends every command of Slurm."""
    text = next(
        each.text for each in render(a_policy(), version=version).objects if each.name == FRAGMENT
    )
    assert f"\n{key}\n" in text
    assert other not in text


@pytest.mark.parametrize("version", ["slurm 21.08.8", "Slurm", ""])
def test_a_version_that_was_never_tried_is_refused(version: str) -> None:
    """Rather than a file that ends the cluster."""
    with pytest.raises(InvalidInput, match=r"22\.05 or later"):
        render(a_policy(), version=version)


def test_a_month_is_slurms_and_a_day_is_the_daemons() -> None:
    """Slurm knows one period; where a shorter one moves the cap, the field is not compared."""
    month = {"team": "vision", "per": "month", "limit": "50.5 GPU-hours"}
    hard = {"kind": "hard", "running": "finish"}
    rendering = render(a_policy(budgets=[month | hard]), version=None)
    assert values(rendering, "account", "vision")["GrpTRESMins"] == "gres/gpu=3030"
    assert values(rendering, "account", "speech")["GrpTRESMins"] == ""
    day = month | {"per": "day", "limit": "5 GPU-hours"}
    rendering = render(a_policy(budgets=[month | hard, day | hard]), version=None)
    assert "GrpTRESMins" not in values(rendering, "account", "vision")
    assert any("budget of a day" in each.text for each in rendering.remarks)
    rendering = render(a_policy(budgets=[month | {"kind": "soft"}]), version=None)
    assert values(rendering, "account", "vision")["GrpTRESMins"] == ""


def test_what_is_used_never_decays_under_a_hard_budget() -> None:
    """Else a budget would leak; without one, Slurm's own decay stays."""
    terms = {each.key: each.value for each in config_terms(a_policy(), (24, 11))}
    assert terms["PriorityDecayHalfLife"] == "0"
    assert "safe" in terms["AccountingStorageEnforce"]
    keys = {each.key for each in config_terms(a_policy(budgets=None), (24, 11))}
    assert "PriorityDecayHalfLife" not in keys


@pytest.mark.parametrize("low", [1, 9, 999_998])
def test_a_higher_priority_goes_first_whatever_the_shares(low: int) -> None:
    """The smallest step between two of them weighs more than fair share and age together."""
    priorities = [{"name": "a", "value": low}, {"name": "b", "value": low + 1}]
    terms = {
        each.key: each.value for each in config_terms(a_policy(priorities=priorities), (24, 11))
    }
    step = int(terms["PriorityWeightQOS"]) / (low + 1)
    assert step > int(terms["PriorityWeightFairShare"]) + int(terms["PriorityWeightAge"])
    assert int(terms["PriorityWeightQOS"]) < 2**32


SETTINGS = {
    "JobRequeue": "1",
    "RequeueExit": "70-80,99",
    "RequeueExitHold": "",
    "KillWait": "30 sec",
    "PreemptType": "preempt/qos",
    "PreemptMode": "GANG,REQUEUE",
    "PreemptExemptTime": "00:00:00",
    "PriorityDecayHalfLife": "7-00:00:00",
    "AccountingStorageTRES": "cpu,mem,gres/gpu,gres/gpu:a100",
}


def test_what_a_cluster_has_otherwise_is_named_by_its_own_words() -> None:
    """Lists may have more, times be written otherwise, waits be longer."""
    terms = config_terms(a_policy(priorities=PRIORITIES), (24, 11))
    wanted = {each.key: each.value for each in terms}
    found = satisfied_values(terms, SETTINGS)
    differing = {key for key in found if found[key] != wanted[key]}
    assert differing == {
        "RequeueExitHold",
        "KillWait",
        "PriorityDecayHalfLife",
        "AccountingStorageTRES",
    }
    assert found["KillWait"] == "30 sec"
    longer = satisfied_values(terms, SETTINGS | {"KillWait": "300 sec"})
    assert longer["KillWait"] == wanted["KillWait"]


def test_partitions_do_without_accounting() -> None:
    """The order of priorities, grace and notice; quotas and budgets are said not to hold."""
    priorities: list[dict[str, Any]] = [dict(each) for each in PRIORITIES]
    priorities[1]["preempts"] = ["low"]
    rendering = render(a_policy(priorities=priorities, **PARTITIONS), version="22.05")
    assert {each.by for each in rendering.objects} == {By.HAND}
    assert values(rendering, "partition", "gpu-low") == {
        "PriorityTier": "1",
        "PreemptMode": "REQUEUE",
        "GraceTime": "1200",
    }
    assert values(rendering, "partition", "gpu-high") == {
        "PriorityTier": "3",
        "PreemptMode": "OFF",
        "GraceTime": "0",
    }
    text = next(each.text for each in rendering.objects if each.name == FRAGMENT)
    assert "PreemptExemptTime=00:30:00\n" in text  # a bare number would be minutes
    assert "AccountingStorage" not in text
    assert any("without accounting" in each.text for each in rendering.remarks)


def test_partitions_that_would_preempt_more_than_the_policy_are_refused() -> None:
    """A tier preempts all below it: that a middle one must not, Slurm cannot know."""
    with pytest.raises(InvalidInput, match="preempt: qos"):
        render(a_policy(priorities=PRIORITIES, **PARTITIONS), version=None)


def test_a_name_that_slurms_database_garbles_is_refused() -> None:
    """It would be added without complaint, and neither found nor deleted again."""
    team = {"name": "vision", "users": ["EXAMPLE\\ana"], "quota": {"a100-40": 8}}
    with pytest.raises(InvalidInput, match=r"teams\[0\]\.users"):
        render(a_policy(teams=[team], budgets=None), version=None)


def test_without_preemption_nobody_is_asked_to_leave() -> None:
    """No key turns it on, and no QOS has a grace."""
    priorities = [{"name": "low", "value": 1}, {"name": "high", "value": 2}]
    rendering = render(a_policy(preemption=None, priorities=priorities), version=None)
    text = next(each.text for each in rendering.objects if each.name == FRAGMENT)
    assert "Preempt" not in text
    assert values(rendering, "qos", "high")["Preempt"] == ""
    assert values(rendering, "qos", "low")["GraceTime"] == "00:00:00"


def test_a_version_is_read_from_what_programs_print() -> None:
    """Debian's name is another than the project's."""
    assert version_of("slurm-wlm 22.05.8\n") == (22, 5)
    assert version_of("slurm 24.11.5") == (24, 11)
    assert version_of(None) >= (24, 11)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"JobRequeue": "1", "RequeueExit": "70-80,99"}, ()),
        ({"JobRequeue": "1", "RequeueExit": ""}, ("RequeueExit=75",)),
        ({"JobRequeue": "0", "RequeueExit": "75"}, ("JobRequeue=1",)),
        ({"RequeueExit": "99"}, ("JobRequeue=1", "RequeueExit=75")),
    ],
)
def test_a_cluster_on_which_nobody_would_come_back_is_told_of(
    settings: dict[str, str], named: tuple[str, ...]
) -> None:
    """Lightning #20542: it saved, left, and was never seen again."""
    words = no_return(settings)
    assert (words is None) is not named
    for name in named:
        assert name in (words or "")


def test_people_of_one_account_come_and_go_by_one_command() -> None:
    """What has to be done for one of them before is done before, and no other command is touched.

    Alone each costs sacctmgr's five questions.
    """
    commands = [
        Command(("add", "user", "name=ana", "account=vision", "cluster=ci")),
        Command(("add", "account", "name=vision", "parent=gpuwarden")),
        Command(("add", "user", "name=bo", "account=vision", "cluster=ci")),
        Command(("delete", "user", "where", "name=cy", "account=vision", "cluster=ci")),
        Command(("modify", "user", "set", "defaultaccount=x", "where", "name=di", "cluster=ci")),
        Command(("delete", "user", "where", "name=di", "account=vision", "cluster=ci")),
        Command(("add", "user", "name=eve", "account=speech", "cluster=ci")),
    ]
    assert [" ".join(each.words) for each in merged(commands)] == [
        "add account name=vision parent=gpuwarden",
        "modify user set defaultaccount=x where name=di cluster=ci",
        "add user name=ana,bo account=vision cluster=ci",
        "delete user where name=cy,di account=vision cluster=ci",
        "add user name=eve account=speech cluster=ci",
    ]


@pytest.mark.parametrize(
    ("private", "kept"),
    [
        ("none", ()),
        ("(null)", ()),
        ("users,jobs", ("jobs",)),
        ("accounts,events,jobs,usage", ("jobs", "usage", "accounts")),
        ("all", ("jobs", "usage", "accounts", "reservations", "nodes", "partitions")),
    ],
)
def test_what_a_cluster_hides_is_known(private: str, kept: tuple[str, ...]) -> None:
    """From all but root, its own user and its operators."""
    settings = {"PrivateData": private, "SlurmUser": "slurm(64030)"}
    assert hidden(settings) == kept
    assert is_slurms_own(settings, "slurm")
    assert is_slurms_own(settings, "root")
    assert not is_slurms_own(settings, "64030")
