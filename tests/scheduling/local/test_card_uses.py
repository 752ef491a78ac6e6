"""Which cards may be given to whom: those that are known to be free, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.scheduling.local.policy_texts import box

from gpuwarden.exporter import simulated
from gpuwarden.scheduling.local.card_uses import IDLE_BYTES, CardUses, Holder, uses_of
from gpuwarden.scheduling.local.cards import CardSeen
from gpuwarden.scheduling.preemption_terms import Pool

POOL = Pool("a100")
REPOSITORY = Path(__file__).resolve().parents[3]


def card(index: int = 0, **others: Any) -> CardSeen:
    """A card that nobody uses."""
    chosen = {"model": "NVIDIA A100", "used": 0, "pids": frozenset(), **others}
    return CardSeen(uuid=f"GPU-{index}", index=index, **chosen)


def uses(*cards: CardSeen, holders: dict[str, Holder] | None = None, **others: Any) -> CardUses:
    """Of a box whose policy counts four."""
    return uses_of(cards, holders or {}, box(), **others)


def test_a_card_without_anybody_is_free_also_with_a_little_memory_in_use() -> None:
    """A driver has contexts of its own."""
    found = uses(card(0), card(1, used=IDLE_BYTES))
    assert found.free == {"a100": ("GPU-0", "GPU-1")}
    assert found.total == {POOL: 2}
    assert found.missing == {"a100": 2}


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"pids": frozenset({7})}, "process 7 uses it"),
        ({"pids": None}, "does not tell who uses it"),
        ({"used": None}, "does not tell who uses it"),
        ({"used": IDLE_BYTES + 1}, "in use by no process"),
        ({"whole": False}, "MIG mode"),
        ({"problem": "it does not answer"}, "it does not answer"),
        ({"drawing": frozenset({9}), "used": IDLE_BYTES + 1}, "by process 9, which draws"),
        ({"model": "NVIDIA T4"}, "no kind of cards of the policy has the model 'NVIDIA T4'"),
    ],
)
def test_what_is_not_known_to_be_free_is_off_limits(seen: dict[str, Any], words: str) -> None:
    """With the reason."""
    found = uses(card(0, **seen))
    assert not found.free["a100"]
    assert words in found.refused["GPU-0"]


def test_a_job_is_no_stranger_on_its_own_card_and_one_on_another() -> None:
    """Its environment names its cards; one that goes elsewhere is told as anybody."""
    mine = Holder("1", frozenset({7, 8}), ended=False)
    found = uses(
        card(0, pids=frozenset({7, 8}), used=9 * IDLE_BYTES),
        card(1, pids=frozenset({8})),
        holders={"GPU-0": mine},
    )
    assert set(found.refused) == {"GPU-1"}
    assert found.total == {POOL: 2}
    assert found.free == {"a100": ()}


def test_a_card_that_was_left_is_free_when_processes_and_memory_are_gone() -> None:
    """Not when the job has ended: kueue #6143."""
    left = {"GPU-0": Holder("1", frozenset({7}), ended=True)}
    on_it = uses(card(0, pids=frozenset({7})), holders=left)
    assert (on_it.released, on_it.free["a100"]) == (frozenset(), ())
    assert on_it.refused["GPU-0"] == "processes are still on it after job 1 left it"
    held = uses(card(0, used=3 * IDLE_BYTES), holders=left)
    assert held.refused["GPU-0"] == "3.0 GiB of its memory are in use after job 1 left it"
    assert held.total == {POOL: 1}
    gone = uses(card(0), holders=left)
    assert (gone.released, gone.free["a100"]) == (frozenset({"GPU-0"}), ("GPU-0",))


def test_cards_beyond_the_policys_number_are_left_alone() -> None:
    """Those that jobs hold are counted first, whatever the policy calls them now."""
    holder = {"GPU-5": Holder("1", frozenset(), ended=False)}
    found = uses(*(card(index) for index in range(6)), holders=holder, kinds={"GPU-5": "a100"})
    assert found.free["a100"] == ("GPU-0", "GPU-1", "GPU-2")
    assert set(found.refused) == {"GPU-3", "GPU-4"}


def test_a_display_server_keeps_no_card_from_being_used() -> None:
    """On a workstation it is on every card: its few bytes are those of a driver's own contexts."""
    drawn = card(0, drawing=frozenset({9}), used=IDLE_BYTES)
    assert uses(drawn).free["a100"] == ("GPU-0",)
    left = {"GPU-0": Holder("1", frozenset(), ended=True)}
    assert uses(drawn, holders=left).released == {"GPU-0"}


def test_a_card_that_does_not_answer_concerns_no_other() -> None:
    """It serves nobody, a spare one stands in for it, and who had it is not waited for."""
    seen = [card(index) for index in range(5)]
    seen[1] = card(1, lost=True, problem="it does not answer", pids=None, used=None)
    found = uses(*seen)
    assert found.free["a100"] == ("GPU-0", "GPU-2", "GPU-3", "GPU-4")
    assert found.total == {POOL: 4}
    assert set(found.refused) == {"GPU-1"}


def test_cards_are_read_from_the_driver_that_the_linker_finds(tmp_path: Path) -> None:
    """A real library: UUIDs, models, memory and processes; MIG mode; a driver that is gone."""
    scenario = tmp_path / "scenario"
    scenario.write_text(
        'card index=0 uuid=GPU-1 name="NVIDIA A100" memory=42949672960\n'
        'card index=1 uuid=GPU-2 name="NVIDIA A100" memory=42949672960 mig=1\n'
        'card index=2 uuid=GPU-3 name="NVIDIA A100" memory=42949672960 compute_mode=2\n'
        f"process card=0 pid={os.getpid()} memory=1073741824\n"
        "process card=1 pid=1 memory=4194304 kind=graphics\n"
    )
    program = (
        "import sys, time\n"
        "from gpuwarden.scheduling.local.cards import NvmlCards\n"
        "cards = NvmlCards()\n"
        "for each in cards.read(): print(each.uuid, each.model, each.used, sorted(each.pids or ()),"
        " sorted(each.drawing), each.whole, bool(each.problem))\n"
        "with open(sys.argv[1], 'a') as file: file.write('fault card=1 call=* code=15\\n')\n"
        "time.sleep(0.1)\n"
        "for each in cards.read(): print(each.uuid, each.lost, each.problem)\n"
        "cards.close()\n"
        "print(len(cards.read()))\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY / "src"),
        "LD_LIBRARY_PATH": str(simulated.build().parent),
        simulated.SCENARIO_VARIABLE: str(scenario),
    }
    command = [sys.executable, "-c", program, str(scenario)]
    answer = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.splitlines() == [
        f"GPU-1 NVIDIA A100 1073741824 [{os.getpid()}] [] True False",
        "GPU-2 NVIDIA A100 4194304 [] [1] False False",
        "GPU-3 NVIDIA A100 0 [] [] True True",
        "GPU-1 False ",
        "GPU-2 True it does not answer (GPU is lost): see dmesg for its Xid; it may want a reset",
        "GPU-3 False its compute mode lets nobody compute on it: nvidia-smi -c DEFAULT",
        "3",
    ]
    environment["LD_LIBRARY_PATH"] = str(tmp_path)
    gone = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "DriverUnavailable" in gone.stderr


def test_a_driver_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    """It is waited for once, and told at each look; when it comes back it is asked again."""
    scenario = tmp_path / "scenario"
    scenario.write_text(
        'card index=0 uuid=GPU-1 name="NVIDIA A100" memory=42949672960\n'
        "delay card=0 call=nvmlDeviceGetName milliseconds=600\n"
    )
    program = (
        "import time\n"
        "from gpuwarden.errors import DriverUnavailable\n"
        "from gpuwarden.scheduling.local.cards import NvmlCards\n"
        "cards = NvmlCards(patience=0.05)\n"
        "for _ in range(2):\n"
        "    try: print(cards.read())\n"
        "    except DriverUnavailable as error: print(error)\n"
        "cards.close()\n"
        "cards._reading.join()\n"
        "cards._patience = 60\n"
        "print(len(cards.read()))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY / "src"),
            "LD_LIBRARY_PATH": str(simulated.build().parent),
            simulated.SCENARIO_VARIABLE: str(scenario),
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    first, second, third = answer.stdout.splitlines()
    assert first.startswith("NVML has not answered for")
    assert second.startswith("NVML has not answered for")
    assert third == "1"
