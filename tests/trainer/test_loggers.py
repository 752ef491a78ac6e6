"""Experiment trackers over several attempts; stand-ins have the calls that ultralytics makes.

Against the real ones (wandb 0.31, mlflow 3.17, offline) the same was seen by hand: one run each
over a SIGTERM, with an entry for every epoch.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpuwarden.trainer import loggers
from gpuwarden.trainer.runs import RunRecord

RECORD = RunRecord("exp1", "abc", {}, 1.0)


class Tracker(ModuleType):
    """Stands in for wandb and mlflow."""

    def __init__(self) -> None:
        super().__init__("tracker")
        self.begun: list[dict[str, Any]] = []
        self.logged: dict[str, Any] = {}
        self.run: Any = None

    def init(self, **chosen: Any) -> None:
        """Of wandb."""
        self.begun.append(chosen)

    def get_run(self, run_id: str) -> Any:
        """Of mlflow."""
        if run_id != "m1":
            raise LookupError(run_id)
        return SimpleNamespace(data=SimpleNamespace(params=dict(self.logged)))

    def active_run(self) -> Any:
        """Of mlflow."""
        return self.run

    def start_run(self) -> None:
        """Of mlflow, which reads and removes the variable."""
        run_id = os.environ.pop("MLFLOW_RUN_ID", "m1")
        self.begun.append({"id": run_id})
        self.run = SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def log_params(self, params: dict[str, Any]) -> None:
        """Of mlflow, which refuses to change one."""
        for name, value in params.items():
            if self.logged.setdefault(name, value) != value:
                raise ValueError(name)


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Tracker:
    """Both of them, imported."""
    made = Tracker()
    monkeypatch.setitem(sys.modules, "wandb", made)
    monkeypatch.setitem(sys.modules, "mlflow", made)
    for name in ("WANDB_RUN_ID", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return made


def test_wandb_continues_the_run_of_that_name(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another lineage is another run; a user's own choice stands; outside nothing is changed."""
    with loggers.one_run(RECORD):
        tracker.init(project="p", id="by the clock", resume=None)
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    with loggers.one_run(RECORD):
        tracker.init(project="p")
    tracker.init(id="another")
    assert tracker.begun == [
        {"project": "p", "id": "exp1-abc", "resume": "allow"},
        {"project": "p", "id": "mine", "resume": "allow"},
        {"id": "another"},
    ]


def test_mlflow_continues_the_run_that_was_noted(tracker: Tracker) -> None:
    """Although the device, one of its parameters, is another in this attempt."""
    with loggers.one_run(RECORD) as noted:
        tracker.start_run()
        tracker.log_params({"lr0": 0.1, "device": "0"})
    assert noted == {"mlflow": "m1"}
    record = RunRecord("exp1", "abc", {}, 1.0, loggers=noted)
    with loggers.one_run(record) as again:
        tracker.start_run()
        tracker.log_params({"lr0": 0.1, "device": "1", "new": 3})
    assert again == noted
    assert [begun["id"] for begun in tracker.begun] == ["m1", "m1"]
    assert tracker.logged == {"lr0": 0.1, "device": "0", "new": 3}
    assert "MLFLOW_RUN_ID" not in os.environ


def test_a_run_that_was_deleted_there_is_begun_anew(
    tracker: Tracker, caplog: pytest.LogCaptureFixture
) -> None:
    """Rather than a training without its tracker."""
    record = RunRecord("exp1", "abc", {}, 1.0, loggers={"mlflow": "gone"})
    with loggers.one_run(record) as noted:
        tracker.start_run()
    assert noted == {"mlflow": "m1"}
    assert "MLflow run gone cannot be continued" in caplog.text


def test_without_trackers_nothing_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing imported: both take seconds."""
    for name in ("wandb", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with loggers.one_run(RECORD) as noted:
        pass
    assert noted == {}
    loggers.leaving()
    assert "wandb" not in sys.modules


def test_an_attempt_that_leaves_is_called_preempted(tracker: Tracker) -> None:
    """What its tracker says of it must not stop the training from leaving."""
    told: list[str] = []
    tracker.run = SimpleNamespace(mark_preempting=lambda: told.append("preempting"))
    loggers.leaving()
    assert told == ["preempting"]
    tracker.run = SimpleNamespace(mark_preempting=lambda: 1 / 0)
    loggers.leaving()
