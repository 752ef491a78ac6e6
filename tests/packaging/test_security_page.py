"""docs/security.md says what is: its tests, files, addresses, rights and flags are looked up."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest
from pydantic import BaseModel
from tests.deploy import probes, sandboxes

from gpuwarden.cli import gpuwarden
from gpuwarden.exporter import releases
from gpuwarden.exporter.agent import settings as agent_settings
from gpuwarden.exporter.settings import DEFAULT_PORT
from gpuwarden.ruleengine.settings import EngineSettings
from gpuwarden.ruleengine.web_settings import DEFAULT_LISTEN

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/security.md").read_text("utf-8")
FILE_FIELDS = frozenset(
    (
        *("rules", "directory", "ledger", "kill_switch", "kubeconfig", "file", "config"),
        *("squeue", "scontrol", "scancel", "sacct"),
    )
)


def files_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The settings that name a file, with dots between: `web.tokens[].file`, `bots.*.key_file`."""
    for name, field in model.model_fields.items():
        inner = list(_models(field.annotation))
        for below, mark in inner:
            yield from files_of(below, f"{prefix}{name}{mark}.")
        if not inner and (name.endswith("_file") or name in FILE_FIELDS):
            yield f"{prefix}{name}"


def _models(annotation: Any, mark: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, mark
    origin = typing.get_origin(annotation)
    if origin in (tuple, list):
        mark = "[]"
    elif isinstance(origin, type) and issubclass(origin, typing.Mapping):
        mark = ".*"
    for inner in typing.get_args(annotation):
        yield from _models(inner, mark)


def test_every_test_that_it_names_exists() -> None:
    """A claim without its test is none."""
    there = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        there |= set(re.findall(r"def (test_\w+)", path.read_text("utf-8")))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 50
    assert named - there == set()


def test_every_file_that_the_engine_is_given_stands_in_its_table() -> None:
    """Whoever adds a secret says who holds it, and what follows if it is read."""
    wanted = set(files_of(EngineSettings))
    assert {"agents.key_file", "bots.*.secret_file", "web.tokens[].file"} <= wanted
    assert {name for name in wanted if f"`{name}`" not in PAGE} == set()


def test_addresses_and_places_are_the_programs_defaults() -> None:
    """What a firewall and a backup are made from."""
    assert f"| exporter | 127.0.0.1:{DEFAULT_PORT} |" in PAGE
    assert f"| agent | 127.0.0.1:{agent_settings.DEFAULT_PORT} |" in PAGE
    assert f"| engine | {DEFAULT_LISTEN} |" in PAGE
    for place in (
        agent_settings.DEFAULT_JOURNAL,
        agent_settings.DEFAULT_KILL_SWITCH,
        releases.DEFAULT_RELEASE_FILE,
    ):
        assert f"`{place}`" in PAGE


@pytest.mark.parametrize(
    "unit", sorted(path.stem for path in sandboxes.UNITS.glob("*.service") if "CapabilityBounding"
                   in path.read_text("utf-8"))
)  # fmt: skip
def test_rights_are_those_of_the_units(unit: str) -> None:
    """User and capabilities, of each unit that is confined."""
    settings = sandboxes.service(unit)
    (row,) = re.findall(rf"^\| {unit} \| (\S+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert row[0] == settings["User"][0]
    names = set() if row[1] == "none" else set(row[1].split(", "))
    assert names == set(settings["CapabilityBoundingSet"][0].split())


def test_flags_and_figures_exist() -> None:
    """Flags are those of a command; so many things are attempted in the sandbox."""
    flags = set()
    pending: list[click.Command] = [gpuwarden]
    while pending:
        command = pending.pop()
        flags |= {name for item in command.params for name in item.opts}
        if isinstance(command, click.Group):
            context = click.Context(command)
            names = command.list_commands(context)
            pending += [item for name in names if (item := command.get_command(context, name))]
    others = {"--require-hashes"}
    assert set(re.findall(r"(?<![\w-])(--[a-z][\w.-]+)", PAGE)) - flags - others == set()
    attempts = probes.tries(1, Path("x"), Path("x"))
    assert f"and {len(attempts)} things are attempted" in PAGE
