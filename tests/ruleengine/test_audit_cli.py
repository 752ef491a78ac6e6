"""`gpuwarden audit`, asked of an engine that serves, and of a file."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from click.testing import CliRunner
from tests.ruleengine.engines import World, running, serving
from tests.ruleengine.test_why_cli import Asked
from tests.servers import free_port

from gpuwarden.errors import GpuwardenError
from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.audit_cli import audit as audit_command
from gpuwarden.ruleengine.cases import CaseState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path


def ask(*arguments: str) -> Asked:
    """Run the command in this process; its errors are told as `gpuwarden` would tell them."""
    result = CliRunner().invoke(audit_command, arguments)
    if isinstance(result.exception, GpuwardenError):
        return Asked(result.exception.exit_code, result.stdout, str(result.exception))
    return Asked(result.exit_code, result.stdout, result.stderr)


def reclaimed(servers: World, story: Callable[[str, Callable[..., Any]], Awaitable[Any]]) -> Any:
    """Run a story once job-1 is ended, with the decision's id and a way to ask."""
    port = free_port()

    async def whole() -> Any:
        async with running(servers) as world:
            app = EngineApp(
                world.engine, world.hop, notify_token=None, operator_token=None, ticket_key=None
            )

            async def asked(*arguments: str) -> Asked:
                url = f"http://127.0.0.1:{port}"
                return await asyncio.to_thread(ask, *arguments, "--engine.url", url)

            await world.until(CaseState.VERIFIED)
            (decision,) = world.engine.ledger.job_decisions("proc-1")
            async with serving(app, port):
                page = f"http://127.0.0.1:{port}/decisions/{decision.id}"
                async with httpx.AsyncClient() as client:
                    assert (await client.get(page)).status_code == 200
                return await story(decision.id, asked)

    return asyncio.run(whole())


def test_a_job_and_its_decision_mean_the_same_audit(servers: World) -> None:
    """By decision, by job, by the beginning of its name."""

    async def story(decision: str, asked: Any) -> list[Asked]:
        return [await asked(word, "--output", "json") for word in (decision, "proc-1", "proc")]

    answers = reclaimed(servers, story)
    assert [answer.returncode for answer in answers] == [0, 0, 0]
    documents = [json.loads(answer.stdout) for answer in answers]
    assert documents[0] == documents[1] == documents[2]
    assert documents[0]["schema"] == "gpuwarden.audit/v1"


def test_it_is_told_in_words(servers: World) -> None:
    """The answer first, then the course, the node, the invariants and the rule."""

    async def story(decision: str, asked: Any) -> Asked:
        answer: Asked = await asked(decision)
        return answer

    told = reclaimed(servers, story).stdout
    lines = (
        "This job was ended",
        "last look",
        "Node 127.0.0.1: reclaimed",
        " 6 holds",
        "idle-held:",
    )
    places = [told.index(text) for text in lines]
    assert places == sorted(places)
    assert "BROKEN" not in told


def test_a_saved_audit_is_verified_without_the_engine(servers: World, tmp_path: Path) -> None:
    """And what was changed in it is found."""

    async def story(decision: str, asked: Any) -> dict[str, Any]:
        assert (await asked(decision, "--verify")).returncode == 0
        document: dict[str, Any] = json.loads((await asked(decision, "-o", "json")).stdout)
        return document

    document = reclaimed(servers, story)
    path = tmp_path / "audit.json"
    path.write_text(json.dumps(document))
    good = ask("--file", str(path), "--verify")
    assert (good.returncode, good.stdout.count("\n")) == (0, 12)
    document["last_look"]["kill_switch"] = True
    path.write_text(json.dumps(document))
    bad = ask("--file", str(path), "--verify")
    assert bad.returncode == 1
    assert " 5 BROKEN" in bad.stdout
    assert "the kill switch was not known to be off" in bad.stdout
    found = json.loads(ask("--file", str(path), "--verify", "-o", "json").stdout)
    assert [item["number"] for item in found if item["holds"] is False] == [5]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "is no gpuwarden.audit/v1"),
        ('{"schema": "gpuwarden.job/v1"}', "is no gpuwarden.audit/v1"),
        ('{"schema": "gpuwarden.audit/v1"}', "is not whole"),
    ],
)
def test_a_file_that_is_no_audit_is_refused(tmp_path: Path, content: str, said: str) -> None:
    """With what to do; exit status 2."""
    path = tmp_path / "audit.json"
    path.write_text(content)
    answer = ask("--file", str(path), "--verify")
    assert answer.returncode == 2
    assert said in answer.stderr


def test_what_was_never_decided_has_no_audit(servers: World) -> None:
    """A job that runs, and one that there is not; exit status 3. Neither a word is wrong usage."""
    port = free_port()

    async def whole() -> tuple[Asked, Asked]:
        async with running(servers) as world:
            await world.until(CaseState.DETECTED)
            app = EngineApp(
                world.engine, world.hop, notify_token=None, operator_token=None, ticket_key=None
            )
            url = f"http://127.0.0.1:{port}"
            async with serving(app, port):
                one = await asyncio.to_thread(ask, "proc-1", "--engine.url", url)
                other = await asyncio.to_thread(ask, "slurm-ci-1-0", "--engine.url", url)
                return one, other

    running_one, none = asyncio.run(whole())
    assert running_one.returncode == none.returncode == 3
    assert "gpuwarden why proc-1" in running_one.stderr
    assert ask().returncode == 2
