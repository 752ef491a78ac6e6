"""A task gets into Slurm's queue as it was asked for, and once whatever gets lost on the way."""

from __future__ import annotations

import json
import shlex
import stat
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from tests.scheduling.slurm.tasks import a_task, box_policy
from tests.servers import until
from tests.slurm_accounting import manage

from gpuwarden.errors import InvalidInput, RefusedAction, ServiceUnavailable
from gpuwarden.platforms.slurm_attempts import AskedSignal, asked_signal
from gpuwarden.scheduling.policy_texts import policy_yaml
from gpuwarden.scheduling.slurm.clusters import Cluster
from gpuwarden.scheduling.slurm.configs import no_return_of_left
from gpuwarden.scheduling.slurm.refusals import refusal_of_job, refusal_of_reservation
from gpuwarden.scheduling.slurm.scripts import Comment, notice_seconds, read_comment, script
from gpuwarden.scheduling.slurm.submissions import SlurmSubmitter, most_nodes
from gpuwarden.scheduling.submit_cli import submit
from gpuwarden.slurm_commands import Answer, SlurmCommands

if TYPE_CHECKING:
    from pathlib import Path

    from tests.slurm_servers import SlurmCluster

NOW = 1_800_000_000.0
"""Friday, 2027-01-15 09:00 in Berlin."""
PATIENT = {
    "minimum_run": "30m",
    "notice": "epoch",
    "deadline": "20m",
    "back_off": "30m",
    "at_most": {"times": 3, "per": "24h"},
}


def options(text: str) -> dict[str, str]:
    """What a script asks for, by option."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#SBATCH "):
            (word,) = shlex.split(line.removeprefix("#SBATCH "))
            name, _, value = word.partition("=")
            found[name] = value
    return found


# -- the script


def test_a_script_asks_for_what_the_task_says() -> None:
    """Account, priority, cards, time, and to be queued again when it leaves."""
    text = script(a_task(gpus=2, priority="high"), box_policy(), NOW).text
    asked = options(text)
    assert asked["--account"] == "vision"
    assert asked["--qos"] == "high"
    assert asked["--gres"] == "gpu:a100:2"
    assert asked["--time"] == "10"
    assert "--requeue" in asked
    assert asked["--open-mode"] == "append"
    assert "--begin" not in asked
    assert "--dependency" not in asked


def test_the_trainer_itself_gets_the_signals() -> None:
    """The last line is exec: a shell would keep the signal, and report its own status."""
    text = script(a_task(), box_policy(preemption=PATIENT), NOW).text
    last = text.splitlines()[-1]
    assert shlex.split(last)[:5] == ["exec", "gpuwarden", "train", "--run-id", "exp1"]
    assert "--on-signal=epoch" in shlex.split(last)
    assert asked_signal(text) == AskedSignal("USR1", batch=True, makes_way=True)


def test_words_survive_the_shell_and_slurm() -> None:
    """Whatever a user writes stays one word of the trainer's command line."""
    hostile = 'data=a b\';$(touch /tmp/x) "`id`" \\n #SBATCH.yaml'
    text = script(a_task(words=("model=yolov8n", hostile)), box_policy(), NOW).text
    assert hostile in shlex.split(text.splitlines()[-1])
    assert list(options(text)) == list(options(script(a_task(), box_policy(), NOW).text))


def test_a_notice_leaves_time_for_an_epoch_and_a_save() -> None:
    """Two epochs and a save; but not more than half of what the job has."""
    task = a_task(epoch_seconds=90.0, save_seconds=20.0, time_limit_seconds=36_000.0)
    assert notice_seconds(task, box_policy()) == 200
    short = a_task(epoch_seconds=900.0, save_seconds=20.0, time_limit_seconds=600.0)
    assert notice_seconds(short, box_policy()) == 300
    made = script(short, box_policy(), NOW)
    assert any("shorter than an epoch" in said for said in made.warnings)


def test_a_job_without_a_time_limit_is_told_what_it_loses() -> None:
    """Slurm cannot start it in front of anything, and does not let it make way for a booking."""
    made = script(a_task(time_limit_seconds=None), box_policy(), NOW)
    assert "--time" not in options(made.text)
    assert options(made.text)["--signal"].startswith("B:")
    assert any("--time" in said for said in made.warnings)


def test_a_window_is_waited_for() -> None:
    """By day until the evening; at night not at all."""
    task = a_task(window="off-peak")
    assert (
        options(script(task, box_policy(), NOW).text)["--begin"] == f"uts{1_800_000_000 + 39_600}"
    )
    assert "--begin" not in options(script(task, box_policy(), NOW + 12 * 3600).text)
    later = a_task(not_before=NOW + 100)
    assert options(script(later, box_policy(), NOW).text)["--begin"] == "uts1800000100"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"after": ("a-job",)}, "no number of a job"),
        ({"directory": "/data/100%j"}, "%"),
        ({"directory": "/data/a\\b"}, "mean something else"),
        ({"image": f"registry.example.com/yolo@sha256:{'0' * 64}"}, "slurm.container"),
        ({"window": "weekend"}, "no window weekend"),
        ({"team": "nobody"}, "no team nobody"),
    ],
)
def test_what_slurm_cannot_be_told_is_refused(changes: dict[str, object], part: str) -> None:
    """Before anything is sent, with words that say what to do."""
    with pytest.raises(InvalidInput, match=part):
        script(a_task(**changes), box_policy(), NOW)


def test_an_image_is_run_by_the_policys_command() -> None:
    """The container's command stands around the trainer's, in the same process."""
    policy = box_policy(slurm={"container": ["apptainer", "exec", "--nv", "docker://{image}"]})
    image = f"registry.example.com/yolo@sha256:{'0' * 64}"
    last = script(a_task(image=image), policy, NOW).text.splitlines()[-1]
    assert shlex.split(last)[:6] == [
        *("exec", "apptainer", "exec", "--nv", f"docker://{image}", "gpuwarden")
    ]


def test_a_comment_is_read_as_it_was_written() -> None:
    """And one of a user's own says nothing."""
    for comment in (
        Comment("token123", "exp-1", "off-peak"),
        Comment("token123", "exp-1"),
        Comment("token123"),
    ):
        assert read_comment(str(comment)) == comment
    for text in ("", "my own", "gpuwarden:", "gpuwarden:tok", "gpuwarden:token123:run=a b"):
        assert read_comment(text) is None


# -- a real Slurm


@pytest.fixture
def submitter(box: SlurmCluster, cluster: Cluster) -> SlurmSubmitter:
    """A submitter whose trainer writes down how it was called."""
    return SlurmSubmitter(box_policy(box), cluster, environment={"PATH": "/usr/bin:/bin", "K": "v"})


def fake_trainer(folder: Path) -> Path:
    """A program that writes down its words and its environment."""
    path = folder / "gpuwarden"
    path.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$@" > words.new\nenv > environment\nmv words.new words\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize("name", ["plain", 'it\'s "a" folder #1 $HOME'])
def test_a_submitted_task_runs_as_it_was_asked_for(
    tmp_path: Path, submitter: SlurmSubmitter, box: SlurmCluster, name: str
) -> None:
    """Its words, its folder, its environment and its cards arrive, whatever they are called."""
    folder = tmp_path / name
    folder.mkdir()
    words = ("model=yolov8n", 'data=a b\' $(id) "c".yaml')
    task = a_task(program=str(fake_trainer(tmp_path)), directory=str(folder), words=words, gpus=2)
    job = submitter.submit(task, token=f"own-{len(name)}-token")
    until((folder / "words").exists)
    assert (folder / "words").read_text().splitlines() == [
        *("train", "--run-id", "exp1", "--on-signal=epoch", *words, "device=0,1")
    ]
    environment = dict(
        line.split("=", 1)
        for line in (folder / "environment").read_text().splitlines()
        if "=" in line
    )
    assert environment["K"] == "v"
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "SLURM_TIME_FORMAT" not in environment
    assert int(environment["SLURM_JOB_END_TIME"]) > 0
    assert (folder / f"exp1-{job.id}.log").exists()
    box.wait_for_state(int(job.id), "COMPLETED")


def test_the_same_token_is_never_submitted_twice(
    submitter: SlurmSubmitter, box: SlurmCluster
) -> None:
    """A caller who got no answer and tries again gets the job that is there."""
    task = a_task(not_before=NOW * 2)
    first = submitter.submit(task, token="token-asked-twice")
    again = submitter.submit(task, token="token-asked-twice")
    assert first.id == again.id
    other = submitter.submit(task, token="another-token")
    assert other.id != first.id
    box.run("scancel", first.id, other.id)


def lossy(box: SlurmCluster, folder: Path, *, deliver: bool) -> Cluster:
    """A cluster whose first answer to `sbatch` is lost, with or without the job."""
    program = folder / "sbatch"
    real = box.program("sbatch")
    act = f'"{real}" "$@" >/dev/null' if deliver else "true"
    program.write_text(
        f'#!/bin/sh\nif [ -e "{folder}/tried" ]; then exec "{real}" "$@"; fi\n'
        f'touch "{folder}/tried"\n{act}\n'
        'echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv '
        'operation" >&2\nexit 1\n'
    )
    program.chmod(0o755)
    programs = {name: box.program(name) for name in ("squeue", "scontrol", "scancel")}
    return Cluster(SlurmCommands(programs | {"sbatch": program}, box.config, 20.0))


@pytest.mark.parametrize("deliver", [True, False])
def test_a_lost_answer_submits_once(tmp_path: Path, box: SlurmCluster, deliver: bool) -> None:
    """Whether Slurm had taken the job or not, there is one afterwards."""
    pauses: list[float] = []
    token = f"lost-answer-{deliver}"
    with lossy(box, tmp_path, deliver=deliver) as cluster:
        submitter = SlurmSubmitter(box_policy(box), cluster, environment={}, pause=pauses.append)
        job = submitter.submit(a_task(not_before=NOW * 2), token=token)
    listed = box.run("squeue", "--noheader", "-O", "JobID:20,Comment:100").splitlines()
    mine = [line.split()[0] for line in listed if f":{token}:" in line]
    assert mine == [job.id]
    assert bool(pauses) is not deliver
    box.run("scancel", job.id)


def test_without_a_controller_nothing_is_claimed(tmp_path: Path, box: SlurmCluster) -> None:
    """The controller is away: it is said, before anything was sent."""
    programs = dict.fromkeys(("squeue", "scontrol", "scancel", "sbatch"), tmp_path / "down")
    (tmp_path / "down").write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller (connect "
        "failure)' >&2\nexit 1\n"
    )
    (tmp_path / "down").chmod(0o755)
    with Cluster(SlurmCommands(programs, box.config, 20.0)) as cluster:
        submitter = SlurmSubmitter(box_policy(box), cluster, environment={})
        with pytest.raises(ServiceUnavailable, match="Unable to contact"):
            submitter.submit(a_task(), token="never-sent")
        with pytest.raises(ServiceUnavailable, match="does not answer"):
            submitter.foresee(a_task())


def test_where_it_cannot_be_known_it_is_not_sent_again(tmp_path: Path, box: SlurmCluster) -> None:
    """`sbatch` got no answer, and `squeue` then gets none either: the user is told how to look."""
    for name, said in (("sbatch", "Socket timed out"), ("squeue", "Unable to contact")):
        lines = ["#!/bin/sh", f'echo {name} >> "{tmp_path}/calls"']
        if name == "squeue":
            lines.append(f'grep -q sbatch "{tmp_path}/calls" || exit 0')
        lines += [f"echo '{said} slurm controller' >&2", "exit 1"]
        (tmp_path / name).write_text("\n".join([*lines, ""]))
        (tmp_path / name).chmod(0o755)
    programs = {name: tmp_path / name for name in ("squeue", "sbatch")}
    with Cluster(SlurmCommands(programs, box.config, 20.0)) as cluster:
        pauses: list[float] = []
        submitter = SlurmSubmitter(box_policy(box), cluster, environment={}, pause=pauses.append)
        with pytest.raises(ServiceUnavailable, match=r"not known whether.*unsure-token"):
            submitter.submit(a_task(), token="unsure-token")
    assert (tmp_path / "calls").read_text().split().count("sbatch") == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"priority": "nosuch"}, "priority"),
        ({"team": "ghost"}, "account"),
        ({"gpus": 9}, "no_such_node"),
        ({"gpu_type": "h100"}, "no_such_node"),
        ({"after": ("999999",)}, "dependency"),
    ],
)
def test_a_refusal_says_what_to_do(
    box: SlurmCluster, cluster: Cluster, changes: dict[str, object], reason: str
) -> None:
    """Slurm's own words are kept, and a remedy stands before them."""
    if reason == "dependency" and box.version < (23, 2):
        pytest.skip("Slurm 22.05 takes a job that waits for one that is not there")
    card = {"name": "h100", "model": "H100", "memory": "80GiB", "count": 1, "slurm": {"gres": "h1"}}
    ghost = {"name": "ghost", "users": ["root"], "quota": {}}
    usual = box_policy(box)
    policy = box_policy(
        box,
        cards=[usual.cards[0].model_dump(exclude_none=True) | {"memory": "40GiB"}, card],
        teams=[{"name": "vision", "users": ["root"], "quota": {}}, ghost],
    )
    submitter = SlurmSubmitter(policy, cluster, environment={})
    with pytest.raises(RefusedAction) as raised:
        submitter.submit(a_task(**changes), token="refused-token")
    assert raised.value.reason == reason
    with pytest.raises(RefusedAction):
        submitter.foresee(a_task(**changes))


def test_what_a_site_wants_of_every_job_is_said_besides() -> None:
    """Memory by CPU, a feature of nodes: nothing that the task itself says is touched."""
    wanted = ("--mem-per-cpu=4G", "--constraint=a100&nvlink", "--exclusive")
    plain, sites = (
        options(script(a_task(), box_policy(slurm={"sbatch": each}), NOW).text)
        for each in ((), wanted)
    )
    assert sites == plain | {
        "--mem-per-cpu": "4G",
        "--constraint": "a100&nvlink",
        "--exclusive": "",
    }


def test_a_slurm_that_brings_nothing_back_is_told_of() -> None:
    """Whatever JobRequeue is for others: the script asks to be queued again itself."""
    assert no_return_of_left({"RequeueExit": "75", "JobRequeue": "0"}) is None
    assert no_return_of_left({"RequeueExit": "1,70-80"}) is None
    for settings in ({}, {"RequeueExit": "(null)"}, {"RequeueExit": "76"}):
        doubt = no_return_of_left(settings)
        assert doubt is not None
        assert "RequeueExit=75" in doubt
        assert "scontrol requeue" in doubt


def test_states_that_another_node_does_not_see_are_doubted(submitter: SlurmSubmitter) -> None:
    """By what this machine mounts, and how many nodes the largest partition has."""
    passing = a_task(words=("model=yolov8n", "project=/run/ana"))
    (doubt,) = submitter.doubts(passing)
    assert "/run/ana" in doubt
    assert submitter.doubts(a_task(options=("--upload=s3://bucket/ana",))) == ()


@pytest.mark.parametrize(
    ("said", "nodes"),
    [
        ("PartitionName=a TotalCPUs=4 TotalNodes=2 x\nPartitionName=b TotalNodes=11", 11),
        ("No partitions in the system", None),
    ],
)
def test_the_largest_partition_says_how_many_nodes_there_are(said: str, nodes: int | None) -> None:
    """One line each."""
    assert most_nodes(said) == nodes


def test_more_than_the_team_may_ever_have_is_refused_at_once(
    submitter: SlurmSubmitter, box: SlurmCluster
) -> None:
    """The priority's QOS denies what would wait for ever; the team's limit is said to be why."""
    manage(box, "modify", "qos", "normal", "set", "flags=DenyOnLimit")
    manage(box, "modify", "account", "vision", "set", "GrpTRES=gres/gpu=1")
    try:
        with pytest.raises(RefusedAction, match="may have at a time") as raised:
            submitter.submit(a_task(gpus=2), token="too-large-1")
        assert raised.value.reason == "limit"
    finally:
        manage(box, "modify", "account", "vision", "set", "GrpTRES=gres/gpu=-1")
        manage(box, "modify", "qos", "normal", "set", "flags=-1")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Job violates accounting/QOS policy (job submit limit, user's size)", "limit"),
        ("AssocMaxSubmitJobLimit", "too_many_jobs"),
        ("QOSMaxSubmitJobPerUserLimit", "too_many_jobs"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "time_limit"),
        ("Access/permission denied", "forbidden"),
        ("User's group not permitted to use this partition", "partition"),
        ("Required partition not available (inactive or drain)", "partition_down"),
        ("Job dependency problem", "dependency"),
        ("What Slurm says in 2031", "refused"),
    ],
)
def test_a_known_refusal_has_a_remedy(said: str, reason: str) -> None:
    """And an unknown one is told as it is."""
    error = refusal_of_job(Answer(1, "", f"sbatch: error: Batch job submission failed: {said}"))
    assert isinstance(error, RefusedAction)
    assert error.reason == reason
    assert said in str(error)


@pytest.mark.parametrize(
    "said",
    [
        "Unable to contact slurm controller (connect failure)",
        "Socket timed out on send/recv operation",
        "Slurm backup controller in standby mode",
        "Zero Bytes were transmitted or received",
        "Resource temporarily unavailable",
    ],
)
def test_no_answer_is_no_refusal(said: str) -> None:
    """It may have been done, and can be tried again."""
    assert isinstance(refusal_of_job(Answer(1, "", said)), ServiceUnavailable)
    assert isinstance(refusal_of_reservation(Answer(1, "", said)), ServiceUnavailable)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Requested reservation overlaps with another reservation", "overlap"),
        ("Requested nodes are busy", "busy"),
        ("Duplicate reservation name", "duplicate"),
        ("Invalid account or account/partition combination specified", "account"),
        ("Unknown parameter TRESPerNode=gres/gpu=2.  No reservation created.", "unsupported"),
        ("Invalid time specified", "time"),
        ("Requested reservation is in use", "in_use"),
        ("Requested reservation is invalid", "gone"),
        ("Requested node configuration is not available", "no_such_node"),
        ("Access/permission denied", "forbidden"),
    ],
)
def test_a_reservations_refusal_has_its_reason(said: str, reason: str) -> None:
    """As 22.05 and 24.11 say them."""
    error = refusal_of_reservation(Answer(1, "", f"Error creating the reservation: {said}"))
    assert isinstance(error, RefusedAction)
    assert error.reason == reason


def test_slurms_plan_is_told_as_such(submitter: SlurmSubmitter, box: SlurmCluster) -> None:
    """When it would start with room, behind a job that ends, and behind one that never does."""
    free = submitter.foresee(a_task(gpus=1))
    assert free.earliest is not None
    assert free.samples == 0
    endless = box.submit("sleep 600", "--gres=gpu:4", "--account=vision")
    box.wait_for_state(endless, "RUNNING")
    assert submitter.foresee(a_task(gpus=1)).earliest is None
    box.run("scancel", str(endless))
    until(lambda: not box.run("squeue", "--noheader", "--states=running,completing").strip())


def test_the_command_hands_a_training_to_slurm(tmp_path: Path, box: SlurmCluster) -> None:
    """From `gpuwarden submit` to the trainer's words: the estimate, the dry run, the job."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(policy_yaml(box_policy(box)), "utf-8")
    words = ["model=yolov8n.yaml", "data=100", "batch=16", "--name", "cli.1", "--gpus", "2"]
    asked = ["--policy", str(policy), "--chdir", str(tmp_path), "--team", "vision", *words]
    asked += ["--program", str(fake_trainer(tmp_path)), "--socket", str(tmp_path / "none")]
    dry = CliRunner().invoke(submit, [*asked, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "#SBATCH --gres=gpu:a100:2" in dry.output
    done = CliRunner().invoke(submit, [*asked, "-o", "json"])
    job = json.loads(done.output)["job"]
    until((tmp_path / "words").exists)
    assert (tmp_path / "words").read_text().splitlines() == [
        *("train", "--run-id", "cli-1", "--on-signal=epoch"),
        *("model=yolov8n.yaml", "data=100", "batch=16", "device=0,1"),
    ]
    box.wait_for_state(int(job["id"]), "COMPLETED")
