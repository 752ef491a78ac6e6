"""What is idle on a node is read as Slurm counts it, and a node in doubt is no room."""

from __future__ import annotations

import pytest

from gpuwarden.platforms.slurm_nodes import decode_nodes, decode_tiers

LINE = (
    "NodeName=node1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=1 CPUEfctv=8 CPUTot=8 CPULoad=0.80 "
    "AvailableFeatures=fast,big ActiveFeatures=fast Gres=gpu:a100:4 GresDrain=N/A "
    "GresUsed=gpu:a100:3(IDX:0-2) NodeAddr=127.0.0.1 NodeHostName=vm Version=22.05.8 OS=Linux "
    "6.18.44 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=1000 AllocMem=200 FreeMem=12666 Sockets=8 "
    "Boards=1 State=MIXED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A "
    "Partitions=main,side  BootTime=1 SlurmdStartTime=2 LastBusyTime=3 CfgTRES=cpu=8 "
    "AllocTRES=cpu=1 CapWatts=n/a"
)
"""As 22.05.8 and, but for fields that are not read, 24.11.5 printed it."""


def test_what_is_idle_is_the_difference() -> None:
    """Of cards by model, of cores that a job may have, of memory."""
    (node,) = decode_nodes(LINE + "\n")
    assert node.usable
    assert node.idle == {"a100": 1}
    assert (node.cpus, node.taken) == (7, 1)
    assert node.memory == 800 * 2**20
    assert node.partitions == {"main", "side"}
    assert node.features == {"fast"}
    assert node.hosts == {"vm", "127.0.0.1"}


@pytest.mark.parametrize(
    ("gres", "used", "idle"),
    [
        ("gpu:4", "gpu:0", {"": 4}),
        ("gpu:a100:4(S:0-1)", "gpu:a100:1(IDX:2)", {"a100": 3}),
        (
            "gpu:a100:2,gpu:v100:2",
            "gpu:a100:2(IDX:0-1),gpu:v100:0(IDX:N/A)",
            {"a100": 0, "v100": 2},
        ),
        ("gpu:a100:4,nvme:2", "gpu:a100:0(IDX:N/A),nvme:1", {"a100": 4}),
        ("gpu:1g.5gb:7", "gpu:1g.5gb:2", {}),
        ("(null)", "(null)", {}),
    ],
)
def test_cards_are_counted_by_model(gres: str, used: str, idle: dict[str, int]) -> None:
    """A node may have several; other resources are none."""
    text = LINE.replace("gpu:a100:4", gres).replace("gpu:a100:3(IDX:0-2)", used)
    (node,) = decode_nodes(text)
    assert node.idle == idle


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("State=MIXED", "State=MIXED+DRAIN"),
        ("State=MIXED", "State=DOWN*"),
        ("State=MIXED", "State=IDLE+RESERVED"),
        ("State=MIXED", "State=ALLOCATED+MAINTENANCE"),
        ("State=MIXED", "State=IDLE+SOMETHING_NEW"),
        ("State=MIXED ", ""),
        ("RealMemory=1000", "RealMemory=x"),
        ("GresUsed=gpu:a100:3(IDX:0-2)", "GresUsed=gpu:a100:3(IDX:0-2),shard:2(2/2)"),
        ("GresUsed=gpu:a100:3(IDX:0-2)", "GresUsed=what?"),
    ],
)
def test_a_node_in_doubt_is_no_room(old: str, new: str) -> None:
    """Nobody is ended for a job that could not start there."""
    (node,) = decode_nodes(LINE.replace(old, new))
    assert not node.usable
    assert node.lost is ("DOWN" in new)


@pytest.mark.parametrize("state", ["MIXED", "IDLE", "ALLOCATED", "IDLE+CLOUD", "MIXED+PLANNED"])
def test_a_node_in_order_is_room(state: str) -> None:
    """Whether it works or not."""
    (node,) = decode_nodes(LINE.replace("State=MIXED", f"State={state}"))
    assert node.usable


def test_an_administrators_words_change_nothing() -> None:
    """They come last, and what is named twice counts once."""
    remark = " Reason=State=IDLE Gres=gpu:a100:9 [root@1] Comment=NodeName=node2 CPUAlloc=0"
    assert decode_nodes(LINE + remark) == decode_nodes(LINE)


def test_several_nodes_are_told_apart() -> None:
    """One on each line."""
    text = f"{LINE}\n{LINE.replace('node1', 'node2')}\n\n"
    assert [node.name for node in decode_nodes(text)] == ["node1", "node2"]


def test_tiers_of_partitions() -> None:
    """As both versions print them."""
    line = "PartitionName={} AllowGroups=ALL Default=YES Nodes=node1 {} RootOnly=NO State=UP"
    text = "\n".join(
        (line.format("main", "PriorityTier=1"), line.format("high", "PriorityTier=10"))
    )
    assert decode_tiers(text + "\n") == {"main": 1, "high": 10}
    assert decode_tiers(line.format("odd", "") + "\n") == {"odd": 0}
