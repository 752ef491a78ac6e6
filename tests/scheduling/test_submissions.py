"""What becomes of what somebody asks for: a task, or a no that says what would be possible."""

from __future__ import annotations

import dataclasses
import zoneinfo
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scheduling.policy_files import NOW, a_policy

from gpuwarden.errors import InvalidInput, RefusedAction
from gpuwarden.estimates import GIB, Range, Unknown
from gpuwarden.schedule_api import BudgetEntry
from gpuwarden.scheduling import submission_texts, trainings
from gpuwarden.scheduling.estimations import Fit
from gpuwarden.scheduling.submissions import Asked, Plan, budget_doubts, plan, read
from gpuwarden.scheduling.tasks import Foreseen, SubmittedJob, Task
from gpuwarden.training_profiles import Profile

if TYPE_CHECKING:
    from gpuwarden.scheduling.policies import Policy

ZONE = zoneinfo.ZoneInfo("Europe/Berlin")
A100 = "NVIDIA A100-SXM4-40GB"


def ask(
    *words: str,
    policy: Policy | None = None,
    profiles: tuple[Profile, ...] = (),
    **said: Any,
) -> Plan:
    """The plan for what ana of team vision asks for."""
    asked = Asked(**{"words": words, "user": "ana", "directory": "/home/ana"} | said)
    return plan(asked, read(asked), policy or a_policy(), profiles=profiles, now=NOW)


def refused(*words: str, **said: Any) -> tuple[str, str]:
    """Reason and text of the no."""
    with pytest.raises(RefusedAction) as caught:
        ask(*words, **said)
    return caught.value.reason, str(caught.value)


def profile(**changes: Any) -> Profile:
    """What yolov8m is known to need on an A100."""
    return Profile.model_validate(
        {"model": "yolov8m", "batch": 64, "imgsz": 640, "hardware": A100}
        | {"gpu_memory": "20GiB", "throughput": "200 img/s", "tolerance": "10%"}
        | changes
    )


def test_the_cheapest_card_that_has_room_is_taken() -> None:
    """A batch that the upper end of its memory does not fit goes to the next."""
    small = ask("model=yolov8m", "data=coco.yaml", "batch=64")
    assert (small.chosen.kind.name, small.why_card) == ("a100-40", "the cheapest")
    large = ask("model=yolov8m", "data=coco.yaml", "batch=96")
    assert large.estimates[0].fit is Fit.TIGHT
    assert large.chosen.kind.name == "h100-80"
    assert "a100-40 has no room" in large.why_card


def test_a_task_carries_what_engines_need() -> None:
    """Memory and time at the upper end of what is expected, the image by its digest."""
    found = ask("model=yolov8m", "data=coco.yaml", "batch=64", gpus=2, window="off-peak")
    task, chosen = found.task, found.chosen
    assert isinstance(chosen.memory, Range)
    assert isinstance(chosen.epoch_seconds, Range)
    assert isinstance(chosen.training_seconds, Range)
    assert (task.team, task.priority, task.window) == ("vision", "normal", "off-peak")
    assert task.memory_bytes == chosen.memory.high
    assert task.epoch_seconds == chosen.epoch_seconds.high
    assert task.time_limit_seconds is not None
    assert chosen.training_seconds.high < task.time_limit_seconds
    assert task.time_limit_seconds % 300 == 0
    assert task.image is None
    assert task.command[-1] == "device=0,1"
    assert "--on-signal=epoch" in task.command
    assert Task.from_document(task.as_document()) == task


def test_an_image_is_chosen_where_jobs_run_in_images() -> None:
    """On Kubernetes, and on a Slurm whose policy says how; elsewhere only if it is asked for."""
    words = ("model=yolov8m", "data=100")
    assert "@sha256:" in (ask(*words, engine="kueue").task.image or "")
    contained = a_policy(slurm={"container": ["apptainer", "exec", "{image}"]})
    assert ask(*words, policy=contained).task.image is not None
    assert ask(*words, policy=contained, engine="local").task.image is None
    assert ask(*words, image="yolo:m-cu124").task.image is not None


def test_a_budget_that_would_be_spent_is_told() -> None:
    """Only the team's own, and only where it does not suffice."""

    def entry(team: str, per: str, *, used: float | None, kind: str = "hard") -> BudgetEntry:
        return BudgetEntry(team, per, 100.0, kind, NOW, NOW + 1, used=used)

    budgets = [
        entry("vision", "month", used=95.0),
        entry("vision", "day", used=95.0, kind="soft"),
        entry("vision", "week", used=1.0),
        entry("vision", "year", used=None),
        entry("speech", "month", used=200.0),
    ]
    told = budget_doubts(budgets, team="vision", hours=Range(5.0, 10.0, 20.0))
    assert [line.partition(":")[0] for line in told] == [
        "hard budget of the month",
        "soft budget of the day",
    ]
    assert "95.0 of 100.0 GPU-hours are used, and this takes about 10.0" in told[0]
    assert budget_doubts(budgets, team="vision", hours=None) == ()


def test_what_has_no_room_anywhere_is_refused_with_what_would() -> None:
    """Batches for each card, and a smaller model of the family."""
    reason, text = refused("model=yolov8x", "data=coco.yaml", "batch=256")
    assert reason == "memory"
    assert "a100-40 (39.5 GiB): batch=" in text
    assert "h100-80 (79.2 GiB): batch=" in text
    assert "yolov8s with the same batch" in text


@pytest.mark.parametrize(
    "card",
    [
        "a100-40",
        "h100-80",
    ],
)
def test_the_batch_that_is_offered_is_taken(card: str) -> None:
    """What a refusal names is then accepted."""
    _reason, text = refused("model=yolov8x", "data=coco.yaml", "batch=256", card=card)
    line = next(line for line in text.splitlines() if line.strip().startswith(card))
    batch = line.rpartition("batch=")[2]
    assert ask("model=yolov8x", "data=coco.yaml", f"batch={batch}").chosen.fit is Fit.YES


def test_a_card_that_was_said_is_taken_with_its_doubts() -> None:
    """What may not fit is the user's choice; what cannot is not."""
    found = ask("model=yolov8m", "data=coco.yaml", "batch=96", card="a100-40")
    assert found.chosen.fit is Fit.TIGHT
    assert any("may have no room" in warning for warning in found.warnings)
    assert any("is sure to have room" in line for line in found.advice)
    reason, text = refused("model=yolov8m", "data=coco.yaml", "batch=160", card="a100-40")
    assert reason == "memory"
    assert "--card h100-80" in text


def test_of_what_is_unknown_nothing_is_guessed() -> None:
    """Card and time have to be said; then it is submitted, and marked."""
    words = ("model=yolo99q", "data=coco.yaml")
    reason, text = refused(*words)
    assert reason == "unknown"
    assert "UNKNOWN" in text
    assert "--card and --time" in text
    reason, text = refused(*words, card="a100-40")
    assert reason == "unknown"
    assert "--time" in text
    found = ask(*words, card="a100-40", time_limit=7200.0)
    assert found.task.time_limit_seconds == 7200.0
    assert found.task.memory_bytes is None
    assert any("UNKNOWN whether it has room" in warning for warning in found.warnings)


def test_an_unknown_card_has_no_speed_but_a_memory() -> None:
    """The policy says its memory; how fast it is nobody knows."""
    cards = [{"name": "own", "model": "ACME 9000", "memory": "40GiB", "count": 4}]
    teams = [{"name": "vision", "users": ["ana"], "quota": {"own": 4}}]
    policy = a_policy(cards=cards, teams=teams, budgets=[], engine="local")
    reason, text = refused("model=yolov8m", "data=coco.yaml", "batch=16", policy=policy)
    assert reason == "unknown"
    assert "ACME 9000" in text
    found = ask("model=yolov8m", "data=coco.yaml", policy=policy, time_limit=3600.0)
    assert found.chosen.fit is Fit.YES
    assert isinstance(found.chosen.images, Unknown)


def test_a_data_set_that_cannot_be_counted_needs_a_time() -> None:
    """Without images there is no epoch."""
    reason, text = refused("model=yolov8m")
    assert reason == "unknown"
    assert "data=" in text
    assert ask("model=yolov8m", time_limit=3600.0).chosen.fit is Fit.YES


def test_a_signal_means_what_the_policy_says() -> None:
    """Its notice lets an epoch end, unless the policy or the user wants less."""
    words = ("model=yolov8m", "data=100")
    assert ask(*words).task.options == ("--on-signal=epoch",)
    said = ("--on-signal=step",)
    assert ask(*words, options=said).task.options == said
    at_once = {"minimum_run": "30m", "notice": "step", "deadline": "20m", "back_off": "30m"}
    at_once |= {"at_most": {"times": 3, "per": "24h"}}
    assert ask(*words, policy=a_policy(preemption=at_once)).task.options == ()


def test_a_deadline_passes_over_what_is_too_slow() -> None:
    """By the upper end of what is expected."""
    words = ("model=yolov8m", "data=coco.yaml", "batch=64")
    found = ask(*words, deadline=NOW + 18 * 3600)
    assert found.chosen.kind.name == "h100-80"
    assert "a100-40 takes too long" in found.why_card
    reason, text = refused(*words, deadline=NOW + 3600)
    assert reason == "deadline"
    assert "h100-80" in text


def test_a_batch_of_its_own_choice_is_fixed() -> None:
    """A resumed run on another card would else be another training."""
    found = ask("model=yolov8m", "data=coco.yaml", "batch=-1", "epochs=3")
    batch = found.task.word("batch")
    assert batch is not None
    assert found.chosen.batch == int(batch)
    assert isinstance(found.chosen.memory, Range)
    assert found.chosen.memory.high <= 0.6 * found.chosen.offered
    assert [word for word in found.task.words if word.startswith("batch=")] == [f"batch={batch}"]
    assert any("is fixed now" in warning for warning in found.warnings)


def test_people_submit_for_their_own_team() -> None:
    """An operator for any; who is in none, for none."""
    words = ("model=yolov8m", "data=100")
    assert ask(*words, user="cy").task.team == "speech"
    reason, text = refused(*words, team="speech")
    assert reason == "team"
    assert "in: vision" in text
    assert ask(*words, team="speech", operator=True).task.team == "speech"
    reason, text = refused(*words, user="mallory")
    assert reason == "team"
    with pytest.raises(InvalidInput, match='did you mean "vision"'):
        ask(*words, team="visoin")


def test_who_is_in_two_teams_says_for_which() -> None:
    """The first is not taken for the other."""
    teams = [
        {"name": name, "users": ["ana"], "quota": {"a100-40": 4}} for name in ("vision", "speech")
    ]
    policy = a_policy(teams=teams, budgets=[])
    with pytest.raises(InvalidInput, match="--team vision or --team speech"):
        ask("model=yolov8m", "data=100", policy=policy)
    assert ask("model=yolov8m", "data=100", policy=policy, team="speech").task.team == "speech"


def test_a_team_has_the_priorities_that_it_may_choose() -> None:
    """The policy's usual one where it may, else the lowest of its own."""
    team = {"name": "vision", "users": ["ana"], "quota": {"a100-40": 4}}
    policy = a_policy(teams=[team | {"priorities": ["low", "high"]}], budgets=[])
    words = ("model=yolov8m", "data=100")
    assert ask(*words, policy=policy).task.priority == "low"
    assert ask(*words, policy=policy, priority="high").task.priority == "high"
    assert refused(*words, policy=policy, priority="normal")[0] == "priority"
    with pytest.raises(InvalidInput, match='did you mean "high"'):
        ask(*words, priority="hihg")


def test_cards_beyond_a_quota_are_refused_before_they_are_waited_for() -> None:
    """A job that could never start does not enter the queue."""
    words = ("model=yolov8m", "data=coco.yaml", "batch=64")
    reason, text = refused(*words, gpus=16, user="cy", card="a100-40")
    assert reason == "card"
    assert "team speech may hold 12" in text
    booked = ask(*words, gpus=16, user="cy", card="a100-40", booked=16).task
    assert (booked.gpus, booked.team) == (16, "speech")
    assert refused(*words, gpus=64)[0] == "card"
    assert refused(*words, gpus=4, user="cy", card="a100-40", image="other")[0] == "image"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"card": "a100"}, 'did you mean "a100-40"'),
        ({"window": "offpeak"}, 'did you mean "off-peak"'),
        ({"gpus": 0}, "from 1 to 64"),
        ({"time_limit": 5.0}, "a minute at least"),
        ({"words": ("model=yolov8m", "data=9", "device=1")}, "--gpus"),
        ({"words": ("data=9",)}, "which model"),
        ({"options": ("--run-id=x",)}, "made from --name"),
        ({"name": "x y"}, "may hold letters"),
        ({"after": ("$(reboot)",)}, "no id of a job"),
    ],
)
def test_what_cannot_be_meant_is_told_with_what_can(said: dict[str, Any], words: str) -> None:
    """Exit status 2: nothing is submitted."""
    with pytest.raises(InvalidInput) as caught:
        ask(*said.pop("words", ("model=yolov8m", "data=9")), **said)
    assert words in str(caught.value)


def test_what_is_known_here_goes_before_the_formula() -> None:
    """A profile's band is its tolerance."""
    words = ("model=yolov8m", "data=coco.yaml", "batch=64")
    found = ask(*words, profiles=(profile(), profile(hardware="another card")))
    assert found.chosen.basis == "profile"
    assert found.chosen.memory == Range(18 * GIB, 20 * GIB, 22 * GIB)
    assert isinstance(found.chosen.images, Range)
    assert found.chosen.images.expected == 200
    assert found.estimates[1].basis == "formula"


def test_a_profile_knows_what_the_tables_do_not() -> None:
    """A model of one's own that was learnt has memory and time."""
    words = ("model=mine-v2", "data=1000", "batch=64")
    found = ask(*words, profiles=(profile(model="mine-v2"),))
    assert found.chosen.basis == "profile"
    assert found.chosen.largest_batch is None
    assert found.task.time_limit_seconds is not None


def test_what_is_off_profile_is_said() -> None:
    """With what is known; a training of the same kind says nothing."""
    known = (profile(),)
    off = ask("model=yolov8m", "data=coco.yaml", "batch=32", profiles=known)
    assert "off profile: yolov8m on a100-40 is known here with batch 64" in off.advice[0]
    fits = ask("model=yolov8m", "data=coco.yaml", "batch=64", profiles=known)
    assert not any("off profile" in line for line in fits.advice)


def test_a_batch_that_leaves_the_card_idle_is_advised_against() -> None:
    """Below it a step takes no less time."""
    found = ask("model=yolov8n", "data=coco.yaml", "batch=4", card="h100-80")
    assert any("a step takes no less time below batch" in line for line in found.advice)


@pytest.mark.parametrize(("images", "advised"), [(4, None), (1000, 56), (300, 24)])
def test_no_batch_is_advised_that_the_data_set_cannot_fill(
    images: int, advised: int | None
) -> None:
    """An epoch keeps ten steps."""
    found = ask("model=yolov8n", f"data={images}", "batch=4", card="h100-80")
    told = [line for line in found.advice if "a step takes no less time" in line]
    assert [f"batch={advised} " in line for line in told] == ([] if advised is None else [True])


def test_cards_that_gain_little_are_advised_against() -> None:
    """Two images on each of eight cards are mostly launches."""
    found = ask("model=yolov8n", "data=coco.yaml", "batch=8", gpus=8, card="a100-40")
    assert any("as fast as one" in line for line in found.advice)


def test_a_limit_below_what_is_expected_is_warned_of() -> None:
    """An attempt is ended there, and the next goes on."""
    found = ask("model=yolov8m", "data=coco.yaml", "batch=64", time_limit=3600.0)
    assert any("--time 1h is less" in warning for warning in found.warnings)


def test_time_in_hours_is_the_time() -> None:
    """`time=2`: two hours and an epoch, and what the start takes."""
    found = ask("model=yolov8m", "data=1000", "time=2")
    assert found.task.time_limit_seconds is not None
    assert 2 * 3600 < found.task.time_limit_seconds < 2.7 * 3600


@given(
    model=st.sampled_from(
        ["yolov8n", "yolo11x", "yolov9e", "yolo26m-seg", "nothing", "yolov8l-cls"]
    ),
    batch=st.sampled_from(["1", "16", "64", "1024", "-1"]),
    imgsz=st.sampled_from(["64", "640", "1280"]),
    gpus=st.sampled_from([1, 2, 8]),
    card=st.sampled_from([None, "a100-40", "h100-80"]),
    time_limit=st.sampled_from([None, 7200.0]),
)
@settings(deadline=None, max_examples=60)
def test_every_answer_is_consistent(
    model: str,
    batch: str,
    imgsz: str,
    *,
    gpus: int,
    card: str | None,
    time_limit: float | None,
) -> None:
    """A task has room and a limit; whoever is refused reads why; nothing else happens."""
    words = (f"model={model}", "data=coco.yaml", f"batch={batch}", f"imgsz={imgsz}")
    try:
        found = ask(*words, gpus=gpus, card=card, time_limit=time_limit)
    except (InvalidInput, RefusedAction) as error:
        text = str(error)
    else:
        text = ""
        consistent(found, card=card, time_limit=time_limit)
    assert text.strip() == text


def consistent(found: Plan, *, card: str | None, time_limit: float | None) -> None:
    """What every plan keeps."""
    assert found.chosen.fit is not Fit.NO
    assert found.task.time_limit_seconds is not None
    if found.chosen.fit is Fit.UNKNOWN:
        assert card is not None
        assert time_limit is not None
    if isinstance(found.chosen.memory, Range) and found.task.memory_bytes is not None:
        assert found.chosen.memory.expected <= found.chosen.offered
    shown = submission_texts.as_text(found)
    assert found.task.name in shown
    assert Task.from_document(found.task.as_document()) == found.task


def test_people_read_the_table_and_machines_the_document() -> None:
    """The chosen card is marked; what is not known is UNKNOWN, and absent in JSON."""
    found = ask("model=yolov8m", "data=coco.yaml", "batch=64", name="exp.1")
    foreseen = Foreseen(earliest=NOW, latest=NOW + 7200, samples=12)
    text = submission_texts.as_text(found)
    assert ">  a100-40" in text
    assert "EUR" in text
    start = submission_texts.start_line(foreseen, ZONE)
    assert start == "start    Fri 15 Jan 09:00 to Fri 15 Jan 11:00, from 12 jobs before"
    assert "its run is called exp-1" in text
    job = SubmittedJob(engine="slurm", id="7", name="exp.1", run_id="exp-1", words="it waits")
    document = submission_texts.as_document(found, foreseen, job=job)
    assert document["submitted"] is True
    assert document["job"]["id"] == "7"
    assert document["estimates"][0]["cost"].endswith(" EUR")
    assert "cost" not in document["estimates"][1]
    unknown = ask("model=yolo99q", card="a100-40", time_limit=7200.0)
    assert "UNKNOWN" in submission_texts.as_text(unknown)
    assert submission_texts.start_line(Foreseen(words="it waits"), ZONE) == "start    it waits"
    estimate = submission_texts.as_document(unknown, Foreseen())["estimates"][0]
    assert "memory_bytes" not in estimate
    assert estimate["unknown"]


def test_a_name_is_made_of_model_data_and_moment() -> None:
    """Two submissions of one second apart are two runs."""
    first = ask("model=yolov8m", "data=/data/My Set.yaml", images=9)
    assert first.task.name == "yolov8m-my-set-0115-080000"
    asked = Asked(words=("model=yolov8m", "data=9"), user="ana", directory="/")
    training = trainings.read_training(asked.words, gpus=1)
    later = plan(asked, training, a_policy(), profiles=(), now=NOW + 1)
    assert later.task.run_id != dataclasses.replace(first.task, name="x").run_id
