"""A policy in a real Slurm's accounting: made, changed, taken back, and nothing else touched."""

from __future__ import annotations

import asyncio
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result
from tests.scheduling.policy_files import a_policy
from tests.servers import ServerFailed
from tests.slurm_accounting import accounted_slurm, manage
from tests.slurm_servers import commands_of

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.scheduling.engines import Act, Outcome, Plan, carry_out, plan, undoing
from gpuwarden.scheduling.policy_cli import policy as policy_group
from gpuwarden.scheduling.policy_texts import policy_yaml
from gpuwarden.scheduling.slurm.adapters import SlurmAdapter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.slurm_servers import SlurmCluster

    from gpuwarden.scheduling.engines import Rendering
    from gpuwarden.scheduling.policies import Policy

ONE_CARD = [{"name": "a100-40", "count": 4, "slurm": {"gres": "a100", "partition": "main"}}]
CARDS = [card | {"model": "NVIDIA A100-SXM4-40GB", "memory": "40GiB"} for card in ONE_CARD]
TEAMS = [
    {
        "name": "vision",
        "users": ["root", "ana"],
        "quota": {"a100-40": 2},
        "borrow": {"a100-40": 1},
        "slurm": {"account": "Vision"},
    },
    {"name": "speech", "users": ["cy"], "quota": {"a100-40": 2}, "share": 2},
]
LOW = {"name": "low", "value": 10}
HIGH = {"name": "high", "value": 1000, "preempts": ["low"]}
BUDGET = {"team": "vision", "per": "month", "limit": "10 GPU-hours", "kind": "hard"}
PARTS: dict[str, Any] = {
    "cards": CARDS,
    "teams": TEAMS,
    "priorities": [LOW, HIGH],
    "budgets": [BUDGET | {"running": "finish"}],
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """A Slurm with an account of somebody else's; below a short path: it holds sockets."""
    teams = {"others": ("root",)}
    with (
        tempfile.TemporaryDirectory(prefix="gw") as name,
        accounted_slurm(Path(name), preemption="qos", teams=teams) as started,
    ):
        yield started


@pytest.fixture
def empty(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The Slurm, from which all that is gpuwarden's is taken away afterwards."""
    yield cluster
    policy = a_policy(**PARTS)
    adapter = SlurmAdapter(policy, commands_of(cluster))
    found = asyncio.run(adapter.read(adapter.render(policy, version=None)))
    assert asyncio.run(carry_out(adapter, undoing(found).steps, _silent)).failed is None


def _silent(_number: int, _step: object) -> None:
    """Nobody watches."""


class Applied:
    """A policy and a cluster, as `gpuwarden policy` brings them together."""

    def __init__(self, cluster: SlurmCluster, policy: Policy) -> None:
        self.adapter = SlurmAdapter(policy, commands_of(cluster))
        version = asyncio.run(self.adapter.version())
        self.wanted: Rendering = self.adapter.render(policy, version=version)

    def plan(self) -> Plan:
        """What is to be done."""
        return plan(self.wanted, asyncio.run(self.adapter.read(self.wanted)))

    def apply(self) -> Outcome:
        """Do it."""
        return asyncio.run(carry_out(self.adapter, self.plan().steps, _silent))


def foreign(cluster: SlurmCluster) -> str:
    """All that is not gpuwarden's, as Slurm shows it."""
    qos = cluster.run("sacctmgr", "show", "qos", "-P", "format=name,description,priority,flags")
    rows = cluster.run("sacctmgr", "show", "assoc", "-P", "format=account,user,qos,grptres")
    ours = ("gpuwarden", "vision", "speech")
    return qos + "\n".join(line for line in rows.splitlines() if not line.startswith(ours))


def test_a_policy_is_made_once_and_taken_back(empty: SlurmCluster) -> None:
    """It holds; applied again it does nothing; undone, what was others' is there, as it was.

    What slurm.conf lacks is told key by key, with what the cluster has: the file is a person's.
    """
    before = foreign(empty)
    team = TEAMS[0] | {"users": ["root"]}
    applied = Applied(empty, a_policy(**PARTS | {"teams": [team]}))
    made = applied.apply()
    assert (made.failed, made.error) == (None, None)
    assert len(made.done) == 2 + 2 + 1
    assert not applied.plan().steps
    words = ("show", "assoc_mgr", "accounts=vision", "flags=assoc")
    limits = empty.run("scontrol", "--oneliner", *words)
    assert "GrpTRESMins=cpu=N" in limits
    assert "gres/gpu=600(0)" in limits
    (by_hand,) = applied.plan().by_hand
    lacking = {change.field: change.found for change in by_hand.changes}
    assert lacking["KillWait"] == "5 sec"
    assert not lacking.keys() & {"RequeueExit", "AccountingStorageTRES", "PreemptMode"}
    job_words = ("--account=vision", "--time=1")
    job = empty.submit("true", *job_words, "--gres=gpu:a100:3")
    empty.wait_for_state(job, "COMPLETED")
    with pytest.raises(ServerFailed, match="violates accounting/QOS policy"):
        empty.submit("true", *job_words, "--gres=gpu:a100:4")
    with pytest.raises(ServerFailed, match=r"Invalid (qos|account)"):
        empty.submit("true", "--account=others", "--qos=high", "--gres=gpu:a100:1")
    everything = undoing(asyncio.run(applied.adapter.read(applied.wanted)))
    assert asyncio.run(carry_out(applied.adapter, everything.steps, _silent)).failed is None
    assert foreign(empty) == before


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_the_commands_apply_watch_and_take_back(empty: SlurmCluster, tmp_path: Path) -> None:
    """From a file: what somebody changes by hand is named, and another apply puts it right."""

    def run(command: str, *words: str) -> Result:
        keeping = () if command == "diff" else ("--record", str(tmp_path / "record.json"))
        return CliRunner().invoke(policy_group, [command, str(file), *keeping, *words])

    file = tmp_path / "policy.yaml"
    slurm = {"config": str(empty.config), "programs": str(empty.program("scontrol").parent)}
    file.write_text(policy_yaml(a_policy(**PARTS, slurm=slurm)))
    before = run("diff")
    assert before.exit_code == 1, before.output
    assert "+ create account vision" in before.stdout
    assert "* by hand: file gpuwarden.conf" in before.stdout
    applied = run("apply", "--yes")
    assert applied.exit_code == 0, applied.output
    assert "8 steps done" in applied.stderr
    clean = run("drift")
    assert (clean.exit_code, clean.stdout) == (0, "No drift: the engine is as it was applied.\n")
    manage(empty, "modify", "qos", "high", "set", "priority=7")
    drift = run("drift")
    assert (drift.exit_code, drift.stdout) == (1, "qos high: Priority is 7, and was 1000\n")
    assert "[1/1] change qos high" in run("apply", "--yes").stderr
    undone = run("undo", "--yes")
    assert undone.exit_code == 0, undone.output
    assert "8 steps done" in undone.stderr
    assert run("diff").stdout.splitlines()[0] == before.stdout.splitlines()[0]


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_a_policy_that_changes_changes_only_what_differs(empty: SlurmCluster) -> None:
    """Teams and people go and come, a limit is dropped, a default moves to what is left."""
    assert Applied(empty, a_policy(**PARTS)).apply().failed is None
    changed = a_policy(
        cards=CARDS,
        teams=[{"name": "vision", "users": ["bo"], "quota": {"a100-40": 1}, "share": 5}],
        priorities=[HIGH | {"preempts": []}],
        budgets=None,
    )
    applied = Applied(empty, changed)
    acts = {(step.act, step.kind, step.name) for step in applied.plan().steps}
    assert acts == {
        (Act.CHANGE, "qos", "high"),
        (Act.CHANGE, "account", "vision"),
        (Act.CREATE, "user", "bo@vision"),
        (Act.DELETE, "user", "root@vision"),
        (Act.DELETE, "user", "ana@vision"),
        (Act.DELETE, "user", "cy@speech"),
        (Act.DELETE, "account", "speech"),
        (Act.DELETE, "qos", "low"),
    }
    outcome = applied.apply()
    assert (outcome.failed, outcome.error) == (None, None)
    assert not applied.plan().steps


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_what_people_change_by_hand_is_named_and_mended(empty: SlurmCluster) -> None:
    """A raised limit, a flag, a stolen member: each is seen with what it was and should be."""
    applied = Applied(empty, a_policy(**PARTS))
    assert applied.apply().failed is None
    manage(empty, "modify", "account", "vision", "set", "grptres=gres/gpu=99,cpu=7")
    manage(empty, "modify", "qos", "high", "set", "priority=3", "flags+=NoReserve")
    manage(empty, "delete", "user", "where", "name=cy", "account=speech")
    seen = {
        (step.name, change.field, change.found)
        for step in applied.plan().steps
        for change in step.changes
    }
    assert seen == {
        ("vision", "GrpTRES", "cpu=7,gres/gpu=99,gres/gpu:a100=3"),
        ("high", "Priority", "3"),
        ("high", "Flags", "DenyOnLimit,NoReserve"),
        ("cy@speech", "Account", None),
    }
    assert applied.apply().failed is None
    assert not applied.plan().steps


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_what_is_somebody_elses_is_in_the_way_and_left_alone(empty: SlurmCluster) -> None:
    """Also where it appears between the plan and its step."""
    manage(empty, "add", "account", "speech", "description=our old account", "organization=lab")
    applied = Applied(empty, a_policy(**PARTS))
    chosen = applied.plan()
    assert [str(each) for each in chosen.in_the_way] == ["account speech"]
    manage(empty, "add", "qos", "high", "description=mine")
    step = next(step for step in chosen.steps if step.name == "high")
    with pytest.raises(RefusedAction, match="does not carry gpuwarden's mark"):
        asyncio.run(applied.adapter.carry_out(step))
    manage(empty, "delete", "qos", "name=high")
    manage(empty, "delete", "account", "name=speech")


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_people_of_a_directory_are_found_again_as_slurm_writes_them(empty: SlurmCluster) -> None:
    """In small letters: they are neither made twice nor taken away, and leave as they came."""
    people = ["Ana@Example.org", "bo", "root"]
    team = TEAMS[1] | {"users": people}
    applied = Applied(empty, a_policy(**PARTS | {"teams": [team], "budgets": None}))
    assert applied.apply().failed is None
    assert not applied.plan().steps
    assert "ana@example.org" in empty.run("sacctmgr", "show", "assoc", "-P", "format=user")
    # The account that is somebody's default can only go if another one takes its place.
    manage(empty, "modify", "user", "set", "defaultaccount=speech", "where", "name=root")
    fewer = a_policy(**PARTS | {"teams": [team | {"users": ["zoe"]}], "budgets": None})
    outcome = Applied(empty, fewer).apply()
    assert (outcome.failed, outcome.error) == (None, None)
    assert not Applied(empty, fewer).plan().steps


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_a_priority_may_take_over_slurms_own_quality(empty: SlurmCluster) -> None:
    """`normal` is in every database: a person hands it over by its description, undo gives back."""
    normal = {"name": "normal", "value": 50, "default": True}
    policy = a_policy(**PARTS | {"priorities": [LOW, normal, HIGH]})
    applied = Applied(empty, policy)
    assert [str(each) for each in applied.plan().in_the_way] == ["qos normal"]
    wanted = next(each for each in applied.wanted.objects if each.key == ("qos", "normal"))
    program, *words = shlex.split(wanted.take_over)
    assert program == "sacctmgr"
    manage(empty, *words)
    assert applied.apply().failed is None
    assert not applied.plan().nothing or not applied.plan().in_the_way
    assert not applied.plan().steps
    everything = undoing(asyncio.run(applied.adapter.read(applied.wanted)))
    assert asyncio.run(carry_out(applied.adapter, everything.steps, _silent)).failed is None
    assert "normal|normal qos default|0|" in foreign(empty)


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_a_team_with_running_jobs_is_not_taken_away(empty: SlurmCluster) -> None:
    """Slurm refuses, and so do we, with what to do; what was done before stays done."""
    assert Applied(empty, a_policy(**PARTS)).apply().failed is None
    job = empty.submit("sleep 300", "--account=vision", "--qos=low", "--time=10")
    empty.wait_for_state(job, "RUNNING")
    outcome = Applied(empty, a_policy(**PARTS | {"teams": TEAMS[1:], "budgets": None})).apply()
    assert outcome.failed is not None
    assert isinstance(outcome.error, RefusedAction)
    assert "wait for these jobs" in str(outcome.error)
    empty.run("scancel", str(job))
    empty.wait_for_state(job, "CANCELLED")


def test_a_database_that_does_not_answer_is_no_refusal(cluster: SlurmCluster) -> None:
    """It is asked again later; nothing was decided."""
    applied = Applied(cluster, a_policy(**PARTS))
    steps = applied.plan().steps
    cluster.stop_daemon("slurmdbd")
    try:
        with pytest.raises(ServiceUnavailable):
            asyncio.run(applied.adapter.carry_out(steps[0]))
        with pytest.raises(ServiceUnavailable):
            applied.plan()
    finally:
        cluster.start("slurmdbd")
