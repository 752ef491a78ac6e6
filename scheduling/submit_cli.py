"""`gpuwarden submit`: a training is estimated, checked, and handed to the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import grp
import importlib
import json
import os
import pwd
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from gpuwarden.errors import InvalidInput, RefusedAction, ServiceUnavailable
from gpuwarden.option_values import output_option
from gpuwarden.scheduling import slot_choices, submission_texts
from gpuwarden.scheduling.daemon_clients import DaemonClient, daemon_options
from gpuwarden.scheduling.expectations import Past, read_past
from gpuwarden.scheduling.moments import MomentUnclear, read_last
from gpuwarden.scheduling.policy_checks import load_policy
from gpuwarden.scheduling.predictions import training_of_words
from gpuwarden.scheduling.submissions import Asked, budget_doubts, plan, read, refuse_second
from gpuwarden.scheduling.submit_parsing import SubmitCommand, read_time_limit, split_words
from gpuwarden.scheduling.tasks import Foreseen
from gpuwarden.scheduling.yolo_words import spelt_out
from gpuwarden.training_profiles import load_profiles

if TYPE_CHECKING:
    from gpuwarden.schedule_api import BookingEntry
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.submissions import Plan
    from gpuwarden.scheduling.tasks import Submitter

DEFAULT_POLICY: Final = Path("/etc/gpuwarden/policy.yaml")
FRESH_SECONDS: Final = 300.0
ENGINES: Final = ("slurm", "kueue", "local")

_EPILOG = """
\b
The job is an ordinary training: `gpuwarden train --run-id NAME ...`. Started anew by the engine,
it goes on where it was; nothing of gpuwarden has to run for that. Options of gpuwarden train go
behind the words, each as --option=value:
  gpuwarden submit model=yolov8m data=coco.yaml -- --checkpoint-every=2m

\b
Exit status:
  0   submitted; with --dry-run: it could be
  1   the answer is no: no room on any card, the policy forbids it, or the run is in the queue
  2   wrong usage or input
  3   the engine does not answer: nothing was submitted

What the estimate rests on, and how cards, batches and images are chosen: docs/submit.md.
"""


@click.command(
    "submit",
    cls=SubmitCommand,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--policy",
    "policy_file",
    envvar="GPUWARDEN_POLICY",
    type=click.Path(path_type=Path, dir_okay=False),
    default=DEFAULT_POLICY,
    show_default=True,
    help="The cluster's policy.",
)
@click.option("--team", help="Whose quota and budget count. Default: the only team you are in.")
@click.option("--priority", help="Class of the task. Default: the policy's.")
@click.option("--gpus", type=int, default=1, show_default=True, help="Cards, all of one node.")
@click.option(
    "--card", help="Kind of cards, by the policy's name. Default: the cheapest that will do."
)
@click.option("--window", help="Run only in this window of the policy, such as off-peak.")
@click.option(
    "--booking",
    metavar="ID",
    help="Start with this slot, as `gpuwarden book list` shows it, or the next one of a booking "
    "that repeats: its team and kind of cards are the task's.",
)
@click.option(
    "--after",
    multiple=True,
    metavar="JOB",
    help="Wait until this job has succeeded; its id as `gpuwarden queue` shows it. May be "
    "repeated.",
)
@click.option(
    "--name",
    help="Of the task and its run. The same name again continues an unfinished run. Default: from "
    "the model, the data set and the time, with a mark of its own.",
)
@click.option("--image", help="One of the policy's images. Default: that for the model.")
@click.option(
    "--time",
    "time_limit",
    metavar="DURATION",
    callback=read_time_limit,
    help="Time limit of an attempt, such as 4h. Default: what the slowest of the trainings like it "
    "took here, else the upper end of the estimate, and a margin. Needed where neither is known.",
)
@click.option(
    "--deadline",
    metavar="WHEN",
    help="Be done by then: fri 18:00, +20h, 2026-12-24 08:00, by the policy's time zone; a date "
    "without a time is that whole day. Cards that are too slow are passed over.",
)
@click.option(
    "--images",
    type=click.IntRange(min=1),
    metavar="N",
    help="Images of the training set, where the data are not in sight of this machine.",
)
@click.option(
    "--profiles",
    "profile_files",
    multiple=True,
    envvar="GPUWARDEN_PROFILES",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="What is trained here, as `gpuwarden profiles learn` writes it; goes before the formula. "
    "May be repeated.",
)
@click.option(
    "--program",
    default="gpuwarden",
    show_default=True,
    help="gpuwarden in the training's environment: an absolute path, where it is not in the PATH.",
)
@click.option(
    "--chdir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where the training starts. Default: here.",
)
@click.option("--engine", type=click.Choice(ENGINES), help="Default: the policy's.")
@click.option("--dry-run", is_flag=True, help="Show everything, and what would be sent.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask. Only a terminal is asked.")
@daemon_options
@output_option
@click.argument("words", nargs=-1, required=True, metavar="KEY=VALUE... [-- --OPTION=VALUE...]")
def submit(words: tuple[str, ...], **said: Any) -> None:
    """Estimate a training, check it, and hand it to the engine.

    \u0008
      gpuwarden submit model=yolov8m data=coco.yaml batch=64 epochs=100 --team vision
      gpuwarden submit model=yolo11x data=/data/my.yaml --gpus 2 --priority high --dry-run
      gpuwarden submit model=yolov8s data=my.yaml --window off-peak --after 4711
      gpuwarden submit model=mine.yaml data=my.yaml --card a100-40 --time 6h

    Says for each kind of cards what the training needs there, how long it takes and what it costs,
    what trainings like it took here, and when it would start. What fits no card is refused, with
    the batch that would; so is a data set that is not there, an image that the policy does not
    list, and a run that is in the queue already.
    """
    now = time.time()
    policy = load_policy(said["policy_file"], now=now, engine=said["engine"])
    profiles = tuple(each for file in said["profile_files"] for each in load_profiles(file))
    # Words name files from there on; whoever calls this from Python stays where it is.
    with contextlib.chdir(said["chdir"] or "."):
        asked = _asked(words, said, policy, now)
        client = DaemonClient(said["socket"], said["url"], token_file=said["token_file"])
        slot = _slot(said["booking"], asked, client, now)
        if slot is not None:
            # Slurm and Kueue count what runs in a slot for the team's limits.
            booked = slot.gpus if (asked.engine or policy.engine) == "local" else 0
            asked = dataclasses.replace(asked, team=slot.team, card=slot.gpu_type, booked=booked)
        training = read(asked, policy)
        past = _past(asked, client)
        found = plan(asked, training, policy, profiles=profiles, now=now, past=past)
        found = _with_schedule(found, client)
        if slot is not None:
            found = _in_slot(found, slot, policy, now)
        engine = asked.engine or policy.engine
        if said["output"] != "json":  # before the engine is asked, which may say no, or nothing
            click.echo(submission_texts.as_text(found, engine=engine))
        submitter = open_submitter(engine, policy, client)
        with contextlib.closing(submitter):
            _hand_over(submitter, found, policy, said)


def _hand_over(submitter: Submitter, found: Plan, policy: Policy, said: dict[str, Any]) -> None:
    """Ask the engine when it would start, and submit it, unless it is only to be shown."""
    as_json = said["output"] == "json"
    foreseen = _foreseen(submitter, found)
    doubts = _doubts(submitter, found)
    found = dataclasses.replace(found, warnings=(*found.warnings, *doubts))
    if not as_json:
        click.echo(submission_texts.start_line(foreseen, policy.zone))
        for each in doubts:
            click.echo(f"warning  {each}")
    if said["dry_run"]:
        rendered = submitter.render(found.task)
        if as_json:
            _show(submission_texts.as_document(found, foreseen, rendered=rendered))
        else:
            click.echo(f"\nnothing is submitted; this would be sent to {submitter.engine}:\n")
            click.echo(rendered)
        return
    if not (as_json or said["yes"]) and sys.stdin.isatty():
        click.confirm("\nSubmit?", default=True, abort=True)
    job = submitter.submit(found.task, token=secrets.token_hex(8))
    if as_json:
        _show(submission_texts.as_document(found, foreseen, job=job))
        return
    for warning in job.warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"\n{job.engine} {job.id}: {job.words}")


def open_submitter(engine: str, policy: Policy, client: DaemonClient) -> Submitter:
    """The engine's port for tasks; its modules are loaded only where it is the one.

    Args:
        engine: slurm, kueue or local.
        policy: of this cluster.
        client: of the daemon, which is the local engine itself; the others do without.
    """
    module: Any = importlib.import_module(f"gpuwarden.scheduling.{engine}.submitters")
    submitter: Submitter = (
        module.submitter(policy, client) if engine == "local" else module.submitter(policy)
    )
    return submitter


def _past(asked: Asked, client: DaemonClient) -> Past | None:
    """What the daemon remembers of such trainings; None where it cannot be asked."""
    features = training_of_words(
        asked.words, card="", gpus=asked.gpus, directory=asked.directory
    ).features
    if not (features.model and features.data):
        return Past()
    names = ("model", "imgsz", "data", "pacing")
    parameters = {name: getattr(features, name) for name in names}
    try:
        return read_past(client.ask("GET", "/v1/runs", parameters=parameters))
    except (ServiceUnavailable, RefusedAction, InvalidInput):
        return None


def _with_schedule(found: Plan, client: DaemonClient) -> Plan:
    """With what the daemon says of the team's budgets; without a daemon nobody can tell.

    Raises:
        RefusedAction: the run is in the queue already.
    """
    try:
        schedule = client.schedule()
    except (ServiceUnavailable, RefusedAction):
        return found
    # A queue that was seen long ago says nothing of what waits now.
    if time.time() - schedule.taken <= FRESH_SECONDS:
        refuse_second(found.task, schedule.entries)
    doubts = budget_doubts(schedule.budgets, team=found.task.team, hours=found.gpu_hours)
    return dataclasses.replace(found, warnings=(*found.warnings, *doubts))


def _slot(name: str | None, asked: Asked, client: DaemonClient, now: float) -> BookingEntry | None:
    """The slot that was said.

    Raises:
        ServiceUnavailable: nobody can tell which there are.
        RefusedAction: there is none.
        InvalidInput: the task cannot be for it.
    """
    if name is None:
        return None
    slot = slot_choices.chosen(client.schedule().bookings, name, now=now)
    slot_choices.refuse_misfit(
        slot, team=asked.team, card=asked.card, gpus=asked.gpus, window=asked.window
    )
    return slot


def _in_slot(found: Plan, slot: BookingEntry, policy: Policy, now: float) -> Plan:
    """The task, to start with its slot."""
    task = found.task
    seconds = task.time_limit_seconds
    doubts = slot_choices.doubts(slot, user=task.user, seconds=seconds, now=now, zone=policy.zone)
    start = slot.start if slot.start > now else None
    return dataclasses.replace(
        found,
        task=dataclasses.replace(task, not_before=start),
        warnings=(*found.warnings, *doubts),
    )


def _asked(words: tuple[str, ...], said: dict[str, Any], policy: Policy, now: float) -> Asked:
    plain, options = split_words(words)
    deadline = said["deadline"]
    try:
        moment = None if deadline is None else read_last(deadline, now=now, zone=policy.zone)
    except MomentUnclear as error:
        raise InvalidInput(f"--deadline: {error}") from error
    if moment is not None and moment <= now:
        raise InvalidInput(f"--deadline {deadline} is past")
    return Asked(
        words=spelt_out(plain),
        options=options,
        user=user_name(),
        operator=_is_operator(policy),
        directory=str(Path.cwd()),
        deadline=moment,
        mark=secrets.token_hex(2),
        **{key: said[key] for key in ("team", "priority", "gpus", "card", "window", "after")},
        **{
            key: said[key] for key in ("name", "image", "time_limit", "images", "program", "engine")
        },
    )


def user_name() -> str:
    """Who runs this process, by the system's list of users and not by the environment."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _is_operator(policy: Policy) -> bool:
    if os.getuid() == 0 or user_name() in policy.operators.users:
        return True
    groups = set()
    for gid in {os.getgid(), *os.getgroups()}:
        with contextlib.suppress(KeyError):  # a group without a name is nobody's
            groups.add(grp.getgrgid(gid).gr_name)
    return not groups.isdisjoint(policy.operators.groups)


def _foreseen(submitter: Submitter, found: Plan) -> Foreseen:
    """When it would start; that an engine cannot tell is no reason not to say the rest."""
    try:
        return submitter.foresee(found.task)
    except ServiceUnavailable as error:
        return Foreseen(words=f"UNKNOWN when it starts: {error}")


def _doubts(submitter: Submitter, found: Plan) -> tuple[str, ...]:
    """What may keep it from coming back; an engine that does not answer says so elsewhere."""
    try:
        return submitter.doubts(found.task)
    except ServiceUnavailable:
        return ()


def _show(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, indent=2))
