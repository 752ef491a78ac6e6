from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from gpuwarden.errors import InvalidInput
from gpuwarden.trainer.settings import TrainSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuwarden.trainer.resume import Plan

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    """Plans a command; `begin` leaves the record that its attempt would leave."""
    from gpuwarden.trainer import resume  # noqa: PLC0415 -- after the environment is set

    clock = iter(range(1, 100))

    def make(
        *,
        begin: bool = False,
        finished: bool = False,
        saved: bool = True,
        options: dict[str, Any] | None = None,
        **words: Any,
    ) -> Plan:
        settings = TrainSettings(**(options or {}))
        said = {"model": "yolov8n.yaml", "data": "d.yaml", "project": tmp_path, **words}
        made = resume.plan(settings, said, task="detect", now=float(next(clock)))
        if begin:
            made.folder.mkdir(parents=True, exist_ok=True)
            end = 99.0 if finished else None
            dataclasses.replace(made.record, finished=end).write(made.folder)
            if saved:
                (made.folder / "000001.json").write_text("{}", "utf-8")
        return made

    return make


AUTO = {"resume": "auto"}


def test_a_new_run_gets_a_name_and_a_folder_of_its_own(plan: Callable[..., Plan]) -> None:
    """As with `yolo train`: train, train-2, and ids that no other run has."""
    first, second = plan(begin=True), plan(begin=True)
    assert (first.save_dir.name, second.save_dir.name) == ("train", "train-2")
    assert first.record.run_id.startswith("yolov8n-")
    assert first.record.run_id != second.record.run_id
    assert first.fresh
    assert second.fresh


def test_auto_finds_the_newest_run_with_the_same_words(plan: Callable[..., Plan]) -> None:
    """Words that do not change what is learnt may differ, such as the device."""
    plan(begin=True)
    second = plan(begin=True)
    third = plan(begin=True, epochs=7)
    found = plan(options=AUTO, device="cpu", workers=3)
    assert (found.record, found.fresh) == (second.record, False)
    assert plan(options=AUTO, epochs=7).record == third.record


def test_auto_starts_where_nothing_was_started(plan: Callable[..., Plan]) -> None:
    """So that the same job script serves the first attempt and all others."""
    plan(begin=True)
    assert plan(options=AUTO, name="other").fresh
    assert plan(options={"run_id": "exp1"}).record.run_id == "exp1"


def test_other_words_are_refused_by_name(plan: Callable[..., Plan]) -> None:
    """A run is not continued as something else, nor silently started anew."""
    plan(begin=True, epochs=3)
    with pytest.raises(InvalidInput, match=r"epochs=5 instead of 3.*--resume never"):
        plan(options=AUTO, epochs=5)
    plan(begin=True, options={"run_id": "exp1"}, batch=16)
    with pytest.raises(InvalidInput, match=r"batch=8 instead of 16"):
        plan(options={"run_id": "exp1"}, batch=8)
    assert plan(options={"run_id": "exp1", "resume": "never"}, batch=8).fresh


@pytest.mark.parametrize("options", [AUTO, {"run_id": "exp1"}])
def test_a_run_that_has_learnt_nothing_takes_other_words(
    plan: Callable[..., Plan], options: dict[str, Any]
) -> None:
    """A word that was wrong is put right in the same command, and not refused for having been."""
    first = plan(begin=True, saved=False, options=options, optimizer="Adan")
    again = plan(options=options, optimizer="AdamW")
    assert (again.record, again.fresh) == (first.record, False)
    assert again.words["optimizer"] == "AdamW"


def test_a_complete_run_is_found_complete(plan: Callable[..., Plan]) -> None:
    """The same words again have nothing to do; other words are another training."""
    plan(begin=True, finished=True, epochs=3)
    assert plan(options=AUTO, epochs=3).record.finished == 99
    assert plan(options=AUTO, epochs=5).fresh


def test_a_run_id_is_found_under_any_name(plan: Callable[..., Plan]) -> None:
    """The id is the run's, the folder's name only its place in the project."""
    first = plan(begin=True, options={"run_id": "exp1"}, name="a")
    assert plan(options={"run_id": "exp1"}, name="b").save_dir == first.save_dir


def test_this_version_of_ultralytics_is_known() -> None:
    """The tests ran against it: exact resume must not be lost to a forgotten digest."""
    from gpuwarden.trainer import resume  # noqa: PLC0415 -- see plan

    assert {resume.loop_digest(task) for task in resume.EXACT_TASKS} == set(resume.KNOWN_LOOPS)
