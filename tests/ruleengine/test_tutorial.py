"""docs/tutorial-rules.md works as it reads: its files are written, its commands run."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.servers import Server, free_port, running, until

from gpuwarden.ruleengine.histories import history
from gpuwarden.ruleengine.rule_tests import RuleTest
from gpuwarden.ruleengine.temporary_servers import temporary_prometheus

if TYPE_CHECKING:
    from collections.abc import Iterator

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial-rules.md"
_BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


def _blocks() -> list[tuple[str, str]]:
    return [(found["kind"], found["text"]) for found in _BLOCK.finditer(TUTORIAL.read_text())]


def _write(folder: Path, text: str) -> None:
    """A file whose name is the comment in its first line."""
    name, _, content = text.partition("\n")
    path = folder / name.removeprefix("# ")
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)


def _commands(text: str) -> Iterator[tuple[str, str]]:
    """Commands of a console block, with what they print."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def _run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    name, *words = shlex.split(command)
    assert name == "gpuwarden"
    return subprocess.run(
        [sys.executable, "-m", "gpuwarden", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def _plain(text: str) -> str:
    """Without what differs from run to run: how long it took, what it asked, the rules' hash."""
    text = re.sub(r"\(\d+\.\d s\)", "(1.0 s)", text)
    text = re.sub(r"\d+ queries, \d+ samples, [\d.]+ s", "1 queries, 1 samples, 1 s", text)
    # Cells of tables are as wide as their column.
    text = re.sub(r" +$", "", text, flags=re.MULTILINE)
    return re.sub(r"hash [0-9a-f]{16}", "hash 0123456789abcdef", text)


@pytest.mark.timeout(300)  # a dozen processes, one after the other
def test_every_command_prints_what_the_tutorial_says(tmp_path: Path) -> None:
    """From the first mistake to the proof that a job would be ended."""
    commands = []
    for kind, text in _blocks():
        if kind == "yaml":
            _write(tmp_path, text)
        elif kind == "console":
            for command, output in _commands(text):
                commands.append(command.split()[1:3])
                done = _run(tmp_path, command)
                assert (_plain(done.stdout), done.stderr) == (_plain(output), ""), command
    for word in ("check", "test", "explain", "diff", "replay"):
        assert ["rules", word] in commands


def test_the_engine_observes_with_the_tutorials_files(tmp_path: Path) -> None:
    """A job that crashed an hour ago is on the list of `gpuwarden jobs list`."""
    for kind, text in _blocks():
        if kind == "yaml":
            _write(tmp_path, text)
    # Prometheus is given the next minutes as well: whenever the engine asks, data are fresh.
    begun = datetime.fromtimestamp(time.time() // 5 * 5 - 2400, UTC)
    job = {"job": "proc-crashed", "like": "idle", "age": "1h"}
    until_then = {"at": "45m", "rule": "idle-card", "job": "proc-crashed", "verdict": "yes"}
    test = RuleTest.model_validate(
        {"name": "now", "start": begun.isoformat(), "jobs": [job], "expect": [until_then]}
    )

    async def observe() -> str:
        async with temporary_prometheus(history(test)) as url:
            return await asyncio.to_thread(_observed, tmp_path, url)

    listed = asyncio.run(observe())
    assert re.search(r"^proc-crashed .*idle-card: watching", listed, re.MULTILINE)


def _observed(folder: Path, prometheus: str) -> str:
    port = free_port()
    config = folder / "engine.yaml"
    text = config.read_text().replace("http://127.0.0.1:9090", prometheus)
    config.write_text(f'{text}web: {{listen: "127.0.0.1:{port}"}}\n')
    command = [sys.executable, "-m", "gpuwarden", "engine", "--config", str(config)]
    url = f"http://127.0.0.1:{port}"
    engine = Server(url, folder / "engine.log", command, ready_path="/-/healthy")
    with running(engine):
        command_line = f"gpuwarden jobs list --engine.url {url}"

        def listed() -> str:
            table = _run(folder, command_line).stdout
            return table if "idle-card" in table else ""

        return until(listed, 60, every=0.5)
