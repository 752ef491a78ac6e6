from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
from tests.trainer.conftest import copy_by_pickle

from gpuwarden import job_files
from gpuwarden.job_files import LeaveRequest
from gpuwarden.trainer import leave_pending
from gpuwarden.trainer.leaving import SIGNALS, Leave, LeaveWatch, QuietWorker, job_ends_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def watch(clock: Any, jobs: Path) -> Iterator[LeaveWatch]:
    """A watch on this process's signals and the run's requests."""
    # Tests that a shell started in the background come with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    watch = LeaveWatch(clock)
    watch.observe(job_files.request_path(jobs, "run"), answered={"former"}, since=clock.wall())
    watch.install()
    yield watch
    watch.restore()
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def ask(jobs: Path, clock: Any) -> Callable[..., None]:
    """Writes a leave request as the agent does, and lets the next poll come."""

    def write(decision_id: str = "d1", **fields: Any) -> None:
        fields.setdefault("leave_by", clock.wall() + 60)
        request = LeaveRequest(decision_id, **fields)
        job_files.write(job_files.request_path(jobs, "run"), request.encode())
        clock.advance(1.0)

    return write


@pytest.mark.parametrize("number", SIGNALS)
def test_every_signal_only_sets_a_flag(watch: LeaveWatch, number: signal.Signals) -> None:
    """Outside the waits, a signal changes nothing but what the next boundary reads."""
    assert not watch.must_leave()
    signal.raise_signal(number)
    assert watch.must_leave()
    notice = watch.notice()
    assert notice is not None
    assert (notice.reason, notice.status) == (number.name, 75)


def test_what_others_make_of_a_leave_is_one(watch: LeaveWatch) -> None:
    """A class under construction, as in any import, turns what is raised in it into a fault."""

    class Named:
        def __set_name__(self, owner: type, name: str) -> None:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Leave), watch.interruptible():
        type("Owner", (), {"part": Named()})


def test_a_fault_beside_a_signal_stays_a_fault(watch: LeaveWatch) -> None:
    """It did not come of the signal, and would come again."""

    def fail() -> None:
        with watch.shielded():
            signal.raise_signal(signal.SIGTERM)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), watch.interruptible():
        fail()


def test_handlers_are_given_back() -> None:
    """After a training in Python, Ctrl-C is the program's again."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    watch = LeaveWatch()
    watch.install()
    assert signal.getsignal(signal.SIGINT) != before[signal.SIGINT]
    watch.restore()
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_a_long_wait_is_cut_short(watch: LeaveWatch) -> None:
    """Where nothing can be torn a signal leaves at once, and one that came before does too."""
    with pytest.raises(Leave), watch.interruptible():
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Leave), watch.interruptible():
        pytest.fail("a notice that stands is seen at the entry")


def test_a_shield_inside_a_wait_holds(watch: LeaveWatch) -> None:
    """A file written during set-up is written whole."""
    with watch.interruptible(), watch.shielded():
        signal.raise_signal(signal.SIGTERM)
    assert watch.must_leave()


@pytest.mark.usefixtures("watch")
def test_ctrl_c_three_times_gives_up(clock: Any) -> None:
    """A person can get out; signals that arrive together are one, whoever sent them."""
    for _ in range(5):
        signal.raise_signal(signal.SIGINT)
    clock.advance(6)
    signal.raise_signal(signal.SIGINT)
    clock.advance(6)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_the_request_decides_the_exit_status(watch: LeaveWatch, ask: Callable[..., None]) -> None:
    """`then: hold` wins over the bare signal of the ladder, whichever comes first."""
    signal.raise_signal(signal.SIGTERM)
    assert watch.leaving_status() == 75
    ask(then="hold", reason="rule idle")
    watch.reread()
    notice = watch.notice()
    assert notice is not None
    assert (notice.status, notice.decision_id, notice.reason) == (76, "d1", "SIGTERM")


def test_a_request_is_read_once_a_second(watch: LeaveWatch, ask: Callable[..., None]) -> None:
    """Polling costs a file lookup a second, however fast the steps are."""
    assert watch.notice() is None
    ask(reason="the card is needed")
    notice = watch.notice()
    assert notice is not None
    assert (notice.reason, notice.at, notice.status) == ("the card is needed", "step", 75)


def test_at_epoch_waits_for_the_epoch_but_not_past_the_deadline(
    watch: LeaveWatch, ask: Callable[..., None], clock: Any
) -> None:
    """An epoch that would end too late is given up for a save in time."""
    ask(at="epoch", leave_by=clock.wall() + 60)
    assert not watch.must_leave(margin=5)
    assert watch.must_leave(epoch_ended=True)
    clock.advance(55)
    assert watch.must_leave(margin=5)


def test_a_signal_shortens_a_wait_for_the_epoch(
    watch: LeaveWatch, ask: Callable[..., None]
) -> None:
    """The ladder's next step is not to be waited out."""
    ask(at="epoch", then="hold")
    assert not watch.must_leave()
    signal.raise_signal(signal.SIGTERM)
    assert watch.must_leave()
    assert watch.leaving_status() == 76


def test_a_patient_notice_lets_the_epoch_end(clock: Any) -> None:
    """Neither a boundary nor a wait for a batch is the place to leave; the epoch's end is."""
    watch = LeaveWatch(clock, on_signal="epoch")
    watch.install()
    try:
        watch.disarm()
        with watch.interruptible():
            signal.raise_signal(signal.SIGUSR1)
        assert not watch.must_leave(margin=5)
        assert watch.must_leave(epoch_ended=True)
        assert watch.leaving_status() == 75
    finally:
        watch.restore()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_end_that_comes_after_a_patient_notice_is_obeyed(
    clock: Any, number: signal.Signals
) -> None:
    """The scheduler's grace is over, or a person has had enough: the epoch is given up."""
    watch = LeaveWatch(clock, on_signal="epoch")
    watch.install()
    try:
        watch.disarm()
        signal.raise_signal(signal.SIGUSR2)
        assert not watch.must_leave()
        with pytest.raises(Leave), watch.interruptible():
            signal.raise_signal(number)
        assert watch.must_leave()
        notice = watch.notice()
        assert notice is not None
        assert (notice.reason, notice.at) == ("SIGUSR2", "step")
    finally:
        watch.restore()


def test_a_patient_notice_in_set_up_is_obeyed_at_once(clock: Any) -> None:
    """Nothing has begun that would be worth an epoch of waiting."""
    watch = LeaveWatch(clock, on_signal="epoch")
    watch.install()
    try:
        with pytest.raises(Leave), watch.interruptible():
            signal.raise_signal(signal.SIGUSR1)
    finally:
        watch.restore()


def test_patience_ends_before_the_job_does(clock: Any) -> None:
    """The notice of a time limit may come too late for the epoch: the state is saved in time."""
    watch = LeaveWatch(clock, on_signal="epoch", ends_at=clock.wall() + 60)
    watch.install()
    try:
        watch.disarm()
        signal.raise_signal(signal.SIGUSR1)
        assert not watch.must_leave(margin=5)
        clock.advance(55)
        assert watch.must_leave(margin=5)
    finally:
        watch.restore()


def test_slurm_says_when_a_job_ends() -> None:
    """What is no time is none, whoever has set it."""
    assert job_ends_at({"SLURM_JOB_END_TIME": "1796039456"}) == 1796039456.0
    for said in ("", "Unknown", "-1", "nan", "١٢", "9" * 400):
        assert job_ends_at({"SLURM_JOB_END_TIME": said}) is None
    assert job_ends_at({}) is None


def test_a_request_for_the_step_ends_a_patient_notice(jobs: Path, clock: Any) -> None:
    """Whoever asks twice may have become more urgent."""
    watch = LeaveWatch(clock, on_signal="epoch")
    watch.observe(job_files.request_path(jobs, "run"), answered=set(), since=clock.wall())
    watch.install()
    try:
        watch.disarm()
        signal.raise_signal(signal.SIGUSR1)
        assert not watch.must_leave()
        request = LeaveRequest("d1", clock.wall() + 60, at="step")
        job_files.write(job_files.request_path(jobs, "run"), request.encode())
        watch.reread()
        assert watch.must_leave()
    finally:
        watch.restore()


@pytest.mark.parametrize("fields", [{"decision_id": "former"}, {"leave_by": 1.0}])
def test_a_request_to_a_former_attempt_is_not_obeyed(
    watch: LeaveWatch, ask: Callable[..., None], fields: dict[str, Any]
) -> None:
    """A requeued job must not leave again because of the file that made it leave."""
    ask(**fields)
    assert watch.notice() is None


def test_a_withdrawn_request_is_forgotten(
    watch: LeaveWatch, ask: Callable[..., None], jobs: Path, clock: Any
) -> None:
    """The agent takes the file away when the engine has changed its mind."""
    ask()
    assert watch.must_leave()
    job_files.request_path(jobs, "run").unlink()
    clock.advance(1)
    assert not watch.must_leave()


def test_continue_asks_for_a_state_only(watch: LeaveWatch, ask: Callable[..., None]) -> None:
    """`then: continue` is seen as a request but never as a reason to leave."""
    ask(then="continue")
    assert watch.request() is not None
    assert not watch.must_leave()
    watch.answer("d1")
    assert watch.request() is None


def test_a_broken_request_is_reported_once(
    watch: LeaveWatch, jobs: Path, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that does not decode neither ends the training nor fills its log."""
    job_files.request_path(jobs, "run").write_text("{", "utf-8")
    for _ in range(3):
        clock.advance(1)
        assert watch.notice() is None
    assert len(caplog.records) == 1


def test_others_can_ask_whether_to_leave(watch: LeaveWatch) -> None:
    """A user's own waits end early through `leave_pending`."""
    assert not leave_pending()
    signal.raise_signal(signal.SIGUSR1)
    assert leave_pending()
    watch.restore()
    assert not leave_pending()


def test_workers_ignore_the_signals_and_keep_their_own_initialiser() -> None:
    """It survives pickling, for the spawn and forkserver start methods."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    quiet = copy_by_pickle(QuietWorker(chr))
    try:
        with pytest.raises(ValueError, match="chr"):
            quiet(-1)
        assert all(signal.getsignal(number) == signal.SIG_IGN for number in SIGNALS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
