"""`gpuwarden doctor engine`: files, the engine itself, its ledger, and who can be told."""

from __future__ import annotations

import asyncio
import os
import stat
import time
import zoneinfo
from typing import TYPE_CHECKING, Final

import aiosmtplib
import httpx

from gpuwarden import __version__
from gpuwarden.diagnostics import Severity
from gpuwarden.errors import GpuwardenError, InvalidInput
from gpuwarden.exchanges import exchange
from gpuwarden.files import read_secret
from gpuwarden.findings import CannotCheck, Check
from gpuwarden.ruleengine import doctor_findings as known
from gpuwarden.ruleengine import ledger_files
from gpuwarden.ruleengine.directory_checks import check_directory
from gpuwarden.ruleengine.doctor_centres import SECONDS, finite
from gpuwarden.ruleengine.serving import check_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpuwarden.findings import Finding
    from gpuwarden.ruleengine.doctor_centres import Centre
    from gpuwarden.ruleengine.settings import SmtpSettings

LOW_BYTES: Final = 1024**3
LEAST_BYTES: Final = 100 * 1024**2
"""Free for the ledger; below the first it is a warning."""
_LATE_TICKS = 3.0
_ANYWHERE = ("Asia/Shanghai", "Europe/Berlin", "America/New_York")
"""Zones that every machine with time zone data knows."""
_PEOPLE_NAMED = 20


def engine_checks(centre: Centre) -> list[Check]:
    """Every check that needs no other server than the engine and those that deliver."""
    return [
        Check(known.CONFIG, lambda: _config(centre), 20.0),
        Check(known.SECRET_FILES, lambda: _secret_files(centre)),
        Check(known.ANSWER, lambda: _answer(centre), 15.0),
        Check(known.TICKS, lambda: _ticks(centre), 15.0),
        Check(known.RULE_HASH, lambda: _rule_hash(centre), 20.0),
        Check(known.ENFORCEMENT, lambda: _enforcement(centre), 15.0),
        Check(known.ZONES, lambda: _zones(centre)),
        Check(known.DIRECTORY, lambda: _directory(centre), 20.0),
        Check(known.MAIL, lambda: _mail(centre), 20.0),
        Check(known.SLACK, lambda: _slack(centre), 15.0),
        Check(known.BOTS, lambda: _bots(centre)),
        Check(known.LEDGER, lambda: _ledger(centre), 60.0),
        Check(known.DISK, lambda: _disk(centre)),
    ]


def _config(centre: Centre) -> Iterator[Finding]:
    try:
        book = check_files(centre.settings)
    except InvalidInput as error:
        yield known.CONFIG.failed(str(error))
        return
    enforced = sum(1 for rule in book.rules.rules if rule.mode.value == "enforce")
    text = f"{len(book.rules.rules)} rules ({enforced} enforce), {len(book.directory.users)} users"
    yield known.CONFIG.ok(text)


def _secret_files(centre: Centre) -> Iterator[Finding]:
    settings, wrong = centre.settings, 0
    for path in sorted({settings.path(name) for name in _named_secrets(centre)}):
        try:
            about = path.stat()
        except OSError as error:
            wrong += 1
            yield known.SECRET_FILES.failed(f"cannot be seen: {error.strerror}", str(path))
            continue
        if about.st_mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
            wrong += 1
            mode = stat.filemode(about.st_mode)
            yield known.SECRET_FILES.failed(f"others may read or change it ({mode})", str(path))
    if not wrong:
        yield known.SECRET_FILES.ok("nobody else may read or change them")


def _named_secrets(centre: Centre) -> list[str]:
    values = centre.settings.values
    registration = values.nodes.registration if values.nodes else None
    names = [
        values.web.token_file,
        values.web.operator_token_file,
        values.web.metrics_token_file,
        values.smtp.password_file if values.smtp else None,
        values.slack.token_file if values.slack else None,
        values.agents.key_file if values.agents else None,
        registration.token_file if registration else None,
        values.prometheus.password_file,
        values.prometheus.bearer_token_file,
        *(token.file for token in values.web.tokens),
        *(name for bot in values.bots.values() for name in (bot.key_file, bot.secret_file)),
    ]
    return [name for name in names if name is not None]


def _answer(centre: Centre) -> Iterator[Finding]:
    try:
        health = centre.engine("/v1/health")
    except CannotCheck as error:
        yield known.ANSWER.failed(str(error), centre.url)
        return
    for problem in health["problems"]:
        yield known.ANSWER.failed(problem, centre.url)
    if health["version"] != __version__:
        text = f"it is version {health['version']}, and this is {__version__}"
        yield known.ANSWER.warning(text, centre.url, remedy="Use the same version on both sides.")
    elif not health["problems"]:
        yield known.ANSWER.ok(f"version {health['version']}, ready", centre.url)


def _ticks(centre: Centre) -> Iterator[Finding]:
    ticks = centre.engine("/v1/health")["ticks"]
    age, every = ticks["age"], ticks["every"]
    if age is None:
        yield known.TICKS.failed("none has completed since its start")
    elif age > _LATE_TICKS * every:
        yield known.TICKS.failed(
            f"the last one completed {age:.0f} s ago; one is due each {every:g} s"
        )
    elif ticks["seconds"] > every:
        text = f"one takes {ticks['seconds']:.1f} s, longer than the {every:g} s between two"
        yield known.TICKS.warning(text, remedy="Make `tick` longer, or Prometheus faster.")
    else:
        yield known.TICKS.ok(f"{age:.0f} s ago, in {ticks['seconds']:.2f} s of {every:g} s")


def _rule_hash(centre: Centre) -> Iterator[Finding]:
    in_force = centre.engine("/v1/health")["rules"]
    if in_force["problem"]:
        yield known.RULE_HASH.failed(in_force["problem"])
        return
    try:
        on_disk = check_files(centre.settings).hash
    except InvalidInput as error:
        raise CannotCheck(f"the files on disk cannot be read: {error}") from error
    if on_disk != in_force["hash"]:
        text = f"in force are {in_force['hash'][:12]}, on disk {on_disk[:12]}"
        yield known.RULE_HASH.failed(text)
    else:
        yield known.RULE_HASH.ok(f"{in_force['count']} rules, {in_force['hash'][:12]}")


def _enforcement(centre: Centre) -> Iterator[Finding]:
    state = centre.engine("/v1/health")["enforcement"]
    found = False
    if state["paused"] is not None:
        found = True
        paused = state["paused"]
        yield known.ENFORCEMENT.warning(f"paused by {paused['by']}: {paused['reason']}")
    if state["kill_switch"] is not False:
        found = True
        text = "the kill switch is on" if state["kill_switch"] else "the kill switch is unreadable"
        yield known.ENFORCEMENT.warning(text)
    for rule in state["held_back"]:
        found = True
        yield known.ENFORCEMENT.warning(f"only warns: {rule['sentence']}", rule["rule"])
    for block in state["halted"]:
        if block["reason"] not in ("paused", "kill_switch"):
            found = True
            yield known.ENFORCEMENT.warning(block["sentence"])
    if not found:
        yield known.ENFORCEMENT.ok("rules in enforce are carried out")


def _zones(centre: Centre) -> Iterator[Finding]:
    wrong = [name for name in _ANYWHERE if not _is_zone(name)]
    if wrong:
        text = f"this machine has no time zone data: it does not know {', '.join(wrong)}"
        yield known.ZONES.failed(text)
        return
    try:
        book = check_files(centre.settings)
    except InvalidInput as error:
        raise CannotCheck(f"the files cannot be read: {error}") from error
    users = book.directory.users.values()
    names = {book.rules.timezone, *(user.timezone for user in users)} - {None}
    yield known.ZONES.ok(f"time zone data is there; {len(names)} zones are named")


def _is_zone(name: str) -> bool:
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True


def _directory(centre: Centre) -> Iterator[Finding]:
    name = centre.settings.values.directory
    if name is None:
        yield known.DIRECTORY.warning("engine.yaml names no directory: nobody can be told")
        return
    checked = check_directory(centre.settings.path(name), now=time.time())
    for item in checked.diagnostics[:_PEOPLE_NAMED]:
        make = known.DIRECTORY.failed
        if item.severity is not Severity.ERROR:
            make = known.DIRECTORY.warning
        yield make(f"{item.message} [{item.code}]", str(item.span))
    if checked.content is None:
        return
    users = {
        row.labels.get("user", "")
        for row in finite(centre.rows("count by (user) (last_over_time(gpu_job_info[1d]))"))
    } - {""}
    unknown = sorted(users - checked.content.users.keys())
    for user in unknown[:_PEOPLE_NAMED]:
        yield known.DIRECTORY.warning("used a card within a day, and is not in the directory", user)
    if len(unknown) > _PEOPLE_NAMED:
        yield known.DIRECTORY.warning(f"and {len(unknown) - _PEOPLE_NAMED} more")
    teamless = [n for n in sorted(users - set(unknown)) if not checked.content.user(n).team]
    for user in teamless[:_PEOPLE_NAMED]:
        yield known.DIRECTORY.warning("is of no team: budgets and reports miss their hours", user)
    if not unknown and not teamless and not checked.diagnostics:
        yield known.DIRECTORY.ok(f"{len(users)} users of a day, all with a team and an address")


# ---------------------------------------------------------------------------------------------
# How people are reached; nobody is sent anything


def _mail(centre: Centre) -> Iterator[Finding]:
    smtp = centre.settings.values.smtp
    if smtp is None:
        raise CannotCheck("engine.yaml has no smtp", needed=False)
    password = None
    if smtp.password_file is not None:
        path = centre.settings.path(smtp.password_file)
        password = _secret(path, "smtp.password_file")
    ca_file = None if smtp.ca_file is None else centre.settings.path(smtp.ca_file)
    server = f"{smtp.host}:{smtp.port}"
    try:
        said = asyncio.run(_logged_in(smtp, password, ca_file))
    except (aiosmtplib.SMTPException, OSError, TimeoutError, ValueError) as error:
        yield known.MAIL.failed(f"{type(error).__name__}: {error}", server)
    else:
        yield known.MAIL.ok(said, server)


async def _logged_in(smtp: SmtpSettings, password: str | None, ca_file: Path | None) -> str:
    client = aiosmtplib.SMTP(
        hostname=smtp.host,
        port=smtp.port,
        use_tls=smtp.tls == "implicit",
        start_tls=smtp.tls == "starttls",
        timeout=min(smtp.timeout, SECONDS),
        cert_bundle=None if ca_file is None else str(ca_file),
    )
    async with asyncio.timeout(3 * SECONDS):
        await client.connect()
        try:
            if smtp.username is not None and password is not None:
                await client.login(smtp.username, password)
                return "connected and logged in; nothing was sent"
            await client.noop()
            return "connected, without a login; nothing was sent"
        finally:
            await client.quit()


def _slack(centre: Centre) -> Iterator[Finding]:
    slack = centre.settings.values.slack
    if slack is None:
        raise CannotCheck("engine.yaml has no slack", needed=False)
    token = _secret(centre.settings.path(slack.token_file), "slack.token_file")

    async def story() -> tuple[dict[str, object], str]:
        async with httpx.AsyncClient(timeout=SECONDS) as client:
            answer = await exchange(
                client,
                "POST",
                f"{slack.url}/auth.test",
                seconds=SECONDS,
                headers={"Authorization": f"Bearer {token}"},
            )
        document = answer.json()
        return document if isinstance(document, dict) else {}, answer.headers.get(
            "x-oauth-scopes", ""
        )

    try:
        said, scopes = asyncio.run(story())
    except (GpuwardenError, ValueError) as error:
        yield known.SLACK.failed(f"auth.test: {error}", slack.url)
        return
    if said.get("ok") is not True:
        yield known.SLACK.failed(f"auth.test: {said.get('error', 'no answer of Slack')}", slack.url)
    elif scopes and "chat:write" not in scopes.replace(" ", "").split(","):
        yield known.SLACK.failed(f"the token may {scopes}, and not chat:write", slack.url)
    else:
        yield known.SLACK.ok(f"as {said.get('user', 'a bot')} of {said.get('team', 'a team')}")


def _bots(centre: Centre) -> Iterator[Finding]:
    bots = centre.settings.values.bots
    if not bots:
        raise CannotCheck("engine.yaml has no bots", needed=False)
    for name in bots:
        text = "only a message would tell: `gpuwarden notices send-test`"
        yield known.BOTS.unchecked(text, name, needed=False)


def _secret(path: Path, setting: str) -> str:
    try:
        return read_secret(path, setting)
    except InvalidInput as error:
        raise CannotCheck(str(error)) from error


# ---------------------------------------------------------------------------------------------
# The ledger


def _ledger(centre: Centre) -> Iterator[Finding]:
    path = centre.settings.path(centre.settings.values.ledger)
    if not path.exists():
        text = f"{path} is not there; an engine makes it at its first start"
        raise CannotCheck(text)
    try:
        found = ledger_files.check(path)
    except GpuwardenError as error:
        yield known.LEDGER.failed(str(error))
        return
    for problem in found.problems:
        yield known.LEDGER.failed(problem)
    if not found.problems:
        size = f"{found.bytes / 2**20:.1f} MiB"
        text = f"version {found.version}, {size}, {found.open_cases} open cases"
        yield known.LEDGER.ok(text)


def _disk(centre: Centre) -> Iterator[Finding]:
    folder = centre.settings.path(centre.settings.values.ledger).parent
    try:
        about = os.statvfs(folder)
    except OSError as error:
        raise CannotCheck(f"{folder}: {error.strerror}") from error
    free = about.f_bavail * about.f_frsize
    text = f"{free / 2**20:.0f} MiB free"
    if free < LEAST_BYTES or (about.f_files and about.f_favail < 100):
        yield known.DISK.failed(f"{text}, {about.f_favail} more files", str(folder))
    elif free < LOW_BYTES:
        yield known.DISK.warning(text, str(folder))
    else:
        yield known.DISK.ok(text, str(folder))
