"""From what somebody asks for to a task, and why not: the decision behind `gpuwarden submit`. Pure.

Everything that is wrong with a request is said at once. What a policy forbids and what has no room
on any card is a no; an unknown model or card is no reason to refuse, but then nothing is guessed:
the card and the time have to be said.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from gpuwarden.budget_terms import GPU_HOURS, quantity
from gpuwarden.errors import InvalidInput, RefusedAction
from gpuwarden.estimates import GIB, ModelCosts, Range, Unknown
from gpuwarden.schedule_api import EntryState
from gpuwarden.scheduling import expectations, images, recommendations
from gpuwarden.scheduling.card_choices import choose_card, high, none_of
from gpuwarden.scheduling.estimations import CardEstimate, Fit, Kind, estimate, save_seconds
from gpuwarden.scheduling.expectations import Limit
from gpuwarden.scheduling.predictions import Prediction, Unforeseen
from gpuwarden.scheduling.recommendations import span
from gpuwarden.scheduling.tasks import Task, option_problem, run_id_of, word_problem
from gpuwarden.scheduling.trainings import read_training

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gpuwarden.schedule_api import BudgetEntry, QueueEntry
    from gpuwarden.scheduling.expectations import Past
    from gpuwarden.scheduling.policies import Image, Policy, Priority, Team, Window
    from gpuwarden.scheduling.trainings import Training
    from gpuwarden.training_profiles import Profile

MOST_GPUS: Final = 64
"""Cards of one node at most; the trainer starts a process for each."""
SHORT_START_SECONDS: Final = 120.0
"""What every attempt takes before its first step: imports, the cards, the data's index."""
_SHORT_LIMIT: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was said on the command line.

    Attributes:
        words: of `yolo train`.
        options: of `gpuwarden train`.
        user: who asks.
        operator: whether they may submit for teams that they are not in.
        directory: where the training starts.
        team, priority, card, window, image: by the policy's names, or None where not said.
        gpus: cards.
        after: ids of jobs to wait for.
        name: of the task, or None.
        time_limit: seconds, or None.
        deadline: Unix time by which it should be done, or None.
        images: of one epoch, where the data set is out of sight.
        program: `gpuwarden`, or its absolute path in the training's environment.
        engine: instead of the policy's, or None.
        booked: cards of the slot that it is for, in which no quota binds; 0 without one.
        mark: a few letters by which tasks without a name that are submitted in one second are told
            apart, or empty.
    """

    words: tuple[str, ...]
    user: str
    directory: str
    operator: bool = False
    options: tuple[str, ...] = ()
    team: str | None = None
    priority: str | None = None
    card: str | None = None
    window: str | None = None
    image: str | None = None
    gpus: int = 1
    after: tuple[str, ...] = ()
    name: str | None = None
    time_limit: float | None = None
    deadline: float | None = None
    images: int | None = None
    program: str = "gpuwarden"
    engine: str | None = None
    booked: int = 0
    mark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A task that can be submitted, and what is to be said of it.

    Attributes:
        task: for an engine.
        training: what it trains.
        estimates: on every kind of cards, in the policy's order.
        chosen: the card that it takes.
        why_card: one sentence.
        image: of the catalogue, or None.
        warnings: what may go wrong.
        advice: what could be chosen otherwise.
        sizes: smaller models of the family on the chosen card.
        history: kind of cards -> what trainings like it took there, or why nothing is foretold;
            empty where nobody was asked.
        limit_words: what the time limit rests on; empty where it was said, or there is none.
    """

    task: Task
    training: Training
    estimates: tuple[CardEstimate, ...]
    chosen: CardEstimate
    why_card: str
    image: Image | None
    warnings: tuple[str, ...]
    advice: tuple[str, ...]
    sizes: tuple[tuple[str, CardEstimate], ...]
    history: Mapping[str, Prediction | Unforeseen] = field(default_factory=dict)
    limit_words: str = ""

    @property
    def foretold(self) -> Prediction | Unforeseen | None:
        """What history says of it on its card; None where nobody was asked."""
        return self.history.get(self.chosen.kind.name)

    @property
    def gpu_hours(self) -> Range | None:
        """What it costs, by history, or else by the estimate; None where neither tells."""
        if isinstance(self.foretold, Prediction):
            return expectations.gpu_hours(self.foretold, self.task.gpus)
        return self.chosen.gpu_hours(self.task.gpus)


def plan(
    asked: Asked,
    training: Training,
    policy: Policy,
    *,
    profiles: Sequence[Profile],
    now: float,
    past: Past | None = None,
) -> Plan:
    """Make a task of what was asked for.

    Args:
        asked: on the command line.
        training: what its words say, by `read`.
        policy: of this cluster.
        profiles: of what is trained here.
        now: Unix time.
        past: what the daemon remembers of such trainings; None where it was not asked.

    Raises:
        InvalidInput: what was said cannot be meant; every problem, one a line.
        RefusedAction: the policy forbids it (`team`, `priority`, `card`, `image`), nothing has room
            for it (`memory`), it cannot be done in time (`deadline`), or it is not known how long
            it takes (`unknown`); the text says what would be possible.
    """
    team = _team(policy, asked)
    priority = _priority(policy, team, asked.priority)
    window = _window(policy, asked.window)
    kinds = [
        Kind(
            name=card.name,
            model=card.model,
            memory=card.memory,
            count=card.count,
            allowed=min(card.count, max(team.most(card.name), asked.booked)),
            price=card.price,
        )
        for card in policy.cards
    ]
    everywhere = estimate(training, kinds, gpus=asked.gpus, profiles=profiles)
    history = expectations.expected(
        everywhere,
        past,
        {each.kind.name: _words(asked.words, training, each) for each in everywhere},
        gpus=asked.gpus,
        directory=asked.directory,
    )
    # What ended on a card has room there, whatever a formula says.
    everywhere = tuple(
        replace(each, fit=Fit.YES) if isinstance(history.get(each.kind.name), Prediction) else each
        for each in everywhere
    )
    chosen, why = choose_card(
        asked, training, everywhere, team=team, profiles=profiles, history=history, now=now
    )
    foretold = history.get(chosen.kind.name)
    picked = images.Chosen(None)
    if asked.image is not None or runs_images(policy, asked.engine or policy.engine):
        picked = images.choose(
            policy.images, training.model_name, wanted=asked.image, gpu=chosen.gpu
        )
    limit = _limit(asked, training, chosen, policy=policy, foretold=foretold, past=past)
    name = asked.name if asked.name is not None else usual_name(training, now, asked.mark)
    task = Task(
        name=name,
        run_id=run_id_of(name),
        words=_words(asked.words, training, chosen),
        options=_options(asked.options, policy),
        user=asked.user,
        team=team.name,
        priority=priority.name,
        gpus=asked.gpus,
        gpu_type=chosen.kind.name,
        memory_bytes=_memory(chosen),
        image=None if picked.image is None else picked.image.image,
        window=None if window is None else window.name,
        after=asked.after,
        deadline=asked.deadline,
        time_limit_seconds=limit.seconds,
        epoch_seconds=_epoch(chosen, foretold),
        save_seconds=save_seconds(training.model),
        estimate=chosen.as_document(asked.gpus)
        | ({} if foretold is None else {"history": expectations.as_document(foretold)}),
        directory=asked.directory,
        program=asked.program,
    )
    return Plan(
        task=task,
        training=training,
        estimates=everywhere,
        chosen=chosen,
        why_card=why,
        image=picked.image,
        warnings=(
            *_doubts(asked, training, chosen, limit=limit.seconds, foretold=foretold),
            *picked.warnings,
        ),
        advice=recommendations.recommendations(
            training, chosen, everywhere, gpus=asked.gpus, profiles=profiles
        ),
        sizes=recommendations.sizes(training, chosen, gpus=asked.gpus, profiles=profiles),
        history=history,
        limit_words=limit.words,
    )


def runs_images(policy: Policy, engine: str) -> bool:
    """Whether jobs of an engine run in images, unless somebody asks for one."""
    return engine == "kueue" or (engine == "slurm" and bool(policy.slurm.container))


def budget_doubts(
    budgets: Iterable[BudgetEntry], *, team: str, hours: Range | None
) -> tuple[str, ...]:
    """What is to be said of a team's budgets before it uses more of them.

    Args:
        budgets: as they stand.
        team: that submits.
        hours: GPU-hours that it is about to use, or None where nobody can tell.
    """
    found = []
    for each in budgets:
        if each.team != team or each.used is None:
            continue
        more = 0.0 if hours is None else hours.expected
        if each.used + more <= each.limit_gpu_hours:
            continue
        used, limit = (quantity(amount, GPU_HOURS) for amount in (each.used, each.limit_gpu_hours))
        what = (
            "once it is spent, nothing of the team starts" if each.kind == "hard" else "it is told"
        )
        found.append(
            f"{each.kind} budget of the {each.per}: {used.partition(' ')[0]} of {limit} are used"
            + (f", and this takes about {more:,.1f}" if more else "")
            + f"; {what}"
        )
    return tuple(found)


def refuse_second(task: Task, entries: Iterable[QueueEntry]) -> None:
    """See that nobody trains, or is about to train, the run of a task.

    Args:
        task: that is to be submitted.
        entries: of the queue.

    Raises:
        RefusedAction: a job of it waits or runs, and the task does not wait for its end.
    """
    over = (EntryState.DONE, EntryState.FAILED)
    for entry in entries:
        if entry.run_id == task.run_id and entry.state not in over and entry.id not in task.after:
            raise RefusedAction(
                "run_active",
                f"run {task.run_id} is job {entry.id} of {entry.user} already ({entry.state}): two "
                f"at a time would train the same run. Say another --name, or --after {entry.id} to "
                "go on when that one has succeeded",
            )


def usual_name(training: Training, now: float, mark: str = "") -> str:
    """A name for a task that was given none: model, data set, and the second of its submission.

    Args:
        training: what it trains.
        now: Unix time.
        mark: of this submission, where others may come in the same second; or empty.
    """
    data = re.sub(r"\.[a-z]+$", "", training.data.rstrip("/").rpartition("/")[2].lower())
    moment = dt.datetime.fromtimestamp(now, dt.UTC).strftime("%m%d-%H%M%S")
    parts = [re.sub(r"[^a-z0-9-]+", "-", part).strip("-") for part in (training.model_name, data)]
    return "-".join([*(part[:20] for part in parts if part), moment, *([mark] if mark else [])])


def read(asked: Asked, policy: Policy | None = None) -> Training:
    """Look up what the words name: the model in the tables, the data set on this machine.

    Args:
        asked: on the command line.
        policy: whose names it uses, to tell of those that are none at the same time; or None.

    Raises:
        InvalidInput: words that cannot be meant, or a data set that is not there; every problem,
            one a line.
    """
    problems = [problem for word in asked.words if (problem := word_problem(word))]
    problems += [problem for option in asked.options if (problem := option_problem(option))]
    if not any(word.startswith("model=") for word in asked.words):
        problems.append("which model? Say model=yolov8m, for example")
    if not 1 <= asked.gpus <= MOST_GPUS:
        problems.append(f"--gpus {asked.gpus}: from 1 to {MOST_GPUS}, all of one node")
    if asked.time_limit is not None and asked.time_limit < _SHORT_LIMIT:
        problems.append(f"--time {span(asked.time_limit)}: a minute at least")
    names = [] if policy is None else list(_unknown_names(asked, policy))
    if not problems:
        try:
            training = read_training(asked.words, gpus=asked.gpus, images=asked.images)
        except InvalidInput as error:
            problems.append(str(error))
    if problems or names:
        raise InvalidInput("\n".join([*problems, *names]))
    return training


def _unknown_names(asked: Asked, policy: Policy) -> Iterator[str]:
    """What was said by a name that the policy does not have."""
    for option, wanted, known in (
        ("--team", asked.team, [each.name for each in policy.teams]),
        ("--priority", asked.priority, [each.name for each in policy.priorities]),
        ("--window", asked.window, [each.name for each in policy.windows]),
        ("--card", asked.card, [each.name for each in policy.cards]),
    ):
        if wanted is not None and wanted not in known:
            yield f"{option} {wanted}: {none_of(wanted, known)}"


# ---------------------------------------------------------------------------------------------
# What the policy says


def _team(policy: Policy, asked: Asked) -> Team:
    user, wanted = asked.user, asked.team
    mine = policy.teams_of(user)
    if wanted is not None:
        team = policy.team(wanted)
        if team is None:
            raise InvalidInput(
                f"--team {wanted}: {none_of(wanted, [each.name for each in policy.teams])}"
            )
        if team not in mine and not asked.operator:
            theirs = ", ".join(each.name for each in mine) or "none"
            raise RefusedAction(
                "team", f"{user} is not in team {wanted} by the policy; in: {theirs}"
            )
        return team
    if len(mine) == 1:
        return mine[0]
    if mine:
        names = " or ".join(f"--team {each.name}" for each in mine)
        raise InvalidInput(f"{user} is in several teams: say {names}")
    raise RefusedAction(
        "team", f"{user} is in no team of the policy: an operator adds people to `teams`"
    )


def _priority(policy: Policy, team: Team, wanted: str | None) -> Priority:
    allowed = [each for each in policy.priorities if team.may_choose(each.name)]
    if wanted is None:
        usual = policy.usual_priority
        return usual if usual in allowed else min(allowed, key=lambda each: each.value)
    found = policy.priority(wanted)
    if found is None:
        raise InvalidInput(
            f"--priority {wanted}: {none_of(wanted, [each.name for each in policy.priorities])}"
        )
    if found not in allowed:
        names = ", ".join(each.name for each in allowed)
        raise RefusedAction(
            "priority", f"team {team.name} may not choose priority {wanted}: it may {names}"
        )
    return found


def _window(policy: Policy, wanted: str | None) -> Window | None:
    if wanted is None:
        return None
    found = policy.window(wanted)
    if found is None:
        names = [each.name for each in policy.windows]
        raise InvalidInput(f"--window {wanted}: {none_of(wanted, names)}")
    return found


# ---------------------------------------------------------------------------------------------
# Time, words, doubts


def _limit(
    asked: Asked,
    training: Training,
    chosen: CardEstimate,
    *,
    policy: Policy,
    foretold: Prediction | Unforeseen | None,
    past: Past | None,
) -> Limit:
    if asked.time_limit is not None:
        return Limit(asked.time_limit, "")
    limit = chosen.time_limit_seconds
    if isinstance(foretold, Prediction) and past is not None:
        # Only Slurm fills gaps by it.
        tight = (asked.engine or policy.engine) == "slurm"
        return expectations.time_limit(foretold, limit, past, tight=tight)
    if limit is None:
        reasons = "; ".join(chosen.reasons()).removesuffix("?")
        if isinstance(foretold, Unforeseen):
            reasons = f"{reasons}; {foretold.words}"
        raise RefusedAction(
            "unknown",
            f"UNKNOWN: how long {training.model_name} takes on {chosen.kind.name}: {reasons}. "
            "Nothing is guessed: say --time"
            + (" and --card" if isinstance(training.model, Unknown) and not asked.card else ""),
        )
    return Limit(limit, "the upper end of the estimate, and a margin")


def _options(options: tuple[str, ...], policy: Policy) -> tuple[str, ...]:
    """With what a signal of an engine means, where the policy lets a job finish its epoch."""
    epoch = policy.preemption is not None and policy.preemption.notice == "epoch"
    said = any(option.partition("=")[0] == "--on-signal" for option in options)
    return (*options, "--on-signal=epoch") if epoch and not said else options


def _words(words: tuple[str, ...], training: Training, chosen: CardEstimate) -> tuple[str, ...]:
    """The words, with a batch of its own choice made a fixed one.

    Ultralytics would choose it anew by the card that an attempt runs on: a resumed run would then
    be another training.
    """
    if training.batch is not None or chosen.batch is None:
        return words
    return (*(word for word in words if not word.startswith("batch=")), f"batch={chosen.batch}")


def _doubts(
    asked: Asked,
    training: Training,
    chosen: CardEstimate,
    *,
    limit: float,
    foretold: Prediction | Unforeseen | None,
) -> Iterable[str]:
    known = isinstance(foretold, Prediction)
    if chosen.fit is Fit.UNKNOWN:
        yield "UNKNOWN whether it has room: " + "; ".join(chosen.reasons())
    elif isinstance(chosen.training_seconds, Unknown) and not known:
        yield f"UNKNOWN how long it takes: {chosen.training_seconds}"
    if isinstance(chosen.memory, Range) and chosen.fit is Fit.TIGHT:
        yield (
            f"it may have no room: up to {chosen.memory.high / GIB:.1f} GiB of "
            f"{chosen.offered / GIB:.1f}"
        )
    yield from _limit_doubts(asked, chosen, limit=limit, foretold=foretold)
    if training.batch is None and chosen.batch is not None:
        yield (
            f"batch={chosen.batch} is fixed now, from the estimate: a batch that is chosen anew "
            "with each attempt would make another training of it"
        )
    yield from training.doubts
    if training.absent and "--online" not in asked.options:
        yield (
            f"not in sight from {asked.directory}: {', '.join(training.absent)}; a training "
            "downloads nothing, unless its options say --online: see that they are where it runs"
            + (
                f", or say model={training.model_name}.yaml to begin from random weights"
                if training.absent[0].endswith(".pt") and isinstance(training.model, ModelCosts)
                else ""
            )
        )
    if asked.name is None:
        return
    if run_id_of(asked.name) != asked.name:
        yield f"its run is called {run_id_of(asked.name)}"


def _limit_doubts(
    asked: Asked,
    chosen: CardEstimate,
    *,
    limit: float,
    foretold: Prediction | Unforeseen | None,
) -> Iterable[str]:
    """What a time limit that was said cuts off."""
    if asked.time_limit is None:
        return
    expected: Range | Unknown = chosen.training_seconds
    if isinstance(foretold, Prediction):
        expected = Range(foretold.shortest, foretold.middle, foretold.slowest)
    if isinstance(expected, Range) and limit < expected.high:
        yield (
            f"--time {span(limit)} is less than what it may take ({span(expected.low)} to "
            f"{span(expected.high)}): the engine ends an attempt there; the next continues it"
        )
    whole = _epoch(chosen, foretold)
    if whole is not None and limit < whole + SHORT_START_SECONDS:
        yield (
            f"--time {span(limit)} may not hold one epoch (up to {span(whole)}) beside the start: "
            "an attempt that saves none comes back without end, or is held for it"
        )


def _memory(chosen: CardEstimate) -> float | None:
    """Upper end on each card; where such trainings ended on it, no more than it has."""
    if not isinstance(chosen.memory, Range):
        return None
    return min(chosen.memory.high, chosen.offered) if chosen.fit is Fit.YES else chosen.memory.high


def _epoch(chosen: CardEstimate, foretold: Prediction | Unforeseen | None) -> float | None:
    """Upper end of an epoch, by the estimate, or else by history."""
    if isinstance(chosen.epoch_seconds, Unknown) and isinstance(foretold, Prediction):
        return foretold.slowest / foretold.epochs
    return high(chosen.epoch_seconds)
