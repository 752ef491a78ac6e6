"""`gpuwarden why`, asked of an engine that serves."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from click.testing import CliRunner
from tests.ruleengine.engines import World, running, serving
from tests.ruleengine.test_engine_cli import gpuwarden
from tests.ruleengine.worlds import Job
from tests.servers import free_port

from gpuwarden.errors import GpuwardenError
from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.why_cli import why as why_command

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@dataclass
class Asked:
    """What the command said."""

    returncode: int
    stdout: str
    stderr: str


def ask(*arguments: str) -> Asked:
    """Run the command in this process; its errors are told as `gpuwarden` would tell them."""
    result = CliRunner().invoke(why_command, arguments)
    if isinstance(result.exception, GpuwardenError):
        return Asked(result.exception.exit_code, result.stdout, str(result.exception))
    return Asked(result.exit_code, result.stdout, result.stderr)


def told(servers: World, story: Callable[[World, Callable[..., Awaitable[Asked]]], Any]) -> Any:
    """Run a story with a serving engine, of which `why(...)` is asked."""
    port = free_port()

    async def whole() -> Any:
        async with running(servers) as world:
            app = EngineApp(
                world.engine,
                world.hop,
                notify_token=None,
                operator_token=None,
                ticket_key=None,
            )

            async def why(*arguments: str) -> Asked:
                url = f"http://127.0.0.1:{port}"
                return await asyncio.to_thread(ask, *arguments, "--engine.url", url)

            async with serving(app, port):
                return await story(world, why)

    return asyncio.run(whole())


def test_a_broken_rule_is_told_with_what_comes_next(servers: World) -> None:
    """Numbers, times, and what holds the end back; exit status 1."""

    async def story(world: World, why: Any) -> tuple[Asked, Asked, list[dict[str, Any]]]:
        while world.state() is not CaseState.NOTIFIED:
            await world.tick()
        text = await why("proc-1")
        document = await why("proc-1", "-o", "json")
        (rule,) = json.loads(document.stdout)["rules"]
        return text, document, rule["next"]

    text, document, foretold = told(servers, story)
    assert (text.returncode, document.returncode) == (1, 1)
    assert text.stdout.startswith("This job breaks the rule idle-held. It is not ended now: ")
    assert "Job proc-1 of alice (vision) on 127.0.0.1:9835, GPU 0" in text.stdout
    (end,) = foretold
    assert (end["kind"], end["level"]) == ("terminate", "severe")
    assert 300 <= end["in_seconds"] <= 480
    assert "): the job is ended at the earliest, if it stays so [idle-held, severe]" in text.stdout
    assert "gpu_utilization max over 1m <= 5 %, all GPUs" in text.stdout
    assert "not ended: the owner has had the notice for" in text.stdout


def test_nothing_that_a_user_chose_is_obeyed(servers: World) -> None:
    """Neither by the terminal nor as a style: names are shown as they are."""
    servers.fleet.jobs[0].user = "[/b]:key:[red]\x1b]0;x\x07\x9b2J\u202e"

    async def story(world: World, why: Any) -> str:
        while world.state() is not CaseState.DETECTED:
            await world.tick()
        answer: Asked = await why("proc-1", "--all")
        return answer.stdout

    text = told(servers, story)
    assert "of [/b]:key:[red]\ufffd]0;x\ufffd\ufffd2J\ufffd" in text
    assert not set(text) & set("\x1b\x07\x9b\u202e")


def test_how_far_it_must_still_come_is_told(servers: World) -> None:
    """The condition of the stage that would end the job, with what was measured for it."""
    path = servers.folder / "rules.yaml"
    grade = "when: {signal: gpu_memory_share, agg: min, window: 60s, above: 90%, gpus: any}, "
    path.write_text(path.read_text().replace("do: terminate, ", f"do: terminate, {grade}"))

    async def story(world: World, why: Any) -> str:
        while world.state() is not CaseState.NOTIFIED:
            await world.tick()
        answer: Asked = await why("proc-1")
        return " ".join(answer.stdout.split())

    text = told(servers, story)
    assert "severe-terminate: gpu_memory_share min" in text
    assert "and from now on gpu_memory_share min over 1m > 90 %" in text


def test_a_job_that_breaks_nothing_is_fine(servers: World) -> None:
    """Every rule in one line with what it rests on; `--all` shows the whole; exit status 0."""
    servers.fleet.jobs[0].utilization = 0.9

    async def story(world: World, why: Any) -> list[Asked]:
        await world.tick()
        return [await why("proc-1"), await why("proc-1", "--all")]

    brief, full = told(servers, story)
    assert (brief.returncode, full.returncode) == (0, 0)
    assert brief.stdout.startswith("This job breaks no rule.")
    assert "What comes next" not in brief.stdout
    (line,) = [text for text in brief.stdout.splitlines() if text.startswith("idle-held")]
    assert line.split()[:3] == ["idle-held", "enforce", "NO"]
    assert "90 %" in line
    assert "CONDITION" not in brief.stdout
    assert "CONDITION" in full.stdout


def test_a_job_that_was_ended_is_told_with_its_proof(servers: World) -> None:
    """By which rule, on which evidence, and what came back; also when it is long gone."""

    async def story(world: World, why: Any) -> Asked:
        while not world.agent.requests:
            await world.tick()
        await world.settled()
        world.fleet.jobs.clear()
        await world.tick(8)
        found: Asked = await why("proc-1")
        return found

    done = told(servers, story)
    assert done.returncode == 1
    assert done.stdout.startswith("This job was ended by the rule idle-held at ")
    assert "YES: gpu_utilization max over 1m <= 5 %, all GPUs: GPU 0: 0 %" in done.stdout
    assert "NVML: the processes are gone from its lists; 30.0 GiB freed" in done.stdout


def test_what_holds_everything_back_is_told(servers: World) -> None:
    """A kill switch stands above all rules."""

    async def story(world: World, why: Any) -> Asked:
        (world.folder / "halt").touch()
        await world.until(CaseState.DUE)
        found: Asked = await why("proc-1")
        return found

    done = told(servers, story)
    assert "No job at all is ended now: the kill switch is on [kill_switch]" in done.stdout


def test_a_job_is_found_by_its_run_and_by_a_beginning(servers: World) -> None:
    """Several are listed and refused; an unknown one has an exit status of its own."""
    servers.fleet.jobs = [
        Job("proc-aa-1", run={"run_id": "night-run"}, activity={"cpu": 1_799_990_000.0}),
        Job("proc-aa-2", uuid="GPU-2", user="bob"),
    ]

    async def story(world: World, why: Any) -> list[Asked]:
        await world.tick(6)
        words = ("night-run", "night", "proc-aa-2", "proc-aa", "nothing")
        return [await why(word) for word in words]

    by_run, by_beginning, whole, several, unknown = told(servers, story)
    for found in (by_run, by_beginning):
        assert "Job proc-aa-1 of alice" in found.stdout, found.stderr
    assert "Job proc-aa-2 of bob" in whole.stdout
    assert several.returncode == 2
    assert "proc-aa-1\n  proc-aa-2" in several.stderr
    assert unknown.returncode == 3
    assert "no job nothing was seen" in unknown.stderr


def test_a_run_that_came_back_means_its_running_attempt(servers: World) -> None:
    """Of an earlier attempt it is said that there was one."""
    run = {"run_id": "night-run"}
    servers.fleet.jobs = [Job("proc-old", run=run, activity={"cpu": 1_799_990_000.0})]

    async def story(world: World, why: Any) -> list[Asked]:
        while world.state("proc-old") is not CaseState.DETECTED:
            await world.tick()
        world.fleet.jobs = [Job("proc-new", run=run, utilization=0.9)]
        await world.tick(8)
        running_attempt = await why("night-run")
        world.fleet.jobs = []
        await world.tick(8)
        return [running_attempt, await why("night-run"), await why("proc-ol")]

    now, later, by_name = told(servers, story)
    assert "Job proc-new of alice" in now.stdout
    assert "also had the attempts proc-old" in now.stderr
    assert later.stdout.startswith("This job is not seen any more; gpuwarden did not end it.")
    assert "idle-held" in later.stdout
    assert later.stdout == by_name.stdout


def test_an_engine_that_is_away_is_no_answer() -> None:
    """Exit status 3, and what to look at."""
    done = gpuwarden("why", "proc-1", "--engine.url", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 3
    assert "is --engine.url right?" in done.stderr


def test_the_help_teaches() -> None:
    """What JOB may be, and what the exit status says."""
    text = gpuwarden("why", "--help").stdout
    assert "run_id of a training, or the beginning of" in " ".join(text.split())
    assert "Exit status: 0 it breaks no rule" in text
