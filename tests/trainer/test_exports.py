"""The trained model in other formats, as a phase of the training."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from gpuwarden.errors import InvalidInput
from gpuwarden.trainer import LeftTraining, exports

if TYPE_CHECKING:
    from tests.trainer.trainings import Trainings

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]


def test_an_unknown_format_is_refused_before_the_training() -> None:
    """Not after days, when the model is there."""
    with pytest.raises(InvalidInput, match=r"'onix' is none of .*onnx"):
        exports.check(["onix"])
    exports.check(["onnx", "engine"])


def test_an_export_that_is_cut_short_is_done_by_the_next_attempt(trainings: Trainings) -> None:
    """Without training anything again; and only then is the run complete."""
    from ultralytics.engine.exporter import Exporter  # noqa: PLC0415 -- after its environment

    def leave(_exporter: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exporter, "export_torchscript", leave)
        with pytest.raises(LeftTraining) as left:
            trainings.attempt("run", {"epochs": 1}, export="torchscript")
    assert left.value.code == 75
    trainer = trainings.attempt("run", {"epochs": 1}, export="torchscript")
    status = trainings.status("run")
    assert status.counters.steps == 0
    assert status.counters.phase_seconds["export"] > 0
    assert status.phase == "done"
    assert trainer.best.with_suffix(".torchscript").exists()
