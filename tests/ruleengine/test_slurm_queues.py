"""Jobs are ended only while somebody waits for a GPU in Slurm, and never on a guess."""

from __future__ import annotations

import asyncio
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import World, running
from tests.ruleengine.fleets import a_job, a_rule
from tests.ruleengine.test_waiting import IDLE, STAGES
from tests.servers import binary, free_port, until
from tests.slurm_servers import commands_of, slurm

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.platforms.slurm_queue import (
    QUEUE_FIELDS,
    decode_queue,
    queue_format,
    waits,
)
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.demands import service
from gpuwarden.ruleengine.linting import lint_rule
from gpuwarden.ruleengine.model import RuleSet
from gpuwarden.ruleengine.needs import needed_keys
from gpuwarden.ruleengine.rule_differences import differences
from gpuwarden.ruleengine.rule_explanations import explain_rule, explanation_lines
from gpuwarden.ruleengine.slurm_queues import SlurmQueue
from gpuwarden.ruleengine.verdicts import Truth
from gpuwarden.slurm_commands import MAX_OUTPUT_BYTES, SlurmCommands

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tests.slurm_servers import SlurmCluster

    from gpuwarden.platforms.slurm_queue import PendingJob
    from gpuwarden.ruleengine.model import Rule

MARK = "|0123456789abcdef"
REST = "4294901757;1;1;1;;(null);OK;(null);N/A;cpu=1,mem=1000M,node=1,billing=1"
"""Priority, nodes, tasks, names, features, sharing, reservation, components, and all in all."""


def answer(*rows: str) -> str:
    """Rows as Slurm 22.05.8 gave them, values apart by `;`; of a small job where they end early."""
    whole = [row if row.count(";") > 6 else f"{row};{REST}" for row in rows]
    return "".join("".join(f"{value}{MARK}" for value in row.split(";")) + "\n" for row in whole)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("2;main;Resources;N/A;gres:gpu:1;N/A;N/A", True),
        ("3;main;Priority;gres:gpu:1;N/A;N/A;N/A", True),
        ("4;main;Priority;N/A;N/A;N/A;gres:gpu:1", True),
        ("4;main;Priority;N/A;N/A;gres:gpu:1;N/A", True),
        ("8;main;Priority;N/A;gres:gpu:a100:1;N/A;N/A", True),
        ("8;main;Priority;N/A;gres/gpu:a100=1;N/A;N/A", True),
        ("8;main;Priority;N/A;gres:nvme:1,gres:gpu:1;N/A;N/A", True),
        ("7;main;Resources;N/A;N/A;N/A;N/A", False),
        ("7;main;Resources;N/A;gres:gpu:0;N/A;N/A", False),
        ("7;main;Resources;N/A;gres:gpumem:1;N/A;N/A", False),
        ("7;main;Resources;N/A;gres:nvme:gpu;N/A;N/A", False),
        ("5;main;JobHeldUser;N/A;gres:gpu:1;N/A;N/A", False),
        ("6;main;BeginTime;N/A;gres:gpu:a100:1;N/A;N/A", False),
        ("9;main;Dependency;N/A;gres:gpu:1;N/A;N/A", False),
        ("9;main;QOSMaxJobsPerUserLimit;N/A;gres:gpu:1;N/A;N/A", False),
        ("9;main;AssocGrpGRESMinutes;N/A;gres:gpu:1;N/A;N/A", False),
    ],
)
def test_who_waits_for_a_card_and_who_would_not_start_on_one(row: str, expected: bool) -> None:
    """A job asks for a GPU in any of four ways, and only room or its turn is waited for."""
    assert waiting_jobs(decode_queue(answer(row), MARK)) == expected


def test_a_partition_counts_the_jobs_that_may_start_in_it() -> None:
    """Of several that a job names, any; and an array once."""
    jobs = decode_queue(
        answer(
            "1;a100,h100;Priority;N/A;gres:gpu:1;N/A;N/A",
            "2;h100;Resources;N/A;gres:gpu:1;N/A;N/A",
        ),
        MARK,
    )
    counts = [waiting_jobs(jobs, name) for name in (None, "h100", "a100", "h1")]
    assert counts == [2, 2, 1, 0]


@pytest.mark.parametrize(
    "text",
    [
        "slurm_load_jobs error: Unable to contact slurm controller\n",
        answer("1;main;Resources;N/A;gres:gpu:1;N/A;N/A").removesuffix(f"{MARK}\n"),
        answer("1;main;Resources;N/A;gres:gpu:1;N/A;N/A;1"),
        answer("x;main;Resources;N/A;gres:gpu:1;N/A;N/A"),
        answer("1;main;Resources;N/A;gres:gpu:1;N/A;N/A") + "more",
    ],
)
def test_an_answer_of_another_form_is_none(text: str) -> None:
    """Half an answer may lack the one who waits, and must not invent one."""
    with pytest.raises(ServiceUnavailable):
        decode_queue(text, MARK)


def test_no_row_is_an_empty_queue() -> None:
    """Slurm prints nothing then."""
    assert decode_queue("", MARK) == ()
    assert decode_queue("\n", MARK) == ()


@pytest.mark.parametrize("mark", ["", "|", "|short", "0123456789abcdef", "|0123456789ABCDEF"])
def test_a_mark_must_be_one_that_nobody_foresees(mark: str) -> None:
    """It keeps the values apart."""
    with pytest.raises(ValueError, match="no mark"):
        queue_format(mark)


# -- the command


@pytest.fixture
def command(tmp_path: Path) -> Callable[[str], SlurmQueue]:
    """A `squeue` of a few lines of shell, asked with a short patience."""

    def make(script: str, timeout: float = 20.0) -> SlurmQueue:
        path = tmp_path / "squeue"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return SlurmQueue(SlurmCommands({"squeue": path}, Path("/etc/there.conf"), timeout))

    return make


def waiting_jobs(jobs: Iterable[PendingJob], partition: str | None = None) -> int:
    """How many jobs wait for a GPU, an array counted once; in one partition or in all."""
    return sum(
        1 for job in jobs if waits(job) and (partition is None or partition in job.partitions)
    )


def _pending(queue: SlurmQueue) -> tuple[PendingJob, ...]:
    return asyncio.run(queue.pending())


def test_the_command_gets_its_arguments_and_nothing_of_our_environment(
    command: Callable[[str], SlurmQueue], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What somebody exported for his own squeue must not change the answer."""
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    _pending(command(f'env > {tmp_path}/env; echo "$@" > {tmp_path}/words'))
    words = (tmp_path / "words").read_text().split()
    assert words[:-1] == ["--all", "--local", "--noheader", "--states=PENDING", "-O"]
    assert [part.partition(":")[0] for part in words[-1].split(",")] == list(QUEUE_FIELDS)
    environment = (tmp_path / "env").read_text()
    assert "SLURM_CONF=/etc/there.conf" in environment
    assert "SQUEUE_STATES" not in environment


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'error: no controller' >&2; exit 1", "status 1: error: no controller"),
        ("kill -9 $$", "status -9"),
        ("echo 'JOBID PARTITION'", "another form"),
        (f"head -c {MAX_OUTPUT_BYTES + 1} /dev/zero", "more than 16 MiB"),
    ],
)
def test_whatever_goes_wrong_is_said(
    command: Callable[[str], SlurmQueue], script: str, says: str
) -> None:
    """And is no empty queue."""
    with pytest.raises(ServiceUnavailable, match=says):
        _pending(command(script))


def test_a_command_that_hangs_is_ended_with_what_it_started(
    command: Callable[..., SlurmQueue], tmp_path: Path
) -> None:
    """Nothing is left behind on the engine's machine."""
    queue = command(f"sleep 600 & echo $! > {tmp_path}/pid; wait", 0.5)
    with pytest.raises(ServiceUnavailable, match="did not answer within"):
        _pending(queue)
    pid = (tmp_path / "pid").read_text().strip()
    until(lambda: _ended(pid), 10)


def _ended(pid: str) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def test_a_command_that_is_not_there_is_said(tmp_path: Path) -> None:
    """With the setting that names it."""
    with pytest.raises(ServiceUnavailable, match=r"see slurm\.squeue in engine\.yaml"):
        _pending(SlurmQueue(SlurmCommands({"squeue": tmp_path / "none"}, None, 5)))


# -- a real Slurm


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    """Below a short path: it holds a socket."""
    with tempfile.TemporaryDirectory(prefix="gw") as name, slurm(Path(name), gpus=1) as found:
        yield found


def test_a_real_queue_is_read(cluster: SlurmCluster) -> None:
    """Every way to ask for a card counts, every way not to wait for one does not."""
    busy = cluster.submit("sleep 600", "--gres=gpu:1")
    cluster.wait_for_state(busy, "RUNNING")
    queue = SlurmQueue(commands_of(cluster, 20))
    assert _pending(queue) == ()
    for options in (
        ("--gres=gpu:1", "--hold"),
        ("--gres=gpu:1", "--begin=now+1hour"),
        ("--gres=gpu:1", f"--dependency=afterok:{busy}"),
        ("--exclusive",),
    ):
        cluster.submit("sleep 60", *options)
    reasons = {"JobHeldUser", "BeginTime", "Dependency"}
    until(lambda: {job.reason for job in _pending(queue)} >= reasons, 60)
    assert waiting_jobs(_pending(queue)) == 0
    for options in (
        ("--gres=gpu:1",),
        ("--gpus=1",),
        ("--ntasks=1", "--gpus-per-task=1"),
        ("--gpus-per-node=1",),
        ("--gres=gpu:a100:1", "--array=1-5"),
    ):
        cluster.submit("sleep 60", *options)
    until(lambda: waiting_jobs(_pending(queue)) == 5, 60)
    assert waiting_jobs(_pending(queue), "main") == 5
    assert waiting_jobs(_pending(queue), "other") == 0
    served = service(asyncio.run(queue.demand(fits=True)), a_job(job_id=f"slurm-ci-{busy}-0"))
    assert served.truth is Truth.YES, served
    assert served.job in {str(job.job_id) for job in _pending(queue)}
    text = re.sub(r"SlurmctldPort=\d+", f"SlurmctldPort={free_port()}", cluster.config.read_text())
    elsewhere = cluster.folder / "etc/elsewhere.conf"
    elsewhere.write_text(text)
    with pytest.raises(ServiceUnavailable):
        _pending(SlurmQueue(SlurmCommands({"squeue": Path(binary(("squeue",)))}, elsewhere, 1)))


# -- rules and the engine


def _rule(waiting: dict[str, object] | None) -> Rule:
    ending: dict[str, object] = {"stages": STAGES, "match": {}, "ignore_phases": {}}
    return a_rule(IDLE, **ending, **({} if waiting is None else {"only_if_waiting": waiting}))


@pytest.mark.parametrize(
    ("script", "reasons"),
    [
        ("exit 1", {"waiting_unknown"}),
        ("exit 0", {"nobody_waiting"}),
        (None, {"waiting_unknown"}),
    ],
)
def test_a_due_job_is_ended_once_somebody_waits_in_slurm(
    servers: World, command: Callable[[str], SlurmQueue], script: str | None, reasons: set[str]
) -> None:
    """An empty queue, a broken squeue and an engine without Slurm all end nothing."""
    servers.rules()
    path, begin = servers.folder / "rules.yaml", "  cold_start: 60s\n"
    condition = "  only_if_waiting: {slurm: {partition: main}, above: 0, fits: false}\n"
    path.write_text(path.read_text().replace(begin, condition + begin))
    servers.demands = {} if script is None else {"slurm": command(script)}

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.DUE)
            await world.tick(2)
            assert world.why() == reasons
            assert world.agent.requests == []
            if script is None:
                return
            row = "1 main Resources N/A gres:gpu:1 N/A N/A 1 1 1 1 N/A N/A OK N/A N/A cpu=1"
            command(
                'for last; do :; done; mark="|${last#*|}"; mark="${mark%%,*}"; '
                f'for v in {row}; do printf "%s%s" "$v" "$mark"; done'
            )
            await world.tick()
            await world.settled()
            assert world.agent.ended == ["proc-1"]

    asyncio.run(story())


def test_slurms_queue_is_no_query_of_prometheus() -> None:
    """And needs no check as PromQL."""
    rule = _rule({"slurm": {}, "above": 0})
    assert all(not key.signal.startswith("slurm") for key in needed_keys(_set(rule)))
    assert lint_rule(rule) == []


def _set(rule: Rule) -> RuleSet:
    return RuleSet(version=1, rules=(rule,))


@pytest.mark.parametrize(
    "waiting",
    [
        {"slurm": {}},
        {"slurm": {}, "promql": "sum(gpu_processes)", "above": 0},
        {"above": 0},
        {"slurm": {"partition": "a b"}, "above": 0},
        {"slurm": {"queue": "main"}, "above": 0},
        {"slurm": {}, "above": "5%"},
        {"slurm": {}, "above": 0, "fits": "yes"},
        {"promql": "sum(gpu_processes)", "above": 0, "fits": True},
    ],
)
def test_one_source_and_one_bare_limit(waiting: dict[str, object]) -> None:
    """Anything else is an error."""
    with pytest.raises(ValueError, match="validation error"):
        _rule(waiting)


def test_it_is_explained_and_compared() -> None:
    """To end only while somebody waits is laxer."""
    one, two = _rule(None), _rule({"slurm": {"partition": "main"}, "above": 0})
    lines = explanation_lines(explain_rule(two, _set(two), scrape_interval=5))
    wanted = (
        "the number of jobs that wait for a GPU in Slurm in its partition main is > 0, "
        "and the first in line could start on its cards"
    )
    assert f"It takes cards only while {wanted}" in [line.strip() for line in lines]
    for old, new, effect in ((one, two, "laxer"), (two, one, "stricter")):
        (difference,) = differences(_set(old), _set(new))
        assert [change.effect for change in difference.changes] == [effect]
