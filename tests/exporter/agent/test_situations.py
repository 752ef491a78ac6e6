from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.exporter.agent import situations, situations_nearby, situations_refused
from tests.exporter.agent.nodes import AgentProcess
from tests.exporter.agent.situations import ONLY_ROOT, SITUATIONS, Case, World, identities
from tests.servers import until

from gpuwarden.agent_api import Action, ActionReport, Outcome
from gpuwarden.exporter.processes import read_process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.exporter.agent.nodes import Cards, Engine, Jobs, Node

TABLE_VARIABLE = "GPUWARDEN_KILL_TABLE"
"""Names a file to which each situation appends its row; `python -m bench.agent` prints it."""


@pytest.fixture
def world(node: Node, jobs: Jobs, cards: Cards, engine: Engine, tmp_path: Path) -> Iterator[World]:
    """A node, and what a situation may need besides."""
    made = World(node, jobs, cards, AgentProcess.beside(tmp_path, cards, engine))
    try:
        yield made
    finally:
        if made.agent.running:
            made.agent.stop()
        jobs.close()
        for folder in made.cgroups:
            until(lambda folder=folder: not (folder / "cgroup.procs").read_text())
            folder.rmdir()


def ask(world: World, case: Case, action: Action) -> ActionReport:
    """Ask for an action as the situation has it, and let happen what happens in the grace."""
    if case.ask is not None:
        return case.ask(action)
    about = {"grace": 1.0, **case.about}
    request = world.node.engine.request(case.job_id, action, **about)
    decision = world.node.actions.submit(request).decision_id
    if action is Action.TERMINATE and case.during is not None:
        world.node.reached(decision, "sigterm")
        case.during()
    return world.node.outcome(decision)


def listed(world: World) -> set[int]:
    """Pids that the driver lists on any card."""
    world.node.driver.open()
    return {item.pid for items in world.node.driver.process_list().values() for item in items}


def written(world: World) -> set[Path]:
    """Leave requests on the node."""
    return {path for folder in (world.node.jobs, world.node.folder / "jobs")
            for path in folder.glob("requests/*")}  # fmt: skip


def all_of(world: World) -> dict[int, tuple[int, bool]]:
    """Everything that runs for the test, below the launcher."""
    return identities(tuple(world.jobs.living()))


def test_the_table_has_all_kinds_of_situations() -> None:
    """Each module of situations, once imported, is in the table."""
    modules = (situations, situations_nearby, situations_refused)
    found = {function.__module__ for function in SITUATIONS.values()}
    assert found == {module.__name__ for module in modules}


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_job_ends_as_a_whole_and_alone(name: str, world: World) -> None:
    """What belongs to the job ends, nothing else does, and `inspect` says so before."""
    if name in ONLY_ROOT and os.geteuid() != 0:
        pytest.skip("takes another user, namespace, cgroup or pid: only root can")
    neighbour = world.jobs.start("polite")
    world.hold(neighbour.pid)
    case = SITUATIONS[name](world)
    spared = (*case.spared, neighbour.pid)
    unharmed = identities(spared)
    before, on_cards = identities((*case.ends, *spared)), listed(world)

    inspected = ask(world, case, Action.INSPECT)

    assert identities((*case.ends, *spared)) == before
    assert listed(world) == on_cards
    assert written(world) == set()
    assert inspected.outcome is (Outcome.REFUSED if case.refused else Outcome.DONE)
    assert set(inspected.steps) <= {"verified"}

    report = ask(world, case, Action.TERMINATE)

    after = identities(spared)
    same = sum(after.get(pid) == item for pid, item in unharmed.items())
    row(name, inspected, report, others=f"{same} of {len(unharmed)}")
    assert after == unharmed
    assert (report.outcome and report.outcome.value) == (
        "refused" if case.refused else case.outcome
    )
    assert inspected.reason == case.refused
    if case.refused:
        assert report.reason == case.refused
        assert report.processes == inspected.processes == ()
        return
    ended = {item.pid: item.ended_by for item in report.processes}
    assert ended.items() >= case.ends.items()
    assert identities(tuple(ended)) == {}
    assert report.proof is not None
    assert report.proof.gone is (case.outcome == "reclaimed")
    if case.outcome == "reclaimed":
        assert listed(world).isdisjoint(ended)
        assert report.proof.memory_freed > 0
        used, left_over = report.proof.device_used_before, report.proof.device_used_after
        assert sum(used[uuid] - left_over[uuid] for uuid in used) == report.proof.memory_freed
    if not case.open:
        assert ended == case.ends
        assert {item.pid for item in inspected.processes} == set(ended)
    # Whoever escaped the agent would still carry the mark of the test.
    left = {pid: item for pid in world.jobs.living() if (item := read_process(pid))}
    known = {world.jobs.process.pid, *spared}
    strangers = {
        pid
        for pid, item in left.items()
        if pid not in known and not item.ended and item.comm != "gw-launcher"
    }
    assert strangers == set()


def row(name: str, inspected: ActionReport, report: ActionReport, *, others: str) -> None:
    """Append the situation's row of the table, where one is asked for."""
    path = os.environ.get(TABLE_VARIABLE)
    if not path:
        return
    by = [item.ended_by for item in report.processes]
    cells = [(SITUATIONS[name].__doc__ or name).strip().rstrip(".")]
    if report.outcome is Outcome.REFUSED:
        cells += [f"refused: {inspected.reason}", f"refused: {report.reason}", "none", "", ""]
    else:
        survivors = identities(tuple(item.pid for item in report.processes))
        freed = report.proof.memory_freed if report.proof is not None else 0
        cells += [
            f"names {len(inspected.processes)}",
            str(report.outcome and report.outcome.value),
            f"{by.count('SIGTERM')} / {by.count('SIGKILL')}",
            str(len(survivors)),
            f"{freed >> 30} GiB",
        ]
    with Path(path).open("a", encoding="utf-8") as table:
        table.write(f"| {' | '.join([*cells, others])} |\n")
