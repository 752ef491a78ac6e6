"""The directory: its mistakes at their places, and who is told where an owner cannot be."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from tests.ruleengine.engines import World, running

from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.directories import CHANNELS, Directory
from gpuwarden.ruleengine.directory_checks import check_directory
from gpuwarden.ruleengine.directory_cli import directory
from gpuwarden.ruleengine.recipients import Recipients, recipients

if TYPE_CHECKING:
    from pathlib import Path

NOON = 1_796_040_000.0
"""2026-11-30 12:00 UTC."""
HERE, CHANNEL = ("slack", "U0ALICE01"), ("slack", "#vision")


def checked(folder: Path, text: str) -> list[str]:
    """Findings on a directory, as `line:column code`."""
    path = folder / "directory.yaml"
    path.write_text(text)
    found = check_directory(path, now=NOON).diagnostics
    return [f"{item.span.line}:{item.span.column} {item.code}" for item in found]


def test_every_mistake_is_found_in_one_pass(tmp_path: Path) -> None:
    """Each at its line and column, as those of rule files."""
    text = """version: 1
users:
  ana: {left: 2026-13-01}
  bob: {team: a, teams: [b]}
  "x/y": {}
  joe: {mail: joe@example.org}
  mo: {teams: [a, a]}
  kim: {teams: 5}
"""
    found = checked(tmp_path, text)
    wrong = ["3:15 GW107", "4:8 GW111", "5:3 GW107", "6:9 GW103", "7:15 GW111", "8:16 GW106"]
    assert sorted(found) == wrong


def test_a_deputy_is_another_user_of_the_directory(tmp_path: Path) -> None:
    """Who stands in must be somebody who can be told."""
    text = """version: 1
operators: {slack: "#ops"}
users:
  ana: {email: ana@example.org, deputy: bbo}
  bob: {email: bob@example.org, deputy: bob}
"""
    assert checked(tmp_path, text) == ["4:41 GW401", "5:41 GW401"]


def test_who_could_not_be_told_is_a_warning(tmp_path: Path) -> None:
    """The operator hears of it before a notice is due; the file is usable all the same."""
    text = """version: 1
teams: {vision: {}}
users:
  ana: {team: vision}
  bob: {slack: U0BOB0001, team: vison}
  kim: {slack: U0KIM0001, team: vision, left: 2026-11-30}
  lou: {slack: U0LOU0001, team: vision, left: 2026-11-30, deputy: bob}
  mia: {slack: U0MIA0001, team: vision, left: 2026-12-01}
"""
    found = checked(tmp_path, text)
    assert sorted(found) == ["1:1 GW413", "4:3 GW410", "5:3 GW412", "6:3 GW411"]
    assert check_directory(tmp_path / "directory.yaml", now=NOON).content is not None


def test_users_who_may_be_one_are_told(tmp_path: Path) -> None:
    """An address twice, and names that differ in capital letters only."""
    text = """version: 1
operators: {slack: "#ops"}
users:
  ana: {email: ana@example.org}
  Ana: {email: ANA@example.org}
  bob: {email: bob@example.org}
"""
    assert sorted(checked(tmp_path, text)) == ["5:3 GW414", "5:3 GW415"]


def test_the_command_says_whether_the_file_can_be_used(tmp_path: Path) -> None:
    """Exit status 2 for an error, 0 for warnings."""
    path = tmp_path / "directory.yaml"
    for text, status, words in (
        ("version: 1\nusers: {ana: {zone: UTC}}\n", 2, "error[GW103]"),
        ("version: 1\nusers: {ana: {}}\n", 0, "warning[GW410]"),
    ):
        path.write_text(text)
        result = CliRunner().invoke(directory, ["check", str(path)])
        assert result.exit_code == status
        assert words in result.output


def test_the_command_shows_who_is_told_of_whom(tmp_path: Path) -> None:
    """Of one who has left: the deputy, and the team's contact."""
    path = tmp_path / "directory.yaml"
    path.write_text(LEFT.replace("}  # deputy", ", deputy: bob}"))
    result = CliRunner().invoke(directory, ["show", "alice", "--file", str(path)])
    assert "told       bob stands in: slack U0BOB0001\n" in result.output
    assert "as well    slack #vision" in result.output


@pytest.mark.parametrize("name", [r"EXAMPLE\ana", "ana@example.org", "4711", "müller", "host$"])
def test_user_names_are_those_that_directories_of_organisations_have(name: str) -> None:
    """What LDAP gives a node as a user's name can be written down."""
    known = Directory.model_validate({"version": 1, "users": {name: {"team": "a"}}})
    assert known.user(name).team == "a"


def test_who_is_in_several_teams_has_jobs_that_count_for_the_first() -> None:
    """The others are teams of theirs, too."""
    known = Directory.model_validate({"version": 1, "users": {"ana": {"teams": ["a", "b"]}}})
    assert (known.user("ana").team, known.user("ana").member_of) == ("a", ("a", "b"))


ALICE = {"slack": "U0ALICE01", "team": "vision"}
BOB = {"slack": "U0BOB0001", "team": "vision"}
GONE = "they have left (by the directory, on 2026-11-30)"
NO_ADDRESS = "the directory has no address"
STAND_INS = (
    (ALICE, BOB, Recipients((HERE,))),
    ({**ALICE, "left": "2026-12-01"}, BOB, Recipients((HERE,))),
    ({**ALICE, "left": "2026-11-30"}, BOB, Recipients((), (CHANNEL,), why_not=GONE)),
    ({"team": "vision"}, BOB, Recipients((), (CHANNEL,), why_not=NO_ADDRESS)),
    (
        {**ALICE, "left": "2026-11-30", "deputy": "bob"},
        BOB,
        Recipients((("slack", "U0BOB0001"),), (CHANNEL,), "bob", GONE),
    ),
    (
        {"team": "vision", "deputy": "bob"},
        BOB,
        Recipients((("slack", "U0BOB0001"),), (CHANNEL,), "bob", NO_ADDRESS),
    ),
    (
        {**ALICE, "left": "2026-11-30", "deputy": "bob"},
        {**BOB, "left": "2026-01-01"},
        Recipients((), (CHANNEL,), why_not=GONE),
    ),
    ({**ALICE, "left": "2026-12-01", "timezone": "Pacific/Kiritimati"}, BOB, None),
)


@pytest.mark.parametrize(("alice", "bob", "expected"), STAND_INS)
def test_who_stands_in(alice: dict, bob: dict, expected: Recipients | None) -> None:
    """A deputy counts as the owner; a team's contact is told, and counts for nothing."""
    known = Directory.model_validate(
        {
            "version": 1,
            "teams": {"vision": {"contact": {"slack": "#vision"}}},
            "users": {"alice": alice, "bob": bob},
        }
    )
    found = recipients(known, "alice", CHANNELS, now=NOON)
    if expected is None:
        # Where the new day has begun already, it is over for them.
        assert found.why_not == "they have left (by the directory, on 2026-12-01)"
    else:
        assert found == expected


LEFT = """
version: 1
operators: {slack: "#gpu-ops"}
teams: {vision: {contact: {slack: "#vision"}}}
users:
  alice: {slack: U0ALICE01, team: vision, left: 2020-01-01}  # deputy
  bob: {slack: U0BOB0001, team: speech}
"""


def told(world: World) -> set[str]:
    """Who got a message."""
    return {request.json()["channel"] for request in world.slack.received}


def test_without_a_deputy_nobody_who_has_left_loses_a_job(servers: World) -> None:
    """The team is told, the operators are paged, and nothing severe happens."""

    async def story() -> None:
        (servers.folder / "directory.yaml").write_text(LEFT)
        async with running(servers) as world:
            await world.until(CaseState.DETECTED)
            await world.tick(60)
            assert told(world) == {"#vision"}
            assert world.state() is CaseState.DETECTED
            assert not world.agent.requests
            pages = [
                alert
                for alert in world.alerts.received[-1].json()
                if alert["labels"]["alertname"] == "GpuwardenNoticeUndeliverable"
            ]
            assert (
                GONE.replace("2026-11-30", "2020-01-01") in pages[0]["annotations"]["description"]
            )

    asyncio.run(story())


def test_a_deputys_proof_counts_as_the_owners(servers: World) -> None:
    """The end comes as announced; nothing goes to who has left."""

    async def story() -> None:
        text = LEFT.replace("}  # deputy", ", deputy: bob}")
        (servers.folder / "directory.yaml").write_text(text)
        async with running(servers) as world:
            await world.until(CaseState.VERIFIED)
            assert told(world) == {"U0BOB0001", "#vision"}

    asyncio.run(story())
