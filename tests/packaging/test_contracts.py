"""What programs of two versions hand to each other: the previous release beside this one.

A fleet is never upgraded at once: old exporters, agents and trainings meet a new engine, and after
a step back the other way round. `make test` reads what the previous version wrote, recorded by
`contracts.py`; `make test-all` builds its wheel from git's history and tries every pair.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.exporter.agent.conftest import cards, engine, jobs
from tests.exporter.agent.nodes import AgentProcess

from gpuwarden.agent_api import Action, Outcome
from gpuwarden.catalogue import CATALOGUE

if TYPE_CHECKING:
    from tests.exporter.agent.nodes import Cards, Engine, Jobs

__all__ = ["cards", "engine", "jobs"]

ROOT = Path(__file__).resolve().parents[2]
TOOL = Path(__file__).with_name("contracts.py")
PREVIOUS = "046e372810d5ec4fc31c0531488b7db98ecf76a0"
"""The commit that stands for the release before this one."""
RECORDED = Path(__file__).with_name("recorded") / PREVIOUS[:7]


def tool(what: str, folder: Path, sources: Path) -> str:
    """Write or read every contract with the gpuwarden of a folder."""
    done = subprocess.run(
        [sys.executable, str(TOOL), what, str(folder)],
        env={**os.environ, "PYTHONPATH": str(sources)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def unlike(before: Any, now: Any, place: str = "") -> list[str]:
    """What one version understood and the other understands otherwise; more is no difference."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            line
            for key, value in before.items()
            for line in (
                unlike(value, now[key], f"{place}/{key}")
                if key in now
                else [f"{place}/{key} is gone"]
            )
        ]
    return [] if before == now else [f"{place}: {before!r} became {now!r}"]


def unpack(archive: Path, folder: Path) -> None:
    """Unpack what this repository itself has packed; Debian 12 has 3.11.2, without filters."""
    filters: dict[str, Any] = {"filter": "data"} if sys.version_info >= (3, 11, 4) else {}
    shutil.unpack_archive(archive, folder, **filters)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """What the previous version wrote."""
    folder = tmp_path / "recorded"
    unpack(RECORDED / "files.tar.gz", folder)
    return folder


def test_what_the_previous_version_wrote_is_understood(recorded: Path) -> None:
    """Job files, orders, reports, journal, states, ledger, rules, settings: by each field."""
    before = json.loads((RECORDED / "understood.json").read_text("utf-8"))
    assert not [name for name, told in before.items() if list(told) == ["failed"]]
    now = json.loads(tool("read", recorded, ROOT / "src"))
    # An old ledger is of this version from now on, and counts on.
    assert unlike(before, now) == []


def test_no_metric_was_taken_away_or_called_otherwise(recorded: Path) -> None:
    """Boards, rules and alerts of others rest on them: name, type, unit and labels stay."""
    told = json.loads((recorded / "catalogue.json").read_bytes())["metrics"]
    for name, entry in told.items():
        metric = CATALOGUE[name]
        assert (str(metric.type), metric.unit) == (entry["type"], entry["unit"]), name
        assert list(metric.labels) == entry["labels"], name


# ---------------------------------------------------------------------------------------------
# The wheels themselves


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of the previous version and of this one, unpacked."""
    there = subprocess.run(
        ["git", "cat-file", "-e", f"{PREVIOUS}^{{commit}}"],  # noqa: S607
        cwd=ROOT,
        check=False,
        capture_output=True,
    )
    if there.returncode:
        pytest.skip(f"NOT TRIED: git's history ends before {PREVIOUS[:7]}: git fetch --unshallow")
    folder = tmp_path_factory.mktemp("wheels")
    sources = {"old": folder / "sources", "new": ROOT}
    packed = folder / "sources.tar"
    subprocess.run(
        ["git", "archive", "--output", str(packed), PREVIOUS],  # noqa: S607
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    unpack(packed, sources["old"])
    found = {}
    for name, place in sources.items():
        out = folder / f"wheel-{name}"
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(place)],
            check=True,
            timeout=300,
        )
        (wheel,) = out.glob("*.whl")
        found[name] = folder / name
        with zipfile.ZipFile(wheel) as archive_file:
            archive_file.extractall(found[name])
    return found


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_each_understands_what_the_other_writes(wheels: dict[str, Path], tmp_path: Path) -> None:
    """Old nodes and trainings beside a new engine, and the other way; but for the ledger."""
    understood = {}
    for writer, sources in wheels.items():
        folder = tmp_path / writer
        tool("write", folder, sources)
        for reader, reading in wheels.items():
            copy = tmp_path / f"{writer}-{reader}"
            shutil.copytree(folder, copy)
            understood[writer, reader] = json.loads(tool("read", copy, reading))
    assert unlike(understood["old", "old"], understood["old", "new"]) == []
    # What an old reader knows of new files is what it would know of its own.
    new, old = understood["new", "new"], understood["new", "old"]
    for name in ("ledger.sqlite", "catalogue.json"):
        new.pop(name)
    old.pop("catalogue.json")
    refused = old.pop("ledger.sqlite")
    assert set(old) == set(new)
    assert unlike(old, new) == []
    assert "newer gpuwarden" in refused["refused"]


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_an_old_engine_refuses_a_new_ledger_and_loses_nothing(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    """It says that it is older; the file stays as it was, for the engine that wrote it."""
    tool("write", tmp_path / "made", wheels["new"])
    ledger = tmp_path / "alone/ledger.sqlite"
    ledger.parent.mkdir()
    shutil.copy(tmp_path / "made/ledger.sqlite", ledger)
    content = ledger.read_bytes()
    answer = json.loads(tool("read", ledger.parent, wheels["old"]))["ledger.sqlite"]
    assert "newer gpuwarden" in answer["refused"]
    assert ledger.read_bytes() == content
    kept = json.loads(tool("read", ledger.parent, wheels["new"]))["ledger.sqlite"]
    assert kept["case"]["state"] == "notified"


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", ["old", "new"])
def test_an_agent_of_either_version_ends_a_job_for_this_engine(
    version: str, *, wheels: dict[str, Path], jobs: Jobs, cards: Cards, engine: Engine,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The order is taken, carried out and reported; a second one is answered by the first."""
    host = jobs.start("tenant")
    tenant = host.pids[1]
    cards.hold(tenant)
    monkeypatch.setenv("PYTHONPATH", str(wheels[version]))
    agent = AgentProcess.beside(tmp_path, cards, engine)
    agent.start()
    try:
        request = engine.request(host.part(tenant), grace=5.0)
        agent.post(engine, request)
        assert agent.outcome(request.decision_id).outcome is Outcome.RECLAIMED
        again = engine.request(host.part(tenant), Action.TERMINATE, grace=5.0)
        assert agent.post(engine, again).outcome is Outcome.RECLAIMED
    finally:
        agent.stop()


def page_of(sources: Path, cards: Cards, folder: Path) -> set[tuple[str, tuple[str, ...]]]:
    """Series of the exporter of a version, as names with the names of their labels."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "gpuwarden", "exporter", "--once"),
            *("--gpus", f"simulated:{cards.path}", "--jobs.directory", str(folder)),
        ],
        env={**os.environ, "PYTHONPATH": str(sources)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = set()
    for line in done.stdout.splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition("{")
            labels = tuple(part.split("=")[0] for part in rest.split("}")[0].split('",'))
            found.add((name.split(" ")[0], labels if rest else ()))
    return found


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_an_exporter_of_either_version_tells_what_the_other_told(
    wheels: dict[str, Path], cards: Cards, jobs: Jobs, tmp_path: Path
) -> None:
    """Of the same node: no series is gone or has other labels, whichever way one goes."""
    host = jobs.start("tenant")
    cards.hold(host.pids[1])
    old, new = (page_of(wheels[name], cards, tmp_path / name) for name in ("old", "new"))
    assert len(old) > 30
    assert old - new == set()
    known = json.loads((RECORDED / "understood.json").read_text("utf-8"))["catalogue.json"]
    # What is new is new by name: an old engine asks for none of it, and is misled by none.
    assert {name for name, _ in new - old} & set(known["metrics"]) == set()
