"""Run the demo: `python -m demo [--keep]`, or try rules of your own: `--rules FILE`."""

from __future__ import annotations

import argparse
import datetime as dt
import getpass
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tests.servers import until

from demo.jobs import install_tensorboard, tensorboard_path
from demo.lab_boxes import LabBox
from demo.outcomes import Outcome, ReadBack
from demo.stack import COMMAND, ROOT, Stack, as_launcher
from demo.story import Moment, Story
from gpuwarden.exporter.scenarios import GIB
from gpuwarden.schedule_api import STEPS

if TYPE_CHECKING:
    from demo.lab_boxes import Account
    from demo.sinks import Received
    from gpuwarden.schedule_api import Preemption

REPORT_SECONDS = 120
COLOURS = {
    "started": "green",
    "on the card": "green",
    "detected": "yellow",
    "log": "yellow",
    "notify": "yellow",
    "notified": "yellow",
    "due": "magenta",
    "would_terminate": "magenta",
    "authorised": "red",
    "acting": "red",
    "verified": "bold green",
    "incomplete": "bold red",
    "process ended": "cyan",
    "submitted": "green",
    "leaving": "magenta",
    "came back": "cyan",
    "done": "bold green",
    "email arrived": "blue",
    "slack arrived": "blue",
}


def main() -> int:
    """Run the demo; 0 only if each outcome was read back from Prometheus and the ledger."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument(
        "--rules",
        type=Path,
        metavar="FILE",
        help="judge a crashed notebook and two trainings by these rules, until Ctrl-C",
    )
    parser.add_argument("--keep", action="store_true", help="leave everything up at the end")
    parser.add_argument("--folder", type=Path, default=ROOT / ".demo", help="where it writes")
    arguments = parser.parse_args()
    # A file or pipe has no width of its own; 80 columns would break the table.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 132)
    folder: Path = arguments.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments.rules is not None:
        return try_rules(console, folder, arguments.rules.resolve())
    try:
        install_tensorboard(folder)
    except PermissionError as error:
        console.print(f"The whitelisted service must belong to root. {error}")
        return 2
    with as_launcher(), Stack(folder, write_rules(folder), owner=getpass.getuser()) as stack:
        console.print(addresses(stack), soft_wrap=True)
        story = Story(stack, lambda moment: console.print(line(moment), soft_wrap=True))
        box = LabBox(folder / "lab-box", getpass.getuser(), story.say)
        # Beside the story once its trainings train: from then on they wait most of the time.
        beside = ThreadPoolExecutor(1)
        left = beside.submit(box.play, lambda: trains(story))
        try:
            began, since = time.monotonic(), time.time()
            story.run()
            settle(stack)
            wrong = told(console, stack, story, left.result())
            report, problem = write_report(stack, since)
            wrong += [f"report: {problem}"] if problem else []
            for text in wrong:
                console.print(Text(f"not as it should be: {text}", style="bold red"))
            took = time.monotonic() - began
            console.print(f"5 jobs, 1 preemption, {len(wrong)} problems, {took:.0f} s")
            if not problem:
                console.print(f"What the node did meanwhile: {report.as_uri()}", soft_wrap=True)
            if arguments.keep:
                console.print(addresses(stack), soft_wrap=True)
                console.print(commands(stack), soft_wrap=True)
                console.print("Everything is left up; Ctrl-C ends it.")
                wait_for_interrupt()
        finally:
            box.stop()
            beside.shutdown()
            story.stop()
    return 1 if wrong else 0


def trains(story: Story) -> bool:
    """Whether every training of the story has begun to train."""
    return all(job.on_card for job in story.jobs.values() if job.training)


def told(console: Console, stack: Stack, story: Story, account: Account) -> list[str]:
    """Read everything back, print it, and say what is not as it should be."""
    read = ReadBack(stack, story.record)
    outcomes, counters = read.outcomes(), read.counters()
    notices(console, stack.sinks.received)
    console.print(table(outcomes))
    console.print(counter_table(counters))
    if account.preemption is not None:
        console.print(receipts(account.preemption))
    wrong = [f"{item.job}: {text}" for item in outcomes for text in item.wrong]
    return wrong + [f"lab box: {text}" for text in account.wrong]


def try_rules(console: Console, folder: Path, rules: Path) -> int:
    """Let rules of the user's own judge real processes on the simulated cards, until interrupted.

    The engine reads the file again when it changes, as everywhere.

    Returns:
        0 when interrupted, 2 if the rules are not usable.
    """
    check = [str(COMMAND), "rules", "check", str(rules)]
    done = subprocess.run(check, capture_output=True, text=True, check=False, timeout=60)
    console.print(Text((done.stdout + done.stderr).strip()), soft_wrap=True)
    if done.returncode:
        return 2
    with as_launcher(), Stack(folder, rules, owner=getpass.getuser()) as stack:
        console.print(addresses(stack), soft_wrap=True)
        console.print(commands(stack), soft_wrap=True)
        console.print(f"{rules} is read again when it changes. Ctrl-C ends everything.")
        story = Story(stack, lambda moment: console.print(line(moment), soft_wrap=True))
        try:
            story.watch()
        except KeyboardInterrupt:
            return 0
        finally:
            story.stop()


def write_rules(folder: Path) -> Path:
    """The demo's policy with the path of the service that it whitelists."""
    rules = (ROOT / "demo" / "rules.yaml").read_text()
    path = folder / "rules.yaml"
    path.write_text(rules.replace("@TENSORBOARD@", str(tensorboard_path(folder).resolve())))
    return path


def settle(stack: Stack) -> None:
    """Wait until Prometheus has scraped what the engine counted last (it scrapes every 15 s)."""
    with stack.open_ledger() as ledger:
        (ends,) = ledger.execute("SELECT count(*) FROM decisions WHERE state='verified'").fetchone()
    try:
        until(lambda: stack.value("sum(gpu_released_success_total)") == ends, 30, every=0.5)
    except TimeoutError:
        return  # the outcomes will say what is missing


def write_report(stack: Stack, since: float) -> tuple[Path, str]:
    """Report on the run as an operator would on a week; the page outlives the stack.

    Args:
        stack: still running, since the report asks its Prometheus.
        since: Unix time of the beginning.

    Returns:
        Where the page is, and what went wrong or an empty string.
    """
    file = stack.folder / "report.html"
    begin, end = (dt.datetime.fromtimestamp(at, dt.UTC).isoformat() for at in (since, time.time()))
    config = stack.folder / "engine" / "engine.yaml"
    command = [str(COMMAND), "report", "--config", str(config), "-o", str(file)]
    try:
        done = subprocess.run(
            [*command, "--from", begin, "--to", end],
            capture_output=True,
            text=True,
            check=False,
            timeout=REPORT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return file, f"not made within {REPORT_SECONDS} s"
    return file, done.stderr.strip() if done.returncode else ""


def addresses(stack: Stack) -> str:
    """Where to look."""
    rows = (
        ("Prometheus", stack.url("prometheus")),
        ("Alertmanager", stack.url("alertmanager")),
        ("engine", f"{stack.url('engine')}/v1/jobs"),
        ("exporter", f"{stack.url('exporter')}/metrics"),
        ("files", str(stack.folder)),
    )
    return "\n".join(f"  {name:<13} {address}" for name, address in rows)


def commands(stack: Stack) -> str:
    """What to type in another terminal to look at this stack."""
    config = stack.folder / "engine" / "engine.yaml"
    rows = (
        f"export PATH={COMMAND.parent}:$PATH GPUWARDEN_ENGINE_URL={stack.url('engine')}",
        "gpuwarden top",
        "gpuwarden jobs list",
        "gpuwarden why JOB",
        f"gpuwarden doctor engine --config {config}",
        f"gpuwarden report --config {config} --from now-10m --to now -o report.html",
    )
    return "\n".join(("In another terminal:", *(f"  {row}" for row in rows)))


def line(moment: Moment) -> Text:
    """One line of the timeline."""
    text = Text(f"{moment.at:6.1f} s  ", style="dim")
    text.append(f"{moment.job:<12}", style="bold")
    text.append(f"{moment.what:<16}", style=COLOURS.get(moment.what, ""))
    text.append(moment.detail)
    return text


def notices(console: Console, received: list[Received]) -> None:
    """Every notice as it arrived, the same text only once."""
    shown: set[tuple[str, str]] = set()
    for message in received:
        if (message.channel, message.text) in shown:
            continue
        shown.add((message.channel, message.text))
        console.rule(f"{message.channel} to {message.to}")
        if message.subject:
            console.print(Text(message.subject, style="bold"))
        console.print(Text(message.text))


def table(outcomes: list[Outcome]) -> Table:
    """What became of each job."""
    columns = ("job", "owner", "verdict", "cause", "violation", "stages, seconds later", "freed")
    result = Table(title="What became of the jobs", title_justify="left")
    for column in columns:
        result.add_column(column, overflow="fold")
    for item in outcomes:
        mark = "" if not item.wrong else " (!)"
        result.add_row(
            item.job + mark,
            item.owner,
            item.verdict,
            item.cause,
            "" if item.began is None else time.strftime("%H:%M:%S", time.localtime(item.began)),
            "  ".join(f"{kind} {seconds:.0f}" for kind, seconds in item.steps),
            f"{item.freed / GIB:.0f} GiB" if item.freed else "",
        )
    return result


def receipts(preemption: Preemption) -> Table:
    """Every step of the preemption, and how long after the one before it was seen."""
    result = Table("step", "at", "later", title="How low-1 left for high-1", title_justify="left")
    before: float | None = None
    for step in STEPS:
        moment = preemption.steps.get(step)
        if moment is None:
            result.add_row(step, "not seen", "")
            continue
        later = "" if before is None else f"+ {moment - before:.1f} s"
        result.add_row(step, time.strftime("%H:%M:%S", time.localtime(moment)), later)
        before = moment
    return result


def counter_table(counters: dict[str, float | None]) -> Table:
    """The four counters, as Prometheus has them."""
    result = Table("counter", "value", title="As Prometheus has it", title_justify="left")
    for name, value in counters.items():
        result.add_row(name, "absent" if value is None else f"{value:.0f}")
    return result


def wait_for_interrupt() -> None:
    """Wait until the user has seen enough."""
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
