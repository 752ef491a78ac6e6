"""`gpuwarden book`: cards for a team, from a moment on, for a while."""

from __future__ import annotations

import datetime as dt
import json
import secrets
import sys
import zoneinfo
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from gpuwarden.consoles import print_table, printable
from gpuwarden.errors import ServiceUnavailable
from gpuwarden.option_values import output_option
from gpuwarden.scheduling.daemon_clients import DaemonClient, daemon_options
from gpuwarden.scheduling.recurrences import Repeat

if TYPE_CHECKING:
    from pathlib import Path

_MOST_SHOWN = 10


@click.group(
    invoke_without_command=True,
    epilog="""
\b
Examples:
  gpuwarden book --gpus 4 --card a100-40 --from "tomorrow 20:00" --for 12h
  gpuwarden book --gpus 2 --from "mon 09:00" --for 4h --repeat weekly --until 2027-03-31
  gpuwarden book list

\b
Exit status:
  0   booked; with --dry-run: it could be
  1   the answer is no: somebody has the cards, or the policy forbids it
  2   wrong usage or input
  3   the scheduler does not answer
""",
)
@click.option("--gpus", type=click.IntRange(min=1), help="How many cards.")
@click.option(
    "--from",
    "begin",
    metavar="WHEN",
    help="When it begins, by the clocks of the policy's zone: 2026-12-01 20:00, tomorrow 20:00, "
    "fri 18:30, +2h.",
)
@click.option("--for", "length", metavar="DURATION", help="How long, such as 12h.")
@click.option("--card", default="", help="Kind of cards, by the policy's name.")
@click.option("--team", default="", help="For which team; yours by default.")
@click.option(
    "--repeat",
    type=click.Choice([str(each) for each in Repeat]),
    default="none",
    show_default=True,
    help="How it comes again, at the same time on the wall.",
)
@click.option(
    "--until",
    default="",
    metavar="WHEN",
    help="With --repeat: no slot begins after this; a date without a time is that whole day. "
    "By default as far ahead as the policy allows.",
)
@click.option("--words", default="", help="What it is for; others read it.")
@click.option("--dry-run", is_flag=True, help="Only say what would be booked, and what it costs.")
@click.option("-y", "--yes", is_flag=True, help="Book without asking back.")
@output_option
@daemon_options
@click.pass_context
def book(
    context: click.Context,
    gpus: int | None,
    *,
    begin: str | None,
    length: str | None,
    card: str,
    team: str,
    repeat: str,
    until: str,
    words: str,
    dry_run: bool,
    yes: bool,
    output: str,
    socket: Path,
    url: str | None,
    token_file: Path | None,
) -> None:
    """Book cards for a team, and give bookings back.

    What is in the way is told before anything is booked: who has the cards, and the nearest times
    at which it would do. The cost is shown and asked for. Whoever must leave is told before the
    slot begins; a slot to which nobody comes is given back, as the policy says.
    """
    client = DaemonClient(socket, url, token_file=token_file)
    context.obj = client
    if context.invoked_subcommand is not None:
        return
    missing = [
        flag
        for flag, value in (("--gpus", gpus), ("--from", begin), ("--for", length))
        if value is None
    ]
    if missing:
        raise click.UsageError(f"{', '.join(missing)} missing: see gpuwarden book --help")
    wish: dict[str, Any] = {"gpus": gpus, "from": begin, "for": length, "repeat": repeat}
    given = {"card": card, "team": team, "until": until, "words": words}
    wish |= {name: value for name, value in given.items() if value}
    found = client.ask("POST", "/v1/bookings", body={**wish, "dry_run": True}, also=(409,))
    if output == "text":
        _show_answer(found)
    if found["objections"] or dry_run:
        _end(context, found, output)
        return
    if not yes:
        _confirm()
    # By the moments that were shown: `+2h` is another one when the answer has been thought over.
    wish["from"] = _iso(found["start"])
    if found["until"] is not None:
        wish["until"] = _iso(found["until"])
    wish["key"] = secrets.token_hex(12)
    made = _booked(client, wish)
    if output == "text" and made["objections"]:
        _show_answer(made)
    elif output == "text":
        _show_made(made, known=found["warnings"])
    _end(context, made, output)


def _show_made(made: dict[str, Any], *, known: list[str]) -> None:
    slots = made["slots"]
    names = ", ".join(item["id"] for item in slots[:_MOST_SHOWN])
    more = f" and {len(slots) - _MOST_SHOWN} more" if len(slots) > _MOST_SHOWN else ""
    click.echo(f"booked: {made['booking']} ({names}{more})")
    for text in made["warnings"]:
        if text not in known:
            click.echo(f"note: {printable(text)}")
    if any(item["state"] == "proposed" for item in slots):
        click.echo("The engine has not confirmed it yet: gpuwarden book show says when it has.")


def _confirm() -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("nothing is booked without an answer: say --yes")
    click.confirm("Book it?", abort=True)


def _booked(client: DaemonClient, wish: dict[str, Any]) -> dict[str, Any]:
    """Book; an answer that is lost is asked for once more: the key keeps it from being two."""
    try:
        return client.ask("POST", "/v1/bookings", body=wish, also=(409,))
    except ServiceUnavailable:
        return client.ask("POST", "/v1/bookings", body=wish, also=(409,))


def _iso(at: float) -> str:
    return dt.datetime.fromtimestamp(int(at), dt.UTC).isoformat()


def _end(context: click.Context, found: dict[str, Any], output: str) -> None:
    if output == "json":
        click.echo(json.dumps(found, indent=2))
    if found["objections"]:
        context.exit(1)


def _show_answer(found: dict[str, Any]) -> None:
    would = found["would"]
    for item in would[:_MOST_SHOWN]:
        click.echo(f"{item['gpus']} x {item['card']}: {printable(item['shown'])}")
    if len(would) > _MOST_SHOWN:
        click.echo(f"and {len(would) - _MOST_SHOWN} more, the last {would[-1]['shown']}")
    if would:
        _tell_zone(found.get("timezone"), would[0]["start"])
        money = "".join(f", {amount:,.2f} {unit}" for unit, amount in found["cost"].items())
        click.echo(f"{found['gpu_hours']:,.1f} GPU-hours{money}")
    for text in found["warnings"]:
        click.echo(f"warning: {printable(text)}", err=True)
    for item in found["objections"]:
        click.echo(f"no: {printable(item['words'])} [{item['code']}]", err=True)
    if found["proposals"]:
        click.echo("It would do from:", err=True)
        for item in found["proposals"]:
            click.echo(f"  {printable(item['shown'])}", err=True)


def _tell_zone(name: object, at: float) -> None:
    """Say whose clocks the times are by, where this machine's show others."""
    try:
        theirs = dt.datetime.fromtimestamp(at, zoneinfo.ZoneInfo(str(name)))
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError, OverflowError):
        return
    here = theirs.astimezone()
    if here.utcoffset() != theirs.utcoffset():
        click.echo(
            f"by the clocks of {theirs.tzinfo}; here the first begins {here:%a %Y-%m-%d %H:%M}"
        )


@book.command("list")
@click.option("--team", help="Only of this team.")
@click.option("--from", "begin", metavar="WHEN", help="From then on; now by default.")
@click.option("--to", "end", metavar="WHEN", help="Until then; 90 days later by default.")
@click.option("-a", "--all", "released", is_flag=True, help="Also those that were given back.")
@output_option
@click.pass_obj
def list_bookings(
    client: DaemonClient,
    team: str | None,
    *,
    begin: str | None,
    end: str | None,
    released: bool,
    output: str,
) -> None:
    """List the slots that are booked."""
    given = {"team": team, "from": begin, "to": end, "all": "true" if released else None}
    parameters = {name: value for name, value in given.items() if value is not None}
    _show_slots(client.ask("GET", "/v1/bookings", parameters=parameters), output)


@book.command()
@click.argument("name", metavar="ID")
@output_option
@click.pass_obj
def show(client: DaemonClient, name: str, *, output: str) -> None:
    """Show a booking, or one slot of it: where it stands, and what of it was used."""
    document = client.ask("GET", f"/v1/bookings/{quote(name, safe='')}")
    if output == "json":
        click.echo(json.dumps(document, indent=2))
        return
    for item in document["slots"]:
        used = item["used_gpu_hours"]
        told = "not known" if used is None else f"{used:,.1f} GPU-hours"
        back = ""
        if item["released"] is not None:
            back = f", given back by {item['released_by']}"
        click.echo(
            printable(
                f"{item['id']}: {item['gpus']} x {item['card']} for {item['team']} (by "
                f"{item['who']})\n  {item['shown']}: {item['state']}{back}\n"
                f"  costs {item['gpu_hours']:,.1f} GPU-hours, used {told}"
            )
        )
        if item["words"]:
            click.echo(f"  {printable(item['words'])}")


@book.command()
@click.argument("name", metavar="ID")
@click.option("-y", "--yes", is_flag=True, help="Without asking back.")
@output_option
@click.pass_obj
def cancel(client: DaemonClient, name: str, *, yes: bool, output: str) -> None:
    """Give a booking back: all its slots that are ahead, or one (ID.3).

    Of a slot that has begun the rest is given back; jobs in it run on as far as the engine lets
    them.
    """
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("nothing is given back without an answer: say --yes")
        click.confirm(f"Give {name} back?", abort=True)
    document = client.ask("DELETE", f"/v1/bookings/{quote(name, safe='')}")
    if output == "json":
        click.echo(json.dumps(document, indent=2))
        return
    click.echo(f"given back: {', '.join(item['id'] for item in document['slots'])}")


@book.command()
@click.argument("name", metavar="ID")
@click.option("--by", metavar="DURATION", help="So much longer, such as 2h.")
@click.option("--to", metavar="WHEN", help="Until then; earlier than now planned is possible too.")
@click.option("--dry-run", is_flag=True, help="Only say whether it could be.")
@output_option
@click.pass_context
def extend(
    context: click.Context,
    name: str,
    *,
    by: str | None,
    to: str | None,
    dry_run: bool,
    output: str,
) -> None:
    """Have a slot last longer, or end earlier."""
    if (by is None) == (to is None):
        raise click.UsageError("say either --by or --to")
    client: DaemonClient = context.obj
    body = {"by": by} if by is not None else {"to": to}
    path = f"/v1/bookings/{quote(name, safe='')}/end"
    found = client.ask("POST", path, body={**body, "dry_run": dry_run}, also=(409,))
    if output == "text":
        for item in found["objections"]:
            click.echo(f"no: {printable(item['words'])} [{item['code']}]", err=True)
        for item in found["would"] if not found["objections"] else ():
            click.echo(f"{name}: {item['shown']}, {found['gpu_hours']:,.1f} GPU-hours")
    _end(context, found, output)


@book.command()
@click.option("--team", default="", help="Only of this team.")
@click.option("--address", is_flag=True, help="An address that calendar programs subscribe to.")
@click.option(
    "-O",
    "--output-file",
    type=click.File("wb"),
    default="-",
    show_default=True,
    help="Where the calendar goes.",
)
@click.pass_obj
def calendar(client: DaemonClient, team: str, *, address: bool, output_file: Any) -> None:
    """Write the bookings as a calendar (iCalendar), or say where programs can read it.

    Whoever has the address reads the bookings of its team, without a token.
    """
    parameters = {"team": team} if team else {}
    if not address:
        output_file.write(client.text("/v1/calendar.ics", parameters))
        return
    path = client.ask("GET", "/v1/calendar-address", parameters=parameters)["path"]
    if client.base is None:
        click.echo(f"{path}\n(behind http:// and the host and port of the daemon's --listen)")
    else:
        click.echo(f"{client.base}{path}")


def _show_slots(document: dict[str, Any], output: str) -> None:
    if output == "json":
        click.echo(json.dumps(document, indent=2))
        return
    if not document["slots"]:
        click.echo("nothing is booked")
        return
    rows = [
        (
            item["id"],
            item["team"],
            item["who"],
            f"{item['gpus']} x {item['card']}",
            item["shown"],
            item["state"],
            item["words"],
        )
        for item in document["slots"]
    ]
    print_table(("ID", "TEAM", "BY", "CARDS", "WHEN", "STATE", "FOR"), rows)
