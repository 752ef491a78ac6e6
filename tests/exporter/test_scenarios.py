from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.exporter.nodes import Children, process_of

from gpuwarden.errors import InvalidInput
from gpuwarden.exporter.scenarios import (
    NOT_AVAILABLE,
    Card,
    Delay,
    Fault,
    Scenario,
    SimulatedInstance,
    SimulatedProcess,
    SimulatedXid,
    parse,
    read,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_what_is_written_is_read() -> None:
    """A scenario survives its file."""
    scenario = Scenario(
        cards=[Card(0, name='odd "name" \\ #', utilization=0), Card(1, mig=1, memory=5)],
        processes=[
            SimulatedProcess(0, 7, memory=NOT_AVAILABLE, linger=1.5, start=9),
            SimulatedProcess(1, 8, after=7, kind="mps", sm=3, sample_age=0.25, gi=3, ci=1),
        ],
        faults=[Fault("nvml*", 15, card=1), Fault("nvmlInit_v2", 9, times=2)],
        delays=[Delay("*", 0.3)],
        missing=["nvmlDeviceGetPowerUsage"],
        driver="1.2",
        instances=[SimulatedInstance(1, 3, "MIG-a", ci=1, profile="2g.10gb", used=7)],
        xids=[SimulatedXid(0, 79), SimulatedXid(1, 31, count=4)],
        row_bytes=32,
    )
    assert parse(scenario.render()) == scenario


@given(name=st.binary(min_size=1, max_size=60).filter(lambda name: b"\0" not in name))
def test_any_name(name: bytes) -> None:
    """A card may have any bytes for a name."""
    text = name.decode("utf-8", "surrogateescape")
    assert parse(Scenario([Card(0, name=text)]).render()).cards[0].name == text


def test_processes_are_bound_to_their_start(children: Children, scenario_file: Path) -> None:
    """A written scenario means the process that has the pid now, and no later one."""
    child = children.start()
    Scenario([Card(0)], [SimulatedProcess(0, child.pid)]).write(scenario_file)
    assert read(scenario_file).processes[0].start == process_of(child.pid).start_ticks


@pytest.mark.parametrize(
    ("line", "column", "message"),
    [
        ("crad index=1", 1, 'did you mean "card"'),
        ("card index=1 memroy=5", 14, 'did you mean "memory"'),
        ("card index=1 memory=5G", 14, "not a number"),
        ("card index=1 memory=-5", 14, "outside"),
        ("card index=1 index=2", 14, "twice"),
        ("card uuid=x", 1, "card lacks index="),
        ("card index=0 uuid=other", 1, "already that of line 1"),
        ('card index=1 name="open', 19, "unexpected"),
        ("process card=3 pid=1", 1, "no card 3"),
        ("xid card=3 code=79", 1, "no card 3"),
        ("mig card=0 gi=1 uuid=MIG-a", 1, "mig=1"),
        ("process card=0 pid=1 kind=x", 22, "compute"),
        ("fault call=x code=1" + " " * 2000, 1, "longer"),
    ],
)
def test_mistakes(line: str, column: int, message: str) -> None:
    """Each mistake is named at its place, with what to write instead."""
    with pytest.raises(InvalidInput) as caught:
        parse(f"card index=0 uuid=GPU-0  # fine\n{line}\n", "file")
    found = caught.value.diagnostics[0]
    assert (found.span.line, found.span.column) == (2, column)
    assert message in str(caught.value)


def test_all_mistakes_at_once() -> None:
    """Every mistake of a file is told in one go."""
    with pytest.raises(InvalidInput) as caught:
        parse("crad\ncard index=x\nfault code=1\n")
    assert [item.span.line for item in caught.value.diagnostics] == [1, 2, 3]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """A missing file is the user's to name."""
    with pytest.raises(InvalidInput, match="name a scenario file"):
        read(tmp_path / "none")


def test_a_contradiction_is_not_written(scenario_file: Path) -> None:
    """A wrong scenario is refused before it replaces a right one."""
    with pytest.raises(InvalidInput, match="no card 5"):
        Scenario([Card(0)], [SimulatedProcess(5, 1)]).write(scenario_file)
    assert not scenario_file.exists()
