"""The launcher of ranks, with real processes that train nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.trainer.conftest import REPOSITORY, wait_for

from gpuwarden.errors import InvalidInput
from gpuwarden.trainer import launching, ranks
from gpuwarden.trainer.cli import train

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LAUNCH = """\
import logging, sys
from gpuwarden.trainer.launching import Launcher
logging.basicConfig(level="INFO", format="gpuwarden: %(message)s")
command = [sys.executable, "-m", "tests.trainer.rank"]
sys.exit(Launcher(command, ("cpu",) * int(sys.argv[1]), float(sys.argv[2]), patience=0.5).run())
"""


class Launched:
    """A launcher and what its ranks have left in the folder."""

    def __init__(self, folder: Path, roles: tuple[str, ...], grace: float) -> None:
        self.folder, self._roles = folder, roles
        for number, role in enumerate(roles):
            (folder / str(number)).write_text(role, "utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(len(roles)), str(grace)],
            cwd=REPOSITORY,
            env={**os.environ, "TEST_FOLDER": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def pids(self) -> list[int]:
        """All ranks that wait, and their children, once every one of them waits."""
        waiting = [
            self.folder / f"{number}.pids"
            for number, role in enumerate(self._roles)
            if "wait" in role or "deaf" in role
        ]
        wait_for(lambda: all(file.exists() for file in waiting))
        return [int(pid) for file in waiting for pid in file.read_text("utf-8").split()]

    def end(self) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Starts a launcher whose ranks have the roles given."""
    started: list[Launched] = []

    def start(*roles: str, grace: float = 30.0) -> Launched:
        started.append(Launched(tmp_path, roles, grace))
        return started[-1]

    yield start
    for item in started:
        if item.process.poll() is None:
            item.process.kill()
        item.process.communicate()


def _alive(pids: list[int]) -> list[int]:
    living = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            living.append(pid)
    return living


@pytest.mark.parametrize("code", [0, 1, 2, 76])
def test_rank_0_speaks_for_the_training(launch: Callable[..., Launched], code: int) -> None:
    """Its status is the training's, so that a scheduler sees what one process would have said."""
    other = 75 if code in (76, 77) else code
    status, _out, err = launch(f"exit:{code}", f"exit:{other}").end()
    assert status == code, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher_reaches_every_rank(
    launch: Callable[..., Launched], number: signal.Signals
) -> None:
    """Each in a group of its own, they would not get it otherwise."""
    launched = launch("wait exit:75", "wait exit:75")
    pids = launched.pids()
    assert len({os.getpgid(pid) for pid in pids}) == 2
    launched.process.send_signal(number)
    assert launched.end()[0] == 75
    heard = {(launched.folder / f"{rank}.heard").read_text("utf-8") for rank in (0, 1)}
    assert heard == {number.name}


def test_a_signal_meets_ranks_that_end_at_that_moment(launch: Callable[..., Launched]) -> None:
    """One that has ended just before is not lost sight of: its status is the training's."""
    launched = launch("wait exit:76", "wait exit:75")
    launched.pids()
    deadline = time.monotonic() + 30
    while launched.process.poll() is None and time.monotonic() < deadline:
        launched.process.send_signal(signal.SIGTERM)  # without a pause, until all has ended
    status, _out, err = launched.end()
    assert status == 76, err


def test_a_signal_that_comes_too_early_waits(launch: Callable[..., Launched]) -> None:
    """A rank that does not handle signals yet is not killed by one: it gets it when it does."""
    launched = launch("slow wait exit:75", "slow wait exit:75")
    wait_for((launched.folder / "1.started").exists)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 75


@pytest.mark.parametrize(
    ("told", "code"), [("", 77), ("durable", 75), ("durable hold", 76), ("hold", 77)]
)
def test_ranks_that_do_not_leave_in_time_are_killed(
    launch: Callable[..., Launched], told: str, code: int
) -> None:
    """The status tells whether a state is there to go on from, and whether to hold the job."""
    launched = launch(f"{told} child deaf", "deaf", grace=1.0)
    pids = launched.pids()
    launched.process.send_signal(signal.SIGTERM)
    status, _out, err = launched.end()
    assert (status, _alive(pids)) == (code, []), err
    assert "SIGTERM, and 1 s later it had not left" in err


@pytest.mark.parametrize("left", ["die", "exit:3"])
def test_a_rank_that_fails_takes_the_others_down(
    launch: Callable[..., Launched], left: str
) -> None:
    """They would wait for it for good, and hold their cards meanwhile."""
    launched = launch("durable child deaf", f"wait {left}", "deaf")
    pids = launched.pids()
    os.kill(pids[2], signal.SIGUSR1)  # after rank 0 and its child
    status, _out, err = launched.end()
    assert (status, _alive(pids)) == (1 if left == "die" else 3, []), err
    named = "SIGKILL" if left == "die" else "status 3"
    assert f"rank 1 ended with {named}" in err
    assert "goes on from the newest" in err


@pytest.mark.parametrize("code", [0, 75])
def test_nobody_waits_for_rank_0_when_it_has_ended(
    launch: Callable[..., Launched], code: int
) -> None:
    """A rank that hangs at its end, in a communicator say, does not hold its card for good."""
    launched = launch(f"wait exit:{code}", "child deaf")
    pids = launched.pids()
    os.kill(pids[0], signal.SIGUSR1)
    status, _out, err = launched.end()
    assert (status, _alive(pids)) == (code, []), err
    assert "rank 0 has ended" in err


def test_a_rank_told_alone_takes_the_others_along(launch: Callable[..., Launched]) -> None:
    """One that leaves where it need not ask the others: they are asked then."""
    launched = launch("wait exit:76", "wait exit:75")
    os.kill(launched.pids()[1], signal.SIGUSR2)
    assert launched.end()[0] == 76
    assert (launched.folder / "0.heard").read_text("utf-8") == "SIGTERM"


def test_ranks_outlive_a_killed_launcher_only_to_leave(launch: Callable[..., Launched]) -> None:
    """They are told by the kernel; one that does not heed it is gone with its children in time."""
    launched = launch("wait exit:75", "child deaf", grace=3.0)
    pids = launched.pids()
    launched.process.kill()
    wait_for(lambda: not _alive(pids), seconds=10)
    assert (launched.folder / "0.heard").read_text("utf-8") == "SIGTERM"


def test_no_child_of_a_rank_is_left(launch: Callable[..., Launched]) -> None:
    """A loader worker that hangs neither holds the card nor the job's cgroup."""
    launched = launch("child wait exit:75", "child wait exit:75")
    pids = launched.pids()
    launched.process.terminate()
    assert launched.end()[0] == 75
    wait_for(lambda: not _alive(pids))


def test_it_is_told_which_rank_speaks(launch: Callable[..., Launched]) -> None:
    """Standard output is rank 0's as it is: progress bars and the log's growth are of it."""
    status, out, err = launch("print:progress say:mine exit:0", "print:other say:its exit:0").end()
    assert (status, out) == (0, "progress\n")
    lines = err.splitlines()
    assert "[rank 0] mine" in lines
    assert {"[rank 1] other", "[rank 1] its"} <= set(lines)


@pytest.mark.sweep
def test_ctrl_c_three_times_gives_up(launch: Callable[..., Launched]) -> None:
    """Further apart than an agent and a launcher would repeat one, as with one process."""
    launched = launch("deaf", "deaf")
    pids = launched.pids()
    for number in range(3):
        if number:
            with pytest.raises(subprocess.TimeoutExpired):
                launched.process.wait(timeout=5.5)
        launched.process.send_signal(signal.SIGINT)
    assert (launched.end()[0], _alive(pids)) == (130, [])


@pytest.mark.parametrize(
    ("words", "nproc", "devices"),
    [
        (["device=0,1"], None, ("0", "1")),
        (["device=cuda:2,3"], None, ("2", "3")),
        (["--device=[1, 0]"], None, ("1", "0")),
        (["device", "=", "0,1"], None, ("0", "1")),
        (["device=", "0,1"], None, ("0", "1")),
        (["device=0,1", "device=0"], None, ()),
        (["device=0"], None, ()),
        (["model=a.yaml"], None, ()),
        (["model=a.yaml"], 2, ("0", "1")),
        (["device=3,1"], 2, ("3", "1")),
        (["device=cpu"], 2, ("cpu", "cpu")),
        (["device=cpu"], 1, ()),
        (["device=mps"], None, ()),
    ],
)
def test_devices_are_understood_as_ultralytics_understands_them(
    words: list[str], nproc: int | None, devices: tuple[str, ...]
) -> None:
    """One process unless several cards are named, or --nproc says so."""
    assert launching.devices_of(words, nproc) == devices


@pytest.mark.parametrize(
    ("words", "nproc", "complaint"),
    [
        (["device=0,0"], None, "names a card twice"),
        (["device=0,1"], 3, "one process per card"),
        (["device=npu:0,1"], None, "named by number"),
        (["device=mps"], 2, "named by number"),
        (["device=-1,-1"], None, "named by number"),
    ],
)
def test_devices_that_make_no_sense_are_refused(
    words: list[str], nproc: int | None, complaint: str
) -> None:
    """Before torch is imported, and before anything is written."""
    with pytest.raises(InvalidInput, match=complaint):
        launching.devices_of(words, nproc)


def test_a_rank_sees_no_card_but_its_own() -> None:
    """So that it cannot hold memory on another's; the cards given to the job are counted from 0."""
    given = {"CUDA_VISIBLE_DEVICES": "4, GPU-5a,6", "OMP_NUM_THREADS": "3"}
    made = launching.rank_environment(("2", "1"), 1, port=7, environ=given)
    assert made["CUDA_VISIBLE_DEVICES"] == "GPU-5a"
    assert (made["RANK"], made["WORLD_SIZE"], made["MASTER_PORT"]) == ("1", "2", "7")
    assert made["OMP_NUM_THREADS"] == "3"
    alone = launching.rank_environment(("0", "3"), 1, port=7, environ={})
    assert alone["CUDA_VISIBLE_DEVICES"] == "3"
    with pytest.raises(InvalidInput, match=r"names 3 card\(s\), counted from 0"):
        launching.rank_environment(("2", "3"), 1, port=7, environ=given)


def test_ranks_get_the_command_as_it_was_typed() -> None:
    """Defaults and what the environment says come to them by themselves."""
    typed = ["--run-id", "exp1", "--nproc=2", "--checkpoint-every", "90s", "--resume=auto"]
    context = train.make_context("train", [*typed, "model=a b.yaml", "--epochs=3"])
    options = list(launching.options_said(context))
    assert sorted(options) == sorted(
        ["--run-id=exp1", "--nproc=2", "--checkpoint-every=90s", "--resume=auto"]
    )
    command = launching.rank_command(options, context.params["words"])
    again = train.make_context("train", command[command.index("train") + 1 :])
    assert again.params == context.params


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"WORLD_SIZE": "2"}, "variables cannot be understood"),
        ({"WORLD_SIZE": "2", "RANK": "x"}, "variables cannot be understood"),
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "one node"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "not one of"),
    ],
)
def test_other_launchers_variables_are_checked(said: dict[str, str], complaint: str) -> None:
    """A rank that misunderstood its place would wait for the others for good."""
    with pytest.raises(InvalidInput, match=complaint):
        ranks.Place.of(said)
    assert ranks.Place.of({"WORLD_SIZE": "1", "RANK": "0"}) == ranks.Place()
    assert ranks.Place.of({"WORLD_SIZE": "2", "RANK": "1"}) == ranks.Place(1, 2)
