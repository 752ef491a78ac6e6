"""Slurm's jobs end by Slurm's hand: the attempt that was meant, whole, once, and for good.

On a real Slurm of two nodes, whose jobs are small programs that write down which signals they get.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.ruleengine.fleets import a_job
from tests.servers import binary, until
from tests.slurm_servers import commands_of, slurm

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.ruleengine.guards import Blocked
from gpuwarden.ruleengine.reclaim.ports import Claim, Deed, Order, Standing, State
from gpuwarden.ruleengine.reclaim.slurm import Slurm
from gpuwarden.ruleengine.settings import load_settings
from gpuwarden.slurm_commands import SlurmCommands

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.slurm_servers import SlurmCluster

    from gpuwarden.ruleengine.verdicts import JobFacts

TRAINER = """
import os, signal, sys, time
out, status = open(sys.argv[1], "a", buffering=1), int(sys.argv[2])
def leave(number, frame):
    out.write(signal.Signals(number).name + "\\n")
    if status >= 0:
        os._exit(status)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, leave)
out.write(f"start {os.getpid()}\\n")
while True:
    time.sleep(0.1)
"""
"""Leaves by a signal with its exit status; with a negative one it stays."""


@dataclass(frozen=True, slots=True)
class World:
    """A cluster, and what its jobs wrote."""

    cluster: SlurmCluster

    def start(
        self, status: int, *options: str, script: str = "", run: str = "exec {}", wait: bool = True
    ) -> int:
        """Submit a trainer, and wait until it runs."""
        log = self.cluster.folder / "log" / "train-$SLURM_JOB_ID"
        trainer = self.cluster.folder / "train.py"
        command = run.format(f"python3 {trainer} {log} {status}")
        job = self.cluster.submit(f"{script}\n{command}", *options)
        if wait:
            until(lambda: "start" in self.lines(job), 30)
        return job

    def lines(self, job: int) -> str:
        """What a job wrote."""
        path = self.cluster.folder / "log" / f"train-{job}"
        return path.read_text() if path.exists() else ""

    def trainers(self) -> list[int]:
        """Processes of the trainers that live."""
        script = str(self.cluster.folder / "train.py").encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if path.read_bytes().split(b"\0")[1:2] == [script]:
                    found.append(int(path.parent.name))
        return found

    def leave(self, job: int) -> None:
        """Make a trainer leave of itself, by what it takes for a request."""
        self.cluster.run("scancel", "--batch", "--signal=USR1", str(job))

    def slurm(self) -> Slurm:
        """The adapter, as after a start of the engine."""
        return Slurm(commands_of(self.cluster))

    def claim(self, job: int | str, deed: Deed = Deed.TERMINATE, restarts: int = 0) -> Claim:
        """The claim of an attempt that must be found."""
        found = self.find(facts(job, restarts=restarts), deed)
        assert isinstance(found, Claim), found
        return found

    def find(self, job: JobFacts, deed: Deed = Deed.TERMINATE, **options: Any) -> Claim | Blocked:
        """What is found of facts."""
        return asyncio.run(self.slurm().find(job, deed, **options))

    def state(self, claim: Claim, deed: Deed = Deed.TERMINATE) -> State:
        """What has become of an attempt."""
        return asyncio.run(self.slurm().state(order(claim, deed)))

    def end(self, claim: Claim, deed: Deed = Deed.TERMINATE) -> None:
        """End an attempt."""
        asyncio.run(self.slurm().end(order(claim, deed)))

    def until(self, claim: Claim, standing: Standing, seconds: float = 30) -> State:
        """Wait until an attempt stands so."""
        until(lambda: self.state(claim).standing is standing, seconds)
        return self.state(claim)


def facts(job: int | str, *, restarts: int = 0, **changes: Any) -> JobFacts:
    """What the nodes say of a job of this user's."""
    known: dict[str, Any] = {
        "job_id": f"slurm-ci-{job}-{restarts}",
        "user": Path("~").expanduser().owner(),
        "instance": "node1:9835",
        "instances": (),
    }
    return a_job(**(known | changes))


def order(claim: Claim, deed: Deed = Deed.TERMINATE) -> Order:
    """An order of the decision 7-1-ab."""
    return Order("7-1-ab", claim, deed, grace=60)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Two nodes with two cards each; below a short path, for it holds a socket."""
    with (
        tempfile.TemporaryDirectory(prefix="gw") as name,
        slurm(Path(name), gpus=2, others=("node2",), settings=("KillWait=2",)) as cluster,
    ):
        (cluster.folder / "train.py").write_text(TRAINER)
        yield World(cluster)


@pytest.fixture(autouse=True)
def clean(world: World) -> Iterator[None]:
    """Every test leaves the nodes empty."""
    yield
    mine = f"--user={Path('~').expanduser().owner()}"
    world.cluster.run("scancel", mine, "--state=PENDING")
    for pid in world.trainers():
        # Who ignores SIGTERM would make the next test wait.
        os.kill(pid, signal.SIGKILL)
    world.cluster.run("scancel", mine)
    until(lambda: not world.cluster.run("squeue", "--noheader").strip(), 30)


# -- recognising


def test_a_claim_names_this_attempt_and_no_other(world: World) -> None:
    """By what no second job has: cluster, number, time of submission, restarts, user."""
    job = world.start(0, "--gres=gpu:1", "--nodelist=node1")
    claim = world.claim(job)
    submitted = claim.identity["submit_time"]
    assert isinstance(submitted, int)
    assert claim.identity["cluster"] == "ci"
    assert (claim.identity["number"], claim.identity["restarts"]) == (str(job), 0)
    assert claim.identity["user"] == Path("~").expanduser().owner()
    assert (claim.nodes, claim.grace, claim.also) == (("node1",), 2.0, "")
    assert claim.returns


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"user": "mallory"}, "user_differs"),
    ({"user": ""}, "user_differs"),
    ({"instance": "node2:9835"}, "nodes_differ"),
    ({"instances": ("node1:9835", "node2:9835")}, "nodes_differ"),
    ({"instance": "node1;x:9835"}, "nodes_differ"),
    ({"instance": "node1.example.org:9835"}, ""),
    ({"instance": "127.0.0.1:9835"}, ""),
    ({"instance": "localhost:9835"}, ""),
    ({"job_id": "slurm-ci-{}-1"}, "target_changed"),
    ({"job_id": "slurm-elsewhere-{}-0"}, "other_cluster"),
    ({"job_id": "slurm-ci-4000-0"}, "gone"),
    ({"job_id": "slurm-unresolved-node1-{}"}, "attempt_unknown"),
]


def test_facts_and_slurm_must_mean_the_same_job(world: World) -> None:
    """Any contradiction is a reason to do nothing."""
    job = world.start(0, "--nodelist=node1")
    found = []
    for changes, _ in CONTRADICTIONS:
        known = dict(changes)
        if "job_id" in known:
            known["job_id"] = known["job_id"].format(job)
        answer = world.find(facts(job, **known))
        found.append((changes, answer.reason if isinstance(answer, Blocked) else ""))
    assert found == CONTRADICTIONS


def test_what_does_not_run_is_not_ended(world: World) -> None:
    """Neither what waits nor what is over."""
    job = world.start(0, "--hold", wait=False)
    found = world.find(facts(job))
    assert isinstance(found, Blocked)
    assert (found.reason, "JobHeldUser" in found.sentence) == ("not_running", True)
    world.cluster.run("scancel", str(job))
    assert isinstance(world.find(facts(job)), Blocked)


def test_a_job_of_several_nodes_is_claimed_whole(world: World) -> None:
    """Its nodes are Slurm's, also where a node sees no process of it."""
    job = world.start(0, "--nodes=2")
    assert world.claim(job).nodes == ("node1", "node2")


# -- the signal that the job asked for


def test_the_batch_shell_gets_the_signal_that_its_script_asked_for_once(world: World) -> None:
    """Not a second time either after a restart of the engine."""
    job = world.start(-1, script="#SBATCH --signal=B:USR1@60")
    claim = world.claim(job)
    for _ in range(3):
        assert asyncio.run(world.slurm().ask(order(claim)))
    until(lambda: "SIGUSR1" in world.lines(job), 10)
    assert world.lines(job).count("SIG") == 1
    assert world.state(claim).standing is Standing.RUNNING


def test_a_job_that_asked_for_no_signal_gets_none(world: World) -> None:
    """A signal that it does not expect would end it."""
    job = world.start(-1)
    assert not asyncio.run(world.slurm().ask(order(world.claim(job))))
    assert "SIG" not in world.lines(job)


def test_without_b_the_steps_are_meant(world: World) -> None:
    """As Slurm does itself; the batch shell hears nothing."""
    job = world.start(-1, script="#SBATCH --signal=USR1@60")
    claim = world.claim(job)
    assert asyncio.run(world.slurm().ask(order(claim)))
    assert asyncio.run(world.slurm().state(order(claim))).standing is Standing.RUNNING
    assert "SIG" not in world.lines(job)


# -- ending for good


@pytest.mark.parametrize(
    ("status", "run"),
    [(75, "exec {}"), (76, "exec {}"), (75, "{}\nexit $?"), (75, "srun {}\nexit $?")],
)
def test_no_exit_status_brings_an_ended_job_back(world: World, status: int, run: str) -> None:
    """RequeueExit and RequeueExitHold count for who leaves of himself, not for who is cancelled."""
    job = world.start(status, run=run)
    claim = world.claim(job)
    world.end(claim)
    state = world.until(claim, Standing.ENDED)
    assert state.word == "CANCELLED"
    until(lambda: "SIGTERM" in world.lines(job), 10)
    assert world.cluster.run(
        "squeue", "--noheader", "--states=all", f"--jobs={job}", "-O", "RestartCnt"
    ).split() == ["0"]


def test_who_ignores_term_is_killed_by_slurm(world: World) -> None:
    """After KillWait; until then it is ending, and a repeat changes nothing."""
    job = world.start(-1)
    claim = world.claim(job)
    platform = world.slurm()
    asyncio.run(platform.end(order(claim)))
    assert world.state(claim).standing is Standing.ENDING
    assert isinstance(world.find(facts(job)), Blocked)
    asyncio.run(platform.end(order(claim)))
    assert world.until(claim, Standing.ENDED).word == "CANCELLED"
    asyncio.run(platform.end(order(claim)))
    assert world.lines(job).count("SIGTERM") == 1


def test_a_node_that_is_lost_holds_its_jobs_end_up(
    world: World, fake: Callable[..., Slurm]
) -> None:
    """Slurm waits for it, and so does whoever reads what holds it up."""
    claim = world.claim(world.start(-1, "--nodelist=node1"))
    world.end(claim)
    line = "NodeName=node1 State=IDLE+COMPLETING+NOT_RESPONDING"
    real = binary(("scontrol",))
    platform = fake("scontrol", f'[ "$2" = node ] && echo {line} || exec {real} "$@"')
    state = asyncio.run(platform.state(order(claim)))
    assert (state.standing, state.obstacle) == (Standing.ENDING, "node_lost")
    assert dict(state.detail) == {"nodes": "node1"}
    assert world.state(claim).obstacle == ""


def test_the_decision_stands_in_slurms_own_record(world: World) -> None:
    """Unless the site keeps something of its own there."""
    one, two = world.start(0), world.start(0)
    world.cluster.run("scontrol", "update", f"JobId={two}", "AdminComment=ours")
    for job in (one, two):
        world.end(world.claim(job))
    text = world.cluster.run(
        "squeue", "-h", "--states=all", f"--jobs={one},{two}", "-O", "admin_comment:40"
    )
    assert sorted(text.split()) == ["gpuwarden:terminate:7-1-ab", "ours"]


def test_who_left_by_itself_and_would_come_back_is_held(world: World) -> None:
    """Its owner may release it."""
    job = world.start(75)
    claim = world.claim(job)
    world.leave(job)
    state = world.until(claim, Standing.RETURNED)
    assert state.successor == f"slurm-ci-{job}-1"
    world.end(claim)
    state = world.state(claim)
    assert (state.standing, state.word) == (Standing.ENDED, "PENDING (JobHeldUser)")
    world.cluster.run("scontrol", "release", str(job))
    assert world.state(claim).standing is Standing.RETURNED


def test_who_left_and_holds_itself_is_left_alone(world: World) -> None:
    """The trainer leaves with 76 when it is told not to come back."""
    job = world.start(76)
    claim = world.claim(job)
    world.leave(job)
    state = world.until(claim, Standing.ENDED)
    assert "JobHeldUser" in state.word
    with pytest.raises(RefusedAction) as refusal:
        world.end(claim)
    assert refusal.value.reason == "gone"
    assert "JobHeldUser" in world.state(claim).word


def test_what_was_over_before_is_gone_and_no_failure(world: World) -> None:
    """For a job that completed, and for one that Slurm does not know any more."""
    job = world.start(0)
    claim = world.claim(job)
    world.leave(job)
    assert world.until(claim, Standing.ENDED).word == "COMPLETED"
    forgotten = replace(claim, identity={**claim.identity, "number": "4000", "job_id": 4000})
    for known in (claim, forgotten):
        with pytest.raises(RefusedAction) as refusal:
            world.end(known)
        assert refusal.value.reason == "gone"
    assert world.state(forgotten) == State(Standing.ENDED, "FORGOTTEN")


def test_accounting_tells_how_a_forgotten_job_ended(
    world: World, fake: Callable[..., Slurm]
) -> None:
    """The attempt that was submitted at that time, not another one of the number."""
    job = world.start(0)
    claim = world.claim(job)
    forgotten = replace(claim, identity={**claim.identity, "number": "4000", "job_id": 4000})
    rows = f"1|FAILED\\n{claim.identity['submit_time']}|CANCELLED by 0\\n"
    for script, word in ((f"printf '{rows}'", "CANCELLED"), ("exit 1", "FORGOTTEN")):
        state = asyncio.run(fake("sacct", script).state(order(forgotten)))
        assert state == State(Standing.ENDED, word)


def test_another_job_of_the_same_number_is_not_touched(world: World) -> None:
    """A controller that lost its state gives numbers again."""
    job = world.start(0)
    claim = world.claim(job)
    for change in ({"submit_time": 1}, {"user_id": 4000}, {"restarts": 3}):
        old = replace(claim, identity={**claim.identity, **change})
        with pytest.raises(RefusedAction) as refusal:
            world.end(old)
        assert refusal.value.reason == "target_changed"
        assert world.state(old).word == "REPLACED"
    assert world.state(claim).standing is Standing.RUNNING


# -- parts of a whole


def test_one_task_of_an_array_ends_alone(world: World) -> None:
    """Neither its siblings nor those that wait."""
    job = world.start(0, "--array=0-3%2", wait=False)
    until(lambda: world.cluster.states(job) == {"RUNNING", "PENDING"}, 30)
    until(lambda: isinstance(world.find(facts(f"{job}_1")), Claim), 30)
    claim = world.claim(f"{job}_1")
    world.end(claim)
    world.until(claim, Standing.ENDED)
    states = world.cluster.run("squeue", "-h", "-r", "--states=all", f"--jobs={job}", "-o", "%K %T")
    by_task = dict(line.split() for line in states.splitlines())
    assert by_task.pop("1") == "CANCELLED"
    assert set(by_task.values()) <= {"RUNNING", "PENDING"}
    assert by_task["0"] == "RUNNING"


def test_the_task_that_bears_the_arrays_number_ends_alone_too(world: World) -> None:
    """Slurm gives it to the last one."""
    job = world.start(0, "--array=0-1", wait=False)
    world.cluster.wait_for_state(job, "RUNNING")
    claim = world.claim(f"{job}_1")
    assert claim.identity["job_id"] == job
    world.end(claim)
    assert world.until(claim, Standing.ENDED).word == "CANCELLED"
    assert isinstance(world.find(facts(f"{job}_0")), Claim)


def test_a_heterogeneous_job_ends_whole_or_not_at_all(world: World) -> None:
    """A component that works keeps it; one without cards ends along."""
    parts = ("--gres=gpu:1", "--nodelist=node1", ":", "--gres=gpu:1", "--nodelist=node2")
    job = world.start(0, *parts)
    found = world.find(facts(job))
    assert isinstance(found, Blocked)
    assert found.reason == "not_all_offenders"
    both = [f"slurm-ci-{job}-0", f"slurm-ci-{job + 1}-0"]
    claim = world.find(facts(job + 1, instance="node2:9835"), offenders=both)
    assert isinstance(claim, Claim)
    assert (claim.identity["number"], claim.nodes) == (str(job), ("node1", "node2"))
    assert claim.also == f"components {job} of the same job"
    world.end(claim)
    world.until(claim, Standing.ENDED)
    assert world.cluster.states(job) == {"CANCELLED"}


# -- requeueing


def test_a_requeued_job_comes_back_and_the_new_attempt_is_safe(world: World) -> None:
    """The old order touches it neither as a repeat nor by another deed."""
    job = world.start(0)
    claim = world.claim(job, Deed.REQUEUE)
    platform = world.slurm()
    asyncio.run(platform.end(order(claim, Deed.REQUEUE)))
    state = world.until(claim, Standing.RETURNED)
    assert state.successor == f"slurm-ci-{job}-1"
    asyncio.run(platform.end(order(claim, Deed.REQUEUE)))
    # It waits until its credential has expired; hurried, the node would refuse it now and then.
    world.cluster.wait_for_state(job, "RUNNING")
    assert world.state(claim).standing is Standing.RETURNED
    with pytest.raises(RefusedAction) as refusal:
        world.end(claim)
    assert refusal.value.reason == "target_changed"
    assert world.state(world.claim(job, restarts=1)).standing is Standing.RUNNING


def test_what_slurm_does_not_requeue_is_known_before(world: World) -> None:
    """And by the time of the deed it is refused with the same word."""
    job = world.start(0, "--no-requeue")
    found = world.find(facts(job), Deed.REQUEUE)
    assert isinstance(found, Blocked)
    assert found.reason == "not_requeueable"
    with pytest.raises(RefusedAction) as refusal:
        world.end(world.claim(job), Deed.REQUEUE)
    assert refusal.value.reason == "not_requeueable"
    assert world.state(world.claim(job)).standing is Standing.RUNNING


# -- Slurm is away, or does not let us


def test_while_the_controller_is_away_nothing_is_known_and_then_it_goes_on(world: World) -> None:
    """An end in its middle comes to its end after the controller's return."""
    job = world.start(-1)
    claim = world.claim(job)
    world.end(claim)
    world.cluster.stop_daemon("slurmctld")
    try:
        impatient = Slurm(commands_of(world.cluster, 1))
        for call in (impatient.state, impatient.end, impatient.ask):
            with pytest.raises(ServiceUnavailable):
                asyncio.run(call(order(claim)))
        found = asyncio.run(impatient.find(facts(job), Deed.TERMINATE))
        assert isinstance(found, Blocked)
        assert found.reason == "platform_unreachable"
    finally:
        world.cluster.start("slurmctld")
    assert world.until(claim, Standing.ENDED).word == "CANCELLED"


@pytest.fixture
def fake(world: World, tmp_path: Path) -> Callable[..., Slurm]:
    """The real commands, but for one that is a few lines of shell."""

    def make(name: str, script: str) -> Slurm:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        names = ("squeue", "scontrol", "scancel")
        programs = {known: Path(binary((known,))) for known in names}
        return Slurm(SlurmCommands(programs | {name: path}, world.cluster.config, 20))

    return make


SAID: list[tuple[str, str]] = [
    ("scancel: error: Kill job error on job id 5: Access/permission denied", "forbidden"),
    ("scancel: error: Kill job error on job id 5: Invalid user id", "forbidden"),
    ("scancel: error: Unable to contact slurm controller (connect failure)", "unknown"),
    ("scancel: error: Kill job error on job id 5: Job/step already completing or completed", ""),
    ("scancel: error: Kill job error on job id 5: Invalid job id specified", ""),
]


def test_what_slurm_says_to_an_end_is_understood(world: World, fake: Callable[..., Slurm]) -> None:
    """In the words of both versions; that it is over already is no error."""
    claim, found = world.claim(world.start(0)), []
    for says, _ in SAID:
        platform, reason = fake("scancel", f"echo '{says}' >&2; exit 210"), ""
        try:
            asyncio.run(platform.end(order(claim)))
        except RefusedAction as error:
            reason = error.reason
        except ServiceUnavailable:
            reason = "unknown"
        found.append((says, reason))
    assert found == SAID


def test_not_to_see_a_job_is_not_to_know_of_its_end(
    world: World, fake: Callable[..., Slurm]
) -> None:
    """Slurm keeps silent about jobs that one may not see."""
    job = world.start(0)
    claim = world.claim(job)
    platform = fake("squeue", "exit 0")
    with pytest.raises(ServiceUnavailable, match="PrivateData"):
        asyncio.run(platform.state(order(claim)))
    assert isinstance(asyncio.run(platform.find(facts(job), Deed.TERMINATE)), Blocked)


def test_a_claim_that_is_none_is_refused(world: World) -> None:
    """What was on disk is not trusted on a command line."""
    for identity in (
        {},
        {
            "cluster": "ci",
            "number": "--user=root",
            "job_id": 1,
            "submit_time": 1,
            "restarts": 0,
            "user_id": 0,
        },
    ):
        with pytest.raises(RefusedAction) as refusal:
            world.end(Claim("slurm", identity))
        assert refusal.value.reason == "bad_claim"


def test_engine_yaml_names_the_commands_and_the_cluster(world: World, tmp_path: Path) -> None:
    """Without `slurm` there is none, and its jobs are left alone."""
    text = "version: 1\nprometheus: {url: http://127.0.0.1:1}\nrules: [rules.yaml]\n"
    (tmp_path / "engine.yaml").write_text(text)
    assert Slurm.from_settings(load_settings(tmp_path / "engine.yaml")) is None
    programs = "".join(
        f"  {name}: {binary((name,))}\n" for name in ("squeue", "scontrol", "scancel")
    )
    (tmp_path / "engine.yaml").write_text(f"{text}slurm:\n{programs}  config: slurm.conf\n")
    (tmp_path / "slurm.conf").symlink_to(world.cluster.config)
    platform = Slurm.from_settings(load_settings(tmp_path / "engine.yaml"))
    assert platform is not None
    job = world.start(0)
    assert isinstance(asyncio.run(platform.find(facts(job), Deed.TERMINATE)), Claim)
